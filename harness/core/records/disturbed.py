"""Whether other programs disturbed a run, from what its record says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from harness.core.records import DISTURBING_SHARE


def others_share_of_run(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """What other programs used of the cores' time in these epochs; None where none knows it."""
    known = [(row.get("others_cpu_share"), row.get("epoch_time_s")) for row in rows]
    parts = [(a, s) for a, s in known if isinstance(a, int | float) and isinstance(s, int | float)]
    whole_s = math.fsum(s for _, s in parts)
    return math.fsum(share * s for share, s in parts) / whole_s if whole_s else None


def disturbance(launch: Mapping[str, Any] | None, rows: Sequence[Mapping[str, Any]]) -> str | None:
    """What used the machine when a run began or while it trained, in words; None if little did."""
    launch = launch or {}
    before, during = launch.get("cpu_busy_share") or 0, others_share_of_run(rows) or 0
    if launch.get("packed"):
        return "other runs beside it (--pack)"
    if max(before, during) <= DISTURBING_SHARE:
        return None
    if during > DISTURBING_SHARE:
        return f"other programs used {during:.0%} of the cores"
    return f"other programs used {before:.0%} of the cores before it began"

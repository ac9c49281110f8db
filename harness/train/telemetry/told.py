"""What the nodes have told, as it stands in an epoch's row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from harness.train.measures import total
from harness.train.telemetry.window import COUNTERS, LISTS

Told = dict[str, Any]


def epoch_fields(nodes: Sequence[Told | None]) -> dict[str, Any]:
    """Over all devices, and over all nodes; None where nobody looks, or one does not know.

    Means are means over them; p95 and max are the largest; what was counted is added up, unless
    one of them does not know it.
    """
    known = [node for node in nodes if node is not None]
    devices = [device for node in known for device in node["gpus"]]
    if not known or len(known) < len(nodes):
        return {"gpu": None, "node": None, "energy_j": None}
    return {
        # Energy stands beside it: with what was before, where the epoch was broken off.
        "gpu": _together([{n: v for n, v in of.items() if n != "energy_j"} for of in devices]),
        "node": _together([node["node"] for node in known]),
        "energy_j": total([node["energy_j"] for node in known]),
    }


def _together(told: Sequence[Told]) -> dict[str, Any] | None:
    if not told:
        return None
    found: dict[str, Any] = {}
    for name in told[0]:
        values = [one[name] for one in told]
        if name in COUNTERS:
            found[name] = total(values)
        elif name in LISTS:
            found[name] = _largest(values)
        else:
            found[name] = _spread(values)
    return found


def _largest(shares: Sequence[dict[str, float] | None]) -> dict[str, float] | None:
    known = [share for share in shares if share is not None]
    if not known:
        return None
    names = sorted({name for share in known for name in share})
    return {name: max(share.get(name, 0.0) for share in known) for name in names}


def _spread(values: Sequence[dict[str, float] | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {
        "mean": math.fsum(value["mean"] for value in known) / len(known),
        "p95": max(value["p95"] for value in known),
        "max": max(value["max"] for value in known),
    }

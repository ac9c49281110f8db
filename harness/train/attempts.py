"""attempts.jsonl: when a run was started, how each start ended, how long each took.

A run that is broken off and started again is one run: its time is the sum of its attempts.
"""

from __future__ import annotations

import os
import time
from typing import Any

from harness.records import RunFolder, append_row, read_json, read_rows, write_json


def begin(folder: RunFolder, update: int, processes: int) -> int:
    """Note the start of an attempt; returns its number. Closes one that was killed before."""
    rows, _ = read_rows(folder.attempts)
    starts = [row for row in rows if row["event"] == "start"]
    ends = [row for row in rows if row["event"] == "end"]
    if len(starts) > len(ends):
        _close_killed(folder, starts[-1]["attempt"])
    attempt = len(starts) + 1
    append_row(
        folder.attempts,
        {
            "event": "start",
            "attempt": attempt,
            "unix": time.time(),
            "from_update": update,
            "processes": processes,
            "restarts": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
        },
    )
    return attempt


def _close_killed(folder: RunFolder, attempt: int) -> None:
    """A killed process said nothing; what it last told of its time is kept."""
    last = read_json(folder.progress) or {}
    heard = last.get("attempt") == attempt
    append_row(
        folder.attempts,
        {
            "event": "end",
            "attempt": attempt,
            "outcome": "interrupted",
            "reason": "the process was killed",
            "unix": last.get("unix") if heard else None,
            "wall_s": last.get("wall_s") if heard else None,
        },
    )


def end(folder: RunFolder, outcome: str, reason: str | None, wall_s: float) -> None:
    """Note how the attempt ended that was begun last; one that never began is noted as such."""
    rows, _ = read_rows(folder.attempts)
    starts = sum(row["event"] == "start" for row in rows)
    ends = sum(row["event"] == "end" for row in rows)
    append_row(
        folder.attempts,
        {
            "event": "end",
            "attempt": starts if starts > ends else None,
            "outcome": outcome,
            "reason": reason,
            "unix": time.time(),
            "wall_s": wall_s,
        },
    )


def wall_s(folder: RunFolder) -> float:
    """Time spent in all attempts that have ended, as far as they told it."""
    rows, _ = read_rows(folder.attempts)
    return sum(row["wall_s"] or 0.0 for row in rows if row["event"] == "end")


def tell_progress(folder: RunFolder, facts: dict[str, Any]) -> None:
    """Where the attempt is: for whoever watches, and for its time should it be killed."""
    write_json(folder.progress, {**facts, "unix": time.time()}, durable=False)

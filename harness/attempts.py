"""attempts.jsonl: when a run was started, how each start ended, how long each took.

A run that is broken off and started again is one run: its time is the sum of its attempts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from harness.records import RunFolder, append_row, read_json, read_rows, write_json

# By rank, of one attempt; null where a process that was killed had told nothing.
CPU_TIME = ("user_s_per_rank", "system_s_per_rank")


def begin(folder: RunFolder, update: int, processes: int) -> int:
    """Note the start of an attempt; returns its number. Closes one that was killed before."""
    rows, _ = read_rows(folder.attempts)
    starts = [row for row in rows if row["event"] == "start"]
    ends = [row for row in rows if row["event"] == "end"]
    if len(starts) > len(ends):
        _close_killed(folder, starts[-1])
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


def _close_killed(folder: RunFolder, start: dict[str, Any]) -> None:
    """A killed process said nothing; what a rank told of it, and of its time, is kept."""
    last = read_json(folder.progress) or {}
    heard = last.get("attempt") == start["attempt"]
    failure = first_failure(folder, since=start["unix"]) or {}
    append_row(
        folder.attempts,
        {
            "event": "end",
            "attempt": start["attempt"],
            "outcome": failure.get("outcome", "interrupted"),
            "reason": failure.get("reason", "the process was killed"),
            "unix": last.get("unix") if heard else None,
            "wall_s": last.get("wall_s") if heard else None,
            **{name: last.get(name) if heard else None for name in CPU_TIME},
        },
    )


def only_follows(reason: str) -> bool:
    """Whether a rank failed because another was gone."""
    return "peer" in reason.lower()


def first_failure(folder: RunFolder, since: float) -> dict[str, Any] | None:
    """What the rank told that failed first; ranks that follow it fail a moment later.

    By their words rather than by their clocks, which on several machines differ.
    """
    files = sorted((folder.path / "ranks").glob("failure_*.json"))
    told = [failure for file in files if (failure := read_json(file)) is not None]
    fresh = [failure for failure in told if failure["unix"] >= since]
    return min(fresh, key=lambda f: (only_follows(f["reason"]), f["unix"]), default=None)


def end(
    folder: RunFolder,
    outcome: str,
    reason: str | None,
    wall_s: float,
    cpu_time: Mapping[str, list[float] | None] | None = None,
) -> None:
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
            **{name: (cpu_time or {}).get(name) for name in CPU_TIME},
        },
    )


def wall_s(folder: RunFolder) -> float:
    """Time spent in all attempts that have ended, as far as they told it."""
    rows, _ = read_rows(folder.attempts)
    return sum(row["wall_s"] or 0.0 for row in rows if row["event"] == "end")


def cpu_time(folder: RunFolder) -> dict[str, Any]:
    """Processor time of all attempts that have ended, as far as they told it: in all, by rank."""
    rows, _ = read_rows(folder.attempts)
    found: dict[str, Any] = {}
    for name in CPU_TIME:
        told = [row[name] for row in rows if row.get(name)]
        ranks = {len(of_attempt) for of_attempt in told}
        found[name.removesuffix("_per_rank")] = sum(map(sum, told)) if told else None
        # Only attempts of as many processes can be added up rank by rank.
        found[name] = [sum(of) for of in zip(*told, strict=True)] if len(ranks) == 1 else None
    return found


def tell_progress(folder: RunFolder, facts: dict[str, Any]) -> None:
    """Where the attempt is: for whoever watches, and for its time should it be killed."""
    write_json(folder.progress, {**facts, "unix": time.time()}, durable=False)

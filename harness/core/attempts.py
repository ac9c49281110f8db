"""attempts.jsonl: when a run was started, how each start ended, how long each took.

A run that is broken off and started again is one run: its time is the sum of its attempts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.core.records import (
    FINISHED,
    SCHEMA,
    RunFolder,
    append_row,
    read_json,
    read_rows,
    write_json,
)

# By rank, of one attempt; null where a process that was killed had told nothing.
CPU_TIME = ("user_s_per_rank", "system_s_per_rank")


@dataclass(frozen=True)
class Opened:
    """What a process that goes on with a run knows of its own start."""

    unix: float  # when it opened the run
    # When the checkpoint that it goes on from was whole; None without one.
    counted_unix: float | None = None
    # Since when the launcher runs that starts lost processes again; None where there is none.
    launcher_unix: float | None = None


def begin(
    folder: RunFolder,
    update: int,
    processes: int,
    effective_batch: int | None = None,
    opened: Opened | None = None,
) -> int:
    """Note the start of an attempt; returns its number. Closes one that was killed before."""
    if (killed := unended(folder)) is not None:
        _close_killed(folder, killed)
    rows, _ = read_rows(folder.attempts)
    attempt = sum(row["event"] == "start" for row in rows) + 1
    append_row(
        folder.attempts,
        {
            "event": "start",
            "attempt": attempt,
            "unix": time.time(),
            "from_update": update,
            "processes": processes,
            "effective_batch": effective_batch,
            "restarts": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
            **lost(rows, update, opened or Opened(time.time()), time.time()),
        },
    )
    return attempt


def unended(folder: RunFolder) -> dict[str, Any] | None:
    """The start of the attempt that has no end yet: it goes on, or was killed."""
    rows, _ = read_rows(folder.attempts)
    starts = [row for row in rows if row["event"] == "start"]
    ended = sum(row["event"] == "end" and row["attempt"] is not None for row in rows)
    return starts[-1] if len(starts) > ended else None


def lost(
    rows: list[dict[str, Any]], update: int, opened: Opened, now_unix: float
) -> dict[str, float | int | None]:
    """What it has cost that the attempt before broke off; all null for the first attempt."""
    begun = [row for row in rows if row["event"] == "start"]
    if not begun:
        return {"gap_s": None, "lost_s": None, "redone_updates": None}
    start = begun[-1]
    end, *unbegun = rows[rows.index(start) + 1 :]
    ended_unix = end["unix"] or start["unix"]
    in_vain_s = sum(row["wall_s"] or 0.0 for row in unbegun)
    gap_s = None
    if opened.launcher_unix is not None and opened.launcher_unix <= ended_unix:
        gap_s = max(opened.unix - ended_unix - in_vain_s, 0.0)
    counted_unix = max(opened.counted_unix or 0.0, start["unix"])
    thrown_away_s = max(ended_unix - counted_unix, 0.0)
    reached = end.get("update")
    return {
        "gap_s": gap_s,
        "lost_s": thrown_away_s + in_vain_s + (gap_s or 0.0) + now_unix - opened.unix,
        "redone_updates": None if reached is None else max(reached - update, 0),
    }


def went_on(folder: RunFolder, launcher_unix: float | None) -> bool:
    """Whether the same launcher has been at this run before: it starts lost processes again."""
    rows, _ = read_rows(folder.attempts)
    heard = [row["unix"] for row in rows if row["unix"] is not None]
    return launcher_unix is not None and bool(heard) and max(heard) >= launcher_unix


def totals(folder: RunFolder) -> dict[str, Any]:
    """Of all attempts: what breaking off has cost, and how often the launcher has started again."""
    rows, _ = read_rows(folder.attempts)
    starts = [row for row in rows if row["event"] == "start"]
    return {
        "restarts": sum(row.get("gap_s") is not None for row in starts),
        "lost_s": sum(row.get("lost_s") or 0.0 for row in starts),
        "redone_updates": sum(row.get("redone_updates") or 0 for row in starts),
    }


def total_elapsed_s(folder: RunFolder) -> float | None:
    """All attempts, and the time between those that one launcher has started; None if unknown."""
    rows, _ = read_rows(folder.attempts)
    if any(row["event"] == "end" and row["wall_s"] is None for row in rows):
        return None
    return total_wall_s(folder) + sum(row.get("gap_s") or 0.0 for row in rows)


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
            "update": last.get("update") if heard else None,
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
    update: int | None = None,
    begun: bool = True,
) -> None:
    """Note how the attempt ended that was begun last; one that never began is noted as such."""
    open_start = unended(folder)
    if open_start is not None and not begun:
        _close_killed(folder, open_start)  # not this one: it died before
        open_start = None
    append_row(
        folder.attempts,
        {
            "event": "end",
            "attempt": open_start["attempt"] if open_start is not None else None,
            "outcome": outcome,
            "reason": reason,
            "unix": time.time(),
            "update": update,
            "wall_s": wall_s,
            **{name: (cpu_time or {}).get(name) for name in CPU_TIME},
        },
    )


def total_wall_s(folder: RunFolder) -> float:
    """Time spent in all attempts that have ended, as far as they told it."""
    rows, _ = read_rows(folder.attempts)
    return sum(row["wall_s"] or 0.0 for row in rows if row["event"] == "end")


def total_cpu_time(folder: RunFolder) -> dict[str, Any]:
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


# ----
# summary.json: what became of a run, from its rows. Written last, by rename.

# Taken from the last epoch's row.
QUALITY = (
    "train_loss", "eval_loss", "accuracy", "top5_accuracy", "precision", "recall", "f1",
    "precision_macro", "recall_macro", "f1_macro",
)  # fmt: skip


MEANS = ("tflops_per_s", "mfu", "comm_exposed_share", "compute_skew")


SUMS = ("payload_bytes", "network_sent_bytes", "energy_j")


def write_summary(
    folder: RunFolder,
    outcome: str,
    reason: str | None = None,
    best_metric: str | None = None,
    facts: dict[str, Any] | None = None,
) -> None:
    """The same fields for a run that finished and for one that did not get far."""
    rows, _ = read_rows(folder.epochs)
    last = rows[-1] if rows else {}
    timed_s = sum(row["timed_s"] for row in rows)
    rate = sum(row["timed_samples"] for row in rows) / timed_s if timed_s else None
    per_gpu = last.get("train_samples_per_s_per_gpu")
    share = per_gpu / last["train_samples_per_s"] if per_gpu else None
    train_time_s = sum(row["epoch_time_s"] for row in rows)
    elapsed_s = total_elapsed_s(folder)
    write_json(
        folder.summary,
        {
            "schema": SCHEMA,
            "outcome": outcome,
            "reason": reason,
            "epochs_done": len(rows),
            "updates": last.get("updates"),
            "samples": sum(row["samples"] for row in rows),
            **{name: last[name] for name in QUALITY if name in last},
            **best_of(rows, best_metric),
            "train_samples_per_s": rate,
            "train_samples_per_s_per_gpu": rate * share if rate and share else None,
            "train_time_s": train_time_s,
            "eval_time_s": sum(row.get("eval_time_s") or 0.0 for row in rows),
            "wall_s": total_wall_s(folder),
            **totals(folder),
            "goodput_share": train_time_s / elapsed_s if elapsed_s else None,
            **total_cpu_time(folder),
            "peak_memory_gib": _most(rows, "peak_memory_gib_per_rank"),
            "reserved_memory_gib": _most(rows, "reserved_memory_gib_per_rank"),
            "comm_share": (probe_of(folder) or {}).get("comm_share"),
            **{name: _sum_of(rows, name) for name in SUMS},
            **{name: _mean_of(rows, [row.get(name) for row in rows]) for name in MEANS},
            "gpu_utilisation_percent": _mean_of(rows, [*map(gpu_utilisation_percent, rows)]),
            "joules_per_sample": _share(_sum_of(rows, "energy_j"), rows),
            **(facts or {}),
        },
    )


def _sum_of(rows: list[dict[str, Any]], name: str) -> float | None:
    """Unknown where one row does not know it, or there is none."""
    known = [row[name] for row in rows if row.get(name) is not None]
    return sum(known) if known and len(known) == len(rows) else None


def gpu_utilisation_percent(row: dict[str, Any]) -> float | None:
    """Mean over an epoch and its devices; None where nobody knows."""
    found = (row.get("gpu") or {}).get("utilisation_percent")
    return None if found is None else found["mean"]


def _mean_of(rows: list[dict[str, Any]], values: list[float | None]) -> float | None:
    """Over the timed seconds; unknown where one epoch that has any does not know it."""
    timed = [(row["timed_s"], v) for row, v in zip(rows, values, strict=True) if row["timed_s"]]
    known = [(seconds, value) for seconds, value in timed if value is not None]
    if not known or len(known) < len(timed):
        return None
    return sum(s * v for s, v in known) / sum(s for s, _ in known)


def _most(rows: list[dict[str, Any]], name: str) -> float | None:
    """Of all ranks and epochs."""
    return max((of for row in rows for of in row.get(name) or []), default=None)


def probe_of(folder: RunFolder) -> dict[str, Any] | None:
    """What was measured of exchanging, in any start of the run."""
    found: dict[str, Any] | None = (read_json(folder.environment) or {}).get("comm_probe")
    return found


def _share(total: float | None, rows: list[dict[str, Any]]) -> float | None:
    samples = sum(row["samples"] for row in rows)
    return total / samples if total is not None and samples else None


def finish(
    folder: RunFolder,
    best_metric: str | None,
    wall_s: float,
    cpu_time: dict[str, list[float] | None],
    update: int,
    facts: dict[str, Any],
) -> None:
    """The run has been trained to its end."""
    end(folder, FINISHED, None, wall_s, cpu_time, update)
    write_summary(folder, FINISHED, None, best_metric, facts)
    folder.progress.unlink(missing_ok=True)


def larger_is_better(metric: str) -> bool:
    """Of what can choose the best epoch, only a loss is better when it is small."""
    return metric.removeprefix("eval_") != "loss"


def best_of(rows: list[dict[str, Any]], metric: str | None) -> dict[str, Any]:
    """The epoch with the best value of a metric, the earlier one if two are equal."""
    name = str(metric).removeprefix("eval_")
    column = "eval_loss" if name == "loss" else name
    sign = 1 if larger_is_better(name) else -1
    scored = [row for row in rows if row.get(column) is not None]
    if not scored:
        return {"best_metric": None, "best_value": None, "best_epoch": None}
    best = max(scored, key=lambda row: sign * row[column])
    return {"best_metric": column, "best_value": best[column], "best_epoch": best["epoch"]}

"""attempts.jsonl and summary.json: how each attempt at a run ended, and what became of the run.

A run that is interrupted and started again is one run: its time is the sum of its attempts.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, cast

from harness.core.process import warn
from harness.core.records import COMPLETE, FINISHED, SCHEMA, RunFolder, plain, total
from harness.core.records.disk import DiskError
from harness.core.records.redact import settings_of
from harness.core.records.summary import Rows, best_of, of_rows, own_metrics, sum_of
from harness.core.schema.checks import believable, fields, summary_of, undeclared
from harness.core.schema.environment import CommProbeRecord, ObservedRecord
from harness.core.schema.fields import fields_of
from harness.core.schema.rows import (
    AttemptEnd,
    AttemptStart,
    FailureRecord,
    ReportedProgress,
)
from harness.core.settings import Settings, options_off
from harness.core.topology import accumulated, own_batch

# Per rank, within one attempt; null where a process was killed before it reported anything.
CPU_TIME = ("user_s_per_rank", "system_s_per_rank")

Attempts = Sequence[AttemptStart | AttemptEnd]  # rows of attempts.jsonl


@dataclass(frozen=True)
class Opened:
    """When a process opened the run, and what it continues from."""

    unix: float
    # When the checkpoint from which the run continues was complete; None without a checkpoint.
    counted_unix: float | None = None
    # When the launcher that restarts lost processes was started; None without such a launcher.
    launcher_unix: float | None = None


class Lost(TypedDict):
    """The fields of AttemptStart that lost() knows, as declared there."""

    counted_unix: float | None
    gap_s: float | None
    lost_s: float | None
    redone_updates: int | None


def begin(
    folder: RunFolder,
    update: int,
    processes: int,
    effective_batch: int | None = None,
    opened: Opened | None = None,
    per_gpu_batch: int | None = None,
) -> int:
    """Record the start of an attempt; returns its number. Ends an earlier one that was killed."""
    opened = opened or Opened(time.time())
    if (killed := unended(folder)) is not None:
        _close_killed(folder, killed, opened.unix)
    rows = believed(folder)
    attempt = len(starts_of(rows)) + 1
    cost = lost(rows, update, opened, time.time())
    row: AttemptStart = {
        "event": "start",
        "attempt": attempt,
        "unix": time.time(),
        "from_update": update,
        "processes": processes,
        "effective_batch": effective_batch,
        "per_gpu_batch": per_gpu_batch,
        "restarts": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
        "counted_unix": cost["counted_unix"],
        "gap_s": cost["gap_s"],
        "lost_s": cost["lost_s"],
        "redone_updates": cost["redone_updates"],
    }
    folder.append_attempt(row)
    return attempt


def believed(folder: RunFolder) -> list[AttemptStart | AttemptEnd]:
    """The rows, None for values that do not fit the schema: no odd row may prevent a restart."""
    rows, *_ = folder.attempts_as_written()
    known = [believable(row["event"], row) for row in rows if row.get("event") in ("start", "end")]
    return cast(list[AttemptStart | AttemptEnd], known)


def require(folder: RunFolder) -> None:
    """DiskError if attempts.jsonl is gone: a folder created anew would lack the earlier records."""
    if not folder.attempts.is_file():
        raise DiskError(errno.ENOENT, removed(folder))


def removed(folder: RunFolder) -> str:
    return f"{folder.path} was removed while the run was in progress"


def starts_of(rows: Attempts) -> list[AttemptStart]:
    return [cast(AttemptStart, row) for row in rows if row.get("event") == "start"]


def ends_of(rows: Attempts) -> list[AttemptEnd]:
    return [cast(AttemptEnd, row) for row in rows if row.get("event") == "end"]


def first_start(rows: Attempts) -> float | None:
    """When the first attempt started; None where that is not known."""
    return next((row.get("unix") for row in starts_of(rows)), None)


def unended(folder: RunFolder) -> AttemptStart | None:
    """The start row of the attempt without an end row: it is still running, or was killed."""
    rows = believed(folder)
    starts = starts_of(rows)
    ended = sum(row.get("attempt") is not None for row in ends_of(rows))
    return starts[-1] if len(starts) > ended else None


def lost(rows: Attempts, update: int, opened: Opened, now_unix: float) -> Lost:
    """What the interruption of the previous attempt cost; nulls for the first attempt."""
    starts = starts_of(rows)
    if not starts:
        return {
            "counted_unix": opened.counted_unix,
            "gap_s": None,
            "lost_s": None,
            "redone_updates": None,
        }
    started_unix = starts[-1].get("unix") or 0.0
    # The first end row belongs to the attempt itself; further ones were left by processes that
    # failed before they began another attempt.
    ends: Rows = ends_of(rows[rows.index(starts[-1]) + 1 :]) or [{}]
    ended_unix = ends[0].get("unix") or started_unix
    wasted_s = sum(row.get("wall_s") or 0.0 for row in ends[1:])
    gap_s = None
    # The clock may have been set while the attempt ran: the gap is at most the launcher's age.
    # If the clock was set forward later, that age is too long as well, which nothing can detect.
    if opened.launcher_unix is not None and opened.launcher_unix <= ended_unix:
        gap_s = opened.unix - ended_unix - wasted_s
        gap_s = max(min(gap_s, opened.unix - opened.launcher_unix), 0.0)
    discarded_s = ended_unix - max(opened.counted_unix or 0.0, started_unix)
    discarded_s = max(min(discarded_s, ends[0].get("wall_s") or discarded_s), 0.0)
    discarded_s += _discarded_before(rows, opened.counted_unix or 0.0)
    reached, lost_s = ends[0].get("update"), None
    redone = None if reached is None else max(reached - update, 0)
    if not redone and ends[0].get("as_reported"):
        redone = None  # updates made after its last report are unknown
    if opened.counted_unix is not None or not update:  # else the checkpoint's time is unknown
        lost_s = discarded_s + wasted_s + (gap_s or 0.0) + now_unix - opened.unix
    return {
        "counted_unix": opened.counted_unix,
        "gap_s": gap_s,
        "lost_s": lost_s,
        "redone_updates": redone,
    }


def _discarded_before(rows: Attempts, counted_unix: float) -> float:
    """Time of attempts before the last one that counted until now but counts no longer, as the run
    continues from an older checkpoint than the last attempt did, or from none.
    """
    discarded_s, until_unix = 0.0, math.inf
    took_s = {end.get("attempt"): end.get("wall_s") for end in ends_of(rows)}
    for start, following in reversed([*itertools.pairwise(starts_of(rows))]):
        until_unix = min(until_unix, following.get("counted_unix") or 0.0)
        span_s = max(until_unix - max(start.get("unix") or 0.0, counted_unix), 0.0)
        # At most the attempt's own duration, whatever the clock was set to.
        discarded_s += min(span_s, took_s.get(start.get("attempt")) or span_s)
    return discarded_s


def is_resumed(folder: RunFolder, launcher_unix: float | None) -> bool:
    """Whether this launcher has worked on the run before, as it restarts lost processes."""
    times = [row.get("unix") or 0.0 for row in believed(folder)]
    return launcher_unix is not None and max(times, default=0.0) >= launcher_unix


def times_of_attempts(rows: Attempts, train_time_s: float | None) -> dict[str, Any]:
    """The summary's fields that are computed from attempts.jsonl and the training time."""
    starts, wall_s = starts_of(rows), total_wall_s(rows)
    lost, redone = ([s.get(n) for s in starts[1:]] for n in ("lost_s", "redone_updates"))
    return {
        # The time of a killed attempt is unknown if its last progress report is lost.
        "wall_s": None if _are_lost(rows) or wall_s < (train_time_s or 0) else wall_s,
        "restarts": sum(row.get("gap_s") is not None for row in starts),
        "lost_s": total(lost) if lost else 0.0,
        "redone_updates": total(redone) if redone else 0,
        "goodput_share": goodput_share(train_time_s, total_elapsed_s(rows)),
        **total_cpu_time(rows),
    }


def total_elapsed_s(rows: Attempts) -> float | None:
    """Time of all attempts plus the gaps between those of one launcher; None if unknown."""
    if any(row.get("wall_s") is None for row in ends_of(rows)):
        return None
    return total_wall_s(rows) + sum_of(starts_of(rows), "gap_s")


def _close_killed(folder: RunFolder, start: AttemptStart, before_unix: float) -> None:
    """Write the end row that a killed process could not, from its last progress report.

    before_unix: when this process opened the run; later failures did not end that attempt.
    """
    progress = believable("progress", folder.read_progress() or {})
    last = progress if progress.get("attempt") == start.get("attempt") else {}
    since_unix = start.get("unix") or 0.0
    failure = first_failure(folder, lambda f: since_unix <= f["unix"] < before_unix)
    folder.append_attempt(
        {
            "event": "end",
            "attempt": start.get("attempt"),
            "as_reported": True,
            "per_gpu_batch": start.get("per_gpu_batch"),
            "outcome": failure["outcome"] if failure else "interrupted",
            "reason": failure["reason"] if failure else "the process was killed",
            "in_step": failure.get("in_step") if failure else may_be_in_step(folder, last),
            "unix": last.get("unix"),
            "update": last.get("update"),
            "wall_s": last.get("wall_s"),
            "user_s_per_rank": last.get("user_s_per_rank"),
            "system_s_per_rank": last.get("system_s_per_rank"),
            "measuring_s": last.get("measuring_s"),
        },
    )


def with_smaller_batch(outcome: str, reason: str, settings: Settings, folder: RunFolder) -> str:
    """The reason, with what to try if a training step ran out of memory."""
    batch, ends = last_batch(folder, settings), ends_of(believed(folder))
    if outcome != "oom" or "_batch" in reason:
        return reason
    if not _lacked_in_step(ends):
        loaded = ends[-1].get("attempt") is not None
        advice = "outside training steps: if in an evaluation, try a smaller --eval_batch"
        return f"{reason}; {advice}" if loaded else reason
    if batch == 1:
        return reason
    half, grad_acc = accumulated(own_batch(settings), batch // 2)
    if fits := _fitting(folder, settings, batch):
        reason += f"; {fits} fitted on record, so the largest that fits is {fits} to {batch - 1}"
    how = "with --auto_batch the same command resumes with" if settings.auto_batch else "to try:"
    flags = f"--per_gpu_batch {half} --grad_acc {grad_acc}"
    return f"{reason}; {how} {flags}, which is the same effective batch"


# Settings in which runs may differ while a step still needs the same memory per sample.
AS_MUCH_MEMORY = {"per_gpu_batch", "grad_acc", "seed", "lr", "epochs"}


def _fitting(folder: RunFolder, settings: Settings, below: int) -> int:
    """The largest batch below a limit with which a like run finished on a like machine; or 0."""
    own, machine, fitting = settings_of(settings), recorded(folder, "machine"), [0]
    for file in folder.path.parent.glob(f"*/{folder.settings.name}"):
        other = RunFolder(file.parent)
        known = {**options_off(), **(other.read_settings() or {})}
        differing = {n for n in own if known.get(n) != own[n]} - AS_MUCH_MEMORY
        is_alike = not differing and machine is not None and recorded(other, "machine") == machine
        if is_alike and other.outcome() == FINISHED:
            fitting.append(last_batch(other, settings))  # at least the limit if unrecorded
    return max(batch for batch in fitting if batch < below)


def may_be_in_step(folder: RunFolder, progress: Mapping[str, Any]) -> bool | None:
    """Whether a killed attempt ended in a training step: False if it left a half-written
    checkpoint, or had made all updates of the run or of an epoch without a row (rows are written
    after the evaluation); otherwise None: unknown.
    """
    if not all((checkpoint / COMPLETE).is_file() for checkpoint in folder.checkpoints()):
        return False
    epoch, update, updates = (progress.get(name) for name in ("epoch", "update", "updates"))
    if epoch is None or update is None or updates is None:
        return None
    rows = [believable("epochs", row) for row in folder.read_epochs()[0]]
    recorded = max((row.get("epoch") or 0.0 for row in rows), default=0.0)
    evaluated = epoch - recorded < 1e-6 or abs(epoch - round(epoch)) > 1e-6
    return False if update >= updates or not evaluated else None


def _lacked_in_step(ends: Sequence[AttemptEnd]) -> bool:
    """Whether the last attempt may have ended in a training step: if not, its batch is no cause."""
    return not ends or ends[-1].get("in_step") is not False


def last_batch(folder: RunFolder, settings: Settings) -> int:
    """Samples per process and forward pass in the last attempt."""
    known = [row.get("per_gpu_batch") for row in believed(folder)]
    return next(filter(None, reversed(known)), settings.per_gpu_batch or 1)


# Environment variable of a process that continues a run out of memory, whatever --rerun says.
RESUMES = "HARNESS_RESUMES"


def batch_to_try(folder: RunFolder, settings: Settings) -> int | None:
    """The smaller batch per process that --auto_batch tries after a step ran out of memory; None if
    the batch of the last attempt stays.
    """
    last, ends = last_batch(folder, settings), ends_of(believed(folder))
    if not settings.auto_batch or not ends or last == 1 or not _lacked_in_step(ends):
        return None
    if unended(folder) is not None or "oom" not in (ends[-1].get("outcome"), folder.outcome()):
        return None  # the last attempt did not end for lack of memory
    return accumulated(own_batch(settings), last // 2)[0]


def only_follows(reason: str) -> bool:
    """Whether a rank failed only because another rank was gone."""
    return "peer" in reason.lower()


def with_rank(failure: FailureRecord) -> str:
    """The reason with the number of the failed rank, unless the reason already names a rank."""
    reason = failure["reason"]
    return reason if NAMES_RANK.search(reason) else f"{reason} (rank {failure['rank']})"


NAMES_RANK = re.compile(r" \(rank \d+\)$")


def failures_of(folder: RunFolder) -> list[Mapping[str, Any]]:
    """The failure record that each failed rank left; None for values that do not fit the schema."""
    return [believable("failure", failure) for failure in folder.read_failures()]


def first_failure(
    folder: RunFolder, is_new: Callable[[FailureRecord], bool]
) -> FailureRecord | None:
    """The new failure of the rank that failed first; other ranks fail a moment later as a result.

    Sorted by message first, then by clock: clocks differ between machines.
    """
    # A file that lacks fields was not written by a rank.
    names = [name for name, field in fields("failure").items() if field.required]
    complete = [
        cast(FailureRecord, f)
        for f in failures_of(folder)
        if all(f.get(n) is not None for n in names)
    ]
    recent = filter(is_new, complete)
    return min(recent, key=lambda f: (only_follows(f["reason"]), f["unix"]), default=None)


def end(
    folder: RunFolder,
    outcome: str,
    reason: str | None,
    wall_s: float,
    times: Mapping[str, Any] | None = None,
    update: int | None = None,
    begun: bool = True,
    per_gpu_batch: int | None = None,
    in_step: bool | None = None,
) -> None:
    """Record how the latest attempt ended; an attempt that never began training has no number."""
    open_start, known = unended(folder), times or {}
    if open_start is not None and not begun:
        _close_killed(folder, open_start, time.time() - wall_s)  # an earlier attempt, which died
        open_start = None
    folder.append_attempt(
        {
            "event": "end",
            "attempt": None if open_start is None else open_start.get("attempt"),
            "outcome": outcome,
            "reason": reason,
            "unix": time.time(),
            "update": update,
            "per_gpu_batch": per_gpu_batch,
            "in_step": False if open_start is None else in_step,
            "wall_s": wall_s,
            "user_s_per_rank": known.get("user_s_per_rank"),
            "system_s_per_rank": known.get("system_s_per_rank"),
            "measuring_s": known.get("measuring_s"),
        },
    )


def end_from_outside(folder: RunFolder, outcome: str, reason: str, wall_s: float) -> None:
    """end() for a process that could not call it; its last progress report counts."""
    begun, update, in_step, times = unended(folder), None, None, {}
    last = believable("progress", folder.read_progress() or {})
    if begun is not None and last.get("attempt") == begun.get("attempt") is not None:
        wall_s, update = last.get("wall_s") or wall_s, last.get("update")
        in_step, times = may_be_in_step(folder, last), {"measuring_s": last.get("measuring_s")}
    end(folder, outcome, reason, wall_s, times, update, in_step=in_step)
    folder.progress.unlink(missing_ok=True)


def total_wall_s(rows: Attempts) -> float:
    """Time spent in all attempts that have ended, as far as it is known."""
    return sum_of(ends_of(rows), "wall_s")


def wall_s_before(folder: RunFolder) -> float | None:
    """Time spent before this attempt; where rows of earlier attempts are lost, at least the wall_s
    of the last epoch's row, and None if that row has none.
    """
    rows = believed(folder)
    if not _are_lost(rows):
        return total_wall_s(rows)
    epochs, _ = folder.read_epochs()
    last_s = epochs[-1].get("wall_s") if epochs else None
    return None if last_s is None else max(total_wall_s(rows), last_s)


def _are_lost(rows: Attempts) -> bool:
    """Whether rows are lost: the first known attempt continued an earlier one, or an attempt that
    was not killed has no wall_s.
    """
    starts, ends = starts_of(rows), ends_of(rows)
    is_unknown = any(row.get("wall_s") is None and not row.get("as_reported") for row in ends)
    return is_unknown or bool(starts and starts[0].get("from_update"))


def total_cpu_time(rows: Attempts) -> dict[str, Any]:
    """Processor time of all attempts that have ended, as far as known: in total, and by rank."""
    ends: Rows = ends_of(rows)
    times: dict[str, Any] = {}
    for name in CPU_TIME:
        known = [row[name] for row in ends if row.get(name) and None not in row[name]]
        ranks = {len(of_attempt) for of_attempt in known}
        times[name.removesuffix("_per_rank")] = sum(map(sum, known)) if known else None
        # Only attempts with equally many processes can be added up rank by rank.
        times[name] = [sum(of) for of in zip(*known, strict=True)] if len(ranks) == 1 else None
    return times


def write_progress(folder: RunFolder, progress: ReportedProgress) -> None:
    """Write how far the attempt is, for whoever watches, and for its times if it is killed."""
    require(folder)
    folder.write_progress(progress)


def write_summary(
    folder: RunFolder,
    outcome: str,
    reason: str | None = None,
    best_metric: str | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write summary.json, with the same fields whether or not the run finished."""
    own = "script" not in (folder.read_settings() or {"script"})  # LogCallback alone recorded
    rows = [believable("epochs", row, own) for row in folder.read_epochs()[0]]
    known, probe = of_rows(rows), probe_of(folder)
    content = {
        **{name: rows[-1][name] for name in (own_metrics(rows[-1]) if rows else ())},
        "schema": SCHEMA,
        "outcome": outcome,
        "reason": reason,
        **known,
        **best_of(rows, best_metric),
        **times_of_attempts(believed(folder), known["train_time_s"]),
        "comm_share": probe.get("comm_share") if probe is not None else None,
        **(facts or {}),
    }
    content = plain(content)
    summary = summary_of(content, own)
    if lost := [name for name, value in content.items() if summary.get(name) != value]:
        warn(f"{folder.path}: not as declared, and not recorded: {', '.join(lost)}")
    folder.write_summary(summary)


def goodput_share(train_time_s: float | None, elapsed_s: float | None) -> float | None:
    """train_time_s / elapsed_s; None where an attempt without a record must have trained, too."""
    if train_time_s is None or not elapsed_s or elapsed_s < train_time_s:
        return None
    return train_time_s / elapsed_s


def probe_of(folder: RunFolder) -> CommProbeRecord | None:
    """What the exchange adds to a step, as measured in any attempt."""
    return cast(CommProbeRecord | None, recorded(folder, "comm_probe"))


def observed_of(folder: RunFolder) -> ObservedRecord:
    """What earlier attempts observed; without what another version recorded under other names."""
    observed, known = recorded(folder, "observed") or {}, fields_of(ObservedRecord)
    as_declared = {n: v for n, v in observed.items() if not any(undeclared(known, {n: v}))}
    return cast(ObservedRecord, as_declared)


def recorded(folder: RunFolder, name: str) -> Any:
    """A field of environment.json; None if it is not known."""
    return believable("environment", folder.read_environment() or {}).get(name)

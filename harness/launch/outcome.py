"""Determines the outcome of each run of a sweep, even if the run could not record one itself."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from harness.core import attempts
from harness.core.attempts import with_smaller_batch, write_summary
from harness.core.process import NO_MEMORY, last_line, text_of
from harness.core.records import (
    FAILURES,
    FINISHED,
    SERVER_KILLED,
    WAITING,
    RunFolder,
    log_of,
)
from harness.core.records.locks import is_free
from harness.core.records.redact import redacted, settings_of
from harness.core.records.summary import disturbance
from harness.core.schema.checks import believable
from harness.core.schema.rows import SummaryRecord
from harness.launch.launcher import Exit
from harness.launch.plan import Job

ELSEWHERE = "elsewhere"  # the state of a run that another runner or person measures
KNOWN = (FINISHED, *FAILURES)
STOPPED = ("interrupted", "the sweep was stopped")
NODE = re.compile(r"^\[[^\]]+\] ")  # the prefix of a line from another machine
# What a run prints if it cannot write its outcome.
UNRECORDED = re.compile(
    r"^(?:\[[^\]]+\] )?(failed|oom|diverged): (.*); it cannot be recorded", re.M
)
REFUSED = 2  # exit code of a script for an argument error; its last line names the error


@dataclass
class State:
    """One run, as the runner and its screen see it."""

    job: Job
    state: str = WAITING
    reason: str | None = None
    began_s: float | None = None
    took_s: float | None = None
    batch: int | None = None  # batch per process to try after a lack of memory (--auto_batch)
    resumes: bool = False  # continue the record that this runner made, whatever --rerun says
    command: str | None = None  # of the sweep that started or submitted the run, once it has ended
    before_s: float = 0.0  # time of its attempts before this runner started it
    known: bool = False  # had its outcome before this runner reached it

    @property
    def failed(self) -> bool:
        return self.state in FAILURES


@dataclass(frozen=True)
class Began:
    """What a run's folder held when the run began: only later additions belong to the run. Clocks
    may be set at any moment, so times decide only if another process began the run.
    """

    unix: float
    summary: SummaryRecord | None = None  # the one in the folder at that time
    failures: Sequence[Mapping[str, Any]] | None = None  # None if another process began the run

    @classmethod
    def now(cls, folder: RunFolder) -> Self:
        return cls(time.time(), folder.read_summary(), attempts.failures_of(folder))

    def new_summary(self, folder: RunFolder) -> SummaryRecord | None:
        summary = folder.read_summary()
        if self.failures is None:
            return summary if written_since(folder.summary, self.unix) else None
        return summary if summary != self.summary else None

    def is_new(self, failure: Mapping[str, Any]) -> bool:
        if self.failures is None:
            return (failure.get("unix") or 0.0) >= self.unix
        return bool(failure) and failure not in self.failures


def settled(outcome: str | None, rerun: str | None) -> str | None:
    """The outcome of a run that need not be run (again); None if it is to be run.

    An interrupted run continues; any other failure stays a result until --rerun asks for it.
    """
    again = (
        outcome == "interrupted" or rerun == "all" or (rerun == "failed" and outcome != FINISHED)
    )
    return outcome if outcome in KNOWN and not again else None


def disturbance_of(folder: RunFolder) -> str | None:
    """What disturbed a run, in words; None if little did."""
    facts = believable("environment", dict(folder.read_environment() or {}))
    return disturbance(facts.get("launch"), folder.read_epochs()[0])


def was_disturbed(folder: RunFolder) -> bool:
    return folder.outcome() == FINISHED and disturbance_of(folder) is not None


def quality_and_speed(row: Mapping[str, object]) -> str:
    """Quality and speed of a row or summary on one line, including the metric asked for."""
    formats = {"accuracy": "accuracy {:.4f}"}
    if metric := row.get("best_metric"):
        formats.setdefault(str(metric), f"{metric} {{:.4f}}")
    formats["train_samples_per_s"] = "{:,.0f} samples/s"
    return ", ".join(
        f.format(row[name]) for name, f in formats.items() if row.get(name) is not None
    )


def settle(
    job: Job, run_exit: Exit, began: Began, log: Path, stopped: tuple[str, str] | None
) -> str:
    """Make sure that the run's folder has an outcome, and return it.

    stopped: outcome and reason if this runner ended the run.
    """
    folder = job.folder
    summary = began.new_summary(folder)
    if summary is not None and summary.get("outcome") not in KNOWN:
        summary = None  # damaged: treat it as missing
    outside = _from_outside(run_exit, stopped) or _silent(folder, run_exit, began, log)
    if summary is not None and folder.outcome() is None:
        outside, summary = outside or ("failed", attempts.removed(folder)), None
    # A run's own record counts, unless it only shows the effect of an outside event.
    if summary and (outside is None or summary["outcome"] not in ("interrupted", "failed")):
        return _with_cause(job, summary, began)
    outcome, reason = outside or _from_inside(folder, run_exit, began, log)
    if summary is None and folder.outcome() == FINISHED:
        # Another runner was quicker, or --rerun never started: keep that record.
        return outcome if run_exit.code else FINISHED
    if summary is None and is_measured(folder, wait_s=2):
        return ELSEWHERE  # another runner was quicker and writes the record
    if summary is None:
        wall_s = time.time() - began.unix if run_exit.wall_s is None else run_exit.wall_s
        attempts.end_from_outside(folder, outcome, reason, wall_s)
        if not folder.settings.is_file():
            folder.write_settings(settings_of(job.settings))
    reason = with_smaller_batch(outcome, redacted(reason), job.settings, folder)
    write_summary(folder, outcome, reason, job.settings.best_metric)
    return outcome


def _with_cause(job: Job, summary: SummaryRecord, began: Began) -> str:
    """The outcome that rank 0 recorded, or that of a rank on another disk that caused it."""
    outcome, reason = str(summary["outcome"]), str(summary.get("reason"))
    if outcome != "interrupted" and not attempts.only_follows(reason):
        return outcome
    first = attempts.first_failure(job.folder, began.is_new)
    if first is None or not first["rank"] or attempts.only_follows(first["reason"]):
        return outcome
    if first["reason"] not in reason:
        cause = attempts.with_rank(first)
        cause = with_smaller_batch(first["outcome"], cause, job.settings, job.folder)
        write_summary(job.folder, first["outcome"], cause, job.settings.best_metric)
    return job.folder.outcome() or outcome


def is_measured(folder: RunFolder, wait_s: float = 0.0) -> bool:
    """Whether a process is writing this record; a killed one may take a moment to disappear."""
    return not is_free(folder.lock("run"), wait_s)


def _from_outside(run_exit: Exit, stopped: tuple[str, str] | None) -> tuple[str, str] | None:
    """(outcome, reason) if something outside the run ended it; else None."""
    if stopped is not None:
        return stopped
    if run_exit.verdict is not None:
        return run_exit.verdict
    if run_exit.launcher_died:
        return "interrupted", run_exit.error or "the launcher was killed"
    killed = [f for f in run_exit.failures if f["exit_code"] in (-signal.SIGKILL, SERVER_KILLED)]
    for failure in killed:
        if reason := failure.get("stopped"):
            return "failed", reason
    if killed:
        rank = f"rank {killed[0]['rank']}"
        if what := next(filter(None, (failure.get("no_memory") for failure in killed)), None):
            return "oom", f"{rank} was killed by the kernel: {what} is out of memory"
        return "interrupted", f"{rank} was killed (SIGKILL)"
    return None


def _silent(folder: RunFolder, run_exit: Exit, began: Began, log: Path) -> tuple[str, str] | None:
    """(outcome, reason) if a rank died without recording why; other ranks fail as a result."""
    for failure in sorted(run_exit.failures, key=lambda failure: failure["unix"]):
        rank, code = failure["rank"], failure["exit_code"]
        if began.is_new(believable("failure", folder.read_failure(rank) or {})):
            continue
        if code == REFUSED:
            return None
        rank_log = log_of(log, rank)
        rank_log = rank_log if rank_log.is_file() else log  # a remote node has one log
        if unrecorded := UNRECORDED.search(text_of(rank_log)):
            return unrecorded[1], f"{unrecorded[2]} (rank {rank})"
        line = line_of_error(rank_log)
        if NO_MEMORY.search(line):
            return "oom", f"{line} (rank {rank})"
        how = (
            f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        )
        if code == -signal.SIGSEGV and failure.get("limited"):
            # Libraries do not check every allocation; but other bugs end like this, too.
            how += ", perhaps out of memory: ulimit -v is set"
        return "failed", f"rank {rank} {how}"
    return None


def _from_inside(folder: RunFolder, run_exit: Exit, began: Began, log: Path) -> tuple[str, str]:
    """(outcome, reason) of a run that wrote no summary."""
    first = attempts.first_failure(folder, began.is_new)
    if first is not None:
        named = len(run_exit.failures) > 1 or first["rank"]
        return first["outcome"], attempts.with_rank(first) if named else first["reason"]
    if run_exit.error is None and run_exit.code == 0:
        return "failed", f"it ended without an error, and no record is in {folder.path}"
    return "failed", run_exit.error or line_of_error(log) or f"exit code {run_exit.code}"


def written_since(path: Path, unix: float) -> bool:
    try:
        return path.stat().st_mtime >= unix
    except OSError:
        return False


def line_of_error(log: Path) -> str:
    """The error line in what a run printed; if there is none, its last line."""
    lines = [NODE.sub("", line) for line in text_of(log).strip().splitlines()[-200:]]
    memory = [line for line in lines if NO_MEMORY.search(line)]
    refusals = [line for line in lines if re.match(r"\w+\.py: error: ", line)]
    errors = [line for line in lines if re.search(r"^\S*error", line, re.IGNORECASE)]
    # Errors of torchrun about its ranks, and of nodes about each other, are only consequences.
    own = [line for line in errors if not line.startswith("torch.distributed.elastic")]
    chosen = memory[:1] or refusals[-1:] or own[-1:] or errors[-1:] or lines[-1:] or [""]
    return last_line(chosen[0])

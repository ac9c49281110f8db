"""What became of a run, where the run itself could not say it: killed, hung, refused."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

from harness.core import attempts
from harness.core.attempts import write_summary
from harness.core.locks import Lock
from harness.core.provenance import settings_of
from harness.core.records import (
    FINISHED,
    SCHEMA,
    SERVER_KILLED,
    RunFolder,
    log_of,
    read_json,
    write_json,
)
from harness.launch.launcher import Exit
from harness.launch.plan import ELSEWHERE, Job

# How running out of memory looks where no Python exception could tell.
NO_MEMORY = re.compile(r"bad_alloc|MemoryError|Cannot allocate memory|out of memory", re.IGNORECASE)
NODE = re.compile(r"^\[[^\]]+\] ")  # in front of a line from another machine
REFUSED = 2  # by a script, for a mistake in what it was asked; its own line says which


def settle(
    job: Job, ending: Exit, began_unix: float, log: Path, asked: str | None, oom_kills: int
) -> str:
    """See that the run has an outcome in its folder, and return what has become of it.

    asked: why this runner ended the run (timeout or interrupted), None if it did not.
    """
    folder = job.folder
    told = read_json(folder.summary) if written_since(folder.summary, began_unix) else None
    outside = _from_outside(ending, asked, oom_kills) or _silent(folder, ending, began_unix, log)
    # What a run says of itself counts, unless it only felt the blow that came from outside.
    if told is not None and (outside is None or told["outcome"] not in ("interrupted", "failed")):
        told = _with_cause(job, told, began_unix)
        return str(told["outcome"])
    outcome, reason = outside or _from_inside(folder, ending, began_unix, log)
    if told is None and folder.outcome() == FINISHED:
        # Done by somebody quicker, or --rerun did not come to its start: that record stays.
        return outcome if ending.code else FINISHED
    if told is None and is_measured(folder, wait_s=2):
        return ELSEWHERE  # taken by somebody quicker: the record is theirs to write
    if told is None:
        wall_s = time.time() - began_unix if ending.wall_s is None else ending.wall_s
        _close_attempt(folder, outcome, reason, wall_s)
        if not folder.settings.is_file():
            write_json(folder.settings, {"schema": SCHEMA, **settings_of(job.settings)})
    write_summary(folder, outcome, reason, job.settings.best_metric)
    return outcome


def _with_cause(job: Job, told: dict[str, Any], began: float) -> dict[str, Any]:
    """What rank 0 told, unless it only followed a rank that told why on a disk of its own."""
    reason = str(told.get("reason"))
    if told["outcome"] != "interrupted" and not attempts.only_follows(reason):
        return told
    first = attempts.first_failure(job.folder, since=began)
    if first is None or not first["rank"] or attempts.only_follows(first["reason"]):
        return told
    if first["reason"] not in reason:
        cause = f"{first['reason']} (rank {first['rank']})"
        write_summary(job.folder, first["outcome"], cause, job.settings.best_metric)
    return read_json(job.folder.summary) or told


def is_measured(folder: RunFolder, wait_s: float = 0.0) -> bool:
    """Whether a process is writing this record; one that was killed may take a moment to go."""
    lock = Lock(folder.lock("run"))
    free = lock.take(wait_s)
    lock.release()
    return not free


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory; 0 where it does not say."""
    try:
        text = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0


def _from_outside(ending: Exit, asked: str | None, kills: int) -> tuple[str, str] | None:
    """(outcome, reason) where the run was ended by somebody else."""
    if asked is not None:
        what = "longer than --timeout" if asked == "timeout" else "the sweep was stopped"
        return asked, what
    if ending.verdict is not None:
        return ending.verdict
    if ending.launcher_died:
        return "interrupted", ending.error or "the launcher was killed"
    killed = [f for f in ending.failures if f["exit_code"] in (-signal.SIGKILL, SERVER_KILLED)]
    if killed:
        rank = f"rank {killed[0]['rank']}"
        if kills:
            return "oom", f"{rank} was killed by the kernel: the machine is out of memory"
        return "interrupted", f"{rank} was killed (SIGKILL)"
    return None


def _silent(folder: RunFolder, ending: Exit, began: float, log: Path) -> tuple[str, str] | None:
    """(outcome, reason) where a rank died without a word; the others only miss it."""
    for failure in sorted(ending.failures, key=lambda failure: failure["unix"]):
        told = read_json(folder.failure(failure["rank"]))
        if told is not None and told["unix"] >= began:
            continue
        if failure["exit_code"] == REFUSED:
            return None
        own = log_of(log, failure["rank"])
        last = _last_line(own if own.is_file() else log)  # of nodes with a disk of their own: one
        if NO_MEMORY.search(last):
            return "oom", f"{last} (rank {failure['rank']})"
        code = failure["exit_code"]
        how = (
            f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        )
        return "failed", f"rank {failure['rank']} {how}"
    return None


def _from_inside(folder: RunFolder, ending: Exit, began: float, log: Path) -> tuple[str, str]:
    """(outcome, reason) of a run that ended without a word of its own."""
    first = attempts.first_failure(folder, since=began)
    if first is not None:
        who = f" (rank {first['rank']})" if len(ending.failures) > 1 or first["rank"] else ""
        return first["outcome"], first["reason"] + who
    last = _last_line(log)
    return "failed", ending.error or last or f"exit code {ending.code}"


def _close_attempt(folder: RunFolder, outcome: str, reason: str, wall_s: float) -> None:
    begun, last, update = attempts.unended(folder), read_json(folder.progress) or {}, None
    if begun is not None and last.get("attempt") == begun["attempt"]:
        # It had begun: its own clock says how long, as far as it told.
        wall_s, update = last["wall_s"], last["update"]
    attempts.end(folder, outcome, reason, wall_s, update=update)
    folder.progress.unlink(missing_ok=True)


def written_since(path: Path, unix: float) -> bool:
    try:
        return path.stat().st_mtime >= unix
    except OSError:
        return False


def _last_line(log: Path) -> str:
    """Of what the run printed last: the error, where there is one."""
    try:
        text = log.read_text("utf-8", errors="replace")
    except OSError:
        return ""
    lines = [NODE.sub("", line) for line in text.strip().splitlines()[-200:]]
    memory = [line for line in lines if NO_MEMORY.search(line)]
    refusals = [line for line in lines if re.match(r"\w+\.py: error: ", line)]
    errors = [line for line in lines if re.search(r"^\S*error", line, re.IGNORECASE)]
    # What torchrun says of its ranks, and its nodes of each other, only follows from it.
    own = [line for line in errors if not line.startswith("torch.distributed.elastic")]
    chosen = memory[:1] or refusals[-1:] or own[-1:] or errors[-1:] or lines[-1:] or [""]
    return " ".join(chosen[0].split())[:300]

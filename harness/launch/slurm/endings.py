"""How a job of a cluster ended: by the word of the cluster, and by what its script has left."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

from harness.launch.launcher import Ending
from harness.launch.slurm.submitted import Note

# States of a job that has ended, and what they say that the run itself could not.
ENDED: dict[str, tuple[str, str] | None] = {
    "COMPLETED": None,
    "FAILED": None,
    "TIMEOUT": ("timeout", "the job reached its time limit"),
    "DEADLINE": ("timeout", "the job reached its deadline"),
    "OUT_OF_MEMORY": ("oom", "the job took more memory than it was given"),
    "CANCELLED": ("interrupted", "the job was cancelled"),
    "PREEMPTED": ("interrupted", "the job had to make room for another (PREEMPTED)"),
    "NODE_FAIL": ("interrupted", "a node of the job failed (NODE_FAIL)"),
    "BOOT_FAIL": ("interrupted", "a node of the job did not start (BOOT_FAIL)"),
}

# How torchrun prints a rank that failed.
FAILURE = re.compile(
    r"^  time +: (\S+)\n  host +: .*\n  rank +: (\d+) .*\n  exitcode +: (-?\d+) ", re.MULTILINE
)


def code_of(word: str | None, note: Note | None) -> int:
    """The exit code of a job that has ended; word: its state, None where it is forgotten."""
    if word not in ("COMPLETED", None):
        return (note.code if note is not None else None) or 1  # srun may say 0 of a lost node
    if note is not None and note.code is not None:
        return note.code
    return 0 if word == "COMPLETED" else 1


def ending_of(job: str, word: str | None, note: Note | None, log: Path, folder: Path) -> Ending:
    """In the words of the other launchers; folder: of the run's record."""
    code = code_of(word, note)
    return Ending(
        code,
        failures=_failures(note, log),
        error=_error(job, note, code, folder),
        outside=_from_outside(job, word, note),
        wall_s=_wall_s(note, log),
    )


def _from_outside(job: str, word: str | None, note: Note | None) -> tuple[str, str] | None:
    """(outcome, reason) of a job that was ended by the cluster or by a person; None of others."""
    if word is not None and ENDED.get(word) is not None:
        return ENDED[word]
    if note is not None and note.ended is not None:
        signals = {"USR1": ENDED["TIMEOUT"], "TERM": ENDED["CANCELLED"]}
        return signals.get(note.signal) if note.code else None
    if word is None:
        return "interrupted", f"{job} ended without a word: cancelled, or lost with its node"
    return None


def _failures(note: Note | None, log: Path) -> list[dict[str, Any]]:
    """The ranks that failed since the job has begun: its log may tell of earlier starts."""
    try:
        text = log.read_text("utf-8", errors="replace")
    except OSError:
        return []
    found = []
    for stamp, rank, code in FAILURE.findall(text):
        unix = time.mktime(time.strptime(stamp, "%Y-%m-%d_%H:%M:%S"))
        if note is not None and unix >= note.began:
            found.append({"rank": int(rank), "exit_code": int(code), "unix": unix})
    return found


def _error(job: str, note: Note | None, code: int, folder: Path) -> str | None:
    """What a run cannot say of itself."""
    if code == 0:
        return (
            f"{job} ended well, but its record is not in {folder}: put --output_dir on storage "
            "that all nodes share"
        )
    if note is None:
        return f"{job} failed before it began: is {os.getcwd()} there on its node?"
    return None


def _wall_s(note: Note | None, log: Path) -> float:
    """From begin to end as the job told; to its last output where it could not tell its end."""
    if note is None:
        return 0.0
    try:
        ended = log.stat().st_mtime if note.ended is None else note.ended
    except OSError:
        return 0.0
    return max(0.0, ended - note.began)

"""Talking with SLURM: sbatch, squeue, sacct and scancel, each asked for as little as will do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.core.records import append_row, read_json, read_rows
from harness.core.settings import UserError
from harness.launch.launcher import Exit

PATIENCE_S = 60.0


class Unreachable(Exception):
    """The cluster does not answer now; it may later."""


@dataclass(frozen=True)
class Queued:
    id: str  # 12, or 12_3 of an array
    state: str
    reason: str
    name: str

    @property
    def index(self) -> int:
        return int(self.id.partition("_")[2] or 0)


def check_here() -> None:
    if shutil.which("sbatch") is None:
        raise UserError("--launcher slurm: there is no sbatch here: call it on a node of a cluster")


def submit(script: Path, lock: int) -> str:
    """The number of the job; UserError with what sbatch says where it refuses.

    sbatch goes on when its runner is stopped or killed: meanwhile it holds the lock, so that the
    next runner sees the job rather than submit another.
    """
    done = subprocess.run(
        ["sbatch", "--parsable", str(script)],
        capture_output=True,
        text=True,
        check=False,
        pass_fds=(lock,),
        start_new_session=True,
    )
    if done.returncode:
        lines = [line.removeprefix("sbatch: error: ") for line in done.stderr.splitlines() if line]
        said = "; ".join(lines) or f"exit code {done.returncode}"
        hint = ", where a core is a device: --gres none" if "(gres)" in said else ""
        raise UserError(f"sbatch refuses: {said}{hint}; the script is {script}")
    return done.stdout.strip().partition(";")[0]


def queued(names: Iterable[str]) -> list[Queued]:
    """Jobs of these names that wait, run, or have ended a short while ago."""
    text = _ask(
        "squeue", "--noheader", "--array", "--states=all", f"--name={','.join(sorted(names))}",
        "--format=%i|%T|%r|%j",
    )  # fmt: skip
    return [Queued(*line.strip().split("|", 3)) for line in text.splitlines() if line.strip()]


def accounted(id: str) -> str | None:
    """The state in which a job ended that squeue has forgotten; None where no accounts are kept."""
    try:
        text = _ask("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={id}",
                    "--format=State")  # fmt: skip
    except Unreachable:
        return None
    words = text.split()  # CANCELLED by 1000
    return words[0] if words else None


def cancel(ids: Iterable[str]) -> None:
    _ask("scancel", "--quiet", *ids)


def _ask(*command: str) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
            start_new_session=True,  # Ctrl-C is for the runner alone
        )
    except subprocess.TimeoutExpired:
        raise Unreachable(f"{command[0]} did not answer in {PATIENCE_S:.0f} s") from None
    except OSError as error:
        raise Unreachable(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        raise Unreachable(" ".join(done.stderr.split()) or f"{command[0]}: {done.returncode}")
    return done.stdout


# ----
# What a sweep has given to a cluster: a file that survives whoever wrote it.


@dataclass(frozen=True)
class Note:
    """What the script of a job has written, by its own clock."""

    job: str
    began: float
    ended: float | None
    code: int | None
    signal: str  # USR1: shortly before the time limit; TERM: the job was ended; or none

    @property
    def is_final(self) -> bool:
        """Whether it says how the job ended; who sent TERM, only the cluster knows."""
        return self.ended is not None and self.signal != "TERM"


@dataclass(frozen=True)
class Entry:
    """One run that was submitted and has not been settled."""

    path: str  # of the run, below the output folder
    name: str  # of the job
    index: int  # in its array
    of: int  # runs of the array; 1: none
    unix: float
    job: str | None = None  # number; None: whoever submitted it was killed before it was told

    @property
    def id(self) -> str | None:
        return f"{self.job}_{self.index}" if self.job and self.of > 1 else self.job


class Submitted:
    """jobs.jsonl in the folder of a sweep, and jobs/ with the scripts and what they leave."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "jobs"
        self.file = folder / "jobs.jsonl"

    def script(self, name: str) -> Path:
        return self.folder / f"{name}.sh"

    def note(self, entry: Entry) -> Note | None:
        """None before the job has begun."""
        found = read_json(self.folder / f"{entry.name}_{entry.index}.json")
        return Note(**found) if found is not None else None

    def log(self, entry: Entry) -> Path:
        return self.folder.parent / "logs" / f"{entry.name}_{entry.index}.txt"

    def intend(self, name: str, paths: list[str]) -> None:
        """Before sbatch is asked: a job that nobody remembers would be submitted twice."""
        self._add("submitting", name, runs=paths)

    def confirm(self, name: str, job: str) -> None:
        self._add("submitted", name, job=job)

    def withdraw(self, name: str) -> None:
        self._add("withdrawn", name)

    def settle(self, entry: Entry, outcome: str) -> None:
        self._add("settled", entry.name, path=entry.path, outcome=outcome)

    def open(self) -> dict[str, Entry]:
        """The runs that were submitted and not settled, by their path."""
        rows, _ = read_rows(self.file)
        found: dict[tuple[str, str], Entry] = {}
        for row in rows:
            name = row["name"]
            mine = [key for key in found if key[0] == name]
            if row["event"] == "submitting":
                for index, path in enumerate(row["runs"]):
                    found[name, path] = Entry(path, name, index, len(row["runs"]), row["unix"])
            elif row["event"] == "submitted":
                found |= {key: replace(found[key], job=row["job"]) for key in mine}
            elif row["event"] == "withdrawn":
                found = {key: entry for key, entry in found.items() if key[0] != name}
            else:
                found.pop((name, row["path"]), None)
        return {path: entry for (_, path), entry in found.items()}

    def settled(self, entry: Entry) -> bool:
        """Whether another runner has settled it meanwhile."""
        now = self.open().get(entry.path)
        return now is None or now.name != entry.name

    def _add(self, event: str, name: str, **facts: Any) -> None:
        append_row(self.file, {"event": event, "name": name, **facts, "unix": time.time()})


# ----
# How a job of a cluster ended: by the word of the cluster, and by what its script has left.

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


def exit_of(job: str, word: str | None, note: Note | None, log: Path, folder: Path) -> Exit:
    """In the words of the other launchers; folder: of the run's record."""
    code = code_of(word, note)
    return Exit(
        code,
        failures=_failures(note, log),
        error=_error(job, note, code, folder),
        verdict=_from_outside(job, word, note),
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

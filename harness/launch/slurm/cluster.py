"""Jobs of a SLURM cluster: submission, queries, the file that remembers them, how they ended.

sbatch, squeue, sacct and scancel are called as rarely as possible.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.core.process import last_line
from harness.core.records import LOGS, append_row, read_json
from harness.core.records.submitted import JOBS, Entry, open_entries
from harness.core.settings import UserError
from harness.launch.agents import FailedRank, failures_in
from harness.launch.launcher import Exit

PATIENCE_S = 60.0
# States of a job that has ended -> the (outcome, reason) that the run itself could not record.
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
    "REVOKED": ("interrupted", "another cluster of the federation took the job (REVOKED)"),
}
# Variables of SLURM's that are not those of a job in which a sweep is started.
OF_NO_JOB = ("SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS")


class Unreachable(Exception):
    """The cluster does not answer now; it may answer later."""


@dataclass(frozen=True)
class Queued:
    id: str  # 12, or 12_3 in an array
    state: str
    reason: str
    name: str

    @property
    def index(self) -> int:
        return int(self.id.partition("_")[2] or 0)


def check_here() -> None:
    if shutil.which("sbatch") is None:
        raise UserError("--launcher slurm: there is no sbatch here: run it on a node of a cluster")


def partitions() -> list[str]:
    return sorted(set(_ask("sinfo", "--noheader", "--format=%R").split()))


def submit(script: Path, lock: int, is_left: Callable[[], bool]) -> str | None:
    """Submit a script and return the job's number; UserError with sbatch's message if it refuses,
    None if is_left() before it answers.

    sbatch survives a runner that is stopped or killed, and holds the lock until it ends, so that
    the next runner sees the job instead of submitting another. Variables such as SBATCH_TIMELIMIT
    are defaults: they override the options in a script, but not those on the command line.
    """
    options = re.findall(r"^#SBATCH (.*)$", script.read_text("utf-8"), re.M)
    running = subprocess.Popen(
        ["sbatch", "--parsable", *shlex.split(" ".join(options)), str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=(lock,),
        start_new_session=True,
        env=outside_a_job(os.environ),
    )
    while True:
        try:
            answer, errors = running.communicate(timeout=0.2)
            break
        except subprocess.TimeoutExpired:
            if is_left():
                return None
    if running.returncode:
        lines = [line.removeprefix("sbatch: error: ") for line in errors.splitlines() if line]
        reason = "; ".join(lines) or f"exit code {running.returncode}"
        hint = (
            ": without GPUs use --gres none, a core is then a device" if "(gres)" in reason else ""
        )
        raise UserError(f"sbatch refuses: {reason}{hint}; the script is {script}")
    if not (numbered := re.search(r"^(\d+)(;.*)?$", answer.strip(), re.M)):
        raise UserError(
            f"sbatch --parsable answers {last_line(answer)!r}, which is no job number; the script "
            f"is {script}; the same command looks for the job by its name"
        )
    return numbered[1]


def outside_a_job(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without that of a job: its array number or memory are not those of jobs that
    are submitted from it.
    """
    environment = {k: v for k, v in environ.items() if not k.startswith("SLURM_") or k in OF_NO_JOB}
    environment.pop("SBATCH_CLUSTERS", None)  # squeue here would not list the job
    return environment


def queued(names: Iterable[str]) -> list[Queued]:
    """Jobs with these names that wait, run, or ended recently."""
    text = _ask(
        "squeue", "--noheader", "--array", "--states=all", f"--name={','.join(sorted(names))}",
        "--format=%i|%T|%r|%j",
    )  # fmt: skip
    found = []
    for line in (line.strip() for line in text.splitlines()):
        if line.count("|") < 3:
            continue  # a header or a notice
        job = Queued(*line.split("|", 3))
        if not re.fullmatch(r"\d+(_\d+)?", job.id):
            raise Unreachable(f"squeue lists a job as {job.id}, in place of one by one")
        found.append(job)
    return found


def accounted(id: str) -> str | None:
    """The final state of a job that squeue no longer lists; None without accounting."""
    try:
        text = _ask("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={id}",
                    "--format=State")  # fmt: skip
    except Unreachable:
        return None
    return text.split()[0] if text.strip() else None  # first word of "CANCELLED by 1000"


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
            start_new_session=True,  # Ctrl-C must reach the runner alone
        )
    except subprocess.TimeoutExpired:
        raise Unreachable(f"{command[0]} did not answer in {PATIENCE_S:.0f} s") from None
    except OSError as error:
        raise Unreachable(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        reason = re.sub(rf"^{command[0]}: (error: |fatal: )?", "", last_line(done.stderr))
        raise Unreachable(reason or f"{command[0]} ended with exit code {done.returncode}")
    return done.stdout


@dataclass(frozen=True)
class Note:
    """The note that a job's script wrote, with times by its own clock."""

    job: str
    began: float
    ended: float | None
    code: int | None
    signal: str  # USR1: shortly before the time limit; TERM: the job was ended; or empty

    @property
    def is_final(self) -> bool:
        """Whether the note shows how the job ended; only the cluster knows who sent a TERM."""
        return self.ended is not None and self.signal != "TERM"


class Submitted:
    """The jobs that a sweep submitted: jobs.jsonl in its folder, scripts and notes in jobs/."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "jobs"
        self.file = folder / JOBS

    def script(self, name: str) -> Path:
        return self.folder / f"{name}.sh"

    def note(self, entry: Entry) -> Note | None:
        """The note of a job; None before the job begins, or if the note is damaged."""
        content = read_json(self.folder / f"{entry.name}_{entry.index}.json")
        try:
            return Note(**content) if content is not None else None
        except TypeError:  # unexpected fields
            return None

    def log(self, entry: Entry) -> Path:
        return self.folder.parent / LOGS / f"{entry.name}_{entry.index}.txt"

    def intend(self, name: str, paths: list[str], command: str) -> None:
        """Record a job before sbatch is called: an unrecorded job would be submitted twice."""
        self._add("submitting", name, runs=paths, command=command)

    def confirm(self, name: str, job: str) -> None:
        self._add("submitted", name, job=job)

    def withdraw(self, name: str) -> None:
        self._add("withdrawn", name)

    def settle(self, entry: Entry, outcome: str) -> None:
        self._add("settled", entry.name, path=entry.path, outcome=outcome)

    def open(self) -> dict[str, Entry]:
        """The runs that were submitted and are not settled, by path."""
        return open_entries(self.file)

    def settled(self, entry: Entry) -> bool:
        """Whether another runner has settled the run meanwhile."""
        now = self.open().get(entry.path)
        return now is None or now.name != entry.name

    def _add(self, event: str, name: str, **facts: Any) -> None:
        append_row(self.file, {"event": event, "name": name, **facts, "unix": time.time()})


def code_of(job_state: str | None, note: Note | None) -> int:
    """The exit code of a job that has ended; job_state is None if the cluster has forgotten it."""
    if job_state not in ("COMPLETED", None):
        return (note.code if note is not None else None) or 1  # srun may return 0 for a lost node
    if note is not None and note.code is not None:
        return note.code
    return 0 if job_state == "COMPLETED" else 1


def exit_of(job: str, job_state: str | None, note: Note | None, log: Path, folder: Path) -> Exit:
    """The end of a job as an Exit, as from other launchers; folder: that of the run's record."""
    code = code_of(job_state, note)
    return Exit(
        code,
        failures=_failures(note, log),
        error=_error(job, note, code, folder),
        verdict=_from_outside(job, job_state, note),
        wall_s=_wall_s(note, log),
    )


def _from_outside(job: str, job_state: str | None, note: Note | None) -> tuple[str, str] | None:
    """(outcome, reason) of a job that was ended from outside; None for others."""
    if job_state is not None and ENDED.get(job_state) is not None:
        return ENDED[job_state]
    if note is not None and note.ended is not None:
        signals = {"USR1": ENDED["TIMEOUT"], "TERM": ENDED["CANCELLED"]}
        return signals.get(note.signal) if note.code else None
    if job_state is None:
        return "interrupted", f"{job} ended without a trace: cancelled, or lost with its node"
    return None


def _failures(note: Note | None, log: Path) -> list[FailedRank]:
    """The ranks that failed since the job began; its log may contain earlier starts."""
    failures = failures_in(log)
    return [f for f in failures if note is not None and f["unix"] >= note.began]


def _error(job: str, note: Note | None, code: int, folder: Path) -> str | None:
    """An error that the run itself cannot report."""
    if code == 0:
        return (
            f"{job} succeeded, but its record is not in {folder}: put --output_dir on storage "
            "that all nodes share"
        )
    if note is None:
        return f"{job} failed before it began: is {os.getcwd()} there on its node?"
    return None


def _wall_s(note: Note | None, log: Path) -> float:
    """Seconds from the job's begin to its end by its note; without an end, to its last output."""
    if note is None:
        return 0.0
    try:
        ended = log.stat().st_mtime if note.ended is None else note.ended
    except OSError:
        return 0.0
    return max(0.0, ended - note.began)

"""Talking with SLURM: sbatch, squeue, sacct and scancel, each asked for as little as will do."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from harness.settings import UserError

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

"""A run of a sweep as its runner sees it, and what decides whether it is to be run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.launch.plan import Elastic, Job
from harness.launch.slurm.flags import Slurm
from harness.launch.ssh.hosts import Remote
from harness.records import FAILURES, FINISHED

# What becomes of a run here, beside the outcomes of its record.
WAITING, RUNNING, ELSEWHERE, SKIPPED = "waiting", "running", "elsewhere", "skipped"


@dataclass
class Options:
    """How a sweep is run; nothing here changes what is measured."""

    output_dir: str = "outputs"
    launcher: str = "local"
    oversubscribe: bool = False
    elastic: Elastic | None = None
    timeout_s: float | None = None
    rerun: str | None = None  # failed | all
    fail_fast: bool = False
    pack: bool = False
    cold: bool = False
    isolation: str = "warn"  # warn | error | off
    remote: Remote = field(default_factory=Remote)
    slurm: Slurm = field(default_factory=Slurm)


@dataclass
class State:
    """One run, as the runner and its screen see it."""

    job: Job
    state: str = WAITING
    reason: str | None = None
    began_s: float | None = None
    took_s: float | None = None
    known: bool = False  # had its outcome before this runner came to it

    @property
    def failed(self) -> bool:
        return self.state in FAILURES


def place_facts(launcher: str) -> dict[str, Any]:
    """What a record says of the place, before the place has its say."""
    return {
        "launcher": launcher,
        "emulator": None,
        "link": None,
        "processes_per_core": None,
    }


def launched(
    sweep: str, options: Options, found: Mapping[str, object], place: Mapping[str, object]
) -> dict[str, object]:
    """What stands under launch in a run's environment.json."""
    return {
        "sweep": sweep,
        **place,
        "start": "cold" if options.cold else "warm",
        "packed": options.pack,
        "cpu_busy_share": found.get("cpu_busy_share"),
        "gpu_processes": found.get("gpu_processes"),
    }


def settled(outcome: str | None, rerun: str | None) -> str | None:
    """The outcome of a run that is not to be run (again); None of one that is.

    What was interrupted goes on; what failed otherwise stays a result until somebody asks.
    """
    if outcome is None or outcome == "interrupted" or rerun == "all":
        return None
    if outcome != FINISHED and rerun == "failed":
        return None
    return outcome


def in_short(row: Mapping[str, object]) -> str:
    """Quality and speed of a row or a summary, on a line."""
    parts = [("accuracy", "accuracy {:.4f}"), ("train_samples_per_s", "{:,.0f} samples/s")]
    return ", ".join(form.format(row[name]) for name, form in parts if row.get(name) is not None)


def new_log(folder: Path, job: Job) -> Path:
    """A file of its own for what each start prints."""
    stem = job.path.replace("/", "_")
    number = 1
    while (log := folder / f"{stem}_{number}.txt").exists():
        number += 1
    return log

"""A SLURM cluster as a place where runs can run: each is a job, and waits its turn."""

from __future__ import annotations

from pathlib import Path

from harness.launch.places import Place
from harness.launch.plan import Job
from harness.launch.slurm import scripts
from harness.launch.state import State


class Cluster(Place):
    name = "slurm"
    in_turn = False

    def why_not(self, job: Job) -> str | None:
        return scripts.why_not(job, self.options.slurm)

    def dry_run(self, states: list[State], folder: Path) -> list[str]:
        return scripts.dry_run(states, self.options, folder)

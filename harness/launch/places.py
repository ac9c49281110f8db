"""Where runs can run. Each place says what it can host, prints its commands, and starts them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.launch.cold import Cold
from harness.launch.launcher import ROOT, Launcher, Node
from harness.launch.plan import Job
from harness.launch.state import SKIPPED, Options, State, place_facts
from harness.launch.warm import Warm

Devices = tuple[tuple[str, ...], ...]  # GPUs or cores, by node


class Place(ABC):
    """Where runs can run."""

    name: str
    in_turn = True  # one run after the other, in their order

    def __init__(self, options: Options) -> None:
        self.options = options

    @abstractmethod
    def why_not(self, job: Job) -> str | None:
        """Why it cannot host a run; None if it can."""

    @abstractmethod
    def dry_run(self, states: list[State], folder: Path) -> list[str]:
        """What would be run, to be pasted; what cannot run there as comments, with the reason."""

    def open(self, jobs: Sequence[Job]) -> None:
        """Make what these runs need, or say in one line why that cannot be."""

    def facts(self, job: Job) -> dict[str, Any]:
        """What the record of a run says of the place."""
        return place_facts(self.name)

    def close(self) -> None:
        """Leave nothing behind."""


class Machines(Place):
    """Nodes that this process starts runs on, one after the other."""

    here = True  # whether it is this machine that computes

    @abstractmethod
    def plan(self, job: Job, scripts_in: str) -> list[str]:
        """The commands that measure it, as a person would type them: pure text."""

    def dry_run(self, states: list[State], folder: Path) -> list[str]:
        scripts_in = "" if Path.cwd() == ROOT else f"{ROOT}/"
        lines = []
        for state in states:
            found = self.plan(state.job, scripts_in)
            if state.state == SKIPPED:
                found = [f"# skipped: {state.reason}", *(f"# {command}" for command in found)]
            lines += found
        return lines

    @abstractmethod
    def nodes(self) -> list[Node]:
        """Those that are open."""

    def start(self, log: Path) -> Launcher:
        kind = Cold if self.options.cold else Warm
        return kind(self.nodes(), self.environment, log)

    def prepare(self, job: Job) -> None:
        """Before a run: set its link."""

    def collect(self, job: Job) -> str | None:
        """After a run: fetch its record; or why that cannot be."""
        return None

    def free(self, job: Job, taken: set[str]) -> Devices | None:
        """Devices that no other run uses, by node; None: wait."""
        return ()

    def visible(self, devices: Devices) -> Devices:
        """GPUs that the ranks of each node are to see; empty: all."""
        return ()

    @property
    def environment(self) -> dict[str, str]:
        """Of every process on every node."""
        # With the store of the first attempt, those who start again would read old addresses.
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if self.options.elastic else {}

    def variables(self, job: Job) -> dict[str, str]:
        """Of the ranks of one run, besides."""
        return {}

"""Where runs can run. Each place says what it can host, prints its commands, and starts them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.core.links import Link
from harness.core.provenance import ROOT
from harness.launch import machine
from harness.launch.agents import Node, TorchrunAgent, WarmAgent
from harness.launch.launcher import Launcher
from harness.launch.machine import Machine, this_machine
from harness.launch.plan import SKIPPED, Job, Options, State, commands, place_facts

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
        agent_type = TorchrunAgent if self.options.cold else WarmAgent
        return Launcher(self.nodes(), self.environment, log, agent_type)

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


# ----
# Runs on this machine: one node, or one that stands for each peer of a run of peers.


class Local(Machines):
    name = "local"

    def __init__(self, options: Options, found: Machine | None = None) -> None:
        super().__init__(options)
        self.machine = found or this_machine()
        self.count = 1  # nodes

    def why_not(self, job: Job) -> str | None:
        if job.nodes > 1 and not job.peers:
            return f"needs {job.nodes} nodes: the local launcher has one (see --launcher)"
        if job.link != Link():
            return f"link {job.link}: the local launcher has no link that it could slow down"
        return machine.why_not(job, self.machine, self.options.oversubscribe)

    def plan(self, job: Job, scripts_in: str) -> list[str]:
        words = [f"{k}={v}" for k, v in self.environment.items()]
        gpus = self.machine.gpus
        if gpus and job.devices < len(gpus):
            words.insert(0, f"CUDA_VISIBLE_DEVICES={','.join(gpus[: job.devices])}")
        found = commands(job, scripts_in, self.options.elastic)
        return [" ".join([*words, command]).replace("$MASTER", "127.0.0.1") for command in found]

    def open(self, jobs: Sequence[Job]) -> None:
        self.count = max((job.nodes for job in jobs if job.peers), default=1)

    def nodes(self) -> list[Node]:
        return [Node() for _ in range(self.count)]

    def free(self, job: Job, taken: set[str]) -> Devices | None:
        """Cores may be shared by more processes than there are where that was asked for."""
        every = self.machine.gpus or tuple(str(core) for core in self.machine.cores)
        left = [device for device in every if device not in taken]
        if job.nodes * job.devices > len(every):
            return (every,) * job.nodes if not taken else None
        if job.nodes * job.devices > len(left):
            return None
        return tuple(
            tuple(left[node * job.devices : (node + 1) * job.devices]) for node in range(job.nodes)
        )

    def visible(self, devices: Devices) -> Devices:
        return devices if self.machine.gpus else ()

    @property
    def environment(self) -> dict[str, str]:
        """The same number of threads for every run: torchrun sets it only for several processes."""
        threads = os.environ.get("OMP_NUM_THREADS", str(self.machine.threads))
        return {"OMP_NUM_THREADS": threads, **super().environment}

    def facts(self, job: Job) -> dict[str, Any]:
        found = super().facts(job)
        if not self.machine.gpus:
            share = job.nodes * job.processes / len(self.machine.cores)
            found["processes_per_core"] = round(share, 3)
        return found

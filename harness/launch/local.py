"""Runs on this machine: one node, or one that stands for each peer of a run of peers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from harness.launch import machine
from harness.launch.launcher import Node
from harness.launch.machine import Machine, this_machine
from harness.launch.places import Devices, Machines
from harness.launch.plan import Job, commands
from harness.launch.state import Options
from harness.links import Link


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

"""Runs on emulated nodes: one machine stands in for several, with real sockets between them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from harness.core.links import Link
from harness.core.settings import UserError
from harness.launch import machine
from harness.launch.agents import Node
from harness.launch.machine import Machine
from harness.launch.netns import emulation
from harness.launch.netns.emulation import EmulatedNodes
from harness.launch.places import Local, Options
from harness.launch.plan import Job, script_of


class Netns(Local):
    name = "netns"

    def __init__(self, options: Options, found: Machine | None = None) -> None:
        super().__init__(options, found)
        if options.pack:
            raise UserError("--pack: runs side by side would share the links; leave it out")
        self.emulated: EmulatedNodes | None = None

    def why_not(self, job: Job) -> str | None:
        return machine.why_not(job, self.machine, self.options.oversubscribe)

    def plan(self, job: Job, scripts_in: str) -> list[str]:
        if self.options.elastic is not None:
            return super().plan(job, scripts_in)  # node by node: the first one has the store
        words = [f"{k}={v}" for k, v in self.environment.items()]
        link = [] if job.link == Link() else [f"--link={job.link}"]
        nodes = shlex.join(["python", "-m", "harness", "nodes", str(job.nodes), *link])
        torchrun = f"torchrun --nnodes={job.nodes} --nproc_per_node={job.processes}"
        return [" ".join([*words, nodes, "--", torchrun, script_of(job, scripts_in)])]

    def open(self, jobs: Sequence[Job]) -> None:
        hosted = [job.nodes for job in jobs if self.why_not(job) is None]
        if hosted:
            self.emulated = EmulatedNodes.open(max(hosted), Link())

    def nodes(self) -> list[Node]:
        assert self.emulated is not None
        return nodes_of(self.emulated)

    def prepare(self, job: Job) -> None:
        assert self.emulated is not None
        self.emulated.change(job.link, job.nodes)

    def variables(self, job: Job) -> dict[str, str]:
        """NCCL must not go past the link; devices of one node may reach each other directly."""
        if job.nodes == 1 or job.devices > 1:
            return {}
        return {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}

    def facts(self, job: Job) -> dict[str, Any]:
        assert self.emulated is not None
        link = None if job.link == Link() else job.link.facts(job.nodes)
        return {**super().facts(job), "emulator": self.emulated.emulator, "link": link}

    def close(self) -> None:
        if self.emulated is not None:
            self.emulated.close()


def nodes_of(emulated: EmulatedNodes) -> list[Node]:
    """Emulated nodes as launchers know them."""
    return [
        Node(node.name, node.address, tuple(emulated.enter(number)), _variables(node))
        for number, node in enumerate(emulated.nodes)
    ]


def _variables(node: emulation.Node) -> dict[str, str]:
    return {
        "GLOO_SOCKET_IFNAME": node.interface,
        "NCCL_SOCKET_IFNAME": node.interface,
        # Otherwise NCCL sees one machine and goes past the link, through its memory.
        "NCCL_HOSTID": node.name,
        "NCCL_IB_DISABLE": "1",
        # Each process would warn that no address here has a name.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }

"""Emulated nodes: one machine stands in for several, joined by links with set properties.

    with EmulatedNodes.open(2, link_of("20ms/200mbit")) as emulated:
        subprocess.run([*emulated.enter(0), "python", "-c", "..."])

Each node is a network namespace with one interface, link0, and an address that other nodes reach.
Files, users, host name, cores and memory are shared; only the network differs between nodes.
**Nodes have no access outside**: whatever training needs from the internet must be cached before,
and only enter() reaches a node from outside. The host name does not resolve inside, so use
addresses or interfaces (GLOO_SOCKET_IFNAME=link0, NCCL_SOCKET_IFNAME=link0, --master_addr).

Packets are carried by a relay in user space (relay.py). TCP is the machine's own, congestion
control included, with buffers of up to 64 MiB, so that it can fill 2 Gbit/s over 100 ms.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any, Self

from harness.core.links import Link, Network
from harness.core.process import GRACE_S
from harness.core.provenance import RELAY, ROOT
from harness.core.settings import UserError
from harness.launch.agents import Node
from harness.launch.netns.relay import INTERFACE, Counters, address

HOLDER = ["-m", "harness.launch.netns.holder"]
MOST_NODES = 200


class EmulatedNodes:
    """Open until closed; gone as soon as this process ends, however it ends.

    Open them from a thread that lives as long as the nodes: the kernel takes the end of that thread
    for the end of the owner.
    """

    def __init__(self, count: int) -> None:
        self.namespaces: list[str] = []
        self.holder = subprocess.Popen(
            [sys.executable, *HOLDER, str(os.getpid())],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches only the owner, which closes the holder
        )
        facts = self._request({"count": count})
        self.namespaces = facts["namespaces"]
        self.own_user: bool = facts["user"]  # whether the holder is in a user namespace of its own
        # TCP's inside the nodes; it determines the throughput of a lossy link.
        self.congestion_control: str = facts["congestion"]
        self.priority: str = facts["priority"]  # of the relay: realtime, nice -10 or usual
        self.nodes = [
            Node(f"node{n}", address(n), tuple(self.enter(n)), self._variables(n))
            for n in range(count)
        ]

    @classmethod
    def open(cls, count: int, network: Link | Network) -> Self:
        """Open nodes; UserError, in one line, if this machine or user cannot have any."""
        network.check(count)
        if not 1 <= count <= MOST_NODES:
            raise UserError(f"{count} emulated nodes: 1 to {MOST_NODES} are possible")
        if shutil.which("nsenter") is None:
            raise UserError("nsenter is missing: install util-linux")
        emulated = cls(count)
        try:
            emulated.change(network)
        except BaseException:
            emulated.close()
            raise
        return emulated

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _variables(self, node: int) -> dict[str, str]:
        variables = {
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            # Otherwise NCCL sees a single machine and bypasses the link through its memory.
            "NCCL_HOSTID": f"node{node}",
            "NCCL_IB_DISABLE": "1",
            # Otherwise each process warns that no address here has a name.
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        return variables | ({RELAY: str(self.holder.pid)} if node == 0 else {})

    def enter(self, node: int) -> list[str]:
        """The command prefix that runs a command inside a node, as the same user."""
        user = [f"--user=/proc/{self.holder.pid}/ns/user", "--preserve-credentials"]
        net = f"--net={self.namespaces[node]}"
        return ["nsenter", *(user if self.own_user else []), net, "--"]

    def change(self, network: Link | Network, count: int | None = None) -> None:
        """Set the links, also under running programs: of all nodes, or of the first `count`."""
        count = len(self.nodes) if count is None else count
        network.check(count)
        nodes = range(len(self.nodes))
        links = [
            [astuple(network.between(i, j) if max(i, j) < count else Link()) for j in nodes]
            for i in nodes
        ]
        self._request({"do": "change", "links": links})

    def cut(self, node: int) -> None:
        """Cut a node off, like a pulled cable: packets in flight are lost, nobody is notified."""
        self._request({"do": "cut", "node": node})

    def join(self, node: int) -> None:
        """Reconnect a node that was cut off."""
        self._request({"do": "join", "node": node})

    def counters(self) -> Counters:
        """The traffic between each pair of nodes since open()."""
        counters: Counters = self._request({"do": "counters"})
        return counters

    def close(self) -> None:
        """End the nodes and all processes inside them, including those in sessions of their own."""
        for pid in self._inside():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.holder.kill()
        with suppress(subprocess.TimeoutExpired):  # the kernel may take long to free its devices
            self.holder.wait(GRACE_S)
        for pipe in (self.holder.stdin, self.holder.stdout):
            assert pipe is not None
            with suppress(OSError):  # what is left to send goes to a holder that has ended
                pipe.close()

    def _inside(self) -> list[int]:
        """The processes inside the nodes that this user may see."""
        inodes, pids = set(), []
        with suppress(OSError):  # the holder is gone
            inodes = {os.stat(path).st_ino for path in self.namespaces}
        for path in Path("/proc").glob("[0-9]*/ns/net"):
            with suppress(OSError):
                if path.stat().st_ino in inodes:
                    pids.append(int(path.parts[2]))
        return pids

    def _request(self, request: dict[str, Any]) -> Any:
        assert self.holder.stdin is not None and self.holder.stdout is not None
        try:
            self.holder.stdin.write(json.dumps(request) + "\n")
            self.holder.stdin.flush()
            line = self.holder.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.close()
            raise UserError(f"the emulated network has ended (code {self.holder.returncode})")
        answer = json.loads(line)
        if "error" in answer:
            self.close()
            raise UserError(answer["error"])
        return answer["done"]

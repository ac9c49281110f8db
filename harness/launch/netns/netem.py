"""The wires between emulated nodes, in the kernel: a switch of veth pairs, netem at every port.

A packet from node i to node j waits at port j of the switch, in the class of its sender i. So the
interface inside a node stays plain, and TCP does not mistake packets in flight for unsent ones.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

from harness.core.links import Link
from harness.core.settings import UserError
from harness.launch.netns import (
    INTERFACE,
    LARGEST_HANDOVER,
    ONE_PACKET,
    PACKET,
    Matrix,
    address,
    queue_s,
)

Command = list[str]
# netem keeps the rate of an earlier call, and keeps packets in order only if it has one.
NO_LIMIT_MBIT = 100_000.0
MOST_PACKETS = 1_000_000
# tc knows no JSON for classes.
CLASS = re.compile(r"class htb 1:(\w+) .*\n Sent (\d+) bytes (\d+) pkt \(dropped (\d+),")


def wiring(namespaces: Sequence[str]) -> list[Command]:
    """The switch, in the namespace that it stands in: bridge, ports, a class for each sender."""
    nodes = range(len(namespaces))
    commands = ["ip link add bridge0 type bridge", "ip link set bridge0 up"]
    for node, namespace in enumerate(namespaces):
        port = f"port{node}"
        commands += [
            f"ip link add {port} type veth peer name {INTERFACE} netns {namespace}",
            f"ip link set {port} master bridge0",
            f"ip link set {port} up",
            f"tc qdisc add dev {port} root handle 1: htb",
        ]
        for sender in nodes:
            if sender != node:
                commands += [
                    f"tc class add dev {port} parent 1: classid 1:{sender + 1:x} "
                    "htb rate 100gbit quantum 65536",
                    f"tc filter add dev {port} parent 1: protocol ip prio 1 "
                    f"u32 match ip src {address(sender)}/32 flowid 1:{sender + 1:x}",
                ]
    return [command.split() for command in commands]


def shaping(links: Matrix) -> list[Command]:
    """What each class does to its packets; running it again changes the links under traffic."""
    return [
        f"tc qdisc replace dev port{node} parent 1:{sender + 1:x} handle {sender + 2:x}: "
        f"{discipline(links[sender][node], links[node][sender])}".split()
        for node in range(len(links))
        for sender in range(len(links))
        if sender != node
    ]


def discipline(link: Link, back: Link) -> str:
    """A link in the syntax of netem."""
    rate = link.rate_mbit or NO_LIMIT_MBIT
    packets = rate * 1e6 / 8 / PACKET * (queue_s(link, back) + link.delay_ms / 1e3)
    limit = min(MOST_PACKETS, round(packets) + 100)
    delay = f" delay {link.delay_ms:.6g}ms" if link.delay_ms else ""
    jitter = f" {link.jitter_ms:.6g}ms" if link.jitter_ms else ""
    loss = f" loss {link.loss * 100:.6g}%" if link.loss else ""
    return f"netem limit {limit}{delay}{jitter}{loss} rate {rate * 1e6:.0f}bit"


def handover(links: Sequence[Link]) -> tuple[int, int]:
    """netem counts its queue in packets and drops whole ones: they must be single packets."""
    single = any(link.loss or link.rate_mbit for link in links)
    return ONE_PACKET if single else LARGEST_HANDOVER


def has_netem() -> bool:
    """Whether the kernel has it: tried on the loopback of this process's new namespace."""
    try:
        command = ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def run(command: Command) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(f"emulated network: {' '.join(command)}: {reason}")
    return done.stdout


class Switch:
    """Carries the packets in the kernel. Everything happens in the switch's namespace."""

    def __init__(self, namespaces: Sequence[str]) -> None:
        self.count = len(namespaces)
        for command in wiring(namespaces):
            run(command)

    def change(self, links: Matrix) -> None:
        for command in shaping(links):
            run(command)

    def cut(self, node: int) -> None:
        run(["ip", "link", "set", f"port{node}", "down"])

    def join(self, node: int) -> None:
        run(["ip", "link", "set", f"port{node}", "up"])

    def counters(self) -> list[list[dict[str, int]]]:
        """By sender and receiver: what has passed, and what was dropped."""
        counters = [[{"bytes": 0, "packets": 0, "lost": 0} for _ in range(self.count)]
                    for _ in range(self.count)]  # fmt: skip
        for node in range(self.count):
            listed = run(f"tc -s class show dev port{node}".split())
            for sender, *values in CLASS.findall(listed):
                named = zip(("bytes", "packets", "lost"), map(int, values), strict=True)
                counters[int(sender, 16) - 1][node] = dict(named)
        return counters

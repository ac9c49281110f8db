"""What the cores of a machine did, and how much of it was for this run."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from harness.core.process import text_of

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a machine
NETWORK = "/proc/self/ns/net"  # a link that names the network namespace
LEAST_S = 0.2  # of an interval: the kernel counts processor time in hundredths of a second
IDLE = ("idle", "iowait")
INSIDE_OTHERS = ("guest", "guest_nice")  # counted in user and nice already


class Processors:
    """Processor time since the last edge: of the whole machine, and of these processes."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = pids
        self.before = self.last = self._read()

    def _read(self) -> tuple[float, float, float]:
        return time.monotonic(), _busy_s(), _of_trees_s(self.pids)

    def edge(self) -> None:
        """Begin another interval at the last reading."""
        self.before = self.last

    def since_edge(self) -> dict[str, Any]:
        self.last = self._read()
        seconds, busy_s, own_s = (b - a for a, b in zip(self.before, self.last, strict=True))
        return {
            "machine": _machine(),
            "network": _network(),
            "core_s": seconds * (psutil.cpu_count() or 1),
            "busy_s": busy_s,
            "own_s": own_s,
            "seconds": seconds,
        }


def others_share(nodes: Iterable[dict[str, Any]]) -> float | None:
    """The share of the cores' time that other programs used, on the machine where it was largest.

    Emulated nodes share one machine, and the work of each of them is not that of others. None if
    the time is too short to tell, and where a clock was set back.
    """
    machines: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for node in nodes:
        machines[node["machine"]].append(node)
    shares = []
    for of_machine in machines.values():
        longest = max(of_machine, key=lambda node: node["seconds"])
        if longest["seconds"] < LEAST_S or longest["busy_s"] < 0:
            return None
        own_s = sum(node["own_s"] for node in of_machine)
        shares.append(min(max(longest["busy_s"] - own_s, 0.0) / longest["core_s"], 1.0))
    return max(shares, default=None)


def _busy_s() -> float:
    """Busy time of all cores together, with the time that a hypervisor gave to others."""
    times = psutil.cpu_times()._asdict()
    return float(sum(s for name, s in times.items() if name not in (*IDLE, *INSIDE_OTHERS)))


def _of_trees_s(pids: Sequence[int]) -> float:
    """Processor time of these processes and their descendants; an ended one is in its parent."""
    children = defaultdict(list)
    processes = {process.pid: process for process in psutil.process_iter()}
    for process in processes.values():
        with suppress(psutil.Error):
            children[process.ppid()].append(process.pid)
    used_s, left, counted = 0.0, list(pids), set[int]()
    while left:
        if (pid := left.pop()) in counted:
            continue
        counted.add(pid)
        left += children[pid]
        with suppress(psutil.Error, KeyError):
            used_s += sum(processes[pid].cpu_times()[:4])  # its own, and of children that ended
    return used_s


def _machine() -> str:
    """An identifier that tells machines apart and does not name them."""
    return _hash(text_of(BOOT_ID) or socket.gethostname())


def _network() -> str:
    """The same for network namespaces; where there are none, a machine has one network."""
    try:
        namespace = os.readlink(NETWORK)
    except OSError:
        namespace = ""
    return _hash(_machine() + namespace)


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:12]

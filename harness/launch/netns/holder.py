"""The process that holds emulated nodes and carries their packets.

    python -m harness.launch.netns.holder OWNER < requests > answers      a line of JSON each

It ends with its owner, kill -9 included, and with it everything that it holds: namespaces and
devices have no names outside it, so nothing is ever left to be cleaned up. EmulatedNodes
(emulation.py) is the one that talks to it.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from harness.launch.netns import namespaces, netem, relay, tun
from harness.launch.netns.shape import INTERFACE, Matrix, address
from harness.links import Link
from harness.parent import end_with_parent
from harness.settings import UserError

SET_TIMER_SLACK = 29  # PR_SET_TIMERSLACK of linux/prctl.h
REALTIME, NICE = 1, -10


class Nodes:
    """Namespaces with their interfaces, and what carries packets between them."""

    def __init__(self, count: int) -> None:
        self.user = namespaces.become_owner()
        self.carrier: relay.Relay | netem.Switch
        # Raised privileges of a user namespace end with exec, so that tc and ip would have none.
        if not self.user and netem.has_netem():
            self.emulator, self.held, self.carrier = "netem", *_switched(count)
            self.handover = netem.handover
        else:
            self.emulator, self.held, self.carrier = "relay", *_relayed(count)
            self.handover = relay.handover

    def change(self, links: Matrix) -> None:
        self.carrier.change(links)
        for node, row in enumerate(links):
            others = [link for other, link in enumerate(row) if other != node]
            self._inside(node, partial(namespaces.set_handover, *self.handover(others)))

    def answer(self, request: dict[str, Any]) -> Any:
        match request["do"]:
            case "change":
                self.change([[Link(*link) for link in row] for row in request["links"]])
            case "cut":
                self.carrier.cut(request["node"])
            case "join":
                self.carrier.join(request["node"])
            case "counters":
                return self.carrier.counters()
        return None

    def facts(self) -> dict[str, Any]:
        return {
            "emulator": self.emulator,
            "user": self.user,
            "namespaces": [f"/proc/{os.getpid()}/fd/{held}" for held in self.held],
            "congestion": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
            "priority": _hurry(),
        }

    def run(self, control: int, answer: Callable[[], bool]) -> None:
        if isinstance(self.carrier, relay.Relay):
            self.carrier.run(control, answer)
        while answer():
            pass

    def _inside(self, node: int, do: Callable[[], None]) -> None:
        here = os.open("/proc/self/ns/net", os.O_RDONLY)
        try:
            namespaces.enter(self.held[node])
            do()
        finally:
            namespaces.enter(here)
            os.close(here)


def _relayed(count: int) -> tuple[list[int], relay.Relay]:
    held, devices = [], []
    for node in range(count):
        held.append(namespaces.new_network())
        devices.append(tun.open_device(INTERFACE))
        namespaces.prepare_node(address(node))
    return held, relay.Relay(devices)


def _switched(count: int) -> tuple[list[int], netem.Switch]:
    held = [namespaces.new_network() for _ in range(count)]
    switch = namespaces.new_network()
    carrier = netem.Switch([f"/proc/{os.getpid()}/fd/{fd}" for fd in held])
    for node, namespace in enumerate(held):
        namespaces.enter(namespace)
        namespaces.prepare_node(address(node))
    namespaces.enter(switch)
    return held, carrier


def _hurry() -> str:
    """Packets are late when the trainings keep every core busy and this process waits for one."""
    ctypes.CDLL(None).prctl(SET_TIMER_SLACK, 1, 0, 0, 0)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(REALTIME))
        return "realtime"
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
        return f"nice {NICE}"
    return "usual"


def main(argv: list[str]) -> int:
    try:
        nodes = Nodes(_read()["count"])
        # Here, because taking a user namespace may cancel it.
        end_with_parent(int(argv[0]))
        _say({"done": nodes.facts()})
    except (UserError, OSError) as error:
        _say({"error": f"no emulated nodes here: {error}"})
        return 2

    def answer() -> bool:
        request = _read()
        if request is None:
            return False
        try:
            _say({"done": nodes.answer(request)})
        except (UserError, OSError) as error:
            _say({"error": str(error)})
        return True

    nodes.run(sys.stdin.fileno(), answer)
    return 0


def _read() -> Any:
    """The next request, None at the end. One at a time: the owner waits for each answer."""
    line = b""
    while not line.endswith(b"\n"):
        select.select([0], (), ())
        part = os.read(0, 65536)
        if not part:
            return None
        line += part
    return json.loads(line)


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

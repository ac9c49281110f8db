"""The process that holds emulated nodes and carries their packets; emulation.py talks to it.

    python -m harness.launch.netns.holder OWNER < requests > answers      a line of JSON each

It ends with its owner, kill -9 included, and everything it holds ends with it: its network
namespaces and devices have no names, so there is never anything to clean up. Python 3.11 has
neither os.unshare nor os.setns, so the C library is called.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import select
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from harness.core.links import Link
from harness.core.process import end_with_parent
from harness.core.settings import UserError
from harness.launch.netns.relay import (
    INTERFACE,
    Matrix,
    Relay,
    address,
    open_device,
)

NEW_USER = 0x10000000  # CLONE_NEWUSER of linux/sched.h
NEW_NET = 0x40000000  # CLONE_NEWNET
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C  # linux/sockios.h
SIOCGIFINDEX = 0x8933
UP_AND_RUNNING = 0x1 | 0x40  # IFF_UP, IFF_RUNNING
RTM_NEWLINK, ACKNOWLEDGE = 16, 0x1 | 0x4  # NLM_F_REQUEST, NLM_F_ACK
IFLA_TXQLEN, IFLA_GSO_MAX_SEGS, IFLA_GSO_MAX_SIZE = 13, 40, 41  # linux/if_link.h
PREFIX = 24
QUEUE = 10_000  # packets queued before the emulator, which counts those that wait for the link
SET_TIMER_SLACK = 29  # PR_SET_TIMERSLACK of linux/prctl.h
REALTIME, NICE = 1, -10
# Windows must hold the data in flight: 64 MiB is 2 Gbit/s over a round trip of 0.25 s, and over
# half of that at a receiver, whose window is half of its buffer.
TCP = {
    "ipv4/tcp_rmem": "4096 1048576 67108864",
    "ipv4/tcp_wmem": "4096 1048576 67108864",
    # Metrics that TCP remembers of a link are wrong once the link has been changed.
    "ipv4/tcp_no_metrics_save": "1",
}


def new_network() -> int:
    """Move this process into a new network namespace; the returned descriptor keeps it alive."""
    _call("unshare", NEW_NET)
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def enter(namespace: int) -> None:
    _call("setns", namespace, NEW_NET)


def become_owner() -> bool:
    """Gain permission to create namespaces; True if that required a user namespace of our own."""
    if sys.platform != "linux":
        raise UserError("emulated nodes are network namespaces, which only Linux has")
    try:
        _call("unshare", NEW_NET)
        return False
    except PermissionError:
        pass
    uid, gid = os.geteuid(), os.getegid()
    try:
        _call("unshare", NEW_USER)
        # User IDs and file owners stay the same: the namespace only grants rights over networks.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
        _call("unshare", NEW_NET)
    except OSError as error:
        raise UserError(
            f"no permission to make network namespaces ({error.strerror}): start as root, or allow "
            "users to make them: sysctl -w user.max_user_namespaces=10000 "
            "kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0 "
            "(those of the three that the system has)"
        ) from None
    return True


def raise_interface(name: str, node_address: str | None = None) -> None:
    """Bring up an interface of the current namespace, with an address if one is given."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        if node_address is not None:
            mask = socket.inet_ntoa(struct.pack("!I", 0xFFFFFFFF << (32 - PREFIX) & 0xFFFFFFFF))
            for request, value in ((SIOCSIFADDR, node_address), (SIOCSIFNETMASK, mask)):
                packed = struct.pack("HH4s", socket.AF_INET, 0, socket.inet_aton(value))
                _set(sock, request, name, packed)
        _set(sock, SIOCSIFFLAGS, name, struct.pack("H", UP_AND_RUNNING))


def prepare_node(node_address: str) -> None:
    """Set up loopback and interface of a node, with TCP buffers for a long, fast link."""
    raise_interface("lo")
    # IPv6 traffic of the kernel itself is no training traffic. Some kernels have no IPv6.
    write_settings({f"ipv6/conf/{INTERFACE}/disable_ipv6": "1", **TCP})
    raise_interface(INTERFACE, node_address)
    _set_link({IFLA_TXQLEN: QUEUE})


def write_settings(values: dict[str, str]) -> None:
    for name, value in values.items():
        with suppress(FileNotFoundError):
            Path("/proc/sys/net", name).write_text(value)


def set_handover(segments: int, size: int) -> None:
    """Limit what this node's kernel may hand over at once as one packet of many segments."""
    _set_link({IFLA_GSO_MAX_SEGS: segments, IFLA_GSO_MAX_SIZE: size})


def _set_link(values: dict[int, int]) -> None:
    """Set link attributes by netlink, allowed in a user namespace where ioctl is refused."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = fcntl.ioctl(sock, SIOCGIFINDEX, struct.pack("16s24x", INTERFACE.encode()))
    (index,) = struct.unpack_from("i", request, 16)
    message = struct.pack("BxHiII", socket.AF_UNSPEC, 0, index, 0, 0)
    message += b"".join(struct.pack("HHI", 8, name, value) for name, value in values.items())
    header = struct.pack("IHHII", 16 + len(message), RTM_NEWLINK, ACKNOWLEDGE, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as route:
        route.send(header + message)
        (code,) = struct.unpack_from("i", route.recv(4096), 16)
    if code:
        raise OSError(-code, os.strerror(-code))


def _set(sock: socket.socket, request: int, interface: str, value: bytes) -> None:
    fcntl.ioctl(sock, request, struct.pack("16s24s", interface.encode(), value))


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        code = ctypes.get_errno() or errno.EPERM
        raise OSError(code, os.strerror(code))


class Namespaces:
    """Namespaces with their interfaces, and the relay of packets between them."""

    def __init__(self, count: int) -> None:
        self.user = become_owner()
        self.held, devices = list[int](), []
        for node in range(count):
            self.held.append(new_network())
            devices.append(open_device(INTERFACE))
            prepare_node(address(node))
        self.relay = Relay(devices)

    def change(self, links: Matrix) -> None:
        self.relay.change(links)
        for node, row in enumerate(links):
            others = [link for other, link in enumerate(row) if other != node]
            self._inside(node, partial(set_handover, *self.relay.handover(others)))

    def answer(self, request: dict[str, Any]) -> Any:
        match request["do"]:
            case "change":
                self.change([[Link(*link) for link in row] for row in request["links"]])
            case "cut":
                self.relay.cut(request["node"])
            case "join":
                self.relay.join(request["node"])
            case "counters":
                return self.relay.counters()
        return None

    def facts(self) -> dict[str, Any]:
        return {
            "user": self.user,
            "namespaces": [f"/proc/{os.getpid()}/fd/{held}" for held in self.held],
            "congestion": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
            "priority": raise_priority(),
        }

    def _inside(self, node: int, do: Callable[[], None]) -> None:
        here = os.open("/proc/self/ns/net", os.O_RDONLY)
        try:
            enter(self.held[node])
            do()
        finally:
            enter(here)
            os.close(here)


def raise_priority() -> str:
    """Get priority over training, which keeps every core busy: packets would be late otherwise."""
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
        nodes = Namespaces(_receive()["count"])
        # Set only now: entering a user namespace may cancel it.
        end_with_parent(int(argv[0]))
        _send({"done": nodes.facts()})
    except (UserError, OSError) as error:
        _send({"error": f"no emulated nodes here: {error}"})
        return 2

    def answer() -> bool:
        request = _receive()
        if request is None:
            return False
        try:
            _send({"done": nodes.answer(request)})
        except (UserError, OSError) as error:
            _send({"error": str(error)})
        return True

    nodes.relay.run(sys.stdin.fileno(), answer)
    return 0


def _receive() -> Any:
    """The next request; None at end of input. The owner sends one and awaits its answer."""
    line = b""
    while not line.endswith(b"\n"):
        select.select([0], (), ())
        part = os.read(0, 65536)
        if not part:
            return None
        line += part
    return json.loads(line)


def _send(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

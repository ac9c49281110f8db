"""Network namespaces without names: they live as long as a process holds them, and no longer.

Python 3.11 has neither os.unshare nor os.setns, so the C library is called.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

from harness.launch.netns.shape import INTERFACE, QUEUE
from harness.settings import UserError

NEW_USER = 0x10000000  # CLONE_NEWUSER of linux/sched.h
NEW_NET = 0x40000000  # CLONE_NEWNET
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C  # linux/sockios.h
SIOCGIFINDEX = 0x8933
UP_AND_RUNNING = 0x1 | 0x40  # IFF_UP, IFF_RUNNING
RTM_NEWLINK, ACKNOWLEDGE = 16, 0x1 | 0x4  # NLM_F_REQUEST, NLM_F_ACK
IFLA_TXQLEN, IFLA_GSO_MAX_SEGS, IFLA_GSO_MAX_SIZE = 13, 40, 41  # linux/if_link.h
PREFIX = 24

# Windows must hold what is under way: 64 MiB is 2 Gbit/s over a round trip of 0.25 s, and a
# receiver's window is half of its buffer.
TCP = {
    "ipv4/tcp_rmem": "4096 1048576 67108864",
    "ipv4/tcp_wmem": "4096 1048576 67108864",
    # What TCP remembers of a link must not be taken for true when the link has been changed.
    "ipv4/tcp_no_metrics_save": "1",
}


def new_network() -> int:
    """Move this process into a fresh network namespace; the descriptor keeps it alive."""
    _call("unshare", NEW_NET)
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def enter(namespace: int) -> None:
    _call("setns", namespace, NEW_NET)


def become_owner() -> bool:
    """What it takes to make namespaces; True if it took a user namespace of our own."""
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
        # Nobody changes: files belong to whom they belonged, only networks may be made.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
        _call("unshare", NEW_NET)
    except OSError as error:
        raise UserError(
            f"no permission to make network namespaces ({error.strerror}): start as root, or let "
            "users make them: sysctl -w user.max_user_namespaces=10000 "
            "kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0 "
            "(those of the three that the system knows)"
        ) from None
    return True


def raise_interface(name: str, node_address: str | None = None) -> None:
    """In the namespace that this process is in: up, with an address if it needs one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        if node_address is not None:
            mask = socket.inet_ntoa(struct.pack("!I", 0xFFFFFFFF << (32 - PREFIX) & 0xFFFFFFFF))
            for request, value in ((SIOCSIFADDR, node_address), (SIOCSIFNETMASK, mask)):
                packed = struct.pack("HH4s", socket.AF_INET, 0, socket.inet_aton(value))
                _set(sock, request, name, packed)
        _set(sock, SIOCSIFFLAGS, name, struct.pack("H", UP_AND_RUNNING))


def prepare_node(node_address: str) -> None:
    """Loopback and interface, and a TCP that can fill a long fast link."""
    raise_interface("lo")
    # The kernel's own chatter is no traffic of a training. Some kernels have no IPv6 at all.
    write_settings({f"ipv6/conf/{INTERFACE}/disable_ipv6": "1", **TCP})
    raise_interface(INTERFACE, node_address)
    _set_link({IFLA_TXQLEN: QUEUE})


def write_settings(values: dict[str, str]) -> None:
    for name, value in values.items():
        with suppress(FileNotFoundError):
            Path("/proc/sys/net", name).write_text(value)


def set_handover(segments: int, size: int) -> None:
    """How much this node's kernel may hand over at once as one packet of many segments."""
    _set_link({IFLA_GSO_MAX_SEGS: segments, IFLA_GSO_MAX_SIZE: size})


def _set_link(values: dict[int, int]) -> None:
    """By netlink, which is open to the owner of a user namespace where ioctl is not."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        found = fcntl.ioctl(sock, SIOCGIFINDEX, struct.pack("16s24x", INTERFACE.encode()))
    (index,) = struct.unpack_from("i", found, 16)
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

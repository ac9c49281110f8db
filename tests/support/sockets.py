"""Who listens: the sockets of all processes that a test has started, and the words of their
command lines, looked at several times a second.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil

LISTENS = "0A"  # in /proc/net/tcp
SECRET_ID = re.compile(r"\b[0-9a-f]{32}\b")  # as the ids of runs are


@dataclass
class Seen:
    addresses: set[str] = field(default_factory=set)  # of sockets that listen
    looks: int = 0
    secrets: set[str] = field(default_factory=set)  # command lines with the id of a run


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@contextmanager
def watched(processes: Callable[[], list[psutil.Process]] = children) -> Iterator[Seen]:
    """What these processes show for as long as the block lasts."""
    seen, over = Seen(), threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            for process in processes():
                with suppress(OSError, psutil.Error):  # it has ended
                    seen.addresses |= listening(process.pid)
                    words = " ".join(process.cmdline())
                    seen.secrets |= {words} if SECRET_ID.search(words) else set()
            seen.looks += 1

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def listening(pid: int) -> set[str]:
    """The addresses on which a process listens, in its own network."""
    return {address for address, _ in places(pid)}


def answers_at(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def places(pid: int) -> set[tuple[str, int]]:
    """Their ports, too."""
    folder = Path("/proc", str(pid))
    inodes = set()
    for file in (folder / "fd").iterdir():
        with suppress(OSError):
            inodes.add(os.readlink(file))
    found = set()
    for name in ("tcp", "tcp6"):
        for line in (folder / "net" / name).read_text().splitlines()[1:]:
            local, state, inode = (line.split()[i] for i in (1, 3, 9))
            if state == LISTENS and f"socket:[{inode}]" in inodes:
                address, _, port = local.partition(":")
                found.add((_address(address), int(port, 16)))
    return found


def _address(hexadecimal: str) -> str:
    """As people write it; the kernel prints words of four bytes in its own order."""
    words = [hexadecimal[i : i + 8] for i in range(0, len(hexadecimal), 8)]
    packed = b"".join(bytes.fromhex(word)[::-1] for word in words)
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    address = ip_address(socket.inet_ntop(family, packed))
    return str(getattr(address, "ipv4_mapped", None) or address)


class Planted:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)

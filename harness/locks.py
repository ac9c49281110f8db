"""Locks that a dead process cannot hold: the kernel gives them back when their holder ends.

So there is no stale lock to recognise. They work between processes of one machine, and between
machines where the file system passes flock on, as NFS does.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from pathlib import Path


class Lock:
    """One file under flock. The file stays when the lock is given back: removing it would race."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: int | None = None

    def take(self, wait_s: float = 0.0) -> bool:
        """True when it is held now; waits for another holder at most this long."""
        until = time.monotonic() + wait_s
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    os.close(file)
                    return False
                time.sleep(0.05)
            except OSError as error:
                print(
                    f"harness: warning: {self.path.parent} is on a file system without locks "
                    f"({error.strerror}): let only one process at a time write there",
                    file=sys.stderr,
                )
                break
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        self.file = file
        return True

    def holder(self) -> str:
        """The process that took it last, for a message."""
        try:
            return f"process {int(self.path.read_text())}"
        except (OSError, ValueError):
            return "another process"

    def release(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None

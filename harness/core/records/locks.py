"""Locks that a dead process cannot hold: the kernel gives them back when their holder ends.

So there is no stale lock to recognise. They work between processes of one machine, and between
machines where the file system passes flock on, as NFS does.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path

from harness.core.settings import UserError


def is_held(path: Path) -> bool:
    """Whether a process of this machine holds the lock now, by /proc/locks.

    Looked up and not tried: a lock that is tried is held for that moment, and its owner refused.
    """
    try:
        number = path.stat().st_ino
        held = Path("/proc/locks").read_text("utf-8")
    except OSError:
        return False
    return re.search(rf": FLOCK .*:{number} 0 EOF$", held, re.MULTILINE) is not None


def is_free(path: Path, wait_s: float = 0.0) -> bool:
    """Whether no process, of any machine, holds the lock: it is tried, and held for that moment."""
    lock = Lock(path)
    free = lock.take(wait_s)
    lock.release()
    return free


def _no_folder(path: Path) -> bool:
    """Whether something else has this name: a file, or a link to nothing."""
    try:
        kind = path.lstat().st_mode
    except OSError:
        return False
    return not (stat.S_ISDIR(kind) or (stat.S_ISLNK(kind) and path.exists()))


# Process and descriptor of what is held. The text of a lock file does not tell: in each container
# the first process has the number 1.
_held: set[tuple[int, int]] = set()


class Lock:
    """A file under flock; it exists while it is held, and after its holder was killed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: int | None = None
        self.made: list[Path] = []  # folders that were not there before

    def take(self, wait_s: float = 0.0) -> bool:
        """True when it is held now; waits for another holder at most this long."""
        until = time.monotonic() + wait_s
        while not self._try():
            if time.monotonic() >= until:
                self._tidy()
                return False
            time.sleep(0.05)
        assert self.file is not None
        with suppress(OSError):  # it is only for messages, and the disk may be full
            os.ftruncate(self.file, 0)
            os.pwrite(self.file, f"{os.getpid()}\n".encode(), 0)
        _held.add((os.getpid(), self.file))
        return True

    def take_again(self, wait_s: float = 0.0) -> bool:
        """As take(), but also true if this process already holds it from an earlier run."""
        own = [file for process, file in _held if process == os.getpid()]
        mine = any(map(self._is_at_its_place, own))
        return self.take(0 if mine else wait_s) or mine

    def holder(self) -> str:
        """The process that took it last, for a message."""
        try:
            return f"process {int(self.path.read_text())}"
        except (OSError, ValueError):
            return "another process"

    def release(self) -> None:
        """Give it back; nothing is left of it, unless its disk has become read-only."""
        if self.file is None:
            return
        with suppress(OSError):
            self.path.unlink()
        self._tidy()
        _held.discard((os.getpid(), self.file))
        os.close(self.file)
        self.file = None

    def _try(self) -> bool:
        self.made += [p for p in self.path.parents if not p.exists() and p not in self.made]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)  # less the umask
        except (FileNotFoundError, FileExistsError, NotADirectoryError):
            if (odd := next(filter(_no_folder, self.path.parents), None)) is not None:
                raise UserError(f"{self.path} cannot be locked: {odd} is no folder") from None
            return False  # its folder has just been tidied away by somebody else
        except OSError as error:
            others = ": the folder, or a lock in it, may belong to another user"
            forbidden = error.errno in (errno.EACCES, errno.EPERM)
            why = f"({error.strerror}){others if forbidden else ''}"
            raise UserError(f"{self.path} cannot be locked {why}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        except OSError as error:
            print(
                f"harness: warning: {self.path.parent} is on a file system without locks "
                f"({error.strerror}): let only one process at a time write there",
                file=sys.stderr,
            )
        if not self._is_at_its_place(file):
            os.close(file)
            return False
        self.file = file
        return True

    def _is_at_its_place(self, file: int) -> bool:
        """Whether the path still names the locked file: a lock on a removed file is useless."""
        try:
            return os.path.samestat(os.fstat(file), self.path.stat())
        except FileNotFoundError:
            return False

    def _tidy(self) -> None:
        for folder in (self.path.parent, *self.made):  # the innermost first
            with suppress(OSError):
                folder.rmdir()

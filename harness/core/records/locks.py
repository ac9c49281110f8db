"""Locks that a dead process cannot hold: the kernel releases them when the holder ends.

So no lock can be stale. They work between processes of one machine, and between machines whose
file system supports flock across them, as NFS does.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from contextlib import suppress
from pathlib import Path

from harness.core.process import warn
from harness.core.settings import UserError


def is_held(path: Path) -> bool:
    """Whether a process of this machine holds the lock now, according to /proc/locks.

    The lock is not tried: trying holds it for a moment, in which its owner would be refused.
    Device and inode must both be those of the file. Where /proc does not say how the kernel names
    them (in a chroot, and of Linux before 5.14), they are those of stat, which differ on btrfs and
    overlayfs: a lock that is held there is then not seen.
    """
    if not (held := _proc("locks")):  # nothing is locked, or this is no Linux
        return False
    with suppress(OSError):
        name = _name_in_locks(path)
        return re.search(rf": FLOCK .* {name} 0 EOF$", held, re.MULTILINE) is not None
    return False


def _proc(name: str) -> str:
    """A file of /proc; empty where there is none."""
    try:
        return Path("/proc", name).read_text("utf-8", "replace")
    except OSError:
        return ""


def _name_in_locks(path: Path) -> str:
    """MAJOR:MINOR:INODE of a file as in /proc/locks: the device is that of its mount."""
    file = os.open(path, os.O_PATH)
    try:
        at = os.fstat(file)
        open_file = dict(re.findall(r"^(mnt_id|ino):\s*(\d+)$", _proc(f"self/fdinfo/{file}"), re.M))
    finally:
        os.close(file)
    inode, device = open_file.get("ino", at.st_ino), (os.major(at.st_dev), os.minor(at.st_dev))
    for line in _proc("self/mountinfo").splitlines():
        mount, _, numbers = line.split()[:3]
        if mount == open_file.get("mnt_id"):
            major, _, minor = numbers.partition(":")
            device = int(major), int(minor)
    return f"{device[0]:02x}:{device[1]:02x}:{inode}"


def is_free(path: Path, wait_s: float = 0.0) -> bool:
    """Whether no process of any machine holds the lock; the lock is tried, so briefly held."""
    lock = Lock(path)
    free = lock.take(wait_s)
    lock.release()
    return free


def _no_folder(path: Path) -> bool:
    """Whether a path exists but is no folder: a file, or a broken link."""
    try:
        kind = path.lstat().st_mode
    except OSError:
        return False
    return not (stat.S_ISDIR(kind) or (stat.S_ISLNK(kind) and path.exists()))


# (process, descriptor) of locks held here. The text of a lock file cannot tell: in each container
# the first process has the number 1.
_held: set[tuple[int, int]] = set()


class Lock:
    """A file under flock; it exists while it is held, and after its holder was killed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: int | None = None
        self.made: list[Path] = []  # folders that take() created

    def take(self, wait_s: float = 0.0) -> bool:
        """Take the lock, waiting at most this long for another holder; True if it is held now."""
        until = time.monotonic() + wait_s
        while not self._try():
            if time.monotonic() >= until:
                self._tidy()
                return False
            time.sleep(0.05)
        assert self.file is not None
        with suppress(OSError):  # the text is only for messages, and the disk may be full
            os.ftruncate(self.file, 0)
            os.pwrite(self.file, f"{os.getpid()}\n".encode(), 0)
        _held.add((os.getpid(), self.file))
        return True

    def take_again(self, wait_s: float = 0.0) -> bool:
        """Like take(), but also true if this process holds the lock from an earlier run."""
        own = [file for process, file in _held if process == os.getpid()]
        mine = any(map(self._is_at_its_place, own))
        return self.take(0 if mine else wait_s) or mine

    def holder(self) -> str:
        """The process that took the lock last, for a message."""
        try:
            return f"process {int(self.path.read_text())}"
        except (OSError, ValueError):
            return "another process"

    def release(self) -> None:
        """Release the lock; its file and folders disappear unless the disk has become read-only."""
        if self.file is None:
            return
        with suppress(OSError):
            self.path.unlink()
        self._tidy()
        _held.discard((os.getpid(), self.file))
        os.close(self.file)
        self.file = None

    def leave(self) -> None:
        """Leave the lock to a process that was given its descriptor, and holds it until it ends."""
        if self.file is not None:
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
                raise UserError(f"{self.path} cannot be locked: {odd} is not a folder") from None
            return False  # somebody else has just removed its folder
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
            warn(
                f"{self.path.parent} is on a file system without locks ({error.strerror}): let "
                "only one process at a time write there"
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

"""A small disk of its own that really fails, at the moment of a chosen write below a folder."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.power import WRITES


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


@contextmanager
def small_disk(disk: Path, size: str = "4m", names: int = 300) -> Iterator[None]:
    disk.mkdir(parents=True, exist_ok=True)
    mount("-t", "tmpfs", "-o", f"size={size},nr_inodes={names}", "tmpfs", str(disk))
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path) -> None:
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def take_names(disk: Path) -> None:
    (disk / "fillers").mkdir()
    with suppress(OSError):
        for number in range(10**6):
            (disk / "fillers" / str(number)).touch()


def protect(disk: Path) -> None:
    """Another mount of it over itself: one with open files cannot be made read-only."""
    mount("--bind", str(disk), str(disk))
    mount("-o", "remount,bind,ro", str(disk))


def release(disk: Path) -> None:
    if os.statvfs(disk).f_flag & os.ST_RDONLY:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    (disk / "filler").unlink(missing_ok=True)
    shutil.rmtree(disk / "fillers", ignore_errors=True)


# By name: what happens to the disk, and how the line begins that says it.
FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "full": (fill, "no space on "),
    "no names": (take_names, "no space on "),
    "read-only": (protect, "nothing can be written to the read-only "),
}


class Writes:
    """Counts the files and folders that Python opens, makes, renames or removes below a folder, and
    acts before the chosen one. Native code writes between two of them.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.count = root, 0
        self.at, self.act = -1, lambda: None
        self.busy = False
        sys.addaudithook(self._audit)  # for ever: the process is one of its own

    def arm(self, at: int, act: Callable[[], None]) -> None:
        self.count, self.at, self.act = 0, at, act

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self.busy or event not in WRITES or not isinstance(args[0], (str, os.PathLike)):
            return
        reads = event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if reads or not Path(os.fsdecode(args[0])).is_relative_to(self.root):
            return
        self.count += 1
        if self.count == self.at:
            self.busy = True
            try:
                self.act()
            finally:
                self.busy = False


@contextmanager
def failing(writes: Writes, disk: Path, fault: str, at: int) -> Iterator[None]:
    if fault == "removed":
        gone = partial(shutil.rmtree, disk / "out", ignore_errors=True)
        writes.arm(at, gone)
        yield
        writes.arm(-1, gone)
        return
    writes.arm(at, partial(FAULTS[fault][0], disk))
    try:
        yield
    finally:
        writes.arm(-1, lambda: None)
        release(disk)


def trials(
    writes: Writes, disk: Path, chosen: int, trial: Callable[[str, int], str | None]
) -> list[str]:
    """What is wrong, of so many trials for each fault; the writes of a healthy disk are counted."""
    every, writes.root, wrong = range(1, writes.count + 1), disk, []
    for fault in (*FAULTS, "removed"):
        draw = random.Random(fault)
        for at in every if chosen >= len(every) else sorted(draw.sample(every, chosen)):
            with small_disk(disk):
                try:
                    problem = trial(fault, at)
                except BaseException:
                    problem = traceback.format_exc()
            if problem is not None:
                wrong.append(f"{fault} at write {at} of {len(every)}: {problem}")
    return wrong

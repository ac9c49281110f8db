"""A disk that loses its power between any two writes, as strictly as POSIX allows.

What a file holds survives once the file was synced, a name in a folder once the folder was. What
was not synced may be there, be lost, be zeros, or be half of what was written.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CONTENTS = ("synced", "written", "zeros", "half")
WRITES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")


@dataclass
class Moment:
    """What is written and what is synced, by the number of file or folder."""

    root: int
    names: dict[int, dict[str, int]] = field(default_factory=dict)  # in each folder
    content: dict[int, bytes] = field(default_factory=dict)  # of each file
    synced_names: dict[int, dict[str, int]] = field(default_factory=dict)
    synced_content: dict[int, bytes] = field(default_factory=dict)

    def restore(self, to: Path, contents: str, all_names: bool) -> None:
        """One of the disks that may be found when the power is back."""
        self._restore(self.root, to, contents, all_names)

    def _restore(self, folder: int, to: Path, contents: str, all_names: bool) -> None:
        to.mkdir(parents=True)
        names = (self.names if all_names else self.synced_names).get(folder, {})
        for name, number in names.items():
            if number in self.content:
                (to / name).write_bytes(self._of(number, contents))
            else:
                self._restore(number, to / name, contents, all_names)

    def _of(self, number: int, contents: str) -> bytes:
        synced, written = self.synced_content.get(number, b""), self.content[number]
        kept = next((n for n, pair in enumerate(zip(synced, written, strict=False))
                     if pair[0] != pair[1]), min(len(synced), len(written)))  # fmt: skip
        if contents == "zeros":
            return written[:kept] + bytes(len(written) - kept)
        return {"synced": synced, "written": written,
                "half": written[: (kept + len(written)) // 2]}[contents]  # fmt: skip


class Disk:
    """Records a moment before each write below a folder; what is there already is synced."""

    def __init__(self, root: Path) -> None:
        self.root, self.moments = root, list[Moment]()
        self.open: dict[int, int] = {}  # kept open: their numbers are given to no other file
        self.synced_names: dict[int, dict[str, int]] = {}
        self.synced_content: dict[int, bytes] = {}
        self.busy = False
        first = self.look()
        self.synced_names, self.synced_content = dict(first.names), dict(first.content)

    def look(self) -> Moment:
        moment = Moment(self.root.stat().st_ino)
        for folder, inner, files in os.walk(self.root):
            names = {}
            for name in (*inner, *files):
                path = Path(folder, name)
                number = names[name] = path.stat().st_ino
                if number not in self.open:
                    self.open[number] = os.open(path, os.O_RDONLY)
            moment.names[Path(folder).stat().st_ino] = names
        for number, file in self.open.items():
            if stat.S_ISREG(os.fstat(file).st_mode):
                moment.content[number] = os.pread(file, os.fstat(file).st_size, 0)
        moment.synced_names, moment.synced_content = (
            dict(self.synced_names),
            dict(self.synced_content),
        )
        return moment

    def note(self) -> None:
        if not self.busy:
            self.busy = True
            try:
                self.moments.append(self.look())
            finally:
                self.busy = False

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event in WRITES and isinstance(args[0], (str, os.PathLike)):
            reads = event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if not reads and Path(args[0]).is_relative_to(self.root):
                self.note()

    def sync(self, file: int) -> None:
        self.note()
        moment, number = self.look(), os.fstat(file).st_ino
        if number in moment.content:
            self.synced_content[number] = moment.content[number]
        elif number in moment.names:
            self.synced_names[number] = moment.names[number]


DISKS: list[Disk] = []  # a hook of Python's stays for ever: it looks here


def _hook(event: str, args: tuple[Any, ...]) -> None:
    for disk in DISKS:
        disk.audit(event, args)


@contextmanager
def recorded_writes(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """All that is written below a folder inside the block; the last moment is the end of it."""
    if not getattr(sys, "_watches_writes", False):
        sys.addaudithook(_hook)
        sys._watches_writes = True  # type: ignore[attr-defined]
    disk = Disk(root)
    DISKS.append(disk)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", disk.sync)
        try:
            yield disk
        finally:
            disk.note()
            DISKS.remove(disk)
            for file in disk.open.values():
                os.close(file)


def disks_after(disk: Disk, into: Path) -> Iterator[tuple[Path, bool]]:
    """Each disk that may be found after a power cut at any moment, and whether at the end of all
    that was to be written."""
    for n, moment in enumerate(disk.moments):
        for contents in CONTENTS:
            for all_names in (True, False):
                found = into / f"{n}_{contents}_{all_names}"
                moment.restore(found, contents, all_names)
                yield found, n + 1 == len(disk.moments)

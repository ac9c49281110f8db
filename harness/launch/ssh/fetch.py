"""Fetches a run's record from the host that measured it: both ends of the pipe.

    python -m harness.launch.ssh.fetch FOLDER     writes its records to standard output, as tar

Checkpoints stay where they are: they are large, and the run continues there.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from harness.core.records import ATTEMPTS, FAILURE_OF_RANK, SUMMARY, RunFolder

OF_RANK = re.compile(r"_(\d+)\.\w+$")


@dataclass(frozen=True)
class Fetched:
    """As it was on its host."""

    content: bytes
    unix: float  # when it was last written, by the clock of its host


def send(folder: Path, to: IO[bytes]) -> None:
    """Every record of a run; a missing folder is an empty tar."""
    with tarfile.open(fileobj=to, mode="w|") as tar:
        for file in _files(folder):
            try:
                content, written_s = file.read_bytes(), file.stat().st_mtime
            except FileNotFoundError:
                continue  # a draft that became its file in this moment
            entry = tarfile.TarInfo(str(PurePosixPath(file.relative_to(folder))))
            entry.size, entry.mtime = len(content), written_s
            tar.addfile(entry, io.BytesIO(content))


def _files(folder: Path) -> Iterator[Path]:
    for path, inner, names in os.walk(folder):
        inner[:] = sorted(d for d in inner if not d.startswith((".", "checkpoint-")))
        yield from (Path(path, name) for name in sorted(names) if not name.startswith("."))


def received(tar: bytes) -> dict[str, Fetched]:
    """Files by their path in the run's folder; paths that lead outside are ignored."""
    files: dict[str, Fetched] = {}
    with tarfile.open(fileobj=io.BytesIO(tar), mode="r|") as archive:
        for entry in archive:
            path = PurePosixPath(entry.name)
            if not entry.isfile() or path.is_absolute() or ".." in path.parts:
                continue
            file = archive.extractfile(entry)
            assert file is not None
            files[str(path)] = Fetched(file.read(), float(entry.mtime))
    return files


def merged(by_node: Mapping[int, Mapping[str, Fetched]], processes: int) -> dict[str, Fetched]:
    """One record from all nodes: rank 0's, and from each other node what its ranks wrote.

    Other files there may be from an earlier run, in which the host was another node.
    """
    whole: dict[str, Fetched] = {}
    for node, files in sorted(by_node.items()):
        for name, sent in files.items():
            inside = "/" in name
            match = OF_RANK.search(name) if inside else None
            owner = int(match[1]) // processes if match else None
            if owner == node or (owner is None and (node == 0 or (inside and name not in whole))):
                whole[name] = sent
    return whole


def put(files: Mapping[str, Fetched], folder: RunFolder, clock_s: float) -> None:
    """Into the folder here, unless its content is newer; another run's record is set aside.

    clock_s: by how much the host's clock is ahead of ours. Equal files are not written again.
    """
    here = _rows(folder.attempts.read_bytes() if folder.attempts.is_file() else b"")
    there = _rows(files[ATTEMPTS].content if ATTEMPTS in files else b"")
    if _latest(here) > _latest(there):
        # Failures of ranks are still news: rank 0 may have had no time to record them.
        files = {name: sent for name, sent in files.items() if name.startswith(FAILURE_OF_RANK)}
    elif files and SUMMARY not in files:
        folder.summary.unlink(missing_ok=True)  # of the previous attempt: this one has none yet
    if None not in (_began(here), _began(there)) and _began(here) != _began(there) and files:
        folder.set_aside()
    # The summary last: a reader who sees it may rely on the rest.
    for name in sorted(files, key=lambda name: (name == SUMMARY, name)):
        _write(folder.path / name, files[name], clock_s)


def _write(path: Path, sent: Fetched, clock_s: float) -> None:
    if path.is_file() and path.read_bytes() == sent.content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(sent.content)
    written_unix = sent.unix - clock_s
    os.utime(draft, (written_unix, written_unix))
    draft.replace(path)


def _rows(lines: bytes) -> list[dict[str, Any]]:
    """Complete ones: a killed process may have left half a line."""
    rows = []
    for line in lines.splitlines():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def _latest(rows: list[dict[str, Any]]) -> float:
    """When an attempt was last started or ended; 0 of none."""
    return max((row["unix"] or 0.0 for row in rows), default=0.0)


def _began(rows: list[dict[str, Any]]) -> float | None:
    """When the run was first started, which identifies it; None if it never was."""
    return next((row["unix"] for row in rows if row["event"] == "start"), None)


if __name__ == "__main__":
    send(Path(sys.argv[1]), sys.stdout.buffer)

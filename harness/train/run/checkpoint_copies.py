"""Nodes that share no disk: rank 0's checkpoint is whole, and is handed to those that miss it.

Every rank calls these functions: they are collectives. Where the nodes share a disk, nothing
is sent.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from harness.core.records import RunFolder
from harness.core.topology import World

PIECE = 64 * 2**20  # bytes that are in memory at once


def follow_rank0(folder: RunFolder, world: World) -> None:
    """What a node still has of a run that rank 0 does not have any more is set aside there, too."""
    if world.nodes == 1:
        return
    box = [not folder.path.exists()]
    dist.broadcast_object_list(box, src=0)
    if box[0] and world.local_rank == 0 and world.rank:
        # On a disk that is shared somebody may be about to look for it, too.
        with suppress(OSError):
            if folder.path.exists():
                folder.set_aside()


def on_own_disk(written: Path, world: World) -> bool:
    """Whether this rank looks after a disk on which what rank 0 has written is not seen."""
    if world.nodes == 1:
        return False
    dist.barrier()
    return world.local_rank == 0 and not written.is_file()


def give_to_rank0(file: Path, world: World) -> None:
    """A small file that every rank has written on its own disk, for rank 0's as well."""
    if world.nodes == 1:
        return
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, (file.name, file.read_bytes()))
    if world.rank == 0:
        for name, content in everyone:
            if not (copy := file.with_name(name)).is_file():
                copy.write_bytes(content)


def hand_out(folders: list[Path], last: str, world: World) -> None:
    """Rank 0's folders onto the disk of every node that does not have them as they are.

    last: the file that says that a folder is whole; it is written after all others.
    """
    if world.nodes == 1:
        return
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    files.sort(key=lambda file: file.name == last)
    box: list[Any] = [[(file, _known_by(file)) for file in files]]
    missing: list[Any] = [None] * world.size
    dist.broadcast_object_list(box, src=0)
    mine = [file for file, known in box[0] if _known_by(file) != known]
    dist.all_gather_object(missing, mine if world.local_rank == 0 else [])
    for file, known in box[0]:
        if any(file in of_rank for of_rank in missing):
            _hand(file, known, takes=file in missing[world.rank], gives=world.rank == 0)
    dist.barrier()  # the other ranks of a node read what its first has written


def _known_by(file: Path) -> tuple[int, int] | None:
    """Size and time: another run's may have the same name."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_size, int(found.st_mtime)


def _hand(file: Path, known: tuple[int, int], takes: bool, gives: bool) -> None:
    """Piece by piece: weights may be larger than what is free in memory."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    with ExitStack() as stack:
        if takes:
            file.parent.mkdir(parents=True, exist_ok=True)
        source = stack.enter_context(file.open("rb")) if gives else None
        copy = stack.enter_context(draft.open("wb")) if takes else None
        while True:
            piece = [source.read(PIECE) if source is not None else b""]
            dist.broadcast_object_list(piece, src=0)
            if not piece[0]:
                break
            if copy is not None:
                copy.write(piece[0])
    if takes:
        os.utime(draft, (known[1], known[1]))
        draft.replace(file)

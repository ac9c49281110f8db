"""Checkpoints of a run: whole or ignored, and on the disk of every node.

Where nodes share no disk, rank 0's checkpoint is the whole one, and is handed to those that miss
it. What concerns several nodes is a collective: every rank calls it. Where the nodes share a disk,
nothing is sent.
"""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerState

from harness.core.records import RunFolder, write_json
from harness.core.topology import World
from harness.train.context import COMPLETE, Context
from harness.train.session import broadcast, gather

PIECE = 64 * 2**20  # bytes that are in memory at once


def whole_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that were written to the end, oldest first."""
    whole = [mark.parent for mark in folder.glob(f"checkpoint-*/{COMPLETE}")]
    return sorted(whole, key=lambda path: int(path.name.rsplit("-", 1)[1]))


def remove_broken(folder: Path) -> None:
    """Remove what a killed process left half-written: it must not be taken for a checkpoint."""
    for checkpoint in folder.glob("checkpoint-*"):
        if not (checkpoint / COMPLETE).is_file():
            shutil.rmtree(checkpoint, ignore_errors=True)


def complete(
    folder: Path, context: Context, state: TrainerState, epoch_so_far: dict[str, Any]
) -> None:
    """Mark a checkpoint that is written as whole, and remove those before it (a collective)."""
    args, world = context.args, context.world
    for name in ("sent", "measured"):
        epoch_so_far[name] = gather(epoch_so_far.get(name))
    give_to_rank0(folder / f"rng_state_{world.rank}.pth", world)
    if args.world_size > 1:
        dist.barrier()  # every rank has written its part
    if args.should_save:
        position = {
            "update": state.global_step,
            "epoch": int((state.epoch or 0) + 1e-6),
            "samples": epoch_so_far.get("samples", 0),
        }
        mark = {"fingerprint": context.fingerprint, "processes": args.world_size}
        write_json(folder / COMPLETE, {**mark, "position": position, "epoch": epoch_so_far})
    if on_own_disk(folder / COMPLETE, world) or args.should_save:
        best = state.best_model_checkpoint
        for other in folder.parent.glob("checkpoint-*"):
            if other != folder and (best is None or other.resolve() != Path(best).resolve()):
                shutil.rmtree(other, ignore_errors=True)


def follow_rank0(folder: RunFolder, world: World) -> None:
    """Set aside what this node still has of a run that rank 0 no longer has."""
    if world.nodes == 1:
        return
    gone = broadcast(not folder.path.exists())
    if gone and world.local_rank == 0 and world.rank:
        # On a shared disk another rank may be about to do the same.
        with suppress(OSError):
            if folder.path.exists():
                folder.set_aside()


def on_own_disk(written: Path, world: World) -> bool:
    """Whether this rank is the first of a node that does not see what rank 0 has written."""
    if world.nodes == 1:
        return False
    dist.barrier()
    return world.local_rank == 0 and not written.is_file()


def give_to_rank0(file: Path, world: World) -> None:
    """Copy to rank 0's disk a small file that every rank has written on its own."""
    if world.nodes == 1:
        return
    files = gather((file.name, file.read_bytes()))
    if world.rank == 0:
        for name, content in files:
            if not (copy := file.with_name(name)).is_file():
                copy.write_bytes(content)


def hand_out(folders: list[Path], last: str, world: World) -> None:
    """Copy rank 0's folders to every node whose disk does not have them as they are.

    last: the file that says that a folder is whole; it is written after all others.
    """
    if world.nodes == 1:
        return
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    files.sort(key=lambda file: file.name == last)
    stamped = broadcast([(file, _size_and_time(file)) for file in files])
    mine = [file for file, stamp in stamped if _size_and_time(file) != stamp]
    missing = gather(mine if world.local_rank == 0 else [])
    for file, stamp in stamped:
        if any(file in of_rank for of_rank in missing):
            _hand(file, stamp, takes=file in missing[world.rank], gives=world.rank == 0)
    dist.barrier()  # the other ranks of a node read what its first has written


def _size_and_time(file: Path) -> tuple[int, int] | None:
    """What tells a file from another run's of the same name; None if it is missing."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, int(status.st_mtime)


def _hand(file: Path, stamp: tuple[int, int], takes: bool, gives: bool) -> None:
    """Send a file piece by piece: weights may be larger than the free memory."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    with ExitStack() as stack:
        if takes:
            file.parent.mkdir(parents=True, exist_ok=True)
        source = stack.enter_context(file.open("rb")) if gives else None
        copy = stack.enter_context(draft.open("wb")) if takes else None
        while piece := broadcast(source.read(PIECE) if source is not None else b""):
            if copy is not None:
                copy.write(piece)
    if takes:
        os.utime(draft, (stamp[1], stamp[1]))
        draft.replace(file)

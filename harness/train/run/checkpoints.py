"""Checkpoints of a run: unchanged since they were written or ignored, and on every node's disk.

Where nodes share no disk, only rank 0's checkpoint is whole, and nodes that lack it get a copy.
Where they share a disk, nothing is sent. Functions that concern several nodes are collectives:
every rank calls them.
"""

from __future__ import annotations

import base64
import errno
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerState

from harness.core.process import warn
from harness.core.records import COMPLETE, EPOCHS, RunFolder, update_of
from harness.core.records.checksums import OWN, changed_row
from harness.core.records.disk import DiskError, draft_of, sync
from harness.core.records.manifests import CheckpointFacts, PositionRecord, read_checkpoint
from harness.core.settings import UserError
from harness.core.topology import World
from harness.train.context import Context
from harness.train.manifest import checksum, damage, write_manifest
from harness.train.session import barrier, broadcast, broadcast_object, gather

PIECE = 64 * 2**20  # bytes that are in memory at once
RANDOM = "rng_state_{}.pth"  # random state of a rank, written by the Trainer
FIX = "restore the file, or use --rerun to start afresh; the old record is kept aside"


def complete_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that were written to the end, oldest first."""
    return [path for path in RunFolder(folder).checkpoints() if (path / COMPLETE).exists()]


def sound_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that match their checksums and the recorded rows, oldest first.

    The others are reported and removed. Raises UserError if recorded rows have changed.
    """
    require_unchanged(RunFolder(folder))
    checkpoints, rows = complete_checkpoints(folder), _recorded(folder)
    damaged = {path.name: damage(path / COMPLETE) for path in checkpoints}
    read = {path: read_checkpoint(path) for path in checkpoints if not damaged[path.name]}
    manifests = {path: manifest for path, manifest in read.items() if manifest is not None}
    for path, manifest in manifests.items():
        before = manifest.get("row_checksums", [])
        _refuse_changed(RunFolder(folder).epochs, path.name, before, rows)
    sound = []
    for path in checkpoints:
        name = path.name
        if path not in manifests:
            problem = f"{name} is damaged and not used ({damaged[name]})"
        elif len(rows) < len(manifests[path].get("row_checksums", [])):
            # A run that resumed from there would end without these rows.
            problem = f"{name} is not used: {EPOCHS} lacks rows that were written before it"
        elif (best := manifests[path].get("best")) and folder / best not in sound and best != name:
            problem = f"{name} is not used: its best epoch is {best}, which is not used either"
        else:
            sound.append(path)
            continue
        warn(problem)
        shutil.rmtree(path, ignore_errors=True)
    if checkpoints and not sound:
        warn("no checkpoint is left: training starts from the beginning")
    return sound


def _recorded(folder: Path) -> list[Any]:
    """The checksums that the rows carry."""
    return [row.get(OWN) for row in RunFolder(folder).read_epochs()[0]]


def _refuse_changed(file: Path, checkpoint: str, written: list[Any], rows: list[Any]) -> None:
    """Raise if a row differs from the checkpoint's; rows lost at the end are made again."""
    changed = (n for n, pair in enumerate(zip(written, rows, strict=False), 1) if len({*pair}) > 1)
    if (number := next(changed, None)) is not None:
        raise UserError(
            f"{file}: row {number} is not as it was when {checkpoint} was written: {FIX}"
        )


def require_unchanged(folder: RunFolder, fix: str = FIX) -> None:
    """Raise if a row is not as it was written: training keeps recorded rows as they are."""
    if (number := changed_row(folder.read_epochs()[0])) is not None:
        raise UserError(f"{folder.epochs}: row {number} is not as it was written: {fix}")


def usable_checkpoint(folder: Path, world: World) -> Path | None:
    """The last checkpoint that is sound on every node, copied to all nodes (a collective)."""
    names, problem = broadcast(_sound_or_why_not(folder) if world.rank == 0 else ([], None))
    if problem is not None:
        raise UserError(problem)
    sound = [folder / name for name in names]
    if sound:
        hand_out(sound, world)
    while sound:
        last: Path = sound.pop()
        damaged = [name for name in gather(_damaged_here(last, world)) if name]
        if not damaged:
            return last
        if world.local_rank == 0:
            shutil.rmtree(last, ignore_errors=True)
        if world.rank == 0:
            warn(
                f"{last.name} is damaged and not used ({damaged[0]} has changed on the disk of "
                "another node)"
            )
    return None


def _sound_or_why_not(folder: Path) -> tuple[list[str], str | None]:
    """For all ranks: names of the sound checkpoints, and the error with which every rank ends."""
    try:
        return [path.name for path in sound_checkpoints(folder)], None
    except UserError as error:
        return [], str(error)


def _damaged_here(checkpoint: Path, world: World) -> str | None:
    """The name of a changed file that only this node holds; the strategy decides whether such a
    file may be missing.
    """
    if world.nodes == 1 or world.local_rank or not world.rank:
        return None
    manifest = read_checkpoint(checkpoint)
    elsewhere = manifest.get("files_elsewhere", {}) if manifest is not None else {}
    for name, (length, written) in elsewhere.items():
        file = checkpoint / name
        if file.is_file() and (file.stat().st_size, checksum(file)) != (length, written):
            return str(name)
    return None


def require_sound(checkpoint: Path, world: World) -> None:
    """Raise if what is about to be loaded is not what rank 0 has written (a collective)."""
    if problem := broadcast(damage(checkpoint / COMPLETE) if world.rank == 0 else None):
        raise RuntimeError(f"{checkpoint.name} is damaged ({problem}): start the run again")


def remove_broken(folder: Path) -> None:
    """Remove what a killed process left half-written: it must not be taken for a checkpoint."""
    for checkpoint in RunFolder(folder).checkpoints():
        if not checkpoint.is_dir():
            checkpoint.unlink(missing_ok=True)
        elif not (checkpoint / COMPLETE).is_file():
            shutil.rmtree(checkpoint, ignore_errors=True)


@dataclass(frozen=True)
class Written:
    """What a rank contributes to a checkpoint."""

    files: Sequence[Path] = ()  # that the rank has written besides the Trainer's
    own_disk: bool = False  # the rank writes to a disk that rank 0 does not see


ONLY_SEEN = Written()


def require_space(folder: Path, model: nn.Module) -> None:
    """Raise before the first byte of a checkpoint is written if the disk lacks space for it.

    A checkpoint is as large as the one before it, and at least as large as the weights.
    """
    weights = sum(weight.nbytes for weight in model.parameters())
    before = complete_checkpoints(folder.parent)[-1:]
    files = (file for checkpoint in before for file in checkpoint.rglob("*") if file.is_file())
    needed = max(weights, sum(file.stat().st_size for file in files))
    if (free := shutil.disk_usage(folder.parent).free) < needed:
        raise DiskError(
            errno.ENOSPC,
            f"no space on {folder.parent}: a checkpoint takes {needed / 1e6:,.1f} MB, and "
            f"{free / 1e6:,.1f} MB are free",
        )


def agree_to_save(folder: Path, world: World, finite: bool, model: nn.Module) -> tuple[bool, bool]:
    """(all ranks' weights are finite, this rank has a disk of its own); a collective.

    A rank has a disk of its own if it does not see a file that rank 0 has just made.
    """
    if world.rank == 0:
        require_space(folder, model)
    mark = folder / f".{secrets.token_hex(8)}" if world.nodes > 1 and world.rank == 0 else None
    if mark is not None:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    answers = gather([finite, mark and mark.name])
    all_finite = all(finite for finite, _ in answers)
    if mark is not None and not all_finite:
        mark.unlink()
        with suppress(OSError):  # a checkpoint of this update that was written before is kept
            folder.rmdir()
    name = answers[0][1]
    return all_finite, name is not None and not (folder / name).exists()


def complete(
    folder: Path, context: Context, state: TrainerState, epoch_so_far: dict[str, Any],
    own: Written = ONLY_SEEN,
) -> None:  # fmt: skip
    """Mark a written checkpoint as complete (a collective: every rank reports what it wrote).

    The checkpoint before it is kept: the run continues from there if this one turns out damaged.
    """
    args, world = context.args, context.world
    of_rank = ("sent", "measured", "sums")
    report: dict[str, Any] = {name: epoch_so_far.get(name) for name in of_rank}
    report |= {"files": {}, "random": None}
    if own.own_disk:
        random = folder / RANDOM.format(world.rank)  # for a node that takes over
        report["random"] = base64.b64encode(random.read_bytes()).decode()
        for file in own.files:
            sync(file)
            report["files"][file.name] = file.stat().st_size, checksum(file)
    everyone = gather(report)
    for name in of_rank:
        epoch_so_far[name] = [rank[name] for rank in everyone]
    if args.should_save:
        for mark in folder.glob(".*"):
            mark.unlink()
        for number, rank in enumerate(everyone):
            if rank["random"] is not None:
                content = base64.b64decode(rank["random"])
                (folder / RANDOM.format(number)).write_bytes(content)
        position: PositionRecord = {
            "update": state.global_step,
            "epoch": int((state.epoch or 0) + 1e-6),
            "samples": epoch_so_far.get("samples", 0),
        }
        facts: CheckpointFacts = {
            "fingerprint": context.fingerprint,
            "processes": args.world_size,
            "best": _best(state),
            "files_elsewhere": {
                name: of for rank in everyone for name, of in rank["files"].items()
            },
            "position": position,
            "epoch": epoch_so_far,
            "row_checksums": _recorded(folder.parent),
            "complete_unix": time.time(),
        }
        write_manifest(folder / COMPLETE, facts)
        sync(folder.parent)
    if args.should_save or (own.own_disk and world.local_rank == 0):
        _keep(folder, 2, _best(state))


def keep_model(folder: RunFolder, context: Context, state: TrainerState) -> Path | None:
    """After training, keep only the last checkpoint and the best one (a collective).

    Returns the one to use, the best if there is one, on a process that keeps checkpoints.
    """
    checkpoints = folder.checkpoints()
    on_own = on_own_disk(folder.settings, context.world)
    if not checkpoints or not (on_own or context.args.should_save):
        return None
    last = checkpoints[-1]
    if not on_own and (problem := damage(last / COMPLETE)):
        warn(f"{last.name} is damaged ({problem})")
        return None  # and keep the one before it
    best = _best(state)
    _keep(last, 1, best)
    return last.with_name(best) if best else last


def _best(state: TrainerState) -> str | None:
    return Path(state.best_model_checkpoint).name if state.best_model_checkpoint else None


def _keep(last: Path, count: int, best: str | None) -> None:
    """Remove all checkpoints but `count` up to `last`, and the best one that each of these names.

    Without its best one, a checkpoint is not used.
    """
    others = RunFolder(last.parent).checkpoints()
    kept = [path for path in others if update_of(path) <= update_of(last)][-count:]
    manifests = filter(None, map(read_checkpoint, kept))
    bests = [best, *(manifest.get("best") for manifest in manifests)]
    for other in others:
        if other not in kept and other.name not in bests:
            shutil.rmtree(other, ignore_errors=True)


def follow_rank0(folder: RunFolder, world: World, gone: bool) -> None:
    """Set aside what this node still has of a run that is gone on rank 0's disk."""
    if gone and world.nodes > 1 and world.local_rank == 0 and world.rank:
        # On a shared disk another rank may be about to do the same.
        with suppress(OSError):
            if folder.path.exists():
                folder.set_aside()


def on_own_disk(written: Path, world: World) -> bool:
    """Whether this rank is the first of a node that does not see what rank 0 has written."""
    if world.nodes == 1:
        return False
    barrier()
    return world.local_rank == 0 and not written.is_file()


def hand_out(checkpoints: list[Path], world: World) -> None:
    """Copy rank 0's checkpoints, just verified, to every node whose disk does not have them intact.

    The manifest, which vouches for the other files, is written last.
    """
    if world.nodes == 1:
        return
    files: list[tuple[Path, str]] = []
    for checkpoint in checkpoints if world.rank == 0 else ():
        manifest = read_checkpoint(checkpoint)
        listed = manifest["files"] if manifest is not None else {}
        files += [(checkpoint / name, written) for name, (_, written) in listed.items()]
    manifests = [each / COMPLETE for each in checkpoints if world.rank == 0]
    files += [(manifest, checksum(manifest)) for manifest in manifests]
    written = broadcast([(str(file), file.stat().st_mtime, of) for file, of in files])
    first = world.local_rank == 0
    missing = gather([f for f, _, content in written if first and _content(Path(f)) != content])
    for file, unix, _ in written:
        takers = [rank for rank, files in enumerate(missing) if file in files]
        if takers:
            _hand(Path(file), unix, takes=world.rank in takers, gives=world.rank == 0)
    barrier()  # the other ranks of a node read what its first rank has written


def _content(file: Path) -> str | None:
    """The checksum of a file; None if the file is missing or cannot be read."""
    try:
        return checksum(file)
    except OSError:
        return None


def _hand(file: Path, unix: float, takes: bool, gives: bool) -> None:
    """Send a file piece by piece: weights may be larger than the free memory."""
    with ExitStack() as stack:
        if takes:
            file.parent.mkdir(parents=True, exist_ok=True)
        source = stack.enter_context(file.open("rb")) if gives else None
        draft = stack.enter_context(draft_of(file)) if takes else None
        copy = stack.enter_context(draft.open("wb")) if draft is not None else None
        while piece := broadcast_object(source.read(PIECE) if source is not None else b""):
            if copy is not None:
                copy.write(piece)
        if draft is not None and copy is not None:
            copy.close()  # before utime(): writing the rest would change the time
            os.utime(draft, (unix, unix))

"""Prepared samples on disk: made once, read by all ranks and runs.

The cache lies beside the Hub's (HF_HOME, by default ~/.cache/huggingface) in the folder harness;
it may be deleted at any time. The key of an entry covers the content of the samples and everything
that is done to them.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from harness.core.process import warn
from harness.core.provenance import cache_root
from harness.core.records.disk import DiskError, sync, writing_to
from harness.core.records.manifests import KEY
from harness.core.records.redact import redacted
from harness.core.settings import NodeError, UserError
from harness.core.topology import World, world_of
from harness.train.manifest import damage, write_manifest
from harness.train.session import OtherFailed, gather

FORMAT = 7  # raised when the prepared files change
DAY_S = 86_400


def cached(key: dict[str, Any], build: Callable[[Path], object]) -> Path:
    """The folder for this key, built in a draft beside it and renamed when complete.

    A folder that is not as it was written is built again.
    """
    root, text = cache_root(), json.dumps({"format": FORMAT, **key}, sort_keys=True, default=str)
    folder = root / hashlib.sha256(text.encode()).hexdigest()[:24]
    if folder.exists():
        # The first process of a node has just checked the contents that the others read (in_turn).
        problem = damage(folder / KEY, contents=world_of(os.environ).local_rank == 0)
        if problem is None:
            return folder
        warn(f"{folder} is damaged and prepared again ({problem})")
    _remove_drafts(root)
    draft = root / f".draft-{uuid.uuid4().hex}"
    try:
        draft.mkdir(parents=True)  # with the modes that the user gives to all new folders
    except OSError as error:
        raise UserError(
            f"the cache {root} cannot be written ({error.strerror}): set HF_HOME to a folder of "
            "yours"
        ) from None
    try:
        with writing_to(root):
            build(draft)
            write_manifest(draft / KEY, json.loads(text))
            _put(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _remove_drafts(root: Path) -> None:
    """Remove the drafts of killed processes: nothing was written to them for a day."""
    for draft in root.glob(".draft-*"):
        with suppress(OSError):  # another process may end it or remove it at this moment
            newest = max(path.stat().st_mtime for path in (draft, *draft.rglob("*")))
            if time.time() - newest > DAY_S:
                shutil.rmtree(draft, ignore_errors=True)


def _put(draft: Path, folder: Path) -> None:
    """Give a complete draft its name, unless another process was first: its files are the same."""
    root = os.open(folder.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # on a file system without locks two processes may exchange it
            fcntl.flock(root, fcntl.LOCK_EX)
        if folder.exists():
            if damage(folder / KEY) is None:
                return
            # A process that reads the damaged folder goes on with the files that it has opened.
            damaged = draft.with_name(f"{draft.name}-damaged")
            folder.rename(damaged)
            shutil.rmtree(damaged, ignore_errors=True)
        draft.rename(folder)
        sync(folder.parent)
    finally:
        os.close(root)


def reserve(file: Path) -> None:
    """Have the disk set aside the whole length of a file; some file systems cannot.

    To write to a file that is mapped into memory would kill the process where the disk is full.
    """
    if hasattr(os, "posix_fallocate"):
        with file.open("r+b") as content:
            try:
                os.posix_fallocate(content.fileno(), 0, file.stat().st_size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise


@contextmanager
def in_turn(world: World) -> Iterator[None]:
    """Rank 0 goes first, then one rank of each other node, then the rest.

    What rank 0 downloads or prepares, the others read from the cache; a node that shares no disk
    with rank 0 prepares its own copy once. If a rank fails, those after it do not try.
    """
    turn = 0 if world.rank == 0 else 1 if world.local_rank == 0 else 2
    many = dist.is_initialized() and world.size > 1
    for _ in range(turn if many else 0):
        if not all(_outcomes(True)):
            raise UserError("a rank before this one could not load it, and says why")
    done: bool | str | None = None  # interrupted
    try:
        yield
        done = True
    except UserError as error:
        done = False
        if turn == 1:
            raise NodeError(str(error)) from None
        raise
    except Exception as error:  # any error is reported to the waiting ranks and raised again
        text = str(error) if isinstance(error, DiskError) else f"{type(error).__name__}: {error}"
        done = redacted(" ".join(text.split()))
        raise
    finally:
        turns = 2 - turn if done is True else min(1, 2 - turn)
        of_turns = [_outcomes(done) for _ in range(turns if many else 0)]
        if done is True and any(False in outcomes for outcomes in of_turns):
            raise UserError("the first rank of another node could not load it, and says why there")


def _outcomes(done: bool | str | None) -> list[bool | None]:
    """Whether each rank has done its part; False where a UserError refused it.

    A rank that has not failed raises another rank's failure, whose record may lie on another disk.
    """
    outcomes = gather(done)
    if done is True:
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, str):
                raise OtherFailed(f"{outcome[:300]} (rank {rank})")
    return outcomes

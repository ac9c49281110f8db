"""Prepared samples on disk: made once, read by all ranks and runs.

The cache lies beside the Hub's (HF_HOME, by default ~/.cache/huggingface) in the folder harness;
it may be deleted at any time. The key of an entry covers the content of the samples and everything
that is done to them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from harness.core.settings import UserError
from harness.core.topology import World

FORMAT = 3  # raised when the prepared files change


def cache_root() -> Path:
    default = Path.home() / ".cache" / "huggingface"
    return Path(os.environ.get("HF_HOME", default)).expanduser() / "harness"


def cached(key: dict[str, Any], build: Callable[[Path], object]) -> Path:
    """The folder for this key, built in a draft beside it and renamed when complete."""
    key_text = json.dumps({"format": FORMAT, **key}, sort_keys=True, default=str)
    folder = cache_root() / hashlib.sha256(key_text.encode()).hexdigest()[:24]
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder.parent))
    except OSError as error:
        raise UserError(
            f"the cache {folder.parent} cannot be written ({error.strerror}): set HF_HOME to a "
            "folder of yours"
        ) from None
    try:
        build(draft)
        (draft / "key.json").write_text(key_text)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first: its files are the same
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


@contextmanager
def in_turn(world: World) -> Iterator[None]:
    """Rank 0 goes first, then one rank of each other node, then the rest.

    What rank 0 downloads or prepares, the others read from the cache; a node that shares no disk
    with rank 0 prepares its own copy once.
    """
    turn = 0 if world.rank == 0 else 1 if world.local_rank == 0 else 2
    many = dist.is_initialized() and world.size > 1
    for _ in range(turn if many else 0):
        dist.barrier()
    try:
        yield
    finally:
        for _ in range(2 - turn if many else 0):
            dist.barrier()

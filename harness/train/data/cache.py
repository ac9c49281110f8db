"""Prepared samples on disk: made once, read by all ranks and runs (texts.py, images.py).

The cache lies beside the Hub's (HF_HOME, by default ~/.cache/huggingface) in the folder harness;
it may be deleted at any time. An entry is keyed by the content of the samples and by everything
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from harness.core.settings import Settings, UserError
from harness.core.topology import World, batch_of

FORMAT = 1  # raised when the prepared files change


CHUNK = 256  # samples prepared at a time


@dataclass
class Data:
    """What a script hands to the Trainer."""

    train: Dataset
    test: Dataset
    validation: Dataset | None  # where each epoch is not evaluated on the test set
    collate: Callable[[Any], dict[str, torch.Tensor]]
    to_device: Callable[[dict[str, Any]], dict[str, Any]]
    labels: list[str]
    processing: Any  # tokenizer or image processor, saved beside the weights
    facts: dict[str, Any]


class Indices(Dataset):
    """A set whose samples are numbers: the collator gathers a whole batch of them at once."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return self.first + index

    def __getitems__(self, indices: list[int]) -> np.ndarray:
        return self.first + np.asarray(indices)


def indices(sizes: list[int], used: int) -> tuple[Dataset, Dataset, Dataset | None]:
    """(training, test, validation) of samples that are numbered through in this order."""
    train, test, *validation = sizes
    held_out = Indices(validation[0], first=train + test) if validation else None
    return Indices(used), Indices(test, first=train), held_out


def cache_root() -> Path:
    default = Path.home() / ".cache" / "huggingface"
    return Path(os.environ.get("HF_HOME", default)).expanduser() / "harness"


def cached(what: dict[str, Any], build: Callable[[Path], None]) -> Path:
    """The folder for this key, built in a draft beside it and renamed when whole."""
    key = json.dumps({"format": FORMAT, **what}, sort_keys=True, default=str)
    folder = cache_root() / hashlib.sha256(key.encode()).hexdigest()[:24]
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
        (draft / "key.json").write_text(key)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process was first: its files are the same
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def cut_tail(settings: Settings, count: int, world: int) -> int:
    """Training samples used: whole effective batches, so that each is fed once and weighs alike."""
    batch = batch_of(settings, world)
    if settings.target_batch is not None and count < batch:
        raise UserError(
            f"--target_batch {batch}: there are {count} training samples, not enough for one "
            "update; lower it, or raise --train_size"
        )
    if count < batch:
        raise UserError(
            f"{count} training samples do not fill one effective batch of {batch} "
            f"({settings.per_gpu_batch} x {settings.grad_acc} x {world}): lower --per_gpu_batch or "
            "--grad_acc, or raise --train_size"
        )
    return count - count % batch if settings.tail == "cut" else count


def chunks(count: int) -> Iterator[slice]:
    for start in range(0, count, CHUNK):
        yield slice(start, min(start + CHUNK, count))


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

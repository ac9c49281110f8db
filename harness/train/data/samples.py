"""Samples as the Trainer sees them: numbers, their order in an epoch, and what makes batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from harness.core.schema.environment import DataRecord
from harness.core.settings import Settings, UserError
from harness.core.topology import batch_of
from harness.train.data.sources import Source

TOP = 5  # top5_accuracy is measured where there are more classes
CHUNK = 256  # samples prepared at a time
SHAPE = "shape"  # the entry of a batch with its BatchShape, which the model does not see


@dataclass(frozen=True)
class BatchShape:
    """Samples of a forward pass, with their tokens and the squares of their lengths in tokens.

    tokens and squares are as computed, padding included; text_tokens and text_squares are of the
    texts alone. None: unknown. Images have no tokens.
    """

    samples: int
    tokens: int | None = None
    squares: int | None = None
    text_tokens: int | None = None
    text_squares: int | None = None

    def __add__(self, other: BatchShape) -> BatchShape:
        """Two forward passes together; unknown where one is."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        sums: list[Any] = [None if None in pair else sum(pair) for pair in pairs]
        return BatchShape(*sums)


@dataclass
class Data:
    """What a script hands to the Trainer."""

    train: Dataset
    test: Dataset
    validation: Dataset | None  # if given, each epoch is evaluated on it instead of the test set
    collate: Callable[[Any], dict[str, torch.Tensor]]
    to_device: Callable[[dict[str, Any]], dict[str, Any]]
    labels: list[str]
    processing: Any  # tokenizer or image processor, saved beside the weights
    facts: DataRecord


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


class EpochOrder(Sampler[int]):
    """A permutation drawn from (seed, epoch).

    The stock sampler uses seed + epoch, so that epoch 1 of seed 7 is epoch 0 of seed 8 and runs
    with neighbouring seeds are not independent.
    """

    draws = False  # whether to draw a random number each epoch, as a loader without workers does

    def __init__(self, size: int, seed: int, multiple: int = 1) -> None:
        self.size, self.seed, self.epoch = size, seed, 0
        self.multiple = multiple  # of which the samples drawn are a multiple: the rest is left out
        self.trained: dict[int, int] = {}  # epoch -> how many of its first samples were trained on

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size - self.size % self.multiple

    def __iter__(self) -> Iterator[int]:
        if self.draws:
            torch.empty((), dtype=torch.int64).random_()
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.size)
        left = order[self.trained.get(self.epoch, 0) :]
        yield from left[: len(left) - len(left) % self.multiple].tolist()


def as_data(
    settings: Settings,
    source: Source,
    world: int,
    collate: Callable[[Any], dict[str, torch.Tensor]],
    to_device: Callable[[dict[str, Any]], dict[str, Any]],
    processing: Any,
    facts: DataRecord,
) -> Data:
    """The sets of a source, whose samples are numbered consecutively over all of them."""
    metric, classes = settings.best_metric.removeprefix("eval_"), len(source.labels)
    if metric == "top5_accuracy" and classes <= TOP:
        raise UserError(
            f"--best_metric {metric}: with {classes} classes all are among the first {TOP}; use "
            "accuracy, f1 or loss"
        )
    train, test, *validation = source.sizes
    used = cut_tail(settings, train, world)
    counts: DataRecord = {"train_samples": used, "left_out_samples": train - used}
    return Data(
        Indices(used),
        Indices(test, first=train),
        Indices(validation[0], first=train + test) if validation else None,
        collate,
        to_device,
        source.labels,
        processing,
        {**source.facts, **counts, **facts},
    )


def check_model(collate: Any, name: str, model: Any) -> None:
    """Refuse a model that cannot read what was prepared; a user's collator need not check it."""
    if check := getattr(collate, "check_model", None):
        check(name, model)


def cut_tail(settings: Settings, count: int, world: int) -> int:
    """Training samples used; with --tail cut, whole effective batches, so that all weigh alike."""
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


def chunks(data: Any) -> Iterator[Any]:
    """The rows of a set, CHUNK at a time, one list per column."""
    for start in range(0, len(data), CHUNK):
        yield data[start : start + CHUNK]

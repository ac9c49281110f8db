"""The order in which an epoch visits its samples."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler


class EpochOrder(Sampler[int]):
    """A permutation drawn from (seed, epoch).

    The stock sampler uses seed + epoch, so that epoch 1 of seed 7 is epoch 0 of seed 8 and runs
    with neighbouring seeds are not independent.
    """

    def __init__(self, size: int, seed: int, whole: int = 1) -> None:
        self.size, self.seed, self.epoch = size, seed, 0
        self.whole = whole  # what is left over of so many samples is left out
        self.trained: dict[int, int] = {}  # epoch -> its first samples that have had their turn

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size - self.size % self.whole

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.size)
        left = order[self.trained.get(self.epoch, 0) :]
        yield from left[: len(left) - len(left) % self.whole].tolist()

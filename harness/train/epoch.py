"""What belongs to one epoch: its order, its sums, and random numbers it must not lose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Sampler


class EpochOrder(Sampler[int]):
    """A permutation drawn from (seed, epoch).

    The stock sampler uses seed + epoch, so that epoch 1 of seed 7 is epoch 0 of seed 8 and runs
    with neighbouring seeds are not independent.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed, self.epoch = size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        yield from (np.random.default_rng([self.seed, self.epoch]).permutation(self.size).tolist())


class Sums:
    """What is added up over an epoch: kept as it comes in the step, added on the device later."""

    FOLD = 64  # values kept before they are added: one small operation then, instead of one each

    def __init__(self, device: torch.device, reused: bool = False) -> None:
        zeros = torch.zeros(4, dtype=torch.float64, device=device)
        self.loss, self.norm, self.clipped, self.overflowed = zeros
        self.samples = self.updates = 0
        self.losses: list[torch.Tensor] = []
        self.weights: list[int] = []
        self.norms: list[torch.Tensor] = []
        self.bound = float("inf")
        # A compiled step may write its next result into the same memory.
        self.keep = torch.clone if reused else torch.Tensor.detach

    def add_loss(self, loss: torch.Tensor, samples: int) -> None:
        loss = loss.detach()
        self.losses.append(self.keep(loss if loss.ndim == 0 else loss.mean()))
        self.weights.append(samples)
        self.samples += samples
        if len(self.losses) == self.FOLD:
            self.fold()

    def add_norm(self, norm: torch.Tensor, bound: float) -> None:
        self.norms.append(self.keep(norm))
        self.bound = bound
        self.updates += 1

    def fold(self) -> None:
        """Add what has been kept."""
        if self.losses:
            weights = torch.tensor(self.weights, dtype=torch.float64, device=self.loss.device)
            self.loss += torch.stack(self.losses).double() @ weights
        if self.norms:
            norms = torch.stack(self.norms).double()
            finite = torch.isfinite(norms)
            self.norm += torch.where(finite, norms, 0.0).sum()
            self.clipped += (finite & (norms > self.bound)).sum()
            self.overflowed += (~finite).sum()
        self.losses, self.weights, self.norms = [], [], []

    def total(self) -> list[float]:
        """Loss x samples and samples over all ranks; then, equal on all, the sum of the norms, the
        updates that were clipped, all updates, and those whose gradient was not finite.
        """
        self.fold()
        shared = torch.stack([self.loss, torch.full_like(self.loss, self.samples)])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(shared)
        norm, clipped, overflowed = torch.stack([self.norm, self.clipped, self.overflowed]).tolist()
        return [*shared.tolist(), norm, clipped, self.updates, overflowed]

    def restore(self, total: list[float], leader: bool) -> None:
        """Go on from a checkpoint inside the epoch; what belongs to all ranks is counted once."""
        if leader:
            self.loss += total[0]
            self.samples = int(total[1])
        self.norm += total[2]
        self.clipped += total[3]
        self.updates = int(total[4])
        self.overflowed += total[5]


@contextmanager
def untouched_random_state() -> Iterator[None]:
    """An evaluation draws random numbers; with dropout, the training after it would differ."""
    cpu = torch.get_rng_state()
    gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state_all(gpu)

"""--balance: each rank's share of the effective batch follows its speed, so that no rank waits.

Losses are weighted by the shares, so that loss and gradient are the same as with equal shares.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler

from harness.core.schema.environment import ObservedRecord
from harness.core.settings import UserError
from harness.train.context import Context, autocast
from harness.train.data import probes
from harness.train.measure.calibration import pass_s
from harness.train.session import barrier, gather

SECONDS = 1.0  # of timed passes: a CPU quota shows in the mean over several of its periods


class RankBatches(BatchSampler):
    """Yields, for each step, one batch per rank in rank order, as accelerate deals them out."""

    def __init__(self, sampler: Any, shares: Sequence[int]) -> None:
        self.sampler, self.shares = sampler, shares

    def __len__(self) -> int:
        return len(self.sampler) // sum(self.shares) * len(self.shares)

    def __iter__(self) -> Iterator[list[int]]:
        samples = iter(self.sampler)
        for _ in range(len(self) // len(self.shares)):
            for share in self.shares:
                yield list(islice(samples, share))


class Balance:
    """The shares of all ranks, agreed on before training (a collective)."""

    def __init__(
        self, context: Context, model: nn.Module, samples: Callable[[int], Mapping[str, Any]]
    ) -> None:
        equal = context.args.per_device_train_batch_size
        self.shares = _agreed(context, model, samples, equal)
        # The mean over ranks weights all ranks equally; this factor corrects it for unequal shares.
        self.weight = self.shares[context.args.process_index] / equal if self.shares else 1.0
        self.observed: ObservedRecord = {"shares": self.shares} if self.shares else {}

    def dealt(self, loader: Any) -> Any:
        """The loader that accelerate has prepared, with batches sized by this rank's share."""
        if self.shares:
            dealer = loader.batch_sampler
            dealer.batch_sampler = RankBatches(dealer.batch_sampler.sampler, self.shares)
            dealer.batch_size = None  # batches differ in size
        return loader


def shares_of(speeds: Sequence[float], samples: int) -> list[int]:
    """Whole samples for each rank, at least one, such that the last rank is ready earliest."""
    shares = [1] * len(speeds)
    for _ in range(samples - len(speeds)):
        ready = [(share + 1) / speed for share, speed in zip(shares, speeds, strict=True)]
        shares[ready.index(min(ready))] += 1
    return shares


def _agreed(
    context: Context, model: nn.Module, samples: Callable[[int], Mapping[str, Any]], equal: int
) -> list[int]:
    """Samples per rank and step, from the checkpoint if there is one; empty without --balance."""
    if (asked := context.settings.balance) is None:
        return []
    if any(isinstance(m, probes.BATCHNORM) for m in model.modules()):
        raise UserError(
            f"--balance {asked}: {type(model).__name__} has BatchNorm, whose statistics depend on "
            "the size of each rank's batch; leave --balance out"
        )
    if before := context.epoch_so_far.get("shares"):
        return list(before)
    if asked != "measured":
        speeds = [float(number) for number in asked.split(",")]
    else:
        inputs = samples(equal)
        barrier()  # all ranks are timed at once, as they will train
        speeds = gather(_passes_per_s(context, model, inputs))
    return shares_of(speeds, equal * len(speeds))


def _passes_per_s(context: Context, model: nn.Module, inputs: Mapping[str, Any]) -> float:
    copy = probes.twin(model)
    device = context.args.device

    def one_pass() -> None:
        pass_s(copy, inputs, autocast(context.settings, device))
        if device.type == "cuda":
            torch.cuda.synchronize()

    one_pass()  # a warm-up, which prepares kernels
    passes, began_s = 0, time.perf_counter()
    while (took_s := time.perf_counter() - began_s) < SECONDS or passes < 2:
        one_pass()
        passes += 1
    return passes / took_s

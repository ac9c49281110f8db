"""What belongs to one epoch: edges, order, sums, and random numbers it must not lose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy


class EpochEdges(TrainerCallback):
    """Tells the trainer when an epoch and its updates begin and end."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.begin_training()
        self.trainer.exchange.begin(state.max_steps)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Before the run is recorded as finished.
        self.trainer.exchange.end()
        if self.trainer.compiled is not None:
            self.trainer.observations.checked |= self.trainer.compiled.found()
        self.trainer.test()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # accelerate does not reach the sampler of several ranks that resume inside an epoch.
        self.trainer.order.set_epoch(int((state.epoch or 0) + 1e-6))
        self.trainer.begin_epoch()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.batches_fetched()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        done = state.global_step + 1
        self.trainer.exchange.after_update(done, last=done >= state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.count_samples()
        if self.trainer.compiled is not None:
            self.trainer.compiled.after_update(state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.log_epoch()
        control.should_save |= args.save_strategy == SaveStrategy.STEPS


class Sums:
    """What is added up over an epoch: kept as it comes in the step, added on the device later."""

    FOLD = 64  # values kept before they are added: one small operation then, instead of one each

    def __init__(self, device: torch.device, reused: bool = False, apart: bool = False) -> None:
        zeros = torch.zeros(4, dtype=torch.float64, device=device)
        self.loss, self.norm, self.clipped, self.overflowed = zeros
        self.samples = self.updates = 0
        self.losses: list[torch.Tensor] = []
        self.weights: list[int] = []
        self.norms: list[torch.Tensor] = []
        self.bound = float("inf")
        self.apart = apart  # ranks have gradients of their own
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
        """Loss x samples and samples over all ranks; then the sum of the norms, the updates that
        were clipped, all updates, and those whose gradient was not finite: equal on all ranks, or
        where they train apart, added up over them, so that each rank's updates count.
        """
        self.fold()
        updates = torch.full_like(self.loss, self.updates)
        numbers = torch.stack([
            self.loss, torch.full_like(self.loss, self.samples),
            self.norm, self.clipped, updates, self.overflowed,
        ])  # fmt: skip
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(numbers if self.apart else numbers[:2])
        return list(numbers.tolist())

    def restore(self, total: list[float], leader: bool) -> None:
        """Go on from a checkpoint inside the epoch; what belongs to all ranks is counted once."""
        if leader:
            self.loss += total[0]
            self.samples = int(total[1])
        if self.apart and not leader:
            return
        self.norm += total[2]
        self.clipped += total[3]
        self.updates = int(total[4])
        self.overflowed += total[5]


def draw_from(*numbers: int) -> None:
    """Random numbers of torch that follow from these numbers."""
    torch.manual_seed(int(np.random.SeedSequence(list(numbers)).generate_state(1)[0]))


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

"""An epoch's events, its sums, and random numbers that must not be disturbed.

How the loss reaches the record: ExactTrainer.compute_loss() gives each batch's mean loss and number
of samples to EpochSums, which keeps the losses on the device. At the end of the epoch EpochEvents,
the first of all callbacks, adds them up over batches and ranks and stores the means in
EpochEvents.means (and, as epoch_train_loss and so on, in the Trainer's log). LogCallback, a
later callback of the same event, copies them into the epoch's row, which is written when the
evaluation is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from harness.core.strategies import own_strategy
from harness.train.measure.rows import EpochMeans
from harness.train.run.checkpoints import keep_model
from harness.train.run.failures import Diverged
from harness.train.session import gather
from harness.train.strategy.weights import require_equal_weights


class EpochEvents(TrainerCallback):
    """What ExactTrainer does when its training, epochs and updates begin and end."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.means: EpochMeans = {}  # of the epoch that has ended
        self.kept_model: Path | None = None  # the trained model, if this process has kept it

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, context = self.trainer, self.trainer.context
        trainer.sums = trainer.empty_sums()
        if before := context.epoch_so_far.get("sums"):
            of_all = trainer.sums.over_ranks(before)
            trainer.sums.restore(of_all, rank0=args.process_index == 0)
        if context.settings.rank_dropout == "own":
            # One seed for all would give every rank the same dropout mask at every step.
            seed_from(context.settings.seed, context.world.rank)
        trainer.exchange.begin(state.max_steps)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        # accelerate does not set the sampler's epoch when several ranks resume inside an epoch.
        trainer.order.set_epoch(int((state.epoch or 0) + 1e-6))
        trainer.exchange.begin_epoch()
        if hasattr(trainer.to_device, "set_epoch"):
            trainer.to_device.set_epoch(trainer.order.epoch)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.load_late_rng_state()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        update = state.global_step + 1
        self.trainer.exchange.after_update(update, last=update >= state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the Trainer's count of updates and epochs, just raised, to that of the run."""
        trainer, elastic = self.trainer, self.trainer.elastic
        for norm in trainer.exchange.take_norms():
            trainer.sums.add_norm(norm, args.max_grad_norm)
        if not trainer.exchange.count_step(state, control) and elastic is not None:
            elastic.count_step(state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, exchange = self.trainer, self.trainer.exchange
        totals = exchange.end_epoch(state.epoch or 0.0, trainer.sums.total())
        trainer.sums = trainer.empty_sums()
        loss, samples, norm, clipped, updates, overflowed = totals
        # With fp16, the scaler looks for the largest scale that fits, and skips what overflows.
        if not math.isfinite(loss) or (overflowed and not args.fp16):
            where = f"in epoch {state.epoch:.0f}{exchange.caution}"
            raise Diverged(f"loss or gradient is not finite {where}")
        means: EpochMeans = {"train_loss": loss / max(samples, 1), "train_samples": samples}
        if (made := updates - overflowed) > 0:
            means |= {"grad_norm": norm / made, "clipped_share": clipped / made}
        if updates:
            means["skipped_updates"] = int(overflowed)
        self.means = means
        trainer.log({f"epoch_{name}": value for name, value in means.items()})
        control.should_save |= args.save_strategy == SaveStrategy.STEPS

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the run is recorded as finished."""
        trainer = self.trainer
        trainer.exchange.end()
        if own_strategy(strategy := trainer.settings.strategy):
            require_equal_weights(trainer.model, strategy)
        if trainer.compiled is not None:
            trainer.compiled.observe()
        if trainer.test_dataset is not None:
            trainer.test()
        context = trainer.context
        self.kept_model = keep_model(context.folder, context, state)


class EpochSums:
    """Losses and gradient norms of an epoch: a step only stores them, fold() adds them up."""

    FOLD = 64  # values stored before they are added up: one operation instead of one for each

    def __init__(
        self, device: torch.device, reused: bool = False, replicas_differ: bool = False
    ) -> None:
        zeros = torch.zeros(4, dtype=torch.float64, device=device)
        self.loss, self.norm, self.clipped, self.overflowed = zeros
        self.samples = self.updates = 0
        self.losses: list[torch.Tensor] = []
        self.weights: list[int] = []
        self.norms: list[torch.Tensor] = []
        self.bound = float("inf")
        self.replicas_differ = replicas_differ  # ranks have gradients of their own
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
        """Add the kept values to the sums."""
        if self.losses:
            # From pinned memory, so that the host does not wait for the device.
            device = self.loss.device
            weights = torch.tensor(
                self.weights, dtype=torch.float64, pin_memory=device.type == "cuda"
            ).to(device, non_blocking=True)
            self.loss += torch.stack(self.losses).double() @ weights
        if self.norms:
            norms = torch.stack(self.norms).double()
            finite = torch.isfinite(norms)
            self.norm += torch.where(finite, norms, 0.0).sum()
            self.clipped += (finite & (norms > self.bound)).sum()
            self.overflowed += (~finite).sum()
        self.losses, self.weights, self.norms = [], [], []

    def own(self) -> list[float]:
        """This rank's sums: loss x samples, samples, gradient norms, clipped updates, all updates,
        and updates whose gradient was not finite.
        """
        self.fold()
        updates = torch.full_like(self.loss, self.updates)
        numbers = torch.stack([
            self.loss, torch.full_like(self.loss, self.samples),
            self.norm, self.clipped, updates, self.overflowed,
        ])  # fmt: skip
        return list(numbers.tolist())

    def over_ranks(self, ranks: Sequence[Sequence[float]]) -> list[float]:
        """The sums of an epoch over all ranks: loss and samples are added up. The other numbers are
        equal on all ranks, or added up too where ranks train apart: each rank's updates count.
        """
        added = [sum(numbers) for numbers in zip(*ranks, strict=True)]
        return added if self.replicas_differ else [*added[:2], *ranks[0][2:]]

    def total(self) -> list[float]:
        """The sums over all ranks (a collective)."""
        return self.over_ranks(gather(self.own()))

    def restore(self, total: list[float], rank0: bool) -> None:
        """Restore sums from a checkpoint inside the epoch; sums over ranks go to rank 0 alone."""
        if rank0:
            self.loss += total[0]
            self.samples = int(total[1])
        if self.replicas_differ and not rank0:
            return
        self.norm += total[2]
        self.clipped += total[3]
        self.updates = int(total[4])
        self.overflowed += total[5]


def seed_from(*numbers: int) -> None:
    """Seed torch from several numbers."""
    torch.manual_seed(int(np.random.SeedSequence(list(numbers)).generate_state(1)[0]))


@contextmanager
def untouched_random_state() -> Iterator[None]:
    """Restore the random state afterwards: an evaluation must not change later dropout."""
    cpu = torch.get_rng_state()
    gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state_all(gpu)

"""--elastic_batch scale: an epoch goes on, and the rate falls, by samples and not by updates.

The Trainer finds its place by dividing updates, which is right as long as all of them have one
size. Here an epoch goes on behind the samples that it has had, with updates of the size that the
processes of now make, and the schedule is that of the whole set-up, read at the share of the
samples that are done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from transformers import Trainer

from harness.core.topology import batch_of_trainer, effective_batch
from harness.train.context import Context, Position
from harness.train.data.samples import EpochOrder
from harness.train.strategy.base import Exchange


@dataclass(frozen=True)
class Plan:
    """What is still to be done from a position, with updates of this many samples."""

    position: Position
    train_samples: int
    epochs: int
    batch: int  # of an update now
    asked_batch: int  # of an update of the whole set-up

    @classmethod
    def of(cls, context: Context, train_samples: int) -> Self:
        """What is left to be done by as many processes as there are now."""
        settings, args = context.settings, context.args
        batch = batch_of_trainer(args)
        asked = effective_batch(
            settings.per_gpu_batch or 1, settings.grad_acc, context.data_parallel_size
        )
        return cls(context.position, train_samples, settings.epochs or 1, batch, asked)

    @property
    def an_epoch(self) -> int:
        """Updates of an epoch."""
        return self.train_samples // self.batch

    @property
    def rest(self) -> int:
        """Updates that are left of the epoch in which it goes on."""
        return (self.train_samples - self.position.samples) // self.batch

    @property
    def updates(self) -> int:
        """Updates of the run, those before the position included."""
        after = self.epochs - self.position.epoch - 1
        return self.position.update + (self.rest + after * self.an_epoch if after >= 0 else 0)

    def epoch_at(self, update: int) -> float:
        """Epochs done after an update of the epoch in which it goes on."""
        done = self.position.samples + (update - self.position.update) * self.batch
        whole = self.position.samples + self.rest * self.batch
        return self.position.epoch + done / whole

    def asked_updates(self) -> int:
        """Updates of the run, had the whole set-up made them all."""
        return self.epochs * (self.train_samples // self.asked_batch)

    def asked_update_at(self, update: float) -> float:
        """How many of those the samples are worth that were trained on until an update."""
        before = self.position.epoch * self.train_samples + self.position.samples
        since = (update - self.position.update) * self.batch
        return (before + since) / self.asked_batch


class BySamples(Trainer):
    """The Trainer's counting, where updates change their size; self.plan is None otherwise."""

    plan: Plan | None = None
    exchange: Exchange
    order: EpochOrder
    random_state: str | None = None  # a checkpoint whose random state is still to be loaded

    def set_initial_training_values(self, *args: Any) -> Any:
        if (values := self.exchange.training_values()) is not None:
            return values
        found = super().set_initial_training_values(*args)
        if self.plan is None:
            return found
        self.order.trained = {self.plan.position.epoch: self.plan.position.samples}
        return (*found[:-1], self.plan.updates)

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        found: tuple[int, int] = super()._init_training_state(*args)
        if (position := self.exchange.resume_at(self.state.global_step)) is not None:
            return position
        # The sampler leaves out what has had its turn: no batch is to be skipped.
        return found if self.plan is None else (self.plan.position.epoch, 0)

    def _run_epoch(self, **given: Any) -> None:
        plan = self.plan
        if plan is None or given["epoch"] != plan.position.epoch:
            return super()._run_epoch(**given)
        given["num_update_steps_per_epoch"] = plan.rest
        given["steps_in_epoch"] = plan.rest * self.args.gradient_accumulation_steps
        if plan.rest == 0:
            self.state.epoch = plan.position.epoch + 1
        super()._run_epoch(**given)
        if plan.rest == 0:
            # The Trainer takes an epoch without updates for the end of all data.
            self.control.should_training_stop = False

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self.plan is not None and self.plan.position.samples and self.random_state is None:
            # To fetch batches draws from it, and inside an epoch that has been done before.
            self.random_state = checkpoint
            return
        super()._load_rng_state(checkpoint)

    def batches_fetched(self) -> None:
        if self.random_state:
            self._load_rng_state(self.random_state)
            self.random_state = ""

    def count_samples(self) -> None:
        """The Trainer counts the epoch's share by updates, as if all had the size of now."""
        if self.exchange.count_step(self.state, self.control):
            return
        plan, update = self.plan, self.state.global_step
        if plan is not None and update <= plan.position.update + plan.rest:
            self.state.epoch = plan.epoch_at(update)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        plan = self.plan
        if plan is None:
            return super().create_scheduler(num_training_steps, optimizer)
        scheduler = super().create_scheduler(plan.asked_updates(), optimizer)
        # Those without a clock, as reduce_lr_on_plateau, have none to set.
        for number, rate in enumerate(getattr(scheduler, "lr_lambdas", [])):
            scheduler.lr_lambdas[number] = lambda update, rate=rate: rate(
                plan.asked_update_at(update)
            )
        return scheduler

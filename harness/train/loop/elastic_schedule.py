"""--elastic_batch scale: an epoch goes on, and the rate falls, by samples and not by updates.

The Trainer finds its place by dividing updates, which is right as long as all of them have one
size. Here an epoch goes on behind the samples that it has had, with updates of the size that the
processes of now make, and the schedule is that of the whole set-up, read at the share of the
samples that are done.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

from transformers import Trainer

from harness.train.context import Context, Position
from harness.train.data.order import EpochOrder


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
        batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        per_process = (settings.per_gpu_batch or 1) * settings.grad_acc
        asked = per_process * context.data_parallel_size
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
    order: EpochOrder
    random_state: str | None = None  # a checkpoint whose random state is still to be loaded

    def set_initial_training_values(self, *args: Any) -> Any:
        found = super().set_initial_training_values(*args)
        if self.plan is None:
            return found
        self.order.trained = {self.plan.position.epoch: self.plan.position.samples}
        return (*found[:-1], self.plan.updates)

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        found: tuple[int, int] = super()._init_training_state(*args)
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


ENDLESS = 10**12  # batches: a peer brings what it can


class ByPeers(BySamples):
    """The Trainer's counting in a run of peers; self.exchange.update is None elsewhere."""

    context: Any
    exchange: Any
    order: Any
    sums: Any
    logged_at = logged_steps = steps = 0  # updates, batches of this peer
    epoch_begun = 0

    @property
    def among_peers(self) -> bool:
        return self.context.peers is not None

    @property
    def updates_an_epoch(self) -> int:
        return len(self.train_dataset) // self.context.settings.target_batch

    def is_world_process_zero(self) -> bool:
        return bool(super().is_world_process_zero()) and (
            not self.among_peers or self.context.is_rank0
        )

    def set_initial_training_values(self, *args: Any) -> Any:
        if not self.among_peers:
            return super().set_initial_training_values(*args)
        asked, an_epoch = self.args.max_steps, self.updates_an_epoch
        updates = asked if asked > 0 else an_epoch * int(self.args.num_train_epochs)
        samples, batch = len(self.train_dataset), self.context.settings.target_batch
        batches = ENDLESS * self.args.gradient_accumulation_steps
        epochs = math.ceil(updates / an_epoch)
        return epochs, ENDLESS, samples, updates * batch, batch, batches, updates

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        found: tuple[int, int] = super()._init_training_state(*args)
        if not self.among_peers:
            return found
        return self.state.global_step // self.updates_an_epoch, 0

    def begin_epoch(self) -> None:
        if self.among_peers:
            self.epoch_begun = self.exchange.update // self.updates_an_epoch
            self.exchange.clipped = lambda norm, bound: self.sums.add_norm(norm, bound)
            self.exchange.begin_epoch(self.epoch_begun)
            self.order.position = self.exchange.position

    def norm_of_all(self) -> Any:
        """Of the last average of all peers, which is clipped in the place of a peer's own part."""
        return self.exchange.norm

    def of_all_peers(self, totals: list[float]) -> list[float]:
        """The sums of an epoch, over all peers where there are others."""
        if not self.among_peers:
            return totals
        found: list[float] = self.exchange.end_epoch(self.state.epoch, totals)
        return found

    def count_samples(self) -> None:
        if not self.among_peers:
            return super().count_samples()
        self.steps += 1
        an_epoch, most = self.updates_an_epoch, self.state.max_steps
        update = min(self.exchange.update, most)
        while self.lr_scheduler.last_epoch < update:
            self.lr_scheduler.step()
        epoch = update // an_epoch
        self.state.global_step, self.state.epoch = update, update / an_epoch
        if epoch > self.epoch_begun:
            # Who has fallen behind may be in the middle of the next one: its row is of this edge.
            self.state.epoch = float(epoch)
            self.control.should_epoch_stop = True
        if self.context.peers.over:
            self.control.should_training_stop = True

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.among_peers and "loss" in logs:
            # The Trainer has divided the sum over this peer's batches by the updates of all.
            made = self.state.global_step - self.logged_at
            logs["loss"] *= made / max(self.steps - self.logged_steps, 1)
            self.logged_at, self.logged_steps = self.state.global_step, self.steps
        super().log(logs, start_time)

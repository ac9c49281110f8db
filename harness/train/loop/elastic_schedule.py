"""--elastic_batch scale: an epoch goes on, and the rate falls, by samples and not by updates.

The Trainer finds its place by dividing updates, which is right while all of them have one size.
Here the epoch is resumed behind the samples that were trained on, with updates of the size that
the present processes make; the schedule is that of the complete set-up, read at the share of the
samples that are done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from transformers import TrainerState

from harness.core.topology import own_batch
from harness.train.context import Context, Position


@dataclass(frozen=True)
class ElasticSchedule:
    """What is still to be done from a position, with updates of this many samples."""

    position: Position
    train_samples: int
    epochs: int
    batch: int  # of an update now
    full_batch: int  # of an update of the whole set-up

    @classmethod
    def of(cls, context: Context, train_samples: int) -> Self:
        """What is left to be done by as many processes as there are now."""
        settings = context.settings
        batch = context.effective_batch
        full = own_batch(settings, context.data_parallel_size)
        return cls(context.position, train_samples, settings.epochs or 1, batch, full)

    @property
    def updates_per_epoch(self) -> int:
        """Updates of a whole epoch."""
        return self.train_samples // self.batch

    @property
    def rest(self) -> int:
        """Updates that are left of the epoch in which it goes on."""
        return (self.train_samples - self.position.samples) // self.batch

    @property
    def updates(self) -> int:
        """Updates of the run, those before the position included."""
        after = self.epochs - self.position.epoch - 1
        return self.position.update + (
            self.rest + after * self.updates_per_epoch if after >= 0 else 0
        )

    def epoch_at(self, update: int) -> float:
        """Epochs done after an update of the epoch in which it goes on."""
        done = self.position.samples + (update - self.position.update) * self.batch
        total = self.position.samples + self.rest * self.batch
        return self.position.epoch + done / total

    def count_step(self, state: TrainerState) -> None:
        """The Trainer counts the epoch's share by updates, as if all had the present size."""
        if state.global_step <= self.position.update + self.rest:
            state.epoch = self.epoch_at(state.global_step)

    def full_updates(self) -> int:
        """Updates of the run if the whole set-up made them all."""
        return self.epochs * (self.train_samples // self.full_batch)

    def full_update_at(self, update: float) -> float:
        """How many updates of the whole set-up the samples up to an update amount to."""
        before = self.position.epoch * self.train_samples + self.position.samples
        since = (update - self.position.update) * self.batch
        return (before + since) / self.full_batch


def by_samples(scheduler: Any, schedule: ElasticSchedule) -> Any:
    """The schedule of the complete set-up, read at the share of the samples trained on."""
    # Those without a clock, as reduce_lr_on_plateau, have none to set.
    for number, rate in enumerate(getattr(scheduler, "lr_lambdas", [])):
        scheduler.lr_lambdas[number] = lambda update, rate=rate: rate(
            schedule.full_update_at(update)
        )
    return scheduler

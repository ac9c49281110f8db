"""--elastic_batch scale: epoch progress and learning rate follow samples instead of updates.

The Trainer finds its position in an epoch by dividing updates, which is right only if all updates
have one size. Here the epoch resumes after the samples already trained on, with updates of the size
that the present processes make. The schedule is that of the complete set-up, read at the share of
samples done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from transformers import TrainerState

from harness.core.topology import own_batch
from harness.train.context import Context, Position


@dataclass(frozen=True)
class ElasticSchedule:
    """What remains to be trained from a position on, with updates of `batch` samples."""

    position: Position
    train_samples: int
    epochs: int
    batch: int  # samples of an update now
    full_batch: int  # samples of an update of the complete set-up

    @classmethod
    def of(cls, context: Context, train_samples: int) -> Self:
        """What remains for the present number of processes."""
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
        """Updates left in the epoch in which training resumes."""
        return (self.train_samples - self.position.samples) // self.batch

    @property
    def updates(self) -> int:
        """Updates of the run, including those before the position."""
        after = self.epochs - self.position.epoch - 1
        return self.position.update + (
            self.rest + after * self.updates_per_epoch if after >= 0 else 0
        )

    def epoch_at(self, update: int) -> float:
        """Epochs done after an update within the epoch in which training resumes."""
        done = self.position.samples + (update - self.position.update) * self.batch
        total = self.position.samples + self.rest * self.batch
        return self.position.epoch + done / total

    def count_step(self, state: TrainerState) -> None:
        """Correct state.epoch, which the Trainer counts as if all updates had the present size."""
        if state.global_step <= self.position.update + self.rest:
            state.epoch = self.epoch_at(state.global_step)

    def full_updates(self) -> int:
        """Updates of the run if the complete set-up made all of them."""
        return self.epochs * (self.train_samples // self.full_batch)

    def full_update_at(self, update: float) -> float:
        """The samples up to an update, counted in updates of the complete set-up."""
        before = self.position.epoch * self.train_samples + self.position.samples
        since = (update - self.position.update) * self.batch
        return (before + since) / self.full_batch


def by_samples(scheduler: Any, schedule: ElasticSchedule) -> Any:
    """The schedule of the complete set-up, read at the share of the samples trained on."""
    # Schedules that do not follow updates, such as reduce_lr_on_plateau, have no lr_lambdas.
    for number, rate in enumerate(getattr(scheduler, "lr_lambdas", [])):
        scheduler.lr_lambdas[number] = lambda update, rate=rate: rate(
            schedule.full_update_at(update)
        )
    return scheduler

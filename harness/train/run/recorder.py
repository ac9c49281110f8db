"""What ExactTrainer passes to the callback that writes the record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainingArguments

from harness.train.measure.resources import CpuTime
from harness.train.measure.rows import EpochMeasure
from harness.train.session import gather
from harness.train.strategy.base import Exchange

RankMetrics = Callable[[TrainingArguments], dict[str, Any]]


@dataclass
class Observations:
    """What ExactTrainer knows beyond the Trainer's events; nothing with the stock Trainer."""

    world_size: int
    exchange: Exchange | None = None
    rank_metrics: RankMetrics = lambda args: {}  # of the samples that this rank evaluated last
    measures: Sequence[EpochMeasure] = ()  # of what is measured beside the time of steps
    checked: dict[str, Any] = field(default_factory=dict)  # what model, optimizer and batches are
    link: dict[str, Any] | None = None  # between nodes, measured before the first step
    epoch_means: dict[str, float] = field(default_factory=dict)  # of the epoch that has ended
    test_metrics: dict[str, Any] = field(default_factory=dict)  # of the one test at the end
    model: Path | None = None  # the trained model, if this process has kept it

    @property
    def observed(self) -> dict[str, Any]:
        return self.checked | (self.exchange.observed if self.exchange else {})

    @property
    def epoch_fields(self) -> dict[str, Any]:
        """What the strategy adds to the row of the epoch that has ended."""
        return self.exchange.epoch_fields if self.exchange else {}

    @property
    def devices(self) -> int:
        """How many devices train, or trained in the last epoch where processes come and go."""
        if self.exchange is not None and self.exchange.devices is not None:
            return self.exchange.devices
        return int(self.checked.get("devices", self.world_size))

    def payload_bytes(self) -> int | None:
        """What this rank has handed over for sending; None if unknown."""
        return self.exchange.payload_bytes if self.exchange else None

    def gather(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """The rows of all ranks (a collective)."""
        return self.exchange.gather(row) if self.exchange else gather(row)


class Recorder(TrainerCallback):
    """The interface of the callback that keeps the record, for ExactTrainer and the run's end.

    This one records nothing; LogCallback does.
    """

    observations: Observations  # set by ExactTrainer
    attempt = 0  # number of the attempt, once its training has begun
    update: int | None = None  # the last update made in the attempt
    cpu: CpuTime | None = None
    last_row: dict[str, Any] | None = None  # of the epoch recorded last

    def measuring_s(self) -> float | None:
        """How long the attempt has measured for the record alone; None if unknown."""
        return None

    def partial_epoch(self) -> dict[str, Any]:
        """What a checkpoint inside an epoch must keep of the epoch; empty between epochs."""
        return {}

    def paused(self) -> AbstractContextManager[None]:
        """Work between two steps that is no part of the training: excluded from all measures."""
        return nullcontext()

"""What ExactTrainer passes to the callback that writes the record."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from transformers import TrainerCallback, TrainingArguments

from harness.core.schema.environment import LinkRecord, ObservedRecord
from harness.core.schema.rows import EpochRow
from harness.core.strategies import DP
from harness.train.measure.resources import CpuTime
from harness.train.measure.rows import EpochMeans, EpochMeasure
from harness.train.session import gather


class Observations:
    """What the record needs beyond the Trainer's events: nothing is known with the stock Trainer.

    TrainerObservations (loop/observations.py) asks ExactTrainer.
    """

    measures: Sequence[EpochMeasure] = ()  # of what is measured beside the time of steps

    def __init__(self, world_size: int, gpus: int = 1) -> None:
        """gpus: of a process; with the Trainer's nn.DataParallel there are several."""
        self.world_size, self.gpus = world_size, gpus

    @property
    def observed(self) -> ObservedRecord:
        """What model, optimizer, batches and exchange really are."""
        return {"strategy": DP, "devices": self.gpus} if self.gpus > 1 else {}

    @property
    def link(self) -> LinkRecord | None:
        """Between nodes, measured before the first step."""
        return None

    @property
    def epoch_means(self) -> EpochMeans:
        """Of the epoch that has ended."""
        return {}

    @property
    def epoch_fields(self) -> dict[str, Any]:
        """What the strategy adds to the row of the epoch that has ended."""
        return {}

    @property
    def test_metrics(self) -> dict[str, Any]:
        """Of the one test at the end."""
        return {}

    @property
    def devices(self) -> int:
        """How many devices train, or trained in the last epoch where processes come and go."""
        return self.world_size * self.gpus

    def rank_metrics(self, args: TrainingArguments) -> dict[str, Any]:
        """Of the samples that this rank evaluated last."""
        return {}

    def payload_bytes(self) -> int | None:
        """What this rank has handed over for sending; None if unknown."""
        return None

    def gather(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """The rows of all ranks (a collective)."""
        return gather(row)


class Recorder(TrainerCallback):
    """The interface of the callback that keeps the record, for ExactTrainer and the run's end.

    This one records nothing; LogCallback does.
    """

    observations: Observations  # set by ExactTrainer
    attempt = 0  # number of the attempt, once its training has begun
    update: int | None = None  # the last update made in the attempt
    cpu: CpuTime | None = None
    last_row: EpochRow | None = None  # of the epoch recorded last

    def measuring_s(self) -> float | None:
        """How long the attempt has measured for the record alone; None if unknown."""
        return None

    def partial_epoch(self) -> dict[str, Any]:
        """What a checkpoint inside an epoch must keep of the epoch; empty between epochs."""
        return {}

    def paused(self) -> AbstractContextManager[None]:
        """Work between two steps that is no part of the training: excluded from all measures."""
        return nullcontext()

"""What the record takes from ExactTrainer: whoever knows a part keeps it, and all join here."""

from __future__ import annotations

from typing import Any, Protocol

from transformers import TrainingArguments

from harness.core.schema.environment import LinkRecord, ObservedRecord
from harness.train.context import Context
from harness.train.loop.compiling import Compiled
from harness.train.loop.epoch import EpochEvents
from harness.train.loop.evaluation import Evaluation
from harness.train.measure.communication import CommProbe, Exposure
from harness.train.measure.flops import Utilisation
from harness.train.measure.rows import EpochMeans
from harness.train.run.recorder import Observations
from harness.train.strategy.base import Exchange
from harness.train.strategy.verify import NumberFormat


class Parts(Protocol):
    """What ExactTrainer has that the record asks for."""

    context: Context
    exchange: Exchange
    evaluation: Evaluation
    epochs: EpochEvents
    utilisation: Utilisation
    exposure: Exposure
    comm_probe: CommProbe
    number_format: NumberFormat
    compiled: Compiled | None
    built: ObservedRecord  # what is verified before the first step
    link: LinkRecord | None
    tested: dict[str, Any]  # metrics of the one test at the end


class TrainerObservations(Observations):
    """Of an ExactTrainer, at any time; nothing is stored here."""

    def __init__(self, trainer: Parts) -> None:
        super().__init__(trainer.context.recorded_world.size)
        self.trainer = trainer
        self.measures = (trainer.utilisation, trainer.exposure, trainer.comm_probe)

    @property
    def observed(self) -> ObservedRecord:
        """What was known before the first step, then what training has shown since."""
        compiled = self.trainer.compiled
        compiling: ObservedRecord = {} if compiled is None else compiled.observed
        return {
            **self.trainer.built,
            **self.trainer.number_format.observed,
            **compiling,
            **self.trainer.exchange.observed,
        }

    @property
    def link(self) -> LinkRecord | None:
        return self.trainer.link

    @property
    def epoch_means(self) -> EpochMeans:
        return self.trainer.epochs.means

    @property
    def epoch_fields(self) -> dict[str, Any]:
        return self.trainer.exchange.epoch_fields

    @property
    def test_metrics(self) -> dict[str, Any]:
        return self.trainer.tested

    @property
    def devices(self) -> int:
        devices = self.trainer.exchange.devices
        return self.trainer.built.get("devices", self.world_size) if devices is None else devices

    def rank_metrics(self, args: TrainingArguments) -> dict[str, Any]:
        return self.trainer.evaluation.rank_metrics(args)

    def payload_bytes(self) -> int | None:
        return self.trainer.exchange.payload_bytes

    def gather(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        return self.trainer.exchange.gather(row)

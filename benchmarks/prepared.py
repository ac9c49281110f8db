"""A run of bert.py or vit.py, prepared by hand for uses that the scripts do not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from harness.core.command_line import parse
from harness.core.settings import Settings
from harness.train.context import Context
from harness.train.data import models
from harness.train.data.images import load_images
from harness.train.data.samples import Data
from harness.train.data.texts import load_texts
from harness.train.loop.trainer import ExactTrainer
from harness.train.measure.metrics import BatchMetrics
from harness.train.run.start import start


class Prepared(NamedTuple):
    context: Context
    data: Data
    model: nn.Module

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments for any Trainer."""
        data = self.data
        return {
            "model": self.model, "args": self.context.args, "train_dataset": data.train,
            "eval_dataset": data.test, "data_collator": data.collate,
            "processing_class": data.processing,
            "compute_metrics": BatchMetrics(len(data.labels)),
        }  # fmt: skip

    def trainer(self, *callbacks: Any) -> ExactTrainer:
        return ExactTrainer(
            context=self.context, to_device=self.data.to_device, callbacks=[*callbacks],
            **self.arguments,
        )  # fmt: skip


def prepared(
    script: str, flags: Sequence[str], environ: Mapping[str, str] | None = None
) -> Prepared:
    """Prepare a run; every call with the same flags gives the same weights."""
    run = start(parse(script, [*flags, "--save", "none"], environ=environ))
    assert run is not None
    data = load(run.context.settings, run.context.data_parallel_size)
    context = run.resume(data.facts)
    torch.manual_seed(context.settings.seed)
    return Prepared(context, data, models.build(context.settings, data.labels))


def load(settings: Settings, processes: int) -> Data:
    return (load_texts if settings.script == "bert" else load_images)(settings, processes)

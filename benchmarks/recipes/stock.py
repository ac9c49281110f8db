"""What recipes with transformers' own Trainer share, and what must be equal in all arms."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import Trainer, TrainingArguments

from benchmarks.recipes.clock import EpochClock
from benchmarks.recipes.task import Task, cuda, quality, quality_row
from harness.train.data.samples import EpochOrder


class InOrder(Trainer):
    """The Trainer, fed in the order that all arms share."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return EpochOrder(len(self.train_dataset), self.args.seed)


def arguments(task: Task, **recipe: Any) -> TrainingArguments:
    """The Trainer's defaults, except where the task or the recipe says otherwise."""
    return TrainingArguments(
        output_dir=task.out, per_device_train_batch_size=task.batch,
        num_train_epochs=task.epochs, learning_rate=task.lr, seed=task.seed,
        bf16=task.precision == "bf16", use_cpu=not cuda(), eval_strategy="epoch",
        dataloader_num_workers=task.workers, report_to="none", disable_tqdm=True, **recipe,
    )  # fmt: skip


def train(
    task: Task, args: TrainingArguments, prepare_s: float, model: Any, **parts: Any
) -> dict[str, Any]:
    clock = EpochClock()
    clock.watch_trainers()
    trainer = InOrder(model=model, args=args, compute_metrics=_metrics, **parts)
    trainer.train()
    found = [quality_row(log) for log in trainer.state.log_history if "eval_loss" in log]
    return {"prepare_s": prepare_s, "quality": found, **clock.result()}


def _metrics(whole: Any) -> dict[str, float]:
    return quality(np.asarray(whole.predictions), np.asarray(whole.label_ids))

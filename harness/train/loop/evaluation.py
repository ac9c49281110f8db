"""Evaluation: each rank counts its own samples on its device; at the end all are put together.

The Trainer's own loop gathers loss, logits and classes of every batch, asks all ranks for their
shapes before, and empties the device's cache after. Here it runs with nothing left to gather.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import TrainingArguments

from harness.core.identity import EVAL_BATCH
from harness.core.settings import Settings
from harness.train.measure.metrics import BatchMetrics, require
from harness.train.run.failures import Diverged
from harness.train.session import gather, gather_rows
from harness.train.strategy import sharding

# Samples of a batch that keeps a GPU busy, though Python drives it; a processor gains nothing from
# more than EVAL_BATCH. A small GPU may not hold as many: at most so many for each GiB.
ON_GPU, PER_GIB = 512, 24


def eval_batch(gpu_bytes: int, samples: int, ranks: int) -> int:
    """The default batch of a rank: never more than its share of the set; 0 bytes: on a CPU."""
    if not gpu_bytes:
        return EVAL_BATCH
    most = min(ON_GPU, max(EVAL_BATCH, PER_GIB * gpu_bytes // 2**30))
    return min(most, max(1, -(-samples // ranks)))


def eval_batch_of(args: TrainingArguments, samples: int) -> int:
    """The same on all ranks (a collective): unlike ones would be dealt out with gaps."""
    own: list[Any] = [*range(args.n_gpu)] if args.n_gpu > 1 else [args.device]
    gpu_bytes = 0
    if args.device.type == "cuda":
        sizes = [torch.cuda.get_device_properties(gpu).total_memory for gpu in own]
        gpu_bytes = min(gather(min(sizes)))
    return eval_batch(gpu_bytes, samples, args.world_size * len(own))


class Evaluation:
    """The metrics of the evaluation that goes on, or of the last one."""

    def __init__(self) -> None:
        self.active: BatchMetrics | None = None  # while it goes on
        self.last: BatchMetrics | None = None

    @contextmanager
    def counting(self, metrics: BatchMetrics, args: TrainingArguments) -> Iterator[None]:
        metrics.begin()
        self.active, batch_wise = metrics, args.batch_eval_metrics
        args.batch_eval_metrics = False  # with it, the device's cache is emptied each time
        try:
            yield
        finally:
            self.active, args.batch_eval_metrics = None, batch_wise
        self.last = metrics

    def result(self, samples: int, args: TrainingArguments, settings: Settings) -> dict[str, float]:
        """The metrics over all samples of the set, --best_metric among them (a collective)."""
        assert self.last is not None
        values = self.last.result(partial(in_order, samples=samples, args=args))
        require(settings.best_metric, values, self.last.no_numbers.named)
        return values

    def rank_metrics(self, args: TrainingArguments) -> dict[str, Any]:
        """The metrics of the samples that this rank evaluated."""
        if self.last is None:
            return {}
        return self.last.rank_quality(args.process_index, args.world_size, args.eval_batch_size)


def in_order(mine: torch.Tensor, samples: int, args: TrainingArguments) -> torch.Tensor:
    """A row for each sample, in the order of the set, without those that fill up the end.

    The ranks take batches in turn, all of one size.
    """
    if args.world_size == 1:
        return mine
    turns = zip(*(rows.split(args.eval_batch_size) for rows in gather_rows(mine)), strict=True)
    return torch.cat([rows for turn in turns for rows in turn])[:samples]


def test_metrics(trainer: Any) -> dict[str, Any]:
    """Evaluate the test set, once, with the best weights where these are kept."""
    update = trainer.state.global_step
    if trainer.args.load_best_model_at_end:
        update = trainer.state.best_global_step
        sharding.load_weights(trainer.model, trainer.best_weights(), trainer.settings)
    sharding.average_buffers(trainer.model)
    loader = trainer.get_test_dataloader(trainer.test_dataset)
    # Not evaluate(): this belongs to no epoch, and callbacks would record it as one's evaluation.
    metrics = trainer.evaluation_loop(loader, "Test", metric_key_prefix="test").metrics
    if not math.isfinite(metrics["test_loss"]):
        raise Diverged(f"test_loss is {metrics['test_loss']} at update {update}")
    metrics.pop("test_model_preparation_time", None)
    evaluated = (log for log in trainer.state.log_history if "eval_loss" in log)
    epochs = {log["step"]: log["epoch"] for log in evaluated}
    return {**metrics, "test_epoch": round(epochs[update], 6)}

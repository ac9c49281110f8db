"""Evaluation: each rank counts its own samples on its device; results are combined at the end.

For every batch, the Trainer's own loop asks all ranks for their shapes, gathers loss, logits and
classes, and empties the device's cache. Here that loop runs with nothing left to gather.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import TrainingArguments

from harness.core.identity import EVAL_BATCH
from harness.core.settings import Settings, UserError
from harness.train.measure.metrics import BatchMetrics, require
from harness.train.run.failures import Diverged
from harness.train.session import gather, gather_rows
from harness.train.strategy import sharding

# A batch of ON_GPU samples keeps a GPU busy although Python drives it; a CPU gains nothing from
# more than EVAL_BATCH. A small GPU may not hold as many: at most PER_GIB for each GiB it has.
ON_GPU, PER_GIB = 512, 24


def eval_batch(gpu_bytes: int, samples: int, ranks: int) -> int:
    """The default batch of a rank: on a GPU at most its share of the set; 0 bytes: a CPU."""
    if not gpu_bytes:
        return EVAL_BATCH
    most = min(ON_GPU, max(EVAL_BATCH, PER_GIB * gpu_bytes // 2**30))
    return min(most, max(1, -(-samples // ranks)))


def eval_batch_of(args: TrainingArguments, samples: int) -> int:
    """The default batch, equal on all ranks (a collective): unequal ones would skip samples."""
    own: list[Any] = [*range(args.n_gpu)] if args.n_gpu > 1 else [args.device]
    gpu_bytes = 0
    if args.device.type == "cuda":
        sizes = [torch.cuda.get_device_properties(gpu).total_memory for gpu in own]
        gpu_bytes = min(gather(min(sizes)))
    return eval_batch(gpu_bytes, samples, args.world_size * len(own))


def logits_first(outputs: Any) -> Any:
    """What a model returns, its scores first: the Trainer takes entries in their order, and in a
    model of the user's own another may come first.
    """
    if not isinstance(outputs, dict):
        return outputs
    if "logits" not in outputs:
        names = ", ".join(outputs)
        raise UserError(f"the model returns {names}: name its scores, one for each class, logits")
    if isinstance(outputs, OrderedDict):  # as models of transformers return them
        outputs.move_to_end("logits", last=False)
        return outputs
    return {"logits": outputs["logits"], **outputs}


class Evaluation:
    """The metrics of the evaluation in progress, and of the last one that ended."""

    def __init__(self) -> None:
        self.active: BatchMetrics | None = None  # during an evaluation
        self.last: BatchMetrics | None = None

    @contextmanager
    def counting(self, metrics: BatchMetrics, args: TrainingArguments) -> Iterator[None]:
        metrics.begin()
        self.active, batch_wise = metrics, args.batch_eval_metrics
        args.batch_eval_metrics = False  # True would empty the device's cache at every batch
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
    """One row per sample, in the order of the set, without the padding rows at the end.

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
    # Not evaluate(): callbacks would record it as an epoch's evaluation, and it belongs to none.
    metrics = trainer.evaluation_loop(loader, "Test", metric_key_prefix="test").metrics
    if not math.isfinite(metrics["test_loss"]):
        raise Diverged(f"test_loss is {metrics['test_loss']} at update {update}")
    metrics.pop("test_model_preparation_time", None)
    evaluated = (log for log in trainer.state.log_history if "eval_loss" in log)
    epochs = {log["step"]: log["epoch"] for log in evaluated}
    return {**metrics, "test_epoch": round(epochs[update], 6)}

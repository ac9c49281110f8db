"""Evaluation: each rank counts its own samples on its device; at the end all are put together.

The Trainer's own loop gathers loss, logits and classes of every batch, asks all ranks for their
shapes before, and empties the device's cache after. Here the loop is the same and is left nothing
to gather.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from harness.core.identity import EVAL_BATCH
from harness.train.data.text_layout import InParts
from harness.train.loop.checkpoints import Checkpoints
from harness.train.measure.metrics import BatchMetrics

# A GPU that is started from Python is kept busy by so many; a processor gains nothing from them.
ON_GPU = 512


def eval_batch(cuda: bool, samples: int, ranks: int) -> int:
    """What a rank takes at a time where no flag says it: never more than its share of the set."""
    return min(ON_GPU, max(1, -(-samples // ranks))) if cuda else EVAL_BATCH


class Evaluation(InParts, Checkpoints):
    """The part of ExactTrainer that evaluates."""

    counting: BatchMetrics | None = None  # while its evaluation goes on

    def choose_eval_batch(self, args: Any, dataset: Any) -> None:
        if self.settings.eval_batch is None and dataset is not None:
            ranks = args.world_size * max(1, args.n_gpu)
            cuda = args.device.type == "cuda"
            args.per_device_eval_batch_size = eval_batch(cuda, len(dataset), ranks)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        *args: Any,
        metric_key_prefix: str = "eval",
        **kwargs: Any,
    ) -> Any:
        metrics, prefix = self.compute_metrics, metric_key_prefix
        if not isinstance(metrics, BatchMetrics) or description == "Prediction":
            more = {**kwargs, "metric_key_prefix": prefix}
            return super().evaluation_loop(dataloader, description, *args, **more)
        metrics.begin()
        self.counting = metrics
        try:
            output = super().evaluation_loop(
                dataloader, description, *args, metric_key_prefix=prefix, **kwargs
            )
        finally:
            self.counting = None
        samples = len(dataloader.dataset)
        found = metrics.result(lambda mine: self._of_all_samples(mine, samples))
        output.metrics.update({f"{prefix}_{name}": value for name, value in found.items()})
        return output

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        found = super().prediction_step(*args, **kwargs)
        if self.counting is None:
            return found
        _, logits, labels = found
        self.counting.add(logits, labels)
        return None, None, None

    def _of_all_samples(self, mine: torch.Tensor, samples: int) -> torch.Tensor:
        """A row for each sample, in the order of the set, without those that fill up the end.

        The ranks take batches in turn, all of one size.
        """
        ranks = self.args.world_size
        if ranks == 1:
            return mine
        everyone = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(everyone, mine.contiguous())
        turns = zip(*(rows.split(self.args.eval_batch_size) for rows in everyone), strict=True)
        return torch.cat([rows for turn in turns for rows in turn])[:samples]

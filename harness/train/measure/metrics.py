"""Quality of a classifier, counted batch by batch: no logits are kept, and no Hub is needed.

The samples that fill up the last batch of a distributed evaluation are not counted, so the numbers
are those of the test set, whatever the number of ranks. eval_loss is computed here too: the
Trainer's own averages over batches, padding included.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import datasets
import evaluate
import numpy as np
import torch
from sklearn.metrics import precision_recall_fscore_support
from transformers import EvalPrediction

from harness.core.records.summary import metric_name
from harness.core.settings import BEST_METRICS, UserError, nearest
from harness.core.topology import world_of
from harness.train.context import Context
from harness.train.data.samples import TOP
from harness.train.measure.rows import NoNumbers


class ConfusionMetrics(evaluate.Metric):
    """Accuracy, and precision, recall and F1 (weighted and macro), from a confusion matrix.

    A row is a cell of the matrix: a predicted class, a true class, and how many samples have both.
    """

    def _info(self) -> evaluate.MetricInfo:
        names = ("predictions", "references", "samples")
        return evaluate.MetricInfo(
            description="Quality of a single-label classifier.",
            citation="",
            inputs_description="The cells of a confusion matrix that are not empty.",
            features=datasets.Features({name: datasets.Value("int64") for name in names}),
            format="numpy",
        )

    def _compute(
        self, predictions: np.ndarray, references: np.ndarray, samples: np.ndarray
    ) -> dict[str, float]:
        *by_class, support = precision_recall_fscore_support(
            references, predictions, sample_weight=samples, zero_division=0
        )
        quality = {"accuracy": samples[predictions == references].sum() / samples.sum()}
        for suffix, weights in (("", support), ("_macro", None)):
            for name, values in zip(("precision", "recall", "f1"), by_class, strict=True):
                quality[f"{name}{suffix}"] = np.average(values, weights=weights)
        return {name: float(value) for name, value in quality.items()}


def beside_ours(own: Any, context: Context) -> BatchMetrics:
    """The compute_metrics of a script together with our metrics."""
    return (
        own if isinstance(own, BatchMetrics) else BatchMetrics(context.data_facts["classes"], own)
    )


def require(best_metric: str, values: Mapping[str, float], others: Mapping[str, str]) -> None:
    """Refuse a --best_metric that is none of these; others: metrics that are no numbers."""
    if (name := metric_name(best_metric)) in values:
        return
    if kind := others.get(name):
        raise UserError(
            f"--best_metric {best_metric}: compute_metrics returned {kind}: expected a number"
        )
    names = [name for name in values if name != "samples"]
    hints = [f"the metrics are {', '.join(names)}", nearest(name.partition(":")[0], names, "")]
    if ":" in name:
        hints.append("only :min may stand after a name, where smaller is better")
    raise UserError(f"--best_metric {best_metric}: {'; '.join(filter(None, hints))}")


def check_before(metrics: BatchMetrics, best_metric: str) -> None:
    """Refuse, before training, a --best_metric that the script's compute_metrics will not give.

    Only compute_metrics knows its names. It is called with made-up scores, some for each class; if
    it cannot take these, the first evaluation tells.
    """
    if metric_name(best_metric) in BEST_METRICS:
        return
    classes, each = metrics.num_labels, 4
    scores = torch.randn(classes * each, classes, generator=torch.Generator().manual_seed(0))
    metrics.begin()
    try:
        with warnings.catch_warnings(action="ignore"):
            metrics.add(scores, torch.arange(classes).repeat(each))
            values = metrics.result()
    except UserError:
        raise
    except Exception:  # any metrics of a user may fail on these, and training goes on
        metrics.begin()
        return
    require(best_metric, values, metrics.no_numbers.named)


class BatchMetrics:
    """Counts an evaluation batch by batch. Of each sample four numbers are kept, on its device.

    It is the compute_metrics of any Trainer, with batch_eval_metrics or without. own: a
    compute_metrics of the script; of each sample all scores are kept for it.
    """

    def __init__(
        self, num_labels: int, own: Callable[[EvalPrediction], dict[str, Any]] | None = None
    ) -> None:
        self.num_labels, self.own = num_labels, own
        self.confusion = ConfusionMetrics(keep_in_memory=True)
        self.no_numbers = NoNumbers()  # of the script's metrics
        # One row per sample: predicted class, true class, rank of the true class, its loss, and
        # for a metric of the script the scores.
        self.batches: list[torch.Tensor] = []
        # One row per sample of the last evaluation: whether it is a hit, and a top-5 hit.
        self.hits = np.empty((0, 2), dtype=bool)

    def __call__(self, batch: EvalPrediction, compute_result: bool = True) -> dict[str, float]:
        self.add(batch.predictions, batch.label_ids)
        return self.result() if compute_result else {}

    def begin(self) -> None:
        """Drop what an interrupted evaluation has left."""
        self.batches = []

    def add(self, logits: Any, labels: Any) -> None:
        """Count a batch, without waiting for its device."""
        if isinstance(logits, (tuple, list)):
            logits = logits[0]
        labels = torch.as_tensor(labels)
        scores = torch.log_softmax(torch.as_tensor(logits).double(), dim=-1)
        true_scores = scores.gather(1, labels[:, None])
        # How many classes come before the true one: below 5 is a top-5 hit. Of those that score the
        # same, as half precision makes them, the lowest comes first, as in the prediction.
        lower = torch.arange(scores.shape[1], device=scores.device) < labels[:, None]
        true_rank = ((scores > true_scores) | (lower & (scores == true_scores))).sum(-1)
        columns = (scores.argmax(-1), labels, true_rank, -true_scores[:, 0])
        rows = torch.stack([column.double() for column in columns], dim=1)
        if self.own is not None:
            rows = torch.cat([rows, torch.as_tensor(logits).to(rows)], dim=1)
        self.batches.append(rows)

    def result(
        self, gather: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows
    ) -> dict[str, float]:
        """The quality over all samples; `gather` joins the rows of several ranks."""
        rows = gather(torch.cat(self.batches)).cpu().numpy()
        self.batches = []
        predicted, true, true_rank = rows[:, :3].astype(np.int64).T
        self.hits = np.stack([predicted == true, true_rank < TOP], axis=1)
        # Cells rather than samples: evaluate encodes each value of its table by itself, which
        # for every sample would take longer than all else here.
        width = max(self.num_labels, int(predicted.max()) + 1)  # a model of one's own may name more
        cells, counts = np.unique(true * width + predicted, return_counts=True)
        references, predictions = np.divmod(cells, width)
        self.confusion.add_batch(predictions=predictions, references=references, samples=counts)
        quality = {"samples": len(rows), "loss": float(np.mean(rows[:, 3]))}
        if self.num_labels > TOP:
            quality["top5_accuracy"] = float(np.mean(self.hits[:, 1]))
        by_class: dict[str, float] = self.confusion.compute()
        quality |= by_class
        return quality | self._own_quality(rows[:, 4:], true, quality.keys())

    def _own_quality(
        self, scores: np.ndarray, labels: np.ndarray, taken: Collection[str]
    ) -> dict[str, float]:
        """Results of the script's compute_metrics on the whole set; own_f1 where f1 is taken."""
        if self.own is None:
            return {}
        values = self.own(EvalPrediction(scores.astype(np.float32), labels))
        if not isinstance(values, Mapping):
            raise UserError(f"compute_metrics returned {type(values).__name__}: expected a dict "
                            "of names and numbers")  # fmt: skip
        values = {str(name).removeprefix("eval_"): value for name, value in values.items()}
        numbers = {name: _number(value) for name, value in values.items()}
        others = {name: values[name] for name, number in numbers.items() if number is None}
        self.no_numbers.name(others, aloud=world_of(os.environ).rank == 0)
        return {
            f"own_{name}" if name in taken else name: number
            for name, number in numbers.items()
            if number is not None
        }

    def rank_quality(self, rank: int, ranks: int, batch: int) -> dict[str, Any]:
        """The accuracy on the samples that one rank had in the last evaluation.

        The gathered samples come batch by batch, rank by rank, and those that fill up the last
        batch are at the end and cut off: over all ranks together, each sample is counted once.
        """
        hits = self.hits[np.arange(len(self.hits)) // batch % ranks == rank]
        accuracy, top5 = hits.mean(axis=0).tolist() if len(hits) else (None, None)
        quality = {"eval_samples": len(hits), "eval_accuracy": accuracy}
        return quality | ({"eval_top5_accuracy": top5} if self.num_labels > TOP else {})


def _number(value: Any) -> float | None:
    """A metric as a number; None if it is none."""
    try:
        number = np.asarray(value)
    except (TypeError, ValueError):  # rows of several lengths, or a tensor on a GPU
        return None
    return float(number.item()) if number.size == 1 and number.dtype.kind in "fiub" else None

"""Quality of a classifier, batch by batch: no pile of logits in memory, no Hub at run time.

The samples that fill up the last batch of a distributed evaluation are not counted, so the numbers
are those of the test set, whatever the number of ranks. eval_loss is computed here too: the
Trainer's own averages over batches, padding included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import datasets
import evaluate
import numpy as np
import torch
from sklearn.metrics import precision_recall_fscore_support
from transformers import EvalPrediction

TOP = 5


class Classification(evaluate.Metric):
    """accuracy, precision, recall and f1 (weighted and macro), top-5 and cross-entropy."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Quality of a single-label classifier over a whole test set.",
            citation="",
            inputs_description="Class, reference, and the reference's position and loss.",
            features=datasets.Features(
                {
                    "predictions": datasets.Value("int64"),
                    "references": datasets.Value("int64"),
                    "position": datasets.Value("int64"),
                    "loss": datasets.Value("float64"),
                }
            ),
        )

    def _compute(
        self,
        predictions: np.ndarray,
        references: np.ndarray,
        position: np.ndarray,
        loss: np.ndarray,
    ) -> dict[str, float]:
        predicted, true = predictions, references
        result = {
            "samples": len(true),
            "loss": float(np.mean(loss)),
            "accuracy": float(np.mean(predicted == true)),
            "top5_accuracy": float(np.mean(position < TOP)),
        }
        for suffix, average in (("", "weighted"), ("_macro", "macro")):
            precision, recall, f1, _ = precision_recall_fscore_support(
                true, predicted, average=average, zero_division=0
            )
            result |= {
                f"precision{suffix}": float(precision),
                f"recall{suffix}": float(recall),
                f"f1{suffix}": float(f1),
            }
        return result


class BatchMetrics:
    """Adds up an evaluation batch by batch. Of each sample four numbers are kept, on its device.

    Called as the Trainer does with batch_eval_metrics=True, it works with any Trainer.
    """

    def __init__(self, num_labels: int) -> None:
        self.num_labels = num_labels
        self.metric = Classification(keep_in_memory=True)
        # Of each batch a row for each sample: predicted class, true class, its position, its loss.
        self.counted: list[torch.Tensor] = []
        self.last = np.empty((0, 2), dtype=bool)  # of a whole evaluation: right, in the first five

    def __call__(self, batch: EvalPrediction, compute_result: bool) -> dict[str, float]:
        self.add(batch.predictions, batch.label_ids)
        return self.result() if compute_result else {}

    def begin(self) -> None:
        """Nothing of an evaluation that broke off is left for the next."""
        self.counted = []

    def add(self, logits: Any, labels: Any) -> None:
        """A batch has been classified; nothing here waits for its device."""
        if isinstance(logits, (tuple, list)):
            logits = logits[0]
        labels = torch.as_tensor(labels)
        scores = torch.log_softmax(torch.as_tensor(logits).double(), dim=-1)
        of_true = scores.gather(1, labels[:, None])
        # How many classes scored higher: below five is a top-5 hit.
        position = (scores > of_true).sum(-1)
        columns = (scores.argmax(-1), labels, position, -of_true[:, 0])
        self.counted.append(torch.stack([column.double() for column in columns], dim=1))

    def result(
        self, of_all: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows
    ) -> dict[str, float]:
        """The quality over all samples; of_all puts together what several ranks have counted."""
        rows = of_all(torch.cat(self.counted)).cpu().numpy()
        self.counted = []
        predicted, true, position = rows[:, :3].astype(np.int64).T
        self.last = np.stack([predicted == true, position < TOP], axis=1)
        # Not compute(), which puts all samples into a table first: three times as long.
        result = self.metric._compute(predicted, true, position, rows[:, 3])
        if self.num_labels <= TOP:
            del result["top5_accuracy"]
        return result

    def of_rank(self, rank: int, ranks: int, batch: int) -> dict[str, Any]:
        """How well the samples that one rank had in the last evaluation were classified.

        The gathered samples come batch by batch, rank by rank, and those that fill up the last
        batch are at the end and cut off: of all ranks together, each sample is counted once.
        """
        mine = self.last[np.arange(len(self.last)) // batch % ranks == rank]
        right, near = mine.mean(axis=0).tolist() if len(mine) else (None, None)
        found = {"eval_samples": len(mine), "eval_accuracy": right, "eval_top5_accuracy": near}
        if self.num_labels <= TOP:
            del found["eval_top5_accuracy"]
        return found

"""Quality of a classifier, batch by batch: no pile of logits in memory, no Hub at run time.

The Trainer hands over gathered logits without the samples that fill up the last batch of a
distributed evaluation, so the numbers are those of the test set, whatever the number of ranks.
eval_loss is computed here too: the Trainer's own averages over batches, padding included.
"""

from __future__ import annotations

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
        predictions: list[int],
        references: list[int],
        position: list[int],
        loss: list[float],
    ) -> dict[str, float]:
        predicted, true = np.asarray(predictions), np.asarray(references)
        result = {
            "samples": len(true),
            "loss": float(np.mean(loss)),
            "accuracy": float(np.mean(predicted == true)),
            "top5_accuracy": float(np.mean(np.asarray(position) < TOP)),
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
    """compute_metrics for the Trainer's batch-wise evaluation (batch_eval_metrics=True)."""

    def __init__(self, num_labels: int) -> None:
        self.num_labels = num_labels
        self.metric = Classification(keep_in_memory=True)
        self.hits: list[np.ndarray] = []  # of each sample: class right, among the first five
        self.last = np.empty((0, 2), dtype=bool)  # the same of a whole evaluation

    def __call__(self, batch: EvalPrediction, compute_result: bool) -> dict[str, float]:
        logits: Any = batch.predictions
        if isinstance(logits, (tuple, list)):
            logits = logits[0]
        labels = torch.as_tensor(batch.label_ids)
        scores = torch.log_softmax(torch.as_tensor(logits).double(), dim=-1)
        of_true = scores.gather(1, labels[:, None])
        predicted, true = scores.argmax(-1).cpu().numpy(), labels.cpu().numpy()
        # How many classes scored higher: below five is a top-5 hit.
        position = (scores > of_true).sum(-1).cpu().numpy()
        self.metric.add_batch(
            predictions=predicted,
            references=true,
            position=position,
            loss=-of_true[:, 0].cpu().numpy(),
        )
        self.hits.append(np.stack([predicted == true, position < TOP], axis=1))
        if not compute_result:
            return {}
        self.last, self.hits = np.concatenate(self.hits), []
        result = dict(self.metric.compute() or {})
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

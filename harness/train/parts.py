"""A batch of texts fed in parts of like length, for models that cannot read texts in a row.

The mean loss of a batch is that of its parts, each weighed by its share of the samples, and so is
the gradient: it adds up over the parts and is exchanged with the last one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import Trainer

from harness.train.text_batches import AMOUNT, Amount

WHOLE_ROWS = ("labels",)  # all else has a column a token


class InParts(Trainer):
    """The Trainer's step and its evaluation, a part at a time where a batch has parts."""

    share = 1.0  # of the batch's samples that are in the part which is being fed

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        amount: Amount | None = inputs.get(AMOUNT)
        if amount is None or len(amount.parts) < 2:
            return super().training_step(model, inputs, *args, **kwargs)
        losses = []
        for number, part in enumerate(parts_of(inputs, amount), start=1):
            self.share = len(part["labels"]) / amount.texts
            last = number == len(amount.parts)
            deferred: AbstractContextManager[Any] = (
                nullcontext() if last else self.accelerator.no_sync(model)
            )
            with deferred:
                losses.append(super().training_step(model, part, *args, **kwargs))
        self.share = 1.0
        return torch.stack(losses).sum()

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        amount: Amount | None = inputs.get(AMOUNT)
        if amount is None or len(amount.parts) < 2:
            return super().prediction_step(model, inputs, *args, **kwargs)
        losses, logits, labels = [], [], []
        for part in parts_of(inputs, amount):
            loss, scores, classes = super().prediction_step(model, part, *args, **kwargs)
            losses.append(loss * (len(classes) / amount.texts))
            logits.append(scores[0] if isinstance(scores, tuple) else scores)
            labels.append(classes)
        order = torch.cat([torch.from_numpy(rows) for rows, _ in amount.parts]).argsort()
        order = order.to(labels[0].device)
        # As they were given: what fills up the last batch is cut off behind them.
        return torch.stack(losses).sum(), torch.cat(logits)[order], torch.cat(labels)[order]


def parts_of(inputs: dict[str, Any], amount: Amount) -> list[dict[str, Any]]:
    """The rows of each part, without the columns in which they have no tokens."""
    found = []
    for rows, columns in amount.parts:
        chosen = torch.from_numpy(rows)
        part = {
            name: value[chosen] if name in WHOLE_ROWS else value[chosen, :columns]
            for name, value in inputs.items()
            if name != AMOUNT
        }
        found.append(part)
    return found

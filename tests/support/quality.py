"""The metrics of a test set by scikit-learn, from all logits at once."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import (
    accuracy_score,
    f1_score,
    log_loss,
    precision_score,
    recall_score,
    top_k_accuracy_score,
)


def expected(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """scikit-learn on everything at once; the cross-entropy in double precision."""
    wide = logits.astype(np.float64)
    scores = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    classes = np.arange(logits.shape[1])
    found = {
        "loss": log_loss(labels, np.exp(scores), labels=classes),
        "accuracy": accuracy_score(labels, wide.argmax(1)),
    }
    assert found["loss"] == pytest.approx(-scores[np.arange(len(labels)), labels].mean(), abs=1e-12)
    for name, score in (("precision", precision_score), ("recall", recall_score), ("f1", f1_score)):
        for suffix, average in (("", "weighted"), ("_macro", "macro")):
            found[name + suffix] = score(labels, wide.argmax(1), average=average, zero_division=0)
    if len(classes) > 5:
        found["top5_accuracy"] = top_k_accuracy_score(labels, wide, k=5, labels=classes)
    return found

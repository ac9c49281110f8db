"""Small text models, lengths of texts of which some are padded far, and what becomes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from harness.train.data.texts import for_model
from tests.support.samples import PAD

SIZES = {
    "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 64, "num_labels": 3, "pad_token_id": PAD,
    "type_vocab_size": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
OF_DISTILBERT = {
    "vocab_size": 60, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "num_labels": 3,
    "max_position_embeddings": 64, "pad_token_id": PAD, "dropout": 0.0, "attention_dropout": 0.0,
    "seq_classif_dropout": 0.0,
}  # fmt: skip
# Most texts are longer than the window, 9 tokens to either side, of the second layer.
OF_MODERNBERT = {
    **SIZES, "local_attention": 18, "global_attn_every_n_layers": 2, "cls_token_id": 2,
    "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
OWN_SIZES: dict[str, dict[str, Any]] = {
    "distilbert": OF_DISTILBERT,
    "modernbert": {**OF_MODERNBERT, "classifier_pooling": "mean"},
    "modernbert-cls": {**OF_MODERNBERT, "classifier_pooling": "cls"},
}
TRAIN, TEST = 48, 21


def small(name: str, **changed: Any) -> Any:
    torch.manual_seed(0)
    sizes = {**OWN_SIZES.get(name, SIZES), **changed}
    config = AutoConfig.for_model(name.removesuffix("-cls"), **sizes)
    return AutoModelForSequenceClassification.from_config(config)


def lengths() -> np.ndarray:
    """Most are short, a few are long: in some batches parts pay, in others they do not."""
    random = np.random.default_rng(1)
    long = random.random(TRAIN + TEST) < 0.15
    return np.where(long, random.integers(45, 60, len(long)), random.integers(3, 20, len(long)))


def outcome(model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores, and the loss's gradient in one row."""
    model.zero_grad()
    result = model(**for_model(batch))
    result.loss.backward()
    return result.logits.detach(), torch.cat(
        [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    )


def by_each_text(
    rows: list[torch.Tensor], bounds: torch.Tensor, longest: int, dropout: float, scale: Any,
    window: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """What the kernel is to compute: attention within each text, or each token's window of it."""
    assert int(bounds.diff().max()) <= longest
    assert int(bounds[-1]) == len(rows[0])
    query, key, value = (
        [part.transpose(0, 1) for part in r.split(bounds.diff().tolist())] for r in rows
    )
    result = []
    for q, k, v in zip(query, key, value, strict=True):
        seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool)
        near = seen if window is None else seen.triu(1 - window).tril(window - 1)
        attend = torch.nn.functional.scaled_dot_product_attention
        result.append(attend(q, k, v, attn_mask=None if near.all() else near, scale=scale))
    return torch.cat([f.transpose(0, 1) for f in result])

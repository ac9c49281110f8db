"""Small text models, and lengths of texts of which some are padded far."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

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


def small(name: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name.removesuffix("-cls"), **OWN_SIZES.get(name, SIZES))
    return AutoModelForSequenceClassification.from_config(config)


def lengths() -> np.ndarray:
    """Most are short, a few are long: in some batches parts pay, in others they do not."""
    random = np.random.default_rng(1)
    long = random.random(TRAIN + TEST) < 0.15
    return np.where(long, random.integers(45, 60, len(long)), random.integers(3, 20, len(long)))

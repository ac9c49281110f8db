"""Tokenised texts: one flat array of tokens, from which batches are gathered (text_batches.py)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from harness.core.settings import Settings, UserError
from harness.train.data import embedded, models, sources
from harness.train.data.cache import cached
from harness.train.data.models import explain
from harness.train.data.samples import Data, as_data, chunks
from harness.train.data.text_batches import TextBatches, for_model


def load_texts(settings: Settings, world: int) -> Data:
    """The samples of a run whose forward passes take `world` batches of per_gpu_batch."""
    source = sources.load(settings)
    tokenizer = _tokenizer(settings, source)
    length = min(settings.max_length or 512, _max_length(settings, tokenizer))

    def tokenise(folder: Path) -> None:
        tokens: list[np.ndarray] = []
        types: list[np.ndarray] = []
        for rows in (rows for data in source.sets for rows in chunks(data)):
            columns = [rows[column] for column in source.inputs]
            encoded = tokenizer(
                *columns, truncation=True, max_length=length, return_token_type_ids=True
            )
            tokens += [np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"]]
            types += [np.asarray(ids, dtype=np.int8) for ids in encoded["token_type_ids"]]
        np.save(folder / "tokens.npy", np.concatenate(tokens))
        np.save(folder / "types.npy", np.concatenate(types))
        np.save(folder / "offsets.npy", np.cumsum([0, *map(len, tokens)]))

    key = {
        "texts": source.facts["data_checksum"],
        "samples": source.sizes,
        "tokenizer": _fingerprint(tokenizer),
        "max_length": length,
    }
    folder = cached(key, tokenise)
    collate = TextBatches(folder, source.all_labels, tokenizer, pair=len(source.inputs) == 2)
    facts = {"max_length": length, "mean_tokens": round(collate.mean_tokens(), 2)}
    return as_data(settings, source, world, collate, for_model, tokenizer, facts)


def _tokenizer(settings: Settings, source: sources.Source) -> Any:
    """The model's own, or one trained here for an architecture that brings none."""
    if models.named(settings) is None:
        models.check_name(settings)
        with explain("model", str(settings.model)):
            tokenizer = AutoTokenizer.from_pretrained(
                settings.model, trust_remote_code=settings.trust_remote_code
            )
    else:
        size = models.configuration(settings).vocab_size
        folder = cached(
            {"tokenizer_for": source.facts["data_checksum"], "vocabulary": size},
            lambda draft: _train_tokenizer(source, draft, size),
        )
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    if tokenizer.pad_token_id is None:
        raise UserError(f"--model {settings.model}: its tokenizer has no padding token")
    return tokenizer


def _train_tokenizer(source: sources.Source, folder: Path, size: int) -> None:
    texts = (text for column in source.inputs for text in source.train[column])
    embedded.train_tokenizer(texts, folder / "tokenizer", size)


def _max_length(settings: Settings, tokenizer: Any) -> int:
    positions = getattr(models.configuration(settings), "max_position_embeddings", None)
    limits = [n for n in (positions, tokenizer.model_max_length) if n is not None and n < 10**9]
    return min(limits, default=10**9)


def _fingerprint(tokenizer: Any) -> str:
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256((type(tokenizer).__name__ + vocabulary).encode()).hexdigest()

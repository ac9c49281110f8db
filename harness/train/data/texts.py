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
from harness.train.data.cache import Data, cached, chunks, cut_tail, indices
from harness.train.data.models import explain
from harness.train.data.text_batches import TextBatches, for_model


def load_texts(settings: Settings, world: int) -> Data:
    """The samples of a run whose forward passes take `world` batches of per_gpu_batch."""
    source = sources.load(settings)
    tokenizer = _tokenizer(settings, source)
    length = min(settings.max_length or 512, _longest(settings, tokenizer))

    def build(folder: Path) -> None:
        flat: list[np.ndarray] = []
        kinds: list[np.ndarray] = []
        offsets = [0]
        for data in source.sets:
            for part in chunks(len(data)):
                columns = [data[part][column] for column in source.inputs]
                encoded = tokenizer(
                    *columns,
                    truncation=True,
                    max_length=length,
                    return_token_type_ids=True,
                )
                for ids, types in zip(encoded["input_ids"], encoded["token_type_ids"], strict=True):
                    flat.append(np.asarray(ids, dtype=np.int32))
                    kinds.append(np.asarray(types, dtype=np.int8))
                    offsets.append(offsets[-1] + len(ids))
        np.save(folder / "tokens.npy", np.concatenate(flat))
        np.save(folder / "types.npy", np.concatenate(kinds))
        np.save(folder / "offsets.npy", np.asarray(offsets))

    folder = cached(
        {
            "texts": source.facts["data_checksum"],
            "samples": source.sizes,
            "tokenizer": _fingerprint_of(tokenizer),
            "max_length": length,
        },
        build,
    )
    used = cut_tail(settings, len(source.train), world)
    collate = TextBatches(folder, source.all_labels, tokenizer, pair=len(source.inputs) == 2)
    facts = {
        **source.facts,
        "train_samples": used,
        "left_out_samples": len(source.train) - used,
    }
    facts |= {"max_length": length, "mean_tokens": round(collate.mean_tokens(), 2)}
    return Data(
        *indices(source.sizes, used),
        collate,
        for_model,
        source.labels,
        tokenizer,
        facts,
    )


def _tokenizer(settings: Settings, source: sources.Source) -> Any:
    """The model's own, or one trained on the spot for an architecture that brings none."""
    entry = models.named(settings)
    if entry is None:
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


def _longest(settings: Settings, tokenizer: Any) -> int:
    positions = getattr(models.configuration(settings), "max_position_embeddings", None)
    longest = [n for n in (positions, tokenizer.model_max_length) if n is not None and n < 10**9]
    return min(longest, default=10**9)


def _fingerprint_of(tokenizer: Any) -> str:
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256((type(tokenizer).__name__ + vocabulary).encode()).hexdigest()

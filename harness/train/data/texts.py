"""Texts: tokenised once into one flat array, from which batches are gathered.

A batch is laid out as the model reads it:
packed  all tokens in one row, the shortest text first, with the bounds of each text
parts   one row per text; rows of similar length are fed together (parts_of)
batch   one row per text, padded to the longest of the batch
"""

from __future__ import annotations

import hashlib
import inspect
import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from harness.core.provenance import version_of
from harness.core.schema.environment import DataRecord
from harness.core.settings import Settings, UserError
from harness.train.data import embedded, models, sources
from harness.train.data.cache import cached
from harness.train.data.models import explain
from harness.train.data.samples import SHAPE, BatchShape, Data, as_data, chunks

# Rows of a batch, and how many of their columns hold tokens.
Parts = tuple[tuple[np.ndarray, int], ...]
# The entries of a batch with its parts, which the model does not see; those of evaluation alone.
PARTS, EVAL_PARTS = "parts", "eval_parts"
MAX_PARTS = 4
# The overhead of one more forward and backward pass, in tokens that could be computed instead. On a
# CPU, bert-mini with batches of 16 to 64 news texts: of 100, 300 and 1000, 100 was the fastest.
PART_TOKENS = 100
MAX_SHAPES = 8
SHAPE_STEP = 8  # sizes are multiples of this
MOST_UNKNOWN = 0.5  # of the tokens; a folder without a tokenizer gives one that knows no word
SIMULATED_BATCHES = 1000  # to see which sizes are usual


def load_texts(settings: Settings, world: int) -> Data:
    """The samples of a run whose forward passes take `world` batches of per_gpu_batch."""
    source = sources.load(settings)
    tokenizer = _tokenizer(settings, source)
    length = min(settings.max_length or 512, _max_length(settings, tokenizer))

    def tokenise(folder: Path) -> None:
        tokens: list[np.ndarray] = []
        types: list[np.ndarray] = []
        truncated: list[bool] = []
        for rows in (rows for data in source.sets.values() for rows in chunks(data)):
            columns = [rows[column] for column in source.inputs]
            encoded = tokenizer(
                *columns, truncation=True, max_length=length, return_token_type_ids=True
            )
            # GPT-2 makes no token of an empty text, and no model reads a row without columns.
            ids = [ids or [tokenizer.pad_token_id] for ids in encoded["input_ids"]]
            tokens += [np.asarray(of_text, dtype=np.int32) for of_text in ids]
            types += [np.asarray(ids or [0], dtype=np.int8) for ids in encoded["token_type_ids"]]
            truncated += [bool(each.overflowing) for each in encoded.encodings or ()]
        np.save(folder / "tokens.npy", every := np.concatenate(tokens))
        np.save(folder / "counts.npy", np.bincount(every))
        np.save(folder / "types.npy", np.concatenate(types))
        np.save(folder / "truncated.npy", sum(truncated) if truncated else -1)
        np.save(folder / "offsets.npy", np.cumsum([0, *map(len, tokens)]))

    key = {
        "texts": source.facts["data_checksum"],
        "samples": source.sizes,
        "tokenizer": _fingerprint(tokenizer),
        "versions": {name: version_of(name) for name in ("transformers", "tokenizers")},
        "max_length": length,
    }
    folder = cached(key, tokenise)
    # A model without use for token types may take them for something else, as GPT-2 does. In single
    # texts, XLNet and Funnel mark one token with a type of its own.
    typed = "token_type_ids" in tokenizer.model_input_names
    typed = typed and bool(np.load(folder / "types.npy", mmap_mode="r").any())
    collate = TextBatches(folder, source.all_labels, tokenizer, typed)
    unknown = collate.unknown_share(tokenizer)
    if unknown > MOST_UNKNOWN:
        lacks = f"its tokenizer does not know {unknown:.0%} of the tokens of these texts"
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            lacks = "there is no tokenizer in its folder"
        raise UserError(
            f"--model {settings.model}: {lacks}: save the tokenizer that belongs to it there "
            "(save_pretrained)"
        )
    truncated = int(np.load(folder / "truncated.npy"))
    facts: DataRecord = {
        "max_length": length,
        "mean_tokens": round(collate.mean_tokens(), 2),
        "truncated_texts": None if truncated < 0 else truncated,
    }
    return as_data(settings, source, world, collate, for_model, tokenizer, facts)


def _tokenizer(settings: Settings, source: sources.Source) -> Any:
    """The model's own tokenizer, or one trained here for an architecture that brings none."""
    if models.named(settings) is None:
        models.check_kind(settings)
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
        # GPT-2 and its kin have no padding token: padding is masked, and any token will do.
        if tokenizer.eos_token_id is None:
            raise UserError(
                f"--model {settings.model}: its tokenizer has no padding token, and no end token "
                "to take its place: save it with pad_token set, and name that folder"
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _train_tokenizer(source: sources.Source, folder: Path, size: int) -> None:
    texts = (text for column in source.inputs for text in source.train[column])
    embedded.train_tokenizer(texts, folder / "tokenizer", size)


def _max_length(settings: Settings, tokenizer: Any) -> int:
    both = models.max_tokens(settings), tokenizer.model_max_length
    limits = [n for n in both if n and 0 < n < 10**9]
    return min(limits, default=10**9)


def _fingerprint(tokenizer: Any) -> str:
    """A checksum of everything that tokens depend on."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer in Python has its rules in its class and arguments
        rules = {"vocabulary": tokenizer.get_vocab(), "arguments": tokenizer.init_kwargs}
    else:
        rules = json.loads(backend.to_str())
        del rules["truncation"], rules["padding"]  # what its last call was asked for
    kind = [type(tokenizer).__name__, tokenizer.truncation_side, tokenizer.model_input_names]
    kind.append(models.code_of(tokenizer))
    text = json.dumps([kind, tokenizer.special_tokens_map, rules], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Layout:
    """How batches are laid out; text_layout chooses it for a model on a device."""

    kind: str = "batch"
    attention: str = ""  # of packed texts: runs, padded or kernel (text_layout.py)
    first_position: int = 0  # where a model begins to count positions
    few_shapes: bool = False  # round sizes up, because every new shape is compiled
    row_step: int = 1  # fill packed rows up to a multiple of it: a new length costs some preparing
    by_length: bool = False  # evaluate texts of one length together: no padding is read


def split_by_length(lengths: np.ndarray) -> Parts:
    """Split texts into at most MAX_PARTS parts of similar length, at the least total cost."""
    order = np.argsort(lengths, kind="stable")
    ordered, count = lengths[order], len(lengths)
    # cost[i, j]: the texts from i to j, both included, as one part.
    begins, ends = np.arange(count)[:, None], np.arange(1, count + 1)
    cost = np.where(begins < ends, (ends - begins) * ordered[ends - 1] + PART_TOKENS, np.inf)
    best, cuts = [cost[0]], [np.zeros(count, dtype=np.int64)]
    for _ in range(1, min(MAX_PARTS, count)):
        # The texts before i in the parts so far, the rest in one more.
        total = best[-1][:-1, None] + cost[1:]
        cuts.append(total.argmin(axis=0) + 1)
        best.append(total.min(axis=0))
    end, parts = count, []
    for number in range(int(np.argmin([costs[-1] for costs in best])), -1, -1):
        begin = int(cuts[number][end - 1])
        parts.append((order[begin:end], int(ordered[end - 1])))
        end = begin
    return tuple(reversed(parts))


def alike(lengths: np.ndarray) -> Parts:
    """One part for each length: none has padding."""
    return tuple((np.flatnonzero(lengths == size), int(size)) for size in np.unique(lengths))


def size_buckets(lengths: np.ndarray, texts: int, packed: bool) -> list[int]:
    """At most MAX_SHAPES sizes for all batches of so many texts, close to the usual ones.

    The size of a batch is that of its longest text, or of all its texts in one row if packed.
    """
    drawn = np.random.default_rng(0).choice(lengths, (SIMULATED_BATCHES, texts))
    usual = np.quantile(
        drawn.sum(axis=1) if packed else drawn.max(axis=1),
        np.arange(1, MAX_SHAPES) / (MAX_SHAPES - 1),
        method="higher",
    )
    # A packed row may have any length; a padded one must not exceed the positions of the model.
    longest = int(lengths.max())
    largest = -(-longest * texts // SHAPE_STEP) * SHAPE_STEP if packed else longest
    rounded = (-(-int(size) // SHAPE_STEP) * SHAPE_STEP for size in usual)
    return sorted({largest, *(min(size, largest) for size in rounded)})


class TextBatches:
    """The collator: sample numbers -> one batch."""

    def __init__(self, folder: Path, labels: np.ndarray, tokenizer: Any, typed: bool) -> None:
        # Plain views, because every access to a np.memmap object is slower.
        self.tokens = np.asarray(np.load(folder / "tokens.npy", mmap_mode="r"))
        self.counts = np.load(folder / "counts.npy")  # of each token
        types = np.load(folder / "types.npy", mmap_mode="r") if typed else None
        self.types = None if types is None else np.asarray(types)
        self.offsets = np.load(folder / "offsets.npy")
        self.labels = labels
        self.pad = tokenizer.pad_token_id
        self.pads_left = getattr(tokenizer, "padding_side", "right") == "left"
        self.end_token = getattr(tokenizer, "eos_token", None)
        self.layout = Layout()
        self.buckets: dict[int, list[int]] = {}  # by the number of texts in a batch

    def check_model(self, name: str, model: Any) -> None:
        """Refuse a model that has no embedding for a token; on a GPU the first step would end the
        run without naming the cause.
        """
        kinds = getattr(getattr(model, "config", None), "type_vocab_size", None)
        largest_type = -1 if self.types is None else int(self.types.max())
        for what, largest, known in (
            ("tokens", max(len(self.counts) - 1, self.pad), tokens_of(model)),
            ("token types", largest_type, kinds),
        ):
            if known and largest >= known:
                raise UserError(
                    f"--model {name}: its tokenizer gives {what} up to {largest}, and the model "
                    f"knows those below {known}: save the tokenizer that belongs to it there"
                )
        end = getattr(getattr(model, "config", None), "eos_token_id", None)
        if isinstance(end, int) and classifies_by_ends(model):
            self._check_ends(name, end)

    def _check_ends(self, name: str, end: int) -> None:
        """Refuse texts without one end: the first batch with such a text would end the run."""
        places = np.flatnonzero(self.tokens == end)
        ends = np.diff(np.searchsorted(places, self.offsets))
        usual = int(np.bincount(ends).argmax())
        if usual == 0:
            raise UserError(
                f"--model {name}: it classifies by a text's end token, number {end}, and its "
                "tokenizer adds none: save a tokenizer that does there"
            )
        if others := int((ends != usual).sum()):
            raise UserError(
                f"--model {name}: it classifies by a text's end token, and {others} texts have "
                f"{self.end_token} elsewhere, too: remove it from them"
            )

    def unknown_share(self, tokenizer: Any) -> float:
        """The share of unknown tokens in the texts, without those that a tokenizer adds."""
        added = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        of_texts = self.counts.sum() - sum(self.counts[i] for i in added if i < len(self.counts))
        unknown = tokenizer.unk_token_id
        known = unknown is None or unknown >= len(self.counts) or unknown == self.pad
        return 0.0 if known else float(self.counts[unknown] / max(of_texts, 1))

    def mean_tokens(self) -> float:
        return float(self.offsets[-1] / (len(self.offsets) - 1))

    def __call__(self, samples: Any) -> dict[str, Any]:
        samples = np.asarray(samples)
        lengths = self.offsets[samples + 1] - self.offsets[samples]
        gather = self._packed if self.layout.kind == "packed" else self._padded
        return {"labels": torch.from_numpy(self.labels[samples]), **gather(samples, lengths)}

    def _padded(self, samples: np.ndarray, lengths: np.ndarray) -> dict[str, Any]:
        """One row per text, masked beyond its end."""
        shape = (len(samples), self._rounded_up(int(lengths.max()), len(samples)))
        columns = np.arange(shape[1])
        inside = (columns[::-1] if self.pads_left else columns) < lengths[:, None]
        parts = split_by_length(lengths) if self.layout.kind == "parts" else ()
        in_evaluation = alike(lengths) if self.layout.by_length else ()
        sizes = [(len(rows), columns) for rows, columns in parts] or [shape]
        tokens = sum(rows * columns for rows, columns in sizes)
        squares = sum(rows * columns * columns for rows, columns in sizes)
        return {
            **self._columns(samples, lengths, shape, inside),
            "attention_mask": torch.from_numpy(inside.astype(np.int64)),
            SHAPE: _shape(lengths, tokens, squares),
            **({PARTS: parts} if len(parts) > 1 else {}),
            **({EVAL_PARTS: in_evaluation} if len(in_evaluation) > 1 else {}),
        }

    def _packed(self, samples: np.ndarray, lengths: np.ndarray) -> dict[str, Any]:
        """All tokens in one row; in order of length, so that texts of equal length are adjacent."""
        order = np.argsort(lengths, kind="stable")
        ordered = lengths[order]
        ends = np.cumsum(ordered)
        begins, tokens = ends - ordered, int(ends[-1])
        total = self._rounded_up(tokens, len(samples))
        total = -(-total // self.layout.row_step) * self.layout.row_step
        shape, inside = (1, total), np.s_[0, :tokens]
        positions = np.full(shape, self.layout.first_position, dtype=np.int64)
        positions[inside] += np.arange(tokens) - np.repeat(begins, ordered)
        first = np.empty_like(begins)
        first[order] = begins  # in the order of the samples, as the results have to be
        attention, few_shapes = self.layout.attention, self.layout.few_shapes
        longest = int(ordered[-1])
        fill = [total - tokens] if total > tokens else []
        if few_shapes:  # compiled in once: the longest text of all, and how many fill a row up
            longest = self._longest
            fill = self._fill(total - tokens, longest, len(samples))
        inputs = attention_inputs(attention, ordered, longest, fill)
        squares = int((ordered * ordered).sum()) + sum(length * length for length in fill)
        if attention == "padded":
            squares = len(samples) * int(ordered[-1]) ** 2
        return {
            **self._columns(samples[order], ordered, shape, inside),
            "position_ids": torch.from_numpy(positions),
            "texts": {
                "first": torch.from_numpy(first),
                "lengths": torch.from_numpy(lengths),
                **inputs,
            },
            SHAPE: _shape(lengths, total, squares),
        }

    def _columns(
        self, samples: np.ndarray, lengths: np.ndarray, shape: tuple[int, int], inside: Any
    ) -> dict[str, torch.Tensor]:
        """The tokens of these texts, put one after the other into the places that are `inside`."""
        ends = np.cumsum(lengths)
        shifts = self.offsets[samples] - (ends - lengths)
        places = np.arange(ends[-1]) + np.repeat(shifts, lengths)

        def fill(flat: np.ndarray, padding: int) -> torch.Tensor:
            filled = np.full(shape, padding, dtype=np.int64)
            filled[inside] = flat[places]
            return torch.from_numpy(filled)

        columns = {"input_ids": fill(self.tokens, self.pad)}
        return columns if self.types is None else columns | {"token_type_ids": fill(self.types, 0)}

    def _rounded_up(self, size: int, texts: int) -> int:
        if not self.layout.few_shapes:
            return size
        sizes = self.sizes_of(texts)
        return sizes[bisect_left(sizes, size)]

    def sizes_of(self, texts: int) -> list[int]:
        """The numbers of columns of batches of so many texts, where the layout has few shapes."""
        if texts not in self.buckets:
            packed = self.layout.kind == "packed"
            self.buckets[texts] = size_buckets(np.diff(self.offsets), texts, packed)
        return self.buckets[texts]

    @cached_property
    def _longest(self) -> int:
        """The tokens of the longest text."""
        return int(np.diff(self.offsets).max())

    def _fill(self, tokens: int, longest: int, texts: int) -> list[int]:
        """The lengths, none above the longest, of what fills up a row of so many texts by so many
        tokens; as many for all rows, so that some are 0. The kernel reserves work for each text as
        if it were the longest, and computes the square of its length: one filler of thousands of
        tokens would cost more than all texts.
        """
        most = int(np.diff([0, *self.sizes_of(texts)]).max())
        whole, rest = divmod(tokens, longest)
        pieces = -(-most // longest)
        return ([longest] * whole + [rest] + [0] * pieces)[:pieces]


def classifies_by_ends(model: Any) -> bool:
    """Whether a model demands as many end tokens in each text, and classifies by the last one."""
    try:
        return "same number of <eos> tokens" in inspect.getsource(type(model).forward)
    except (OSError, TypeError, AttributeError):
        return False


def tokens_of(model: Any) -> int | None:
    """The number of token embeddings of a model; None if its configuration does not say."""
    try:
        table = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # a user's model, and few of transformers
        return None
    return table.num_embeddings if isinstance(table, torch.nn.Embedding) else None


def attention_inputs(
    attention: str, lengths: np.ndarray, longest: int, fill: Sequence[int] = ()
) -> dict[str, Any]:
    """What packed attention needs to keep texts of these lengths apart, in the order of the row.
    fill: the lengths of what fills it up.
    """
    ends = np.cumsum(lengths)
    if attention == "kernel":
        bounds = np.cumsum([0, *lengths, *fill])
        return {"bounds": torch.from_numpy(bounds.astype(np.int32)), "longest": longest}
    if attention == "padded":
        columns = np.arange(longest)
        inside = columns < lengths[:, None]
        # Padding reads the tokens behind a text, each once: if all padding read one token, its
        # gradients, which are zeros, would be added up there one after the other.
        places = ((ends - lengths)[:, None] + columns) % ends[-1]
        return {
            "places": torch.from_numpy(places),
            "inside": torch.from_numpy(inside[:, None, None]),
            "back": torch.from_numpy(np.flatnonzero(inside)),
        }
    sizes, counts = np.unique(lengths, return_counts=True)
    runs = list(zip(counts.tolist(), sizes.tolist(), strict=True))
    return {"runs": [*runs, *((1, length) for length in fill)]}


def for_model(inputs: dict[str, Any]) -> dict[str, Any]:
    """A batch without what only the trainer reads."""
    return {name: value for name, value in inputs.items() if name not in (SHAPE, PARTS, EVAL_PARTS)}


def _shape(lengths: np.ndarray, tokens: int, squares: int) -> BatchShape:
    own_squares = int((lengths * lengths).sum())
    return BatchShape(len(lengths), int(tokens), int(squares), int(lengths.sum()), own_squares)


def _division(inputs: dict[str, Any], evaluates: bool) -> Parts:
    parts: Parts = inputs.get(PARTS, ())
    return parts or (inputs.get(EVAL_PARTS, ()) if evaluates else ())


def parts_of(inputs: dict[str, Any], evaluates: bool = False) -> list[dict[str, Any]]:
    """The parts of a batch, each without the columns in which it has no tokens; [] if undivided."""
    parts = []
    for rows, width in _division(inputs, evaluates):
        chosen = torch.from_numpy(rows)
        mask = inputs["attention_mask"][chosen]
        columns = slice(width) if mask[:, 0].all() else slice(mask.shape[1] - width, None)
        parts.append({
            name: value[chosen] if name == "labels" else value[chosen, columns]
            for name, value in for_model(inputs).items()
        })  # fmt: skip
    return parts


def join_predictions(inputs: dict[str, Any], predictions: Sequence[Any]) -> tuple[Any, Any, Any]:
    """(loss, logits, labels) of a batch from those of its parts, in the order of the batch."""
    labels = torch.cat([of for _, _, of in predictions])
    losses = [loss * (len(of) / len(labels)) for loss, _, of in predictions]
    logits = torch.cat([of[0] if isinstance(of, tuple) else of for _, of, _ in predictions])
    rows = [torch.from_numpy(rows) for rows, _ in _division(inputs, evaluates=True)]
    order = torch.cat(rows).argsort().to(labels.device)
    return torch.stack(losses).sum(), logits[order], labels[order]

"""Arithmetic with the lengths of texts: which are fed together, and to what they are rounded up."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Rows of a batch, and how many of their columns hold tokens.
Parts = tuple[tuple[np.ndarray, int], ...]


MOST_PARTS = 4


# What a forward and backward pass of its own costs, in tokens that could be computed instead. On a
# CPU, bert-mini with batches of 16 to 64 news texts: of 100, 300 and 1000, 100 was the fastest.
PART_TOKENS = 100


MOST_SHAPES = 8


DRAWS = 1000  # of batches, to see which sizes are usual


STEP = 8  # sizes are multiples of this


def split(lengths: np.ndarray) -> Parts:
    """The texts in at most MOST_PARTS parts of like length, so that the least is computed."""
    order = np.argsort(lengths, kind="stable")
    ordered, count = lengths[order], len(lengths)
    # cost[i, j]: of the texts from i to before j as one part.
    begins, ends = np.arange(count)[:, None], np.arange(1, count + 1)
    cost = np.where(begins < ends, (ends - begins) * ordered[ends - 1] + PART_TOKENS, np.inf)
    best, cuts = [cost[0]], [np.zeros(count, dtype=np.int64)]
    for _ in range(1, min(MOST_PARTS, count)):
        # Up to i in the parts before, the rest in one more.
        total = best[-1][:-1, None] + cost[1:]
        cuts.append(total.argmin(axis=0) + 1)
        best.append(total.min(axis=0))
    end, parts = count, []
    for number in range(int(np.argmin([each[-1] for each in best])), -1, -1):
        begin = int(cuts[number][end - 1])
        parts.append((order[begin:end], int(ordered[end - 1])))
        end = begin
    return tuple(reversed(parts))


def edges_of(lengths: np.ndarray, texts: int, in_a_row: bool) -> list[int]:
    """At most MOST_SHAPES sizes for all batches of so many texts, close to those that are usual.

    The size of a batch is that of its longest text, or of all its texts in a row.
    """
    drawn = np.random.default_rng(0).choice(lengths, (DRAWS, texts))
    usual = np.quantile(
        drawn.sum(axis=1) if in_a_row else drawn.max(axis=1),
        np.arange(1, MOST_SHAPES) / (MOST_SHAPES - 1),
        method="higher",
    )
    # A model may have no position behind its longest text; a row may be of any length.
    most = -(-int(lengths.max()) * texts // STEP) * STEP if in_a_row else int(lengths.max())
    return sorted({most, *(min(-(-int(size) // STEP) * STEP, most) for size in usual)})


def next_edge(edges: list[int], size: int) -> int:
    return edges[bisect_left(edges, size)]


# ----
# Batches of texts, gathered from one flat array of tokens and laid out as the model reads them.
#
# packed  all tokens in one row, the shortest text first, and where each text begins (packed.py)
# parts   one row a text, and which rows are fed together because they are of like length (parts.py)
# batch   one row a text, padded to the longest of the batch

AMOUNT = "amount"  # of a batch; the model does not see it


@dataclass(frozen=True)
class Amount:
    """What a batch makes a model compute, known on the host: see measure.flops.Work.of."""

    texts: int
    tokens: int  # of the texts themselves
    squares: int  # of their lengths, added up
    computed_tokens: int  # padding included
    computed_squares: int
    parts: Parts = ()  # what is fed by itself: rows of the batch, and how many of their columns


@dataclass(frozen=True)
class Layout:
    """How batches are laid out; the trainer says so when it knows model and device."""

    kind: str = "batch"
    attention: str = ""  # of packed texts: runs, padded or kernel (packed.py)
    first_position: int = 0  # where a model begins to count positions
    few_shapes: bool = False  # sizes are rounded up: each size is compiled by itself


class TextBatches:
    """Sample numbers -> one batch."""

    def __init__(self, folder: Path, labels: np.ndarray, tokenizer: Any, pair: bool) -> None:
        # Plain views: numpy's own class for files is slower with every look.
        self.tokens = np.asarray(np.load(folder / "tokens.npy", mmap_mode="r"))
        types = np.load(folder / "types.npy", mmap_mode="r") if pair else None
        self.types = None if types is None else np.asarray(types)
        self.offsets = np.load(folder / "offsets.npy")
        self.labels = labels
        self.pad = tokenizer.pad_token_id
        self.layout = Layout()
        self.edges: dict[int, list[int]] = {}  # by the size of a batch

    def mean_tokens(self) -> float:
        return float(self.offsets[-1] / (len(self.offsets) - 1))

    def __call__(self, samples: np.ndarray) -> dict[str, Any]:
        samples = np.asarray(samples)
        return self.packed(samples) if self.layout.kind == "packed" else self.padded(samples)

    def padded(self, samples: np.ndarray) -> dict[str, Any]:
        """A row a text; what lies beyond its end is masked."""
        lengths = self.offsets[samples + 1] - self.offsets[samples]
        longest = self._rounded_up(int(lengths.max()), len(samples))
        parts = split(lengths) if self.layout.kind == "parts" else ()
        shape = (len(samples), longest)
        inside = np.arange(longest) < lengths[:, None]
        places = self._places(samples, lengths)

        def rows(flat: np.ndarray, beyond: int) -> torch.Tensor:
            filled = np.full(shape, beyond, dtype=np.int64)
            filled[inside] = flat[places]
            return torch.from_numpy(filled)

        batch: dict[str, Any] = {
            "labels": torch.from_numpy(self.labels[samples]),
            "input_ids": rows(self.tokens, self.pad),
            "attention_mask": torch.from_numpy(inside.astype(np.int64)),
        }
        if self.types is not None:
            batch["token_type_ids"] = rows(self.types, 0)
        sizes = [(len(found), columns) for found, columns in parts] or [shape]
        batch[AMOUNT] = _amount(
            lengths, sum(n * c for n, c in sizes), sum(n * c * c for n, c in sizes), parts
        )
        return batch

    def packed(self, samples: np.ndarray) -> dict[str, Any]:
        """One row of all tokens: for runs of equal lengths the texts are in order of length."""
        lengths = self.offsets[samples + 1] - self.offsets[samples]
        order = np.argsort(lengths, kind="stable")
        ordered = lengths[order]
        ends = np.cumsum(ordered)
        begins = ends - ordered
        total = self._rounded_up(int(ends[-1]), len(samples))
        places = self._places(samples[order], ordered)

        def row(flat: np.ndarray, beyond: int) -> torch.Tensor:
            filled = np.full((1, total), beyond, dtype=np.int64)
            filled[0, : len(places)] = flat[places]
            return torch.from_numpy(filled)

        positions = np.full((1, total), self.layout.first_position, dtype=np.int64)
        positions[0, : len(places)] += np.arange(len(places)) - np.repeat(begins, ordered)
        first = np.empty_like(begins)
        first[order] = begins  # as the samples were given, so that results are in their order
        batch: dict[str, Any] = {
            "labels": torch.from_numpy(self.labels[samples]),
            "input_ids": row(self.tokens, self.pad),
            "position_ids": torch.from_numpy(positions),
            "texts": {"first": torch.from_numpy(first), **self._attended(ordered, ends, total)},
        }
        if self.types is not None:
            batch["token_type_ids"] = row(self.types, 0)
        squares = int((ordered * ordered).sum()) + (total - int(ends[-1])) ** 2
        if self.layout.attention == "padded":
            squares = len(samples) * int(ordered[-1]) ** 2
        batch[AMOUNT] = _amount(lengths, total, squares)
        return batch

    def _places(self, samples: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Of the tokens of these texts, one text after the other, in the flat array."""
        ends = np.cumsum(lengths)
        shifts = self.offsets[samples] - (ends - lengths)
        return np.arange(ends[-1]) + np.repeat(shifts, lengths)

    def _attended(self, lengths: np.ndarray, ends: np.ndarray, total: int) -> dict[str, Any]:
        """What attention must know to keep texts apart, in the words of packed.attention."""
        if self.layout.attention == "kernel":
            bounds = [0, *ends.tolist(), *([total] if self.layout.few_shapes else [])]
            longest = self._bound(len(lengths)) if self.layout.few_shapes else int(lengths[-1])
            return {"bounds": torch.tensor(bounds, dtype=torch.int32), "longest": longest}
        if self.layout.attention == "padded":
            columns = np.arange(lengths[-1])
            inside = columns < lengths[:, None]
            places = np.where(inside, (ends - lengths)[:, None] + columns, 0)
            return {
                "places": torch.from_numpy(places),
                "inside": torch.from_numpy(inside[:, None, None]),
                "back": torch.from_numpy(np.flatnonzero(inside)),
            }
        sizes, counts = np.unique(lengths, return_counts=True)
        return {"runs": list(zip(counts.tolist(), sizes.tolist(), strict=True))}

    # ---- few shapes ----

    def _rounded_up(self, size: int, texts: int) -> int:
        return next_edge(self._edges(texts), size) if self.layout.few_shapes else size

    def _edges(self, texts: int) -> list[int]:
        if texts not in self.edges:
            in_a_row = self.layout.kind == "packed"
            self.edges[texts] = edges_of(np.diff(self.offsets), texts, in_a_row)
        return self.edges[texts]

    def _bound(self, texts: int) -> int:
        """No text is longer, nor what fills a row up: a number that is compiled in once."""
        steps = np.diff([0, *self._edges(texts)])
        return int(max(np.diff(self.offsets).max(), steps.max()))


def for_model(inputs: dict[str, Any]) -> dict[str, Any]:
    """A batch without what only the trainer reads."""
    return {name: value for name, value in inputs.items() if name != AMOUNT}


def _amount(lengths: np.ndarray, tokens: int, squares: int, parts: Parts = ()) -> Amount:
    real, real_squares = int(lengths.sum()), int((lengths * lengths).sum())
    return Amount(len(lengths), real, real_squares, int(tokens), int(squares), parts)

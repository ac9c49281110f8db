"""Which texts are fed together, to what sizes are rounded up, and what a batch then holds."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from harness.train.data.samples import SHAPE
from harness.train.data.texts import (
    MAX_PARTS,
    MAX_SHAPES,
    PART_TOKENS,
    Layout,
    for_model,
    size_buckets,
    split_by_length,
)
from tests.support.samples import PAD, text_batches


def computed(parts: list[tuple[int, int]]) -> int:
    return sum(rows * columns + PART_TOKENS for rows, columns in parts)


def cheapest(lengths: np.ndarray) -> int:
    """By trying every way to cut the texts in order of length."""
    ordered, count = np.sort(lengths), len(lengths)
    counts = []
    for pieces in range(1, min(MAX_PARTS, count) + 1):
        for cuts in itertools.combinations(range(1, count), pieces - 1):
            edges = [0, *cuts, count]
            counts.append(computed([(b - a, ordered[b - 1]) for a, b in itertools.pairwise(edges)]))
    return min(counts)


@pytest.mark.parametrize("draw", range(12))
def test_parts_are_the_cheapest_and_hold_each_text_once(draw: int) -> None:
    random = np.random.default_rng(draw)
    lengths = random.integers(1, random.choice([30, 400]), random.integers(1, 11))
    parts = split_by_length(lengths)
    assert sorted(np.concatenate([rows for rows, _ in parts]).tolist()) == list(range(len(lengths)))
    assert all(columns == lengths[rows].max() for rows, columns in parts)
    assert 1 <= len(parts) <= MAX_PARTS
    assert computed([(len(rows), columns) for rows, columns in parts]) == cheapest(lengths)


def test_texts_of_one_length_are_one_part_and_outliers_one_of_their_own() -> None:
    assert len(split_by_length(np.full(64, 50))) == 1
    (most, few) = split_by_length(np.array([300, *[20] * 31]))
    assert most[1] == 20 and len(most[0]) == 31
    assert few[1] == 300 and few[0].tolist() == [0]


@pytest.mark.parametrize("layout", ["batch", "parts"])
def test_a_padded_batch_is_its_texts_and_padding(layout: str, tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(3, 90, 50)
    batches = text_batches(tmp_path, lengths)
    batches.layout = Layout(layout)
    samples = np.array([7, 3, 3, 49, 20])
    batch, longest = batches(samples), lengths[samples].max()
    for row, sample in enumerate(samples):
        begin, end = batches.offsets[sample : sample + 2]
        beyond = longest - lengths[sample]
        expected = [*batches.tokens[begin:end], *[PAD] * beyond]
        assert batch["input_ids"][row].tolist() == expected
        types = batches.types
        assert types is not None
        assert batch["token_type_ids"][row].tolist() == [*types[begin:end], *[0] * beyond]
        mask = [1] * lengths[sample] + [0] * beyond
        assert batch["attention_mask"][row].tolist() == mask
    assert batch["labels"].tolist() == batches.labels[samples].tolist()
    assert {str(v.dtype) for v in for_model(batch).values()} == {"torch.int64"}


def test_what_is_computed_is_counted(tmp_path: Path) -> None:
    lengths = np.array([5, 9, 9, 3])
    batches, counts = text_batches(tmp_path, lengths), {}
    for kind, attention in (("batch", ""), ("packed", "runs"), ("packed", "padded")):
        batches.layout = Layout(kind, attention)
        shape = batches(np.arange(4))[SHAPE]
        assert (shape.samples, shape.text_tokens) == (4, 26)
        assert shape.text_squares == 25 + 81 + 81 + 9
        counts[kind, attention] = (shape.tokens, shape.squares)
    assert counts == {
        ("batch", ""): (36, 4 * 81),
        ("packed", "runs"): (26, 196),
        ("packed", "padded"): (26, 4 * 81),
    }
    batches = text_batches(tmp_path, [5, 9, 300])
    batches.layout = Layout("parts")
    shape = batches(np.arange(3))[SHAPE]
    assert shape.tokens == 2 * 9 + 300
    assert shape.squares == 2 * 81 + 300 * 300


LAYOUTS = [Layout(few_shapes=True), Layout("packed", "kernel", few_shapes=True)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["batch", "packed"])
@pytest.mark.parametrize("size", [1, 16, 64])
def test_batches_have_few_shapes(layout: Layout, size: int, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    lengths = np.minimum(random.lognormal(3.9, 0.4, 3000).astype(int) + 3, 203)
    batches = text_batches(tmp_path, lengths)
    batches.layout = layout
    drawn = [batches(random.choice(len(lengths), size, replace=False)) for _ in range(400)]
    shapes = {batch["input_ids"].shape for batch in drawn}
    assert 1 < len(shapes) <= MAX_SHAPES
    assert max(shape[1] for shape in shapes) <= (203 if layout.kind == "batch" else 208 * size)
    if size > 1:
        rounded, packed = sum(b[SHAPE].tokens for b in drawn), layout.kind == "packed"
        needed = sum(
            b[SHAPE].text_tokens if packed else size * int(b["attention_mask"].sum(1).max())
            for b in drawn
        )
        assert rounded < 1.1 * needed
    if layout.kind == "packed":
        # Compiled in as numbers: the same for all batches, and no text or filling is longer.
        inputs = [batch["texts"] for batch in drawn]
        assert len({each["longest"] for each in inputs}) == 1
        (count,) = {len(each["bounds"]) for each in inputs}
        gap = int(np.diff([0, *batches.sizes_of(size)]).max())
        assert count == size + 1 + -(-gap // int(lengths.max())) <= 2 * size + 2
        steps = [each["bounds"].diff() for each in inputs]
        assert inputs[0]["longest"] == lengths.max()
        assert all(step.min() >= 0 and step.max() <= lengths.max() for step in steps)
        squares = [int((step.long() ** 2).sum()) for step in steps]
        assert squares == [batch[SHAPE].squares for batch in drawn]
        assert all(
            each["bounds"][-1] == batch["input_ids"].shape[1]
            for each, batch in zip(inputs, drawn, strict=True)
        )


def test_no_size_is_beyond_the_longest_text() -> None:
    edges = size_buckets(np.array([3, 5, 13]), 4, packed=False)
    assert max(edges) == 13  # a model may have thirteen positions
    assert size_buckets(np.array([3, 5, 13]), 4, packed=True)[-1] == 56

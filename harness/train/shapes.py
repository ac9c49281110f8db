"""How much a forward pass is given to compute, known on the host: a GPU is asked for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from harness.train.text_batches import AMOUNT, Amount


@dataclass(frozen=True)
class Shape:
    """Samples of a forward pass, with their tokens and the squares of their lengths in tokens.

    As they are computed, padding included, and of the texts alone: None where nobody knows those.
    Images have no tokens.
    """

    samples: int
    tokens: int | None = None
    squares: int | None = None
    text_tokens: int | None = None
    text_squares: int | None = None


def shape_of(inputs: Mapping[str, Any]) -> Shape:
    """Of a batch, before it is copied to a device; texts say themselves what they make of it."""
    samples = len(inputs["labels"])
    amount: Amount | None = inputs.get(AMOUNT)
    if amount is not None:
        return Shape(
            samples, amount.computed_tokens, amount.computed_squares, amount.tokens, amount.squares
        )
    if (ids := inputs.get("input_ids")) is None:
        return Shape(samples)
    texts, longest = ids.shape
    return Shape(samples, texts * longest, texts * longest * longest)


def added(one: Shape, other: Shape) -> Shape:
    """Of two forward passes together; unknown where one is."""
    pairs = zip(astuple(one), astuple(other), strict=True)
    sums: list[Any] = [None if None in pair else sum(pair) for pair in pairs]
    return Shape(*sums)

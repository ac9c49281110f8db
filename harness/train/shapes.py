"""How much a forward pass is given to compute, known on the host: a GPU is asked for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch


class Batch(dict[str, torch.Tensor]):
    """Tensors of a batch that remembers how long its texts are.

    No entry of it: models take what they are given by name. The lengths stay with the batch through
    the loader's processes, its pinned memory and accelerate's copy to the device.
    """

    lengths: np.ndarray | None = None

    def to(self, device: Any, non_blocking: bool = False) -> Batch:
        """As accelerate moves what can move itself."""
        moved = Batch({k: v.to(device, non_blocking=non_blocking) for k, v in self.items()})
        moved.lengths = self.lengths
        return moved


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


def shape_of(inputs: Mapping[str, Any], lengths: np.ndarray | None = None) -> Shape:
    """Of a batch as the model is given it: texts are padded to the longest of them."""
    samples = len(inputs["labels"])
    ids = inputs.get("input_ids")
    if ids is None:
        return Shape(samples)
    texts, longest = ids.shape
    mask = inputs.get("attention_mask")
    if lengths is None and mask is not None and mask.device.type == "cpu":
        lengths = mask.sum(1).numpy()
    known = (None, None) if lengths is None else (int(lengths.sum()), int(lengths @ lengths))
    return Shape(samples, texts * longest, texts * longest * longest, *known)


def added(one: Shape, other: Shape) -> Shape:
    """Of two forward passes together; unknown where one is."""
    pairs = zip(astuple(one), astuple(other), strict=True)
    sums: list[Any] = [None if None in pair else sum(pair) for pair in pairs]
    return Shape(*sums)

"""Floating point operations that training takes, from the shapes of a model.

A multiplication with its addition counts as two, as everywhere. Only what multiplies matrices
counts: layers that are linear, convolutions, and attention. The backward pass takes twice the
forward pass, but for the first layer of an image, whose input needs no gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

CLOSED, COUNTED = "closed form", "counted"
FORWARD_AND_BACKWARD = 3
NO_INPUT_GRADIENT = 2
# Lengths of texts at which a model is counted; a fourth holds what was made of three.
LENGTHS = (16, 32, 48)
CHECK_LENGTH = 64
SAMPLES = 2  # BatchNorm has nothing to norm where a single sample is left of one pixel


class Uncountable(Exception):
    """Why the operations of a model are not known."""


@dataclass(frozen=True)
class Work:
    """Operations of forward and backward pass for a sample of T tokens: a polynomial in T."""

    fixed: float  # of an image all there is
    per_token: float = 0.0
    per_pair: float = 0.0  # attention: every token looks at every token
    how: str = CLOSED

    def of(self, tokens: float = 0.0, squares: float | None = None, samples: int = 1) -> float:
        """Of samples with so many tokens in all, and so many squares of their lengths."""
        squares = tokens * tokens if squares is None else squares
        return self.fixed * samples + self.per_token * tokens + self.per_pair * squares


def work_of(
    model: nn.Module,
    one_sample: Callable[[], Mapping[str, torch.Tensor]],
    image: tuple[int, int] | None = None,
) -> Work:
    """By the closed form where there is one, else counted once, on a batch like this one.

    Images have the size that they are given to the model with; a configuration may not know it.
    Raises Uncountable where neither works.
    """
    config = getattr(model, "config", None)
    kind = str(getattr(config, "model_type", None))
    if kind in TEXTS:
        return TEXTS[kind](config)
    if kind in IMAGES and image is not None:
        return IMAGES[kind](config, image)
    return counted(model, one_sample)


# ---- closed forms ----


def _encoder(layers: int, width: int, inner: int, head: int) -> Work:
    """Layers of attention and two linear layers over all tokens; a head over one of them."""
    a_layer = 4 * width * width + 2 * width * inner  # numbers in its matrices
    return Work(
        fixed=FORWARD_AND_BACKWARD * 2.0 * head,
        per_token=FORWARD_AND_BACKWARD * 2.0 * layers * a_layer,
        per_pair=FORWARD_AND_BACKWARD * 4.0 * layers * width,
    )


def _bert(config: Any) -> Work:
    width, classes = config.hidden_size, config.num_labels
    head = width * width + width * classes  # pooler and classifier
    return _encoder(config.num_hidden_layers, width, config.intermediate_size, head)


def _distilbert(config: Any) -> Work:
    head = config.dim * config.dim + config.dim * config.num_labels
    return _encoder(config.n_layers, config.dim, config.hidden_dim, head)


def _vit(config: Any, image: tuple[int, int]) -> Work:
    width = config.hidden_size
    high, wide = image
    patch_high, patch_wide = _pair(config.patch_size)
    patches = (high // patch_high) * (wide // patch_wide)
    encoder = _encoder(
        config.num_hidden_layers, width, config.intermediate_size, width * config.num_labels
    )
    numbers = config.num_channels * patch_high * patch_wide * width
    return Work(encoder.of(patches + 1) + NO_INPUT_GRADIENT * 2.0 * numbers * patches)


def _resnet(config: Any, image: tuple[int, int]) -> Work:
    """Stem, stages, head; every convolution but the stem's has padding that keeps its size."""
    small = getattr(config, "cifar_stem", False)
    kernel, stride = (3, 1) if small else (7, 2)
    side = _smaller(image, stride)
    stem = side[0] * side[1] * kernel * kernel * config.num_channels * config.embedding_size
    if not small:
        side = _smaller(side, 2)  # pooling
    total, width = 0, config.embedding_size
    for number, (depth, out) in enumerate(zip(config.depths, config.hidden_sizes, strict=True)):
        for layer in range(depth):
            first = layer == 0 and (number > 0 or config.downsample_in_first_stage)
            made, side = _block(config, width, out, side, 2 if first else 1)
            total, width = total + made, out
    head = width * config.num_labels
    return Work(2.0 * (FORWARD_AND_BACKWARD * (total + head) + NO_INPUT_GRADIENT * stem))


def _block(
    config: Any, before: int, after: int, side: tuple[int, int], stride: int
) -> tuple[int, tuple[int, int]]:
    """Multiplications of a residual layer, and the size of what it gives."""
    small = _smaller(side, stride)
    pixels, pixels_before = small[0] * small[1], side[0] * side[1]
    if config.layer_type == "bottleneck":
        inner = after // 4
        early = config.downsample_in_bottleneck
        total = (pixels if early else pixels_before) * before * inner
        total += pixels * (9 * inner * inner + inner * after)
    else:
        total = pixels * 9 * (before * after + after * after)
    if before != after or stride > 1:
        total += pixels * before * after  # the way around it
    return total, small


def _smaller(side: tuple[int, int], stride: int) -> tuple[int, int]:
    return -(-side[0] // stride), -(-side[1] // stride)


def _pair(size: Any) -> tuple[int, int]:
    return (
        (int(size), int(size)) if isinstance(size, (int, float)) else (int(size[0]), int(size[1]))
    )


TEXTS: dict[str, Callable[[Any], Work]] = {"bert": _bert, "distilbert": _distilbert}
IMAGES: dict[str, Callable[[Any, tuple[int, int]], Work]] = {"vit": _vit, "resnet": _resnet}


# ---- counted ----


def counted(model: nn.Module, one_sample: Callable[[], Mapping[str, torch.Tensor]]) -> Work:
    """Of a model without a closed form, on tensors that have a shape and no content.

    Raises Uncountable where the model looks at what is in them, or where its work is no polynomial
    of the length.
    """
    try:
        # Without a mask all tokens count, as in a text that is not padded.
        batch = {name: of for name, of in one_sample().items() if name != "attention_mask"}
        if "input_ids" not in batch:
            return Work(_count(model, batch), how=COUNTED)
        found = {n: _count(model, _of_length(batch, n)) for n in (*LENGTHS, CHECK_LENGTH)}
    except Exception as error:  # whatever a model of somebody's makes of it: training goes on
        lines = str(error).splitlines() or [""]
        why = f"{type(error).__name__}: {lines[0]}"
        raise Uncountable(f"it cannot be counted without content: {why}") from None
    work = _polynomial(found)
    if abs(work.of(CHECK_LENGTH) / found[CHECK_LENGTH] - 1) > 0.01:
        raise Uncountable("its operations are no polynomial of the length of a text")
    return work


def _count(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> float:
    """Operations of one sample's forward and backward pass."""
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors}
    for name, parameter in model.named_parameters():
        shapes[name].requires_grad_(parameter.requires_grad)
    inputs = {
        name: torch.empty((SAMPLES, *value.shape[1:]), dtype=value.dtype, device="meta")
        for name, value in batch.items()
    }
    counter = FlopCounterMode(display=False)
    # Attention in kernels of its own is not counted on every device; taken apart it is.
    with sdpa_kernel(SDPBackend.MATH), counter:
        loss = torch.func.functional_call(model, shapes, (), inputs)["loss"]
        loss.backward()
    return counter.get_total_flops() / SAMPLES


def _of_length(batch: Mapping[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
    return {
        name: value.new_empty((1, length)) if value.ndim == 2 else value
        for name, value in batch.items()
    }


def _polynomial(found: Mapping[int, float]) -> Work:
    """Through three points that are equally far apart."""
    a, b, c = (found[length] for length in LENGTHS)
    step = LENGTHS[1] - LENGTHS[0]
    per_pair = (a - 2 * b + c) / (2 * step * step)
    per_token = (b - a) / step - per_pair * (LENGTHS[0] + LENGTHS[1])
    fixed = a - per_token * LENGTHS[0] - per_pair * LENGTHS[0] ** 2
    return Work(fixed, per_token, per_pair, COUNTED)

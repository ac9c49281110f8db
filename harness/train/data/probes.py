"""Properties of a model, determined by experiments.

Each trial has a copy of the model, because some models change with what they read: the model that
is trained stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from harness.core.settings import UserError

BATCHNORM = nn.modules.batchnorm._BatchNorm
Pair = tuple[Mapping[str, Any], Mapping[str, Any]]  # a text alone, and padded
WITH_DROPOUT = (nn.modules.dropout._DropoutNd, nn.MultiheadAttention)


def twin(model: nn.Module, device: Any = None, dtype: torch.dtype | None = None) -> Any:
    """A copy of the model in evaluation mode. It shares its weights with the model, unless it is
    put on a device ("meta": without content, which costs neither time nor memory) or computes in
    another number format. Its buffers are its own, as a forward pass may change them.
    """

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

    tensors: dict[int, Any] = {id(each): converted(each).clone() for each in model.buffers()}
    for each in model.parameters():
        tensors[id(each)] = nn.Parameter(converted(each.detach()), each.requires_grad)
    return copy.deepcopy(model, tensors).eval()


class _Skipping(TorchFunctionMode):
    """Makes torch.rand draw 0: a layer that may be skipped at random is skipped."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        drawn = torch.zeros if function is torch.rand else function
        return drawn(*args, **(kwargs or {}))


def unused_parameters(
    model: nn.Module, batch: Mapping[str, Any], skipping: bool = False
) -> list[str]:
    """The trained parameters on which the loss of a batch does not depend; with `skipping`, also
    those of layers that training skips at random.
    """
    model = twin(model)
    for module in model.modules() if skipping else ():
        # On a single sample BatchNorm has no statistics.
        module.training = not isinstance(module, BATCHNORM)
    with torch.enable_grad(), _Skipping() if skipping else nullcontext():
        nodes = [model(**batch)["loss"].grad_fn]
    seen, used = set(nodes), set()
    while nodes:
        node = nodes.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            used.add(id(leaf))
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        nodes += following
    return [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in used]


def skips_layers(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether training skips layers at random."""
    every = unused_parameters(model, batch)
    return len(unused_parameters(model, batch, skipping=True)) > len(every)


def outputs_of(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """What the model returns: UserError for a tensor, which indexing by name would take apart."""
    outputs = model(**inputs)
    if isinstance(outputs, torch.Tensor):
        raise UserError(
            f"{type(model).__name__} returned a tensor: it must return a dict with loss and logits"
        )
    return outputs


def reads_padding(model: nn.Module, pairs: Sequence[Pair], exact: bool = True) -> bool:
    """Whether padding changes the scores of a text.

    exact: compare in float64, which needs memory for a copy of the model; otherwise a change as
    small as rounding is missed. A text that the model cannot read counts only if no other one
    decides.

    Some models compute in float32 all the same: rounding there changes a score by 3e-7 of it, and
    padding by 4e-6 of it or more.
    """
    copied, failed = twin(model, dtype=torch.float64 if exact else None), None
    for pair in pairs:
        try:
            with torch.no_grad():
                scores, others = (outputs_of(copied, inputs)["logits"] for inputs in pair)
        except UserError:
            raise
        except Exception as error:  # any model of a user may fail in float64, or on a short text
            failed = failed or error
            continue
        most = (1e-6 if exact else 2e-5) * scores.abs().max()
        if not bool((scores - others).abs().max() <= most):  # NaN is not
            return True
    if failed is not None:
        raise failed
    return False


def fails_alone(model: nn.Module, pairs: Sequence[Pair]) -> bool:
    """Whether the model cannot read one of the texts without padding, as some cannot if short."""
    copied = twin(model)
    try:
        with torch.no_grad():
            for alone, _ in pairs:
                outputs_of(copied, alone)
    except Exception:  # as above
        return True
    return False


class _WithoutDropout(TorchFunctionMode):
    """Drops nothing where a forward pass calls the function by itself."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if function in (nn.functional.dropout, torch.dropout):
            return args[0] if args else given["input"]
        if function is nn.functional.scaled_dot_product_attention:
            args, given = (*args[:4], *(0.0 for _ in args[4:5]), *args[5:]), dict(given)
            given |= {"dropout_p": 0.0} if "dropout_p" in given else {}
        return function(*args, **given)


def loss_is_mean(
    model: nn.Module, batch: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]
) -> bool:
    """Whether the loss of a batch in training is the mean of those of its samples. One that weighs
    classes is not, nor one of a layer that mixes samples.
    """
    try:
        return _is_mean(model, batch, parts, torch.float64, 1e-6)
    except RuntimeError:  # with numbers of its own in float32, such as weights of classes
        return _is_mean(model, batch, parts, None, 2e-5)


def _is_mean(
    model: nn.Module,
    batch: Mapping[str, Any],
    parts: Sequence[Mapping[str, Any]],
    dtype: torch.dtype | None,
    tolerance: float,
) -> bool:
    converted, losses = twin(model, dtype=dtype), []
    for inputs in (batch, batch, *parts):
        copied = twin(converted).train()  # with the weights of the other, and buffers of its own
        for module in copied.modules():
            if isinstance(module, WITH_DROPOUT):
                module.eval()
        with torch.no_grad(), _WithoutDropout():
            losses.append(outputs_of(copied, inputs)["loss"])
    again, whole, mean = losses[0], losses[1], torch.stack(losses[2:]).mean()
    if not torch.isfinite(whole) or (whole - again).abs() > tolerance * whole.abs():
        raise RuntimeError("the loss of one batch differs from pass to pass")
    return bool((whole - mean).abs() <= tolerance * whole.abs())

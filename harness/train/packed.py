"""Texts without padding: all tokens of a batch in one row, in which each text attends to itself.

Everything but attention looks at one token at a time, so it computes the same on a row as on
padded texts. Attention is told where texts begin and end; a head that reads the first token of
each text finds exactly these. Loss and gradient are those of padded texts up to rounding; dropout
draws other masks, of the same distribution.

Attention on a row, as the device allows (TextBatches gives what each of them needs):
runs    a CPU: texts of equal length lie side by side, and each such run is a batch of its own
padded  padded for attention alone, which is a small part of the work
kernel  CUDA in half precision: torch's kernel for texts of any length
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "texts_in_a_row"
# Models whose head reads the first token of each text and nothing else, and where their layers are.
LAYERS = {
    "bert": "encoder",
    "camembert": "encoder",
    "distilbert": "transformer",
    "electra": "encoder",
    "roberta": "encoder",
    "xlm-roberta": "encoder",
}
# They count positions from behind the number of the padding token.
COUNT_BEHIND_PADDING = ("camembert", "roberta", "xlm-roberta")
HALF = (torch.bfloat16, torch.float16)
KERNEL_DEVICE = "cuda"


def layers_of(model: nn.Module) -> nn.Module | None:
    """The layers of a model that can read a row of texts; None where it cannot."""
    config = getattr(model, "config", None)
    path = LAYERS.get(str(getattr(config, "model_type", None)))
    if path is None or getattr(config, "is_decoder", False):
        return None
    base = getattr(model, "base_model", model)
    return getattr(base, path, None)


def first_position(model: nn.Module) -> int:
    config: Any = model.config
    return config.pad_token_id + 1 if config.model_type in COUNT_BEHIND_PADDING else 0


def read_rows(model: Any) -> None:
    """The model takes a row of texts from now on, and padded texts as before."""
    layers = layers_of(model)
    assert layers is not None
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    layers.register_forward_hook(_keep_first, with_kwargs=True)


def _keep_first(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Of all tokens the first one of each text, as (texts, 1, width): no head reads another."""
    if (texts := kwargs.get("texts")) is not None:
        first = output.last_hidden_state[0].index_select(0, texts["first"])
        output.last_hidden_state = first[:, None]
    return output


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    texts: dict[str, Any] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers asks for it: of (1, heads, tokens, width), (1, tokens, heads, width)."""
    if texts is None:
        padded: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return padded
    rows = [each[0].transpose(0, 1) for each in (query, key, value)]  # (tokens, heads, width)
    if "bounds" in texts:
        found = by_kernel(rows, texts["bounds"], texts["longest"], dropout, scaling)
    elif "runs" in texts:
        found = _by_runs(rows, texts["runs"], dropout, scaling)
    else:
        found = _by_padding(rows, texts, dropout, scaling)
    return found[None], None


def _by_runs(
    rows: list[torch.Tensor], runs: list[tuple[int, int]], dropout: float, scaling: float | None
) -> torch.Tensor:
    """Texts of one length are a batch as they lie: nothing is copied, masked or padded."""
    sizes = [count * length for count, length in runs]
    found = []
    for (count, length), *of_run in zip(runs, *(r.split(sizes) for r in rows), strict=True):
        q, k, v = (r.unflatten(0, (count, length)).transpose(1, 2) for r in of_run)
        attended = scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling)
        found.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(found)


def _by_padding(
    rows: list[torch.Tensor], texts: dict[str, Any], dropout: float, scaling: float | None
) -> torch.Tensor:
    count, longest = texts["places"].shape
    places = texts["places"].flatten()
    padded = (r.index_select(0, places).unflatten(0, (count, longest)) for r in rows)
    q, k, v = (p.transpose(1, 2) for p in padded)
    attended = scaled_dot_product_attention(
        q, k, v, attn_mask=texts["inside"], dropout_p=dropout, scale=scaling
    )
    return attended.transpose(1, 2).flatten(0, 1).index_select(0, texts["back"])


def by_kernel(
    rows: list[torch.Tensor],
    bounds: torch.Tensor,
    longest: int,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """Its public face, torch.nn.attention.varlen, has no dropout; what is behind it has."""
    query, key, value = (r.contiguous() for r in rows)
    found: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, bounds, bounds, longest, longest, dropout, False, False, scale=scaling
    )[0]
    return found


def why_no_kernel(device: torch.device, dtype: torch.dtype, heads: int, width: int) -> str | None:
    """Why attention is not left to the kernel; None where it gives here what padding gives."""
    if device.type != KERNEL_DEVICE:
        return f"the kernel needs CUDA, not {device.type}"
    if dtype not in HALF:
        return f"the kernel needs half precision, not {str(dtype).removeprefix('torch.')}"
    try:
        wrong = _largest_difference(device, dtype, heads, width)
    except (RuntimeError, AttributeError, TypeError) as error:
        return f"the kernel does not run here: {str(error).splitlines()[0]}"
    return None if wrong < 0.05 else f"the kernel is off by {wrong:.2g} here"


def _largest_difference(device: torch.device, dtype: torch.dtype, heads: int, width: int) -> float:
    """Of results and gradients of three texts, by the kernel and by padding; about 1 in size."""
    lengths = torch.tensor([3, 17, 40])
    ends = lengths.cumsum(0)
    inside = torch.arange(40) < lengths[:, None]
    texts = {
        "places": torch.where(inside, (ends - lengths)[:, None] + torch.arange(40), 0).to(device),
        "inside": inside[:, None, None].to(device),
        "back": inside.flatten().nonzero()[:, 0].to(device),
    }
    bounds = torch.tensor([0, *ends.tolist()], dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(4, 60, heads, width, generator=generator).to(device, dtype)
    results = []
    for kernel in (True, False):
        rows = [r.clone().requires_grad_() for r in drawn[:3]]
        if kernel:
            found = by_kernel(rows, bounds, 40, 0.0, None)
        else:
            found = _by_padding(rows, texts, 0.0, None)
        gradients = torch.autograd.grad(found, rows, drawn[3])
        results.append(torch.stack([found.detach(), *gradients]))
    # With dropout there is nothing to compare with, but it must run.
    torch.autograd.grad(by_kernel(rows, bounds, 40, 0.1, None).sum(), rows)
    return float((results[0].float() - results[1].float()).abs().max())

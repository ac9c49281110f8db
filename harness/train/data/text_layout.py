"""How a run's texts are laid out: without padding where model and device allow it (--padding)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, Trainer, TrainingArguments
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from harness.core.settings import Settings
from harness.train.data.text_batches import AMOUNT, Amount, Layout, TextBatches

# Where attention is not to be left to the kernel.
ATTENTION = {"cpu": "runs"}


def arrange(
    model: nn.Module, batches: Any, settings: Settings, args: TrainingArguments
) -> dict[str, Any]:
    """Tell the batches and the model; what the record is to know. Nothing is told of images."""
    if not isinstance(batches, TextBatches):
        return {}
    layout, reason = _chosen(model, settings, args)
    batches.layout = layout
    if layout.kind == "packed":
        read_rows(model)
    how = f"{layout.kind}, {layout.attention}" if layout.attention else layout.kind
    return {"padding": how, "padding_reason": reason}


def _chosen(model: Any, settings: Settings, args: TrainingArguments) -> tuple[Layout, str | None]:
    """The layout, and why it is no better one."""
    few_shapes = bool(args.torch_compile)
    if reason := _why_batch(model, settings, args):
        return Layout(few_shapes=few_shapes), reason
    if layers_of(model) is None:
        reason = f"{getattr(model.config, 'model_type', 'this model')} reads one text a row"
        if few_shapes:
            return Layout(few_shapes=True), f"{reason}, and parts have many shapes to compile"
        if settings.strategy == "fsdp":
            # Each part gathers the weights from all ranks, which may have other numbers of parts.
            return Layout(), f"{reason}, and fsdp needs as many parts on every rank"
        return Layout("parts"), reason
    config, device = model.config, args.device
    width = config.hidden_size // config.num_attention_heads
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(settings.precision, torch.float32)
    reason = why_no_kernel(device, dtype, config.num_attention_heads, width)
    if reason and few_shapes:
        return Layout(few_shapes=True), f"{reason}, and runs have many shapes to compile"
    attention = ATTENTION.get(device.type, "padded") if reason else "kernel"
    return Layout("packed", attention, first_position(model), few_shapes), reason


def _why_batch(model: nn.Module, settings: Settings, args: TrainingArguments) -> str | None:
    """Why the texts of a batch have to stay together, padded; None if they need not."""
    if settings.padding == "batch":
        return "asked for"
    if settings.strategy == "dp":
        return "nn.DataParallel splits batches by rows"
    if args.neftune_noise_alpha is not None:
        return "the noise of --neftune_noise_alpha depends on the size of a padded batch"
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        return "BatchNorm mixes the texts of a batch"
    return None


# ----
# Texts without padding: all tokens of a batch in one row, in which each text attends to itself.
#
# Everything but attention looks at one token at a time, so it computes the same on a row as on
# padded texts. Attention is told where texts begin and end; a head that reads the first token of
# each text finds exactly these. Loss and gradient are those of padded texts up to rounding; dropout
# draws other masks, of the same distribution.
#
# Attention on a row, as the device allows (TextBatches gives what each of them needs):
# runs    a CPU: texts of equal length lie side by side, and each such run is a batch of its own
# padded  padded for attention alone, which is a small part of the work
# kernel  CUDA in half precision: torch's kernel for texts of any length

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


# ----
# A batch of texts fed in parts of like length, for models that cannot read texts in a row.
#
# The mean loss of a batch is that of its parts, each weighed by its share of the samples, and so is
# the gradient: it adds up over the parts and is exchanged with the last one.

WHOLE_ROWS = ("labels",)  # all else has a column a token


class InParts(Trainer):
    """The Trainer's step and its evaluation, a part at a time where a batch has parts."""

    share = 1.0  # of the batch's samples that are in the part which is being fed

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        amount: Amount | None = inputs.get(AMOUNT)
        if amount is None or len(amount.parts) < 2:
            return super().training_step(model, inputs, *args, **kwargs)
        losses = []
        for number, part in enumerate(parts_of(inputs, amount), start=1):
            self.share = len(part["labels"]) / amount.texts
            last = number == len(amount.parts)
            deferred: AbstractContextManager[Any] = (
                nullcontext() if last else self.accelerator.no_sync(model)
            )
            with deferred:
                losses.append(super().training_step(model, part, *args, **kwargs))
        self.share = 1.0
        return torch.stack(losses).sum()

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        amount: Amount | None = inputs.get(AMOUNT)
        if amount is None or len(amount.parts) < 2:
            return super().prediction_step(model, inputs, *args, **kwargs)
        losses, logits, labels = [], [], []
        for part in parts_of(inputs, amount):
            loss, scores, classes = super().prediction_step(model, part, *args, **kwargs)
            losses.append(loss * (len(classes) / amount.texts))
            logits.append(scores[0] if isinstance(scores, tuple) else scores)
            labels.append(classes)
        order = torch.cat([torch.from_numpy(rows) for rows, _ in amount.parts]).argsort()
        order = order.to(labels[0].device)
        # As they were given: what fills up the last batch is cut off behind them.
        return torch.stack(losses).sum(), torch.cat(logits)[order], torch.cat(labels)[order]


def parts_of(inputs: dict[str, Any], amount: Amount) -> list[dict[str, Any]]:
    """The rows of each part, without the columns in which they have no tokens."""
    found = []
    for rows, columns in amount.parts:
        chosen = torch.from_numpy(rows)
        part = {
            name: value[chosen] if name in WHOLE_ROWS else value[chosen, :columns]
            for name, value in inputs.items()
            if name != AMOUNT
        }
        found.append(part)
    return found

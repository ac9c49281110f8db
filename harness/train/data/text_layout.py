"""How a model reads a batch of texts: without padding where model and device allow it (--padding).

Packed: all tokens lie in one row, and each text attends to itself alone. Everything but attention
looks at one token at a time and so computes the same as on padded texts. Attention gets the bounds
of the texts, and the head, which reads the first token of each text, gets exactly these. Loss and
gradient are those of padded texts up to rounding; dropout draws other masks of the same
distribution. Attention on a row, by device (TextBatches prepares what each of them needs):
runs    CPU: texts of equal length are adjacent, and each such run is a batch of its own
padded  padded for attention alone, which is a small part of the work
kernel  CUDA in half precision: torch's kernel for texts of any length, with windows or without

In parts: other models, if a text has the same scores however far it is padded (this is tried), are
fed rows of similar length together. The mean loss of a batch is that of its parts, each weighted by
its share of the samples, and so is the gradient: it adds up over the parts and is exchanged with
the last one. Models that read padding train on padded batches; where possible, they are evaluated
on texts of one length together.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, TrainingArguments
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from harness.core.process import warn
from harness.core.records.redact import first_line
from harness.core.schema.environment import ObservedRecord
from harness.core.settings import Settings, UserError
from harness.core.strategies import strategy_of
from harness.core.topology import world_of
from harness.train.context import HALF_PRECISION
from harness.train.data import models, probes
from harness.train.data.texts import Layout, TextBatches, attention_inputs, for_model

ATTENTION_NAME = "packed_texts"  # under which transformers knows it
# The models whose head reads one row for each text, its first token or the mean of its tokens, and
# their encoders ("": all but the head).
ENCODERS = {
    "bert": "encoder",
    "camembert": "encoder",
    "distilbert": "transformer",
    "electra": "encoder",
    "modernbert": "",
    "roberta": "encoder",
    "xlm-roberta": "encoder",
}
HALF = (torch.bfloat16, torch.float16)
KERNEL_DEVICE = "cuda"
# In tokens. In half precision a CPU's library prepares the product for each shape that it has not
# met lately, and packed rows hardly ever have the same length.
CPU_ROW_STEP = 32
TRIED_WINDOW = 9  # tokens, with which the kernel is compared
MOST_TRIED = 64  # texts of one trial
NOT_TRIED = "cannot be tried"


def arrange(
    model: nn.Module,
    batches: Any,
    settings: Settings,
    args: TrainingArguments,
    own_loss: bool = False,
) -> ObservedRecord:
    """Choose a layout for batches and model, and return what the record says; images have none.
    own_loss: the script computes the loss by itself, from a whole batch.
    """
    if not isinstance(batches, TextBatches):
        return {}
    layout, reason = _choose(model, settings, args)
    mixes = None if layout.kind == "packed" or models.is_stock(model) else _mixes(model, batches)
    exact = not strategy_of(settings).shards  # which may lack the memory for a copy of all weights
    pairs = [] if reads_packed(model) else _pairs(model, batches)
    reads = _reads_padding(model, pairs, exact) if pairs else None
    if layout.kind == "parts" and own_loss:
        layout, reason = Layout(), "the script has a loss of its own"
    elif layout.kind == "parts" and (problem := reads or mixes):
        layout, reason = Layout(), problem
    if reads and NOT_TRIED not in reads:
        whole = own_loss or bool(mixes) or layout.few_shapes or strategy_of(settings).shards
        layout = replace(layout, by_length=not (whole or probes.fails_alone(model, pairs)))
    batches.layout = layout
    if layout.kind == "packed":
        accept_packed(model)
    how = f"{layout.kind}, {layout.attention}" if layout.attention else layout.kind
    found = _of_batches(mixes, reads, args, layout.by_length)
    return {"padding": how, "padding_reason": reason, **found}


def _of_batches(
    mixes: str | None, reads: str | None, args: TrainingArguments, by_length: bool
) -> ObservedRecord:
    """What the record says of a model whose training depends on how batches are split."""
    found: ObservedRecord = {}
    lines = []
    if mixes and NOT_TRIED not in mixes:
        found["loss_of_batch"] = mixes
        lines.append(mixes)
    if reads and NOT_TRIED not in reads:
        batch = None if by_length else args.eval_batch_size
        found["reads_padding"] = {"train_batch": args.train_batch_size, "eval_batch": batch}
        quality = "as texts are evaluated unpadded, quality does not depend on --eval_batch"
        quality = quality if by_length else "quality depends on --eval_batch, too"
        lines.append(f"{reads} ({quality})")
    for line in lines if world_of(os.environ).rank == 0 else ():
        warn(f"{line}: to split a batch otherwise is another training")
    return found


def has_own_loss(trainer: Any) -> bool:
    """Whether the script of a user computes the loss, in a subclass or by compute_loss_func."""
    inherited = type(trainer).compute_loss.__module__.startswith("harness.")
    return not inherited or trainer.compute_loss_func is not None


def _choose(model: Any, settings: Settings, args: TrainingArguments) -> tuple[Layout, str | None]:
    """The layout, and the reason if a better one is not possible."""
    few_shapes = bool(args.torch_compile)
    if reason := _why_padded(model, settings, args):
        return Layout(few_shapes=few_shapes), reason
    if not reads_packed(model):
        reason = f"{model_type(model)} reads one text per row"
        if few_shapes:
            return Layout(few_shapes=True), f"{reason}, and parts have many shapes to compile"
        if strategy_of(settings).shards:
            # Each part gathers the weights from all ranks, which may have other numbers of parts.
            return Layout(), f"{reason}, and fsdp needs as many parts on every rank"
        return Layout("parts"), reason
    heads, device = model.config.num_attention_heads, args.device
    dtype = HALF_PRECISION.get(settings.precision, torch.float32)
    width = model.config.hidden_size // heads
    reason = why_no_kernel(device, dtype, heads, width, has_windows(model))
    if reason and few_shapes:
        return Layout(few_shapes=True), f"{reason}, and runs have many shapes to compile"
    attention = "kernel" if reason is None else "runs" if device.type == "cpu" else "padded"
    row_step = CPU_ROW_STEP if attention == "runs" and dtype in HALF else 1
    position = models.first_position(model)
    return Layout("packed", attention, position, few_shapes, row_step), reason


def model_type(model: Any) -> str:
    config = getattr(model, "config", None)  # a user's model may have none
    return str(getattr(config, "model_type", "this model"))


def _mixes(model: nn.Module, batches: TextBatches) -> str | None:
    """Why the loss of a batch may not be computed from its texts one by one, or that it cannot be
    found out; None if it may. Tried with the shortest texts of every class, if possible two of
    each, as a loss may compare them.
    """
    problem = f"the loss of a batch of {model_type(model)} is not the mean of those of its texts"
    if any(isinstance(module, probes.BATCHNORM) for module in model.modules()):
        return problem
    shortest: dict[int, list[int]] = {}
    for text in np.diff(batches.offsets)[: len(batches.labels)].argsort(kind="stable"):
        shortest.setdefault(int(batches.labels[text]), []).append(int(text))
    if len(shortest) > MOST_TRIED:
        return f"whether {problem} {NOT_TRIED}: there are {len(shortest)} classes"
    texts = [text for n in (0, 1) for of_one in shortest.values() for text in of_one[n : n + 1]]
    texts = texts[:MOST_TRIED]
    device = next(model.parameters()).device
    batched, *unpadded = (
        {name: value.to(device) for name, value in for_model(batches(rows)).items()}
        for rows in (texts, *([text] for text in texts))
    )
    return _tried(problem, lambda: not probes.loss_is_mean(model, batched, unpadded))


def _tried(problem: str, has_it: Callable[[], bool]) -> str | None:
    """The problem if the model has it, or why that cannot be determined; else None."""
    try:
        return problem if has_it() else None
    except UserError:
        raise
    except Exception as error:  # any model of a user may fail in float64, and training goes on
        reason = f"{type(error).__name__}: {first_line(error)}"
        return f"whether {problem} {NOT_TRIED}: {reason}"


def _pairs(model: nn.Module, batches: TextBatches) -> list[probes.Pair]:
    """Texts of several lengths, the shortest first: each alone, and padded to the longest."""
    order = np.diff(batches.offsets).argsort(kind="stable")
    device = next(model.parameters()).device
    pairs: list[probes.Pair] = []
    for text in dict.fromkeys(int(order[len(order) * n // 4]) for n in range(4)):
        unpadded, padded = (
            {name: value[:1].to(device) for name, value in for_model(batches(rows)).items()}
            for rows in ([text], [text, int(order[-1])])
        )
        pairs.append((unpadded, padded))
    return pairs


def _reads_padding(model: nn.Module, pairs: list[probes.Pair], exact: bool) -> str | None:
    """Why the model may not read parts: a text has other scores alone than padded, or it cannot be
    found out. None if the scores are the same.
    """
    problem = f"the scores of {model_type(model)} depend on padding"
    found = _tried(problem, lambda: probes.reads_padding(model, pairs, exact))
    if found and NOT_TRIED in found and exact:
        # It may not compute in float64: then float32 may show it, but cannot rule it out.
        shown = _tried(problem, lambda: probes.reads_padding(model, pairs, exact=False))
        return problem if shown == problem else found
    return found


def _why_padded(model: nn.Module, settings: Settings, args: TrainingArguments) -> str | None:
    """Why the texts of a batch have to stay together, padded; None if they need not."""
    if settings.padding == "batch":
        return "asked for"
    if strategy_of(settings).splits_batch:
        return "nn.DataParallel splits batches by rows"
    if args.neftune_noise_alpha is not None:
        return "the noise of --neftune_noise_alpha depends on the size of a padded batch"
    if any(isinstance(m, probes.BATCHNORM) for m in model.modules()):
        return "BatchNorm mixes the texts of a batch"
    return None


def reads_packed(model: nn.Module) -> bool:
    """Whether a model can read packed texts. A user's class, or a user's head in a class of
    transformers, may read more than the first token of a text.
    """
    classifies = type(model).__name__.endswith("ForSequenceClassification")
    return encoder_of(model) is not None and classifies and models.is_stock(model)


def encoder_of(model: nn.Module) -> nn.Module | None:
    """The layers that can read packed texts, by the configuration; None if there are none."""
    config = getattr(model, "config", None)
    path = ENCODERS.get(str(getattr(config, "model_type", None)))
    if path is None or getattr(config, "is_decoder", False):
        return None
    base = getattr(model, "base_model", model)
    return getattr(base, path, None) if path else base


def accept_packed(model: Any) -> None:
    """From now on the model accepts packed texts, and padded texts as before."""
    encoder = encoder_of(model)
    assert encoder is not None
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    model.set_attn_implementation(ATTENTION_NAME)
    if has_windows(model):
        encoder.register_forward_pre_hook(_without_masks, with_kwargs=True)
    mean = getattr(model.config, "classifier_pooling", "cls") == "mean"
    encoder.register_forward_hook(partial(_keep_read_rows, mean), with_kwargs=True)


def has_windows(model: Any) -> bool:
    """Whether tokens of some layers see only those near to them."""
    return "sliding_attention" in getattr(model.config, "layer_types", ())


def _without_masks(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Leave out masks of tokens by tokens of a whole row: attention gets the texts' bounds."""
    if kwargs.get("texts") is not None:
        kwargs["attention_mask"] = dict.fromkeys(module.config.layer_types)
    return args, kwargs


def _keep_read_rows(mean: bool, module: Any, args: Any, kwargs: Any, output: Any) -> Any:
    """Keep what the head reads of each text, as (texts, 1, width): its first token, or the mean."""
    if (texts := kwargs.get("texts")) is not None:
        row, first = output.last_hidden_state.squeeze(0), texts["first"]
        kept = _means(row, first, texts["lengths"]) if mean else row.index_select(0, first)
        output.last_hidden_state = kept[:, None]
    return output


def _means(row: torch.Tensor, first: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The mean over the tokens of each text; tokens that fill up the row belong to no text."""
    begins, order = first.sort()
    places = torch.arange(len(row), device=row.device)
    of = order[torch.bucketize(places, begins, right=True) - 1]
    inside = places < (first + lengths)[of]
    sums = row.new_zeros(len(first), row.shape[1]).index_add(0, of, row * inside[:, None])
    return sums / lengths[:, None]


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    texts: dict[str, Any] | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The interface of transformers: (1, heads, tokens, width) -> (1, tokens, heads, width)."""
    if texts is None:
        padded: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return padded
    # (tokens, heads, width). The gradient of an index would be copied, transposed, into zeros.
    rows = [each.squeeze(0).transpose(0, 1) for each in (query, key, value)]
    if "bounds" in texts:
        bounds, longest = texts["bounds"], texts["longest"]
        attended = kernel_attention(rows, bounds, longest, dropout, scaling, sliding_window)
    elif "runs" in texts:
        attended = _run_attention(rows, texts["runs"], dropout, scaling, sliding_window)
    else:
        attended = _padded_attention(rows, texts, dropout, scaling, sliding_window)
    return attended[None], None


def _near(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Which tokens see each other: those less than a window apart; None if all do."""
    if window is None or length <= window:
        return None
    places = torch.arange(length, device=device)
    return (places[:, None] - places).abs() < window


def _run_attention(
    rows: list[torch.Tensor],
    runs: list[tuple[int, int]],
    dropout: float,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Adjacent texts of one length are a batch already: nothing is masked or padded.

    In training, rows in half precision are computed in float32: torch's gradient of attention takes
    3 to 6 times as long in bfloat16 for texts of 37 to 50 tokens, on a CPU with units for it.
    """
    dtype, sizes = rows[0].dtype, [count * length for count, length in runs]
    exact = torch.is_grad_enabled() and dtype in HALF
    results = []
    with torch.autocast("cpu", enabled=not exact and torch.is_autocast_enabled("cpu")):
        rows = [r.float() for r in rows] if exact else rows
        for (count, length), *run in zip(runs, *(r.split(sizes) for r in rows), strict=True):
            q, k, v = (r.unflatten(0, (count, length)).transpose(1, 2) for r in run)
            attended = scaled_dot_product_attention(
                q, k, v, attn_mask=_near(length, window, q.device), dropout_p=dropout, scale=scaling
            )
            results.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(results).to(dtype)


def _padded_attention(
    rows: list[torch.Tensor],
    texts: dict[str, Any],
    dropout: float,
    scaling: float | None,
    window: int | None = None,
) -> torch.Tensor:
    shape, places, inside = texts["places"].shape, texts["places"].flatten(), texts["inside"]
    if (near := _near(shape[1], window, inside.device)) is not None:
        # Padding attends to the text, too: a row that attends to nothing would be NaN.
        inside = inside & (near | ~inside.transpose(2, 3))
    padded = (r.index_select(0, places).unflatten(0, shape) for r in rows)
    q, k, v = (p.transpose(1, 2) for p in padded)
    attended = scaled_dot_product_attention(
        q, k, v, attn_mask=inside, dropout_p=dropout, scale=scaling
    )
    return attended.transpose(1, 2).flatten(0, 1).index_select(0, texts["back"])


def kernel_attention(
    rows: list[torch.Tensor],
    bounds: torch.Tensor,
    longest: int,
    dropout: float,
    scaling: float | None,
    window: int | None = None,
) -> torch.Tensor:
    """The operator behind torch.nn.attention.varlen, which does not expose dropout."""
    query, key, value = (r.contiguous() for r in rows)
    side = None if window is None else window - 1  # the farthest token that is seen, as in _near
    attended: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, bounds, bounds, longest, longest, dropout, False, False, scale=scaling,
        window_size_left=side, window_size_right=side,
    )[0]  # fmt: skip
    return attended


def why_no_kernel(
    device: torch.device, dtype: torch.dtype, heads: int, width: int, windows: bool = False
) -> str | None:
    """Why the kernel is not used; None if its results here are those of padded texts. windows: the
    model has layers whose tokens see only those near to them.
    """
    if device.type != KERNEL_DEVICE:
        return f"the kernel needs CUDA, not {device.type}"
    if dtype not in HALF:
        return f"the kernel needs half precision, not {str(dtype).removeprefix('torch.')}"
    try:
        error = kernel_error(device, dtype, heads, width)
        if windows:
            error = max(error, kernel_error(device, dtype, heads, width, TRIED_WINDOW))
    except (RuntimeError, AttributeError, TypeError) as failure:
        return f"the kernel does not run here: {first_line(failure)}"
    return None if error < 0.05 else f"the kernel is off by {error:.2g} here"


def kernel_error(
    device: torch.device, dtype: torch.dtype, heads: int, width: int, window: int | None = None
) -> float:
    """The largest difference between kernel and padding, in results and gradients of size 1."""
    lengths = np.array([3, 17, 40])
    padded = {
        name: value.to(device) for name, value in attention_inputs("padded", lengths, 40).items()
    }
    bounds = attention_inputs("kernel", lengths, 40)["bounds"].to(device)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(4, 60, heads, width, generator=generator).to(device, dtype)
    results = []
    for kernel in (True, False):
        rows = [r.clone().requires_grad_() for r in drawn[:3]]
        if kernel:
            attended = kernel_attention(rows, bounds, 40, 0.0, None, window)
        else:
            attended = _padded_attention(rows, padded, 0.0, None, window)
        gradients = torch.autograd.grad(attended, rows, drawn[3])
        results.append(torch.stack([attended.detach(), *gradients]))
    # With dropout there is nothing to compare with, but it must run.
    torch.autograd.grad(kernel_attention(rows, bounds, 40, 0.1, None, window).sum(), rows)
    return float((results[0].float() - results[1].float()).abs().max())

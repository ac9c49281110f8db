"""How a run's texts are laid out: without padding where model and device allow it (--padding)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from harness.settings import Settings
from harness.train import packed
from harness.train.text_batches import Layout, TextBatches

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
        packed.read_rows(model)
    how = f"{layout.kind}, {layout.attention}" if layout.attention else layout.kind
    return {"padding": how, "padding_reason": reason}


def _chosen(model: Any, settings: Settings, args: TrainingArguments) -> tuple[Layout, str | None]:
    """The layout, and why it is no better one."""
    few_shapes = bool(args.torch_compile)
    if reason := _why_batch(model, settings, args):
        return Layout(few_shapes=few_shapes), reason
    if packed.layers_of(model) is None:
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
    reason = packed.why_no_kernel(device, dtype, config.num_attention_heads, width)
    if reason and few_shapes:
        return Layout(few_shapes=True), f"{reason}, and runs have many shapes to compile"
    attention = ATTENTION.get(device.type, "padded") if reason else "kernel"
    return Layout("packed", attention, packed.first_position(model), few_shapes), reason


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

"""A model's weights over ranks: split by FSDP, put together again, saved and loaded.

accelerate silently replaces FSDP by DDP on a CPU, so that sharding is done here with torch's own
fully_shard, on CPU and GPU alike.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from harness.core.settings import Settings, UserError
from harness.core.strategies import strategy_of
from harness.train.context import HALF_PRECISION
from harness.train.data import lora
from harness.train.data.probes import BATCHNORM, skips_layers
from harness.train.session import gather, gather_rows, is_alone

WEIGHTS = "model.safetensors"  # in a checkpoint's folder
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The layers that are gathered one at a time: the members of the outermost module lists, which
    may be lists of lists.
    """
    blocks: list[nn.Module] = []
    for child in model.children():
        is_layer = isinstance(model, nn.ModuleList) and not isinstance(child, nn.ModuleList)
        blocks += [child] if is_layer else blocks_of(child)
    return blocks


def refuse_skipped_layers(model: nn.Module, batch: Mapping[str, Any], settings: Settings) -> None:
    """Refuse layers skipped at random: all ranks gather a layer's weights, and would wait."""
    if skips_layers(model, batch):
        raise layers_are_skipped(model, settings)


def layers_are_skipped(model: nn.Module, settings: Settings) -> UserError:
    return UserError(
        f"--strategy {settings.strategy}: {type(model).__name__} skips layers at random, "
        "different ones on each rank, and ranks would wait for each other: add --dropout 0, or use "
        "--strategy ddp"
    )


def shard(model: nn.Module, settings: Settings, device: torch.device) -> None:
    """Split the model over all processes, layer by layer."""
    policy: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        # False keeps layers whole after the forward pass: only gradients and optimizer are split.
        "reshard_after_forward": settings.fsdp_shard == "full",
    }
    if dtype := HALF_PRECISION.get(settings.precision):
        policy["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if settings.fsdp_offload:
        policy["offload_policy"] = CPUOffloadPolicy()
    blocks = blocks_of(model)
    owners = Counter(id(weight) for block in blocks for weight in block.parameters())
    for block in blocks:
        if all(owners[id(weight)] == 1 for weight in block.parameters()):
            fully_shard(block, **policy)
    fully_shard(model, **policy)  # and what several blocks share


def full_weights(model: nn.Module) -> dict[str, Any]:
    """The unsharded weights, on rank 0 (a collective: every rank calls it)."""
    weights: dict[str, Any] = get_model_state_dict(model, options=FULL)
    return weights


def save_weights(model: nn.Module, folder: Path, weights: dict[str, Any] | None = None) -> None:
    """Save the model's weights, or `weights` put together from shards, under their names in memory.

    With --lora, these are the plain model's weights, and what was trained is saved beside them.
    """
    if adapted := lora.is_adapted(model):
        weights = lora.merged(model)
    if isinstance(model, PreTrainedModel):
        model.save_pretrained(folder, state_dict=weights, save_original_format=False)
    elif weights is not None:
        folder.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(_in_memory_of_their_own(weights), folder / WEIGHTS)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_model(model, str(folder / WEIGHTS))
    if adapted:
        lora.save_trained(model, folder)


def _in_memory_of_their_own(weights: dict[str, Any]) -> dict[str, Any]:
    """Copies of tied weights: a file of tensors holds no memory twice."""
    seen: set[int] = set()
    own = {}
    for name, weight in weights.items():
        memory = weight.untyped_storage().data_ptr()
        own[name] = weight.contiguous().clone() if memory in seen else weight.contiguous()
        seen.add(memory)
    return own


def load_weights(
    model: nn.Module, file: Path, settings: Settings, everywhere: bool = False
) -> None:
    """A file's weights on every rank; a weight that is not in it raises (a collective).

    everywhere: each rank reads it. Otherwise only rank 0 may see the file, and sends what it reads:
    a node without the file would silently go on with other weights.
    """
    rank0 = not dist.is_initialized() or dist.get_rank() == 0
    if strategy_of(settings).shards:
        # NCCL does not reach shards that are offloaded to the CPU: then every rank reads the file.
        everywhere |= settings.fsdp_offload
        weights = safetensors.torch.load_file(file) if rank0 or everywhere else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=not everywhere)
        set_model_state_dict(model, weights, options=options)
        return
    if (rank0 or everywhere) and settings.lora:
        lora.load_trained(model, file)
    elif rank0 or everywhere:
        safetensors.torch.load_model(model, file, strict=True)
    if not everywhere and not is_alone():
        for tensor in model.state_dict().values():
            contiguous = tensor.contiguous()
            dist.broadcast(contiguous, src=0)
            tensor.copy_(contiguous)


def save_optimizer(trainer: Any, folder: Path) -> None:
    """Save the optimizer in one piece, for any number of processes to go on (a collective)."""
    optimizer = _torch_optimizer(trainer.optimizer)
    state = get_optimizer_state_dict(trainer.model, optimizer, options=FULL)
    if trainer.args.should_save:
        torch.save(state, folder / OPTIMIZER_NAME)
        torch.save(trainer.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)


def load_optimizer(trainer: Any, folder: Path) -> None:
    optimizer, options = _torch_optimizer(trainer.optimizer), StateDictOptions(full_state_dict=True)
    state = torch.load(folder / OPTIMIZER_NAME, weights_only=True)
    set_optimizer_state_dict(trainer.model, optimizer, state, options=options)
    schedule = torch.load(folder / SCHEDULER_NAME, weights_only=True)
    trainer.lr_scheduler.load_state_dict(schedule)


def _torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """torch's optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def has_finite_weights(model: nn.Module) -> bool:
    """Whether all weights of the model on this rank are finite, with BatchNorm's statistics, which
    an update that fp16 skips may have spoilt.
    """
    statistics = (b for m in model.modules() if isinstance(m, BATCHNORM) for b in m.buffers())
    tensors = [*model.parameters(), *statistics]
    weights = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    flags = [torch.isfinite(weight).all() for weight in weights]
    # With --fsdp_offload the shards lie on the host, and BatchNorm's statistics do not.
    return bool(torch.stack([flag.to(flags[0].device) for flag in flags]).all())


def average_buffers(model: nn.Module) -> None:
    """Average what the forward passes of the ranks have made unlike, as each saw its share of the
    data: BatchNorm's statistics, and floating-point buffers of the user's own layers. Other
    numbers become those of rank 0.

    Otherwise each rank would evaluate with its own, and the metric would mix several models.
    """
    if is_alone():
        return
    unlike: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for module in model.modules():
        own = dict(module.named_buffers(recurse=False))
        if isinstance(module, BATCHNORM):
            unlike += [own.pop(name) for name in ("running_mean", "running_var") if name in own]
            own.pop("num_batches_tracked", None)
        if not type(module).__module__.startswith("transformers."):
            others += own.values()
    if others:
        checksums = gather([hashlib.sha256(content_of(each)).hexdigest() for each in others])
        by_buffer = zip(others, *checksums, strict=True)
        unlike += [buffer for buffer, first, *more in by_buffer if {*more} != {first}]
    if unlike:
        _average(unlike)


def _average(buffers: Sequence[torch.Tensor]) -> None:
    """In one exchange for floating point, and one for all else, whose bytes are rank 0's."""
    buffers = [torch.view_as_real(each) if each.is_complex() else each for each in buffers]
    floats = [buffer for buffer in buffers if buffer.is_floating_point()]
    others = [buffer for buffer in buffers if not buffer.is_floating_point()]
    if floats:
        rows = gather_rows(torch.cat([buffer.detach().double().flatten() for buffer in floats]))
        means = torch.stack(rows).mean(0).split([buffer.numel() for buffer in floats])
        for buffer, mean in zip(floats, means, strict=True):
            buffer.copy_(mean.view_as(buffer))
    if others:
        contents = [buffer.detach().flatten().view(torch.uint8) for buffer in others]
        first, sizes = gather_rows(torch.cat(contents))[0], [len(content) for content in contents]
        for buffer, content in zip(others, first.split(sizes), strict=True):
            buffer.copy_(content.clone().view(buffer.dtype).view_as(buffer))


def content_of(tensor: torch.Tensor) -> memoryview:
    """Its bytes."""
    return memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())

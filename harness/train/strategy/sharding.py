"""A model's weights over ranks: split by FSDP, put together again, loaded from rank 0.

accelerate silently replaces FSDP by DDP on a CPU, so that sharding is done here with torch's own
fully_shard, on CPU and GPU alike.
"""

from __future__ import annotations

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

from harness.core.settings import Settings

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The layers that are gathered one at a time: the members of the outermost module lists."""
    blocks: list[nn.Module] = []
    for child in model.children():
        blocks += child if isinstance(child, nn.ModuleList) else blocks_of(child)
    return blocks


def shard(model: nn.Module, settings: Settings, device: torch.device) -> None:
    """Split the model over all processes, layer by layer."""
    policy: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        # False keeps layers whole after the forward pass: only gradients and optimizer are split.
        "reshard_after_forward": settings.fsdp_shard == "full",
    }
    if settings.precision in ("bf16", "fp16"):
        dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float16
        policy["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if settings.fsdp_offload:
        policy["offload_policy"] = CPUOffloadPolicy()
    for block in blocks_of(model):
        fully_shard(block, **policy)
    fully_shard(model, **policy)


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """The unsharded weights, on rank 0 (a collective: every rank calls it)."""
    weights: dict[str, Any] = get_model_state_dict(model, options=WHOLE)
    return weights


def load_weights(model: nn.Module, weights: dict[str, Any]) -> None:
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))


def load_from_leader(model: nn.Module, file: Path, settings: Settings) -> None:
    """Rank 0's weights on every rank (a collective), since only rank 0 may see the file.

    Loaded rank by rank, a node without the file would silently go on with other weights.
    """
    leader = not dist.is_initialized() or dist.get_rank() == 0
    if settings.strategy == "fsdp":
        # NCCL does not reach shards that are offloaded to the CPU: then every rank reads the file.
        every_rank = settings.fsdp_offload
        weights = safetensors.torch.load_file(file) if leader or every_rank else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=not every_rank)
        set_model_state_dict(model, weights, options=options)
        return
    if leader:
        safetensors.torch.load_model(model, file, strict=True)
    if dist.is_initialized() and dist.get_world_size() > 1:
        for tensor in model.state_dict().values():
            whole = tensor.contiguous()
            dist.broadcast(whole, src=0)
            tensor.copy_(whole)


def whole_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    return state


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    set_optimizer_state_dict(
        model, optimizer, state, options=StateDictOptions(full_state_dict=True)
    )


def average_buffers(model: nn.Module) -> None:
    """The mean of BatchNorm's statistics over ranks, each of which has seen its share of the data.

    Without this each rank would evaluate with its own, and the metric would mix several models.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            for buffer in (module.running_mean, module.running_var):
                if buffer is not None:
                    dist.all_reduce(buffer)
                    buffer /= dist.get_world_size()

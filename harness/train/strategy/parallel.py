"""What a strategy does to a model, and the proof that it did it.

accelerate turns FSDP into DDP on a CPU without a word, and the Trainer turns a plain run on
several GPUs into DataParallel. So sharding is done here with torch's own fully_shard, on CPU and
GPU alike, and observe() looks at the model that training really uses.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
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
from torch.nn.parallel import DataParallel, DistributedDataParallel

from harness.core.settings import Settings, UserError
from harness.core.strategies import is_apart, why_a_gpu
from harness.core.topology import World

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def pin_one_device(settings: Settings, local_rank: int = 0) -> None:
    """A run on one device sees one device: otherwise the Trainer would use DataParallel.

    Before CUDA is initialised; the first of the devices that the user left visible stays.
    """
    # Counting asks the driver and leaves CUDA uninitialised.
    if settings.strategy in ("single", "hivemind") and (count := torch.cuda.device_count()) > 1:
        every = ",".join(map(str, range(count)))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")
        # Peers of one machine each take their own.
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[local_rank % len(visible)]


@contextmanager
def in_turn(world: World) -> Iterator[None]:
    """Rank 0 goes first, then one rank of each other node, then the rest.

    What rank 0 downloads or prepares, the others read from the cache; a node that shares no disk
    with it prepares its own, once.
    """
    turn = 0 if world.rank == 0 else 1 if world.local_rank == 0 else 2
    many = dist.is_initialized() and world.size > 1
    for _ in range(turn if many else 0):
        dist.barrier()
    try:
        yield
    finally:
        for _ in range(2 - turn if many else 0):
            dist.barrier()


def refuse_impossible(settings: Settings, cuda: bool) -> None:
    """What this device cannot do is refused with the reason, never replaced by something else."""
    if not cuda and (reason := why_a_gpu(settings)):
        raise UserError(reason)
    if settings.exchange == "direct" and cuda and not dict(settings.trainer).get("use_cpu"):
        raise UserError(
            "--exchange direct is for gloo, which CPUs use: leave it out on GPUs (NCCL), "
            "or add --use_cpu"
        )
    if settings.precision == "tf32" and torch.cuda.get_device_capability() < (8, 0):
        raise UserError("--precision tf32 needs an NVIDIA GPU of the Ampere generation or newer")
    if settings.precision == "bf16" and cuda and not torch.cuda.is_bf16_supported():
        raise UserError("--precision bf16 is not supported by this GPU; use fp16 or fp32")


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The layers that are gathered one at a time: the members of the outermost module lists."""
    found: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                found.extend(child)
            else:
                walk(child)

    walk(model)
    return found


def shard(model: nn.Module, settings: Settings, device: torch.device) -> None:
    """Split the model over all processes, layer by layer."""
    policy: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        # Kept whole after the forward pass: only gradients and optimizer stay split.
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
    """Every weight in one piece on rank 0 (a collective: every rank calls it)."""
    return get_model_state_dict(model, options=WHOLE)


def load_weights(model: nn.Module, weights: dict[str, Any]) -> None:
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))


def load_from_leader(model: nn.Module, file: Path, settings: Settings) -> None:
    """Rank 0's weights on every rank (a collective): it may be alone to see the file.

    Rank by rank, a node without the file would go on with other weights, and nothing would say so.
    """
    leader = not dist.is_initialized() or dist.get_rank() == 0
    if settings.strategy == "fsdp":
        # Offloaded shards lie where NCCL does not reach: there every rank reads the file.
        each = settings.fsdp_offload
        weights = safetensors.torch.load_file(file) if leader or each else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=not each)
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
    return get_optimizer_state_dict(model, optimizer, options=WHOLE)


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    set_optimizer_state_dict(
        model, optimizer, state, options=StateDictOptions(full_state_dict=True)
    )


def average_buffers(model: nn.Module) -> None:
    """One set of BatchNorm statistics for all ranks: each has seen only its share of the data.

    Without this each rank evaluates with its own, and the metric mixes several models.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            for buffer in (module.running_mean, module.running_var):
                if buffer is not None:
                    dist.all_reduce(buffer)
                    buffer /= dist.get_world_size()


def as_single(settings: Settings) -> Settings:
    """A strategy whose model is a plain one in a process of its own."""
    return replace(settings, strategy="single")


def observe(model: nn.Module, settings: Settings, world: World) -> dict[str, Any]:
    """What the model that training uses really is; raises if it is not what was asked for."""
    model = getattr(model, "_orig_mod", model)  # inside torch.compile
    parameters = list(model.parameters())
    sharded = [p for p in parameters if isinstance(p, DTensor)]
    if isinstance(model, DistributedDataParallel):
        # What is left of its exchange, the strategy counts until the end.
        ran = str(settings.strategy) if is_apart(settings) else "ddp"
    elif isinstance(model, DataParallel):
        ran = "dp"
    elif sharded:
        ran = "fsdp"
    else:
        ran = "single"
    here = sum(_local(p).numel() * p.element_size() for p in parameters)
    whole = sum(p.numel() * p.element_size() for p in parameters)
    seen = {
        "strategy": ran,
        "world": dist.get_world_size() if dist.is_initialized() else 1,
        "backend": dist.get_backend() if dist.is_initialized() else None,
        "device": str(_local(parameters[0]).device),
        "parameter_bytes": whole,
        "parameter_bytes_per_rank": here,
        "sharded_parameters": len(sharded),
        "parameters": len(parameters),
    }
    if isinstance(model, DataParallel):
        seen["devices"] = len(model.device_ids)
    wrong = ran != settings.strategy or seen["world"] != world.size
    if ran == "fsdp" and world.size > 1:
        # Padding of small tensors allows for a little more than an equal share.
        wrong |= len(sharded) != len(parameters) or here > whole / world.size * 1.1 + 65536
    if wrong:
        raise RuntimeError(
            f"asked for --strategy {settings.strategy} on {world.size} process(es), but what would "
            f"run is {seen}: refusing to record one as the other"
        )
    return seen


# What DDP says is registered where gradients are to be compressed so.
HOOKS = {"bf16": "bf16_hook", "fp16": "fp16_compress_hook", "powersgd": "PowerSGD.hook"}


DIRECT_HOOK = "DirectGradients.hook"


def observe_hook(model: nn.Module, settings: Settings) -> dict[str, Any]:
    """What DDP calls in place of its own exchange of gradients; raises if it was not asked for."""
    ddp: Any = getattr(model, "_orig_mod", model)
    if not isinstance(ddp, DistributedDataParallel):
        return {"gradient_hook": None}
    seen = ddp._get_ddp_logging_data().get("comm_hook") or None
    for _, state in ddp._comm_hooks:
        if rank := getattr(state, "matrix_approximation_rank", None):
            seen = f"{seen} of rank {rank}"
        if dtype := getattr(state, "sent_as", None):
            seen = f"{seen} in {str(dtype).removeprefix('torch.')}"
    kind, _, rank = settings.compress.partition(":")
    expected = HOOKS.get(kind)
    if kind == "powersgd":
        expected = f"{expected} of rank {rank or 1}"
    if settings.exchange == "direct":
        sent_as = {"bf16": " in bfloat16", "fp16": " in float16"}
        expected = DIRECT_HOOK + sent_as.get(kind, "")
    if settings.strategy == "ddp" and seen != expected:
        asked = f"--compress {settings.compress}"
        if settings.exchange != "backend":
            asked += f" --exchange {settings.exchange}"
        raise RuntimeError(
            f"asked for {asked}, but DDP exchanges gradients by {seen}: "
            "refusing to record one as the other"
        )
    return {"gradient_hook": seen}


def observe_decay(optimizer: Any) -> dict[str, int]:
    """What weight decay is applied to: vectors too, such as the weights of a norm."""
    decayed = [p for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]]
    vectors = sum(p.ndim < 2 for p in decayed)
    return {"decayed_tensors": len(decayed), "decayed_vectors": vectors}


def observe_dtype(model: nn.Module, settings: Settings, observed: dict[str, Any]) -> None:
    """Record the number format that the first layer really computes in, when it does."""
    layers = (nn.Linear, nn.Conv2d)
    first = next(m for m in model.modules() if isinstance(m, layers))

    def look(module: Any, inputs: Any, output: torch.Tensor) -> None:
        handle.remove()
        seen = observed["dtype"] = str(output.dtype).removeprefix("torch.")
        expected = {"bf16": "bfloat16", "fp16": "float16"}.get(settings.precision, "float32")
        if seen != expected:
            raise RuntimeError(
                f"asked for --precision {settings.precision}, but the first layer "
                f"computes in {seen}: refusing to record one as the other"
            )

    handle = first.register_forward_hook(look)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter

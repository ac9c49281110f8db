"""The proof that what runs is what was asked for.

accelerate silently replaces FSDP by DDP on a CPU, and the Trainer makes a plain run on several GPUs
a DataParallel one. So the observe functions look at the model that training really uses: a record
never names a strategy, an exchange or a number format that did not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from harness.core.collectives import ALL_TO_ALL, BACKEND
from harness.core.records.redact import redacted
from harness.core.schema.environment import ObservedRecord
from harness.core.settings import Settings, UserError
from harness.core.strategies import GRADIENT_CODES, STRATEGIES, strategy_of
from harness.core.topology import World
from harness.train.data import lora
from harness.train.data.probes import BATCHNORM
from harness.train.measure.communication import uncompiled
from harness.train.strategy.muon import WithMuon

# What torch says of a model that a strategy cannot train, and what that means.
UNFIT = {
    "marked as ready twice": "computes gradients of a weight more than once in a backward pass, "
    "and ddp exchanges each once: use --strategy single",
    "got mixed torch.Tensor and DTensor": "calls layers past the hooks with which fsdp gathers "
    "their weights: use --strategy ddp or single",
}

# Classes around a model, by which strategies are told apart.
WRAPPERS = {DistributedDataParallel: "DDP", DataParallel: "DataParallel"}

# Packages of classes that a name or folder stands for; the second holds the code of the Hub.
NAMED = ("transformers", "transformers_modules", "harness")


@contextmanager
def explained(model: nn.Module, settings: Settings) -> Iterator[None]:
    """Explain, in one line, that a strategy cannot train a model, as its first step shows."""
    try:
        yield
    except RuntimeError as error:
        for sign, meaning in UNFIT.items():
            if sign in str(error):
                name = type(uncompiled(model)).__name__.removeprefix("FSDP")
                raise UserError(f"--strategy {settings.strategy}: {name} {meaning}") from error
        raise


def observe(model: nn.Module, settings: Settings, world: World) -> ObservedRecord:
    """What the model that training uses really is; raises where it is not what was asked for."""
    model = uncompiled(model)
    parameters = list(model.parameters())
    sharded = sum(isinstance(p, DTensor) for p in parameters)
    ran = _strategy_of(model, settings, bool(sharded))
    local_bytes = sum(_local(p).nbytes for p in parameters)
    total_bytes = sum(p.nbytes for p in parameters)
    observed: ObservedRecord = {
        "strategy": ran,
        "world": dist.get_world_size() if dist.is_initialized() else 1,
        "backend": dist.get_backend() if dist.is_initialized() else None,
        "device": str(_device_of(parameters[0])),
        "parameter_bytes": total_bytes,
        "parameter_bytes_per_rank": local_bytes,
        "sharded_parameters": sharded,
        "parameters": len(parameters),
        "batchnorm_layers": sum(isinstance(module, BATCHNORM) for module in model.modules()),
        "trained_bytes": sum(p.nbytes for p in parameters if p.requires_grad),
    }
    if settings.lora and not lora.is_adapted(model):
        raise UserError(
            f"--lora {settings.lora}: the model of {settings.script}.py has no adapters: make it "
            "with harness.train.data.models.build, or give it to harness.train.data.lora.add"
        )
    if STRATEGIES[ran].reduces_gradients:
        observed["find_unused_parameters"] = model.find_unused_parameters
    if isinstance(model, DataParallel):
        observed["devices"] = len(model.device_ids)
    differs = ran != settings.strategy or observed["world"] != world.size
    if STRATEGIES[ran].shards and world.size > 1:
        # Small tensors are padded: a little more than an equal share is right.
        most = total_bytes / world.size * 1.1 + 65536
        differs |= sharded != len(parameters) or local_bytes > most
    if differs:
        raise RuntimeError(
            f"asked for --strategy {settings.strategy} on {world.size} process(es), but what would "
            f"run is {observed}: refusing to record one as the other"
        )
    return observed


def _device_of(parameter: torch.Tensor) -> torch.device:
    """The one that computes: with --fsdp_offload the shards lie on the host."""
    if isinstance(parameter, DTensor) and parameter.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return _local(parameter).device


def _strategy_of(model: nn.Module, settings: Settings, sharded: bool) -> str:
    """The strategy that trains a model which is wrapped or sharded like this one."""
    wrapped = (name for kind, name in WRAPPERS.items() if isinstance(model, kind))
    wrapper = next(wrapped, "FSDP" if sharded else "nothing")
    # What is exchanged is verified elsewhere: the hook of DDP by observe_hook(), and by local_sgd
    # and diloco their count of exchanges; a user's strategy has to end with equal weights.
    wanted = strategy_of(settings)
    alike = (each for each in STRATEGIES.values() if each.wrapper == wrapper)
    return (wanted if wanted.wrapper == wrapper else next(alike)).name


# The name under which DDP logs the hook of each compression.
HOOKS = {"bf16": "bf16_hook", "fp16": "fp16_compress_hook", "powersgd": "PowerSGD.hook"}
DIRECT_HOOK = "DirectGradients.hook"


def expected_hook(settings: Settings, way: str, world: World) -> str | None:
    kind, _, rank = settings.compress.partition(":")
    if strategy_of(settings).reduces_gradients and kind in GRADIENT_CODES:
        return f"GradientRow.hook in {kind} by {way}"
    if way != BACKEND:
        dtype = {"bf16": " in bfloat16", "fp16": " in float16"}.get(kind, "")
        how = dtype + (f" by {way}" if way == ALL_TO_ALL else "")
        return DIRECT_HOOK + how + (" between nodes" if world.is_two_level else "")
    return f"{HOOKS[kind]} of rank {rank or 1}" if kind == "powersgd" else HOOKS.get(kind)


def observe_hook(model: nn.Module, settings: Settings, way: str, world: World) -> ObservedRecord:
    """The hook that DDP calls instead of its own exchange; raises if it is not of this --exchange
    and --compress.
    """
    ddp = uncompiled(model)
    if not isinstance(ddp, DistributedDataParallel):
        return {"gradient_hook": None}
    hook = ddp._get_ddp_logging_data().get("comm_hook") or None
    for _, state in ddp._comm_hooks:
        if rank := getattr(state, "matrix_approximation_rank", None):
            hook = f"{hook} of rank {rank}"
        if how := getattr(state, "how", ""):
            hook = f"{hook}{how}"
    expects = strategy_of(settings).reduces_gradients
    if expects and hook != expected_hook(settings, way, world):
        flags = f"--compress {settings.compress}"
        if way != BACKEND:
            flags += f" --exchange {way}"
        raise RuntimeError(
            f"asked for {flags}, but DDP exchanges gradients by {hook}: "
            "refusing to record one as the other"
        )
    return {"gradient_hook": hook}


def observe_optimizer(optimizer: Any, settings: Settings) -> ObservedRecord:
    """How many tensors weight decay applies to, how many of these are vectors (biases), and how
    many matrices Muon trains; raises if that is not what --muon asks for.
    """
    decayed = [p for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]]
    vectors = sum(p.ndim < 2 for p in decayed)
    found: ObservedRecord = {"decayed_tensors": len(decayed), "decayed_vectors": vectors}
    optimizer = getattr(optimizer, "optimizer", optimizer)  # without accelerate's wrapper
    matrices = optimizer.matrices if isinstance(optimizer, WithMuon) else 0
    if settings.muon != (matrices > 0):
        raise RuntimeError(
            f"--muon is {settings.muon}, but Muon trains {matrices} matrices: refusing to record "
            "one as the other"
        )
    if matrices:
        found["muon_matrices"] = matrices
    return found


def own_model(model: nn.Module, named: str) -> ObservedRecord:
    """The class of a model that a script has made, with what --model names if it has a
    configuration. Before the model is wrapped or sharded.
    """
    made = type(uncompiled(model))
    if not hasattr(model, "config"):
        return {"own_model": made.__name__}
    is_named = made.__module__.partition(".")[0] in NAMED
    return {} if is_named else {"own_model": f"{made.__name__} ({redacted(named)})"}


class NumberFormat:
    """The number format that the first layer computes in, from its first forward pass on."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.observed: ObservedRecord = {}

    def watch(self, model: nn.Module) -> None:
        """Observe the next forward pass, unless the format is known already."""
        layers = (nn.Linear, nn.Conv2d)
        first = next((m for m in model.modules() if isinstance(m, layers)), None)
        if first is None or self.observed:
            return  # a user's model may be without such layers

        def record(module: Any, inputs: Any, output: torch.Tensor) -> None:
            handle.remove()
            dtype = str(output.dtype).removeprefix("torch.")
            self.observed = {"dtype": dtype}
            precision = self.settings.precision
            expected = {"bf16": "bfloat16", "fp16": "float16"}.get(precision, "float32")
            if dtype != expected:
                raise RuntimeError(
                    f"asked for --precision {precision}, but the first layer "
                    f"computes in {dtype}: refusing to record one as the other"
                )

        handle = first.register_forward_hook(record)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter

"""What DDP is told about the weights, and whether all ranks have the same: before the first update,
and after the last one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import accelerate
import torch.distributed as dist
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn

from harness.core.collectives import GLOO
from harness.core.process import warn
from harness.core.settings import Settings
from harness.core.strategies import is_apart, strategy_of
from harness.core.topology import World
from harness.train.data import probes
from harness.train.session import gather
from harness.train.strategy.sharding import content_of, layers_are_skipped


class EqualStart(DistributedDataParallelKwargs):
    """The arguments of DDP for a model whose weights are the same on all ranks."""

    def to_kwargs(self) -> dict[str, object]:
        return {**super().to_kwargs(), "init_sync": False}


def is_wrapped(settings: Settings) -> bool:
    """Whether DDP wraps the model."""
    return strategy_of(settings).wrapper == "DDP"


def settle_unused(
    arguments: DistributedDataParallelKwargs,
    model: nn.Module,
    batch: Mapping[str, Any],
    settings: Settings,
) -> bool:
    """Prepare for parameters on which the loss does not depend: DDP waits for the gradient of each.
    Returns whether training skips layers at random.

    DDP is told to search for them in every update, which takes time, and a collective of all ranks.
    Replicas that train apart do without: parameters that never get a gradient are not trained.
    """
    if is_apart(settings):
        every = probes.unused_parameters(model, batch)
        skipped = probes.unused_parameters(model, batch, skipping=True)
        if len(skipped) > len(every):
            raise layers_are_skipped(model, settings)
        unused = [name for name in every if name in skipped]
        for name in unused:
            model.get_parameter(name).requires_grad_(False)
        if unused and dist.get_rank() == 0:
            what = f"{len(unused)} tensors, such as {unused[0]}"
            warn(f"the loss does not depend on {what}: they are not trained")
        return False
    skipped = probes.unused_parameters(model, batch, skipping=True)
    arguments.find_unused_parameters = bool(skipped)
    return bool(skipped) and probes.skips_layers(model, batch)


def arrange_ddp(accelerator: accelerate.Accelerator, model: nn.Module, world: World) -> None:
    """Prepare DDP's arguments before the model is wrapped; all ranks call this.

    DDP would send all weights of rank 0, frozen ones too, to every other rank: on CPUs of several
    nodes it does so only if weights differ, as the link may be slow. With NCCL it always does,
    which takes less time than comparing them.
    """
    arguments = {**vars(accelerator.ddp_handler), "gradient_as_bucket_view": True}
    far = world.nodes > 1 and dist.get_backend() == GLOO
    equal = far and len({*gather(checksum_of(model))}) == 1
    kind = EqualStart if equal else DistributedDataParallelKwargs
    accelerator.ddp_handler = kind(**arguments)


def checksum_of(model: nn.Module) -> str:
    """A checksum of all weights, their names and shapes, and whether they are trained."""
    checksum = hashlib.sha256()
    for name, weight in model.named_parameters():
        about = (name, tuple(weight.shape), weight.dtype, weight.requires_grad)
        checksum.update(repr(about).encode())
        checksum.update(content_of(weight))
    return checksum.hexdigest()


def require_equal_weights(model: nn.Module, strategy: object) -> None:
    """Raise if ranks have different weights after the last update: one model is recorded."""
    first, *others = gather(checksum_of(model))
    if unlike := sum(checksum != first for checksum in others):
        raise RuntimeError(
            f"--strategy {strategy}: after the last update {unlike} rank(s) have other "
            "weights than rank 0, and one model is recorded: the strategy must make them equal"
        )

"""Whether all ranks have the same weights: before the first update, and after the last one."""

from __future__ import annotations

import hashlib

import accelerate
import torch
import torch.distributed as dist
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn

from harness.core.topology import World
from harness.train.session import gather


class EqualStart(DistributedDataParallelKwargs):
    """The arguments of DDP for a model whose weights are the same on all ranks."""

    def to_kwargs(self) -> dict[str, object]:
        return {**super().to_kwargs(), "init_sync": False}


def arrange_ddp(accelerator: accelerate.Accelerator, model: nn.Module, world: World) -> None:
    """Prepare DDP's arguments before the model is wrapped; all ranks call this.

    DDP would send all weights of rank 0, frozen ones too, to every other rank: on CPUs of several
    nodes it does so only if weights differ, as the link may be slow. With NCCL it always does,
    which takes less time than comparing them.
    """
    arguments = {**vars(accelerator.ddp_handler), "gradient_as_bucket_view": True}
    far = world.nodes > 1 and dist.get_backend() == "gloo"
    equal = far and len({*gather(checksum_of(model))}) == 1
    kind = EqualStart if equal else DistributedDataParallelKwargs
    accelerator.ddp_handler = kind(**arguments)


def checksum_of(model: nn.Module) -> str:
    """A checksum of all weights, their names and shapes, and whether they are trained."""
    checksum = hashlib.sha256()
    for name, weight in model.named_parameters():
        about = (name, tuple(weight.shape), weight.dtype, weight.requires_grad)
        checksum.update(repr(about).encode())
        content = weight.detach().cpu().contiguous().view(-1).view(torch.uint8)
        checksum.update(memoryview(content.numpy()))
    return checksum.hexdigest()


def require_equal_weights(model: nn.Module, strategy: object) -> None:
    """Raise if ranks have different weights after the last update: one model is recorded."""
    first, *others = gather(checksum_of(model))
    if unlike := sum(checksum != first for checksum in others):
        raise RuntimeError(
            f"--strategy {strategy}: after the last update {unlike} rank(s) have other "
            "weights than rank 0, and one model is recorded: they must be exchanged until then"
        )

"""How a process takes part in a run: the contract, and ranks of one process group.

Ranks must act alike, and each may see another disk: gather() and broadcast() are collectives of
Python objects, and give the value itself where there is no process group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainingArguments

from harness.core.settings import Settings
from harness.core.topology import World, for_world


class Session:
    """Made before the run's folder is opened. This one: torchrun has started the processes, they
    end together, and rank 0 records; or there is only one.
    """

    def __init__(self, world: World) -> None:
        self.world = world  # the processes that the Trainer sees
        self.recorded_world = world  # the processes that the record describes

    @property
    def alone(self) -> bool:
        """Whether no other process trains with this one."""
        return self.world.size == 1

    def own_settings(self, settings: Settings) -> Settings:
        """With the batch and accumulation of this process."""
        # Only torchrun's elastic runs train on fewer processes than the set-up names; DataParallel
        # is one process, whatever its set-up says.
        return for_world(settings, self.world.size) if self.world.elastic else settings

    def restrict(self, args: TrainingArguments) -> None:
        """Switch off what this process leaves to the one that records the run."""

    def already_finished(self) -> None:
        """The record is complete: nothing is trained."""

    def open(self) -> bool:
        """The run begins; False if this process is not needed."""
        return True

    def check_data(self, checksum: str | None) -> None:
        """The data are loaded; raises if they are not those of the run."""

    def finish(self) -> None:
        """The record is complete."""

    def fail(self, outcome: str, interrupted: bool) -> None:
        """This process ends without completing the run."""


def gather(value: Any) -> list[Any]:
    """The value of each rank, in the order of ranks, on all of them."""
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast(value: Any) -> Any:
    """Rank 0's value on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def barrier() -> None:
    """Wait for all ranks; NCCL is told the device, or each rank would print a notice."""
    if dist.is_initialized():
        nccl = dist.get_backend() == "nccl"
        dist.barrier(device_ids=[torch.cuda.current_device()] if nccl else None)

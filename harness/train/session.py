"""How a process takes part in a run: the contract, and ranks of one process group.

Ranks must act alike, and each may see another disk: gather() and broadcast() are collectives of
what JSON holds; a process alone gets its own value. Over gloo they are one message of each rank to
all others (direct.py).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from harness.core.collectives import GLOO, NCCL
from harness.core.schema.environment import ObservedRecord
from harness.core.settings import Settings
from harness.core.topology import World, for_world
from harness.train.direct import Messages

if TYPE_CHECKING:
    from transformers import TrainingArguments


class Session:
    """How a process takes part in a run; made before the run's folder is opened.

    In this class torchrun has started the processes, they end together, and rank 0 records; or
    there is only one process.
    """

    ends_when_silent = True  # a process that does not answer is hung, and ends the run

    def __init__(self, world: World) -> None:
        self.world = world  # the processes that the Trainer sees
        self.recorded_world = world  # the processes that the record describes
        self.observed: ObservedRecord = {}  # of the model, once it is made

    @property
    def is_single(self) -> bool:
        """Whether no other process trains with this one."""
        return self.world.size == 1

    def own_settings(self, settings: Settings) -> Settings:
        """The settings with the batch and accumulation of this process."""
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

    def model_made(self, observed: ObservedRecord) -> None:
        """The model is made: what is recorded of it, also of a run that fails from here on."""
        self.observed = observed

    def finish(self) -> None:
        """The record is complete."""

    def fail(self, outcome: str, interrupted: bool) -> None:
        """This process ends without completing the run."""


class OtherFailed(RuntimeError):
    """Another rank has failed: with what, and which it is."""


def is_alone() -> bool:
    """Whether this process has no other to exchange with."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def gather(value: Any) -> list[Any]:
    """The value of each rank, in the order of ranks, on all of them."""
    if is_alone():
        return [value]
    if (messages := _messages()) is not None:
        return [json.loads(text) for text in messages.exchange(json.dumps(value).encode())]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather_rows(own: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks, of one shape, in the order of ranks."""
    if is_alone():
        return [own]
    if own.device.type == "cpu" and (messages := _messages()) is not None:
        return messages.rows(own.contiguous())
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own.contiguous())
    return everyone


def broadcast(value: Any) -> Any:
    """Rank 0's value on every rank, as JSON holds it: tuples become lists."""
    if is_alone():
        return json.loads(json.dumps(value))
    own = value if dist.get_rank() == 0 else None
    return gather(own)[0] if _messages() else json.loads(broadcast_object(json.dumps(own)))


def broadcast_object(value: Any) -> Any:
    """Rank 0's value, whatever it is: torch sends its length first, and waits for each."""
    if is_alone():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def barrier() -> None:
    """Wait for all ranks; NCCL is told the device, or each rank would print a notice."""
    if dist.is_initialized():
        if dist.get_backend() == NCCL:
            dist.barrier(device_ids=[torch.cuda.current_device()])
        else:
            gather(None)


def end_group() -> None:
    """Leave the process group, if there is one. Its sockets close with the last that uses it."""
    global _of_world
    _of_world = None
    if dist.is_initialized():
        dist.destroy_process_group()


_of_world: tuple[Any, Messages] | None = None


def _messages() -> Messages | None:
    """The messages of the default process group, if its backend is gloo."""
    global _of_world
    world = dist.group.WORLD
    if dist.get_backend(world) != GLOO:
        return None
    if _of_world is None or _of_world[0] is not world:
        _of_world = world, Messages(world)
    return _of_world[1]

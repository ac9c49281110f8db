"""The processes of a run: how many there are, which one this is, and the effective batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from harness.core.settings import Settings, UserError, parse_setup


@dataclass(frozen=True)
class World:
    """The processes that a launcher started; without a launcher, one process."""

    nodes: int = 1
    per_node: int = 1
    rank: int = 0
    local_rank: int = 0
    launched: bool = False  # by torchrun, or a launcher that sets the same variables
    elastic: bool = False  # torchrun may continue with other nodes

    @property
    def size(self) -> int:
        return self.nodes * self.per_node

    @property
    def is_two_level(self) -> bool:
        """Whether there are several nodes with several processes each."""
        return self.nodes > 1 and self.per_node > 1


def world_of(environ: Mapping[str, str]) -> World:
    """Read the variables that torchrun and accelerate set for each process."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return World()
    size = int(environ["WORLD_SIZE"])
    per_node = int(environ.get("LOCAL_WORLD_SIZE", size))
    if size % per_node:
        raise UserError(
            f"{size} processes over nodes of {per_node}: start the same number on every node"
        )
    return World(
        nodes=max(size // per_node, 1),
        per_node=per_node,
        rank=int(environ["RANK"]),
        local_rank=int(environ.get("LOCAL_RANK", 0)),
        launched=True,
        elastic=is_elastic(environ),
    )


def effective_batch(per_gpu_batch: int, grad_acc: int, devices: int) -> int:
    """Samples of one update over all devices."""
    return per_gpu_batch * grad_acc * devices


def own_batch(settings: Settings, devices: int = 1) -> int:
    """Samples that these devices contribute at a time; one hivemind peer has one device."""
    return effective_batch(settings.per_gpu_batch or 1, settings.grad_acc, devices)


def batch_of(settings: Settings, devices: int) -> int:
    """The effective batch of a run."""
    return batch_of_update(settings.target_batch, own_batch(settings, devices))


def batch_of_update(target_batch: int | None, own: int) -> int:
    """The target that hivemind peers share, or else the samples of all processes."""
    return target_batch or own


def batch_of_device(effective_batch: int, grad_acc: int, devices: int) -> int | None:
    """The per_gpu_batch that gives this effective batch; None if it cannot be split equally."""
    batch, rest = divmod(effective_batch, grad_acc * devices)
    return None if rest or not batch else batch


def batch_of_trainer(args: Any, fitting: int | None = None) -> int:
    """The effective batch by TrainingArguments; train_batch_size covers all GPUs of a process, and
    all processes if they split batches. fitting: the one that auto_find_batch_size trains with.
    """
    sharing = 1 if _splits_batches(args) else args.world_size
    batch = fitting or args.train_batch_size
    return effective_batch(batch, args.gradient_accumulation_steps, sharing)


def per_gpu_batch_of_trainer(args: Any, fitting: int | None = None) -> int:
    """Samples of one device in a forward pass, by TrainingArguments."""
    batch: int = args.per_device_train_batch_size
    if fitting:
        batch = fitting // max(args.n_gpu, 1)
    return batch // args.world_size if _splits_batches(args) else batch


def _splits_batches(args: Any) -> bool:
    """Whether the processes share the batch that is configured (accelerate's split_batches)."""
    known = getattr(args, "accelerator_config", None)
    if isinstance(known, Mapping):
        return bool(known.get("split_batches"))
    return bool(getattr(known, "split_batches", False))


# In runs whose processes may come and go (torchrun --nnodes=1:4 --max_restarts=3), the set-up names
# the processes asked for, which determine effective batch, training set and schedule. Fewer may run
# at a time; the functions below decide how those make the same updates.

# How long a process waits for the others once training has begun: a node that is cut off from the
# network sends nothing, not even the end of a connection.
COLLECTIVE_TIMEOUT_S = 60


def is_elastic(environ: Mapping[str, str]) -> bool:
    """Whether torchrun restarts the processes when one is lost."""
    return int(environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0


def restarts_left(environ: Mapping[str, str]) -> int:
    """How many restarts this node's agent has left; nodes that join or leave use up none."""
    used = int(environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    return int(environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) - used


def asked_processes(settings: Settings) -> int:
    nodes, per_node, _ = parse_setup(str(settings.setup))
    return nodes * per_node


def asked_batch(settings: Settings) -> int:
    """The effective batch of the whole set-up."""
    return batch_of(replace(settings, target_batch=None), asked_processes(settings))


def split(effective_batch: int, per_gpu_batch: int, processes: int) -> tuple[int, int] | None:
    """(per_gpu_batch, grad_acc) that give this effective batch; None if it cannot be split equally.

    No process gets more samples at a time than per_gpu_batch: its memory may not hold them.
    """
    per_process = batch_of_device(effective_batch, 1, processes)
    if per_process is None:
        return None
    fitting = (b for b in range(min(per_gpu_batch, per_process), 0, -1) if per_process % b == 0)
    batch = next(fitting)
    return batch, per_process // batch


def accumulated(effective_batch: int, most: int) -> tuple[int, int]:
    """(per_gpu_batch, grad_acc) of one process that takes at most `most` samples at a time."""
    sizes = split(effective_batch, most, 1)
    assert sizes is not None  # one process can always take all
    return sizes


def nodes_that_hold(settings: Settings) -> list[int]:
    """The numbers of nodes, up to the set-up's, that can share its effective batch equally."""
    nodes, per_node, _ = parse_setup(str(settings.setup))
    return [n for n in range(1, nodes + 1) if asked_batch(settings) % (n * per_node) == 0]


def for_world(settings: Settings, processes: int) -> Settings:
    """The settings with the batch and accumulation that this number of processes trains with."""
    if settings.elastic_batch == "scale" or processes == asked_processes(settings):
        return settings
    sizes = split(asked_batch(settings), settings.per_gpu_batch or 1, processes)
    if sizes is None:
        raise UserError(
            f"{processes} processes cannot share the effective batch of {asked_batch(settings)} "
            f"that --setup {settings.setup} has: {_numbers(nodes_that_hold(settings))} node(s) "
            "can; --elastic_batch scale lets it change with the processes"
        )
    return replace(settings, per_gpu_batch=sizes[0], grad_acc=sizes[1])


def warning(settings: Settings) -> str | None:
    """A warning if some numbers of nodes cannot hold the effective batch."""
    nodes, _, _ = parse_setup(str(settings.setup))
    holding = nodes_that_hold(settings)
    if settings.elastic_batch == "scale" or len(holding) == nodes:
        return None
    return (
        f"the effective batch of {asked_batch(settings)} can be held on {_numbers(holding)} of "
        f"{nodes} nodes; on another number the run ends, unless --elastic_batch scale"
    )


def _numbers(counts: list[int]) -> str:
    return ", ".join(map(str, counts))

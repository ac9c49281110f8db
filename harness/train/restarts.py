"""What a process of an elastic run does besides training (harness/elastic.py decides the rest)."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from harness import elastic
from harness.settings import Settings
from harness.world import World


@dataclass(frozen=True)
class Launch:
    """What the agents of torchrun on all nodes say together."""

    unix: float  # since when the first of them runs
    restarts_left: int  # before the first of them gives up


def launch_of(world: World) -> Launch | None:
    """Of an elastic run (a collective: every rank calls it); None for one that ends with a rank."""
    if not world.elastic:
        return None
    began = psutil.Process(os.getppid()).create_time()
    mine = (began, elastic.restarts_left(os.environ))
    told = [mine] * world.size
    if dist.is_initialized() and world.size > 1:
        dist.all_gather_object(told, mine)
    return Launch(min(unix for unix, _ in told), min(left for _, left in told))


def warn(settings: Settings) -> None:
    """What would go wrong only when a node is lost."""
    told = [elastic.warning(settings)]
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and dist.is_initialized() and dist.get_backend() == "gloo":
        told.append(
            "restarts fail on gloo, because the processes find the addresses of the attempt "
            "before: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on every node"
        )
    for text in filter(None, told):
        print(f"harness: warning: {text}", file=sys.stderr)


def wait_for_peers(settings: Settings) -> None:
    """From now on all ranks meet often: one that says nothing for this long is gone.

    Not before: while rank 0 loads a model for the first time, the others wait for it.
    """
    seconds = dict(settings.trainer).get("ddp_timeout", elastic.PEERS_WAIT_S)
    _set_pg_timeout(timedelta(seconds=seconds))

"""What a process of an elastic run does besides training (core/topology.py decides)."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from datetime import timedelta

import psutil
import torch.distributed as dist
from torch.distributed import DistNetworkError, TCPStore
from torch.distributed.distributed_c10d import _set_pg_timeout

from harness.core import topology
from harness.core.settings import Settings, UserError
from harness.core.topology import World
from harness.train.context import Launch


def launch_of(world: World) -> Launch | None:
    """Of an elastic run (a collective: every rank calls it); None for one that ends with a rank."""
    if not world.elastic:
        return None
    began = psutil.Process(os.getppid()).create_time()
    mine = (began, topology.restarts_left(os.environ))
    told = [mine] * world.size
    if dist.is_initialized() and world.size > 1:
        dist.all_gather_object(told, mine)
    return Launch(min(unix for unix, _ in told), min(left for _, left in told))


def warn(settings: Settings) -> None:
    """What would go wrong only when a node is lost."""
    told = [topology.warning(settings)]
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
    seconds = dict(settings.trainer).get("ddp_timeout", topology.PEERS_WAIT_S)
    _set_pg_timeout(timedelta(seconds=seconds))


# ----
# python -m harness store PORT: where the nodes of an elastic run meet, so that each may be lost.
#
# Without it the first node holds the rendezvous, and the run ends with that node.


def run(options: argparse.Namespace) -> int:
    try:
        store = TCPStore("127.0.0.1", options.port, is_master=True, wait_for_workers=False)
    except DistNetworkError:
        raise UserError(f"port {options.port} is taken: use another") from None
    try:
        print(
            f"torchrun --rdzv_backend=c10d --rdzv_endpoint=THIS_MACHINE:{store.port} "
            "--rdzv_conf=is_host=0,... meets here; one store for one start",
            flush=True,
        )
        signal.pause()
    except KeyboardInterrupt:
        return 130
    return 0

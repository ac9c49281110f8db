"""Elastic runs: what a process does besides training, and the store in which the nodes meet.

core/topology.py makes the decisions.
"""

from __future__ import annotations

import argparse
import os
import signal
from datetime import timedelta

import psutil
import torch.distributed as dist
from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import _set_pg_timeout

from harness.core import topology
from harness.core.collectives import GLOO
from harness.core.process import warn
from harness.core.settings import Settings, UserError
from harness.core.topology import World
from harness.train import rendezvous
from harness.train.context import Launch
from harness.train.run.watchdog import launcher_has_store
from harness.train.session import gather


def launch_of(world: World) -> Launch | None:
    """The launch of an elastic run; None if the run ends when a rank is lost (a collective)."""
    if not world.elastic:
        return None
    agent_began = psutil.Process(os.getppid()).create_time()
    of_ranks = gather((agent_began, topology.restarts_left(os.environ)))
    return Launch(min(unix for unix, _ in of_ranks), min(left for _, left in of_ranks))


def warn_of_restarts(settings: Settings) -> None:
    """Warn of what would go wrong only once a node is lost."""
    warnings = [topology.warning(settings)]
    if launcher_has_store() and dist.is_initialized() and dist.get_backend() == GLOO:
        warnings.append(
            "restarts fail on gloo, because the processes find the addresses of the attempt "
            "before: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on every node"
        )
    for text in filter(None, warnings):
        warn(text)


def limit_collectives(settings: Settings, elastic: bool) -> None:
    """Give up a rank that is silent for --ddp_timeout, now that all ranks exchange often.

    Not earlier, as ranks may wait long while rank 0 loads a model for the first time. The Trainer
    itself ignores the flag on gloo.
    """
    default = topology.COLLECTIVE_TIMEOUT_S if elastic else None
    seconds = settings.passed.get("ddp_timeout", default)
    if seconds is not None:
        _set_pg_timeout(timedelta(seconds=seconds))


def run(options: argparse.Namespace) -> int:
    """python -m harness store ADDRESS:PORT: where the nodes of an elastic run meet, so that any of
    them may be lost. Without it the first node holds the rendezvous: the run ends with that node.
    """
    host, port = options.at
    try:
        store = rendezvous.store(host, port, is_master=True, wait_for_workers=False)
    except DistNetworkError:
        raise UserError(f"port {port} is taken: use another") from None
    except OSError as error:
        raise UserError(f"{host}: {error.strerror}: name an address of this machine") from None
    try:
        print(
            f"export PET_RDZV_ID={rendezvous.new_id()}\n"
            f"python -m harness.train.torchrun --rdzv_backend=c10d --rdzv_endpoint={host}:"
            f"{store.port} --rdzv_conf=is_host=0,... meets here; one store for one start",
            flush=True,
        )
        signal.pause()
    except KeyboardInterrupt:
        return 130
    return 0

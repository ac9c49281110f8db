"""A run is opened: what is asked, whether it can be done here, and whether it has been done."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import set_seed
from transformers.trainer_utils import enable_full_determinism

from harness import attempts
from harness.flags import refuse
from harness.identity import run_id
from harness.locks import Lock
from harness.records import FINISHED, RunFolder
from harness.settings import Settings, UserError
from harness.strategies import STRATEGIES
from harness.train import parallel
from harness.train.arguments import arguments_of
from harness.train.disks import follow_leader
from harness.train.process import quiet
from harness.train.restarts import launch_of, warn
from harness.train.run import Run, from_leader
from harness.train.telemetry.session import open_watch
from harness.world import place, world_of


def start(settings: Settings) -> Run | None:
    """Open a run, or say where its record is when it has been finished before."""
    world = world_of(os.environ)
    peers = None
    quiet(bars=world.rank == 0 and sys.stderr.isatty())
    try:
        parallel.pin_one_device(settings, world.local_rank)
        gpus = torch.cuda.device_count()
        settings = place(settings, world, gpus)
        parallel.refuse_impossible(settings, cuda=gpus > 0)
        folder = RunFolder(
            Path(settings.output_dir) / settings.script / str(settings.setup) / run_id(settings)
        )
        if world.rank == 0:
            _check_writable(Path(settings.output_dir))
        if STRATEGIES[str(settings.strategy)].processes == "peers":
            from harness.train.peers.session import Peers  # needs a package of its own

            peers = Peers(settings, world, folder)
            world = peers.world
        args = arguments_of(settings, folder.path, world, peers)
        lock = _locked(folder, wait_s=30 if world.elastic else 5) if world.rank == 0 else None
    except UserError as error:
        refuse(settings.script, error, world.rank == 0 or not world.launched)
    run = Run(settings, world, args, folder, lock=lock, launch=launch_of(world), peers=peers)
    launched_unix = run.launch.unix if run.launch else None
    before = from_leader(folder.outcome() if run.leader else None)
    goes_on = run.leader and attempts.went_on(folder, launched_unix)
    if run.launch is not None and run.leader:
        warn(settings)
    if settings.rerun and not from_leader(goes_on):
        if run.leader and folder.path.exists():
            print(f"the earlier record is kept in {folder.set_aside()}")
    elif before == FINISHED:
        if run.leader:
            print(f"already finished: {folder.path} (--rerun measures again)")
        if peers is not None:
            peers.finished_before()
        run.unlock()
        if dist.is_initialized():
            dist.destroy_process_group()
        return None
    if peers is not None and not peers.open():
        return None
    run.watch = open_watch(settings.telemetry_hz, world, max(args.n_gpu, 1))
    follow_leader(folder, world)
    if dist.is_initialized():
        dist.barrier()
    # Before the model is made: the head's weights are drawn from it, on every rank alike.
    (enable_full_determinism if args.full_determinism else set_seed)(settings.seed)
    return run


def _locked(folder: RunFolder, wait_s: float) -> Lock:
    """Two processes that write one record would spoil it. One that has just been killed may
    take a moment to be gone; one that is cut off the network, until it gives its peers up.
    """
    lock = Lock(folder.lock("run"))
    # This process itself may hold it, from a run that it has given up.
    mine = lock.holder() == f"process {os.getpid()}"
    if not lock.take(0 if mine else wait_s) and not mine:
        raise UserError(f"{folder.path} is being measured by {lock.holder()}: wait until it ends")
    return lock


def _check_writable(root: Path) -> None:
    """Before anything is loaded: hours of training must not end at a folder that is read-only."""
    existing = next(p for p in (root, *root.absolute().parents) if p.exists())
    try:
        # Tried rather than asked: root may do anything, but not in /proc or on a read-only disk.
        Path(tempfile.mkdtemp(prefix=".harness-", dir=existing)).rmdir()
    except OSError:
        raise UserError(
            f"--output_dir {root}: {existing} is not a folder that can be written to"
        ) from None

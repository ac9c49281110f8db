"""The life of one run: what is asked, whether it has been done, where it goes on, how it ended."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from transformers import TrainingArguments, set_seed
from transformers.trainer_utils import enable_full_determinism

from harness import attempts
from harness.flags import refuse
from harness.identity import identity, run_id
from harness.locks import Lock
from harness.public import settings_of
from harness.records import FINISHED, SCHEMA, RunFolder, read_json, write_json
from harness.settings import Settings, UserError
from harness.strategies import World, place, world_of
from harness.summary import write_summary
from harness.train import parallel
from harness.train.arguments import training_arguments
from harness.train.cpu import CpuTime
from harness.train.disks import follow_leader, hand_out
from harness.train.outcome import Stopped, outcome_of
from harness.train.process import quiet

# In a checkpoint's folder, written last: without it the checkpoint is not whole.
COMPLETE = "complete.json"


@dataclass
class Run:
    """One run of one experiment, as this process sees it."""

    settings: Settings
    world: World
    args: TrainingArguments
    folder: RunFolder
    checkpoint: Path | None = None
    data_facts: dict[str, Any] = field(default_factory=dict)
    observed: dict[str, Any] = field(default_factory=dict)
    link: dict[str, Any] | None = None  # between nodes, measured before the first step
    # What the checkpoint says of the epoch in which it was made.
    epoch_so_far: dict[str, Any] = field(default_factory=dict)
    partial_epoch: Callable[[], dict[str, Any]] = dict
    last_row: dict[str, Any] | None = None  # of the epoch that has just been recorded
    # Of the last evaluation, what this rank had a part in; the trainer knows.
    own_quality: Callable[[], dict[str, Any]] = dict
    tested: dict[str, Any] = field(default_factory=dict)  # of the test set, used once at the end
    began_s: float = field(default_factory=time.perf_counter)
    cpu: CpuTime = field(init=False)
    previous_handlers: dict[int, Any] = field(default_factory=dict)
    stop_showing: Callable[[], None] = lambda: None  # gives the terminal back
    lock: Lock | None = None  # of the run's folder, held by rank 0 as long as it lives

    def __post_init__(self) -> None:
        self.cpu = CpuTime(self.world.size)

    @property
    def leader(self) -> bool:
        return self.world.rank == 0

    @property
    def batches(self) -> int:
        """How many batches of per_gpu_batch make one forward pass: processes, or GPUs for dp."""
        return self.args.world_size * max(1, self.args.n_gpu)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint must agree with: resumed otherwise, samples would be skipped."""
        canonical = json.dumps(identity(self.settings), sort_keys=True, default=str)
        return {
            "settings": hashlib.sha256(canonical.encode()).hexdigest(),
            "world": self.world.size,
            "data": self.data_facts.get("data_checksum"),
            "train_samples": self.data_facts.get("train_samples"),
        }

    def use(self, data_facts: dict[str, Any]) -> None:
        """The data are ready: find the checkpoint to go on from, and see that it fits."""
        self.data_facts = data_facts
        found = whole_checkpoints(self.folder.path) if self.leader else []
        self.checkpoint = _from_leader(found[-1] if found else None)
        if self.checkpoint is None:
            return
        hand_out(found, COMPLETE, self.world)
        mark = read_json(self.checkpoint / COMPLETE)
        assert mark is not None
        differing = [k for k, v in self.fingerprint.items() if mark["fingerprint"].get(k) != v]
        if differing:
            raise UserError(
                f"{self.checkpoint} does not fit this run (different {', '.join(differing)}): "
                "use --rerun to start afresh; the old record is kept aside"
            )
        self.epoch_so_far = mark["epoch"]

    def train(self, trainer: Any) -> None:
        """Train, from the last whole checkpoint where there is one."""
        if self.leader:
            # What a killed process left half-written must not be taken for a checkpoint.
            for broken in self.folder.path.glob("checkpoint-*"):
                if not (broken / COMPLETE).is_file():
                    shutil.rmtree(broken, ignore_errors=True)
        trainer.train(resume_from_checkpoint=str(self.checkpoint) if self.checkpoint else None)

    def __enter__(self) -> Self:
        def stop(signum: int, frame: Any) -> None:
            # A second signal while the record is written must not cut it off.
            for number in self.previous_handlers:
                signal.signal(number, signal.SIG_IGN)
            raise Stopped(signum)

        for number in (signal.SIGTERM, signal.SIGINT):
            self.previous_handlers[number] = signal.signal(number, stop)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop_showing()
        if error is not None:
            # A launcher stops the other ranks as soon as one fails: not while this one records.
            for number in self.previous_handlers:
                signal.signal(number, signal.SIG_IGN)
        try:
            if error is not None and not isinstance(error, (UserError, SystemExit)):
                self._record_failure(error)
        finally:
            self.unlock()
            for number, handler in self.previous_handlers.items():
                signal.signal(number, handler)
        if isinstance(error, Stopped):
            # Without waiting for peers that may be gone already.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(128 + error.signum)
        if isinstance(error, UserError):
            refuse(self.settings.script, error, self.leader)
        if kind is None and dist.is_initialized():
            # All ranks end together: torchrun stops the others as soon as one has left.
            dist.barrier()
            dist.destroy_process_group()

    def unlock(self) -> None:
        """The record is whole: who comes next may read or continue it."""
        if self.lock is not None:
            self.lock.release()

    def _record_failure(self, error: BaseException) -> None:
        outcome, reason = outcome_of(error)
        row = {
            "rank": self.world.rank,
            "outcome": outcome,
            "reason": reason,
            "unix": time.time(),
        }
        if outcome != "interrupted":
            write_json(self.folder.failure(self.world.rank), row)
        if not self.leader:
            self._let_leader_record()
            return
        # A rank whose peer is gone fails too, or is stopped, a moment after the one that began it.
        follows = isinstance(error, Stopped) or attempts.only_follows(str(error))
        first = self._first_failure(wait_s=2.0 if follows and self.world.size > 1 else 0.0)
        if first is not None:
            rank, outcome = first["rank"], first["outcome"]
            reason = first["reason"] + (f" (rank {rank})" if self.world.size > 1 else "")
        attempts.end(self.folder, outcome, reason, self.wall_s, self.cpu.per_rank())
        if not self.folder.settings.is_file():
            write_json(self.folder.settings, {"schema": SCHEMA, **settings_of(self.settings)})
        write_summary(self.folder, outcome, reason, self.settings.best_metric)
        print(f"{outcome}: {reason}; the record is in {self.folder.path}", file=sys.stderr)

    def _let_leader_record(self) -> None:
        """Rank 0 may be waiting for this one: let it see that it is gone, and write the record."""
        if dist.is_initialized() and dist.get_backend() == "gloo":
            dist.destroy_process_group()
        until = time.monotonic() + 5
        while time.monotonic() < until and not self.folder.summary.is_file():
            time.sleep(0.05)

    def _first_failure(self, wait_s: float) -> dict[str, Any] | None:
        """The failure of another rank that came first, if one comes within this time."""
        until = time.monotonic() + wait_s
        while True:
            first = attempts.first_failure(self.folder, since=time.time() - self.wall_s)
            others = first is not None and first["rank"] != self.world.rank
            if others or time.monotonic() >= until:
                return first
            time.sleep(0.05)

    @property
    def wall_s(self) -> float:
        """Since this process opened the run."""
        return time.perf_counter() - self.began_s


def start(settings: Settings) -> Run | None:
    """Open a run, or say where its record is when it has been finished before."""
    world = world_of(os.environ)
    quiet(bars=world.rank == 0 and sys.stderr.isatty())
    try:
        parallel.pin_one_device(settings)
        gpus = torch.cuda.device_count()
        settings = place(settings, world, gpus)
        parallel.refuse_impossible(settings, cuda=gpus > 0)
        folder = RunFolder(
            Path(settings.output_dir) / settings.script / str(settings.setup) / run_id(settings)
        )
        if world.rank == 0:
            _check_writable(Path(settings.output_dir))
        if settings.strategy in ("single", "dp"):
            _forget_launcher()
        args = training_arguments(settings, folder.path, world.size)
        lock = _locked(folder) if world.rank == 0 else None
    except UserError as error:
        refuse(settings.script, error, world.rank == 0)
    run = Run(settings, world, args, folder, lock=lock)
    before = _from_leader(folder.outcome() if run.leader else None)
    if settings.rerun:
        if run.leader and folder.path.exists():
            print(f"the earlier record is kept in {folder.set_aside()}")
    elif before == FINISHED:
        if run.leader:
            print(f"already finished: {folder.path} (--rerun measures again)")
        run.unlock()
        if dist.is_initialized():
            dist.destroy_process_group()
        return None
    follow_leader(folder, world)
    _barrier()
    # Before the model is made: the head's weights are drawn from it, on every rank alike.
    (enable_full_determinism if args.full_determinism else set_seed)(settings.seed)
    return run


def whole_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that were written to the end, oldest first."""
    found = [p.parent for p in folder.glob(f"checkpoint-*/{COMPLETE}")]
    return sorted(found, key=lambda p: int(p.name.rsplit("-", 1)[1]))


def _forget_launcher() -> None:
    """torchrun with one process: the Trainer would wrap the model in DDP all the same."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)


def _locked(folder: RunFolder) -> Lock:
    """Two processes that write one record would spoil it. One that has just been killed may
    take a moment to be gone.
    """
    lock = Lock(folder.lock("run"))
    # This process itself may hold it, from a run that it has given up.
    mine = lock.holder() == f"process {os.getpid()}"
    if not lock.take(wait_s=0 if mine else 5) and not mine:
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


def _from_leader(value: Any) -> Any:
    """What rank 0 found: its disk holds the record, and all ranks must act alike."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()

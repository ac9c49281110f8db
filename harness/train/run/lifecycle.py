"""The life of one run: what is asked, whether it has been done, where it goes on, how it ended."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from transformers import TrainingArguments

from harness.core import attempts
from harness.core.command_line import refuse
from harness.core.identity import identity
from harness.core.locks import Lock
from harness.core.records import SCHEMA, RunFolder, read_json, write_json
from harness.core.settings import Settings, UserError
from harness.core.topology import World, asked_processes
from harness.train.loop.elastic_schedule import Plan, Position
from harness.train.measure.base import Measure
from harness.train.measure.environment import recorded_settings
from harness.train.measure.resources import CpuTime
from harness.train.measure.telemetry import Watch
from harness.train.run.checkpoint_copies import hand_out
from harness.train.run.elastic import Launch, wait_for_peers
from harness.train.run.failures import Stopped, outcome_of, record_failure

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
    # For what is done between two steps and is no part of the training.
    aside: Callable[[], AbstractContextManager[None]] = nullcontext
    clock: Any = None  # of the steps of this training; the record keeps it
    # Bytes that this rank has handed over for sending; the trainer knows.
    payload: Callable[[], int | None] = lambda: None
    last_row: dict[str, Any] | None = None  # of the epoch that has just been recorded
    # Of the last evaluation, what this rank had a part in; the trainer knows.
    own_quality: Callable[[], dict[str, Any]] = dict
    tested: dict[str, Any] = field(default_factory=dict)  # of the test set, used once at the end
    began_s: float = field(default_factory=time.perf_counter)
    cpu: CpuTime = field(init=False)
    previous_handlers: dict[int, Any] = field(default_factory=dict)
    stop_showing: Callable[[], None] = lambda: None  # gives the terminal back
    watch: Watch | None = None  # of this node, on its first process
    # What the trainer measures beside the time of steps.
    measures: list[Measure] = field(default_factory=list)
    lock: Lock | None = None  # of the run's folder, held by rank 0 as long as it lives
    launch: Launch | None = None  # of a run that torchrun goes on with when processes are lost
    attempt: int = 0  # of a training that has begun
    update: int | None = None  # the last that was made in it
    position: Position = field(default_factory=Position)  # where the checkpoint was made
    peers: Any = None  # this process's part in a run of peers; None where processes are a group
    # What they have done in the epoch that has ended, and what the others have told of themselves.
    of_peers: dict[str, Any] = field(default_factory=dict)
    other_peers: list[dict[str, Any]] = field(default_factory=list)
    other_processes: bool = False  # the checkpoint was made by more or fewer of them

    def __post_init__(self) -> None:
        self.cpu = CpuTime(self.shape.size if self.peers is None else 2)

    @property
    def leader(self) -> bool:
        return self.world.rank == 0

    @property
    def shape(self) -> World:
        """The processes that the record is of; a peer is alone in its own world."""
        return self.world if self.peers is None else self.peers.shape

    @property
    def speaks(self) -> bool:
        """Whether a person listens to this process: a peer has a terminal of its own."""
        return self.leader or not self.world.launched

    @property
    def processes(self) -> int:
        """Those of the set-up; in an elastic run not all of them may be there."""
        return asked_processes(self.settings) if self.world.elastic else self.shape.size

    @property
    def batches(self) -> int:
        """How many batches of per_gpu_batch the set-up has at a time: processes, GPUs for dp."""
        gpus = 1 if self.world.elastic else max(1, self.args.n_gpu)
        return self.processes * gpus

    @property
    def devices(self) -> int:
        """Those that train: of a run of peers in the epoch that has ended, GPUs for dp."""
        found = self.observed.get("devices", self.of_peers.get("peers", self.shape.size))
        return int(found)

    def plan(self, train_samples: int) -> Plan:
        """What is left to be done by as many processes as there are now."""
        args = self.args
        batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        asked = (self.settings.per_gpu_batch or 1) * self.settings.grad_acc * self.batches
        return Plan(self.position, train_samples, self.settings.epochs or 1, batch, asked)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint must agree with: resumed otherwise, samples would be skipped."""
        canonical = json.dumps(identity(self.settings), sort_keys=True, default=str)
        return {
            "settings": hashlib.sha256(canonical.encode()).hexdigest(),
            "world": self.processes,
            "data": self.data_facts.get("data_checksum"),
            "train_samples": self.data_facts.get("train_samples"),
        }

    def use(self, data_facts: dict[str, Any]) -> None:
        """The data are ready: find the checkpoint to go on from, and see that it fits."""
        self.data_facts = data_facts
        if self.peers is not None:
            self.peers.check_data(data_facts.get("data_checksum"))
        found = whole_checkpoints(self.folder.path) if self.leader else []
        self.checkpoint = from_leader(found[-1] if found else None)
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
        self.position = Position(**mark.get("position", {}))
        self.other_processes = mark.get("processes", self.world.size) != self.world.size

    @property
    def opened(self) -> attempts.Opened:
        """What the record is to know of how this process came to go on with the run."""
        mark = self.checkpoint and (self.checkpoint / COMPLETE).stat()
        return attempts.Opened(
            unix=time.time() - self.wall_s,
            counted_unix=mark.st_mtime if mark else None,
            launcher_unix=self.launch.unix if self.launch is not None else None,
        )

    def train(self, trainer: Any) -> None:
        """Train, from the last whole checkpoint where there is one."""
        if self.leader:
            # What a killed process left half-written must not be taken for a checkpoint.
            for broken in self.folder.path.glob("checkpoint-*"):
                if not (broken / COMPLETE).is_file():
                    shutil.rmtree(broken, ignore_errors=True)
        if self.launch is not None and dist.is_initialized():
            wait_for_peers(self.settings)
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
        if self.watch is not None:
            self.watch.close()  # which takes its time
        try:
            if error is not None and not isinstance(error, (UserError, SystemExit)):
                record_failure(self, error)
            if error is not None and self.peers is not None:
                self.peers.fail(outcome_of(error)[0], isinstance(error, KeyboardInterrupt))
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
            refuse(self.settings.script, error, self.speaks)
        if self.peers is not None and kind is None:
            self.peers.finish()
        if kind is None and dist.is_initialized():
            # All ranks end together: torchrun stops the others as soon as one has left.
            dist.barrier()
            dist.destroy_process_group()

    def unlock(self) -> None:
        """The record is whole: who comes next may read or continue it."""
        if self.lock is not None:
            self.lock.release()

    @property
    def wall_s(self) -> float:
        """Since this process opened the run."""
        return time.perf_counter() - self.began_s


def whole_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that were written to the end, oldest first."""
    found = [p.parent for p in folder.glob(f"checkpoint-*/{COMPLETE}")]
    return sorted(found, key=lambda p: int(p.name.rsplit("-", 1)[1]))


def from_leader(value: Any) -> Any:
    """What rank 0 found: its disk holds the record, and all ranks must act alike."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


# ----
# A training begins to be recorded, or goes on.


def open_record(
    folder: RunFolder,
    run: Run | None,
    args: TrainingArguments,
    update: int,
    processes: int,
    batch: int,
) -> int:
    """The number of the attempt that begins after this update; its settings are written."""
    opened = run.opened if run is not None else None
    attempt = attempts.begin(folder, update, processes, batch, opened)
    if run is not None:
        run.attempt, run.update = attempt, update
    # What became of the attempts before stands in attempts.jsonl; this one has no end yet.
    folder.summary.unlink(missing_ok=True)
    settings = recorded_settings(run.settings if run is not None else None, args)
    write_json(folder.settings, {"schema": SCHEMA, **settings})
    return attempt

"""What a training process knows before its first step; all of it is immutable."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from harness.core.attempts import Opened
from harness.core.identity import identity
from harness.core.records import RunFolder
from harness.core.records.manifests import CHECKPOINT_FORMAT, read_checkpoint
from harness.core.schema.environment import DataRecord, InputsRecord
from harness.core.settings import Settings
from harness.core.topology import World, asked_processes, batch_of_trainer, batch_of_update
from harness.train.session import Session

# Of --precision and --compress.
HALF_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(settings: Settings, device: torch.device) -> torch.autocast:
    """The number format of the run, for a model that accelerate has not prepared: kernels for half
    precision refuse another one.
    """
    dtype = HALF_PRECISION.get(settings.precision)
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


@dataclass(frozen=True)
class Launch:
    """What the torchrun agents of an elastic run agree on, over all nodes."""

    unix: float  # start of the oldest agent
    restarts_left: int  # until the first agent gives up


@dataclass(frozen=True)
class Position:
    """Where in the training a checkpoint was written."""

    update: int = 0
    epoch: int = 0  # completed epochs
    samples: int = 0  # of the epoch in progress


@dataclass(frozen=True)
class Context:
    """One run as this process sees it: opened by run/start.py, completed once the data are loaded
    and the checkpoint is chosen, then read by everything that trains, measures and records.
    """

    settings: Settings
    world: World
    args: TrainingArguments
    folder: RunFolder
    session: Session  # how this process takes part in the run
    launch: Launch | None = None  # None unless torchrun may restart the run
    sampler: Any = None  # sampler of this node's devices, on the first process of the node
    began_s: float = field(default_factory=time.perf_counter)
    cpu_began: os.times_result = field(default_factory=os.times)
    inputs: InputsRecord | None = None  # local files and code, on rank 0
    earlier_failures: Sequence[Mapping[str, Any]] = ()  # in the folder before the ranks met
    # Known once the data are loaded.
    data_facts: DataRecord = field(default_factory=DataRecord)
    checkpoint: Path | None = None
    position: Position = field(default_factory=Position)
    epoch_so_far: dict[str, Any] = field(default_factory=dict)  # of the checkpoint's epoch
    other_processes: bool = False  # whether another number of processes wrote the checkpoint

    @property
    def is_rank0(self) -> bool:
        return self.world.rank == 0

    @property
    def recorded_world(self) -> World:
        """The processes that the record describes; the Trainer may see fewer (context.world)."""
        return self.session.recorded_world

    @property
    def data_parallel_size(self) -> int:
        """How many batches of per_gpu_batch the complete set-up trains on at once."""
        gpus = 1 if self.world.elastic else max(1, self.args.n_gpu)
        return self._processes * gpus

    @property
    def effective_batch(self) -> int:
        """Samples of an update, by all processes together."""
        return batch_of_update(self.settings.target_batch, batch_of_trainer(self.args))

    @property
    def _processes(self) -> int:
        """Processes of the complete set-up; an elastic run may have fewer at the moment."""
        return asked_processes(self.settings) if self.world.elastic else self.recorded_world.size

    @property
    def wall_s(self) -> float:
        """Seconds since this process opened the run."""
        return time.perf_counter() - self.began_s

    @property
    def opened(self) -> Opened:
        """What the record keeps of how this process came to start or resume the run."""
        manifest = read_checkpoint(self.checkpoint) if self.checkpoint else None
        return Opened(
            unix=time.time() - self.wall_s,
            counted_unix=manifest.get("complete_unix") if manifest else None,
            launcher_unix=self.launch.unix if self.launch else None,
        )

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What must be equal in a checkpoint to resume from it, or samples would be skipped."""
        canonical = json.dumps(identity(self.settings), sort_keys=True, default=str)
        return {
            "format": CHECKPOINT_FORMAT,
            "settings": hashlib.sha256(canonical.encode()).hexdigest(),
            "world": self._processes,
            "data": self.data_facts.get("data_checksum"),
            "train_samples": self.data_facts.get("train_samples"),
        }

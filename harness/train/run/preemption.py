"""Preemption: the machine will be taken away, so write a checkpoint while there is time, and exit.

Whoever started the run names a file in HARNESS_LAST_CALL and creates it when the time has come. All
ranks write the checkpoint at the same update, on which they agree through the store in which they
met: no step waits for the agreement, and until the file is there nothing is exchanged.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from transformers import TrainerCallback

from harness.train.run.failures import Stopped

VARIABLE = "HARNESS_LAST_CALL"
LOOK_EVERY_S = 1.0
AHEAD = 3  # updates; the ranks of one run are never more than one apart
READY_RANKS, UPDATE = "harness/last_call/ranks", "harness/last_call/update"  # in the store


class Preemption(TrainerCallback):
    """Saves inside an epoch and ends the run once the file is there."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.looked_s = 0.0
        self.announced = self.saving = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.announced and not self._look():
            return
        update = self._agreed_update(args.process_index, args.world_size, state.global_step)
        # At the end of an epoch its row comes first.
        inside = abs(state.epoch - round(state.epoch)) > 1e-6
        if update is not None and state.global_step >= update and inside:
            control.should_save = self.saving = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.saving:
            raise Stopped(signal.SIGUSR1, "the time limit is near: saved")

    def _look(self) -> bool:
        """Whether the file is there; now and then only, because it lies on a shared disk."""
        now_s = time.monotonic()
        if now_s - self.looked_s < LOOK_EVERY_S:
            return False
        self.looked_s = now_s
        self.announced = self.file.exists()
        if self.announced and dist.is_initialized():
            _get_default_store().add(READY_RANKS, 1)
        return self.announced

    def _agreed_update(self, rank: int, world: int, update: int) -> int | None:
        """The update at which all save; rank 0 chooses it once all ranks have seen the file."""
        if world == 1:
            return update
        store = _get_default_store()
        if store.check([UPDATE]):
            return int(store.get(UPDATE))
        if rank == 0 and store.add(READY_RANKS, 0) == world:
            store.set(UPDATE, str(update + AHEAD))
        return None


def preemption() -> Preemption | None:
    """None where nobody announces it."""
    file = os.environ.get(VARIABLE)
    return Preemption(Path(file)) if file else None

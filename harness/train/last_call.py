"""The machine will be taken away: save while there is time, and end.

Whoever started the run names a file in HARNESS_LAST_CALL, and makes it when the time has come. A
checkpoint is written by all ranks at one update, on which they agree through the store where they
met: no step waits for it, and nothing is asked of anybody before the file is there.
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

from harness.train.outcome import Stopped

VARIABLE = "HARNESS_LAST_CALL"
LOOK_EVERY_S = 1.0
AHEAD = 3  # updates; the ranks of one run are never more than one apart
COUNT, UPDATE = "harness/last_call/ranks", "harness/last_call/update"


class LastCall(TrainerCallback):
    def __init__(self, file: Path) -> None:
        self.file = file
        self.looked_s = 0.0
        self.called = self.saving = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.called and not self._call():
            return
        update = self._agreed(args.process_index, args.world_size, state.global_step)
        # At the end of an epoch its row comes first.
        inside = abs(state.epoch - round(state.epoch)) > 1e-6
        if update is not None and state.global_step >= update and inside:
            control.should_save = self.saving = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.saving:
            raise Stopped(signal.SIGUSR1, "the time limit is near: saved")

    def _call(self) -> bool:
        """Whether the file has come; asked now and then, because it lies on a shared disk."""
        now_s = time.monotonic()
        if now_s - self.looked_s < LOOK_EVERY_S:
            return False
        self.looked_s = now_s
        self.called = self.file.exists()
        if self.called and dist.is_initialized():
            _get_default_store().add(COUNT, 1)
        return self.called

    def _agreed(self, rank: int, world: int, update: int) -> int | None:
        """The update at which all save; rank 0 chooses it when all have seen the file."""
        if world == 1:
            return update
        store = _get_default_store()
        if store.check([UPDATE]):
            return int(store.get(UPDATE))
        if rank == 0 and store.add(COUNT, 0) == world:
            store.set(UPDATE, str(update + AHEAD))
        return None


def last_call() -> LastCall | None:
    """Of this process; None where nobody calls."""
    file = os.environ.get(VARIABLE)
    return LastCall(Path(file)) if file else None

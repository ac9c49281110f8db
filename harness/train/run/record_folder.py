"""The folder of a record of LogCallback alone: locked, and resumed by the same training only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from harness.core import attempts
from harness.core.identity import SHOWN_ONLY, number
from harness.core.records import FINISHED, SCHEMA, RunFolder, plain
from harness.core.records.locks import Lock
from harness.core.records.summary import sum_of
from harness.core.schema.checks import believable
from harness.core.settings import UserError
from harness.train.measure.clock import MEASURING, StepClock
from harness.train.measure.resources import CpuTime
from harness.train.run.checkpoints import require_unchanged

# A training that is resumed may be longer or shorter, and find its place in the data otherwise.
RESUMED_WITH = ("max_steps", "ignore_data_skip", "restore_callback_states_from_checkpoint")
FREE = ("epochs", *RESUMED_WITH, *SHOWN_ONLY, "training_arguments", "trainer")
# Nor do arguments whose names begin so decide what it learns (dataloader_pin_memory,
# dataloader_prefetch_factor and dataloader_persistent_workers among them).
WITHOUT_EFFECT = ("save_", "logging_", "dataloader_num_workers", "dataloader_p")
# And if torchrun has restarted it, on another number of processes.
OF_PROCESSES = ("setup", "per_gpu_batch", "grad_acc")
SHOWN = 3  # differences that a message names


def take(
    folder: RunFolder, held: Lock | None, settings: Mapping[str, Any], update: int,
    launcher_unix: float | None,
) -> Lock:  # fmt: skip
    """Lock the folder for a training that begins after an update; UserError if it must not.

    The record of another training is kept aside if this one begins anew. held: the lock, if it is
    still held since a training that broke off. launcher_unix: as in attempts.Opened.
    """
    lock = held if held is not None and held.file is not None else _locked(folder)
    try:
        if update:
            restarted = attempts.is_resumed(folder, launcher_unix)
            require_same_training(folder, settings, update, restarted)
        elif folder.settings.is_file():
            folder.set_aside()
        require_unchanged(folder, "restore the file, or record into another folder")
    except UserError:
        lock.release()
        raise
    return lock


def _locked(folder: RunFolder) -> Lock:
    """Two trainings in one folder would spoil the records of both."""
    lock = Lock(folder.lock("run"))
    if not lock.take_again():
        raise UserError(
            f"{folder.path} is being written by {lock.holder()}: give each run a folder of its own"
        )
    return lock


def measured_before(folder: RunFolder) -> float:
    """Lower bound for earlier attempts: the end of a killed one may lack measuring_s."""
    ends = attempts.ends_of(attempts.believed(folder))
    earlier, _ = folder.read_epochs()
    of_rows = (earlier[-1].get("measuring_s") or 0.0) if earlier else 0.0
    return max(of_rows, sum_of(ends, "measuring_s"))


def broke_off(
    pid: int, folder: RunFolder, attempt: int, state: Any, clock: StepClock,
    began_s: float, measured_s: float, cpu: CpuTime, batch: int,
) -> None:  # fmt: skip
    """Record how far a training came that an exception ended: no Trainer event reports that.

    Called when the training's LogCallback is garbage-collected, or at the end of the process.
    """
    if os.getpid() != pid:  # in a forked worker
        return
    with suppress(OSError):
        if (start := attempts.unended(folder)) is None or start.get("attempt") != attempt:
            return
        # At least what the attempt's rows say.
        recorded_s = believable("progress", folder.read_progress() or {}).get("wall_s") or 0.0
        wall_s, update = max(clock.last_s - began_s, recorded_s), state.global_step
        times = {**cpu.per_rank(), "measuring_s": MEASURING.total_s - measured_s}
        reason = "the training broke off"
        attempts.end(folder, "interrupted", reason, wall_s, times, update, per_gpu_batch=batch)


def require_same_training(
    folder: RunFolder, settings: Mapping[str, Any], update: int, restarted: bool
) -> None:
    """Raise if a training that resumes from an update is another than the folder's.

    restarted: by the torchrun that began it, maybe on another number of processes.
    """
    if (recorded := folder.read_settings()) is None:
        return
    left_out = {*FREE, *(OF_PROCESSES if restarted else ())}
    before = _compared(recorded, left_out)
    now = _compared(plain({"schema": SCHEMA, **settings}), left_out)
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if names:
        shown = [f"{n} {_value(before, n)}, not {_value(now, n)}" for n in names[:SHOWN]]
        more = [f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
        raise UserError(
            f"{folder.path} holds a training with {'; '.join([*shown, *more])}: resume with its "
            "settings, or record into another folder"
        )
    outcome, rows = folder.outcome(), folder.read_epochs()[0]
    last = max((believable("epochs", row).get("updates") or 0 for row in rows), default=0)
    if outcome == FINISHED and last > update:  # one that failed repeats what came after its save
        raise UserError(
            f"{folder.path} holds a training that has finished at update {last}: to train again "
            f"from update {update}, record into another folder"
        )


def _compared(settings: Mapping[str, Any], left_out: set[str]) -> dict[str, Any]:
    """The settings and the Trainer's other arguments, by name."""
    passed = settings.get("trainer")
    every = {**(passed if isinstance(passed, dict) else {}), **settings}
    return {
        name: value
        for name, value in every.items()
        if name not in left_out and not name.startswith(WITHOUT_EFFECT)
    }


def _value(settings: Mapping[str, Any], name: str) -> str:
    return number(settings[name]) if name in settings else "the default"

"""What ends a run before its time: a failure, a signal, or the preemption of its machine.

Every rank writes down why it ends, and rank 0 the outcome of the run.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from transformers import TrainerCallback

from harness.core import attempts
from harness.core.attempts import write_summary
from harness.core.collectives import GLOO
from harness.core.process import causes_of, is_without_reason, lacks_memory, report_to_torchrun
from harness.core.records import RunFolder
from harness.core.records.disk import DiskError, of_disk, writing_to
from harness.core.records.redact import redacted, settings_of
from harness.core.schema.environment import KnownRecord, environment_record
from harness.core.schema.rows import FailureRecord
from harness.core.settings import Settings, UserError
from harness.train.context import Context, Launch
from harness.train.measure.environment import environment
from harness.train.measure.resources import CpuTime
from harness.train.run.checkpoints import remove_broken
from harness.train.run.recorder import Recorder
from harness.train.run.watchdog import Hung, is_beside_steps
from harness.train.session import OtherFailed, end_group
from harness.train.strategy.base import Exchange

PREEMPTION = "HARNESS_PREEMPTION"  # environment variable: the file that announces a preemption
LOOK_EVERY_S = 1.0
AHEAD = 2  # updates, beyond those that ranks may be apart
READY_RANKS, UPDATE = "harness/preemption/ranks", "harness/preemption/update"  # in the store


class Diverged(RuntimeError):
    """Loss, gradient or weights are no longer finite: a result, and not a good one."""


class Stopped(KeyboardInterrupt):
    """A signal has arrived, or a preemption of the machine was announced."""

    def __init__(self, signum: int, why: str | None = None) -> None:
        super().__init__(why or signal.Signals(signum).name)
        self.signum = signum


def outcome_of(error: BaseException) -> tuple[str, str]:
    """(outcome, reason) of what ended a run."""
    message = redacted(" ".join(str(error).split()))
    text = message[:300] or type(error).__name__
    if is_without_reason(error):
        return "oom", f"{type(error).__name__}: {text}: probably out of memory, as ulimit -v is set"
    if isinstance(error, torch.OutOfMemoryError) or lacks_memory(error):
        # As oneDNN says it: "could not create a primitive".
        says = not isinstance(error, (ImportError, RuntimeError)) or "memory" in text.lower()
        return "oom", text if says else f"out of memory: {text}"
    if isinstance(error, Diverged):
        return "diverged", text
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", text
    named = isinstance(error, (DiskError, Hung, OtherFailed, UserError))  # the text says it all
    return "failed", text if named else f"{type(error).__name__}: {text}"


def what_ended(error: BaseException | None, context: Context) -> BaseException | None:
    """The error, or its cause: damaged code of a compiled step, or the disk of the run, if that
    refused a write of any library.
    """
    if context.args.torch_compile and (damaged := of_compiled_code(error)):
        return damaged
    if not isinstance(error, OSError):
        return error
    folder = context.folder.path
    if error.errno == errno.ENOENT and folder.exists():
        return error  # a file that was to be read
    return of_disk(error, folder) or error


def of_compiled_code(error: BaseException | None) -> UserError | None:
    """Remove a library that torch compiled and cannot load, as a kill while it was being written
    leaves it: torch would find it again each time.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # takes seconds, so only here

    for cause in causes_of(error):
        if not isinstance(cause, ImportError) or lacks_memory(cause) or cause.path is None:
            continue
        if Path(cause.path).is_relative_to(cache_dir()):
            with suppress(OSError):  # somebody else's, or on a disk that cannot be written
                Path(cause.path).unlink(missing_ok=True)
                return UserError(
                    f"{cause.path}, which torch compiled, is damaged and was removed: the same "
                    "command compiles it again"
                )
    return None


def was_at_step(error: BaseException) -> bool | None:
    """Whether the error came from neither evaluation nor saving; None if another thread found it.

    Errors of loading come before any attempt.
    """
    if error.__traceback__ is None:
        return None
    return not any(is_beside_steps(frame) for frame, _ in traceback.walk_tb(error.__traceback__))


def record_failure(context: Context, recorder: Recorder, error: BaseException) -> None:
    """Every rank writes down why it ends, and rank 0 the outcome of the run."""
    if context.is_rank0 and isinstance(error, DiskError):
        remove_broken(context.folder.path)  # half a checkpoint may have filled the disk
    try:
        with writing_to(context.folder.path):
            _record(context, recorder, error)
    except DiskError as refused:
        outcome, reason = outcome_of(error)
        why = "" if str(refused) == reason else f": {refused}"
        print(f"{outcome}: {reason}; it cannot be recorded{why}", file=sys.stderr)
        if not context.folder.attempts.is_file() and context.folder.path.exists():
            with suppress(OSError):
                context.folder.set_aside()  # what was written after the folder was removed


def _record(context: Context, recorder: Recorder, error: BaseException) -> None:
    outcome, reason = outcome_of(error)
    folder, rank, many = context.folder, context.world.rank, context.world.size > 1
    now_unix, in_step = time.time(), was_at_step(error)
    begun = bool(recorder.attempt)
    if begun:
        attempts.require(folder)
    if outcome != "interrupted":
        folder.write_failure(
            {"rank": rank, "outcome": outcome, "reason": reason, "unix": now_unix,
             "in_step": in_step}
        )  # fmt: skip
        report_to_torchrun(f"{outcome}: {reason}")
    restarts = _restarts(context.launch, error)
    hang = error if isinstance(error, Hung) else None
    if not (hang.records if hang else context.is_rank0):
        if not restarts:
            # After a hang, the rank that records may have read the verdict later than this rank.
            settle_s = hang.settle_s if hang else 0.0
            # In another thread, the main thread still waits in the process group.
            waits = threading.current_thread() is not threading.main_thread()
            _let_rank0_record(folder, leave_group=not waits, within_s=5.0 + settle_s)
        return
    # A rank whose peer is gone fails too, or is stopped, a moment after the rank that began it.
    follows = isinstance(error, Stopped) or attempts.only_follows(str(error))
    first = _first_failure(context, wait_s=2.0 if follows and many else 0.0)
    if first is not None and hang is None:
        outcome, in_step = first["outcome"], first.get("in_step")
        reason = attempts.with_rank(first) if many else first["reason"]
    cpu_time = (recorder.cpu or CpuTime.of(context)).per_rank()
    times = {**cpu_time, "measuring_s": recorder.measuring_s()}
    begun = begun or (hang is not None and attempts.unended(folder) is not None)
    update = recorder.update if begun else None
    batch = context.args.per_device_train_batch_size
    attempts.end(folder, outcome, reason, context.wall_s, times, update, begun, batch, in_step)
    folder.progress.unlink(missing_ok=True)
    if restarts:
        # What becomes of the run is not known yet.
        print(f"{outcome}: {reason}; torchrun may start it again", file=sys.stderr)
        return
    settings = context.settings
    reason = attempts.with_smaller_batch(outcome, reason, settings, folder)
    if not folder.settings.is_file():
        folder.write_settings(settings_of(settings))
    write_summary(folder, outcome, reason, settings.best_metric)
    again = "; the same command resumes it" if outcome == "interrupted" else ""
    print(f"{outcome}: {reason}; the record is in {folder.path}{again}", file=sys.stderr)
    if not folder.environment.is_file():  # which training writes when it begins
        _write_environment(context)


def _write_environment(context: Context) -> None:
    """What is known of a run that failed before its first step."""
    world, data = context.recorded_world, context.data_facts
    machine = environment(context.args.device.type == "cuda")
    opened: KnownRecord = {"observed": context.session.observed}
    if context.inputs is not None:
        opened = {"inputs": context.inputs, **opened}
    batch = context.effective_batch
    record = environment_record(machine, world.nodes, world.per_node, batch, None, opened)
    if data:
        record["data"] = data
    context.folder.write_environment(record)


def _restarts(launch: Launch | None, error: BaseException) -> bool:
    """Whether torchrun is about to start the run again, as far as a process can know.

    torchrun stops ranks with SIGTERM when a node joins or leaves, which costs no restart. Whoever
    stops torchrun itself with SIGTERM sees an attempt that has ended and a run without outcome.
    """
    if launch is None:
        return False
    if isinstance(error, Stopped):
        return error.signum == signal.SIGTERM
    return launch.restarts_left > 0


def _let_rank0_record(folder: RunFolder, leave_group: bool, within_s: float) -> None:
    """Let rank 0, which may wait for this rank, see that it is gone and write the record."""
    if leave_group and dist.is_initialized() and dist.get_backend() == GLOO:
        end_group()
    until = time.monotonic() + within_s
    while time.monotonic() < until and not folder.summary.is_file():
        time.sleep(0.05)


def _first_failure(context: Context, wait_s: float) -> FailureRecord | None:
    """The first failure of any rank, after waiting up to wait_s for one of another rank."""
    until = time.monotonic() + wait_s
    while True:  # new failures are not recognized by clocks, which differ between nodes
        first = attempts.first_failure(
            context.folder, lambda failure: failure not in context.earlier_failures
        )
        others = first is not None and first["rank"] != context.world.rank
        if others or time.monotonic() >= until:
            return first
        time.sleep(0.05)


class Preemption(TrainerCallback):
    """Write a checkpoint when a preemption is announced, and exit while there is time.

    Whoever started the run names a file, and creates it when the time has come. All ranks write the
    checkpoint at the same update, on which they agree through the store in which they met: no step
    waits for the agreement, and until the file is there nothing is exchanged. No rank may be past
    the update when rank 0 chooses it: it would save later than the others, or wait for them in an
    exchange while they wait for it to save.
    """

    def __init__(self, file: Path, exchange: Exchange) -> None:
        self.file, self.exchange = file, exchange
        self.looked_s = 0.0
        self.announced = self.ready = self.saving = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.announced and not self._look():
            return
        if args.device.type == "cuda":
            # No exchange holds back a host that runs ahead of its device.
            torch.cuda.synchronize(args.device)
        update = self._agreed_update(args.process_index, args.world_size, state.global_step)
        # At the end of an epoch, the epoch's row is recorded first.
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
        return self.announced

    def _agreed_update(self, rank: int, world: int, update: int) -> int | None:
        """The update at which all save; rank 0 chooses it once all ranks have seen the file."""
        if world == 1:
            return update
        apart = self.exchange.updates_apart()
        if apart is None:
            return None  # no update is known that no rank has passed
        store = _get_default_store()
        if not self.ready:
            self.ready = store.add(READY_RANKS, 1) > 0
        if store.check([UPDATE]):
            return int(store.get(UPDATE))
        if rank == 0 and store.add(READY_RANKS, 0) == world:
            store.set(UPDATE, str(update + apart + AHEAD))
            store.get(UPDATE)  # once it answers, all others see it
        return None


def preemption(settings: Settings, exchange: Exchange) -> Preemption | None:
    """The callback; None if no file announces preemptions, or if the run does not save inside an
    epoch.
    """
    file = os.environ.get(PREEMPTION)
    saves = settings.save != "none" and exchange.saves_inside_epoch
    return Preemption(Path(file), exchange) if file and saves else None

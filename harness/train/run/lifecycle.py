"""The life of one run in this process: choose its checkpoint, train, and record its end."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import torch.distributed as dist

from harness.core.attempts import RESUMES, batch_to_try
from harness.core.command_line import refuse
from harness.core.process import (
    end_at_once,
    ending_signals,
    forked,
    restore_excepthook,
)
from harness.core.records.disk import DiskError
from harness.core.records.locks import Lock
from harness.core.records.manifests import read_checkpoint
from harness.core.records.walking import as_typed
from harness.core.schema.environment import DataRecord
from harness.core.settings import UserError
from harness.train.context import Context, Position
from harness.train.data.models import loading
from harness.train.measure.environment import launch
from harness.train.run.checkpoints import remove_broken, usable_checkpoint
from harness.train.run.elastic import limit_collectives
from harness.train.run.failures import Stopped, outcome_of, record_failure, what_ended
from harness.train.run.publish import publish
from harness.train.run.recorder import Recorder
from harness.train.run.watchdog import Hung, Watchdog
from harness.train.session import OtherFailed, barrier, end_group
from harness.train.stopped import UntilMet
from harness.train.strategy import verify

DEAF_S = 3.0  # within which the main thread must handle a signal


@dataclass
class Lifecycle:
    """A context manager: whatever ends the run is recorded, and the run's lock is released."""

    entered: ClassVar[Lifecycle | None] = None  # the run of this process, while it handles signals

    context: Context
    lock: Lock | None = None  # of the run's folder, held by rank 0
    meeting: UntilMet | None = None  # looks at the other ranks until the watchdog does
    recorder: Recorder = field(default_factory=Recorder)  # of the training, once there is one
    watchdog: Watchdog | None = None  # from __enter__() on
    previous_handlers: dict[int, Any] = field(default_factory=dict)
    # Taken by the thread that ends the run, the main one or another, and never released.
    ending: threading.Lock = field(default_factory=threading.Lock)
    over: bool = False
    signal_received: threading.Event = field(default_factory=threading.Event)
    wakeup: int = -1  # file descriptor to which Python writes a signal's number at once
    previous_wakeup: int = -1

    def resume(self, data_facts: DataRecord) -> Context:
        """Add the facts of the data, and the last whole checkpoint of the run if there is one."""
        context = self.context = replace(self.context, data_facts=data_facts)
        context.session.check_data(data_facts.get("data_checksum"))
        checkpoint = usable_checkpoint(context.folder.path, context.world)
        if checkpoint is None:
            return context
        manifest = read_checkpoint(checkpoint)
        assert manifest is not None  # it was found sound
        saved, at = manifest["fingerprint"], manifest["position"]
        differing = [k for k, v in context.fingerprint.items() if saved.get(k) != v]
        if differing:
            raise UserError(
                f"{checkpoint} does not fit this run (different {', '.join(differing)}): "
                "use --rerun to start afresh; the old record is kept aside"
            )
        self.context = replace(
            context,
            checkpoint=checkpoint,
            position=Position(at["update"], at["epoch"], at["samples"]),
            epoch_so_far=manifest["epoch"],
            other_processes=manifest["processes"] != context.world.size,
        )
        return self.context

    def train(self, trainer: Any) -> None:
        """Train, from the checkpoint if there is one."""
        context = self.context
        if context.is_rank0:
            remove_broken(context.folder.path)
        if dist.is_initialized():
            limit_collectives(context.settings, elastic=context.launch is not None)
        self.recorder = trainer.recorder
        if self.watchdog is not None:
            trainer.add_callback(self.watchdog)
        checkpoint = context.checkpoint
        try:
            with verify.explained(trainer.model, context.settings):
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        finally:
            trainer.close()
        if context.is_rank0 and not launch().get("sweep"):
            if (folder := trainer.epochs.kept_model) is not None:
                print(f"  the trained model is in {folder}")
                length = context.data_facts.get("max_length")
                print(f"  load it: {loading(context.settings, trainer.model, folder, length)}")
            elif context.settings.save == "none":
                print("  the trained model was not kept (--save none)")
            records = str(as_typed(Path(context.settings.output_dir)))
            table = shlex.join(["python", "-m", "harness", "table", records])
            print(f"  next: {table}")

    def unlock(self) -> None:
        """Release the folder: the record is whole, and other processes may read or continue it."""
        if self.lock is not None:
            self.lock.release()

    def _end_hung(self, error: Hung | Stopped) -> None:
        """End the run from a thread of its own: the main thread waits for what does not come."""
        self.ending.acquire()
        try:
            if isinstance(error, Hung):
                time.sleep(error.settle_s)  # the other ranks fail as soon as one has left
            record_failure(self.context, self.recorder, error)
            self.unlock()
        finally:
            for pid in forked():  # a data loader that is stopped would stay
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            end_at_once(1 if isinstance(error, Hung) else 128 + error.signum)

    def _listen(self, signals: int) -> None:
        """End the run if the main thread waits in native code (NCCL), and handles no signal."""
        while signum := os.read(signals, 1):
            if signum[0] in self.previous_handlers and not self.signal_received.wait(DEAF_S):
                self._end_hung(Stopped(signum[0]))
        os.close(signals)

    def __enter__(self) -> Self:
        restore_excepthook()
        self.watchdog = Watchdog.of(self.context, self._end_hung)
        self.watchdog.start()
        if self.meeting is not None:
            self.meeting.close()

        listener, self.wakeup = os.pipe()
        os.set_blocking(self.wakeup, False)
        self.previous_wakeup = signal.set_wakeup_fd(self.wakeup, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(listener,), daemon=True).start()

        def stop(signum: int, frame: Any) -> None:
            self.signal_received.set()
            if self.over:
                return
            self._ignore_signals()  # a second one must not cut the record off
            # Loader workers may get the same signal; torch raises an error where one has ended.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            raise Stopped(signum)

        for number in ending_signals():
            self.previous_handlers[number] = signal.signal(number, stop)
        Lifecycle.entered = self
        return self

    def _ignore_signals(self) -> None:
        for number in self.previous_handlers:
            signal.signal(number, signal.SIG_IGN)

    @classmethod
    def forget_signals(cls) -> None:
        """In a forked process, such as a user's pool of workers: a signal to it is none to the
        run.
        """
        if cls.entered is not None:
            signal.set_wakeup_fd(-1)
            for number in cls.entered.previous_handlers:
                signal.signal(number, signal.SIG_DFL)
            cls.entered = None

    def _restore_signals(self) -> None:
        Lifecycle.entered = None
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)
        if self.wakeup >= 0:
            signal.set_wakeup_fd(self.previous_wakeup)
            os.close(self.wakeup)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The cause of the end is known. Later signals are ignored while this rank records and
        # unlocks, also those with which a launcher stops the other ranks as soon as one fails.
        self.over = True
        self._ignore_signals()
        error = what_ended(error, self.context)
        context, begun = self.context, self.recorder.update is not None
        assert self.watchdog is not None
        self.watchdog.close(done=error is None)
        self.ending.acquire()
        try:
            if context.sampler is not None:
                context.sampler.close()  # which takes its time
            # Once training has begun, a user's mistake is an outcome like any other, of any rank.
            refusals = SystemExit if begun else (SystemExit, UserError)
            if error is not None and not isinstance(error, refusals):
                record_failure(context, self.recorder, error)
            if error is not None:
                context.session.fail(outcome_of(error)[0], isinstance(error, KeyboardInterrupt))
        finally:
            self.unlock()
            self._restore_signals()
        if isinstance(error, Stopped):
            # Without waiting for other processes that may be gone already.
            end_at_once(128 + error.signum)
        if isinstance(error, UserError) and not begun:
            # A hivemind peer has a terminal of its own.
            refuse(context.settings.script, error, context.is_rank0 or not context.world.launched)
        if isinstance(error, (DiskError, OtherFailed, UserError)):
            # The line that states the error has been printed.
            sys.exit(2 if isinstance(error, UserError) else 1)
        if error is None:
            self._end_together()
            publish(context)
        elif outcome_of(error)[0] == "oom":
            self._start_again()

    def _start_again(self) -> None:
        """With --auto_batch, start again in place of this process if it is the script's own;
        torchrun and sweeps restart their processes, and a notebook goes on with its next cell.
        """
        context = self.context
        program = getattr(sys.modules["__main__"], "__file__", None) or ""
        own = not context.world.launched and Path(program).stem == context.settings.script
        own &= multiprocessing.parent_process() is None
        if own and batch_to_try(context.folder, context.settings) is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os.environ[RESUMES] = "1"
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606

    def _end_together(self) -> None:
        self.context.session.finish()
        if dist.is_initialized():
            # torchrun stops the others as soon as one has left.
            barrier()
            end_group()


os.register_at_fork(after_in_child=Lifecycle.forget_signals)

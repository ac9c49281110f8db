"""Turns Trainer events into records (outputs/README.md): a row per epoch, written as it ends.

It works in any training script, with any model and any compute_metrics:

    Trainer(..., callbacks=[LogCallback("outputs/mine")])
"""

from __future__ import annotations

import errno
import math
import os
import shlex
import time
import weakref
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from harness.core import attempts
from harness.core.process import warn
from harness.core.records import FINISHED, RunFolder
from harness.core.records.disk import DiskError
from harness.core.records.locks import Lock
from harness.core.schema import environment as schema
from harness.core.schema.checks import NotAsDeclaredError
from harness.core.schema.rows import ReportedProgress
from harness.core.settings import UserError
from harness.core.topology import per_gpu_batch_of_trainer, world_of
from harness.train.context import Context
from harness.train.measure import rows
from harness.train.measure.clock import MEASURING, StepClock
from harness.train.measure.environment import environment, gpus_of, recorded_settings
from harness.train.measure.resources import CpuTime, Memory, over_ranks, traffic_of
from harness.train.measure.telemetry import Telemetry
from harness.train.run.elastic import launch_of
from harness.train.run.record_folder import broke_off, measured_before, take
from harness.train.run.recorder import Observations, Recorder
from harness.train.session import broadcast

# The first steps of a process include caching and allocation; step times leave them out.
WARMUP_STEPS = 10
# Sums over an epoch: unknown if an attempt that kept no sums trained the epoch's first part.
OF_WHOLE_EPOCHS = ("epoch_time_s", "payload_bytes", "network_sent_bytes", "energy_j")


def best_of_trainer(args: TrainingArguments) -> str | None:
    """The metric by which the stock Trainer selects the best model, as --best_metric names it."""
    smaller = args.metric_for_best_model is not None and args.greater_is_better is False
    return f"{args.metric_for_best_model}:min" if smaller else args.metric_for_best_model


class LogCallback(Recorder):
    """Records one run into one folder; rank 0 writes the rows, every rank its own file."""

    cpu: CpuTime

    def __init__(self, context: Context | str | os.PathLike[str]) -> None:
        self.context: Context | None = None
        if isinstance(context, Context):
            self.context, self.folder = context, context.folder
            self.world, self.began_s = context.recorded_world, context.began_s
            self.cpu = CpuTime.of(context)
        else:
            self.folder, self.world = RunFolder(Path(context)), world_of(os.environ)
            self.began_s, self.cpu = time.perf_counter(), CpuTime(self.world.size == 1)
        self.observations = Observations(self.world.size)  # ExactTrainer gives its own
        self.clock = StepClock(cuda=False)
        self.measures: list[rows.EpochMeasure] = []
        self.telemetry: Telemetry | None = None
        # Rows of the epoch that has ended, not yet written: the run's and this rank's.
        self.row = rows.Pending(self.folder.epochs, self.folder.append_epoch)
        self.rank_row = rows.Pending(self.folder.rank(self.world.rank), self.folder.append_rank)
        # Metrics of the last evaluation that is in no row yet: over all samples, over this rank's.
        self.quality: dict[str, Any] = {}
        self.rank_quality: dict[str, Any] = {}
        self.quality_update: int | None = None  # the update of that evaluation
        self.sets: dict[str, tuple[int | None, float]] = {}  # its sets: samples, seconds by prefix
        self.at_ends = rows.AtEpochEnds()
        self.inside_s = 0.0  # of evaluations inside the epoch, whose metrics are in no row
        self.no_numbers = rows.NoNumbers()  # metrics that are not numbers
        self.losses = rows.LoggedLoss()
        self.learning_rate: float | None = None
        self.first_learning_rate: float | None = None  # 0 with a warm-up
        self.observed_before: schema.ObservedRecord = {}  # observations of an earlier attempt
        self.finite = True  # whether all weights are; the Trainer's log hides a loss that is not
        self.lock: Lock | None = None  # of the folder; without a context only
        self.at_exit: weakref.finalize[Any, Any] | None = None  # likewise, while training
        self.save_time_s = self.ended_s = self.reported_s = 0.0
        self.earlier_wall_s: float | None = 0.0
        # Measuring seconds: of earlier attempts, and of this process before this training.
        self.earlier_measuring_s, self.measured_s = 0.0, MEASURING.total_s
        self.rest_only = False  # only the rest of an epoch is trained; its first part is unknown

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.clock.marks:  # train() is called again
            self.began_s, self.measured_s = time.perf_counter(), MEASURING.total_s
            self.cpu.restart()
        cuda, devices = args.device.type == "cuda", args.n_gpu  # of this process; 0 on a CPU
        self.passes = args.gradient_accumulation_steps
        loader, ours = kwargs.get("train_dataloader"), self.context is not None
        if self.context is not None:
            self.batch = self.context.effective_batch
            self.per_gpu_batch = per_gpu_batch_of_trainer(args)
        else:
            self.batch, self.per_gpu_batch = rows.batches_of_trainer(args, state, loader)
        model, data = kwargs.get("model"), getattr(loader, "dataset", None)
        own = self.context.settings if self.context else None
        settings = recorded_settings(own, args, self.world, model, data, self.per_gpu_batch)
        self.train_samples = rows.size_of(loader, ours, args.world_size)
        self.batches_vary = rows.batches_vary(loader)
        self.is_dispatched = rows.is_dispatched(loader)
        # The Trainer's eval loss is a mean over the samples only with one process and device; its
        # training loss only if also each update has one pass and each batch is full. With label
        # smoothing neither is a cross-entropy.
        exact = args.world_size * max(devices, 1) == 1 and not args.label_smoothing_factor
        full = self.train_samples is not None and self.train_samples % self.batch == 0
        self.eval_loss_is_exact = ours or exact
        self.train_loss_is_exact = ours or (exact and full and self.passes == 1)
        steps_an_epoch = state.max_steps // max(int(state.num_train_epochs), 1) or state.max_steps
        left_out = max(1, min(WARMUP_STEPS, steps_an_epoch // 5))
        traffic = traffic_of(self.context, self.observations.payload_bytes)
        self.clock = StepClock(cuda, traffic, left_out)
        self.quality, self.sets, self.inside_s = {}, {}, 0.0  # of evaluations before this training
        self.save_time_s, self.first_learning_rate, self.observed_before = 0.0, None, {}
        self.first_update = self.update = state.global_step
        self.losses.begin(state.global_step)
        self.at_ends.begin()
        self.epoch_so_far = self.context.epoch_so_far if self.context else {}
        self.rank_row.begin(resumes=self.context is not None or self.first_update > 0)
        if self.context is None:
            self.observations = Observations(self.world.size, gpus_of(args, model))
            self._open(state, settings)
        self.telemetry = Telemetry(self.context, self.world, devices, self.observations.gather)
        self.telemetry.open(self.folder)
        self.measures = [*self.observations.measures, Memory(cuda, devices), self.telemetry]
        for measure in self.measures:
            measure.begin(self.clock)
        if not state.is_world_process_zero:
            return
        self.row.begin()
        self._begin_attempt(settings)
        self.earlier_wall_s = attempts.wall_s_before(self.folder)
        self.earlier_measuring_s = measured_before(self.folder)
        if self.context is None:
            self.at_exit = weakref.finalize(
                self, broke_off, os.getpid(), self.folder, self.attempt, state, self.clock,
                self.began_s, self.measured_s, self.cpu, self.per_gpu_batch,
            )  # fmt: skip
        self.machine = environment(cuda)
        if self.first_update:
            # What an earlier attempt observed in its first steps holds for the whole run.
            self.observed_before = attempts.observed_of(self.folder)
            self.first_learning_rate = attempts.recorded(self.folder, "first_learning_rate")
        self._write_environment(state)
        self._report_progress(state)

    def measuring_s(self) -> float:
        return MEASURING.total_s - self.measured_s

    def _open(self, state: TrainerState, settings: dict[str, Any]) -> None:
        """Take the folder (without a context); if it must not be taken, all ranks end alike."""
        if self.telemetry is not None:
            self.telemetry.close()  # left open by a training that broke off
        launch, problem = launch_of(self.world), None
        if state.is_world_process_zero:
            if self.at_exit is not None:
                self.at_exit()  # records the end of a training that broke off
            unix = launch.unix if launch else None
            try:
                self.lock = take(self.folder, self.lock, settings, self.first_update, unix)
            except UserError as error:
                problem = str(error)
        if (problem := broadcast(problem)) is not None:
            raise UserError(problem)

    def _begin_attempt(self, settings: dict[str, Any]) -> None:
        """Record the start of an attempt, new or resumed, and write its settings."""
        opened = self.context.opened if self.context else None
        self.attempt = attempts.begin(
            self.folder, self.first_update, self.world.size, self.batch, opened, self.per_gpu_batch
        )
        self.folder.summary.unlink(missing_ok=True)  # of an earlier attempt
        self.folder.write_settings(settings)

    def _write_environment(self, state: TrainerState) -> None:
        """Write where the run takes place, and what was checked or derived at its start."""
        opened = built = schema.KnownRecord()
        if self.context is not None:
            if self.context.inputs is not None:
                opened = {"inputs": self.context.inputs}
            built = {
                "observed": {**self.observed_before, **self.observations.observed},
                "link": self.observations.link,
                "data": self.context.data_facts,
            }
        elif self.observations.gpus > 1:
            built = {"observed": self.observations.observed}
        measured: schema.MeasuredRecord = {
            "first_learning_rate": self.first_learning_rate,
            "timing_warmup_steps": self.clock.untimed,
            **rows.facts_of(self.measures),
        }
        self.folder.write_environment(schema.environment_record(
            self.machine, self.world.nodes, self.world.per_node, self.batch, state.max_steps,
            opened, built, measured,
        ))  # fmt: skip

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        loader = kwargs.get("train_dataloader")
        self._write_row(state)
        self._drop_quality()
        self.rank_quality = {}
        self.losses.epoch_begins()
        self.updates_before = state.global_step
        epoch, resumed = state.epoch or 0.0, state.global_step == self.first_update > 0
        self.rest_only = self.context is None and resumed and abs(epoch - round(epoch)) > 1e-6
        if self.rest_only and not args.ignore_data_skip:  # else the Trainer begins it anew
            self.updates_before -= rows.updates_of(epoch, state.global_step, self.passes, loader)
        for measure in self.measures:
            measure.epoch_begins()
        self.clock.start()

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.clock.data_ready()

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, control: Any, **kwargs: Any
    ) -> None:
        optimizer = kwargs.get("optimizer")
        if optimizer is not None:
            self.learning_rate = optimizer.param_groups[0]["lr"]
            if self.first_learning_rate is None:
                self.first_learning_rate = self.learning_rate

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.update == state.global_step:
            return self.clock.wait_begins()  # one peer's batch, not yet an update of all peers
        self.clock.step(self.batch)
        if control.should_evaluate or control.should_save:
            self.clock.settle()
        self.update = state.global_step
        self._report_progress(state, every_s=1)

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any
    ) -> None:
        logs = logs or {}
        # A loss without learning rate is one that a script logs itself.
        if "loss" in logs and ("learning_rate" in logs or self.context is not None):
            self.clock.logged()
            self.losses.add(state.global_step, float(logs["loss"]))
            if self.row.row is not None:  # logged once per epoch, after its end
                self.row.row |= self._logged_loss(state)
        if "train_runtime" not in logs:
            self._report_progress(state, every_s=1)

    def _report_progress(self, state: TrainerState, every_s: float = 0.0) -> None:
        """Write how far the attempt is, so that its progress is known if it is killed."""
        now_s = time.perf_counter()
        if not self.attempt or now_s - self.reported_s < every_s:
            return
        self.reported_s = now_s
        progress: ReportedProgress = {
            "attempt": self.attempt,
            "epoch": state.epoch,
            "update": state.global_step,
            "updates": state.max_steps,
            "loss": self.losses.logged[-1][1] if self.losses.logged else None,
            "wall_s": now_s - self.began_s,
            "measuring_s": self.measuring_s(),
            **self.cpu.per_rank(),
        }
        attempts.write_progress(self.folder, progress)

    def on_epoch_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        train_s, sent = self.clock.stop(), self.clock.traffic.stop()
        strategy_fields = self.observations.epoch_fields
        steps: list[rows.Step] = [*self.clock.steps()]
        if self.context is None and self.train_samples is None:
            steps = rows.steps_of_stream(steps, self.batches_vary)
        else:
            short = self._fed(state) - (self.train_samples or math.inf)
            steps = rows.steps(self.clock.steps(), strategy_fields.get("samples"), short)
        first_epoch = self.updates_before <= self.first_update
        untimed = self.clock.untimed if first_epoch else 0
        timed = steps[untimed:]
        epoch, waited_s = round(state.epoch or 0, 6), self.clock.data_wait_s
        own = rows.rank_row(epoch, self.world.rank, train_s, timed, waited_s)
        self.rank_row.row = own | self.cpu.own() | sent
        self.rank_row.row |= rows.merged(m.rank_fields(untimed) for m in self.measures)
        everyone = self.observations.gather(self.rank_row.row)
        self.cpu.report(everyone)
        if self.context is None:  # ExactTrainer ends a run that diverges
            self.finite = all(torch.isfinite(p).all() for p in kwargs["model"].parameters())
        if self.quality_update != state.global_step:  # of weights inside the epoch
            self._drop_quality()
            self.rank_quality = {}
        self._report_progress(state)  # if the run is killed now, it was not in a step
        self.at_ends.epoch_ends()
        self.ended_s = time.perf_counter()
        if state.is_world_process_zero:
            row = self.row.row = self._row(state, train_s, timed, everyone)
            row |= rows.merged(m.run_fields(everyone, row) for m in self.measures)
            row |= strategy_fields
            row |= dict.fromkeys(OF_WHOLE_EPOCHS if self.rest_only else ())
            if first_epoch:
                self._write_environment(state)  # what was observed in the first steps is known
        self.epoch_so_far = {}

    def _row(
        self,
        state: TrainerState,
        train_s: float,
        timed: list[rows.Step],
        everyone: list[dict[str, Any]],
    ) -> dict[str, Any]:
        fed, samples = self._samples(state)
        return {
            "epoch": everyone[0]["epoch"],
            "updates": state.global_step,
            "samples": samples,
            "effective_batch": self.batch,
            "learning_rate": self.learning_rate,
            **rows.epoch_sums(self.observations.epoch_means, fed),
            **self._logged_loss(state),
            "epoch_time_s": train_s + self.epoch_so_far.get("epoch_time_s", 0.0),
            **rows.rates(timed, self.observations.devices),
            "step_time_median_s": everyone[0]["step_time_median_s"],
            "step_time_p95_s": everyone[0]["step_time_p95_s"],
            "data_wait_share": self.clock.data_wait_s / train_s if train_s else None,
            **over_ranks(everyone, self.world.per_node),
        }

    def _logged_loss(self, state: TrainerState) -> dict[str, float | None]:
        """The training loss from the Trainer's log, if no trainer of ours has summed it."""
        if "train_loss" in self.observations.epoch_means:
            return {}
        loss = self.losses.mean(self.updates_before, state.global_step) if self.finite else None
        return {"train_loss" if self.train_loss_is_exact else "trainer_train_loss": loss}

    def _samples(self, state: TrainerState) -> tuple[int | None, int | None]:
        """Samples of this epoch: those fed, and those of them that are distinct."""
        fed = self._fed(state)
        if self.context is None and rows.are_unknown(fed, self.train_samples, self.batch):
            return None, None
        samples = min(fed, self.train_samples or fed)
        # One process feeds none twice; several fill up their last passes, but make no further ones.
        per_pass = self.world.size if self.is_dispatched else max(1, int(self.batch) // self.passes)
        per_pass = 1 if self.world.size == 1 else per_pass
        return min(fed, -(-samples // per_pass) * per_pass), samples

    def _fed(self, state: TrainerState) -> int:
        """Samples of this epoch's updates if every batch were full."""
        updates = state.global_step - self.updates_before
        fed: int = updates * int(self.batch) + int(self.epoch_so_far.get("samples", 0))
        return fed

    def partial_epoch(self) -> dict[str, Any]:
        """The state of a running epoch that a checkpoint has to keep; empty between epochs."""
        if not self.clock.running:
            return {}
        samples = sum(n for n, _ in self.clock.marks if n is not None)
        return {
            "epoch_time_s": self.clock.so_far() + self.epoch_so_far.get("epoch_time_s", 0.0),
            "samples": samples + self.epoch_so_far.get("samples", 0),
            "sent": self.clock.traffic.so_far(),  # not what is sent while saving
            "measured": {m.name: m.state() for m in self.measures if m.name},
        }

    def paused(self) -> AbstractContextManager[None]:
        return rows.excluded(self.clock, self.measures)

    def on_evaluate(
        self, args: Any, state: TrainerState, control: Any, metrics: Any = None, **kwargs: Any
    ) -> None:
        if not self.clock.marks:
            return  # evaluated before training: belongs to no epoch
        eval_s = time.perf_counter() - (self.clock.last_s if self.clock.running else self.ended_s)
        values = {k.removeprefix("eval_"): v for k, v in (metrics or {}).items()}
        if not self.eval_loss_is_exact:
            values = rows.with_losses_of_trainer(values)
        counted = values.get("samples") if self.context else None  # else a metric of its user
        samples = counted or rows.size_of(kwargs.get("eval_dataloader"), processes=args.world_size)
        if self.quality_update != state.global_step:
            self._drop_quality()  # several test sets share the weights
        self.quality_update = state.global_step
        of_set = next((k for k in values if k.endswith("runtime")), "")
        self.inside_s += self.sets.get(of_set, (None, 0.0))[1]  # evaluated again
        self.sets[of_set] = samples, eval_s
        self.quality |= rows.quality_of(values, *rows.over_sets(self.sets.values()))
        self.no_numbers.name(rows.no_numbers(values), aloud=state.is_world_process_zero)
        self.rank_quality = self.observations.rank_metrics(args)
        if self.clock.running:
            self.clock.resume()
        self.ended_s = time.perf_counter()
        ours = self.context is not None and "runtime" in values
        if not self.clock.running and (self.at_ends.is_last(of_set) or ours):
            self._write_row(state)  # else once a checkpoint is saved, or the next epoch begins
            self.ended_s = time.perf_counter()

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        if self.clock.running:
            self.clock.resume()
        self.ended_s = time.perf_counter()

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        began_s = self.clock.last_s if self.clock.running else self.ended_s
        self._write_row(state)
        self.save_time_s += time.perf_counter() - began_s
        if self.clock.running:
            self.clock.resume()

    def _write_row(self, state: TrainerState) -> None:
        """Write the rows of the epoch that has ended, unless an earlier attempt wrote them."""
        if self.attempt:
            attempts.require(self.folder)
        self.rank_row.write(self.rank_quality, {})
        if self.row.row is not None:
            self._report_progress(state)  # keeps a killed attempt's time at least that of its rows
        # Alone the row may be written after a checkpoint, whose time is none of it.
        until_s = self.ended_s if self.context is None else time.perf_counter()
        earlier_s, own_s = self.earlier_wall_s, until_s - self.began_s
        wall_s = None if earlier_s is None else earlier_s + own_s
        measuring_s = self.earlier_measuring_s + self.measuring_s()
        more = {"attempt": self.attempt, "wall_s": wall_s, "measuring_s": measuring_s,
                "unix": time.time()}  # fmt: skip
        eval_s = self.inside_s + self.quality.get("eval_time_s", 0.0)
        quality = {**self.quality, **({"eval_time_s": eval_s} if eval_s else {})}
        if (row := self.row.write(quality, more)) is not None:
            self.quality, self.sets, self.last_row, self.inside_s = {}, {}, row, 0.0

    def _drop_quality(self) -> None:
        """Forget the metrics of weights that no row is about, but not the time that they took."""
        self.inside_s += self.quality.get("eval_time_s", 0.0)
        self.quality, self.sets = {}, {}

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._write_row(state)
        self.cpu.report(self.observations.gather(self.cpu.own()))
        if self.context is None and self.telemetry is not None:
            self.telemetry.close()
        if not state.is_world_process_zero:
            return
        attempts.require(self.folder)
        try:
            self._write_environment(state)  # facts about exchanges are known now
        except NotAsDeclaredError as error:  # no trained model may be lost by it
            warn(f"{error}: {self.folder.environment.name} stays as it was")
        best = self.context.settings.best_metric if self.context else best_of_trainer(args)
        trained = state.global_step > self.first_update  # else only the test was left to do
        facts = {
            **self.observations.test_metrics,
            "attempts": self.attempt,
            "save_time_s": self.save_time_s,
            "trainer_train_samples_per_second": (
                rows.stock_rate(state.log_history) if trained else None
            ),
        }
        wall_s = time.perf_counter() - self.began_s
        times = {**self.cpu.per_rank(), "measuring_s": self.measuring_s()}
        update = state.global_step
        outcome, reason = FINISHED, None
        if not self.finite:
            outcome, reason = "diverged", f"weights are not finite at update {update}"
        if self.at_exit is not None:
            self.at_exit.detach()
        attempts.end(
            self.folder, outcome, reason, wall_s, times, update, per_gpu_batch=self.per_gpu_batch
        )
        attempts.write_summary(self.folder, outcome, reason, best, facts)
        if self.folder.outcome() is None:  # the folder was removed; only the new summary is in it
            raise DiskError(errno.ENOENT, attempts.removed(self.folder))
        with suppress(OSError):  # the record is complete without it
            self.folder.progress.unlink(missing_ok=True)
        if self.lock is not None:
            self.lock.release()
            table = shlex.join(["python", "-m", "harness", "table", str(self.folder.path)])
            print(f"recorded in {self.folder.path}; next: {table}")
            if not any("eval_samples" in row for row in self.folder.read_epochs()[0]):
                print('no quality is recorded: set eval_strategy="epoch" (logging_strategy="epoch" '
                      "for the loss of training)")  # fmt: skip

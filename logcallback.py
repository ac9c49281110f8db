"""Trainer events -> records: one row an epoch, on disk the moment the epoch ends.

In any script of yours, with any model and whatever compute_metrics gives:

    Trainer(..., callbacks=[LogCallback("outputs/mine")])

What the fields mean stands in outputs/README.md.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from harness import attempts, summary
from harness.flags import as_mapping
from harness.records import SCHEMA, RunFolder, append_row, read_rows, write_json
from harness.strategies import World, world_of
from harness.train.clock import StepClock
from harness.train.environment import environment, resolved_arguments, without_home
from harness.train.rows import mean_of_log, rank_row, size_of
from harness.train.run import Run

# The first steps of a process pay for caches and allocations and are left out of step times.
WARMUP_STEPS = 10
# Of what evaluation gives, not quality: the Trainer's own timing, and what stands elsewhere.
TIMING = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
ELSEWHERE = ("epoch", "samples")


class LogCallback(TrainerCallback):
    """Records one run into one folder; rank 0 writes the rows, every rank its own file."""

    def __init__(self, run: Run | str | os.PathLike[str]) -> None:
        self.run = run if isinstance(run, Run) else None
        self.folder = run.folder if isinstance(run, Run) else RunFolder(Path(run))
        self.world: World = run.world if isinstance(run, Run) else world_of(os.environ)
        self.began_s = run.began_s if isinstance(run, Run) else time.perf_counter()
        self.clock = StepClock(cuda=False)
        self.row: dict[str, Any] | None = None  # the epoch that has ended, not yet written
        self.quality: dict[str, Any] = {}  # of the last evaluation that no row has yet
        self.recorded: set[float] = set()
        self.losses: list[tuple[int, float]] = []
        self.exact: dict[str, float] = {}
        self.learning_rate: float | None = None
        self.first_learning_rate: float | None = None  # 0 where there is a warm-up
        self.attempt = 0  # of a training that has begun
        self.earlier_wall_s = self.save_time_s = self.ended_s = self.told_s = 0.0
        if self.run is not None:
            self.run.partial_epoch = self.partial_epoch

    # ---- the run begins ----

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.clock = StepClock(args.device.type == "cuda")
        self.batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        loader: Any = kwargs.get("train_dataloader")
        self.train_samples = size_of(loader)
        steps_an_epoch = state.max_steps // max(int(state.num_train_epochs), 1)
        self.steps_left_out = max(1, min(WARMUP_STEPS, steps_an_epoch // 5))
        self.first_update = state.global_step
        self.before = self.run.epoch_so_far if self.run is not None else {}
        if self.attempt:
            self.began_s = time.perf_counter()  # train() once more
        if not state.is_world_process_zero:
            return
        if self.run is None and self.first_update == 0 and self.folder.settings.is_file():
            self.folder.set_aside()  # another training in the same folder: the earlier one is kept
        rows, _ = read_rows(self.folder.epochs)
        self.recorded = {row["epoch"] for row in rows}
        self.attempt = attempts.begin(self.folder, self.first_update, self.world.size)
        self.earlier_wall_s = attempts.wall_s(self.folder)
        # What became of the attempts before stands in attempts.jsonl; this one has no end yet.
        self.folder.summary.unlink(missing_ok=True)
        write_json(self.folder.settings, {"schema": SCHEMA, **self._settings(args)})
        self.machine = environment()
        self._write_environment(state)

    def _settings(self, args: TrainingArguments) -> dict[str, Any]:
        """All settings, and every resolved argument of the Trainer."""
        named = as_mapping(self.run.settings) if self.run is not None else {}
        for name in ("output_dir", "rerun"):  # where it is written is no part of what it is
            named.pop(name, None)
        for name in ("model", "dataset"):
            if name in named:
                named[name] = without_home(str(named[name]))
        return {**named, "training_arguments": resolved_arguments(args)}

    def _write_environment(self, state: TrainerState) -> None:
        """Where it ran, and what was checked or derived at the start."""
        facts: dict[str, Any] = {
            "nodes": self.world.nodes,
            "processes_per_node": self.world.per_node,
            "effective_batch": self.batch,
            "updates": state.max_steps,
            "first_learning_rate": self.first_learning_rate,
            "timing_warmup_steps": self.steps_left_out,
        }
        if self.run is not None:
            facts |= {"observed": self.run.observed, "data": self.run.data_facts}
        write_json(self.folder.environment, {**self.machine, **facts})

    # ---- an epoch ----

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._write_row()
        self.losses, self.exact, self.quality = [], {}, {}
        self.updates_before = state.global_step
        if self.clock.cuda:
            torch.cuda.reset_peak_memory_stats()
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
        self.clock.step(self.batch)

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any
    ) -> None:
        logs = logs or {}
        if "loss" in logs:
            self.losses.append((state.global_step, float(logs["loss"])))
        # What ExactTrainer adds up over all samples and ranks; the stock Trainer has none of it.
        for name, value in logs.items():
            if name.startswith("epoch_"):
                self.exact[name.removeprefix("epoch_")] = value
        now_s = time.perf_counter()
        if self.attempt and "train_runtime" not in logs and now_s - self.told_s >= 1:
            self.told_s = now_s
            progress = {
                "attempt": self.attempt,
                "epoch": state.epoch,
                "update": state.global_step,
                "updates": state.max_steps,
                "loss": self.losses[-1][1] if self.losses else None,
                "wall_s": now_s - self.began_s,
            }
            attempts.tell_progress(self.folder, progress)

    def on_epoch_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        train_s = self.clock.stop()
        steps = self.clock.steps()
        if steps and (short := self._fed(state) - (self.train_samples or math.inf)) > 0:
            # The last batch was not full, or was filled up with samples that had been fed before.
            steps[-1] = (steps[-1][0] - int(short), steps[-1][1])
        first_epoch = self.updates_before == self.first_update
        timed = steps[self.steps_left_out :] if first_epoch else steps
        mine = rank_row(round(state.epoch or 0, 6), self.world.rank, train_s, timed, self.clock)
        append_row(self.folder.rank(self.world.rank), mine)
        everyone = gather_object([mine]) if self.world.size > 1 else [mine]
        self.ended_s = time.perf_counter()
        if state.is_world_process_zero:
            self.row = self._row(state, train_s, timed, everyone)
            if first_epoch:
                # What was seen in the first step is known now.
                self._write_environment(state)
        self.before = {}

    def _row(
        self,
        state: TrainerState,
        train_s: float,
        timed: list[tuple[int, float]],
        everyone: list[dict[str, Any]],
    ) -> dict[str, Any]:
        fed = self._fed(state)
        samples = min(fed, self.train_samples or fed)
        if self.world.size == 1:
            fed = samples  # one process is fed no sample twice
        timed_samples = sum(n for n, _ in timed)
        timed_s = sum(seconds for _, seconds in timed)
        rate = timed_samples / timed_s if timed_s else None
        logged_loss = mean_of_log(self.losses, self.updates_before)
        observed = self.run.observed if self.run is not None else {}
        devices = observed.get("devices", self.world.size)
        return {
            "epoch": everyone[0]["epoch"],
            "updates": state.global_step,
            "samples": samples,
            "fed_samples": int(self.exact.get("train_samples", fed)),
            "effective_batch": self.batch,
            "learning_rate": self.learning_rate,
            "train_loss": self.exact.get("train_loss", logged_loss),
            "grad_norm": self.exact.get("grad_norm"),
            "clipped_share": self.exact.get("clipped_share"),
            "skipped_updates": self.exact.get("skipped_updates"),
            "epoch_time_s": train_s + self.before.get("epoch_time_s", 0.0),
            "train_samples_per_s": rate,
            "train_samples_per_s_per_gpu": rate / devices if rate else None,
            "timed_steps": len(timed),
            "timed_samples": timed_samples,
            "timed_s": timed_s,
            "step_time_median_s": everyone[0]["step_time_median_s"],
            "step_time_p95_s": everyone[0]["step_time_p95_s"],
            "data_wait_share": self.clock.data_wait_s / train_s if train_s else None,
            "peak_memory_gib_per_rank": [rank["peak_memory_gib"] for rank in everyone],
        }

    def _fed(self, state: TrainerState) -> int:
        """Samples of this epoch's updates, had every batch been full."""
        updates = state.global_step - self.updates_before
        return updates * self.batch + int(self.before.get("samples", 0))

    def partial_epoch(self) -> dict[str, Any]:
        """What a checkpoint inside an epoch has to know of that epoch; empty between epochs."""
        if not self.clock.running:
            return {}
        samples = sum(n for n, _ in self.clock.marks if n is not None)
        return {
            "epoch_time_s": self.clock.so_far() + self.before.get("epoch_time_s", 0.0),
            "samples": samples + self.before.get("samples", 0),
        }

    # ---- evaluation and saving ----

    def on_evaluate(
        self, args: Any, state: TrainerState, control: Any, metrics: Any = None, **kwargs: Any
    ) -> None:
        if not self.clock.marks:
            return  # before training: no epoch's
        eval_s = time.perf_counter() - (self.clock.last_s if self.clock.running else self.ended_s)
        given = {k.removeprefix("eval_"): v for k, v in (metrics or {}).items()}
        loader: Any = kwargs.get("eval_dataloader")
        samples = given.get("samples") or size_of(loader)
        self.quality |= {
            "eval_loss" if name == "loss" else name: value
            for name, value in given.items()
            if name not in ELSEWHERE
            and not name.endswith(TIMING)
            and isinstance(value, (int, float))
        }
        self.quality |= {
            "eval_samples": samples,
            "eval_time_s": eval_s,
            "eval_samples_per_s": samples / eval_s if samples else None,
        }
        if self.clock.running:
            self.clock.resume()
        elif "runtime" in given:
            self._write_row()  # one test set; of several no one says which is the last
        self.ended_s = time.perf_counter()

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        began_s = self.clock.last_s if self.clock.running else self.ended_s
        self._write_row()
        self.save_time_s += time.perf_counter() - began_s
        if self.clock.running:
            self.clock.resume()

    def _write_row(self) -> None:
        """The row of the epoch that has ended, unless an attempt before has written it."""
        row, self.row = self.row, None
        if row is None or row["epoch"] in self.recorded:
            return
        self.recorded.add(row["epoch"])
        # A metric of the user's that has the name of a field of ours keeps both.
        row |= {f"eval_{k}" if k in row else k: v for k, v in self.quality.items()}
        self.quality = {}
        wall_s = self.earlier_wall_s + time.perf_counter() - self.began_s
        row |= {"attempt": self.attempt, "wall_s": wall_s, "unix": time.time()}
        append_row(self.folder.epochs, row)
        if self.run is not None:
            self.run.last_row = row

    # ---- the run ends ----

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._write_row()
        if not state.is_world_process_zero:
            return
        best = self.run.settings.best_metric if self.run is not None else args.metric_for_best_model
        stock = [log for log in state.log_history if "train_runtime" in log]
        facts = {
            "attempts": self.attempt,
            "save_time_s": self.save_time_s,
            # The Trainer's own figure: evaluation, saving and warm-up are in it.
            "trainer_train_samples_per_second": stock[-1]["train_samples_per_second"],
        }
        summary.finish(self.folder, best, time.perf_counter() - self.began_s, facts)

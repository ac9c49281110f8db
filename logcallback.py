"""Trainer events -> records: one row an epoch, on disk the moment the epoch ends.

In any script of yours, with any model and whatever compute_metrics gives:

    Trainer(..., callbacks=[LogCallback("outputs/mine")])

What the fields mean stands in outputs/README.md.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate.utils import gather_object
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from harness.flags import as_mapping
from harness.records import (
    FINISHED,
    SCHEMA,
    RunFolder,
    append_row,
    read_json,
    read_rows,
    write_json,
)
from harness.strategies import World, world_of
from harness.train.clock import StepClock
from harness.train.environment import environment
from harness.train.run import Run, wall_of_attempts

# The first steps of a process pay for caches and allocations and are left out of step times.
WARMUP_STEPS = 10
GIB = 2**30


class LogCallback(TrainerCallback):
    """Records one run into one folder; rank 0 writes the rows, every rank its own file."""

    def __init__(self, run: Run | str | os.PathLike[str]) -> None:
        self.run = run if isinstance(run, Run) else None
        self.folder = run.folder if isinstance(run, Run) else RunFolder(Path(run))
        self.world: World = run.world if isinstance(run, Run) else world_of(os.environ)
        self.began_s = run.began_s if isinstance(run, Run) else time.perf_counter()
        self.row: dict[str, Any] | None = None  # the epoch that has ended, not yet written
        self.recorded: set[int] = set()
        self.earlier_wall_s = 0.0
        self.save_time_s = 0.0
        self.losses: list[tuple[int, float]] = []
        self.exact: dict[str, float] = {}
        self.learning_rate: float | None = None
        self.before: dict[str, Any] = {}
        if self.run is not None:
            self.run.partial_epoch = self.partial_epoch

    # ---- the run begins ----

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        self.clock = StepClock(args.device.type == "cuda")
        self.batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        loader = kwargs.get("train_dataloader")
        self.train_samples = len(loader.dataset) if hasattr(loader, "dataset") else None
        self.steps_left_out = max(1, min(WARMUP_STEPS, _steps_an_epoch(args, state) // 5))
        self.before = self.run.epoch_so_far if self.run is not None else {}
        if not state.is_world_process_zero:
            return
        rows, _ = read_rows(self.folder.epochs)
        self.recorded = {row["epoch"] for row in rows}
        attempts = self._close_broken_attempts()
        self.earlier_wall_s = wall_of_attempts(self.folder)
        self.attempt = 1 + sum(row["event"] == "start" for row in attempts)
        if self.folder.summary.exists():
            # What became of the attempts before stands in attempts.jsonl; this one has no end yet.
            self.folder.summary.unlink()
        write_json(self.folder.settings, {"schema": SCHEMA, **self._settings(args)})
        self._write_environment(args, state)
        append_row(
            self.folder.attempts,
            {
                "event": "start",
                "attempt": self.attempt,
                "unix": time.time(),
                "from_update": state.global_step,
                "processes": self.world.size,
                "restarts": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
            },
        )

    def _close_broken_attempts(self) -> list[dict[str, Any]]:
        """An attempt that was killed said nothing; what it last told of its time is kept."""
        attempts, _ = read_rows(self.folder.attempts)
        begun = [row["attempt"] for row in attempts if row["event"] == "start"]
        ended = [row.get("attempt") for row in attempts if row["event"] == "end"]
        if len(begun) > len(ended):
            last = read_json(self.folder.progress) or {}
            heard = last.get("attempt") == begun[-1]
            row = {
                "event": "end",
                "attempt": begun[-1],
                "outcome": "interrupted",
                "reason": "the process was killed",
                "wall_s": last.get("wall_s") if heard else None,
                "unix": last.get("unix") if heard else None,
            }
            append_row(self.folder.attempts, row)
        return attempts

    def _settings(self, args: TrainingArguments) -> dict[str, Any]:
        """All settings, and every resolved flag of the Trainer but paths and secrets."""
        hidden = ("dir", "token", "hub_", "_path", "trackio", "run_name")
        resolved = {
            name: value
            for name, value in args.to_dict().items()
            if not any(part in name for part in hidden)
        }
        if self.run is None:
            return {"training_arguments": resolved}
        named = as_mapping(self.run.settings)
        for name in ("output_dir", "rerun"):
            del named[name]
        for name in ("model", "dataset"):
            named[name] = str(named[name]).replace(str(Path.home()), "~")
        return {**named, "training_arguments": resolved}

    def _write_environment(self, args: TrainingArguments, state: TrainerState) -> None:
        write_json(self.folder.environment, {**environment(), **self._facts(args, state)})

    def _facts(self, args: TrainingArguments, state: TrainerState) -> dict[str, Any]:
        """What was checked or derived at the start."""
        facts: dict[str, Any] = {
            "nodes": self.world.nodes,
            "processes_per_node": self.world.per_node,
            "effective_batch": self.batch,
            "updates": state.max_steps,
            "timing_warmup_steps": self.steps_left_out,
        }
        if self.run is not None:
            facts |= {"observed": self.run.observed, "data": self.run.data_facts}
        return facts

    # ---- an epoch ----

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._write_row()
        self.losses, self.exact = [], {}
        self.updates_before = state.global_step
        if torch.cuda.is_available():
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

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.clock.step(self.batch)

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: Any,
        logs: Any = None,
        **kwargs: Any,
    ) -> None:
        logs = logs or {}
        if "loss" in logs:
            self.losses.append((state.global_step, float(logs["loss"])))
        for name in ("loss", "grad_norm", "samples", "clipped_share"):
            for key in (f"epoch_train_{name}", f"epoch_{name}"):
                if key in logs:
                    self.exact[name] = float(logs[key])
        if state.is_world_process_zero and self.run is not None:
            self._tell_progress(state)

    def on_epoch_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        train_s = self.clock.stop()
        steps = self.clock.steps()
        if self.updates_before == self._first_update():
            steps = steps[self.steps_left_out :]
        mine = self._rank_row(args, state, train_s, [s for _, s in steps])
        append_row(self.folder.rank(self.world.rank), mine)
        everyone = gather_object([mine]) if self.world.size > 1 else [mine]
        self.ended_s = time.perf_counter()
        if state.is_world_process_zero:
            self.row = self._row(state, train_s, steps, everyone)
            if self.run is not None and self.updates_before == self._first_update():
                # The number format that was seen in the first step is known now.
                self._write_environment(args, state)

    def _first_update(self) -> int:
        checkpoint = self.run.checkpoint if self.run is not None else None
        return int(checkpoint.name.rsplit("-", 1)[1]) if checkpoint is not None else 0

    def _rank_row(
        self, args: Any, state: TrainerState, train_s: float, steps: list[float]
    ) -> dict[str, Any]:
        cuda = args.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated() if cuda else _peak_of_process()
        return {
            "epoch": round(state.epoch or 0, 6),
            "rank": self.world.rank,
            "epoch_time_s": train_s,
            "step_time_median_s": statistics.median(steps) if steps else None,
            "step_time_p95_s": _quantile(steps, 0.95),
            "data_wait_s": self.clock.data_wait_s,
            "peak_memory_gib": peak / GIB,
        }

    def _row(
        self,
        state: TrainerState,
        train_s: float,
        steps: list[tuple[int, float]],
        everyone: list[dict[str, Any]],
    ) -> dict[str, Any]:
        updates = state.global_step - self.updates_before
        samples = self._real_samples(updates)
        # The last batch of an epoch may be short: never count more than was there.
        timed = min(sum(n for n, _ in steps), samples)
        timed_s = sum(s for _, s in steps)
        rate = timed / timed_s if timed_s else None
        so_far = self.before
        mine = everyone[0]
        row = {
            "epoch": mine["epoch"],
            "updates": state.global_step,
            "samples": samples + so_far.get("samples", 0),
            "effective_batch": self.batch,
            "learning_rate": self.learning_rate,
            "train_loss": self.exact.get("loss", _mean_of_log(self.losses, self.updates_before)),
            "grad_norm": self.exact.get("grad_norm"),
            "clipped_share": self.exact.get("clipped_share"),
            "fed_samples": self.exact.get("samples"),
            "epoch_time_s": train_s + so_far.get("epoch_time_s", 0.0),
            "train_samples_per_s": rate,
            "train_samples_per_s_per_gpu": rate and rate / self._devices(),
            "timed_steps": len(steps),
            "timed_s": timed_s,
            "timed_samples": timed,
            "step_time_median_s": mine["step_time_median_s"],
            "step_time_p95_s": mine["step_time_p95_s"],
            "data_wait_share": self.clock.data_wait_s / train_s if train_s else None,
            "peak_memory_gib_per_rank": [rank["peak_memory_gib"] for rank in everyone],
        }
        self.before = {}
        return row

    def _devices(self) -> int:
        observed = self.run.observed if self.run is not None else {}
        return int(observed.get("devices", self.world.size))

    def _real_samples(self, updates: int) -> int:
        """Samples of the epoch, those counted once that a sampler fed twice to fill up a batch."""
        fed = updates * self.batch
        return min(fed, self.train_samples) if self.train_samples else fed

    def partial_epoch(self) -> dict[str, Any]:
        """What a checkpoint inside an epoch has to know of that epoch; empty between epochs."""
        if self.row is not None or not self.clock.marks:
            return {}
        steps = self.clock.steps()
        train_s = time.perf_counter() - self.clock.began_s - self.clock.paused_s
        return {
            "epoch_time_s": train_s + self.before.get("epoch_time_s", 0.0),
            "samples": sum(n for n, _ in steps) + self.before.get("samples", 0),
        }

    # ---- evaluation and saving ----

    def on_evaluate(
        self,
        args: Any,
        state: TrainerState,
        control: Any,
        metrics: Any = None,
        **kwargs: Any,
    ) -> None:
        if self.row is None:
            if state.is_world_process_zero and hasattr(self, "clock"):
                self.clock.resume()
            return
        given = dict(metrics or {})
        eval_s = time.perf_counter() - self.ended_s
        loader = kwargs.get("eval_dataloader")
        samples = given.get("eval_samples") or (len(loader.dataset) if loader is not None else None)
        for name, value in given.items():
            short = name.removeprefix("eval_")
            if short in (
                "runtime",
                "samples_per_second",
                "steps_per_second",
                "epoch",
                "samples",
            ):
                continue
            if short == "model_preparation_time" or not isinstance(value, (int, float)):
                continue
            self.row["eval_loss" if short == "loss" else short] = value
        self.row |= {
            "eval_samples": samples,
            "eval_time_s": eval_s,
            "eval_samples_per_s": samples / eval_s if samples else None,
        }
        self._write_row()
        self.ended_s = time.perf_counter()

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.clock.marks and self.row is None and hasattr(self, "ended_s"):
            self.save_time_s += time.perf_counter() - self.ended_s
        self.clock.resume()

    def _write_row(self) -> None:
        """The row of the epoch that has ended, unless an attempt before has written it."""
        row, self.row = self.row, None
        if row is None or row["epoch"] in self.recorded:
            return
        self.recorded.add(row["epoch"])
        row |= {"attempt": self.attempt, "wall_s": self._wall_s(), "unix": time.time()}
        append_row(self.folder.epochs, row)
        if self.run is not None:
            self.run.last_row = row

    def _wall_s(self) -> float:
        return self.earlier_wall_s + time.perf_counter() - self.began_s

    def _tell_progress(self, state: TrainerState) -> None:
        write_json(
            self.folder.progress,
            {
                "attempt": self.attempt,
                "epoch": state.epoch,
                "update": state.global_step,
                "updates": state.max_steps,
                "loss": self.losses[-1][1] if self.losses else None,
                "wall_s": time.perf_counter() - self.began_s,
                "unix": time.time(),
            },
        )

    # ---- the run ends ----

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._write_row()
        if not state.is_world_process_zero:
            return
        end = {
            "event": "end",
            "attempt": self.attempt,
            "outcome": FINISHED,
            "reason": None,
            "unix": time.time(),
            "wall_s": time.perf_counter() - self.began_s,
        }
        append_row(self.folder.attempts, end)
        rows, _ = read_rows(self.folder.epochs)
        write_json(self.folder.summary, self._summary(args, state, rows))
        self.folder.progress.unlink(missing_ok=True)

    def _summary(
        self, args: TrainingArguments, state: TrainerState, rows: list[dict[str, Any]]
    ) -> dict[str, Any]:
        timed_s = sum(row["timed_s"] for row in rows)
        rate = sum(row["timed_samples"] for row in rows) / timed_s if timed_s else None
        last = rows[-1] if rows else {}
        metric = (
            self.run.settings.best_metric if self.run is not None else args.metric_for_best_model
        )
        column = {"loss": "eval_loss"}.get(str(metric), str(metric).removeprefix("eval_"))
        scored = [row for row in rows if row.get(column) is not None]
        sign = -1 if column == "eval_loss" else 1
        best = max(scored, key=lambda row: sign * row[column], default=None)
        stock = next((h for h in reversed(state.log_history) if "train_runtime" in h), {})
        quality = (
            "accuracy",
            "top5_accuracy",
            "precision",
            "recall",
            "f1",
            "f1_macro",
            "eval_loss",
        )
        return {
            "schema": SCHEMA,
            "outcome": FINISHED,
            "reason": None,
            "epochs": len(rows),
            "updates": state.global_step,
            "samples": sum(row["samples"] for row in rows),
            **{name: last[name] for name in quality if name in last},
            "train_loss": last.get("train_loss"),
            "best_metric": column if best else None,
            "best_value": best[column] if best else None,
            "best_epoch": best["epoch"] if best else None,
            "train_samples_per_s": rate,
            "train_samples_per_s_per_gpu": rate and rate / self._devices(),
            "train_time_s": sum(row["epoch_time_s"] for row in rows),
            "eval_time_s": sum(row.get("eval_time_s") or 0.0 for row in rows),
            "save_time_s": self.save_time_s,
            "wall_s": wall_of_attempts(self.folder),
            "attempts": self.attempt,
            "peak_memory_gib": max(
                (m for row in rows for m in row["peak_memory_gib_per_rank"]),
                default=None,
            ),
            # The Trainer's own figure: evaluation, saving and warm-up are in it.
            "trainer_train_samples_per_second": stock.get("train_samples_per_second"),
        }


def _steps_an_epoch(args: TrainingArguments, state: TrainerState) -> int:
    return max(1, int(state.max_steps / max(state.num_train_epochs, 1)))


def _mean_of_log(losses: list[tuple[int, float]], before: int) -> float | None:
    """Mean of the logged losses, each for the updates since the one before; None without any."""
    total = weight = 0.0
    for update, loss in losses:
        total += loss * (update - before)
        weight += update - before
        before = update
    return total / weight if weight else None


def _quantile(values: list[float], share: float) -> float | None:
    if not values:
        return None
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def _peak_of_process() -> int:
    """The most memory this process has had, in bytes: a CPU has no allocator to ask."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return int(psutil.Process().memory_info().rss)

"""Progress of a run: lines and a bar for a person, numbers for trackers (--report_to)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from rich.console import Console as Screen
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from transformers import TrainerCallback
from transformers.integrations import get_reporting_integration_callbacks

from harness.core.identity import number
from harness.core.process import usable_cores
from harness.core.records import DISTURBING_SHARE, RunFolder, plain
from harness.core.records.summary import (
    Rows,
    best_of,
    disturbance,
    gpu_utilisation_percent,
    larger_is_better,
    own_metrics,
)
from harness.core.schema.environment import DataRecord, ObservedRecord
from harness.core.schema.rows import EpochRow
from harness.core.settings import Settings, flag_fields
from harness.core.topology import batch_of_trainer
from harness.train.context import Context
from harness.train.loop.compiling import what_it_brings
from harness.train.measure.calibration import WORTH_SAYING
from harness.train.measure.environment import launch
from harness.train.run.recorder import Recorder

PREFIX = "harness"  # of the names that trackers receive
TEST_METRICS = ("test_loss", "test_accuracy", "test_top5_accuracy", "test_f1")
UNLIKE_F1 = 0.02
MOST_NAMED = 5  # entries that a warning lists

# Lists of a data record that are worth a warning -> what they list.
SUSPECT: dict[Literal["alike_classes", "rare_classes", "untrained_classes", "blank_texts"], str] = {
    "alike_classes": "classes that differ in case, blanks or as 1, 1.0 alone (samples)",
    "rare_classes": "classes with very few samples",
    "untrained_classes": "classes without a training sample (test, validation samples)",
    "blank_texts": "samples whose text is empty or blanks alone (a header not counted)",
}
# If another program takes one thread's core, all other threads of the process wait for it.
THREADS_WAIT = "threads wait for each other beside other programs: try OMP_NUM_THREADS=1"


class Console(TrainerCallback):
    """Prints on rank 0; without a terminal, whole lines only and no bar."""

    def __init__(self, recorder: Recorder, context: Context) -> None:
        self.recorder, self.context = recorder, context
        self.screen = Screen(file=sys.stdout, highlight=False, soft_wrap=True)
        self.bar: Progress | None = None
        self.threads_reported = self.compiling_reported = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        settings = self.context.settings
        observed = self.recorder.observations.observed
        model = escape(str(observed.get("own_model", settings.model)))
        dataset = escape(str(self.context.data_facts["dataset"]))
        setup = escape(f"{settings.script} {settings.setup}")
        self.screen.print(f"[bold]{setup}[/bold]  {model} on {dataset}")
        for line in (*self._about_data(), *self._about_training(args, state, observed)):
            self.screen.print(f"  {line}", markup=False)
        if self.screen.is_terminal:
            self.bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                TimeRemainingColumn(), console=self.screen, transient=True,
            )  # fmt: skip
            self.task = self.bar.add_task(
                "updates", total=state.max_steps, completed=state.global_step
            )
            self.bar.start()

    def _about_data(self) -> Iterator[str]:
        data = self.context.data_facts
        drawn = f" of {n:,}" if (n := data.get("available_samples")) else ""
        over = f" ({n} more fill no batch)" if (n := data["left_out_samples"]) else ""
        held_out = f"{n:,} validation samples, " if (n := data.get("validation_samples")) else ""
        yield (
            f"{data['train_samples']:,}{drawn} training samples{over}, "
            f"{held_out}{data['test_samples']:,} test samples, {data['classes']} classes"
        )
        if "label_column" in data and not str(data["dataset"]).startswith("embedded:"):
            inputs = " and ".join(data["input_columns"])
            yield f"input from {inputs}, classes from {data['label_column']}"
            if cut := data.get("truncated_texts"):
                yield (
                    f"{cut:,} texts have more than {data['max_length']} tokens and are cut there "
                    "(--max_length)"
                )
        for field, which in SUSPECT.items():
            if named := data.get(field):
                more = "; ..." if named[MOST_NAMED:] else ""
                yield f"warning: {which}: {'; '.join(named[:MOST_NAMED])}{more}"
        yield from self._unused_splits(data)
        facts: Mapping[str, Any] = data
        for which in ("test", "validation"):
            if of_them := facts.get(f"{which}_samples_in_training"):
                of_all = facts[f"{which}_samples"]
                yield (
                    f"warning: {of_them:,} of {of_all:,} {which} samples are "
                    "also in the training set: they overstate the quality on new data"
                )
        if deep := data.get("sixteen_bit_images"):
            yield (
                f"warning: {deep:,} images have 16 bits, which are divided by 257; pipeline() and "
                "Pillow cut them off at 255: give the trained model images with 8 bits"
            )

    def _unused_splits(self, data: DataRecord) -> Iterator[str]:
        empty = data.get("empty_test_splits", [])
        without = [name for name in data.get("unused_test_splits", []) if name not in empty]
        for lack, unused in (("classes", without), ("rows", empty)):
            if unused:
                names = f"split{'s' * (len(unused) > 1)} {', '.join(unused)}"
                yield (
                    f"warning: {names} {'have' if unused[1:] else 'has'} no {lack}, and "
                    f"{'are' if unused[1:] else 'is'} not used: the test set is {data['test_from']}"
                )

    def _about_training(self, args: Any, state: Any, observed: ObservedRecord) -> Iterator[str]:
        settings = self.context.settings
        device = observed["device"] if args.n_gpu < 2 else f"{args.n_gpu} GPUs"  # DataParallel
        on_cpu, threads = device == "cpu", torch.get_num_threads()
        many = observed["world"] > 1
        if on_cpu:
            device += f" with {threads} thread{'s' * (threads > 1)}{' each' * many}"
        yield (
            f"{observed['strategy']} on {observed['world']} process{'es' * many}, {device}, "
            f"{settings.precision}, seed {settings.seed}"
        )
        batch, own = self.context.effective_batch, batch_of_trainer(args)
        acc, devices = args.gradient_accumulation_steps, args.world_size * max(1, args.n_gpu)
        terms = f"{args.per_device_train_batch_size} x {acc} accumulation x {devices}"
        if batch != own:
            terms = f"of all processes together, each {own} at a time"
        schedule = args.lr_scheduler_type.value
        yield (
            f"effective batch {batch} = {terms}; {state.max_steps:,} updates at a learning "
            f"rate of {number(settings.lr)} ({schedule} schedule, not scaled with the batch)"
        )
        if on_cpu and (crowded := self._crowded(threads)):
            yield f"warning: {crowded}"
        if shares := observed.get("shares"):
            yield f"shares of the ranks in a step: {', '.join(map(str, shares))} samples"
        yield from _about_weights(settings, observed)
        if (gain := self._bf16_gain()) >= WORTH_SAYING:
            yield f"--precision bf16 would be {gain:.1f} times as fast on this processor"
        if expected := observed.get("exchange_estimates_s"):
            seconds: Mapping[str, Any] = expected
            times = ", ".join(f"{way} {s * 1e3:,.0f}" for way, s in seconds.items())
            yield f"exchange by {observed['exchange']}, chosen by the link; ms expected: {times}"
        if state.global_step:
            yield f"resumes from update {state.global_step} of an earlier attempt"

    def _crowded(self, threads: int) -> str | None:
        """A warning if the processes of this machine have more threads than it has cores."""
        world, how = self.context.recorded_world, launch()
        here = world.size if how.get("launcher") in ("local", "netns") else world.per_node
        cores = len(usable_cores())
        if here * threads <= cores:
            return None
        fix = f"; OMP_NUM_THREADS={cores // here} gives each its share" if here <= cores else ""
        return (
            f"{here * threads} threads share {cores} core{'s' * (cores > 1)} of this machine{fix}"
        )

    def _bf16_gain(self) -> float:
        measures = self.recorder.observations.measures
        tried = (each.facts().get("cpu_calibration") for each in measures)
        return max((known["bf16_gain"] or 0.0 for known in tried if known), default=0.0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        row = self.recorder.last_row
        if not state.is_world_process_zero or row is None:
            return
        # --max_steps may end training within an epoch, or after more epochs than --epochs says.
        epochs = state.num_train_epochs if args.max_steps > 0 else args.num_train_epochs
        parts = [f"epoch {round(row['epoch'], 2):g}/{epochs:g}"]
        # Weighted by the size of classes, f1 hides a small class that is never named.
        unlike = abs((row.get("f1_macro") or 0.0) - (row.get("f1") or 0.0)) > UNLIKE_F1
        names = ["train_loss", "eval_loss", "accuracy", "f1", *["f1_macro"] * unlike]
        metrics: Mapping[str, Any] = row
        for name in (*names, *own_metrics(metrics)):
            if metrics.get(name) is not None:
                parts.append(f"{name} {metrics[name]:.4f}")
        if row["train_samples_per_s"]:
            parts.append(f"{row['train_samples_per_s']:,.0f} samples/s")
        parts += utilisation(row)
        train_s = row["epoch_time_s"]  # unknown where the peer that records was away
        trained = "epoch of unknown time" if train_s is None else f"epoch {train_s:.1f} s"
        parts.append(f"{trained}, evaluation {row['eval_time_s']:.1f} s")
        if (others := row.get("others_cpu_share") or 0.0) > DISTURBING_SHARE:
            parts.append(f"other programs used {others:.0%} of the cores")
        self.screen.print("  " + "  ".join(parts), markup=False)  # user-defined metric names
        observed = self.recorder.observations.observed
        if "eager_pass_s" in observed and not self.compiling_reported:
            self.compiling_reported = True
            passes = state.global_step / state.epoch * args.gradient_accumulation_steps
            self.screen.print(f"  {what_it_brings(observed, passes)}")
        many = args.device.type == "cpu" and torch.get_num_threads() > 1
        if others > DISTURBING_SHARE and many and not self.threads_reported:
            self.threads_reported = True
            self.screen.print(f"  {THREADS_WAIT}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()
        if state.is_world_process_zero:
            if metrics := self.recorder.observations.test_metrics:
                shown = "  ".join(f"{n} {metrics[n]:.4f}" for n in TEST_METRICS if n in metrics)
                epoch = metrics["test_epoch"]
                self.screen.print(f"  test set, weights of epoch {epoch:g}: {shown}")
            rows, _ = self.context.folder.read_epochs()
            if best := best_epoch(self.context.settings, rows):
                self.screen.print(f"  {best}", markup=False)
            if nothing := no_better(self.context.data_facts.get("majority_share"), rows):
                self.screen.print(f"  warning: {nothing}")
            if why := disturbance(launch(), rows):
                self.screen.print(f"  disturbed: {why}; tables mark its times")
            self.screen.print(f"  recorded in {self.context.folder.path}")

    def close(self) -> None:
        """Give the terminal back, also when the training breaks off."""
        if self.bar is not None:
            self.bar.stop()


def no_better(majority_share: float | None, rows: Rows) -> str | None:
    """A warning if a model is no better than always predicting the largest class."""
    accuracy = rows[-1].get("accuracy") if rows else None
    if accuracy is None or majority_share is None or accuracy > majority_share:
        return None
    return (
        f"the accuracy of the last epoch, {accuracy:.4f}, is no better than naming the largest "
        f"class for every sample ({majority_share:.4f})"
    )


def best_epoch(settings: Settings, rows: Rows) -> str | None:
    """A line about the best epoch, where --save best or a --best_metric of the user asks for it."""
    kept, default = settings.save == "best", flag_fields()["best_metric"].default
    best = best_of(rows, settings.best_metric)
    if best["best_epoch"] is None or not (kept or settings.best_metric != default):
        return None
    hint = "" if kept else "; --save best keeps its weights"
    if kept and not settings.validation_split:
        hint = "; chosen on the test set, which flatters it: --validation_split 0.1 avoids that"
    # The direction of a user's own metric is easily forgotten (NAME:min).
    which = "largest" if larger_is_better(settings.best_metric) else "smallest"
    return (
        f"best epoch by {best['best_metric']}: {best['best_epoch']:g} "
        f"({best['best_value']:.4f}, the {which}){hint}"
    )


def utilisation(row: Mapping[str, Any]) -> list[str]:
    """MFU and GPU utilisation: a GPU may be busy all the time and still compute little."""
    mfu, busy = row.get("mfu"), gpu_utilisation_percent(row)
    if mfu is None and busy is None:
        return []
    share = "unknown" if mfu is None else f"{mfu:.1%}"
    if row.get("gpu") is None:
        return [f"MFU {share}"]  # of a CPU
    return [f"MFU {share} (GPU utilisation {'unknown' if busy is None else f'{busy:.0f}%'})"]


class Trackers(TrainerCallback):
    """Sends each epoch's row and, at the end, the summary to the trackers, on rank 0.

    The trackers are the Trainer's own callbacks, and receive both like what the Trainer logs.
    """

    def __init__(
        self, recorder: Recorder, folder: RunFolder, trackers: list[TrainerCallback]
    ) -> None:
        self.recorder, self.folder, self.trackers = recorder, folder, trackers
        self.sent: EpochRow | None = None

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        row = self.recorder.last_row
        if row is not None and row is not self.sent:
            self.sent = row
            self._send(numbers(row, PREFIX), args, state, control, kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        summary = numbers(self.folder.read_summary() or {}, f"{PREFIX}/summary")
        self._send(summary, args, state, control, kwargs)

    def _send(
        self, logs: dict[str, float], args: Any, state: Any, control: Any, more: dict[str, Any]
    ) -> None:
        for tracker in self.trackers if logs else ():
            tracker.on_log(args, state, control, logs=logs, model=more.get("model"))


def add_trackers(trainer: Any) -> None:
    """Keep trackers on rank 0 alone, after the recorder, whose rows they receive."""
    if not trainer.args.report_to:
        return
    kinds = tuple(get_reporting_integration_callbacks(trainer.args.report_to))
    handler, context = trainer.callback_handler, trainer.context
    trackers = [one for one in handler.callbacks if isinstance(one, kinds)]
    handler.callbacks = [one for one in handler.callbacks if one not in trackers]
    if context.is_rank0:
        handler.callbacks += [Trackers(trainer.recorder, context.folder, trackers), *trackers]


def numbers(content: Mapping[str, Any], name: str) -> dict[str, float]:
    """Every known number by its path: harness/gpu/power_w/mean; elements of lists by index."""
    return dict(_walk(plain(content), name))


def _walk(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, (dict, list)):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in inner:
            yield from _walk(part, f"{name}/{key}")
    elif isinstance(value, (int, float)):
        yield name, value


def _about_weights(settings: Settings, observed: Mapping[str, Any]) -> Iterator[str]:
    """Where not all weights are trained, or not all by AdamW."""
    if settings.lora:
        trained, total = observed["trained_bytes"], observed["parameter_bytes"]
        yield f"LoRA of rank {settings.lora}: {trained / total:.2%} of the weights are trained"
    if matrices := observed.get("muon_matrices"):
        yield f"Muon trains {matrices} matrices, AdamW the rest"

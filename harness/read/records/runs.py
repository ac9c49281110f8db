"""One run as its folder holds it, or as a sweep has planned it where there is no record yet."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

from harness.core.identity import EVAL_BATCH, REPETITIONS, SHOWN_ONLY
from harness.core.records import (
    FAILURES,
    FINISHED,
    INTERRUPTED,
    RUNNING,
    SKIPPED,
    WAITING,
    RunFolder,
)
from harness.core.records.locks import is_held
from harness.core.records.summary import (
    QUALITY_FIELDS,
    beyond_a_share,
    disturbance,
    epochs_lacking,
    epochs_of,
    epochs_until,
    larger_is_better,
    mean_of,
    others_share_of_run,
    own_metrics,
    total_of,
)
from harness.core.schema.checks import check_fields
from harness.core.schema.environment import (
    CalibrationRecord,
    DataRecord,
    LinkRecord,
    ObservedRecord,
)
from harness.core.schema.machine import LaunchRecord
from harness.core.schema.rows import AttemptEnd, AttemptStart, EpochRow, RankRow
from harness.core.settings import UserError, flag_fields, nearest
from harness.core.strategies import recorded_strategy
from harness.read.labels import counted, machine_kind
from harness.read.measures import (
    FIELDS,
    MEMORY_FIRST,
    MEMORY_OTHERS,
    PER_UPDATE,
    TO_TARGET,
    WALL_OF_TRAINING,
    is_timed_or_memory,
)
from harness.read.records.recorded import (
    UNFINISHED,
    UNREADABLE,
    Recorded,
    is_number,
    is_ours,
    link_text,
    measuring_s,
    processes_of,
    recorded,
)

# Progress is written once a second, but not during a long evaluation.
QUIET_S = 120.0

# States, in the order in which a group names them if its runs ended in several ways.
STATES = (FINISHED, *FAILURES, UNREADABLE, UNFINISHED, WAITING, SKIPPED)

# Numbers of summary.json that measure nothing.
NO_MEASURES = ("schema", "best_value", "best_epoch")
# Sums over all epochs, unknown where a record lacks some.
OF_ALL_EPOCHS = ("samples", "train_time_s", "eval_time_s", *PER_UPDATE.values(), "energy_j",
                 "epochs_done", "user_s", "system_s", "save_time_s")  # fmt: skip

# Per node: fields of its ranks' rows that are added up, and those that are averaged.
SUMMED = {"user_s": "user_s", "system_s": "system_s"}
AVERAGED = {"accuracy": "eval_accuracy", "top5_accuracy": "eval_top5_accuracy"}
PER_NODE = (*SUMMED, *AVERAGED)


@dataclass(frozen=True)
class Target:
    """The quality whose time is measured: a field of epochs.jsonl and its value."""

    metric: str
    value: float
    at_most: bool = False  # of a metric of one's own, given as NAME:min

    @classmethod
    def of(cls, metric: str, value: float) -> Target:  # metric: as --best_metric has it
        name = metric.removesuffix(":min")
        return cls("eval_loss" if name == "loss" else name, value, name != metric)

    @property
    def smaller_is_better(self) -> bool:
        return self.at_most or not larger_is_better(self.metric) or self.metric.endswith("_loss")

    def reached(self, value: float) -> bool:
        return value <= self.value if self.smaller_is_better else value >= self.value

    def __str__(self) -> str:
        return f"{self.metric} at {'most' if self.smaller_is_better else 'least'} {self.value:g}"

    @property
    def short(self) -> str:
        """For the label of an axis."""
        return f"{self.metric} {self.value:g}"


def parse_target(text: str) -> Target:
    """Parse METRIC=VALUE of the command line, for example accuracy=0.9."""
    metric, _, value = text.partition("=")
    try:
        target = Target.of(metric, float(value))
    except ValueError:
        raise UserError(f"--target {text}: expected METRIC=VALUE, such as accuracy=0.9") from None
    if problem := beyond_a_share(target.metric, target.value):
        raise UserError(f"--target {text}: {problem}")
    return target


def check_target(target: Target, runs: Iterable[Run]) -> None:
    """UserError where no epoch of these runs has the metric of the target."""
    rows = [row for run in runs for row in run.epochs]
    known = {name for row in rows for name, value in row.items() if is_number(value)}
    if rows and target.metric not in known:
        hint = nearest(target.metric, sorted({*QUALITY_FIELDS} & known))
        raise UserError(f"--target {target.metric}: no epoch of these runs has it: {hint}")


@dataclass(frozen=True, eq=False)  # equal by identity: comparing all fields takes long
class Run:
    """One run, whatever became of it."""

    label: dict[str, Any]  # as its sweep names it; empty outside a sweep
    path: str | None  # as shown to the user; None: refused by the plan before it had a path
    state: str
    reason: str | None = None
    folder: RunFolder | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    measures: dict[str, float] = field(default_factory=dict)
    epochs: tuple[EpochRow, ...] = ()
    ranks: dict[int, list[RankRow]] = field(default_factory=dict)
    attempts: Sequence[AttemptStart | AttemptEnd] = ()
    in_per_cent: tuple[str, ...] = ()  # metrics that its script gave so, which are shares here
    broken_lines: dict[str, int] = field(default_factory=dict)  # file -> its unreadable lines
    other_batches: tuple[int, ...] = ()  # per process, those that ran instead of the one asked for
    left_out: tuple[str, ...] = ()  # names of measures that were dropped for that

    @property
    def recorded_folder(self) -> RunFolder:
        """The folder of a run that has a record."""
        assert self.folder is not None, f"{self.label} has no record"
        return self.folder

    @property
    def seed(self) -> int | None:
        seed: int | None = self._repeats("seed")
        return seed

    @property
    def repetition(self) -> tuple[Any, Any]:
        """What distinguishes this run from the others of its group."""
        return self._repeats("seed"), self._repeats("repeat")

    def _repeats(self, name: str) -> Any:
        return self.label.get(name, self.settings.get(name))

    @property
    def machine(self) -> str | None:
        return self.environment.get("machine")

    @property
    def machine_kind(self) -> str | None:
        """The machine without the number of its GPUs: GPUs of one kind are one kind of machine."""
        machine = self.machine
        return machine_kind(machine) if machine and self.environment.get("gpus") else machine

    @property
    def launch(self) -> LaunchRecord:
        """How a launcher started the run; this and the next four are empty if unknown."""
        return cast(LaunchRecord, self.environment.get("launch") or {})

    @property
    def observed(self) -> ObservedRecord:
        return cast(ObservedRecord, self.environment.get("observed") or {})

    @property
    def data(self) -> DataRecord:
        return cast(DataRecord, self.environment.get("data") or {})

    @property
    def measured_link(self) -> LinkRecord:
        return cast(LinkRecord, self.environment.get("link") or {})

    @property
    def calibration(self) -> CalibrationRecord:
        return cast(CalibrationRecord, self.environment.get("cpu_calibration") or {})

    @property
    def nodes(self) -> int | None:
        return self.environment.get("nodes")

    @property
    def processes(self) -> int | None:
        return processes_of(self.environment)

    @property
    def device(self) -> str | None:
        """The device that the run trained on: cpu, cuda:0."""
        return self.observed.get("device")

    @property
    def threads(self) -> int | None:
        """Threads of a process that computes on a CPU: torchrun sets one, without it all cores are
        used. 0 for a GPU, whose times do not depend on threads; None where unknown.
        """
        # A record of LogCallback alone has no device, and has GPUs only if training used them.
        gpus = self.environment.get("gpus") if self.device is None else self.device != "cpu"
        return 0 if gpus else self.environment.get("threads")

    @property
    def devices(self) -> int | None:
        """One process of dp drives several devices; each other process drives one."""
        return self.processes * (self.observed.get("devices") or 1) if self.processes else None

    @property
    def effective_batch(self) -> int | None:
        return self.environment.get("effective_batch")

    @property
    def imported(self) -> dict[str, Any]:
        """Where an imported record comes from; empty for a run of this project."""
        return self.settings.get("imported") or {}

    @property
    def link_warning(self) -> str | None:
        """Set where the measured link was far from the requested one."""
        return self.measured_link.get("warning")

    @property
    def lacks_epochs(self) -> bool:
        """Whether LogCallback alone wrote no row for an epoch, or wrote it in another folder."""
        return epochs_lacking(self.settings, self.epochs) > 0

    @property
    def was_resumed(self) -> bool:
        return (self.measures.get("attempts") or 1) > 1

    @property
    def is_disturbed(self) -> bool:
        """Whether its times may differ from those of its settings on a quiet machine."""
        return self.is_beside_others or bool(self.other_batches)

    @property
    def is_beside_others(self) -> bool:
        """Whether others used the machine when the run began, or while it trained."""
        return disturbance(self.launch, self.epochs) is not None

    @property
    def load_is_unknown(self) -> bool:
        return self.others_cpu_share is None and not self.is_beside_others

    @cached_property
    def others_cpu_share(self) -> float | None:
        return others_share_of_run(self.epochs)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The settings that can change the result, and the link that was requested."""
        return identity_settings(self.settings) | {"link": link_text(self.launch.get("link"))}

    @cached_property
    def characteristics(self) -> dict[str, Any]:
        """The identity, and what else the sweep's label of the run holds."""
        more = {n: v for n, v in self.label.items() if n not in (*self.identity, *REPETITIONS)}
        return self.identity | more

    def toward(self, target: Target) -> Run:
        """The run with the times to this target, whatever the target of its sweep is."""
        measures = {n: v for n, v in self.measures.items() if n not in TO_TARGET}
        reached: dict[str, float] = {}
        if not self.lacks_epochs:
            reached = time_to_target(self.epochs, target, self.environment, self.settings)
        for name, value in reached.items():
            if not (self.other_batches and _depends_on_batch(name, value)):
                measures[name] = value
        return replace(self, measures=measures)

    @cached_property
    def per_node(self) -> tuple[dict[str, float | None], ...]:
        """For each node the totals and means of the last rows of its ranks; None: unknown."""
        size = self.environment.get("processes_per_node")
        if self.state != FINISHED or self.folder is None or not self.nodes or not size:
            return ()
        last: dict[int, Mapping[str, Any]] = defaultdict(dict)
        last |= {rank: rows[-1] for rank, rows in self.ranks.items() if rows}
        nodes = []
        for node in range(self.nodes):
            ranks = [last[rank] for rank in range(node * size, (node + 1) * size)]
            sums = {name: total_of(ranks, field) for name, field in SUMMED.items()}
            # A rank without samples has no accuracy and does not count.
            tested = [row for row in ranks if row.get("eval_samples") != 0]
            means = {name: mean_of(tested, of, "eval_samples") for name, of in AVERAGED.items()}
            nodes.append(sums | means)
        return tuple(nodes)

    @property
    def own_metrics(self) -> list[str]:
        """The metrics of the script's own compute_metrics, in addition to ours."""
        return own_metrics(self.epochs[-1]) if self.epochs else []

    @property
    def current_state(self) -> str:
        """The state at this moment: a run without outcome is running, or was interrupted."""
        if self.state != UNFINISHED:
            return self.state
        last = self._last_progress()
        recent = time.time() - (last.get("unix") or 0.0) < QUIET_S
        return RUNNING if recent or is_held(self.recorded_folder.lock("run")) else INTERRUPTED

    @property
    def progress(self) -> str:
        """How far a run without outcome has come."""
        last = self._last_progress()
        text = f"{counted(len(self.epochs), 'epoch')} recorded"
        if last.get("update") is not None:
            text += f", update {last['update']} of {last.get('updates')}"
        return text

    def _last_progress(self) -> Mapping[str, Any]:
        """What the attempt in progress last reported; empty where that is not known."""
        last: Mapping[str, Any] = self.recorded_folder.read_progress() or {}
        try:
            check_fields("progress", last, self.recorded_folder.progress)
        except UserError:
            return {}
        return last

    @property
    def command(self) -> list[str]:
        """The words of the command that made it; empty where it is not known."""
        try:
            return shlex.split(self.environment.get("command") or "")
        except ValueError:  # an open quote
            return []


def own_metrics_of(runs: Iterable[Run]) -> list[str]:
    """The metrics of the scripts' own compute_metrics, each once."""
    return [*dict.fromkeys(name for run in runs for name in run.own_metrics)]


def identity_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that can change a result, without those that repeat a measurement."""
    passed = settings.get("trainer") or {}
    named = {
        name: settings.get(name)
        for name, flag in flag_fields().items()
        if flag.metadata["identity"] and name not in ("tiny", *REPETITIONS)
    }
    if is_ours(settings):  # as in the run id: a record that names the default is not another run
        named["eval_batch"] = named["eval_batch"] or EVAL_BATCH
        named["augment"] = named["augment"] or "none"
        if named["validation_split"] is not None:  # which weights the test set was measured on
            best = settings.get("best_metric") or flag_fields()["best_metric"].default
            named["tested"] = best if settings.get("save") == "best" else "last epoch"
    passed = {name: value for name, value in passed.items() if name not in SHOWN_ONLY}
    values = {"script": settings.get("script"), **named, **passed}
    return {name: _comparable(value) for name, value in values.items()}


def _comparable(value: Any) -> Any:
    """A value that can be compared: a flag with several values as JSON text."""
    return json.dumps(value, sort_keys=True) if isinstance(value, (list, dict)) else value


def read_run(folder: RunFolder, label: Mapping[str, Any], path: str, target: Target | None) -> Run:
    """The run in a folder; where its record is not believed, `reason` says why."""
    return run_of(recorded(folder, with_ranks=True), label, path, target)


def run_of(record: Recorded, label: Mapping[str, Any], path: str, target: Target | None) -> Run:
    summary, environment = record.summary, record.environment
    measures: dict[str, float] = {}
    unknown = OF_ALL_EPOCHS if epochs_lacking(record.settings, record.epochs) else ()
    if summary is not None:
        measures = {
            name: float(value)
            for name, value in summary.items()
            if name not in (*NO_MEASURES, *unknown) and is_number(value)
        }
        measures |= link_numbers(environment)
        if record.state == FINISHED:
            measures |= _derived(record, summary, None if unknown else target)
    left_out: tuple[str, ...] = ()
    if other_batches := _other_batches(record):
        left_out = tuple(n for n, v in measures.items() if _depends_on_batch(n, v))
        measures = {n: v for n, v in measures.items() if n not in left_out}
    return Run(
        label=dict(label), path=path, state=record.state, reason=record.reason,
        folder=record.folder, settings=record.shown_settings, environment=environment,
        measures=measures, epochs=record.epochs, ranks=record.ranks, attempts=record.attempts,
        broken_lines=record.broken_lines, in_per_cent=record.in_per_cent,
        other_batches=other_batches, left_out=left_out,
    )  # fmt: skip


def _other_batches(record: Recorded) -> tuple[int, ...]:
    """Batches of attempts that differ from the one asked for (--auto_batch, missing nodes)."""
    requested = record.settings.get("per_gpu_batch")
    batches = {row.get("per_gpu_batch") for row in record.attempts} if requested else set()
    return tuple(sorted(batch for batch in batches if batch and batch != requested))


def _depends_on_batch(measure: str, value: float) -> bool:
    """True for times, rates and memory, but not for a missed target: any batch misses it."""
    return is_timed_or_memory(measure) and not math.isinf(value)


def _derived(
    record: Recorded, summary: Mapping[str, Any], target: Target | None
) -> dict[str, float]:
    rows, environment, derived = record.epochs, record.environment, {}
    epochs, train_s = summary.get("epochs_done"), summary.get("train_time_s")
    strategy = recorded_strategy(record.settings)
    if rows and not strategy.has_peers and not record.settings.get("imported"):
        epochs = epochs_of(rows, record.settings)
    if epochs and is_number(train_s):
        derived["epoch_time_s"] = train_s / epochs
    if is_number(summary.get("wall_s")) and rows:
        derived[WALL_OF_TRAINING] = summary["wall_s"] - measuring_s(rows[-1], environment)
    for name, total in PER_UPDATE.items():
        if is_number(summary.get(total)) and summary.get("updates"):
            derived[name] = summary[total] / summary["updates"] / 1e6
    derived |= memory_of_devices(rows)
    if target is not None:
        derived |= time_to_target(rows, target, environment, record.settings)
    return derived


def memory_of_devices(rows: Sequence[EpochRow]) -> dict[str, float]:
    """The peak of the first device, which holds more with dp, and the largest of the others."""
    lists = [row.get("peak_memory_gib_per_rank") or [] for row in rows]
    first = [peaks[0] for peaks in lists if peaks and is_number(peaks[0])]
    others = [peak for peaks in lists for peak in peaks[1:] if is_number(peak)]
    named = {MEMORY_FIRST: first, MEMORY_OTHERS: others}
    return {name: float(max(peaks)) for name, peaks in named.items() if peaks}


def time_to_target(
    rows: Sequence[EpochRow], target: Target, environment: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, float]:  # fmt: skip
    """Times, epochs and samples to the end of the first epoch at the target; infinity if missed.

    The wall time leaves out the time that measuring itself took.
    Empty where no epoch has the metric: the time is then unknown, not missed.
    """
    if not any(is_number(row.get(target.metric)) for row in rows):
        return {}
    train_s, samples = 0.0, 0.0
    for number, row in enumerate(rows, 1):
        train_s += _known(row.get("epoch_time_s"))
        samples += _known(row.get("samples"))
        value = row.get(target.metric)
        if is_number(value) and target.reached(value):
            wall_s = _known(row.get("wall_s")) - measuring_s(row, environment or {})
            wall_s = wall_s if wall_s > 0 else math.nan
            epochs = _known(epochs_until(rows, number, settings))
            figures = (train_s, wall_s, epochs, samples)
            # A sum with something unknown in it is unknown.
            return {n: v for n, v in zip(TO_TARGET, figures, strict=True) if not math.isnan(v)}
    return dict.fromkeys(TO_TARGET, math.inf)


def _known(value: Any) -> float:
    return float(value) if is_number(value) else math.nan


def link_numbers(environment: Mapping[str, Any]) -> dict[str, float]:
    """The measured figures of the link that are known; none for a run on one node."""
    link = environment.get("link") or {}
    return {name: link[at] for name, at in FIELDS.items() if is_number(link.get(at))}

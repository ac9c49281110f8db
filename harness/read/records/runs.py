"""One run as its folder holds it, or as a sweep has planned it where there is no record yet.

load() and load_runs() give the records below a folder as data frames: a row per epoch, a row per
run. Values whose type is not the declared one are refused here, so that readers need not expect
them.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import pandas as pd

from harness.core.attempts import larger_is_better
from harness.core.identity import EVAL_BATCH, SHOWN_ONLY
from harness.core.links import FIELDS as LINK_FIELDS
from harness.core.links import Link
from harness.core.locks import is_held
from harness.core.records import (
    FAILURES,
    FINISHED,
    RUNNING,
    SCHEMA,
    SKIPPED,
    WAITING,
    RunFolder,
    find_runs,
    read_json,
    sum_known,
)
from harness.core.schema.dictionary import check_types
from harness.core.schema.rows import EpochRow
from harness.core.settings import UserError, flag_fields
from harness.read.labels import machine_kind

# What a run without summary.json is: it may still be going on, or have been killed.
UNFINISHED = "unfinished"

# Fields of a row that hold further fields, or are null.
DEVICES = ("gpu", "node")

# Column -> field of environment.json's link.
RTT, BANDWIDTH = "link_rtt_median_ms", "link_bandwidth_mbit"
FIELDS = {
    "link_rtt_min_ms": "rtt_min_ms",
    RTT: "rtt_median_ms",
    BANDWIDTH: "bandwidth_mbit",
    "link_allreduce_s": "allreduce_s",
    "link_allreduce_algbw_mbit": "allreduce_algbw_mbit",
    "link_allreduce_busbw_mbit": "allreduce_busbw_mbit",
}

# An unfinished run that nobody works on at this moment; the other state is RUNNING.
INTERRUPTED = "interrupted"
# Progress is written once a second, but not during a long evaluation.
QUIET_S = 120.0

# In this order where the runs of a group ended in several ways.
STATES = (FINISHED, *FAILURES, UNFINISHED, WAITING, SKIPPED)

# Runs that differ in nothing else repeat one measurement: they form a group.
REPETITIONS = ("seed", "repeat")

# Numbers of summary.json that measure nothing.
NO_MEASURES = ("schema", "best_value", "best_epoch")

# Millions of bytes: payload is what a strategy hands over, sent is what left the nodes.
PER_UPDATE = {
    "payload_mb_per_update": "payload_bytes",
    "network_mb_per_update": "network_sent_bytes",
}
TO_TARGET = ("tta_train_s", "tta_wall_s", "tta_epochs", "tta_samples")
MEMORY_FIRST, MEMORY_OTHERS = "peak_memory_first_gib", "peak_memory_others_gib"

# Per node: fields of its ranks' rows that are added up, and those that are averaged.
SUMMED = {"user_s": "user_s", "system_s": "system_s"}
AVERAGED = {"accuracy": "eval_accuracy", "top5_accuracy": "eval_top5_accuracy"}
PER_NODE = (*SUMMED, *AVERAGED)


@dataclass(frozen=True)
class Target:
    """The quality whose time is measured: a field of epochs.jsonl and its value."""

    metric: str
    value: float

    @property
    def smaller_is_better(self) -> bool:
        return not larger_is_better(self.metric) or self.metric.endswith("_loss")

    def reached(self, value: float) -> bool:
        return value <= self.value if self.smaller_is_better else value >= self.value

    def __str__(self) -> str:
        return f"{self.metric} at {'most' if self.smaller_is_better else 'least'} {self.value:g}"

    @property
    def short(self) -> str:
        """For the label of an axis."""
        return f"{self.metric} {self.value:g}"


def parse_target(text: str) -> Target:
    """accuracy=0.9, as on the command line."""
    metric, _, value = text.partition("=")
    try:
        return Target("eval_loss" if metric == "loss" else metric, float(value))
    except ValueError:
        raise UserError(f"--target {text}: expected METRIC=VALUE, such as accuracy=0.9") from None


@dataclass(frozen=True)
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
    broken_lines: int = 0  # unreadable lines of epochs.jsonl

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
        """GPUs of one kind are one kind of machine, however many are used."""
        machine = self.machine
        return machine_kind(machine) if machine and self.environment.get("gpus") else machine

    @property
    def nodes(self) -> int | None:
        return self.environment.get("nodes")

    @property
    def processes(self) -> int | None:
        per_node = self.environment.get("processes_per_node")
        return self.nodes * per_node if self.nodes and per_node else None

    @property
    def devices(self) -> int | None:
        """One process of dp drives several devices; each other process drives one."""
        observed = self.environment.get("observed") or {}
        return self.processes * (observed.get("devices") or 1) if self.processes else None

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
        return (self.environment.get("link") or {}).get("warning")

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The settings that can change the result, and the link that was requested."""
        return identity_settings(self.settings) | {"link": self._requested_link()}

    @cached_property
    def characteristics(self) -> dict[str, Any]:
        """The identity, and what the label of a sweep says beyond it."""
        more = {n: v for n, v in self.label.items() if n not in (*self.identity, *REPETITIONS)}
        return self.identity | more

    def _requested_link(self) -> str | None:
        """As it is written on the command line."""
        link = (self.environment.get("launch") or {}).get("link")
        if not isinstance(link, dict):
            return None if link is None else str(link)
        return str(Link(**{n: link[n] for n in LINK_FIELDS if link.get(n) is not None}))

    @cached_property
    def per_node(self) -> tuple[dict[str, float | None], ...]:
        """For each node the totals and means of the last rows of its ranks; None: unknown."""
        size = self.environment.get("processes_per_node")
        if self.state != FINISHED or self.folder is None or not self.nodes or not size:
            return ()
        rows_of = self.folder.read_ranks()
        last: dict[int, Mapping[str, Any]] = defaultdict(dict)
        last |= {rank: rows[-1] for rank, rows in rows_of.items() if rows}
        nodes = []
        for node in range(self.nodes):
            ranks = [last[rank] for rank in range(node * size, (node + 1) * size)]
            sums = {name: sum_known(r.get(field) for r in ranks) for name, field in SUMMED.items()}
            nodes.append(sums | {name: _mean(ranks, field) for name, field in AVERAGED.items()})
        return tuple(nodes)

    @property
    def current_state(self) -> str:
        """The state at this moment: a run without outcome is running, or was interrupted."""
        if self.state != UNFINISHED:
            return self.state
        last = self.recorded_folder.read_progress()
        recent = last is not None and time.time() - last.get("unix", 0.0) < QUIET_S
        return RUNNING if recent or is_held(self.recorded_folder.lock("run")) else INTERRUPTED

    @property
    def progress(self) -> str:
        """How far a run without outcome has come."""
        last = self.recorded_folder.read_progress()
        done = len(self.epochs)
        text = f"{done} epoch{'' if done == 1 else 's'} recorded"
        if last is not None and last.get("update") is not None:
            text += f", update {last['update']} of {last.get('updates')}"
        return text


def identity_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that can change a result, without those that repeat a measurement.

    A record of this project that lacks a flag is older than it, and was made with its default.
    """
    ours = "script" in settings and not settings.get("imported")
    fields = {n: f for n, f in flag_fields().items() if f.metadata["identity"] and n != "tiny"}
    passed = settings.get("trainer") or {}
    named = {
        name: settings.get(name, flag.default if ours else None)
        for name, flag in fields.items()
        if name not in REPETITIONS
    }
    if ours:  # as in the run id: a record that names the default is not another run
        named["eval_batch"] = named["eval_batch"] or EVAL_BATCH
        named["augment"] = named["augment"] or "none"
    return {
        "script": settings.get("script"),
        **named,
        **{name: value for name, value in passed.items() if name not in SHOWN_ONLY},
    }


def read_run(folder: RunFolder, label: Mapping[str, Any], path: str, target: Target | None) -> Run:
    """What one folder holds; records of other definitions are refused."""
    settings = recorded_settings(folder) if folder.settings.exists() else {}
    summary, environment = summary_of(folder), environment_of(folder)
    epochs, broken = epochs_of(folder)
    state, reason, measures = UNFINISHED, None, {}
    if summary is not None:
        state, reason = str(summary.get("outcome")), summary.get("reason")
        measures = {
            name: float(value)
            for name, value in summary.items()
            if name not in NO_MEASURES and is_number(value)
        }
        measures |= link_numbers(environment)
        if state == FINISHED:
            measures |= _derived(epochs, summary, target)
    return Run(
        label=dict(label), path=path, state=state, reason=reason, folder=folder, settings=settings,
        environment=environment, measures=measures, epochs=tuple(epochs), broken_lines=broken,
    )  # fmt: skip


def _derived(
    rows: Sequence[EpochRow], summary: dict[str, Any], target: Target | None
) -> dict[str, float]:
    derived = {}
    epochs, train_s = summary.get("epochs_done"), summary.get("train_time_s")
    if epochs and is_number(train_s):
        derived["epoch_time_s"] = train_s / epochs
    for name, total in PER_UPDATE.items():
        if is_number(summary.get(total)) and summary.get("updates"):
            derived[name] = summary[total] / summary["updates"] / 1e6
    derived |= memory_of_devices(rows)
    if target is not None:
        derived |= time_to_target(rows, target)
    return derived


def memory_of_devices(rows: Sequence[EpochRow]) -> dict[str, float]:
    """The first device's peak and the largest of the others': with dp the first holds more."""
    lists = [row.get("peak_memory_gib_per_rank") or [] for row in rows]
    first = [peaks[0] for peaks in lists if peaks and is_number(peaks[0])]
    others = [peak for peaks in lists for peak in peaks[1:] if is_number(peak)]
    named = {MEMORY_FIRST: first, MEMORY_OTHERS: others}
    return {name: float(max(peaks)) for name, peaks in named.items() if peaks}


def time_to_target(rows: Sequence[EpochRow], target: Target) -> dict[str, float]:
    """At the end of the first epoch that reaches it; a miss is infinity.

    Empty where no epoch has the metric: that is unknown, not missed.
    """
    if not any(is_number(row.get(target.metric)) for row in rows):
        return {}
    train_s, samples = 0.0, 0.0
    for row in rows:
        train_s += _known(row.get("epoch_time_s"))
        samples += _known(row.get("samples"))
        value = row.get(target.metric)
        if is_number(value) and target.reached(value):
            wall_s, epoch = _known(row.get("wall_s")), _known(row.get("epoch"))
            figures = (train_s, wall_s, epoch, samples)
            # A sum with something unknown in it is unknown.
            return {n: v for n, v in zip(TO_TARGET, figures, strict=True) if not math.isnan(v)}
    return dict.fromkeys(TO_TARGET, math.inf)


def _known(value: Any) -> float:
    return float(value) if is_number(value) else math.nan


def _mean(ranks: list[Mapping[str, Any]], name: str) -> float | None:
    """Over the samples: ranks need not have the same number of them."""
    # A rank without samples has no accuracy and does not count.
    rows = [row for row in ranks if row.get("eval_samples") != 0]
    if not rows or not all(is_number(r.get(n)) for r in rows for n in (name, "eval_samples")):
        return None
    total = math.fsum(row["eval_samples"] for row in rows)
    return math.fsum(row["eval_samples"] * row[name] for row in rows) / total


def recorded_settings(folder: RunFolder) -> dict[str, Any]:
    """The settings as they were written, if this version of the definitions wrote them."""
    settings = read_json(folder.settings)
    if settings is None:
        raise UserError(f"{folder.settings} is not readable as JSON: move the folder away")
    check_schema(settings.pop("schema", None), folder.path)
    check_types("settings", settings, folder.settings)
    return settings


def check_schema(schema: object, path: Path) -> None:
    if schema != SCHEMA:
        raise UserError(
            f"{path} was written with schema {schema}, this reads {SCHEMA}: "
            "read it with the version of this project that wrote it"
        )


def environment_of(folder: RunFolder) -> dict[str, Any]:
    environment = read_json(folder.environment) or {}
    check_types("environment", environment, folder.environment)
    return environment


def summary_of(folder: RunFolder) -> dict[str, Any] | None:
    summary = read_json(folder.summary)
    check_types("summary", summary or {}, folder.summary)
    return summary


def epochs_of(folder: RunFolder) -> tuple[list[EpochRow], int]:
    """The rows, and the number of lines that are not readable."""
    rows, broken = folder.read_epochs()
    for row in rows:
        check_types("epochs", row, folder.epochs)
    return rows, broken


def is_number(value: Any) -> TypeGuard[float]:
    """Unknown is null; what is neither a number nor finite is unknown."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def link_numbers(environment: Mapping[str, Any]) -> dict[str, float]:
    """The measured figures of the link that are known; none for a run on one node."""
    link = environment.get("link") or {}
    return {name: link[at] for name, at in FIELDS.items() if is_number(link.get(at))}


def load(root: str | Path) -> pd.DataFrame:
    """One row per epoch over all runs at or below a folder; settings and machine as columns.

    Lines that are not readable are left out and counted in the column broken_lines.
    """
    rows: list[dict[str, Any]] = []
    for folder in find_runs(existing(root)):
        epochs, broken = epochs_of(folder)
        outcome = (summary_of(folder) or {}).get("outcome", UNFINISHED)
        shared = {**_shared(folder), "outcome": outcome, "broken_lines": broken}
        rows += [{**shared, **_flat(row)} for row in epochs]
    return pd.DataFrame(rows)


def load_runs(root: str | Path, dtype: type | None = None) -> pd.DataFrame:
    """One row per run: its settings, its machine and the fields of summary.json.

    With dtype=object integers stay integers where some runs do not have them.
    """
    rows = []
    for folder in find_runs(existing(root)):
        summary = summary_of(folder) or {"outcome": UNFINISHED, "reason": None}
        rows.append({**_shared(folder), **summary})
    return pd.DataFrame(rows, dtype=dtype)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a field as columns of their own: gpu_power_w_mean."""
    columns: dict[str, Any] = {}
    for name, value in row.items():
        if type(value) is dict:
            for inner, of in _flat(value).items() if name not in DEVICES else _spread(value):
                columns[f"{name}_{inner}"] = of
        elif value is not None or name not in DEVICES:
            columns[name] = value
    return columns


def _spread(device: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Mean, p95 and max of each reading: nearly all columns of a row come from here."""
    for name, value in device.items():
        if type(value) is dict:
            for which, number in value.items():
                yield f"{name}_{which}", number
        else:
            yield name, value


def existing(root: str | Path) -> Path:
    if not Path(root).exists():
        raise UserError(f"{root}: there is no such folder")
    return Path(root)


def _shared(folder: RunFolder) -> dict[str, Any]:
    settings, environment = recorded_settings(folder), environment_of(folder)
    settings.pop("training_arguments", None)
    if "precision" in settings:
        # The setting and the metric have one name; the metric keeps it.
        settings["number_format"] = settings.pop("precision")
    passed = settings.pop("trainer", None) or {}
    imported = settings.pop("imported", None) or {}
    nodes, per_node = environment.get("nodes"), environment.get("processes_per_node")
    return {
        "path": str(folder.path),
        **settings,
        **{f"trainer_{name}": value for name, value in passed.items()},
        "imported": imported.get("source"),  # None: measured by this project
        "machine": environment.get("machine"),
        "nodes": nodes,
        "processes_per_node": per_node,
        "processes": nodes * per_node if nodes and per_node else None,
        "effective_batch": environment.get("effective_batch"),
        **link_numbers(environment),
        "link_warning": (environment.get("link") or {}).get("warning"),
    }

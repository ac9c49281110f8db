"""The runs of a sweep: for each what became of it, and what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from harness.core.records import FAILURES, FINISHED, RunFolder, read_json, read_rows
from harness.read.records.loading import UNFINISHED, link_numbers, link_warning, settings_of
from harness.read.records.sweeps import PlannedRun, Sweep, Target, is_number, read_sweep

# What a planned run is that has no record.
WAITING, SKIPPED = "waiting", "skipped"


# In this order where the runs of a group ended in several ways.
STATES = (FINISHED, *FAILURES, UNFINISHED, WAITING, SKIPPED)


# Numbers of summary.json that measure nothing.
NO_MEASURES = ("schema", "best_value", "best_epoch")


# Millions of bytes: payload is what a strategy hands over, sent is what left the nodes.
PER_UPDATE = {
    "payload_mb_per_update": "payload_bytes",
    "network_mb_per_update": "network_sent_bytes",
}


TO_TARGET = ("tta_train_s", "tta_wall_s", "tta_epochs", "tta_samples")


MEMORY_FIRST, MEMORY_OTHERS = "peak_memory_first_gib", "peak_memory_others_gib"


# Of one node: what the rows of its ranks add up to, and what they are averaged to.
SUMMED = {"user_s": "user_s", "system_s": "system_s"}


AVERAGED = {"accuracy": "eval_accuracy", "top5_accuracy": "eval_top5_accuracy"}


@dataclass(frozen=True)
class SweepRun:
    """One planned run, whatever became of it."""

    label: dict[str, Any]
    path: str | None
    state: str
    reason: str | None
    environment: dict[str, Any] = field(default_factory=dict)
    measures: dict[str, float] = field(default_factory=dict)
    per_node: tuple[dict[str, float | None], ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    epochs: tuple[dict[str, Any], ...] = ()
    broken_lines: int = 0  # of epochs.jsonl, left out

    @property
    def repetition(self) -> tuple[Any, Any]:
        """What tells this run from the others of its group."""
        return self.label.get("seed"), self.label.get("repeat")

    @property
    def machine(self) -> str | None:
        return self.environment.get("machine")

    @property
    def facts(self) -> dict[str, Any]:
        """What really ran."""
        nodes = self.environment.get("nodes")
        per_node = self.environment.get("processes_per_node")
        processes = nodes * per_node if nodes and per_node else None
        # One process of dp drives several devices; each other process drives one.
        observed = self.environment.get("observed") or {}
        devices = processes * (observed.get("devices") or 1) if processes else None
        return {
            "nodes": nodes,
            "processes": processes,
            "devices": devices,
            "effective_batch": self.environment.get("effective_batch"),
        }


def load_sweep_runs(folder: str | Path) -> pd.DataFrame:
    """One row a planned run: its label, what became of it, and its numbers."""
    sweep = read_sweep(folder)
    return pd.DataFrame([run_row(sweep, run) for run in read_runs(sweep)])


def run_row(sweep: Sweep, run: SweepRun) -> dict[str, Any]:
    versions = run.environment.get("versions") or {}
    return {
        **{column_of(axis): run.label.get(axis) for axis in sweep.axes},
        "seed": run.label.get("seed"),
        "repeat": run.label.get("repeat"),
        "path": run.path,
        "state": run.state,
        "reason": run.reason,
        "machine": run.machine,
        **run.facts,
        **run.measures,
        "link_warning": link_warning(run.environment),
        **{f"{name}_version": versions.get(name) for name in ("torch", "transformers")},
        "commit": run.environment.get("commit"),
        "dirty": run.environment.get("dirty"),
    }


# What an axis may be called that is also what is measured.
TAKEN = (
    "path", "state", "reason", "machine", "nodes", "processes", "devices", "effective_batch",
    "updates", "samples", "accuracy", "recall", "f1", "attempts", "commit", "dirty",
    "baseline", "planned", "finished", "reached", "outcome", "seeds", "repeats",
)  # fmt: skip


def column_of(axis: str) -> str:
    """The column of an axis: as in load() where the setting has the name of a metric."""
    if axis == "precision":
        return "number_format"
    return f"label_{axis}" if axis in TAKEN else axis


def read_runs(sweep: Sweep) -> list[SweepRun]:
    """All of them, in the order of the plan."""
    return [_read(sweep, planned) for planned in sweep.runs]


def _read(sweep: Sweep, planned: PlannedRun) -> SweepRun:
    if planned.path is None:
        return SweepRun(planned.label, None, SKIPPED, planned.skipped)
    folder = RunFolder(sweep.output_dir / planned.path)
    run = read_record(folder, planned.label, planned.path, sweep.target, sweep.per_node)
    if run.state != UNFINISHED:
        return run
    state, reason = _without_outcome(folder, planned)
    return replace(run, state=state, reason=reason)


def read_record(
    folder: RunFolder, label: dict[str, Any], path: str, target: Target | None, nodes: bool = False
) -> SweepRun:
    """What one folder holds; other definitions are refused."""
    settings = settings_of(folder) if folder.settings.exists() else {}
    summary = read_json(folder.summary)
    environment = read_json(folder.environment) or {}
    epochs, broken = read_rows(folder.epochs)
    found: dict[str, Any] = {
        "label": label, "path": path, "environment": environment,
        "settings": settings, "epochs": tuple(epochs), "broken_lines": broken,
    }  # fmt: skip
    if summary is None:
        return SweepRun(**found, state=UNFINISHED, reason=None)
    state, reason = str(summary.get("outcome")), summary.get("reason")
    measures = {
        name: float(value)
        for name, value in summary.items()
        if name not in NO_MEASURES and is_number(value)
    }
    measures |= link_numbers(environment)
    if state == FINISHED:
        measures |= _derived(epochs, summary, target)
    by_node = per_node(folder, environment) if nodes and state == FINISHED else ()
    return SweepRun(**found, state=state, reason=reason, measures=measures, per_node=by_node)


def _without_outcome(folder: RunFolder, planned: PlannedRun) -> tuple[str, str | None]:
    """A record counts more than the plan: what was skipped here may have run elsewhere."""
    if folder.settings.exists() or folder.epochs.exists() or folder.attempts.exists():
        return UNFINISHED, None
    return (WAITING, None) if planned.skipped is None else (SKIPPED, planned.skipped)


def _derived(
    rows: list[dict[str, Any]], summary: dict[str, Any], target: Target | None
) -> dict[str, float]:
    found = {}
    epochs, train_s = summary.get("epochs_done"), summary.get("train_time_s")
    if epochs and is_number(train_s):
        found["epoch_time_s"] = train_s / epochs
    for name, total in PER_UPDATE.items():
        if is_number(summary.get(total)) and summary.get("updates"):
            found[name] = summary[total] / summary["updates"] / 1e6
    found |= memory_of_devices(rows)
    if target is not None:
        found |= time_to_target(rows, target)
    return found


def memory_of_devices(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The first device's peak and the largest of the others': with dp the first holds more."""
    lists = [row.get("peak_memory_gib_per_rank") or [] for row in rows]
    first = [peaks[0] for peaks in lists if peaks and is_number(peaks[0])]
    others = [peak for peaks in lists for peak in peaks[1:] if is_number(peak)]
    named = {MEMORY_FIRST: first, MEMORY_OTHERS: others}
    return {name: float(max(peaks)) for name, peaks in named.items() if peaks}


def time_to_target(rows: Sequence[dict[str, Any]], target: Target) -> dict[str, float]:
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


def per_node(folder: RunFolder, environment: dict[str, Any]) -> tuple[dict[str, float | None], ...]:
    """For each node what the last rows of its ranks say together; null where one says nothing."""
    nodes, size = environment.get("nodes"), environment.get("processes_per_node")
    if not nodes or not size:
        return ()
    found = []
    for node in range(nodes):
        ranks = [_last(folder, rank) for rank in range(node * size, (node + 1) * size)]
        figures = {name: _sum(ranks, field) for name, field in SUMMED.items()}
        found.append(figures | {name: _mean(ranks, field) for name, field in AVERAGED.items()})
    return tuple(found)


def _last(folder: RunFolder, rank: int) -> dict[str, Any]:
    rows, _ = read_rows(folder.rank(rank))
    return rows[-1] if rows else {}


def _sum(ranks: list[dict[str, Any]], name: str) -> float | None:
    known = [value for row in ranks if is_number(value := row.get(name))]
    return math.fsum(known) if len(known) == len(ranks) else None


def _mean(ranks: list[dict[str, Any]], name: str) -> float | None:
    """Over the samples: ranks need not have the same number of them."""
    # A rank without samples has no accuracy and does not count.
    rows = [row for row in ranks if row.get("eval_samples") != 0]
    if not rows or not all(is_number(r.get(n)) for r in rows for n in (name, "eval_samples")):
        return None
    total = math.fsum(row["eval_samples"] for row in rows)
    return math.fsum(row["eval_samples"] * row[name] for row in rows) / total

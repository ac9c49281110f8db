"""A sweep's groups against their baseline, as rows of numbers for tables and data frames."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from harness.core.strategies import OF_EXCHANGE, OF_ONE_STRATEGY, OF_OPTIMIZER, SINGLE, is_off
from harness.read.labels import STRATEGY, column_of
from harness.read.measures import TO_TARGET
from harness.read.records.comparable import (
    ACCURACY,
    QUALITY,
    SHARES,
    SPEED,
    TARGET,
    measured_against,
    refused,
)
from harness.read.records.groups import Group
from harness.read.records.runs import PER_NODE, Run
from harness.read.records.sweeps import SweepResults, read_sweep
from harness.read.statistics import Estimate, is_rate, spread

RATE, TIME = "train_samples_per_s", "train_time_s"
WEAK, STRONG = "weak", "strong"
# How processes exchange: one process alone, which exchanges nothing, may stand for any of these.
EXCHANGED = (STRATEGY, "exchange", "link", *OF_EXCHANGE)

# Columns of a comparison with the baseline.
GAIN, POINTS, EFFICIENCY = (
    "train_samples_per_s_gain_percent", "accuracy_gain_points", "scaling_efficiency",
)  # fmt: skip
TIMES = TO_TARGET[:2]
RATIOS = tuple(f"{name}_ratio" for name in TIMES)

# What really ran: properties of Run.
FACTS = ("nodes", "processes", "devices", "effective_batch")


def load_sweep(folder: str | Path) -> pd.DataFrame:
    """One row per group: label, counts, and per measure mean, sd, n, 95 % interval, values."""
    return pd.DataFrame(group_rows(read_sweep(folder)))


def load_sweep_runs(folder: str | Path) -> pd.DataFrame:
    """One row per planned run: its label, what became of it, and its numbers."""
    sweep = read_sweep(folder)
    return pd.DataFrame([run_row(sweep, run) for run in sweep.runs])


def run_row(sweep: SweepResults, run: Run) -> dict[str, Any]:
    versions = run.environment.get("versions") or {}
    return {
        **{column_of(axis): run.label.get(axis) for axis in sweep.axes},
        "seed": run.label.get("seed"),
        "repeat": run.label.get("repeat"),
        "path": run.path,
        "state": run.state,
        "reason": run.reason,
        "machine": run.machine,
        **{name: getattr(run, name) for name in FACTS},
        **run.measures,
        "link_warning": run.link_warning,
        "disturbed": run.is_disturbed,
        **{f"{name}_version": versions.get(name) for name in ("torch", "transformers")},
        "commit": run.environment.get("commit"),
        "dirty": run.environment.get("dirty"),
    }


def baseline_of(sweep: SweepResults, group: Group) -> Group | None:
    """The group with the baseline's values that agrees on every other axis, on a like machine;
    or the single process that does the same work as these several.
    """
    baseline = sweep.baseline
    if baseline is None:
        return None
    named = [
        other
        for other in sweep.groups
        if other.machine_kind == group.machine_kind
        and all(other.label[axis] == value for axis, value in baseline.items())
    ]
    like = [o for o in named if all(_fits(baseline, axis, o, group) for axis in sweep.axes)]
    if not like and "setup" in baseline:
        like = [other for other in named if is_single_of(other, group, sweep.axes)]
    if "setup" in baseline:  # what more devices gain with the same optimizer
        like = [other for other in like if _same_optimizer(other, group)] or like
    like = [other for other in like if is_plain(baseline, other)] or like
    nearest = [
        (other.machine != group.machine, sum(other.label[a] != group.label[a] for a in sweep.axes))
        for other in like
    ]
    return like[nearest.index(min(nearest))] if like else None


def compared_groups(sweep: SweepResults) -> list[tuple[Group, Group]]:
    """Each group with its baseline, where that is another one and both have finished runs."""
    pairs = ((group, baseline_of(sweep, group)) for group in sweep.groups)
    return [
        (group, base)
        for group, base in pairs
        if base is not None and base is not group and group.finished and base.finished
    ]


def _fits(baseline: dict[str, Any], axis: str, other: Group, group: Group) -> bool:
    """Whether another group may be the baseline of this one, as far as an axis tells.

    A baseline without a value on an axis, as one machine has no link, serves groups of every value;
    if it ran with a default, only those of that value.
    """
    if axis in baseline or other.label[axis] == group.label[axis]:
        return True
    if STRATEGY in baseline and axis in OF_ONE_STRATEGY and is_off(other.label[axis]):
        return True
    if axis in OF_OPTIMIZER:
        return _same_optimizer(other, group)
    if other.label[axis] is None:
        default = None if axis in EXCHANGED else other.setting(axis)
        return default is None or bool(default == group.label[axis])
    return False


def is_single_of(one: Group, group: Group, axes: Sequence[str]) -> bool:
    """Whether one process does the same training as several, with the batch of each of them (weak
    scaling) or of all together (strong).
    """
    if one.setting(STRATEGY) != SINGLE or group.setting(STRATEGY) in (SINGLE, None):
        return False
    batch = one.fact("effective_batch")
    shared = SHARES if batch is not None and batch == group.fact("effective_batch") else ()
    free = {"setup", *EXCHANGED, *OF_OPTIMIZER, *shared}
    alike = one.machine_kind == group.machine_kind and _same_optimizer(one, group)
    return alike and all(one.label[axis] == group.label[axis] for axis in axes if axis not in free)


def differs_from_single(group: Group, base: Group | None, axes: Sequence[str]) -> set[str]:
    """The axes on which a group differs from the single process that it is compared with."""
    if base is None or not is_single_of(base, group, axes):
        return set()
    return {axis for axis in axes if group.label[axis] != base.label[axis]}


def is_plain(way: dict[str, Any], group: Group) -> bool:
    """Whether the group has no flag of a strategy beside those that `way` names, if it names a
    strategy: ddp means ddp and not ddp powersgd.
    """
    return STRATEGY not in way or all(
        is_off(group.label.get(flag)) for flag in OF_ONE_STRATEGY if flag not in way
    )


def _same_optimizer(one: Group, other: Group) -> bool:
    return all(is_off(one.setting(n)) == is_off(other.setting(n)) for n in OF_OPTIMIZER)


def gains(group: Group, base: Group | None) -> dict[str, Any]:
    """What the group gives more or less than its baseline; unknown without a finished baseline."""
    kind, share = efficiency(group, base)
    updates = (group.mean("updates"), None if base is None else base.mean("updates"))
    return {
        "baseline": base is group,
        "baseline_finished": None if base is None else len(base.finished),
        "other_updates": None if None in updates else updates[0] != updates[1],
        **_named(GAIN, _against(group, base, RATE, SPEED).scaled(100, -100)),
        **_named(POINTS, _against(group, base, ACCURACY, QUALITY).scaled(100)),
        **_named(EFFICIENCY, share),
        "scaling_kind": kind,
    }


def against_target(group: Group, base: Group | None) -> dict[str, Any]:
    """Times to the target as shares of the baseline's, unknown where that misses it."""
    row: dict[str, Any] = {}
    for time, name in zip(TIMES, RATIOS, strict=True):
        missed = base is not None and base.missed(time)
        row |= _named(name, Estimate() if missed else _against(group, base, time, TARGET))
    return row


def _against(group: Group, base: Group | None, measure: str, question: str) -> Estimate:
    """The estimate; unknown where `compare` refuses it, without interval against itself."""
    if base is None or not group.values(measure):
        return Estimate()
    if base is group:
        return Estimate(0.0 if question == QUALITY else 1.0)
    if refused(group, base, question):
        return Estimate()
    return measured_against(group, base, measure, question)


def _named(name: str, estimate: Estimate) -> dict[str, float | None]:
    return {
        name: estimate.value,
        f"{name}_low": estimate.low,
        f"{name}_high": estimate.high,
        f"{name}_n": estimate.n,
        f"{name}_unpaired": estimate.unpaired,
    }


def efficiency(group: Group, base: Group | None) -> tuple[str | None, Estimate]:
    """Weak X_N/(N X_1) at equal batch per device, strong T_1/(N T_N) at equal effective batch."""
    if base is None or not base.finished or not group.finished:
        return None, Estimate()
    if base is group:
        return None, Estimate(1.0)
    if refused(group, base, SPEED) or not _same_optimizer(group, base):
        return None, Estimate()
    devices, before = group.fact("devices"), base.fact("devices")
    batch, batch_before = group.fact("effective_batch"), base.fact("effective_batch")
    if not (devices and before and batch and batch_before) or devices == before:
        return None, Estimate()  # the same number of devices: something else than scaling
    more = devices / before
    if batch * before == batch_before * devices:
        return WEAK, measured_against(group, base, RATE, SPEED).scaled(1 / more)
    same_work = all(
        group.mean(name) is not None and group.mean(name) == base.mean(name)
        for name in ("samples", "epochs_done")
    )
    if batch == batch_before and same_work:
        return STRONG, measured_against(base, group, TIME, SPEED).scaled(1 / more)
    return None, Estimate()


def group_rows(sweep: SweepResults) -> list[dict[str, Any]]:
    names = measures_of(sweep)
    return [_row(sweep, group, baseline_of(sweep, group), names) for group in sweep.groups]


def measures_of(sweep: SweepResults) -> list[str]:
    """Every number that a finished run of the sweep has, in the order of the records."""
    names = (name for run in sweep.finished for name in run.measures)
    last = TO_TARGET if sweep.target else ()
    return [*dict.fromkeys(n for n in names if n not in TO_TARGET), *last]


def _row(sweep: SweepResults, group: Group, base: Group | None, names: list[str]) -> dict[str, Any]:
    row = {
        **{column_of(axis): value for axis, value in group.label.items()},
        "machine": group.machine,
        "planned": len(group.runs),
        "finished": len(group.finished),
        "outcome": group.outcome,
        "seeds": [run.label.get("seed") for run in group.finished],
        "repeats": [run.label.get("repeat") for run in group.finished],
        **{name: group.fact(name) for name in FACTS},
        **gains(group, base),
        "disturbed": group.disturbed,
        "link_warnings": sum(run.link_warning is not None for run in group.finished),
    }
    if sweep.target:
        row["reached"] = sum(math.isfinite(epochs) for _, epochs in group.by_run("tta_epochs"))
        row |= against_target(group, base)
    for name in names:
        counted = {*group.measured(name)}
        values = (r.measures.get(name) if r in counted else None for r in group.finished)
        row |= _statistics(name, group.values(name), [*values])
    if sweep.per_node:
        row |= per_node(group)
    return row


def _statistics(name: str, repeats: list[float], values: list[float | None]) -> dict[str, Any]:
    """Statistics of a measure; `values` of runs in the order of seeds, unknown ones included."""
    stats = spread(repeats, is_rate(name))
    median = {f"{name}_median": stats.median} if name in TO_TARGET else {}
    return {
        name: stats.mean,
        f"{name}_sd": stats.sd,
        f"{name}_n": stats.n,
        f"{name}_low": stats.low,
        f"{name}_high": stats.high,
        **median,
        f"{name}_values": values,
    }


def per_node(group: Group) -> dict[str, list[float | None]]:
    """For each figure a list by node: means over the runs that know it and whose number counts."""
    nodes = max((len(run.per_node) for run in group.finished), default=0)
    by_node: dict[str, list[float | None]] = {}
    for name in PER_NODE:
        means = []
        for node in range(nodes):
            runs = group.measured(name)
            values = [run.per_node[node].get(name) for run in runs if node < len(run.per_node)]
            means.append(spread([value for value in values if value is not None]).mean)
        by_node[f"{name}_per_node"] = means
    return by_node

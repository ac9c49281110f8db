"""A sweep's groups: runs that differ only in seed or repeat, and how each compares to its baseline.

Raw numbers only; how they are shown stands in sweep_columns.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from harness.core.records import FINISHED
from harness.core.strategies import OF_ONE_STRATEGY, is_off
from harness.read.labels import STRATEGY
from harness.read.records.loading import link_warning
from harness.read.records.sweep_runs import STATES, TO_TARGET, SweepRun, column_of, read_runs
from harness.read.records.sweeps import Sweep, group_key, is_number, read_sweep
from harness.read.statistics import Estimate, difference_of_means, ratio_of_means, spread

RATE, TIME = "train_samples_per_s", "train_time_s"


WEAK, STRONG = "weak", "strong"


@dataclass(frozen=True)
class Group:
    """Runs with one label but for seed and repeat, on one kind of machine."""

    label: dict[str, Any]
    machine: str | None
    runs: tuple[SweepRun, ...]

    @property
    def finished(self) -> list[SweepRun]:
        return [run for run in self.runs if run.state == FINISHED]

    @property
    def outcome(self) -> str:
        """Finished if any run is, else what became of them, the worst first."""
        states = {run.state for run in self.runs}
        if FINISHED in states:
            return FINISHED
        return ", ".join(sorted(states, key=lambda s: STATES.index(s) if s in STATES else 0))

    def by_repetition(self, measure: str) -> dict[Any, float]:
        return {
            (run.repetition, n): run.measures[measure]
            for n, run in enumerate_equal(self.finished)
            if measure in run.measures
        }

    def values(self, measure: str) -> list[float]:
        return list(self.by_repetition(measure).values())

    def fact(self, name: str) -> Any:
        """What is the same for all runs that know it; None where it differs or nobody does."""
        known = {run.facts[name] for run in self.finished or self.runs} - {None}
        return known.pop() if len(known) == 1 else None

    def mean(self, measure: str) -> float | None:
        return spread(self.values(measure)).mean


def enumerate_equal(runs: Iterable[SweepRun]) -> Iterable[tuple[int, SweepRun]]:
    """A number for each run among those with the same seed and repeat: 0 unless a plan errs."""
    seen: dict[Any, int] = {}
    for run in runs:
        number = seen.get(run.repetition, 0)
        seen[run.repetition] = number + 1
        yield number, run


def load_sweep(folder: str | Path) -> pd.DataFrame:
    """One row a group: label, counts, and of each measure mean, sd, n, 95 % interval, values."""
    sweep = read_sweep(folder)
    return pd.DataFrame(group_rows(sweep, make_groups(sweep, read_runs(sweep))))


def make_groups(sweep: Sweep, runs: list[SweepRun]) -> list[Group]:
    """In the order of the plan. Runs on unlike machines are never averaged."""
    by_label: dict[Any, list[SweepRun]] = {}
    for run in runs:
        by_label.setdefault(group_key(run.label, sweep.axes), []).append(run)
    groups = []
    for together in by_label.values():
        label = {axis: together[0].label.get(axis) for axis in sweep.axes}
        by_machine: dict[str | None, list[SweepRun]] = {}
        for run in together:
            by_machine.setdefault(_machine(run, together), []).append(run)
        groups += [Group(label, machine, tuple(on)) for machine, on in by_machine.items()]
    return groups


def _machine(run: SweepRun, together: list[SweepRun]) -> str | None:
    """A run that has not ended belongs to its group's machine, where there is only one."""
    if run.machine is not None or run.state == FINISHED:
        return run.machine
    machines = {other.machine for other in together} - {None}
    return machines.pop() if len(machines) == 1 else None


def baseline_of(sweep: Sweep, group: Group, groups: list[Group]) -> Group | None:
    """The group with the baseline's values that agrees on every other axis, on a like machine."""
    if sweep.baseline is None:
        return None
    like = [
        other
        for other in groups
        if all(_fits(sweep.baseline, axis, other, group) for axis in sweep.axes)
        and kind_of_machine(other) == kind_of_machine(group)
    ]
    plain = [other for other in like if _is_plain(sweep.baseline, other)]
    like = plain or like
    nearest = [
        (other.machine != group.machine, sum(other.label[a] != group.label[a] for a in sweep.axes))
        for other in like
    ]
    return like[nearest.index(min(nearest))] if like else None


def _fits(baseline: dict[str, Any], axis: str, other: Group, group: Group) -> bool:
    """Whether another group may be the baseline of this one, as far as an axis tells.

    A baseline that has no value on an axis, as one machine has no link, is that of every value.
    """
    if axis in baseline:
        return bool(other.label[axis] == baseline[axis])
    if other.label[axis] is None or bool(other.label[axis] == group.label[axis]):
        return True
    return STRATEGY in baseline and axis in OF_ONE_STRATEGY and is_off(other.label[axis])


def _is_plain(baseline: dict[str, Any], other: Group) -> bool:
    """A baseline that names a strategy alone means it without its flags: ddp, not ddp powersgd."""
    return STRATEGY not in baseline or all(
        is_off(other.label.get(flag)) for flag in OF_ONE_STRATEGY if flag not in baseline
    )


def kind_of_machine(group: Group) -> str | None:
    """The label without the number of GPUs: one GPU of a kind is the baseline of four."""
    gpus = any(run.environment.get("gpus") for run in group.runs)
    return without_count(group.machine) if group.machine and gpus else group.machine


def without_count(machine: str) -> str:
    """The kind of GPU that a label names."""
    return re.sub(r"x\d+$", "", machine)


def compare(group: Group, base: Group | None) -> dict[str, Any]:
    """What the group gives more or less than its baseline; unknown without a finished baseline."""
    rate = gain = Estimate()
    if base is group:
        # Against itself there is nothing to be uncertain of.
        rate, gain = (Estimate(0.0 if base.values(m) else None) for m in (RATE, "accuracy"))
    elif base is not None:
        ratio = ratio_of_means(group.by_repetition(RATE), base.by_repetition(RATE))
        rate = ratio.scaled(100, -100)
        measures = (g.by_repetition("accuracy") for g in (group, base))
        gain = difference_of_means(*measures).scaled(100)
    kind, share = efficiency(group, base)
    updates = (group.mean("updates"), None if base is None else base.mean("updates"))
    return {
        "baseline": base is group,
        "baseline_finished": None if base is None else len(base.finished),
        "other_updates": None if None in updates else updates[0] != updates[1],
        **_named("train_samples_per_s_gain_percent", rate),
        **_named("accuracy_gain_points", gain),
        **_named("scaling_efficiency", share),
        "scaling_kind": kind,
    }


def against_target(group: Group, base: Group | None) -> dict[str, Any]:
    """Times to the target as shares of the baseline's."""
    names = ("tta_train_s", "tta_wall_s")
    return {k: v for n in names for k, v in _named(f"{n}_ratio", _share(group, base, n)).items()}


def _share(group: Group, base: Group | None, name: str) -> Estimate:
    """A miss takes for ever; how much longer than for ever, nobody knows."""
    if base is None:
        return Estimate()
    ours, theirs = group.by_repetition(name), base.by_repetition(name)
    if not ours or not all(map(math.isfinite, theirs.values())):
        return Estimate()
    if base is group:
        return Estimate(1.0)
    return ratio_of_means(ours, theirs)


def _named(name: str, estimate: Estimate) -> dict[str, float | None]:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def efficiency(group: Group, base: Group | None) -> tuple[str | None, Estimate]:
    """Weak X_N/(N X_1) at equal batch per device, strong T_1/(N T_N) at equal effective batch."""
    if base is None or not base.finished or not group.finished:
        return None, Estimate()
    if base is group:
        return None, Estimate(1.0)
    devices, before = group.fact("devices"), base.fact("devices")
    batch, batch_before = group.fact("effective_batch"), base.fact("effective_batch")
    if not (devices and before and batch and batch_before) or devices == before:
        return None, Estimate()  # the same number of devices: something else than scaling
    more = devices / before
    if batch * before == batch_before * devices:
        ratio = ratio_of_means(group.by_repetition(RATE), base.by_repetition(RATE))
        return WEAK, ratio.scaled(1 / more)
    same_work = all(
        group.mean(name) is not None and group.mean(name) == base.mean(name)
        for name in ("samples", "epochs_done")
    )
    if batch == batch_before and same_work:
        ratio = ratio_of_means(base.by_repetition(TIME), group.by_repetition(TIME))
        return STRONG, ratio.scaled(1 / more)
    return None, Estimate()


def group_rows(sweep: Sweep, groups: list[Group]) -> list[dict[str, Any]]:
    names = measures_of(sweep, groups)
    return [_row(sweep, g, baseline_of(sweep, g, groups), names) for g in groups]


def measures_of(sweep: Sweep, groups: list[Group]) -> list[str]:
    """Every number that a finished run of the sweep has, in the order of the records."""
    found = (name for group in groups for run in group.finished for name in run.measures)
    last = TO_TARGET if sweep.target else ()
    return [*dict.fromkeys(n for n in found if n not in TO_TARGET), *last]


def _row(sweep: Sweep, group: Group, base: Group | None, names: list[str]) -> dict[str, Any]:
    row = {
        **{column_of(axis): value for axis, value in group.label.items()},
        "machine": group.machine,
        "planned": len(group.runs),
        "finished": len(group.finished),
        "outcome": group.outcome,
        "seeds": [run.label.get("seed") for run in group.finished],
        "repeats": [run.label.get("repeat") for run in group.finished],
        **{name: group.fact(name) for name in ("nodes", "processes", "devices", "effective_batch")},
        **compare(group, base),
        "link_warnings": sum(link_warning(run.environment) is not None for run in group.finished),
    }
    if sweep.target:
        row["reached"] = sum(map(math.isfinite, group.values("tta_epochs")))
        row |= against_target(group, base)
    for name in names:
        row |= _statistics(name, [run.measures.get(name) for run in group.finished])
    if sweep.per_node:
        row |= per_node(group)
    return row


def _statistics(name: str, values: list[float | None]) -> dict[str, Any]:
    """The single values stand in the order of the seeds; one that is unknown keeps its place."""
    found = spread([value for value in values if value is not None])
    median = {f"{name}_median": found.median} if name in TO_TARGET else {}
    return {
        name: found.mean,
        f"{name}_sd": found.sd,
        f"{name}_n": found.n,
        f"{name}_low": found.low,
        f"{name}_high": found.high,
        **median,
        f"{name}_values": values,
    }


def per_node(group: Group) -> dict[str, list[float | None]]:
    """For each figure a list by node: means over the finished runs that know it."""
    nodes = max((len(run.per_node) for run in group.finished), default=0)
    found: dict[str, list[float | None]] = {}
    for name in ("user_s", "system_s", "accuracy", "top5_accuracy"):
        means = []
        for node in range(nodes):
            told = [r.per_node[node].get(name) for r in group.finished if node < len(r.per_node)]
            known = [value for value in told if is_number(value)]
            means.append(math.fsum(known) / len(known) if known else None)
        found[f"{name}_per_node"] = means
    return found

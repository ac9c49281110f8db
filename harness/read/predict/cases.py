"""Groups of runs on several nodes, each predicted from the runs of one machine of its kind."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from harness.core.collectives import BACKEND, MEANS, Wire
from harness.core.records.summary import epochs_until
from harness.core.settings import UserError
from harness.core.strategies import DDP, STRATEGIES
from harness.read.predict.basis import PREDICTED_OVER
from harness.read.predict.facts import (
    Overrides,
    grad_acc_of,
    is_emulated,
    setting_of,
    shape_of,
    step_s,
)
from harness.read.predict.fitting import (
    Fitted,
    all_reduces_of,
    fit_on,
    same_training,
    wire_between,
)
from harness.read.predict.lossy.messages import assumption
from harness.read.predict.model import EXPOSED, Prediction, predict
from harness.read.predict.scenario import Scenario
from harness.read.records.groups import Group, by_key
from harness.read.records.processors import by_speed, speed_text
from harness.read.records.recorded import is_number, uniform_link
from harness.read.records.runs import Run
from harness.read.records.sweeps import SweepResults


class PredictedGroup(NamedTuple):
    """A group on several nodes: what was measured, and what was predicted without it."""

    group: Group
    runs: tuple[Run, ...]  # the quiet ones, if there are any
    prediction: Prediction

    @property
    def measured_s(self) -> tuple[float, ...]:
        """The step time of each run."""
        return tuple(step_s(run, Overrides()) or 0.0 for run in self.runs)

    @property
    def mean_s(self) -> float:
        return statistics.mean(self.measured_s)

    @property
    def error(self) -> float:
        return self.prediction.step_s / self.mean_s - 1

    @property
    def baseline_error(self) -> float:
        return self.prediction.baseline_s / self.mean_s - 1


class Workload(NamedTuple):
    """Runs of one training on one kind of machine, with what distinguishes it from the others."""

    name: str
    fitted: Fitted
    cases: list[PredictedGroup]


SPEED = "processor"  # a kind has its speed
Kind = tuple[tuple[str, str], ...]  # settings that runs have in common, and their machine


def workloads_of(sweep: SweepResults) -> tuple[list[Workload], dict[str, list[str]]]:
    """The workloads that can be predicted; and reason -> groups on several nodes that cannot."""
    excluded: dict[str, list[str]] = {}
    parts: list[tuple[Kind, list[Group]]] = []
    by_kind = by_key((group for group in sweep.groups if group.finished), _kind)
    for kind, groups in by_kind.items():
        for runs in by_speed(run for group in groups for run in group.finished):
            own = {run.path for run in runs}
            of_speed = [_with_runs(group, own) for group in groups]
            speed = (SPEED, speed_text(runs))
            parts.append(((*kind, speed), [group for group in of_speed if group.runs]))
    workloads = [
        _workload(sweep, name, groups, excluded)
        for name, (_, groups) in zip(_names([kind for kind, _ in parts]), parts, strict=True)
    ]
    return [workload for workload in workloads if workload is not None], excluded


def _with_runs(group: Group, paths: Collection[str | None]) -> Group:
    """The group with its finished runs of these paths alone: of one speed of the processor."""
    return replace(group, runs=tuple(run for run in group.finished if run.path in paths))


def _kind(group: Group) -> Kind:
    settings = group.finished[0].characteristics | {"machine": group.machine_kind}
    return tuple((n, str(value)) for n, value in settings.items() if n not in PREDICTED_OVER)


def _names(kinds: list[Kind]) -> list[str]:
    """A name for each kind, of the first settings that tell kinds apart; a single kind has none."""
    labels = [dict(kind) for kind in kinds]
    names = [""] * len(kinds)
    for setting in dict.fromkeys(name for label in labels for name in label):
        values = [label.get(setting, "None") for label in labels]
        longer = [", ".join(filter(None, each)) for each in zip(names, values, strict=True)]
        if len({*longer}) > len({*names}):
            names = longer
    return names


def _workload(
    sweep: SweepResults, name: str, groups: list[Group], excluded: dict[str, list[str]]
) -> Workload | None:
    """The predictions of a workload; None if there are none. Adds to excluded: reason -> groups."""
    far = [group for group in groups if shape_of(group.finished[0]).nodes > 1]
    runs = [run for group in groups for run in group.finished]
    on = "" if len(runs) == len(sweep.finished) else f", on a processor of {speed_text(runs)}"
    try:
        fitted = fit_on(f"{sweep.name}{on}", runs, Overrides(), all_reduces_of(runs))
    except UserError as error:
        own = " (a sweep is predicted from its own runs: list it in its file, too)"
        reason = f"{error}{own if sweep.has_question else ''}"
        if far:
            excluded.setdefault(reason, []).extend(sweep.short_name_of(g) for g in far)
        return None
    cases = []
    for group in far:
        try:
            cases.append(_predicted(_without(fitted, group, groups), group))
        except UserError as error:
            excluded.setdefault(str(error), []).append(sweep.short_name_of(group))
    if any(not case.prediction.plan.wire.is_steady for case in cases):
        simulated = assumption(fitted.model.congestion)
        fitted = replace(fitted, assumed=(*fitted.assumed, simulated))
    return Workload(name, fitted, cases) if cases else None


def _without(fitted: Fitted, group: Group, groups: Sequence[Group]) -> Fitted:
    """The fit without the all-reduces that the runs of this group measured on their link."""
    others = [run for other in groups if other is not group for run in other.finished]
    return replace(fitted, model=replace(fitted.model, table=tuple(all_reduces_of(others))))


def _predicted(fitted: Fitted, group: Group) -> PredictedGroup:
    """Predict a group; UserError where it is not modelled, or not measured."""
    if None in [step_s(run, Overrides()) for run in group.finished]:
        changed = any(run.other_batches for run in group.finished)
        raise UserError("another batch ran than asked for" if changed else "no steps were timed")
    runs = tuple(group.measured("epoch_time_s"))
    plan = as_timed(scenario_of(runs), runs[0])
    return PredictedGroup(group, runs, predict(fitted.model, plan))


def measured_as(fitted: Fitted, plan: Scenario) -> list[float]:
    """The step times of runs that have measured what is predicted: of the selected ones those of
    its training and settings on this machine, the quiet ones if there are any.
    """
    alike = [
        run for run in same_training(fitted.first, fitted.selected)
        if fitted.is_timed_like(run) and grad_acc_of(run) == fitted.model.grad_acc
        and _is_of(run, plan)
    ]  # fmt: skip
    steps = (step_s(run, Overrides()) for run in Group(tuple(alike)).measured("epoch_time_s"))
    return [seconds for seconds in steps if seconds is not None]


def measured_otherwise(fitted: Fitted, plan: Scenario) -> tuple[Scenario, list[float]] | None:
    """The step times of runs that differ from what is predicted in their way of exchange, or in
    whether their nodes are emulated; with the scenario of these runs.
    """
    for emulated in (plan.emulated, not plan.emulated):
        for way in dict.fromkeys((plan.exchange, BACKEND, *MEANS)):
            other = replace(plan, emulated=emulated, exchange=way)
            if other != plan and (seconds := measured_as(fitted, other)):
                return other, seconds
    return None


def _is_of(run: Run, plan: Scenario) -> bool:
    """Whether a run has the nodes, settings and link of a scenario."""
    shape = shape_of(run)
    if shape != plan.shape or run.identity["per_gpu_batch"] != plan.batch:
        return False
    if shape.ranks == 1:
        return True
    try:
        own = scenario_of((run,), None if shape.nodes > 1 else Wire(), plan.blocks)
    except UserError:
        return False
    names = ("fragments", "overlap", *(("wire", "emulated") if shape.nodes > 1 else ()))
    same = all(getattr(own, name) == getattr(plan, name) for name in names)
    return same and own.fields == plan.fields


def scenario_of(
    runs: Sequence[Run], wire: Wire | None = None, blocks: int | None = None
) -> Scenario:
    """The scenario of these runs, over their own link or another one; fsdp gathers its model in so
    many blocks.
    """
    first = runs[0]
    settings = first.identity
    # Imported records may lack a strategy: several processes then count as DDP.
    strategy, compress = settings["strategy"] or DDP, settings["compress"] or "none"
    if strategy not in EXPOSED:
        raise UserError(f"{strategy} is not modelled")
    shards = STRATEGIES[strategy].shards
    if shards and blocks is None:
        raise UserError(
            "fsdp gathers layer by layer, and how many there are is in no record: predict and plan "
            "take --blocks"
        )
    if settings["per_gpu_batch"] is None:
        raise UserError("the batch is in no record")
    names = ("sync_every", "sync_first", "sync_scope", "fragments", "overlap")
    own = {name: setting_of(first, name) for name in names}
    return Scenario(
        shape_of(first), settings["per_gpu_batch"], wire or _wire(runs), strategy, compress,
        blocks=blocks if shards else None,
        emulated=is_emulated(first),
        exchange=settings["exchange"] or BACKEND,
        epoch_updates=_epoch_updates(first),
        updates=int(first.measures["updates"]) if "updates" in first.measures else None,
        **{name: value for name, value in own.items() if value is not None},
    )  # fmt: skip


def _epoch_updates(run: Run) -> int | None:
    """Updates of a whole epoch, also if --max_steps ended the run within its first epoch."""
    first: Mapping[str, Any] = run.epochs[0] if run.epochs else {}
    epochs = epochs_until(run.epochs, 1, run.settings) if first else None
    updates = first.get("updates")
    return round(updates / epochs) if updates and epochs else updates


def as_timed(plan: Scenario, run: Run) -> Scenario:
    """The scenario that a record's mean is of: first updates of the first epoch are not timed."""
    if plan.updates is None or not run.epochs:
        return plan
    count, timed = (run.epochs[0].get(name) for name in ("updates", "timed_steps"))
    if not is_number(count) or not is_number(timed) or not 0 < timed <= count:
        return plan
    return replace(plan, untimed=int(count - timed))


def _wire(runs: Sequence[Run]) -> Wire:
    """The requested link; where none was requested, the median of the measured ones."""
    links = [run.measured_link for run in runs]
    requested = uniform_link(links[0].get("asked"))
    if requested is None and links[0].get("asked"):
        raise UserError("links that differ between pairs of nodes are not modelled")
    wires = [wire for link in links if (wire := wire_between(link)) is not None]
    if not wires:
        raise UserError("the link between the nodes is in no record")
    return replace(
        wires[0],
        delay_s=statistics.median(wire.delay_s for wire in wires),
        bytes_per_s=statistics.median(wire.bytes_per_s for wire in wires),
    )

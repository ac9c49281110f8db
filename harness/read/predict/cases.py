"""Groups of runs on several nodes, each with what is predicted for it from runs of one machine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from harness.core.settings import UserError
from harness.core.strategies import OF_ONE_STRATEGY, STRATEGIES
from harness.read.labels import STRATEGY, strategy_text
from harness.read.predict.exchange import Wire
from harness.read.predict.fitting import (
    FREE,
    Fitted,
    Given,
    batch_or_none,
    fit_on,
    recorded,
    shape_of,
    step_s,
    wire_between,
)
from harness.read.predict.model import COMPRESSED, EXPOSED, Plan, Prediction, predict
from harness.read.records.groups import Group
from harness.read.records.runs import Run
from harness.read.records.sweeps import SweepResults

# Beside FREE, what runs may differ in of which one is predicted from the others.
PREDICTED_OVER = (*FREE, *OF_ONE_STRATEGY, "exchange", "fsdp_shard", "fsdp_offload")


NOTHING_GIVEN = Given()


Kind = tuple[tuple[str, str], ...]  # settings that runs have in common, and their machine


class Case(NamedTuple):
    """A group on several nodes: what was measured, and what was predicted without it."""

    group: Group
    measured_s: tuple[float, ...]  # a run each
    found: Prediction

    @property
    def mean_s(self) -> float:
        return statistics.mean(self.measured_s)

    @property
    def error(self) -> float:
        return self.found.step_s / self.mean_s - 1

    @property
    def baseline_error(self) -> float:
        return self.found.baseline_s / self.mean_s - 1

    @property
    def strategy(self) -> str:
        """In short: with what is compressed, and how often it exchanges."""
        first = self.group.finished[0]
        label = {name: first.identity[name] for name in ("compress", "sync_every")}
        return strategy_text({STRATEGY: strategy_of(first), **label}) or ""


class Workload(NamedTuple):
    """Runs of one training on one kind of machine, with what tells it from the others."""

    name: str
    fitted: Fitted
    cases: list[Case]


def tasks_of(sweep: SweepResults) -> tuple[list[Workload], dict[str, list[str]]]:
    """What can be predicted; and why not -> the groups on several nodes of which it cannot."""
    left: dict[str, list[str]] = {}
    found = [_task(sweep, name, kind, left) for name, kind in _named(_kinds(sweep)).items()]
    return [task for task in found if task is not None], left


def _kinds(sweep: SweepResults) -> dict[Kind, list[Group]]:
    """What runs of one kind have in common -> the groups with any that finished."""
    found: dict[Kind, list[Group]] = {}
    for group in sweep.groups:
        if group.finished:
            common = {
                n: v
                for n, v in group.finished[0].characteristics.items()
                if n not in PREDICTED_OVER
            }
            common["machine"] = group.machine_kind
            key = tuple((name, str(value)) for name, value in common.items())
            found.setdefault(key, []).append(group)
    return found


def _named(kinds: dict[Kind, list[Group]]) -> dict[str, list[Group]]:
    """By the first settings that tell them apart; one alone needs no name."""
    labels = [dict(key) for key in kinds]
    taken: list[str] = []

    def named() -> list[str]:
        return [", ".join(label.get(n, "None") for n in taken) for label in labels]

    for name in dict.fromkeys(name for label in labels for name in label):
        before = len(set(named()))
        taken.append(name)
        if len(set(named())) == before:
            taken.pop()
    return dict(zip(named(), kinds.values(), strict=True))


def _far(group: Group) -> bool:
    return shape_of(group.finished[0]).nodes > 1


def _task(
    sweep: SweepResults, name: str, kind: list[Group], left: dict[str, list[str]]
) -> Workload | None:
    """None where nothing of it is predicted; left: why not -> of which groups."""
    far = [group for group in kind if _far(group)]
    runs = [run for group in kind for run in group.finished]
    try:
        fitted = fit_on(sweep.name, runs, NOTHING_GIVEN, recorded(runs))
    except UserError as error:
        if far:
            left.setdefault(str(error), []).extend(sweep.short_name_of(g) for g in far)
        return None
    cases = []
    for group in far:
        try:
            cases.append(_case(fitted, group))
        except UserError as error:
            left.setdefault(str(error), []).append(sweep.short_name_of(group))
    return Workload(name, fitted, cases) if cases else None


def _case(fitted: Fitted, group: Group) -> Case:
    """UserError where it is not modelled, or not measured."""
    steps = [step for run in group.finished if (step := step_s(run, NOTHING_GIVEN)) is not None]
    if len(steps) < len(group.finished):
        raise UserError("no steps were timed")
    return Case(group, tuple(steps), predict(fitted.model, _plan(group.finished)))


def strategy_of(run: Run) -> str:
    """Several processes are DDP's where nothing else is said."""
    return run.identity["strategy"] or "ddp"


def _plan(runs: Sequence[Run]) -> Plan:
    first = runs[0]
    settings = first.identity
    strategy, compress = strategy_of(first), settings["compress"] or "none"
    if strategy not in EXPOSED:
        raise UserError(f"{strategy} is not modelled")
    if compress not in COMPRESSED[strategy]:
        raise UserError(f"{strategy} with {compress} is not modelled")
    if strategy == "fsdp":
        raise UserError("fsdp gathers layer by layer, and how many there are is in no record")
    if settings["exchange"] == "direct":
        raise UserError("--exchange direct is not modelled")
    batch = batch_or_none(first)
    if batch is None:
        raise UserError("the batch is in no record")
    own = {n: settings[n] for n in ("sync_every", "sync_scope", "fragments", "overlap")}
    own = {n: STRATEGIES[strategy].own.get(n) if v is None else v for n, v in own.items()}
    return Plan(
        shape_of(first), batch, _wire(runs), strategy, compress,
        emulated=(first.environment.get("launch") or {}).get("launcher") == "netns",
        **{name: value for name, value in own.items() if value is not None},
    )  # fmt: skip


def _wire(runs: Sequence[Run]) -> Wire:
    """Of the link that was asked for; where none was, the median of what runs measured."""
    links = [run.environment.get("link") or {} for run in runs]
    asked = links[0].get("asked")
    if isinstance(asked, dict) and (asked.get("loss") or asked.get("jitter_ms")):
        raise UserError("loss and jitter are not modelled")
    if asked and not isinstance(asked, dict):
        raise UserError("links that differ between pairs of nodes are not modelled")
    wires = [wire for link in links if (wire := wire_between(link)) is not None]
    if not wires:
        raise UserError("the link between the nodes is in no record")
    delays, rates = zip(*((wire.delay_s, wire.bytes_per_s) for wire in wires), strict=True)
    return Wire(statistics.median(delays), statistics.median(rates))

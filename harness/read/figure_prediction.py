"""Step times as predicted from runs of one machine, against what was measured on several nodes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from harness.read.drawing import (
    FAINT,
    MOST_PANELS,
    Drawn,
    NothingToDraw,
    Style,
    listed,
    panels,
    styles_of,
)
from harness.read.figure_epochs import failed_runs, run_words
from harness.read.groups import Group, kind_of_machine
from harness.read.lines import name_of, short_name
from harness.read.measured import Measured
from harness.read.naming import strategy_text
from harness.read.prediction.exchange import Wire
from harness.read.prediction.fitting import FREE, Fitted, fit_on
from harness.read.prediction.model import COMPRESSED, EXPOSED, Plan, Prediction, predict
from harness.read.prediction.told import (
    Given,
    batch_or_none,
    recorded,
    shape_of,
    step_s,
    wire_between,
)
from harness.read.sides import Record, record_of
from harness.read.statistics import spread
from harness.settings import UserError
from harness.strategies import OF_ONE_STRATEGY, STRATEGIES

NO_NODES = (
    "no finished run is on several nodes, so there is nothing to predict: "
    "python -m harness sweep experiments/prediction.yaml --tiny --launcher netns makes some"
)
# Beside FREE, what runs may differ in of which one is predicted from the others.
PREDICTED_OVER = (*FREE, *OF_ONE_STRATEGY, "exchange", "fsdp_shard", "fsdp_offload")
NEAR = 0.1  # the band around the diagonal
NOTHING_GIVEN = Given()


class Runs(NamedTuple):
    """The finished runs of a group."""

    group: Group
    records: list[Record]


class Case(NamedTuple):
    """A group on several nodes: what was measured, and what was predicted without it."""

    runs: Runs
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
        return strategy_text(self.runs.records[0].settings) or "ddp"


class Task(NamedTuple):
    """Runs of one training on one kind of machine, with what tells it from the others."""

    name: str
    fitted: Fitted
    cases: list[Case]


def prediction(measured: Measured) -> Drawn:
    """Each run a point, means with their intervals; on the diagonal a prediction is right."""
    kinds = _kinds(measured)
    if not any(_far(runs) for kind in kinds.values() for runs in kind):
        raise NothingToDraw(NO_NODES)
    left: dict[str, list[str]] = {}
    tasks = [
        task for name, kind in _named(kinds).items() if (task := _task(measured, name, kind, left))
    ]
    not_predicted = [f"{reason} ({listed(names, ', ')})" for reason, names in left.items()]
    if not tasks:
        raise NothingToDraw("; ".join(not_predicted))
    notes = [f"not predicted: {reason}" for reason in not_predicted]
    if len(tasks) > MOST_PANELS:
        notes.append(f"{len(tasks) - MOST_PANELS} more panels are not drawn")
    tasks = tasks[:MOST_PANELS]
    figure, axes = panels(len(tasks), 4.4 if len(tasks) == 1 else 3.4)
    drawn = Drawn(figure, "")
    styles = styles_of(case.strategy for task in tasks for case in task.cases)
    for place, task in zip(axes, tasks, strict=True):
        for case in task.cases:
            _mark(drawn, place, measured, case, styles[case.strategy])
        _dress(place, task)
    _legend(figure, styles)
    cases = [case for task in tasks for case in task.cases]
    drawn.notes = [*map(_fitted_on, tasks), *_failed(measured, kinds), *notes]
    said = listed(f"{name_of(measured, case.runs.group)} {_numbers(case)}" for case in cases)
    drawn.alt = f"Predicted step time against measured. {_errors(cases)}. {said}."
    return drawn


# ---- which runs ----


def _kinds(measured: Measured) -> dict[tuple[tuple[str, str], ...], list[Runs]]:
    """What runs of one kind have in common -> the groups with any that finished."""
    found: dict[tuple[tuple[str, str], ...], list[Runs]] = {}
    for group in measured.groups:
        records = [record_of(measured.folder(run), run.label, None) for run in group.finished]
        if records:
            common = {n: v for n, v in records[0].settings.items() if n not in PREDICTED_OVER}
            common["machine"] = kind_of_machine(group)
            key = tuple((name, str(value)) for name, value in common.items())
            found.setdefault(key, []).append(Runs(group, records))
    return found


def _named(kinds: dict[tuple[tuple[str, str], ...], list[Runs]]) -> dict[str, list[Runs]]:
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


def _far(runs: Runs) -> bool:
    return shape_of(runs.records[0]).nodes > 1


def _failed(measured: Measured, kinds: dict[Any, list[Runs]]) -> Iterable[str]:
    lost = [f"{short_name(measured, g)} ({', '.join(f)})" for g in measured.groups
            if (f := failed_runs(g))]  # fmt: skip
    if lost:
        yield f"failed runs have no place here: {listed(lost)}"


# ---- what is predicted ----


def _task(
    measured: Measured, name: str, kind: list[Runs], left: dict[str, list[str]]
) -> Task | None:
    """None where nothing of it is predicted; left: why not -> of which groups."""
    far = [runs for runs in kind if _far(runs)]
    records = [record for runs in kind for record in runs.records]
    try:
        fitted = fit_on(measured.sweep.name, records, NOTHING_GIVEN, recorded(records))
    except UserError as error:
        if far:
            left.setdefault(str(error), []).extend(short_name(measured, r.group) for r in far)
        return None
    cases = []
    for runs in far:
        try:
            cases.append(_case(fitted, runs))
        except UserError as error:
            left.setdefault(str(error), []).append(short_name(measured, runs.group))
    return Task(name, fitted, cases) if cases else None


def _case(fitted: Fitted, runs: Runs) -> Case:
    """UserError where it is not modelled, or not measured."""
    steps = [step for r in runs.records if (step := step_s(r, NOTHING_GIVEN)) is not None]
    if len(steps) < len(runs.records):
        raise UserError("no steps were timed")
    return Case(runs, tuple(steps), predict(fitted.model, _plan(runs.records)))


def _plan(records: Sequence[Record]) -> Plan:
    first = records[0]
    settings = first.settings
    strategy, compress = settings["strategy"] or "ddp", settings["compress"] or "none"
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
        shape_of(first), batch, _wire(records), strategy, compress,
        emulated=(first.run.environment.get("launch") or {}).get("launcher") == "netns",
        **{name: value for name, value in own.items() if value is not None},
    )  # fmt: skip


def _wire(records: Sequence[Record]) -> Wire:
    """Of the link that was asked for; where none was, the median of what runs measured."""
    links = [record.run.environment.get("link") or {} for record in records]
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


# ---- drawing ----


def _mark(drawn: Drawn, axes: Axes, measured: Measured, case: Case, style: Style) -> None:
    """Runs at what they measured, all as high as what was predicted for them."""
    found, name = case.found, name_of(measured, case.runs.group)
    predicted = 1e3 * found.step_s
    steps = [1e3 * each for each in case.measured_s]
    artist = axes.scatter(steps, [predicted] * len(steps), s=12, color=style.colour, alpha=0.4,
                          linewidths=0, zorder=3)  # fmt: skip
    drawn.tip(artist, [
        f"{name}, {run_words(record.run)}: {step:,.4g} ms measured, {predicted:,.4g} ms predicted"
        for record, step in zip(case.runs.records, steps, strict=True)
    ])  # fmt: skip
    mean = spread(steps)
    axes.plot([1e3 * case.mean_s], [1e3 * found.baseline_s], color=FAINT, marker="o", alpha=0.7,
              markerfacecolor="none", markersize=5, linestyle="", zorder=2)  # fmt: skip
    if mean.low is not None and mean.high is not None:
        axes.plot([mean.low, mean.high], [predicted] * 2, color=style.colour, linewidth=1.2)
    if found.low_s is not None and found.high_s is not None:
        bar = [1e3 * found.low_s, 1e3 * found.high_s]
        axes.plot([1e3 * case.mean_s] * 2, bar, color=style.colour, linewidth=1.2)
    axes.plot([1e3 * case.mean_s], [predicted], color=style.colour, marker=style.marker,
              markersize=6, linestyle="", zorder=4)  # fmt: skip


def _dress(axes: Axes, task: Task) -> None:
    """Both axes alike, from the smallest of all marks to the largest; intervals may be cut."""
    marks = [s for c in task.cases for s in (*c.measured_s, c.found.step_s, c.found.baseline_s)]
    low, high = 1e3 * min(marks) / 1.15, 1e3 * max(marks) * 1.15
    ends = [low, high]
    axes.plot(ends, ends, color=FAINT, linestyle="--", linewidth=1.2, zorder=1)
    axes.fill_between(ends, [(1 - NEAR) * e for e in ends], [(1 + NEAR) * e for e in ends],
                      color=FAINT, alpha=0.15, linewidth=0, zorder=0)  # fmt: skip
    if high > 4 * low:
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
            axis.set_minor_formatter(NullFormatter())
        axes.tick_params(which="minor", length=0)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_title(task.name, fontsize=10)
    axes.set_xlabel("measured step time (ms)", fontsize=9)
    axes.set_ylabel("predicted step time (ms)", fontsize=9)


def _legend(figure: Figure, styles: dict[str, Style]) -> None:
    marks: list[Any] = [
        Line2D([], [], color=s.colour, marker=s.marker, linestyle="", markersize=6, label=name)
        for name, s in styles.items()
    ]
    marks += [
        Line2D([], [], color=FAINT, marker="o", markerfacecolor="none", linestyle="", markersize=5,
               label="textbook's alpha-beta"),
        Line2D([], [], color=FAINT, linestyle="--", linewidth=1.2, label="as measured"),
        Patch(color=FAINT, alpha=0.15, linewidth=0, label=f"within {NEAR:.0%}"),
    ]  # fmt: skip
    figure.legend(handles=marks, loc="outside upper center", ncols=5, frameon=False, fontsize=9)


# ---- words ----


def _errors(cases: Sequence[Case]) -> str:
    ours = [abs(case.error) for case in cases]
    textbook = [abs(case.baseline_error) for case in cases]
    groups = f"{len(cases)} group{'s' if len(cases) > 1 else ''} of runs on several nodes"
    return (
        f"{groups}: off by {statistics.median(ours):.1%} in the median, by {max(ours):.1%} at "
        f"most; the textbook's alpha-beta by {statistics.median(textbook):.1%} and "
        f"{max(textbook):.1%}"
    )


def _numbers(case: Case) -> str:
    predicted, mean = 1e3 * case.found.step_s, 1e3 * case.mean_s
    return f"{mean:,.4g} ms measured, {predicted:,.4g} ms predicted ({case.error:+.1%})"


def _fitted_on(task: Task) -> str:
    runs = f"{task.fitted.runs} run{'s' if task.fitted.runs > 1 else ''} on one machine"
    assumed = "".join(f"; assumed: {each}" for each in task.fitted.assumed)
    return (
        f"{task.name}{': ' if task.name else ''}{_errors(task.cases)}. Predicted from {runs} and "
        f"from all-reduces measured over links, from no step of what is predicted{assumed}"
    )

"""Step times as predicted from runs of one machine, against what was measured on several nodes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

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
from harness.read.figures.epochs import failed_runs, run_words
from harness.read.predict.cases import Case, Task, tasks_of
from harness.read.records.sweeps import SweepResults
from harness.read.statistics import spread

NO_NODES = (
    "no finished run is on several nodes, so there is nothing to predict: "
    "python -m harness sweep experiments/prediction.yaml --tiny --launcher netns makes some"
)


MOST_NAMED = 4


NEAR = 0.1  # the band around the diagonal


def prediction(sweep: SweepResults) -> Drawn:
    """Each run a point, means with their intervals; on the diagonal a prediction is right."""
    tasks, left = tasks_of(sweep)
    if not tasks and not left:
        raise NothingToDraw(NO_NODES)
    not_predicted = [f"{reason} ({_short(names)})" for reason, names in left.items()]
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
            _mark(drawn, place, sweep, case, styles[case.strategy])
        _dress(place, task)
    _legend(figure, styles)
    cases = [case for task in tasks for case in task.cases]
    lost = [f"{sweep.short_name_of(g)} ({', '.join(f)})" for g in sweep.groups
            if (f := failed_runs(g))]  # fmt: skip
    if lost:
        notes.append(f"failed runs have no place here: {listed(lost)}")
    drawn.notes = [*map(_fitted_on, tasks), *notes]
    said = listed(f"{sweep.short_name_of(case.group)} {_numbers(case)}" for case in cases)
    drawn.alt = f"Predicted step time against measured. {_errors(cases)}. {said}."
    return drawn


def _mark(drawn: Drawn, axes: Axes, sweep: SweepResults, case: Case, style: Style) -> None:
    """Runs at what they measured, all as high as what was predicted for them."""
    found, name = case.found, sweep.name_of(case.group)
    predicted = 1e3 * found.step_s
    steps = [1e3 * each for each in case.measured_s]
    artist = axes.scatter(steps, [predicted] * len(steps), s=12, color=style.colour, alpha=0.4,
                          linewidths=0, zorder=3)  # fmt: skip
    drawn.tip(artist, [
        f"{name}, {run_words(run)}: {step:,.4g} ms measured, {predicted:,.4g} ms predicted"
        for run, step in zip(case.group.finished, steps, strict=True)
    ])  # fmt: skip
    mean = spread(steps)
    axes.plot([1e3 * case.mean_s], [1e3 * found.baseline_s], color=FAINT, marker="o", alpha=0.7,
              markerfacecolor="none", markersize=5, linestyle="", zorder=2)  # fmt: skip
    if mean.low is not None and mean.high is not None and mean.low < mean.high:
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
    longest = max(len(mark.get_label()) for mark in marks)
    columns = max(1, min(len(marks), int(115 / (longest + 8))))
    figure.legend(
        handles=marks, loc="outside upper center", ncols=columns, frameon=False, fontsize=9
    )


def _errors(cases: Sequence[Case]) -> str:
    ours = [abs(case.error) for case in cases]
    textbook = [abs(case.baseline_error) for case in cases]
    groups = f"{len(cases)} group{'s' if len(cases) > 1 else ''} of runs on several nodes"
    return (
        f"{groups}: off by {statistics.median(ours):.1%} in the median, by {max(ours):.1%} at "
        f"most; the textbook's alpha-beta by {statistics.median(textbook):.1%} and "
        f"{max(textbook):.1%}"
    )


def _short(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= MOST_NAMED else f"{len(names)} groups of runs"


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

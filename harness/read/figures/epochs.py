"""A measure of quality against the epoch: a panel a set-up, a line for each learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from harness.core.records import FAILURES
from harness.read.drawing import (
    FAILED,
    MOST_PANELS,
    Drawn,
    NothingToDraw,
    Style,
    beside,
    fitted,
    legend,
    listed,
    numbers_of,
    panels,
    styles_of,
)
from harness.read.figures.panels import PanelOf, panels_and_lines
from harness.read.labels import heading_of
from harness.read.records.groups import Group
from harness.read.records.loading import is_number
from harness.read.records.runs import Run
from harness.read.records.sweeps import SweepResults
from harness.read.statistics import spread

Curve = dict[float, float]  # epoch -> value


def accuracy_by_epoch(sweep: SweepResults) -> Drawn:
    return by_epoch(sweep, ("accuracy",))


def loss_by_epoch(sweep: SweepResults) -> Drawn:
    """Of training (with dropout, weights moving) above that of the test set."""
    return by_epoch(sweep, ("train_loss", "eval_loss"))


def by_epoch(sweep: SweepResults, metrics: Sequence[str]) -> Drawn:
    """A row of panels a measure, a panel a set-up; a run that failed ends with a cross."""
    groups = [g for g in sweep.groups if any(_curve(r, m) for r in g.runs for m in metrics)]
    if not groups:
        raise NothingToDraw(f"no epoch of any run has {' or '.join(metrics)}")
    if all(len(run.epochs) < 2 for group in groups for run in group.runs):
        raise NothingToDraw("one epoch makes no line")
    arranged, notes = panels_and_lines(sweep, groups)
    room = MOST_PANELS // len(metrics)
    if len(arranged) > room:
        notes.append(f"{len(arranged) - room} more panels are not drawn")
        arranged = arranged[:room]
    styles = styles_of(line.name for panel in arranged for line in panel.lines)
    per_row = beside(len(arranged))
    blocks = [arranged[n : n + per_row] for n in range(0, len(arranged), per_row)]
    count = len(blocks) * len(metrics) * per_row if len(arranged) > 1 else len(metrics)
    figure, axes = panels(count, 2.5, per_row)
    drawn = Drawn(figure, "", notes)
    said = []
    for b, block in enumerate(blocks):
        for m, metric in enumerate(metrics):
            for p in range(per_row):
                place = axes[(b * len(metrics) + m) * per_row + p]
                if p >= len(block):
                    place.set_visible(False)
                    continue
                said.append(_panel(drawn, place, block[p], metric, styles))
                place.set_title(block[p].title if m == 0 else "", fontsize=10)
                place.set_xlabel("epoch" if m == len(metrics) - 1 else "", fontsize=9)
                place.set_ylabel(_words(metric) if p == 0 else "", fontsize=9)
    legend(figure, styles)
    drawn.alt = f"{' and '.join(map(_words, metrics))} by epoch. " + listed(filter(None, said), " ")
    return drawn


def _words(metric: str) -> str:
    return {"train_loss": "training loss", "eval_loss": "test loss"}.get(metric, heading_of(metric))


def _curve(run: Run, metric: str) -> Curve:
    rows = (row for row in run.epochs if is_number(row.get("epoch")) and is_number(row.get(metric)))
    return {float(row["epoch"]): float(row[metric]) for row in rows}


def _panel(drawn: Drawn, axes: Axes, panel: PanelOf, metric: str, styles: dict[str, Style]) -> str:
    seen: list[float] = []
    bars: list[float] = []
    last = []
    for line in panel.lines:
        for group in line.groups:
            curves = [(run, c) for run in group.runs if (c := _curve(run, metric))]
            if not curves:
                continue
            seen += [value for _, curve in curves for value in curve.values()]
            bars += _mean(axes, [c for _, c in curves], styles[line.name])
            _points(drawn, axes, curves, line.name, styles[line.name])
            ends = [curve[max(curve)] for _, curve in curves]
            last.append(f"{line.name or 'all runs'} {numbers_of(ends)}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    if not seen:
        return ""
    fitted(axes, seen, bars, share=max(seen) <= 1 and not metric.endswith("loss"))
    return f"{panel.title}, {_words(metric)} at the end: {listed(last)}."


def _mean(axes: Axes, curves: list[Curve], style: Style) -> list[float]:
    """The mean over the runs that have an epoch, and its 95 % interval as a band."""
    epochs = sorted({epoch for curve in curves for epoch in curve})
    spreads = [spread([curve[e] for curve in curves if e in curve]) for e in epochs]
    means = [s.mean if s.mean is not None else math.nan for s in spreads]
    lows = [s.low if s.low is not None else m for s, m in zip(spreads, means, strict=True)]
    highs = [s.high if s.high is not None else m for s, m in zip(spreads, means, strict=True)]
    axes.plot(epochs, means, color=style.colour, marker=style.marker, markersize=4,
              linestyle=style.dash, linewidth=1.4, zorder=3)  # fmt: skip
    if lows != means:
        axes.fill_between(epochs, lows, highs, color=style.colour, alpha=0.12, linewidth=0)
    return [*lows, *highs]


def _points(
    drawn: Drawn, axes: Axes, curves: list[tuple[Run, Curve]], name: str, style: Style
) -> None:
    points = [(run, e, v) for run, curve in curves for e, v in curve.items()]
    if len(curves) > 1:
        artist = axes.scatter([e for _, e, _ in points], [v for _, _, v in points], s=9,
                              color=style.colour, alpha=0.4, linewidths=0)  # fmt: skip
    else:
        # One run: its points are the line's markers, here only to be asked.
        artist = axes.scatter([e for _, e, _ in points], [v for _, _, v in points], s=25,
                              color=style.colour, linewidths=0)  # fmt: skip
    drawn.tip(artist, [f"{name}, {run_words(run)}, epoch {e:g}: {v:.4g}" for run, e, v in points])
    for run, curve in curves:
        if run.state in FAILURES:
            end = max(curve)
            axes.plot([end], [curve[end]], marker="X", color=FAILED, markersize=8, zorder=5)
            axes.annotate(run.state, (end, curve[end]), xytext=(5, 5), fontsize=8, color=FAILED,
                          textcoords="offset points")  # fmt: skip


def run_words(run: Run) -> str:
    """What tells a run from the others of its group."""
    seed, repeat = run.repetition
    words = [f"seed {seed}"] if seed is not None else []
    words += [f"repeat {repeat}"] if repeat not in (None, 1) else []
    return ", ".join(words) or "one run"


def failed_runs(group: Group) -> list[str]:
    """What became of the runs of a group that have no numbers of their own, counted."""
    states = [run.state for run in group.runs if run.state in FAILURES]
    counts = {state: states.count(state) for state in states}
    return [state if n == 1 else f"{n} x {state}" for state, n in counts.items()]

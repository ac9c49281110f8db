"""A measure of quality against the epoch: a panel a set-up, a line for each learning rate."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from harness.core.records import FAILURES
from harness.read import drawing as kit
from harness.read.drawing import Drawn, NothingToDraw, Style
from harness.read.figures.panels import Panel, Styles, arrange, run_name
from harness.read.labels import heading_of
from harness.read.records.loading import is_number
from harness.read.records.runs import Run
from harness.read.records.sweeps import SweepResults
from harness.read.statistics import spread

TITLES = {"train_loss": "training loss", "eval_loss": "test loss"}
Curve = dict[float, float]  # epoch -> value


def accuracy_by_epoch(sweep: SweepResults, styles: Styles) -> Drawn:
    return _by_epoch(sweep, styles, ("accuracy",))


def loss_by_epoch(sweep: SweepResults, styles: Styles) -> Drawn:
    """Of training (with dropout, weights moving) above that of the test set."""
    return _by_epoch(sweep, styles, ("train_loss", "eval_loss"))


def _by_epoch(sweep: SweepResults, styles: Styles, metrics: Sequence[str]) -> Drawn:
    """A row of panels per measure; a failed run ends with a cross."""
    groups = [g for g in sweep.groups if any(_curve(r, m) for r in g.runs for m in metrics)]
    if not groups:
        raise NothingToDraw(f"no epoch of any run has {' or '.join(metrics)}")
    if all(len(run.epochs) < 2 for group in groups for run in group.runs):
        raise NothingToDraw("one epoch makes no line")
    arranged, notes = arrange(sweep, groups, most=kit.MOST_PANELS // len(metrics))
    of_lines = styles.of_lines(sweep, arranged)
    wide = kit.beside(len(arranged))
    blocks = [arranged[n : n + wide] for n in range(0, len(arranged), wide)]
    rows = [(metric, block) for block in blocks for metric in metrics]
    figure, axes = kit.panels(len(rows) * wide, 2.4, wide)
    drawn, texts = Drawn(figure, notes=notes), []
    for y, (metric, block) in enumerate(rows):
        for x, place in enumerate(axes[y * wide : (y + 1) * wide]):
            if x >= len(block):
                place.set_visible(False)
                continue
            texts.append(_draw(drawn, place, block[x], metric, of_lines))
            kit.describe(
                place,
                block[x].title if metric == metrics[0] else "",
                "epoch" if metric == metrics[-1] else "",
                _title(metric) if x == 0 else "",
            )
    kit.legend(figure, of_lines)
    drawn.alt = f"{' and '.join(map(_title, metrics))} by epoch. " + kit.listed(
        filter(None, texts), " "
    )
    return drawn


def _title(metric: str) -> str:
    return TITLES.get(metric, heading_of(metric))


def _curve(run: Run, metric: str) -> Curve:
    rows = (row for row in run.epochs if is_number(row.get("epoch")) and is_number(row.get(metric)))
    return {float(row["epoch"]): float(row[metric]) for row in rows}


def _draw(drawn: Drawn, axes: Axes, panel: Panel, metric: str, styles: dict[str, Style]) -> str:
    values: list[float] = []
    bars: list[float] = []
    last = []
    for name, groups in panel.lines:
        for group in groups:
            curves = [(run, c) for run in group.runs if (c := _curve(run, metric))]
            if not curves:
                continue
            values += [value for _, curve in curves for value in curve.values()]
            bars += _mean(axes, [c for _, c in curves], styles[name])
            _runs(drawn, axes, curves, name, styles[name])
            ends = [curve[max(curve)] for _, curve in curves]
            last.append(f"{name or 'all runs'} {kit.numbers_of(ends)}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    if not values:
        return ""
    kit.fitted(axes, values, bars, share=max(values) <= 1 and not metric.endswith("loss"))
    return f"{panel.title}, {_title(metric)} at the end: {kit.listed(last)}."


def _mean(axes: Axes, curves: list[Curve], style: Style) -> list[float]:
    """The mean over the runs that have an epoch, and its 95 % interval as a band."""
    epochs = sorted({epoch for curve in curves for epoch in curve})
    spreads = [spread([curve[e] for curve in curves if e in curve]) for e in epochs]
    means = [float(s.mean or 0.0) for s in spreads]
    lows = [mean if s.low is None else s.low for s, mean in zip(spreads, means, strict=True)]
    highs = [mean if s.high is None else s.high for s, mean in zip(spreads, means, strict=True)]
    kit.line(axes, epochs, means, style, marker=style.marker, markersize=4, zorder=3)
    if lows != means:
        axes.fill_between(epochs, lows, highs, color=style.colour, alpha=0.12, linewidth=0)
    return [*lows, *highs]


def _runs(
    drawn: Drawn, axes: Axes, curves: Sequence[tuple[Run, Curve]], name: str, style: Style
) -> None:
    points = [(run, epoch, v) for run, curve in curves for epoch, v in curve.items()]
    tips = [f"{name}, {run_name(run)}, epoch {epoch:g}: {v:.4g}" for run, epoch, v in points]
    kit.run_points(drawn, axes, [e for _, e, _ in points], [v for _, _, v in points], style, tips)
    for run, curve in curves:
        if run.state in FAILURES:
            end = max(curve)
            axes.plot([end], [curve[end]], marker="X", color=kit.FAILED, markersize=8, zorder=5)
            kit.small_text(
                axes, run.state, (end, curve[end]), (5, 5), color=kit.FAILED, va="bottom"
            )

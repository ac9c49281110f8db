"""Quality against the epoch."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from harness.core.records import FAILURES, FINISHED
from harness.read import drawing as kit
from harness.read.drawing import Drawn, NothingToDraw, Style
from harness.read.figures.panels import (
    Panel,
    Styles,
    arrange,
    name_lines,
    rows_of_panels,
    run_name,
    same_scale,
    without_place,
)
from harness.read.labels import heading_of
from harness.read.records.groups import repeats_of
from harness.read.records.recorded import is_number
from harness.read.records.runs import Run, own_metrics_of
from harness.read.records.sweeps import SweepResults
from harness.read.scales import fitted
from harness.read.statistics import spread

TITLES = {"train_loss": "training loss", "eval_loss": "test loss"}
Curve = dict[float, float]  # epoch -> value


def accuracy_by_epoch(sweep: SweepResults, styles: Styles) -> Drawn:
    return _by_epoch(sweep, styles, ("accuracy",))


def loss_by_epoch(sweep: SweepResults, styles: Styles) -> Drawn:
    """The loss of training (with dropout, weights moving) above that of the test set."""
    return _by_epoch(sweep, styles, ("train_loss", "eval_loss"))


def own_metrics_by_epoch(sweep: SweepResults, styles: Styles) -> Drawn:
    """The metrics of the scripts' own compute_metrics, by epoch."""
    if not (own := own_metrics_of(sweep.runs)):
        raise NothingToDraw("no run has metrics of its script's own")
    return _by_epoch(sweep, styles, own[: kit.MOST_PANELS])


def _by_epoch(sweep: SweepResults, styles: Styles, metrics: Sequence[str]) -> Drawn:
    """A row of panels per measure; a failed run ends with a cross."""
    groups = [g for g in sweep.groups if any(_curve(r, m) for r in g.runs for m in metrics)]
    if not groups:
        raise NothingToDraw(f"no epoch of any run has {' or '.join(metrics)}")
    if all(len(run.epochs) < 2 for group in groups for run in group.runs):
        raise NothingToDraw("one epoch makes no line")
    arranged, notes = arrange(sweep, groups, most=kit.MOST_PANELS // len(metrics))
    of_lines = styles.of_lines(sweep, arranged)
    figure, placed = rows_of_panels(
        arranged, {metric: _title(metric) for metric in metrics}, "epoch", 2.4
    )
    notes += without_place(sweep, groups)
    drawn = Drawn(figure, notes=notes)
    texts = [_draw(drawn, axes, panel, metric, of_lines) for axes, panel, metric in placed]
    for metric in metrics:
        same_scale([axes for axes, _, of in placed if of == metric])
    name_lines(figure, [axes for axes, *_ in placed], of_lines)
    what = " and ".join(map(_title, metrics))
    drawn.alt = f"{what[0].upper()}{what[1:]} by epoch. {kit.listed(filter(None, texts), ' ')}"
    return drawn


def _title(metric: str) -> str:
    return TITLES.get(metric, heading_of(metric))


def _curve(run: Run, metric: str) -> Curve:
    rows = [(row.get("epoch"), row.get(metric)) for row in run.epochs]
    return {float(epoch): float(v) for epoch, v in rows if is_number(epoch) and is_number(v)}


def _draw(drawn: Drawn, axes: Axes, panel: Panel, metric: str, styles: dict[str, Style]) -> str:
    values: list[float] = []
    bars: list[float] = []
    last = []
    shown = [v for _, groups in panel.lines for g in groups for r in g.runs
             for v in _curve(r, metric).values()]  # fmt: skip
    is_fraction = bool(shown) and 0 <= min(shown) <= max(shown) <= 1 and not metric.endswith("loss")
    for name, groups in panel.lines:
        for group in groups:
            curves = [(run, c) for run in group.runs if (c := _curve(run, metric))]
            if not curves:
                continue
            values += [value for _, curve in curves for value in curve.values()]
            # A run that failed or goes on has points, but no last value that counts.
            whole = [(run, curve) for run, curve in curves if run.state == FINISHED]
            bars += _mean(axes, whole or curves, metric, styles[name], is_fraction, name)
            _runs(drawn, axes, curves, name, styles[name])
            at_end = repeats_of(metric, ((run, curve[max(curve)]) for run, curve in whole))
            ends = [*at_end.values()]
            numbers = kit.numbers_of(ends) if ends else "not finished"
            last.append(f"{name or 'all runs'} {numbers}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    if not values:
        return ""
    fitted(axes, values, bars, is_fraction)
    of = ", ".join(filter(None, (panel.title, _title(metric))))
    return f"{of} at the end: {kit.listed(last)}."


def _mean(
    axes: Axes, curves: Sequence[tuple[Run, Curve]], metric: str, style: Style, is_fraction: bool,
    name: str,
) -> list[float]:  # fmt: skip
    """Draw the mean over the runs that have an epoch, and its 95 % interval as a band.

    is_fraction: clip the interval to 0..1, as no mean of fractions lies outside.
    """
    epochs = sorted({epoch for _, curve in curves for epoch in curve})
    at = ([(run, curve[e]) for run, curve in curves if e in curve] for e in epochs)
    spreads = [spread([*repeats_of(metric, each).values()]) for each in at]
    means = [float(s.mean or 0.0) for s in spreads]
    lows, highs = map(list, zip(*(s.ends for s in spreads), strict=True))
    if is_fraction:
        lows, highs = [max(low, 0.0) for low in lows], [min(high, 1.0) for high in highs]
    kit.line(axes, epochs, means, style, label=name, marker=style.marker, markersize=4, zorder=3)
    if lows != means:
        kit.band(axes, epochs, lows, highs, style, 0.12)
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
            kit.marks(axes, [end], [curve[end]], kit.FAILURE, markersize=8, zorder=5)
            kit.small_text(
                axes, run.state, (end, curve[end]), (5, 5), color=kit.FAILED, va="bottom"
            )

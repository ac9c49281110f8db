"""Predictions from one machine against measurements of several nodes; and over more of them, by
python -m harness predict --plot.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from harness.read import drawing as kit
from harness.read.drawing import Drawn, NothingToDraw, Style
from harness.read.figures.panels import (
    Styles,
    axis_text,
    left_out,
    run_name,
    set_title,
    without_place,
)
from harness.read.files import save
from harness.read.labels import STRATEGY, counted
from harness.read.predict.cases import PredictedGroup, Workload, workloads_of
from harness.read.predict.command import print_prediction
from harness.read.predict.model import Prediction, below_half_efficiency
from harness.read.records.sweeps import SweepResults
from harness.read.scales import doubling_axis, log_axis

NO_NODES = (
    "no finished run is on several nodes, so there is nothing to predict: "
    "python -m harness sweep experiments/prediction.yaml --tiny --launcher netns makes some"
)
MOST_NAMED = 4
NEAR = 0.1  # the band around the diagonal


def prediction(sweep: SweepResults, styles: Styles) -> Drawn:
    """Runs as points and means with their intervals; a prediction on the diagonal is exact."""
    workloads, excluded = workloads_of(sweep)
    if not workloads and not excluded:
        raise NothingToDraw(NO_NODES)
    not_predicted = [f"{reason} ({_short(names)})" for reason, names in excluded.items()]
    if not workloads:
        raise NothingToDraw("; ".join(not_predicted))
    notes = [f"not predicted: {reason}" for reason in not_predicted]
    notes += left_out(len(workloads) - kit.MOST_PANELS, "panels")
    workloads = workloads[: kit.MOST_PANELS]
    cases = [case for workload in workloads for case in workload.cases]
    figure, axes = kit.panels(len(workloads), 4.4 if len(workloads) == 1 else 3.4)
    drawn = Drawn(figure)
    of_strategies = styles.of_axis(STRATEGY, [axis_text(case.group, STRATEGY) for case in cases])
    for place, workload in zip(axes, workloads, strict=True):
        for case in workload.cases:
            style = of_strategies[axis_text(case.group, STRATEGY)]
            _mark(drawn, place, sweep, case, style)
        _diagonal(place, workload)
        kit.mark_cut_intervals(drawn, place)
    kit.legend(figure, of_strategies, [
        kit.legend_mark(kit.HOLLOW, "textbook's alpha-beta", markerfacecolor="none", linestyle=""),
        kit.legend_mark(kit.REFERENCE, "as measured", linewidth=1.2),
        Patch(color=kit.FAINT, alpha=0.15, linewidth=0, label=f"within {NEAR:.0%}"),
    ])  # fmt: skip
    set_title(figure, f"{_errors(cases)}. Predicted by this version, after the runs.")
    notes += without_place(sweep)
    drawn.notes = [*map(_fitted_on, workloads), *notes, *drawn.notes]
    numbers = kit.listed(f"{sweep.short_name_of(case.group)} {_numbers(case)}" for case in cases)
    drawn.alt = f"Predicted step time against measured. {_errors(cases)}. {numbers}."
    return drawn


def _mark(
    drawn: Drawn, axes: Axes, sweep: SweepResults, case: PredictedGroup, style: Style
) -> None:
    """Draw the runs at their measured times, all at the height of their prediction."""
    predicted, name = case.prediction, sweep.name_of(case.group)
    predicted_ms = 1e3 * predicted.step_s
    steps = [1e3 * each for each in case.measured_s]
    tips = [
        f"{name}, {run_name(run)}: {step:,.4g} ms measured, {predicted_ms:,.4g} ms predicted"
        for run, step in zip(case.runs, steps, strict=True)
    ]
    kit.run_points(drawn, axes, steps, [predicted_ms] * len(steps), style, tips)
    mean, *_ = kit.mean_with_interval(axes, predicted_ms, steps, style, across=True)
    kit.marks(axes, [mean], [1e3 * predicted.baseline_s], kit.HOLLOW, alpha=0.7,
              markerfacecolor="none", zorder=2)  # fmt: skip
    if predicted.low_s is not None and predicted.high_s is not None:
        kit.interval(axes, [mean, mean], [1e3 * predicted.low_s, 1e3 * predicted.high_s], style)


def _diagonal(axes: Axes, workload: Workload) -> None:
    """Draw the diagonal, with equal axes from the smallest mark to the largest; bars may be cut."""
    predictions = [case.prediction for case in workload.cases]
    times_s = [s for case in workload.cases for s in case.measured_s]
    times_s += [s for each in predictions for s in (each.step_s, each.baseline_s)]
    low, high = 1e3 * min(times_s) / 1.15, 1e3 * max(times_s) * 1.15
    ends = [low, high]
    kit.line(axes, ends, ends, kit.REFERENCE, linewidth=1.2, zorder=1)
    below, above = ([factor * end for end in ends] for factor in (1 - NEAR, 1 + NEAR))
    kit.band(axes, ends, below, above, kit.REFERENCE, 0.15, zorder=0)
    if high > 4 * low:
        log_axis(axes, "x")
        log_axis(axes, "y")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    kit.describe(axes, workload.name, "measured step time (ms)", "predicted step time (ms)")


def errors_of(sweep: SweepResults) -> str:
    """How far predictions are off in all; "" where nothing is predicted."""
    workloads, _ = workloads_of(sweep)
    return _errors([case for workload in workloads for case in workload.cases]) if workloads else ""


def _errors(cases: Sequence[PredictedGroup]) -> str:
    errors = [abs(case.error) for case in cases]
    textbook = [abs(case.baseline_error) for case in cases]
    groups = f"{counted(len(cases), 'group')} of runs on several nodes"
    return (
        f"{groups}: off by {statistics.median(errors):.1%} in the median, by {max(errors):.1%} at "
        f"most; the textbook's alpha-beta by {statistics.median(textbook):.1%} and "
        f"{max(textbook):.1%}"
    )


def _short(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= MOST_NAMED else f"{len(names)} groups of runs"


def _numbers(case: PredictedGroup) -> str:
    predicted, mean = 1e3 * case.prediction.step_s, 1e3 * case.mean_s
    return f"{mean:,.4g} ms measured, {predicted:,.4g} ms predicted ({case.error:+.1%})"


def _fitted_on(workload: Workload) -> str:
    assumed = "".join(f"; assumed: {each}" for each in workload.fitted.assumed)
    return (
        f"{workload.name}{': ' if workload.name else ''}{_errors(workload.cases)}. Predicted from "
        f"{workload.fitted.runs_text} and from all-reduces measured over links, from no step of "
        f"what is predicted{assumed}"
    )


def run(options: argparse.Namespace) -> int:
    curve, title = print_prediction(options)
    if options.plot:
        kind = options.plot.suffix.removeprefix(".")
        save(curve_figure(curve, title), options.plot.parent, options.plot.stem, [kind], dark=False)
        if not options.json:
            print(f"written: {options.plot}")
    return 0


def curve_figure(curve: list[Prediction], title: str) -> Drawn:
    """Samples/s over nodes, with a line of no waiting, and the 95 % interval where it is known."""
    figure, (axes,) = kit.grid([4.0])
    nodes = [each.plan.shape.nodes for each in curve]
    styles = {"no waiting": kit.REFERENCE, "predicted": kit.cycle(0)}
    ideal, predicted = styles.values()
    kit.line(axes, nodes, [each.samples / each.alone_s for each in curve], ideal)
    rates = [each.samples_per_s for each in curve]
    kit.line(axes, nodes, rates, predicted, marker=predicted.marker, markersize=5)
    marks = list[Artist]()
    if known := [
        (each.plan.shape.nodes, each.samples / each.high_s, each.samples / each.low_s)
        for each in curve
        if each.low_s and each.high_s
    ]:
        at, low, high = zip(*known, strict=True)
        band = kit.band(axes, at, low, high, predicted, 0.2, bar=True)
        band.set_label("95 % interval")
        marks.append(band)
    if (below := below_half_efficiency(curve)) is not None:
        first = below.plan.shape.nodes
        text, style = f"efficiency below 0.5 from {first} on", kit.cycle(1)
        marks.append(kit.reference(axes, first, style, upright=True, label=text))
    doubling_axis(axes, nodes)
    log_axis(axes, "y")
    per_node = curve[0].plan.shape.per_node
    kit.describe(axes, title, f"nodes of {per_node} process(es)", "training samples/s")
    kit.legend(figure, styles, marks)
    return Drawn(figure, f"{title}: predicted training samples/s over the number of nodes")

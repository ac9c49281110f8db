"""Samples per second over nodes as predicted, and where the curve bends."""

from __future__ import annotations

from matplotlib.figure import Figure

from harness.read.drawing import LINES, calm
from harness.read.prediction.model import Prediction, bend


def curve_figure(curve: list[Prediction], title: str) -> Figure:
    """With the line that no waiting would give, and the 95 % interval where it is known."""
    figure = Figure(figsize=(6.0, 4.0), layout="constrained")
    axes = figure.add_subplot()
    nodes = [each.plan.shape.nodes for each in curve]
    rates = [each.samples_per_s for each in curve]
    (blue, marker), (orange, _) = LINES[:2]
    ideal = [each.samples / each.alone_s for each in curve]
    axes.plot(nodes, ideal, color="#777777", linestyle="--", linewidth=1.2, label="no waiting")
    axes.plot(nodes, rates, color=blue, marker=marker, markersize=5, label="predicted")
    known = [each for each in curve if each.low_s and each.high_s]
    if known:
        axes.fill_between(
            [each.plan.shape.nodes for each in known],
            [each.samples / (each.high_s or 1.0) for each in known],
            [each.samples / (each.low_s or 1.0) for each in known],
            color=blue, alpha=0.2, linewidth=0, label="95 % interval",
        )  # fmt: skip
    bends = bend(curve)
    if bends is not None:
        at = bends.plan.shape.nodes
        axes.axvline(at, color=orange, linewidth=1.2, label=f"efficiency below 0.5 from {at} on")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(nodes, [f"{count:,}" for count in nodes], rotation=45 if len(nodes) > 8 else 0)
    axes.minorticks_off()
    axes.set_xlabel(f"nodes of {curve[0].plan.shape.per_node} process(es)")
    axes.set_ylabel("training samples/s")
    axes.set_title(title, fontsize=10)
    calm(axes)
    axes.legend(frameon=False, fontsize=8)
    return figure

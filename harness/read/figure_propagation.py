"""Samples per second over the distance between nodes."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.links import plain_link
from harness.read.drawing import LINES, NO_LINK, calm, delay_axis, log_ticks, rate_text
from harness.settings import UserError

RATE = "train_samples_per_s"


def propagation(runs: pd.DataFrame, groups: pd.DataFrame) -> Figure:
    """Samples/s over the delay between nodes, a line a rate, each run a point.

    Dashed: the baseline, where the sweep names one.
    """
    runs, groups = _with_script(runs), _with_script(groups)
    runs = runs[runs["state"] == "finished"]
    linked = runs[runs["link"].notna()]
    if linked.empty:
        raise UserError(NO_LINK)
    links = linked["link"].map(plain_link)
    linked = linked.assign(
        delay=[link.delay_ms for link in links], rate=[link.rate_mbit for link in links]
    )
    names = list(dict.fromkeys(linked["script"]))
    figure = Figure(figsize=(4.6 * len(names), 3.8), layout="constrained")
    for number, name in enumerate(names):
        axes = figure.add_subplot(1, len(names), number + 1)
        _lines(axes, linked[linked["script"] == name])
        _baseline(axes, groups, name)
        _dress(axes, name, sorted(linked["delay"].unique()), first=number == 0)
    return figure


def _with_script(rows: pd.DataFrame) -> pd.DataFrame:
    """Where there is one script for all it is no axis, and no column."""
    return rows if "script" in rows else rows.assign(script="training")


def _lines(axes: Axes, runs: pd.DataFrame) -> None:
    rates = sorted(runs["rate"].unique(), key=lambda rate: -(rate or float("inf")))
    for (colour, marker), rate in zip(LINES, rates, strict=False):
        chosen = runs[runs["rate"].isna()] if pd.isna(rate) else runs[runs["rate"] == rate]
        axes.scatter(chosen["delay"], chosen[RATE], s=14, color=colour, marker=marker, alpha=0.45)
        means = chosen.groupby("delay")[RATE].mean()
        label = rate_text(None if pd.isna(rate) else rate)
        axes.plot(means.index, means, color=colour, marker=marker, markersize=5, label=label)


def _baseline(axes: Axes, groups: pd.DataFrame, script: str) -> None:
    chosen = groups[groups["baseline"] & groups[RATE].notna() & (groups["script"] == script)]
    for _, row in chosen.iterrows():
        axes.axhline(row[RATE], color="#777777", linestyle="--", linewidth=1.2)
        axes.annotate(
            f"{row['setup']}, no network",
            (1, row[RATE]), xycoords=("axes fraction", "data"), xytext=(-4, 3),
            textcoords="offset points", ha="right", fontsize=8, color="#555555",
        )  # fmt: skip


def _dress(axes: Axes, name: str, delays: list[float], first: bool) -> None:
    axes.set_title(name, fontsize=10)
    delay_axis(axes, delays)
    log_ticks(axes)
    axes.set_xlabel("delay between the nodes, one way (ms)")
    axes.set_ylabel("training samples/s" if first else "")
    calm(axes)
    axes.legend(frameon=False, fontsize=8, loc="lower left")

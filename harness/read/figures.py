"""Figures of sweeps, drawn from their records: python -m harness figures SWEEP."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files, no windows

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, StrMethodFormatter

from harness.links import Link, plain_link
from harness.read.groups import load_sweep
from harness.read.sweep_runs import load_sweep_runs
from harness.read.sweeps import read_sweep
from harness.settings import UserError

# Told apart by colour-blind people as well (Okabe and Ito), and by their markers.
LINES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"))
RATE = "train_samples_per_s"


def propagation(runs: pd.DataFrame, groups: pd.DataFrame) -> Figure:
    """Samples/s over the delay between nodes, a line a rate, each run a point.

    Dashed: the baseline, where the sweep names one.
    """
    runs, groups = _with_script(runs), _with_script(groups)
    runs = runs[runs["state"] == "finished"]
    linked = runs[runs["link"].notna()]
    if linked.empty:
        raise UserError("no finished run has a link: run the sweep with --launcher netns")
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
        label = str(Link(rate_mbit=None if pd.isna(rate) else rate)).replace("mbit", " Mbit/s")
        label = label.replace("none", "rate not limited")
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
    axes.set_xscale("symlog", linthresh=1, linscale=0.5)
    axes.set_xticks(delays, [f"{delay:g}" for delay in delays])
    axes.set_xlim(-0.4, max(delays) * 1.3)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.minorticks_off()
    axes.set_xlabel("delay between the nodes, one way (ms)")
    axes.set_ylabel("training samples/s" if first else "")
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower left")


def main(argv: list[str]) -> int:
    """python -m harness figures SWEEP"""
    if len(argv) != 1 or argv[0] in ("-h", "--help"):
        print("usage: python -m harness figures SWEEP\n\nthe folder of a sweep with links")
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    try:
        sweep = read_sweep(argv[0])
        if "link" not in sweep.axes:
            raise UserError(f"{sweep.file}: link does not vary: there is no figure for it yet")
        figure = propagation(load_sweep_runs(argv[0]), load_sweep(argv[0]))
    except UserError as error:
        print(f"harness figures: error: {error}", file=sys.stderr)
        return 2
    path = Path(sweep.file).parent / "propagation.png"
    figure.savefig(path, dpi=200)
    print(f"written: {path}")
    return 0

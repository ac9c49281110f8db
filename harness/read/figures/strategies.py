"""Samples per second over the distance between nodes."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.core.links import Link, plain_link
from harness.core.settings import UserError
from harness.read.drawing import (
    DASHES,
    INK,
    LINES,
    Style,
    calm,
    delay_axis,
    log_axis,
)
from harness.read.labels import shown_axes, strategy_text
from harness.read.records.baseline import baseline_of
from harness.read.records.groups import Group
from harness.read.records.sweeps import SweepResults

RATE = "train_samples_per_s"
NO_LINK = "no finished run has a link: run the sweep with --launcher netns"


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
        _dress_propagation(axes, name, sorted(linked["delay"].unique()), first=number == 0)
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


def _dress_propagation(axes: Axes, name: str, delays: list[float], first: bool) -> None:
    axes.set_title(name, fontsize=10)
    delay_axis(axes, delays)
    log_axis(axes, "y")
    axes.set_xlabel("delay between the nodes, one way (ms)")
    axes.set_ylabel("training samples/s" if first else "")
    calm(axes)
    axes.legend(frameon=False, fontsize=8, loc="lower left")


def rate_text(rate_mbit: float | None) -> str:
    text = str(Link(rate_mbit=rate_mbit))
    return text.replace("mbit", " Mbit/s").replace("none", "rate not limited")


# ----
# Time to the target quality over the distance between nodes, a line a strategy; and its price.

TIME, QUALITY = "tta_train_s", "accuracy"


BASE_STYLE = ("#000000", "X")  # what all are compared with is seen at once


SHOWN = ("script", "strategy", "setup", "link")


MISS_ROW = 0.085  # of a panel's height: a line of small text


APART = 1.06  # strategies at the same delay stand side by side, this factor from one to the next


@dataclass(frozen=True)
class Cell:
    """A group with its place in the figure."""

    group: Group
    base: Group | None
    strategy: str
    column: tuple[str, str]  # script, set-up
    row: Link  # without its delay
    delay: float

    @property
    def times(self) -> list[float]:
        return self.group.values(TIME)

    @property
    def losses(self) -> list[float]:
        """Points of final accuracy more than the baseline with the same seed, for each seed."""
        if self.base is None:
            return []
        theirs = self.base.by_repetition(QUALITY)
        ours = self.group.by_repetition(QUALITY)
        return [100 * (value - theirs[key]) for key, value in ours.items() if key in theirs]


def strategies(sweep: SweepResults) -> Figure:
    """Columns of panels by set-up, rows by rate; below, what the strategies cost in quality."""
    cells = _cells(sweep)
    columns, rows = _distinct(c.column for c in cells), _by_rate(c.row for c in cells)
    styles = _styles(cells)
    has_base = any(cell.losses and cell.base is not cell.group for cell in cells)
    heights = [2.5] * len(rows) + ([0.65 + 0.24 * len(styles)] if has_base else [])
    figure = Figure(figsize=(4.6 * len(columns), sum(heights) + 0.7), layout="constrained")
    grid = figure.add_gridspec(len(heights), len(columns), height_ratios=heights)
    span, delays = _span(cells), sorted({cell.delay for cell in cells})
    said = f"training time to {_target(sweep)} (s)"
    for x, column in enumerate(columns):
        for y, row in enumerate(rows):
            axes = figure.add_subplot(grid[y, x])
            _panel(axes, [c for c in cells if (c.column, c.row) == (column, row)], styles)
            _dress(axes, column, row, delays, span, said if x == 0 else "")
            if y == len(rows) - 1:
                axes.set_xlabel("delay between the nodes, one way (ms)", fontsize=9)
        if has_base:
            axes = figure.add_subplot(grid[len(rows), x])
            _quality(axes, [c for c in cells if c.column == column], styles, first=x == 0)
    marks = [
        Line2D([], [], color=colour, marker=marker, markersize=5, linestyle=dash, label=name)
        for name, (colour, marker, dash) in styles.items()
    ]
    wide = len(marks) if len(marks) < 5 else (len(marks) + 1) // 2
    wide = min(wide, 2 * len(columns))
    figure.legend(handles=marks, loc="outside upper center", ncols=wide, frameon=False, fontsize=9)
    return figure


def _target(sweep: SweepResults) -> str:
    return str(sweep.target).replace(" at least ", " ").replace(" at most ", " ")


def _cells(sweep: SweepResults) -> list[Cell]:
    """What has finished over a link; UserError says what else would be needed."""
    if sweep.target is None:
        raise UserError(
            f"{sweep.file}: has no target, and the figure shows the time to it: write for example "
            "target: {metric: accuracy, value: 0.9} into the sweep file"
        )
    if others := [axis for axis in shown_axes(sweep.axes) if axis not in SHOWN]:
        raise UserError(f"{sweep.file}: {', '.join(others)} varies too: there is no figure for it")
    linked = [g for g in sweep.groups if g.finished and g.label.get("link") is not None]
    if not linked:
        raise UserError(NO_LINK)
    if not any(group.values(TIME) for group in linked):
        raise UserError(f"no epoch of any run has a number named {sweep.target.metric}")
    return [_cell(group, baseline_of(sweep, group)) for group in linked]


def _cell(group: Group, base: Group | None) -> Cell:
    label = group.label
    link = plain_link(label["link"])
    column = (str(label.get("script") or ""), str(label.get("setup") or ""))
    strategy = strategy_text(label) or "plain"
    return Cell(group, base, strategy, column, replace(link, delay_ms=0.0), link.delay_ms)


def _distinct(values: Iterable[Any]) -> list[Any]:
    return [*dict.fromkeys(values)]


def _by_rate(rows: Iterable[Link]) -> list[Link]:
    return sorted(set(rows), key=lambda row: (-(row.rate_mbit or math.inf), str(row)))


def _styles(cells: list[Cell]) -> dict[str, Style]:
    """Colour, marker and dash of each strategy, those of the baseline first."""
    names = _distinct(cell.strategy for cell in cells)
    bases = [n for n in names if any(c.strategy == n and c.base is c.group for c in cells)]
    styles = {name: Style(*BASE_STYLE, "-") for name in bases[:1]}
    others = [name for name in names if name not in styles]
    for number, name in enumerate(others):
        again, at = divmod(number, len(LINES))
        styles[name] = Style(*LINES[at], DASHES[again % len(DASHES)])
    return styles


def _panel(axes: Axes, cells: list[Cell], styles: dict[str, Style]) -> None:
    slots: Counter[float] = Counter()
    nearest = min((cell.delay for cell in cells), default=0.0)
    for number, (name, style) in enumerate(styles.items()):
        mine = sorted((c for c in cells if c.strategy == name and c.times), key=lambda c: c.delay)
        aside = APART ** (number - (len(styles) - 1) / 2)
        points = [(c.delay * aside, t) for c in mine for t in c.times if math.isfinite(t)]
        axes.scatter([x for x, _ in points], [y for _, y in points], s=14, color=style.colour,
                     marker=style.marker, alpha=0.45, linewidths=0)  # fmt: skip
        # The median of runs of which a miss takes for ever; a mean would not be there.
        medians = [statistics.median(c.times) for c in mine]
        finite = [m if math.isfinite(m) else math.nan for m in medians]
        axes.plot([c.delay * aside for c in mine], finite, color=style.colour, marker=style.marker,
                  markersize=5, linestyle=style.dash, linewidth=1.4, label=name)  # fmt: skip
        for cell in mine:
            if missed := sum(map(math.isinf, cell.times)):
                text = f"\u2191 {missed} of {len(cell.times)}"
                # On the left edge there is no room on the left.
                side = 1 if cell.delay == nearest else -1
                _miss(axes, cell.delay, slots[cell.delay], text, style, side)
                slots[cell.delay] += 1


def _miss(axes: Axes, delay: float, slot: int, text: str, style: Style, side: int) -> None:
    """At the top edge, one below the other: they would lie above every number."""
    at, place = 1 - MISS_ROW * (slot + 0.5), axes.get_xaxis_transform()
    axes.plot([delay], [at], marker=style.marker, color=style.colour, markersize=4.5,
              linestyle="", transform=place)  # fmt: skip
    axes.annotate(
        text, (delay, at), xycoords=place, xytext=(6 * side, 0), textcoords="offset points",
        ha="left" if side > 0 else "right", va="center", fontsize=7.5, color=INK,
    )  # fmt: skip


class Span(NamedTuple):
    """Of the times in all panels, and how much of a panel's height the misses above them take."""

    low: float
    high: float
    missed: float


def _span(cells: list[Cell]) -> Span:
    times = [t for cell in cells for t in cell.times if math.isfinite(t)] or [1.0]
    missed = Counter((c.column, c.row, c.delay) for c in cells if any(map(math.isinf, c.times)))
    share = min(MISS_ROW * max(missed.values(), default=0), 0.7)
    return Span(min(times) / 1.3, max(times) * 1.3, share)


def _dress(
    axes: Axes, column: tuple[str, str], row: Link, delays: list[float], span: Span, said: str
) -> None:
    script, setup = column
    others = str(replace(row, rate_mbit=None)).replace("none", "")
    parts = [script, f"set-up {setup}" if setup else "", rate_text(row.rate_mbit), others]
    axes.set_title(", ".join(part for part in parts if part), fontsize=10)
    delay_axis(axes, delays)
    axes.set_yscale("log")
    powers = range(math.floor(math.log10(span.low)), math.ceil(math.log10(span.high)))
    ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    ticks = [tick for tick in ticks if span.low <= tick <= span.high]
    axes.set_yticks(ticks, [f"{tick:,g}" if said else "" for tick in ticks])
    axes.minorticks_off()
    top = span.high * (span.high / span.low) ** (span.missed / (1 - span.missed))
    axes.set_ylim(span.low, top)
    if span.missed:
        axes.axhspan(span.high, top, color="#f2f2f2", zorder=0, linewidth=0)
        axes.annotate("missed", (1, 1 - MISS_ROW / 2), xycoords="axes fraction", xytext=(4, 0),
                      textcoords="offset points", va="center", fontsize=8, color=INK)  # fmt: skip
    axes.tick_params(labelsize=9)
    axes.set_ylabel(said, fontsize=9)
    calm(axes)


def _quality(axes: Axes, cells: list[Cell], styles: dict[str, Style], first: bool) -> None:
    """Final accuracy less the baseline's, each run a point, mean and standard deviation."""
    compared = [cell for cell in cells if cell.base is not cell.group]
    bases = _distinct(strategy_text(c.base.label) for c in cells if c.base is not None)
    names = [name for name in styles if any(c.strategy == name for c in compared)]
    axes.axvspan(-1, 1, color="#eeeeee", zorder=0)
    axes.axvline(0, color="#777777", linestyle="--", linewidth=1.2)
    for height, name in enumerate(names):
        style = styles[name]
        losses = [loss for c in compared if c.strategy == name for loss in c.losses]
        if not losses:
            continue
        mean = statistics.mean(losses)
        sd = statistics.stdev(losses) if len(losses) > 1 else None
        axes.scatter(losses, [height] * len(losses), s=12, color=style.colour, alpha=0.35,
                     linewidths=0)  # fmt: skip
        axes.errorbar(mean, height, xerr=sd, color=style.colour, marker=style.marker, markersize=5,
                      capsize=3)  # fmt: skip
        axes.annotate(
            f"{mean:+.1f}" + ("" if sd is None else f" \u00b1 {sd:.1f}"),
            (1, height), xycoords=("axes fraction", "data"), xytext=(4, 0),
            textcoords="offset points", va="center", fontsize=8, color=INK,
        )  # fmt: skip
    axes.set_yticks(range(len(names)), names if first else [""] * len(names), fontsize=9)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(labelsize=9)
    base = bases[0] if len(bases) == 1 and bases[0] else "the baseline"
    said = f"final accuracy less that of {base}, points (grey: within one)"
    axes.set_xlabel(said, fontsize=9)
    calm(axes)

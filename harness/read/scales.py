"""Axes: fitted to values, with named rows, or logarithmic with as many ticks as have room."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from harness.read.drawing import LETTERS, page_inches, wrapped

ROW_LETTERS = 6.5  # per inch of the page: names of rows take half of it
ROW, LINE = 0.26, 0.14  # inches: of a row, and of each further line of its name


def fitted(
    axes: Axes, values: Iterable[float], bars: Iterable[float] = (), is_fraction: bool = False
) -> None:
    """Fit the vertical axis to the values; long bars at most double what is shown.

    is_fraction: values and bars are within 0 to 1; bars are shown whole.
    """
    known = [v for v in values if math.isfinite(v)]
    low, high = min(known), max(known)
    room = (high - low) or abs(high) * 0.1 or 1.0
    ends = [b for b in bars if math.isfinite(b)]
    most = 1.0 if is_fraction else room
    bottom = max(low - most, min([low, *ends])) - 0.08 * room
    top = min(high + most, max([high, *ends])) + 0.08 * room
    # A share ends at one, with room for a marker.
    axes.set_ylim(max(bottom, 0) if low >= 0 else bottom, min(top, 1.03) if is_fraction else top)


def row_names(names: Sequence[str]) -> tuple[list[str], float]:
    """The names, wrapped so that a panel has room, and the height of a row in inches."""
    lines = [wrapped(name, ROW_LETTERS * page_inches()) for name in names]
    return lines, ROW + LINE * max((name.count("\n") for name in lines), default=0)


def named_rows(axes: Axes, names: Sequence[str]) -> None:
    """A row for each name, the first at the top."""
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(len(names) - 0.5, -0.5)


def named_columns(axes: Axes, names: Sequence[str]) -> None:
    """A column for each name; the parts of a link stand below each other."""
    axes.set_xticks(range(len(names)), [name.replace("/", "\n") for name in names])
    axes.set_xlim(-0.5, len(names) - 0.5)


def log_axis(axes: Axes, which: Literal["x", "y"], few: bool = False) -> None:
    """Make an axis logarithmic, with ticks also between powers of ten; few: without these."""
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(_FittingTicks(subs=(1,) if few else (1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    _no_minor_ticks(axis)


class _FittingTicks(LogLocator):
    """Ticks at powers of ten alone where the labels of those between have no room."""

    def tick_values(self, vmin: float, vmax: float) -> Any:
        ticks = super().tick_values(vmin, vmax)
        assert isinstance(self.axis, Axis)
        axes = self.axis.axes
        shown = [tick for tick in ticks if vmin <= tick <= vmax]
        decades = math.log10(vmax / vmin)
        a_decade = LETTERS * axes.bbox.width / axes.figure.dpi / decades  # in letters
        if self.axis is axes.xaxis and any(
            a_decade * math.log10(right / left) < len(f"{left:,g}{right:,g}") / 2 + 1
            for left, right in pairwise(shown)
        ):
            self.set_params(subs=(1,))
            ticks = super().tick_values(vmin, vmax)
        return ticks


def doubling_axis(axes: Axes, values: Iterable[float]) -> None:
    """Make x logarithmic for counts and sizes that double: each value has its tick."""
    ticks = sorted(set(values))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    _no_minor_ticks(axes.xaxis)
    axes.set_xlim(ticks[0] / 1.5, ticks[-1] * 1.6)


def delay_axis(axes: Axes, delays: Sequence[float]) -> None:
    """Make x logarithmic; a delay of zero, if any, has a place of its own below 1 ms."""
    axes.set_xscale("symlog", linthresh=1, linscale=0.5)
    axes.set_xlim(-0.4, max(delays) * 1.3)
    if min(delays) > 0:
        axes.set_xscale("log")
        ends = (2.5, 1.35) if len(delays) > 1 else (1.6, 1.6)  # a single delay is in the middle
        axes.set_xlim(min(delays) / ends[0], max(delays) * ends[1])
    axes.set_xticks(delays, [f"{delay:g}" for delay in delays])
    _no_minor_ticks(axes.xaxis)


def _no_minor_ticks(axis: Axis) -> None:
    axis.set_minor_formatter(NullFormatter())
    axis.set_tick_params(which="minor", length=0)

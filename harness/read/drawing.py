"""The drawing kit of all figures: colours, panels, points with their mean, axes, light and dark.

Figures are drawn light. The dark variant differs in its colours alone; inside a page the colours
are CSS variables, so that the reader's choice of light or dark decides.
"""

from __future__ import annotations

import io
import math
import statistics
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import LayoutEngine
from matplotlib.lines import Line2D
from PIL import Image

from harness.core.settings import UserError
from harness.read import labels
from harness.read.statistics import spread

Dash = Literal["-", "--", ":"]

# Distinguishable with colour-vision deficiency (Okabe and Ito), and by marker.
LINES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"),
         ("#56B4E9", "P"))  # fmt: skip
DASHES: tuple[Dash, ...] = ("-", "--", ":")
BLACK, WHITE = "#000000", "#ffffff"
INK = "#333333"  # small text: lighter colours are hard to read
FAINT = "#777777"  # references and ideals
STRIP = "#f2f2f2"  # background of the strip beside an axis, for runs without a number
NO_DIFFERENCE = "#eeeeee"  # differences too small to matter
GRID = "#dddddd"
FAILED = "#B00020"

# Light -> dark. Hues that are readable on both backgrounds are not listed.
DARK = {
    WHITE: "#0d1117", BLACK: "#e6edf3", INK: "#c9d1d9", FAINT: "#8b949e", GRID: "#30363d",
    STRIP: "#1b2129", NO_DIFFERENCE: "#1f262e", "#262626": "#e6edf3", "#cccccc": "#484f58",
    "#c8c8c8": "#4a5159", "#9fb8c8": "#53758a", "#0072b2": "#3d8fe0", "#d55e00": "#f08040",
    "#009e73": "#2fc79a", "#56b4e9": "#b5e0ff", "#b00020": "#ff6b7d", "#882255": "#d977a8",
    "#8c510a": "#c98a45", "#332288": "#9b8cff", "#999933": "#c5c55a",
}  # fmt: skip

WIDTH = 8.0  # inches: 800 px, the width of a README
LETTERS, TITLE_LETTERS = 14.4, 11.5  # per inch: at 9 points, and at the 10 points of a title
FEWEST_LETTERS, OF_MARK = 12, 8  # fewest in a line; the width of a mark beside its name
NARROW_SHARE = 0.6  # of a panel's width, for its title and axis label, if --width is given
HEAD, FEW_LINES = 0.19, 2  # inches per line of a legend or title; lines that have room anyway
WIDEST = 20.0  # inches, the most that --width takes
NARROW = 2.5  # inches: what a panel needs for its numbers and labels
_page: ContextVar[float | None] = ContextVar("page", default=None)  # --width in inches, if given
PER_ROW = 3  # panels
NOTEBOOK_DPI, PNG_DPI, PNG_COLOURS = 90, 150, 128
MOST_LINES, MOST_PANELS, MOST_LISTED = 12, 12, 12


class NothingToDraw(UserError):
    """The records lack what a figure shows; the message takes the figure's place."""


@dataclass(repr=False)
class Drawn:
    """A figure, its description in words, and notes on what it leaves out."""

    figure: Figure
    alt: str = ""
    notes: list[str] = field(default_factory=list)
    # gid of a drawn set of points -> a tooltip for each point
    tips: dict[str, list[str]] = field(default_factory=dict)
    svg: str = ""  # cached output of matplotlib

    def __repr__(self) -> str:
        return self.alt

    def _repr_png_(self) -> bytes:
        """The image that a notebook displays."""
        return png(self.figure, NOTEBOOK_DPI)

    def tip(self, artist: Artist, texts: Sequence[str]) -> None:
        """Give each point of an artist a tooltip."""
        name = f"points_{len(self.tips)}"
        artist.set_gid(name)
        self.tips[name] = list(texts)


class Style(NamedTuple):
    colour: str
    marker: str
    dash: Dash


BASE = Style(BLACK, "X", "-")  # stands out from the cycle below
REFERENCE, IDEAL = Style(FAINT, "", "--"), Style(FAINT, "", ":")
HOLLOW = Style(FAINT, "o", "-")  # the outline of a mark
FAILURE = Style(FAILED, "X", "-")


def cycle(number: int) -> Style:
    """Style of line `number`: six colours; each further round changes the marker and the dash."""
    again, at = divmod(number, len(LINES))
    marker = LINES[(at + again) % len(LINES)][1]
    return Style(LINES[at][0], marker, DASHES[again % len(DASHES)])


@contextmanager
def page_width(inches: float | None) -> Iterator[None]:
    """Draw figures inside this context this wide (None: README width), with usual font sizes."""
    token = _page.set(inches)
    try:
        yield
    finally:
        _page.reset(token)


def panels(count: int, height: float, wide: int | None = None) -> tuple[Figure, list[Axes]]:
    """A figure of README width with this many panels."""
    wide = min(count, wide) if wide else panels_per_row(count)
    figure, axes = grid([height] * math.ceil(count / wide), wide)
    for panel in axes[count:]:
        panel.remove()
    return figure, axes[:count]


def grid(
    heights: Sequence[float], wide: int = 1, width: float = WIDTH
) -> tuple[Figure, list[Axes]]:
    """A figure with a row of `wide` panels for each height, and its panels row by row."""
    width = _page.get() or width
    figure = Figure(figsize=(width, sum(heights) + 0.5), layout="constrained")
    cells = figure.add_gridspec(len(heights), wide, height_ratios=heights)
    axes = [figure.add_subplot(cells[y, x]) for y in range(len(heights)) for x in range(wide)]
    for panel in axes:
        calm(panel)
    return figure, axes


def panels_per_row(count: int) -> int:
    """How many of `count` panels to place in a row."""
    wide = 2 if count == 4 else min(count, PER_ROW)
    return max(1, min(wide, int((_page.get() or WIDTH) / NARROW)))


def has_room(inches: float) -> bool:
    """Whether the requested page width, if any, is at least this many inches."""
    return (_page.get() or math.inf) >= inches


def page_inches() -> float:
    return _page.get() or WIDTH


def calm(axes: Axes) -> None:
    axes.grid(True, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)


def describe(axes: Axes, title: str = "", x: str = "", y: str = "") -> None:
    spec, figure = axes.get_subplotspec(), axes.get_figure(root=True)
    assert spec is not None and figure is not None
    wide = spec.get_gridspec().ncols
    # With --width, row names and tick labels narrow the panels, and wrapped titles take height.
    across = figure.get_figwidth() / wide * (1.0 if _page.get() is None else NARROW_SHARE)
    title, x = wrapped(title, TITLE_LETTERS * across), wrapped(x, LETTERS * across)
    if _page.get() is not None:
        make_room(figure, FEW_LINES + (title.count("\n") + x.count("\n")) / wide)
    # y=1.0 fixes the title's place; without it, matplotlib measures all ticks at every drawing.
    axes.set_title(title, fontsize=10, y=1.0)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)


def wrapped(text: str, letters: float) -> str:
    """Wrap text into lines of at most this many letters, but not below FEWEST_LETTERS."""
    wide = max(int(letters), FEWEST_LETTERS)
    return "\n".join(textwrap.fill(line, wide) for line in _signed(text).splitlines())


def _signed(text: str) -> str:
    """Show the sign of a number as a minus instead of a hyphen, as axes do."""
    return labels.SIGN.sub("\u2212", text)


def legend(figure: Figure, styles: Mapping[str, Style], more: Sequence[Artist] = ()) -> None:
    """Draw a legend above all panels, if any style has a name."""
    marks = [*(legend_mark(style, name) for name, style in styles.items() if name), *more]
    if not marks:
        return
    letters = LETTERS * figure.get_figwidth()
    names = [wrapped(str(mark.get_label()), letters - OF_MARK) for mark in marks]
    longest = max(len(line) for name in names for line in name.splitlines())
    columns = max(1, min(len(marks), 4, int(letters / (longest + OF_MARK))))
    lines = max(1 + name.count("\n") for name in names)
    make_room(figure, lines * math.ceil(len(names) / columns))
    figure.legend(
        marks, names, loc="outside upper center", ncols=columns, frameon=False, fontsize=9
    )


def legend_mark(style: Style, label: str, **more: Any) -> Artist:
    return Line2D([], [], label=label, **_look(style, more, marker=style.marker, markersize=5))


def _look(style: Style, more: dict[str, Any], **usual: Any) -> dict[str, Any]:
    return {"color": style.colour, "linestyle": style.dash} | usual | more


def make_room(figure: Figure, lines: float) -> None:
    """Heighten the figure for lines above its panels, beyond the FEW_LINES that have room."""
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + HEAD * max(lines - FEW_LINES, 0))


def small_text(
    axes: Axes, text: str, at: tuple[float, float], shift: tuple[float, float] = (0, 0),
    **more: Any,
) -> None:  # fmt: skip
    """Write small text beside a point of the panel; shift is in points."""
    look: dict[str, Any] = {"fontsize": 8, "color": INK, "va": "center"}
    axes.annotate(_signed(text), at, xytext=shift, textcoords="offset points", **(look | more))


def run_points(
    drawn: Drawn, axes: Axes, x: Sequence[float], y: Sequence[float], style: Style,
    tips: Sequence[str], hollow: bool = False,
) -> None:  # fmt: skip
    """Draw single runs as faint points, or as outlines, each with its tooltip."""
    look: dict[str, Any] = {"color": style.colour, "s": 14, "alpha": 0.45, "linewidths": 0}
    if hollow:  # above the median's line, which would fill it
        look = {"facecolors": WHITE, "edgecolors": style.colour, "s": 28, "linewidths": 1.2}
    artist = axes.scatter(x, y, marker=style.marker or "o", zorder=6 if hollow else 4, **look)
    drawn.tip(artist, tips)


def mean_with_interval(
    axes: Axes, at: float, values: Sequence[float], style: Style, harmonic: bool = False,
    across: bool = False, is_fraction: bool = False,
) -> tuple[float, float, float]:  # fmt: skip
    """Draw a mean and its 95 % interval, upright or `across`; return (mean, low, high).

    is_fraction: clip the interval to 0..1, as no mean of fractions lies outside.
    """
    stats = spread(values, harmonic)
    assert stats.mean is not None
    low, high = stats.ends
    if math.isinf(high):  # draw an open end at the same factor from the mean as the low end
        high = stats.mean**2 / low
    if is_fraction:
        low, high = max(low, 0.0), min(high, 1.0)
    value_with_interval(axes, at, (stats.mean, low, high), style, across)
    return stats.mean, low, high


def value_with_interval(
    axes: Axes, at: float, values: tuple[float, float, float], style: Style, across: bool = False
) -> None:
    """Draw (value, low, high), upright or `across`; without a bar where the ends are equal."""
    value, low, high = values
    ends, middle = ([at, at], [low, high]), ([at], [value])
    if across:
        ends, middle = (ends[1], ends[0]), (middle[1], middle[0])
    if high > low:
        interval(axes, *ends, style)
    marks(axes, *middle, style, markersize=6, zorder=3)


INTERVAL = "_interval"  # label of interval lines; its underscore keeps them out of a legend
CUT = "an arrow: the interval goes on beyond the axis"


def interval(axes: Axes, x: Sequence[float], y: Sequence[float], style: Style) -> None:
    axes.plot(x, y, color=style.colour, linewidth=1.2, zorder=2, label=INTERVAL)


def mark_cut_intervals(drawn: Drawn, axes: Axes) -> None:
    """Draw an arrow where an axis, whose limits must be set before, cuts an upright interval."""
    (low, high), across = axes.get_ylim(), axes.get_xaxis_transform()
    for bar in [bar for bar in axes.lines if bar.get_label() == INTERVAL]:
        x, ends = np.asarray(bar.get_xdata())[:1], np.asarray(bar.get_ydata(), dtype=float)
        for cut, edge, marker in ((max(ends) > high, 1, "^"), (min(ends) < low, 0, "v")):
            if cut:
                axes.plot(x, [edge], color=bar.get_color(), marker=marker, markersize=4,
                          transform=across, clip_on=False)  # fmt: skip
                drawn.notes += [] if CUT in drawn.notes else [CUT]


def aside(number: int, count: int) -> float:
    """Factor that moves lines that share a place beside each other, the first to the left."""
    return math.pow(1.04, number - (count - 1) / 2)


def line(axes: Axes, x: Sequence[float], y: Sequence[float], style: Style, **more: Any) -> None:
    axes.plot(x, y, **_look(style, more, linewidth=1.4))


def marks(axes: Axes, x: Sequence[float], y: Sequence[float], style: Style, **more: Any) -> None:
    """Draw points without a line."""
    axes.plot(x, y, **_look(style, more, marker=style.marker, linestyle="", markersize=5))


def hollow_marks(axes: Axes, x: Sequence[float], y: Sequence[float], style: Style) -> None:
    """Draw outlines above the points of single runs, which would fill them."""
    marks(axes, x, y, style, markerfacecolor=WHITE, markersize=7, markeredgewidth=1.5, zorder=5)


def reference(
    axes: Axes, at: float, style: Style = REFERENCE, upright: bool = False, **more: Any
) -> Artist:
    """Draw a line across the whole panel, or `upright`."""
    return (axes.axvline if upright else axes.axhline)(at, **_look(style, more, linewidth=1.2))


def strip(
    axes: Axes, low: float, high: float, upright: bool = False, color: str = STRIP, **more: Any
) -> None:
    """Draw a background across the whole panel, or `upright`, between two values."""
    look: dict[str, Any] = {"color": color, "linewidth": 0, "zorder": 0} | more
    (axes.axvspan if upright else axes.axhspan)(low, high, **look)


def band(
    axes: Axes, x: Sequence[float], low: Sequence[float], high: Sequence[float], style: Style,
    alpha: float, bar: bool = False, **more: Any,
) -> Artist:  # fmt: skip
    """Fill the place between two lines; of a single point nothing is seen, or a `bar`."""
    if bar and len(x) == 1:
        return axes.vlines(x, low, high, color=style.colour, alpha=2 * alpha, linewidth=5, **more)
    return axes.fill_between(x, low, high, color=style.colour, alpha=alpha, linewidth=0, **more)


def crosses(axes: Axes, failures: Sequence[tuple[float, str]]) -> None:
    """Draw failed runs, given as (x, outcome), as crosses above all values."""
    if not failures:
        return
    across, stacked = axes.get_xaxis_transform(), Counter[float]()
    counts = Counter(x for x, _ in failures)
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top + (top - bottom) * 0.1 * max(counts.values()))
    # Alone at the right, there is room at the left of it.
    position = axes.transAxes.inverted().transform(axes.transData.transform((max(counts), 0)))
    left = len(counts) == 1 and position[0] > 0.5
    for x, outcome in failures:
        height = 0.96 - 0.08 * stacked[x]
        stacked[x] += 1
        marks(axes, [x], [height], FAILURE, markersize=7, transform=across, zorder=4)
        small_text(axes, outcome, (x, height), (-6 if left else 6, 0), xycoords=across,
                   color=FAILED, ha="right" if left else "left")  # fmt: skip


def listed(texts: Iterable[str], joined_by: str = "; ") -> str:
    """Join texts, as many as a description that is read aloud can hold."""
    return labels.listed(texts, joined_by, MOST_LISTED)


def numbers_of(values: Sequence[float], harmonic: bool = False) -> str:
    """The text "mean (from least to most, n)", for the description of a figure."""
    mean = f"{spread(values, harmonic).mean:,.4g}"
    if len(values) == 1:
        return f"{mean} (one value)"
    return f"{mean} (from {min(values):,.4g} to {max(values):,.4g}, n = {len(values)})"


def median_text(times: Sequence[float]) -> str:
    """The median of times to a target with the least and the most; misses are infinite."""
    reached, median = [t for t in times if math.isfinite(t)], statistics.median(times)
    text = f"{median:,.4g} s" if math.isfinite(median) else "not reached"
    if len(reached) > 1:
        text += f" (from {min(reached):,.4g} to {max(reached):,.4g})"
    missed = len(times) - len(reached)
    return f"{text}, {missed} of {len(times)} missed" if missed else f"{text}, n = {len(times)}"


def png(figure: Figure, dpi: int) -> bytes:
    """The figure as PNG with a palette: a third of the size, without visible difference."""
    canvas: Any = FigureCanvasAgg(figure)
    reduced = io.BytesIO()
    with _drawn_at(figure, dpi):
        canvas.draw()
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba()))
    # Without optimize=True, which takes six times as long to save a seventh of the size.
    picture.convert("RGB").quantize(PNG_COLOURS).save(reduced, format="png")
    return reduced.getvalue()


def lay_out(figure: Figure) -> None:
    """Lay the figure out once for all files; otherwise each file would be drawn twice for it."""
    if (engine := figure.get_layout_engine()) is None:
        return
    asked, height = figure.get_size_inches()
    widths = np.arange(asked, WIDEST, 0.2)
    for width in widths:
        figure.set_size_inches(width, height)
        if _is_placed(figure, engine):
            break
    if width > asked:
        raise UserError(f"--width: the labels of this figure need {width:.1f}in or more")
    figure.set_layout_engine(None)


def _is_placed(figure: Figure, engine: LayoutEngine) -> bool:
    """Lay out the figure; False if a requested width leaves no room between its labels."""
    with _drawn_at(figure, PNG_DPI), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.execute(figure)
    return _page.get() is None or not any("constrained_layout" in str(w.message) for w in caught)


@contextmanager
def _drawn_at(figure: Figure, dpi: int) -> Iterator[None]:
    usual = figure.dpi
    figure.set_dpi(dpi)
    yield
    figure.set_dpi(usual)

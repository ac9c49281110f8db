"""What the figures share: colours, panels, points with their mean, and axes read at a glance."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from PIL import Image

from harness.links import Link
from harness.read.statistics import spread
from harness.settings import UserError

# Told apart by colour-blind people as well (Okabe and Ito), and by their markers.
LINES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"),
         ("#56B4E9", "P"))  # fmt: skip
DASHES: tuple[Literal["-", "--", ":"], ...] = ("-", "--", ":")
NO_LINK = "no finished run has a link: run the sweep with --launcher netns"
INK = "#333333"  # of small text: the lighter colours are hard to read
FAINT = "#777777"  # of what is only compared with
FAILED = "#B00020"
WIDTH = 8.0  # inches: 800 px at the width of a README
PER_ROW = 3  # panels beside each other
NOTEBOOK_DPI, COLOURS = 90, 128
MOST_LINES, MOST_PANELS, MOST_SAID = 12, 12, 12


class NothingToDraw(UserError):
    """The records do not hold what a figure shows: said in its place."""


@dataclass(repr=False)
class Drawn:
    """A figure, the same in words, and what does not stand in it."""

    figure: Figure
    alt: str
    notes: list[str] = field(default_factory=list)
    # Name of a drawn set of points (its gid) -> what each of them is.
    tips: dict[str, list[str]] = field(default_factory=dict)
    svg: str = ""  # once it has been drawn so

    def __repr__(self) -> str:
        return self.alt

    def _repr_png_(self) -> bytes:
        """What a notebook shows."""
        return png(self.figure, NOTEBOOK_DPI)

    def tip(self, artist: object, texts: Sequence[str]) -> None:
        """Say what the points of an artist are, where a pointer can ask."""
        name = f"points_{len(self.tips)}"
        artist.set_gid(name)  # type: ignore[attr-defined]
        self.tips[name] = list(texts)


def png(figure: Figure, dpi: int) -> bytes:
    """With so many colours as a figure has: a third of the size, and nobody sees it."""
    drawn, held = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, dpi=dpi, format="png")
    Image.open(drawn).convert("RGB").quantize(COLOURS).save(held, format="png", optimize=True)
    return held.getvalue()


class Style(NamedTuple):
    colour: str
    marker: str
    dash: Literal["-", "--", ":"]


def styles_of(names: Iterable[str]) -> dict[str, Style]:
    """A colour, marker and dash for each name, the same wherever it occurs in the figure."""
    found = {}
    for number, name in enumerate(dict.fromkeys(names)):
        again, at = divmod(number, len(LINES))
        found[name] = Style(*LINES[at], DASHES[again % len(DASHES)])
    return found


def legend(figure: Figure, styles: dict[str, Style]) -> None:
    """Above all panels, of what has a name; none where there is nothing to tell apart."""
    styles = {name: style for name, style in styles.items() if name}
    if not styles:
        return
    marks = [
        Line2D([], [], color=s.colour, marker=s.marker, linestyle=s.dash, markersize=5, label=name)
        for name, s in styles.items()
    ]
    longest = max(map(len, styles))
    columns = max(1, min(len(marks), 4, int(115 / (longest + 8))))
    figure.legend(
        handles=marks, loc="outside upper center", ncols=columns, frameon=False, fontsize=9
    )


def panels(count: int, height: float, wide: int | None = None) -> tuple[Figure, list[Axes]]:
    """A figure of README width, with so many panels, and so many of them in a row."""
    wide = min(count, wide) if wide else beside(count)
    rows = math.ceil(count / wide)
    figure = Figure(figsize=(WIDTH, height * rows + 0.5), layout="constrained")
    axes = [figure.add_subplot(rows, wide, n + 1) for n in range(count)]
    for panel in axes:
        calm(panel)
        panel.tick_params(labelsize=9)
    return figure, axes


def mean_with_interval(
    axes: Axes, x: float, values: Sequence[float], style: Style
) -> tuple[float, float, float]:
    """The mean as a marker and its 95 % interval as a bar; (mean, low, high)."""
    found = spread(values)
    assert found.mean is not None
    low = found.mean if found.low is None else found.low
    high = found.mean if found.high is None else found.high
    if high > low:
        axes.plot([x, x], [low, high], color=style.colour, linewidth=1.2, zorder=2)
    axes.plot([x], [found.mean], color=style.colour, marker=style.marker, markersize=6, zorder=3)
    return found.mean, low, high


def crosses(axes: Axes, places: Sequence[tuple[float, str]]) -> None:
    """What failed, above its place on the horizontal axis, with what became of it."""
    across, stacked = axes.get_xaxis_transform(), Counter[float]()
    most = max(Counter(x for x, _ in places).values(), default=0)
    if most:  # room above all values
        bottom, top = axes.get_ylim()
        axes.set_ylim(bottom, top + (top - bottom) * 0.1 * most)
    for x, what in places:
        height = 0.96 - 0.08 * stacked[x]
        stacked[x] += 1
        axes.plot([x], [height], marker="X", color=FAILED, markersize=7, linestyle="",
                  transform=across, zorder=4)  # fmt: skip
        axes.annotate(what, (x, height), xycoords=across, xytext=(6, 0), va="center",
                      textcoords="offset points", fontsize=8, color=FAILED)  # fmt: skip


def beside(count: int) -> int:
    """How many of so many panels stand in a row."""
    return 2 if count == 4 else min(count, PER_ROW)


def fitted(
    axes: Axes, values: Iterable[float], bars: Iterable[float] = (), share: bool = False
) -> None:
    """The vertical axis fits the values; of long bars at most as much again is shown."""
    known = [v for v in values if math.isfinite(v)]
    low, high = min(known), max(known)
    room = (high - low) or abs(high) * 0.1 or 1.0
    ends = [b for b in bars if math.isfinite(b)]
    bottom = max(low - room, min([low, *ends])) - 0.08 * room
    top = min(high + room, max([high, *ends])) + 0.08 * room
    # A share ends at one, with room for a marker.
    axes.set_ylim(max(bottom, 0) if low >= 0 else bottom, min(top, 1.03) if share else top)


def listed(texts: Iterable[str], joined_by: str = "; ") -> str:
    """So many of them as somebody may listen to."""
    told = [*texts]
    more = [f"and {len(told) - MOST_SAID} more"] if len(told) > MOST_SAID else []
    return joined_by.join([*told[:MOST_SAID], *more])


def numbers_of(values: Sequence[float], form: str = "{:,.4g}") -> str:
    """mean (least to most of n), for a text in place of the figure."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{form.format(mean)} (one run)"
    low, high = form.format(min(values)), form.format(max(values))
    return f"{form.format(mean)} ({low} to {high}, n = {len(values)})"


def rate_text(rate_mbit: float | None) -> str:
    text = str(Link(rate_mbit=rate_mbit))
    return text.replace("mbit", " Mbit/s").replace("none", "rate not limited")


def delay_axis(axes: Axes, delays: list[float]) -> None:
    """Logarithmic from 1 ms, and with a place for no delay at all."""
    axes.set_xscale("symlog", linthresh=1, linscale=0.5)
    axes.set_xticks(delays, [f"{delay:g}" for delay in delays])
    axes.set_xlim(-0.4, max(delays) * 1.3)


def log_ticks(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.minorticks_off()


def log_times(axes: Axes) -> None:
    """Horizontal and logarithmic, with ticks also where there is no power of ten."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", which="minor", length=0)


def doubling_axis(axes: Axes, values: Iterable[float]) -> None:
    """For counts and sizes that are doubled: each of them is named."""
    ticks = sorted(set(values))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", which="minor", length=0)
    axes.set_xlim(ticks[0] / 1.5, ticks[-1] * 1.6)


def calm(axes: Axes) -> None:
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)

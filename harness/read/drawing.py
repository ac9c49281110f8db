"""What the figures share: colours, panels, points with their mean, and axes read at a glance."""

from __future__ import annotations

import html
import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from PIL import Image

from harness.core.links import Link
from harness.core.settings import UserError
from harness.read.statistics import spread

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


# ----
# Figures as files and as part of a page: light and dark, from one drawing.
#
# They are drawn light. The dark one has other colours and nothing else; in a page the reader's
# choice of light or dark decides.

PNG_DPI = 150


BLACK, WHITE = "#000000", "#ffffff"


# Light -> dark. What is not named stays: hues that are read on both.
DARK = {
    WHITE: "#0d1117", BLACK: "#e6edf3", "#333333": "#c9d1d9", "#777777": "#8b949e",
    "#555555": "#a0a8b0", "#dddddd": "#30363d", "#f2f2f2": "#1b2129", "#eeeeee": "#1f262e",
    "#262626": "#e6edf3", "#cccccc": "#484f58", "#c8c8c8": "#4a5159", "#9fb8c8": "#53758a",
    "#0072b2": "#3d8fe0", "#d55e00": "#f08040", "#009e73": "#2fc79a", "#56b4e9": "#b5e0ff",
    "#b00020": "#ff6b7d",
}  # fmt: skip


SALT = "harness"  # the same records give the same file


KINDS = ("svg", "png")


def darken(figure: Figure) -> None:
    """Give every part of the figure its dark colour; the figure is not light any more."""
    for artist in figure.findobj():
        for name in ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor"):
            get, put = (getattr(artist, f"{verb}_{name}", None) for verb in ("get", "set"))
            if get is None or put is None:
                continue
            found = get()
            if isinstance(found, str) and found in ("auto", "none", "inherit"):
                continue
            put(_dark(found))
    figure.set_facecolor(DARK[WHITE])


def _dark(colour: Any) -> Any:
    """One colour, or one for each of a collection's parts; how much shines through stays."""
    try:
        red, green, blue, alpha = to_rgba(colour)
    except ValueError:
        return [_dark(part) for part in colour]
    light = to_hex((red, green, blue))
    return (*to_rgba(DARK.get(light, light))[:3], alpha)


def save(drawn: Drawn, folder: Path, name: str, kinds: Sequence[str] = KINDS) -> list[Path]:
    """A file a kind, light and dark; the figure is dark after it."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}{tone}.{kind}" for kind in kinds for tone in ("", "-dark")]
    if "svg" in kinds:
        light = svg(drawn)
        (folder / f"{name}.svg").write_text(light, "utf-8")
        (folder / f"{name}-dark.svg").write_text(_dark_text(light), "utf-8")
    if "png" in kinds:
        (folder / f"{name}.png").write_bytes(png(drawn.figure, PNG_DPI))
        drawn.figure.set_layout_engine("none")  # laid out once, for both
        darken(drawn.figure)
        (folder / f"{name}-dark.png").write_bytes(png(drawn.figure, PNG_DPI))
    return files


def svg(drawn: Drawn) -> str:
    """The figure as text, and in words; letters as letters, a tenth of the size of outlines."""
    drawn.svg = drawn.svg or _drawn_svg(drawn)
    return drawn.svg


def _drawn_svg(drawn: Drawn) -> str:
    held = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": SALT, "svg.fonttype": "none"}):
        drawn.figure.savefig(held, format="svg", metadata={"Date": None, "Creator": None})
    text = held.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"(\.\d\d)\d+", r"\1", text)  # a hundredth of a point is fine enough
    fonts = "'DejaVu Sans', Verdana, sans-serif"
    text = re.sub(r" font-family: [^;\"]*;?", "", text)
    # What has no colour of its own is black: said once, so that it can be another.
    opening = f'<svg font-family="{fonts}" fill="{BLACK}" role="img" '
    text = re.sub(r"\n\s*", "\n", text).replace("<svg ", opening, 1)
    return re.sub(r"(<svg [^>]*>)", lambda m: m[1] + _title(drawn.alt), text, count=1)


def _title(alt: str) -> str:
    return f"<title>{html.escape(alt)}</title>"


COLOUR = re.compile(r"(?<=[\" ])#[0-9a-f]{6}(?=[;\"])")


def _dark_text(light: str) -> str:
    return COLOUR.sub(lambda m: DARK.get(m.group(), m.group()), light)


def for_page(drawn: Drawn, name: str) -> str:
    """The drawing to stand inside a page: its colours are the page's, its points can be asked."""
    # The title of a whole drawing would be shown wherever a pointer rests on it.
    text = re.sub(r"<title>.*?</title>", "", svg(drawn), count=1, flags=re.DOTALL)
    text = COLOUR.sub(lambda m: _variable(m.group()), text)
    # Names are of one figure; a page has many.
    text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = _with_tips(text, name, drawn.tips)
    said = html.escape(drawn.alt, quote=True)
    # A variable is not understood in an attribute, only in a style.
    text = text.replace(f'fill="{_variable(BLACK)}" ', "", 1)
    return text.replace("<svg ", f'<svg aria-label="{said}" class="figure" ', 1)


def _variable(colour: str) -> str:
    return f"var(--c{colour[1:]})" if colour in DARK else colour


def colour_rules() -> tuple[str, str]:
    """Values of the variables above, light and dark, as text of a style sheet."""
    light = "".join(f"--c{colour[1:]}:{colour};" for colour in DARK)
    dark = "".join(f"--c{colour[1:]}:{other};" for colour, other in DARK.items())
    return light, dark


def _with_tips(text: str, name: str, tips: Mapping[str, list[str]]) -> str:
    """Each drawn point is given what it is."""
    for gid, texts in tips.items():
        start = text.find(f'id="{name}-{gid}"')
        if start < 0:
            continue
        end = _end_of_group(text, start)
        points = text[start:end].split("<use ")
        if len(points) == len(texts) + 1:
            told = (f'data-tip="{html.escape(tip, quote=True)}" ' for tip in texts)
            pairs = zip(told, points[1:], strict=True)
            points = [points[0], *(f"<use {tip}{point}" for tip, point in pairs)]
            text = text[:start] + "".join(points) + text[end:]
    return text


def _end_of_group(text: str, start: int) -> int:
    """Where the <g> ends inside which a place lies."""
    depth = 1
    for found in re.compile(r"<g[ >]|</g>").finditer(text, start):
        depth += -1 if found.group() == "</g>" else 1
        if depth == 0:
            return found.end()
    return len(text)

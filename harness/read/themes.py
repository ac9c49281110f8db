"""Figures as files and as part of a page: light and dark, from one drawing.

They are drawn light. The dark one has other colours and nothing else; in a page the reader's
choice of light or dark decides.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.colors import to_hex, to_rgba
from matplotlib.figure import Figure

from harness.read.drawing import Drawn, png

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

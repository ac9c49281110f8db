"""Drawings as files, light and dark, and inside a page."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.colors import to_hex, to_rgba
from matplotlib.figure import Figure

from harness.read.drawing import BLACK, DARK, PNG_DPI, WHITE, Drawn, lay_out, png

KINDS = ("svg", "png")


def darken(figure: Figure) -> None:
    """Give every part of the figure its dark colour."""
    for artist in figure.findobj():
        for name in ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor"):
            get, put = (getattr(artist, f"{verb}_{name}", None) for verb in ("get", "set"))
            if get is None or put is None:
                continue
            colour = get()
            if not (isinstance(colour, str) and colour in ("auto", "none", "inherit")):
                put(_dark(colour))
    figure.set_facecolor(DARK[WHITE])


def _dark(colour: Any) -> Any:
    """The dark variant of a colour, or of each part of a collection; the opacity stays."""
    try:
        red, green, blue, alpha = to_rgba(colour)
    except ValueError:
        return [_dark(part) for part in colour]
    light = to_hex((red, green, blue))
    return (*to_rgba(DARK.get(light, light))[:3], alpha)


def save(
    drawn: Drawn, folder: Path, name: str, kinds: Sequence[str] = KINDS, dark: bool = True
) -> list[Path]:
    """Write light and, with `dark`, dark files of each kind; a dark PNG leaves the figure dark."""
    folder.mkdir(parents=True, exist_ok=True)
    lay_out(drawn.figure)
    written = [folder / f"{name}.{kind}" for kind in kinds]
    for file in written:
        if file.suffix == ".pdf":  # for paper, which is light; letters as letters, not as drawings
            with matplotlib.rc_context({"pdf.fonttype": 42}):
                drawn.figure.savefig(file, metadata={"CreationDate": None})
        elif file.suffix == ".svg":
            file.write_text(svg(drawn, {}), "utf-8")
        else:
            file.write_bytes(png(drawn.figure, PNG_DPI))
    for file in [file for file in written if dark and file.suffix != ".pdf"]:
        other = file.with_stem(f"{name}-dark")
        if file.suffix == ".svg":
            other.write_text(svg(drawn, DARK), "utf-8")
        else:
            darken(drawn.figure)
            other.write_bytes(png(drawn.figure, PNG_DPI))
        written.insert(written.index(file) + 1, other)
    return written


VARIABLES = {colour: f"var(--c{colour[1:]})" for colour in DARK}


def colour_rules() -> tuple[str, str]:
    """The values of these CSS variables, light and dark, as text of a style sheet."""
    light = "".join(f"--c{colour[1:]}:{colour};" for colour in DARK)
    dark = "".join(f"--c{colour[1:]}:{other};" for colour, other in DARK.items())
    return light, dark


NAMESPACE = "http://www.w3.org/2000/svg"
LINK = "{http://www.w3.org/1999/xlink}href"
ElementTree.register_namespace("", NAMESPACE)
ElementTree.register_namespace("xlink", LINK[1:-5])


def svg(drawn: Drawn, colours: Mapping[str, str]) -> str:
    """The drawing as an SVG file; colours: {} as it was drawn, DARK in dark colours."""
    root = _svg_tree(drawn, colours)
    root.set("fill", colours.get(BLACK, BLACK))  # for text, which has no colour of its own
    title = ElementTree.Element(f"{{{NAMESPACE}}}title")
    title.text = drawn.alt
    root.insert(0, title)
    return ElementTree.tostring(root, encoding="unicode")


def for_page(drawn: Drawn, name: str) -> str:
    """The drawing as SVG inside a page: CSS variables as colours, tooltips, ids with a prefix.

    It has no title element, which browsers show wherever the pointer rests on the drawing.
    """
    root = _svg_tree(drawn, VARIABLES)
    for gid, texts in drawn.tips.items():
        points = root.findall(f".//*[@id='{gid}']//{{{NAMESPACE}}}use")
        if len(texts) == len(points):
            for point, text in zip(points, texts, strict=True):
                point.set("data-tip", text)
    for element in root.iter():  # ids must be unique in a page of many figures
        for key, value in element.items():
            if key == "id":
                element.set(key, f"{name}-{value}")
            elif key == LINK:
                element.set(key, f"#{name}-{value[1:]}")
            elif "url(#" in value:
                element.set(key, value.replace("url(#", f"url(#{name}-"))
    root.set("aria-label", drawn.alt)
    root.set("class", "figure")
    # A page may scale the drawing; its style sheet limits this by the width, for legible letters.
    root.set("style", f"--inches:{drawn.figure.get_figwidth():g}")
    return ElementTree.tostring(root, encoding="unicode")


def _svg_tree(drawn: Drawn, colours: Mapping[str, str]) -> ElementTree.Element:
    """The drawing in these colours; it is drawn once."""
    if not drawn.svg:
        lay_out(drawn.figure)
        buffer = io.StringIO()
        # A fixed salt of the ids: the same records give the same file.
        with matplotlib.rc_context({"svg.hashsalt": "harness", "svg.fonttype": "none"}):
            no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            drawn.figure.savefig(buffer, format="svg", metadata=no_metadata)
        drawn.svg = _smaller(buffer.getvalue())
    root = ElementTree.fromstring(drawn.svg)  # noqa: S314 # matplotlib wrote it
    for element in root.iter() if colours else ():
        if style := element.get("style"):
            rules = (rule.split(":", 1) for rule in style.split(";"))
            element.set("style", ";".join(f"{n}:{colours.get(v, v)}" for n, v in rules))
    root.set("font-family", "'DejaVu Sans', Verdana, sans-serif")
    root.set("role", "img")
    return root


def _smaller(drawing: str) -> str:
    """matplotlib's SVG made smaller: letters as letters, hundredths of a point, one font."""
    root = ElementTree.fromstring(re.sub(r"\n\s*", "\n", drawing))  # noqa: S314 # as above
    for element in root.iter():
        for key, value in element.items():
            element.set(key, re.sub(r"(\.\d\d)\d+", r"\1", value))
        if style := element.get("style"):
            rules = [rule.strip().split(": ") for rule in style.split(";") if rule.strip()]
            kept = (f"{n}:{v}" for n, v in rules if n != "font-family")
            element.set("style", ";".join(kept))
    return ElementTree.tostring(root, encoding="unicode")

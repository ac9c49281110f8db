"""Tables and lists of texts, shown on a terminal, as Markdown, as HTML; tables also as LaTeX."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from harness.core.process import printable
from harness.core.settings import UserError
from harness.read.labels import SIGN, UNKNOWN, heading_of

GAP = 2  # spaces between columns on a terminal
NUMBER = re.compile(r"^[-+]?[\d.,]+")
# What a column of numbers may hold besides numbers.
NO_NUMBER = re.compile(rf"{UNKNOWN}|base|not reached|missed \d+ of \d+|infinite")


@dataclass(frozen=True)
class Table:
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    keys: int = 1  # the number of columns that identify a row
    numeric: Sequence[bool] | None = None  # columns aligned to the right; None: those of numbers
    attributes: Sequence[Mapping[str, str]] = ()  # of each row on a page: data-NAME of its element

    @property
    def right(self) -> list[bool]:
        return list(self.numeric) if self.numeric is not None else [*map(_is_numeric, self.columns)]

    @property
    def columns(self) -> list[list[str]]:
        return [[row[n] for row in self.rows] for n in range(len(self.headings))]

    def select(self, at: Sequence[int]) -> Table:
        """The same rows with these columns alone."""
        right = self.right
        return replace(
            self,
            headings=[self.headings[n] for n in at],
            rows=[[row[n] for n in at] for row in self.rows],
            numeric=[right[n] for n in at],
        )


def chosen(table: Table, names: Sequence[str]) -> Table:
    """The named columns, by heading or by name of the field, in this order. Where the key columns
    among them (the number of runs does not count as one), batch and updates do not tell all rows
    apart, the other key columns in which rows differ come first.
    """
    at: list[int] = []
    for name in names:
        matching = [n for n, head in enumerate(table.headings) if head in (name, heading_of(name))]
        if not matching:
            raise UserError(f"no column {name}: there are {', '.join(table.headings)}")
        at += matching
    keys = [n for n in range(table.keys) if table.headings[n] != "n"]
    named = [n for n in at if n in keys]
    known = [heading_of(name) for name in ("effective_batch", "updates")]
    telling = [n for n in at if n in keys or table.headings[n] in known]
    distinct, most_distinct = (
        len({*zip(*table.select(of).columns, strict=True)}) for of in (telling, [*keys, *telling])
    )
    if named and distinct == most_distinct:
        return replace(table.select(at), keys=1)
    lacking = [n for n in range(table.keys) if len({*table.columns[n]}) > 1 and n not in at]
    return replace(table.select([*lacking, *at]), keys=len(lacking) or 1)


def _is_numeric(cells: Sequence[str]) -> bool:
    return all(NUMBER.match(cell) or NO_NUMBER.fullmatch(cell) for cell in cells)


class PlainConsole(Console):
    """A console without markup, as reasons and names hold brackets, or control characters."""

    def __init__(self) -> None:
        super().__init__(highlight=False, soft_wrap=True, markup=False, emoji=False)

    def print(self, *objects: Any, **how: Any) -> None:
        texts = (printable(each) if isinstance(each, str) else each for each in objects)
        super().print(*texts, **how)

    def on_broken_pipe(self) -> None:
        """Called by rich when the reader has closed the pipe; quiet_when_closed() handles it."""
        raise BrokenPipeError


def screen() -> Console:
    return PlainConsole()


class Item(NamedTuple):
    """An item of a list: a text, and the texts below it."""

    text: str
    below: Sequence[str] = ()


def show_list(items: Iterable[Item]) -> None:
    """Print a list; on a terminal, lines are broken between words."""
    console = screen()
    for text, below in items:
        for line, indent in ((text, "- "), *((each, "  - ") for each in below)):
            width = console.width if console.is_terminal else len(line) + len(indent)
            more = " " * len(indent)
            console.print(textwrap.fill(line, width, initial_indent=indent, subsequent_indent=more))


def show(table: Table) -> None:
    """Print a table, in parts if the terminal is too narrow: nothing is cropped."""
    console = screen()
    for part in parts(table, console.width if console.is_terminal else None):
        drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for n, right in enumerate(part.right):
            drawn.add_column(
                Text("\n".join(_heading_lines(part, n))), justify="right" if right else "left",
                no_wrap=True, vertical="bottom", header_style="bold",
            )  # fmt: skip
        for row in part.rows:
            drawn.add_row(*(Text(printable(cell)) for cell in row))
        Console(highlight=False, width=_width(part, range(len(part.headings)))).print(drawn)


def parts(table: Table, width: int | None) -> list[Table]:
    """As few tables as possible, of similar width; each repeats the key columns."""
    every_column = range(len(table.headings))
    if width is None or _width(table, every_column) <= width:
        return [table]
    rows = [[cell.replace(" ± ", "±") for cell in row] for row in table.rows]
    tight = replace(table, rows=rows)
    if _width(tight, every_column) <= width:
        return [tight]
    fewest = _filled(table, width)
    while width > 1 and len(narrower := _filled(table, width - 1)) == len(fewest):
        fewest, width = narrower, width - 1
    return [table.select(columns) for columns in fewest]


def _filled(table: Table, width: int) -> list[list[int]]:
    """The columns of each part: the keys, and as many others as fit."""
    keys = list(range(table.keys))
    columns = [[*keys]]
    for n in range(table.keys, len(table.headings)):
        if len(columns[-1]) > len(keys) and _width(table, [*columns[-1], n]) > width:
            columns.append([*keys])
        columns[-1].append(n)
    return columns


def _heading_lines(table: Table, n: int) -> list[str]:
    """The heading, over several lines where it is longer than what stands below it."""
    heading, cells = table.headings[n], [row[n] for row in table.rows]
    longest = max(map(cell_len, (*heading.split(), *cells)), default=1)
    return textwrap.wrap(heading, longest, break_long_words=False) if heading else [""]


def _width(table: Table, columns: Iterable[int]) -> int:
    widths = (
        max(map(cell_len, (*_heading_lines(table, n), *(row[n] for row in table.rows))))
        for n in columns
    )
    # With the box's own edge, a space on either side.
    return sum(width + GAP for width in widths) - GAP + 2


def markdown_lines(table: Table, as_is: bool = False) -> Iterator[str]:
    """as_is: the cells are Markdown already, and nothing in them is escaped."""
    first, *rows = (
        " | ".join(cells if as_is else map(escaped, cells))
        for cells in (table.headings, *table.rows)
    )
    yield f"| {first} |"
    yield "|" + "|".join("--:" if right else "---" for right in table.right) + "|"
    yield from (f"| {row} |" for row in rows)


def markdown_list(items: Iterable[Item]) -> Iterator[str]:
    for text, below in items:
        yield f"- {escaped(text)}"
        yield from (f"  - {escaped(each)}" for each in below)


def escaped(text: str) -> str:
    """Escape what Markdown would interpret, which an underscore inside a word is not."""
    text = " ".join(printable(text).split())
    return re.sub(r"([\\|*<>&`\[\]]|(?<!\w)_|_(?!\w))", r"\\\1", text)


def as_code(text: str) -> str:
    """The text between backticks, where Markdown interprets nothing else."""
    return f"`{' '.join(text.split()).replace('`', chr(39))}`"


LATEX = str.maketrans({
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "[": "{[}", "]": "{]}",
    "±": r"$\pm$", "†": r"\textdagger{}", "‡": r"\textdaggerdbl{}",
    "§": r"\S{}", "¶": r"\P{}", "≥": r"$\geq$", "≤": r"$\leq$", "`": r"\textasciigrave{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
})  # fmt: skip


def latex_lines(table: Table) -> Iterator[str]:
    """For \\usepackage{booktabs}."""
    yield rf"\begin{{tabular}}{{{''.join('r' if right else 'l' for right in table.right)}}}"
    yield r"\toprule"
    yield _latex_row(table.headings)
    yield r"\midrule"
    yield from map(_latex_row, table.rows)
    yield r"\bottomrule"
    yield r"\end{tabular}"


def _latex_row(cells: Iterable[str]) -> str:
    texts = (" ".join(printable(cell).split()).translate(LATEX) for cell in cells)
    # A minus, not a hyphen.
    return " & ".join(SIGN.sub("$-$", text) for text in texts) + r" \\"


def html_lines(table: Table) -> Iterator[str]:
    """The table with buttons as headings, for sorting; it scrolls by itself, also by keyboard."""
    kinds = [' class="number"' if right else "" for right in table.right]
    yield '<div class="wide" tabindex="0"><table>\n<thead><tr>'
    yield "".join(
        f'<th scope="col"{kind}><button type="button">{html.escape(heading)}</button></th>'
        for heading, kind in zip(table.headings, kinds, strict=True)
    )
    yield "</tr></thead>\n<tbody>"
    for row, values in zip(table.rows, table.attributes or [{}] * len(table.rows), strict=True):
        cells = zip(row, kinds, strict=True)
        texts = (f"<td{kind}>{html.escape(cell)}</td>" for cell, kind in cells)
        attributes = (f' data-{name}="{html.escape(value)}"' for name, value in values.items())
        yield f"<tr{''.join(attributes)}>" + "".join(texts) + "</tr>"
    yield "</tbody></table></div>"


def html_list(items: Iterable[Item]) -> str:
    return f"<ul>{''.join(map(_html_item, items))}</ul>"


def _html_item(item: Item) -> str:
    below = html_list(map(Item, item.below)) if item.below else ""
    return f"<li>{html.escape(item.text)}{below}</li>"

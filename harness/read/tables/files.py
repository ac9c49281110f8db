"""A sweep's table drawn: on the screen, and as the files that lie beside sweep.json."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.core.command_line import print_json
from harness.core.settings import UserError
from harness.read.records.baseline import run_row
from harness.read.records.sweeps import SweepResults, read_sweep
from harness.read.tables.columns import Row
from harness.read.tables.sweep_table import Shown, table_of

GAP = 2  # spaces between columns


def show_sweep(path: Path, write: bool, as_json: bool = False) -> None:
    """What python -m harness table does with the folder of a sweep."""
    sweep = read_sweep(path)
    shown, rows = table_of(sweep)
    files = write_files(sweep, shown, rows) if write else []
    if as_json:
        print_json({
            "sweep": sweep.name, "question": sweep.question, "rows": rows,
            "runs": [run_row(sweep, run) for run in sweep.runs], "written": files,
        })  # fmt: skip
        return
    draw(shown)
    screen = _screen()
    for file in files:
        screen.print(f"written: {file}")
    screen.print(f"records: {sweep.output_dir}")


def draw(shown: Shown) -> None:
    screen = _screen()
    screen.print(shown.title, style="bold")
    screen.print(shown.about)
    fitting, columns_of_tables = fit(shown, screen.width if screen.is_terminal else None)
    for columns in columns_of_tables:
        table, width = _drawn(fitting, columns)
        # Never cropped: a terminal that is too narrow wraps the lines, a file has no width.
        Console(highlight=False, width=width).print(table)
    for which, what, path in shown.not_finished:
        screen.print(f"{what} ({which})" + (f"\n  {path}" if path else ""))
    for note in shown.notes:
        screen.print(note)
    for line in shown.legend:
        screen.print(line, style="dim")
    if shown.environment:
        screen.print("; ".join(shown.environment), style="dim")
    if shown.command:
        screen.print(shown.command, style="dim")


def _screen() -> Console:
    # Markup off: reasons and names hold brackets.
    return Console(highlight=False, soft_wrap=True, markup=False, emoji=False)


def _drawn(shown: Shown, columns: list[int]) -> tuple[Table, int]:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for n in columns:
        side: Literal["left", "right"] = "right" if shown.right[n] else "left"
        table.add_column(
            Text("\n".join(_heading(shown, n))), justify=side, no_wrap=True, vertical="bottom"
        )
        table.columns[-1].header_style = "bold"
    for row in shown.rows:
        table.add_row(*(Text(row[n]) for n in columns))
    return table, _width(shown, columns)


def _heading(shown: Shown, n: int) -> list[str]:
    """Over several lines where it is longer than what stands below it."""
    heading = shown.headings[n]
    longest = max(map(cell_len, (*heading.split(), *(row[n] for row in shown.rows))), default=1)
    return textwrap.wrap(heading, longest, break_long_words=False)


def _width(shown: Shown, columns: list[int]) -> int:
    # With the box's own edge, a space on either side.
    return sum(_column_width(shown, n) + GAP for n in columns) - GAP + 2


def _column_width(shown: Shown, n: int) -> int:
    return max(map(cell_len, (*_heading(shown, n), *(row[n] for row in shown.rows))))


def fit(shown: Shown, width: int | None) -> tuple[Shown, list[list[int]]]:
    """The table for a width, and the columns of each part; each part says which row is which.

    One part if that is possible, else as few as are needed, and of like width.
    """
    keys = list(range(shown.keys))
    rest = list(range(shown.keys, len(shown.headings)))
    if width is None or _width(shown, keys + rest) <= width:
        return shown, [keys + rest]
    tight = replace(shown, rows=[[cell.replace(" ± ", "±") for cell in r] for r in shown.rows])
    if _width(tight, keys + rest) <= width:
        return tight, [keys + rest]
    return shown, _parts(shown, keys, rest, width)


def _parts(shown: Shown, keys: list[int], rest: list[int], width: int) -> list[list[int]]:
    fewest = _filled(shown, keys, rest, width)
    while len(narrower := _filled(shown, keys, rest, width - 1)) == len(fewest) and width > 1:
        fewest, width = narrower, width - 1
    return fewest


def _filled(shown: Shown, keys: list[int], rest: list[int], width: int) -> list[list[int]]:
    tables = [[*keys]]
    for n in rest:
        if len(tables[-1]) > len(keys) and _width(shown, [*tables[-1], n]) > width:
            tables.append([*keys])
        tables[-1].append(n)
    return tables


def write_files(sweep: SweepResults, shown: Shown, rows: list[Row]) -> list[Path]:
    """table.md, table.csv and runs.csv, each whole or not at all."""
    texts = {
        "table.md": markdown(shown),
        "table.csv": csv_text(rows),
        "runs.csv": csv_text([run_row(sweep, run) for run in sweep.runs]),
    }
    files = []
    for name, text in texts.items():
        file = sweep.folder / name
        draft = file.with_name(f".{name}.{os.getpid()}")
        try:
            draft.write_text(text, "utf-8")
            draft.replace(file)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise UserError(f"{file} cannot be written: {error.strerror}") from None
        files.append(file)
    return files


def csv_text(rows: Any) -> str:
    """Unknown is empty, a miss is inf, a list is its values with ; between them."""
    cells = [{name: _cell(value) for name, value in row.items()} for row in rows]
    return str(pd.DataFrame(cells, dtype=object).to_csv(index=False, lineterminator="\n"))


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return ";".join("" if part is None else str(part) for part in value)
    return " ".join(value.split()) if isinstance(value, str) else value


def markdown(shown: Shown) -> str:
    """To be pasted into an issue or a README as it is."""
    return "\n".join(_markdown(shown)) + "\n"


def _markdown(shown: Shown) -> Iterator[str]:
    yield f"### {escaped(shown.title)}"
    yield ""
    yield escaped(shown.about)
    yield ""
    yield from table_lines(shown, range(len(shown.headings)))
    if shown.not_finished:
        yield ""
        for which, what, path in shown.not_finished:
            where = f" ({_code(path)})" if path else ""
            yield f"- {escaped(which)}{where}: {_code(what)}"
    for text in (*shown.notes, *shown.legend):
        yield ""
        yield escaped(text)
    if shown.environment:
        yield ""
        yield f"Environment: {escaped('; '.join(shown.environment))}"
    if shown.command:
        yield ""
        yield f"Command: {_code(shown.command)}"


def table_lines(shown: Shown, columns: Iterable[int]) -> Iterator[str]:
    columns = list(columns)
    yield _line(shown.headings[n] for n in columns)
    yield "|" + "|".join("--:" if shown.right[n] else "---" for n in columns) + "|"
    for row in shown.rows:
        yield _line(row[n] for n in columns)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(map(escaped, cells)) + " |"


def escaped(text: str) -> str:
    """What Markdown would take for its own; an underscore inside a word is none of it."""
    return re.sub(r"([|*<>`\[\]]|(?<!\w)_|_(?!\w))", r"\\\1", " ".join(text.split()))


def _code(text: str) -> str:
    return f"`{' '.join(text.split()).replace('`', chr(39))}`"


# ----
# The tables of a README, made of records: python -m harness.read.tables.files README.md
#
# <!-- table outputs/published/sweeps/demo-tiny: script, setup, accuracy -->
# <!-- end of table -->
#
# What stands between such lines is replaced by these columns of the sweep's table, with the sample
# standard deviations over the seeds. Nothing else of the file is touched.

END = "<!-- end of table -->"


PLACE = re.compile(r"(<!-- table (?P<folder>[^:\n]+): (?P<columns>[^\n]+) -->\n)(?P<old>.*?)"
                   rf"(?={END})", re.DOTALL)  # fmt: skip


def main(argv: list[str]) -> int:
    try:
        if len(argv) != 1:
            raise UserError("usage: python -m harness.read.tables.files FILE")
        file = Path(argv[0])
        try:
            text = file.read_text("utf-8")
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}") from None
        file.write_text(with_tables(text, file.parent), "utf-8")
    except UserError as error:
        print(f"readme: error: {error}", file=sys.stderr)
        return 2
    return 0


def with_tables(text: str, root: Path) -> str:
    """The text with its tables as the records below root have them."""
    places = text.count("<!-- table ")
    if len(PLACE.findall(text)) != places:
        raise UserError(f"a place of a table is not closed by {END}, or names no columns")
    return PLACE.sub(
        lambda place: place[1] + _table(root / place["folder"], place["columns"]), text
    )


def _table(folder: Path, columns: str) -> str:
    shown, _ = table_of(read_sweep(folder))
    wanted = [name.strip() for name in columns.split(",")]
    for name in wanted:
        if name not in shown.headings:
            raise UserError(f"{folder} has no column {name}; it has {', '.join(shown.headings)}")
    return "\n".join(table_lines(shown, [shown.headings.index(name) for name in wanted])) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

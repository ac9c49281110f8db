"""A sweep's table drawn: on the screen, and as the files that lie beside sweep.json."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from harness.core.command_line import print_json
from harness.core.settings import UserError
from harness.read.records.baseline import run_row
from harness.read.records.sweeps import SweepResults, read_sweep
from harness.read.table import escaped, markdown_lines, screen, show
from harness.read.tables.columns import Row
from harness.read.tables.sweep_table import SweepTable, sweep_table


def show_sweep(path: Path, write: bool, as_json: bool = False) -> None:
    """What python -m harness table does with the folder of a sweep."""
    sweep = read_sweep(path)
    shown, rows = sweep_table(sweep)
    files = write_files(sweep, shown, rows) if write else []
    if as_json:
        print_json({
            "sweep": sweep.name, "question": sweep.question, "rows": rows,
            "runs": [run_row(sweep, run) for run in sweep.runs], "written": files,
        })  # fmt: skip
        return
    draw(shown)
    console = screen()
    for file in files:
        console.print(f"written: {file}")
    console.print(f"records: {sweep.output_dir}")


def draw(shown: SweepTable) -> None:
    console = screen()
    console.print(shown.title, style="bold")
    console.print(shown.about)
    show(shown.table)
    for which, what, path in shown.not_finished:
        console.print(f"{what} ({which})" + (f"\n  {path}" if path else ""))
    for note in shown.notes:
        console.print(note)
    environment = ["; ".join(shown.environment)] if shown.environment else []
    for line in (*shown.legend, *environment, *([shown.command] if shown.command else [])):
        console.print(line, style="dim")


def write_files(sweep: SweepResults, shown: SweepTable, rows: list[Row]) -> list[Path]:
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


def markdown(shown: SweepTable) -> str:
    """To be pasted into an issue or a README as it is."""
    return "\n".join(_markdown(shown)) + "\n"


def _markdown(shown: SweepTable) -> Iterator[str]:
    yield f"### {escaped(shown.title)}"
    yield ""
    yield escaped(shown.about)
    yield ""
    yield from markdown_lines(shown.table)
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


def _code(text: str) -> str:
    return f"`{' '.join(text.split()).replace('`', chr(39))}`"


# Tables of a README are made of records by python -m harness.read.tables.files README.md:
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
    table = sweep_table(read_sweep(folder))[0].table
    wanted = [name.strip() for name in columns.split(",")]
    for name in wanted:
        if name not in table.headings:
            raise UserError(f"{folder} has no column {name}; it has {', '.join(table.headings)}")
    chosen = table.select([table.headings.index(name) for name in wanted])
    return "\n".join(markdown_lines(chosen)) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

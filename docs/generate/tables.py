"""The tables and answers of a page, from the records that it names.

python -m docs.generate.tables README.md

    <!-- table outputs/published/sweeps/demo-tiny: script, setup, accuracy -->
    <!-- end of table -->
    <!-- table outputs/published/sweeps/news: setup, accuracy; and words alone of outputs/words -->
    <!-- end of table -->
    <!-- answers outputs/published/sweeps/slow_links-tiny: setup=2_1, link=80ms/50mbit -->
    <!-- end of answers -->
    <!-- answers FOLDER: strategy=diloco; against strategy=ddp, exchange=direct -->
    <!-- end of answers -->
    <!-- verdicts outputs/published/sweeps/news -->
    <!-- end of verdicts -->
    <!-- sweeps experiments -->
    <!-- end of sweeps -->
    <!-- floors records/exchange -->
    <!-- end of floors -->
    <!-- simulated records/lossy -->
    <!-- end of simulated -->

What stands between such lines is replaced by these columns of the sweep's table, with the sample
standard deviations over the seeds, with the runs of another folder as a last row of that name, or
by what the sweep answers in these cases, against its baseline or the one named, by whether the
numbers of its hypothesis hold, by how long exchanges took, relative to what is possible, or beside
what is simulated (records of python -m benchmarks.exchange). Nothing else of the file is touched.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.exchange import floors, simulated
from harness.core.settings import UserError
from harness.launch.sweepfile import header_of
from harness.read.compare.answers import answers
from harness.read.compare.expected import verdicts
from harness.read.labels import UNKNOWN, has_texts
from harness.read.records.sweeps import SweepResults, read_results, read_sweep
from harness.read.table import Item, Table, chosen, markdown_lines, markdown_list
from harness.read.tables.sweep_table import sweep_table

PLACE = re.compile(
    r"(?P<start><!-- (?P<kind>table|answers|verdicts|sweeps|floors|simulated) (?P<folder>[^:\n]+)"
    r"(: (?P<what>[^\n]+))? -->\n)"
    r"(?P<old>.*?)(?=<!-- end of (?P=kind) -->)", re.DOTALL,
)  # fmt: skip
STARTS = re.compile(r"<!-- (table|answers|verdicts|sweeps|floors|simulated) ")


def main(argv: list[str]) -> int:
    try:
        if len(argv) != 1:
            raise UserError("usage: python -m docs.generate.tables PAGE")
        file = Path(argv[0])
        try:
            text = file.read_text("utf-8")
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}") from None
        file.write_text(with_tables(text, file.parent), "utf-8")
    except UserError as error:
        print(f"docs.generate.tables: error: {error}", file=sys.stderr)
        return 2
    return 0


def with_tables(text: str, root: Path) -> str:
    """The text with its tables and answers as the records below root have them."""
    places = PLACE.findall(text)
    if len(places) != len(STARTS.findall(text)):
        raise UserError(
            "a table, or a list of answers or verdicts, is not closed by its <!-- end of ... -->"
        )
    return PLACE.sub(lambda place: place["start"] + _filled(place, root), text)


def _filled(place: re.Match[str], root: Path) -> str:
    folder, what = root / place["folder"], place["what"] or ""
    if place["kind"] == "table":
        lines = _table(read_sweep(folder), what, root)
    elif place["kind"] == "answers":
        lines = _answers(read_sweep(folder), what)
    elif place["kind"] == "verdicts":
        lines = _verdicts(read_sweep(folder))
    elif place["kind"] == "floors":
        return f"{floors(folder)}\n"
    elif place["kind"] == "simulated":
        return f"{simulated(folder)}\n"
    else:
        lines = _sweeps(folder)
    return "\n".join(lines) + "\n"


def _table(sweep: SweepResults, what: str, root: Path) -> Iterator[str]:
    columns, _, other = what.partition("; and ")
    names = [name.strip() for name in columns.split(",")]
    try:
        table = chosen(sweep_table(sweep)[0].table, names)
    except UserError as error:
        raise UserError(f"{sweep.folder}: {error}") from None
    if other:
        name, of, folder = other.rpartition(" of ")
        others = sweep_table(read_results(root / folder))[0].table if of else None
        if others is None or len(others.rows) != 1:
            raise UserError(f"; and {other}: expected NAME of FOLDER, with runs of one kind")
        known = dict(zip(others.headings, others.rows[0], strict=True))
        cells = [known.get(heading, UNKNOWN) for heading in table.headings[1:]]
        table = replace(table, rows=[*table.rows, [name, *cells]])
    return markdown_lines(table)


def _answers(sweep: SweepResults, what: str) -> Iterator[str]:
    cases, _, baseline = what.partition("; against ")
    if baseline:
        sweep = sweep.against(_of_label(sweep, _values(baseline)))
    found = answers(sweep, _values(cases))
    if not found:
        raise UserError(f"{sweep.folder}: no answer for {what or 'any case'}")
    return markdown_list(answer.item for answer in found)


def _verdicts(sweep: SweepResults) -> Iterator[str]:
    if not sweep.expect:
        raise UserError(f"{sweep.folder}: its plan expects nothing in numbers")
    return markdown_list(map(Item, verdicts(sweep)))


def _sweeps(folder: Path) -> Iterator[str]:
    """The question of each sweep file, and how long its runs take."""
    rows = []
    for file in sorted(folder.glob("*.yaml")):
        header = header_of(file)
        if missing := {"question", "time"} - header.keys():
            raise UserError(f"{file}: its header has no {' and no '.join(sorted(missing))}")
        time = header["time"].removeprefix("not measured; ")
        rows.append([file.stem, header["question"], time])
    if not rows:
        raise UserError(f"{folder}: no sweep file is in this folder")
    return markdown_lines(Table(("sweep", "question", "time"), rows, numeric=(False,) * 3))


def _of_label(sweep: SweepResults, texts: dict[str, str]) -> dict[str, Any]:
    """The values of a planned run that read like these."""
    for run in sweep.planned:
        if has_texts(run.label, texts):
            return {axis: run.label[axis] for axis in texts}
    named = ", ".join(f"{axis}={text}" for axis, text in texts.items())
    raise UserError(f"{sweep.folder}: no run has {named}")


def _values(text: str) -> dict[str, str]:
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    return {axis: value for axis, _, value in pairs}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

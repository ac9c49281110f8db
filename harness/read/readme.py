"""The tables of a README, made of records: python -m harness.read.readme README.md

    <!-- table outputs/published/sweeps/demo-tiny: script, setup, accuracy -->
    <!-- end of table -->

What stands between such lines is replaced by these columns of the sweep's table, with the sample
standard deviations over the seeds. Nothing else of the file is touched.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from harness.read.sweep_files import table_lines
from harness.read.sweep_table import make_table
from harness.read.sweeps import read_sweep
from harness.settings import UserError

END = "<!-- end of table -->"
PLACE = re.compile(r"(<!-- table (?P<folder>[^:\n]+): (?P<columns>[^\n]+) -->\n)(?P<old>.*?)"
                   rf"(?={END})", re.DOTALL)  # fmt: skip


def main(argv: list[str]) -> int:
    try:
        if len(argv) != 1:
            raise UserError("usage: python -m harness.read.readme FILE")
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
    shown, _, _ = make_table(read_sweep(folder))
    wanted = [name.strip() for name in columns.split(",")]
    for name in wanted:
        if name not in shown.headings:
            raise UserError(f"{folder} has no column {name}; it has {', '.join(shown.headings)}")
    return "\n".join(table_lines(shown, [shown.headings.index(name) for name in wanted])) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

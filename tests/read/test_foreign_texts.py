"""Texts in a record that somebody else made stay texts, in whatever is written of it."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from harness.read.report.report import make_report
from harness.read.tables.command import csv_text
from tests.support.records import Plan


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        ("=HYPERLINK(A1)", "'=HYPERLINK(A1)"), ("@SUM(A1)", "'@SUM(A1)"),
        ("+1+cmd|'/C calc'!A0", "'+1+cmd|'/C calc'!A0"), ("-2+3", "'-2+3"), ("\t=A1", "'=A1"),
        (["x", "=A1", None], "x;'=A1;"),
        ("-", "-"), ("-0.5", "-0.5"), ("+1.5e-3", "+1.5e-3"), ("-inf", "-inf"), ("-.5", "-.5"),
        ("-1,024", "-1,024"), (-0.5, "-0.5"), ([-1, None, -2.5], "-1;;-2.5"),
        ("a=b", "a=b"), ("1-2", "1-2"), (None, ""),
    ],
)  # fmt: skip
def test_no_cell_of_a_csv_file_is_a_formula(value: object, cell: str) -> None:
    # Beside a number, as a line that is all empty would be left out.
    (row,) = csv.DictReader(io.StringIO(csv_text([{"=name": value, "n": 1}])))
    assert row == {"'=name": cell, "n": "1"}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("word", "shown"), [("a`<b>`", "'a'<b>'' "), ("two\nlines", "'two lines' "), ("'open", None)]
)
def test_the_command_of_others_is_code_in_a_report(
    word: str, shown: str | None, plan: Plan, tmp_path: Path
) -> None:
    plan.run(environment={"launch": {"cpu_busy_share": 0.9}})
    command = f"python -m harness sweep {word}" if shown is None else f'a "{word}" b.yaml'
    folder = plan.write(command=command).parents[1]
    _, text, *sections = make_report(folder, tmp_path / "report")
    (line,) = [
        each for each in text.read_text().splitlines() if each.startswith("Repeat when")
    ] or [""]
    repeat = f"`a {shown}b.yaml --rerun disturbed --isolation error`"
    assert line == ("" if shown is None else f"Repeat when nothing else runs: {repeat}")
    assert len(sections) == 1

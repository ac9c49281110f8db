"""The tables in README and docs match the published records; a mistake is one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.core.settings import UserError
from harness.read.tables.command import END, main, with_tables

FOUR = "outputs/published/sweeps/slow_links_four-tiny"


def test_the_tables_match_the_records(root: Path) -> None:
    """Those of every page that `make figures` redraws, and no other file has any."""
    (patterns,) = re.findall(r"for page in (.*); do", (root / "Makefile").read_text())
    pages = [page for pattern in patterns.split() for page in sorted(root.glob(pattern))]
    texts = {page: page.read_text() for page in pages}
    assert [text.count(END) for text in texts.values() if END in text] == [1, 1, 2]
    for page, text in texts.items():
        assert with_tables(text, page.parent) == text, f"make figures: a table of {page} is old"


@pytest.mark.parametrize(
    ("strategy", "setup", "link", "text"),
    [
        ("diloco h50 lr1 m0.5", "2_1", "80ms/50mbit", "0.12 of DDP's (0.09 to 0.17)"),
        ("ddp powersgd", "2_1", "1ms/50mbit", "0.79 of DDP's time"),
        ("ddp powersgd", "2_1", "80ms/50mbit", "4.7 times as long"),
        ("hivemind t640 local updates", "2_1", "1ms/1000mbit", "2.3 times as long as DDP on two"),
        ("hivemind t640 local updates", "4_1", "1ms/1000mbit", "5.3 times as long on four"),
    ],
)
def test_ratios_to_ddp_are_those_of_the_table(
    strategy: str, setup: str, link: str, text: str, root: Path
) -> None:
    assert text in " ".join((root / "docs" / "strategies.md").read_text().split())
    table = (root / "outputs/published/sweeps/slow_links-tiny/table.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    names = next(row for row in rows if row)
    (cells,) = (row for row in rows if row[:3] == [strategy, setup, link])
    ratio, interval = cells[names.index("target train vs base")].split(" ", 1)
    shown = text.split()[0]
    assert f"{float(ratio):.{len(shown.partition('.')[2])}f}" == shown
    assert "(" not in text or text.endswith(interval)


def test_chosen_columns_replace_what_was_there_and_nothing_else(root: Path, tmp_path: Path) -> None:
    (tmp_path / "outputs").symlink_to(root / "outputs")
    place = f"before\n<!-- table {FOUR}: strategy, n -->\n"
    file = tmp_path / "PAGE.md"
    file.write_text(f"{place}old\n{END}\nafter\n{place}{END}\n")
    assert main([str(file)]) == 0
    rows = "\n".join(
        f"| {name} | 3/3 |"
        for name in ("ddp", "local_sgd h10", "diloco h10 lr1 m0.5", "diloco h25 lr1 m0.5",
                     "diloco h50 lr1 m0.5")
    )  # fmt: skip
    table = f"| strategy | n |\n|---|--:|\n{rows}\n"
    assert file.read_text() == f"{place}{table}{END}\nafter\n{place}{table}{END}\n"
    assert with_tables(file.read_text(), root) == file.read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"<!-- table {FOUR}: strategy, nothing -->\n{END}\n", "has no column nothing; it has"),
        (f"<!-- table {FOUR}: strategy -->\nold\n", "is not closed"),
        (f"<!-- table {FOUR} -->\n{END}\n", "names no columns"),
        (f"<!-- table {FOUR}: n -->\n<!-- table {FOUR}: n -->\n{END}\n", "is not closed"),
        (f"<!-- table outputs/nowhere: n -->\n{END}\n", "nowhere"),
    ],
)
def test_a_place_that_is_not_one(text: str, words: str, root: Path) -> None:
    with pytest.raises(UserError, match=words):
        with_tables(text, root)


def test_without_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2 and main([str(tmp_path / "none.md")]) == 2
    usage, missing = capsys.readouterr().err.splitlines()
    assert "usage: " in usage and "none.md cannot be read" in missing

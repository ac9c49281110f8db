"""The tables in README and docs match the published records; a mistake is one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.generate.tables import main, with_tables
from harness.core.settings import UserError

END = "<!-- end of table -->"
FOUR = "outputs/published/sweeps/slow_links_four-tiny"


def test_the_tables_match_the_records(root: Path) -> None:
    """Those of every page that `make figures` redraws, and no other file has any."""
    (patterns,) = re.findall(r"for page in (.*); do", (root / "Makefile").read_text())
    pages = [page for pattern in patterns.split() for page in sorted(root.glob(pattern))]
    texts = {page: page.read_text() for page in pages}
    places = {page.name: text.count("<!-- end of ") for page, text in texts.items()}
    expected = {"README.md": 2, "reading.md": 4, "strategies.md": 8}
    assert expected.items() <= places.items()
    for page, text in texts.items():
        assert with_tables(text, page.parent) == text, f"make figures: a table of {page} is old"


def test_answers_replace_what_was_there(root: Path, tmp_path: Path) -> None:
    (tmp_path / "outputs").symlink_to(root / "outputs")
    start = f"<!-- answers {FOUR}: strategy=diloco, sync_every=25 -->\n"
    file = tmp_path / "PAGE.md"
    file.write_text(f"{start}old\n<!-- end of answers -->\n")
    assert main([str(file)]) == 0
    first, what, measure, *_, last = file.read_text().splitlines()
    assert first == start.strip() and last == "<!-- end of answers -->"
    assert what == "- diloco h25 lr1 m0.5 against ddp:"
    assert measure.startswith("  - wall time to accuracy 0.9: 0.45 times as long")


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
        (f"<!-- table {FOUR}: strategy, nothing -->\n{END}\n", "no column nothing: there are"),
        (f"<!-- table {FOUR}: strategy -->\nold\n", "is not closed"),
        (f"<!-- table {FOUR} -->\n{END}\n", "no column : there are"),
        (f"<!-- table {FOUR}: n -->\n<!-- table {FOUR}: n -->\n{END}\n", "is not closed"),
        (
            f"<!-- answers {FOUR}: setup=9_9 -->\n<!-- end of answers -->\n",
            "no answer for setup=9_9",
        ),
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

"""A file that is imported already, with other flags."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from harness.cli import main
from tests.support.paired import text_file

NEEDED = ("--script", "bert", "--setup", "1_2", "--batch", "16", "--lr", "2e-5")


@pytest.mark.parametrize(
    "more",
    [
        ("--lr", "3e-5"), ("--batch", "4"), ("--model", "mine"), ("--dataset", "theirs"),
        ("--source", "them"),
    ],
)  # fmt: skip
def test_other_flags_for_a_file_that_is_imported_are_refused(
    more: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would change nothing. With the same ones, or fewer, nothing is asked to change."""
    file = text_file(tmp_path, name="theirs.txt")

    def take(*words: str) -> int:
        return main(["import", str(file), "--output_dir", str(tmp_path / "out"), *words])

    assert take(*NEEDED) == 0
    (path,) = (tmp_path / "out").glob("*/*/*")
    assert take(*NEEDED, *more) == 2
    assert (
        f"{file}: {path} holds it with other flags ({more[0]}); to give it these, remove that "
        "folder\n"
    ) in capsys.readouterr().err
    shutil.rmtree(path)
    assert take(*NEEDED, *more) == take(*NEEDED, *more) == 0
    if more[0] not in NEEDED:
        assert take(*NEEDED) == 0


def test_json_holds_what_became_of_each_file_and_sentences_are_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = text_file(tmp_path, name="theirs.txt")
    words = ["import", str(file), "--output_dir", str(tmp_path / "out"), *NEEDED]
    for result in ("imported", "already imported"):
        assert main([*words, "--json"]) == 0
        (path,) = (tmp_path / "out").glob("*/*/*")
        printed = capsys.readouterr()
        assert json.loads(printed.out) == {
            "results": [{"file": str(file), "result": result, "path": str(path), "notes": []}]
        }
        assert printed.err == f"{result}: {file} is {path}\n"

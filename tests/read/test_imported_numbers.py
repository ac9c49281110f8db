"""Numbers of a Trainer's state that no record can hold are refused in a line, or left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli import main
from harness.core.records import find_runs

STATE = """{"epoch": 1.0, "global_step": 5, "max_steps": 5, "train_batch_size": 8,
"log_history": [{"eval_loss": 0.5, "epoch": 1.0, "step": 5}]}"""


def take(tmp_path: Path, *states: str) -> int:
    files = []
    for number, text in enumerate(states):
        files.append(tmp_path / f"checkpoint-{number}" / "trainer_state.json")
        files[-1].parent.mkdir()
        files[-1].write_text(text)
    words = ["--script", "vit", "--setup", "1_2", "--output_dir", str(tmp_path / "out")]
    return main(["import", *map(str, files), *words])


@pytest.mark.parametrize("digits", [400, 5000])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"eval_loss": 0.5', '"eval_loss": {}'), ('"eval_loss": 0.5', '"loss": -{}'),
        ('"eval_loss": 0.5', '"eval_mine": {}'), ('"step": 5', '"step": {}'),
        ('"train_batch_size": 8', '"train_batch_size": {}'),
    ],
)  # fmt: skip
def test_a_number_of_very_many_digits_is_one_line(
    before: str, after: str, digits: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    number = digits * "1"
    assert before in STATE
    assert take(tmp_path, STATE, STATE.replace(before, after.format(number))) == 2
    line, end = capsys.readouterr().err.splitlines()
    sign = "-" if "-" in after else ""
    of = f"holds the number {sign}{number[: 12 - len(sign)]}... of {digits:,} digits"
    file = tmp_path / "checkpoint-1" / "trainer_state.json"
    assert line == f"harness import: error: {file}: {of}: at most 100 are expected"
    assert end == "harness import: error: nothing was imported"


def test_yes_and_no_are_no_metrics_and_refuse_no_file(tmp_path: Path) -> None:
    more = '"eval_accuracy": 0.75, "eval_ok": true, "eval_loss": 0.5'
    assert take(tmp_path, STATE.replace('"eval_loss": 0.5', more)) == 0
    (run,) = find_runs(tmp_path / "out")
    (row,) = run.read_epochs()[0]
    assert row.get("accuracy") == 0.75 and "ok" not in row

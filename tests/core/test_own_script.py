"""A copy of bert.py under another name is a script of its own: it runs, resumes and sweeps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.core.command_line import command_line
from harness.core.provenance import changed_inputs, inputs
from harness.core.records import RunFolder, find_runs
from harness.core.settings import UserError
from harness.core.tasks import TASKS, task_of
from harness.launch.plan import plan, script_of
from harness.launch.sweepfile import load
from harness.read.records.frames import load_runs
from harness.train.run.warm import imported
from tests.support.ranks import script
from tests.support.sweeps import sweep_file

BERT = Path(__file__).resolve().parents[2] / "bert.py"
SMALL = ["--tiny", "--epochs", "1", "--train_size", "64", "--test_size", "32"]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["mine.py", *SMALL])
    Path("mine.py").write_text(BERT.read_text())
    return tmp_path / "mine.py"


def test_its_records_have_the_name_of_its_file(mine: Path) -> None:
    settings = command_line("bert")  # as the copy has it
    assert settings.script == "mine"
    assert settings.model == TASKS["bert"].tiny["model"]


@pytest.mark.parametrize("name", ["vit.py", "sweeps.py", "published.py", "my script.py"])
def test_a_name_that_records_cannot_have_is_refused(
    mine: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit, match="2"):
        command_line("bert")
    assert "cannot have this name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def main(settings): ...", r"needs a call of command_line\(\) with one of bert, vit"),
        ('command_line("mine")\ndef main(settings): ...', "needs a call of command_line"),
        ('command_line("bert")', r"a function main\(settings\)"),
        ("def main(:", "mine.py is not readable as Python"),
    ],
)
def test_what_is_no_script_is_refused(mine: Path, text: str, said: str) -> None:
    mine.write_text(text)
    with pytest.raises(UserError, match=said):
        task_of("mine")
    with pytest.raises(UserError, match=f"line 1: .*{said}"):
        load(sweep_file(mine.parent, "script: mine.py\n", "s"))


def test_a_finished_run_answers_for_its_code_alone(mine: Path) -> None:
    (mine.parent / "net.py").write_text("SIZE = 1\n\n\ndef grow():\n    global SIZE\n")
    mine.write_text("import net\n" + mine.read_text())
    settings = command_line("bert")
    before = inputs(settings)
    assert before["script"]["files"] == 2
    mine.write_text("# a comment\n" + mine.read_text())
    assert changed_inputs(before, inputs(settings)) == ""
    (mine.parent / "net.py").write_text("SIZE = 2\n")
    assert "the script has changed since" in changed_inputs(before, inputs(settings))


def test_a_copy_beside_ours_is_not_one_of_ours(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As README's reader makes it: `cp bert.py mine.py` in the checkout."""
    monkeypatch.setattr("harness.core.provenance.ROOT", mine.parent)
    before = inputs(command_line("bert"))
    mine.write_text(mine.read_text() + "print(1)\n")
    assert "the script has changed since" in changed_inputs(before, inputs(command_line("bert")))
    mine.rename("bert.py")
    monkeypatch.setattr(sys, "argv", ["bert.py"])
    assert inputs(command_line("bert"))["script"] is None


def test_a_sweep_names_it_beside_ours(mine: Path) -> None:
    text = "script: [bert, mine.py]\nmine: {epochs: 7}\ngrid: {seed: [1, 2]}\n"
    jobs = plan(load(sweep_file(mine.parent, text, "s"), tiny=True))
    own = [job for job in jobs if job.settings.script == "mine"]
    assert [job.settings.epochs for job in own] == [7, 7] and len(jobs) == 4
    assert script_of(own[0], "/elsewhere/").startswith("mine.py --")  # not beside bert.py
    assert callable(imported("mine").main)


@pytest.mark.process
def test_it_runs_is_finished_and_stands_in_the_table(mine: Path) -> None:
    done = script("mine", *SMALL, cwd=mine.parent)
    assert done.code == 0, done.err
    (folder,) = find_runs(mine.parent / "outputs")
    assert folder.path.is_relative_to(mine.parent / "outputs" / "mine" / "1_1")
    assert set(load_runs(mine.parent / "outputs")["script"]) == {"mine"}
    again = script("mine", *SMALL, cwd=mine.parent)
    assert again.out.startswith("already finished")
    mine.write_text(f"{mine.read_text()}\nCHANGED = 1\n")
    refused = script("mine", *SMALL, cwd=mine.parent)
    assert refused.code == 2 and "the script has changed since" in refused.err
    assert RunFolder(folder.path).outcome() == "finished"

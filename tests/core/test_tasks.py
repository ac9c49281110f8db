"""A third task is one script and one entry in TASKS: everything else follows from the entry."""

from __future__ import annotations

import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli import main, parser_of
from harness.core.command_line import help_text, parse, to_argv
from harness.core.identity import run_id
from harness.core.provenance import check_inputs
from harness.core.records import find_runs, read_json
from harness.core.settings import Settings, UserError
from harness.core.tasks import TASKS, module_from
from harness.launch.plan import plan
from harness.launch.sweepfile import load
from harness.read.imports.formats import settings_in
from tests.support.ranks import script
from tests.support.sweeps import sweep_file


@pytest.fixture
def reviews(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "reviews", replace(TASKS["bert"], script="reviews"))


@pytest.mark.usefixtures("reviews")
def test_a_third_task_is_parsed_identified_and_planned(tmp_path: Path) -> None:
    settings = parse("reviews", ["--tiny", "--max_length", "32"], {})
    assert (settings.script, settings.model, settings.max_length) == ("reviews", "bert-nano", 32)
    assert parse("reviews", to_argv(settings), {}) == settings
    assert run_id(settings) != run_id(replace(settings, script="bert"))
    assert "python reviews.py" in help_text("reviews")
    with pytest.raises(UserError, match=r"--image_size is a flag of vit\.py, not of reviews\.py"):
        parse("reviews", ["--image_size", "32"], {})
    text = "script: [bert, reviews]\nreviews: {epochs: 2}\ngrid: {lr: [0.1, 0.2]}\n"
    jobs = plan(load(sweep_file(tmp_path, text), tiny=True))
    epochs = TASKS["bert"].tiny["epochs"]
    planned = [(job.settings.script, job.settings.lr, job.settings.epochs) for job in jobs]
    assert sorted(planned) == [
        ("bert", 0.1, epochs), ("bert", 0.2, epochs), ("reviews", 0.1, 2), ("reviews", 0.2, 2),
    ]  # fmt: skip
    assert parser_of("import").read(["f", "--script", "reviews"]).script == "reviews"
    assert settings_in(tmp_path / "reviews" / "1_1_2e-05_16_x.txt")["script"] == "reviews"


def test_a_script_without_a_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="script reviews"):
        load(sweep_file(tmp_path, "script: reviews\n"))
    with pytest.raises(UserError, match="expected one of bert, vit"):
        parser_of("import").read(["f", "--script", "reviews"])


@pytest.mark.process
def test_a_third_modality_trains_and_is_read(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "outputs"
    shutil.copy(root / "tests" / "support" / "tones.py", tmp_path)
    done = script("tones", "-o", str(out), cwd=tmp_path)
    assert done.code == 0, done.err[-2000:]
    (run,) = find_runs(out)
    assert run.path.relative_to(out).parts[0] == "tones"
    assert (read_json(run.settings) or {})["script"] == "tones"
    summary = run.read_summary() or {}
    assert summary.get("updates") == 8 and "accuracy" in summary
    assert main(["table", str(out)]) == 0
    assert "tones" in capsys.readouterr().out


def test_a_third_modality_may_have_its_labels_in_a_csv_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS, "tones", replace(TASKS["bert"], script="tones", input="audio"))
    (file := tmp_path / "a.csv").write_text("wave,pitch\n1,low\n")
    settings = Settings(script="tones", model="bert-nano", dataset=str(file), label_column="pitch")
    check_inputs(settings)
    with pytest.raises(UserError, match=r"--label_column ptich: did you mean pitch\?"):
        check_inputs(replace(settings, label_column="ptich"))


def test_a_file_of_ones_own_takes_no_other_modules_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("random", "my_way"):
        (tmp_path / f"{name}.py").write_text("FOUND = 7\n")
        assert module_from(tmp_path / f"{name}.py").FOUND == 7
    assert sys.modules["random"] is random and sys.modules.pop("my_way").FOUND == 7

"""Records of LogCallback alone, in any script of anybody's, before every reader."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from harness.core.records import SCHEMA, RunFolder, read_json
from harness.core.records.summary import epochs_lacking, epochs_of
from harness.core.schema.checks import check_fields
from harness.read.explain.time_breakdown import time_breakdown
from harness.read.records.frames import load_runs
from harness.read.records.runs import TO_TARGET, Target, read_run, time_to_target
from harness.read.report import report
from harness.read.report.report import make_report
from logcallback import LogCallback
from tests.support.paired import Verb
from tests.support.toys import Net, Points

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("quiet_machine")]


def in_per_cent(prediction: Any) -> dict[str, float]:
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": 100 * float(right.mean()), "mcc": 0.25, "my metric": -4.0}


def trained(
    folder: Path, batch: int, seed: int = 1, evaluated: str = "epoch", **more: Any
) -> RunFolder:
    args = TrainingArguments(
        str(folder.parent / "trainer"), num_train_epochs=2, eval_strategy=evaluated, seed=seed,
        per_device_train_batch_size=batch, learning_rate=0.01, weight_decay=0.1, use_cpu=True,
        save_strategy="no", report_to="none", disable_tqdm=True, **more,
    )  # fmt: skip
    Trainer(
        Net(), args, train_dataset=Points(32), eval_dataset=Points(16),
        compute_metrics=in_per_cent, callbacks=[LogCallback(folder)],
    ).train()  # fmt: skip
    return RunFolder(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("alone")
    trained(root / "new" / "a", 8)
    for name, batch in (("a", 8), ("b", 4)):
        folder = trained(root / "bare" / name, batch)
        # As one that knows nothing but the Trainer's arguments.
        arguments = (read_json(folder.settings) or {})["training_arguments"]
        bare = {"schema": SCHEMA, "training_arguments": arguments}
        folder.settings.write_text(json.dumps(bare))
    return root


def test_its_last_line_says_where_the_record_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], table: Verb
) -> None:
    folder = trained(tmp_path / "mine", 8).path
    line = f"recorded in {folder}; next: python -m harness table {folder}"
    said = capsys.readouterr().out
    assert said.splitlines().count(line) == 1 and "no quality" not in said
    assert "0.01" in table(folder)  # its learning rate
    other = trained(tmp_path / "other", 8, evaluated="no").path
    assert 'no quality is recorded: set eval_strategy="epoch" (' in capsys.readouterr().out
    compared = Verb("compare", capsys)(folder, other)
    assert "speed: comparable\n" in compared
    assert "quality: not comparable\n  no measure to compare\n" in compared
    verdicts = json.loads(Verb("compare", capsys)(folder, other, "--json"))["verdicts"]
    assert [verdicts[of]["comparable"] for of in ("speed", "quality")] == [True, False]


def test_another_test_set_is_refused_where_the_rows_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trained(tmp_path / "whole", 8).path
    cut = trained(tmp_path / "cut", 8, per_device_eval_batch_size=5, dataloader_drop_last=True).path
    text = Verb("compare", capsys)(whole, cut)
    assert "quality: not comparable\n  evaluated samples: A has 16, B has 15\n" in text


def test_what_the_trainer_knows_is_recorded(runs: Path) -> None:
    folder = RunFolder(runs / "new" / "a")
    settings = read_json(folder.settings) or {}
    check_fields("settings", settings, "settings.json")
    expected = {
        "model": "Net", "dataset": "Points of 32 samples", "lr": 0.01, "seed": 1, "epochs": 2,
        "per_gpu_batch": 8, "grad_acc": 1, "setup": "1_1", "precision": "fp32",
    }  # fmt: skip
    assert settings.items() >= expected.items()
    assert settings["trainer"]["weight_decay"] == 0.1
    assert "learning_rate" not in settings["trainer"]


def test_its_metrics_stand_in_the_table(runs: Path, table: Verb) -> None:
    """As they are, but for shares that were given in per cent."""
    (run,) = load_runs(runs / "new").to_dict("records")
    written = read_json(RunFolder(runs / "new" / "a").summary) or {}
    assert written["accuracy"] > 1 and run["accuracy"] == written["accuracy"] / 100
    assert run["mcc"] == 0.25 and run["my metric"] == -4.0
    said = table(runs / "new")
    assert all(word in said for word in ("Net", "Points", "0.01", "mcc", "0.2500", "-4.0000"))


def test_rows_that_nothing_else_tells_apart_name_their_folders(
    runs: Path, tmp_path: Path, table: Verb
) -> None:
    assert not re.search(r"^ run +setup", table(runs), re.MULTILINE)
    for name in ("second", "first"):
        trained(tmp_path / name, 8)
    said = table(tmp_path)
    assert re.search(r"^ run +setup", said, re.MULTILINE)
    assert re.findall(r"^ (\w+) +1_1 ", said, re.MULTILINE) == ["first", "second"]


def test_no_reader_is_broken_by_them(
    runs: Path, tmp_path: Path, table: Verb, capsys: pytest.CaptureFixture[str]
) -> None:
    explain, compare = Verb("explain", capsys), Verb("compare", capsys)
    assert "None" not in explain(runs / "bare" / "a")
    assert "The baseline is" in explain(runs / "bare" / "a", runs / "bare" / "b")
    assert "speed: comparable" in compare(runs / "bare" / "a", runs / "bare" / "b")
    assert "mcc" in compare(runs / "new" / "a", runs / "new" / "a")
    assert table(runs).count("finished") == 3
    page, *_ = make_report(runs, tmp_path / "report")
    assert page.read_text().count("<h3>Results</h3>") == 2 and "not shown" not in page.read_text()


def test_what_to_do_about_a_cost_is_said_in_arguments_of_the_trainer(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step of a net of two weights takes no time: evaluation and the start cost most."""
    said = Verb("explain", capsys)(runs / "new" / "a")
    remedies = re.findall(r"Remedy: (.*)\.", said)
    assert remedies and not any("--" in each for each in remedies), said
    assert "per_device_eval_batch_size" in said or 'save_strategy="no"' in said


def test_folders_around_it_are_not_searched(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stranger = RunFolder(runs.parent / "stranger" / "bert" / "1_1" / "run")
    stranger.path.mkdir(parents=True)
    stranger.settings.write_text("{")
    assert "not read" not in Verb("explain", capsys)(runs / "bare" / "a")


def test_a_section_that_fails_is_named_and_the_rest_is_whole(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(sweep: Any) -> Any:
        if "Net" in sweep.name:
            raise TypeError("nothing but None")
        return real(sweep)

    real = report.explain_sweep
    monkeypatch.setattr(report, "explain_sweep", broken)
    page, text, *_ = make_report(runs, tmp_path / "report")
    named = "runs of Net, Points of 32 samples is not shown: TypeError: nothing but None"
    assert page.read_text().count("<h3>Results</h3>") == 1
    assert named in page.read_text() and named in text.read_text()
    assert named in capsys.readouterr().err


def test_a_training_that_went_on_in_a_new_folder_lacks_its_first_epochs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its one epoch counted as three, and its samples and time to a target as the whole run's."""
    args = TrainingArguments(
        str(tmp_path / "trainer"), num_train_epochs=3, eval_strategy="epoch", use_cpu=True,
        save_strategy="epoch", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    for name, checkpoint in (("whole", None), ("rest", str(tmp_path / "trainer/checkpoint-8"))):
        Trainer(
            Net(), args, train_dataset=Points(32), eval_dataset=Points(16),
            compute_metrics=in_per_cent, callbacks=[LogCallback(tmp_path / name)],
        ).train(resume_from_checkpoint=checkpoint)  # fmt: skip
    target = Target.of("mcc", 0.25)
    whole, rest = (read_run(RunFolder(tmp_path / n), {}, n, target) for n in ("whole", "rest"))
    assert [len(run.epochs) for run in (whole, rest)] == [3, 1]
    assert [run.lacks_epochs for run in (whole, rest)] == [False, True]
    seconds = [row["epoch_time_s"] or 0.0 for row in (*whole.epochs, *rest.epochs)]
    assert whole.measures["epoch_time_s"] == pytest.approx(sum(seconds[:3]) / 3)
    assert rest.measures["epoch_time_s"] == pytest.approx(seconds[3])
    lacking = {"samples", "train_time_s", "eval_time_s", "wall_s", *TO_TARGET}
    lacking |= {"epochs_done", "user_s", "system_s", "save_time_s"}  # of this folder alone
    assert lacking <= {*whole.measures} and not lacking & {*rest.measures}
    assert not lacking & {*rest.toward(target).measures}
    assert rest.measures["updates"] == 12 and time_breakdown(rest).updates == 4
    assert time_breakdown(whole).updates == 12
    said = Verb("explain", capsys)(tmp_path / "rest")
    assert "None" not in said and "nan" not in said


def test_passes_over_a_stream_are_counted_by_their_updates() -> None:
    """Of a stream, the Trainer's epochs end at fractions of all updates that were asked for."""

    def rows(*updates: int) -> list[dict[str, Any]]:
        ends = [(n + end / updates[-1]) for n, end in enumerate(updates)]
        unknown = {"samples": None, "fed_samples": None, "attempt": 1, "epoch_time_s": 1.0}
        pairs = enumerate(zip(ends, updates, strict=True))
        return [{"epoch": e, "updates": u, "mcc": n / 10, **unknown} for n, (e, u) in pairs]

    streams = ([100, 200, 300], [100, 200, 250], [100, 150], [100])
    assert [epochs_of(rows(*updates)) for updates in streams] == [3, 2.5, 1.5, None]
    known: Any = rows(100, 200, 300)
    for value, epochs in ((0.0, 1), (0.1, 2), (0.2, 3)):
        assert time_to_target(known, Target("mcc", value))["tta_epochs"] == epochs
    one: Any = rows(100)
    assert "tta_epochs" not in time_to_target(one, Target("mcc", 0.0))


class OwnBatches(Trainer):
    """Whose batches are of unequal length, so that LogCallback alone knows no samples."""

    def get_train_dataloader(self) -> Any:
        batches: Any = [range(start, start + 2 + start % 4) for start in range(0, 20, 2)]
        return DataLoader(Points(32), batch_sampler=batches)  # type: ignore[arg-type]


@pytest.mark.parametrize(("asked", "epochs"), [
    ({"num_train_epochs": 1}, 1), ({"num_train_epochs": 2}, 2), ({"max_steps": 15}, 1.5),
])  # fmt: skip
def test_epochs_of_own_batches_are_no_passes_over_a_stream(
    asked: dict[str, int], epochs: float, tmp_path: Path
) -> None:
    args = TrainingArguments(
        str(tmp_path / "trainer"), use_cpu=True, save_strategy="no", report_to="none",
        disable_tqdm=True, **asked,
    )  # fmt: skip
    OwnBatches(Net(), args, callbacks=[LogCallback(tmp_path / "run")]).train()
    run = read_run(RunFolder(tmp_path / "run"), {}, "run", None)
    assert {row["samples"] for row in run.epochs} == {None}
    assert run.measures["epoch_time_s"] * epochs == pytest.approx(run.measures["train_time_s"])
    rows = [{**row, "mcc": 0.5} for row in run.epochs]
    reached: Any = replace(run, epochs=rows).toward(Target("mcc", 0.5))
    assert reached.measures["tta_epochs"] == 1


def test_whole_epochs_whose_samples_are_unknown_are_counted_by_their_rows() -> None:
    def rows(*ends: tuple[float, int]) -> list[dict[str, Any]]:
        unknown = {"samples": None, "fed_samples": None, "attempt": 1}
        return [{"epoch": epoch, "updates": updates, **unknown} for epoch, updates in ends]

    assert epochs_of(rows((1.0, 10), (2.0, 18))) == 2  # they were taken for 1.8 passes
    assert epochs_of(rows((1.0, 10), (1.5, 16))) == 1.5
    assert epochs_of(rows((3.0, 30), (4.0, 40))) == 2  # went on in a new folder
    assert epochs_of(rows((10 / 18, 10), (1 + 8 / 18, 18))) == 1.8
    one = rows((1.0, 10))
    settings = {"training_arguments": {"max_steps": -1}}
    assert (epochs_of(one), epochs_of(one, settings)) == (None, 1)
    assert epochs_of(one, {"training_arguments": {"max_steps": 10}}) is None


def test_whole_epochs_are_counted_by_their_rows() -> None:
    def rows(*epochs: float) -> list[dict[str, float]]:
        return [{"epoch": epoch} for epoch in epochs]

    assert [epochs_of(rows(*e)) for e in ([1, 2, 3], [3], [1, 3], [3, 3.5], [0.25])] == [
        3, 1, 2, 1.5, 0.25,
    ]  # fmt: skip
    assert [epochs_lacking({}, rows(*e)) for e in ([1, 2], [3], [2.5], [0.5, 1.5], [])] == [
        0, 2, 2, 0, 0,
    ]  # fmt: skip
    gaps: list[list[float]] = [[1, 2, 4], [2, 2.5, 3], [1, 1.5, 2], [1, 5.5]]
    assert [epochs_lacking({}, rows(*e)) for e in gaps] == [1, 1, 0, 4]
    assert epochs_lacking({"script": "bert"}, rows(2, 4)) == 0  # evaluations of an import

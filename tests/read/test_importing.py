"""Records of others: read whole or refused, with the line; marked, and never mixed with ours."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.core.records import RunFolder, find_runs, read_json, read_rows
from harness.core.schema.checks import check_fields, fields
from harness.core.schema.environment import DataRecord, ImportedRecord
from harness.core.schema.fields import fields_of
from harness.read import load, load_runs
from harness.read.imports.formats import learning_rate, read_foreign
from tests.support.paired import NAME, TEXT, text_file
from tests.support.records import record


def state(**changes: Any) -> dict[str, Any]:
    """As the Trainer writes it: two evaluations an epoch, two epochs of ten updates."""
    history: list[dict[str, Any]] = []
    for n, (loss, accuracy) in enumerate([(1.5, 0.5), (1.25, 0.625), (1.0, 0.75), (0.5, 0.7)], 1):
        at = {"epoch": n / 2, "step": 5 * n}
        history.append({"loss": loss, "grad_norm": 2.5, "learning_rate": 1e-5, **at})
        history.append(
            {
                "eval_loss": 2 * loss, "eval_accuracy": accuracy, "eval_runtime": 0.25 * n,
                "eval_samples_per_second": 400.5, "eval_samples": 100, "eval_steps_per_second": 7.0,
                **at,
            }
        )  # fmt: skip
    end = {
        "train_runtime": 12.5, "train_samples_per_second": 51.2, "train_steps_per_second": 1.6,
        "train_loss": 1.0625, "total_flos": 1e15, "epoch": 2.0, "step": 20,
    }  # fmt: skip
    return {
        "epoch": 2.0, "global_step": 20, "max_steps": 20, "num_train_epochs": 2,
        "train_batch_size": 8, "best_metric": 0.75, "log_history": [*history, end], **changes,
    }  # fmt: skip


def state_file(tmp_path: Path, content: Any, folder: str = "checkpoint-20") -> Path:
    file = tmp_path / "theirs" / folder / "trainer_state.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def take(tmp_path: Path, *words: Any) -> int:
    return main(["import", *map(str, words), "--output_dir", str(tmp_path / "out")])


def only(tmp_path: Path) -> RunFolder:
    (settings,) = (tmp_path / "out").glob("*/*/*/settings.json")
    return RunFolder(settings.parent)


def refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    """Why files are not imported; nothing of them, or of others, is written."""
    assert take(tmp_path, *words) == 2
    text = capsys.readouterr()
    assert text.out == "" and not (tmp_path / "out").exists()
    lines = text.err.splitlines()
    assert all(line.startswith("harness import: error: ") for line in lines)
    return lines[0].removeprefix("harness import: error: ")


def test_a_text_file_becomes_a_run(tmp_path: Path) -> None:
    file = text_file(tmp_path)
    assert take(tmp_path, file) == 0
    folder = only(tmp_path)
    assert re.fullmatch(
        r"bert/2_1_P100far/imported-2_1_2e-05_16_P100far-[0-9a-f]{8}",
        str(folder.path.relative_to(tmp_path / "out")),
    )
    first, last = load(tmp_path / "out").to_dict("records")
    assert (first["epoch_time_s"], last["epoch_time_s"]) == (120.5, 118.25)
    # The source's samples/s are those of evaluation: of training nothing is known.
    assert first["eval_samples_per_s"] == 196.2 and first["train_samples_per_s"] is None
    assert (last["accuracy"], last["f1"], last["precision"], last["recall"], last["eval_loss"]) == (
        0.92, 0.91, 0.93, 0.92, 0.27,
    )  # fmt: skip
    (run,) = load_runs(tmp_path / "out").to_dict("records")
    assert run["outcome"] == "finished" and run["epochs_done"] == 2
    assert run["train_time_s"] == 238.75 and run["wall_s"] is None
    assert (run["script"], run["setup"], run["lr"]) == ("bert", "2_1_P100far", 2e-5)
    assert (run["per_gpu_batch"], run["epochs"], run["processes"]) == (16, 2, 2)
    assert run["imported"] == "callback-text" and run["machine"] == "imported:callback-text"
    for unknown in ("seed", "model", "number_format", "effective_batch", "updates", "strategy"):
        assert run[unknown] is None, unknown
    imported = (read_json(folder.settings) or {})["imported"]
    assert imported["file"] == NAME and len(imported["sha256"]) == 64
    assert str(tmp_path) not in folder.settings.read_text()  # no folders of a person's own


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("2e-05", 2e-5), ("25e-05", None), ("0002", 0.0002), ("00002", 2e-5), ("001", 0.001),
        ("0.0003", 0.0003), ("1.5e-4", 1.5e-4), ("-05", None), ("5", None), ("fast", None),
        ("000", None),
        ("1e999", None), ("0e-5", None),
    ],
)  # fmt: skip
def test_learning_rates_as_their_names_have_them(text: str, rate: float | None) -> None:
    assert learning_rate(text) == (None if rate is None else pytest.approx(rate))


def test_flags_say_what_the_name_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = text_file(tmp_path, name="mine.txt", folder="notes")
    text = refusal(tmp_path, capsys, file)
    assert all(flag in text for flag in ("mine.txt", "--script", "--setup", "--lr", "--batch"))
    lost = text_file(tmp_path, name="1_1_-05_16.txt")
    assert refusal(tmp_path, capsys, lost).endswith("do not say all: give --lr")
    flags = ["--script", "vit", "--setup", "1_4", "--lr", "3e-5", "--batch=8", "--grad_acc", "2"]
    more = ["--test_size", "2000", "--seed", "7", "--model", "a/b", "--source", "lab.v100"]
    assert take(tmp_path, file, *flags, *more) == 0
    (run,) = load_runs(tmp_path / "out").to_dict("records")
    assert run["machine"] == "imported:lab.v100" and run["imported"] == "lab.v100"
    assert (run["script"], run["setup"], run["lr"], run["seed"]) == ("vit", "1_4", 3e-5, 7)
    assert run["effective_batch"] == 8 * 2 * 4 and run["model"] == "a/b"
    row, _ = read_rows(only(tmp_path).epochs)[0]
    assert row["eval_samples"] == 2000 and row["eval_time_s"] == 2000 / 196.2


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("times=[120.5,118.25]", "times=[120.5]", "unequal length: f1 2 (line 1)"),
        ("accuracy=[0.86,0.92]", "accuracy=[86,92]", "line 2: accuracy 86 is not a share"),
        ("loss=[0.31,", "loss=[a,", "line 6: 'a' in loss is not a number"),
        ("loss=", "f1=", "line 6: f1 stands in line 1 already"),
        ("recall", "recal", "line 4: recal is not known"),
        ("f1=[0.85,0.91]", "f1: 0.85, 0.91", "line 1: 'f1: 0.85, 0.91' is not of the form"),
        ("120.5", "-1", "line 5: times cannot be -1"),
        ("0.87", "inf", "line 3: precision cannot be inf"),
    ],
)
def test_a_bad_text_is_refused_with_its_line(
    before: str, after: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = text_file(tmp_path, name="1_1_2e-05_4.txt")
    assert before in TEXT
    bad = text_file(tmp_path, TEXT.replace(before, after))
    text = refusal(tmp_path, capsys, good, bad)
    assert NAME in text and words in text


def test_files_that_are_no_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds no line" in refusal(tmp_path, capsys, text_file(tmp_path, "\n"))
    assert "all lists are empty" in refusal(tmp_path, capsys, text_file(tmp_path, "f1=[]\n"))
    text_file(tmp_path).write_bytes(b"\xff\xfe\x00")
    assert "is not text" in refusal(tmp_path, capsys, tmp_path / "theirs" / "bert" / NAME)
    assert "cannot be read" in refusal(tmp_path, capsys, tmp_path / "none.txt")
    assert "cannot be read" in refusal(tmp_path, capsys, tmp_path)


def test_a_loss_that_is_not_a_number_is_a_run_that_diverged(tmp_path: Path) -> None:
    assert take(tmp_path, text_file(tmp_path, TEXT.replace("0.27", "nan"))) == 0
    (run,) = load_runs(tmp_path / "out").to_dict("records")
    assert run["outcome"] == "diverged" and "epoch 2" in run["reason"]
    assert run["eval_loss"] is None


def test_what_comes_next_names_the_folder_as_it_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert take(tmp_path, text_file(tmp_path)) == 0
    assert capsys.readouterr().out.endswith("next: python -m harness table out\n")


def test_the_same_file_twice_is_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = text_file(tmp_path)
    again = text_file(tmp_path, name="2_1_2e-05_16_copy.txt")
    assert take(tmp_path, file, again) == 0 and take(tmp_path, file) == 0
    first, second, _, third, following = capsys.readouterr().out.splitlines()
    assert following == f"next: python -m harness table {tmp_path / 'out'}"
    assert first.startswith("imported: ")
    assert second.startswith("already imported: ") and third.startswith("already imported: ")
    assert str(only(tmp_path).path) in third


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--lr", "3e-5"], "--lr 3e-05 contradicts the file, which says 2e-05"),
        (["--batch", "4"], "--batch 4 contradicts the file, which says 16"),
        (["--script", "gpt"], "--script gpt: expected one of bert, vit"),
        (["--setup", "many"], "--setup many: expected N_M"),
        (["--source", "a/b"], "--source a/b: expected letters"),
        (["--batch", "0"], "--batch 0: must be at least 1"),
        (["--lr"], "--lr needs a value"),
        (["--colour", "red"], "unknown flag --colour: there are --"),
    ],
)
def test_wrong_flags(
    words: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in refusal(tmp_path, capsys, text_file(tmp_path), *words)


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import"]) == 2 and main(["import", "--help"]) == 0
    assert capsys.readouterr().out.count("usage: python -m harness import") == 1
    assert main(["import", "--lr", "1"]) == 2
    assert "missing FILE; usage" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("a file")
    assert take(tmp_path, text_file(tmp_path)) == 2
    assert "cannot be written" in capsys.readouterr().err


PLACE = ("--script", "vit", "--setup", "1_2")


def test_a_trainer_state_has_a_row_an_evaluation(tmp_path: Path) -> None:
    assert take(tmp_path, state_file(tmp_path, state()), *PLACE, "--lr", "2e-5") == 0
    rows, broken = read_rows(only(tmp_path).epochs)
    assert broken == 0
    assert [row["epoch"] for row in rows] == [0.5, 1.0, 1.5, 2.0]
    assert [row["updates"] for row in rows] == [5, 10, 15, 20]
    assert [row["accuracy"] for row in rows] == [0.5, 0.625, 0.75, 0.7]
    assert [row["eval_loss"] for row in rows] == [3.0, 2.5, 2.0, 1.0]
    assert [row["train_loss"] for row in rows] == [1.5, 1.25, 1.0, 0.5]
    assert [row["eval_time_s"] for row in rows] == [0.25, 0.5, 0.75, 1.0]
    assert {row["eval_samples_per_s"] for row in rows} == {400.5}
    assert {(row["eval_samples"], row["samples"]) for row in rows} == {(100, None)}
    # Its times hold evaluation and saving: they are no times of ours.
    assert {row["epoch_time_s"] for row in rows} == {None}
    (run,) = load_runs(tmp_path / "out").to_dict("records")
    assert run["outcome"] == "finished" and run["updates"] == 20 and run["epochs_done"] == 2.0
    assert (run["best_metric"], run["best_value"], run["best_epoch"]) == ("accuracy", 0.75, 1.5)
    assert run["per_gpu_batch"] == 8 and run["train_loss"] == 1.0625
    assert run["trainer_train_samples_per_second"] == 51.2
    assert run["train_samples_per_s"] is None and run["train_time_s"] is None
    text = (read_json(only(tmp_path).settings) or {})["imported"]["source_numbers"]
    assert text == {"train_runtime": 12.5, "train_steps_per_second": 1.6}


def test_the_best_metric_is_that_of_the_update_that_the_state_names(tmp_path: Path) -> None:
    rows = [(1.0, 10, 0.5, 0.6), (2.0, 20, 0.6, 0.55)]
    history = [
        {"eval_accuracy": accuracy, "eval_f1": f1, "eval_runtime": 0.5, "epoch": epoch, "step": n}
        for epoch, n, accuracy, f1 in rows
    ]
    content = state(log_history=history, best_metric=0.6)
    found = []
    for more in ({"best_global_step": 20}, {}, {"best_global_step": 10}, {"best_global_step": 7}):
        file = state_file(tmp_path, content | more, f"checkpoint-{len(found)}")
        found.append(read_foreign(file).best_metric)
    assert found == ["accuracy", None, "f1", None]  # without the update it may be either of them
    history[1]["eval_f1_macro"] = 60.0
    assert take(tmp_path, state_file(tmp_path, state(log_history=history)), "--script=bert") == 2


def test_a_learning_rate_below_one_that_was_logged_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = [
        {"loss": 1.0, "learning_rate": 6.77e-4, "epoch": 1.0, "step": 10},
        {"eval_accuracy": 0.5, "eval_runtime": 0.5, "epoch": 1.0, "step": 10},
        {"loss": 0.9, "learning_rate": 1e-5, "epoch": 1.5, "step": 15},
        {"eval_accuracy": 0.6, "eval_runtime": 0.5, "epoch": 2.0, "step": 20},
    ]
    file = state_file(tmp_path, state(log_history=history))
    words = ("--script=bert", "--setup=1_1")
    assert take(tmp_path, file, *words, "--lr=2e-5") == 2
    assert "--lr 2e-05 contradicts the file, which logged 0.000677" in capsys.readouterr().err
    assert take(tmp_path, file, *words, "--lr=1e-3") == 0
    assert [row["learning_rate"] for row in only(tmp_path).read_epochs()[0]] == [6.77e-4, None]


def test_evaluations_at_one_update_are_one_row(tmp_path: Path) -> None:
    """Of two test sets, before the training, and once more after it, on the best weights."""
    history: list[dict[str, Any]] = [{"eval_loss": 9.0, "eval_runtime": 1.0, "epoch": 0, "step": 0}]
    for entry in state()["log_history"]:
        history.append(entry)
        if "eval_loss" in entry:
            at = {"epoch": entry["epoch"], "step": entry["step"]}
            history.append({"eval_other_accuracy": 0.25, "eval_other_runtime": 0.5, **at})
    history.append({"eval_loss": 0.125, "eval_accuracy": 0.75, "epoch": 2.0, "step": 20})
    assert take(tmp_path, state_file(tmp_path, state(log_history=history)), *PLACE) == 0
    rows, _ = read_rows(only(tmp_path).epochs)
    assert [row["epoch"] for row in rows] == [0.5, 1.0, 1.5, 2.0]
    assert [row["accuracy"] for row in rows] == [0.5, 0.625, 0.75, 0.7]
    assert [row["eval_loss"] for row in rows] == [3.0, 2.5, 2.0, 1.0]
    assert [row["train_loss"] for row in rows] == [1.5, 1.25, 1.0, 0.5]
    assert {row["other_accuracy"] for row in rows} == {0.25} and "other_runtime" not in rows[0]
    (run,) = load_runs(tmp_path / "out").to_dict("records")
    assert run["outcome"] == "finished" and run["accuracy"] == 0.7


def test_evaluations_within_a_rounded_epoch_are_rows_of_their_own(tmp_path: Path) -> None:
    """Some versions of the Trainer round the epoch to two digits."""
    history = []
    for step, accuracy in ((2, 0.95), (4, 0.5), (6, 0.7), (8, 0.6)):
        at = {"epoch": round(step / 1000, 2), "step": step}
        history += [{"loss": 1.0, **at}, {"eval_accuracy": accuracy, **at}]
    short = state(log_history=history, epoch=0.008, global_step=8, max_steps=8, best_metric=0.95)
    assert take(tmp_path, state_file(tmp_path, short), *PLACE) == 0
    rows, _ = read_rows(only(tmp_path).epochs)
    assert [row["epoch"] for row in rows] == pytest.approx([0.002, 0.004, 0.006, 0.008])
    assert [row["accuracy"] for row in rows] == [0.95, 0.5, 0.7, 0.6]
    (run,) = load_runs(tmp_path / "out").to_dict("records")
    assert run["accuracy"] == 0.6


def test_a_state_that_goes_on_after_its_last_evaluation_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = [e for e in state()["log_history"] if "eval_loss" not in e or e["step"] < 20]
    assert take(tmp_path, state_file(tmp_path, state(log_history=history)), *PLACE) == 0
    notes = (read_json(only(tmp_path).settings) or {})["imported"]["notes"]
    assert "the last evaluation is that after update 15 of 20" in notes
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.endswith("; the last evaluation is that after update 15 of 20")


@pytest.mark.parametrize(
    ("loss", "steps", "outcome"),
    [(0.0, 1, "diverged"), (0.5, 2, "diverged"), (0.5, 1, "finished")],
)  # fmt: skip
def test_gradients_that_stay_nan_are_those_of_a_run_that_diverged(
    loss: float, steps: int, outcome: str, tmp_path: Path
) -> None:
    """The Trainer logs a finite loss in place of nan. A single nan may be one of fp16."""
    history = state()["log_history"]
    for entry in [entry for entry in history if "grad_norm" in entry][-steps:]:
        entry |= {"loss": loss, "grad_norm": math.nan}
    assert take(tmp_path, state_file(tmp_path, state(log_history=history)), *PLACE) == 0
    (run,) = load_runs(tmp_path / "out").to_dict("records")
    assert run["outcome"] == outcome
    if outcome == "diverged":
        assert run["reason"] == f"grad_norm is nan from update {25 - 5 * steps} on"


def test_the_end_of_the_training_counts_not_an_earlier_one(tmp_path: Path) -> None:
    history = state()["log_history"]
    history.insert(2, history[-1] | {"train_samples_per_second": 80.0, "step": 5, "epoch": 0.5})
    assert take(tmp_path, state_file(tmp_path, state(log_history=history)), *PLACE) == 0
    (run,) = load_runs(tmp_path / "out").to_dict("records")
    assert run["trainer_train_samples_per_second"] == 51.2


def test_a_state_of_the_middle_of_a_run_is_not_a_finished_one(tmp_path: Path) -> None:
    middle = state(global_step=5, epoch=0.5, log_history=state()["log_history"][:2])
    assert take(tmp_path, state_file(tmp_path, middle), *PLACE) == 0
    (run,) = load_runs(tmp_path / "out").to_dict("records")
    assert run["outcome"] == "interrupted" and "5 of 20 updates" in run["reason"]


def test_two_states_of_one_run_are_not_two_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    middle = state(global_step=5, log_history=state()["log_history"][:2])
    files = [state_file(tmp_path, middle, "checkpoint-5"), state_file(tmp_path, state())]
    assert take(tmp_path, *files, *PLACE) == 0
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first.startswith("imported: ") and second.startswith("not imported: ")
    assert "another state of the run" in second
    only(tmp_path)


def test_a_state_without_evaluations_has_one_row(tmp_path: Path) -> None:
    history = [entry for entry in state()["log_history"] if "eval_loss" not in entry]
    assert take(tmp_path, state_file(tmp_path, state(log_history=history)), *PLACE) == 0
    (row,) = read_rows(only(tmp_path).epochs)[0]
    assert (row["epoch"], row["updates"], row["train_loss"]) == (2.0, 20, 1.0625)
    assert row["accuracy"] is None


def test_a_state_with_a_loss_that_is_not_a_number_diverged(tmp_path: Path) -> None:
    content = json.dumps(state()).replace('"eval_loss": 2.0', '"eval_loss": NaN')
    assert take(tmp_path, state_file(tmp_path, content), *PLACE) == 0
    (run,) = load_runs(tmp_path / "out").to_dict("records")
    assert run["outcome"] == "diverged" and run["reason"] == "eval_loss at update 15 is not finite"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"epoch": 1,\n "log_history": [}', "line 2: not readable as JSON"),
        ("[1]", "has no log_history"),
        (state(log_history=[]), "log_history is empty"),
        (state(log_history=["x"]), "holds 'x', which is no entry"),
        (state(log_history=[None]), "holds 'None', which is no entry"),
        (
            state(log_history=[{"eval_accuracy": 75.0, "epoch": 1}]),
            "[0]: accuracy 75 is not a share",
        ),
        (state(log_history=[{"eval_accuracy": 0.5}]), "log_history[0]: epoch is None"),
        (state(log_history=[{"loss": "low", "epoch": 1}]), "[0]: loss is 'low'"),
        (state(global_step=1.5), "global_step is 1.5"),
    ],
)
def test_a_bad_state_is_refused(
    content: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(tmp_path, capsys, state_file(tmp_path, content), *PLACE)


def test_a_state_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = state_file(tmp_path, state())
    file.write_bytes(b"\x80\x81{}")
    assert "is not text" in refusal(tmp_path, capsys, file, *PLACE)
    file.write_text(json.dumps(state()))
    assert refusal(tmp_path, capsys, file).endswith("give --script bert or vit, --setup N_M")


def test_imported_runs_stand_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "out" / "bert" / "1_2" / "ours")
    assert main(["table", str(tmp_path / "out")]) == 0
    assert "imported:" not in capsys.readouterr().out
    assert take(tmp_path, text_file(tmp_path), "--source", "them") == 0
    runs = load_runs(tmp_path / "out")
    assert dict(zip(runs["machine"], runs["imported"].isna(), strict=True)) == {
        "a-cpux2": True,
        "imported:them": False,
    }
    capsys.readouterr()
    assert main(["table", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert text.index("a-cpux2") < text.index("imported:them") < text.index("imported: what others")


def test_every_field_is_declared(tmp_path: Path) -> None:
    assert take(tmp_path, text_file(tmp_path)) == 0
    assert take(tmp_path, state_file(tmp_path, state()), *PLACE) == 0
    imported = find_runs(tmp_path / "out")
    assert len(imported) == 2
    for folder in imported:
        (row, *_), _ = read_rows(folder.epochs)
        contents = {"epochs": row} | {
            kind: read_json(folder.path / f"{kind}.json") or {}
            for kind in ("settings", "environment", "summary")
        }
        for kind, content in contents.items():
            # What the source does not say is null; nothing is there that is not declared.
            check_fields(kind, content, folder.path)
            assert set(content) <= set(fields(kind)), kind
        assert set(contents["environment"]["data"]) <= set(fields_of(DataRecord))
        assert set(contents["settings"]["imported"]) == set(fields_of(ImportedRecord))


def test_the_batch_of_dataparallel_is_that_of_one_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = state_file(tmp_path, state())
    of_one = ["--script", "bert", "--grad_acc", "1", "--strategy", "dp"]
    assert refusal(tmp_path, capsys, file, *of_one, "--setup", "1_3").endswith(
        "whose batch of 8 is not divisible by them"
    )
    of_one += ["--batch", "2"]
    assert take(tmp_path, file, *of_one, "--setup", "1_4", "--train_size", "80") == 0
    assert only(tmp_path).read_epochs()[0][-1]["effective_batch"] == 8
    assert (only(tmp_path).read_settings() or {})["per_gpu_batch"] == 2
    assert take(tmp_path, file, "--script", "bert", "--setup", "1_4") == 0  # as it is there


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--train_size", "640"], "20 updates of 8 samples are not 2 epochs of 640: check"),
        (["--grad_acc", "4", "--train_size", "80"], "20 updates of 32 samples are not"),
        (["--test_size", "200"], "--test_size 200 contradicts the file, .* about 100 samples"),
    ],
)
def test_sizes_that_contradict_the_file(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = state_file(tmp_path, state())
    of_all = ["--script", "bert", "--setup", "1_1", "--grad_acc", "1"]
    assert re.search(words, refusal(tmp_path, capsys, file, *of_all, *flags))


def test_losses_are_weighted_by_the_updates_that_they_are_of(tmp_path: Path) -> None:
    entries = [{"loss": loss, "epoch": step / 100, "step": step}
               for step, loss in ((1, 1.4), (50, 1.0), (100, 0.8))]  # fmt: skip
    end = {"eval_loss": 0.5, "epoch": 1.0, "step": 100}
    history = state(log_history=[*entries, end], best_metric=None, global_step=100, max_steps=100)
    assert take(tmp_path, state_file(tmp_path, history), "--script", "bert", "--setup", "1_1") == 0
    (row,) = only(tmp_path).read_epochs()[0]
    assert row["train_loss"] == pytest.approx((1.4 + 49 * 1.0 + 50 * 0.8) / 100)

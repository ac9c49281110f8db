"""What a run prints of its machine: threads that share cores, and other programs."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.core.records import RunFolder, append_row
from harness.core.settings import Settings
from harness.core.topology import World
from harness.train.loop.progress import Console, best_epoch
from harness.train.run.recorder import Recorder

KEEP = "; --save best keeps its weights"
FLATTERS = "; chosen on the test set, which flatters it: --validation_split 0.1 avoids that"
SHARE = "threads share 4 cores of this machine"


def console(folder: Path, **world: int) -> Console:
    context: Any = SimpleNamespace(
        folder=RunFolder(folder), recorded_world=World(**world), settings=Settings(script="vit"),
        data_facts={},
    )  # fmt: skip
    recorder: Any = Recorder()
    recorder.observations = SimpleNamespace(test_metrics={}, observed={})
    return Console(recorder, context)


@pytest.mark.parametrize(
    ("launcher", "nodes", "threads", "said"),
    [
        (None, 1, 4, None),
        (None, 4, 4, None),  # of other machines
        ("netns", 4, 1, None),
        ("netns", 2, 4, f"8 {SHARE}; OMP_NUM_THREADS=2 gives each its share"),
        ("netns", 5, 1, f"5 {SHARE}"),
        ("local", 5, 1, f"5 {SHARE}"),
        ("slurm", 5, 1, None),
    ],
)  # fmt: skip
def test_more_threads_than_cores_are_said(
    launcher: str | None, nodes: int, threads: int, said: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(4)})
    monkeypatch.setenv("HARNESS_LAUNCH", f'{{"launcher": "{launcher}"}}' if launcher else "")
    assert console(tmp_path, nodes=nodes)._crowded(threads) == said


def test_a_run_that_others_disturbed_ends_with_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HARNESS_LAUNCH", raising=False)
    state: Any = SimpleNamespace(is_world_process_zero=True)
    for share, said in ((0.1, ""), (0.9, "  disturbed: other programs used 50% of the cores")):
        append_row(RunFolder(tmp_path).epochs, {"epoch_time_s": 1.0, "others_cpu_share": share})
        console(tmp_path).on_train_end(None, state, None)
        *lines, last = capsys.readouterr().out.splitlines()
        assert lines == ([f"{said}; tables mark its times"] if said else [])
        assert last == f"  recorded in {tmp_path}"


@pytest.mark.parametrize(("macro", "shown"), [(0.9, False), (0.65, True)])
def test_a_small_class_that_is_never_named_shows(
    macro: float, shown: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args: Any = SimpleNamespace(
        max_steps=-1, num_train_epochs=3, device=SimpleNamespace(type="cpu")
    )
    screen = console(tmp_path)
    screen.recorder.row = screen.recorder.last_row = {
        "epoch": 1.0, "accuracy": 0.96, "f1": 0.91, "f1_macro": macro, "train_samples_per_s": 9.0,
        "epoch_time_s": 1.0, "eval_time_s": 1.0,
    }  # fmt: skip
    screen.on_evaluate(args, SimpleNamespace(is_world_process_zero=True), None)
    assert ("f1 0.9100  f1_macro 0.6500" in capsys.readouterr().out) == shown


def test_a_run_that_learned_nothing_ends_with_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HARNESS_LAUNCH", raising=False)
    append_row(RunFolder(tmp_path).epochs, {"epoch_time_s": 1.0, "accuracy": 0.5})
    shown = console(tmp_path)
    for share, count in ((0.4, 0), (0.5, 1)):
        shown.context.data_facts["majority_share"] = share
        shown.on_train_end(None, SimpleNamespace(is_world_process_zero=True), None)
        said = capsys.readouterr().out
        assert said.count("warning: the accuracy of the last epoch, 0.5000, is no better") == count


@pytest.mark.parametrize(
    ("device", "threads", "share", "said"),
    [("cpu", 2, 0.7, 1), ("cpu", 2, 0.1, 0), ("cpu", 1, 0.7, 0), ("cuda", 2, 0.7, 0)],
)
def test_threads_that_wait_beside_other_programs_are_said_once(
    device: str, threads: int, share: float, said: int, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    printing = console(tmp_path)
    printing.recorder.last_row = {  # type: ignore[misc]
        "epoch": 1.0, "train_samples_per_s": 9.0, "epoch_time_s": 1.0, "eval_time_s": 1.0,
        "others_cpu_share": share,
    }  # fmt: skip
    args: Any = SimpleNamespace(
        num_train_epochs=2, max_steps=-1, device=SimpleNamespace(type=device)
    )
    for _ in range(2):
        printing.on_evaluate(args, SimpleNamespace(is_world_process_zero=True), None)
    assert capsys.readouterr().out.count("try OMP_NUM_THREADS=1") == said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({}, None),
        ({"save": "best"}, f"best epoch by accuracy: 3 (0.8000, the largest){FLATTERS}"),
        (
            {"save": "best", "validation_split": 0.1},
            "best epoch by accuracy: 3 (0.8000, the largest)",
        ),
        ({"best_metric": "mcc"}, f"best epoch by mcc: 1 (0.5000, the largest){KEEP}"),
        ({"best_metric": "loss"}, f"best epoch by eval_loss: 2 (0.3000, the smallest){KEEP}"),
        ({"best_metric": "rmse:min"}, None),  # the run was interrupted before any was measured
    ],
)
def test_the_best_epoch_is_named_where_somebody_asked_for_it(
    flags: dict[str, Any], said: str | None
) -> None:
    values = [(0.6, 0.4, 0.5), (0.7, 0.3, 0.4), (0.8, 0.35, 0.3)]
    rows = [
        {"epoch": epoch, "accuracy": accuracy, "eval_loss": loss, "mcc": mcc}
        for epoch, (accuracy, loss, mcc) in enumerate(values, 1)
    ]
    assert best_epoch(Settings(script="vit", **flags), rows) == said


def test_an_own_metric_stands_in_the_line_of_its_epoch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printing = console(tmp_path)
    printing.recorder.last_row = {  # type: ignore[misc]
        "epoch": 1.0, "f1": 0.5, "mcc": 0.25, "train_samples_per_s": 9.0, "epoch_time_s": 1.0,
        "eval_time_s": 1.0,
    }  # fmt: skip
    args: Any = SimpleNamespace(
        num_train_epochs=2, max_steps=-1, device=SimpleNamespace(type="cuda")
    )
    printing.on_evaluate(args, SimpleNamespace(is_world_process_zero=True), None)
    assert "f1 0.5000  mcc 0.2500  9 samples/s" in capsys.readouterr().out


def test_max_steps_says_of_how_many_epochs_a_line_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printing = console(tmp_path)
    printing.recorder.last_row = {  # type: ignore[misc]
        "epoch": 1.454545, "train_samples_per_s": None, "epoch_time_s": 1.0, "eval_time_s": 1.0,
    }  # fmt: skip
    device = SimpleNamespace(type="cuda")
    state = SimpleNamespace(is_world_process_zero=True, num_train_epochs=2)
    for steps, said in ((40, "epoch 1.45/2 "), (-1, "epoch 1.45/1 ")):
        args: Any = SimpleNamespace(num_train_epochs=1, max_steps=steps, device=device)
        printing.on_evaluate(args, state, None)
        assert said in capsys.readouterr().out


@pytest.mark.parametrize(("dataset", "cut", "said"), [("mine.csv", 1300, 1), ("mine.csv", 0, 0),
                                                      ("embedded:english", 1300, 0)])  # fmt: skip
def test_texts_that_are_cut_off_are_counted(
    dataset: str, cut: int, said: int, tmp_path: Path
) -> None:
    printing = console(tmp_path)
    printing.context.data_facts = {  # type: ignore[misc]
        "dataset": dataset, "label_column": "label", "input_columns": ["text"], "classes": 2,
        "left_out_samples": 0, "train_samples": 1200, "test_samples": 400, "max_length": 48,
        "truncated_texts": cut,
    }  # fmt: skip
    line = "1,300 texts have more than 48 tokens and are cut there (--max_length)"
    assert [*printing._about_data()].count(line) == said


def test_a_time_that_the_recorder_has_not_seen_is_called_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printing = console(tmp_path)
    printing.recorder.last_row = {  # type: ignore[misc]
        "epoch": 3.0, "train_samples_per_s": None, "epoch_time_s": None, "eval_time_s": 1.0,
    }  # fmt: skip
    args: Any = SimpleNamespace(
        num_train_epochs=4, max_steps=-1, device=SimpleNamespace(type="cuda")
    )
    printing.on_evaluate(args, SimpleNamespace(is_world_process_zero=True), None)
    assert "epoch 3/4  epoch of unknown time, evaluation 1.0 s" in capsys.readouterr().out

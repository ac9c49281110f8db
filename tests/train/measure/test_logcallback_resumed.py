"""LogCallback alone: a training resumes into the record of the same training, and of no other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

import logcallback
from harness.core import attempts
from harness.core.records import RunFolder
from harness.core.settings import UserError
from harness.train.measure.environment import recorded_settings
from harness.train.run import elastic
from logcallback import LogCallback
from tests.support.ranks import ranks
from tests.support.recorded import rows_of, summary_of, train, trainer_for
from tests.support.toys import CPU, BreakOff, BrokenOffError, Net, Points

FIX = "resume with its settings, or record into another folder"


class BegunError(Exception):
    """The training is not refused: telemetry would start now."""


@pytest.fixture(autouse=True)
def begun(monkeypatch: pytest.MonkeyPatch) -> None:
    def telemetry(*args: Any) -> None:
        raise BegunError

    monkeypatch.setattr(logcallback, "Telemetry", telemetry)


def arguments(**more: Any) -> TrainingArguments:
    chosen = {"learning_rate": 2e-5, "num_train_epochs": 3, "per_device_train_batch_size": 4}
    return TrainingArguments("out", use_cpu=True, **{**chosen, **more})


def record(folder: Path, rows: int = 3, ended: bool = False, setup: str = "1_1") -> RunFolder:
    """A training of three epochs with four updates each, as far as these rows."""
    run, world = RunFolder(folder), SimpleNamespace(nodes=1, per_node=int(setup[-1]))
    settings = recorded_settings(None, arguments(), world, Net(), Points(16))  # type: ignore[arg-type]
    run.write_settings(settings)
    attempts.begin(run, 0, world.per_node, 4, per_gpu_batch=4)
    for epoch in range(1, rows + 1):
        row: Any = {"epoch": float(epoch), "updates": 4 * epoch, "accuracy": 0.5}
        run.append_epoch(row)
    if ended:
        attempts.end(run, "finished", None, 1.0, update=4 * rows)
        attempts.write_summary(run, "finished")
    return run


def resume(folder: Path, update: int = 4, data: Any = None, **more: Any) -> LogCallback:
    """As the Trainer does once it has loaded a checkpoint."""
    callback = LogCallback(folder)
    state = TrainerState(global_step=update, max_steps=12, num_train_epochs=3)
    loader = SimpleNamespace(dataset=data or Points(16), sampler=range(16))
    callback.on_train_begin(
        arguments(**more), state, TrainerControl(), model=Net(), train_dataloader=loader
    )
    return callback


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(
    ("more", "differs"),
    [
        ({"learning_rate": 1e-4}, "lr 2e-05, not 0.0001"),
        ({"learning_rate": 1e-4, "seed": 7}, "lr 2e-05, not 0.0001; seed 42, not 7"),
        ({"weight_decay": 0.5}, "weight_decay the default, not 0.5"),
        ({"data": Points(8)}, "dataset Points of 16 samples, not Points of 8 samples"),
        (
            {"learning_rate": 1.0, "seed": 7, "max_grad_norm": 2.0, "weight_decay": 0.5},
            "lr 2e-05, not 1; seed 42, not 7; weight_decay the default, not 0.5; and 1 more",
        ),
    ],
)
@pytest.mark.parametrize("ended", [False, True])
def test_another_training_does_not_resume_into_a_record(
    more: dict[str, Any], differs: str, ended: bool, tmp_path: Path
) -> None:
    """It put its settings above the epochs and the accuracy of the other."""
    run = record(tmp_path / "record", ended=ended)
    before = contents(tmp_path)
    with pytest.raises(UserError) as refused:
        resume(run.path, **more)
    assert str(refused.value) == f"{run.path} holds a training with {differs}: {FIX}"
    assert contents(tmp_path) == before and not run.lock("run").exists()


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_train_epochs": 5, "max_steps": 20, "ignore_data_skip": True},
        {"save_steps": 7, "run_name": "again", "disable_tqdm": True},
        {"save_strategy": "epoch", "logging_steps": 5, "dataloader_num_workers": 2},
    ],
)
def test_the_same_training_goes_on(more: dict[str, Any], tmp_path: Path) -> None:
    run = record(tmp_path / "record")
    with pytest.raises(BegunError):
        resume(run.path, **more)
    assert len(rows_of(run.path)) == 3  # a resume after a crash repeats them


def test_a_training_that_has_ended_does_not_resume_from_an_earlier_update(tmp_path: Path) -> None:
    run = record(tmp_path / "record", ended=True)
    before = contents(tmp_path)
    with pytest.raises(UserError) as refused:
        resume(run.path, 8)
    assert str(refused.value) == (
        f"{run.path} holds a training that has finished at update 12: to train again from "
        "update 8, record into another folder"
    )
    assert contents(tmp_path) == before
    with pytest.raises(BegunError):
        resume(run.path, 12, num_train_epochs=5)


def test_one_that_failed_goes_on_from_before_its_last_row(tmp_path: Path) -> None:
    run = record(tmp_path / "record")
    attempts.end(run, "failed", "out of memory", 1.0, update=12)
    attempts.write_summary(run, "failed", "out of memory")
    with pytest.raises(BegunError):
        resume(run.path, 8)
    assert len(rows_of(run.path)) == 3


def test_torchrun_may_restart_on_another_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = record(tmp_path / "record", setup="1_4")
    with pytest.raises(UserError, match=f"with setup 1_4, not 1_1: {FIX}"):
        resume(run.path)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    of_launcher: list[float] = [time.time() + 60, time.time() - 60]
    process = SimpleNamespace(create_time=lambda: of_launcher[0])
    monkeypatch.setattr(elastic, "psutil", SimpleNamespace(Process=lambda pid: process))
    with pytest.raises(UserError, match="setup"):  # by hand
        resume(run.path)
    del of_launcher[0]
    with pytest.raises(BegunError):
        resume(run.path)
    with pytest.raises(UserError, match="lr 2e-05"):
        resume(run.path, learning_rate=1.0)


def refusals(folder: str) -> tuple[list[str], dict[str, Any]]:
    """On two ranks: one that runs, then others that resume into its folder."""
    more: dict[str, Any] = {"train": Points(32), "num_train_epochs": 3, "save_strategy": "epoch"}
    with contextlib.suppress(BrokenOffError):
        train(folder, callbacks=[BreakOff(12)], **more)
    refused = []
    checkpoints = f"{folder}-checkpoints/checkpoint-"

    def again(number: int, **other: Any) -> None:
        trainer = trainer_for(folder, **{**more, **other})
        trainer.train(resume_from_checkpoint=f"{checkpoints}{number}")

    def is_refused(do: Callable[[], None]) -> None:
        with pytest.raises(UserError) as error:
            do()
        refused.append(str(error.value))

    is_refused(lambda: again(8, learning_rate=0.5))
    again(4)
    is_refused(lambda: again(4))
    return refused, summary_of(folder)


@pytest.mark.process
def test_all_ranks_end_alike(tmp_path: Path) -> None:
    folder = str(tmp_path / "record")
    one, other = ranks(2, refusals, folder, env=CPU)
    assert one == other
    (rate, ended), summary = one
    assert rate == f"{folder} holds a training with lr 0.01, not 0.5: {FIX}"
    assert "has finished at update 12: to train again from update 4" in ended
    assert (summary["outcome"], summary["attempts"]) == ("finished", 2)
    assert [(row["epoch"], row["attempt"]) for row in rows_of(folder)] == [(1, 1), (2, 1), (3, 2)]

"""LogCallback alone: what the rows of epochs say when scripts do more than train."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainerCallback

import logcallback
from harness.core.records import RunFolder
from harness.read.records.runs import read_run
from logcallback import LogCallback
from tests.support.recorded import (
    environment_of,
    rows_of,
    summary_of,
    trainer_for,
    without_telemetry,
)
from tests.support.toys import BreakOff, BrokenOffError, Net, Points


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logcallback, "Telemetry", without_telemetry)


class EndsInSave(TrainerCallback):
    """Between the checkpoint of an epoch's end and the row of the epoch."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 8:
            raise BrokenOffError


def ended_in_save(folder: Path, test: Any) -> list[float]:
    more: dict[str, Any] = {"num_train_epochs": 4, "save_strategy": "epoch", "test": test}
    more["eval_strategy"] = "no" if test is None else "epoch"
    with pytest.raises(BrokenOffError):
        trainer_for(folder, callbacks=[EndsInSave()], **more).train()
    trainer_for(folder, **more).train(resume_from_checkpoint=True)
    return [row["epoch"] for row in rows_of(folder)]


def test_totals_of_a_record_that_lacks_a_row_are_unknown(tmp_path: Path) -> None:
    """They were those of the other epochs."""
    assert ended_in_save(tmp_path / "record", None) == [1, 3, 4]
    run = read_run(RunFolder(tmp_path / "record"), {}, "lacking", None)
    assert run.state == "finished" and run.lacks_epochs
    assert run.measures["updates"] == 16 and run.measures["wall_s"] > 0
    assert not {"samples", "epochs_done", "train_time_s", "eval_time_s"} & {*run.measures}


@pytest.mark.parametrize("test", [Points(8), {"one": Points(8), "two": Points(4)}])
def test_a_row_is_written_after_as_many_evaluations_as_in_the_epoch_before(
    test: Any, tmp_path: Path
) -> None:
    assert ended_in_save(tmp_path / "record", test) == [1, 2, 3, 4]


class Evaluates(TrainerCallback):
    """Another set, before the Trainer evaluates its own."""

    trainer: Any

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self.trainer.evaluate(Points(4, draw=2))
        control.should_evaluate = True
        return control


def test_the_last_evaluation_of_an_epoch_counts(tmp_path: Path) -> None:
    """The first one did, which is of other data."""
    other = Evaluates()
    more: dict[str, Any] = {"eval_strategy": "epoch", "num_train_epochs": 3}
    trainer = trainer_for(tmp_path / "record", test=Points(8, draw=1), **more)
    trainer.add_callback(other)
    other.trainer = trainer
    trainer.train()
    logs = [log for log in trainer.state.log_history if "eval_loss" in log]
    rows = rows_of(tmp_path / "record")
    assert len(rows) == 3 and len(logs) == 6
    for row, log in zip(rows, logs[1::2], strict=True):
        assert (row["eval_samples"], row["eval_loss"]) == (8, log["eval_loss"])
        assert row["accuracy"] == log["eval_accuracy"]


class SlowSave(TrainerCallback):
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(0.3)


def test_the_time_of_a_row_is_without_the_save_after_it(tmp_path: Path) -> None:
    folder, more = tmp_path / "record", {"eval_strategy": "epoch", "save_strategy": "epoch"}
    trainer_for(folder, test=Points(8), callbacks=[SlowSave()], num_train_epochs=1, **more).train()
    (row,) = rows_of(folder)
    assert row["wall_s"] + 0.3 <= summary_of(folder)["wall_s"]


class OwnLog(Trainer):
    """Logs a loss of its own at each step."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.log({"loss": 100.0})
        return loss


def test_the_loss_is_the_one_that_the_trainer_logs(tmp_path: Path) -> None:
    """A script's own entries of the same name counted."""
    trainer = trainer_for(tmp_path / "record", kind=OwnLog, logging_strategy="epoch")
    trainer.train()
    logged = [log["loss"] for log in trainer.state.log_history if "learning_rate" in log]
    assert [row["train_loss"] for row in rows_of(tmp_path / "record")] == pytest.approx(logged)


class Predicts(TrainerCallback):
    """At the end of an epoch, or after its second step; 0.6 s."""

    trainer: Any

    def __init__(self, inside: bool) -> None:
        self.inside = inside

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.inside and state.global_step % 4 == 2:
            self.trainer.predict(Points(8))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.inside:
            self.trainer.predict(Points(8))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_predictions_are_neither_training_nor_evaluation(
    before: bool, inside: bool, tmp_path: Path
) -> None:
    """before: the script's callback is asked before LogCallback."""
    predicts, net = Predicts(inside), Net(eval_s=0.3)
    own: Any = {"callbacks": [predicts]} if before else {}
    trainer = trainer_for(tmp_path / "record", net, test=Points(4), eval_strategy="epoch", **own)
    if not before:
        trainer.add_callback(predicts)
    predicts.trainer = trainer
    trainer.train()
    for row in rows_of(tmp_path / "record"):
        assert row["epoch_time_s"] < 0.6 > row["step_time_p95_s"]
        assert 0.3 <= row["eval_time_s"] < 0.9


def test_a_second_training_keeps_nothing_of_the_first(tmp_path: Path) -> None:
    callback = LogCallback(tmp_path / "record")
    for rate, save in ((0.01, "epoch"), (0.5, "no")):
        trainer = trainer_for(tmp_path / "other", learning_rate=rate, save_strategy=save)
        trainer.pop_callback(LogCallback)
        trainer.add_callback(callback)
        trainer.train()
        environment = environment_of(tmp_path / "record")
        assert environment["first_learning_rate"] == pytest.approx(rate)
        assert (summary_of(tmp_path / "record")["save_time_s"] > 0) == (save == "epoch")


def test_an_epoch_that_is_begun_anew_has_the_updates_made_since(tmp_path: Path) -> None:
    """With ignore_data_skip those before the checkpoint counted, and its rate was wrong."""
    more: dict[str, Any] = {"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 6}
    net = Net()
    with pytest.raises(BrokenOffError):
        trainer_for(tmp_path / "record", callbacks=[BreakOff(6)], **more).train()
    again = trainer_for(tmp_path / "record", net, ignore_data_skip=True, **more)
    again.train(resume_from_checkpoint=True)
    assert len(net.fed) == 6
    _, second, third = rows_of(tmp_path / "record")
    assert [(row["updates"], row["samples"]) for row in (second, third)] == [(10, 16), (12, 8)]
    assert (second["timed_steps"], second["timed_samples"]) == (3, 12)
    assert second["train_samples_per_s"] == second["timed_samples"] / second["timed_s"]
    assert second["epoch_time_s"] is None  # it was begun before

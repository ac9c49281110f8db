"""LogCallback alone: any model with the stock Trainer, in a script of anybody's."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import platform
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from harness.core.records import RunFolder, find_runs, read_json, read_rows
from harness.core.records.summary import best_of
from harness.core.settings import UserError
from harness.read.records.recorded import recorded
from harness.train.measure.rows import NoNumbers, no_numbers
from logcallback import LogCallback, best_of_trainer
from tests.support.ranks import ran, ranks
from tests.support.recorded import (
    alone,
    environment_of,
    rows_of,
    summary_of,
    train,
    trainer_for,
    two_ranks,
)
from tests.support.toys import CPU, BreakOff, BrokenOffError, Net, Points, Poisoned, ours

pytestmark = pytest.mark.process

MARKER = "hf_SecretThatNobodyMayRead"
NAMES = ("someuser", "somehost", "/home/someuser")


def five_lines(folder: str, out: str) -> None:
    """The promise, word for word; nothing here knows of the harness but the one argument."""
    model, data = Net(), Points(16)
    args = TrainingArguments(out, num_train_epochs=3, eval_strategy="epoch", report_to="none")
    trainer = Trainer(
        model, args, train_dataset=data, eval_dataset=data,
        compute_metrics=odd_metrics, callbacks=[LogCallback(folder)],
    )  # fmt: skip
    trainer.train()


def odd_metrics(prediction: Any) -> dict[str, Any]:
    """Names and kinds of numbers that nobody has agreed on."""
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {
        "kappa@3 (odd name)": float(right.mean()),
        "numpy": np.float32(0.25),
        "tensor": torch.tensor(0.5),
        "whole": 7,
        "unknown": float("nan"),
        "endless": np.inf,
    }


def test_five_lines_record_a_run(tmp_path: Path) -> None:
    folder, _ = alone(tmp_path, five_lines, str(tmp_path / "out"))
    written = sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("*") if p.is_file())
    reference = ["attempts.jsonl", "environment.json", "epochs.jsonl", "ranks/rank_0.jsonl"]
    reference += ["settings.json", "summary.json", "telemetry/node_0.jsonl"]
    assert written == reference
    rows = rows_of(folder)
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert 0 <= row["kappa@3 (odd name)"] <= 1
        assert (row["numpy"], row["tensor"], row["whole"]) == (0.25, 0.5, 7)
        assert row["unknown"] is None and row["endless"] is None
        assert row["eval_loss"] > 0 and row["eval_samples"] == 16
        assert row["samples"] == 16 and row["updates"] == 2 * row["epoch"]
        assert row["effective_batch"] == 8 and row["attempt"] == 1
        assert row["payload_bytes"] is row["network_sent_bytes"] is None
    # Strict JSON: NaN is not a word of it.
    for line in Path(folder, "epochs.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(word))
    summary = summary_of(folder)
    assert summary["outcome"] == "finished" and summary["reason"] is None
    assert summary["epochs_done"] == 3 and summary["updates"] == 6 and summary["samples"] == 48
    assert summary["attempts"] == 1 and summary["eval_loss"] == rows[-1]["eval_loss"]
    settings = read_json(Path(folder, "settings.json")) or {}
    assert settings["schema"] == 1
    assert settings["training_arguments"]["num_train_epochs"] == 3
    environment = environment_of(folder)
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["nodes"] == environment["processes_per_node"] == 1
    assert environment["effective_batch"] == 8 and environment["updates"] == 6


def test_without_evaluation(tmp_path: Path) -> None:
    folder, _ = alone(tmp_path, train)
    rows = rows_of(folder)
    assert [row["epoch"] for row in rows] == [1, 2]
    for row in rows:
        assert row["train_loss"] > 0
        assert not [name for name in row if name.startswith("eval")]
    assert summary_of(folder)["outcome"] == "finished"


def evaluated_by_steps(folder: str, every: int) -> list[dict[str, Any]]:
    trainer = trainer_for(folder, test=Points(8, draw=1), eval_strategy="steps", eval_steps=every)
    trainer.train()
    return [log for log in trainer.state.log_history if "eval_loss" in log]


def test_an_evaluation_inside_an_epoch_is_not_of_its_end(tmp_path: Path) -> None:
    """An epoch has four updates; the Trainer evaluates after the last of all, too."""
    folder, logs = alone(tmp_path, evaluated_by_steps, 3)
    assert [log["step"] for log in logs] == [3, 6, 8]
    first, last = rows_of(folder)
    assert [name for name in first if name.startswith("eval")] == ["eval_time_s"]  # it took time
    assert last["eval_loss"] == logs[-1]["eval_loss"]


def test_an_evaluation_at_the_last_update_of_an_epoch_is_of_its_end(tmp_path: Path) -> None:
    folder, logs = alone(tmp_path, evaluated_by_steps, 2)
    assert [log["step"] for log in logs] == [2, 4, 6, 8]
    assert [row["eval_loss"] for row in rows_of(folder)] == [
        logs[1]["eval_loss"],
        logs[3]["eval_loss"],
    ]


def test_a_training_loss_is_that_of_its_epoch_or_unknown(tmp_path: Path) -> None:
    ways: dict[str, dict[str, Any]] = {
        "each": {"logging_steps": 1},
        "epoch": {"logging_strategy": "epoch"},
        "half": {"logging_steps": 2},
        "across": {"logging_steps": 3},
    }
    losses = {}
    for name, flags in ways.items():
        folder, _ = alone(tmp_path / name, trained_with, flags)
        losses[name] = [row["train_loss"] for row in rows_of(folder)]
    assert losses["epoch"] == pytest.approx(losses["each"], rel=1e-5)
    assert losses["half"] == pytest.approx(losses["each"], rel=1e-5)
    assert losses["across"] == [None, None]


def trained_with(folder: str, flags: dict[str, Any]) -> None:
    train(folder, **flags)


def accumulated(folder: str) -> None:
    train(folder, test=Points(16), eval_strategy="epoch", gradient_accumulation_steps=2)


def test_of_accumulated_passes_the_trainers_loss_has_a_name_of_its_own(tmp_path: Path) -> None:
    folder, _ = alone(tmp_path, accumulated)
    for row in rows_of(folder):
        assert row["train_loss"] is None and row["trainer_train_loss"] > 0
        assert row["eval_loss"] > 0 and "trainer_eval_loss" not in row


def poisoned(folder: str) -> None:
    train(folder, train=Poisoned(24))


def test_a_loss_that_the_trainer_hides_is_a_run_that_diverged(tmp_path: Path) -> None:
    folder, _ = alone(tmp_path, poisoned)
    summary = summary_of(folder)
    assert (summary["outcome"], summary["train_loss"]) == ("diverged", None)
    assert summary["reason"] == "weights are not finite at update 12"
    assert [row["train_loss"] for row in rows_of(folder)] == [None, None]
    end = read_rows(RunFolder(Path(folder)).attempts)[0][-1]
    assert (end["outcome"], end["reason"]) == ("diverged", summary["reason"])


def before_training(folder: str, by_trainer: bool) -> None:
    """The untrained model is looked at first; those of training come at the end."""
    late = {"eval_strategy": "steps", "eval_steps": 1000} if by_trainer else {}
    trainer = trainer_for(folder, test=Points(8, draw=1), eval_on_start=by_trainer, **late)
    if not by_trainer:
        trainer.evaluate()
    trainer.train()


@pytest.mark.parametrize("by_trainer", [True, False])
def test_what_was_measured_before_training_is_no_row(by_trainer: bool, tmp_path: Path) -> None:
    folder, _ = alone(tmp_path, before_training, by_trainer)
    rows = rows_of(folder)
    assert [row["epoch"] for row in rows] == [1, 2]
    # By steps, the Trainer evaluates at the last one too: that is of the last epoch, and in time.
    assert ("eval_loss" in rows[1]) == by_trainer
    assert rows[1].get("eval_time_s", 0) < 60
    assert "eval_loss" not in rows[0] and "accuracy" not in rows[0] and "eval_time_s" not in rows[0]


def test_two_ranks_write_one_record(tmp_path: Path) -> None:
    folder = str(tmp_path / "record")
    ranks(2, two_ranks, folder, env=CPU)
    rows = rows_of(folder)
    assert [row["epoch"] for row in rows] == [1, 2]
    for row in rows:
        assert row["effective_batch"] == 8 and row["updates"] == 3 * row["epoch"]
        # 22 samples: the last batch is filled up with two that are fed twice and counted once.
        assert row["samples"] == 22 and row["fed_samples"] == 24
        assert row["eval_samples"] == 13
        # Over two processes those of the Trainer may be of any size: not under the exact names.
        assert "eval_loss" not in row and row["train_loss"] is None
        assert row["trainer_eval_loss"] > 0 and row["trainer_train_loss"] > 0
        assert row["train_samples_per_s_per_gpu"] == pytest.approx(row["train_samples_per_s"] / 2)
        assert len(row["peak_memory_gib_per_rank"]) == 2
    for rank in (0, 1):
        own, _ = read_rows(RunFolder(Path(folder)).rank(rank))
        assert [(row["rank"], row["epoch"]) for row in own] == [(rank, 1), (rank, 2)]


def two_sets(folder: str) -> None:
    sets = {"near": Points(8, draw=1), "far": Points(12, draw=2)}
    trainer_for(folder, test=sets, eval_strategy="epoch").train()


def test_two_test_sets_are_both_recorded(tmp_path: Path) -> None:
    folder, _ = alone(tmp_path, two_sets)
    rows = rows_of(folder)
    assert [row["epoch"] for row in rows] == [1, 2]
    for row in rows:
        for name in ("near_loss", "near_accuracy", "far_loss", "far_accuracy"):
            assert row[name] is not None, name
        # Of both sets together, as there is one field: it was that of the last.
        assert row["eval_samples"] == 8 + 12
        assert row["eval_samples_per_s"] == pytest.approx(20 / row["eval_time_s"])
    assert rows[0]["far_loss"] != rows[1]["far_loss"]


class Endless(IterableDataset):
    """A stream, whose length nobody knows."""

    def __iter__(self) -> Any:
        points = Points(64)
        return (points[i] for i in range(64))


def stream(folder: str) -> None:
    trainer_for(folder, train=Endless(), max_steps=6).train()


def test_a_stream_without_length(tmp_path: Path) -> None:
    folder, _ = alone(tmp_path, stream)
    (row,) = rows_of(folder)
    assert row["samples"] is row["fed_samples"] is None and row["updates"] == 6
    assert row["train_loss"] is None and row["trainer_train_loss"] > 0
    summary = summary_of(folder)
    assert (summary["outcome"], summary["samples"]) == ("finished", None)


def twice(folder: str) -> float:
    train(folder, learning_rate=0.01)
    time.sleep(0.3)
    trainer = trainer_for(folder, learning_rate=0.02)
    trainer.train()
    began = time.perf_counter()
    trainer.train()
    return time.perf_counter() - began


def test_the_same_folder_again_keeps_the_earlier_record(tmp_path: Path) -> None:
    folder, last_s = alone(tmp_path, twice)
    kept = sorted(p.name for p in tmp_path.iterdir() if "earlier" in p.name)
    assert kept == ["record.earlier-1", "record.earlier-2"]
    for name, rate in (("record.earlier-1", 0.01), ("record.earlier-2", 0.02), ("record", 0.02)):
        assert [row["epoch"] for row in rows_of(tmp_path / name)] == [1, 2]
        summary = summary_of(tmp_path / name)
        assert summary["outcome"] == "finished" and summary["attempts"] == 1
        settings = read_json(tmp_path / name / "settings.json") or {}
        assert settings["training_arguments"]["learning_rate"] == rate
    # Trained twice, timed twice: the second time does not contain the first.
    assert summary_of(folder)["wall_s"] <= last_s + 0.05


def held(folder: str) -> tuple[str, bool]:
    """A training in a folder that another process writes to; and once that one has ended."""
    path = RunFolder(Path(folder)).lock("run")
    path.parent.mkdir(parents=True)
    with path.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        print(1, file=other, flush=True)
        with pytest.raises(UserError) as refused:
            train(folder)
    train(folder)
    return str(refused.value), path.exists()


def test_two_trainings_in_one_folder_at_a_time_are_refused(tmp_path: Path) -> None:
    folder, (said, left) = alone(tmp_path, held)
    assert said == f"{folder} is being written by process 1: give each run a folder of its own"
    assert summary_of(folder)["outcome"] == "finished" and not left


def unfinished_then_other(folder: str) -> None:
    with contextlib.suppress(BrokenOffError):
        train(folder, save_strategy="steps", save_steps=6, callbacks=[BreakOff(6)])
    assert [row["epoch"] for row in rows_of(folder)] == [1]
    train(folder, learning_rate=0.5)  # from the start, and something else


def test_rows_of_two_trainings_are_not_mixed(tmp_path: Path) -> None:
    """A record that was not finished is not gone on with by a training that begins anew."""
    folder, _ = alone(tmp_path, unfinished_then_other)
    rows = rows_of(folder)
    assert [row["epoch"] for row in rows] == [1, 2]
    assert rows[0]["learning_rate"] > 0.1 and rows[0]["attempt"] == rows[1]["attempt"]
    (earlier,) = tmp_path.glob("record.earlier-*")
    (kept,) = rows_of(earlier)
    assert kept["learning_rate"] < 0.02


def resumed(folder: str, broken_off_at: int, how: str) -> None:
    more: dict[str, Any] = {
        "test": Points(8, draw=1), "eval_strategy": "epoch", "num_train_epochs": 3,
        "save_strategy": how, "save_steps": 2,
    }  # fmt: skip
    with contextlib.suppress(BrokenOffError):
        train(folder, callbacks=[BreakOff(broken_off_at)], **more)
    assert not Path(folder, "summary.json").exists()
    trainer_for(folder, **more).train(resume_from_checkpoint=True)


# 4 updates an epoch: broken off after a row was written, and inside an epoch.
@pytest.mark.parametrize(("update", "how"), [(8, "epoch"), (6, "steps")])
def test_resuming_doubles_no_row(update: int, how: str, tmp_path: Path) -> None:
    folder, _ = alone(tmp_path, resumed, update, how)
    rows = rows_of(folder)
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert [row["updates"] for row in rows] == [4, 8, 12]
    assert [row["attempt"] for row in rows] == [1, 1 if update == 8 else 2, 2]
    assert all(row["eval_loss"] > 0 for row in rows)
    attempts, _ = read_rows(RunFolder(Path(folder)).attempts)
    assert [row["event"] for row in attempts] == ["start", "end", "start", "end"]
    assert attempts[1]["outcome"] == "interrupted" and attempts[1]["wall_s"] > 0
    assert attempts[2]["from_update"] == update
    summary = summary_of(folder)
    assert summary["attempts"] == 2 and summary["outcome"] == "finished"
    assert summary["wall_s"] == pytest.approx(attempts[1]["wall_s"] + attempts[3]["wall_s"])
    assert rows[2]["wall_s"] > rows[0]["wall_s"]
    # What the first attempt had of the second epoch is known as samples alone.
    assert [row["samples"] for row in rows] == [16, 16, 16]
    whole = update == 8
    for name in ("train_loss", "epoch_time_s"):
        assert [row[name] is not None for row in rows] == [True, whole, True], name
    assert (summary["train_time_s"] is not None) == (summary["goodput_share"] is not None) == whole
    assert recorded(RunFolder(Path(folder))).problem is None


class Interrupted(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 7:
            raise KeyboardInterrupt


def resumed_after_interrupt(folder: str) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        train(folder, callbacks=[Interrupted()], save_strategy="epoch")
    gc.collect()  # as at the end of the process
    trainer_for(folder, save_strategy="epoch").train(resume_from_checkpoint=True)


def test_an_interrupted_attempt_is_recorded_up_to_its_last_update(tmp_path: Path) -> None:
    """Of quick steps most had not been reported, and nothing was said to be made again."""
    folder, _ = alone(tmp_path, resumed_after_interrupt)
    _, end, start, _ = read_rows(RunFolder(Path(folder)).attempts)[0]
    assert (end["update"], end["reason"]) == (7, "the training broke off")
    assert (start["from_update"], start["redone_updates"]) == (4, 3)
    summary = summary_of(folder)
    assert (summary["redone_updates"], summary["attempts"]) == (3, 2)
    assert summary["wall_s"] >= end["wall_s"] > 0


def resumed_elsewhere(folder: str) -> None:
    with contextlib.suppress(BrokenOffError):
        train(folder, callbacks=[BreakOff(4)], save_strategy="epoch")
    again = trainer_for(f"{folder}-new", output_dir=f"{folder}-checkpoints")
    again.train(resume_from_checkpoint=True)


def test_a_run_that_goes_on_in_a_new_folder_does_not_know_its_time(tmp_path: Path) -> None:
    """It was that of the last attempt, as if the first epoch had taken none."""
    folder, _ = alone(tmp_path, resumed_elsewhere)
    (row,) = rows_of(f"{folder}-new")
    assert (row["epoch"], row["wall_s"], row["train_loss"] > 0) == (2, None, True)
    assert summary_of(f"{folder}-new")["wall_s"] is None
    assert recorded(RunFolder(Path(f"{folder}-new"))).problem is None


def test_metrics_that_are_no_numbers_are_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    """They vanished without a word."""
    values = {"loss": 0.5, "matrix": [[1, 2]], "best": "cat", "whole": 7}
    others = NoNumbers()
    others.name(no_numbers(values), aloud=True)
    others.name(no_numbers({"matrix": [[1, 2]], "loss": 0.5}), aloud=True)
    assert capsys.readouterr().err == (
        "warning: metrics that are no numbers are not recorded: matrix (list), best (str)\n"
    )
    others.name({"other": "x"}, aloud=False)
    assert capsys.readouterr().err == ""


def test_the_best_epoch_is_that_of_the_trainer() -> None:
    """Of a metric that is better where it is smaller, the worst epoch was called the best."""
    rows = [{"epoch": 1, "rmse": 0.2}, {"epoch": 2, "rmse": 0.1}, {"epoch": 3, "rmse": 0.3}]
    for greater, best in ((False, 2), (True, 3), (None, 3)):
        args: Any = SimpleNamespace(metric_for_best_model="eval_rmse", greater_is_better=greater)
        assert best_of(rows, best_of_trainer(args))["best_epoch"] == best
    args = SimpleNamespace(metric_for_best_model=None, greater_is_better=None)
    assert best_of_trainer(args) is None


class KilledInSave(TrainerCallback):
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 16:
            os.kill(os.getpid(), signal.SIGKILL)


def with_checkpoints(folder: str, kill: bool) -> None:
    """A run; killed between the checkpoint of an epoch's last step and the epoch's end."""
    flags = ["--epochs=3", "--per_gpu_batch=16", "--save_steps=4", "--save=last"]
    callbacks = [KilledInSave()] if kill else []
    test = Points(65, draw=1)
    trainer, run = ours(folder, Net(), Points(128), test, *flags, callbacks=callbacks)
    run.train(trainer)


def test_an_epoch_without_row_is_not_taken_for_done(tmp_path: Path) -> None:
    killed = ran(1, with_checkpoints, str(tmp_path), True, env=CPU)
    assert killed.code == 128 + signal.SIGKILL
    (folder,) = find_runs(tmp_path)
    assert [row["epoch"] for row in rows_of(folder.path)] == [1]
    ranks(1, with_checkpoints, str(tmp_path), False, env=CPU)
    assert [row["epoch"] for row in rows_of(folder.path)] == [1, 2, 3]
    assert summary_of(folder.path)["samples"] == 3 * 128
    assert summary_of(folder.path)["attempts"] == 2


class Killed(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(folder: str, how: str) -> None:
    train(folder, callbacks=[Killed()], test=Points(8, draw=1), eval_strategy=how)


@pytest.mark.parametrize("how", ["epoch", "no"])
def test_a_row_is_on_disk_when_its_epoch_has_ended(how: str, tmp_path: Path) -> None:
    folder = tmp_path / "record"
    done = ran(1, killed, str(folder), how, env=CPU)
    assert done.code == 128 + signal.SIGKILL
    (row,) = rows_of(folder)
    assert row["epoch"] == 1 and ("eval_loss" in row) == (how == "epoch")
    assert {p.name for p in folder.iterdir() if not p.name.startswith(".")} == {
        "attempts.jsonl", "environment.json", "epochs.jsonl", "progress.json", "ranks",
        "settings.json", "telemetry",
    }  # fmt: skip


def secrets(folder: str) -> None:
    socket.gethostname = platform.node = lambda: NAMES[1]  # type: ignore[assignment]
    home = os.environ["HOME"]
    sys.argv = [f"{home}/train.py", "--hub_token", MARKER, f"--wandb_key={MARKER}", "--out", home]
    trainer_for(
        folder,
        test=Points(8, draw=1),
        eval_strategy="epoch",
        hub_token=MARKER,
        hub_model_id=f"{NAMES[0]}/private",
        run_name=f"{NAMES[0]}-{NAMES[1]}",
        resume_from_checkpoint=f"{home}/checkpoint-7",
    ).train()


def test_no_secrets_and_no_names(tmp_path: Path) -> None:
    tokens = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY")
    env = dict.fromkeys(tokens, MARKER) | dict.fromkeys(("USER", "LOGNAME"), NAMES[0])
    env |= {"HOME": NAMES[2], "HOSTNAME": NAMES[1], **CPU}
    folder = tmp_path / "record"
    ranks(1, secrets, str(folder), env=env)
    files = [p for p in folder.rglob("*") if p.is_file()]
    assert len(files) == 7
    real = [name for name in (socket.gethostname(), str(tmp_path)) if len(name) > 4]
    outcome = [
        (p.name, word) for p in files for word in (MARKER, *NAMES, *real) if word in p.read_text()
    ]
    assert outcome == []

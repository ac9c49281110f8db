"""A run that is broken off and started again ends as one that was not."""

from __future__ import annotations

import json
import operator
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification, TrainerCallback

from harness.core.records import RunFolder, read_rows
from harness.read.records.packing import pack_into
from harness.train.run.failures import Diverged
from tests.support.broken_runs import (
    ARGV,
    SHORT,
    Whole,
    assert_same_training,
    attempts_of,
    broken_off,
    only_run,
)
from tests.support.ranks import ranks, script
from tests.support.toys import CPU, Net, Points, ours

pytestmark = pytest.mark.process


def rank_rows(folder: RunFolder, rank: int) -> list[dict[str, Any]]:
    names = ("epoch", "rank", "eval_samples", "eval_accuracy")
    return [{name: row[name] for name in names} for row in read_rows(folder.rank(rank))[0]]


# 8 updates an epoch with one rank, 4 with two: all stop inside epoch 2 or at its evaluation.
CASES = [
    ("vit", 1, "kill", 10, []),
    ("vit", 2, "kill", 6, ["--strategy", "fsdp"]),
    ("vit", 1, "kill", 11, ["--save_steps", "5", "--augment", "crop_flip"]),
    ("vit", 2, "kill", 6, ["--save_steps", "5", "--balance", "3,1"]),
    ("bert", 1, "kill", 10, []),
    ("bert", 1, "kill row", 16, []),
    ("bert", 1, "term", 10, []),
    ("bert", 1, "int", 10, []),
    ("bert", 1, "crash", 10, []),
    ("bert", 1, "kill", 11, ["--save_steps", "5"]),
    ("bert", 2, "kill", 6, []),
    ("bert", 1, "term all", 10, ["--num_workers", "2"]),
]
SIGNALS = {"term": 143, "term all": 143, "int": 130}  # and the exit codes that they lead to
SLOW_CASES = [
    ("bert", 2, "kill evaluating", 8, []),
    ("bert", 2, "crash", 6, []),
    ("bert", 2, "kill", 6, ["--strategy", "fsdp"]),
    ("bert", 2, "kill", 7, ["--save_steps", "3"]),
    ("bert", 1, "kill", 11, ["--save_steps", "5", "--num_workers", "2"]),
    ("bert", 1, "kill", 10, ["--num_workers", "2"]),
]


@pytest.mark.parametrize(
    ("name", "count", "how", "update", "more"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
)
def test_a_broken_run_goes_on(
    name: str, count: int, how: str, update: int, more: list[str], tmp_path: Path, whole: Whole
) -> None:
    argv = [*SHORT, *more, "--o", str(tmp_path)]
    broken = broken_off(count, argv, update, how, name)
    folder = only_run(tmp_path)
    if how in SIGNALS:
        assert (broken.code, folder.outcome()) == (SIGNALS[how], "interrupted")
    before = folder.epochs.read_text()
    # Killed while evaluating, the other rank may or may not have got as far as to write.
    rows_before = {"kill row": {2}, "kill evaluating": {1, 2}}.get(how, {1})
    assert before.count("\n") in rows_before

    done = script(name, *argv, count=count)
    assert done.code == 0, done.err
    assert "resumes from update" in done.out
    undisturbed = whole(name, count, [*SHORT, *more])
    assert folder.epochs.read_text().startswith(before)  # no row was touched
    assert_same_training(folder, undisturbed)
    measuring = [row["measuring_s"] for row in read_rows(folder.epochs)[0]]
    assert measuring == sorted(measuring) and measuring[0] >= 0  # as far as both attempts did
    for rank in range(count):  # one row an epoch, however often the epoch was begun
        for row, one in zip(rank_rows(folder, rank), rank_rows(undisturbed, rank), strict=True):
            assert row == one

    summary = folder.read_summary()
    assert summary is not None
    assert summary["outcome"] == "finished"
    assert summary["attempts"] == 2
    attempts, _ = read_rows(folder.attempts)
    assert [row["event"] for row in attempts] == ["start", "end", "start", "end"]
    # The time of the attempt that broke is in the whole.
    assert attempts[1]["wall_s"] > 0
    assert summary["wall_s"] == pytest.approx(attempts[1]["wall_s"] + attempts[3]["wall_s"])
    known = [row["user_s_per_rank"] for row in attempts if row.get("user_s_per_rank")]
    assert len(known[-1]) == count and summary["user_s"] == pytest.approx(sum(map(sum, known)))
    outcomes = {"crash": "failed", "int": "interrupted"}
    outcomes |= {"term": "interrupted", "term all": "interrupted"}
    assert attempts[1]["outcome"] == outcomes.get(how, attempts[1]["outcome"])
    if how == "crash":
        assert "planted" in attempts[1]["reason"]


def test_loader_processes_change_nothing(whole: Whole) -> None:
    one, other = (whole("bert", 1, [*SHORT, *more]) for more in ([], ["--num_workers", "2"]))
    assert_same_training(one, other)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("how", "outcome"), [("crash", "failed"), ("oom", "oom")])
def test_a_failure_is_a_record_with_its_reason(
    count: int, how: str, outcome: str, tmp_path: Path
) -> None:
    broken_off(count, [*ARGV, "--o", str(tmp_path)], 2, how)
    summary = only_run(tmp_path).read_summary()
    assert summary is not None
    assert summary["outcome"] == outcome
    assert "planted" in summary["reason"]
    assert summary["epochs_done"] == 0


class BreakWeights(TrainerCallback):
    """Make a weight of the last rank NaN after this update, or a statistic of BatchNorm."""

    def __init__(self, update: int, what: str) -> None:
        self.update, self.what = update, what

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.update and args.process_index == args.world_size - 1:
            with torch.no_grad():
                operator.attrgetter(self.what)(kwargs["model"]).fill_(torch.nan)


def breaks(folder: str, update: int, what: str, *more: str) -> str:
    """What was raised; nothing but the checkpoints looks at the weights or the loss."""
    flags = ("--save=last", "--log_every=50", *more)
    net, data, test = Net(batchnorm="norm" in what), Points(64), Points(8)
    trainer, run = ours(folder, net, data, test, *flags, callbacks=[BreakWeights(update, what)])
    with pytest.raises(Diverged) as raised, run:
        run.train(trainer)
    return str(raised.value)


@pytest.mark.parametrize(("count", "strategy", "what"), [
    (1, "single", "head.bias"), (1, "single", "norm.running_var"), (2, "ddp", "head.bias"),
    (2, "fsdp", "head.bias"), (2, "local_sgd", "head.bias"), (2, "diloco", "head.bias"),
])  # fmt: skip
def test_a_run_that_diverges_keeps_its_last_good_checkpoint(
    count: int, strategy: str, what: str, tmp_path: Path
) -> None:
    more = [f"--strategy={strategy}", "--save_steps=3"]
    if strategy in ("local_sgd", "diloco"):
        more += ["--sync_every=4", "--sync_scope=rank"]
    messages = ranks(count, breaks, str(tmp_path), 4, what, *more, env=CPU)
    assert messages == ["weights are not finite at update 6"] * count
    assert_the_first_is_left(tmp_path, messages[0], 3)


def test_a_peer_that_diverges_keeps_its_last_good_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("hivemind")
    more = ["--strategy=hivemind", "--epochs=2"]
    for what in ("head.bias", "norm.running_var"):
        folder = tmp_path / what
        (message,) = ranks(1, breaks, str(folder), 32, what, *more, env=CPU)
        assert "nan at update 32" in message  # the evaluation comes before the checkpoint
        assert_the_first_is_left(folder, message, 16)


def assert_the_first_is_left(root: Path, reason: str, update: int) -> None:
    folder = only_run(root)
    summary = folder.read_summary() or {}
    assert summary["outcome"] == "diverged" and summary["reason"].startswith(reason)
    (mark,) = folder.path.glob("checkpoint-*/complete.json")
    assert mark.parent.name == f"checkpoint-{update}"
    weights = load_file(mark.with_name("model.safetensors"))
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())


@pytest.mark.parametrize(("count", "more"), [(1, []), (2, ["--strategy", "fsdp"])])
def test_weights_that_are_not_finite_are_no_checkpoint(
    count: int, more: list[str], tmp_path: Path
) -> None:
    argv = ["--tiny", "--train_size", "128", "--test_size", "32", "--b", "16", "--lr", "1e18"]
    argv += ["--save_steps", "3", "--log_every", "50", "--o", str(tmp_path), *more]
    done = script("vit", *argv, count=count)
    assert done.code != 0
    folder = only_run(tmp_path)
    summary = folder.read_summary() or {}
    assert summary["outcome"] == "diverged" and "not finite at update 3" in summary["reason"]
    assert not [*folder.path.glob("checkpoint-*")]


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    argv = ["--tiny", "--train_size", "64", "--test_size", "32", "--epochs", "1"]
    argv += ["--o", str(tmp_path)]
    assert script("vit", *argv).code == 0
    folder = only_run(tmp_path)
    first = {p: p.read_bytes() for p in folder.path.rglob("*.json*")}
    again = script("vit", *argv)
    assert again.code == 0
    assert "already finished" in again.out and "best epoch" not in again.out
    other = script("vit", *argv, "--best_metric", "f1_macro", "--save", "best").out
    unlike = "its best epoch is by --best_metric accuracy, without --save best"
    assert f"({unlike}, --rerun measures again)" in other
    assert {p: p.read_bytes() for p in folder.path.rglob("*.json*")} == first
    # Likewise of a record in an archive.
    pack_into(tmp_path, tmp_path / "packed.jsonl.gz")
    away = folder.path.rename(tmp_path / ".away")
    packed = script("vit", *argv, "--best_metric", "f1_macro", "--save", "best").out
    assert f"({unlike}, --rerun measures again)" in packed and not folder.path.exists()
    away.rename(folder.path)
    (tmp_path / "packed.jsonl.gz").unlink()

    assert script("vit", *argv, "--rerun").code == 0
    aside = folder.path.with_name(folder.path.name + ".earlier-1")
    assert {aside / p.relative_to(folder.path): t for p, t in first.items()} == {
        p: p.read_bytes() for p in aside.rglob("*.json*")
    }
    assert folder.outcome() == "finished"


@pytest.mark.parametrize("count", [1, 2])
def test_a_finished_run_does_not_answer_for_other_data(count: int, tmp_path: Path) -> None:
    texts = tmp_path / "texts.csv"
    lines = [f"a text about {'cats' if i % 2 else 'dogs'} {i},{i % 2}" for i in range(80)]
    texts.write_text("\n".join(["text,label", *lines]))
    argv = ["--tiny", "--dataset", str(texts), "--train_size", "48", "--test_size", "16"]
    argv += ["--epochs", "1", "--b", "8", "--o", str(tmp_path / "out")]
    assert script("bert", *argv, count=count).code == 0
    folder = only_run(tmp_path / "out")
    inputs = json.loads(folder.environment.read_text())["inputs"]
    assert inputs["dataset"]["files"] == 1 and inputs["dataset"]["bytes"] == texts.stat().st_size
    assert inputs["model"] is None

    os.utime(texts, (1, 1))  # only copied or touched: the same data
    assert "(--rerun measures again)" in script("bert", *argv, count=count).out
    texts.write_text(texts.read_text().replace("cats 7,", "cows 7,"))
    kept = folder.summary.read_bytes()
    done = script("bert", *argv, count=count)
    assert done.code == 2 and "already finished" not in done.out
    assert "the files of --dataset have changed since" in done.err and "--rerun" in done.err
    assert "Traceback" not in done.err and folder.summary.read_bytes() == kept
    assert script("bert", *argv, "--rerun", count=count).code == 0

    environment = json.loads(folder.environment.read_text())
    environment["inputs"]["code"] = "another"
    folder.environment.write_text(json.dumps(environment | {"threads": 7}))
    unlike = "(with other code than now, measured with OMP_NUM_THREADS=7, --rerun"
    assert unlike in script("bert", *argv, count=count).out


def test_rerun_on_two_ranks_runs_on_both(tmp_path: Path) -> None:
    argv = ["--tiny", "--train_size", "64", "--test_size", "32", "--epochs", "1", "--b", "16"]
    for more in ([], [], ["--rerun"]):
        done = script("vit", *argv, *more, "--o", str(tmp_path), count=2)
        assert done.code == 0, done.err
    aside, fresh = sorted(tmp_path.glob("vit/1_2/*"), key=lambda p: "earlier" not in p.name)
    assert aside.name == fresh.name + ".earlier-1"
    for folder in (aside, fresh):
        assert {p.name for p in (folder / "ranks").iterdir()} == {"rank_0.jsonl", "rank_1.jsonl"}


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """The data behind the same name have changed since the checkpoint was made."""
    data = tmp_path / "data.csv"
    lines = [f"text number {i},{'ab'[i % 2]}" for i in range(200)]
    data.write_text("\n".join(["text,label", *lines]) + "\n")
    argv = ["--tiny", "--dataset", str(data), "--train_size", "128", "--test_size", "32"]
    argv += ["--epochs", "3", "--b", "16", "--o", str(tmp_path / "out")]
    broken_off(1, argv, 10, "kill")
    data.write_text("\n".join(["text,label", *reversed(lines)]) + "\n")
    done = script("bert", *argv)
    assert done.code == 2
    assert "does not fit" in done.err
    assert "--rerun" in done.err


def test_half_a_checkpoint_is_not_taken_for_one(tmp_path: Path) -> None:
    argv = [*SHORT, "--o", str(tmp_path)]
    broken_off(1, argv, 10, "kill")
    folder = only_run(tmp_path).path
    (folder / "checkpoint-8" / "complete.json").unlink()
    (folder / "checkpoint-9").mkdir()
    done = script("bert", *argv)
    assert done.code == 0, done.err
    assert "goes on" not in done.out
    rows, _ = read_rows(only_run(tmp_path).epochs)
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert json.loads((folder / "summary.json").read_text())["attempts"] == 2


@pytest.mark.parametrize(("count", "more"), [(1, []), (2, ["--strategy", "fsdp"])])
def test_the_best_epoch_is_kept_and_can_be_loaded(
    count: int, more: list[str], tmp_path: Path
) -> None:
    """A learning rate that goes wrong late: the best epoch is not the last."""
    argv = [*ARGV, *more, "--save", "best", "--lr", "0.03"]
    done = script(
        "vit", *argv, "--lr_scheduler_type", "constant", "--o", str(tmp_path), count=count
    )
    assert done.code == 0, done.err
    folder = only_run(tmp_path)
    summary = folder.read_summary()
    assert summary is not None
    rows, _ = read_rows(folder.epochs)
    assert summary["best_value"] == max(row["accuracy"] for row in rows)
    best = folder.path / f"checkpoint-{rows[int(summary['best_epoch']) - 1]['updates']}"
    last = folder.path / f"checkpoint-{rows[-1]['updates']}"
    assert set(folder.path.glob("checkpoint-*")) == {best, last}
    # Anyone can load it, under the names of the file.
    weights = load_file(best / "model.safetensors")
    loaded = AutoModelForImageClassification.from_pretrained(best).state_dict()
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[key], weight) for key, weight in weights.items())
    assert not list(folder.path.rglob("*.bin"))  # no pickled arguments


@pytest.mark.parametrize("count", [1, 2])
def test_half_the_batch_makes_the_same_updates(count: int, tmp_path: Path) -> None:
    argv = [*SHORT, "--dropout", "0", "--save_steps", "3", "--o"]
    whole, auto = str(tmp_path / "whole"), [*argv, str(tmp_path / "auto"), "--auto_batch"]
    assert script("vit", *argv, whole, count=count).code == 0
    for update, batch in ((3, 8), (2, 4)):
        done = broken_off(count, auto, update, "oom over 4", "vit")
        folder = only_run(tmp_path / "auto")
        told = folder.read_summary() or {}
        assert told["outcome"] == "oom"
        assert f"resumes with --per_gpu_batch {batch} --grad_acc {16 // batch}" in told["reason"]
    # Its name and its settings are those that were asked for; what was run stands beside them.
    done = script("vit", *auto, count=count)
    assert done.code == 0, done.err
    assert "--auto_batch: --per_gpu_batch 4 --grad_acc 4 instead of 16 and 1" in done.err
    expected = only_run(tmp_path / "whole")
    assert folder.path.name == expected.path.name and folder.outcome() == "finished"
    settings = json.loads(folder.settings.read_text())
    assert (settings["per_gpu_batch"], settings["grad_acc"]) == (16, 1)
    assert settings["training_arguments"]["per_device_train_batch_size"] == 4
    assert [row["per_gpu_batch"] for row in attempts_of(folder)[0]] == [16, 8, 4]
    for row, other in zip(folder.read_epochs()[0], expected.read_epochs()[0], strict=True):
        for name in ("updates", "samples", "effective_batch", "learning_rate"):
            assert row[name] == other[name], name
        assert row["train_loss"] == pytest.approx(other["train_loss"], rel=1e-4)
        assert row["eval_loss"] == pytest.approx(other["eval_loss"], rel=1e-4)

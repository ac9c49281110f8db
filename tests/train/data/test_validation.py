"""With a validation set the test set is used once, at the end, on the weights that were chosen."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageClassification

from harness.core.command_line import parse
from harness.core.records import RunFolder, read_json, read_rows
from harness.train.data.images import load_images
from harness.train.strategy import sharding
from tests.support.broken_runs import only_run
from tests.support.quality import expected
from tests.support.ranks import ran, ranks, run_script, script
from tests.support.sweeps import untimed_rows
from tests.support.toys import CPU, FEATURES, Net, weights

pytestmark = pytest.mark.process

# A learning rate that goes wrong late: the best epoch is not the last.
ARGV = [
    "--tiny", "--train_size", "128", "--test_size", "101", "--validation_split", "0.2",
    "--epochs", "3", "--b", "16", "--seed", "2", "--lr", "0.03", "--lr_scheduler_type", "constant",
    "--full_determinism",
]  # fmt: skip
HELD_OUT = 32
CASES = {
    "last": (1, []),
    "best, ddp": (2, ["--save", "best"]),
    "best, fsdp": (2, ["--save", "best", "--strategy", "fsdp"]),
}


def summary_of(folder: RunFolder) -> dict[str, Any]:
    return read_json(folder.summary) or {}


def of_the_test(folder: RunFolder) -> dict[str, Any]:
    return {k: v for k, v in summary_of(folder).items() if k.startswith("test_")}


def watched(argv: list[str], diary: str, kill: str) -> int:
    """vit.py, which writes down what is evaluated, killed before or within or after the test."""
    import vit

    class Watcher(vit.Console):
        def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
            size = len(kwargs["eval_dataloader"].dataset)
            with Path(diary).open("a") as file:
                file.write(f"{self.context.world.rank} {size}\n")
            if kill == "in test" and size == 101:
                os.kill(os.getpid(), signal.SIGKILL)

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if kill == "before test" and state.global_step == state.max_steps:
                os.kill(os.getpid(), signal.SIGKILL)

    class Tester(vit.ExactTrainer):
        def test(self) -> None:
            super().test()
            if kill == "after test" and self.args.process_index == self.args.world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)

    vit.Console, vit.ExactTrainer = Watcher, Tester  # type: ignore[misc]
    return run_script("vit", argv, ".")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[RunFolder, str, str]]:
    """Undisturbed runs: the record, what was evaluated, and what a person saw."""
    result = {}
    for case, (count, more) in CASES.items():
        root = tmp_path_factory.mktemp("whole")
        diary = root / "diary"
        done = ran(count, watched, [*ARGV, *more, "--o", str(root)], str(diary), "")
        assert done.code == 0, done.err
        result[case] = (only_run(root), diary.read_text(), done.out)
    return result


def answers(checkpoint: str) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Logits and classes of the test set by saved weights, and the numbers of all samples."""
    model = AutoModelForImageClassification.from_pretrained(checkpoint).eval()
    images = load_images(parse("vit", ARGV), 1)
    sets: list[Any] = [images.train, images.validation, images.test]
    parts = [data.__getitems__(list(range(len(data)))) for data in sets]
    batch = images.to_device(images.collate(parts[2]))
    labels = batch.pop("labels")
    with torch.no_grad():
        logits = model(**batch).logits.numpy()
    return logits, labels.numpy(), np.concatenate(parts).tolist()


@pytest.mark.parametrize("case", CASES)
def test_the_test_set_is_used_once_on_the_chosen_weights(case: str, whole: Any) -> None:
    folder, diary, out = whole[case]
    count, _ = CASES[case]
    rows, summary = untimed_rows(folder), summary_of(folder)
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert {row["eval_samples"] for row in rows} == {HELD_OUT}
    assert summary["eval_loss"] == rows[-1]["eval_loss"]
    # One batch of 64 a process: an evaluation is one step, of the test set two on one process.
    steps = diary.splitlines()
    for rank in range(count):
        mine = [line.split()[1] for line in steps if line.startswith(f"{rank} ")]
        assert mine == [str(HELD_OUT)] * 3 + ["101"] * (2 if count == 1 else 1)
    times = [row["eval_time_s"] for row in read_rows(folder.epochs)[0]]
    assert summary["eval_time_s"] == pytest.approx(sum(times))

    best = summary["best_epoch"]
    assert best < 3, "the best epoch must not be the last, for this to be a test"
    epoch = 3 if case == "last" else best
    result = of_the_test(folder)
    assert result.pop("test_epoch") == epoch and result.pop("test_samples") == 101
    checkpoint = folder.path / f"checkpoint-{rows[int(epoch) - 1]['updates']}"
    ((logits, labels, numbers),) = ranks(1, answers, str(checkpoint))
    assert len(set(numbers)) == len(numbers) == 128 + HELD_OUT + 101
    reference = {f"test_{name}": value for name, value in expected(logits, labels).items()}
    assert result.keys() == reference.keys()
    # Other batches, other rounding: the loss is compared as single precision allows.
    assert result.pop("test_loss") == pytest.approx(reference.pop("test_loss"), abs=1e-5)
    assert result == pytest.approx(reference, abs=1e-9)
    data = (read_json(folder.environment) or {})["data"]
    assert data["validation_samples"] == HELD_OUT
    assert data["validation_from"] == "0.2 of the training samples" and data["test_samples"] == 101
    assert "32 validation samples, 101 test samples" in out
    assert f"weights of epoch {epoch:g}: test_loss" in out


KILLS = [("last", "before test"), ("last", "after test"), ("best, fsdp", "in test")]


@pytest.mark.parametrize(("case", "kill"), KILLS)
def test_a_run_killed_around_its_test_is_tested(
    case: str, kill: str, tmp_path: Path, whole: Any
) -> None:
    """No step is left when it is started again."""
    count, more = CASES[case]
    argv = [*ARGV, *more, "--o", str(tmp_path)]
    assert ran(count, watched, argv, str(tmp_path / "diary"), kill).code != 0
    folder = only_run(tmp_path)
    assert not of_the_test(folder) and summary_of(folder).get("outcome") != "finished"
    before = {p: p.read_text() for p in [folder.epochs, *map(folder.rank, range(count))]}
    observed = (read_json(folder.environment) or {})["observed"]
    assert [row["epoch"] for row in untimed_rows(folder)] == [1, 2, 3]

    done = script("vit", *argv, count=count)
    assert done.code == 0, done.err
    undisturbed = whole[case][0]
    assert of_the_test(folder) == of_the_test(undisturbed)
    assert {p: p.read_text() for p in before} == before
    summary = summary_of(folder)
    assert (summary["outcome"], summary["attempts"]) == ("finished", 2)
    # Of an attempt without a step the Trainer has no figure, and its record loses none.
    assert summary["trainer_train_samples_per_second"] is None
    environment = read_json(folder.environment) or {}
    assert environment["observed"] == observed and environment["first_learning_rate"] == 0.03


def other_weights(folder: str, strategy: str) -> tuple[np.ndarray, list[float]]:
    """Each rank has other weights, and rank 0 alone the file with the ones to load."""
    from harness.train.run.start import start

    argv = ["--tiny", "--strategy", strategy, "--save", "none", "--o", folder]
    run = start(parse("vit", argv))
    assert run is not None
    rank = run.context.world.rank
    net = Net(batchnorm=True, draw=rank)
    file = Path(folder) / f"seen_by_{rank}" / "model.safetensors"
    if rank == 0:
        import safetensors.torch

        saved = Net(batchnorm=True, draw=7)
        saved.norm.running_mean += 3
        file.parent.mkdir(parents=True)
        safetensors.torch.save_model(saved, str(file))
    if strategy == "fsdp":
        sharding.shard(net, run.context.settings, torch.device("cpu"))
    sharding.load_weights(net, file, run.context.settings)
    if strategy == "fsdp":
        result = sharding.full_weights(net)  # put together from all ranks, on rank 0
        parts = [result[name].flatten() for name, _ in net.named_parameters() if rank == 0]
        values = torch.cat(parts).double().numpy() if parts else np.empty(0)
        return values, net.norm.running_mean.tolist()
    return weights(net), net.norm.running_mean.tolist()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_get_the_weights_that_rank_0_sees(strategy: str, tmp_path: Path) -> None:
    result = ranks(2, other_weights, str(tmp_path), strategy, env=CPU)
    for rank, (values, mean) in enumerate(result):
        assert mean == [3.0] * FEATURES
        if rank == 0 or strategy == "ddp":
            assert np.array_equal(values, weights(Net(batchnorm=True, draw=7)))


def test_without_the_flag_nothing_is_tested(tmp_path: Path) -> None:
    argv = ["--tiny", "--train_size", "64", "--test_size", "45", "--epochs", "1", "--b", "16"]
    done = script("vit", *argv, "--eval_batch", "8", "--o", str(tmp_path), count=2)
    assert done.code == 0, done.err
    folder = only_run(tmp_path)
    assert not of_the_test(folder) and "validation" not in done.out
    data = (read_json(folder.environment) or {})["data"]
    assert not [name for name in data if name.startswith("validation")]
    # Each rank's own part of the 45: batches of 8 in turn, and the last 5.
    (row,) = untimed_rows(folder)
    mine = [read_rows(folder.rank(rank))[0][0] for rank in (0, 1)]
    assert [each["eval_samples"] for each in mine] == [24, 21]
    for name in ("accuracy", "top5_accuracy"):
        mean = sum(each[f"eval_{name}"] * each["eval_samples"] for each in mine) / 45
        assert mean == pytest.approx(row[name], abs=1e-12)

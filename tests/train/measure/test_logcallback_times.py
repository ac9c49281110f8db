"""Times, losses and counts of samples that LogCallback alone records, beside a second clock."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import transformers.trainer
from torch.utils.data import IterableDataset, WeightedRandomSampler
from transformers import PreTrainedConfig, Trainer, TrainerCallback

from harness.core.records import RunFolder
from harness.read.records.recorded import recorded
from harness.read.records.runs import read_run
from harness.train.measure.clock import MEASURING
from logcallback import LogCallback
from tests.support.broken_runs import attempts_of
from tests.support.own_time import keep_own_time
from tests.support.ranks import ranks
from tests.support.recorded import (
    alone,
    environment_of,
    rows_of,
    summary_of,
    train,
    trainer_for,
)
from tests.support.toys import CPU, Net, Points

pytestmark = pytest.mark.process


class Wall(TrainerCallback):
    """A second clock around each epoch."""

    def __init__(self) -> None:
        self.epochs: list[float] = []

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        self.began = time.perf_counter()

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self.epochs.append(time.perf_counter() - self.began)


def agree(rows: list[dict[str, Any]], wall: list[float]) -> bool:
    apart = [abs(row["epoch_time_s"] - s) for row, s in zip(rows, wall, strict=True)]
    return max(apart) < 0.06


class Slow(Points):
    """Samples that take a while to come."""

    took: ClassVar[list[float]] = []

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        began = time.perf_counter()
        time.sleep(0.01)
        self.took.append(time.perf_counter() - began)
        return super().__getitem__(i)


def slow_data(folder: str) -> tuple[list[float], list[float]]:
    keep_own_time()
    wall = Wall()
    train(folder, train=Slow(24), callbacks=[wall])
    return wall.epochs, Slow.took


def test_waiting_for_data_is_seen(tmp_path: Path) -> None:
    folder, (wall, took) = alone(tmp_path, slow_data)
    rows = rows_of(folder)
    assert len(took) == 48 and agree(rows, wall)
    for row, waited in zip(rows, (took[:24], took[24:]), strict=True):
        assert 0.99 * sum(waited) < row["data_wait_share"] * row["epoch_time_s"]
        assert 24 * 0.01 <= row["data_wait_share"] * row["epoch_time_s"] <= row["epoch_time_s"]


def slow_logs(folder: str) -> None:
    keep_own_time()
    gather = transformers.trainer.nested_gather

    def late(*args: Any) -> Any:
        time.sleep(0.05)
        return gather(*args)

    transformers.trainer.nested_gather = late
    train(folder)


def test_waiting_for_the_loss_of_a_log_entry_is_no_waiting_for_data(tmp_path: Path) -> None:
    folder, _ = alone(tmp_path, slow_logs)
    rows = rows_of(folder)
    assert all(row["epoch_time_s"] > 4 * 0.05 for row in rows)
    assert max(row["data_wait_share"] * row["epoch_time_s"] for row in rows) < 0.05


def slow_steps(folder: str) -> list[float]:
    keep_own_time()
    wall = Wall()
    model = Net(train_s=0.03)
    trainer_for(folder, model, Points(24), callbacks=[wall], num_train_epochs=4).train()
    return wall.epochs


def test_times_agree_with_each_other_and_with_a_clock(tmp_path: Path) -> None:
    folder, wall = alone(tmp_path, slow_steps)
    left_out = environment_of(folder)["timing_warmup_steps"]
    assert left_out == 1
    rows = rows_of(folder)
    assert agree(rows, wall)
    for row in rows:
        # At least six times 0.03 s of it are computing.
        assert row["data_wait_share"] * row["epoch_time_s"] <= row["epoch_time_s"] - 6 * 0.03
        assert row["train_samples_per_s"] == row["timed_samples"] / row["timed_s"]
        assert row["train_samples_per_s_per_gpu"] == row["train_samples_per_s"]
        assert 0.03 <= row["step_time_median_s"] <= row["step_time_p95_s"] < row["timed_s"]
        assert row["timed_s"] <= row["epoch_time_s"]
    assert [row["timed_steps"] for row in rows] == [6 - left_out, 6, 6, 6]
    assert [row["timed_samples"] for row in rows] == [20, 24, 24, 24]
    # Steps are nearly all of an epoch.
    assert max(row["epoch_time_s"] / row["timed_s"] for row in rows[1:]) < 1.1
    summary = summary_of(folder)
    timed_s = sum(row["timed_s"] for row in rows)
    assert summary["train_samples_per_s"] == pytest.approx(92 / timed_s)
    assert summary["train_time_s"] == pytest.approx(sum(row["epoch_time_s"] for row in rows))
    assert summary["wall_s"] >= summary["train_time_s"]


def measured_before(folder: str) -> tuple[float, float]:
    keep_own_time()
    began_s = time.perf_counter()
    with MEASURING.counted(), MEASURING.counted():
        time.sleep(0.05)
    took_s = time.perf_counter() - began_s
    train(folder)
    return MEASURING.total_s, took_s


def test_what_was_measured_before_a_run_is_none_of_its_time(tmp_path: Path) -> None:
    folder, (counted_s, took_s) = alone(tmp_path, measured_before)
    assert 0.05 <= counted_s <= took_s  # once, though one was within the other
    assert [row["measuring_s"] for row in rows_of(folder)] == [0, 0]


class Measures(TrainerCallback):
    """At an update, measures; and a training of which one begins to fail after it."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            with MEASURING.counted():
                time.sleep(0.05)
            if self.fails:
                raise RuntimeError("planted")


def measured_in_two_attempts(folder: str) -> None:
    with pytest.raises(RuntimeError, match="planted"):
        train(folder, callbacks=[Measures(fails=True)])
    gc.collect()  # the trainer, with which its record ends
    record = RunFolder(Path(folder))
    record.settings.unlink()  # or it would be set aside: this goes on with it
    train(folder, callbacks=[Measures(fails=False)])


def test_what_an_attempt_measured_that_left_no_row_counts(tmp_path: Path) -> None:
    """Its wall time did, and its measuring seemed to be training."""
    folder, _ = alone(tmp_path, measured_in_two_attempts)
    starts, ends = attempts_of(RunFolder(Path(folder)))
    assert len(starts) == 2 and min(end["measuring_s"] for end in ends) >= 0.05
    both_s = sum(end["measuring_s"] for end in ends)
    assert [row["measuring_s"] for row in rows_of(folder)] == pytest.approx([both_s] * 2)


class SlowSave(Trainer):
    saves: ClassVar[list[float]] = []

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        began = time.perf_counter()
        time.sleep(0.8)
        super()._save_checkpoint(*args, **kwargs)
        self.saves.append(time.perf_counter() - began)


def interrupted_epochs(folder: str, **more: Any) -> tuple[list[float], list[float]]:
    keep_own_time()
    wall = Wall()
    net, test = Net(train_s=0.01, eval_s=0.2), Points(8, draw=1)
    chosen = {"callbacks": [wall], "kind": SlowSave, **more}
    trainer_for(folder, net, Points(20), test, **chosen).train()
    return wall.epochs, SlowSave.saves


def by_epoch(folder: str) -> tuple[list[float], list[float]]:
    return interrupted_epochs(folder, eval_strategy="epoch", save_strategy="epoch")


def by_steps(folder: str) -> tuple[list[float], list[float]]:
    # 5 steps an epoch: evaluated after 2, 4 | 6, 8, 10; saved after 3 | 6, 9, 10.
    strategies = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps"}
    return interrupted_epochs(folder, save_steps=3, **strategies)


@pytest.mark.parametrize("how", [by_epoch, by_steps])
def test_evaluation_and_saving_are_not_training_time(how: Any, tmp_path: Path) -> None:
    folder, (wall, saves) = alone(tmp_path, how)
    rows = rows_of(folder)
    assert [row["epoch"] for row in rows] == [1, 2]
    assert len(saves) == (2 if how is by_epoch else 4)
    # What the second clock counted besides training: 0.4 s for each evaluation, and the saves.
    beside = [0.0, 0.0] if how is by_epoch else [2 * 0.4 + saves[0], 3 * 0.4 + sum(saves[1:])]
    for row, seconds, others in zip(rows, wall, beside, strict=True):
        assert 5 * 0.01 <= row["epoch_time_s"] < seconds - others + 0.06
        assert row["timed_s"] <= row["epoch_time_s"]
        assert row["step_time_p95_s"] < 0.4
    for row, count in zip(rows, (1, 1) if how is by_epoch else (2, 3), strict=True):
        # Two batches each, and no save; evaluations inside the epoch count as well.
        assert count * 0.4 <= row["eval_time_s"] < count * 0.4 + 0.8
        if row is rows[-1] or how is by_epoch:
            assert row["eval_samples"] == 8
            one_s = 8 / row["eval_samples_per_s"]  # of the evaluation at the end
            assert one_s == pytest.approx(row["eval_time_s"]) if count == 1 else 0.4 <= one_s < 1.2
    summary = summary_of(folder)
    assert sum(saves) <= summary["save_time_s"] < sum(saves) + 0.4  # and no evaluation
    assert summary["train_time_s"] == pytest.approx(sum(row["epoch_time_s"] for row in rows))


def short_last_batch(folder: str) -> list[list[int]]:
    net = Net(train_s=0.02)
    trainer_for(folder, net, Points(13)).train()
    return net.fed


def test_a_short_last_batch_is_counted_as_it_is(tmp_path: Path) -> None:
    folder, fed = alone(tmp_path, short_last_batch)
    assert [len(batch) for batch in fed] == [4, 4, 4, 1] * 2
    rows = rows_of(folder)
    for row in rows:
        assert row["samples"] == 13
        assert row["fed_samples"] == 13  # one process fills nothing up
        assert row["train_samples_per_s"] == row["timed_samples"] / row["timed_s"]
        # The Trainer's loss is a mean over batches, of which the last has a quarter of the samples.
        assert row["train_loss"] is None and row["trainer_train_loss"] > 0
    # The step that is left out has four samples, the last one has one.
    assert [row["timed_steps"] for row in rows] == [3, 4]
    assert [row["timed_samples"] for row in rows] == [9, 13]
    assert summary_of(folder)["samples"] == 26


class Unlabelled(Net):
    """The Trainer looks at its configuration, and takes the labels away where it smooths them."""

    config = PreTrainedConfig()

    def forward(self, x: Any, index: Any, labels: Any = None) -> dict[str, Any]:
        return super().forward(
            x, torch.zeros(len(x), dtype=int) if labels is None else labels, index
        )


def evaluated_with(folder: str, flags: dict[str, Any]) -> None:
    sets = {"train": Points(22), "test": Points(13, draw=1)}
    train(folder, **{"model": Unlabelled(), **sets, "eval_strategy": "epoch", **flags})


def test_smoothed_losses_have_names_of_their_own(tmp_path: Path) -> None:
    """They are no cross-entropy, which `eval_loss` and `train_loss` are."""
    flags = {"label_smoothing_factor": 0.1, "train": Points(24)}
    folder, _ = alone(tmp_path, evaluated_with, flags)
    for row in rows_of(folder):
        assert row["trainer_eval_loss"] > 0 and "eval_loss" not in row
        assert row["trainer_train_loss"] > 0 and row["train_loss"] is None


@pytest.mark.parametrize("accumulated", [1, 2])
def test_dropped_samples_are_not_counted(accumulated: int, tmp_path: Path) -> None:
    """All samples of both sets were, though the Trainer skips the last batch, which is not full."""
    flags = {
        "dataloader_drop_last": True,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": accumulated,
    }
    folder, _ = alone(tmp_path, evaluated_with, flags)
    for row in rows_of(folder):
        assert (row["samples"], row["fed_samples"], row["eval_samples"]) == (20, 20, 12)
        assert row["eval_samples_per_s"] == pytest.approx(12 / row["eval_time_s"])
        assert (row["train_loss"] is not None) == (accumulated == 1)


class Stream(IterableDataset):
    """Ten samples a pass, which nobody knows before."""

    def __iter__(self) -> Any:
        points = Points(10)
        return (points[i] for i in range(10))


def streamed(folder: str, workers: int) -> None:
    train(folder, train=Stream(), max_steps=6, dataloader_num_workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_a_stream_are_unknown(workers: int, tmp_path: Path) -> None:
    """Passes of batches of 4, 4 and 2; they were taken for 12 samples."""
    folder, _ = alone(tmp_path, streamed, workers)
    rows, summary = rows_of(folder), summary_of(folder)
    assert [row["updates"] for row in rows] == [3, 6]
    for row in rows:
        assert row["samples"] is row["fed_samples"] is row["train_loss"] is None
        assert row["trainer_train_loss"] > 0
    timed = [(row["timed_steps"], row["timed_samples"]) for row in rows]
    assert timed == ([(2, None), (3, None)] if workers else [(1, 4), (2, 8)])
    for row in (*rows, summary):
        assert (row["train_samples_per_s"] is None) == (workers == 1)
    assert summary["samples"] is None and recorded(RunFolder(Path(folder))).problem is None
    run = read_run(RunFolder(Path(folder)), {}, "stream", None)  # two passes, at epochs 0.5 and 1.5
    assert run.measures["epoch_time_s"] == pytest.approx(summary["train_time_s"] / 2)


class Drawing(Trainer):
    """Draws more samples than the set has."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return WeightedRandomSampler([1.0] * 8, num_samples=22)


def drawn(folder: str) -> None:
    trainer_for(folder, train=Points(8), kind=Drawing).train()
    trainer_for(f"{folder}-stream", train=Stream(), max_steps=60).train()


def test_samples_are_those_drawn_and_streams_leave_out_ten_steps(tmp_path: Path) -> None:
    folder, _ = alone(tmp_path, drawn)
    for row in rows_of(folder):
        assert (row["updates"] % 6, row["samples"], row["fed_samples"]) == (0, 22, 22)
    assert rows_of(folder)[1]["timed_samples"] == 22
    assert environment_of(f"{folder}-stream")["timing_warmup_steps"] == 10


def accumulating(folder: str) -> int:
    net = Net()
    trainer_for(folder, net, Points(22), gradient_accumulation_steps=2).train()
    return sum(map(len, net.fed))


def test_passes_that_several_processes_accumulate_are_fed_once(tmp_path: Path) -> None:
    """Three passes of four samples on each of two ranks: the second update has one of them."""
    folder = str(tmp_path / "record")
    fed = ranks(2, accumulating, folder, env=CPU)
    rows = rows_of(folder)
    assert [(row["samples"], row["fed_samples"]) for row in rows] == [(22, 24)] * 2
    assert sum(fed) == sum(row["fed_samples"] for row in rows)


def dispatching(folder: str) -> int:
    net = Net()
    trainer_for(folder, net, Points(21), accelerator_config={"dispatch_batches": True}).train()
    return sum(map(len, net.fed))


def test_batches_that_one_process_dispatches_are_filled_up_to_equal_shares(tmp_path: Path) -> None:
    """The last five samples and one more; a whole batch of each process counted."""
    folder = str(tmp_path / "record")
    fed = ranks(2, dispatching, folder, env=CPU)
    rows = rows_of(folder)
    assert [(row["samples"], row["fed_samples"]) for row in rows] == [(21, 22)] * 2
    assert sum(fed) == sum(row["fed_samples"] for row in rows)


def with_a_metric_called_samples(folder: str) -> None:
    trainer = trainer_for(folder, None, Points(16), Points(13, draw=1), eval_strategy="epoch")
    trainer.compute_metrics = lambda _: {"samples": 3}
    trainer.train()


def test_a_metric_called_samples_is_not_the_size_of_the_set(tmp_path: Path) -> None:
    folder, _ = alone(tmp_path, with_a_metric_called_samples)
    assert [row["eval_samples"] for row in rows_of(folder)] == [13, 13]


def two_sets_on_two_ranks(folder: str) -> None:
    sets = {"one": Points(13, draw=1), "two": Points(11, draw=2)}
    train(folder, train=Points(22), test=sets, eval_strategy="epoch")


def test_losses_of_several_sets_that_ranks_share_are_the_trainers(tmp_path: Path) -> None:
    """They are means over sets that were filled up, as that of a single one is."""
    folder = str(tmp_path / "record")
    ranks(2, two_sets_on_two_ranks, folder, env=CPU)
    for row in rows_of(folder):
        assert row["trainer_one_loss"] > 0 < row["trainer_two_loss"]
        assert not {"one_loss", "two_loss", "eval_loss"} & {*row}


def test_the_clock_settles_where_an_evaluation_or_a_save_follows() -> None:
    settled: list[int] = []
    callback = LogCallback.__new__(LogCallback)
    step: list[int] = [0]
    clock: Any = SimpleNamespace(step=lambda _: None, settle=lambda: settled.append(step[0]))
    callback.clock, callback.batch, callback.update, callback.attempt = clock, 4, 0, 0
    for evaluates, saves in ((False, False), (True, False), (False, True), (False, False)):
        step[0] += 1
        control = SimpleNamespace(should_evaluate=evaluates, should_save=saves)
        state: Any = SimpleNamespace(global_step=step[0])
        callback.on_step_end(None, state, control)
    assert settled == [2, 3]


def evaluated_between(folder: str) -> float:
    keep_own_time()
    trainer = trainer_for(folder, test=Points(8, draw=1), eval_strategy="epoch")
    trainer.train()
    time.sleep(1.0)
    trainer.evaluate()
    trainer.train()
    return trainer.args.num_train_epochs


def test_an_evaluation_between_two_trainings_is_of_neither(tmp_path: Path) -> None:
    folder, epochs = alone(tmp_path, evaluated_between)
    rows = rows_of(folder)
    assert len(rows) == epochs and all(0 < row["eval_time_s"] < 1.0 for row in rows)


class EvaluatesAgain(TrainerCallback):
    """Evaluates the same set once more inside the first epoch."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            for _ in range(2):
                self.trainer.evaluate()


def evaluated_twice(folder: str) -> None:
    keep_own_time()
    again, net = EvaluatesAgain(), Net(eval_s=0.2)
    test = Points(8, draw=1)
    again.trainer = trainer_for(folder, net, Points(20), test, callbacks=[again],
                                eval_strategy="epoch")  # fmt: skip
    again.trainer.train()


def test_each_of_two_evaluations_at_one_update_takes_its_time(tmp_path: Path) -> None:
    folder, _ = alone(tmp_path, evaluated_twice)
    first, *others = rows_of(folder)
    assert 3 * 0.4 <= first["eval_time_s"] < 3 * 0.4 + 0.8
    assert all(0.4 <= row["eval_time_s"] < 0.8 for row in others)

"""Hand-worked cases for what an epoch's row is made of."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from harness.core import attempts
from harness.core.records import RunFolder, append_row, write_json
from harness.core.records.summary import best_of
from harness.core.schema.rows import EpochRow
from harness.train.loop.epoch import EpochEvents, EpochSums
from harness.train.measure import sampler
from harness.train.measure.clock import StepClock
from harness.train.measure.rows import (
    LoggedLoss,
    Pending,
    are_unknown,
    batch_of,
    batches_vary,
    rank_row,
    rates,
    size_of,
    steps,
    updates_of,
)
from harness.train.measure.sampler import quantile


def test_quantile_is_a_value_that_occurs() -> None:
    values = [float(n) for n in range(1, 101)]
    assert quantile(values, 0.95) == 95.0
    assert rank_row(1.0, 0, 1.0, [(1.0, v) for v in values], 0.0)["step_time_p95_s"] == 95.0
    assert (sampler._spread([*values, None]) or {})["p95"] == 95.0
    assert quantile([3.0], 0.95) == 3.0
    assert quantile([], 0.95) is None


def test_logged_losses_weigh_as_many_updates_as_they_cover() -> None:
    logged = LoggedLoss()
    logged.begin(10)
    logged.epoch_begins()
    assert logged.mean(10, 15) is None  # nothing was logged
    logged.add(12, 1.0)
    assert logged.mean(10, 15) is None  # the last three updates are not known
    logged.add(15, 2.0)
    assert logged.mean(10, 15) == pytest.approx((2 * 1.0 + 3 * 2.0) / 5)
    logged.epoch_begins()
    logged.add(18, 4.0)
    logged.epoch_begins()  # update 20
    logged.add(21, 5.0)  # the mean of updates of two epochs
    logged.add(25, 6.0)
    assert logged.mean(20, 25) is None


def test_steps_leave_out_what_pauses_the_epoch_and_wait_for_their_batches() -> None:
    clock = StepClock(cuda=False)
    # A step of 2 s, an evaluation of 5 s, a step of 3 s.
    clock.marks = [(None, 10.0), (4, 12.0), (None, 17.0), (4, 20.0)]
    clock.fetches, clock.logs = [10.5, 17.5], [None, 17.25]  # the second after a log entry
    assert clock.steps() == [(4, 2.0), (4, 3.0)]
    assert clock.waits() == [0.5, 0.25] and clock.log_waits() == [0.0, 0.25]


def test_what_a_gpu_still_computes_is_part_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not of the evaluation that follows, whose beginning is the end of the last step."""
    now = [10.0]
    monkeypatch.setattr("harness.train.measure.clock.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("harness.train.measure.clock.stamp", lambda cuda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: now.__setitem__(0, now[0] + 1.0))
    clock = StepClock(cuda=True)
    clock.start()
    clock.step(4)
    clock.settle()
    evaluated_from = clock.last_s
    now[0] += 5.0
    clock.resume()
    assert evaluated_from == 11.0 and clock.paused_s == 5.0 and clock.so_far() == 1.0


def test_steps_are_never_longer_than_their_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the process is stopped between two looks at the clock."""
    looks = iter(range(100))
    monkeypatch.setattr("harness.train.measure.clock.time.perf_counter", lambda: float(next(looks)))
    clock = StepClock(cuda=False)
    clock.start()
    for _ in range(3):
        clock.data_ready()
        clock.step(4)
        with clock.paused():
            pass
    train_s = clock.stop()
    assert sum(seconds for _, seconds in clock.steps()) <= train_s


def test_sums_of_an_epoch_by_hand() -> None:
    sums = EpochSums(torch.device("cpu"))
    for n in range(1, 101):  # more than are kept before they are added
        sums.add_loss(torch.tensor(float(n)), samples=2)
        sums.add_norm(torch.tensor(float("inf") if n == 50 else n / 50), bound=1.0)
    loss, samples, norm, clipped, updates, overflowed = sums.total()
    assert (loss, samples) == (2 * 5050, 200)
    assert norm == pytest.approx((5050 - 50) / 50)
    assert (clipped, updates, overflowed) == (50, 100, 1)
    again = EpochSums(torch.device("cpu"))
    again.restore(sums.total(), rank0=True)
    assert again.total() == sums.total()
    other = EpochSums(torch.device("cpu"))
    other.restore(sums.total(), rank0=False)  # what is added over ranks is counted once
    assert other.total()[:2] == [0.0, 0.0]


@pytest.mark.parametrize(("skipped", "means"), [
    (1, {"grad_norm": 2.0, "clipped_share": 1.0, "skipped_updates": 1}),
    (3, {"skipped_updates": 3}),  # nothing was trained, and the record says so
])  # fmt: skip
def test_updates_that_fp16_skips_are_counted(skipped: int, means: dict[str, Any]) -> None:
    trainer: Any = SimpleNamespace(
        exchange=SimpleNamespace(end_epoch=lambda epoch, totals: totals, caution=""),
        sums=EpochSums(torch.device("cpu")), empty_sums=lambda: None, log=lambda values: None,
    )  # fmt: skip
    for n in range(3):
        trainer.sums.add_loss(torch.tensor(0.5), samples=2)
        trainer.sums.add_norm(torch.tensor(float("inf") if n < skipped else 2.0), bound=1.0)
    state, control = SimpleNamespace(epoch=1.0), SimpleNamespace(should_save=False)
    args = SimpleNamespace(fp16=True, save_strategy="epoch")
    events = EpochEvents(trainer)
    events.on_epoch_end(args, state, control)
    assert events.means == {"train_loss": 0.5, "train_samples": 6.0, **means}


def test_best_epoch_is_the_earlier_of_equals_and_loss_is_better_when_small() -> None:
    rows = [
        {"epoch": 1, "accuracy": 0.5, "eval_loss": 1.0},
        {"epoch": 2, "accuracy": 0.7, "eval_loss": 0.9},
        {"epoch": 3, "accuracy": 0.7, "eval_loss": 1.1},
    ]
    assert best_of(rows, "accuracy")["best_epoch"] == 2
    assert best_of(rows, "eval_loss") == {
        "best_metric": "eval_loss", "best_value": 0.9, "best_epoch": 2,
    }  # fmt: skip
    assert best_of(rows, "f1")["best_epoch"] is None


def test_a_killed_attempt_counts_as_far_as_it_told(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert attempts.begin(folder, update=0, processes=2) == 1
    attempts.write_progress(folder, {"attempt": 1, "wall_s": 7.5})
    assert attempts.begin(folder, update=4, processes=2) == 2
    attempts.end(folder, "finished", None, wall_s=2.0)
    assert attempts.total_wall_s(attempts.believed(folder)) == 9.5


def test_the_first_failure_of_this_attempt_is_the_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    reported = {"outcome": "oom", "reason": "no memory"}
    for rank, unix in ((0, 105.0), (1, 103.0), (2, 50.0)):  # rank 2 failed in an earlier attempt
        write_json(folder.failure(rank), {**reported, "rank": rank, "unix": unix})
    first = attempts.first_failure(folder, lambda f: f["unix"] >= 100)
    assert first is not None
    assert first["rank"] == 1
    assert attempts.first_failure(folder, lambda f: f["unix"] >= 200) is None
    # The clock of another machine is behind: it only misses the one that failed.
    follows = {**reported, "rank": 3, "unix": 101.0, "reason": "Connection reset by peer [b]:1"}
    write_json(folder.failure(3), follows)
    assert attempts.first_failure(folder, lambda f: f["unix"] >= 100) == first
    append_row(folder.attempts, {"event": "start", "attempt": 1, "unix": 100.0})
    attempts.begin(folder, update=0, processes=3)
    assert '"outcome": "oom"' in folder.attempts.read_text()


def test_samples_are_those_that_the_sampler_draws() -> None:
    """Of 5,000 samples drawn from 1,000, the last step had -3,950."""
    data: Any = [*range(1000)]
    for count in (5000, 105):
        drawn = WeightedRandomSampler([1.0] * 1000, num_samples=count)
        loader = DataLoader(data, sampler=drawn, batch_size=50)
        assert size_of(loader) == count and not batches_vary(loader)
        assert size_of(loader, of_dataset=True) == 1000
        shard = SimpleNamespace(batch_sampler=loader.batch_sampler)  # of accelerate, of one rank
        sharded = SimpleNamespace(dataset=data, batch_sampler=shard, total_batch_size=100)
        assert size_of(sharded) == count
    own = DataLoader(data, batch_sampler=[[1, 2, 3], [4]])  # type: ignore[arg-type]
    assert size_of(own) is None and batches_vary(own)


def test_a_step_never_has_fewer_samples_than_one() -> None:
    timed = [(50, 0.1)] * 100
    assert steps(timed, None, 5000 - 4990)[-1] == (40, 0.1)
    assert rates(steps(timed, None, 5000 - 1000), 1)["train_samples_per_s"] is None
    assert are_unknown(5000, 1000, 50) and not are_unknown(5000, 4951, 50)


@pytest.mark.parametrize(("split", "batch"), [(False, (16, 8)), (True, (8, 4))])
@pytest.mark.parametrize("dispatched", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_the_batch_of_a_loader_is_that_of_all_processes(
    split: bool, batch: tuple[int, int], dispatched: bool, streamed: bool
) -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(range(105))

    data: Any = Stream() if streamed else [*range(105)]
    kinds: Any = {"split_batches": split, "dispatch_batches": dispatched}
    loader = prepare_data_loader(
        DataLoader(data, batch_size=8), num_processes=2, process_index=0, put_on_device=True,
        **kinds,
    )  # fmt: skip
    assert batch_of(loader, 2) == batch


def test_the_last_update_of_an_epoch_may_have_fewer_batches() -> None:
    """501 batches, ten an update: one more was counted."""
    assert updates_of(3 + 360 / 501, 3 * 51 + 36, 10, range(501)) == 36
    assert updates_of(1.5, 6, 1, iter([])) == 2  # of a stream


def test_metrics_with_names_of_fields_stand_beside_them(tmp_path: Path) -> None:
    """wall_s and unix of the user vanished, and comm_exposed_share was taken for ours."""
    written: list[Any] = []
    pending: Pending[EpochRow] = Pending(tmp_path / "epochs.jsonl", written.append)
    pending.row = {"epoch": 1.0, "train_loss": 0.5, "updates": 4}
    metrics = {"wall_s": 1.0, "unix": 2.0, "comm_exposed_share": 0.5, "checksum": 3.0,
               "train_loss": 4.0, "accuracy": 0.75, "eval_loss": 0.25, "mcc": 0.1}  # fmt: skip
    pending.write({**metrics, "eval_samples": 8, "eval_time_s": 0.5}, {"wall_s": 9.0, "unix": 7.0})
    (row,) = written
    assert {**row, "checksum": None} == {
        "epoch": 1.0, "updates": 4, "train_loss": 0.5, "wall_s": 9.0, "unix": 7.0,
        "eval_wall_s": 1.0, "eval_unix": 2.0, "eval_comm_exposed_share": 0.5, "eval_checksum": 3.0,
        "eval_train_loss": 4.0, "accuracy": 0.75, "eval_loss": 0.25, "mcc": 0.1,
        "eval_samples": 8, "eval_time_s": 0.5, "checksum": None,
    }  # fmt: skip

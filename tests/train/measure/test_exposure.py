"""Where a step's time goes: closed forms, and ranks and exchanges that are slow on purpose."""

from __future__ import annotations

import math
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from harness.core.records import read_json, read_rows
from harness.train.measure.clock import StepClock
from harness.train.measure.communication import FIELDS, Exposure, skew, split_waiting
from harness.train.measure.resources import Traffic
from harness.train.strategy import compress
from tests.support.exchanges import group
from tests.support.own_time import go_before_others
from tests.support.ranks import ranks
from tests.support.toys import Net, Points, ours

SLEEP_S = 0.2  # more than a busy machine takes from a step
COMPUTING_S = 0.05  # of a step beside it: the exchange of a step of a few ms may be all of it


def test_what_is_more_than_the_least_of_all_ranks_is_waiting() -> None:
    # Rank 0 is ready last at the first update, rank 1 at the second.
    one, other = [0.25, 2.0], [1.25, 0.5]
    assert split_waiting(one, (one, other)) == (2.25, 1.5)
    assert split_waiting(other, (one, other)) == (1.75, 1.0)


def exposed_of_two(delay_s: float, computing: list[tuple[float, float]]) -> list[list[float]]:
    """Each sends when it is ready, and goes on once it is and the other's has arrived."""
    ends, exposed = [0.0, 0.0], [[], []]
    for seconds in computing:
        ready = [end + own for end, own in zip(ends, seconds, strict=True)]
        ends = [max(ready[0], ready[1] + delay_s), max(ready[1], ready[0] + delay_s)]
        for rank in range(2):
            exposed[rank].append(ends[rank] - ready[rank])
    return exposed


def test_ranks_that_wait_for_a_delay_in_turns_do_not_wait_for_each_other() -> None:
    """Rank 1 was late once: ever since, one of the two has its wait while the other computes."""
    of_ranks = exposed_of_two(0.5, [(0.25, 0.75), *[(0.25, 0.25)] * 9])
    assert of_ranks[0][:4] == [1.0, 0.0, 1.0, 0.0] and of_ranks[1][:4] == [0.0, 1.0, 0.0, 1.0]
    for rank in range(2):
        assert split_waiting(of_ranks[rank], of_ranks, early_s=1.0) == (5.0, 0.0)
        assert split_waiting(of_ranks[rank], of_ranks)[1] == 5.0


def test_a_rank_that_is_always_slower_is_waited_for_over_a_delay() -> None:
    """Half of its lag goes on while sums are under way: a step takes that much less than both."""
    of_ranks = exposed_of_two(0.5, [(0.25, 0.5)] * 8)
    waited = [split_waiting(exposed, of_ranks, early_s=1.0)[1] for exposed in of_ranks]
    assert waited == [8 * 0.25, 0.0]


def test_a_rank_that_is_later_than_the_delay_is_waited_for() -> None:
    of_ranks = exposed_of_two(0.5, [(0.25, 4.25), (4.25, 0.25), (0.25, 0.25), (0.25, 0.25)])
    waited = [split_waiting(exposed, of_ranks, early_s=1.0)[1] for exposed in of_ranks]
    assert waited[0] >= 3.0 and waited[1] >= 2.5


def test_the_slowest_rank_and_how_much_slower_it_is() -> None:
    assert skew([4.0, 10.0, 5.0]) == {"compute_skew": 2.0, "slowest_rank": 1}
    assert skew([3.0, 1.0]) == {"compute_skew": 1.5, "slowest_rank": 0}
    unknown = {"compute_skew": None, "slowest_rank": None}
    assert skew([3.0]) == skew([3.0, None]) == skew([None, None]) == skew([]) == unknown


def test_what_is_done_aside_is_in_no_time_and_in_no_count(monkeypatch: Any) -> None:
    # A stamp is a look at the clock of its own; two more are at the edges of what is aside.
    looks = [0.0, 0, 1, 1, 4, 4, 4, 10, 10, 10.5, 10.5, 12, 12]
    looks += [14, 14, 14.5, 14.5, 15, 15, 18, 18, 18, 18, 18]
    now = iter(looks).__next__
    monkeypatch.setattr("harness.train.measure.clock.time.perf_counter", now)
    sent = iter([(0, None), (5, None), (105, None), (107, None)]).__next__
    clock = StepClock(cuda=False, traffic=Traffic(sent))
    clock.start()  # at 0
    clock.data_ready()  # at 1
    clock.step(8)  # at 4
    with clock.paused():  # from 4 to 10
        pass
    clock.data_ready()  # at 10.5
    clock.step(8)  # at 12
    clock.logged()  # from 12 to 14, within the next step
    clock.data_ready()  # at 14.5
    clock.step(8)  # at 15
    assert clock.steps() == [(8, 4.0), (8, 2.0), (8, 3.0)]
    clock.logged()  # from 15 to 18: in no step
    clock.resume()
    assert clock.waits() == [1.0, 0.5, 0.5] and clock.log_waits() == [0.0, 0.0, 2.0]
    assert (clock.stop(), clock.data_wait_s, clock.log) == (12.0, 2.0, None)
    assert clock.traffic.stop()["payload_bytes"] == 7


class Slow(Net):
    """Rank 1 takes its time in the forward pass."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training and dist.get_rank() == 1:
            time.sleep(SLEEP_S)
        return super().forward(*args, **kwargs)


def slow_hook(state, bucket):  # type: ignore[no-untyped-def] # torch takes no annotations in quotes
    time.sleep(SLEEP_S)
    return compress.default_hooks.bf16_compress_hook(state, bucket)


slow_hook.__qualname__ = "bf16_hook"  # the one that was asked for, as DDP tells it


def of_slow_ones(folder: str) -> dict[str, Any]:
    """A rank that is slow, an exchange that is slow, and neither."""
    go_before_others()
    result = {}
    data, test = Points(64), Points(8)
    before = compress.bf16_hook
    for name, net, hook in (
        ("neither", Net(train_s=COMPUTING_S), before),
        ("rank", Slow(), before),
        ("exchange", Net(train_s=COMPUTING_S), slow_hook),
    ):
        compress.bf16_hook = hook
        trainer, run = ours(
            f"{folder}/{name}", net, data, test, "--compress=bf16", "--comm_probe=auto"
        )
        run.train(trainer)
        result[name] = {
            "row": read_rows(run.context.folder.epochs)[0][0] if run.context.is_rank0 else None,
            "rank": read_rows(run.context.folder.rank(run.context.world.rank))[0][0],
            "summary": read_json(run.context.folder.summary) if run.context.is_rank0 else None,
            "environment": read_json(run.context.folder.environment)
            if run.context.is_rank0
            else None,
            "hooks": len(trainer.exposure.handles),
        }
    return result


@pytest.fixture(scope="module")
def slow_ones(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks(2, of_slow_ones, str(tmp_path_factory.mktemp("slow")))


@pytest.mark.process
def test_a_rank_that_is_slow_is_named_and_waited_for(slow_ones: list[dict[str, Any]]) -> None:
    first, second = (result["rank"]["rank"] for result in slow_ones)
    row = slow_ones[0]["rank"]["row"]
    asleep_s = row["timed_steps"] * SLEEP_S
    assert row["timed_steps"] == 8 - 1
    assert row["slowest_rank"] == 1 and 1 < row["compute_skew"] <= 2
    # A sleep is never shorter than it was asked for: the other rank computes, and then waits.
    assert second["compute_s"] >= asleep_s
    assert row["compute_skew"] == pytest.approx(
        2 * second["compute_s"] / (first["compute_s"] + second["compute_s"])
    )
    assert first["comm_wait_s"] > max(second["comm_wait_s"], asleep_s / 2)


@pytest.mark.process
def test_all_of_a_step_is_one_thing_or_the_other(slow_ones: list[dict[str, Any]]) -> None:
    for result in slow_ones[0].values():
        row, rank = result["row"], result["rank"]
        used_s = rank["compute_s"] + rank["comm_exposed_s"]
        assert row["timed_s"] - rank["data_wait_s"] - 1e-6 <= used_s <= row["timed_s"]
        assert 0 <= rank["comm_wait_s"] <= rank["comm_exposed_s"]
        shown = (rank["comm_exposed_s"] - rank["comm_wait_s"]) / row["timed_s"]
        assert row["comm_exposed_share"] == pytest.approx(shown)
        assert result["hooks"] == 1  # after the first backward pass


def probe_exposed_s(result: dict[str, Any]) -> float:
    probe = result["environment"]["comm_probe"]
    return statistics.median(map(float.__sub__, probe["with_s"], probe["without_s"]))


@pytest.mark.process
def test_an_exchange_that_is_slow_is_seen_as_one(slow_ones: list[dict[str, Any]]) -> None:
    """By both measures: the step as it is, and without its exchange."""
    result, plain = slow_ones[0]["exchange"], slow_ones[0]["neither"]
    row, summary = result["row"], result["summary"]
    # One bucket, which is sent when the last gradient is there: nothing hides it.
    assert row["comm_exposed_share"] * row["timed_s"] >= row["timed_steps"] * SLEEP_S
    assert row["comm_exposed_share"] > plain["row"]["comm_exposed_share"]
    probe = result["environment"]["comm_probe"]
    assert min(probe["with_s"]) >= SLEEP_S
    assert all(map(float.__gt__, probe["with_s"], probe["without_s"]))
    assert probe_exposed_s(result) > probe_exposed_s(plain)
    # None where the machine was disturbed so much that it would be more than a whole step.
    share = probe_exposed_s(result) / probe["step_s"]
    assert summary["comm_share"] == probe["comm_share"] == (share if share < 1 else None)
    assert summary["comm_exposed_share"] == row["comm_exposed_share"]


def of_unlike_knowledge() -> list[Any]:
    """Seconds of two updates after one that is not timed; then a rank that knows one not."""
    rank, result = group(), []
    clock = SimpleNamespace(
        steps=lambda: [(4, 9.0), (4, 3.0), (4, 5.0)],
        waits=lambda: [9, 1, 1],
        log_waits=lambda: [5.0, 0.0, 0.125],
    )
    settings = SimpleNamespace(strategy="ddp")
    run: Any = SimpleNamespace(args=SimpleNamespace(device=torch.device("cpu")), settings=settings)
    exposure = Exposure(run)
    exposure.begin(clock)
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    assert exposure.watch(ddp) and len(exposure.handles) == 2
    exposure.backward_ended(exchanged=False)  # of another model: nobody was ready
    for ends in ([9.0, 1.0, 0.5], [9.0, 0.5, 1.0]) if rank == 0 else ([9.0, 0.25, 2.0], [9.0, 0.5]):
        exposure.epoch_begins()
        exposure.marks = [(0.0, end) for end in ends]
        result.append(exposure.rank_fields(untimed=1))
    exposure.marks = [(None, 1.0)] * 3 if rank == 0 else [(0.0, 1.0)] * 3
    result.append(exposure.rank_fields(untimed=1))
    clock.steps = clock.waits = clock.log_waits = list
    result.append(exposure.rank_fields(untimed=1))
    return result


@pytest.mark.process
def test_where_one_rank_does_not_know_none_does() -> None:
    nothing: dict[str, Any] = dict.fromkeys(FIELDS)
    one, other = ranks(2, of_unlike_knowledge)
    # The wait for the loss of a log entry, 0.125 s, is communication as well.
    assert one[0] == {"compute_s": 6 - 1.625, "comm_exposed_s": 1.625, "comm_wait_s": 0.75}
    assert other[0] == {"compute_s": 6 - 2.375, "comm_exposed_s": 2.375, "comm_wait_s": 1.5}
    assert one[1:] == other[1:] == [nothing] * 3


@pytest.mark.parametrize(
    ("strategy", "world", "alone", "known"),
    [("single", 1, True, True), ("ddp", 1, True, True), ("dp", 1, True, False),
     ("fsdp", 2, False, False), ("diloco", 2, False, False), ("hivemind", 1, False, False)],
)  # fmt: skip
def test_computing_is_known_where_nothing_is_exchanged(
    strategy: str, world: int, alone: bool, known: bool
) -> None:
    run: Any = SimpleNamespace(
        settings=SimpleNamespace(strategy=strategy),
        world=SimpleNamespace(size=world),
        session=SimpleNamespace(is_single=alone),
        args=SimpleNamespace(device=torch.device("cpu")),
    )
    exposure = Exposure(run)
    exposure.begin(SimpleNamespace(steps=lambda: [(4, 2.0), (4, 3.0)], waits=lambda: [0.5, 1.0]))
    assert not exposure.watch(torch.nn.Linear(2, 2))
    row = exposure.rank_fields(untimed=1)
    expected = 2.0 if known else None
    assert row == {"compute_s": expected, "comm_exposed_s": None, "comm_wait_s": None}
    fields = exposure.run_fields([row] * world, {"timed_s": 3.0})
    assert fields == dict.fromkeys(("comm_exposed_share", "compute_skew", "slowest_rank"))


@pytest.mark.process
@pytest.mark.gpu
def test_events_have_the_exchange_behind_them(tmp_path: Path) -> None:
    assert min(ranks(2, on_one_gpu)) > SLEEP_S


def on_one_gpu() -> float:
    """Two ranks on one GPU through gloo; rank 0 has its gradients first, and waits."""
    device = torch.device("cuda", 0)
    dist.init_process_group("gloo")
    settings = SimpleNamespace(strategy="ddp")
    exposure = Exposure(SimpleNamespace(args=SimpleNamespace(device=device), settings=settings))  # type: ignore[arg-type]
    model = torch.nn.Linear(64, 64).to(device)
    ddp = DistributedDataParallel(model, device_ids=[0])
    assert exposure.watch(ddp)
    for step in range(4):
        loss = ddp(torch.ones(4, 64, device=device)).sum()
        if (dist.get_rank() + step) % 2:
            torch.cuda.synchronize()
            time.sleep(4 * SLEEP_S)
        loss.backward()
        exposure.backward_ended(exchanged=True)
    torch.cuda.synchronize()
    result = exposure.exposed()
    assert not any(map(math.isnan, result))
    return max(result)

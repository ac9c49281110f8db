"""Distant links: transfers count after TCP has opened its window, and pairs share the time."""

from __future__ import annotations

import math
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.core.topology import World, world_of
from harness.train.measure import link_probe
from harness.train.measure.link_probe import SMALLEST, Reductions, pairs_of, rounds_of, turns_of
from tests.support.probed import MIB, Link
from tests.support.ranks import ranks


class Window(Link):
    """A link on which TCP opens its window: what it has sent doubles it, from ten packets on."""

    window = 14_600

    def once(self, size: int) -> float:
        seconds, left = 0.0, size
        while left > self.window and self.window * 8 / self.mbit / 1e6 < self.besides_s:
            seconds, left = seconds + self.besides_s, left - self.window
            self.window *= 2
        seconds += left * 8 / self.mbit / 1e6
        self.window = max(self.window, size)
        self.sizes.append(size)
        self.now_s += seconds + 2 * self.besides_s  # it is announced, and answered
        return seconds

    def __init__(self, mbit: float, round_trip_s: float) -> None:
        super().__init__(mbit, besides_s=round_trip_s)

    def measured(self, budget_s: float) -> list[float]:
        """As a pair of nodes measures it within so many seconds."""
        channel = link_probe.TensorChannel(torch.device("cpu"))
        trip_s = self.besides_s
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(link_probe, "_transfer", lambda *a: trip_s + self.once(a[2]))
            patched.setattr(channel, "send_message", lambda *_: None)
            patched.setattr(time, "perf_counter", lambda: self.now_s)
            return link_probe.measure_transfer(channel, 1, budget_s, trip_s)


def test_of_a_distant_link_the_window_opens_before_a_transfer_counts() -> None:
    """80 ms and 50 Mbit/s each way, in the times that two, four and eight nodes have for a pair."""
    for budget_s in (7.0, 5.5, 3.0):
        size, seconds = Window(50, 0.16).measured(budget_s)
        row = link_probe.pair_row((0, 1), 0.16, 0.16, size, seconds)
        assert row["bandwidth_mbit"] == pytest.approx(50, rel=0.05)
    # With the time for one exchange of 1 MiB, which would tell 23 Mbit/s, nothing is known.
    for budget_s in (2.57, 2.0):
        size, seconds = Window(50, 0.16).measured(budget_s)
        row = link_probe.pair_row((0, 1), 0.16, 0.16, size, seconds)
        assert row["bandwidth_mbit"] is None and row["transfer_bytes"] < MIB


def test_a_size_is_exchanged_twice_or_not_at_all() -> None:
    for tenths in range(1, 80):
        distant = Window(50, 0.16)
        distant.measured(tenths / 10)
        assert distant.sizes.count(distant.sizes[-1]) > 1
        assert distant.now_s - 100.0 < max(1.0, 1.15 * tenths / 10)


def test_an_all_reduce_that_takes_as_long_as_the_smallest_is_not_approached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight nodes over 80 ms: 3 s for any size up to some MB, of which a quarter has no time."""
    counts: list[int] = []

    def make(reductions: Reductions, size: int) -> None:
        counts.append(size // 4)
        reductions.times.append(3.0)

    monkeypatch.setattr(Reductions, "make", make)

    def bytes_of(takes_s: Any) -> int:
        until_s = time.perf_counter() + 2.5
        size = [400_000]
        rows = link_probe.measure_allreduce(
            World(8), torch.device("cpu"), torch.float32, size, until_s, takes_s
        )
        assert rows[0]["s"] == 3.0
        return int(rows[0]["bytes"])

    assert bytes_of(lambda size: 3.0) == 400_000 and counts[0] == 100_000
    assert counts.count(100_000) > 1 and counts[-1] == 0
    counts.clear()
    assert bytes_of(lambda size: size * 1e-5) and counts[0] == SMALLEST // 4
    counts.clear()
    assert bytes_of(lambda size: None) and counts[0] == SMALLEST // 4


LATE_S = 0.5


def reduced(sizes: list[int]) -> tuple[list[dict[str, Any]], float]:
    """What is measured where rank 1 leaves each announcement late, and rank 0's last own time."""
    dist.init_process_group("gloo")
    real, own_s = dist.all_reduce, [0.0]

    def late(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        began_s = time.perf_counter()
        real(tensor, op)
        own_s[0] = time.perf_counter() - began_s if len(tensor) > 100 else own_s[0]
        if op == dist.ReduceOp.MAX and dist.get_rank() == 1:
            time.sleep(LATE_S)

    dist.all_reduce = late  # type: ignore[assignment]
    until_s = time.perf_counter() + 60
    rows = link_probe.measure_allreduce(
        world_of(os.environ), torch.device("cpu"), torch.float32, sizes, until_s
    )
    dist.destroy_process_group()
    return rows, own_s[0]


@pytest.mark.process
def test_a_rank_that_waits_for_others_is_not_the_time_of_an_all_reduce() -> None:
    sizes = [1000, SMALLEST, MIB]
    (rows, own_s), (none, _) = ranks(2, reduced, sizes)
    assert none == [] and own_s > LATE_S / 2
    assert [row["bytes"] for row in rows] == sizes
    assert all(0 < row["s"] < LATE_S / 2 for row in rows)


@pytest.mark.parametrize("nodes", range(2, 12))
def test_each_node_is_in_one_pair_of_a_round(nodes: int) -> None:
    rounds = rounds_of(nodes)
    assert sorted(pair for pairs in rounds for pair in pairs) == pairs_of(nodes)
    for pairs in rounds:
        members = [node for pair in pairs for node in pair]
        assert len(members) == len(set(members))
    if nodes <= 8:
        assert len(rounds) == nodes - 1 + nodes % 2


def test_pairs_transfer_one_by_one_if_there_is_time_and_the_most_distant_first() -> None:
    trips_s = dict.fromkeys(pairs_of(4), 0.16) | {(1, 3): 0.3, (2, 3): math.nan}
    one_by_one = turns_of(trips_s, 4, 60.0)
    assert one_by_one[0] == [(1, 3)] and sorted(one_by_one) == [[p] for p in pairs_of(4)[:-1]]
    at_once = turns_of(trips_s, 4, 5.0)
    assert sorted(at_once[0]) == [(0, 2), (1, 3)]
    assert sorted(map(sorted, at_once[1:])) == [[(0, 1)], [(0, 3), (1, 2)]]
    # Of turns that are about as distant, one of two pairs comes before the most distant alone.
    alone = trips_s | {(0, 2): math.nan}
    assert sorted(turns_of(alone, 4, 5.0)[0]) == [(0, 3), (1, 2)]
    assert turns_of(alone | {(1, 3): 0.4}, 4, 5.0)[0] == [(1, 3)]
    assert turns_of(dict.fromkeys(pairs_of(4), math.nan), 4, 5.0) == []

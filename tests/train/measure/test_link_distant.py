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
        self.now_s += seconds
        return seconds

    def transfers(
        self, channel: Any, peer: int, size: int, times: int, least_s: float
    ) -> tuple[float, list[float]]:
        self.now_s += 2 * self.besides_s  # they are announced, and the last one is answered
        self.counts.append((size, times))
        return super().transfers(channel, peer, size, times, least_s)

    def __init__(self, mbit: float, round_trip_s: float) -> None:
        super().__init__(mbit, besides_s=round_trip_s)
        self.counts = list[tuple[int, int]]()

    def measured(self, budget_s: float) -> list[float]:
        """Size and seconds as a pair of nodes measures it within so many seconds."""
        channel = link_probe.TensorChannel(torch.device("cpu"))
        trip_s = self.besides_s
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(link_probe, "_transfers", self.transfers)
            patched.setattr(time, "perf_counter", lambda: self.now_s)
            return link_probe.measure_transfer(channel, 1, budget_s, trip_s)[:2]


def test_of_a_distant_link_the_window_opens_before_a_transfer_counts() -> None:
    """80 ms and 50 Mbit/s each way, in the times that two, four and eight nodes have for a pair."""
    for budget_s in (7.0, 5.5, 3.0, 2.57):
        size, seconds = Window(50, 0.16).measured(budget_s)
        row = link_probe.pair_row((0, 1), 0.16, 0.16, 2, size, seconds, 1)
        assert row["bandwidth_mbit"] == pytest.approx(50, rel=0.05)
    # With the time for one exchange of 1 MiB, which would tell 23 Mbit/s, nothing is known.
    for budget_s in (2.0, 1.5):
        size, seconds = Window(50, 0.16).measured(budget_s)
        row = link_probe.pair_row((0, 1), 0.16, 0.16, 2, size, seconds, 1)
        assert row["bandwidth_mbit"] is None and row["transfer_bytes"] < MIB


def test_a_rate_takes_three_announcements_and_five_transfers() -> None:
    """A small size, of which the window keeps the time of more unknown, then a large one: once to
    open the window, and twice without a pause.
    """
    distant = Window(50, 0.16)
    distant.measured(7.0)
    assert distant.counts == [(SMALLEST, 2), (MIB, 1), (MIB, 2)]
    slow = Window(1, 0.16)  # what takes long is not repeated
    slow.measured(7.0)
    assert slow.counts == [(SMALLEST, 2), (4 * SMALLEST, 1), (4 * SMALLEST, 1)]
    near = Window(1000, 0.0002)
    near.measured(7.0)
    assert near.counts == [(SMALLEST, 2), (MIB, 1), (16 * MIB, 1), (16 * MIB, 3)]


@pytest.mark.parametrize(
    ("trips_s", "expected"),
    [
        ([0.161, 0.160], (0.160, 2)),  # alike, and the connection was open
        ([0.480, 0.161, 0.160], (0.160, 2)),
        ([0.161, 0.160, 0.180], (0.160, 2)),
        ([0.190, 0.160, 0.175, 0.162], (0.160, 3)),  # unlike: as many as there is time for
        ([0.0002] * 5000, (0.0002, 1501)),
    ],
)
def test_distant_round_trips_that_agree_are_not_repeated(
    trips_s: list[float], expected: tuple[float, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, now_s = iter(trips_s), [0.0]

    def round_trip(channel: Any, peer: int) -> float:
        seconds = next(left)
        now_s[0] += seconds
        return seconds

    monkeypatch.setattr(link_probe, "_round_trip", round_trip)
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    channel = link_probe.TensorChannel(torch.device("cpu"))
    least_s, median_s, count = link_probe.measure_trips(channel, 1, 0.47)
    assert (least_s, count) == (expected[0], pytest.approx(expected[1], abs=expected[1] // 1000))
    assert median_s >= least_s


def turns_directed(nodes: int, trip_s: float, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The messages of rank 0 by which transfers are measured between nodes, and its own."""
    sent: list[Any] = []

    class Channel:
        def send_message(self, rank: int, kind: float, *numbers: float) -> None:
            sent.append((rank, kind))

        def receive_messages(self, ranks: list[int]) -> list[list[float]]:
            return [[MIB, 0.17, 2, 0.16] for _ in ranks]

    def transfer(channel: Any, peer: int, share_s: float, least_s: float) -> list[float]:
        sent.append(peer)
        return [MIB, 0.17, 2, 0.16]

    monkeypatch.setattr(link_probe, "measure_transfer", transfer)
    trips_s = dict.fromkeys(pairs_of(nodes), trip_s)
    channel: Any = Channel()
    found = link_probe._lead(World(nodes), channel, trips_s, time.perf_counter() + 6.0)
    return [sent, len(found)]


def test_messages_that_direct_the_transfers_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, measure, end = link_probe.ANSWER, link_probe.MEASURE, link_probe.END
    # Of two nodes, the other one follows its only peer: it needs no other message than the end.
    assert turns_directed(2, 0.16, monkeypatch) == [[1, (1, end)], 1]
    # Of four, one turn of two distant pairs: the other pairs are taken to be like them.
    sent, pairs = turns_directed(4, 0.16, monkeypatch)
    assert pairs == 2 and len(sent) == 2 + 1 + 3
    assert [kind for _, kind in (one for one in sent if one not in (1, 2, 3))] == [
        answer, measure, end, end, end,
    ]  # fmt: skip
    # Nearer ones have time.
    assert turns_directed(4, 0.04, monkeypatch)[1] == 6


@pytest.mark.parametrize(("takes_s", "times"), [(1.3, 2), (0.44, 3), (0.2, 4), (0.001, 4)])
def test_all_reduces_of_a_size_are_announced_at_once(
    takes_s: float, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not count, and as many as half a second holds, at most three."""
    announced: list[list[int]] = []
    made: list[int] = []
    monkeypatch.setattr(link_probe, "broadcast", lambda value: announced.append(value) or value)
    monkeypatch.setattr(link_probe, "gather", lambda value: [value])
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: made.append(len(tensor)))
    (row,) = link_probe.measure_allreduce(
        World(2), torch.device("cpu"), torch.float32, [400_000], time.perf_counter() + 60,
        lambda size: takes_s,
    )  # fmt: skip
    assert announced == [[100_000, times], [0, 1]] and made == [100_000] * times
    assert (row["bytes"], row["allreduces"]) == (400_000, times - 1)


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

    def make(reductions: Reductions, size: int, times: int = 1) -> None:
        counts.extend([size // 4] * times)
        reductions.sizes.extend([size] * times)
        reductions.times.extend([3.0] * times)

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
    real, announced, own_s = dist.all_reduce, link_probe.broadcast, [0.0]

    def timed(tensor: torch.Tensor) -> None:
        began_s = time.perf_counter()
        real(tensor)
        own_s[0] = time.perf_counter() - began_s if len(tensor) > 100 else own_s[0]

    def late(value: Any) -> Any:
        value = announced(value)
        if dist.get_rank() == 1:
            time.sleep(LATE_S)
        return value

    dist.all_reduce, link_probe.broadcast = timed, late  # type: ignore[assignment]
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

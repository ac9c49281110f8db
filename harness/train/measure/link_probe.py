"""Exchanges between ranks as training makes them, timed.

A slow link must not cost minutes: sizes grow as long as the next one fits into the time that is
left, and what did not fit is unknown.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from harness.core.topology import World

SMALLEST, GROWTH = 2**16, 4  # bytes of the first size, and how many times larger the next one is


SAMPLES, SAMPLES_S = 3, 1.0  # of which the median counts; those that take long need no more


def busbw(algbw: float, ranks: int) -> float:
    """What each rank's link has to carry in an all-reduce, whatever the number of ranks."""
    return algbw * 2 * (ranks - 1) / ranks


def climb(
    once: Callable[[int], float],
    target: int,
    until_s: float,
    long_enough_s: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[int, float] | None:
    """(size, median seconds) at the target or the largest size for which there was time.

    once(size) does it and gives the seconds that count; what it costs besides is seen here. The
    first one of each size counts only where there is time for no other: it opens TCP's window.
    """
    size, seconds = 0, 0.0
    larger, cost_s, slope = min(SMALLEST, target), 0.0, 0.0
    while larger > size and clock() + cost_s + slope * (larger - size) <= until_s:
        before = size, seconds
        began_s = clock()
        size, seconds = larger, once(larger)
        cost_s = clock() - began_s
        # The same latency is in both, so what more bytes take is what the last ones took.
        slope = max(0.0, seconds - before[1]) / (size - before[0])
        larger = size if seconds >= long_enough_s else min(GROWTH * size, target)
    if not size:
        return None
    samples: list[float] = []
    while len(samples) < SAMPLES and sum(samples) < SAMPLES_S and clock() + cost_s <= until_s:
        samples.append(once(size))
    return size, statistics.median(samples or [seconds])


@dataclass
class Wire:
    """Tensors between ranks, of the kind and where training has them."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    group: Any = None  # None: that of the training
    buffer: torch.Tensor | None = None

    def finish(self) -> None:
        """NCCL only begins an exchange."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def say(self, rank: int, *numbers: float) -> None:
        """Four numbers: what is asked for, or what was found."""
        padded = [*numbers, 0.0, 0.0, 0.0][:4]
        self.send(torch.tensor(padded, dtype=torch.float64, device=self.device), rank)

    def hear(self, rank: int) -> list[float]:
        message = torch.zeros(4, dtype=torch.float64, device=self.device)
        self.receive(message, rank)
        return list(message.tolist())

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        dist.send(tensor, rank, group=self.group)
        self.finish()

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        dist.recv(tensor, rank, group=self.group)
        self.finish()

    def elements(self, count: int) -> torch.Tensor:
        """Zeros, whose sum stays what it is; kept for the next time."""
        if self.buffer is None or len(self.buffer) < count:
            self.buffer = None  # before there is another
            self.buffer = torch.zeros(count, dtype=self.dtype, device=self.device)
        return self.buffer[:count]

    def count_of(self, size: int) -> int:
        return max(1, size // self.dtype.itemsize)


def measure_allreduce(
    world: World, device: torch.device, dtype: torch.dtype, sizes: list[int], until_s: float
) -> list[dict[str, Any]]:
    """A row a size, on rank 0; the other ranks reduce as much as it tells them."""
    wire = Wire(device, dtype)
    if world.rank != 0:
        while _reduce(wire, 0) is not None:
            pass
        return []
    rows = []

    def once(size: int) -> float:
        seconds = _reduce(wire, wire.count_of(size))
        assert seconds is not None
        return seconds

    for number, size in enumerate(sizes):
        now_s = time.perf_counter()
        share_s = (until_s - now_s) / (len(sizes) - number)
        found = climb(once, size, now_s + share_s)
        rows.append(_reduction(size, found, world.size))
    _reduce(wire, 0)
    return rows


def _reduce(wire: Wire, count: int) -> float | None:
    """Seconds of an all-reduce as large as rank 0 says, the others say 0; None: that was all."""
    # Also lets the ranks begin together, as far as the link lets them.
    told = torch.tensor([count], dtype=torch.int64, device=wire.device)
    dist.all_reduce(told)
    if (told_count := int(told.item())) == 0:
        return None
    tensor = wire.elements(told_count)
    began_s = time.perf_counter()
    dist.all_reduce(tensor)
    wire.finish()
    return time.perf_counter() - began_s


def _reduction(asked: int, found: tuple[int, float] | None, ranks: int) -> dict[str, Any]:
    size, seconds = found or (None, None)
    algbw = size * 8 / seconds / 1e6 if size and seconds else None
    return {
        "asked_bytes": asked,
        "bytes": size,
        "s": seconds,
        "algbw_mbit": algbw,
        "busbw_mbit": None if algbw is None else busbw(algbw, ranks),
    }


# ----
# Round trips and bandwidth between two nodes, one pair at a time so that none disturbs another.
#
# The leaders of the nodes (their first ranks) exchange messages of four numbers. Rank 0 says whose
# turn it is; the lower leader of a pair asks, measures and tells rank 0, the other one answers.

ALL_PAIRS = 8  # nodes; with more of them each is measured with node 0 alone


LARGEST_TRANSFER = 2**26  # bytes


LONG_ENOUGH_S = 0.1  # a transfer that takes so long, and four round trips, says enough


ROUND_TRIPS, FEW_ROUND_TRIPS = 20, 3


# A pair far apart needs so many of its round trips for a bandwidth, whatever its share of the time.
NEEDED_ROUND_TRIPS = 16


# What a message asks for.
PING, BULK, ASK, ANSWER, END = range(5)


UNKNOWN = math.nan


def pairs_of(nodes: int) -> list[tuple[int, int]]:
    """Those of node 0 first: they are known even where there is no time for all."""
    if nodes <= ALL_PAIRS:
        return list(combinations(range(nodes), 2))
    return [(0, node) for node in range(1, nodes)]


@contextmanager
def leaders(world: World, device: torch.device) -> Iterator[Wire]:
    """gloo's connections are there already; NCCL's take memory of the GPU until they are closed."""
    if dist.get_backend() != "nccl":
        yield Wire(device)
        return
    group = dist.new_group([_leader(world, node) for node in range(world.nodes)])
    try:
        yield Wire(device, group=group)
    finally:
        dist.destroy_process_group(group)


def _leader(world: World, node: int) -> int:
    return node * world.per_node


def measure_pairs(world: World, device: torch.device, until_s: float) -> list[dict[str, Any]]:
    """A row a pair, on rank 0; the other leaders do as it tells them, the other ranks nothing."""
    with leaders(world, device) as wire:
        if world.rank == 0:
            return _lead(world, wire, until_s)
        if world.rank % world.per_node == 0:
            _follow(wire)
        return []


def _lead(world: World, wire: Wire, until_s: float) -> list[dict[str, Any]]:
    rows = []
    pairs = pairs_of(world.nodes)
    for number, nodes in enumerate(pairs):
        one, other = (_leader(world, node) for node in nodes)
        left_s = until_s - time.perf_counter()
        share_s = left_s / (len(pairs) - number)
        found = [UNKNOWN] * 4
        if left_s > 0:
            wire.say(other, ANSWER, one)
            if one == 0:
                found = ask(wire, other, share_s, left_s)
            else:
                wire.say(one, ASK, other, share_s, left_s)
                found = wire.hear(one)
        rows.append(_row(nodes, *found))
    for node in range(1, world.nodes):
        wire.say(_leader(world, node), END)
    return rows


def _follow(wire: Wire) -> None:
    while True:
        what, rank, share_s, left_s = wire.hear(0)
        if what == END:
            return
        if what == ANSWER:
            answer(wire, int(rank))
        else:
            wire.say(0, *ask(wire, int(rank), share_s, left_s))


def ask(wire: Wire, peer: int, share_s: float, left_s: float) -> list[float]:
    """Least and median round trip, bytes of a transfer and its seconds, seen from this side."""
    began_s = time.perf_counter()
    _round_trip(wire, peer)  # opens the connection where there is none yet
    trips = [_round_trip(wire, peer)]
    opened_s = time.perf_counter()
    share_s = max(share_s, NEEDED_ROUND_TRIPS * trips[0])
    until_s = min(opened_s + share_s, began_s + left_s)
    while len(trips) < ROUND_TRIPS and (
        len(trips) < FEW_ROUND_TRIPS or time.perf_counter() < opened_s + share_s / 8
    ):
        trips.append(_round_trip(wire, peer))
    least = min(trips)

    def once(size: int) -> float:
        return _transfer(wire, peer, size) - least

    moved = climb(once, LARGEST_TRANSFER, until_s, max(LONG_ENOUGH_S, 4 * least))
    wire.say(peer, END)
    return [least, statistics.median(trips), *(moved or (UNKNOWN, UNKNOWN))]


def _round_trip(wire: Wire, peer: int) -> float:
    began_s = time.perf_counter()
    wire.say(peer, PING)
    wire.hear(peer)
    return time.perf_counter() - began_s


def _transfer(wire: Wire, peer: int, size: int) -> float:
    """Seconds from the first byte sent to the answer to the last: a round trip too many."""
    count = wire.count_of(size)
    tensor = wire.elements(count)
    wire.say(peer, BULK, count)
    wire.hear(peer)
    began_s = time.perf_counter()
    wire.send(tensor, peer)
    wire.hear(peer)
    return time.perf_counter() - began_s


def answer(wire: Wire, peer: int) -> None:
    """The other side of ask()."""
    while True:
        what, count, *_ = wire.hear(peer)
        if what == END:
            return
        tensor = wire.elements(int(count)) if what == BULK else None
        wire.say(peer, what)
        if tensor is not None:
            wire.receive(tensor, peer)
            wire.say(peer, END)


def _row(
    nodes: tuple[int, int], least_s: float, median_s: float, size: float, seconds: float
) -> dict[str, Any]:
    known = seconds > 0  # else shorter than a round trip: it says nothing of the bandwidth
    return {
        "nodes": list(nodes),
        "rtt_min_ms": _known(least_s * 1000),
        "rtt_median_ms": _known(median_s * 1000),
        "bandwidth_mbit": size * 8 / seconds / 1e6 if known else None,
        "transfer_bytes": int(size) if known else None,
    }


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None

"""Timed exchanges between ranks: all-reduces of all, round trips and transfers between two nodes.

A slow link must not cost minutes: sizes grow as long as the next one fits into the time that is
left, and what did not fit is unknown. Pairs of nodes are measured one at a time, so that none
disturbs another. Their leaders (the first rank of each node) exchange messages of four numbers:
rank 0 says whose turn it is, the lower leader of a pair measures and reports to rank 0, the other
one answers.
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

from harness.core.links import tells_rate
from harness.core.topology import World

SMALLEST, GROWTH = 2**16, 4  # bytes of the first size, and the ratio of one size to the next
SAMPLES, SAMPLES_S = 3, 0.5  # the median of so many counts; of slow exchanges fewer are made
ALL_PAIRS = 8  # nodes; with more of them each is measured with node 0 alone
LARGEST_TRANSFER = 2**26  # bytes
LONG_ENOUGH_S = 0.1  # no larger transfer is made after one that takes this long and 4 round trips
ENOUGH = 4  # times that an all-reduce is expected to fit: the first may take longer
ROUND_TRIPS, FEW_ROUND_TRIPS = 20, 3
ROUND_TRIPS_S = 0.3  # short ones are repeated so long: other programs may take the processors
# A distant pair needs so many of its round trips for a bandwidth, whatever its share of the time.
NEEDED_ROUND_TRIPS = 16
# The kinds of messages.
PING, BULK, MEASURE, ANSWER, END = range(5)
NOT_MEASURED = math.nan


@dataclass
class TensorChannel:
    """Sends tensors between ranks, of the kind and on the device that training uses."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    group: Any = None  # None: that of the training
    buffer: torch.Tensor | None = None

    def finish(self) -> None:
        """Wait for the exchange: NCCL calls return before it is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        self._pass(dist.isend, tensor, rank)

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        self._pass(dist.irecv, tensor, rank)

    def _pass(self, operation: Any, tensor: torch.Tensor, rank: int) -> None:
        """As a batch of one operation: outside of a batch NCCL makes another communicator."""
        for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, rank, self.group)]):
            work.wait()
        self.finish()

    def send_message(self, rank: int, *numbers: float) -> None:
        """A kind with its arguments, or a result; filled up to four numbers."""
        padded = [*numbers, 0.0, 0.0, 0.0][:4]
        self.send(torch.tensor(padded, dtype=torch.float64, device=self.device), rank)

    def receive_message(self, rank: int) -> list[float]:
        message = torch.zeros(4, dtype=torch.float64, device=self.device)
        self.receive(message, rank)
        return list(message.tolist())

    def elements(self, count: int) -> torch.Tensor:
        """Zeros, which stay zeros when summed; the memory is reused."""
        if self.buffer is None or len(self.buffer) < count:
            self.buffer = None  # free it before allocating another
            self.buffer = torch.zeros(count, dtype=self.dtype, device=self.device)
        return self.buffer[:count]

    def count_of(self, size: int) -> int:
        return max(1, size // int(self.dtype.itemsize))


def busbw(algbw: float, ranks: int) -> float:
    """What the link of each rank carries in an all-reduce, comparable for any number of ranks."""
    return algbw * 2 * (ranks - 1) / ranks


def climb(
    once: Callable[[int], float],
    target: int,
    until_s: float,
    is_enough: Callable[[int, float], bool] = lambda size, seconds: False,
    clock: Callable[[], float] = time.perf_counter,
    first: int = SMALLEST,
) -> tuple[int, float] | None:
    """(size, median seconds) at the target, or at the largest size that fits into the time, from
    the first size on.

    once(size) makes one exchange and returns the seconds that count; climb() times all of it.
    The first exchange of a size counts only if there is time for no other, because it opens TCP's
    window, and the very first one never.
    """
    size, seconds = 0, 0.0
    larger, cost_s, slope = min(first, target), 0.0, 0.0
    smallest = larger
    while larger > size and clock() + cost_s + slope * (larger - size) <= until_s:
        before = size, seconds
        began_s = clock()
        size, seconds = larger, once(larger)
        cost_s = clock() - began_s
        # Both sizes have the same latency, so more bytes cost what the last additional ones did.
        slope = max(0.0, seconds - before[1]) / (size - before[0])
        larger = size if is_enough(size, seconds) else min(GROWTH * size, target)
    if not size:
        return None
    samples = [once(size)] if size == smallest else []
    while len(samples) < SAMPLES and sum(samples) < SAMPLES_S and clock() + cost_s <= until_s:
        samples.append(once(size))
    return size, statistics.median(samples or [seconds])


def measure_allreduce(
    world: World, device: torch.device, dtype: torch.dtype, sizes: list[int], until_s: float,
    takes_s: Callable[[int], float | None] = lambda size: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row per size, on rank 0; other ranks reduce as much as rank 0 announces. A size is measured
    at once where it is known to fit into its time often enough.
    """
    channel = TensorChannel(device, dtype)
    if world.rank != 0:
        while _reduce(channel, 0) is not None:
            pass
        return []
    rows = []

    def once(size: int) -> float:
        seconds = _reduce(channel, channel.count_of(size))
        assert seconds is not None
        return seconds

    for number, target in enumerate(sizes):
        now_s = time.perf_counter()
        share_s = (until_s - now_s) / (len(sizes) - number)
        expected_s = takes_s(target)
        fits = expected_s is not None and ENOUGH * expected_s < share_s
        first = target if fits else SMALLEST
        size, seconds = climb(once, target, now_s + share_s, first=first) or (None, None)
        algbw = size * 8 / seconds / 1e6 if size and seconds else None
        rows.append({
            "asked_bytes": target,
            "bytes": size,
            "s": seconds,
            "algbw_mbit": algbw,
            "busbw_mbit": None if algbw is None else busbw(algbw, world.size),
        })  # fmt: skip
    _reduce(channel, 0)
    return rows


def _reduce(channel: TensorChannel, count: int) -> float | None:
    """Seconds of an all-reduce of as many elements as rank 0 announces; None: it was the last."""
    # The sum is what rank 0 gives, as the others give 0; it also lets all ranks begin together.
    announced = torch.tensor([count], dtype=torch.int64, device=channel.device)
    dist.all_reduce(announced)
    if (size := int(announced.item())) == 0:
        return None
    tensor = channel.elements(size)
    began_s = time.perf_counter()
    dist.all_reduce(tensor)
    channel.finish()
    return time.perf_counter() - began_s


def pairs_of(nodes: int) -> list[tuple[int, int]]:
    """The pairs of node 0 first: they are measured even if time runs out."""
    if nodes <= ALL_PAIRS:
        return list(combinations(range(nodes), 2))
    return [(0, node) for node in range(1, nodes)]


@contextmanager
def leaders(world: World, device: torch.device) -> Iterator[TensorChannel]:
    """A channel of the nodes' first ranks; NCCL's connections take GPU memory until closed."""
    if dist.get_backend() != "nccl":
        yield TensorChannel(device)
        return
    group = dist.new_group([_leader(world, node) for node in range(world.nodes)])
    try:
        if world.rank % world.per_node == 0:
            # NCCL's first operation in a group needs all ranks of it, and a pair is not all.
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        yield TensorChannel(device, group=group)
    finally:
        dist.destroy_process_group(group)


def _leader(world: World, node: int) -> int:
    return node * world.per_node


def measure_pairs(world: World, device: torch.device, until_s: float) -> list[dict[str, Any]]:
    """A row per pair, on rank 0, which directs the other leaders; other ranks do nothing."""
    with leaders(world, device) as channel:
        if world.rank == 0:
            return _lead(world, channel, until_s)
        if world.rank % world.per_node == 0:
            _follow(channel)
        return []


def _lead(world: World, channel: TensorChannel, until_s: float) -> list[dict[str, Any]]:
    rows = []
    pairs = pairs_of(world.nodes)
    for number, nodes in enumerate(pairs):
        lower, upper = (_leader(world, node) for node in nodes)
        left_s = until_s - time.perf_counter()
        share_s = left_s / (len(pairs) - number)
        result = [NOT_MEASURED] * 4
        if left_s > 0:
            channel.send_message(upper, ANSWER, lower)
            if lower == 0:
                result = measure_pair(channel, upper, share_s, left_s)
            else:
                channel.send_message(lower, MEASURE, upper, share_s, left_s)
                result = channel.receive_message(lower)
        rows.append(pair_row(nodes, *result))
    for node in range(1, world.nodes):
        channel.send_message(_leader(world, node), END)
    return rows


def _follow(channel: TensorChannel) -> None:
    while True:
        kind, rank, share_s, left_s = channel.receive_message(0)
        if kind == END:
            return
        if kind == ANSWER:
            answer(channel, int(rank))
        else:
            channel.send_message(0, *measure_pair(channel, int(rank), share_s, left_s))


def measure_pair(channel: TensorChannel, peer: int, share_s: float, left_s: float) -> list[float]:
    """Least and median round trip, bytes of a transfer and its seconds, seen from this side."""
    began_s = time.perf_counter()
    _round_trip(channel, peer)  # opens the connection if there is none yet
    trips = [_round_trip(channel, peer)]
    opened_s = time.perf_counter()
    share_s = max(share_s, NEEDED_ROUND_TRIPS * trips[0])
    until_s = min(opened_s + share_s, began_s + left_s)
    now_s = opened_s
    while len(trips) < FEW_ROUND_TRIPS or (
        now_s < opened_s + share_s / 16
        and (len(trips) < ROUND_TRIPS or now_s < opened_s + ROUND_TRIPS_S)
    ):
        trips.append(_round_trip(channel, peer))
        now_s = time.perf_counter()
    least = min(trips)

    def once(size: int) -> float:
        return _transfer(channel, peer, size) - least

    def is_enough(size: int, seconds: float) -> bool:
        return seconds >= max(LONG_ENOUGH_S, 4 * least) and tells_rate(size, seconds, least)

    transfer = climb(once, LARGEST_TRANSFER, until_s, is_enough)
    channel.send_message(peer, END)
    return [least, statistics.median(trips), *(transfer or (NOT_MEASURED, NOT_MEASURED))]


def _round_trip(channel: TensorChannel, peer: int) -> float:
    began_s = time.perf_counter()
    channel.send_message(peer, PING)
    channel.receive_message(peer)
    return time.perf_counter() - began_s


def _transfer(channel: TensorChannel, peer: int, size: int) -> float:
    """Seconds from the first byte sent to the answer to the last: one round trip too many."""
    count = channel.count_of(size)
    tensor = channel.elements(count)
    channel.send_message(peer, BULK, count)
    channel.receive_message(peer)
    began_s = time.perf_counter()
    channel.send(tensor, peer)
    channel.receive_message(peer)
    return time.perf_counter() - began_s


def answer(channel: TensorChannel, peer: int) -> None:
    """The other side of measure_pair()."""
    while True:
        kind, count, *_ = channel.receive_message(peer)
        if kind == END:
            return
        tensor = channel.elements(int(count)) if kind == BULK else None
        channel.send_message(peer, kind)
        if tensor is not None:
            channel.receive(tensor, peer)
            channel.send_message(peer, END)


def pair_row(
    nodes: tuple[int, int], least_s: float, median_s: float, size: float, seconds: float
) -> dict[str, Any]:
    known = tells_rate(size, seconds, least_s)
    return {
        "nodes": list(nodes),
        "rtt_min_ms": least_s * 1000 if math.isfinite(least_s) else None,
        "rtt_median_ms": median_s * 1000 if math.isfinite(median_s) else None,
        "bandwidth_mbit": size * 8 / seconds / 1e6 if known else None,
        "transfer_bytes": int(size) if math.isfinite(size) else None,
    }

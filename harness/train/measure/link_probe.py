"""Timed exchanges between ranks: all-reduces of all, round trips and transfers between two nodes.

A slow link must not cost minutes: sizes grow as long as two exchanges of the next one fit into the
time that is left, and what did not fit is unknown. The leaders of the nodes (the first rank of
each) measure the round trips of all pairs in rounds, then rates in turns, which rank 0 directs by
messages of four numbers. The lower leader of a pair measures and reports to rank 0, the other one
answers. If there is no time for rates pair by pair, pairs without a common node transfer at the
same time.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypedDict

import torch
import torch.distributed as dist

from harness.core.collectives import NCCL
from harness.core.links import FURTHER, tells_rate
from harness.core.schema.environment import LinkPair
from harness.core.topology import World

SMALLEST, GROWTH = 2**16, 4  # bytes of the first size, and the ratio of one size to the next
SAMPLES, SAMPLES_S = 3, 0.5  # the median of so many counts; of slow exchanges fewer are made
ALL_PAIRS = 8  # nodes; with more of them each is measured with node 0 alone
LARGEST_TRANSFER = 2**26  # bytes
LONG_ENOUGH_S = 0.1  # no larger transfer is made after one that takes this long and 4 round trips
ENOUGH = 4  # times that an all-reduce is expected to fit: the first may take longer
# Times as long as the smallest size: an all-reduce that takes at most this costs what latency does.
NEARLY = 1.5
ROUND_TRIPS, FEW_ROUND_TRIPS = 20, 2
ROUND_TRIPS_S = 0.3  # short ones are repeated so long: other programs may take the processors
# Of the time for all pairs: after the first share no pair's round trips are begun; repeats beyond
# FEW_ROUND_TRIPS take the other share at most.
TRIPS_SHARE, MORE_TRIPS_SHARE = 1 / 4, 1 / 16
# A distant pair needs so many of its round trips for a bandwidth, whatever its share of the time.
NEEDED_ROUND_TRIPS = 20
OPENING_TRIPS = 2  # round trips that the first transfer waits for TCP's window
# The kinds of messages.
PING, BULK, MEASURE, ANSWER, END = range(5)
NOT_MEASURED = math.nan
Pair = tuple[int, int]


class AllreduceRow(TypedDict):
    """An all-reduce over all ranks; null where there was no time for it."""

    asked_bytes: int
    bytes: int | None
    s: float | None
    algbw_mbit: float | None
    busbw_mbit: float | None


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
        self._pass(dist.isend, {rank: tensor})

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        self._pass(dist.irecv, {rank: tensor})

    def _pass(self, operation: Any, tensors: Mapping[int, torch.Tensor]) -> None:
        """As a batch: outside of a batch NCCL makes another communicator."""
        batch = [
            dist.P2POp(operation, tensor, rank, self.group) for rank, tensor in tensors.items()
        ]
        for work in dist.batch_isend_irecv(batch) if batch else ():
            work.wait()
        self.finish()

    def send_message(self, rank: int, *numbers: float) -> None:
        """A kind with its arguments, or a result; filled up to four numbers."""
        padded = [*numbers, 0.0, 0.0, 0.0][:4]
        self.send(torch.tensor(padded, dtype=torch.float64, device=self.device), rank)

    def receive_message(self, rank: int) -> list[float]:
        return self.receive_messages([rank])[0]

    def receive_messages(self, ranks: list[int], count: int = 4) -> list[list[float]]:
        """One of each rank. All are waited for at once: one by one each takes a round trip."""
        messages = [torch.zeros(count, dtype=torch.float64, device=self.device) for _ in ranks]
        self._pass(dist.irecv, dict(zip(ranks, messages, strict=True)))
        return [list(message.tolist()) for message in messages]

    def elements(self, count: int) -> torch.Tensor:
        """Zeros, which stay zeros when summed; the memory is reused."""
        if self.buffer is None or len(self.buffer) < count:
            self.buffer = None  # free it before allocating another
            self.buffer = torch.zeros(count, dtype=self.dtype, device=self.device)
        return self.buffer[:count]

    def count_of(self, size: int) -> int:
        return max(1, size // int(self.dtype.itemsize))


def busbw(algbw: float, ranks: int) -> float:
    """The bandwidth used on each rank's link in an all-reduce, comparable between world sizes."""
    return algbw * 2 * (ranks - 1) / ranks


def climb(
    once: Callable[[int], float],
    target: int,
    until_s: float,
    is_enough: Callable[[int, float], bool] = lambda size, seconds: False,
    clock: Callable[[], float] = time.perf_counter,
    first: int = SMALLEST,
    latency_s: float = 0.0,
) -> tuple[int, float] | None:
    """(size, median seconds) at the target, or at the largest size that fits into the time, from
    the first size on.

    once(size) makes one exchange and returns the seconds that count; climb() times all of it.
    The first exchange of a size never counts, because it opens TCP's window: a size is tried only
    if a second exchange of it is expected to fit, too. latency_s is what the first size may take
    beside its bytes.
    """
    size, seconds = 0, latency_s
    larger, cost_s, slope = min(first, target), 0.0, 0.0
    while larger > size and clock() + 2 * (cost_s + slope * (larger - size)) <= until_s:
        before = size, seconds
        began_s = clock()
        size, seconds = larger, once(larger)
        cost_s = clock() - began_s
        # Both sizes have the same latency, so more bytes cost what the last additional ones did.
        slope = max(0.0, seconds - before[1]) / (size - before[0])
        larger = size if is_enough(size, seconds) else min(GROWTH * size, target)
    if not size:
        return None
    samples = [once(size)]
    while len(samples) < SAMPLES and sum(samples) < SAMPLES_S and clock() + cost_s <= until_s:
        samples.append(once(size))
    return size, statistics.median(samples)


def measure_allreduce(
    world: World, device: torch.device, dtype: torch.dtype, sizes: list[int], until_s: float,
    takes_s: Callable[[int], float | None] = lambda size: None,
) -> list[AllreduceRow]:  # fmt: skip
    """A row per size, on rank 0; other ranks reduce as much as rank 0 announces. A size is measured
    at once where it is known to fit into its time often enough, or to take hardly longer than the
    smallest.
    """
    reductions = Reductions(TensorChannel(device, dtype))
    if world.rank != 0:
        while reductions.make(0):
            pass
        return []
    made: list[int] = []  # the size of each
    taken: list[tuple[int | None, slice]] = []  # of each size asked for: what was made, its samples

    def once(size: int) -> float:
        reductions.make(size)
        made.append(size)
        return reductions.times[-1]

    for number, target in enumerate(sizes):
        now_s = time.perf_counter()
        share_s = (until_s - now_s) / (len(sizes) - number)
        expected_s, least_s = takes_s(target), takes_s(SMALLEST)
        longest_s = max(share_s / ENOUGH, NEARLY * (least_s or 0.0))
        first = target if expected_s is not None and expected_s < longest_s else SMALLEST
        before = len(made)
        climbed = climb(once, target, now_s + share_s, first=first, latency_s=takes_s(1) or 0.0)
        size = climbed[0] if climbed else None
        # The first of a size does not count.
        taken.append((size, slice(len(made) + 1 - made[before:].count(size or 0), len(made))))
    reductions.make(0)
    return [
        _allreduce_row(asked, size, reductions.times[samples], world.size)
        for asked, (size, samples) in zip(sizes, taken, strict=True)
    ]


def _allreduce_row(
    asked: int, size: int | None, times_s: Sequence[float], ranks: int
) -> AllreduceRow:
    seconds = statistics.median(times_s) if size else None
    algbw = size * 8 / seconds / 1e6 if size and seconds else None
    return {
        "asked_bytes": asked,
        "bytes": size,
        "s": seconds,
        "algbw_mbit": algbw,
        "busbw_mbit": None if algbw is None else busbw(algbw, ranks),
    }


class Reductions:
    """All-reduces of as many bytes as rank 0 announces, timed on all ranks.

    The announcement is an all-reduce, which the ranks leave up to a round trip apart. A rank that
    begins before others waits for them, so the least time of all ranks counts. Each announcement
    carries the latest times.
    """

    def __init__(self, channel: TensorChannel) -> None:
        self.channel = channel
        self.times: list[float] = []  # of each all-reduce; the last one is this rank's own yet

    def make(self, size: int) -> bool:
        """Make and time one of this size, which rank 0 knows; False if it is 0: it was the last."""
        channel, latest = self.channel, self.times[-SAMPLES:]
        # Of the sizes and of the negative times, all ranks get the largest.
        values = [float(channel.count_of(size) if size else 0), *(-each for each in latest)]
        announced = torch.tensor(values, dtype=torch.float64, device=channel.device)
        dist.all_reduce(announced, op=dist.ReduceOp.MAX)  # it also lets all ranks begin together
        count, *negative = announced.tolist()
        self.times[len(self.times) - len(latest) :] = [-each for each in negative]
        if not count:
            return False
        tensor = channel.elements(int(count))
        began_s = time.perf_counter()
        dist.all_reduce(tensor)
        channel.finish()
        self.times.append(time.perf_counter() - began_s)
        return True


def pairs_of(nodes: int) -> list[Pair]:
    """All pairs, or of many nodes those of node 0."""
    if nodes <= ALL_PAIRS:
        return list(combinations(range(nodes), 2))
    return [(0, node) for node in range(1, nodes)]


def rounds_of(nodes: int) -> list[list[Pair]]:
    """The same pairs in rounds, in each of which a node belongs to one pair at most."""
    if nodes > ALL_PAIRS:
        return [[pair] for pair in pairs_of(nodes)]
    last = nodes - 1 + nodes % 2  # plays against number r in round r; of an odd number it is nobody
    rounds = []
    for r in range(last):
        others = (((r + k) % last, (r - k) % last) for k in range(1, (last + 1) // 2))
        pairs = (sorted(pair) for pair in ((r, last), *others))
        rounds.append([(one, other) for one, other in pairs if other < nodes])
    return rounds


def turns_of(trips_s: Mapping[Pair, float], nodes: int, left_s: float) -> list[list[Pair]]:
    """Pairs whose rates are measured at the same time, the most distant first: one pair at a time
    if there is time for that, as transfers may disturb each other, else a round.
    """
    known = {pair: seconds for pair, seconds in trips_s.items() if math.isfinite(seconds)}
    one_by_one = NEEDED_ROUND_TRIPS * sum(known.values()) <= left_s
    groups = [[pair] for pair in known] if one_by_one else rounds_of(nodes)
    turns = [[pair for pair in group if pair in known] for group in groups]
    longest_s = max(known.values(), default=0.0)

    def rank(turn: list[Pair]) -> tuple[bool, int, float]:
        """Of turns that are about as distant, those of many pairs first."""
        distance_s = max(known[pair] for pair in turn)
        return FURTHER * distance_s >= longest_s, len(turn), distance_s

    return sorted(filter(None, turns), key=rank, reverse=True)


@contextmanager
def leaders(world: World, device: torch.device) -> Iterator[TensorChannel]:
    """A channel of the nodes' first ranks; NCCL's connections take GPU memory until closed."""
    if dist.get_backend() != NCCL:
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


def measure_pairs(world: World, device: torch.device, until_s: float) -> list[LinkPair]:
    """A row per pair, on rank 0, which directs the other leaders; other ranks do nothing."""
    with leaders(world, device) as channel:
        if world.rank % world.per_node:
            return []
        trips = _gathered(world, channel, _measure_own_trips(world, channel, until_s))
        if world.rank:
            _follow(channel)
            return []
        least_s = {pair: least for pair, (least, _) in trips.items()}
        transfers = _lead(world, channel, least_s, until_s)
        unknown = [NOT_MEASURED] * 2
        return [
            pair_row(pair, *trips[pair], *transfers.get(pair, unknown))
            for pair in pairs_of(world.nodes)
        ]


def _measure_own_trips(
    world: World, channel: TensorChannel, until_s: float
) -> dict[Pair, list[float]]:
    """Least and median round trip by pair, of those pairs of which this leader is the lower one."""
    rounds, own, began_s = rounds_of(world.nodes), world.rank // world.per_node, time.perf_counter()
    left_s = until_s - began_s
    more_s = left_s / len(rounds) * MORE_TRIPS_SHARE
    trips = {}
    for pair in (pair for pairs in rounds for pair in pairs if own in pair):
        lower, upper = (_leader(world, node) for node in pair)
        if world.rank == upper:
            answer(channel, lower)
            continue
        in_time = time.perf_counter() < began_s + left_s * TRIPS_SHARE
        trips[pair] = measure_trips(channel, upper, more_s) if in_time else [NOT_MEASURED] * 2
        channel.send_message(upper, END)
    return trips


def _gathered(
    world: World, channel: TensorChannel, own: Mapping[Pair, list[float]]
) -> dict[Pair, list[float]]:
    """What all leaders have measured, on rank 0; in the table of each the rest is unknown."""
    pairs, unknown = pairs_of(world.nodes), [NOT_MEASURED] * 2
    table = [seconds for pair in pairs for seconds in own.get(pair, unknown)]
    if world.rank:
        if own:
            channel.send(torch.tensor(table, dtype=torch.float64, device=channel.device), 0)
        return {}
    senders = sorted({lower for lower, _ in pairs} - {0})
    others = channel.receive_messages([_leader(world, node) for node in senders], len(table))
    tables = {0: table, **dict(zip(senders, others, strict=True))}
    rows = enumerate(pairs)
    return {pair: tables[pair[0]][2 * number : 2 * number + 2] for number, pair in rows}


def _lead(
    world: World, channel: TensorChannel, trips_s: Mapping[Pair, float], until_s: float
) -> dict[Pair, list[float]]:
    """Bytes of a transfer and its seconds by pair, of those for which there was time."""
    found: dict[Pair, list[float]] = {}
    turns = turns_of(trips_s, world.nodes, until_s - time.perf_counter())
    for number, turn in enumerate(turns):
        left_s = until_s - time.perf_counter()
        needed_s = NEEDED_ROUND_TRIPS * max(trips_s[pair] for pair in turn)
        if left_s <= 0 or (number and left_s < needed_s):
            continue  # a nearer pair may still have time
        share_s = left_s / max(1, min(len(turns) - number, int(left_s / needed_s)))
        for lower, upper in turn:
            channel.send_message(_leader(world, upper), ANSWER, _leader(world, lower))
            if lower:
                to, seconds = _leader(world, upper), (share_s, trips_s[lower, upper])
                channel.send_message(_leader(world, lower), MEASURE, to, *seconds)
        for lower, upper in turn:
            if not lower:
                times = share_s, trips_s[lower, upper]
                found[lower, upper] = measure_transfer(channel, _leader(world, upper), *times)
        others = [pair for pair in turn if pair[0]]
        results = channel.receive_messages([_leader(world, lower) for lower, _ in others])
        found |= dict(zip(others, (result[:2] for result in results), strict=True))
    for node in range(1, world.nodes):
        channel.send_message(_leader(world, node), END)
    return found


def _follow(channel: TensorChannel) -> None:
    while True:
        kind, rank, share_s, least_s = channel.receive_message(0)
        if kind == END:
            return
        if kind == ANSWER:
            answer(channel, int(rank))
        else:
            channel.send_message(0, *measure_transfer(channel, int(rank), share_s, least_s))


def measure_trips(channel: TensorChannel, peer: int, more_s: float) -> list[float]:
    """Least and median round trip; more than a few only for so many seconds."""
    _round_trip(channel, peer)  # opens the connection if there is none yet
    began_s = now_s = time.perf_counter()
    trips: list[float] = []
    while len(trips) < FEW_ROUND_TRIPS or (
        now_s < began_s + more_s and (len(trips) < ROUND_TRIPS or now_s < began_s + ROUND_TRIPS_S)
    ):
        trips.append(_round_trip(channel, peer))
        now_s = time.perf_counter()
    return [min(trips), statistics.median(trips)]


def measure_transfer(
    channel: TensorChannel, peer: int, share_s: float, least_s: float
) -> list[float]:
    """Bytes of a transfer and its seconds beyond the round trip, seen from this side."""

    def once(size: int) -> float:
        return _transfer(channel, peer, size) - least_s

    def is_enough(size: int, seconds: float) -> bool:
        return seconds >= max(LONG_ENOUGH_S, 4 * least_s) and tells_rate(size, seconds, least_s)

    clock, opening_s = time.perf_counter, OPENING_TRIPS * least_s
    until_s = clock() + share_s
    transfer = climb(once, LARGEST_TRANSFER, until_s, is_enough, clock, latency_s=opening_s)
    channel.send_message(peer, END)
    return list(transfer or (NOT_MEASURED, NOT_MEASURED))


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
    """The other side of measure_trips() and measure_transfer()."""
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
) -> LinkPair:
    known = tells_rate(size, seconds, least_s)
    return {
        "nodes": list(nodes),
        "rtt_min_ms": least_s * 1000 if math.isfinite(least_s) else None,
        "rtt_median_ms": median_s * 1000 if math.isfinite(median_s) else None,
        "bandwidth_mbit": size * 8 / seconds / 1e6 if known else None,
        "transfer_bytes": int(size) if math.isfinite(size) else None,
    }

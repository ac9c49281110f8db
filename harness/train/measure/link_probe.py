"""Timed exchanges between ranks: all-reduces of all, round trips and transfers between two nodes.

A slow link must not cost minutes: sizes grow as long as two exchanges of the next one fit into the
time that is left, and what did not fit is unknown. Over a delay, each message costs: repeats are
announced together, and distant round trips that agree are not repeated. The leaders of the nodes
(the first rank of each) measure the round trips of all pairs in rounds, then rates in turns, which
rank 0 directs by messages of four numbers. The lower leader of a pair measures and reports to rank
0, the other one answers. If there is no time for rates pair by pair, pairs without a common node
transfer at the same time.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import TypedDict

import torch
import torch.distributed as dist

from harness.core.collectives import NCCL
from harness.core.links import FURTHER, OPENED_BYTES, tells_rate
from harness.core.schema.environment import LinkPair
from harness.core.topology import World
from harness.train.channel import TensorChannel
from harness.train.session import broadcast, gather

SMALLEST, GROWTH = 2**16, 4  # bytes of the first size, and the ratio of one size to the next
SAMPLES, SAMPLES_S = 3, 0.5  # the median of so many counts; of slow exchanges fewer are made
ALL_PAIRS = 8  # nodes; with more of them each is measured with node 0 alone
LARGEST_TRANSFER = 2**26  # bytes
LONG_ENOUGH_S = 0.1  # no larger transfer is made after one that takes this long and tells the rate
TRANSFERS_S = 1.0  # transfers of the size that tells it are made so long, as SAMPLES allows
# Ratios of a transfer's size to the one before; small ones skip the first.
LEAPS = (2, 4, 8, 16)
ENOUGH = 4  # times that an all-reduce is expected to fit: the first may take longer
# Times as long as the smallest size: an all-reduce that takes at most this costs what latency does.
NEARLY = 1.5
ROUND_TRIPS, FEW_ROUND_TRIPS = 20, 2
ALIKE = 0.05  # distant round trips that differ by less are not repeated further
ROUND_TRIPS_S = 0.3  # short ones are repeated so long: other programs may take the processors
# Of the time for all pairs: after the first share no pair's round trips are begun; repeats beyond
# FEW_ROUND_TRIPS take the other share at most.
TRIPS_SHARE, MORE_TRIPS_SHARE = 1 / 4, 1 / 16
# A distant pair needs so many of its round trips for a bandwidth, whatever its share of the time.
NEEDED_ROUND_TRIPS = 20
AGAIN_S = 2.0  # after the first turn, pairs that need longer are taken to have the rates of others
# The kinds of messages.
PING, BULK, MEASURE, ANSWER, END = range(5)
# What is measured of a pair: two numbers, and how many measurements they are of.
NOT_MEASURED = math.nan, math.nan, 0.0
UNKNOWN_TRANSFER = *NOT_MEASURED, math.inf  # and the least round trip
Pair = tuple[int, int]


class AllreduceRow(TypedDict):
    """An all-reduce over all ranks; null where there was no time for it."""

    asked_bytes: int
    bytes: int | None
    s: float | None
    algbw_mbit: float | None
    busbw_mbit: float | None
    allreduces: int  # whose median s is


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
    rows: list[AllreduceRow] = []
    for number, target in enumerate(sizes):
        now_s = time.perf_counter()
        share_s = (until_s - now_s) / (len(sizes) - number)
        expected_s, least_s = takes_s(target), takes_s(SMALLEST)
        longest_s = max(share_s / ENOUGH, NEARLY * (least_s or 0.0))
        before = len(reductions.sizes)
        if expected_s is not None and expected_s < longest_s and share_s >= 0:
            size: int | None = target
            counted = min(SAMPLES, math.ceil(SAMPLES_S / max(expected_s, SAMPLES_S / SAMPLES)))
            reductions.make(target, 1 + counted)
        else:
            latency_s = takes_s(1) or 0.0
            climbed = climb(reductions.once, target, now_s + share_s, latency_s=latency_s)
            size = climbed[0] if climbed else None
        made = reductions.sizes[before:].count(size or 0)  # the first of a size does not count
        times_s = reductions.times[len(reductions.times) - max(0, made - 1) :]
        rows.append(_allreduce_row(target, size, times_s, world.size))
    reductions.make(0)
    return rows


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
        "allreduces": len(times_s),
    }


class Reductions:
    """All-reduces of as many bytes as rank 0 announces, and as often, timed on all ranks.

    The ranks leave an announcement, and each all-reduce, up to a round trip apart. A rank that
    begins before others waits for them, so the least time of all ranks counts.
    """

    def __init__(self, channel: TensorChannel) -> None:
        self.channel = channel
        self.sizes: list[int] = []  # of each all-reduce, on rank 0
        self.times: list[float] = []

    def make(self, size: int, times: int = 1) -> bool:
        """Make and time some of this size, which rank 0 knows; False if it is 0: none follows."""
        channel = self.channel
        count, times = broadcast([channel.count_of(size) if size else 0, times])
        if not count:
            return False
        tensor, own = channel.elements(count), []
        for _ in range(times):
            began_s = time.perf_counter()
            dist.all_reduce(tensor)
            channel.finish()
            own.append(time.perf_counter() - began_s)
        self.sizes += [size] * times
        self.times += map(min, zip(*gather(own), strict=True))
        return True

    def once(self, size: int) -> float:
        self.make(size)
        return self.times[-1]


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
        least_s = {pair: least for pair, (least, *_) in trips.items()}
        transfers = _lead(world, channel, least_s, until_s)
        return [
            pair_row(pair, *trips[pair], *transfers.get(pair, UNKNOWN_TRANSFER))
            for pair in pairs_of(world.nodes)
        ]


def _measure_own_trips(
    world: World, channel: TensorChannel, until_s: float
) -> dict[Pair, list[float]]:
    """Least and median round trip and their number, by pair whose lower leader this is."""
    rounds, own, began_s = rounds_of(world.nodes), world.rank // world.per_node, time.perf_counter()
    left_s = until_s - began_s
    more_s = left_s / len(rounds) * MORE_TRIPS_SHARE
    trips = {}
    for pair in (pair for pairs in rounds for pair in pairs if own in pair):
        lower, upper = (_leader(world, node) for node in pair)
        if world.nodes == 2 and own:
            break  # the only other leader is rank 0, which _follow() answers, too
        if world.rank == upper:
            answer(channel, lower)
            continue
        in_time = time.perf_counter() < began_s + left_s * TRIPS_SHARE
        trips[pair] = measure_trips(channel, upper, more_s) if in_time else [*NOT_MEASURED]
        if world.nodes > 2:
            channel.send_message(upper, END)
    return trips


def _gathered(
    world: World, channel: TensorChannel, own: Mapping[Pair, list[float]]
) -> dict[Pair, list[float]]:
    """What all leaders have measured, on rank 0; in the table of each the rest is unknown."""
    pairs, each = pairs_of(world.nodes), len(NOT_MEASURED)
    table = [number for pair in pairs for number in own.get(pair, NOT_MEASURED)]
    if world.rank:
        if own:
            channel.send(torch.tensor(table, dtype=torch.float64, device=channel.device), 0)
        return {}
    senders = sorted({lower for lower, _ in pairs} - {0})
    others = channel.receive_messages([_leader(world, node) for node in senders], len(table))
    tables = {0: table, **dict(zip(senders, others, strict=True))}
    rows = enumerate(pairs)
    return {pair: tables[pair[0]][each * number : each * (number + 1)] for number, pair in rows}


def _lead(
    world: World, channel: TensorChannel, trips_s: Mapping[Pair, float], until_s: float
) -> dict[Pair, list[float]]:
    """Bytes of a transfer, its seconds and its count by pair, of those for which there was time."""
    found: dict[Pair, list[float]] = {}
    turns = turns_of(trips_s, world.nodes, until_s - time.perf_counter())
    for number, turn in enumerate(turns):
        left_s = until_s - time.perf_counter()
        needed_s = NEEDED_ROUND_TRIPS * max(trips_s[pair] for pair in turn)
        if left_s <= 0 or (number and needed_s > min(left_s, AGAIN_S)):
            continue  # a nearer pair may still have time
        share_s = left_s / max(1, min(len(turns) - number, int(left_s / needed_s)))
        for lower, upper in turn:
            if lower:
                to, seconds = _leader(world, upper), (share_s, trips_s[lower, upper])
                channel.send_message(to, ANSWER, _leader(world, lower))
                channel.send_message(_leader(world, lower), MEASURE, to, *seconds)
        for lower, upper in turn:
            if not lower:
                times = share_s, trips_s[lower, upper]
                found[lower, upper] = measure_transfer(channel, _leader(world, upper), *times)
        others = [pair for pair in turn if pair[0]]
        results = channel.receive_messages([_leader(world, lower) for lower, _ in others])
        found |= dict(zip(others, results, strict=True))
    for node in range(1, world.nodes):
        channel.send_message(_leader(world, node), END)
    return found


def _follow(channel: TensorChannel) -> None:
    while True:
        kind, number, *seconds = channel.receive_message(0)
        if kind == END:
            return
        if kind == ANSWER:
            answer(channel, int(number))
        elif kind == MEASURE:
            transfer = measure_transfer(channel, int(number), *seconds)
            channel.send_message(int(number), END)
            channel.send_message(0, *transfer)
        else:
            _answer_one(channel, 0, kind, int(number), int(seconds[0]))


def measure_trips(channel: TensorChannel, peer: int, more_s: float) -> list[float]:
    """Least and median round trip, and of how many; more than a few only for so many seconds, and
    not if distant ones are alike. The first counts if it did not have to open the connection.
    """
    first, began_s = _round_trip(channel, peer), time.perf_counter()
    trips = [_round_trip(channel, peer)]
    if first <= (1 + ALIKE) * trips[0]:
        trips.append(first)
    while len(trips) < FEW_ROUND_TRIPS or (
        (now_s := time.perf_counter()) < began_s + more_s
        and (len(trips) < ROUND_TRIPS or now_s < began_s + ROUND_TRIPS_S)
        and (sum(trips) < ROUND_TRIPS_S or max(trips) > (1 + ALIKE) * min(trips))
    ):
        trips.append(_round_trip(channel, peer))
    return [min(trips), statistics.median(trips), len(trips)]


def measure_transfer(
    channel: TensorChannel, peer: int, share_s: float, least_s: float
) -> list[float]:
    """Bytes of a transfer, its median seconds beyond the round trip, seen from this side, of how
    many, and the least round trip. The first of a size never counts: it opens TCP's window.
    """
    if share_s < 0:
        return [*UNKNOWN_TRANSFER]
    size, until_s = SMALLEST, time.perf_counter() + share_s
    least_s, (_, seconds) = _transfers(channel, peer, size, 2, least_s)
    samples = [seconds]
    while larger := _larger(size, seconds, until_s - time.perf_counter(), least_s):
        size = larger
        least_s, (seconds,) = _transfers(channel, peer, size, 1, least_s)
        samples = []
        if _tells(size, seconds, least_s):
            left_s = until_s - time.perf_counter() - 2 * least_s
            times = min(SAMPLES, math.ceil(TRANSFERS_S / seconds), int(left_s / seconds))
            least_s, samples = _transfers(channel, peer, size, max(1, times), least_s)
            seconds = statistics.median(samples)
    if not samples:
        least_s, samples = _transfers(channel, peer, size, 1, least_s)
    return [size, statistics.median(samples), len(samples), least_s]


def _tells(size: int, seconds: float, least_s: float) -> bool:
    return seconds >= LONG_ENOUGH_S and tells_rate(size, seconds, least_s)


def _larger(size: int, seconds: float, left_s: float, least_s: float) -> int:
    """The next size; 0 if there is no time for two of it, or if this one tells the rate.

    A small transfer may have waited a round trip for TCP's window: the size is the smallest one
    that will tell the rate if it did, and fits into the time if it waited half as long.
    """
    if _tells(size, seconds, least_s):
        return 0
    waited_s = 0.0 if size >= OPENED_BYTES else least_s
    least = max(0.0, seconds - waited_s)
    likely = max(0.0, seconds - waited_s / 2, min(seconds, waited_s / 2))
    larger = 0
    for leap in LEAPS[size < OPENED_BYTES :]:
        # Both are announced, and the first one waits for the window to double again and again.
        needed_s = (4 + math.log2(leap)) * least_s + 2 * leap * likely
        if leap * size > LARGEST_TRANSFER or needed_s > left_s:
            break
        larger = leap * size
        if _tells(larger, leap * least, least_s):
            break
    return larger


def _round_trip(channel: TensorChannel, peer: int) -> float:
    began_s = time.perf_counter()
    channel.send_message(peer, PING)
    channel.receive_message(peer)
    return time.perf_counter() - began_s


def _transfers(
    channel: TensorChannel, peer: int, size: int, times: int, least_s: float
) -> tuple[float, list[float]]:
    """The least round trip, and seconds of each until it is acknowledged, without that round trip.
    Where one follows the other without a pause, there is none but at the beginning.
    """
    count, announced_s = channel.count_of(size), time.perf_counter()
    channel.send_message(peer, BULK, count, times)
    channel.receive_message(peer)
    began_s, seconds = time.perf_counter(), list[float]()
    trip_s = least_s = min(least_s, began_s - announced_s)
    for end_s in channel.send_each(channel.elements(count), peer, times):
        seconds.append(end_s - began_s - trip_s)
        began_s, trip_s = end_s, 0.0 if channel.streams else least_s
    return least_s, seconds


def answer(channel: TensorChannel, peer: int) -> None:
    """The other side of measure_trips() and measure_transfer()."""
    while True:
        kind, count, times, _ = channel.receive_message(peer)
        if kind == END:
            return
        _answer_one(channel, peer, kind, int(count), int(times))


def _answer_one(channel: TensorChannel, peer: int, kind: float, count: int, times: int) -> None:
    if kind == BULK:
        channel.receive_each(channel.elements(count), peer, times, kind)
    else:
        channel.send_message(peer, kind)


def pair_row(
    nodes: tuple[int, int], least_s: float, median_s: float, round_trips: float, size: float,
    seconds: float, transfers: float, also_s: float = math.inf,
) -> LinkPair:  # fmt: skip
    """also_s: the least round trip of messages that announced transfers."""
    least_s = min(least_s, also_s)
    known = tells_rate(size, seconds, least_s)
    return {
        "nodes": list(nodes),
        "rtt_min_ms": least_s * 1000 if math.isfinite(least_s) else None,
        "rtt_median_ms": median_s * 1000 if math.isfinite(median_s) else None,
        "round_trips": int(round_trips),
        "bandwidth_mbit": size * 8 / seconds / 1e6 if known else None,
        "transfer_bytes": int(size) if math.isfinite(size) else None,
        "transfers": int(transfers),
    }

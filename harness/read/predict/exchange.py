"""How long adding up numbers over all processes takes: a closed form for each backend.

A cost has parts because exchanges may be under way together: they share the link, and each waits
for its own round trips.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.core.links import Link

MIB = 2**20


# Of a rate, what is left for a program: IP packets of 1500 bytes carry 1448 of TCP's.
TCP_SHARE = 1448 / 1500


# gloo: a ring passes pieces of 1 MiB at most, at least two for each rank, of which two are on
# their way at a time.
GLOO_PIECE, GLOO_PIECES_PER_RANK, GLOO_IN_FLIGHT = MIB, 2, 2


# Beside the round trips that follow from that, each rank after the first waits so much of another
# one, in which bytes may pass: from all-reduces measured over 15 links and sizes, 1 to 25 MB,
# which the form meets within 14 %.
GLOO_SLACK = 0.7


# A piece is asked for before it is sent. Between two ranks that request queues behind the piece
# that goes the same way; from three on requests and pieces go over different connections, and while
# one piece is waited for the other passes.
GLOO_ADDED, GLOO_ADDED_OF_TWO = 0.5, 1.0


GLOO, NCCL = "gloo", "nccl"


BACKENDS = (GLOO, NCCL)


# Exchanges that a backend has under way at a time.
LANES = {GLOO: 2, NCCL: 1}


@dataclass(frozen=True)
class Wire:
    """A link, in seconds and bytes; of nothing else: it takes no time."""

    delay_s: float = 0.0  # one way
    bytes_per_s: float = math.inf

    @property
    def round_trip_s(self) -> float:
        return 2 * self.delay_s


def wire_of(link: Link) -> Wire:
    rate = math.inf if link.rate_mbit is None else link.rate_mbit * 1e6 / 8 * TCP_SHARE
    return Wire(link.delay_ms / 1000, rate)


@dataclass(frozen=True)
class Cost:
    """Seconds of one exchange."""

    wire_s: float = 0.0  # the link is busy
    waits_s: float = 0.0  # round trips in which it need not be
    slack_s: float = 0.0  # more of them, during which it may be
    added: float = 1.0  # share of wire_s that no round trip hides

    @property
    def alone_s(self) -> float:
        return self.end_s(0.0, self.wire_s)

    def end_s(self, begins_s: float, link_free_s: float) -> float:
        """When it has ended, if the link has carried all of it at link_free_s."""
        hidden_s = (1 - self.added) * self.wire_s
        waited_s = max(link_free_s - hidden_s, begins_s + self.slack_s) + self.waits_s
        return max(link_free_s, waited_s)

    def scaled(self, factor: float) -> Cost:
        return Cost(factor * self.wire_s, factor * self.waits_s, factor * self.slack_s, self.added)


@dataclass(frozen=True)
class Shape:
    """Nodes, and processes of each."""

    nodes: int
    per_node: int = 1

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    def __str__(self) -> str:
        return f"{self.nodes}_{self.per_node}"


def allreduce(backend: str, size: float, shape: Shape, wire: Wire) -> Cost:
    """Of so many bytes over all processes; between nodes alone, what is inside is taken as free."""
    if shape.nodes == 1 or size <= 0:
        return Cost()
    wire_s = _share(shape.ranks) * size / wire.bytes_per_s
    if backend == NCCL:
        # A ring through all nodes, or its trees, which send as much and wait less on many nodes.
        rounds = min(shape.nodes - 1, math.ceil(math.log2(shape.nodes)))
        return Cost(wire_s, 2 * rounds * wire.delay_s)
    waits, slack = gloo_round_trips(size, shape.ranks)
    added = GLOO_ADDED_OF_TWO if shape.ranks == 2 else GLOO_ADDED
    return Cost(wire_s, waits * wire.round_trip_s, slack * wire.round_trip_s, added)


def gloo_round_trips(size: float, ranks: int) -> tuple[float, float]:
    """How many gloo's ring waits for, without bytes in between and with them."""
    pieces = max(math.ceil(size / GLOO_PIECE), GLOO_PIECES_PER_RANK * ranks)
    per_rank = math.ceil(pieces / ranks)
    # Adding up and handing round: each rank sends (ranks - 1) x per_rank pieces in either.
    return 2 * (ranks - 1) * per_rank / GLOO_IN_FLIGHT, GLOO_SLACK * (ranks - 1)


def alpha_beta(size: float, shape: Shape, wire: Wire) -> float:
    """Seconds by the textbook's ring: 2(n-1) delays and 2(n-1)/n of the bytes."""
    if shape.nodes == 1:
        return 0.0
    wire_s = _share(shape.ranks) * size / wire.bytes_per_s
    return 2 * (shape.ranks - 1) * wire.delay_s + wire_s


def coded_mean(size: float, shape: Shape, wire: Wire) -> Cost:
    """Of diloco's bf16 and int8: each part to the rank that adds it up, then round the ring."""
    if shape.nodes == 1:
        return Cost()
    wire_s = _share(shape.ranks) * size / wire.bytes_per_s
    return Cost(wire_s, shape.ranks * wire.round_trip_s)


def _share(ranks: int) -> float:
    """Of the bytes, what the link of each rank carries."""
    return 2 * (ranks - 1) / ranks


# ----
# All-reduces that were measured over links correct the closed form, and say how far it is off.

# Links this close to each other are one link.
ALIKE_SHARE, ALIKE_S = 0.1, 0.0002


@dataclass(frozen=True)
class Reduction:
    """One all-reduce over a link."""

    backend: str
    size: int
    seconds: float
    shape: Shape
    wire: Wire

    @property
    def factor(self) -> float:
        """Of what the closed form says."""
        form_s = allreduce(self.backend, self.size, self.shape, self.wire).alone_s
        return self.seconds / form_s if form_s > 0 else math.nan


@dataclass(frozen=True)
class Correction:
    """What to multiply the closed form with, by size; 1 where nothing was measured."""

    sizes: tuple[float, ...]
    factors: tuple[float, ...]
    spread: float | None  # standard deviation of the factors' logarithms; None: not known
    freedom: int
    of_link: bool  # measured over this very link

    def at(self, size: float) -> float:
        """Between sizes by their logarithms, beyond them as at the nearest."""
        if not self.sizes:
            return 1.0
        logs = np.interp(math.log(max(size, 1)), np.log(self.sizes), np.log(self.factors))
        return float(math.exp(float(logs)))


NOTHING = Correction((), (), None, 0, False)


def correction(table: Sequence[Reduction], backend: str, shape: Shape, wire: Wire) -> Correction:
    """Of this link where it was measured, of as many processes where they were; else of all."""
    known = [row for row in table if row.backend == backend and math.isfinite(row.factor)]
    if not known:
        return NOTHING
    here = [row for row in known if alike(row.wire, wire)]
    same = [row for row in here if row.shape == shape] or here
    if not same:
        logs = [math.log(row.factor) for row in known]
        middle = math.exp(statistics.median(logs))
        return Correction((1.0,), (middle,), _spread(logs), len(logs) - 1, False)
    by_size: dict[int, list[float]] = {}
    for row in same:
        by_size.setdefault(row.size, []).append(math.log(row.factor))
    sizes = sorted(by_size)
    middles = {size: statistics.median(by_size[size]) for size in sizes}
    # What repeats of one size differ by; with none, how much the factor changes with the size.
    off = [each - middles[size] for size in sizes for each in by_size[size]]
    free = len(off) - len(sizes)
    if free > 0:
        spread: float | None = math.sqrt(sum(each**2 for each in off) / free)
    else:
        spread, free = _spread(list(middles.values())), len(sizes) - 1
    factors = tuple(math.exp(middles[size]) for size in sizes)
    return Correction(tuple(map(float, sizes)), factors, spread, free, True)


def alike(one: Wire, other: Wire) -> bool:
    def close(a: float, b: float, room: float) -> bool:
        if math.isinf(a) or math.isinf(b):
            return a == b
        return abs(a - b) <= max(room, ALIKE_SHARE * max(a, b))

    rates = close(one.bytes_per_s, other.bytes_per_s, 0.0)
    return rates and close(one.delay_s, other.delay_s, ALIKE_S)


def _spread(logs: Sequence[float]) -> float | None:
    return statistics.stdev(logs) if len(logs) > 1 else None


# ----
# Gradients are exchanged in buckets while the backward pass still computes others.

# DDP's: the first bucket, of the last layers, is small, so that the exchange begins early.
FIRST_BYTES, CAP_MB = MIB, 25.0


def buckets(size: float, cap_mb: float | None = None) -> list[float]:
    """Bytes of each bucket, in the order in which they are ready.

    As if tensors could be cut anywhere: which ones there are is in no record.
    """
    cap = (CAP_MB if cap_mb is None else cap_mb) * MIB
    found, left, room = [], float(size), min(FIRST_BYTES, cap)
    while left > 0:
        found.append(min(room, left))
        left, room = left - found[-1], cap
    return found


def ready_times(sizes: Sequence[float], backward_s: float) -> list[float]:
    """From the start of the backward pass: time goes by as bytes do."""
    total, done, found = sum(sizes), 0.0, []
    for size in sizes:
        done += size
        found.append(backward_s * done / total)
    return found


def last_end(ready_s: Sequence[float], costs: Sequence[Cost], lanes: int) -> float:
    """When the last exchange has ended. So many are under way at a time, over one link."""
    ends: list[float] = []
    link_free_s = 0.0
    for number, (at_s, cost) in enumerate(zip(ready_s, costs, strict=True)):
        before = ends[number - lanes] if number >= lanes else 0.0
        begins_s = max(at_s, before)
        link_free_s = max(begins_s, link_free_s) + cost.wire_s
        ends.append(cost.end_s(begins_s, link_free_s))
    return max(ends, default=0.0)

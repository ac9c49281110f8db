"""How long adding up numbers over all processes takes: a closed form for each backend.

A cost has parts because exchanges may be under way together: they share the link, and each waits
for its own round trips.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from harness.core.links import Link
from harness.read.statistics import spread

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
# A piece is requested before it is sent. Between two ranks that request queues behind the piece
# that goes the same way; from three on requests and pieces go over different connections, and while
# one piece is waited for the other passes.
GLOO_ADDED, GLOO_ADDED_OF_TWO = 0.5, 1.0

GLOO, NCCL = "gloo", "nccl"
BACKENDS = (GLOO, NCCL)
LANES = {GLOO: 2, NCCL: 1}  # exchanges that a backend has under way at a time

# DDP's buckets: the first, of the last layers, is small, so that the exchange begins early.
FIRST_BYTES, CAP_MB = MIB, 25.0
# Where a connection has sent nothing for its timeout of retransmission, which is the round trip and
# at least 200 ms, TCP begins again with ten segments and doubles them each round trip.
RESTED_S, WINDOW_BYTES = 0.2, 10 * 1448
# torch's PowerSGD sums what it does not compress, then either of its two factors.
POWERSGD_SUMS = 3
# How far an exchange of a training is from an all-reduce measured alone over its link, which no
# repeats of that show: standard deviation over ten published links (propagation-tiny), of what
# steps take longer there than without a link.
TRAINING_SPREAD, TRAINING_FREEDOM = 0.041, 10
# Links this close to each other are one link.
ALIKE_SHARE, ALIKE_S = 0.1, 0.0002


@dataclass(frozen=True)
class Wire:
    """A link, in seconds and bytes; by default one that takes no time."""

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
        """When it ends, if the link has carried all of it at link_free_s."""
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
    """The cost of all-reducing so many bytes; traffic inside a node counts as free."""
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
    """Round trips of gloo's ring: with the link idle, and while bytes may pass."""
    pieces = max(math.ceil(size / GLOO_PIECE), GLOO_PIECES_PER_RANK * ranks)
    per_rank = math.ceil(pieces / ranks)
    # Reduce-scatter and all-gather: each rank sends (ranks - 1) x per_rank pieces in either.
    return 2 * (ranks - 1) * per_rank / GLOO_IN_FLIGHT, GLOO_SLACK * (ranks - 1)


def alpha_beta(size: float, shape: Shape, wire: Wire) -> float:
    """Seconds by the textbook's ring: 2(n-1) delays and 2(n-1)/n of the bytes."""
    if shape.nodes == 1:
        return 0.0
    wire_s = _share(shape.ranks) * size / wire.bytes_per_s
    return 2 * (shape.ranks - 1) * wire.delay_s + wire_s


def coded_mean(size: float, shape: Shape, wire: Wire, of_pairs: bool = False) -> Cost:
    """The cost of averaging codes: each piece to the rank that adds it up, then round the ring."""
    if shape.nodes == 1:
        return Cost()
    round_s = _share(shape.ranks) / 2 * size / wire.bytes_per_s
    to_all_s = on_a_link(size / shape.ranks, shape, of_pairs) / wire.bytes_per_s
    return Cost(to_all_s + round_s, shape.ranks * wire.round_trip_s)


def direct_mean(size: float, shape: Shape, wire: Wire, of_pairs: bool = False) -> Cost:
    """Of --exchange direct: all parts at once to those who add them up, and back. Two ranks send
    each other all they have.
    """
    if shape.ranks == 2:
        return all_to_all_mean(size, shape, wire, of_pairs)
    if shape.nodes == 1:
        return Cost()
    sent = 2 * on_a_link(size / shape.ranks, shape, of_pairs)
    return Cost(sent / wire.bytes_per_s, 2 * wire.delay_s)


def all_to_all_mean(size: float, shape: Shape, wire: Wire, of_pairs: bool = False) -> Cost:
    """The cost of --exchange all_to_all: each rank sends all to all others, in one delay."""
    if shape.nodes == 1:
        return Cost()
    return Cost(on_a_link(size, shape, of_pairs) / wire.bytes_per_s, wire.delay_s)


def on_a_link(size: float, shape: Shape, of_pairs: bool) -> float:
    """Bytes that a link carries one way when each process sends so many to each other one.

    A node has one link to all others. Emulated nodes have one for each pair: the rate of an
    emulated link is that of its pair, whatever other pairs send.
    """
    receivers = shape.per_node if of_pairs else shape.ranks - shape.per_node
    return size * shape.per_node * receivers


def powersgd_mean(size: float, shape: Shape, wire: Wire) -> Cost:
    """Its sums follow one another, and ranks that have just met wait for no one again."""
    waits, slack = gloo_round_trips(size / POWERSGD_SUMS, shape.ranks)
    wire_s = _share(shape.ranks) * size / wire.bytes_per_s
    round_trip_s = wire.round_trip_s
    return Cost(wire_s, POWERSGD_SUMS * waits * round_trip_s, slack * round_trip_s)


def restart_s(size: float, shape: Shape, wire: Wire) -> float:
    """What an exchange takes longer over connections that have rested: round trips until TCP's
    window holds what a rank sends at once, or what the link holds.
    """
    if wire.delay_s == 0:
        return 0.0
    at_once = min(size / shape.ranks, wire.bytes_per_s * wire.round_trip_s)
    return max(0, math.ceil(math.log2(at_once / WINDOW_BYTES + 1)) - 1) * wire.round_trip_s


def _share(ranks: int) -> float:
    """The share of the bytes that the link of each rank carries."""
    return 2 * (ranks - 1) / ranks


@dataclass(frozen=True)
class Reduction:
    """An all-reduce that was measured over a link."""

    backend: str
    size: int
    seconds: float
    shape: Shape
    wire: Wire

    @property
    def factor(self) -> float:
        """Measured time / closed form."""
        form_s = allreduce(self.backend, self.size, self.shape, self.wire).alone_s
        return self.seconds / form_s if form_s > 0 else math.nan


@dataclass(frozen=True)
class Correction:
    """The factor of the closed form by size, from measurements; 1 where there are none."""

    sizes: tuple[float, ...]
    factors: tuple[float, ...]
    spread: float | None  # standard deviation of the factors' logarithms; None: not known
    freedom: int
    of_link: bool  # measured over this very link

    def at(self, size: float) -> float:
        """The factor at a size: interpolated in logarithms, constant beyond the measured sizes."""
        if not self.sizes:
            return 1.0
        logs = np.interp(math.log(max(size, 1)), np.log(self.sizes), np.log(self.factors))
        return float(math.exp(float(logs)))


UNMEASURED = Correction((), (), None, 0, False)


def correction(table: Sequence[Reduction], backend: str, shape: Shape, wire: Wire) -> Correction:
    """By all-reduces over this link, else of as many processes, else by all that were measured."""
    known = [row for row in table if row.backend == backend and math.isfinite(row.factor)]
    if not known:
        return UNMEASURED
    here = [row for row in known if alike(row.wire, wire)]
    same = [row for row in here if row.shape == shape] or here
    if not same:
        logs = [math.log(row.factor) for row in known]
        middle = math.exp(statistics.median(logs))
        return Correction((1.0,), (middle,), spread(logs).sd, len(logs) - 1, False)
    by_size: dict[int, list[float]] = {}
    for row in same:
        by_size.setdefault(row.size, []).append(math.log(row.factor))
    sizes = sorted(by_size)
    middles = {size: statistics.median(by_size[size]) for size in sizes}
    # What repeats of one size differ by; with none, how much the factor changes with the size.
    off = [each - middles[size] for size in sizes for each in by_size[size]]
    freedom = len(off) - len(sizes)
    if freedom > 0:
        sd: float | None = math.sqrt(sum(each**2 for each in off) / freedom)
    else:
        sd, freedom = spread(list(middles.values())).sd, len(sizes) - 1
    factors = tuple(math.exp(middles[size]) for size in sizes)
    return Correction(tuple(map(float, sizes)), factors, sd, freedom, True)


def alike(one: Wire, other: Wire) -> bool:
    rates, delays = (one.bytes_per_s, other.bytes_per_s), (one.delay_s, other.delay_s)
    return math.isclose(*rates, rel_tol=ALIKE_SHARE) and math.isclose(
        *delays, rel_tol=ALIKE_SHARE, abs_tol=ALIKE_S
    )


def joined(wires: Iterable[Wire]) -> dict[Wire, Wire]:
    """Each link -> the one it counts as: what runs measured of one link differs by noise."""
    counts_as: dict[Wire, Wire] = {}
    for wire in sorted({*wires}, key=lambda each: (each.delay_s, each.bytes_per_s)):
        counts_as[wire] = next((known for known in counts_as.values() if alike(known, wire)), wire)
    return counts_as


def buckets(size: float, cap_mb: float | None = None) -> list[float]:
    """Bytes of each bucket that DDP exchanges, in the order in which they are ready.

    As if tensors could be cut anywhere: no record lists them.
    """
    cap = (CAP_MB if cap_mb is None else cap_mb) * MIB
    sizes, left, room = [], float(size), min(FIRST_BYTES, cap)
    while left > 0:
        sizes.append(min(room, left))
        left, room = left - sizes[-1], cap
    return sizes


def ready_times(sizes: Sequence[float], backward_s: float) -> list[float]:
    """From the start of the backward pass, in proportion to the bytes so far."""
    return [backward_s * done / sum(sizes) for done in accumulate(sizes)]


def last_end(ready_s: Sequence[float], costs: Sequence[Cost], lanes: int) -> float:
    """When the last exchange ends: as many at a time as there are lanes, over one link."""
    ends: list[float] = []
    link_free_s = 0.0
    for number, (at_s, cost) in enumerate(zip(ready_s, costs, strict=True)):
        before = ends[number - lanes] if number >= lanes else 0.0
        begins_s = max(at_s, before)
        link_free_s = max(begins_s, link_free_s) + cost.wire_s
        ends.append(cost.end_s(begins_s, link_free_s))
    return max(ends, default=0.0)

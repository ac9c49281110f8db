"""The time to add up numbers over all processes: a closed form for each way to do it.

A cost has several parts because exchanges may overlap: they share the link, while each waits for
its own round trips.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from harness.core.links import PACKET, Link

MIB = 2**20
TCP_SEGMENT = 1448  # bytes of TCP's data in an IP packet of 1500 bytes
TCP_SHARE = TCP_SEGMENT / PACKET  # of a link's rate: what is left for payload

# gloo: a ring passes pieces of at most 1 MiB, at least two per rank, of which two are in flight at
# a time.
GLOO_PIECE, GLOO_PIECES_PER_RANK, GLOO_IN_FLIGHT = MIB, 2, 2
# In addition to the round trips of these pieces, each rank after the first waits this share of one
# more, during which bytes may pass. Fitted on all-reduces measured over 15 links and sizes of 1 to
# 25 MB, which the closed form matches within 14 %; others (records/exchange) within 31 %.
GLOO_SLACK = 0.7
# A piece is requested before it is sent. Between two ranks, the request queues behind the piece
# sent in the same direction; with three or more, requests and pieces use different connections,
# and while one piece is awaited the other one passes.
GLOO_ADDED, GLOO_ADDED_OF_TWO = 0.5, 1.0

# For codes, gloo's all-to-all and each turn of the gathering ring wait one round trip. A further
# share of a round trip passes in which bytes may be in flight. Timed alone over 20 to 60 ms, two
# ranks waited 3.1 to 3.4 round trips in all, three 4.0, four 5.6; in trainings of two nodes over
# twelve links 3.1 to 3.4, and half of one more in steps longer than a round trip and 200 ms. The
# share was fitted on these times; between four ranks it is half a round trip too low.
CODED_SLACK = 1.15

# torch's PowerSGD makes three sums: of what it does not compress, and of each of its two factors.
POWERSGD_SUMS = 3

GLOO, NCCL = "gloo", "nccl"


@dataclass(frozen=True)
class Wire:
    """A link, in seconds and bytes; by default one that needs no time."""

    delay_s: float = 0.0  # one way
    bytes_per_s: float = math.inf
    jitter_s: float = 0.0  # not in the closed forms, nor is the loss
    loss: float = 0.0  # share of the packets

    @property
    def round_trip_s(self) -> float:
        return 2 * self.delay_s

    @property
    def is_steady(self) -> bool:
        """Whether there is neither loss nor jitter."""
        return not (self.loss or self.jitter_s)


def wire_of(link: Link) -> Wire:
    rate = math.inf if link.rate_mbit is None else link.rate_mbit * 1e6 / 8 * TCP_SHARE
    return Wire(link.delay_ms / 1000, rate, link.jitter_ms / 1000, link.loss)


@dataclass(frozen=True)
class Cost:
    """Seconds of one exchange, by part."""

    wire_s: float = 0.0  # time for which the link is busy
    waits_s: float = 0.0  # round trips during which the link may be idle
    slack_s: float = 0.0  # further round trips, during which the link may be busy
    added: float = 1.0  # share of wire_s that no round trip hides

    @property
    def alone_s(self) -> float:
        return self.end_s(0.0, self.wire_s)

    def end_s(self, begins_s: float, link_free_s: float) -> float:
        """When the exchange ends, if the link has carried all of its bytes at link_free_s."""
        hidden_s = (1 - self.added) * self.wire_s
        waited_s = max(link_free_s - hidden_s, begins_s + self.slack_s) + self.waits_s
        return max(link_free_s, waited_s)

    def later(self, more_s: float) -> Cost:
        """The same exchange if the link is busy for longer, which no round trip hides."""
        wire_s = self.wire_s + more_s
        added = 1 - (1 - self.added) * self.wire_s / wire_s if more_s else self.added
        return Cost(wire_s, self.waits_s, self.slack_s + more_s, added)

    def scaled(self, factor: float) -> Cost:
        return Cost(factor * self.wire_s, factor * self.waits_s, factor * self.slack_s, self.added)


@dataclass(frozen=True)
class Shape:
    """A number of nodes and of processes per node."""

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
    wire_s = ring_share(shape.ranks) * size / wire.bytes_per_s
    if backend == NCCL:
        # A ring through all nodes, or NCCL's trees, which send as much and wait less on many nodes.
        rounds = min(shape.nodes - 1, math.ceil(math.log2(shape.nodes)))
        return Cost(wire_s, 2 * rounds * wire.delay_s)
    waits, slack = gloo_round_trips(size, shape.ranks)
    added = GLOO_ADDED_OF_TWO if shape.ranks == 2 else GLOO_ADDED
    return Cost(wire_s, waits * wire.round_trip_s, slack * wire.round_trip_s, added)


def gloo_round_trips(size: float, ranks: int) -> tuple[float, float]:
    """Round trips of gloo's ring: with the link idle, and those in which bytes may pass."""
    pieces = max(math.ceil(size / GLOO_PIECE), GLOO_PIECES_PER_RANK * ranks)
    per_rank = math.ceil(pieces / ranks)
    # Reduce-scatter and all-gather: in each, every rank sends (ranks - 1) x per_rank pieces.
    return 2 * (ranks - 1) * per_rank / GLOO_IN_FLIGHT, GLOO_SLACK * (ranks - 1)


def powersgd_mean(size: float, shape: Shape, wire: Wire) -> Cost:
    """The cost of PowerSGD's sums, one after the other. Unlike all-reduces they have no slack:
    over six links, trainings on two nodes waited for 5.9 to 6.2 round trips.
    """
    waits, _ = gloo_round_trips(size / POWERSGD_SUMS, shape.ranks)
    wire_s = ring_share(shape.ranks) * size / wire.bytes_per_s
    return Cost(wire_s, POWERSGD_SUMS * waits * wire.round_trip_s)


def ring_share(ranks: int) -> float:
    """Bytes on the link of each rank / bytes to sum, for a ring."""
    return 2 * (ranks - 1) / ranks


def coded_mean(size: float, shape: Shape, wire: Wire, of_pairs: bool = False) -> Cost:
    """The cost of averaging codes: each piece to the rank that sums it, then around the ring."""
    if shape.nodes == 1:
        return Cost()
    round_s = ring_share(shape.ranks) / 2 * size / wire.bytes_per_s
    to_all_s = on_a_link(size / shape.ranks, shape, of_pairs) / wire.bytes_per_s
    slack_s = CODED_SLACK * wire.round_trip_s
    return Cost(to_all_s + round_s, shape.ranks * wire.round_trip_s, slack_s)


def direct_mean(size: float, shape: Shape, wire: Wire, of_pairs: bool = False) -> Cost:
    """The cost of --exchange direct: each rank sends every part to the rank that sums it, and
    receives the sums. Two ranks send each other everything.
    """
    if shape.ranks == 2:
        return all_to_all_mean(size, shape, wire, of_pairs)
    if shape.nodes == 1:
        return Cost()
    sent = 2 * on_a_link(size / shape.ranks, shape, of_pairs)
    return Cost(sent / wire.bytes_per_s, 2 * wire.delay_s)


def all_to_all_mean(size: float, shape: Shape, wire: Wire, of_pairs: bool = False) -> Cost:
    """The cost of --exchange all_to_all: each rank sends everything to all others, in one delay."""
    if shape.nodes == 1:
        return Cost()
    return Cost(on_a_link(size, shape, of_pairs) / wire.bytes_per_s, wire.delay_s)


def on_a_link(size: float, shape: Shape, of_pairs: bool) -> float:
    """Bytes that a link carries one way if each process sends so many bytes to each other one.

    A node has one link to all others. Emulated nodes have one link per pair: an emulated link has
    the rate of its pair, whatever other pairs send.
    """
    receivers = shape.per_node if of_pairs else shape.ranks - shape.per_node
    return size * shape.per_node * receivers


# Ways of --exchange. Those that do not use the backend, with the time that a mean takes.
BACKEND, DIRECT, ALL_TO_ALL = "backend", "direct", "all_to_all"
MEANS = {DIRECT: direct_mean, ALL_TO_ALL: all_to_all_mean}

# How --exchange auto chooses. Below this round trip, a backend's waiting costs less than direct
# sends cost the host; and a way that is faster by less than this share may be so by noise.
FAR_S, WORTH = 0.001, 0.8


def ways(
    size: float, sending: Shape, wire: Wire, of_pairs: bool, longer: float | None
) -> dict[str, float]:
    """Seconds that so many bytes take by each way. One process per node sends them, in gloo's
    all-reduce all of `sending`. If the rate is unknown, all_to_all, which sends most, is left out.

    longer: measured / predicted time of gloo's all-reduce, as far as known. None: codes are sent,
    which do not use that all-reduce.
    """
    shape = Shape(sending.nodes)
    if longer is None:
        backend_s = coded_mean(size, shape, wire, of_pairs).alone_s
    else:
        backend_s = max(wire.delay_s, longer * allreduce(GLOO, size, sending, wire).alone_s)
    result = {BACKEND: backend_s, DIRECT: direct_mean(size, shape, wire, of_pairs).alone_s}
    if shape.nodes > 2 and math.isfinite(wire.bytes_per_s):  # two send each other everything anyway
        result[ALL_TO_ALL] = all_to_all_mean(size, shape, wire, of_pairs).alone_s
    return result


def fastest(expected: Mapping[str, float]) -> str:
    """The fastest way, if it is clearly faster than the backend; otherwise the backend."""
    best = min(expected, key=expected.__getitem__)
    return best if expected[best] < WORTH * expected[BACKEND] else BACKEND

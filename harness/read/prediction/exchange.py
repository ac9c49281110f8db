"""How long adding up numbers over all processes takes: a closed form for each backend.

A cost has parts because exchanges may be under way together: they share the link, and each waits
for its own round trips.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.links import Link

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

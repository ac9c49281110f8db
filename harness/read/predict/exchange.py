"""How long the exchanges of a training take: closed forms, corrected by measured all-reduces."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from harness.core.collectives import (
    GLOO,
    MIB,
    NCCL,
    TCP_SEGMENT,
    TCP_SHARE,
    Cost,
    Shape,
    Wire,
    allreduce,
    on_a_link,
    ring_share,
)
from harness.core.links import packets_at_once
from harness.read.predict.lossy.messages import longer_s
from harness.read.statistics import spread

Form = Callable[[Wire], Cost]  # what an exchange costs over a link without loss and jitter

BACKENDS = (GLOO, NCCL)
LANES = {GLOO: 2, NCCL: 1}  # exchanges that a backend has under way at a time

# DDP's buckets: the first, of the last layers, is small, so that the exchange begins early.
FIRST_BYTES, CAP_MB = MIB, 25.0
# A connection rests if it has sent nothing for its retransmission timeout: a round trip plus at
# least 200 ms. TCP then restarts with ten segments, and doubles them each round trip.
RESTED_S, WINDOW_BYTES = 0.2, 10 * 1448
# How far an exchange of a training is from an all-reduce measured alone over its link; no repeats
# of the latter show it: standard deviation over ten published links (propagation-tiny), of the
# time that steps take longer there than without a link.
TRAINING_SPREAD, TRAINING_FREEDOM = 0.046, 10
# The same of exchanges from their closed forms, over the sixteen links of four sets of predictions
# for two nodes (docs/prediction.md): codes, replicas apart, and these with codes. DDP's own
# all-reduces are as far off as measured ones.
CODED_SPREAD, APART_SPREAD, APART_CODED_SPREAD = 0.1, 0.12, 0.2
# The same of exchanges over links with loss or jitter, by simulation: of 30 between two nodes, each
# timed alone (records/lossy).
SIMULATED_SPREAD, SIMULATED_FREEDOM = 0.115, 29
# Processor time of each handover between emulated nodes: the relay's, and that of the kernel and of
# the receiver that it wakes. Fitted on the processor time (not the steps) of 48 published runs on
# four nodes; 30 runs over other links say 66 us.
HANDOVER_S = 60e-6
# Links this close to each other are one link.
ALIKE_SHARE, ALIKE_S = 0.1, 0.0002


def alpha_beta(size: float, shape: Shape, wire: Wire) -> float:
    """Seconds by the textbook's ring: 2(n-1) delays and 2(n-1)/n of the bytes."""
    if shape.nodes == 1:
        return 0.0
    wire_s = ring_share(shape.ranks) * size / wire.bytes_per_s
    return 2 * (shape.ranks - 1) * wire.delay_s + wire_s


def rests_after_s(wire: Wire) -> float:
    """How long a connection may send nothing before it counts as rested."""
    return wire.round_trip_s + RESTED_S


def slow_start_s(at_once: float, wire: Wire) -> float:
    """How much longer an exchange takes over connections that begin: round trips until TCP's window
    holds the bytes that a rank sends at once, or those that the link holds.
    """
    if wire.delay_s == 0:
        return 0.0
    at_once = min(at_once, wire.bytes_per_s * wire.round_trip_s)
    return max(0, math.ceil(math.log2(at_once / WINDOW_BYTES + 1)) - 1) * wire.round_trip_s


def relay_s(size: float, shape: Shape, wire: Wire, to_all: bool) -> float:
    """Processor time of carrying a direct exchange between emulated nodes: over all links, by the
    number of handovers.
    """
    receivers = shape.ranks - shape.per_node
    sent = size * receivers * (shape.ranks if to_all else 2)
    packets = 1 if wire.loss else packets_at_once(wire.bytes_per_s / TCP_SHARE)
    return HANDOVER_S * sent / (packets * TCP_SEGMENT)


def longer_over(
    form: Form, shape: Shape, wire: Wire, control: str, to_all: bool, of_pairs: bool
) -> float:
    """How many seconds longer an exchange takes over a link with loss or jitter. Its closed form
    says how many messages wait for one another, and their bytes. to_all: each process sends to all
    others, over one connection each, which share a link.
    """
    counts = form(Wire(1.0, 1.0))
    flows = on_a_link(1, shape, of_pairs) if to_all else 1
    own = replace(wire, bytes_per_s=wire.bytes_per_s / flows)
    rounds = counts.waits_s + counts.slack_s
    return longer_s(own, control, counts.wire_s / flows, rounds, shape.nodes, to_all)


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
    """By all-reduces over this link, of the same shape if any; else by all. Those over links with
    loss or jitter do not count: rare losses are in no median of few.
    """
    known = [
        row for row in table
        if row.backend == backend and row.wire.is_steady and math.isfinite(row.factor)
    ]  # fmt: skip
    here = [row for row in known if alike(row.wire, wire)]
    same = [row for row in here if row.shape == shape] or here
    if not known:
        return UNMEASURED
    if not same:
        logs = [math.log(row.factor) for row in known]
        middle = math.exp(statistics.median(logs))
        return Correction((1.0,), (middle,), spread(logs).sd, len(logs) - 1, False)
    by_size: dict[int, list[float]] = {}
    for row in same:
        by_size.setdefault(row.size, []).append(math.log(row.factor))
    sizes = sorted(by_size)
    middles = {size: statistics.median(by_size[size]) for size in sizes}
    # The spread of repeats of one size; without repeats, the change of the factor with the size.
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
    if (one.jitter_s, one.loss) != (other.jitter_s, other.loss):
        return False
    return math.isclose(*rates, rel_tol=ALIKE_SHARE) and math.isclose(
        *delays, rel_tol=ALIKE_SHARE, abs_tol=ALIKE_S
    )


def joined(wires: Iterable[Wire]) -> dict[Wire, Wire]:
    """Each link -> the one it counts as: measurements of one link differ by noise."""
    counts_as: dict[Wire, Wire] = {}
    for wire in sorted({*wires}, key=lambda each: (each.delay_s, each.bytes_per_s)):
        counts_as[wire] = next((known for known in counts_as.values() if alike(known, wire)), wire)
    return counts_as


def buckets(size: float, cap_mb: float | None = None) -> list[float]:
    """Bytes of each bucket that DDP exchanges, in the order in which they are ready.

    Tensors are treated as if they could be cut anywhere: no record lists them.
    """
    cap = (CAP_MB if cap_mb is None else cap_mb) * MIB
    sizes, left, room = [], float(size), min(FIRST_BYTES, cap)
    while left > 0:
        sizes.append(min(room, left))
        left, room = left - sizes[-1], cap
    return sizes


def ready_times(sizes: Sequence[float], backward_s: float) -> list[float]:
    """When buckets are ready after the backward pass begins: in proportion to the bytes so far."""
    return [backward_s * done / sum(sizes) for done in accumulate(sizes)]


def last_end(ready_s: Sequence[float], costs: Sequence[Cost], lanes: int) -> float:
    """When the last exchange ends, with as many at a time as there are lanes, over one link."""
    ends: list[float] = []
    link_free_s = 0.0
    for number, (at_s, cost) in enumerate(zip(ready_s, costs, strict=True)):
        before = ends[number - lanes] if number >= lanes else 0.0
        begins_s = max(at_s, before)
        link_free_s = max(begins_s, link_free_s) + cost.wire_s
        ends.append(cost.end_s(begins_s, link_free_s))
    return max(ends, default=0.0)

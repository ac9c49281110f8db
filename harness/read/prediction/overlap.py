"""Gradients are exchanged in buckets while the backward pass still computes others."""

from __future__ import annotations

from collections.abc import Sequence

from harness.read.prediction.exchange import MIB, Cost

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

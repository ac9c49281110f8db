"""All-reduces that were measured over links correct the closed form, and say how far it is off."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.read.prediction.exchange import Shape, Wire, allreduce

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

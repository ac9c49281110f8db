"""What several runs say together: mean and spread, and ratios of means with their uncertainty.

One run says nothing about spread: sd and interval are then None, never zero.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000


# The same records give the same interval, on every machine and at every call.
SEED = 0


@dataclass(frozen=True)
class Spread:
    """Of n values: mean, median, sample standard deviation, 95 % interval of the mean."""

    n: int
    mean: float | None
    median: float | None
    sd: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Estimate:
    """A figure made of two groups, with its 95 % interval where both have several runs."""

    value: float | None = None
    low: float | None = None
    high: float | None = None

    def scaled(self, factor: float, shift: float = 0.0) -> Estimate:
        """The same in other units: factor * figure + shift, for a factor above zero."""

        def turned(value: float | None) -> float | None:
            return None if value is None else factor * value + shift

        return Estimate(turned(self.value), turned(self.low), turned(self.high))


@dataclass(frozen=True)
class Difference:
    """mean(one) - mean(other), with its 95 % interval by Student's t where both have several."""

    value: float
    low: float | None
    high: float | None
    paired: bool

    @property
    def is_beyond_noise(self) -> bool | None:
        """None where the values do not tell: one on a side, or none that differs from another."""
        if self.low is None or self.high is None or (self.low == self.high and self.value != 0):
            return None
        return self.low > 0 or self.high < 0


def spread(values: Sequence[float]) -> Spread:
    """A miss is infinity: then the mean is infinite, the median may not be, a spread is not."""
    n = len(values)
    if n == 0:
        return Spread(0, None, None, None, None, None)
    median = statistics.median(values)
    if any(math.isinf(value) for value in values):
        return Spread(n, math.inf, median, None, None, None)
    # Exact sums: equal values have a spread of exactly nothing.
    mean = statistics.mean(values)
    if n == 1:
        return Spread(1, mean, median, None, None, None)
    sd = statistics.stdev(values)
    half = student_t(n - 1) * sd / math.sqrt(n)
    return Spread(n, mean, median, sd, mean - half, mean + half)


def difference(one: Mapping[Hashable, float], other: Mapping[Hashable, float]) -> Difference:
    """Paired where both go by the same keys, such as seeds; else Welch's, for unequal spreads.

    Of finite values, at least one on each side.
    """
    ones, others = list(one.values()), list(other.values())
    value = statistics.mean(ones) - statistics.mean(others)
    if min(len(ones), len(others)) < 2:
        return Difference(value, None, None, False)
    if set(one) == set(other):
        found = spread([one[key] - other[key] for key in one])
        return Difference(value, found.low, found.high, True)
    half = _welch_half(statistics.variance(ones) / len(ones), len(ones) - 1,
                       statistics.variance(others) / len(others), len(others) - 1)  # fmt: skip
    return Difference(value, value - half, value + half, False)


def _welch_half(one: float, freedom: int, other: float, freedom_other: int) -> float:
    """Half of the interval, from the squared standard errors of two means."""
    total = one + other
    if total == 0:
        return 0.0
    freedom_of_both = total**2 / (one**2 / freedom + other**2 / freedom_other)
    return student_t(freedom_of_both) * math.sqrt(total)


def student_t(freedom: float) -> float:
    """The value that Student's t exceeds, on either side, with a probability of 5 % together."""
    from scipy.special import stdtrit  # a fifth of a second: only where it is needed

    return float(stdtrit(freedom, 0.975))


def ratio_of_means(upper: Mapping[Hashable, float], lower: Mapping[Hashable, float]) -> Estimate:
    """mean(upper) / mean(lower); the values go by what repeats them, such as the seed."""
    if not upper or not lower or math.fsum(lower.values()) == 0:
        return Estimate()
    tops, bottoms = _resampled(upper, lower)
    value = float(np.mean(list(upper.values())) / np.mean(list(lower.values())))
    with np.errstate(divide="ignore", invalid="ignore"):
        return _estimate(value, tops / bottoms)


def difference_of_means(one: Mapping[Hashable, float], other: Mapping[Hashable, float]) -> Estimate:
    """mean(one) - mean(other), as above."""
    if not one or not other:
        return Estimate()
    ones, others = _resampled(one, other)
    value = float(np.mean(list(one.values())) - np.mean(list(other.values())))
    return _estimate(value, ones - others)


def _resampled(
    one: Mapping[Hashable, float], other: Mapping[Hashable, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Means of bootstrap samples of both; none where one of them has a single run.

    Groups with the same seeds are drawn together: what a seed does to both cancels out.
    """
    if min(len(one), len(other)) < 2:
        return np.empty(0), np.empty(0)
    random = np.random.default_rng(SEED)
    paired = set(one) == set(other)
    keys = list(one)
    ours = np.array([one[key] for key in keys])
    theirs = np.array([other[key] for key in (keys if paired else other)])
    drawn = random.integers(len(ours), size=(RESAMPLES, len(ours)))
    if not paired:
        theirs_drawn = random.integers(len(theirs), size=(RESAMPLES, len(theirs)))
    return ours[drawn].mean(1), theirs[drawn if paired else theirs_drawn].mean(1)


def _estimate(value: float, resampled: np.ndarray) -> Estimate:
    if len(resampled) == 0 or not np.isfinite(resampled).all():
        return Estimate(value)
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Estimate(value, float(low), float(high))

"""Means, ratios and their 95 % intervals over runs that repeat one measurement.

There is one interval: Student's t over the repeats. Two groups are compared pair by pair over the
seeds that both have; by Welch's test where they share none. Ratios are compared by their
logarithms. A single value has no spread: standard deviation and interval are then None, never zero.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from harness.read.labels import UNKNOWN

Error = tuple[float, float]  # squared standard error, and its degrees of freedom
Repeats = Mapping[Hashable, float]  # the values of a group by what repeats them, such as the seed

# Intervals of differences, of shares or of logarithms, below this are rounding errors.
ROUNDING = 1e-12

Side = TypeVar("Side")


@dataclass(frozen=True)
class SampleStatistics:
    """Of n values: mean, median, sample standard deviation, 95 % interval of the mean."""

    n: int
    mean: float | None = None
    median: float | None = None
    sd: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the interval; the mean twice where there is none."""
        return _ends(self.mean, self.low, self.high)

    def text(self, form: str) -> str:
        """Mean ± standard deviation, as far as they are known."""
        if self.mean is None:
            return UNKNOWN
        return form.format(self.mean) + ("" if self.sd is None else f" ± {form.format(self.sd)}")


class Noise(StrEnum):
    """What the interval of an estimate says about noise."""

    EQUAL = "equal"  # none of several pairs or runs differs; one alone cannot tell
    BEYOND = "beyond the noise"
    WITHIN = "within the noise"
    NO_SPREAD = "no spread to judge noise by"  # all differ by the same: an interval of no width
    UNKNOWN = "of unknown noise"  # there is no interval


@dataclass(frozen=True)
class Estimate:
    """A difference or ratio of two groups, with its 95 % interval where there are several pairs, or
    several runs on both sides.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0  # pairs, or the runs of the smaller group
    paired: bool = False
    unpaired: int = 0  # values of both sides without a partner: beside pairs they do not count

    def scaled(self, factor: float, shift: float = 0.0) -> Estimate:
        """The estimate in other units: factor * value + shift, for a factor above zero."""
        ends = (self.value, self.low, self.high)
        value, low, high = (None if end is None else factor * end + shift for end in ends)
        return replace(self, value=value, low=low, high=high)

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the interval; the value twice where there is none."""
        return _ends(self.value, self.low, self.high)

    def judged(self, equal: float) -> Noise:
        """Whether the estimate is more than noise. equal: its value where nothing differs."""
        if self.low is None or self.high is None:
            return Noise.UNKNOWN
        if all(abs(end - equal) < ROUNDING for end in (self.low, self.high)):
            return Noise.EQUAL
        if self.low == self.high:
            return Noise.NO_SPREAD
        return Noise.BEYOND if self.low > equal or self.high < equal else Noise.WITHIN


def _ends(value: float | None, low: float | None, high: float | None) -> tuple[float, float]:
    assert value is not None
    return value if low is None else low, value if high is None else high


def is_rate(measure: str) -> bool:
    """Whether a measure is an amount per second, whose mean is the total amount by total time."""
    per_second = re.search(r"_per_s(econd)?(_|$)", measure)  # and not joules_per_sample
    return per_second is not None or measure.endswith("_mbit") or measure == "mfu"


def spread(values: Sequence[float], harmonic: bool = False) -> SampleStatistics:
    """Statistics of values; with a miss, infinity, the mean is infinite and the spread unknown.

    harmonic: the mean is the harmonic one, and its interval is that of the time per sample.
    """
    n = len(values)
    if n == 0:
        return SampleStatistics(0)
    median = statistics.median(values)
    if any(math.isinf(value) for value in values):
        return SampleStatistics(n, math.inf, median)
    if harmonic and min(values) > 0:
        times = spread([1 / value for value in values])
        assert times.mean is not None
        # Equal values have a mean of exactly that value.
        mean = values[0] if len({*values}) == 1 else 1 / times.mean
        if times.low is None or times.high is None:
            return SampleStatistics(1, mean, median)
        sd = statistics.stdev(values)
        high = 1 / times.low if times.low > 0 else math.inf
        low, high = (mean, mean) if sd == 0 else (1 / times.high, high)
        return SampleStatistics(n, mean, median, sd, low, high)
    # Exact sums: equal values have a spread of exactly nothing.
    mean = statistics.mean(values)
    if n == 1:
        return SampleStatistics(1, mean, median)
    sd = statistics.stdev(values)
    half = student_t(n - 1) * sd / math.sqrt(n)
    return SampleStatistics(n, mean, median, sd, mean - half, mean + half)


def difference(one: Repeats, other: Repeats) -> Estimate:
    """mean(one) - mean(other), of finite values."""
    if not one or not other:
        return Estimate()
    values = len(one) + len(other)
    n, (one, other) = compared(one, other), in_both(one, other)
    unpaired = values - len(one) - len(other)
    ones, others, paired = list(one.values()), list(other.values()), set(one) == set(other)
    value = statistics.mean(ones) - statistics.mean(others)
    if n < 2:
        return Estimate(value, n=n, paired=paired, unpaired=unpaired)
    if paired:
        pairs = spread([one[key] - other[key] for key in one])
        low, high = pairs.ends
        if high - low < ROUNDING:
            low = high = value
        return Estimate(value, low, high, n, True, unpaired)
    half = welch_half(*((statistics.variance(v) / len(v), len(v) - 1) for v in (ones, others)))
    return Estimate(value, value - half, value + half, n)


def ratio(upper: Repeats, lower: Repeats) -> Estimate:
    """Geometric mean of upper / that of lower; for pairs, the geometric mean of their ratios.

    The interval is that of the difference of the logarithms. Where a value has no logarithm, as
    the infinite time of a miss, it is the ratio of all means, without an interval.
    """
    if not upper or not lower:
        return Estimate()
    n = min(len(upper), len(lower))
    if not all(0 < v < math.inf for values in (upper, lower) for v in values.values()):
        above, below = (statistics.mean(values.values()) for values in (upper, lower))
        unknown = below == 0 or (math.isinf(above) and math.isinf(below))
        return Estimate() if unknown else Estimate(above / below, n=n)
    logs = difference(*({k: math.log(v) for k, v in values.items()} for values in (upper, lower)))
    upper, lower = in_both(upper, lower)
    value = _geometric_mean(upper.values()) / _geometric_mean(lower.values())
    if logs.low is None or logs.high is None:
        return replace(logs, value=value)
    low, high = math.exp(logs.low), math.exp(logs.high)
    if logs.high - logs.low < ROUNDING:
        low = high = value
    return replace(logs, value=value, low=low, high=high)


def compared(one: Repeats, other: Repeats) -> int:
    """How many pairs two sides are compared by; if they have none in common, how many values the
    smaller side has.
    """
    return min(map(len, in_both(one, other)))


def leaders(
    sides: Sequence[Side], lead: Callable[[Side, Side], Estimate], equal: float
) -> list[Side]:
    """The sides that no other side beats: several where they are equal. None where each is beaten
    by another, which can happen because every two sides are compared over the seeds they share.

    lead: how far the first side is ahead of the second, over their shared seeds. equal: the lead
    between two sides that do not differ.
    """

    def is_led(one: Side, other: Side) -> bool:
        value = lead(one, other).value
        return value is None or value < equal - ROUNDING

    return [one for one in sides if not any(is_led(one, o) for o in sides if o is not one)]


def in_both(one: Repeats, other: Repeats) -> tuple[Repeats, Repeats]:
    """The values with a partner, as seeds may differ more than groups do; all if none has one."""
    keys = [key for key in one if key in other]
    if not keys:
        return one, other
    return {key: one[key] for key in keys}, {key: other[key] for key in keys}


def _geometric_mean(values: Collection[float]) -> float:
    """The geometric mean; of equal values exactly that value."""
    first, *others = {*values}
    return statistics.geometric_mean(values) if others else first


def welch_sum(*errors: Error) -> Error:
    """The error of a sum or a difference of independent parts, from the errors of its parts: the
    degrees of freedom are those of Welch and Satterthwaite. The order of adding does not matter.
    """
    total = math.fsum(square for square, _ in errors)
    if total == 0:
        return 0.0, math.inf
    return total, total**2 / math.fsum(square**2 / freedom for square, freedom in errors)


def welch_half(*errors: Error) -> float:
    """Half of the interval of a sum or a difference, from the errors of its parts."""
    square, freedom = welch_sum(*errors)
    return student_t(freedom) * math.sqrt(square) if square else 0.0


def student_t(freedom: float) -> float:
    """The value that Student's t exceeds, on either side, with a probability of 5 % together."""
    from scipy.special import stdtrit  # a fifth of a second: only where it is needed

    return float(stdtrit(freedom, 0.975))

"""Samples to a target as a function of the batch: E(B) = Emin (1 + B / Bcrit).

Below Bcrit a larger batch costs few samples more; at Bcrit it costs twice the least, and beyond it
samples grow as the batch does: as many updates, each of more work (McCandlish et al. 2018,
arXiv 1812.06162). The form is a straight line in B, so the fit has a closed form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.read.statistics import student_t
from harness.read.sweeps import Target, is_number

BATCHES = 3  # a line goes through any two points
# Where measured means are further from the line than this share, the form is not that of the data.
TOLERANCE = 0.25


@dataclass(frozen=True)
class Reached:
    """How far one run had come when it reached the target."""

    samples: float  # infinite: it did not
    train_s: float | None
    early: bool  # before its first evaluation: these are no more than a bound


@dataclass(frozen=True)
class Fit:
    """None where the data do not tell; `why` then says in what they fall short."""

    least_samples: float | None  # Emin
    critical: float | None  # Bcrit
    low: float | None = None  # its 95 % interval; an open end is infinite
    high: float | None = None
    error: float | None = None  # largest distance of a batch's mean from the line, as a share
    why: str | None = None

    def samples(self, batch: float) -> float | None:
        if self.least_samples is None or self.critical is None:
            return None
        return self.least_samples * (1 + batch / self.critical)


def reached(rows: Sequence[Mapping[str, object]], target: Target) -> Reached | None:
    """Between the two evaluations around the target, in a straight line: an epoch is too coarse.

    None where the records do not tell how many samples or what quality.
    """
    samples = train_s = 0.0
    before: float | None = None
    for n, row in enumerate(rows):
        value, more, seconds = (row.get(k) for k in (target.metric, "samples", "epoch_time_s"))
        if not is_number(value) or not is_number(more):
            return None
        seconds = float(seconds) if is_number(seconds) else math.nan
        if target.reached(value):
            share = 1.0 if before is None else (target.value - before) / (value - before)
            elapsed = train_s + share * seconds
            return Reached(samples + share * more, None if math.isnan(elapsed) else elapsed, n == 0)
        samples, train_s, before = samples + more, train_s + seconds, value
    return Reached(math.inf, None, False) if rows else None


def fit(values: Mapping[float, Sequence[float]]) -> Fit:
    """By least squares over all runs; each batch counts by its relative error.

    The interval is Fieller's, of a ratio of two estimates: it is open where the data do not show
    that samples grow with the batch at all.
    """
    if len(values) < BATCHES:
        many = "1 batch reaches" if len(values) == 1 else f"{len(values)} batches reach"
        return _undetermined(f"{many} it in every run; {BATCHES} are needed")
    batches = np.array([batch for batch, found in values.items() for _ in found])
    samples = np.array([value for found in values.values() for value in found])
    means = {batch: math.fsum(found) / len(found) for batch, found in values.items()}
    weights = np.array([1 / means[batch] ** 2 for batch in batches])
    lines = np.stack([np.ones_like(batches), batches], axis=1)
    inverse = np.linalg.inv(lines.T @ (weights[:, None] * lines))
    (base, slope) = inverse @ (lines.T @ (weights * samples))
    residuals = samples - lines @ (base, slope)
    freedom = len(samples) - 2
    spread = inverse * float((weights * residuals**2).sum()) / freedom
    error = max(abs(base + slope * batch - mean) / mean for batch, mean in means.items())
    if error > TOLERANCE:
        return _undetermined(
            f"samples do not grow in a straight line with the batch: {100 * error:.0f} % off"
        )
    low, high = _ratio(base, slope, spread, student_t(freedom))
    if high is None:
        return _undetermined("samples do not grow with the batch by more than noise", low)
    if base <= 0:
        return _undetermined(
            "samples grow as fast as the batch: smaller batches are needed to see where that begins"
        )
    return Fit(float(base), float(base / slope), low, high, float(error))


def _undetermined(why: str, low: float | None = None) -> Fit:
    return Fit(None, None, low, why=why)


def _ratio(
    base: float, slope: float, spread: np.ndarray, t: float
) -> tuple[float | None, float | None]:
    """Both ends of the interval of base / slope; (low or None, None) where it has no upper end."""
    steep = slope**2 - t**2 * spread[1, 1]
    middle = base * slope - t**2 * spread[0, 1]
    flat = base**2 - t**2 * spread[0, 0]
    root = middle**2 - steep * flat
    if slope <= 0 or steep <= 0:
        if root <= 0 or steep >= 0 or flat <= 0:
            return None, None
        # What is left of zero would be a slope downwards; on the right it begins here.
        end = max((middle - math.sqrt(root)) / steep, (middle + math.sqrt(root)) / steep)
        return (float(end) if end > 0 else None), None
    ends = ((middle - math.sqrt(max(root, 0))) / steep, (middle + math.sqrt(max(root, 0))) / steep)
    return float(max(ends[0], 0.0)), float(ends[1])

"""What a step computes: a line over the batch, and what processes of one machine cost another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# Backward passes take twice the operations of the forward pass.
BACKWARD_SHARE = 2 / 3


@dataclass(frozen=True)
class Line:
    """fixed_s + per_sample_s x batch; of one batch alone nothing is known of any other."""

    fixed_s: float
    per_sample_s: float
    batches: tuple[int, ...]  # measured
    spread: float | None  # relative standard deviation of a run from the line
    freedom: int
    residuals: tuple[tuple[int, float], ...]  # batch, how far a run is from the line, relative

    def step_s(self, batch: int) -> float:
        return self.fixed_s + self.per_sample_s * batch

    def knows(self, batch: int) -> bool:
        return len(self.batches) > 1 or batch in self.batches

    def backward_s(self, batch: int) -> float:
        """Of one batch alone it is not known what of the step is fixed: none is taken to be."""
        grows = self.per_sample_s * batch if len(self.batches) > 1 else self.step_s(batch)
        return BACKWARD_SHARE * grows


def fit_line(runs: Sequence[tuple[int, float]]) -> Line:
    """By least squares of relative errors, with neither part below zero."""
    batches = np.array([batch for batch, _ in runs], dtype=float)
    steps = np.array([step for _, step in runs], dtype=float)
    known = tuple(sorted({batch for batch, _ in runs}))
    if len(known) == 1:
        fixed, slope, free = float(np.mean(steps)), 0.0, len(runs) - 1
    else:
        fixed, slope = _least_squares(batches, steps)
        free = len(runs) - 2
    off = (steps - (fixed + slope * batches)) / steps
    spread = float(math.sqrt(float(off @ off) / free)) if free > 0 else None
    residuals = tuple((int(batch), float(each)) for batch, each in zip(batches, off, strict=True))
    return Line(fixed, slope, known, spread, free, residuals)


def _least_squares(batches: np.ndarray, steps: np.ndarray) -> tuple[float, float]:
    columns = np.stack([1 / steps, batches / steps], axis=1)
    (fixed, slope), *_ = np.linalg.lstsq(columns, np.ones(len(steps)), rcond=None)
    if slope < 0:
        return float(np.sum(1 / steps) / np.sum(1 / steps**2)), 0.0
    if fixed < 0:
        return 0.0, float(np.sum(batches / steps) / np.sum((batches / steps) ** 2))
    return float(fixed), float(slope)


def fit_sharing(slower: Mapping[int, Sequence[float]]) -> float:
    """What each more process on a machine adds to a step, as a share of it.

    From steps of so many processes / steps of one; never below zero.
    """
    points = [(count - 1, each - 1) for count, many in slower.items() for each in many]
    squares = sum(more**2 for more, _ in points)
    return max(0.0, sum(more * added for more, added in points) / squares) if squares else 0.0

"""Step times on one machine: a line over the batch, and how much processes slow each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# A backward pass takes twice the operations of the forward pass.
BACKWARD_SHARE = 2 / 3


@dataclass(frozen=True)
class StepTime:
    """fixed_s + per_sample_s x batch; a fit of one batch predicts no other batch."""

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

    def spread_at(self, batch: int) -> float | None:
        """The spread of a further run: that of runs around the line, and the line's own error."""
        if self.spread is None:
            return None
        rows = np.array([self._relative(known) for known, _ in self.residuals])
        row = np.array(self._relative(batch))
        leverage = float(row @ np.linalg.pinv(rows.T @ rows) @ row)
        return self.spread * math.sqrt(1 + leverage)

    def _relative(self, batch: int) -> tuple[float, float]:
        """By which share of a step each parameter, fixed and per sample, changes it."""
        step_s = self.step_s(batch)
        return 1 / step_s, (batch if len(self.batches) > 1 else 0) / step_s

    def spans(self, batch: int) -> bool:
        return self.batches[0] <= batch <= self.batches[-1]

    def backward_s(self, batch: int) -> float:
        """The backward pass; if only one batch was measured, no part of a step counts as fixed."""
        grows = self.per_sample_s * batch if len(self.batches) > 1 else self.step_s(batch)
        return BACKWARD_SHARE * grows


def fit_line(runs: Sequence[tuple[int, float]]) -> StepTime:
    """By least squares of relative errors, with neither part below zero."""
    batches = np.array([batch for batch, _ in runs], dtype=float)
    steps = np.array([step for _, step in runs], dtype=float)
    known = tuple(sorted({batch for batch, _ in runs}))
    several = len(known) > 1
    fixed, slope = least_squares(batches, steps) if several else (float(np.mean(steps)), 0.0)
    freedom = len(runs) - 1 - several
    off = (steps - (fixed + slope * batches)) / steps
    spread = math.sqrt(float(off @ off) / freedom) if freedom > 0 else None
    residuals = tuple((int(batch), float(each)) for batch, each in zip(batches, off, strict=True))
    return StepTime(fixed, slope, known, spread, freedom, residuals)


def least_squares(batches: np.ndarray, steps: np.ndarray) -> tuple[float, float]:
    """(fixed, slope) of the line with the least relative errors, neither of them below zero."""
    columns = np.stack([1 / steps, batches / steps], axis=1)
    (fixed, slope), *_ = np.linalg.lstsq(columns, np.ones(len(steps)), rcond=None)
    if slope < 0:
        return float(np.sum(1 / steps) / np.sum(1 / steps**2)), 0.0
    if fixed < 0:
        return 0.0, float(np.sum(batches / steps) / np.sum((batches / steps) ** 2))
    return float(fixed), float(slope)


def crowd(processes: int, own_cores: int | None) -> tuple[int, float]:
    """(how many processes of a machine compute at once, how many take turns in the place of each).
    Two are taken to compute at once, also where one alone would use all cores.
    """
    alone = min(processes, max(own_cores, 2)) if own_cores is not None else processes
    return alone, processes / alone


def slowdown(sharing: float, processes: int, own_cores: int | None) -> float:
    """How many times as long processes of a machine compute, if each further one that computes at
    once slows all by the share `sharing`.
    """
    cores, turns = crowd(processes, own_cores)
    return (1 + sharing * (cores - 1)) * turns


def fit_sharing(slower: Mapping[int, Sequence[float]]) -> float:
    """What each further process on a machine adds to a step, as a share of it; never below zero.

    From (number of processes -> their steps / those of one process).
    """
    points = [(count - 1, each - 1) for count, many in slower.items() for each in many]
    squares = sum(more**2 for more, _ in points)
    return max(0.0, sum(more * added for more, added in points) / squares) if squares else 0.0

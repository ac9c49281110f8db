"""What a drawn figure holds: its points, its words, the crosses of failed runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.read.drawing import FAILED, Drawn
from harness.read.records.sweeps import SweepResults, read_results
from tests.support.records import Plan


def measured(plan: Plan, **changes: Any) -> SweepResults:
    return read_results(plan.write(**changes))


def scaled(plan: Plan, hold: str) -> SweepResults:
    """1, 2 and 4 devices: 100, 150 and 200 samples/s, 30, 20 and 15 seconds."""
    for setup, devices, rate, seconds in (("1_1", 1, 100, 30), ("1_2", 2, 150, 20),
                                          ("1_4", 4, 200, 15)):  # fmt: skip
        batch = 4 if hold == "per_gpu_batch" else 4 // devices
        for seed in (1, 2):
            plan.run(setup, batch, seed, devices, train_samples_per_s=rate, train_time_s=seconds)
    return measured(plan, hold=hold)


def points(drawn: Drawn, panel: int = 0) -> list[tuple[float, float]]:
    """Of all single runs in a panel."""
    offsets = (found.get_offsets() for found in drawn.figure.axes[panel].collections)
    return sorted(tuple(map(float, point)) for array in offsets for point in np.asarray(array))


def texts(drawn: Drawn, panel: int = 0) -> list[str]:
    return [text.get_text() for text in drawn.figure.axes[panel].texts]


def names_of(drawn: Drawn) -> list[str]:
    """Of the lines: those of the legend, and those that stand at their ends."""
    figure = drawn.figure
    names = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    return names + names_at_ends(drawn)


def names_at_ends(drawn: Drawn) -> list[str]:
    return [
        text.get_text() for axes in drawn.figure.axes for text in axes.texts
        if text.get_text() in {str(line.get_label()) for line in axes.lines}
    ]  # fmt: skip


def failed_at(drawn: Drawn, panel: int = 0) -> list[float]:
    return [float(np.asarray(line.get_xdata())[0]) for line in drawn.figure.axes[panel].lines
            if line.get_marker() == "X" and line.get_color() == FAILED]  # fmt: skip

"""How answers write a ratio or a difference: its number, unit and interval; and counts."""

from __future__ import annotations

from collections.abc import Collection

from harness.read.compare.compare import WIDEST_SHOWN, ComparedMeasure, Width, is_wider
from harness.read.labels import TIMES_TO_TARGET
from harness.read.records.baseline import RATE
from harness.read.records.comparable import QUALITY
from harness.read.statistics import Estimate

MEMORY = "peak_memory_gib"
# Measure -> the words after "times"; the title of a figure lacks them, as an axis says it.
AS = {RATE: "as many", MEMORY: "as much",
      **dict.fromkeys((*TIMES_TO_TARGET, "epoch_time_s"), "as long")}  # fmt: skip


def unit_of(measure: ComparedMeasure, brief: bool) -> str:
    if measure.question == QUALITY:
        return "points"
    return "times" if brief else f"times {AS[measure.name]}"


def number_of(measure: ComparedMeasure, value: float | None) -> str:
    """The number as text, with at least two significant digits for a small factor."""
    assert value is not None
    if measure.question == QUALITY:
        return f"{value:+.1f}"
    if value < 0.01 or value >= 100:
        return f"{value:.2g}" if value < 1 else f"{value:,.0f}"
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def interval_of(measure: ComparedMeasure, estimate: Estimate) -> str:
    """In brackets, to follow its number; nothing where it is not known."""
    if estimate.low is None or estimate.high is None:
        return ""
    if is_too_wide(measure, estimate, WIDEST_SHOWN):
        return f" ({measure.no_interval(estimate.n)})"
    return f" ({number_of(measure, estimate.low)} to {number_of(measure, estimate.high)})"


def is_too_wide(measure: ComparedMeasure, estimate: Estimate, width: Width) -> bool:
    return is_wider(estimate, width, is_ratio=measure.question != QUALITY)


def counted_once(different: int, cases: int) -> str:
    """A text where several cases have identical values; else an empty one."""
    if different == cases:
        return ""
    if different == 1:
        return f" (the same values in each of {cases} cases)"
    return f" ({different} different results in {cases} cases)"


def from_to(counts: Collection[int]) -> str:
    few, most = min(counts), max(counts)
    return f"{few}" if few == most else f"{few} to {most}"

"""How fast processors were when runs were measured: machines of one name may have several kinds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from harness.read.records.runs import Run

# From this ratio of two calibrations on, times do not count as those of one machine.
UNLIKE = 1.25
NOTED = 1.05  # from this ratio on, tables name both
Rates = dict[tuple[str, int], list[float]]


def rates(runs: Iterable[Run], formats: Collection[str] = ()) -> Rates:
    """(number format, threads) -> TFLOP/s of a process in this format: in these formats, or else in
    that of each run's training.
    """
    measured: Rates = defaultdict(list)
    for run in runs:
        known: Mapping[str, Any] = run.calibration
        threads = known.get("threads")
        for number_format in formats or (run.identity["precision"],):
            rate = known.get(f"{number_format}_tflops")
            if rate and threads and run.device == "cpu":
                measured[number_format, threads].append(rate)
    return measured


def are_apart(one: float, other: float) -> bool:
    return max(one, other) > UNLIKE * min(one, other)


def spread_of(runs: Iterable[Run]) -> list[str]:
    """A sentence for each number format and thread count whose measured speeds were apart."""
    return [
        f"before these runs matrix products ran at {min(speeds):.3g} to {max(speeds):.3g} TFLOP/s "
        f"in {number_format} ({threads} thread(s)): times of different sessions may differ by as "
        "much"
        for (number_format, threads), speeds in sorted(rates(runs).items())
        if max(speeds) > NOTED * min(speeds)
    ]

"""How fast processors were when runs were measured: machines of one name may have several kinds."""

from __future__ import annotations

import statistics
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


def by_speed(runs: Iterable[Run]) -> list[list[Run]]:
    """Runs apart by the speed of their processor in fp32; those of unknown speed with the most."""
    known, classes, unknown = [], list[list[Run]](), list[Run]()
    for run in runs:
        rate = run.calibration.get("fp32_tflops") if run.device == "cpu" else None
        if rate:
            known.append((rate, run))
        else:
            unknown.append(run)
    slowest = 0.0
    for rate, run in sorted(known, key=lambda pair: pair[0]):
        if not classes or are_apart(rate, slowest):
            slowest = rate
            classes.append([])
        classes[-1].append(run)
    if not classes:
        return [unknown] if unknown else []
    max(classes, key=len).extend(unknown)
    return classes


def speed_text(runs: Iterable[Run]) -> str:
    """The speed of the processors of these runs, as a text; "an unknown speed" without any."""
    known = [rate for run in runs if (rate := run.calibration.get("fp32_tflops"))]
    return f"{statistics.median(known):.3g} TFLOP/s" if known else "an unknown speed"


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

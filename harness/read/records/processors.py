"""How fast processors were when runs were measured: machines of one name may have several kinds."""

from __future__ import annotations

import itertools
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
    """Runs apart by the speed of their processor in fp32, the slowest first; those of unknown speed
    with the most. Speeds too far apart for one class are divided at the largest gap between them.
    """
    known, unknown = list[tuple[float, Run]](), list[Run]()
    for run in runs:
        rate = run.calibration.get("fp32_tflops") if run.device == "cpu" else None
        if rate:
            known.append((rate, run))
        else:
            unknown.append(run)
    known.sort(key=lambda pair: pair[0])
    classes = [[run for _, run in each] for each in _divided(known)]
    if classes:
        max(classes, key=len).extend(unknown)
    elif unknown:
        classes = [unknown]
    return classes


def _divided(known: list[tuple[float, Run]]) -> list[list[tuple[float, Run]]]:
    """Rates in ascending order, divided until none of a class are apart."""
    if not known or not are_apart(known[0][0], known[-1][0]):
        return [known] if known else []
    gaps = [later / rate for (rate, _), (later, _) in itertools.pairwise(known)]
    at = gaps.index(max(gaps)) + 1
    return [*_divided(known[:at]), *_divided(known[at:])]


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

"""Whether what a hypothesis says in numbers holds: `expect` of a sweep file against the records.

An expectation bounds a measure of one way to run against another. In each case that is compared it
holds where the whole 95 % interval is within the bounds, does not hold where all of it is outside,
and is open in between and where there is no interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.read.compare.answers import (
    BY_NAME,
    Pair,
    cases_of,
    counted_runs,
    interval_of,
    names_of_cases,
    number_of,
    other_links,
    pairs_by_way,
    unit_of,
    what_is_compared,
)
from harness.read.compare.compare import ComparedMeasure
from harness.read.labels import STRATEGY, counted, label_text, listed, plain_text
from harness.read.records.baseline import is_plain
from harness.read.records.comparable import QUALITY
from harness.read.records.sweeps import Expected, SweepResults
from harness.read.statistics import Estimate, Noise

HOLDS, FAILS, OPEN = "holds", "does not hold", "open"
MOST_CASES = 4  # each with its own number


def verdicts(sweep: SweepResults) -> list[str]:
    """A sentence for each expectation, in the order of the sweep file."""
    return [_verdict(sweep, expected) for expected in sweep.expect]


def _verdict(sweep: SweepResults, expected: Expected) -> str:
    if expected.against is not None:
        sweep = sweep.against(expected.against)
    measure = BY_NAME[expected.measure]
    texts = {axis: plain_text(value) for axis, value in expected.of.items()}
    pairs = [pair for of_way in pairs_by_way(sweep, texts).values() for pair in of_way]
    pairs = [pair for pair in pairs if is_plain(expected.of, pair.group)] or pairs
    ways = (label_text(way, tuple(way)) for way in (expected.of, sweep.baseline or {}))
    which = " against ".join(text.removeprefix(f"{STRATEGY} ") for text in ways)
    claim = f"Expected of {which}: {what_is_compared(sweep, measure)} {_bounds(expected, measure)}"
    if not pairs:
        return f"{claim}: {OPEN}, as no runs of both have finished."
    found = [_found(sweep, expected, measure, pairs), counted_runs(pairs), *other_links(pairs)]
    return f"{claim}: {'; '.join(found)}."


def _bounds(expected: Expected, measure: ComparedMeasure) -> str:
    bounds = {"at least": expected.at_least, "at most": expected.at_most}
    form = "{:+g}" if measure.question == QUALITY else "{:g}"
    texts = [f"{word} {form.format(b)}" for word, b in bounds.items() if math.isfinite(b)]
    return f"{' and '.join(texts)} {unit_of(measure, brief=False)}"


def _found(
    sweep: SweepResults, expected: Expected, measure: ComparedMeasure, pairs: Sequence[Pair]
) -> str:
    """The verdict and, in brackets, the numbers; of several cases each verdict with its cases."""
    cases = cases_of(measure, pairs)
    names = names_of_cases(cases, [axis for axis in sweep.axes if axis not in expected.of])
    found: dict[str, list[str]] = {}
    for case, name in zip(cases, names, strict=True):
        text = _number(measure, case.result) + (f" for {name}" if name else "")
        found.setdefault(_judged(expected, measure, case.result), []).append(text)
    if len(cases) == 1:
        ((judged, (text,)),) = found.items()
        return f"{judged}, {text}"
    order = [judged for judged in (HOLDS, FAILS, OPEN) if judged in found]
    return "; ".join(
        f"{judged} in {len(found[judged])} of {counted(len(cases), 'case')} "
        f"({listed(found[judged], ', ', MOST_CASES)})"
        for judged in order
    )


def _judged(expected: Expected, measure: ComparedMeasure, result: Estimate | str) -> str:
    if isinstance(result, str) or result.judged(measure.equal) in (Noise.NO_SPREAD, Noise.UNKNOWN):
        return OPEN
    low, high = result.ends
    if low >= expected.at_least and high <= expected.at_most:
        return HOLDS
    outside = high < expected.at_least or low > expected.at_most
    return FAILS if outside else OPEN


def _number(measure: ComparedMeasure, result: Estimate | str) -> str:
    if not isinstance(result, Estimate):
        return result
    if result.value is None:
        return "unknown"
    return number_of(measure, result.value) + interval_of(measure, result)

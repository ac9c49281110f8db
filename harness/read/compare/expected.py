"""Whether the bounds of a hypothesis hold: `expect` of a sweep file against the records.

An expectation bounds a measure of one variant against another: its ratio, or for a share the
difference in percentage points. Each planned case is judged by itself: the expectation holds if the
whole 95 % interval is within the bounds, and does not hold if all of it is outside. It is open in
between, and where nothing can be judged: one run on a side, a target that some run misses, no
spread, no finished runs, groups that must not be compared.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from harness.read.compare.answers import (
    BY_NAME,
    Case,
    Pair,
    cases_of,
    counted_runs,
    failures_of,
    names_of_cases,
    other_links,
    pairs_counted,
)
from harness.read.compare.compare import WIDEST_SHOWN, ComparedMeasure, title_of
from harness.read.compare.disturbed import disturbed_sides
from harness.read.compare.wording import counted_once, interval_of, is_too_wide, number_of, unit_of
from harness.read.labels import STRATEGY, counted, has_texts, label_text, listed, plain_text
from harness.read.records.baseline import baseline_of, is_plain
from harness.read.records.comparable import QUALITY
from harness.read.records.sweeps import Expected, SweepResults
from harness.read.statistics import Estimate, Noise

HOLDS, FAILS, OPEN = "holds", "does not hold", "open"
MOST_CASES = 4  # each with its own number


def verdicts(sweep: SweepResults) -> list[str]:
    """A sentence for each expectation, in the order of the sweep file."""
    sentences = [_verdict(sweep, expected) for expected in sweep.expect]
    if sentences and sweep.changed_after:
        sentences.append(f"Written or changed after {sweep.changed_after} had finished.")
    return sentences


def tally(sentences: Sequence[str]) -> str:
    """How many of these verdicts hold in all of their cases, do not hold in some, or are open."""
    judgements = [{*re.findall(rf"[:;] ({HOLDS}|{FAILS}|{OPEN})\b", text)} for text in sentences]
    counts = Counter(
        next(judged for judged in (FAILS, OPEN, HOLDS) if judged in of_one)
        for of_one in judgements
        if of_one
    )
    forms = {HOLDS: ("holds", "hold"), FAILS: (FAILS, "do not hold"), OPEN: (OPEN, OPEN)}
    texts = [f"{n} {forms[judged][n > 1]}" for judged in forms if (n := counts[judged])]
    return f"{counted(counts.total(), 'expectation')}: {', '.join(texts)}" if texts else ""


def _verdict(sweep: SweepResults, expected: Expected) -> str:
    if expected.against is not None:
        sweep = sweep.against(expected.against)
    measure = BY_NAME[expected.measure]
    variants = [_named(variant) for variant in (expected.of, sweep.baseline or {})]
    which = " against ".join(filter(None, variants))
    claim = f"Expected of {which}: {_claim(sweep, expected, measure)}"
    pairs, others = _pairs(sweep, expected)
    compared = cases_of(measure, pairs)
    if not compared and not others:
        return f"{claim}: {OPEN}, no planned runs of both differ in this alone."
    parts = [_numbers(sweep, expected, measure, [*compared, *others])]
    if pairs:
        once = counted_once(len(compared), len(pairs))
        seeds = pairs_counted([case.result for case in compared])
        sides = [pair.group for pair in pairs], [pair.base for pair in pairs]
        parts += [f"{counted_runs(pairs)}{once}{seeds}", *other_links(pairs)]
        parts += disturbed_sides(dict(zip(variants, sides, strict=True)))
    planned = [*pairs, *(pair for case in others for pair in case.pairs)]
    groups = dict.fromkeys(side for pair in planned for side in (pair.group, pair.base))
    return f"{claim}: {'; '.join([*parts, *failures_of([*groups])])}."


def _named(variant: dict[str, Any]) -> str:
    return label_text(variant, tuple(variant)).removeprefix(f"{STRATEGY} ")


def _claim(sweep: SweepResults, expected: Expected, measure: ComparedMeasure) -> str:
    what, form = title_of(measure, sweep.target), "{:g}"
    if measure.question == QUALITY:
        what, form = f"difference in {what}", "{:+g}"
    bounds = {"at least": expected.at_least, "at most": expected.at_most}
    texts = [f"{word} {form.format(b)}" for word, b in bounds.items() if math.isfinite(b)]
    return f"{what} {' and '.join(texts)} {unit_of(measure, brief=False)}"


def _pairs(sweep: SweepResults, expected: Expected) -> tuple[list[Pair], list[Case]]:
    """The pairs that are compared, and the cases in which nothing is, each with the reason.

    A strategy that is named alone means the one without flags, unless the plan has none without.
    """
    texts = {axis: plain_text(value) for axis, value in expected.of.items()}
    named = [group for group in sweep.groups if has_texts(group.label, texts)]
    pairs, others = [], []
    for group in [group for group in named if is_plain(expected.of, group)] or named:
        base = baseline_of(sweep, group)
        if base is group:
            continue
        if not group.finished:
            reason = f"no finished run of {sweep.name_of(group)}"
            others.append(Case([Pair(group, base or group)], reason))
        elif base is None or not base.finished:
            others.append(Case([Pair(group, base or group)], "no finished run to compare with"))
        else:
            pairs.append(Pair(group, base))
    return pairs, others


def _numbers(
    sweep: SweepResults, expected: Expected, measure: ComparedMeasure, cases: Sequence[Case]
) -> str:
    """The verdict and the numbers; for several cases, each verdict with its cases."""
    names = names_of_cases(cases, [axis for axis in sweep.axes if axis not in expected.of])
    by_judgement: dict[str, list[str]] = {}
    for case, name in zip(cases, names, strict=True):
        machine = case.pairs[0].group.machine_kind if len(sweep.machines) > 1 else None
        which = " on ".join(filter(None, (name, machine)))
        text = _number(expected, measure, case.result) + (f" for {which}" if which else "")
        by_judgement.setdefault(_judged(expected, measure, case.result), []).append(text)
    if len(cases) == 1:
        ((judged, (text,)),) = by_judgement.items()
        return f"{judged}, {text}"
    order = [judged for judged in (HOLDS, FAILS, OPEN) if judged in by_judgement]
    return "; ".join(
        f"{judged} in {len(by_judgement[judged])} of {counted(len(cases), 'case')} "
        f"({listed(by_judgement[judged], ', ', MOST_CASES)})"
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


def _number(expected: Expected, measure: ComparedMeasure, result: Estimate | str) -> str:
    """The estimate and its interval, with enough digits to tell its ends from the bounds."""
    if not isinstance(result, Estimate):
        return result
    if result.value is None:
        return "unknown"
    text = number_of(measure, result.value) + interval_of(measure, result)
    bounds = {number_of(measure, b): b for b in (expected.at_least, expected.at_most)}
    is_shown = not is_too_wide(measure, result, WIDEST_SHOWN)
    if is_shown and any(bounds.get(number_of(measure, e), e) != e for e in result.ends):
        form = "{:+.2f}" if measure.question == QUALITY else "{:.4g}"
        low, high = map(form.format, result.ends)
        text = form.format(result.value) + (f" ({low} to {high})" if low != high else "")
    noise = result.judged(measure.equal)
    return f"{text}, {noise}" if noise == Noise.NO_SPREAD else text

"""What a sweep answers, drawn from its records: each variant (way to run) against the baseline.

An answer gives each measure's ratio or difference with its 95 % interval, whether it is within the
noise, the number of runs, and which runs were disturbed or had another link than planned. Where two
groups must not be compared it says why instead. What the hypothesis says in numbers is judged in
expected.py; its text is printed before the answers, for the reader to judge.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from harness.core.records import FAILURES, INTERRUPTED
from harness.core.strategies import OF_ONE_STRATEGY
from harness.read.compare.compare import (
    MEASURES,
    TOO_UNCERTAIN,
    WIDEST,
    ComparedMeasure,
    differing_work,
    title_of,
)
from harness.read.compare.disturbed import all_disturbed, disturbed_sides
from harness.read.compare.wording import (
    MEMORY,
    counted_once,
    from_to,
    interval_of,
    is_too_wide,
    number_of,
    unit_of,
)
from harness.read.labels import (
    STRATEGY,
    TIMES_TO_TARGET,
    column_of,
    has_texts,
    heading_of,
    label_text,
    listed,
    plain_text,
    short_text,
    shown_axes,
)
from harness.read.records.baseline import EXCHANGED, RATE, compared_groups, differs_from_single
from harness.read.records.comparable import ACCURACY, QUALITY, measured_against, refused
from harness.read.records.groups import Group, by_key
from harness.read.records.sweeps import SweepResults
from harness.read.statistics import Estimate, Noise
from harness.read.table import Item

BY_NAME = {measure.name: measure for measure in MEASURES}
MOST_AXES, MOST_TEXTS = 4, 3  # named in a sentence
MOST_TITLED = 3  # variants that a title names if none differs by more than the noise
FEW_CASES = 2  # each with its number in a sentence; of more cases, the least and the most

# Measure -> what more and less of it is called.
MORE, LESS = "more", "less"
MORE_LESS = {
    RATE: ("faster", "slower"),
    ACCURACY: ("higher", "lower"),
    MEMORY: (MORE, LESS),
}
LONGER_SHORTER = ("longer", "shorter")
LEARNING = ("lr", "epochs", "outer_lr", "outer_momentum", "lr_scheduler_type", "weight_decay",
            "warmup_ratio", "warmup_steps")  # fmt: skip
LESS_IS_BETTER = (*TIMES_TO_TARGET, MEMORY)

ALONE = "one run each, so all of it may be chance"
MISSED, NOT_COMPARED = "missed by some run", "not compared"
NOT_RECORDED = "not recorded on a side"


class Missed(str):
    """A result where some runs of a case miss the target: how many runs reach it."""


@dataclass(frozen=True)
class Pair:
    """A group and its baseline, which differ in the variant and in nothing else."""

    group: Group
    base: Group

    def estimate(self, measure: ComparedMeasure) -> Estimate | str:
        """Of the group against its baseline; or why there is none, in a few words."""
        name, question, sides = measure.name, measure.question, (self.group, self.base)
        is_known = all(side.values(name) for side in sides)
        if is_known and any(side.missed(name) for side in sides):
            own, base = (side.reached for side in sides)
            return Missed(f"reached by {own} runs, of the baseline by {base}")
        reasons = refused(*sides, question)
        if work := differing_work(measure, *sides):
            reasons.append(work)
        if reasons or not is_known:
            return f"{NOT_COMPARED} ({', '.join(reasons) or NOT_RECORDED})"
        return measured_against(*sides, name, question).scaled(measure.factor)


def sides_of(pairs: Iterable[Pair]) -> list[Group]:
    return [side for pair in pairs for side in (pair.group, pair.base)]


@dataclass(frozen=True)
class Answer:
    """One variant against the baseline, as texts."""

    compared: str  # the two variants, in how many cases, and which of them had disturbed runs alone
    measures: tuple[str, ...]  # the finding for each measure
    runs: tuple[str, ...]  # how many there are, and how many had another link than planned

    def __str__(self) -> str:
        """In one sentence."""
        return f"{self.compared}: {'; '.join((*self.measures, *self.runs))}."

    @property
    def item(self) -> Item:
        *parts, last = *self.measures, *self.runs
        return Item(f"{self.compared}:", (*parts, f"{last}."))


def answers(sweep: SweepResults, only: Mapping[str, str] | None = None) -> list[Answer]:
    """An answer for each variant that the sweep compares with its baseline.

    only: the values of axes that are asked for; the others are left out.
    """
    by_variant = pairs_by_variant(sweep, only)
    return [_answer(sweep, variant, pairs) for variant, pairs in by_variant.items()]


def failed_variants(sweep: SweepResults) -> list[str]:
    """A sentence for each variant of which no run finished and some failed. Variants that share the
    value of an axis get one sentence if this holds for all of them.
    """
    left = [group for group in sweep.groups if not group.finished and _failures((group,))]
    sentences = []
    for axis in shown_axes(sweep.axes):
        by_value: dict[str, list[Group]] = {}
        for group in sweep.groups:
            by_value.setdefault(plain_text(group.label.get(axis)), []).append(group)
        for alike in by_value.values():
            if len(alike) > 1 and all(group in left for group in alike):
                text = label_text(alike[0].label, (axis,))
                sentences.append(f"{text}: {_failed(alike)}.")
                left = [group for group in left if group not in alike]
    return [*sentences, *(f"{sweep.name_of(group)}: {_failed([group])}." for group in left)]


def _failures(groups: Sequence[Group]) -> list[str]:
    return [run.state for group in groups for run in group.runs if run.state in FAILURES]


def _failed(groups: Sequence[Group]) -> str:
    states, total = _failures(groups), sum(len(group.runs) for group in groups)
    failed = [state for state in states if state != INTERRUPTED]
    texts = [f"{len(failed)} of {total} runs failed ({', '.join(dict.fromkeys(failed))})"]
    if stopped := len(states) - len(failed):
        texts = [*(texts if failed else ()), f"{stopped} of {total} runs interrupted"]
    return ", ".join(texts)


def failures_of(groups: Sequence[Group]) -> list[str]:
    """How many of the runs failed, if any did."""
    return [_failed(groups)] if _failures(groups) else []


def finding(sweep: SweepResults, *names: str) -> str:
    """The title of a figure: the variant that gains most on the baseline in the first of these
    measures, in the mean over its cases, with all of them.

    1. A variant whose other measures are compared with the baseline comes before one where they are
       not, then one that loses no quality beyond the noise, then one that misses a target in fewer
       cases.
    2. Where no variant gains, it is the one that loses most.
    3. Where none differs by more than the noise, the text says so of each that is compared, in
       the first measure; of a single one, in all of them. "" where none is compared.
    """
    measures = [BY_NAME[name] for name in names]
    by_variant, ranks = pairs_by_variant(sweep, None), dict[str, tuple[bool, bool, float, float]]()
    for variant, pairs in by_variant.items():
        results = [case.result for case in cases_of(measures[0], pairs)]
        known = [each for each in results if isinstance(each, Estimate) and each.value is not None]
        if known:
            gain = sum(_clear_gain(measures[0], each) for each in known) / len(results)
            compared = all(_is_compared(measure, pairs) for measure in measures)
            keeps = not any(_loses_quality(measure, pairs) for measure in measures[1:])
            ranks[variant] = compared, keeps, -_missed(results) / len(results), gain
    if not ranks:
        return ""
    if len(ranks) > 1 and not any(gain for *_, gain in ranks.values()):
        return _nothing_found(sweep, {name: by_variant[name] for name in ranks}, measures[0])
    better = [variant for variant, (*_, gain) in ranks.items() if gain > 0]
    variant = (
        max(better, key=ranks.__getitem__) if better else min(ranks, key=lambda v: ranks[v][3])
    )
    return _title_text(sweep, variant, by_variant[variant], measures)


def _title_text(
    sweep: SweepResults, variant: str, pairs: Sequence[Pair], measures: Sequence[ComparedMeasure]
) -> str:
    """What a title says of one variant."""
    parts = [_part(sweep, measure, pairs, brief=True) for measure in measures]
    if sweep.target is not None and (named := f" to {sweep.target.short}:") in parts[0]:
        parts[1:] = [part.replace(named, ":", 1) for part in parts[1:]]
    parts += [ALONE] if counted_runs(pairs) == ALONE else []
    parts = [*_need_once(parts), *other_links(pairs)]
    return f"{_title(sweep, variant, pairs, True)}: {'; '.join(parts)}"


def _nothing_found(
    sweep: SweepResults, by_variant: Mapping[str, Sequence[Pair]], measure: ComparedMeasure
) -> str:
    """A title of several variants of which none differs by more than the noise."""
    named = [*by_variant.items()][:MOST_TITLED]
    texts = [_title_text(sweep, variant, pairs, [measure]) for variant, pairs in named]
    if text := all_disturbed(group for _, pairs in named for group in sides_of(pairs)):
        first, *others = (each.replace(f": {text}", "", 1) for each in texts)
        texts = [f"{text}: {first}", *others]
    more = len(by_variant) - len(named)
    ends = [f"and {more} more"] if more else []
    if all(f"; {ALONE}" in text for text in texts):
        texts, ends = [text.replace(f"; {ALONE}", "") for text in texts], [*ends, ALONE]
    return "; ".join([*_need_once(texts), *ends])


def _need_once(texts: Sequence[str]) -> list[str]:
    """The texts, of which only the first that is too uncertain says what it needs."""
    needs = re.compile(rf"({TOO_UNCERTAIN}) \([^)]*\)")
    first = next((n for n, text in enumerate(texts) if needs.search(text)), len(texts))
    return [*texts[: first + 1], *(needs.sub(r"\1", text) for text in texts[first + 1 :])]


def _is_compared(measure: ComparedMeasure, pairs: Sequence[Pair]) -> bool:
    return any(isinstance(pair.estimate(measure), Estimate) for pair in pairs)


def _loses_quality(measure: ComparedMeasure, pairs: Sequence[Pair]) -> bool:
    """Whether some pair loses more than the noise in this measure, if it is one of quality."""
    estimates = (pair.estimate(measure) for pair in pairs if measure.question == QUALITY)
    return any(isinstance(each, Estimate) and _clear_gain(measure, each) < 0 for each in estimates)


def _clear_gain(measure: ComparedMeasure, estimate: Estimate) -> float:
    """The gain on the baseline, below 0 where the variant is worse; 0 within the noise."""
    if estimate.value is None or _judged(measure, estimate, MORE, LESS) not in (MORE, LESS):
        return 0.0
    gain = estimate.value if measure.question == QUALITY else math.log(estimate.value)
    return -gain if measure.name in LESS_IS_BETTER else gain


def pairs_by_variant(sweep: SweepResults, only: Mapping[str, str] | None) -> dict[str, list[Pair]]:
    """Variant -> its groups, each paired with the baseline that it is compared with."""
    pairs: dict[str, list[Pair]] = {}
    for group, base in compared_groups(sweep):
        if has_texts(group.label, only or {}):
            pair = Pair(group, base)
            pairs.setdefault(_variant(sweep, group, pair), []).append(pair)
    return pairs


def _shared_axes(sweep: SweepResults, pair: Pair) -> list[str]:
    """The axes on which the groups that are compared agree."""
    baseline = sweep.baseline or {}
    compared_axes = {*baseline, *(OF_ONE_STRATEGY if STRATEGY in baseline else ())}
    compared_axes |= differs_from_single(pair.group, pair.base, sweep.axes) - {"link"}
    return [axis for axis in sweep.axes if axis not in compared_axes]


def _variant(sweep: SweepResults, group: Group, pair: Pair) -> str:
    text = sweep.text_of(group, without=_shared_axes(sweep, pair)) or "all runs"
    return text.removeprefix(f"{STRATEGY} ")


def _answer(sweep: SweepResults, variant: str, pairs: Sequence[Pair]) -> Answer:
    names = [] if sweep.target is None else [*TIMES_TO_TARGET]
    missed = _missed(pair.estimate(BY_NAME[name]) for pair in pairs for name in names)
    if sweep.target is None or "setup" in (sweep.baseline or {}) or missed:
        names = [RATE, *names]
    elif not all(map(_are_as_fast, pairs)):
        names = [*names, RATE]
    if MEMORY in (sweep.columns or ()):
        names.append(MEMORY)
    texts = (_part(sweep, BY_NAME[name], pairs) for name in (*names, ACCURACY))
    runs = counted_runs(pairs), *other_links(pairs)
    return Answer(_title(sweep, variant, pairs), tuple(texts), runs)


def _are_as_fast(pair: Pair) -> bool:
    """Whether the sides differ only in how they learn, which no step takes longer for."""
    label, base = pair.group.label, pair.base.label
    return {axis for axis in label if label[axis] != base.get(axis)} <= {*LEARNING}


def _missed(estimates: Iterable[Estimate | str]) -> int:
    return sum(isinstance(each, Missed) for each in estimates)


def _title(sweep: SweepResults, variant: str, pairs: Sequence[Pair], brief: bool = False) -> str:
    """The variant, the baseline, cases and disturbed sides.

    brief: of the disturbed sides only whether all runs were disturbed.
    """
    shared = _shared_axes(sweep, pairs[0])
    axes = [axis for axis in shown_axes(sweep.varied) if axis in shared]
    scope = ""
    if len(pairs) > 1:
        scope = f" in {len(pairs)} cases of {listed(map(heading_of, axes), ', ', MOST_AXES)}"
    elif text := label_text(pairs[0].group.label, tuple(axes)):
        scope = f" for {text}"
    base = _variant(sweep, pairs[0].base, pairs[0])
    sides = {variant: [pair.group for pair in pairs], base: [pair.base for pair in pairs]}
    if brief:
        text = all_disturbed(group for side in sides.values() for group in side)
        disturbed = [text] if text else []
    else:
        disturbed = disturbed_sides(sides)
    return ": ".join([f"{variant} against {base}{scope}", *disturbed])


def _part(
    sweep: SweepResults, measure: ComparedMeasure, pairs: Sequence[Pair], brief: bool = False
) -> str:
    """The number and interval of each case if there are one or two. For more cases, the least and
    the most, and which are faster, slower, within the noise, ... Cases of equal values count once.
    """
    cases, what = cases_of(measure, pairs), title_of(measure, sweep.target)
    results = [case.result for case in cases]
    estimates = [each for each in results if isinstance(each, Estimate) and each.value is not None]
    names = names_of_cases(cases, _shared_axes(sweep, pairs[0]))
    if not estimates:
        if len(cases) <= FEW_CASES and len({*results}) > 1:
            texts = [f"{each} for {name}" for each, name in zip(results, names, strict=True)]
            return f"{what}: {', and '.join(texts)}"
        texts = [MISSED if isinstance(each, Missed) and len(cases) > FEW_CASES else str(each)
                 for each in results]  # fmt: skip
        return f"{what}: {listed(dict.fromkeys(texts), ' or ', MOST_TEXTS)}"
    unit = unit_of(measure, brief)
    of_pairs = "" if brief else pairs_counted(results)
    once = counted_once(len(cases), len(pairs)) + of_pairs
    more, less = MORE_LESS.get(measure.name, LONGER_SHORTER)
    judged = by_key(
        zip(results, names, strict=True), lambda each: _judgement(measure, each[0], more, less)
    )
    if {*judged} == {Noise.EQUAL} and len(pairs) > 1:
        return f"{what}: equal in all {len(pairs)} cases{of_pairs}"
    if len(cases) <= FEW_CASES:
        single_runs = counted_runs(pairs) == ALONE
        both = zip(results, names, strict=True)
        texts = [_one(measure, result, unit, name, single_runs) for result, name in both]
        return f"{what}: {', and '.join(texts)}{once}"
    order = sorted(judged, key=lambda text: (text not in (more, less), text))
    # In a title what differs is enough; the names of its cases are in the answers.
    are_named = len(judged) > 1 and not brief
    shown = ([text for text in order if text != Noise.WITHIN] or order) if brief else order
    texts = [f"{text} {_in_cases([n for _, n in judged[text]], are_named)}" for text in shown]
    span = f"{_span(measure, results, [] if brief else names)} {unit}"
    return f"{what}: {', '.join([span, *texts])}{once}"


def _in_cases(names: Sequence[str], are_named: bool) -> str:
    named = f" ({listed(filter(None, names), ', ', MOST_TEXTS)})" if any(names) else ""
    return f"in {len(names)}{named if are_named else ''}"


def _judgement(measure: ComparedMeasure, result: Estimate | str, more: str, less: str) -> str:
    if isinstance(result, Missed):
        return MISSED
    return result if isinstance(result, str) else _judged(measure, result, more, less)


class Case(NamedTuple):
    """Pairs that have identical values and count once, such as the accuracy over several links,
    which change nothing but the time.
    """

    pairs: list[Pair]
    result: Estimate | str


def cases_of(measure: ComparedMeasure, pairs: Sequence[Pair]) -> list[Case]:
    cases: dict[Any, Case] = {}
    for pair in pairs:
        values = [
            frozenset(group.repeats(measure.name).items()) for group in (pair.group, pair.base)
        ]
        result = pair.estimate(measure)
        key = (*values, result) if isinstance(result, Estimate) else pair
        cases.setdefault(key, Case([], result)).pairs.append(pair)
    return [*cases.values()]


def pairs_counted(results: Sequence[Estimate | str]) -> str:
    """A text where cases leave out seeds that only one side has; else an empty one."""
    counts = [result.n for result in results if isinstance(result, Estimate) and result.unpaired]
    if not counts:
        return ""
    cases = f" in {len(counts)} of {len(results)} cases" if len(results) > 1 else ""
    return f" (of {from_to(counts)} pair{'s' * (max(counts) > 1)} with the same seed{cases})"


def _one(
    measure: ComparedMeasure, result: Estimate | str, unit: str, case: str, single_runs: bool
) -> str:
    """The number and interval of one case, which is named if there are several."""
    named = f" for {case}" if case else ""
    judged = result if isinstance(result, str) else _judged(measure, result, "", "")
    if judged == Noise.UNKNOWN and single_runs:  # one sentence at the end covers all
        judged = ""
    if isinstance(result, str) or judged == Noise.EQUAL:
        return f"{judged}{named}"
    text = f"{number_of(measure, result.value)} {unit}"
    if judged != Noise.NO_SPREAD:
        text += interval_of(measure, result)
    return f"{text}{named}, {judged}" if judged else f"{text}{named}"


def _span(measure: ComparedMeasure, results: Sequence[Estimate | str], cases: Sequence[str]) -> str:
    """The least and the most number, each with the name of its case, if they are given."""
    known = [(each.value, n) for n, each in enumerate(results)
             if isinstance(each, Estimate) and each.value is not None]  # fmt: skip
    ends = {number_of(measure, v): cases[n] if cases else "" for v, n in (min(known), max(known))}
    named = cases and (len(ends) > 1 or len(known) == 1)
    texts = [f"{text} ({case})" if named else text for text, case in ends.items()]
    return " to ".join(texts)


def names_of_cases(cases: Sequence[Case], axes: Sequence[str]) -> list[str]:
    """For each case, what tells it from the others; a case of several pairs: what these share."""
    labels = [[_with_defaults(pair.group) for pair in case.pairs] for case in cases]
    axes = [
        axis for axis in shown_axes(axes)
        if len({short_text(label, (axis,)) for of_one in labels for label in of_one}) > 1
    ]  # fmt: skip
    return [
        " ".join(_value(of_one[0], axis) for axis in axes
                 if len({short_text(label, (axis,)) for label in of_one}) == 1)
        for of_one in labels
    ]  # fmt: skip


def _with_defaults(group: Group) -> dict[str, Any]:
    """The label with the settings that were used, also where the plan left them to the default."""
    defaults = {axis: group.setting(axis) for axis in group.label if axis not in EXCHANGED}
    return {axis: defaults.get(axis, value) for axis, value in group.label.items()}


def _value(label: Mapping[str, Any], axis: str) -> str:
    if label.get(axis) in (None, "none") or label[axis] is False:
        return f"{heading_of(column_of(axis))} {plain_text(label.get(axis))}"
    return short_text(label, (axis,))


def _judged(measure: ComparedMeasure, estimate: Estimate, more: str, less: str) -> str:
    judged = estimate.judged(measure.equal)
    if judged not in (Noise.BEYOND, Noise.WITHIN):
        return judged
    if judged == Noise.BEYOND:
        return more if estimate.ends[0] > measure.equal else less
    return measure.too_uncertain if is_too_wide(measure, estimate, WIDEST) else Noise.WITHIN


def counted_runs(pairs: Sequence[Pair]) -> str:
    """How many runs each group has, and how many of these have times that count."""
    groups = sides_of(pairs)
    counts = {len(group.finished) for group in groups}
    if counts == {1}:
        return ALONE
    text = f"{from_to(counts)} runs each"
    if any(0 < group.disturbed < len(group.finished) for group in groups):
        timed = {len(group.measured(RATE)) for group in groups}
        text += f"; where some were undisturbed, only those are timed ({from_to(timed)})"
    return text


def other_links(pairs: Sequence[Pair]) -> list[str]:
    """How many of the runs had a link that carried less or took longer than planned."""
    groups = {*sides_of(pairs)}
    runs = [run for group in groups for run in group.finished]
    other = sum(run.link_warning is not None for run in runs)
    return [f"{other} of {len(runs)} runs over another link than asked for"] if other else []

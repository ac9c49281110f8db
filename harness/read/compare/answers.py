"""What a sweep answers, in sentences drawn from its records: each way against the baseline.

A sentence says by how much, with the 95 % interval and the number of runs, and what is within the
noise. What must not be compared is not: it says so instead.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.core.strategies import OF_ONE_STRATEGY
from harness.read.compare.compare import (
    MEASURES,
    QUALITY,
    ComparedMeasure,
    judge,
    values_of,
)
from harness.read.labels import STRATEGY, heading_of, listed, plain_text, shown_axes
from harness.read.records.baseline import baseline_of
from harness.read.records.groups import Group
from harness.read.records.sweeps import SweepResults
from harness.read.statistics import Estimate, difference, ratio

OF = {measure.name: measure for measure in MEASURES}
RATE, TIMES, ACCURACY = OF["train_samples_per_s"], ("tta_wall_s", "tta_train_s"), OF["accuracy"]
FACTOR, POINTS = "{:.2f}", "{:+.1f}"
MOST_AXES, MOST_TEXTS = 4, 3  # named in a sentence

# Measure -> what more and less of it is called.
MORE_LESS = {RATE.name: ("faster", "slower"), ACCURACY.name: ("higher", "lower")}
LONGER_SHORTER = ("longer", "shorter")

WITHIN_NOISE, UNKNOWN_NOISE = "within the noise", "of unknown noise"
MISSED, NOT_COMPARED = "missed by some run", "not compared"


@dataclass(frozen=True)
class Pair:
    """A group and its baseline, which differ in the way that is compared and in nothing else."""

    group: Group
    base: Group

    def estimate(self, measure: ComparedMeasure) -> Estimate | str:
        """Of the group against its baseline; or the word for why there is none."""
        ours, theirs = values_of(self.group, measure), values_of(self.base, measure)
        if not ours or not theirs:
            return NOT_COMPARED
        if not all(map(math.isfinite, (*ours.values(), *theirs.values()))):
            return MISSED
        if reasons := judge(self.base, self.group)[measure.question].reasons:
            return f"{NOT_COMPARED} ({', '.join(reason.partition(':')[0] for reason in reasons)})"
        if measure.question == QUALITY:
            return difference(ours, theirs).scaled(measure.factor)
        return ratio(ours, theirs)


def answers(sweep: SweepResults, only: Mapping[str, str] | None = None) -> list[str]:
    """A sentence for each way that the sweep compares with its baseline.

    only: the values of axes that are asked for; the others are left out.
    """
    pairs: dict[str, list[Pair]] = {}
    for group in sweep.groups:
        base = baseline_of(sweep, group)
        if base is None or base is group or not (group.finished and base.finished):
            continue
        if all(plain_text(group.label.get(axis)) == text for axis, text in (only or {}).items()):
            pairs.setdefault(_way(sweep, group), []).append(Pair(group, base))
    return [_sentence(sweep, way, of_way) for way, of_way in pairs.items()]


def _is_way(sweep: SweepResults, axis: str) -> bool:
    """Whether the groups that are compared differ on this axis."""
    baseline = sweep.baseline or {}
    return axis in baseline or (STRATEGY in baseline and axis in OF_ONE_STRATEGY)


def _way(sweep: SweepResults, group: Group) -> str:
    cases = [axis for axis in sweep.axes if not _is_way(sweep, axis)]
    text = sweep.text_of(group, without=cases) or "all runs"
    return text.removeprefix(f"{STRATEGY} ")


def _sentence(sweep: SweepResults, way: str, pairs: Sequence[Pair]) -> str:
    case = ""
    if len(pairs) > 1:
        axes = [heading_of(axis) for axis in shown_axes(sweep.axes) if not _is_way(sweep, axis)]
        case = f" in {len(pairs)} cases of {listed(axes, ', ', MOST_AXES)}"
    parts = [*_speed(sweep, pairs), _part("accuracy", ACCURACY, pairs, POINTS)]
    base = _way(sweep, pairs[0].base)
    return f"{way} against {base}{case}: {'; '.join(parts)}; {_runs(pairs)}."


def _speed(sweep: SweepResults, pairs: Sequence[Pair]) -> Iterator[str]:
    if sweep.target is None or "setup" in (sweep.baseline or {}):
        yield _part("samples/s", RATE, pairs, FACTOR)
    if sweep.target is None:
        return
    for name, what in zip(TIMES, ("wall time", "training time"), strict=True):
        yield _part(f"{what} to {sweep.target.short}", OF[name], pairs, FACTOR)


def _part(what: str, measure: ComparedMeasure, pairs: Sequence[Pair], form: str) -> str:
    found = [pair.estimate(measure) for pair in pairs]
    estimates = [each for each in found if isinstance(each, Estimate) and each.value is not None]
    if not estimates:
        return f"{what}: {listed(dict.fromkeys(map(str, found)), ' or ', MOST_TEXTS)}"
    quality = measure.question == QUALITY
    unit, none = ("points", 0.0) if quality else ("times", 1.0)
    if len(found) == 1:
        (one,) = estimates
        text = f"{what}: {_number(form, one.value)} {unit}"
        if one.low is not None:
            text += f" ({_number(form, one.low)} to {_number(form, one.high)})"
        judged = _judged(one, none, "", "")
        return f"{text}, {judged}" if judged else text
    values = sorted(each.value or 0.0 for each in estimates)
    more, less = MORE_LESS.get(measure.name, LONGER_SHORTER)
    counts = Counter(
        each if isinstance(each, str) else _judged(each, none, more, less) for each in found
    )
    order = sorted(counts, key=lambda text: (text not in (more, less), text))
    texts = [f"{text} in {counts[text]}" for text in order]
    span = " to ".join(dict.fromkeys(_number(form, value) for value in (values[0], values[-1])))
    return f"{what}: {span} {unit}, {', '.join(texts)}"


def _judged(estimate: Estimate, none: float, more: str, less: str) -> str:
    if estimate.low is None or estimate.high is None:
        return UNKNOWN_NOISE
    if estimate.low > none or estimate.high < none:
        return more if estimate.low > none else less
    return WITHIN_NOISE


def _number(form: str, value: float | None) -> str:
    """With two digits that count, also of a small factor."""
    assert value is not None
    return f"{value:.3f}" if form == FACTOR and value < 0.1 else form.format(value)


def _runs(pairs: Sequence[Pair]) -> str:
    counts = {len(group.finished) for pair in pairs for group in (pair.group, pair.base)}
    if counts == {1}:
        return "one run each, so all of it may be chance"
    few, most = min(counts), max(counts)
    return f"{few} runs each" if few == most else f"{few} to {most} runs each"

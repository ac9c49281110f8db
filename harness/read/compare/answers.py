"""What a sweep answers, in sentences drawn from its records: each way against the baseline.

A sentence says by how much, with the 95 % interval and the number of runs, and what is within the
noise. What must not be compared is not: it says so instead.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
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
MORE, LESS = "more", "less"
TEXTS = dict(zip((RATE.name, ACCURACY.name, *TIMES),
                 ("samples/s", "accuracy", "wall time", "training time"), strict=True))  # fmt: skip

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
    return [_sentence(sweep, way, of_way) for way, of_way in _pairs(sweep, only).items()]


def finding(sweep: SweepResults, *names: str) -> str:
    """The way that differs most clearly from the baseline in the first of these measures, with all
    of them: the title of a figure. "" where none differs by more than the noise.
    """
    measures = [OF[name] for name in names]
    first = measures[0]
    found = list[tuple[float, float, str]]()
    for way, pairs in _pairs(sweep, None).items():
        estimates = [each for pair in pairs if isinstance(each := pair.estimate(first), Estimate)]
        sizes = [size for each in estimates if (size := _clear(first, each)) is not None]
        if sizes:
            parts = (_part(sweep, measure, pairs) for measure in measures)
            text = f"{_ways(sweep, way, pairs)}: {'; '.join(parts)}"
            found.append((len(sizes) / len(pairs), statistics.median(sizes), text))
    return max(found)[-1] if found else ""


def _clear(measure: ComparedMeasure, estimate: Estimate) -> float | None:
    """How far from nothing, if by more than the noise."""
    none = _none(measure)
    if estimate.value is None or _judged(estimate, none, MORE, LESS) not in (MORE, LESS):
        return None
    return abs(estimate.value if none == 0 else math.log(estimate.value))


def _none(measure: ComparedMeasure) -> float:
    """What the estimate is where nothing differs."""
    return 0.0 if measure.question == QUALITY else 1.0


def _pairs(sweep: SweepResults, only: Mapping[str, str] | None) -> dict[str, list[Pair]]:
    """What is compared, by way."""
    pairs: dict[str, list[Pair]] = {}
    for group in sweep.groups:
        base = baseline_of(sweep, group)
        if base is None or base is group or not (group.finished and base.finished):
            continue
        if all(plain_text(group.label.get(axis)) == text for axis, text in (only or {}).items()):
            pairs.setdefault(_way(sweep, group), []).append(Pair(group, base))
    return pairs


def _is_way(sweep: SweepResults, axis: str) -> bool:
    """Whether the groups that are compared differ on this axis."""
    baseline = sweep.baseline or {}
    return axis in baseline or (STRATEGY in baseline and axis in OF_ONE_STRATEGY)


def _way(sweep: SweepResults, group: Group) -> str:
    cases = [axis for axis in sweep.axes if not _is_way(sweep, axis)]
    text = sweep.text_of(group, without=cases) or "all runs"
    return text.removeprefix(f"{STRATEGY} ")


def _sentence(sweep: SweepResults, way: str, pairs: Sequence[Pair]) -> str:
    speeds = [] if sweep.target is None else [OF[name] for name in TIMES]
    if sweep.target is None or "setup" in (sweep.baseline or {}):
        speeds = [RATE, *speeds]
    parts = (_part(sweep, measure, pairs) for measure in (*speeds, ACCURACY))
    return f"{_ways(sweep, way, pairs)}: {'; '.join(parts)}; {_runs(pairs)}."


def _ways(sweep: SweepResults, way: str, pairs: Sequence[Pair]) -> str:
    case = ""
    if len(pairs) > 1:
        axes = [heading_of(axis) for axis in shown_axes(sweep.axes) if not _is_way(sweep, axis)]
        case = f" in {len(pairs)} cases of {listed(axes, ', ', MOST_AXES)}"
    return f"{way} against {_way(sweep, pairs[0].base)}{case}"


def _what(sweep: SweepResults, measure: ComparedMeasure) -> str:
    text = TEXTS[measure.name]
    return f"{text} to {sweep.target.short}" if sweep.target and measure.name in TIMES else text


def _part(sweep: SweepResults, measure: ComparedMeasure, pairs: Sequence[Pair]) -> str:
    what, none = _what(sweep, measure), _none(measure)
    unit, form = ("points", POINTS) if none == 0 else ("times", FACTOR)
    found = [pair.estimate(measure) for pair in pairs]
    estimates = [each for each in found if isinstance(each, Estimate) and each.value is not None]
    if not estimates:
        return f"{what}: {listed(dict.fromkeys(map(str, found)), ' or ', MOST_TEXTS)}"
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

"""python -m harness compare A B: the differences of two groups, and whether they exceed the noise.

Whether they may be compared comes first, for speed, quality and time to a target.
"""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from harness.core.command_line import print_json
from harness.core.records import SWEEP
from harness.core.settings import UserError
from harness.read import table
from harness.read.labels import UNKNOWN, counted
from harness.read.records.comparable import (
    QUALITY,
    SPEED,
    TARGET,
    Verdict,
    all_beside_others,
    judge,
)
from harness.read.records.copies import run_key
from harness.read.records.groups import Group, counts_each_run
from harness.read.records.runs import Target, check_target, own_metrics_of, parse_target
from harness.read.records.selection import (
    OWN_OUTPUT,
    command_for_seeds,
    describe,
    differing,
    is_published,
    parse_selector,
    read_group,
    seeds_for_pairs,
)
from harness.read.statistics import Estimate, Noise, Repeats, difference, is_rate, ratio, spread

TOO_UNCERTAIN = "too uncertain to tell"


class Width(NamedTuple):
    """Of an interval: the ratio of its ends, or for a share the percentage points between them."""

    times: float
    points: float


# Of intervals that reach to both sides of no difference: wider ones say nothing, and of the widest
# the ends are not worth their digits.
WIDEST, WIDEST_SHOWN = Width(10.0, 20.0), Width(100.0, 100.0)
OF_UNCERTAIN = (
    f"{TOO_UNCERTAIN}: the interval reaches to both sides of no difference, and is more than "
    f"{WIDEST.times:.0f}-fold or {WIDEST.points:.0f} points wide"
)


def is_wider(estimate: Estimate, width: Width, is_ratio: bool) -> bool:
    """Whether the interval reaches to both sides of no difference and is wider than this. The
    estimate is a ratio, or in percentage points.
    """
    if estimate.judged(1.0 if is_ratio else 0.0) != Noise.WITHIN:
        return False
    low, high = estimate.ends
    return high > width.times * low if is_ratio else high - low > width.points


@dataclass(frozen=True)
class ComparedMeasure:
    """A number of a run, and how it and differences of it are written."""

    name: str
    title: str
    question: str
    form: str
    unit: str = ""
    factor: float = 1.0  # of a difference: shares differ by percentage points
    difference_form: str = "{:+,.3f}"
    whole_work: bool = False  # comparable only where as many samples were trained on

    @property
    def equal(self) -> float:
        """The estimate where nothing differs: 0 for quality, a difference; else 1, a ratio."""
        return 0.0 if self.question == QUALITY else 1.0

    @property
    def too_uncertain(self) -> str:
        """The judgement of an interval that is too wide, with what would make it narrower."""
        return f"{TOO_UNCERTAIN} (more {self._repeats} are needed)"

    def no_interval(self, repeats: int) -> str:
        """Takes the place of an interval that is too wide to be worth its numbers."""
        return f"no usable interval from {repeats} {self._repeats.removeprefix('quiet ')}"

    @property
    def _repeats(self) -> str:
        return "quiet runs" if counts_each_run(self.name) else "seeds"


POINTS = "points"  # the unit of differences of shares


def _share(name: str, title: str) -> ComparedMeasure:
    return ComparedMeasure(name, title, QUALITY, "{:.4f}", POINTS, 100.0, "{:+.2f}")


def _quality(name: str, title: str) -> ComparedMeasure:
    """A measure of quality without a unit, such as a loss."""
    return ComparedMeasure(name, title, QUALITY, "{:.4f}", difference_form="{:+.4f}")


EPOCH_TIME = "epoch_time_s"
SAMPLES, EPOCHS = "samples trained on", "epochs"  # the work of a run
MEASURES = (
    _share("accuracy", "accuracy"),
    _share("f1", "f1"),
    _quality("eval_loss", "eval loss"),
    _share("test_accuracy", "test accuracy"),
    _share("test_f1", "test f1"),
    _quality("test_loss", "test loss"),
    ComparedMeasure(
        "train_samples_per_s", "samples/s", SPEED, "{:,.1f}", "samples/s", 1.0, "{:+,.1f}"
    ),
    ComparedMeasure(EPOCH_TIME, "epoch time", SPEED, "{:,.2f}", "s", whole_work=True),
    ComparedMeasure("energy_j", "energy", SPEED, "{:,.0f}", "J", 1.0, "{:+,.1f}", whole_work=True),
    ComparedMeasure("peak_memory_gib", "peak memory", SPEED, "{:,.3f}", "GiB"),
    ComparedMeasure("joules_per_sample", "energy per sample", SPEED, "{:,.3f}", "J"),
    ComparedMeasure("tta_train_s", "training time to target", TARGET, "{:,.2f}", "s"),
    ComparedMeasure("tta_wall_s", "wall time to target", TARGET, "{:,.2f}", "s"),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One measure of both groups: the difference B - A for quality, or if a value is not above 0;
    else the ratio B / A.
    """

    measure: ComparedMeasure
    values: tuple[tuple[float, ...], tuple[float, ...]]
    estimate: Estimate | None  # None where a run missed the target
    is_ratio: bool

    @property
    def equal(self) -> float:
        """What the estimate is where nothing differs."""
        return 1.0 if self.is_ratio else 0.0

    @property
    def judged(self) -> Noise:
        assert self.estimate is not None
        return self.estimate.judged(self.equal)

    def text(self, value: float) -> str:
        """The estimate, or an end of its interval."""
        if self.is_ratio:
            return f"{value:.3f}"
        return self.measure.difference_form.format(self.measure.factor * value)

    @property
    def unit(self) -> str:
        return "times" if self.is_ratio else self.measure.unit

    def is_wider(self, width: Width) -> bool:
        """As for an estimate; differences of what is no share have no width that is too much."""
        assert self.estimate is not None
        if not self.is_ratio and self.measure.unit != POINTS:
            return False
        factor = 1.0 if self.is_ratio else self.measure.factor
        return is_wider(self.estimate.scaled(factor), width, self.is_ratio)

    @property
    def interval(self) -> str:
        assert self.estimate is not None
        low, high = self.estimate.low, self.estimate.high
        if low is None or high is None:
            return UNKNOWN
        if self.is_wider(WIDEST_SHOWN):
            return "too wide"
        return f"{self.text(low)} to {self.text(high)}"


@dataclass(frozen=True)
class Comparison:
    """The second group against the first."""

    groups: tuple[Group, Group]
    verdicts: dict[str, Verdict]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def title_of(measure: ComparedMeasure, target: Target | None) -> str:
    """What is compared, with the target that is to be reached."""
    if target is None or measure.question != TARGET:
        return measure.title
    return measure.title.replace("target", target.short)


def compare(one: Group, other: Group) -> Comparison:
    verdicts = judge(one, other)
    if one.target is None or one.target != other.target:
        del verdicts[TARGET]  # there is no target that both have
    rows, notes, recorded = [], [], set()
    own = (_quality(name, name) for name in own_metrics_of((*one.runs, *other.runs)))
    for measure in (*MEASURES, *own):
        values, others = (group.repeats(measure.name) for group in (one, other))
        if measure.question not in verdicts or not values or not others:
            continue
        recorded.add(measure.question)
        if verdicts[measure.question].reasons:
            continue
        if work := differing_work(measure, one, other):
            notes.append(
                f"{title_of(measure, one.target)} is left out: {work} differ "
                f"({one.name} {work_of(one, work)}, {other.name} {work_of(other, work)})"
            )
            continue
        rows.append(_row(replace(measure, title=title_of(measure, one.target)), values, others))
    if one.finished and other.finished:
        shown = {row.measure.question for row in rows}
        for question, verdict in verdicts.items():
            if question not in recorded or not (verdict.reasons or question in shown):
                verdict.reasons.insert(0, "no measure to compare")
    return Comparison((one, other), verdicts, tuple(rows), tuple(notes))


def _row(measure: ComparedMeasure, one: Repeats, other: Repeats) -> Row:
    values = tuple(one.values()), tuple(other.values())
    both = (*values[0], *values[1])
    is_ratio = measure.question != QUALITY and min(both) > 0
    if not all(map(math.isfinite, both)):
        return Row(measure, values, None, is_ratio)
    return Row(measure, values, (ratio if is_ratio else difference)(other, one), is_ratio)


def differing_work(measure: ComparedMeasure, one: Group, other: Group) -> str | None:
    """The kind of work that differs, for a measure of whole runs: the samples of a run, and for the
    time of an epoch also the number of epochs; None where it is the same.
    """
    if not measure.whole_work:
        return None
    kinds = (SAMPLES, EPOCHS) if measure.name == EPOCH_TIME else (SAMPLES,)
    return next((kind for kind in kinds if work_of(one, kind) != work_of(other, kind)), None)


def work_of(group: Group, kind: str) -> str:
    """The amounts of work in a group, as text; two unknown amounts are the same text."""
    name = {SAMPLES: "samples", EPOCHS: "epochs_done"}[kind]
    amounts = {run.measures.get(name) for run in group.finished}
    return " and ".join("unknown" if v is None else f"{v:,.0f}" for v in sorted(amounts, key=str))


def sentence(row: Row, groups: tuple[Group, Group]) -> str:
    """The difference, and whether it exceeds the noise."""
    measure, (one, other) = row.measure, groups
    estimate = row.estimate
    if estimate is None:
        reached = [group.reached for group in groups]
        return (
            f"{measure.title}: the target is reached by {reached[0]} runs of {one.name} and "
            f"{reached[1]} of {other.name}: nothing can be computed"
        )
    assert estimate.value is not None
    is_equal = f"{other.name} is equal to {one.name}"
    if row.judged == Noise.EQUAL:
        return f"{measure.title}: {is_equal}{_repeats(row)}"
    if estimate.value == row.equal:
        text = is_equal
    elif row.is_ratio:
        text = f"{other.name} has {row.text(estimate.value)} times that of {one.name}"
    else:
        more = "more" if estimate.value > 0 else "less"
        size = f"{row.text(abs(estimate.value)).lstrip('+')} {row.unit}".rstrip()
        text = f"{other.name} has {size} {more} than {one.name}"
    text = f"{measure.title}: {text}"
    if estimate.low is None:
        few = "one pair of the same seed" if _pairs(row) else "one value on a side"
        return f"{text}; with {few} its noise is unknown"
    interval = f"95 % interval {row.interval}"
    if row.is_wider(WIDEST_SHOWN):
        interval = measure.no_interval(estimate.n)
    return f"{text}, {interval}{_repeats(row)}: {judgement(row)}"


def _repeats(row: Row) -> str:
    one, other = map(len, row.values)
    if pairs := _pairs(row):
        what = "run" if counts_each_run(row.measure.name) else "seed"
        return f", {counted(pairs, what)} paired by seed"
    return f", {one} and {other} values, not paired" if min(one, other) > 1 else ""


def _pairs(row: Row) -> int:
    """How many seeds both sides have; 0 if values are not paired, or each side has one."""
    assert row.estimate is not None
    several = max(map(len, row.values)) > 1
    return row.estimate.n if row.estimate.paired and several else 0


def judgement(row: Row) -> str:
    if row.is_wider(WIDEST):
        return row.measure.too_uncertain
    noise = "the noise of runs" if counts_each_run(row.measure.name) else "the noise of seeds"
    words = {
        Noise.BEYOND: f"more than {noise}",
        Noise.WITHIN: f"within {noise}",
        Noise.UNKNOWN: "noise is unknown",
    }
    return words.get(row.judged, row.judged)


LEGEND = (
    "A and B: mean ± sample standard deviation (rates: harmonic mean); B against A: B - A for "
    "quality, the ratio of geometric means for all else; interval: 95 %, Student's t over pairs of "
    "the seeds that A and B share, else Welch's, for a ratio by its logarithm; each measure is "
    "judged by itself: of twenty without any difference, one looks like more than noise; "
    f"{OF_UNCERTAIN}"
)
HEADINGS = ("", "A", "B", "B against A", "95 % interval", "")
NO_DECIMALS = 1000  # standard deviation from which on decimals of a mean say nothing
SEEDS = 3  # fewer give no interval, or too wide a one


def run(options: argparse.Namespace) -> int:
    target = None if options.target is None else parse_target(options.target)
    more = () if options.target is None else ("--target", options.target)
    one = read_group("A", options.a, target, options.b, ("compare", "{}", options.b, *more))
    other = read_group("B", options.b, target, options.a, ("compare", options.a, "{}", *more))
    _check_apart(one, other)
    if target is not None:
        check_target(target, (*one.runs, *other.runs))
    comparison = compare(one, other)
    print_json(as_fields(comparison)) if options.json else show(comparison)
    return 0 if comparison.rows else 2


def as_fields(comparison: Comparison) -> dict[str, Any]:
    """The comparison as plain values, for a program."""
    unlike = differing(*comparison.groups)
    return {
        "sides": {group.name: describe(group) for group in comparison.groups},
        "settings_that_differ": {name: {"A": a, "B": b} for name, a, b in unlike},
        "verdicts": {
            question: {"comparable": not verdict.reasons, **asdict(verdict)}
            for question, verdict in comparison.verdicts.items()
        },
        "measures": [
            {
                "name": row.measure.name,
                "A": row.values[0],
                "B": row.values[1],
                "ratio": asdict(row.estimate) if row.estimate and row.is_ratio else None,
                "difference": asdict(row.estimate) if row.estimate and not row.is_ratio else None,
                "judgement": row.estimate and judgement(row),
            }
            for row in comparison.rows
        ],
        "notes": [*comparison.notes, *more_seeds(comparison)],
        "not_read": [line for group in comparison.groups for line in group.not_read],
    }


def _check_apart(one: Group, other: Group) -> None:
    """UserError where a run, or copies of it, are in both groups, unless the groups are the same:
    these are found to be equal.
    """
    ours, theirs = (
        {run_key(folder) or folder.path.absolute(): folder.path.absolute() for folder in of_group}
        for of_group in ([run.recorded_folder for run in group.runs] for group in (one, other))
    )
    if ours.keys() != theirs.keys() and (both := ours.keys() & theirs.keys()):
        path, copy = min((ours[key], theirs[key]) for key in both)
        raise UserError(f"{path} is on both sides{'' if copy == path else f', there as {copy}'}")


def show(comparison: Comparison) -> None:
    screen = table.screen()
    for group in comparison.groups:
        screen.print(f"{group.name}: {describe(group)}")
    unlike = [f"{n} (A {a}, B {b})" for n, a, b in differing(*comparison.groups)]
    screen.print(f"training settings that differ: {', '.join(unlike) or 'none'}")
    for question, verdict in comparison.verdicts.items():
        target = comparison.groups[0].target
        what = f"time to {target.short}" if target and question == TARGET else question
        screen.print(f"{what}: {_is_comparable(question, comparison)}")
        for text in (*verdict.reasons, *(f"note: {note}" for note in verdict.notes)):
            screen.print(f"  {text}")
    for note in comparison.notes:
        screen.print(note)
    if comparison.rows:
        table.show(
            table.Table(HEADINGS, [_cells(row, comparison.groups) for row in comparison.rows])
        )
        for row in comparison.rows:
            screen.print(sentence(row, comparison.groups))
        screen.print(LEGEND, style="dim")
    for line in (*more_seeds(comparison), *_why(comparison)):
        screen.print(line)


def _why(comparison: Comparison) -> Iterator[str]:
    """The command that explains the difference, where one side has more processes, both are the
    same task with comparable speeds, and their steps were timed here.
    """
    few, many = sorted(comparison.groups, key=lambda group: group.recorded.processes or 0)
    more = 0 < (few.recorded.processes or 0) < (many.recorded.processes or 0)
    same = all(few.identity[name] == many.identity[name] for name in ("script", "model"))
    imported = few.recorded.imported or many.recorded.imported
    if more and same and not imported and not comparison.verdicts[SPEED].reasons:
        words = ("python", "-m", "harness", "explain", many.selector, few.selector)
        yield f"next: {shlex.join(words)}"


def _is_comparable(question: str, comparison: Comparison) -> str:
    if comparison.verdicts[question].reasons:
        return "not comparable"
    is_disturbed = question != QUALITY and all(map(all_beside_others, comparison.groups))
    return f"comparable{', as far as disturbed runs are' if is_disturbed else ''}"


def _cells(row: Row, groups: tuple[Group, Group]) -> list[str]:
    measure, sides = row.measure, zip(row.values, groups, strict=True)
    means = [_mean(row, values, group) for values, group in sides]
    # Shares are written as such, and differ by points; samples/s says its unit itself.
    has_unit = bool(measure.unit) and measure.factor == 1 and measure.unit != measure.title
    title = f"{measure.title} ({measure.unit})" if has_unit else measure.title
    if row.estimate is None or row.estimate.value is None:
        return [title, *means, UNKNOWN, UNKNOWN, "target missed"]
    against = f"{row.text(row.estimate.value)} {row.unit}".rstrip()
    return [title, *means, against, row.interval, judgement(row)]


def _mean(row: Row, values: tuple[float, ...], group: Group) -> str:
    if not all(map(math.isfinite, values)):
        return f"{group.reached} reach it"
    stats = spread(values, is_rate(row.measure.name))
    is_coarse = (stats.sd or 0.0) >= NO_DECIMALS
    return stats.text("{:,.0f}" if is_coarse else row.measure.form)


def more_seeds(comparison: Comparison) -> list[str]:
    """For each side with too few seeds, the command that adds seeds which the other side has too,
    to make the noise known.
    """
    lines = []
    for n, group in enumerate(comparison.groups):
        # Repeats of a seed count for speed only, so speed decides only where nothing else is known.
        known = (row for row in comparison.rows if row.estimate is not None)
        counts = [(counts_each_run(row.measure.name), *_counts(row, n)) for row in known]
        _, few, pairs = min(counts, default=(False, SEEDS, 0))
        seeds = seeds_for_pairs(*comparison.groups, SEEDS - pairs) if few < SEEDS else []
        if seeds := [seed for seed in seeds if seed not in group.seeds]:
            noise = "noise is unknown" if few == 1 else "a wide interval"
            command = command_for_seeds(group, seeds)
            imported = group.recorded.imported
            other = (
                "only its source can measure more"
                if imported
                else "run its script with other seeds"
            )
            more = f"more: {command}" if command else other
            if command and is_published(group.recorded):
                more += f" (into {OWN_OUTPUT}, not beside published records: compare all of yours)"
            elif command and (parse_selector(group.selector)[0] / SWEEP).is_file():
                more += " (this selection shows them once `seeds` in the sweep's file lists them)"
            has = f"has {counted(few, 'seed')}"
            if len(group.seeds) > few == pairs:
                has = f"shares {counted(few, 'seed')} with {comparison.groups[1 - n].name}"
            lines.append(f"{group.name} {has}: {noise}; {more}")
    return lines


def _counts(row: Row, side: int) -> tuple[int, int]:
    """The values of a side that count, and how many pairs there are."""
    assert row.estimate is not None
    pairs = row.estimate.n if row.estimate.paired else 0
    return pairs or len(row.values[side]), pairs

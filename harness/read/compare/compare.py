"""python -m harness compare A B: what two sides differ by, and whether that is more than noise."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Hashable
from dataclasses import asdict, dataclass
from typing import Any

from harness.core.command_line import print_json
from harness.core.settings import UserError
from harness.read import table
from harness.read.compare.comparable import QUALITY, SPEED, TARGET, Verdict, judge
from harness.read.records.groups import Group, enumerate_equal
from harness.read.records.runs import Run, parse_target
from harness.read.records.selection import command_for_seeds, describe, differing, read_group
from harness.read.statistics import Estimate, difference, is_rate, ratio, spread


@dataclass(frozen=True)
class ComparedMeasure:
    """A number of a run, and how it and differences of it are written."""

    name: str
    title: str
    kind: str
    form: str
    unit: str = ""
    factor: float = 1.0  # of a difference: shares are told apart in percentage points
    difference_form: str = "{:+,.3f}"
    whole_work: bool = False  # comparable only where as many samples were trained on


def _share(name: str, title: str) -> ComparedMeasure:
    return ComparedMeasure(name, title, QUALITY, "{:.4f}", "points", 100.0, "{:+.2f}")


MEASURES = (
    _share("accuracy", "accuracy"),
    _share("f1", "f1"),
    ComparedMeasure("eval_loss", "eval loss", QUALITY, "{:.4f}", difference_form="{:+.4f}"),
    _share("test_accuracy", "test accuracy"),
    _share("test_f1", "test f1"),
    ComparedMeasure("test_loss", "test loss", QUALITY, "{:.4f}", difference_form="{:+.4f}"),
    ComparedMeasure(
        "train_samples_per_s", "samples/s", SPEED, "{:,.1f}", "samples/s", 1.0, "{:+,.1f}"
    ),
    ComparedMeasure("epoch_time_s", "epoch time", SPEED, "{:,.2f}", "s", whole_work=True),
    ComparedMeasure("energy_j", "energy", SPEED, "{:,.0f}", "J", 1.0, "{:+,.1f}", whole_work=True),
    ComparedMeasure("joules_per_sample", "energy per sample", SPEED, "{:,.3f}", "J"),
    ComparedMeasure("tta_train_s", "training time to target", TARGET, "{:,.2f}", "s"),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One measure on both sides; no difference where a run missed the target."""

    measure: ComparedMeasure
    values: tuple[tuple[float, ...], tuple[float, ...]]
    difference: Estimate | None
    mean: float  # of the first side, of which per cents are

    def percent(self, value: float | None) -> float | None:
        return None if value is None or self.mean == 0 else 100 * value / self.mean


@dataclass(frozen=True)
class Comparison:
    """The second side less the first."""

    sides: tuple[Group, Group]
    verdicts: dict[str, Verdict]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def compare(one: Group, other: Group) -> Comparison:
    verdicts = judge(one, other)
    if one.target is None or one.target != other.target:
        del verdicts[TARGET]  # nobody said what is to be reached
    rows, notes = [], []
    for measure in MEASURES:
        if measure.kind not in verdicts or verdicts[measure.kind].reasons:
            continue
        both = [values_of(group, measure) for group in (one, other)]
        if not all(both):
            continue
        if measure.whole_work and (work := _work(one)) != _work(other):
            notes.append(
                f"{measure.title} is left out: samples trained on differ "
                f"({one.name} {work}, {other.name} {_work(other)})"
            )
            continue
        rows.append(_row(measure, both[0], both[1]))
    return Comparison((one, other), verdicts, tuple(rows), tuple(notes))


def _row(measure: ComparedMeasure, one: dict[Hashable, float], other: dict[Hashable, float]) -> Row:
    values = tuple(one.values()), tuple(other.values())
    rate = is_rate(measure.name)
    mean = spread(values[0], rate).mean
    assert mean is not None
    if not all(map(math.isfinite, (*values[0], *values[1]))):
        return Row(measure, values, None, math.inf)
    if measure.kind == QUALITY or min(*values[0], *values[1]) <= 0:
        return Row(measure, values, difference(other, one), mean)
    # Times and rates differ by factors: the ratio, in units of A's mean.
    return Row(measure, values, ratio(other, one, rate).scaled(mean, -mean), mean)


def values_of(group: Group, measure: ComparedMeasure) -> dict[Hashable, float]:
    """By what repeats them. Repeats of one seed tell of the noise of time, of quality they do not:
    there each seed has one value, the mean of its repeats."""
    found: dict[Hashable, list[float]] = {}
    for n, run in enumerate_equal(group.finished):
        if measure.name in run.measures:
            key = _key(group, run, n, measure.kind == SPEED)
            found.setdefault(key, []).append(run.measures[measure.name])
    return {key: statistics.mean(values) for key, values in sorted_by_text(found)}


def sorted_by_text(found: dict[Hashable, list[float]]) -> list[tuple[Hashable, list[float]]]:
    return sorted(found.items(), key=lambda item: str(item[0]))


def _key(group: Group, run: Run, n: int, each_repeat: bool) -> Hashable:
    if run.seed is None:
        return group.name, run.path  # pairs with nothing
    return (run.repetition, n) if each_repeat else run.seed


def _work(group: Group) -> str:
    """Samples of a run; unknown is no less the same on both sides."""
    found = {run.measures.get("samples") for run in group.finished}
    return " and ".join("unknown" if v is None else f"{v:,.0f}" for v in sorted(found, key=str))


def sentence(row: Row, sides: tuple[Group, Group]) -> str:
    """What the difference is, and whether it says anything."""
    measure, (one, other) = row.measure, sides
    if row.difference is None:
        missed = [sum(map(math.isinf, values)) for values in row.values]
        return (
            f"{measure.title}: the target is missed by {missed[0]} of {len(row.values[0])} runs of "
            f"{one.name} and {missed[1]} of {len(row.values[1])} of {other.name}: "
            "no difference can be computed"
        )
    found = row.difference
    assert found.value is not None
    if found.value == 0 and (found.low in (None, 0)):
        return f"{measure.title}: {other.name} is equal to {one.name}{_how(row)}"
    more = "more" if found.value > 0 else "less"
    size = absolute(measure, abs(found.value)).lstrip("+")
    share = row.percent(abs(found.value))
    said = f"{measure.title}: {other.name} has {size} {more} than {one.name}"
    said += f" ({share:.1f} %)" if share is not None else ""
    if found.low is None or found.high is None:
        return f"{said}; with one value on a side its noise is unknown"
    said += f", 95 % interval {interval(row)}{_how(row)}"
    return f"{said}: {judgement(row)}"


def _how(row: Row) -> str:
    assert row.difference is not None
    one, other = map(len, row.values)
    if row.difference.paired:
        what = "seeds" if row.measure.kind != SPEED else "runs"
        return f", {one} {what} paired by seed"
    return f", {one} and {other} values, not paired" if min(one, other) > 1 else ""


def judgement(row: Row) -> str:
    assert row.difference is not None
    noise = "the noise of runs" if row.measure.kind == SPEED else "the noise of seeds"
    beyond = row.difference.is_beyond_noise
    if beyond is None:
        return "noise is unknown" if row.difference.low is None else "no spread to judge noise by"
    return f"more than {noise}" if beyond else f"within {noise}"


def absolute(measure: ComparedMeasure, value: float) -> str:
    return f"{measure.difference_form.format(measure.factor * value)} {measure.unit}".rstrip()


def interval(row: Row) -> str:
    assert row.difference is not None
    low, high = row.difference.low, row.difference.high
    if low is None or high is None:
        return "-"
    form, factor = row.measure.difference_form, row.measure.factor
    return f"{form.format(factor * low)} to {form.format(factor * high)}"


LEGEND = (
    "difference: B less A; interval: 95 %, Student's t, of pairs where A and B have the same "
    "seeds, else Welch's, for times and rates of the logarithm of their ratio; per cent are of A's "
    "mean, which is harmonic for rates; each measure is judged by itself: of twenty without any "
    "difference one looks like more than noise"
)


HEADINGS = ("", "A", "B", "difference", "95 % interval", "%", "95 % interval", "")
SEEDS = 3  # from which on an interval says something


def run(options: argparse.Namespace) -> int:
    target = None if options.target is None else parse_target(options.target)
    one, other = (read_group(n, w, target) for n, w in (("A", options.a), ("B", options.b)))
    _check_apart(one, other)
    found = compare(one, other)
    print_json(as_fields(found)) if options.json else show(found)
    return 0 if found.rows else 2


def as_fields(found: Comparison) -> dict[str, Any]:
    """The comparison as plain values, for a program."""
    return {
        "sides": {group.name: describe(group) for group in found.sides},
        "settings_that_differ": {n: {"A": a, "B": b} for n, a, b in differing(*found.sides)},
        "verdicts": {
            kind: {"comparable": not v.reasons, "reasons": v.reasons, "notes": v.notes}
            for kind, v in found.verdicts.items()
        },
        "measures": [
            {
                "name": row.measure.name,
                "A": row.values[0],
                "B": row.values[1],
                "difference": row.difference and asdict(row.difference),
                "judgement": row.difference and judgement(row),
            }
            for row in found.rows
        ],
        "notes": [*found.notes, *more_seeds(found)],
    }


def _check_apart(one: Group, other: Group) -> None:
    """A run on both sides would make them alike; the very same sides are seen to be equal."""
    paths = [{run.directory.path.absolute() for run in group.runs} for group in (one, other)]
    if paths[0] != paths[1] and (both := paths[0] & paths[1]):
        raise UserError(f"{min(both)} is on both sides")


def show(found: Comparison) -> None:
    screen = table.screen()
    one, other = found.sides
    for group in found.sides:
        screen.print(f"{group.name}: {describe(group)}")
    unlike = [f"{n} (A {a}, B {b})" for n, a, b in differing(one, other)]
    screen.print(f"settings that differ: {', '.join(unlike) or 'none'}")
    for kind, verdict in found.verdicts.items():
        screen.print(f"{kind}: {'not comparable' if verdict.reasons else 'comparable'}")
        for text in (*verdict.reasons, *(f"note: {note}" for note in verdict.notes)):
            screen.print(f"  {text}")
    for note in found.notes:
        screen.print(note)
    if found.rows:
        table.show(table.table_of(HEADINGS, map(_cells, found.rows)))
        for row in found.rows:
            screen.print(sentence(row, found.sides))
        screen.print(LEGEND, style="dim")
    elif not any(verdict.reasons for verdict in found.verdicts.values()):
        screen.print("nothing is known on both sides")
    for line in more_seeds(found):
        screen.print(line)


def _cells(row: Row) -> list[str]:
    means = [_mean(row, values) for values in row.values]
    if row.difference is None or row.difference.value is None:
        return [row.measure.title, *means, "-", "-", "-", "-", "target missed"]
    low, high = row.percent(row.difference.low), row.percent(row.difference.high)
    percent = row.percent(row.difference.value)
    return [
        row.measure.title,
        *means,
        absolute(row.measure, row.difference.value),
        interval(row),
        "-" if percent is None else f"{percent:+.1f}",
        "-" if low is None or high is None else f"{low:+.1f} to {high:+.1f}",
        judgement(row),
    ]


def _mean(row: Row, values: tuple[float, ...]) -> str:
    found = spread(values, is_rate(row.measure.name))
    assert found.mean is not None
    if math.isinf(found.mean):
        return f"{sum(map(math.isfinite, values))} of {len(values)} reach it"
    text = row.measure.form.format(found.mean)
    return text if found.sd is None else f"{text} ± {row.measure.form.format(found.sd)}"


def more_seeds(found: Comparison) -> list[str]:
    """How noise that is unknown becomes known."""
    lines = []
    for n, group in enumerate(found.sides):
        few = min(
            (len(row.values[n]) for row in found.rows if row.measure.kind != SPEED),
            default=min((len(row.values[n]) for row in found.rows), default=SEEDS),
        )
        if few >= SEEDS:
            continue
        said = f"{group.name} has {few} seed{'s' if few > 1 else ''}"
        command = command_for_seeds(group, SEEDS - few)
        how = f"; more: {command}" if command else "; only its source can measure more"
        lines.append(f"{said}: {'noise is unknown' if few == 1 else 'a wide interval'}{how}")
    return lines

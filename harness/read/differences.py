"""What two sides differ by: each measure with its interval, and whether that is more than noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable
from dataclasses import dataclass

from harness.read.comparable import QUALITY, SPEED, TARGET, Verdict, judge
from harness.read.groups import enumerate_equal
from harness.read.sides import Record, Side
from harness.read.statistics import Difference, difference


@dataclass(frozen=True)
class Measure:
    """A number of a run, and how it and differences of it are written."""

    name: str
    title: str
    kind: str
    form: str
    unit: str = ""
    factor: float = 1.0  # of a difference: shares are told apart in percentage points
    difference_form: str = "{:+,.3f}"
    whole_work: bool = False  # comparable only where as many samples were trained on


def _share(name: str, title: str) -> Measure:
    return Measure(name, title, QUALITY, "{:.4f}", "points", 100.0, "{:+.2f}")


MEASURES = (
    _share("accuracy", "accuracy"),
    _share("f1", "f1"),
    Measure("eval_loss", "eval loss", QUALITY, "{:.4f}", difference_form="{:+.4f}"),
    _share("test_accuracy", "test accuracy"),
    _share("test_f1", "test f1"),
    Measure("test_loss", "test loss", QUALITY, "{:.4f}", difference_form="{:+.4f}"),
    Measure("train_samples_per_s", "samples/s", SPEED, "{:,.1f}", "samples/s", 1.0, "{:+,.1f}"),
    Measure("epoch_time_s", "epoch time", SPEED, "{:,.2f}", "s", whole_work=True),
    Measure("energy_j", "energy", SPEED, "{:,.0f}", "J", 1.0, "{:+,.1f}", whole_work=True),
    Measure("joules_per_sample", "energy per sample", SPEED, "{:,.3f}", "J"),
    Measure("tta_train_s", "training time to target", TARGET, "{:,.2f}", "s"),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One measure on both sides; no difference where a run missed the target."""

    measure: Measure
    values: tuple[tuple[float, ...], tuple[float, ...]]
    difference: Difference | None
    mean: float  # of the first side, of which per cents are

    def percent(self, value: float | None) -> float | None:
        return None if value is None or self.mean == 0 else 100 * value / self.mean


@dataclass(frozen=True)
class Comparison:
    """The second side less the first."""

    sides: tuple[Side, Side]
    verdicts: dict[str, Verdict]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def compare(one: Side, other: Side) -> Comparison:
    verdicts = judge(one, other)
    if one.target is None or one.target != other.target:
        del verdicts[TARGET]  # nobody said what is to be reached
    rows, notes = [], []
    for measure in MEASURES:
        if measure.kind not in verdicts or verdicts[measure.kind].reasons:
            continue
        both = [values_of(side, measure) for side in (one, other)]
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


def _row(measure: Measure, one: dict[Hashable, float], other: dict[Hashable, float]) -> Row:
    finite = all(math.isfinite(value) for values in (one, other) for value in values.values())
    return Row(
        measure,
        (tuple(one.values()), tuple(other.values())),
        difference(other, one) if finite else None,
        statistics.mean(one.values()) if finite else math.inf,
    )


def values_of(side: Side, measure: Measure) -> dict[Hashable, float]:
    """By what repeats them. Repeats of one seed tell of the noise of time, of quality they do not:
    there each seed has one value, the mean of its repeats."""
    found: dict[Hashable, list[float]] = {}
    runs = enumerate_equal(record.run for record in side.finished)
    for record, (n, run) in zip(side.finished, runs, strict=True):
        if measure.name in run.measures:
            key = _key(side, record, n, measure.kind == SPEED)
            found.setdefault(key, []).append(run.measures[measure.name])
    return {key: statistics.mean(values) for key, values in sorted_by_text(found)}


def sorted_by_text(found: dict[Hashable, list[float]]) -> list[tuple[Hashable, list[float]]]:
    return sorted(found.items(), key=lambda item: str(item[0]))


def _key(side: Side, record: Record, n: int, each_repeat: bool) -> Hashable:
    if record.seed is None:
        return side.name, record.run.path  # pairs with nothing
    return (record.seed, record.run.label.get("repeat"), n) if each_repeat else record.seed


def _work(side: Side) -> str:
    """Samples of a run; unknown is no less the same on both sides."""
    found = {record.run.measures.get("samples") for record in side.finished}
    return " and ".join("unknown" if v is None else f"{v:,.0f}" for v in sorted(found, key=str))


# ---- in words ----


def sentence(row: Row, sides: tuple[Side, Side]) -> str:
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


def absolute(measure: Measure, value: float) -> str:
    return f"{measure.difference_form.format(measure.factor * value)} {measure.unit}".rstrip()


def interval(row: Row) -> str:
    assert row.difference is not None
    low, high = row.difference.low, row.difference.high
    if low is None or high is None:
        return "-"
    form, factor = row.measure.difference_form, row.measure.factor
    return f"{form.format(factor * low)} to {form.format(factor * high)}"

"""python -m harness batches: the batch size beyond which larger batches stop paying off.

Samples to a target as a function of the batch: E(B) = Emin (1 + B / Bcrit).

Below Bcrit a larger batch needs few more samples; at Bcrit it needs twice the least; beyond Bcrit
samples grow in proportion to the batch: as many updates, each of more work (McCandlish et al. 2018,
arXiv 1812.06162). The form is a straight line in B, so the fit has a closed form.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from rich.console import Console

from harness.core.command_line import print_json
from harness.core.identity import number
from harness.core.records.summary import QUALITY_FIELDS
from harness.core.settings import UserError
from harness.read.labels import UNKNOWN, counted
from harness.read.measures import is_timed
from harness.read.records.comparable import (
    LOAD,
    MISSES,
    TARGET,
    disturbed,
    judge,
    measured_against,
)
from harness.read.records.groups import Group, by_key, by_seed
from harness.read.records.recorded import is_number
from harness.read.records.runs import Run, Target, check_target, parse_target
from harness.read.records.selection import read_selected
from harness.read.statistics import (
    ROUNDING,
    Estimate,
    Noise,
    Repeats,
    leaders,
    spread,
    student_t,
)
from harness.read.table import Table, screen, show

BATCHES = 3  # a line goes through any two points
# If a measured mean is off the line by more than this share, the form does not fit the data.
TOLERANCE = 0.25


@dataclass(frozen=True)
class Interpolated:
    """Where between two evaluations one run passed the target."""

    samples: float  # infinite: it missed the target
    early: bool  # before its first evaluation: the samples are an upper bound
    value: float = math.nan  # of the evaluation that reached it


@dataclass(frozen=True)
class Fit:
    """Emin and Bcrit; None where the data do not determine them, for the reason in `why`."""

    least_samples: float | None  # Emin
    critical: float | None  # Bcrit
    low: float | None = None  # its 95 % interval; an open end is infinite
    high: float | None = None
    why: str | None = None

    def samples(self, batch: float) -> float | None:
        if self.least_samples is None or self.critical is None:
            return None
        return self.least_samples * (1 + batch / self.critical)


def interpolated(rows: Sequence[Mapping[str, object]], target: Target) -> Interpolated | None:
    """Samples to the target, in a straight line between the two evaluations around it.

    The fit uses them, as a whole epoch is too coarse a step; None where a row lacks the numbers.
    """
    samples = 0.0
    before: float | None = None
    for n, row in enumerate(rows):
        value, more = row.get(target.metric), row.get("samples")
        if not is_number(value) or not is_number(more):
            return None
        if target.reached(value):
            share = 1.0 if before is None else (target.value - before) / (value - before)
            return Interpolated(samples + share * more, n == 0, value)
        samples, before = samples + more, value
    return Interpolated(math.inf, False) if rows else None


def fit(values: Mapping[float, Sequence[float]]) -> Fit:
    """Fit by least squares over all seeds; an error counts relative to the mean of its batch.

    The interval is Fieller's, of a ratio of two estimates: it is open where the data do not show
    that samples grow with the batch at all.
    """
    if len(values) < BATCHES:
        many = "1 batch" if len(values) == 1 else f"{len(values)} batches"
        return _undetermined(f"{many} can be fitted; {BATCHES} are needed")
    means = {batch: statistics.fmean(samples) for batch, samples in values.items()}
    runs = [(batch, each) for batch, samples in values.items() for each in samples]
    batches, samples = np.array(runs).T
    weights = np.array([1 / means[batch] ** 2 for batch in batches])
    lines = np.stack([np.ones_like(batches), batches], axis=1)
    inverse = np.linalg.inv(lines.T @ (weights[:, None] * lines))
    (base, slope) = inverse @ (lines.T @ (weights * samples))
    residuals = samples - lines @ (base, slope)
    freedom = len(samples) - 2
    square = float((weights * residuals**2).sum())
    covariance = inverse * square / freedom
    error = max(abs(base + slope * batch - mean) / mean for batch, mean in means.items())
    if error > TOLERANCE:
        return _undetermined(
            f"samples do not grow in a straight line with the batch: {100 * error:.0f} % off"
        )
    low, high = _ratio(base, slope, covariance, student_t(freedom))
    if high is None:
        bound = low if square > ROUNDING else None  # without any spread it would be absurd
        return _undetermined("samples do not grow with the batch by more than noise", bound)
    if base <= 0:
        return _undetermined(
            "samples grow as fast as the batch: smaller batches are needed to see where that begins"
        )
    return Fit(float(base), float(base / slope), low, high)


def _undetermined(why: str, low: float | None = None) -> Fit:
    return Fit(None, None, low, why=why)


def _ratio(
    base: float, slope: float, covariance: np.ndarray, t: float
) -> tuple[float | None, float | None]:
    """Both ends of the interval of base / slope; (low or None, None) where it has no upper end."""
    steep = slope**2 - t**2 * covariance[1, 1]
    middle = base * slope - t**2 * covariance[0, 1]
    flat = base**2 - t**2 * covariance[0, 0]
    root = middle**2 - steep * flat
    if slope <= 0 or steep <= 0:
        if root <= 0 or steep >= 0 or flat <= 0:
            return None, None
        # Negative values would be a falling line; the interval begins at this end.
        end = max((middle - math.sqrt(root)) / steep, (middle + math.sqrt(root)) / steep)
        return (float(end) if end > 0 else None), None
    half = math.sqrt(max(root, 0))
    return float(max((middle - half) / steep, 0.0)), float((middle + half) / steep)


LEGEND = (
    "samples to target, train s: to the end of the first epoch that reaches it, mean ± sd; "
    "interpolated: between the two evaluations around the target; Bcrit: the batch at which twice "
    "the least samples are needed, of E = Emin (1 + B / Bcrit) fitted by least squares over the "
    "interpolated samples of all seeds (arXiv 1812.06162); a batch is only as good as its learning "
    "rate, so Bcrit is that of these rates; times of two batches are compared as `compare` does: "
    "by the seeds that both have, if any, as the ratio of geometric means"
)
HEADINGS = (
    "batch", "lr", "runs", "samples to target", "interpolated", "fitted", "samples/s", "train s",
)  # fmt: skip
# Settings in which the runs of a family may differ.
OF_A_BATCH = ("per_gpu_batch", "grad_acc", "lr")


@dataclass(frozen=True)
class Batch:
    """The runs of one effective batch."""

    size: int
    lr: float | None
    group: Group
    by_seed: Mapping[Hashable, Sequence[Interpolated]]  # of the finished runs that record enough

    @property
    def passed(self) -> list[Interpolated]:
        return [at for repeats in self.by_seed.values() for at in repeats]

    @property
    def failed(self) -> int:
        return len(self.group.runs) - len(self.group.finished)

    @property
    def unknown(self) -> int:
        """Finished runs whose epochs do not tell when the target was reached."""
        return len(self.group.finished) - len(self.passed)

    @property
    def reached(self) -> bool:
        """Whether every run reached the target: then the time to the end of that epoch is known."""
        reached = all(math.isfinite(at.samples) for at in self.passed)
        return bool(self.passed) and not self.failed and not self.unknown and reached

    @property
    def usable(self) -> bool:
        """Whether it can be fitted: no run reached the target before the first evaluation."""
        return self.reached and not any(at.early for at in self.passed)

    @property
    def unlike_passes(self) -> str | None:
        """A text where updates were made in unlike passes, which take unlike times; else None."""
        passes = {(run.identity["per_gpu_batch"], run.identity["grad_acc"] or 1)
                  for run in self.group.finished}  # fmt: skip
        if len(passes) < 2:
            return None
        texts = (f"{own} x {acc}" for own, acc in sorted(passes, key=str))
        return f"no times of batch {self.size}: its runs made unlike passes ({', '.join(texts)})"

    @property
    def interpolated_samples(self) -> list[float]:
        """For each seed the mean of its repeats, which do not count as further seeds."""
        seeds = self.by_seed.values()
        return [statistics.fmean(at.samples for at in repeats) for repeats in seeds]

    @property
    def rate(self) -> float | None:
        return None if self.unlike_passes else self.group.mean("train_samples_per_s")

    def measured(self, name: str) -> Repeats:
        """Seed -> time or samples to the end of the first epoch that reached the target."""
        if self.unlike_passes and is_timed(name):
            return {}
        return self.group.repeats(name)


@dataclass(frozen=True)
class Family:
    """Runs that differ in their batch alone, and in the learning rate that goes with it."""

    name: str
    batches: tuple[Batch, ...]

    @cached_property
    def unlike(self) -> list[str]:
        """Why the times of its batches are not compared, in the words of `compare`. Misses are no
        such reason: a batch with misses has no times and is left out alone.
        """
        groups = [batch.group for batch in self.batches if batch.group.finished]
        pairs = itertools.combinations_with_replacement(groups, 2)
        verdicts = [judge(*pair)[TARGET] for pair in pairs]
        reasons = dict.fromkeys(reason for verdict in verdicts for reason in verdict.reasons)
        return [reason for reason in reasons if not reason.startswith(MISSES)]

    @property
    def has_times(self) -> bool:
        """Whether times are shown: also where only the load of other programs forbids comparing."""
        return all(reason.startswith(LOAD) for reason in self.unlike)

    def fit(self) -> Fit:
        return fit({float(b.size): b.interpolated_samples for b in self.batches if b.usable})


def run(options: argparse.Namespace) -> int:
    selector = options.folder
    requested = None if options.target is None else parse_target(options.target)
    records, target, not_read = read_selected(selector, requested)
    if target is None:
        raise UserError(
            f"{selector}: give --target METRIC=VALUE: the batch that is worth it depends on what "
            "is to be reached"
        )
    check_target(target, records)
    families = families_of(records, target)
    if not families:
        raise UserError(f"{selector}: the batch does not vary between its finished runs")
    if options.json:
        fields = [as_fields(each, target) for each in families]
        print_json({"target": str(target), "families": fields, "not_read": not_read})
        return 0
    console = screen()
    for family in families:
        _show(console, family, target)
    console.print(LEGEND, style="dim")
    return 0


def as_fields(family: Family, target: Target) -> dict[str, Any]:
    """A family as plain values, for a program."""
    curve = family.fit()
    return {
        "name": family.name,
        "batches": [
            {
                "batch": batch.size,
                "lr": batch.lr,
                "usable": batch.usable,
                "tta_samples": [*batch.measured("tta_samples").values()],
                "interpolated_samples": batch.interpolated_samples,
                "fitted_samples": curve.samples(batch.size),
                "train_samples_per_s": batch.rate if family.has_times else None,
                "tta_train_s": [*batch.measured("tta_train_s").values()]
                if family.has_times
                else [],
            }
            for batch in family.batches
        ],
        "critical_batch": {"value": curve.critical, "low": curve.low, "high": curve.high},
        "notes": notes(family, curve, target),
    }


def notes(family: Family, curve: Fit, target: Target) -> list[str]:
    runs = [run for batch in family.batches for run in batch.group.finished]
    passes = (text for batch in family.batches if (text := batch.unlike_passes))
    return [
        *left_out(family, target), verdict(family, curve), *fastest(family), *passes,
        *disturbed(runs),
    ]  # fmt: skip


def families_of(records: Iterable[Run], target: Target) -> list[Family]:
    """The families with two batches or more, one per learning rate if a batch ran with several."""
    return [_family(name, own, target) for name, own in _of_several_batches(records)]


def has_enough_batches(records: Iterable[Run]) -> bool:
    """Whether some family has as many batches as a fit takes."""
    sizes = ({run.effective_batch for run in together} for _, together in
             _of_several_batches(records))  # fmt: skip
    return any(len(of_family) >= BATCHES for of_family in sizes)


def _of_several_batches(records: Iterable[Run]) -> Iterator[tuple[str, list[Run]]]:
    """Name and runs of each family."""
    families = by_key((run for run in records if run.effective_batch is not None), _key)
    for key, members in families.items():
        rates = {run.identity["lr"] for run in members}
        several_rates = len({(run.effective_batch, run.identity["lr"]) for run in members}) > len(
            {run.effective_batch for run in members}
        )
        for lr in sorted(rates, key=str) if several_rates else [None]:
            own = [r for r in members if lr is None or r.identity["lr"] == lr]
            if len({run.effective_batch for run in own}) > 1:
                yield _name(key, families, lr), own


def _key(run: Run) -> tuple[tuple[str, Any], ...]:
    """Everything that must be the same; the data too, which may have changed under a name."""
    known = {n: v for n, v in run.characteristics.items() if n not in OF_A_BATCH}
    return (*known.items(), ("data", run.data.get("data_checksum")))


def _name(key: Any, keys: Iterable[Any], lr: Any) -> str:
    """What distinguishes a family from the others, and always what was trained."""
    unlike = {name for other in keys for name, value in other if (name, value) not in key}
    trained = ("script", "model")
    texts = [
        str(v) if n in (*trained, "strategy") else f"{n} {v}"
        for n, v in key
        if v is not None and (n in unlike or n in trained)
    ]
    return ", ".join([*texts, *([f"lr {number(lr)}"] if lr is not None else [])])


def _family(name: str, records: list[Run], target: Target) -> Family:
    by_size = by_key(records, lambda run: run.effective_batch or 0)
    batches = []
    for size, own in sorted(by_size.items()):
        group = Group(tuple(own), name=f"batch {size}", target=target)
        passed = by_seed(
            (run, at)
            for run in group.finished
            if not run.lacks_epochs and (at := interpolated(run.epochs, target)) is not None
        )
        batches.append(Batch(size, own[0].identity["lr"], group, passed))
    return Family(name, tuple(batches))


def _show(console: Console, family: Family, target: Target) -> None:
    curve = family.fit()
    console.print(f"{family.name}, to {target}", style="bold")
    show(Table(HEADINGS, [_cells(family, batch, curve) for batch in family.batches]))
    for line in (*notes(family, curve, target), ""):
        console.print(line)


def _cells(family: Family, batch: Batch, curve: Fit) -> list[str]:
    fitted = curve.samples(batch.size)
    rate = batch.rate if family.has_times else None
    seconds = batch.measured("tta_train_s") if family.has_times and batch.reached else {}
    samples = batch.measured("tta_samples") if batch.reached else {}
    return [
        str(batch.size),
        UNKNOWN if batch.lr is None else number(batch.lr),
        str(len(batch.group.finished)),
        spread(list(samples.values())).text("{:,.0f}"),
        spread(batch.interpolated_samples if batch.usable else []).text("{:,.0f}"),
        UNKNOWN if fitted is None else f"{fitted:,.0f}",
        UNKNOWN if rate is None else f"{rate:,.0f}",
        spread(list(seconds.values())).text("{:,.2f}"),
    ]


def left_out(family: Family, target: Target) -> Iterator[str]:
    """A line for each batch that is not fitted: without its worst runs it would look too good."""
    best = min if target.smaller_is_better else max
    for batch in family.batches:
        if batch.usable:
            continue
        missed = sum(math.isinf(at.samples) for at in batch.passed)
        early = [at.value for at in batch.passed if at.early]
        why = [f"{missed} of {len(batch.group.finished)} runs miss the target"] if missed else []
        if early:
            perfect = target.metric in QUALITY_FIELDS and best(early) == 1 and best is max
            beyond = f"a --target beyond {target.metric}={best(early):.4g} tells when"
            beyond = "evaluate more often, or train on less" if perfect else beyond
            reach = "1 reaches" if len(early) == 1 else f"{len(early)} reach"
            why += [f"{reach} it before the first evaluation ({beyond})"]
        why += [f"{batch.failed} not finished"] if batch.failed else []
        if batch.unknown and batch.passed:
            why += [f"{batch.unknown} of {len(batch.group.finished)} do not tell"]
        of = " of the fit" if batch.reached else ""
        yield f"batch {batch.size} is left out{of}: {', '.join(why) or 'its records do not tell'}"


def verdict(family: Family, curve: Fit) -> str:
    used = [batch.size for batch in family.batches if batch.usable]
    if curve.critical is None or curve.high is None or curve.low is None:
        text = f"Bcrit: not determined: {curve.why}"
        return text + (f"; it is {curve.low:,.0f} or more" if curve.low else "")
    text = f"Bcrit: {curve.critical:,.0f} (95 % interval {curve.low:,.0f} to {curve.high:,.0f})"
    measured = f"batches of {used[0]} to {used[-1]} were measured"
    if not used[0] <= curve.critical <= used[-1]:
        text += f", extrapolated: {measured}"
    elif curve.low < used[0] or curve.high > used[-1]:
        text += f", its interval extrapolated: {measured}"
    # The growth along the line: Emin cancels out.
    growth = (curve.critical + used[-1]) / (curve.critical + used[0])
    return (
        f"{text}; from batch {used[0]} to {used[-1]} the samples needed grow {growth:.2f}-fold: "
        "a larger batch brings the target sooner only where samples/s grow by more"
    )


def fastest(family: Family) -> Iterator[str]:
    """The batch with the least measured time to the target, whether the next larger one takes
    longer by more than noise, and which others do not; or why times are not compared.
    """
    if family.unlike:
        yield f"times are not compared: {'; '.join(family.unlike)}"
        return
    timed = [batch for batch in family.batches if batch.reached and batch.measured("tta_train_s")]
    if len(timed) < 2:
        return
    best = leaders(timed, lambda one, other: _time_of(other, one), equal=1.0)
    if not best:
        yield (
            "least training time to the target: not known, as each batch takes longer than some "
            "other by the seeds that both have; more seeds are needed"
        )
        return
    texts = [
        f"{statistics.mean(batch.measured('tta_train_s').values()):,.2f} s, at batch {batch.size}"
        for batch in best
    ]
    text = f"least training time to the target: {' and '.join(texts)}"
    after = next((batch for batch in timed if batch.size > best[-1].size), None)
    if after is not None:
        yield "; ".join([text, *_beside(after, timed, best)])
        return
    beyond_it = any(batch.size > best[-1].size for batch in family.batches)
    why = "larger ones are left out" if beyond_it else "larger ones may be faster"
    text += f", the largest of those compared: {why}"
    before = next((batch for batch in reversed(timed) if batch not in best), None)
    yield text if before is None else "; ".join([text, *_beside(before, timed, best)])


def _beside(neighbour: Batch, timed: Sequence[Batch], best: Sequence[Batch]) -> Iterator[str]:
    """The time of a neighbour relative to the best, and the batches within the noise."""
    yield _against(neighbour, best[-1])
    for batch in (each for each in timed if each not in best and each is not neighbour):
        if _time_of(batch, best[-1]).judged(equal=1.0) in (Noise.WITHIN, Noise.EQUAL):
            yield _against(batch, best[-1])


def _time_of(batch: Batch, other: Batch) -> Estimate:
    """The time of a batch to the target against that of another batch, as `compare` has it."""
    return measured_against(batch.group, other.group, "tta_train_s", TARGET)


def _against(batch: Batch, best: Batch) -> str:
    """How many times as long as `best` it takes; and the pairs, if a side has further seeds."""
    time = _time_of(batch, best)
    within = "within noise"
    texts = {Noise.BEYOND: "more than noise", Noise.WITHIN: within, Noise.EQUAL: within}
    text = texts.get(time.judged(equal=1.0), "noise unknown")
    if time.unpaired:
        text += f", of {counted(time.n, 'pair')} with the same seed"
    return f"batch {batch.size} takes {time.value:.2f} times as long ({text})"

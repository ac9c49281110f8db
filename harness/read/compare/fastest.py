"""Which batch of a sweep over batches is fastest, and reaches the target soonest, in one sentence,
and what to ask next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import cache

from harness.read.compare.answers import BY_NAME, LESS_IS_BETTER, Missed, Pair
from harness.read.compare.compare import ComparedMeasure
from harness.read.compare.critical_batch import has_enough_batches
from harness.read.grouping import by_key
from harness.read.labels import (
    TIMES_TO_TARGET,
    heading_of,
    label_text,
    listed,
    plain_text,
    shown_axes,
)
from harness.read.records.baseline import RATE
from harness.read.records.comparable import ACCURACY, QUALITY, all_beside_others
from harness.read.records.groups import Group
from harness.read.records.sweeps import SweepResults
from harness.read.statistics import Estimate, Noise, leaders

BATCH = "per_gpu_batch"
OF_BATCH = (BATCH, "lr")
NOT_BEYOND = "not beyond the noise"
MOST_NAMED = 6  # batches
_, WALL_TO_TARGET = TIMES_TO_TARGET


@dataclass(frozen=True)
class Best:
    """The batch of a case that leads all those that may be compared with it."""

    batch: str  # or several equal ones; "" where none can be told
    noise: str  # of its lead over the others; "" where all are equal
    left_out: str  # batches that are not compared, and why
    disturbed: bool  # whether only disturbed runs were compared


def fastest_batch(sweep: SweepResults) -> list[str]:
    """A sentence on the batch with the most samples/s, the one that reaches the sweep's target in
    the least wall time and the one with the highest accuracy, of those that `compare` compares:
    by the seeds that both have, from quiet runs. Nothing where no two batches have a rate.
    """
    cases = _cases(sweep)
    if not cases:
        return []
    rates = [_best(groups, BY_NAME[RATE]) for groups in cases]
    axes, of, case = _axes_of(sweep, cases), "", ""
    if len(cases) > 1:
        of = f" of {len(cases)} cases of {', '.join(map(heading_of, axes))}"
    elif axes and len(cases[0]) < sum(bool(group.values(RATE)) for group in sweep.groups):
        case = f" for {label_text(cases[0][0].label, axes)}"
    if any(best.batch for best in rates):
        text = f"The fastest {heading_of(BATCH)}{case} is {_told(rates, of)}"
    else:
        why = dict.fromkeys(best.left_out or "each is slower than some other" for best in rates)
        text = f"Which {heading_of(BATCH)}{case} is fastest cannot be told: {listed(why, '; ', 2)}"
    more = [("the highest accuracy has", ACCURACY)]
    if sweep.target:
        more.insert(0, (f"{sweep.target} is reached soonest, by wall time, with", WALL_TO_TARGET))
    for words, name in more:
        bests = [_best(groups, BY_NAME[name]) for groups in cases]
        if any(best.batch for best in bests):
            text += f"; {words} {_told(bests, '')}"
    return [f"{text}."]


def next_question(sweep: SweepResults) -> str:
    """The question that runs of several batches, or of set-ups with one, leave open; a command."""
    tiny = " --tiny" if sweep.tiny else ""
    if has_enough_batches(sweep.finished):
        target = "" if sweep.target else " --target accuracy=VALUE"
        command = f"python -m harness batches {sweep.folder_read}{target}"
        return f"up to which batch larger ones pay: {command}"
    if "setup" in sweep.varied and BATCH not in sweep.varied and sweep.has_question:
        command = f"python -m harness sweep experiments/batch_size.yaml{tiny}"
        return f"which batch per GPU is fastest: {command}"
    return ""


def _cases(sweep: SweepResults) -> list[list[Group]]:
    """Groups with a rate, by case: those of one case differ in their batch alone. Where each batch
    has one learning rate of its own, it belongs to the batch.
    """
    rated = [group for group in sweep.groups if BATCH in sweep.varied and group.values(RATE)]
    cases: list[list[Group]] = []
    for groups in by_key(rated, lambda group: _others(group, OF_BATCH)).values():
        has_own_rates = len({plain_text(group.label[BATCH]) for group in groups}) == len(groups)
        of_one_rate = by_key(groups, lambda group: _others(group, (BATCH,)))
        cases += [groups] if has_own_rates else of_one_rate.values()
    return [groups for groups in cases if len(groups) > 1]


def _axes_of(sweep: SweepResults, cases: Sequence[Sequence[Group]]) -> tuple[str, ...]:
    """The axes on which all groups of a case have one value."""
    return tuple(
        axis for axis in shown_axes(sweep.varied)
        if all(len({plain_text(group.label.get(axis)) for group in case}) == 1 for case in cases)
    )  # fmt: skip


def _others(group: Group, but: Collection[str]) -> Hashable:
    """The machine of a group, and its values of all axes but these."""
    return group.machine, *(str(value) for axis, value in group.label.items() if axis not in but)


def _best(groups: Sequence[Group], measure: ComparedMeasure) -> Best:
    @cache
    def between(one: int, other: int) -> Estimate | str:
        return Pair(groups[one], groups[other]).estimate(measure)

    def lead(one: int, other: int) -> Estimate:
        ahead = (other, one) if measure.name in LESS_IS_BETTER else (one, other)
        estimate = between(*ahead)
        assert isinstance(estimate, Estimate)
        return estimate

    def comparable(first: int) -> list[int]:
        """A group and those that may be compared with it and with each other, in their order."""
        kept = [first]
        for n in range(len(groups)):
            if n != first and all(isinstance(between(n, other), Estimate) for other in kept):
                kept.append(n)
        return sorted(kept)

    of_times = measure.question != QUALITY
    busy = [of_times and all_beside_others(group) for group in groups]
    firsts = [n for n, is_busy in enumerate(busy) if not is_busy or all(busy)]
    firsts.sort(key=lambda n: bool(groups[n].missed(measure.name)))
    compared = max(map(comparable, firsts), key=len)
    apart = [n for n in range(len(groups)) if n not in compared]
    whys = [next(w for o in compared if isinstance(w := between(n, o), str)) for n in apart]
    left_out = _left_out([groups[n] for n in apart], whys, measure)
    if len(compared) < 2:
        (alone,) = (groups[n] for n in compared)
        is_best = all(isinstance(why, Missed) for why in whys) and not alone.missed(measure.name)
        return Best(_batch(alone) if is_best else "", "", left_out, False)
    first = leaders(compared, lead, measure.equal)
    judged = [lead(first[0], o).judged(measure.equal) for o in compared if first and o != first[0]]
    *others, last = (_batch(groups[n]) for n in first) if first else [""]
    name = f"{', '.join(others)} and {last}, equal" if others else last
    return Best(name, _noise(judged), left_out, busy[compared[0]])


def _left_out(others: Sequence[Group], whys: Sequence[str], measure: ComparedMeasure) -> str:
    """The batches that are not compared, by the reason."""
    reasons: dict[str, list[str]] = {}
    for group, why in zip(others, whys, strict=True):
        if isinstance(why, Missed):
            missed = len(group.missed(measure.name))
            why = f"missed it in {missed} of {len(group.finished)} runs"
        reasons.setdefault(why, []).append(_batch(group))
    texts = (f"{listed(names, ', ', MOST_NAMED)} {why}" for why, names in reasons.items())
    return "; ".join(texts)


def _noise(judged: Sequence[Noise]) -> str:
    """How sure it is that one batch leads all others: as sure as its least sure lead. Equal batches
    do not lead each other; one seed alone does not always tell whether they are alike.
    """
    for least in (Noise.WITHIN, Noise.UNKNOWN, Noise.NO_SPREAD, Noise.BEYOND):
        if least in judged:
            return NOT_BEYOND if least == Noise.WITHIN else least
    return ""


def _batch(group: Group) -> str:
    return plain_text(group.label[BATCH])


def _told(bests: Sequence[Best], of: str) -> str:
    """The batch, if there is one case; else each batch with the number of its cases."""
    known = [best for best in bests if best.batch]
    if len(bests) == 1:
        (best,) = known
        remarks = [best.noise, best.left_out, "all runs disturbed" if best.disturbed else ""]
        text = best.batch
    else:
        batches = Counter(best.batch for best in known)
        text = ", ".join(f"{name} in {count}" for name, count in batches.most_common()) + of
        clear = sum(best.noise == Noise.BEYOND for best in known)
        noises = {best.noise for best in known} - {""}
        noise = noises.pop() if len(noises) == 1 else NOT_BEYOND if noises else ""
        remarks = [f"{Noise.BEYOND} in {clear}" if clear else noise]
        for remark, count in (
            ("not known", len(bests) - len(known)),
            ("some batches not compared", sum(bool(best.left_out) for best in known)),
            ("all runs disturbed", sum(best.disturbed for best in known)),
        ):
            remarks += [f"{remark} in {count}"] if count else []
    said = "; ".join(filter(None, remarks))
    return f"{text} ({said})" if said else text

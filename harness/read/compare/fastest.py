"""Which batch of a sweep over batches is fastest, and reaches the target soonest; which learning
rate has the highest accuracy; which row reaches the target first; each in one sentence. And what to
ask next.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, partial

from harness.core.records.walking import as_typed
from harness.read.compare.answers import BY_NAME, LESS_IS_BETTER, Missed, Pair, failures_of
from harness.read.compare.critical_batch import has_enough_batches
from harness.read.compare.wording import AS, interval_of, number_of
from harness.read.labels import (
    BATCH,
    TIMES_TO_TARGET,
    heading_of,
    label_text,
    listed,
    plain_text,
    short_text,
    shown_axes,
)
from harness.read.records.baseline import RATE
from harness.read.records.comparable import ACCURACY, QUALITY, all_beside_others
from harness.read.records.groups import Group, by_key
from harness.read.records.recorded import is_number
from harness.read.records.sweeps import SweepResults
from harness.read.statistics import Estimate, Noise, leaders

OF_BATCH = (BATCH, "lr")
NOT_BEYOND = "not beyond the noise"
RATE_OF_UPDATES = "lr"
ENDS = ("the smallest tried", "the largest tried")  # beyond which a better rate may lie
MOST_NAMED = 6  # batches, or cases
WALL_TO_TARGET, _ = TIMES_TO_TARGET


@dataclass(frozen=True)
class Best:
    """The batch or learning rate of a case that leads all those that may be compared with it."""

    value: str  # or several equal ones; "" where that is unknown
    noise: str  # of its lead over the others; "" where all are equal
    left_out: str  # values that are not compared, and why
    disturbed: bool  # whether only disturbed runs were compared
    # It against the next of those compared, and that one; None where there is no single leader.
    against_next: tuple[Estimate, Group] | None = None

    @property
    def remarks(self) -> list[str]:
        remarks = [self.noise, self.left_out, "all runs disturbed" if self.disturbed else ""]
        return [remark for remark in remarks if remark]


def fastest_batch(sweep: SweepResults) -> list[str]:
    """A sentence on the batch with the most samples/s, the one that reaches the sweep's target in
    the least wall time and the one with the highest accuracy, of those that `compare` compares:
    by the seeds that both have, from quiet runs. Nothing where no two batches have a rate.
    """
    cases = [] if sweep.is_for_predictions else _cases(sweep)
    if not cases:
        return []
    rates = [_best(groups, partial(_value, axis=BATCH), RATE) for groups in cases]
    axes, of, case = _axes_of(sweep, cases), "", ""
    names = _names(cases, axes)
    if len(cases) > 1:
        of = f" of {len(cases)} cases of {', '.join(map(heading_of, axes))}"
    elif axes and len(cases[0]) < sum(bool(group.values(RATE)) for group in sweep.groups):
        case = f" for {label_text(cases[0][0].label, axes)}"
    if any(best.value for best in rates):
        text = f"The fastest {heading_of(BATCH)}{case} is {_counts(rates, names, of)}"
    else:
        why = dict.fromkeys(best.left_out or "each is slower than some other" for best in rates)
        text = f"Which {heading_of(BATCH)}{case} is fastest is not known: {listed(why, '; ', 2)}"
    more = [("the highest accuracy has", ACCURACY)]
    if sweep.target:
        more.insert(0, (f"{sweep.target} is reached soonest, by wall time, with", WALL_TO_TARGET))
    for words, name in more:
        bests = [_best(groups, partial(_value, axis=BATCH), name) for groups in cases]
        if any(best.value for best in bests):
            text += f"; {words} {_counts(bests, names, '')}"
    return [f"{text}."]


def best_learning_rate(sweep: SweepResults) -> list[str]:
    """A sentence on the learning rate with the highest accuracy in each case, of those that
    `compare` compares. Nothing where no two rates of a case are compared.
    """
    tried = [group for group in sweep.groups if group.values(ACCURACY) or failures_of([group])]
    cases = _alike(sweep, RATE_OF_UPDATES, tried, (RATE_OF_UPDATES,))
    names = _names(cases, _axes_of(sweep, cases))
    bests = [(name, _best_rate(case)) for name, case in zip(names, cases, strict=True)]
    known = [(name, best) for name, best in bests if best[0]]
    if not known:
        return []
    texts = []
    for (value, remark), alike in by_key(known, lambda each: each[1]).items():
        of_value = (name for name, _ in alike)
        where = f" for {listed(of_value, ', ', MOST_NAMED)}" if len(cases) > 1 else ""
        texts.append(f"{value}{where}" + (remark and f" ({remark})"))
    if unknown := len(cases) - len(known):
        texts.append(f"not known in {unknown}")
    return [f"The learning rate with the highest accuracy is {'; '.join(texts)}."]


def first_to_target(sweep: SweepResults) -> list[str]:
    """A sentence on the row that reaches the target in the least wall time, against the next one:
    of rows with several runs, as far as `compare` compares them. Nothing where none reaches it.
    """
    reached = [group for group in sweep.groups if group.values(WALL_TO_TARGET)]
    groups = [g for g in reached if len(g.values(WALL_TO_TARGET)) > 1 and not failures_of([g])]
    if sweep.target is None or sweep.is_for_predictions or len(groups) < 2:
        return []
    best = _best(groups, sweep.name_of, WALL_TO_TARGET)
    if not best.value:
        return []
    text = f"{sweep.target} is reached first, by wall time, by {best.value}"
    if best.against_next is not None:
        (against, following), measure = best.against_next, BY_NAME[WALL_TO_TARGET]
        times = f"{number_of(measure, against.value)} times {AS[WALL_TO_TARGET]}"
        text += f", {times}{interval_of(measure, against)} as by {sweep.name_of(following)}"
    soonest = min(group.mean(WALL_TO_TARGET) or math.inf for group in groups)
    others = [g for g in reached if g not in groups and (g.mean(WALL_TO_TARGET) or 0) < soonest]
    left_out = [
        f"{sweep.name_of(g)}, sooner, is not compared: {(failures_of([g]) or ['one seed'])[0]}"
        for g in others
    ]
    remarks = "; ".join([*best.remarks, *left_out])
    return [f"{text} ({remarks})." if remarks else f"{text}."]


def _best_rate(case: Sequence[Group]) -> tuple[str, str]:
    """The rate, and the remarks on it. One with failed runs is left out: what the others
    reached is not what it gives.
    """
    failed = [(group, failures_of([group])) for group in case]
    sound = [group for group, texts in failed if not texts]
    remarks = [f"{_value(g, RATE_OF_UPDATES)} left out: {text}" for g, texts in failed
               for text in texts]  # fmt: skip
    if len(sound) < 2:
        return "", ""
    best = _best(sound, partial(_value, axis=RATE_OF_UPDATES), ACCURACY)
    tried = sorted((group.setting(RATE_OF_UPDATES), _value(group, RATE_OF_UPDATES))
                   for group in case if is_number(group.setting(RATE_OF_UPDATES)))  # fmt: skip
    ends = {tried[0][1]: ENDS[0], tried[-1][1]: ENDS[1]} if len(tried) > 1 else {}
    remarks = [ends.get(best.value, ""), best.noise, best.left_out, *remarks]
    return best.value, "; ".join(filter(None, remarks))


def next_question(sweep: SweepResults) -> str:
    """The question that runs of several batches, or of set-ups with one, leave open; a command."""
    tiny = " --tiny" if sweep.tiny else ""
    if has_enough_batches(sweep.finished):
        target = "" if sweep.target else " --target accuracy=VALUE"
        records = shlex.quote(str(as_typed(sweep.folder_read)))
        command = f"python -m harness batches {records}{target}"
        return f"up to which batch larger ones pay: {command}"
    if "setup" in sweep.varied and BATCH not in sweep.varied and sweep.has_question:
        command = f"python -m harness sweep experiments/batch_size.yaml{tiny}"
        return f"which batch per GPU is fastest: {command}"
    return ""


def _cases(sweep: SweepResults) -> list[list[Group]]:
    """Groups with a rate, by case: those of one case differ in their batch alone. Where each batch
    has one learning rate of its own, it belongs to the batch.
    """
    cases: list[list[Group]] = []
    rated = [group for group in sweep.groups if group.values(RATE)]
    for groups in _alike(sweep, BATCH, rated, OF_BATCH):
        has_own_rates = len({plain_text(group.label[BATCH]) for group in groups}) == len(groups)
        of_one_rate = by_key(groups, lambda group: _others(group, (BATCH,)))
        cases += [groups] if has_own_rates else of_one_rate.values()
    return [groups for groups in cases if len(groups) > 1]


def _alike(
    sweep: SweepResults, axis: str, groups: Sequence[Group], but: Collection[str]
) -> list[list[Group]]:
    """These groups, where this axis varies, by the values of all axes but some; several of each."""
    known = groups if axis in sweep.varied else ()
    alike = by_key(known, lambda group: _others(group, but)).values()
    return [of_one for of_one in alike if len(of_one) > 1]


def _axes_of(sweep: SweepResults, cases: Sequence[Sequence[Group]]) -> tuple[str, ...]:
    """The axes on which all groups of a case have one value."""
    return tuple(
        axis for axis in shown_axes(sweep.varied)
        if all(len({plain_text(group.label.get(axis)) for group in case}) == 1 for case in cases)
    )  # fmt: skip


def _names(cases: Sequence[Sequence[Group]], axes: tuple[str, ...]) -> list[str]:
    """What tells each case from the others."""
    machines = [case[0].machine_kind for case in cases]
    several = len({*machines}) > 1
    return [
        short_text(case[0].label, axes, machine if several else None)
        for case, machine in zip(cases, machines, strict=True)
    ]


def _others(group: Group, but: Collection[str]) -> Hashable:
    """The machine of a group, and its values of all axes but these."""
    return group.machine, *(str(value) for axis, value in group.label.items() if axis not in but)


def _best(groups: Sequence[Group], called: Callable[[Group], str], name: str) -> Best:
    measure = BY_NAME[name]

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
    left_out = _left_out([groups[n] for n in apart], whys, called, name)
    if len(compared) < 2:
        (alone,) = (groups[n] for n in compared)
        is_best = all(isinstance(why, Missed) for why in whys) and not alone.missed(measure.name)
        return Best(called(alone) if is_best else "", "", left_out, False)
    first = leaders(compared, lead, measure.equal)
    leads = groups[first[0] if first else compared[0]].mean(name)
    if any(busy[n] and _is_as_good(groups[n].mean(name), leads, name) for n in apart):
        return Best("", "", left_out, False)  # as disturbed as it was, it may well lead
    judged = [lead(first[0], o).judged(measure.equal) for o in compared if first and o != first[0]]
    *others, last = (called(groups[n]) for n in first) if first else [""]
    values = f"{', '.join(others)} and {last}, equal" if others else last
    against_next = None
    if len(first) == 1:
        behind = [n for n in compared if n not in first]
        following = min(behind, key=lambda n: lead(first[0], n).value or 0.0)
        estimate = between(first[0], following)
        assert isinstance(estimate, Estimate)
        against_next = estimate, groups[following]
    return Best(values, _noise(judged), left_out, busy[compared[0]], against_next)


def _is_as_good(one: float | None, other: float | None, measure: str) -> bool:
    if one is None or other is None:
        return False
    return one <= other if measure in LESS_IS_BETTER else one >= other


def _left_out(
    others: Sequence[Group], whys: Sequence[str], called: Callable[[Group], str], measure: str
) -> str:
    """The values that are not compared, by the reason."""
    reasons: dict[str, list[str]] = {}
    for group, why in zip(others, whys, strict=True):
        if isinstance(why, Missed):
            missed = len(group.missed(measure))
            why = f"missed it in {missed} of {len(group.finished)} runs"
        reasons.setdefault(why, []).append(called(group))
    texts = (f"{listed(names, ', ', MOST_NAMED)} {why}" for why, names in reasons.items())
    return "; ".join(texts)


def _noise(judged: Sequence[Noise]) -> str:
    """The certainty that one value leads all others: that of its least certain lead. Equal ones do
    not lead each other; one seed alone does not always tell whether they are alike.
    """
    for least in (Noise.WITHIN, Noise.UNKNOWN, Noise.NO_SPREAD, Noise.BEYOND):
        if least in judged:
            return NOT_BEYOND if least == Noise.WITHIN else least
    return ""


def _value(group: Group, axis: str) -> str:
    return plain_text(group.setting(axis))


def _counts(bests: Sequence[Best], names: Sequence[str], of: str) -> str:
    """The value, if there is one case; else each value with the number of its cases, or with their
    names where the values of a few cases differ.
    """
    known = [best for best in bests if best.value]
    if len(bests) == 1:
        (best,) = known
        text, remarks = best.value, best.remarks
    else:
        text = _by_value(bests, names) or _counted_by_value(known) + of
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
    remarks_text = "; ".join(filter(None, remarks))
    return f"{text} ({remarks_text})" if remarks_text else text


def _counted_by_value(known: Sequence[Best]) -> str:
    values = Counter(best.value for best in known)
    return ", ".join(f"{value} in {count}" for value, count in values.most_common())


def _by_value(bests: Sequence[Best], names: Sequence[str]) -> str:
    """Each value with its cases, if they are few and differ; else ""."""
    by_value = by_key(zip(bests, names, strict=True), lambda each: each[0].value)
    if len(by_value) == 1 or len(bests) > MOST_NAMED or len({*names} - {""}) < len(bests):
        return ""
    texts = ((value, " and ".join(name for _, name in those)) for value, those in by_value.items())
    return ", ".join(f"{value} for {cases}" for value, cases in texts if value)

"""Which batch of a sweep over batches is fastest, in one sentence, and what to ask next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from harness.read.compare.critical_batch import batch_varies
from harness.read.labels import heading_of, plain_text, shown_axes
from harness.read.records.baseline import RATE
from harness.read.records.comparable import ACCURACY, QUALITY, SPEED, refused, values_of
from harness.read.records.groups import Group
from harness.read.records.sweeps import SweepResults
from harness.read.statistics import ratio

BATCH = "per_gpu_batch"


def fastest_batch(sweep: SweepResults) -> list[str]:
    """The batch with the most samples/s and the one with the highest accuracy, of those that
    `compare` would compare; nothing where no two are.
    """
    fastest, most_accurate, clear = Counter[str](), Counter[str](), 0
    for groups in _cases(sweep):
        first, *others = sorted(groups, key=lambda g: -(g.mean(RATE) or 0.0))
        if not (others := [g for g in others if not refused(g, first, SPEED)]):
            continue
        fastest[_batch(first)] += 1
        sides = (values_of(group, RATE, SPEED) for group in (first, others[0]))
        clear += (ratio(*sides).low or 0.0) > 1
        alike = [first, *(g for g in others if not refused(g, first, QUALITY))]
        if len(alike) > 1:
            most_accurate[_batch(max(alike, key=lambda g: g.mean(ACCURACY) or 0.0))] += 1
    if not fastest:
        return []
    cases = fastest.total()
    beyond = f"beyond the noise{f' in {clear}' if cases > 1 else ''}"
    axes = [heading_of(axis) for axis in shown_axes(sweep.varied) if axis != BATCH]
    of = f" of {cases} cases of {', '.join(axes)}" if cases > 1 else ""
    text = f"The fastest {heading_of(BATCH)} is {_counted(fastest)}{of}"
    text += f" ({beyond if clear else 'not beyond the noise'})"
    if most_accurate:
        text += f"; the highest mean accuracy has {_counted(most_accurate)}"
    return [f"{text}."]


def next_question(sweep: SweepResults) -> str:
    """What runs of several batches, or a sweep over set-ups with one, leave open; its command."""
    tiny = " --tiny" if sweep.tiny else ""
    if batch_varies(run for group in sweep.groups for run in group.finished):
        target = "" if sweep.target else " --target accuracy=VALUE"
        command = f"python -m harness batches {sweep.folder_read}{target}"
        return f"up to which batch larger ones pay: {command}"
    if "setup" in sweep.varied and BATCH not in sweep.varied and sweep.has_question:
        command = f"python -m harness sweep experiments/batch_size.yaml{tiny}"
        return f"which batch per GPU is fastest: {command}"
    return ""


def _cases(sweep: SweepResults) -> list[list[Group]]:
    """Groups with a rate that differ in their batch alone."""
    cases: dict[Hashable, list[Group]] = {}
    for group in sweep.groups if BATCH in sweep.varied else ():
        if group.values(RATE):
            others = tuple(str(v) for axis, v in group.label.items() if axis != BATCH)
            cases.setdefault((group.machine, others), []).append(group)
    return [groups for groups in cases.values() if len(groups) > 1]


def _batch(group: Group) -> str:
    return plain_text(group.label[BATCH])


def _counted(batches: Counter[str]) -> str:
    """A batch alone where there is one case."""
    if batches.total() == 1:
        return next(iter(batches))
    return ", ".join(f"{batch} in {count}" for batch, count in batches.most_common())

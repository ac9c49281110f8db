"""The explanations that a report has of a sweep: those of its slowest groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from harness.core.settings import UserError
from harness.read import table
from harness.read.explain.baseline import may_be_baseline
from harness.read.explain.explain import explain
from harness.read.labels import strategy_text
from harness.read.records.groups import Group
from harness.read.records.sweeps import SweepResults

MOST_GROUPS = 6
PER_DEVICE = "train_samples_per_s_per_gpu"


def explain_sweep(sweep: SweepResults) -> list[table.Item]:
    """Each chosen group with its explanation, or the reason why there is none."""
    chosen = list(_chosen(sweep))
    # Without the labels of the sweep: a baseline is searched for by settings, not by axes.
    near = [
        replace(run, label={}, path=str(run.folder.path))
        for run in (sweep.runs if chosen else ())
        if run.folder and may_be_baseline(run)
    ]
    items = []
    for group in chosen[:MOST_GROUPS]:
        name = sweep.name_of(group)
        runs = tuple(replace(run, label={}) for run in group.runs if run.folder)
        try:
            texts = explain(Group(runs, name="RUN", selector=name), near=near).sentences
        except UserError as error:
            texts = (str(error),)
        items.append(table.Item(f"{name}:", texts))
    return items


def _chosen(sweep: SweepResults) -> Iterator[Group]:
    """Per script, topology and strategy the group with the lowest rate per device; groups of one
    process only where there are no others.
    """
    finished = [g for g in sweep.groups if g.finished and g.mean(PER_DEVICE) is not None]
    several = [g for g in finished if (g.fact("devices") or 1) > 1]
    kinds: dict[tuple[str, str, str], list[Group]] = {}
    for group in several or finished:
        script, strategy = str(group.setting("script")), strategy_text(group.label) or ""
        kinds.setdefault((script, group.topology, strategy), []).append(group)
    for groups in kinds.values():
        yield min(groups, key=lambda group: group.mean(PER_DEVICE) or 0.0)

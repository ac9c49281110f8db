"""Why the runs of a sweep were as fast as they were: what explain says of some of its groups."""

from __future__ import annotations

from collections.abc import Iterator

from harness.read.baselines import on_one_node
from harness.read.explain import explain
from harness.read.groups import Group
from harness.read.lines import name_of
from harness.read.measured import Measured, setting, topology
from harness.read.naming import strategy_text
from harness.read.sides import Record, Side, record_of
from harness.settings import UserError

MOST = 6
PER_DEVICE = "train_samples_per_s_per_gpu"


def explained(measured: Measured) -> list[str]:
    """A text for each group chosen; where explain refuses, its reason."""
    chosen = list(_chosen(measured))
    folders = (measured.folder(run) for group in measured.groups for run in group.runs if run.path)
    near = on_one_node(folders) if chosen else []
    return [
        f"{name_of(measured, group)}. {_text(measured, group, near)}" for group in chosen[:MOST]
    ]


def _chosen(measured: Measured) -> Iterator[Group]:
    """Of each script, set-up and strategy that which makes the least of its devices; those of
    one process only where there are no others.
    """
    finished = [g for g in measured.groups if g.finished and g.mean(PER_DEVICE) is not None]
    several = [g for g in finished if (g.fact("devices") or 1) > 1]
    kinds: dict[tuple[str, str, str], list[Group]] = {}
    for group in several or finished:
        script, strategy = str(setting(group, "script")), strategy_text(group.label) or ""
        kinds.setdefault((script, topology(group), strategy), []).append(group)
    for groups in kinds.values():
        yield min(groups, key=lambda group: group.mean(PER_DEVICE) or 0.0)


def _text(measured: Measured, group: Group, near: list[Record]) -> str:
    records = [record_of(measured.folder(run), {}, None) for run in group.runs if run.path]
    side = Side("RUN", name_of(measured, group), tuple(records))
    try:
        return " ".join(explain(side, near=near).sentences)
    except UserError as error:
        return str(error)

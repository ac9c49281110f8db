"""Which groups share a panel of a figure, and what its lines are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from harness.read.drawing import MOST_LINES, MOST_PANELS
from harness.read.labels import strategy_text
from harness.read.records.groups import Group
from harness.read.records.sweeps import SweepResults

# These may have panels of their own, in this order, where a panel would hold too many lines.
INTO_PANELS = ("link", "strategy", "model", "per_gpu_batch", "lr")


class Line(NamedTuple):
    name: str
    groups: list[Group]


class PanelOf(NamedTuple):
    title: str
    lines: list[Line]


def panels_and_lines(
    sweep: SweepResults, groups: Sequence[Group], across: Iterable[str] = (), by_setup: bool = True
) -> tuple[list[PanelOf], list[str]]:
    """The panels with their lines, and what there was no room for.

    across: axes along which a line goes, so that its groups differ in them alone.
    """
    first = ["script", "setup"] if by_setup else ["script"]
    across = {*across}
    beside = [axis for axis in first if axis not in across]
    more = [axis for axis in INTO_PANELS if axis in sweep.axes and axis not in across]
    shared = _arranged(sweep, groups, beside, across)
    while more and max(len(lines) for lines in shared.values()) > MOST_LINES:
        beside.append(more.pop(0))
        shared = _arranged(sweep, groups, beside, across)
    notes = []
    if left := len(shared) - MOST_PANELS:
        notes += [f"{left} more panels are not drawn"] if left > 0 else []
    drawn = []
    for title, lines in [*shared.items()][:MOST_PANELS]:
        names = [*lines]
        if len(names) > MOST_LINES:
            rest = "; ".join(names[MOST_LINES:][:5])
            notes.append(f"{title}: {len(names) - MOST_LINES} more lines are not drawn: {rest} ...")
        drawn.append(PanelOf(title, [Line(name, lines[name]) for name in names[:MOST_LINES]]))
    return drawn, notes


def _arranged(
    sweep: SweepResults, groups: Sequence[Group], beside: list[str], across: set[str]
) -> dict[str, dict[str, list[Group]]]:
    found: dict[str, dict[str, list[Group]]] = {}
    for group in groups:
        title = panel_title(sweep, group, beside)
        name = sweep.text_of(group, {*beside, *across})
        found.setdefault(title, {}).setdefault(name, []).append(group)
    return found


def panel_title(sweep: SweepResults, group: Group, beside: Iterable[str]) -> str:
    words: list[str] = []
    for axis in beside:
        if axis == "setup":
            words.append(group.topology)
        elif axis == "strategy":
            words.append(strategy_text(group.label) or "")
        elif (value := group.setting(axis)) is not None:
            words.append(f"{value}" if axis in ("script", "model", "link") else f"{axis} {value:g}")
    return ", ".join(word for word in words if word)


def in_order(lines: Iterable[Line], key: Callable[[Group], Any]) -> list[Line]:
    return [Line(line.name, sorted(line.groups, key=key)) for line in lines]

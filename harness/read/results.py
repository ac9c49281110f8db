"""The table that a README shows: test accuracy, top-1 and top-5, loss and time, also by node."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from harness.read.groups import Group
from harness.read.lines import name_of
from harness.read.measured import Measured
from harness.read.statistics import spread
from harness.read.sweep_columns import UNKNOWN
from harness.read.sweep_runs import per_node
from harness.read.sweeps import is_number

Rows = tuple[list[str], list[list[str]]]
PERCENT, PLAIN = 100.0, 1.0


def results(measured: Measured) -> Rows:
    """Headings and a row a group; what no group has is no column."""
    columns: list[tuple[str, Callable[[Group], str]]] = [
        ("run", lambda g: name_of(measured, g)),
        ("runs", lambda g: f"{len(g.finished)}/{len(g.runs)}"),
        ("top-1 accuracy (%)", lambda g: _spread(g, "accuracy", PERCENT, 2)),
        ("top-5 accuracy (%)", lambda g: _spread(g, "top5_accuracy", PERCENT, 2)),
        ("loss", lambda g: _spread(g, "eval_loss", PLAIN, 4)),
        ("test accuracy (%)", lambda g: _spread(g, "test_accuracy", PERCENT, 2)),
        ("test loss", lambda g: _spread(g, "test_loss", PLAIN, 4)),
        ("training time", lambda g: _time(g, "train_time_s")),
        ("wall time", lambda g: _time(g, "wall_s")),
        ("effective batch", lambda g: str(g.fact("effective_batch") or UNKNOWN)),
        ("outcome", lambda g: g.outcome),
    ]
    cells = {heading: [text(group) for group in measured.groups] for heading, text in columns}
    kept = [heading for heading, texts in cells.items() if set(texts) != {UNKNOWN}]
    return kept, [list(row) for row in zip(*(cells[heading] for heading in kept), strict=True)]


def _spread(group: Group, measure: str, factor: float, places: int) -> str:
    found = spread([factor * value for value in group.values(measure)])
    if found.mean is None:
        return UNKNOWN
    sd = "" if found.sd is None else f" ± {found.sd:.{places}f}"
    return f"{found.mean:.{places}f}{sd}"


def _time(group: Group, measure: str) -> str:
    mean = group.mean(measure)
    return UNKNOWN if mean is None else duration(mean)


def duration(seconds: float) -> str:
    """As people write it: 1 h 22 min, 12 min 30 s, 8.4 s."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    hours, minutes, left = whole // 3600, whole % 3600 // 60, whole % 60
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {left} s"


def by_node(measured: Measured) -> Rows:
    """Of groups on several nodes, each node: processor time and accuracy of its own samples."""
    rows = []
    for group in measured.groups:
        if (group.fact("nodes") or 1) < 2:
            continue
        told = [per_node(measured.folder(run), run.environment) for run in group.finished]
        for node in range(max(map(len, told), default=0)):
            of_node = [nodes[node] for nodes in told if node < len(nodes)]
            rows.append([name_of(measured, group), str(node), *map(_mean_text(of_node), FIELDS)])
    return ["run", "node", "user time", "system time", "top-1 (%)", "top-5 (%)"], rows


FIELDS = ("user_s", "system_s", "accuracy", "top5_accuracy")


def _mean_text(nodes: list[dict[str, Any]]) -> Callable[[str], str]:
    def text(field: str) -> str:
        known = [node[field] for node in nodes if is_number(node.get(field))]
        if not known:
            return UNKNOWN
        mean = math.fsum(known) / len(known)
        return duration(mean) if field.endswith("_s") else f"{100 * mean:.2f}"

    return text

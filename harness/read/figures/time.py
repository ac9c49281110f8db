"""Where the time went, a bar a group; and what devices and nodes did over the time of a run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from harness.core.records import read_rows
from harness.core.settings import UserError
from harness.read import drawing as kit
from harness.read.drawing import Drawn, NothingToDraw
from harness.read.explain.time_breakdown import (
    COMMUNICATION,
    COMPUTE,
    DATA,
    EVALUATION,
    FIRST,
    PARTS,
    REST,
    SAVING,
    STRAGGLERS,
    UNSEPARATED,
    mean_breakdown,
    time_breakdown,
)
from harness.read.figures.panels import Styles, failed_groups, left_out, run_name
from harness.read.figures.target import MOST_ROWS, cut
from harness.read.labels import duration
from harness.read.records.groups import Group
from harness.read.records.loading import is_number
from harness.read.records.runs import Run
from harness.read.records.sweeps import SweepResults

# Greys are what the records do not separate; hatches help where colours do not.
LOOKS = {
    COMPUTE: ("#009E73", ""), DATA: ("#E69F00", ".."), COMMUNICATION: ("#D55E00", "//"),
    STRAGGLERS: ("#CC79A7", ""), UNSEPARATED: ("#9FB8C8", ""), FIRST: ("#F0E442", ""),
    EVALUATION: ("#0072B2", "\\\\"), SAVING: ("#56B4E9", ""), REST: ("#C8C8C8", ""),
}  # fmt: skip


def where_time_went(sweep: SweepResults, _styles: Styles) -> Drawn:
    """Seconds of a run, means over the seeds, stacked in parts that add up to all of it."""
    untold: dict[str, list[str]] = {}
    rows = [(group, p) for group in sweep.groups if (p := _parts(sweep, group, untold))]
    reasons = [f"{why} ({_counted(names)})" for why, names in untold.items()]
    if not rows:
        why = "; ".join(reasons) or "none finished"
        raise NothingToDraw(f"no run tells where its time went: {why}")
    notes = [*left_out(len(rows) - MOST_ROWS, "groups"), *(f"not drawn: {why}" for why in reasons)]
    if failed := failed_groups(sweep):
        notes.append(f"failed runs are left out: {failed}")
    rows = rows[:MOST_ROWS]
    figure, (axes,) = kit.grid([0.28 * len(rows) + 0.9])
    left = [0.0] * len(rows)
    for name in PARTS:
        widths = [parts.get(name, 0.0) for _, parts in rows]
        if any(widths):
            colour, hatch = LOOKS[name]
            axes.barh(range(len(rows)), widths, left=left, color=colour, height=0.72, label=name,
                      hatch=hatch, edgecolor="white", linewidth=0.4)  # fmt: skip
            left = [a + b for a, b in zip(left, widths, strict=True)]
    for height, total in enumerate(left):
        kit.small_text(axes, duration(total), (total, height), (4, 0))
    kit.named_rows(axes, [cut(sweep.short_name_of(group)) for group, _ in rows])
    axes.set_xlim(0, max(left) * 1.12)
    kit.describe(axes, x="time of a run from its start to its end (s), mean over the seeds")
    kit.legend(figure, {}, axes.get_legend_handles_labels()[0])
    texts = (f"{sweep.name_of(g)} {duration(sum(p.values()))}: {_shares(p)}" for g, p in rows)
    return Drawn(figure, "Where the time of a run went. " + kit.listed(texts) + ".", notes)


def _parts(sweep: SweepResults, group: Group, untold: dict[str, list[str]]) -> dict[str, float]:
    """Means over the runs that tell; untold: why not -> the groups of those that do not."""
    breakdowns = []
    for run in group.finished:
        try:
            breakdowns.append(time_breakdown(run))
        except UserError as error:
            reason = str(error).removeprefix(f"{run.directory.path} ")
            untold.setdefault(reason, []).append(sweep.short_name_of(group))
    if not breakdowns:
        return {}
    mean = mean_breakdown(breakdowns)
    return {n: mean.updates * value for n, value in mean.parts.items() if value is not None}


def _counted(names: Sequence[str]) -> str:
    """Each group once, with how many of its runs."""
    counts = Counter(names).items()
    return kit.listed((f"{name}: {n} run{'s' if n > 1 else ''}" for name, n in counts), ", ")


def _shares(parts: dict[str, float]) -> str:
    total = sum(parts.values())
    return ", ".join(f"{name} {value / total:.0%}" for name, value in parts.items() if value)


MOST_RUNS, MOST_POINTS = 3, 400


class Quantity(NamedTuple):
    title: str
    of_gpu: bool
    field: str


QUANTITIES = (
    Quantity("GPU busy (%)", True, "utilisation_percent"),
    Quantity("GPU power (W)", True, "power_w"),
    Quantity("GPU memory (GiB)", True, "memory_gib"),
    Quantity("cores busy (%)", False, "cpu_percent"),
    Quantity("node memory (GiB)", False, "memory_gib"),
)


Readings = dict[int, list[dict[str, Any]]]  # node -> its lines, in the order of time
Reading = tuple[float, float]  # unix time, value


def usage(sweep: SweepResults, _styles: Styles) -> Drawn:
    """Columns: the first run of some groups; rows: what was read; a line a device or node."""
    runs = [(g, r, readings) for g in sweep.groups for r in g.runs[:1]
            if (readings := _readings(r))]  # fmt: skip
    shown = [q for q in QUANTITIES if any(_series(readings, q) for *_, readings in runs)]
    if not shown:
        raise NothingToDraw("no readings of devices and nodes (telemetry/) beside these records")
    notes = []
    if len(runs) > MOST_RUNS:
        notes.append(f"{len(runs) - MOST_RUNS} more groups have readings: not drawn")
        runs = _of_unlike_kinds(runs)[:MOST_RUNS]
    figure, axes = kit.panels(len(shown) * len(runs), 1.6, len(runs))
    drawn, texts = Drawn(figure, notes=notes), []
    for x, (group, run, readings) in enumerate(runs):
        name = ", ".join([sweep.short_name_of(group), run_name(run)])
        begin = min(float(rows[0]["unix"]) for rows in readings.values())
        words = []
        for y, quantity in enumerate(shown):
            place = axes[y * len(runs) + x]
            values = _draw_series(place, _series(readings, quantity), begin)
            for row in run.epochs:
                if is_number(row.get("unix")):
                    place.axvline(
                        row["unix"] - begin, color=kit.FAINT, linestyle=":", linewidth=0.8
                    )
            kit.describe(
                place,
                cut(name) if y == 0 else "",
                "time since the start (s)" if y == len(shown) - 1 else "",
                quantity.title if x == 0 else "",
            )
            top = 100 if quantity.title.endswith("%)") else max(values, default=1.0) * 1.1 or 1
            place.set_ylim(0, top)
            if values:
                words.append(f"{quantity.title} {np.mean(values):,.3g} in the mean")
        texts.append(f"{name}: {', '.join(words)}.")
    drawn.alt = "What devices and nodes did over the time of a run. " + " ".join(texts)
    return drawn


def _of_unlike_kinds(
    runs: Sequence[tuple[Group, Run, Readings]],
) -> list[tuple[Group, Run, Readings]]:
    """One of each script and set-up before a second of any."""
    count: Counter[tuple[str, str]] = Counter()
    turns = []
    for group, *_ in runs:
        kind = (str(group.setting("script")), group.topology)
        turns.append(count[kind])
        count[kind] += 1
    return [runs[n] for n in sorted(range(len(runs)), key=lambda n: turns[n])]


def _readings(run: Run) -> Readings:
    if run.folder is None:
        return {}
    readings = {}
    for file in sorted((run.folder.path / "telemetry").glob("node_*.jsonl")):
        rows = [row for row in read_rows(file)[0] if is_number(row.get("unix"))]
        if rows:
            readings[int(file.stem.split("_")[1])] = rows
    return readings


def _series(readings: Readings, quantity: Quantity) -> dict[str, tuple[int, list[Reading]]]:
    """Name of a device or node -> (node, its known readings)."""
    series: dict[str, tuple[int, list[Reading]]] = {}
    for node, rows in readings.items():
        sources = {f"node {node}": [row.get("node") or {} for row in rows]}
        if quantity.of_gpu:
            gpus = [row.get("gpus") or [] for row in rows]
            sources = {
                f"node {node}, GPU {n}": [g[n] or {} if n < len(g) else {} for g in gpus]
                for n in range(max(map(len, gpus), default=0))
            }
        for name, source in sources.items():
            values = [(float(row["unix"]), each.get(quantity.field))
                      for row, each in zip(rows, source, strict=True)]  # fmt: skip
            if known := [(at, value) for at, value in values if is_number(value)]:
                series[name] = (node, known)
    return series


def _draw_series(
    axes: Axes, series: dict[str, tuple[int, list[Reading]]], begin: float
) -> list[float]:
    """A colour a node. Of many readings means over as many each, so that no part of a line is
    smoother than another.
    """
    shown = []
    for node, readings in series.values():
        step = math.ceil(len(readings) / MOST_POINTS)
        whole = len(readings) - len(readings) % step
        means = np.array(readings[:whole], float).reshape(-1, step, 2).mean(axis=1)
        values = [float(value) for value in means[:, 1]]
        axes.plot(
            means[:, 0] - begin, values, color=kit.cycle(node).colour, linewidth=1, alpha=0.85
        )
        shown += values
    return shown

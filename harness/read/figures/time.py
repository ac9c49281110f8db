"""Where the time went, a bar a group; and what devices and nodes did over the time of a run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.core.records import read_rows
from harness.core.settings import UserError
from harness.read.drawing import (
    FAINT,
    INK,
    LINES,
    WIDTH,
    Drawn,
    NothingToDraw,
    calm,
    listed,
    panels,
)
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
from harness.read.figures.epochs import failed_runs, run_words
from harness.read.figures.target import MOST_ROWS, cut
from harness.read.labels import duration
from harness.read.records.groups import Group
from harness.read.records.loading import is_number
from harness.read.records.runs import Run
from harness.read.records.sweeps import SweepResults

# Greys are what is not told apart; hatches help where colours do not.
LOOKS = {
    COMPUTE: ("#009E73", ""), DATA: ("#E69F00", ".."), COMMUNICATION: ("#D55E00", "//"),
    STRAGGLERS: ("#CC79A7", ""), UNSEPARATED: ("#9FB8C8", ""), FIRST: ("#F0E442", ""),
    EVALUATION: ("#0072B2", "\\\\"), SAVING: ("#56B4E9", ""), REST: ("#C8C8C8", ""),
}  # fmt: skip


def where_time_went(sweep: SweepResults) -> Drawn:
    """Seconds of a run, means over the seeds, stacked in parts that add up to all of it."""
    untold: dict[str, list[str]] = {}
    rows = [(group, _parts(sweep, group, untold)) for group in sweep.groups]
    lost = [f"{sweep.short_name_of(g)} ({', '.join(f)})" for g, _ in rows if (f := failed_runs(g))]
    rows = [(g, parts) for g, parts in rows if parts]
    told_by_none = [f"{why} ({_counted(names)})" for why, names in untold.items()]
    if not rows:
        why = "; ".join(told_by_none) or "none finished"
        raise NothingToDraw(f"no run tells where its time went: {why}")
    notes = [f"{len(rows) - MOST_ROWS} more groups are not drawn"] if len(rows) > MOST_ROWS else []
    notes += [f"not drawn: {each}" for each in told_by_none]
    notes += [f"failed runs are left out: {'; '.join(lost)}"] if lost else []
    rows = rows[:MOST_ROWS]
    figure = Figure(figsize=(WIDTH, 0.28 * len(rows) + 1.4), layout="constrained")
    axes = figure.add_subplot()
    calm(axes)
    present = [name for name in PARTS if any(parts.get(name) for _, parts in rows)]
    left = [0.0] * len(rows)
    for name in present:
        widths = [parts.get(name, 0.0) for _, parts in rows]
        colour, hatch = LOOKS[name]
        axes.barh(range(len(rows)), widths, left=left, color=colour, height=0.72, label=name,
                  hatch=hatch, edgecolor="white", linewidth=0.4)  # fmt: skip
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for height, total in enumerate(left):
        axes.annotate(duration(total), (total, height), xytext=(4, 0), va="center", fontsize=8,
                      textcoords="offset points", color=INK)  # fmt: skip
    axes.set_yticks(range(len(rows)), [cut(sweep.short_name_of(g)) for g, _ in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, max(left) * 1.12)
    axes.set_xlabel("time of a run from its start to its end (s), mean over the seeds", fontsize=9)
    axes.tick_params(axis="x", labelsize=9)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    said = (f"{sweep.name_of(g)} {duration(sum(p.values()))}: {_shares(p)}" for g, p in rows)
    return Drawn(figure, "Where the time of a run went. " + listed(said) + ".", notes)


def _parts(sweep: SweepResults, group: Group, untold: dict[str, list[str]]) -> dict[str, float]:
    """Means over the runs that tell; untold: why not -> the groups of those that do not."""
    accounts = []
    for run in group.finished:
        try:
            accounts.append(time_breakdown(run))
        except UserError as error:
            reason = str(error).removeprefix(f"{run.directory.path} ")
            untold.setdefault(reason, []).append(sweep.short_name_of(group))
    if not accounts:
        return {}
    whole = mean_breakdown(accounts)
    return {n: whole.updates * value for n, value in whole.parts.items() if value is not None}


def _counted(names: Sequence[str]) -> str:
    """Each group once, with how many of its runs."""
    counts = Counter(names).items()
    return listed((f"{name}: {n} run{'s' if n > 1 else ''}" for name, n in counts), ", ")


def _shares(parts: dict[str, float]) -> str:
    total = sum(parts.values())
    return ", ".join(f"{name} {value / total:.0%}" for name, value in parts.items() if value)


MOST_RUNS, MOST_POINTS = 3, 400


class Quantity(NamedTuple):
    words: str
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


def usage(sweep: SweepResults) -> Drawn:
    """Columns: the first run of some groups; rows: what was read; a line a device or node."""
    found = [(g, r, read) for g in sweep.groups for r in g.runs[:1]
             if (read := _readings(r))]  # fmt: skip
    shown = [q for q in QUANTITIES if any(_lines(read, q) for *_, read in found)]
    if not shown:
        raise NothingToDraw("no readings of devices and nodes (telemetry/) beside these records")
    notes = []
    if len(found) > MOST_RUNS:
        notes.append(f"{len(found) - MOST_RUNS} more groups have readings: not drawn")
        found = _unlike_first(found)[:MOST_RUNS]
    figure, axes = panels(len(shown) * len(found), 1.6, len(found))
    drawn, said = Drawn(figure, "", notes), []
    for x, (group, run, readings) in enumerate(found):
        name = ", ".join([sweep.short_name_of(group), run_words(run)])
        words = []
        for y, quantity in enumerate(shown):
            place = axes[y * len(found) + x]
            values = _drawn_lines(place, _lines(readings, quantity), _begin(readings))
            _epoch_ends(place, run, _begin(readings))
            place.set_title(cut(name) if y == 0 else "", fontsize=9)
            place.set_ylabel(quantity.words if x == 0 else "", fontsize=9)
            place.set_xlabel("time since the start (s)" if y == len(shown) - 1 else "", fontsize=9)
            top = 100 if quantity.words.endswith("%)") else max(values, default=1.0) * 1.1 or 1
            place.set_ylim(0, top)
            if values:
                words.append(f"{quantity.words} {np.mean(values):,.3g} in the mean")
        said.append(f"{name}: {', '.join(words)}.")
    drawn.alt = "What devices and nodes did over the time of a run. " + " ".join(said)
    return drawn


def _unlike_first(
    found: list[tuple[Group, Run, Readings]],
) -> list[tuple[Group, Run, Readings]]:
    """One of each script and set-up before a second of any."""
    seen: Counter[tuple[str, str]] = Counter()
    turns = []
    for entry in found:
        kind = (str(entry[0].setting("script")), entry[0].topology)
        turns.append(seen[kind])
        seen[kind] += 1
    order = sorted(range(len(found)), key=lambda n: turns[n])
    return [found[n] for n in order]


def _readings(run: Run) -> Readings:
    if run.folder is None:
        return {}
    files = (run.folder.path / "telemetry").glob("node_*.jsonl")
    found = {int(file.stem.split("_")[1]): read_rows(file)[0] for file in sorted(files)}
    return {
        node: kept for node, rows in found.items()
        if (kept := [row for row in rows if is_number(row.get("unix"))])
    }  # fmt: skip


def _begin(readings: Readings) -> float:
    return min(float(rows[0]["unix"]) for rows in readings.values())


def _lines(readings: Readings, quantity: Quantity) -> dict[str, tuple[int, list[Any]]]:
    """Name of a device or node -> (node, its readings that are known)."""
    found: dict[str, tuple[int, list[Any]]] = {}
    for node, rows in readings.items():
        count = max((len(row.get("gpus") or ()) for row in rows), default=0)
        takes: dict[str, Callable[[dict[str, Any]], Any]] = (
            {f"node {node}, GPU {n}": _gpu(n) for n in range(count)}
            if quantity.of_gpu
            else {f"node {node}": lambda row: row.get("node") or {}}
        )
        for name, take in takes.items():
            told = [(float(row["unix"]), take(row).get(quantity.field)) for row in rows]
            if known := [(at, value) for at, value in told if is_number(value)]:
                found[name] = (node, known)
    return found


def _gpu(number: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def take(row: dict[str, Any]) -> dict[str, Any]:
        gpus = row.get("gpus") or []
        return gpus[number] or {} if number < len(gpus) else {}

    return take


def _drawn_lines(axes: Axes, lines: dict[str, tuple[int, list[Any]]], begin: float) -> list[float]:
    """A colour a node; of many readings the mean of as many as fall on one point."""
    values = []
    for node, known in lines.values():
        times, read = _thinned([at - begin for at, _ in known], [value for _, value in known])
        axes.plot(times, read, color=LINES[node % len(LINES)][0], linewidth=1, alpha=0.85)
        values += read
    return values


def _thinned(times: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Means over as many readings each, so that no part of a line is calmer than another."""
    step = math.ceil(len(times) / MOST_POINTS)
    whole = len(times) - len(times) % step
    first, second = (
        [float(mean) for mean in np.array(v[:whole], float).reshape(-1, step).mean(axis=1)]
        for v in (times, values)
    )
    return first, second


def _epoch_ends(axes: Axes, run: Run, begin: float) -> None:
    for row in run.epochs:
        if is_number(row.get("unix")):
            axes.axvline(row["unix"] - begin, color=FAINT, linestyle=":", linewidth=0.8)

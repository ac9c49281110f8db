"""What devices and nodes did while runs trained: the readings of their samplers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from harness.core.schema.telemetry import TelemetryRow
from harness.read import drawing as kit
from harness.read.drawing import Drawn, NothingToDraw, Style
from harness.read.figures.panels import Styles, left_out, run_name
from harness.read.records.groups import Group
from harness.read.records.recorded import is_number, telemetry_of
from harness.read.records.runs import Run
from harness.read.records.sweeps import SweepResults

MOST_RUNS, MOST_POINTS, MOST_EPOCHS = 3, 400, 20
LONG_PAUSE_S, MANY_PAUSES = 2.0, 10.0  # s, and times the usual pause: a longer one is a gap


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


Readings = dict[int, list[TelemetryRow]]  # node -> its rows, in the order of time
Reading = tuple[float, float]  # unix time, value
DeviceReadings = dict[tuple[int, int], list[Reading]]  # (node, number of its device) -> readings


def usage(sweep: SweepResults, _styles: Styles) -> Drawn:
    """A column per run: of some groups the first run, a quiet one if there is one. A row per
    quantity, a line per device or node. Colours tell nodes apart, or the devices of a single node.
    """
    read = ((g, r, _readings(r)) for g in sweep.groups for r in (g.timed or g.runs)[:1])
    runs = [each for each in read if any(_series(each[2], q) for q in QUANTITIES)]
    if not runs:
        raise NothingToDraw("no readings of devices and nodes (telemetry/) beside these records")
    notes = []
    if len(runs) > (most := kit.panels_per_row(MOST_RUNS)):
        notes += left_out(len(runs) - most, "groups with readings")
        runs = _of_unlike_kinds(runs)[:most]
    known = [{q: of for q in QUANTITIES if (of := _series(readings, q))} for *_, readings in runs]
    shown = [quantity for quantity in QUANTITIES if any(quantity in of for of in known)]
    figure, axes = kit.panels(len(shown) * len(runs), 1.6, len(runs))
    drawn, texts = Drawn(figure, notes=notes), []
    nodes = {node for of in known for series in of.values() for node, _ in series}
    devices = {gpu for of in known for series in of.values() for _, gpu in series}
    by_gpu = len(nodes) == 1 and len(devices) > 1
    if len(numbers := sorted(devices if by_gpu else nodes)) > 1:
        what = "GPU" if by_gpu else "node"
        of_names = {f"{what} {n}": kit.cycle(n)._replace(marker="") for n in numbers}
        kit.legend(figure, of_names)
    dotted: dict[str, list[str]] = {}  # what dotted lines mark -> names of runs
    for x, ((group, run, readings), series) in enumerate(zip(runs, known, strict=True)):
        name = ", ".join([sweep.short_name_of(group), run_name(run)])
        begin = min(float(rows[0]["unix"]) for rows in readings.values())
        ends, every = _ends_of_epochs(run)
        if ends:
            which = f"one epoch in {every}" if every > 1 else "each epoch"
            dotted.setdefault(which, []).append(name)
        means = []
        for y, quantity in enumerate(shown):
            panel = axes[y * len(runs) + x]
            if quantity not in series:  # a CPU's run beside that of a GPU
                panel.set_visible(False)
                continue
            means.append(_draw_quantity(panel, quantity, series[quantity], begin, by_gpu))
            for end in ends:
                kit.reference(panel, end - begin, kit.IDEAL, upright=True, linewidth=0.8)
            kit.describe(
                panel,
                name if quantity == next(iter(series)) else "",
                "time since the start (s)" if quantity == [*series][-1] else "",
                quantity.title if not any(quantity in of for of in known[:x]) else "",
            )
        texts.append(f"{name}: {', '.join(means)}.")
    drawn.notes += _dotted(dotted)
    _share_scales(axes, len(runs))
    drawn.alt = "What devices and nodes did over the time of a run. " + " ".join(texts)
    return drawn


def _dotted(lines: Mapping[str, Sequence[str]]) -> list[str]:
    """Notes on what dotted lines mark: one for all runs, or one for each kind of runs."""
    texts = {which: f"dotted lines at the end of {which}" for which in lines}
    if len(lines) < 2:
        return [*texts.values()]
    return [f"{'; '.join(names)}: {texts[which]}" for which, names in lines.items()]


def _share_scales(axes: Sequence[Axes], columns: int) -> None:
    """Give a quantity the same scale for all runs, and all quantities of a run the same time."""
    for first in range(columns):
        column = [panel for panel in axes[first::columns] if panel.get_visible()]
        end = max(panel.get_xlim()[1] for panel in column)
        for panel in column:
            panel.set_xlim(0, end)
    for first in range(0, len(axes), columns):
        row = [panel for panel in axes[first : first + columns] if panel.get_visible()]
        top = max(panel.get_ylim()[1] for panel in row)
        for panel in row:
            panel.set_ylim(0, top)


def _draw_quantity(
    panel: Axes, quantity: Quantity, series: DeviceReadings, begin: float, by_gpu: bool
) -> str:
    """Draw one panel; return the means of its lines, as text."""
    if by_gpu and not quantity.of_gpu:
        styles = [Style(kit.INK, "", "-")]
    else:
        styles = [kit.cycle(key[by_gpu]) for key in series]
    values = _draw_series(panel, series, begin, styles)
    # Room above 100 %, so that a line there does not lie on the frame.
    top = 105 if quantity.title.endswith("%)") else max(map(max, values)) * 1.1 or 1
    panel.set_ylim(0, top)
    of_lines = kit.listed((f"{np.mean(each):,.3g}" for each in values), ", ")
    return f"{quantity.title} {of_lines} in the mean"


def _ends_of_epochs(run: Run) -> tuple[list[float], int]:
    """When epochs ended, one in so many: lines for all of a long run would be a grey block."""
    ends = [float(row["unix"]) for row in run.epochs if is_number(row.get("unix"))]
    every = max(1, math.ceil(len(ends) / MOST_EPOCHS))
    return ends[every - 1 :: every], every


def _of_unlike_kinds(
    runs: Sequence[tuple[Group, Run, Readings]],
) -> list[tuple[Group, Run, Readings]]:
    """The runs, sorted so that each script, set-up and strategy comes once before any repeats."""
    count: Counter[tuple[str, ...]] = Counter()
    turns = []
    for group, *_ in runs:
        kind = (str(group.setting("script")), group.topology, str(group.setting("strategy")))
        turns.append(count[kind])
        count[kind] += 1
    return [runs[n] for n in sorted(range(len(runs)), key=lambda n: turns[n])]


def _readings(run: Run) -> Readings:
    """The rows of each node that have a time."""
    of_nodes = {} if run.folder is None else telemetry_of(run.folder)
    return {node: rows for node, rows in of_nodes.items() if rows}


def _series(readings: Readings, quantity: Quantity) -> DeviceReadings:
    """The known readings of a quantity, for each device or each node."""
    series: DeviceReadings = {}
    for node, rows in readings.items():
        for row in rows:
            sources: Sequence[Mapping[str, object] | None]
            sources = (row.get("gpus") or []) if quantity.of_gpu else [row.get("node")]
            for number, source in enumerate(sources):
                if is_number(value := (source or {}).get(quantity.field)):
                    reading = (float(row["unix"]), value)
                    series.setdefault((node, number), []).append(reading)
    return series


def _draw_series(
    axes: Axes, series: DeviceReadings, begin: float, styles: Sequence[Style]
) -> list[list[float]]:
    """Draw a line per series, broken where a run stopped and was resumed; return the drawn values.
    Many readings are averaged over equally many each, so that lines are equally smooth throughout.
    """
    shown = []
    for (_, readings), style in zip(series.items(), styles, strict=True):
        step, values = math.ceil(len(readings) / MOST_POINTS), list[float]()
        for part in _unbroken(np.array(readings, float)):
            count = max(step, len(part) - len(part) % step)
            means = [each.mean(axis=0) for each in np.array_split(part[:count], count // step)]
            times, heights = [time - begin for time, _ in means], [value for _, value in means]
            kit.line(axes, times, heights, style, linewidth=1, alpha=0.85)
            values += [float(value) for _, value in means]
        shown.append(values)
    return shown


def _unbroken(readings: np.ndarray) -> list[np.ndarray]:
    """The readings (time, value), split where nothing was read for long."""
    pauses = np.diff(readings[:, 0])
    usual = float(np.median(pauses)) if len(pauses) else 0.0
    long = np.flatnonzero(pauses > max(LONG_PAUSE_S, MANY_PAUSES * usual))
    return np.split(readings, long + 1)

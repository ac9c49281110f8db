"""Which groups share a panel of a figure, what its lines are called, and in which style."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.text import Annotation

from harness.core.records import FAILURES
from harness.core.strategies import DDP
from harness.read import drawing as kit
from harness.read.drawing import Drawn, Style
from harness.read.labels import (
    BARE,
    MACHINE,
    STRATEGY,
    column_of,
    heading_of,
    plain_text,
    shown_axes,
    strategy_text,
)
from harness.read.records.comparable import ACCURACY
from harness.read.records.groups import Group
from harness.read.records.runs import Run
from harness.read.records.sweeps import SweepResults
from harness.read.statistics import is_rate

# These may have panels of their own, in this order, where a panel would hold too many lines.
INTO_PANELS = ("link", "strategy", "model", "per_gpu_batch", "lr")
# Panels get scales of their own where one ends so many times as high as another.
FAR_APART = 3.0
# A name at the end of a line has at most so many letters; ends of lines within this share of the
# axis count as one place.
AT_END, ONE_PLACE = 16, 0.08
# The first of these that a sweep varies decides the colour of its groups.
COLOUR_BY = ("strategy", "setup", "link", "lr", "per_gpu_batch")
# These have one style on a whole page.
OF_PAGE = ("strategy", "setup", "link")


class Series(NamedTuple):
    name: str
    groups: list[Group]


class Panel(NamedTuple):
    title: str
    lines: list[Series]


def axis_text(group: Group, axis: str) -> str:
    """The value of a group on an axis, as in every title, legend and list; "" where unknown."""
    if axis == STRATEGY:
        return strategy_text({**group.label, STRATEGY: group.setting(STRATEGY)}) or "plain"
    value = group.machine_kind if axis == MACHINE else group.setting(axis)
    if value is None and axis == "link":
        value = group.identity["link"]
    if value is None:
        return ""
    text = plain_text(value)
    return text if axis in BARE else f"{heading_of(column_of(axis))} {text}"


class Styles:
    """The styles of a page: each strategy, set-up and link has one style in all its figures."""

    def __init__(self, sweeps: Iterable[SweepResults]) -> None:
        known: dict[str, set[str]] = {axis: set() for axis in OF_PAGE}
        for sweep in sweeps:
            for axis in OF_PAGE:
                if axis in (*sweep.axes, STRATEGY):
                    known[axis] |= {key_text(group, axis) for group in sweep.groups}
        self._styles = {
            axis: (strategy_styles if axis == STRATEGY else _ordered_styles)(values)
            for axis, values in known.items()
        }

    def of_axis(self, axis: str, values: Iterable[str]) -> dict[str, Style]:
        """Styles of these values; an axis not shared by the page gets styles of this figure."""
        shown = dict.fromkeys(values)
        if axis not in self._styles:
            return {value: kit.cycle(number) for number, value in enumerate(shown)}
        return {value: style for value, style in self._styles[axis].items() if value in shown}

    def of_groups(
        self, sweep: SweepResults, groups: Sequence[Group]
    ) -> tuple[list[str], dict[str, Style]]:
        """For each group the value that decides its colour, and the styles of these values."""
        axis = next((axis for axis in COLOUR_BY if axis in sweep.varied), "")
        names = [key_text(group, axis) if axis else "" for group in groups]
        return names, self.of_axis(axis, names)

    def of_lines(self, sweep: SweepResults, panels: Iterable[Panel]) -> dict[str, Style]:
        """Lines that differ on one axis have its styles. On several, the first decides the colour;
        marker and dash then distinguish lines of one colour.
        """
        lines: dict[str, list[Group]] = {}
        for panel in panels:
            for line in panel.lines:
                lines.setdefault(line.name, []).extend(line.groups)
        for axis in (axis for axis in OF_PAGE if axis in sweep.axes):
            values = [{key_text(group, axis) for group in groups} for groups in lines.values()]
            if all(len(value) == 1 for value in values) and len(set().union(*values)) > 1:
                break
        else:
            return self.of_axis("", lines)
        of_axis = self.of_axis(axis, set().union(*values))
        styles, used = {}, Counter[str]()
        for name, (value,) in zip(lines, values, strict=True):
            number = used[of_axis[value].colour]
            used[of_axis[value].colour] += 1
            other = Style(of_axis[value].colour, kit.cycle(number).marker, kit.DASHES[number % 3])
            styles[name] = of_axis[value] if len(of_axis) == len(lines) else other
        return styles


def key_text(group: Group, axis: str) -> str:
    """Like axis_text, but a set-up without its tag where the label has the link by itself."""
    return group.topology if axis == "setup" and "link" in group.label else axis_text(group, axis)


def _natural(text: str) -> list[Any]:
    pieces = re.split(r"(\d+(?:\.\d+)?(?:e-?\d+)?)", text)
    return [float(piece) if n % 2 else piece for n, piece in enumerate(pieces)]


def _ordered_styles(values: Collection[str]) -> dict[str, Style]:
    """Styles by the values alone, not by the order of records."""
    return {value: kit.cycle(n) for n, value in enumerate(sorted({*values}, key=_natural))}


# Colours of a strategy in every figure; where there are several, by how rarely it exchanges.
FAMILIES: dict[str, tuple[str, ...]] = {
    "ddp": ("#CC79A7",),  # with a code; plain ddp stands out
    "fsdp": ("#999933",),
    "dp": ("#332288",),
    "local_sgd": ("#0072B2", "#56B4E9"),
    "diloco": ("#D55E00", "#E69F00", "#8C510A"),
    "hivemind": ("#009E73",),
    "single": (kit.FAINT,),
}
OWN = ("#882255",)  # for a strategy class of a user
RARER = (20, 100)  # updates between exchanges: from each on the next colour


def strategy_styles(values: Collection[str]) -> dict[str, Style]:
    """The colour follows from the strategy alone; those of one colour differ in marker and dash.

    Plain ddp stands out.
    """
    styles, of_colour = dict[str, Style](), Counter[str]()
    for value in sorted({*values} - {DDP}, key=_natural):
        family, period = value.split(" ")[0], re.search(r" h(\d+)\b", value)
        rarer = sum(int(period[1]) >= updates for updates in RARER) if period else 0
        colours = FAMILIES.get(family, OWN)
        colour = colours[min(rarer, len(colours) - 1)]
        number, first = of_colour[colour], [*FAMILIES, family].index(family) + rarer
        of_colour[colour] += 1
        marker = kit.cycle(first + number).marker
        styles[value] = Style(colour, marker, kit.DASHES[number % len(kit.DASHES)])
    return {DDP: kit.BASE} | styles


def arrange(
    sweep: SweepResults, groups: Sequence[Group], across: Collection[str] = (),
    by_setup: bool = True, most: int = kit.MOST_PANELS,
) -> tuple[list[Panel], list[str]]:  # fmt: skip
    """The panels with their lines, and notes on what there was no room for.

    across: axes along which a line goes, so that its groups differ in them alone.
    """
    beside = [axis for axis in ("script", "setup")[: 1 + by_setup] if axis not in across]
    more = [axis for axis in INTO_PANELS if axis in sweep.varied and axis not in across]
    arranged = _arranged(sweep, groups, beside, across)
    while more and max(len(lines) for lines in arranged.values()) > kit.MOST_LINES:
        beside.append(more.pop(0))
        arranged = _arranged(sweep, groups, beside, across)
    notes, panels = left_out(len(arranged) - most, "panels"), []
    for title, lines in [*arranged.items()][:most]:
        names = [*lines]
        if len(names) > kit.MOST_LINES:
            rest = "; ".join(names[kit.MOST_LINES :][:5])
            notes.append(
                f"{title}: {len(names) - kit.MOST_LINES} more lines are not drawn: {rest} ..."
            )
        panels.append(Panel(title, [Series(name, lines[name]) for name in names[: kit.MOST_LINES]]))
    return panels, notes


def _arranged(
    sweep: SweepResults, groups: Sequence[Group], beside: Sequence[str], across: Collection[str]
) -> dict[str, dict[str, list[Group]]]:
    machine = [MACHINE] if len(sweep.machines) > 1 else []
    within = [a for a in (*shown_axes(sweep.naming), *machine) if a not in {*beside, *across}]
    of_panels: dict[str, list[Group]] = {}
    for group in groups:
        texts = (title_text(sweep, group, axis) for axis in beside)
        of_panels.setdefault(", ".join(filter(None, texts)), []).append(group)
    arranged: dict[str, dict[str, list[Group]]] = {}
    for title, of_panel in of_panels.items():
        # What all lines of a panel share stands in its title.
        shared = [a for a in within if len({axis_text(group, a) for group in of_panel}) == 1]
        if len(shared) == len(within) or len(of_panels) == 1:
            shared = []
        whole = ", ".join(filter(None, [title, *(axis_text(of_panel[0], axis) for axis in shared)]))
        lines: dict[str, list[Group]] = {}
        for group in of_panel:
            texts = (_line_text(group, axis) for axis in within if axis not in shared)
            lines.setdefault(", ".join(filter(None, texts)), []).append(group)
        arranged[whole] = lines
    return arranged


def _line_text(group: Group, axis: str) -> str:
    """What an axis adds to a line's name; of links "one node" for groups of a single node."""
    on_one_node = group.topology.startswith("1_")
    return axis_text(group, axis) or ("one node" if axis == "link" and on_one_node else "")


def title_text(sweep: SweepResults, group: Group, axis: str) -> str:
    """The text of an axis in a title; the only script of a sweep is named by its model."""
    model = group.setting("model") if axis == "script" and axis not in sweep.varied else None
    return Path(str(model)).name if model else key_text(group, axis)


def rows_of_panels(
    panels: Sequence[Panel], measures: dict[str, str], x: str, height: float
) -> tuple[Figure, list[tuple[Axes, Panel, str]]]:
    """A row of panels for each measure, labelled by its value in `measures`; and what is where."""
    wide = kit.panels_per_row(len(panels))
    blocks = [panels[n : n + wide] for n in range(0, len(panels), wide)]
    rows = [(measure, block) for block in blocks for measure in measures]
    figure, axes = kit.panels(len(rows) * wide, height, wide)
    first, last = next(iter(measures)), next(reversed(measures))
    placed = list[tuple[Axes, Panel, str]]()
    for y, (measure, block) in enumerate(rows):
        row = axes[y * wide : (y + 1) * wide]
        for cell in row[len(block) :]:
            cell.set_visible(False)
        for cell, panel in zip(row, block, strict=False):
            title, below = panel.title if measure == first else "", x if measure == last else ""
            kit.describe(cell, title, below, measures[measure] if cell is row[0] else "")
            placed.append((cell, panel, measure))
    return figure, placed


def same_scale(axes: Sequence[Axes], unlike: float = math.inf, across: bool = False) -> None:
    """Give panels of one measure one axis, upright or across: a higher line is a larger value.
    Not where one ends more than `unlike` times as high as another, which would be flat.
    """
    drawn = [panel for panel in axes if panel.has_data()]
    ends = [panel.get_xlim() if across else panel.get_ylim() for panel in drawn]
    tops = [high for _, high in ends]
    alike = bool(tops) and (math.isinf(unlike) or max(tops) <= unlike * min(tops))
    for panel in drawn if alike else ():
        put = panel.set_xlim if across else panel.set_ylim
        put(min(low for low, _ in ends), max(high for _, high in ends))


def in_order(lines: Iterable[Series], key: Callable[[Group], Any]) -> list[Series]:
    return [Series(line.name, sorted(line.groups, key=key)) for line in lines]


def left_out(count: int, what: str) -> list[str]:
    if count == 1:
        noun, *rest = what.split(" ")
        return [f"1 more {' '.join([noun.removesuffix('s'), *rest])} is not drawn"]
    return [f"{count} more {what} are not drawn"] if count > 0 else []


def run_name(run: Run) -> str:
    """What distinguishes a run from the others of its group."""
    seed, repeat = run.repetition
    texts = [f"seed {seed}"] if seed is not None else []
    texts += [f"repeat {repeat}"] if repeat not in (None, 1) else []
    return ", ".join(texts) or "one run"


def failures(group: Group) -> list[str]:
    """Outcomes of the failed runs of a group, counted."""
    counts = Counter(run.state for run in group.runs if run.state in FAILURES)
    return [state if n == 1 else f"{n} x {state}" for state, n in counts.items()]


def failed_groups(sweep: SweepResults, groups: Sequence[Group] | None = None) -> str:
    """Those of these groups, or of all of the sweep, that have failed runs, for a note."""
    return kit.listed(
        f"{sweep.short_name_of(group)} ({', '.join(states)})"
        for group in (sweep.groups if groups is None else groups)
        if (states := failures(group))
    )


def without_place(sweep: SweepResults, shown: Sequence[Group] = ()) -> list[str]:
    """A note on the failed runs of the groups that a figure does not show."""
    failed = failed_groups(sweep, [group for group in sweep.groups if group not in shown])
    return [f"failed runs have no place here: {failed}"] if failed else []


class Point(NamedTuple):
    """The mean of a group at its place on the horizontal axis."""

    x: float
    mean: float
    low: float
    high: float
    values: list[float]
    text: str


def hollow_mark() -> Artist:
    """For a legend: what an outline means."""
    outline: dict[str, Any] = {"markerfacecolor": kit.WHITE, "markersize": 6, "linestyle": ""}
    return kit.legend_mark(kit.HOLLOW, "hollow: all runs beside other programs", **outline)


def draw_group(
    drawn: Drawn, axes: Axes, x: float, group: Group, measure: str, line: str, style: Style,
    drawn_at: float | None = None, unit: str = "",
) -> Point | None:  # fmt: skip
    """Each run as a point, the group's mean with its interval; None where no run has the measure.

    drawn_at: where it is drawn, if not at x, but beside the groups of other lines.
    """
    by_run = group.by_run(measure)
    if not by_run:
        return None
    values = [value for _, value in by_run]
    tips = [f"{line}, {x:g}, {run_name(run)}: {value:,.4g}" for run, value in by_run]
    at = x if drawn_at is None else drawn_at
    kit.run_points(drawn, axes, [at] * len(values), values, style, tips)
    harmonic, repeats = is_rate(measure), group.values(measure)
    mean, low, high = kit.mean_with_interval(
        axes, at, repeats, style, harmonic, is_fraction=measure == ACCURACY
    )
    text = f"{line or 'all'} at {x:g}{unit} {kit.numbers_of(repeats, harmonic)}"
    return Point(x, mean, low, high, values, text)


def name_lines(
    figure: Figure, axes: Sequence[Axes], styles: Mapping[str, Style], more: Sequence[Artist] = ()
) -> None:
    """Name each line at its end, right of the first panel where all ends are apart; if there is no
    such panel, draw a legend. Call it when the axes are set.
    """
    named = [name for name in styles if name]
    panel, ends = next(((panel, ends) for panel in axes if (ends := _ends_apart(panel, named))),
                       (None, {}))  # fmt: skip
    if panel is None:
        kit.legend(figure, styles, more)
        return
    for name, (end, up) in ends.items():
        kit.small_text(panel, name, end, (8, up))
    kit.legend(figure, {}, more)


def _ends_apart(axes: Axes, named: Sequence[str]) -> dict[str, tuple[tuple[float, float], float]]:
    """The ends of the lines with these names, if short names fit beside them, and by how many
    points a name is above its end, so that it does not lie on the axis; else none.
    """
    spec, figure = axes.get_subplotspec(), axes.get_figure(root=True)
    assert spec is not None and figure is not None
    points = {str(line.get_label()): np.asarray(line.get_xydata()) for line in axes.lines}
    fits = all(len(points.get(name, ())) and len(name) <= AT_END for name in named)
    taken = any(text.get_text() and text.xycoords == "data" for text in axes.texts
                if isinstance(text, Annotation))  # fmt: skip
    if not (named and fits and spec.is_last_col() and kit.has_room(kit.WIDTH)) or taken:
        return {}
    ends = {name: (float(points[name][-1, 0]), float(points[name][-1, 1])) for name in named}
    at = [axes.transLimits.transform(axes.transScale.transform(end)) for end in ends.values()]
    across, heights = zip(*at, strict=True)
    inches = axes.get_position().height * figure.get_figheight()
    is_one_column = max(across) - min(across) <= ONE_PLACE
    least = kit.HEAD / inches / 2  # half of a name
    above = [max(height, least) for height in heights]
    has_gaps = all(b - a >= 2 * least for a, b in itertools.pairwise(sorted(above)))
    if not (is_one_column and has_gaps):
        return {}
    ups = [72 * inches * (to - height) for to, height in zip(above, heights, strict=True)]
    return {name: (end, up) for (name, end), up in zip(ends.items(), ups, strict=True)}


def set_title(figure: Figure, text: str) -> None:
    """What the figure shows, above its legend and above what stands there already."""
    legend = figure.legends[0] if figure.legends else None
    below = legend.get_title().get_text() if legend else figure.get_suptitle()
    text = kit.wrapped(text, kit.TITLE_LETTERS * figure.get_figwidth())
    text = "\n".join(filter(None, (text, below)))
    kit.make_room(figure, 1 + text.count("\n"))
    if legend:
        legend.set_title(text, FontProperties(size=10))
    else:
        figure.suptitle(text, fontsize=10)

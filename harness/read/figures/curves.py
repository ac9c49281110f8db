"""Speed and quality against the batch, speed against the number of devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from matplotlib.axes import Axes

from harness.core.strategies import SINGLE
from harness.read import drawing as kit
from harness.read.drawing import Drawn, NothingToDraw, Style
from harness.read.figures.panels import (
    FAR_APART,
    Panel,
    Point,
    Series,
    Styles,
    arrange,
    axis_text,
    draw_group,
    failed_groups,
    failures,
    in_order,
    name_lines,
    rows_of_panels,
    same_scale,
    without_place,
)
from harness.read.labels import BATCH, STRATEGY
from harness.read.records.baseline import RATE, STRONG, WEAK, efficiency, is_single_of
from harness.read.records.comparable import ACCURACY, SPEED, refused
from harness.read.records.groups import Group
from harness.read.records.recorded import is_number
from harness.read.records.sweeps import SweepResults
from harness.read.scales import doubling_axis, fitted


def epoch_time_by_batch(sweep: SweepResults, styles: Styles) -> Drawn:
    """Seconds of training per epoch over the batch of a device, a line per set-up; below, the final
    accuracy.
    """
    groups, apart = groups_by_batch(sweep)
    if len({g.setting(BATCH) for g in groups}) < 2:
        raise NothingToDraw("the batch per GPU does not vary")
    along = _along_batch(sweep)
    drawn = _against(
        sweep, styles, groups, lambda g: float(g.setting(BATCH)), along, "batch per GPU (samples)",
        {"epoch_time_s": "training time of an epoch (s)", ACCURACY: "final accuracy"},
    )  # fmt: skip
    if "lr" in along:
        drawn.notes.append("the learning rate changes along with the batch")
    if apart:
        names = kit.listed(map(sweep.short_name_of, apart), ", ")
        drawn.notes.append(
            f"not drawn, as they differ from all lines in more than one thing: {names}"
        )
    return drawn


def accuracy_by_learning_rate(sweep: SweepResults, styles: Styles) -> Drawn:
    """Final accuracy over the learning rate, a line for each of what else varies; below, with a
    target, the training time to it, otherwise the loss.
    """
    begun = [g for g in sweep.groups if g.finished or failures(g)]
    groups = [g for g in begun if is_number(g.setting("lr"))]
    if len({g.setting("lr") for g in groups}) < 2:
        raise NothingToDraw("the learning rate does not vary")
    second = {"eval_loss": "final evaluation loss"}
    if sweep.target is not None:
        second = {"tta_train_s": f"training time to\n{sweep.target} (s)"}
    return _against(
        sweep, styles, groups, lambda g: float(g.setting("lr")), ("lr",), "learning rate",
        {ACCURACY: "final accuracy", **second},
    )  # fmt: skip


def groups_by_batch(sweep: SweepResults) -> tuple[list[Group], list[Group]]:
    """The groups on lines over the batch, or beside such a line; and those that are not drawn."""
    begun = [g for g in sweep.groups if g.finished or failures(g)]
    groups = [g for g in begun if is_number(g.setting(BATCH))]
    apart = _apart(sweep, _lines_of(sweep, groups, _along_batch(sweep)))
    return [group for group in groups if group not in apart], apart


def _along_batch(sweep: SweepResults) -> tuple[str, ...]:
    return (BATCH, "lr") if "lr" in sweep.varied and _has_rate_each(sweep) else (BATCH,)


def _has_rate_each(sweep: SweepResults) -> bool:
    """Whether each batch of a line has one learning rate, unlike in a sweep that tunes the rate."""
    lines = _lines_of(sweep, sweep.groups, (BATCH, "lr"))
    several = any(len({group.setting("lr") for group in of_line}) > 1 for of_line in lines)
    batches = [{group.setting(BATCH) for group in of_line} for of_line in lines]
    return several and [*map(len, batches)] == [*map(len, lines)]


def _apart(sweep: SweepResults, lines: Sequence[Sequence[Group]]) -> list[Group]:
    """Finished groups with a single batch, each of which differs on more than one axis from every
    group on a line at that batch.
    """
    drawn = [group for of_line in lines if len(of_line) > 1 for group in of_line]

    def differ(one: Group, other: Group) -> int:
        return sum(str(one.label.get(axis)) != str(other.label.get(axis)) for axis in sweep.axes)

    def is_beside(group: Group) -> bool:
        same = [other for other in drawn if other.setting(BATCH) == group.setting(BATCH)]
        return not drawn or any(differ(group, other) == 1 for other in same)

    alone = [of_line[0] for of_line in lines if len(of_line) == 1]
    return [group for group in alone if not failures(group) and not is_beside(group)]


def _lines_of(
    sweep: SweepResults, groups: Sequence[Group], along: Collection[str]
) -> list[list[Group]]:
    """The groups by line: those of one line differ along these axes alone."""
    others = [axis for axis in sweep.axes if axis not in along]
    lines: dict[tuple[str, ...], list[Group]] = {}
    for group in groups:
        key = (str(group.machine_kind), *(str(group.label.get(axis)) for axis in others))
        lines.setdefault(key, []).append(group)
    return [*lines.values()]


def throughput(sweep: SweepResults, styles: Styles) -> Drawn:
    """Samples per second over the number of devices; dotted: proportional to the devices."""
    return _against(
        sweep, styles, _scaled(sweep), _devices, _along(sweep),
        "devices", {RATE: "training samples/s"}, ideal=True,
    )  # fmt: skip


def _against(
    sweep: SweepResults, styles: Styles, groups: Sequence[Group],
    x_of: Callable[[Group], float], across: tuple[str, ...], x: str, measures: dict[str, str],
    ideal: bool = False,
) -> Drawn:  # fmt: skip
    """A panel per script, with lines of groups that differ along `across`, each run a point; a row
    of panels for each of these measures that a run has. Some run must have the first measure.
    """
    first, *_ = measures
    if not any(group.values(first) for group in groups):
        raise NothingToDraw(f"no finished run has {first}")
    known = {name: y for name, y in measures.items() if any(g.values(name) for g in groups)}
    most = kit.MOST_PANELS // len(known)
    arranged, notes = arrange(sweep, groups, across, by_setup=False, most=most)
    of_lines = styles.of_lines(sweep, arranged)
    if ideal:
        arranged, of_lines, alone = _from_single(sweep, arranged, of_lines)
        notes += alone
    figure, placed = rows_of_panels(arranged, known, x, 3.0 if len(known) == 1 else 2.6)
    notes += [*_crosses(sweep, groups), *without_place(sweep, groups)]
    drawn = Drawn(figure, notes=[*notes, *sweep.shared_cores])
    texts = {name: list[str]() for name in known}
    for axes, panel, name in placed:
        texts[name].append(_lines(drawn, axes, panel, of_lines, name, x_of, ideal))
    for name in known:
        same = [axes for axes, panel, of in placed if of == name and _has(panel, name)]
        same_scale(same, FAR_APART)
    for axes, _, _ in placed:
        kit.mark_cut_intervals(drawn, axes)
    lines = [line for panel in arranged for line in panel.lines]
    shown = {line.name for line in lines if any(_has(Panel("", [line]), name) for name in known)}
    named = _of_shown(of_lines, shown)
    begins = any(_is_beginning(group, line) for line in lines for group in line.groups)
    marks = [*[SINGLE_PROCESS] * begins, *[IDEAL] * ideal]
    name_lines(figure, [axes for axes, *_ in placed], named, marks)
    drawn.alt = " ".join(
        f"{' '.join(known[name].split())} over {x}, means. {kit.listed(each, ' ')}"
        for name, each in texts.items()
    )
    return drawn


def _has(panel: Panel, measure: str) -> bool:
    return any(group.values(measure) for line in panel.lines for group in line.groups)


def _crosses(sweep: SweepResults, groups: Sequence[Group]) -> list[str]:
    """Add a note that names the groups that have only crosses, which have no line's colour."""
    failed = failed_groups(sweep, [group for group in groups if not group.finished])
    return [f"crosses: {failed}"] if failed else []


def _lines(
    drawn: Drawn, axes: Axes, panel: Panel, styles: dict[str, Style], measure: str,
    x_of: Callable[[Group], float], ideal: bool,
) -> str:  # fmt: skip
    values: list[float] = []
    bars: list[float] = []
    texts, failed = [], []
    lines = in_order(panel.lines, x_of)
    for (name, groups), drawn_at in zip(lines, _beside(lines, x_of, measure), strict=True):
        points: list[Point] = []
        for group in groups:
            begins = _is_beginning(group, Series(name, groups))
            called = axis_text(group, STRATEGY) if begins else name
            whose = f" ({called})" if called else ""
            failed += [(x_of(group), what + whose) for what in failures(group)]
            texts += [f"{called or 'all'} at {x_of(group):g} {what}" for what in failures(group)]
            at, style = x_of(group), BEGINNING if begins else styles[name]
            if missed := len(group.missed(measure)):
                what = f"{missed} of {len(group.finished)} missed it"
                failed.append((at, f"{missed}/{len(group.finished)} missed"))
                texts.append(f"{called or 'all'} at {at:g} {what}")
                drawn.notes.append(f"missed below: {called or 'all'} at {at:g}, {what}")
                continue  # the mean of those that reached it would be too good
            point = draw_group(drawn, axes, at, group, measure, called, style, drawn_at[at])
            if point is not None:
                points.append(point)
        values += [value for point in points for value in point.values]
        bars += [end for point in points for end in (point.low, point.high)]
        texts += [point.text for point in points]
        means = [(point.x, point.mean) for point in points]
        best = _best(means) if ideal else dict(means)
        if ideal and len(best) > 1:
            bars.append(_ideal(axes, points, styles[name], drawn_at))
        _line_with_gaps(axes, best, drawn_at, styles[name], name)
    _same_place(axes, panel, x_of, measure)
    doubling_axis(axes, [x_of(g) for _, groups in panel.lines for g in groups])
    is_fraction = measure == ACCURACY
    if values:
        fitted(axes, [*values, *(bars[-1:] if ideal else [])], bars, is_fraction)
    if values and not is_fraction:
        axes.set_ylim(bottom=0)
    kit.crosses(axes, failed)
    return f"{': '.join(filter(None, (panel.title, kit.listed(texts))))}."


def _beside(
    lines: Sequence[Series], x_of: Callable[[Group], float], measure: str
) -> list[dict[float, float]]:
    """For each line, place -> where it is drawn: beside the other lines that have a mark at this
    place.
    """
    taken = [{x_of(group) for group in groups if group.values(measure)} for _, groups in lines]
    here = {x: [n for n, places in enumerate(taken) if x in places]
            for x in set[float]().union(*taken)}  # fmt: skip
    return [
        {x: x * kit.aside(here[x].index(n), len(here[x])) if x in taken[n] else x
         for x in sorted({x_of(group) for group in groups})}
        for n, (_, groups) in enumerate(lines)
    ]  # fmt: skip


IDEAL = kit.legend_mark(kit.IDEAL, "in proportion to the devices")
BEGINNING = Style(kit.FAINT, "o", "-")  # of a line of several processes
SINGLE_PROCESS = kit.legend_mark(BEGINNING, "single process", linestyle="")


def _is_beginning(group: Group, line: Series) -> bool:
    """Whether a line of another strategy begins with this single process."""
    return group.label.get(STRATEGY) != line.groups[-1].label.get(STRATEGY)


def _ideal(
    axes: Axes, points: Sequence[Point], style: Style, drawn_at: Mapping[float, float]
) -> float:
    """Draw the line in proportion to the devices from the first point; return its end's height."""
    first, last = points[0], points[-1].x
    end = first.mean * last / first.x
    dotted = style._replace(dash=":")
    kit.line(axes, [drawn_at[first.x], drawn_at[last]], [first.mean, end], dotted, alpha=0.8)
    return end


def _from_single(
    sweep: SweepResults, panels: Sequence[Panel], styles: dict[str, Style]
) -> tuple[list[Panel], dict[str, Style], list[str]]:
    """Lines of several processes begin with the single process that does the same work, which then
    has no line of its own: at an equal batch per device, or if there is none, an equal one in all.
    Other single processes are not drawn beside such lines; a note names them.
    """
    groups = [group for panel in panels for _, of_line in panel.lines for group in of_line]
    singles = {}
    for group in groups:
        alike = [one for one in groups if is_single_of(one, group, sweep.axes)]
        weak = [one for one in alike if one.setting(BATCH) == group.setting(BATCH)]
        singles[group] = weak or alike
    begun = {one for of_group in singles.values() for one in of_group}
    alone = [one for one in groups if begun and one not in begun and _is_single(one)]
    joined = list[Panel]()
    for panel in panels:
        lines = list[Series]()
        for name, of_line in panel.lines:
            if not begun.union(alone).issuperset(of_line):
                first = (one for group in of_line for one in singles[group])
                lines.append(Series(name, [*dict.fromkeys((*first, *of_line))]))
        if lines:
            joined.append(Panel(panel.title, lines))
    names = kit.listed(map(sweep.short_name_of, alone), ", ")
    notes = [f"not drawn, as no run of several devices does its work: {names}"] * bool(alone)
    shown = {name for panel in joined for name, _ in panel.lines}
    return joined, _of_shown(styles, shown), notes


def _is_single(group: Group) -> bool:
    """Whether it is of one process, and has no failed run, which has a cross."""
    return group.setting(STRATEGY) == SINGLE and not failures(group)


def _of_shown(styles: dict[str, Style], shown: Collection[str]) -> dict[str, Style]:
    """The styles that a legend names: a line without any point is not among them."""
    return {name: style for name, style in styles.items() if name in shown}


def _line_with_gaps(
    axes: Axes, points: dict[float, float], drawn_at: Mapping[float, float], style: Style, name: str
) -> None:
    """Draw the line, with a gap where a group between two points has no point."""
    across = [x for x in drawn_at if min(points, default=0) <= x <= max(points, default=0)]
    heights = [points.get(x, math.nan) for x in across]
    kit.line(axes, [drawn_at[x] for x in across], heights, style, label=name)


def _best(points: Sequence[tuple[float, float]]) -> dict[float, float]:
    """A line goes through the best of the set-ups with as many devices; the others stand alone."""
    best: dict[float, float] = {}
    for at, value in points:
        best[at] = max(value, best.get(at, value))
    return best


def _same_place(axes: Axes, panel: Panel, x_of: Callable[[Group], float], measure: str) -> None:
    """Name set-ups with as many devices, on the first line that has them."""
    for _, groups in panel.lines[:1]:
        places = [x_of(group) for group in groups]
        for group, at in zip(groups, places, strict=True):
            mean = group.mean(measure)
            if places.count(at) > 1 and mean is not None:
                kit.small_text(axes, group.topology, (at, mean), (7, 0))


def scaling_efficiency(sweep: SweepResults, styles: Styles) -> Drawn:
    """The share of the ideal that is reached: weak at equal batch a device, else strong.

    The ideal follows from one device: a line without a group on one device is not drawn.
    """
    groups = [group for group in _scaled(sweep) if group.finished]
    if all(_devices(group) > 1 for group in groups):
        raise NothingToDraw("no run on one device finished, against which efficiency is measured")
    arranged, notes = arrange(sweep, groups, _along(sweep), by_setup=False)
    arranged, of_lines, alone = _from_single(sweep, arranged, styles.of_lines(sweep, arranged))
    notes += alone
    figure, axes = kit.panels(len(arranged), 3.0)
    notes += without_place(sweep, groups)
    drawn, texts, kinds, shown = Drawn(figure, notes=notes), [], set[str](), set[str]()
    without_one, not_compared = dict[str, None](), dict[str, None]()
    for cell, panel in zip(axes, arranged, strict=True):
        values, reached = [1.0], []
        lines = in_order(panel.lines, _devices)
        beside = _beside(lines, _devices, RATE)
        for (name, line_groups), drawn_at in zip(lines, beside, strict=True):
            if _devices(line_groups[0]) > 1:
                without_one[name or panel.title or "all"] = None
                continue
            points = _efficiencies(line_groups)
            not_compared |= dict.fromkeys(
                f"{sweep.short_name_of(group)} ({', '.join(why)})"
                for group in line_groups[1:]
                if (why := refused(group, line_groups[0], SPEED))
            )
            if len(points) < 2:
                continue
            kinds |= {kind for *_, kind in points[1:]}
            style = of_lines[name]
            best = _best([(at, value) for at, value, *_ in points])
            _line_with_gaps(cell, best, drawn_at, style, name)
            shown.add(name)
            for at, value, low, high, _ in points:
                x = drawn_at[at]
                kit.interval(cell, [x, x], [low, high], style)
                kit.marks(cell, [x], [value], style, markersize=6)
            values += best.values()
            reached += [f"{name or 'all'} {value:.2f} on {at:g}" for at, value, *_ in points[1:]]
        kit.reference(cell, 1.0, kit.IDEAL, linewidth=1.4)
        kit.small_text(cell, "ideal", (0.98, 1.0), (0, 2), ha="right", va="bottom",
                   xycoords=cell.get_yaxis_transform())  # fmt: skip
        doubling_axis(cell, {_devices(g) for _, groups in panel.lines for g in groups})
        cell.set_ylim(0, 1.1 * max(values))  # cut long intervals rather than make the lines flat
        kit.mark_cut_intervals(drawn, cell)
        kit.describe(
            cell,
            panel.title,
            "devices",
            "efficiency against one device" if cell is axes[0] else "",
        )
        text = kit.listed(reached) or "nothing to compare"
        texts.append(f"{': '.join(filter(None, (panel.title, text)))}.")
    left_out = f"left out, as not comparable with one device: {kit.listed(not_compared, ', ')}"
    refusals = [left_out] * bool(not_compared)
    if not kinds:
        none = "no two set-ups have the same batch per device, or the same work"
        raise NothingToDraw("; ".join([none, *refusals]))
    drawn.notes += refusals
    if without_one:
        named = kit.listed(without_one, ", ")
        drawn.notes.append(f"not drawn, as no run on one device does its work: {named}")
    kind = " and ".join(sorted(kinds))
    name_lines(figure, axes, _of_shown(of_lines, shown))
    drawn.notes += [*sweep.shared_cores, f"{kind}; bars are 95 % intervals over the seeds"]
    drawn.alt = f"Scaling efficiency ({kind}) over the number of devices. " + kit.listed(texts, " ")
    return drawn


def _efficiencies(groups: Sequence[Group]) -> list[tuple[float, float, float, float, str]]:
    """(devices, value, low, high, kind) against the group on one device."""
    base = groups[0]
    points = [(_devices(base), 1.0, 1.0, 1.0, "")]
    for group in groups[1:]:
        kind, share = efficiency(group, base)
        if kind in (WEAK, STRONG) and share.value is not None:
            points.append((_devices(group), share.value, *share.ends, kind))
    return points


def _along(sweep: SweepResults) -> tuple[str, ...]:
    """The axes along a line: also the batch of a device where the effective batch is held."""
    return ("setup", BATCH) if sweep.hold == "effective_batch" else ("setup",)


def _devices(group: Group) -> float:
    return float(group.fact("devices") or 0)


def _scaled(sweep: SweepResults) -> list[Group]:
    groups = [g for g in sweep.groups if _devices(g) and (g.finished or failures(g))]
    if len({_devices(group) for group in groups if group.finished}) < 2:
        raise NothingToDraw("the number of devices does not vary")
    return groups

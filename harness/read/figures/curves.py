"""Quality against the epoch; speed against the batch and the number of devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from harness.core.records import FAILURES
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
    run_name,
    same_scale,
    without_place,
)
from harness.read.labels import STRATEGY, heading_of
from harness.read.records.baseline import RATE, STRONG, WEAK, efficiency, is_single_of
from harness.read.records.comparable import ACCURACY
from harness.read.records.groups import Group, repeats_of
from harness.read.records.recorded import is_number
from harness.read.records.runs import Run
from harness.read.records.sweeps import SweepResults
from harness.read.scales import doubling_axis, fitted
from harness.read.statistics import spread

BATCH = "per_gpu_batch"
TITLES = {"train_loss": "training loss", "eval_loss": "test loss"}
Curve = dict[float, float]  # epoch -> value


def accuracy_by_epoch(sweep: SweepResults, styles: Styles) -> Drawn:
    return _by_epoch(sweep, styles, ("accuracy",))


def loss_by_epoch(sweep: SweepResults, styles: Styles) -> Drawn:
    """Of training (with dropout, weights moving) above that of the test set."""
    return _by_epoch(sweep, styles, ("train_loss", "eval_loss"))


def own_metrics_by_epoch(sweep: SweepResults, styles: Styles) -> Drawn:
    """What the scripts' own compute_metrics gave."""
    own = dict.fromkeys(name for run in sweep.runs for name in run.own_metrics)
    if not own:
        raise NothingToDraw("no run has metrics of its script's own")
    return _by_epoch(sweep, styles, [*own][: kit.MOST_PANELS])


def _by_epoch(sweep: SweepResults, styles: Styles, metrics: Sequence[str]) -> Drawn:
    """A row of panels per measure; a failed run ends with a cross."""
    groups = [g for g in sweep.groups if any(_curve(r, m) for r in g.runs for m in metrics)]
    if not groups:
        raise NothingToDraw(f"no epoch of any run has {' or '.join(metrics)}")
    if all(len(run.epochs) < 2 for group in groups for run in group.runs):
        raise NothingToDraw("one epoch makes no line")
    arranged, notes = arrange(sweep, groups, most=kit.MOST_PANELS // len(metrics))
    of_lines = styles.of_lines(sweep, arranged)
    figure, placed = _rows(arranged, {metric: _title(metric) for metric in metrics}, "epoch", 2.4)
    notes += without_place(sweep, groups)
    drawn = Drawn(figure, notes=notes)
    texts = [_draw(drawn, axes, panel, metric, of_lines) for axes, panel, metric in placed]
    for metric in metrics:
        same_scale([axes for axes, _, of in placed if of == metric])
    name_lines(figure, [axes for axes, *_ in placed], of_lines)
    drawn.alt = f"{' and '.join(map(_title, metrics))} by epoch. " + kit.listed(
        filter(None, texts), " "
    )
    return drawn


def _rows(
    panels: Sequence[Panel], measures: dict[str, str], x: str, height: float
) -> tuple[Figure, list[tuple[Axes, Panel, str]]]:
    """A row of panels for each measure, which has the name of its axis; what stands where."""
    wide = kit.panels_per_row(len(panels))
    blocks = [panels[n : n + wide] for n in range(0, len(panels), wide)]
    rows = [(measure, block) for block in blocks for measure in measures]
    figure, axes = kit.panels(len(rows) * wide, height, wide)
    first, last = next(iter(measures)), next(reversed(measures))
    placed = list[tuple[Axes, Panel, str]]()
    for y, (measure, block) in enumerate(rows):
        row = axes[y * wide : (y + 1) * wide]
        for place in row[len(block) :]:
            place.set_visible(False)
        for place, panel in zip(row, block, strict=False):
            title, below = panel.title if measure == first else "", x if measure == last else ""
            kit.describe(place, title, below, measures[measure] if place is row[0] else "")
            placed.append((place, panel, measure))
    return figure, placed


def _title(metric: str) -> str:
    return TITLES.get(metric, heading_of(metric))


def _curve(run: Run, metric: str) -> Curve:
    rows = [(row.get("epoch"), row.get(metric)) for row in run.epochs]
    return {float(epoch): float(v) for epoch, v in rows if is_number(epoch) and is_number(v)}


def _draw(drawn: Drawn, axes: Axes, panel: Panel, metric: str, styles: dict[str, Style]) -> str:
    values: list[float] = []
    bars: list[float] = []
    last = []
    shown = [v for _, groups in panel.lines for g in groups for r in g.runs
             for v in _curve(r, metric).values()]  # fmt: skip
    share = bool(shown) and 0 <= min(shown) <= max(shown) <= 1 and not metric.endswith("loss")
    for name, groups in panel.lines:
        for group in groups:
            curves = [(run, c) for run in group.runs if (c := _curve(run, metric))]
            if not curves:
                continue
            values += [value for _, curve in curves for value in curve.values()]
            bars += _mean(axes, curves, metric, styles[name], share, name)
            _runs(drawn, axes, curves, name, styles[name])
            ends = repeats_of(metric, ((run, curve[max(curve)]) for run, curve in curves))
            last.append(f"{name or 'all runs'} {kit.numbers_of(ends)}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    if not values:
        return ""
    fitted(axes, values, bars, share)
    return f"{panel.title}, {_title(metric)} at the end: {kit.listed(last)}."


def _mean(
    axes: Axes, curves: Sequence[tuple[Run, Curve]], metric: str, style: Style, share: bool,
    name: str,
) -> list[float]:  # fmt: skip
    """The mean over what has an epoch, and its 95 % interval as a band.

    share: no mean of the measure is below 0 or above 1, whatever Student's t says.
    """
    epochs = sorted({epoch for _, curve in curves for epoch in curve})
    at = ([(run, curve[e]) for run, curve in curves if e in curve] for e in epochs)
    spreads = [spread(repeats_of(metric, each)) for each in at]
    means = [float(s.mean or 0.0) for s in spreads]
    lows, highs = map(list, zip(*(s.ends for s in spreads), strict=True))
    if share:
        lows, highs = [max(low, 0.0) for low in lows], [min(high, 1.0) for high in highs]
    kit.line(axes, epochs, means, style, label=name, marker=style.marker, markersize=4, zorder=3)
    if lows != means:
        axes.fill_between(epochs, lows, highs, color=style.colour, alpha=0.12, linewidth=0)
    return [*lows, *highs]


def _runs(
    drawn: Drawn, axes: Axes, curves: Sequence[tuple[Run, Curve]], name: str, style: Style
) -> None:
    points = [(run, epoch, v) for run, curve in curves for epoch, v in curve.items()]
    tips = [f"{name}, {run_name(run)}, epoch {epoch:g}: {v:.4g}" for run, epoch, v in points]
    kit.run_points(drawn, axes, [e for _, e, _ in points], [v for _, _, v in points], style, tips)
    for run, curve in curves:
        if run.state in FAILURES:
            end = max(curve)
            axes.plot([end], [curve[end]], marker="X", color=kit.FAILED, markersize=8, zorder=5)
            kit.small_text(
                axes, run.state, (end, curve[end]), (5, 5), color=kit.FAILED, va="bottom"
            )


def epoch_time_by_batch(sweep: SweepResults, styles: Styles) -> Drawn:
    """Seconds of training per epoch over the batch of a device, a line a set-up; below, what the
    batch costs in quality.
    """
    begun = [g for g in sweep.groups if g.finished or failures(g)]
    groups = [g for g in begun if is_number(g.setting(BATCH))]
    if len({g.setting(BATCH) for g in groups}) < 2:
        raise NothingToDraw("the batch per GPU does not vary")
    along, notes = (BATCH,), list[str]()
    if "lr" in sweep.varied and _has_rate_each(sweep, groups):
        along, notes = (BATCH, "lr"), ["each batch has a learning rate of its own"]
    alone = [
        of_line[0] for of_line in _lines_of(sweep, groups, along)
        if len(of_line) == 1 and not failures(of_line[0])
    ]  # fmt: skip
    if 0 < len(alone) < len(groups):
        without = {*map(id, alone)}
        groups = [group for group in groups if id(group) not in without]
        names = kit.listed(map(sweep.short_name_of, alone), ", ")
        notes.append(f"not drawn, as no other batch differs in nothing else: {names}")
    drawn = _against(
        sweep, styles, groups, lambda g: float(g.setting(BATCH)), along, "batch per GPU (samples)",
        {"epoch_time_s": "training time of an epoch (s)", ACCURACY: "final accuracy"},
    )  # fmt: skip
    drawn.notes += notes
    return drawn


def _has_rate_each(sweep: SweepResults, groups: Sequence[Group]) -> bool:
    """Whether the learning rate goes along with the batch, as where it is tuned for each."""
    lines = _lines_of(sweep, groups, (BATCH, "lr"))
    several = any(len({group.setting("lr") for group in of_line}) > 1 for of_line in lines)
    batches = [{group.setting(BATCH) for group in of_line} for of_line in lines]
    return several and [*map(len, batches)] == [*map(len, lines)]


def _lines_of(
    sweep: SweepResults, groups: Sequence[Group], along: Collection[str]
) -> list[list[Group]]:
    """The groups that differ along these axes alone."""
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
    place: Callable[[Group], float], across: tuple[str, ...], x: str, measures: dict[str, str],
    ideal: bool = False,
) -> Drawn:  # fmt: skip
    """A panel a script, a line for what is the same along it, each run a point; a row of them for
    each of these measures that a run has, the first of which one must have.
    """
    first, *_ = measures
    if not any(group.values(first) for group in groups):
        raise NothingToDraw(f"no finished run has {first}")
    known = {name: y for name, y in measures.items() if any(g.values(name) for g in groups)}
    most = kit.MOST_PANELS // len(known)
    arranged, notes = arrange(sweep, groups, across, by_setup=False, most=most)
    of_lines = styles.of_lines(sweep, arranged)
    if ideal:
        arranged, of_lines = _from_single(sweep, arranged, of_lines)
    figure, placed = _rows(arranged, known, x, 3.0 if len(known) == 1 else 2.6)
    notes += [*_crosses(sweep, groups), *without_place(sweep, groups)]
    drawn = Drawn(figure, notes=[*notes, *sweep.shared_cores])
    texts = {name: list[str]() for name in known}
    for axes, panel, name in placed:
        texts[name].append(_lines(drawn, axes, panel, of_lines, name, place, ideal))
    for name in known:
        same = [axes for axes, panel, of in placed if of == name and _has(panel, name)]
        same_scale(same, FAR_APART)
    for axes, _, _ in placed:
        kit.mark_cut_intervals(drawn, axes)
    lines = [line for panel in arranged for line in panel.lines]
    shown = {line.name for line in lines if any(_has(Panel("", [line]), name) for name in known)}
    named = _of_shown(of_lines, shown)
    name_lines(figure, [axes for axes, *_ in placed], named, [IDEAL] if ideal else [])
    drawn.alt = " ".join(
        f"{known[name]} over {x}, means. {kit.listed(each, ' ')}" for name, each in texts.items()
    )
    return drawn


def _has(panel: Panel, measure: str) -> bool:
    return any(group.values(measure) for line in panel.lines for group in line.groups)


def _crosses(sweep: SweepResults, groups: Sequence[Group]) -> list[str]:
    """A cross has no colour of a line: a note names the groups that have crosses alone."""
    failed = failed_groups(sweep, [group for group in groups if not group.finished])
    return [f"crosses: {failed}"] if failed else []


def _lines(
    drawn: Drawn, axes: Axes, panel: Panel, styles: dict[str, Style], measure: str,
    place: Callable[[Group], float], ideal: bool,
) -> str:  # fmt: skip
    values: list[float] = []
    bars: list[float] = []
    texts, failed = [], []
    lines = in_order(panel.lines, place)
    for (name, groups), drawn_at in zip(lines, _beside(lines, place, measure), strict=True):
        points: list[Point] = []
        for group in groups:
            of_line = group.label.get(STRATEGY) == groups[-1].label.get(STRATEGY)
            called = name if of_line else axis_text(group, STRATEGY)
            whose = f" ({called})" if called else ""
            failed += [(place(group), what + whose) for what in failures(group)]
            texts += [f"{called or 'all'} at {place(group):g} {what}" for what in failures(group)]
            at, style = place(group), styles[name]
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
    _same_place(axes, panel, place, measure)
    doubling_axis(axes, [place(g) for _, groups in panel.lines for g in groups])
    share = measure == ACCURACY
    if values:
        fitted(axes, [*values, *(bars[-1:] if ideal else [])], bars, share)
    if values and not share:
        axes.set_ylim(bottom=0)
    kit.crosses(axes, failed)
    return f"{': '.join(filter(None, (panel.title, kit.listed(texts))))}."


def _beside(
    lines: Sequence[Series], place: Callable[[Group], float], measure: str
) -> list[dict[float, float]]:
    """For each line, from each of its places to where it is drawn: beside the others that have a
    mark there.
    """
    marks = [{place(group) for group in groups if group.values(measure)} for _, groups in lines]
    here = {x: [n for n, places in enumerate(marks) if x in places]
            for x in set[float]().union(*marks)}  # fmt: skip
    return [
        {x: x * kit.aside(here[x].index(n), len(here[x])) if x in marks[n] else x
         for x in sorted({place(group) for group in groups})}
        for n, (_, groups) in enumerate(lines)
    ]  # fmt: skip


IDEAL = Line2D([], [], color=kit.FAINT, linestyle=":", label="in proportion to the devices")


def _ideal(
    axes: Axes, points: Sequence[Point], style: Style, drawn_at: Mapping[float, float]
) -> float:
    """From the first point in proportion to the devices; the height of its end."""
    first, last = points[0], points[-1].x
    end = first.mean * last / first.x
    dotted = style._replace(dash=":")
    kit.line(axes, [drawn_at[first.x], drawn_at[last]], [first.mean, end], dotted, alpha=0.8)
    return end


def _from_single(
    sweep: SweepResults, panels: Sequence[Panel], styles: dict[str, Style]
) -> tuple[list[Panel], dict[str, Style]]:
    """Lines of several processes begin with the single one that does the same work, which then has
    no line of its own.
    """
    groups = [group for panel in panels for _, of_line in panel.lines for group in of_line]
    singles = {
        id(group): [one for one in groups if is_single_of(one, group, sweep.axes)]
        for group in groups
    }
    begun = {id(one) for group in groups for one in singles[id(group)]}
    joined = list[Panel]()
    for panel in panels:
        lines = list[Series]()
        for name, of_line in panel.lines:
            if not all(id(group) in begun for group in of_line):
                first = {id(one): one for group in of_line for one in singles[id(group)]}
                own = {id(group): group for group in of_line}
                lines.append(Series(name, [*(first | own).values()]))
        if lines:
            joined.append(Panel(panel.title, lines))
    return joined, _of_shown(styles, {name for panel in joined for name, _ in panel.lines})


def _of_shown(styles: dict[str, Style], shown: Collection[str]) -> dict[str, Style]:
    """What a legend names: a line without any point has no place in it."""
    return {name: style for name, style in styles.items() if name in shown}


def _line_with_gaps(
    axes: Axes, points: dict[float, float], drawn_at: Mapping[float, float], style: Style, name: str
) -> None:
    """Broken where a group between two points has none."""
    across = [x for x in drawn_at if min(points, default=0) <= x <= max(points, default=0)]
    heights = [points.get(x, math.nan) for x in across]
    kit.line(axes, [drawn_at[x] for x in across], heights, style, label=name)


def _best(points: Sequence[tuple[float, float]]) -> dict[float, float]:
    """A line goes through the best of the set-ups with as many devices; the others stand alone."""
    best: dict[float, float] = {}
    for at, value in points:
        best[at] = max(value, best.get(at, value))
    return best


def _same_place(axes: Axes, panel: Panel, place: Callable[[Group], float], measure: str) -> None:
    """Name set-ups with as many devices, on the first line that has them."""
    for _, groups in panel.lines[:1]:
        places = [place(group) for group in groups]
        for group, at in zip(groups, places, strict=True):
            mean = group.mean(measure)
            if places.count(at) > 1 and mean is not None:
                kit.small_text(axes, group.topology, (at, mean), (7, 0))


def scaling_efficiency(sweep: SweepResults, styles: Styles) -> Drawn:
    """The share of the ideal that is reached: weak at equal batch a device, else strong.

    Ideal is what one device does: a line whose fewest devices are more has no place in it.
    """
    groups = [group for group in _scaled(sweep) if group.finished]
    if all(_devices(group) > 1 for group in groups):
        raise NothingToDraw("no run on one device finished, against which efficiency is measured")
    arranged, notes = arrange(sweep, groups, _along(sweep), by_setup=False)
    arranged, of_lines = _from_single(sweep, arranged, styles.of_lines(sweep, arranged))
    figure, axes = kit.panels(len(arranged), 3.0)
    notes += without_place(sweep, groups)
    drawn, texts, kinds, shown = Drawn(figure, notes=notes), [], set[str](), set[str]()
    without_one = dict[str, None]()
    for place, panel in zip(axes, arranged, strict=True):
        values, reached = [1.0], []
        lines = in_order(panel.lines, _devices)
        beside = _beside(lines, _devices, RATE)
        for (name, line_groups), drawn_at in zip(lines, beside, strict=True):
            if _devices(line_groups[0]) > 1:
                without_one[name or panel.title or "all"] = None
                continue
            points = _efficiencies(line_groups)
            if len(points) < 2:
                continue
            kinds |= {kind for *_, kind in points[1:]}
            style = of_lines[name]
            best = _best([(at, value) for at, value, *_ in points])
            _line_with_gaps(place, best, drawn_at, style, name)
            shown.add(name)
            for at, value, low, high, _ in points:
                x = drawn_at[at]
                kit.interval(place, [x, x], [low, high], style)
                place.plot([x], [value], color=style.colour, marker=style.marker, markersize=6)
            values += best.values()
            reached += [f"{name or 'all'} {value:.2f} on {at:g}" for at, value, *_ in points[1:]]
        place.axhline(1.0, color=kit.FAINT, linestyle=":", linewidth=1.4)
        kit.small_text(place, "ideal", (0.98, 1.0), (0, 2), ha="right", va="bottom",
                   xycoords=place.get_yaxis_transform())  # fmt: skip
        doubling_axis(place, {_devices(g) for _, groups in panel.lines for g in groups})
        place.set_ylim(0, 1.1 * max(values))  # long intervals are cut, not the lines made flat
        kit.mark_cut_intervals(drawn, place)
        kit.describe(
            place,
            panel.title,
            "devices",
            "efficiency against one device" if place is axes[0] else "",
        )
        text = kit.listed(reached) or "nothing to compare"
        texts.append(f"{': '.join(filter(None, (panel.title, text)))}.")
    if not kinds:
        raise NothingToDraw("no two set-ups have the same batch per device, or the same work")
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
    """Where the effective batch is held, the batch of a device changes with their number."""
    return ("setup", BATCH) if sweep.hold == "effective_batch" else ("setup",)


def _devices(group: Group) -> float:
    return float(group.fact("devices") or 0)


def _scaled(sweep: SweepResults) -> list[Group]:
    groups = [g for g in sweep.groups if _devices(g) and (g.finished or failures(g))]
    if len({_devices(group) for group in groups if group.finished}) < 2:
        raise NothingToDraw("the number of devices does not vary")
    return groups

"""Time to a target accuracy, and accuracy against cost."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from harness.core.strategies import OF_ONE_STRATEGY
from harness.read import drawing as kit
from harness.read.compare.wording import MEMORY
from harness.read.drawing import Drawn, NothingToDraw, Style
from harness.read.figures.panels import (
    Panel,
    Series,
    Styles,
    axis_text,
    failures,
    hollow_mark,
    left_out,
    run_name,
    set_title,
    title_text,
    without_place,
)
from harness.read.labels import (
    MACHINE,
    STRATEGY,
    TIMES_TO_TARGET,
    column_of,
    heading_of,
    short_text,
    shown_axes,
)
from harness.read.measures import WALL_OF_TRAINING
from harness.read.records.comparable import (
    ACCURACY,
    QUALITY,
    TARGET,
    all_beside_others,
    measured_against,
    refused,
)
from harness.read.records.groups import Group, by_key, repeats_of
from harness.read.records.runs import Run, Target
from harness.read.records.sweeps import SweepResults
from harness.read.scales import log_axis, named_rows, row_names
from harness.read.statistics import Noise

MOST_ROWS = 80
OF_BEST = 0.95  # a target for runs whose sweep names none: this share of the best mean accuracy
# Measure, title with the unit shown, and how many units of the measure one of these is.
COSTS = (
    ("train_time_s", "training time (s)", 1.0),
    (WALL_OF_TRAINING, "wall time without measuring (s)", 1.0),
    ("energy_j", "energy of the devices (kJ)", 1e3),
    (MEMORY, "peak memory of a device (GiB)", 1.0),  # where the sweep asks for it
)

Times = list[tuple[Run, float]]


def group_names(sweep: SweepResults, groups: Sequence[Group]) -> tuple[list[str], float]:
    """A name for the row of each group, of what tells the groups apart, and the height of a row."""
    axes = [a for a in sweep.naming if len({str(group.label.get(a)) for group in groups}) > 1]
    if {*axes} & {*OF_ONE_STRATEGY} and STRATEGY in sweep.naming:
        axes = [axis for axis in sweep.naming if axis in {*axes, STRATEGY}]
    kinds = {group.machine_kind for group in groups}
    return row_names([
        short_text(group.label, tuple(axes or sweep.naming),
                   group.machine_kind if len(kinds) > 1 else None)
        for group in groups
    ])  # fmt: skip


def targets_of(sweep: SweepResults) -> dict[str, Target]:
    """Script -> target: that of the sweep, else OF_BEST of the best mean, rounded down to 1 %."""
    if sweep.target is not None:
        scripts = [script_of(group) for group in sweep.groups if group.finished]
        if not scripts:
            raise NothingToDraw("no run finished")
        return dict.fromkeys(scripts, sweep.target)
    best: dict[str, float] = {}
    for group in sweep.groups:
        if (mean := group.mean(ACCURACY)) is not None:
            script = script_of(group)
            best[script] = max(best.get(script, 0.0), mean)
    if not best:
        raise NothingToDraw(f"no finished run has {ACCURACY}")
    return {s: Target(ACCURACY, math.floor(100 * OF_BEST * mean) / 100) for s, mean in best.items()}


def script_of(group: Group) -> str:
    return str(group.setting("script") or "")


def time_to_accuracy(sweep: SweepResults, styles: Styles) -> Drawn:
    """A row per group: runs as points, the median a line; misses are counted at the right edge."""
    blocks = []
    for script, target in targets_of(sweep).items():
        groups = [group for group in sweep.groups if script_of(group) == script]
        rows = [(group, _times(group, target)) for group in groups]
        rows = [(g, times) for g, times in rows if any(times.values()) or failures(g)]
        if any(math.isfinite(t) for _, times in rows for _, t in times["tta_train_s"]):
            blocks.append((target, rows))
    if not blocks:
        raise NothingToDraw("no run reaches the target, or its time is not known")
    notes = left_out(sum(max(len(rows) - MOST_ROWS, 0) for _, rows in blocks), "groups")
    if sweep.target is None:
        notes.append(f"target: {OF_BEST:.0%} of the best mean accuracy, as no sweep names one")
    of_quality = any(group.values(ACCURACY) for _, rows in blocks for group, _ in rows)
    measures = (*TIMES_TO_TARGET, *[ACCURACY] * of_quality)
    wide = len(measures) if kit.panels_per_row(len(measures)) == len(measures) else 1
    named = [group_names(sweep, [group for group, _ in rows[:MOST_ROWS]]) for _, rows in blocks]
    heights = [height * len(names) + 0.7 for names, height in named]
    figure, axes = kit.grid([h for h in heights for _ in range(len(measures) // wide)], wide)
    drawn, texts = Drawn(figure, notes=notes), []
    shown = [
        (*block, names, measure)
        for block, (names, _) in zip(blocks, named, strict=True)
        for measure in measures
    ]
    for number, (place, (target, rows, names, measure)) in enumerate(zip(axes, shown, strict=True)):
        if measure == ACCURACY:
            text, title = _accuracies(drawn, place, sweep, rows[:MOST_ROWS], styles)
            texts.append(f"Final accuracy, means: {text}.")
        else:
            of_measure = [(group, times[measure]) for group, times in rows[:MOST_ROWS]]
            text = _block(drawn, place, sweep, of_measure, styles)
            _scale(place, [t for _, times in rows for ts in times.values() for _, t in ts], wide)
            title = f"{TIMES_TO_TARGET[measure]} to\n{target.short} (s)"
            texts.append(f"{TIMES_TO_TARGET[measure].capitalize()} to {target}, medians: {text}.")
        named_rows(place, [name if number % wide == 0 else "" for name in names])
        script = script_of(rows[0][0]) if len(blocks) > 1 else ""
        kit.describe(place, script, title)
    timed = [g for _, rows in blocks for g, times in rows[:MOST_ROWS] if any(times.values())]
    kit.legend(figure, {}, [hollow_mark()] if any(map(all_beside_others, timed)) else [])
    drawn.alt = " ".join(texts)
    return drawn


def _accuracies(
    drawn: Drawn, axes: Axes, sweep: SweepResults, rows: Sequence[tuple[Group, dict[str, Times]]],
    styles: Styles,
) -> tuple[str, str]:  # fmt: skip
    """Draw final accuracies as points and means with intervals; return a text and the x title."""
    values, of_values = styles.of_groups(sweep, [group for group, _ in rows])
    texts = []
    for height, ((group, _), value) in enumerate(zip(rows, values, strict=True)):
        by_run, style = group.by_run(ACCURACY), of_values[value]
        if not by_run:
            continue
        tips = [f"{run_name(run)}: {accuracy:.4f}" for run, accuracy in by_run]
        accuracies = [accuracy for _, accuracy in by_run]
        kit.run_points(drawn, axes, accuracies, [height] * len(accuracies), style, tips)
        repeats = group.values(ACCURACY)
        kit.mean_with_interval(axes, height, repeats, style, across=True, is_fraction=True)
        texts.append(f"{sweep.name_of(group)} {kit.numbers_of(repeats)}")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=3))
    axes.ticklabel_format(axis="x", style="plain", useOffset=False)
    return kit.listed(texts), "final accuracy\n(means, 95 %)"


def _times(group: Group, target: Target) -> dict[str, Times]:
    """Measure -> times to the target of the finished runs that count; a miss is infinite."""
    return {measure: toward(group, target).by_run(measure) for measure in TIMES_TO_TARGET}


def toward(group: Group, target: Target) -> Group:
    return replace(group, runs=tuple(run.toward(target) for run in group.finished))


def _block(
    drawn: Drawn, axes: Axes, sweep: SweepResults, rows: Sequence[tuple[Group, Times]],
    styles: Styles,
) -> str:  # fmt: skip
    values, of_values = styles.of_groups(sweep, [group for group, _ in rows])
    texts = [
        f"{sweep.name_of(group)}: {_row(drawn, axes, height, group, times, of_values[value])}"
        for height, ((group, times), value) in enumerate(zip(rows, values, strict=True))
    ]
    return kit.listed(texts)


def _scale(axes: Axes, times: Sequence[float], wide: int) -> None:
    """The same axis for both times; counts of misses have a strip without ticks at the right."""
    finite = [t for t in times if math.isfinite(t)]
    longest = max(len(text.get_text()) for text in axes.texts) if axes.texts else 0
    free = 1 - min(0.03 + 0.016 * longest * wide, 0.6)  # of the width, left of the counts
    low, high = min(finite) / 1.2, max(finite) * 1.05
    if max(finite) > 8 * min(finite):
        right = low * (high / low) ** (1 / free)
        log_axis(axes, "x", few=high > 100 * low)
    else:
        low, right = 0, high / free
    axes.set_xlim(low, right)
    if longest:
        # Of ticks chosen for the whole width, all but the first may lie in the strip.
        if axes.get_xscale() == "linear":
            ticks = list(MaxNLocator(nbins=4).tick_values(low, high))
        else:
            decades = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
            ticks = [10.0**n for n in decades if 10.0**n >= low]
            if len(ticks) < 2:
                ticks = [m * 10.0**n for n in decades for m in (1, 2, 5)]
        axes.set_xticks([tick for tick in ticks if low <= tick <= high])
        kit.strip(axes, high, right, upright=True)


def _row(drawn: Drawn, axes: Axes, height: int, group: Group, times: Times, style: Style) -> str:
    reached = [(run, t) for run, t in times if math.isfinite(t)]
    missed, failed = len(times) - len(reached), failures(group)
    if reached:
        tips = [f"{run_name(run)}: {t:,.4g} s" for run, t in reached]
        kit.run_points(drawn, axes, [t for _, t in reached], [height] * len(reached), style, tips,
                       hollow=all_beside_others(group))  # fmt: skip
    median = statistics.median(repeats_of("tta_train_s", times).values()) if times else math.inf
    if math.isfinite(median):
        ends, solid = [height - 0.3, height + 0.3], style._replace(dash="-")
        kit.line(axes, [median] * 2, ends, solid, linewidth=2, zorder=5)
    texts = [*([f"{missed} of {len(times)} missed"] if missed else []), *failed]
    if texts:
        colour, edge = kit.FAILED if failed else kit.INK, ("axes fraction", "data")
        kit.small_text(axes, ", ".join(texts), (1, height), (-3, 0), ha="right", xycoords=edge,
                       color=colour)  # fmt: skip
    missing = "not reached" if times else "not known"
    value = f"{median:,.3g} s" if math.isfinite(median) else missing
    return ", ".join([value, *texts])


NUMBERED = "numbered: nothing cheaper is as accurate, within the noise where it is known"


class TradeOff(NamedTuple):
    group: Group
    cost: float
    quality: float


def frontier(sweep: SweepResults, styles: Styles) -> Drawn:
    """Accuracy over time, energy and memory; a line joins what nothing cheaper beats."""
    asked = [cost for cost in COSTS if cost[0] != MEMORY or MEMORY in (sweep.columns or ())]
    measured = [group for group in sweep.groups if group.values(ACCURACY)
                and any(group.values(measure) for measure, *_ in asked)]  # fmt: skip
    if not measured:
        raise NothingToDraw("no finished run has accuracy and a time")
    given = _given(measured)
    groups, others = [], dict[str, list[str]]()
    for of_case in by_key(measured, lambda group: _case(group, given)).values():
        groups += _comparable(sweep, of_case, others)
    reasons = [f"{kit.listed(names, ', ')} ({why})" for why, names in others.items()]
    notes = [f"left out, as not comparable with the others: {'; '.join(reasons)}"] * bool(reasons)
    costs = [cost for cost in asked if any(group.values(cost[0]) for group in groups)]
    names, of_names, more = _named_styles(sweep, groups, styles)
    notes += more
    counts = Counter(_case(group, given) for group in groups)
    cases = [case for case, number in counts.items() if number > 1]
    if not cases:
        none = f"no two groups have the same {', '.join(GIVEN)}: nothing to choose"
        raise NothingToDraw("; ".join([none, *notes]))
    alone = [name for group, name in zip(groups, names, strict=True)
             if counts[_case(group, given)] == 1]  # fmt: skip
    if alone:
        given_of = ", ".join(given)
        notes.append(
            f"left out, as nothing else has the same {given_of}: {kit.listed(alone, ', ')}"
        )
    drawn_cases = cases[: kit.MOST_PANELS // len(costs)]
    shown = [(*cost, case) for cost in costs for case in drawn_cases]
    # With a single case, the panels of its costs stand side by side.
    wide = kit.panels_per_row(len(shown if len(cases) == 1 else drawn_cases))
    figure, axes = kit.panels(len(shown), 4.0 if len(cases) == 1 else 3.2, wide)
    notes += left_out(len(cases) - len(drawn_cases), "panels")
    drawn, texts, with_points = Drawn(figure, notes=notes), [], set[str]()
    for number, (place, (measure, title, unit, case)) in enumerate(zip(axes, shown, strict=True)):
        placed = [
            (group, name) for group, name in zip(groups, names, strict=True)
            if _case(group, given) == case and group.values(measure)
        ]  # fmt: skip
        with_points |= {name for _, name in placed}
        points = [
            _point(drawn, place, sweep, group, (measure, unit), of_names[name])
            for group, name in placed
        ]
        if not points:
            place.set_visible(False)
            continue
        texts.append(_best(place, sweep, points, ", ".join(filter(None, [case, title]))))
        place.margins(0.1)  # room for the numbers
        # Where the cases continue in further rows, each panel has its title.
        named = (title_text(sweep, placed[0][0], axis) for axis in given)
        above = ", ".join(filter(None, named)) if number < wide or wide < len(drawn_cases) else ""
        kit.describe(place, above, title, "final accuracy" if number % wide == 0 else "")
        if max(p.cost for p in points) > 8 * min(p.cost for p in points) > 0:
            log_axis(place, "x")
    kit.legend(figure, {n: style for n, style in of_names.items() if n in with_points})
    set_title(figure, NUMBERED.capitalize())
    drawn.notes += without_place(sweep)
    drawn.notes.append(f"{NUMBERED}. " + " ".join(texts).removesuffix("."))
    drawn.alt = "Final accuracy against its cost, means; best for their price: " + " ".join(texts)
    return drawn


# Axes that are given: nobody chooses their values by time or accuracy.
GIVEN = ("script", "model", "dataset", "train_size", "link", MACHINE)


def _given(groups: Sequence[Group]) -> list[str]:
    """The script, and each axis of GIVEN that tells more groups apart than those before it."""
    given = ["script"]
    for axis in GIVEN:
        known = {_case(group, given) for group in groups}
        if len({_case(group, [*given, axis]) for group in groups}) > len(known):
            given.append(axis)
    return given


def _case(group: Group, given: Sequence[str]) -> str:
    return ", ".join(filter(None, (axis_text(group, axis) for axis in dict.fromkeys(given))))


def _comparable(
    sweep: SweepResults, groups: Sequence[Group], others: dict[str, list[str]]
) -> list[Group]:
    """The set of groups that `compare` would compare in time to a target, with the most of them
    quiet, then the largest.

    That question is about both time and quality. The names of the other groups are added to
    `others`, by the reason against them.
    """
    parts: list[list[Group]] = []
    for group in groups:
        part = next((p for p in parts if not any(refused(group, o, TARGET) for o in p)), None)
        if part is None:
            parts.append([group])
        else:
            part.append(group)
    quiet = {id(group) for group in groups if not all_beside_others(group)}
    most = max(parts, key=lambda p: (len(p) > 1, sum(id(group) in quiet for group in p), len(p)))
    for part in parts:
        for group in part if part is not most else ():
            why = ", ".join(refused(group, most[0], TARGET))
            others.setdefault(why, []).append(sweep.short_name_of(group))
    return most


def _named_styles(
    sweep: SweepResults, groups: Sequence[Group], styles: Styles
) -> tuple[list[str], dict[str, Style], list[str]]:
    """The name of each group in the legend, the style of each name, and notes.

    A name holds every chosen axis that varies. If there are more names than a legend has room for,
    the first axis decides, and a note says in what the groups of one style differ.
    """
    chosen = [axis for axis in shown_axes(sweep.axes) if axis not in GIVEN]
    varied = [axis for axis in chosen if len({_choice(group, axis) for group in groups}) > 1]
    names = [", ".join(filter(None, (_choice(g, axis) for axis in varied))) for g in groups]
    if len({*names}) <= kit.MOST_LINES:
        lines = [Series(name, [group]) for name, group in zip(names, groups, strict=True)]
        return names, styles.of_lines(sweep, [Panel("", lines)]), []
    names, of_names = styles.of_groups(sweep, groups)
    alike: dict[str, list[Group]] = {}
    for name, group in zip(names, groups, strict=True):
        alike.setdefault(name, []).append(group)
    unlike = ", ".join(
        heading_of(column_of(axis)) for axis in varied
        if any(len({_choice(group, axis) for group in theirs}) > 1 for theirs in alike.values())
    )  # fmt: skip
    return names, of_names, [f"points of one style differ in {unlike}"]


def _choice(group: Group, axis: str) -> str:
    """The axis as text; a set-up lacks its tag, because the link stands above the panel."""
    return group.topology if axis == "setup" else axis_text(group, axis)


def _point(
    drawn: Drawn, axes: Axes, sweep: SweepResults, group: Group, cost_of: tuple[str, float],
    style: Style,
) -> TradeOff:  # fmt: skip
    """Draw each run and the group's mean cost and accuracy; return these means."""
    measure, unit = cost_of
    runs = [run for run in group.measured(measure) if {measure, ACCURACY} <= run.measures.keys()]
    costs = [run.measures[measure] / unit for run in runs]
    qualities = [run.measures[ACCURACY] for run in runs]
    tips = [f"{sweep.name_of(group)}, {run_name(r)}: {c:,.4g}, {q:.4f}"
            for r, c, q in zip(runs, costs, qualities, strict=True)]  # fmt: skip
    kit.run_points(drawn, axes, costs, qualities, style, tips)
    point = TradeOff(group, (group.mean(measure) or 0.0) / unit, group.mean(ACCURACY) or 0.0)
    kit.value_with_interval(axes, point.cost, (point.quality,) * 3, style)
    return point


def _best(axes: Axes, sweep: SweepResults, points: Sequence[TradeOff], title: str) -> str:
    """Number the points that are better than all cheaper ones; return a text that lists them."""
    best, cheaper_ones = list[TradeOff](), list[TradeOff]()
    for point in sorted(points, key=lambda p: (p.cost, -p.quality)):
        if all(_is_better(point, cheaper) for cheaper in cheaper_ones):
            best.append(point)
        cheaper_ones.append(point)
    kit.line(axes, [p.cost for p in best], [p.quality for p in best], kit.REFERENCE,
             drawstyle="steps-post", linewidth=1.2, zorder=1)  # fmt: skip
    texts, above, before = list[str](), False, best[0]
    width, height = (max(ends) - min(ends) for ends in zip(*(p[1:] for p in points), strict=True))
    for number, (group, cost, quality) in enumerate(best, 1):
        # The step line leaves free the place below right and, if that is taken, above left.
        near = cost - before.cost < width / 20 and quality - before.quality < height / 10
        above, before = not (above and near), best[number - 1]
        shift, ha, va = ((-5, 6), "right", "bottom") if above else ((5, -6), "left", "top")
        kit.small_text(axes, str(number), (cost, quality), shift, ha=ha, va=va,
                   fontsize=9, weight="bold")  # fmt: skip
        texts.append(f"{number} {sweep.short_name_of(group)} ({quality:.4f} at {cost:,.4g})")
    return f"{title}: {'; '.join(texts)}."


def _is_better(one: TradeOff, other: TradeOff) -> bool:
    """Whether `one` is better beyond the noise of the seeds; by the mean if noise is unknown."""
    gain = measured_against(one.group, other.group, ACCURACY, QUALITY)
    judged = gain.judged(0.0)
    if judged in (Noise.NO_SPREAD, Noise.UNKNOWN):
        return one.quality > other.quality
    return judged == Noise.BEYOND and (gain.value or 0.0) > 0

"""Time to accuracy with its spread, and what time and energy buy: accuracy against both."""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.read.drawing import (
    FAILED,
    FAINT,
    INK,
    WIDTH,
    Drawn,
    NothingToDraw,
    Style,
    calm,
    legend,
    listed,
    log_axis,
    panels,
    styles_of,
)
from harness.read.figures.epochs import failed_runs, run_words
from harness.read.labels import strategy_text
from harness.read.records.groups import Group
from harness.read.records.runs import Run, Target, time_to_target
from harness.read.records.sweeps import SweepResults

TIME, QUALITY = "tta_train_s", "accuracy"


MOST_ROWS = 80


OF_BEST = 0.95  # a target for runs whose sweep names none: this share of the best mean accuracy


LONGEST_NAME = 46


def targets_of(sweep: SweepResults) -> dict[str, Target]:
    """Of each script: that of the sweep, or made of the best mean, rounded down to a percent."""
    best: dict[str, float] = {}
    for group in sweep.groups:
        if (mean := group.mean(QUALITY)) is not None:
            script = str(group.setting("script") or "")
            best[script] = max(best.get(script, 0.0), mean)
    if not best:
        raise NothingToDraw(f"no finished run has {QUALITY}")
    named = sweep.target
    made = {
        s: Target(QUALITY, math.floor(100 * OF_BEST * value) / 100) for s, value in best.items()
    }
    return made if named is None else dict.fromkeys(best, named)


def time_to_accuracy(sweep: SweepResults) -> Drawn:
    """A row a group: each run a point, the median a line; a miss stands at the right edge."""
    blocks = []
    for script, target in targets_of(sweep).items():
        groups = [g for g in sweep.groups if str(g.setting("script") or "") == script]
        rows = [(g, _times(g, target)) for g in groups]
        rows = [(g, times) for g, times in rows if times or failed_runs(g)]
        if any(math.isfinite(t) for _, times in rows for _, t in times):
            blocks.append((target, rows))
    if not blocks:
        raise NothingToDraw("no run reaches the target, or its time is not known")
    left = sum(max(len(rows) - MOST_ROWS, 0) for _, rows in blocks)
    notes = [f"{left} more groups are not drawn"] if left else []
    if sweep.target is None:
        notes.append(f"target: {OF_BEST:.0%} of the best mean accuracy, as no sweep names one")
    heights = [0.26 * min(len(rows), MOST_ROWS) + 0.7 for _, rows in blocks]
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.3), layout="constrained")
    grid = figure.add_gridspec(len(blocks), 1, height_ratios=heights)
    drawn, said = Drawn(figure, "", notes), []
    for n, (target, rows) in enumerate(blocks):
        axes = figure.add_subplot(grid[n, 0])
        said.append(_block(drawn, axes, sweep, target, rows[:MOST_ROWS]))
    drawn.alt = "Training time to an accuracy, medians. " + " ".join(said)
    return drawn


def _block(
    drawn: Drawn, axes: Axes, sweep: SweepResults, target: Target,
    rows: list[tuple[Group, list[tuple[Run, float]]]],
) -> str:  # fmt: skip
    calm(axes)
    said = [
        f"{sweep.name_of(group)}: {_row(drawn, axes, height, group, times)}"
        for height, (group, times) in enumerate(rows)
    ]
    names = [cut(sweep.short_name_of(group)) for group, _ in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=9)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    finite = [t for _, times in rows for _, t in times if math.isfinite(t)]
    told = any(len(times) > len([t for _, t in times if math.isfinite(t)]) or failed_runs(group)
               for group, times in rows)  # fmt: skip
    if max(finite) > 8 * min(finite):
        log_axis(axes, "x")
        axes.set_xlim(min(finite) / 1.2, max(finite) * (3 if told else 1.2))
    else:
        axes.set_xlim(0, max(finite) * (1.4 if told else 1.1))
    axes.set_xlabel(f"training time to {_short(target)} (s)", fontsize=9)
    axes.tick_params(axis="x", labelsize=9)
    return f"To {target}: {listed(said)}."


def _short(target: Target) -> str:
    return str(target).replace(" at least ", " ").replace(" at most ", " ")


def cut(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 3] + "..."


def _times(group: Group, target: Target) -> list[tuple[Run, float]]:
    """Of the finished runs that have the metric; a miss takes for ever."""
    found = ((run, time_to_target(run.epochs, target)) for run in group.finished)
    return [(run, times[TIME]) for run, times in found if TIME in times]


def _row(
    drawn: Drawn, axes: Axes, height: int, group: Group, times: list[tuple[Run, float]]
) -> str:
    colour = "#0072B2"
    reached = [(run, t) for run, t in times if math.isfinite(t)]
    missed, failed = len(times) - len(reached), failed_runs(group)
    if reached:
        artist = axes.scatter([t for _, t in reached], [height] * len(reached), s=18, color=colour,
                              alpha=0.5, linewidths=0, zorder=3)  # fmt: skip
        drawn.tip(artist, [f"{run_words(run)}: {t:,.4g} s" for run, t in reached])
    median = statistics.median([t for _, t in times]) if times else math.inf
    if math.isfinite(median):
        axes.plot([median] * 2, [height - 0.3, height + 0.3], color=colour, linewidth=2, zorder=4)
    told = [f"{missed} of {len(times)} missed"] if missed else []
    if told or failed:
        axes.annotate(
            ", ".join([*told, *failed]), (1, height), xycoords=("axes fraction", "data"),
            xytext=(-3, 0), textcoords="offset points", ha="right", va="center", fontsize=8,
            color=FAILED if failed else INK,
        )  # fmt: skip
    value = f"{median:,.3g} s" if math.isfinite(median) else "not reached"
    return ", ".join([value, *told, *failed])


class Point(NamedTuple):
    group: Group
    cost: float
    quality: float


# Measure, its words and unit, and how many of its own unit that is.
COSTS = (
    ("train_time_s", "training time (s)", 1.0),
    ("energy_j", "energy of the devices (kJ)", 1e3),
)


COLOUR_BY = ("strategy", "lr", "per_gpu_batch", "setup", "link")


def frontier(sweep: SweepResults) -> Drawn:
    """Accuracy over time and over energy; the line: what nothing else beats in both."""
    groups = [g for g in sweep.groups if g.values(QUALITY)]
    shown = [cost for cost in COSTS if any(g.values(cost[0]) for g in groups)]
    if not shown:
        raise NothingToDraw("no finished run has accuracy and a time")
    by = next((axis for axis in COLOUR_BY if axis in sweep.axes), "")
    styles = styles_of(_colour_name(g, by) for g in groups)
    scripts = [*dict.fromkeys(g.setting("script") for g in groups)]
    parts = [(*cost, script) for cost in shown for script in scripts]
    figure, axes = panels(len(parts), 4.0 if len(scripts) == 1 else 3.2, len(scripts))
    drawn, said = Drawn(figure, ""), []
    for place, (measure, words, unit, script) in zip(axes, parts, strict=True):
        points = [
            _point(drawn, place, sweep, g, (measure, unit), styles[_colour_name(g, by)])
            for g in groups
            if g.setting("script") == script and g.values(measure)
        ]
        if not points:
            place.set_visible(False)
            continue
        said.append(_best(place, sweep, points, ", ".join(filter(None, [script, words]))))
        place.set_title(script or "", fontsize=10)
        place.set_xlabel(words, fontsize=9)
        place.set_ylabel("final accuracy" if script == scripts[0] else "", fontsize=9)
        if max(p.cost for p in points) > 8 * min(p.cost for p in points) > 0:
            log_axis(place, "x")
    legend(figure, styles)
    lost = [f"{sweep.short_name_of(g)} ({', '.join(f)})" for g in sweep.groups
            if (f := failed_runs(g))]  # fmt: skip
    if lost:
        drawn.notes.append(f"failed runs have no place here: {'; '.join(lost)}")
    drawn.notes.append("numbered: no other is both better and cheaper. " + " ".join(said))
    drawn.alt = "Final accuracy against what it took, means; best for their price: " + " ".join(
        said
    )
    return drawn


def _point(
    drawn: Drawn, axes: Axes, sweep: SweepResults, group: Group, cost_of: tuple[str, float],
    style: Style,
) -> Point:  # fmt: skip
    """Each run faintly, and the means of both."""
    measure, unit = cost_of
    known = [r for r in group.finished if {measure, QUALITY} <= r.measures.keys()]
    pairs = [(r.measures[measure] / unit, r.measures[QUALITY]) for r in known]
    artist = axes.scatter([c for c, _ in pairs], [q for _, q in pairs], s=12, color=style.colour,
                          alpha=0.35, linewidths=0)  # fmt: skip
    drawn.tip(artist, [f"{sweep.name_of(group)}, {run_words(r)}: {c:,.4g}, {q:.4f}"
                       for r, (c, q) in zip(known, pairs, strict=True)])  # fmt: skip
    cost, quality = (statistics.mean(values) for values in zip(*pairs, strict=True))
    axes.plot([cost], [quality], color=style.colour, marker=style.marker, markersize=6, zorder=3)
    return Point(group, cost, quality)


def _colour_name(group: Group, by: str) -> str:
    if by == "strategy":
        return strategy_text(group.label) or ""
    if by == "setup":
        return group.topology
    value = group.setting(by) if by else ""
    return f"{by.replace('per_gpu_batch', 'batch')} {value}" if by else ""


def _best(axes: Axes, sweep: SweepResults, points: list[Point], words: str) -> str:
    """What nothing is both better and cheaper than, numbered in the figure and named in words."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.cost, -p.quality)):
        if not best or point.quality > best[-1].quality:
            best.append(point)
    axes.step([p.cost for p in best], [p.quality for p in best], where="post", color=FAINT,
              linewidth=1.2, linestyle="--", zorder=1)  # fmt: skip
    named = []
    for number, point in enumerate(best, 1):
        axes.annotate(str(number), (point.cost, point.quality), xytext=(-5, 6), fontsize=9,
                      textcoords="offset points", ha="right", color=INK, weight="bold")  # fmt: skip
        told = f"{number} {sweep.short_name_of(point.group)}"
        named.append(f"{told} ({point.quality:.4f} at {point.cost:,.4g})")
    return f"{words}: {'; '.join(named)}."

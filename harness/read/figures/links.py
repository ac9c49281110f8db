"""Figures over the delay between nodes: speed, a line per rate; time to target, per strategy."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from harness.core.links import Link, plain_link
from harness.core.strategies import EACH_UPDATE
from harness.read import drawing as kit
from harness.read.drawing import Drawn, NothingToDraw, Style
from harness.read.figures.panels import (
    Styles,
    arrange,
    axis_text,
    draw_group,
    hollow_mark,
    name_lines,
    run_name,
    same_scale,
)
from harness.read.labels import STRATEGY, TIMES_TO_TARGET, listed, plain_text, shown_axes
from harness.read.records.baseline import RATE, baseline_of
from harness.read.records.comparable import (
    ACCURACY,
    QUALITY,
    all_beside_others,
    refused,
)
from harness.read.records.groups import Group
from harness.read.records.sweeps import SweepResults
from harness.read.scales import delay_axis, log_axis, named_columns, named_rows, row_names
from harness.read.statistics import Estimate, Repeats, difference, in_both

NO_LINK = "no finished run has a link: run the sweep with --launcher netns"
DELAY = "delay between the nodes, one way (ms)"
LINKS = "link between the nodes (delay one way, rate)"
COLUMN_WIDTH, NARROWEST = 4.6, 4.0  # inches
MISS_ROW = 0.085  # of a panel's height: a line of small text
PANEL_HEIGHT = 2.1  # inches
MOST_NAMED = 4


def _linked(sweep: SweepResults) -> list[Group]:
    if "link" not in sweep.axes or not sweep.file.is_file():
        raise NothingToDraw("no sweep over links")
    if not (linked := _with_link(sweep)):
        raise NothingToDraw(NO_LINK)
    return linked


def _with_link(sweep: SweepResults) -> list[Group]:
    return [g for g in sweep.groups if g.finished and g.label.get("link") is not None]


def _check_axes(sweep: SweepResults, *shown: str) -> None:
    if others := [axis for axis in shown_axes(sweep.varied) if axis not in shown]:
        values = (g.label.get(others[0]) for g in [*_with_link(sweep), *sweep.groups])
        value = next(value for value in values if value is not None)
        one = f"{others[0]}={plain_text(value)}"
        raise NothingToDraw(
            f"{listed(others, ', ', MOST_NAMED)} varies too, and this figure has no place for it: "
            f"select one value, as in {sweep.folder}:{one}"
        )


def _link(group: Group) -> Link:
    return plain_link(group.label["link"])


def _rate_text(link: Link) -> str:
    text = str(Link(rate_mbit=link.rate_mbit))
    return text.replace("mbit", " Mbit/s").replace("none", "rate not limited")


def _line_text(link: Link) -> str:
    """All of a link but its delay: jitter and loss, too."""
    others = str(replace(link, delay_ms=0.0, rate_mbit=None)).replace("none", "")
    return ", ".join(filter(None, (_rate_text(link), others)))


def _slowest_last(link: Link) -> tuple[float, str]:
    return -(link.rate_mbit or math.inf), str(link)


def propagation(sweep: SweepResults, _styles: Styles) -> Drawn:
    """Samples per second, each run a point; dashed: the baseline."""
    linked = [group for group in _linked(sweep) if group.values(RATE)]
    if not linked:
        raise NothingToDraw(f"no finished run over a link has {RATE}")
    _check_axes(sweep, "script", "setup", "link")
    if len({(g.label.get("setup"), g.machine) for g in linked}) > 1:
        raise NothingToDraw("links of several set-ups or machines do not go into one line")
    rates = sorted({replace(_link(group), delay_ms=0.0) for group in linked}, key=_slowest_last)
    of_rates = {_line_text(rate): kit.cycle(number) for number, rate in enumerate(rates)}
    arranged, notes = arrange(sweep, linked, ("setup", "link"))
    figure, axes = kit.panels(len(arranged), 3.3)
    drawn, texts = Drawn(figure, notes=notes), []
    for place, panel in zip(axes, arranged, strict=True):
        groups = sorted(panel.lines[0].groups, key=lambda g: _link(g).delay_ms)
        for rate, style in of_rates.items():
            points = [
                draw_group(
                    drawn, place, _link(group).delay_ms, group, RATE, rate, style, unit=" ms"
                )
                for group in groups
                if _line_text(_link(group)) == rate
            ]
            known = [point for point in points if point is not None]
            kit.line(place, [p.x for p in known], [p.mean for p in known], style, label=rate)
            texts += [f"{panel.title}, {point.text}" for point in known]
        for base, mean in _baselines(sweep, groups):
            kit.reference(place, mean)
            over = axis_text(base, "link") or "no network"
            kit.small_text(place, f"{axis_text(base, 'setup')}, {over}", (1, mean), (-4, 3),
                       ha="right", va="bottom", xycoords=("axes fraction", "data"))  # fmt: skip
        delay_axis(place, sorted({_link(group).delay_ms for group in groups}))
        log_axis(place, "y")
        kit.describe(place, panel.title, DELAY, "training samples/s" if place is axes[0] else "")
    same_scale(axes)
    bounds = [_bound(place, panel.lines[0].groups)
              for place, panel in zip(axes, arranged, strict=True)]  # fmt: skip
    name_lines(figure, axes, of_rates, [BOUND] * any(bounds))
    drawn.alt = f"Training samples/s over the delay between nodes: {kit.listed(texts)}."
    return drawn


BOUND = kit.legend_mark(kit.IDEAL, "at most: one delay an update")


def _bound(axes: Axes, groups: Sequence[Group]) -> bool:
    """Draw the bound of one exchange per update, whatever the rate; return whether it is seen."""
    delays = [delay for group in groups if (delay := _link(group).delay_ms) > 0]
    batches = {group.fact("effective_batch") for group in groups}
    every_update = all(group.setting(STRATEGY) in (None, *EACH_UPDATE) for group in groups)
    if len(batches) > 1 or None in batches or not (delays and every_update):
        return False
    scale, x = axes.get_ylim(), np.geomspace(min(delays), max(delays), 50)
    most = batches.pop() / (1e-3 * x)
    kit.line(axes, [*x], [*most], kit.IDEAL)
    axes.set_ylim(scale)
    return bool(min(most) < scale[1])


def _baselines(sweep: SweepResults, groups: Sequence[Group]) -> list[tuple[Group, float]]:
    """The groups that these are compared with, each once, and their means."""
    bases = dict.fromkeys(base for group in groups if (base := baseline_of(sweep, group)))
    return [(base, mean) for base in bases if (mean := base.mean(RATE)) is not None]


@dataclass(frozen=True)
class Cell:
    """A group with its place in the figure of strategies."""

    group: Group
    base: Group | None
    column: tuple[str, str]  # script, set-up
    row: Link | None  # without its delay; None where each link has a place of its own
    x: float  # the delay, or the number of the link
    where: str  # the same in words

    @property
    def strategy(self) -> str:
        return axis_text(self.group, STRATEGY)

    @property
    def accuracies(self) -> tuple[Repeats, Repeats] | None:
        """Of the group and of its baseline, as far as they are compared; None if they are not."""
        if self.base is None or self.base is self.group or refused(self.group, self.base, QUALITY):
            return None
        sides = self.group.repeats(ACCURACY), self.base.repeats(ACCURACY)
        return in_both(*sides) if all(sides) else None


def strategies(sweep: SweepResults, styles: Styles) -> Drawn:
    """Columns of panels by set-up, rows by rate and kind of time; below, the cost in quality."""
    cells = _cells(sweep)
    columns = [*dict.fromkeys(cell.column for cell in cells)]
    rates = sorted({cell.row for cell in cells}, key=lambda row: _slowest_last(row or Link()))
    rows = [(rate, measure) for rate in rates for measure in TIMES_TO_TARGET]
    of_strategies = styles.of_axis(STRATEGY, [cell.strategy for cell in cells])
    heights = [PANEL_HEIGHT] * len(rows)
    if any(cell.accuracies for cell in cells):
        _, height = row_names([*of_strategies])
        heights.append(0.65 + height * len(of_strategies))
    wide = len(columns) if kit.has_room(NARROWEST * len(columns)) else 1
    figure, axes = kit.grid(heights * (len(columns) // wide), wide, COLUMN_WIDTH * wide)
    assert sweep.target is not None  # else there are no cells
    drawn, span = Drawn(figure, notes=_not_compared(cells)), _span(cells)
    qualities = list[Axes]()
    for n, place in enumerate(axes):
        # Columns without room beside each other stand below each other.
        x, y = (n % wide, n // wide) if wide > 1 else divmod(n, len(heights))
        mine, left = [cell for cell in cells if cell.column == columns[x]], n % wide == 0
        if y == len(rows):
            _quality(drawn, place, mine, of_strategies, left)
            qualities.append(place)
            continue
        rate, measure = rows[y]
        _times(drawn, place, [c for c in mine if c.row == rate], measure, of_strategies)
        below = _link_axis(place, cells)
        _time_axis(place, span, labels=left)
        of_rate = "" if rate is None else _line_text(rate)
        title = [*columns[x], of_rate, f"median {TIMES_TO_TARGET[measure]}"]
        kit.describe(place, ", ".join(filter(None, title)), below if y == len(rows) - 1 else "",
                 f"time to {sweep.target.short} (s)" if left else "")  # fmt: skip
    same_scale(qualities, across=True)
    with_times = [c for c in cells if any(map(c.group.values, TIMES_TO_TARGET))]
    disturbed = any(all_beside_others(cell.group) for cell in with_times)
    kit.legend(figure, of_strategies, [hollow_mark()] if disturbed else [])
    drawn.alt = " ".join(_in_words(sweep, cells, measure) for measure in TIMES_TO_TARGET)
    return drawn


def _not_compared(cells: Sequence[Cell]) -> list[str]:
    """The strategies whose accuracy is not compared with the baseline's, with the reason."""
    names = dict[str, dict[str, None]]()
    for cell in cells:
        if cell.base is None or cell.base is cell.group:
            continue
        if why := refused(cell.group, cell.base, QUALITY):
            names.setdefault(", ".join(why), {})[cell.strategy] = None
    return [f"accuracy of {', '.join(of)} not compared ({why})" for why, of in names.items()]


def _in_words(sweep: SweepResults, cells: list[Cell], measure: str) -> str:
    """The medians that are drawn, as a sentence; a miss counts as infinite."""
    of_cells = ((cell, cell.group.values(measure)) for cell in cells)
    texts = [f"{sweep.name_of(c.group)} {kit.median_text(times)}" for c, times in of_cells if times]
    title = f"{TIMES_TO_TARGET[measure].capitalize()} to {sweep.target}"
    over = "by link" if cells[0].row is None else "over the delay between nodes"
    return f"{title} {over}, medians: {kit.listed(texts)}."


def _cells(sweep: SweepResults) -> list[Cell]:
    linked = _linked(sweep)
    if sweep.target is None:
        raise NothingToDraw(
            f"{sweep.file}: has no target, and the figure shows the time to it: write for example "
            "target: {metric: accuracy, value: 0.9} into the sweep file"
        )
    _check_axes(sweep, "script", STRATEGY, "setup", "link")
    if not any(group.values(measure) for group in linked for measure in TIMES_TO_TARGET):
        named = any(sweep.target.metric in row for run in sweep.runs for row in run.epochs)
        why = "no run has a time to the target that counts"
        unnamed = f"no epoch of any run has a number named {sweep.target.metric}"
        raise NothingToDraw(why if named else unnamed)
    links = sorted({_link(group) for group in linked}, key=lambda link: (link.delay_ms, str(link)))
    rates = {replace(link, delay_ms=0.0) for link in links}
    # Panels of one delay each would be half empty.
    apart = len(rates) == len(links) > 1
    return [
        Cell(
            group=group,
            base=baseline_of(sweep, group),
            column=(str(group.label.get("script") or ""), str(group.label.get("setup") or "")),
            row=None if apart else replace(link, delay_ms=0.0),
            x=float(links.index(link)) if apart else link.delay_ms,
            where=str(link) if apart else f"{link.delay_ms:g} ms",
        )
        for group in linked
        for link in [_link(group)]
    ]


def _link_axis(axes: Axes, cells: Sequence[Cell]) -> str:
    """Set the horizontal axis, of delays or of links by name; return its title."""
    places = dict(sorted((cell.x, cell.where) for cell in cells))
    if cells[0].row is None:
        named_columns(axes, [*places.values()])
        return LINKS
    delay_axis(axes, [*places])
    return DELAY


def _times(
    drawn: Drawn, axes: Axes, cells: Sequence[Cell], measure: str, styles: dict[str, Style]
) -> None:
    misses: Counter[float] = Counter()
    nearest = min((cell.x for cell in cells), default=0.0)
    for number, (name, style) in enumerate(styles.items()):
        of_name = sorted((c for c in cells if c.strategy == name), key=lambda c: c.x)
        mine = [cell for cell in of_name if cell.group.values(measure)]
        at = [_beside(cell, number, len(styles)) for cell in mine]
        points = [(x, c.where, run, t) for x, c in zip(at, mine, strict=True)
                  for run, t in c.group.by_run(measure) if math.isfinite(t)]  # fmt: skip
        tips = [f"{name}, {where}, {run_name(run)}: {t:,.4g} s" for _, where, run, t in points]
        kit.run_points(drawn, axes, [x for x, *_ in points], [t for *_, t in points], style, tips)
        # The median: a miss is infinite, and so would be the mean.
        medians = [statistics.median(c.group.values(measure)) for c in mine]
        finite = [m if math.isfinite(m) else math.nan for m in medians]
        has_delays = any(cell.row is not None for cell in mine)  # no link lies between others
        kit.line(axes, at, finite, style, linestyle=style.dash if has_delays else "",
             marker=style.marker, markersize=5, label=name)  # fmt: skip
        hollow = [(x, median) for x, c, median in zip(at, mine, medians, strict=True)
                  if all_beside_others(c.group)]  # fmt: skip
        kit.hollow_marks(axes, [x for x, _ in hollow], [y for _, y in hollow], style)
        for cell in of_name:
            # Misses are shown even where too few other runs have a time that counts.
            if missed := len(cell.group.missed(measure)):
                # On the left edge there is no room on the left.
                side, total = 1 if cell.x == nearest else -1, len(cell.group.finished)
                text = f"\u2191 {missed} of {total}"
                text = text if kit.has_room(COLUMN_WIDTH) else f"{missed}/{total}"
                _miss(axes, cell.x, misses[cell.x], text, style, side)
                misses[cell.x] += 1


def _beside(cell: Cell, number: int, count: int) -> float:
    """Where a strategy, by its number, is drawn: beside the others over the same link."""
    if cell.row is None:
        return cell.x + 0.5 * ((number + 0.5) / count - 0.5)
    return cell.x * kit.aside(number, count)


def _miss(axes: Axes, x: float, number: int, text: str, style: Style, side: int) -> None:
    """Mark misses at the top edge, one below the other, as they exceed every time."""
    height, transform = 1 - MISS_ROW * (number + 0.5), axes.get_xaxis_transform()
    kit.marks(axes, [x], [height], style, markersize=4.5, transform=transform)
    kit.small_text(axes, text, (x, height), (6 * side, 0), fontsize=7.5, xycoords=transform,
               ha="left" if side > 0 else "right")  # fmt: skip


class Span(NamedTuple):
    """Range of the times in all panels, and the share of a panel's height kept for misses."""

    low: float
    high: float
    missed: float


def _span(cells: Sequence[Cell]) -> Span:
    times = [
        t
        for cell in cells
        for name in TIMES_TO_TARGET
        for t in cell.group.values(name)
        if math.isfinite(t)
    ]
    times = times or [1.0]
    missing = (cell for cell in cells if cell.group.missed("tta_train_s"))
    missed = Counter((cell.column, cell.row, cell.x) for cell in missing)
    share = min(MISS_ROW * max(missed.values(), default=0), 0.7)
    return Span(min(times) / 1.3, max(times) * 1.3, share)


def _time_axis(axes: Axes, span: Span, labels: bool) -> None:
    """Set the same axis in all panels, with a strip for the misses at the top."""
    log_axis(axes, "y")
    top = span.high * (span.high / span.low) ** (span.missed / (1 - span.missed))
    powers = range(math.floor(math.log10(span.low)), math.ceil(math.log10(span.high)))
    ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    ticks = [tick for tick in ticks if span.low <= tick <= span.high]
    axes.set_yticks(ticks, [f"{tick:,g}" if labels else "" for tick in ticks])
    axes.set_ylim(span.low, top)
    if span.missed:
        kit.strip(axes, span.high, top)
        kit.small_text(axes, "missed", (1, 1 - MISS_ROW / 2), (4, 0), xycoords="axes fraction")


def _accuracies(cells: Sequence[Cell], strategy: str) -> list[tuple[Repeats, Repeats]]:
    """Those of a strategy and of its baseline over each link: of links where seeds are in common,
    if there are any.
    """
    own = (cell.accuracies for cell in cells if cell.strategy == strategy)
    sides = [both for both in own if both]
    paired = [(ours, theirs) for ours, theirs in sides if ours.keys() == theirs.keys()]
    return paired or [(_of_side(0, ours), _of_side(1, theirs)) for ours, theirs in sides]


def _of_side(side: int, values: Repeats) -> Repeats:
    """With keys that no other side has: equal seeds over unlike links are no pair."""
    return {(side, key): value for key, value in values.items()}


def _over_links(sides: Sequence[tuple[Repeats, Repeats]]) -> Estimate:
    """The difference, as tables have it. Each seed counts once, with its mean over the links: its
    runs over several links start alike and repeat nothing.
    """
    means = []
    for over_links in zip(*sides, strict=True):
        values: dict[Hashable, list[float]] = {}
        for key, value in (each for repeats in over_links for each in repeats.items()):
            values.setdefault(key, []).append(value)
        means.append({key: statistics.mean(of_key) for key, of_key in values.items()})
    return difference(*means)


def _quality(
    drawn: Drawn, axes: Axes, cells: Sequence[Cell], styles: dict[str, Style], names: bool
) -> None:
    """Final accuracy less the baseline's: the difference with its interval, and each pair of runs
    with the same seed a point.
    """
    compared = {name: sides for name in styles if (sides := _accuracies(cells, name))}
    kit.strip(axes, -1, 1, upright=True, color=kit.NO_DIFFERENCE, linewidth=1)
    kit.reference(axes, 0, upright=True)
    for height, (name, sides) in enumerate(compared.items()):
        values = [100 * (ours[key] - theirs[key]) for ours, theirs in sides
                  for key in ours if key in theirs]  # fmt: skip
        tips = [f"{name}: {value:+.2f} points" for value in values]
        kit.run_points(drawn, axes, values, [height] * len(values), styles[name], tips)
        gain = _over_links(sides).scaled(100)
        assert gain.value is not None
        low, high = gain.ends
        shown = (gain.value, low, high)
        kit.value_with_interval(axes, height, shown, styles[name], across=True)
        text = f"{gain.value:+.1f}"
        if low < high and kit.has_room(COLUMN_WIDTH):
            text += f" ({low:+.1f} to {high:+.1f})"
        kit.small_text(axes, text, (1, height), (4, 0), xycoords=("axes fraction", "data"))
    lines, _ = row_names([*compared])
    named_rows(axes, lines if names else [""] * len(compared))
    bases = {axis_text(c.base, STRATEGY) for c in cells if c.base is not None}
    base = bases.pop() if len(bases) == 1 else "the baseline"
    what = "bars, brackets" if kit.has_room(COLUMN_WIDTH) else "bars"
    kit.describe(axes, x=f"final accuracy less that of {base}, points\n"
                         f"(grey: within one; {what}: 95 % interval)")  # fmt: skip

"""Speed against the batch and against the number of devices, with what would be ideal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes

from harness.read.drawing import (
    FAINT,
    INK,
    Drawn,
    NothingToDraw,
    Style,
    crosses,
    doubling_axis,
    fitted,
    legend,
    listed,
    mean_with_interval,
    numbers_of,
    panels,
    styles_of,
)
from harness.read.figures.epochs import failed_runs, run_words
from harness.read.figures.panels import PanelOf, in_order, panels_and_lines
from harness.read.records.baseline import RATE, STRONG, WEAK, efficiency
from harness.read.records.groups import Group
from harness.read.records.loading import is_number
from harness.read.records.sweeps import SweepResults

BATCH = "per_gpu_batch"


def epoch_time_by_batch(sweep: SweepResults) -> Drawn:
    """Seconds of training an epoch over the batch of a device, a line a set-up."""
    groups = [g for g in sweep.groups if is_number(g.setting(BATCH))]
    if len({g.setting(BATCH) for g in groups}) < 2:
        raise NothingToDraw("the batch per GPU does not vary")
    return _against(
        sweep, groups, "epoch_time_s", lambda g: g.setting(BATCH), across=(BATCH,),
        x="batch per GPU (samples)", y="training time of an epoch (s)",
    )  # fmt: skip


def throughput(sweep: SweepResults) -> Drawn:
    """Samples a second over the number of devices; dotted: as many times the first as devices."""
    return _against(
        sweep, _scaled(sweep), RATE, _devices, across=_along(sweep),
        x="devices", y="training samples/s", ideal=True,
    )  # fmt: skip


def scaling_efficiency(sweep: SweepResults) -> Drawn:
    """The share of the ideal that is reached: weak at equal batch a device, else strong."""
    groups = [group for group in _scaled(sweep) if group.finished]
    arranged, notes = panels_and_lines(sweep, groups, _along(sweep), by_setup=False)
    styles = styles_of(line.name for panel in arranged for line in panel.lines)
    figure, axes = panels(len(arranged), 3.0)
    drawn, said, kinds, shown = Drawn(figure, "", notes), [], set(), False
    for place, panel in zip(axes, arranged, strict=True):
        values, words = [1.0], []
        for line in in_order(panel.lines, _devices):
            found = _efficiencies(line.groups)
            kinds |= {kind for _, kind, *_ in found}
            if len(found) < 2:
                continue
            shown = True
            style = styles[line.name]
            best = _best([(n, v) for n, _, v, _, _ in found])
            place.plot([*best], [*best.values()], color=style.colour, linestyle=style.dash)
            place.plot([n for n, *_ in found], [v for _, _, v, _, _ in found], color=style.colour,
                       marker=style.marker, linestyle="", markersize=6)  # fmt: skip
            for devices, _, value, low, high in found:
                place.plot([devices] * 2, [low, high], color=style.colour, linewidth=1.2)
                values += [value, low, high]
            words += [f"{line.name or 'all'} {v:.2f} on {n:g}" for n, _, v, _, _ in found[1:]]
        place.axhline(1.0, color=FAINT, linestyle=":", linewidth=1.4)
        place.annotate("ideal", (0.98, 1.0), xycoords=place.get_yaxis_transform(), xytext=(0, 2),
                       textcoords="offset points", ha="right", fontsize=8, color=INK)  # fmt: skip
        doubling_axis(place, {_devices(g) for line in panel.lines for g in line.groups})
        place.set_ylim(0, max(1.1, max(values) * 1.05))
        _dress(place, panel.title, "devices", "scaling efficiency" if place is axes[0] else "")
        said.append(f"{panel.title}: {listed(words) or 'nothing to compare'}.")
    if not shown:
        raise NothingToDraw("no two set-ups have the same batch per device, or the same work")
    kind = " and ".join(sorted(kinds - {None}))
    legend(figure, styles)
    drawn.notes += _shared_cores(sweep)
    drawn.notes.append(f"{kind}; bars are 95 % intervals over the seeds")
    drawn.alt = f"Scaling efficiency ({kind}) over the number of devices. " + listed(said, " ")
    return drawn


def _efficiencies(groups: list[Group]) -> list[tuple[float, Any, float, float, float]]:
    """(devices, kind, value, low, high) against the group with the fewest devices."""
    base = groups[0]
    found: list[tuple[float, Any, float, float, float]] = [(_devices(base), None, 1.0, 1.0, 1.0)]
    for group in groups[1:]:
        kind, share = efficiency(group, base)
        if kind in (WEAK, STRONG) and share.value is not None:
            low = share.value if share.low is None else share.low
            high = share.value if share.high is None else share.high
            found.append((_devices(group), kind, share.value, low, high))
    return found


def _shared_cores(sweep: SweepResults) -> list[str]:
    """What emulated nodes on one machine do to each other is no property of the set-up."""
    shares = [(run.environment.get("launch") or {}).get("processes_per_core") or 0.0
              for group in sweep.groups for run in group.finished]  # fmt: skip
    crowded = sum(share > 1 for share in shares)
    if not crowded:
        return []
    return [
        f"{crowded} of {len(shares)} runs had more processes than cores (up to {max(shares):g} a "
        "core): that they compute more slowly is the machine's doing, not the set-up's"
    ]


def _along(sweep: SweepResults) -> tuple[str, ...]:
    """Where the effective batch is held, the batch of a device changes with their number."""
    return ("setup", BATCH) if sweep.hold == "effective_batch" else ("setup",)


def _devices(group: Group) -> float:
    return float(group.fact("devices") or 0)


def _scaled(sweep: SweepResults) -> list[Group]:
    groups = [g for g in sweep.groups if _devices(g) and (g.finished or failed_runs(g))]
    if len({_devices(group) for group in groups if group.finished}) < 2:
        raise NothingToDraw("the number of devices does not vary")
    return groups


def _against(
    sweep: SweepResults, groups: list[Group], measure: str, place_of: Callable[[Group], Any],
    across: tuple[str, ...], x: str, y: str, ideal: bool = False,
) -> Drawn:  # fmt: skip
    """A panel a script, a line for what is the same along it, each run a point."""
    if not any(group.values(measure) for group in groups):
        raise NothingToDraw(f"no finished run has {measure}")
    arranged, notes = panels_and_lines(sweep, groups, across, by_setup=False)
    styles = styles_of(line.name for panel in arranged for line in panel.lines)
    figure, axes = panels(len(arranged), 3.0)
    drawn, said = Drawn(figure, "", [*notes, *_shared_cores(sweep)]), []
    for place, panel in zip(axes, arranged, strict=True):
        said.append(_lines(drawn, place, panel, styles, measure, place_of, ideal))
        _dress(place, panel.title, x, y if place is axes[0] else "")
    legend(figure, styles)
    drawn.alt = f"{y} over {x}, means. " + listed(said, " ")
    return drawn


def _lines(
    drawn: Drawn, axes: Axes, panel: PanelOf, styles: dict[str, Style], measure: str,
    place_of: Callable[[Group], Any], ideal: bool,
) -> str:  # fmt: skip
    values, bars, words, failed = [], [], [], []
    for line in in_order(panel.lines, place_of):
        style, means = styles[line.name], []
        for group in line.groups:
            at = float(place_of(group))
            lost = failed_runs(group)
            failed += [(at, what) for what in lost]
            words += [f"{line.name or 'all'} at {at:g} {what}" for what in lost]
            known = [r for r in group.finished if measure in r.measures]
            if not known:
                continue
            numbers = [r.measures[measure] for r in known]
            mean, low, high = mean_with_interval(axes, at, numbers, style)
            means.append((at, mean))
            artist = axes.scatter([at] * len(numbers), numbers, s=14, color=style.colour,
                                  alpha=0.45, linewidths=0, zorder=4)  # fmt: skip
            drawn.tip(artist, [f"{line.name}, {at:g}, {run_words(r)}: {n:,.4g}"
                               for r, n in zip(known, numbers, strict=True)])  # fmt: skip
            values += numbers
            bars += [low, high]
            words.append(f"{line.name or 'all'} at {at:g} {numbers_of(numbers)}")
        if not means:
            continue
        best = _best(means) if ideal else dict(means)
        axes.plot([*best], [*best.values()], color=style.colour, linestyle=style.dash,
                  linewidth=1.4)  # fmt: skip
        if ideal and len(means) > 1:
            (first, rate), last = means[0], means[-1][0]
            axes.plot([first, last], [rate, rate * last / first], color=style.colour,
                      linestyle=(0, (1, 2)), linewidth=1.1, alpha=0.8)  # fmt: skip
            axes.annotate("ideal", (last, rate * last / first), xytext=(-4, 2), ha="right",
                          textcoords="offset points", fontsize=8, color=INK)  # fmt: skip
            bars.append(rate * last / first)
    _same_place(axes, panel, place_of, measure)
    places = [float(place_of(g)) for line in panel.lines for g in line.groups]
    doubling_axis(axes, places)
    if values:
        fitted(axes, [*values, *(bars[-1:] if ideal else [])], bars)
        axes.set_ylim(bottom=0)
    crosses(axes, failed)
    return f"{panel.title}: {listed(words)}."


def _best(points: list[tuple[float, float]]) -> dict[float, float]:
    """A line goes through the best of the set-ups with as many devices; the others stand alone."""
    found: dict[float, float] = {}
    for at, value in points:
        found[at] = max(value, found.get(at, value))
    return found


def _same_place(axes: Axes, panel: PanelOf, place_of: Callable[[Group], Any], measure: str) -> None:
    """Two set-ups with as many devices are told apart by name, on the first line that has them."""
    for line in panel.lines[:1]:
        places = [place_of(group) for group in line.groups]
        for group, at in zip(line.groups, places, strict=True):
            mean = group.mean(measure)
            if places.count(at) > 1 and mean is not None:
                axes.annotate(group.topology, (at, mean), xytext=(7, 0), fontsize=8, color=INK,
                              textcoords="offset points", va="center")  # fmt: skip


def _dress(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)

"""The breakdown of the time of runs, from their starts to their ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

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
from harness.read.figures.panels import Styles, failed_groups, left_out
from harness.read.figures.time import MOST_ROWS, group_names
from harness.read.labels import counted, duration
from harness.read.records.groups import Group
from harness.read.records.sweeps import SweepResults
from harness.read.scales import named_rows

# Greys: time that the records do not separate. Hatches help where colours do not.
LOOKS = {
    COMPUTE: ("#009E73", ""), DATA: ("#E69F00", ".."), COMMUNICATION: ("#D55E00", "//"),
    STRAGGLERS: ("#CC79A7", ""), UNSEPARATED: ("#9FB8C8", ""), FIRST: ("#F0E442", ""),
    EVALUATION: ("#0072B2", "\\\\"), SAVING: ("#56B4E9", ""), REST: ("#C8C8C8", ""),
}  # fmt: skip


def where_time_went(sweep: SweepResults, _styles: Styles) -> Drawn:
    """The time of a run as stacked parts that add up to all of it, means over the seeds."""
    unknown: dict[str, list[str]] = {}
    rows = [(group, p) for group in sweep.groups if (p := _parts(sweep, group, unknown))]
    reasons = [f"{why} ({_counted(names)})" for why, names in unknown.items()]
    if not rows:
        why = "; ".join(reasons) or "none finished"
        raise NothingToDraw(f"no run tells where its time went: {why}")
    notes = [*left_out(len(rows) - MOST_ROWS, "groups"), *(f"not drawn: {why}" for why in reasons)]
    if failed := failed_groups(sweep):
        notes.append(f"failed runs are left out: {failed}")
    rows = rows[:MOST_ROWS]
    names, height = group_names(sweep, [group for group, _ in rows])
    figure, (axes,) = kit.grid([height * len(rows) + 0.9])
    left = [0.0] * len(rows)
    for name in PARTS:
        widths = [parts.get(name, 0.0) for _, parts in rows]
        if any(widths):
            colour, hatch = LOOKS[name]
            axes.barh(range(len(rows)), widths, left=left, color=colour, height=0.72, label=name,
                      hatch=hatch, edgecolor=kit.WHITE, linewidth=0.4)  # fmt: skip
            left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, total in enumerate(left):
        kit.small_text(axes, duration(total), (total, row), (4, 0))
    named_rows(axes, names)
    axes.set_xlim(0, max(left) * 1.12)
    kit.describe(axes, x="time of a run from its start to its end (s), mean over the seeds")
    kit.legend(figure, {}, axes.get_legend_handles_labels()[0])
    texts = (f"{sweep.name_of(g)} {duration(sum(p.values()))}: {_shares(p)}" for g, p in rows)
    return Drawn(figure, "Where the time of a run went. " + kit.listed(texts) + ".", notes)


def _parts(sweep: SweepResults, group: Group, unknown: dict[str, list[str]]) -> dict[str, float]:
    """Mean parts of the runs that record them; adds the others to `unknown` by reason."""
    breakdowns = []
    for run in group.timed:
        if run.other_batches or group.has_unlike_threads:
            why = "runs had unlike numbers of threads per process"
            why = "run in another batch per process than asked for" if run.other_batches else why
            unknown.setdefault(why, []).append(sweep.short_name_of(group))
            continue
        try:
            breakdowns.append(time_breakdown(run))
        except UserError as error:
            reason = str(error).removeprefix(f"{run.recorded_folder.path} ")
            unknown.setdefault(reason, []).append(sweep.short_name_of(group))
    if not breakdowns:
        return {}
    mean = mean_breakdown(breakdowns)
    return {n: mean.updates * value for n, value in mean.parts.items() if value is not None}


def _counted(names: Sequence[str]) -> str:
    """Each group's name once, with how many of its runs."""
    counts = Counter(names).items()
    return kit.listed((f"{name}: {counted(n, 'run')}" for name, n in counts), ", ")


def _shares(parts: dict[str, float]) -> str:
    total = sum(parts.values())
    return ", ".join(f"{name} {value / total:.0%}" for name, value in parts.items() if value)

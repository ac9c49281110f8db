"""The columns of a sweep's table: which ones, and how a group's numbers are written in them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from harness.core.records.summary import QUALITY_FIELDS
from harness.core.schema.checks import fields
from harness.core.settings import UserError
from harness.read.compare.compare import WIDEST_SHOWN, is_wider
from harness.read.labels import (
    STRATEGY,
    UNKNOWN,
    column_of,
    heading_of,
    plain_text,
    shown_axes,
    strategy_text,
    without_tag,
)
from harness.read.measures import (
    BANDWIDTH,
    FIELDS,
    MEMORY_FIRST,
    MEMORY_OTHERS,
    PER_UPDATE,
    RTT,
    TO_TARGET,
)
from harness.read.records.baseline import EFFICIENCY, FACTS, GAIN, POINTS, RATIOS, TIMES
from harness.read.records.runs import SUMMED, Run, own_metrics_of
from harness.read.records.sweeps import SweepResults
from harness.read.statistics import Estimate

MFU, BUSY = "mfu", "gpu_utilisation_percent"
TFLOPS, ENERGY, JOULES = "tflops_per_s", "energy_j", "joules_per_sample"
DEVICE_FIELDS = (TFLOPS, MFU, BUSY, ENERGY, JOULES)

Row = Mapping[str, Any]

# Marks: more or fewer updates than the baseline, a link far from the requested one, other programs,
# a comparison of pairs that leaves out values which count in the means beside it.
OTHER_TRAINING, OTHER_LINK, DISTURBED, PAIRS = "†", "‡", "§", "¶"

# How a comparison with the baseline is written.
FORMS = {GAIN: "{:+.1f}%", POINTS: "{:+.2f}", **dict.fromkeys(RATIOS, "{:.2f}")}
AGAINST_BASE = (*FORMS, EFFICIENCY)

# Pairs of columns of which one alone does not say enough: a device can be busy without computing
# much, and a strategy that trains fast can lose the time when it evaluates and saves.
SIDE_BY_SIDE = ((MFU, BUSY), TIMES, RATIOS)

# What a list of columns may name besides the numbers that the records hold.
OTHER_NAMES = {"samples_per_s": "train_samples_per_s",
               "samples_per_s_per_gpu": "train_samples_per_s_per_gpu"}  # fmt: skip

# Attributes of the rows of a page, by which a reader can filter all its tables at once.
FILTERS = ("script", "setup", STRATEGY, "link")
PART = "part"  # marks a row that stays below the previous one, as a node below its group

GROUP_FACTS = (*FACTS, "planned", "finished", "reached")
COUNTS = ("updates", "samples", "epochs_done", "attempts", "tta_samples", *GROUP_FACTS)

# Numbers that are not in every record: a run may have none of them.
OPTIONAL = (*QUALITY_FIELDS, "test_loss", "test_accuracy", "test_top5_accuracy", "user_s",
            "system_s", "updates", "samples", "epochs_done", "train_samples_per_s", "epoch_time_s",
            "train_samples_per_s_per_gpu", "train_time_s", "eval_time_s", "save_time_s", "wall_s",
            "peak_memory_gib", "comm_share", "comm_exposed_share", "compute_skew", MEMORY_FIRST,
            MEMORY_OTHERS, "attempts", *TO_TARGET, GAIN, POINTS,
            EFFICIENCY, *FIELDS, *RATIOS, *PER_UPDATE, *PER_UPDATE.values(),
            *DEVICE_FIELDS)  # fmt: skip


def usual(known: Collection[str], on_cpu: bool) -> list[str]:
    """The columns of devices where these are known."""
    return paired([name for name in (MFU, BUSY, JOULES) if name in known], on_cpu)


def paired(names: list[str], on_cpu: bool) -> list[str]:
    """The names, each with the one that belongs beside it. GPU utilisation is not added where all
    runs trained on CPUs.
    """
    pair_of = {
        name: pair for pair in SIDE_BY_SIDE for name in pair if not (on_cpu and BUSY in pair)
    }
    return [*dict.fromkeys(n for name in names for n in pair_of.get(name, (name,)))]


def is_on_cpu(devices: Collection[str | None]) -> bool:
    """Whether all runs say that they trained on a CPU; an unknown device is not a CPU."""
    return {*devices} == {"cpu"}


@dataclass(frozen=True)
class Column:
    name: str
    heading: str
    cell: Callable[[Row], str]
    right: bool = True
    axis: bool = False
    setting: bool = False  # planned, not measured: written once where it is equal for all
    marks: str = ""  # those that may stand in this column

    def text(self, row: Row) -> str:
        marks = {
            OTHER_TRAINING: row["other_updates"], OTHER_LINK: row["link_warnings"],
            DISTURBED: row["disturbed"], PAIRS: row.get(f"{self.name}_unpaired"),
        }  # fmt: skip
        return self.cell(row) + "".join(mark for mark in self.marks if marks[mark])


def columns_of(sweep: SweepResults, rows: list[Row], measures: list[str]) -> list[Column]:
    """Axes first, then how many runs, then what was asked for or what is usual."""
    known = [*dict.fromkeys([*measures, *OPTIONAL, *GROUP_FACTS])]
    is_listed = sweep.columns is not None
    shown = [_checked(name, known) for name in _asked(sweep)] if is_listed else _usual(sweep, rows)
    own = own_metrics_of(sweep.runs)
    with_spread = shown if is_listed else {"accuracy", "train_samples_per_s", *own}
    first = [_axis(column_of(axis), rows) for axis in shown_axes(sweep.axes)]
    if len({row["machine"] for row in rows if row["machine"]}) > 1:
        first.append(_axis("machine", rows))
    count = Column("planned", "n", partial(_count_text, count="finished", of="planned"), axis=True)
    reached = "reached" in shown
    measured = (measure_column(name, rows, reached, name in with_spread) for name in shown)
    # Another training and another link are marked where they are seen, else at the number of runs.
    marked = {
        OTHER_TRAINING: "updates" if "updates" in shown else "planned",
        DISTURBED: "planned",
        OTHER_LINK: next((name for name in (RTT, BANDWIDTH) if name in shown), "planned"),
    }
    marks = {column: "".join(mark for mark, name in marked.items() if name == column)
             for column in {*marked.values()}} | dict.fromkeys(AGAINST_BASE, PAIRS)  # fmt: skip
    return [replace(c, marks=marks.get(c.name, "")) for c in (*first, count, *measured)]


def _asked(sweep: SweepResults) -> list[str]:
    """The names asked for, without the axes: those are always there."""
    axes = {*sweep.axes, *map(column_of, sweep.axes)}
    names = (OTHER_NAMES.get(name, name) for name in sweep.columns or ())
    return paired([*dict.fromkeys(name for name in names if name not in axes)], _on_cpu(sweep))


def _on_cpu(sweep: SweepResults) -> bool:
    return is_on_cpu({run.device for run in sweep.finished})


def _usual(sweep: SweepResults, rows: list[Row]) -> list[str]:
    shown = ["effective_batch", "updates", "accuracy", *own_metrics_of(sweep.runs), "eval_loss",
             "train_samples_per_s", "train_samples_per_s_per_gpu"]  # fmt: skip
    if sweep.baseline is not None:
        shown.append(GAIN)
        compared = [row for row in rows if not row["baseline"]]
        shown += [n for n in (POINTS, EFFICIENCY) if any(row[n] is not None for row in compared)]
    known = {name for row in rows for name, value in row.items() if value is not None}
    shown += [*usual(known, _on_cpu(sweep)), *(name for name in (RTT, BANDWIDTH) if name in known)]
    shown += ["epoch_time_s", "train_time_s", "wall_s"]
    if sweep.target is not None:
        shown += [*TIMES, "reached"]
    if sweep.per_node:
        shown += ["top5_accuracy", *SUMMED]
    return shown


def _checked(name: str, known: list[str]) -> str:
    if name not in known:
        near = difflib.get_close_matches(name, [*known, *OTHER_NAMES], n=1, cutoff=0.0)
        raise UserError(f"columns: no run has a number named {name}: did you mean {near[0]}?")
    return name


def _axis(name: str, rows: list[Row]) -> Column:
    """The column of an axis, with the values of the plan."""

    def cell(row: Row) -> str:
        return strategy_text(row) or UNKNOWN if name == STRATEGY else plain_text(row[name])

    numbers = all(isinstance(row[name], (int, float)) for row in rows if row[name] is not None)
    right = numbers and name != STRATEGY
    return Column(name, heading_of(name), cell, right, axis=True, setting=True)


def measure_column(name: str, rows: list[Row], reached: bool, with_spread: bool) -> Column:
    """The column of a measured number, written in the form that fits it."""
    heading = heading_of(name)
    if name == EFFICIENCY:
        # Rows say weak or strong only where both occur; otherwise the heading says it.
        kinds = {row["scaling_kind"] for row in rows} - {None}
        one = len(kinds) == 1
        cell = partial(_efficiency_text, with_kind=not one)
        return Column(name, f"{kinds.pop()} eff." if one else "eff.", cell)
    if name in FORMS:
        with_interval = with_spread and name != GAIN
        return Column(name, heading, partial(_against_base, name, with_interval))
    if name == "reached":
        return Column(name, heading, partial(_count_text, count="reached", of="finished"))
    if name in TO_TARGET:
        return Column(name, heading, partial(_target_text, name, with_count=not reached))
    if with_spread and name not in COUNTS:
        return Column(name, heading, partial(spread_text, name))
    setting = name in ("effective_batch", "updates")
    return Column(name, heading, lambda row: number_text(name, row.get(name)), setting=setting)


def _count_text(row: Row, count: str, of: str) -> str:
    """A number of runs out of another one, such as finished/planned."""
    return f"{row[count]}/{row[of]}" if count in row else UNKNOWN


def _target_text(name: str, row: Row, with_count: bool) -> str:
    """A miss is not left out: the mean is infinite, the median may be known."""
    mean, median = row.get(name), row.get(f"{name}_median")
    if mean is None or math.isfinite(mean):
        return spread_text(name, row)
    count = f" ({row['reached']}/{row['finished']})" if with_count else ""
    if median is None or math.isinf(median):
        if not row.get("reached"):
            return f"not reached{count}"
        return f"missed {row['finished'] - row['reached']} of {row['finished']}"
    return f"median {number_text(name, median)}{count}"


def _against_base(name: str, with_interval: bool, row: Row) -> str:
    """A difference or ratio to the baseline, with its 95 % interval where that was asked for."""
    value, low, high = (row.get(f"{name}{end}") for end in ("", "_low", "_high"))
    if row["baseline"]:
        return "base"
    if value is None or math.isinf(value):
        return UNKNOWN if value is None else "infinite"
    # A tenth of the baseline's time still has two digits that count.
    form = "{:.3f}" if name in RATIOS and value < 0.1 else FORMS[name]
    if not with_interval or low is None or high is None:
        return form.format(value)
    if low == high:
        return f"{form.format(value)} (no spread)"
    if is_wider(Estimate(value, low, high), WIDEST_SHOWN, is_ratio=name in RATIOS):
        return f"{form.format(value)} (too wide)"
    return f"{form.format(value)} ({form.format(low)} to {form.format(high)})"


def _efficiency_text(row: Row, with_kind: bool) -> str:
    value, kind = row[EFFICIENCY], row["scaling_kind"]
    text = UNKNOWN if value is None else f"{value:.2f}"
    return f"{text} {kind}" if with_kind and kind else text


def spread_text(name: str, row: Row) -> str:
    """mean ± sample standard deviation; one run shows no spread."""
    mean, sd = row.get(name), row.get(f"{name}_sd")
    if mean is None or sd is None:
        return number_text(name, mean)
    places = decimals(name, mean)
    if sd > 0:
        # A small spread is not written as none, unless it is very small.
        places = max(places, min(places + 2, math.ceil(-math.log10(sd))))
    return f"{mean:,.{places}f} ± {sd:,.{places}f}"


def number_text(name: str, value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:,.{decimals(name, value)}f}"


def decimals(name: str, value: float) -> int:
    """Decimal places for about three significant digits, or four places of a share or a loss."""
    size = abs(value)
    if name == "tta_epochs":
        return 1
    if name in COUNTS:
        return 0 if value == round(value) else 1
    if name.endswith("_gib"):
        return 2 if size >= 1 else 3 if size >= 0.1 else 4
    if name in PER_UPDATE:
        return 1 if size >= 10 else 3 if size >= 0.01 else 5
    if name.endswith("_mbit"):
        return 0 if size >= 100 else 1
    if name.endswith(("_s", "_ms")) or "_per_s" in name:
        rate = "_per_s" in name
        return 0 if size >= (100 if rate else 1000) else 1 if size >= 10 else 2 if size >= 1 else 3
    if value > 1 and value == round(value) and name not in fields("summary"):
        return 0  # a count among a script's own metrics
    return 4 if size < 10 else 2


def filters_of(run: Run) -> dict[str, str]:
    """The value of each filter, in the words of the tables."""
    # A run that was skipped has no settings, only its place in the plan.
    known = {name: run.label.get(name) or run.identity.get(name) for name in FILTERS}
    if known["setup"] is not None:
        known["setup"] = without_tag(str(known["setup"]))
    if run.label.get(STRATEGY) is not None:
        known[STRATEGY] = strategy_text(run.label)
    return {name: plain_text(value) or UNKNOWN for name, value in known.items()}

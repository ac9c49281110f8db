"""The columns of a sweep's table: which ones, and how a group's numbers are written in them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from harness.core.attempts import QUALITY
from harness.core.settings import UserError
from harness.read.labels import (
    STRATEGY,
    UNKNOWN,
    column_of,
    heading_of,
    plain_text,
    shown_axes,
    strategy_text,
)
from harness.read.records.loading import BANDWIDTH, FIELDS, RTT
from harness.read.records.runs import MEMORY_FIRST, MEMORY_OTHERS, PER_UPDATE, SUMMED, TO_TARGET
from harness.read.records.sweeps import SweepResults

MFU, BUSY = "mfu", "gpu_utilisation_percent"
TFLOPS, ENERGY, JOULES = "tflops_per_s", "energy_j", "joules_per_sample"
DEVICE_FIELDS = (TFLOPS, MFU, BUSY, ENERGY, JOULES)


DEFINITIONS = {
    TFLOPS: "TFLOP/s: 10^12 operations a second of the model, padding included",
    MFU: "MFU: share of what the devices can do at most",
    BUSY: "GPU busy: of the time, however little it computes",
    ENERGY: "energy J: of the devices alone",
    JOULES: "J/sample: of the devices alone",
}


def usual(known: Collection[str]) -> list[str]:
    """The columns where these are known. MFU and GPU utilisation are shown together or not at all:
    neither says anything without the other.
    """
    pair = [MFU, BUSY] if MFU in known or BUSY in known else []
    return [*pair, *([JOULES] if JOULES in known else [])]


def paired(names: list[str]) -> list[str]:
    """The names of columns with the other one beside the first of these two."""
    found = [name for name in names if name in (MFU, BUSY)]
    if not found:
        return names
    at = names.index(found[0])
    rest = [name for name in names[at:] if name not in found]
    return [*names[:at], MFU, BUSY, *rest]


Row = Mapping[str, Any]

# Marks: more or fewer updates than the baseline, a link far from the requested one.
OTHER_TRAINING, OTHER_LINK = "†", "‡"

GAIN, POINTS, EFFICIENCY = (
    "train_samples_per_s_gain_percent", "accuracy_gain_points", "scaling_efficiency",
)  # fmt: skip


RATIOS = ("tta_train_s_ratio", "tta_wall_s_ratio")

# What a list of columns may name besides the numbers that the records hold.
OTHER_NAMES = {"samples_per_s": "train_samples_per_s",
               "samples_per_s_per_gpu": "train_samples_per_s_per_gpu"}  # fmt: skip


FACTS = ("nodes", "processes", "devices", "effective_batch", "planned", "finished", "reached")


# Not in every record: a run may have none of them.
OPTIONAL = (*QUALITY, "test_loss", "test_accuracy", "test_top5_accuracy", "user_s", "system_s",
            "updates", "samples", "epochs_done", "train_samples_per_s", "epoch_time_s",
            "train_samples_per_s_per_gpu", "train_time_s", "eval_time_s", "save_time_s", "wall_s",
            "peak_memory_gib", "comm_share", "comm_exposed_share", "compute_skew", MEMORY_FIRST,
            MEMORY_OTHERS, "attempts", *TO_TARGET, GAIN, POINTS,
            EFFICIENCY, *FIELDS, *RATIOS, *PER_UPDATE, *PER_UPDATE.values(),
            *DEVICE_FIELDS)  # fmt: skip


COUNTS = ("updates", "samples", "epochs_done", "attempts", "tta_samples", *FACTS)


@dataclass(frozen=True)
class Column:
    """A value as it stands in the plan; the kinds below write what was measured."""

    name: str
    heading: str
    right: bool = True
    axis: bool = False
    setting: bool = False  # planned, not measured: said once where it is the same for all
    marks: str = ""  # that may stand here

    def text(self, row: Row) -> str:
        marks = {OTHER_TRAINING: row["other_updates"], OTHER_LINK: row["link_warnings"]}
        return self.cell(row) + "".join(mark for mark in self.marks if marks[mark])

    def cell(self, row: Row) -> str:
        if self.name == STRATEGY:
            return strategy_text(row) or UNKNOWN
        return plain_text(row[self.name])


class NumberColumn(Column):
    def cell(self, row: Row) -> str:
        return number_text(self.name, row.get(self.name))


class SpreadColumn(Column):
    def cell(self, row: Row) -> str:
        return spread_text(self.name, row)


@dataclass(frozen=True)
class ShareColumn(Column):
    """So many of so many runs: finished/planned."""

    of: str = "planned"
    count: str = "finished"

    def cell(self, row: Row) -> str:
        return f"{row[self.count]}/{row[self.of]}" if self.count in row else UNKNOWN


@dataclass(frozen=True)
class TargetColumn(Column):
    """A miss is not left out: the mean is infinite, the median may be known."""

    says_reached: bool = True

    def cell(self, row: Row) -> str:
        mean, median = row.get(self.name), row.get(f"{self.name}_median")
        if mean is None or math.isfinite(mean):
            return spread_text(self.name, row)
        count = f" ({row['reached']}/{row['finished']})" if self.says_reached else ""
        if median is None or math.isinf(median):
            return f"not reached{count}"
        return f"median {number_text(self.name, median)}{count}"


@dataclass(frozen=True)
class BaseColumn(Column):
    """A difference or ratio to the baseline, with its 95 % interval where that was asked for."""

    form: str = "{:.2f}"
    interval: bool = False

    def cell(self, row: Row) -> str:
        value, low, high = (row.get(f"{self.name}{end}") for end in ("", "_low", "_high"))
        if row["baseline"]:
            return "base"
        if value is None or math.isinf(value):
            return UNKNOWN if value is None else "infinite"
        # A tenth of the baseline's time still has two digits that count.
        form = "{:.3f}" if self.name in RATIOS and value < 0.1 else self.form
        if not self.interval or low is None or high is None:
            return form.format(value)
        return f"{form.format(value)} ({form.format(low)} to {form.format(high)})"


@dataclass(frozen=True)
class EfficiencyColumn(Column):
    says_kind: bool = False

    def cell(self, row: Row) -> str:
        value, kind = row[EFFICIENCY], row["scaling_kind"]
        text = UNKNOWN if value is None else f"{value:.2f}"
        return f"{text} {kind}" if self.says_kind and kind else text


def columns_of(sweep: SweepResults, rows: list[Row], measures: list[str]) -> list[Column]:
    """Axes first, then how many runs, then what was asked for or what is usual."""
    known = [*dict.fromkeys([*measures, *OPTIONAL, *FACTS])]
    asked = sweep.columns is not None
    shown = [_checked(name, known) for name in _asked(sweep)] if asked else _usual(sweep, rows)
    with_spread = shown if asked else ["accuracy", "train_samples_per_s"]
    first = [_axis(column_of(axis), rows) for axis in shown_axes(sweep.axes)]
    if len({row["machine"] for row in rows if row["machine"]}) > 1:
        first.append(_axis("machine", rows))
    count = ShareColumn("planned", "n", axis=True)
    reached = "reached" in shown
    measured = (_measure(name, rows, reached, name in with_spread) for name in shown)
    # Another training and another link are marked where they are seen, else at the number of runs.
    marked = {
        OTHER_TRAINING: "updates" if "updates" in shown else "planned",
        OTHER_LINK: next((name for name in (RTT, BANDWIDTH) if name in shown), "planned"),
    }
    return [
        replace(column, marks="".join(m for m, name in marked.items() if name == column.name))
        for column in (*first, count, *measured)
    ]


def _asked(sweep: SweepResults) -> list[str]:
    """The names asked for, without the axes: those are always there."""
    axes = {*sweep.axes, *map(column_of, sweep.axes)}
    asked = (OTHER_NAMES.get(name, name) for name in sweep.columns or ())
    return paired([*dict.fromkeys(name for name in asked if name not in axes)])


def _usual(sweep: SweepResults, rows: list[Row]) -> list[str]:
    shown = ["effective_batch", "updates", "accuracy", "eval_loss", "train_samples_per_s",
             "train_samples_per_s_per_gpu"]  # fmt: skip
    if sweep.baseline is not None:
        shown += [GAIN, POINTS]
        if any(row[EFFICIENCY] is not None and not row["baseline"] for row in rows):
            shown.append(EFFICIENCY)
    known = {name for row in rows for name, value in row.items() if value is not None}
    shown += [*usual(known), *(name for name in (RTT, BANDWIDTH) if name in known)]
    shown += ["epoch_time_s", "train_time_s", "wall_s"]
    if sweep.target is not None:
        shown += ["tta_train_s", "tta_wall_s", "reached"]
    if sweep.per_node:
        shown += ["top5_accuracy", *SUMMED]
    return shown


def _checked(name: str, known: list[str]) -> str:
    if name not in known:
        near = difflib.get_close_matches(name, [*known, *OTHER_NAMES], n=1, cutoff=0.0)
        raise UserError(f"columns: no run has a number named {name}: did you mean {near[0]}?")
    return name


def _axis(name: str, rows: list[Row]) -> Column:
    numbers = all(isinstance(row[name], (int, float)) for row in rows if row[name] is not None)
    right = numbers and name != STRATEGY
    return Column(name, heading_of(name), right, axis=True, setting=True)


def _measure(name: str, rows: list[Row], reached: bool, with_spread: bool) -> Column:
    heading = heading_of(name)
    if name == EFFICIENCY:
        # Which of the two it is stands in each row only where there are both.
        kinds = {row["scaling_kind"] for row in rows} - {None}
        one = len(kinds) == 1
        return EfficiencyColumn(name, f"{kinds.pop()} eff." if one else "eff.", says_kind=not one)
    if name == GAIN:
        return BaseColumn(name, heading, form="{:+.1f}%")
    if name == POINTS:
        return BaseColumn(name, heading, form="{:+.2f}", interval=with_spread)
    if name in RATIOS:
        return BaseColumn(name, heading, interval=with_spread)
    if name == "reached":
        return ShareColumn(name, heading, of="finished", count="reached")
    if name in TO_TARGET:
        return TargetColumn(name, heading, says_reached=not reached)
    if with_spread and name not in COUNTS:
        return SpreadColumn(name, heading)
    return NumberColumn(name, heading, setting=name in ("effective_batch", "updates"))


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
    return f"{value:g}" if name == "tta_epochs" else f"{value:,.{decimals(name, value)}f}"


def decimals(name: str, value: float) -> int:
    """About three digits that count, and four places of a share or a loss."""
    size = abs(value)
    if name in COUNTS:
        return 0 if value == round(value) else 1
    if name.endswith("_gib"):
        return 2
    if name in PER_UPDATE:
        return 1 if size >= 10 else 3 if size >= 0.01 else 5
    if name.endswith("_mbit"):
        return 0 if size >= 100 else 1
    if name.endswith(("_s", "_ms")) or "_per_s" in name:
        rate = "_per_s" in name
        return 0 if size >= (100 if rate else 1000) else 1 if size >= 10 else 2 if size >= 1 else 3
    return 4 if size < 10 else 2

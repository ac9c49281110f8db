"""python -m harness table [FOLDER]: what was measured, a row a run, failures included.

In the folder of a sweep: a row for each group of runs that differ only in their seed.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from harness.core.command_line import print_json
from harness.core.settings import UserError
from harness.read.labels import heading_of, strategy_text
from harness.read.records.loading import load_runs
from harness.read.records.sweeps import FILE, sweep_file
from harness.read.table import screen, show, table_of
from harness.read.tables import columns
from harness.read.tables.files import show_sweep

# Heading, column of load_runs(), how a value is shown.
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("script", "script", "{}"),
    ("setup", "setup", "{}"),
    ("strategy", "strategy", "{}"),
    ("model", "model", "{}"),
    ("precision", "number_format", "{}"),
    ("batch", "effective_batch", "{:.0f}"),
    ("lr", "lr", "{:g}"),
    ("seed", "seed", "{:.0f}"),
    ("updates", "updates", "{:.0f}"),
    ("accuracy", "accuracy", "{:.4f}"),
    ("test accuracy", "test_accuracy", "{:.4f}"),  # where a validation set chose the epoch
    ("f1", "f1", "{:.4f}"),
    ("eval loss", "eval_loss", "{:.4f}"),
    ("samples/s", "train_samples_per_s", "{:,.0f}"),
    ("per GPU", "train_samples_per_s_per_gpu", "{:,.0f}"),
    (
        heading_of(columns.MFU),
        columns.MFU,
        "{:.3f}",
    ),  # these three where they are known
    (heading_of(columns.BUSY), columns.BUSY, "{:.0f}"),
    (heading_of(columns.JOULES), columns.JOULES, "{:.3g}"),
    ("round trip ms", "link_rtt_median_ms", "{:.2f}"),  # where there is more than one node
    ("link Mbit/s", "link_bandwidth_mbit", "{:,.0f}"),
    ("training s", "train_time_s", "{:.1f}"),
    ("wall s", "wall_s", "{:.1f}"),
    ("outcome", "outcome", "{}"),
)


LEGEND = (
    "batch: samples of one update over all processes; samples/s: training only, all processes, "
    "first steps left out; wall s: everything from start to end, earlier attempts included"
)


IMPORTED = (
    "imported: what others have measured, read from their files; as their source says it, "
    "on machines that are not known here"
)


# Said once above the table where it is the same for all runs of a machine.
SAID_ONCE = ("script", "model", "strategy", "number_format", "effective_batch", "lr", "seed")


def run(options: argparse.Namespace) -> int:
    root = options.folder
    if sweep_file(root) is not None:
        show_sweep(root, options.write, options.json)
        return 0
    if options.write:
        raise UserError(f"--write is for a sweep: there is no {FILE} in {root}")
    return _show_runs(root, options.json)


def _show_runs(root: Path, as_json: bool) -> int:
    runs = load_runs(root, dtype=object if as_json else None)
    if runs.empty:
        raise UserError(f"no records below {root}: python vit.py --tiny makes one")
    if as_json:
        print_json({"records": root, "runs": runs.to_dict("records")})
        return 0
    if "strategy" in runs:
        runs["strategy"] = _ways(runs)
    console = screen()
    for machine, group in runs.groupby("machine", dropna=False):
        _show_machine(console, group, str(machine))
    failed = runs[runs["reason"].notna()] if "reason" in runs else runs[:0]
    for _, run in failed.iterrows():
        console.print(f"{run['outcome']}: {run['reason']}\n  {run['path']}")
    for _, run in runs[runs["link_warning"].notna()].iterrows():
        console.print(f"warning: {run['link_warning']}\n  {run['path']}")
    console.print(LEGEND, style="dim")
    if runs["imported"].notna().any():
        console.print(IMPORTED, style="dim")
    console.print(f"records: {root}")
    return 0


def _ways(runs: pd.DataFrame) -> list[str | None]:
    """The strategies, and by what runs of one strategy are mostly told apart."""
    told = [name for name in ("strategy", "compress", "sync_every") if name in runs]
    found = runs[told].astype(object).where(runs[told].notna(), None)
    return [strategy_text(dict(zip(told, row, strict=True))) for row in found.to_numpy()]


def _show_machine(console: Console, runs: pd.DataFrame, machine: str) -> None:
    known = [name for name in columns.DEVICE_FIELDS if name in runs and runs[name].notna().any()]
    hidden = {*columns.DEVICE_FIELDS} - {*columns.usual(known)}
    shown = [column for column in COLUMNS if column[1] in runs and column[1] not in hidden]
    same = [c for c in shown if c[1] in SAID_ONCE and len(runs) > 1 and runs[c[1]].nunique() == 1]
    title = machine
    if same:
        first = runs.iloc[0]
        title += ", all: " + ", ".join(f"{h} {_shown(first[c], f)}" for h, c, f in same)
    shown = [column for column in shown if column not in same]
    console.print(title, style="italic")
    order = ("script", "model", "strategy", "number_format", "setup", "lr", "seed")
    ordered = runs.sort_values([name for name in order if name in runs])
    rows = [[_shown(run[c], form) for _, c, form in shown] for _, run in ordered.iterrows()]
    keys = sum(c in order for _, c, _ in shown)
    show(table_of([heading for heading, _, _ in shown], rows, keys))


def _shown(value: Any, form: str) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return form.format(value)

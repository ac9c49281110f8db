"""python -m harness table [FOLDER]: what was measured, a row a run, failures included."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table

from harness.read.loading import load_runs
from harness.settings import UserError

# Heading, column of load_runs(), how a value is shown.
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("script", "script", "{}"),
    ("setup", "setup", "{}"),
    ("strategy", "strategy", "{}"),
    ("model", "model", "{}"),
    ("batch", "effective_batch", "{:.0f}"),
    ("lr", "lr", "{:g}"),
    ("seed", "seed", "{:.0f}"),
    ("updates", "updates", "{:.0f}"),
    ("accuracy", "accuracy", "{:.4f}"),
    ("f1", "f1", "{:.4f}"),
    ("eval loss", "eval_loss", "{:.4f}"),
    ("samples/s", "train_samples_per_s", "{:,.0f}"),
    ("per GPU", "train_samples_per_s_per_gpu", "{:,.0f}"),
    ("training s", "train_time_s", "{:.1f}"),
    ("wall s", "wall_s", "{:.1f}"),
    ("outcome", "outcome", "{}"),
)
LEGEND = (
    "batch: samples of one update over all processes; samples/s: training only, all processes, "
    "first steps left out; wall s: everything from start to end, earlier attempts included"
)


def main(argv: list[str]) -> int:
    if argv and argv[0] in ("-h", "--help"):
        print("usage: python -m harness table [FOLDER]   (outputs)")
        return 0
    root = Path(argv[0] if argv else "outputs")
    try:
        runs = load_runs(root)
    except UserError as error:
        print(f"harness table: error: {error}", file=sys.stderr)
        return 2
    if runs.empty:
        print(
            f"harness table: error: no records below {root}: python vit.py --tiny makes one",
            file=sys.stderr,
        )
        return 2
    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen = Console(highlight=False, width=200)
    for machine, group in runs.groupby("machine", dropna=False):
        screen.print(_table(group, str(machine)))
    failed = runs[runs["reason"].notna()] if "reason" in runs else runs[:0]
    for _, run in failed.iterrows():
        screen.print(f"{run['outcome']}: {run['reason']}\n  {run['path']}")
    screen.print(LEGEND, style="dim")
    screen.print(f"records: {root}")
    return 0


def _table(runs: pd.DataFrame, machine: str) -> Table:
    table = Table(title=machine, title_justify="left", box=box.SIMPLE_HEAD)
    shown = [column for column in COLUMNS if column[1] in runs]
    for heading, column, _ in shown:
        right = pd.api.types.is_numeric_dtype(runs[column])
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    order = [c for c in ("script", "model", "strategy", "setup", "lr", "seed") if c in runs]
    for _, run in runs.sort_values(order).iterrows():
        table.add_row(*(_shown(run[column], form) for _, column, form in shown))
    return table


def _shown(value: Any, form: str) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return form.format(value)

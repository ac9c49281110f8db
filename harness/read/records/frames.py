"""load() and load_runs(): the records below a folder as data frames."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from harness.core.records import find_runs, without_collecting
from harness.read.records.copies import without_copies
from harness.read.records.recorded import (
    Recorded,
    existing,
    none_readable,
    processes_of,
    recorded,
    warn_not_read,
)
from harness.read.records.runs import Run, link_numbers, run_of
from harness.read.records.selection import parse_selector, select

# Fields of a row that hold further fields, or are null.
DEVICES = ("gpu", "node")


@without_collecting()
def load(root: str | Path) -> pd.DataFrame:
    """One row per epoch over all runs at or below a folder; settings and machine as columns.

    Unreadable lines are left out and counted in the column broken_lines. Runs whose record is not
    believed have no epochs and are named on stderr. Copies of a run count once.
    """
    rows: list[dict[str, Any]] = []
    for record in _recorded_below(root)[0]:
        torn = sum(record.broken_lines.values())
        shared = {**_shared(record), "outcome": record.state, "broken_lines": torn}
        rows += [{**shared, **_flat(row)} for row in record.epochs]
    return pd.DataFrame(rows)


def load_runs(root: str | Path) -> pd.DataFrame:
    """One row per run: its settings, its machine and the fields of summary.json; without the times
    of a run in another batch than asked for. root may be FOLDER:NAME=VALUE,NAME=VALUE.

    A run that is not believed has the outcome "unreadable" and no numbers.
    """
    frame, *_ = frame_with_runs(root)
    return frame


@without_collecting()
def frame_with_runs(
    root: str | Path, dtype: type | None = None
) -> tuple[pd.DataFrame, list[Run], list[str]]:  # fmt: skip
    """load_runs(), the run of each row, and a line for each record that was not read. With
    dtype=object, integers stay integers even where some runs lack them.
    """
    path, conditions = parse_selector(str(root))
    records, not_read = _recorded_below(path)
    read = [run_of(record, {}, str(record.folder.path), None) for record in records]
    if conditions:
        kept = {*select(path, read, conditions)}
        records = [rec for rec, run in zip(records, read, strict=True) if run in kept]
        read = [run for run in read if run in kept]
    rows = [
        {
            **_shared(record),
            "disturbed": run.is_disturbed,
            **(record.summary or {"outcome": record.state, "reason": record.reason}),
            **dict.fromkeys(run.left_out),
        }
        for record, run in zip(records, read, strict=True)
    ]
    return pd.DataFrame(rows, dtype=dtype), read, not_read


def _recorded_below(root: str | Path) -> tuple[list[Recorded], list[str]]:
    """Every run below a folder, once, also those that are not believed; and a line for each of
    these, for torn lines and for copies, which are named on stderr.

    UserError where there are runs and none is believed.
    """
    records = {folder: recorded(folder) for folder in find_runs(existing(root))}
    begun = {folder: record.begun for folder, record in records.items()}
    folders, copies = without_copies([*records], known=begun)
    once = [records[folder] for folder in folders]
    bad = [record.line for record in once if record.problem]
    if bad and len(bad) == len(once):
        raise none_readable(bad)
    not_read = [*(line for record in once for line in record.lines), *copies]
    warn_not_read(not_read)
    return once, not_read


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a field as columns of their own: gpu_power_w_mean."""
    columns: dict[str, Any] = {}
    for name, value in row.items():
        if type(value) is dict:
            for inner, of in _flat(value).items() if name not in DEVICES else _spread(value):
                columns[f"{name}_{inner}"] = of
        elif value is not None or name not in DEVICES:
            columns[name] = value
    return columns


def _spread(device: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Mean, p95 and max of each reading, one column each: nearly all columns come from here."""
    for name, value in device.items():
        if type(value) is dict:
            for which, number in value.items():
                yield f"{name}_{which}", number
        else:
            yield name, value


def _shared(record: Recorded) -> dict[str, Any]:
    settings, environment = record.shown_settings, record.environment
    settings.pop("training_arguments", None)
    if "precision" in settings:
        # The setting and the metric have one name; the metric keeps it.
        settings["number_format"] = settings.pop("precision")
    passed = settings.pop("trainer", None) or {}
    imported = settings.pop("imported", None) or {}
    return {
        "path": str(record.folder.path),
        **settings,
        **{f"trainer_{name}": value for name, value in passed.items()},
        "imported": imported.get("source"),  # None: measured by this project
        "machine": environment.get("machine"),
        "device": (environment.get("observed") or {}).get("device"),
        "nodes": environment.get("nodes"),
        "processes_per_node": environment.get("processes_per_node"),
        "processes": processes_of(environment),
        "effective_batch": environment.get("effective_batch"),
        **link_numbers(environment),
        "link_warning": (environment.get("link") or {}).get("warning"),
    }

"""Records as data frames: load() has a row per epoch, load_runs() a row per run.

Values whose type is not the declared one are refused here, so that readers need not expect them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import pandas as pd

from harness.core.records import SCHEMA, RunFolder, find_runs, read_json, read_rows
from harness.core.schema.dictionary import check_types
from harness.core.settings import UserError

# What a run without summary.json is: it may still be going on, or have been killed.
UNFINISHED = "unfinished"

# Fields of a row that hold further fields, or are null.
DEVICES = ("gpu", "node")

# Column -> field of environment.json's link.
RTT, BANDWIDTH = "link_rtt_median_ms", "link_bandwidth_mbit"
FIELDS = {
    "link_rtt_min_ms": "rtt_min_ms",
    RTT: "rtt_median_ms",
    BANDWIDTH: "bandwidth_mbit",
    "link_allreduce_s": "allreduce_s",
    "link_allreduce_algbw_mbit": "allreduce_algbw_mbit",
    "link_allreduce_busbw_mbit": "allreduce_busbw_mbit",
}


def load(root: str | Path) -> pd.DataFrame:
    """One row per epoch over all runs at or below a folder; settings and machine as columns.

    Lines that are not readable are left out and counted in the column broken_lines.
    """
    rows: list[dict[str, Any]] = []
    for folder in _runs(root):
        epochs, broken = epochs_of(folder)
        outcome = (summary_of(folder) or {}).get("outcome", UNFINISHED)
        shared = {**_shared(folder), "outcome": outcome, "broken_lines": broken}
        rows += [{**shared, **_flat(row)} for row in epochs]
    return pd.DataFrame(rows)


def load_runs(root: str | Path, dtype: type | None = None) -> pd.DataFrame:
    """One row per run: its settings, its machine and the fields of summary.json.

    With dtype=object integers stay integers where some runs do not have them.
    """
    rows = []
    for folder in _runs(root):
        summary = summary_of(folder) or {"outcome": UNFINISHED, "reason": None}
        rows.append({**_shared(folder), **summary})
    return pd.DataFrame(rows, dtype=dtype)


def settings_of(folder: RunFolder) -> dict[str, Any]:
    """The settings as they were written, if this version of the definitions wrote them."""
    settings = read_json(folder.settings)
    if settings is None:
        raise UserError(f"{folder.settings} is not readable as JSON: move the folder away")
    schema = settings.pop("schema", None)
    if schema != SCHEMA:
        raise UserError(
            f"{folder.path} was written with schema {schema}, this reads {SCHEMA}: "
            "read it with the version of this project that wrote it"
        )
    check_types("settings", settings, folder.settings)
    return settings


def environment_of(folder: RunFolder) -> dict[str, Any]:
    environment = read_json(folder.environment) or {}
    check_types("environment", environment, folder.environment)
    return environment


def summary_of(folder: RunFolder) -> dict[str, Any] | None:
    summary = read_json(folder.summary)
    check_types("summary", summary or {}, folder.summary)
    return summary


def epochs_of(folder: RunFolder) -> tuple[list[dict[str, Any]], int]:
    """The rows, and the number of lines that are not readable."""
    rows, broken = read_rows(folder.epochs)
    for row in rows:
        check_types("epochs", row, folder.epochs)
    return rows, broken


def is_number(value: Any) -> TypeGuard[float]:
    """Unknown is null; what is neither a number nor finite is unknown."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def link_numbers(environment: Mapping[str, Any]) -> dict[str, float]:
    """The measured figures of the link that are known; none for a run on one node."""
    link = environment.get("link") or {}
    return {name: link[at] for name, at in FIELDS.items() if is_number(link.get(at))}


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
    """Mean, p95 and max of each reading: nearly all columns of a row come from here."""
    for name, value in device.items():
        if type(value) is dict:
            for which, number in value.items():
                yield f"{name}_{which}", number
        else:
            yield name, value


def _runs(root: str | Path) -> list[RunFolder]:
    root = Path(root)
    if not root.exists():
        raise UserError(f"{root}: there is no such folder")
    return find_runs(root)


def _shared(folder: RunFolder) -> dict[str, Any]:
    settings, environment = settings_of(folder), environment_of(folder)
    settings.pop("training_arguments", None)
    if "precision" in settings:
        # The setting and the metric have one name; the metric keeps it.
        settings["number_format"] = settings.pop("precision")
    passed = settings.pop("trainer", None) or {}
    imported = settings.pop("imported", None) or {}
    nodes, per_node = environment.get("nodes"), environment.get("processes_per_node")
    return {
        "path": str(folder.path),
        **settings,
        **{f"trainer_{name}": value for name, value in passed.items()},
        "imported": imported.get("source"),  # None: measured by this project
        "machine": environment.get("machine"),
        "nodes": nodes,
        "processes_per_node": per_node,
        "processes": nodes * per_node if nodes and per_node else None,
        "effective_batch": environment.get("effective_batch"),
        **link_numbers(environment),
        "link_warning": (environment.get("link") or {}).get("warning"),
    }

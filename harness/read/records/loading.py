"""Records as data frames: load() has a row per epoch, load_runs() a row per run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import pandas as pd

from harness.core.records import SCHEMA, RunFolder, find_runs, read_json, read_rows
from harness.core.settings import UserError

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


def is_number(value: Any) -> TypeGuard[float]:
    """Unknown is null; what is neither a number nor finite is unknown."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def link_numbers(environment: dict[str, Any]) -> dict[str, float]:
    """What is known; nothing of a run on one node."""
    link = environment.get("link") or {}
    return {name: link[at] for name, at in FIELDS.items() if is_number(link.get(at))}


def link_warning(environment: dict[str, Any]) -> str | None:
    """What was far from the link that was asked for."""
    return (environment.get("link") or {}).get("warning")


# What a run without summary.json is: it may still be going on, or have been killed.
UNFINISHED = "unfinished"


# Fields of a row that are made of others, or null.
DEVICES = ("gpu", "node")


def load(root: str | Path) -> pd.DataFrame:
    """One row an epoch over all runs at or below a folder; settings and machine as columns.

    Lines that are not readable are left out and counted in the column broken_lines.
    """
    rows: list[dict[str, Any]] = []
    for folder in _runs(root):
        shared = _shared(folder)
        epochs, broken = read_rows(folder.epochs)
        outcome = (read_json(folder.summary) or {}).get("outcome", UNFINISHED)
        for row in epochs:
            rows.append({**shared, "outcome": outcome, "broken_lines": broken, **_flat(row)})
    return pd.DataFrame(rows)


def load_runs(root: str | Path) -> pd.DataFrame:
    """One row a run: its settings, its machine and what stands in summary.json."""
    rows = []
    for folder in _runs(root):
        summary = read_json(folder.summary) or {"outcome": UNFINISHED, "reason": None}
        rows.append({**_shared(folder), **summary})
    return pd.DataFrame(rows)


def _flat(row: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """What stands inside another field as a column of its own: gpu_power_w_mean."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{before}{name}_")
        elif name not in DEVICES or value is not None:
            found[before + name] = value
    return found


def _runs(root: str | Path) -> list[RunFolder]:
    root = Path(root)
    if not root.exists():
        raise UserError(f"{root}: there is no such folder")
    return find_runs(root)


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
    return settings


def _shared(folder: RunFolder) -> dict[str, Any]:
    settings = settings_of(folder)
    settings.pop("training_arguments", None)
    if "precision" in settings:
        # The setting and the metric have one name; the metric keeps it.
        settings["number_format"] = settings.pop("precision")
    passed = settings.pop("trainer", None) or {}
    imported = settings.pop("imported", None) or {}
    environment = read_json(folder.environment) or {}
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
        "link_warning": link_warning(environment),
    }

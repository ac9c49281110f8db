"""What others have recorded, in this project's names and units, and a record made of it.

Nothing is computed that the source does not hold: what it does not say is null.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.core.attempts import QUALITY, best_of
from harness.core.records import (
    FINISHED,
    SCHEMA,
    RunFolder,
    append_row,
    find_runs,
    read_json,
    write_json,
)
from harness.core.settings import UserError, flag_fields, parse_setup
from harness.core.topology import effective_batch

# Of an epoch's row, in the order of those that are measured here.
ROW = (
    "epoch", "updates", "samples", "fed_samples", "effective_batch", "learning_rate", "train_loss",
    "epoch_time_s", "train_samples_per_s", "train_samples_per_s_per_gpu", "timed_samples",
    "timed_s", "energy_j", "eval_loss", "accuracy", "precision", "recall", "f1", "eval_samples",
    "eval_time_s", "eval_samples_per_s", "wall_s", "unix",
)  # fmt: skip


UNKNOWN_OF_MACHINE = (
    "cpu", "cpu_cores", "memory_gib", "gpus", "driver", "cuda", "nccl", "threads", "python",
    "system", "versions", "commit", "dirty", "command", "launch", "variables",
)  # fmt: skip


# What a share cannot be; precision and recall as well as accuracy.
SHARES = ("accuracy", "precision", "recall", "f1", "top5_accuracy")


PREFIX = "imported-"


@dataclass(frozen=True)
class Foreign:
    """One file of somebody else's, read."""

    file: Path
    format: str
    sha256: str
    settings: dict[str, Any]  # what name and content say of them, by our names
    rows: tuple[dict[str, Any], ...]
    epochs_done: float | None
    updates: int | None = None
    outcome: str = FINISHED
    reason: str | None = None
    best_metric: str | None = "accuracy"
    summary: dict[str, Any] = field(default_factory=dict)
    said: dict[str, Any] = field(default_factory=dict)  # numbers that have no name here
    begins: str | None = None  # the same for two states of one run
    notes: tuple[str, ...] = ()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def check_share(where: str, name: str, value: float) -> None:
    """Per cent taken for a share would stand a hundred times too high in every table."""
    if name in SHARES and not 0 <= value <= 1:
        raise UserError(f"{where}: {name} {value:g} is no share: 0 to 1 is expected, not per cent")


def folder_of(foreign: Foreign, output_dir: Path) -> RunFolder:
    settings = foreign.settings
    stem = re.sub(r"[^A-Za-z0-9_.+-]+", "-", foreign.file.stem).strip("-.") or "record"
    name = f"{PREFIX}{stem}-{foreign.sha256[:8]}"
    return RunFolder(output_dir / settings["script"] / settings["setup"] / name)


def imported_in(output_dir: Path) -> dict[Path, dict[str, Any]]:
    """The runs of a folder that were imported, with what stands in their settings of it."""
    found = {}
    for run in find_runs(output_dir) if output_dir.exists() else ():
        if run.path.name.startswith(PREFIX):
            found[run.path] = (read_json(run.settings) or {}).get("imported") or {}
    return found


def write_record(foreign: Foreign, source: str, folder: RunFolder) -> None:
    """The whole folder or none of it: it is made beside its place and renamed."""
    draft = RunFolder(folder.path.with_name(f".{folder.path.name}.{os.getpid()}"))
    try:
        # The file that makes a folder a run comes first, as in a run.
        write_json(draft.settings, recorded_settings(foreign, source))
        write_json(draft.environment, environment(foreign, source))
        for row in foreign.rows:
            append_row(draft.epochs, full_row(foreign, row))
        write_json(draft.summary, summary(foreign))
        draft.path.rename(folder.path)
    except OSError as error:
        raise UserError(f"{folder.path} cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(draft.path, ignore_errors=True)


def recorded_settings(foreign: Foreign, source: str) -> dict[str, Any]:
    named = {name: foreign.settings.get(name) for name in flag_fields() if name != "output_dir"}
    named.pop("rerun")
    return {
        "schema": SCHEMA,
        "script": foreign.settings["script"],
        **named,
        "trainer": {},
        "imported": {
            "source": source,
            "format": foreign.format,
            "file": foreign.file.name,
            "sha256": foreign.sha256,
            "begins": foreign.begins,
            "said": foreign.said,
            "notes": list(foreign.notes),
        },
    }


def environment(foreign: Foreign, source: str) -> dict[str, Any]:
    nodes, per_node, _ = parse_setup(foreign.settings["setup"])
    sizes = {name: foreign.settings.get(name) for name in ("train_size", "test_size")}
    return {
        "machine": machine_of(source),
        **dict.fromkeys(UNKNOWN_OF_MACHINE),
        "nodes": nodes,
        "processes_per_node": per_node,
        "effective_batch": batch_of_import(foreign.settings),
        "updates": foreign.updates,
        "link": None,
        "data": {
            "dataset": foreign.settings.get("dataset"),
            "train_samples": sizes["train_size"] if sizes["train_size"] != "all" else None,
            "test_samples": sizes["test_size"] if sizes["test_size"] != "all" else None,
            "data_checksum": None,
        },
    }


def machine_of(source: str) -> str:
    """A machine of its own: nothing imported is ever averaged with what was measured here."""
    return f"imported:{source}"


def batch_of_import(settings: Mapping[str, Any]) -> int | None:
    nodes, per_node, _ = parse_setup(settings["setup"])
    batch, accumulated = settings.get("per_gpu_batch"), settings.get("grad_acc")
    return effective_batch(batch, accumulated, nodes * per_node) if batch and accumulated else None


def full_row(foreign: Foreign, row: Mapping[str, Any]) -> dict[str, Any]:
    tested, rate = foreign.settings.get("test_size"), row.get("eval_samples_per_s")
    known: dict[str, Any] = {"effective_batch": batch_of_import(foreign.settings)}
    if isinstance(tested, int):
        known |= {"eval_samples": tested, "eval_time_s": tested / rate if rate else None}
    return {**dict.fromkeys(ROW), **known, **row}


def summary(foreign: Foreign) -> dict[str, Any]:
    """The fields that a run's own summary has, as far as the rows tell them."""
    rows = [full_row(foreign, row) for row in foreign.rows]
    last = rows[-1] if rows else {}
    return {
        "schema": SCHEMA,
        "outcome": foreign.outcome,
        "reason": foreign.reason,
        "epochs_done": foreign.epochs_done,
        "updates": foreign.updates,
        "samples": _sum(rows, "samples"),
        **{name: last[name] for name in QUALITY if name in last},
        **best_of([_finite(row) for row in rows], foreign.best_metric),
        "train_samples_per_s": None,
        "train_samples_per_s_per_gpu": None,
        "train_time_s": _sum(rows, "epoch_time_s"),
        "eval_time_s": _sum(rows, "eval_time_s"),
        "wall_s": None,
        "energy_j": None,
        "joules_per_sample": None,
        **foreign.summary,
    }


def _sum(rows: list[dict[str, Any]], name: str) -> float | None:
    known = [row[name] for row in rows if row[name] is not None]
    return math.fsum(known) if known and len(known) == len(rows) else None


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """What is not a number cannot be the best of anything."""
    return {k: v for k, v in row.items() if not isinstance(v, float) or math.isfinite(v)}

"""Runs that a sweep has submitted to a cluster and not settled: jobs.jsonl in its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.core.records import read_rows
from harness.core.settings import UserError

JOBS = "jobs.jsonl"


@dataclass(frozen=True)
class Entry:
    """One run that was submitted and is not settled."""

    path: str  # of the run, below the output folder
    name: str  # of the job
    index: int  # in its array
    array_size: int  # in runs; 1: no array
    unix: float
    command: str  # of the sweep that submitted it
    job: str | None = None  # the job's number; None if the runner was killed before it knew

    @property
    def id(self) -> str | None:
        return f"{self.job}_{self.index}" if self.job and self.array_size > 1 else self.job


def open_entries(file: Path) -> dict[str, Entry]:
    """The open entries of jobs.jsonl, by path of the run."""
    entries: dict[tuple[str, str], Entry] = {}
    for row in read_rows(file)[0]:
        try:
            entries = _followed(entries, row)
        except (KeyError, TypeError):
            raise UserError(
                f"{file}: not a line of a sweep: {json.dumps(row)[:80]}; remove it, and "
                "see in squeue whether jobs of the sweep are left"
            ) from None
    return {path: entry for (_, path), entry in entries.items()}


def _followed(
    entries: dict[tuple[str, str], Entry], row: dict[str, Any]
) -> dict[tuple[str, str], Entry]:
    """The open entries after one more line."""
    name = row["name"]
    of_job = [key for key in entries if key[0] == name]
    if row["event"] == "submitting":
        runs = row["runs"]
        return entries | {
            (name, path): Entry(path, name, index, len(runs), row["unix"], row["command"])
            for index, path in enumerate(runs)
        }
    if row["event"] == "submitted":
        return entries | {key: replace(entries[key], job=row["job"]) for key in of_job}
    gone = of_job if row["event"] == "withdrawn" else [(name, row["path"])]
    return {key: entry for key, entry in entries.items() if key not in gone}

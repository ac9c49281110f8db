"""What a sweep has given to a cluster: a file that survives whoever wrote it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.records import append_row, read_json, read_rows


@dataclass(frozen=True)
class Note:
    """What the script of a job has written, by its own clock."""

    job: str
    began: float
    ended: float | None
    code: int | None
    signal: str  # USR1: shortly before the time limit; TERM: the job was ended; or none

    @property
    def tells(self) -> bool:
        """Whether it says how the job ended; who sent TERM, only the cluster knows."""
        return self.ended is not None and self.signal != "TERM"


@dataclass(frozen=True)
class Entry:
    """One run that was submitted and has not been settled."""

    path: str  # of the run, below the output folder
    name: str  # of the job
    index: int  # in its array
    of: int  # runs of the array; 1: none
    unix: float
    job: str | None = None  # number; None: whoever submitted it was killed before it was told

    @property
    def id(self) -> str | None:
        return f"{self.job}_{self.index}" if self.job and self.of > 1 else self.job


class Submitted:
    """jobs.jsonl in the folder of a sweep, and jobs/ with the scripts and what they leave."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "jobs"
        self.file = folder / "jobs.jsonl"

    def script(self, name: str) -> Path:
        return self.folder / f"{name}.sh"

    def note(self, entry: Entry) -> Note | None:
        """None before the job has begun."""
        found = read_json(self.folder / f"{entry.name}_{entry.index}.json")
        return Note(**found) if found is not None else None

    def log(self, entry: Entry) -> Path:
        return self.folder.parent / "logs" / f"{entry.name}_{entry.index}.txt"

    def intend(self, name: str, paths: list[str]) -> None:
        """Before sbatch is asked: a job that nobody remembers would be submitted twice."""
        self._add("submitting", name, runs=paths)

    def tell(self, name: str, job: str) -> None:
        self._add("submitted", name, job=job)

    def withdraw(self, name: str) -> None:
        self._add("withdrawn", name)

    def settle(self, entry: Entry, outcome: str) -> None:
        self._add("settled", entry.name, path=entry.path, outcome=outcome)

    def open(self) -> dict[str, Entry]:
        """The runs that were submitted and not settled, by their path."""
        rows, _ = read_rows(self.file)
        found: dict[tuple[str, str], Entry] = {}
        for row in rows:
            name = row["name"]
            mine = [key for key in found if key[0] == name]
            if row["event"] == "submitting":
                for index, path in enumerate(row["runs"]):
                    found[name, path] = Entry(path, name, index, len(row["runs"]), row["unix"])
            elif row["event"] == "submitted":
                found |= {key: replace(found[key], job=row["job"]) for key in mine}
            elif row["event"] == "withdrawn":
                found = {key: entry for key, entry in found.items() if key[0] != name}
            else:
                found.pop((name, row["path"]), None)
        return {path: entry for (_, path), entry in found.items()}

    def settled(self, entry: Entry) -> bool:
        """Whether another runner has settled it meanwhile."""
        now = self.open().get(entry.path)
        return now is None or now.name != entry.name

    def _add(self, event: str, name: str, **facts: Any) -> None:
        append_row(self.file, {"event": event, "name": name, **facts, "unix": time.time()})

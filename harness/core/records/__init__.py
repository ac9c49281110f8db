"""The records on disk: one folder per run, plain JSON, written to disk while the run goes on.

    <output_dir>/<script>/<setup>/<run_id>/
        settings.json      every setting, defaults included
        environment.json   machine, versions, commit, command, what was checked at the start
        attempts.jsonl     one row each time the run was started, one each time it ended
        epochs.jsonl       one row per epoch
        progress.json      how far a run in progress is; peers.json: the peers of hivemind
        ranks/             what differs between ranks: one row per epoch in rank_<r>.jsonl, and why
                           a rank failed in failure_<r>.json
        telemetry/         every reading of devices and nodes, in node_<n>.jsonl
        summary.json       written last, by rename: its presence means that the run has an outcome

outputs/README.md says what each field means. Nothing is read back from a log or a file name.
"""

from __future__ import annotations

import gc
import json
import math
import os
import re
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from harness.core.records.archives import (
    RANKS,
    Files,
    archived,
    archives_above,
    is_archive,
    parsed,
    read_archive,
    same_files,
    unpacked,
)
from harness.core.records.archives import TELEMETRY as TELEMETRY
from harness.core.records.checksums import OWN, is_changed, vouched, without_changed
from harness.core.records.disk import draft_of, make_folder, sync, unused, writing_to
from harness.core.records.walking import ASIDE as ASIDE
from harness.core.records.walking import PUBLISHED as PUBLISHED
from harness.core.records.walking import IsOne, walk
from harness.core.schema.checks import RECORDS, check_written
from harness.core.schema.environment import EnvironmentRecord, SweepRecord
from harness.core.schema.rows import FINISHED as FINISHED
from harness.core.schema.rows import (
    OUTCOMES,
    AttemptEnd,
    AttemptStart,
    EpochRow,
    FailureRecord,
    PeerRecord,
    ProgressRecord,
    RankRow,
    ReportedProgress,
    SummaryRecord,
)
from harness.core.schema.telemetry import TelemetryRow
from harness.core.settings import UserError

# Incremented when a definition in harness/core/schema changes: other versions are not compared.
SCHEMA: Final = 1

# The other outcomes of a run. Each is a result and gets a row in tables.
FAILURES = tuple(outcome for outcome in OUTCOMES if outcome != FINISHED)
INTERRUPTED = "interrupted"  # also an unfinished run that no process works on
# States of a run without an outcome: not begun, in progress, or refused by the plan.
WAITING, RUNNING, SKIPPED = "waiting", "running", "skipped"

# Share of all cores (cpu_busy_share, others_cpu_share) used by others that disturbs a measurement.
DISTURBING_SHARE = 0.25

# The exit code that multiprocessing reports for a process that died with its fork server.
SERVER_KILLED = 255

# File names that are also needed without a folder object: in a run's folder, in a sweep's folder.
SETTINGS, ENVIRONMENT, SUMMARY, ATTEMPTS, EPOCHS, PROGRESS, PEERS = (
    RECORDS[kind].file
    for kind in ("settings", "environment", "summary", "start", "epochs", "progress", "peers")
)
# The name of a folder that a run of this project has made.
RUN_FOLDER = re.compile(r".*_s\d+(_[a-z0-9]+)*_[0-9a-f]{8}")
FAILURE_OF_RANK = RECORDS["failure"].file.partition("<")[0]
SWEEP, LOGS = Path(RECORDS["sweep"].file).name, "logs"  # LOGS: the folder of its runs' output
# Prefix of a checkpoint folder, as the Trainer names it; the number of the update follows.
CHECKPOINT = "checkpoint-"
# Written last into a checkpoint's folder: a checkpoint without it is ignored.
COMPLETE = "complete.json"


class File:
    """A descriptor: the path of a file of a run, as an attribute of its RunFolder.

    Joined once and then kept by the folder: joining takes a tenth of the time of reading.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __set_name__(self, owner: type, attribute: str) -> None:
        self.attribute = attribute

    def __get__(self, folder: RunFolder, owner: type | None = None) -> Path:
        folder.__dict__[self.attribute] = path = folder.path / self.name
        return path


@dataclass(frozen=True)
class RunFolder:
    """The only code that knows the files of a run: their names, and what reading them gives.

    Reading checks only that a file is JSON (harness/core/schema/checks.py checks more): training
    and launching must work with whatever an interrupted process has left.
    """

    path: Path
    # The run's files in an archive; they count as long as the folder is not on disk.
    archived: Files | None = field(default=None, compare=False, repr=False)
    problem: str | None = field(default=None, compare=False)  # why an archive cannot be read

    settings = File(SETTINGS)
    environment = File(ENVIRONMENT)
    attempts = File(ATTEMPTS)
    epochs = File(EPOCHS)
    summary = File(SUMMARY)
    progress = File(PROGRESS)
    peers = File(PEERS)

    @classmethod
    def at(cls, path: Path) -> RunFolder:
        """The run at a path: on disk, or else in an archive in a folder above it."""
        return cls(path, archived(path))

    def has(self, file: Path) -> bool:
        return file.exists() or self._name(file) in (self._files() or ())

    def _files(self) -> Files | None:
        return None if self.archived is None or self.path.exists() else self.archived

    def _name(self, file: Path) -> str:
        return str(file)[len(str(self.path)) + 1 :]  # relative_to() takes as long as reading

    def telemetry(self, node: int) -> Path:
        return self.path / TELEMETRY / f"node_{node}.jsonl"

    def rank(self, rank: int) -> Path:
        return self.path / RANKS / f"rank_{rank}.jsonl"

    def failure(self, rank: int) -> Path:
        return self.path / f"{FAILURE_OF_RANK}{rank}.json"

    def checkpoint(self, update: int) -> Path:
        return self.path / f"{CHECKPOINT}{update}"

    def checkpoints(self) -> list[Path]:
        """The checkpoints, oldest first; folders with other names are copies that a user keeps."""
        named = self.path.glob(f"{CHECKPOINT}*")
        own = (p for p in named if re.fullmatch(rf"{CHECKPOINT}[0-9]{{1,18}}", p.name))
        return sorted(own, key=update_of)

    def lock(self, by: str) -> Path:
        """A lock against a second process of the same kind (run: training, claim: sweep runners).

        It lies beside the folder, which may be moved aside while the lock is held.
        """
        return self.path.parent / ".locks" / f"{self.path.name}.{by}"

    def read_settings(self) -> dict[str, Any] | None:
        return self.read_json(self.settings)

    def read_environment(self) -> EnvironmentRecord | None:
        return cast(EnvironmentRecord | None, self.read_json(self.environment))

    def read_summary(self) -> SummaryRecord | None:
        return cast(SummaryRecord | None, self.read_json(self.summary))

    def read_progress(self) -> ProgressRecord | None:
        """The last progress report; None if there is none, or if it was altered."""
        last = self.read_json(self.progress)
        changed = last is None or (OWN in last and is_changed(last))
        return None if changed else cast(ProgressRecord, last)

    def read_peers(self) -> dict[str, PeerRecord]:
        """What each process of a hivemind run has contributed, by its name."""
        return cast(dict[str, PeerRecord], self.read_json(self.peers) or {})

    def read_failure(self, rank: int) -> FailureRecord | None:
        return cast(FailureRecord | None, self.read_json(self.failure(rank)))

    def read_failures(self) -> list[FailureRecord]:
        """The failure record of each rank that failed, in the order of the ranks."""
        files = self._numbered(self.failure(0))
        return [
            cast(FailureRecord, row) for file in files if (row := self.read_json(file)) is not None
        ]

    def read_epochs(self) -> tuple[list[EpochRow], int]:
        """The rows, and the number of lines that are not readable."""
        rows, broken = self.read_rows(self.epochs)
        return cast(list[EpochRow], rows), broken

    def read_attempts(self) -> list[AttemptStart | AttemptEnd]:
        return cast(list[AttemptStart | AttemptEnd], self.read_rows(self.attempts)[0])

    def attempts_as_written(self) -> tuple[list[AttemptStart | AttemptEnd], int | None, int]:
        """The rows, the number of the first that was changed after it was written, and how many
        lines are not readable; of a changed row only `event` and `attempt` are kept.
        """
        found, broken = self.read_rows(self.attempts)
        rows, changed = without_changed(found, kept=("event", "attempt"))
        return cast(list[AttemptStart | AttemptEnd], rows), changed, broken

    def read_ranks(self) -> dict[int, list[RankRow]]:
        """The rows of each rank that has any, in the order of the ranks."""
        files = self._numbered(self.rank(0))
        return {_number(file): cast(list[RankRow], self.read_rows(file)[0]) for file in files}

    def read_telemetry(self) -> dict[int, list[TelemetryRow]]:
        """The readings of each node."""
        files = self._numbered(self.telemetry(0))
        return {_number(file): cast(list[TelemetryRow], self.read_rows(file)[0]) for file in files}

    def read_json(self, file: Path) -> dict[str, Any] | None:
        """Like the function read_json(), on disk or in an archive."""
        if (files := self._files()) is None:
            return read_json(file)
        return _object_in(files.get(self._name(file), ""))

    def read_rows(self, file: Path) -> tuple[list[dict[str, Any]], int]:
        if (files := self._files()) is None:
            return read_rows(file)
        return _rows_of(files.get(self._name(file), "[]"))

    def first_line(self, file: Path) -> str:
        """The first line of a file as it was written, perhaps torn; empty without such a file."""
        if (files := self._files()) is not None:
            text = files.get(self._name(file), '""')
            content = unpacked(text) if text.startswith('"') else b""  # only a text can be torn
        else:
            content = file.read_bytes() if file.exists() else b""
        return content.partition(b"\n")[0].decode("utf-8", errors="replace")

    def _numbered(self, first: Path) -> list[Path]:
        """All files named like this one except for the number, sorted by number."""
        pattern = first.name.replace("0", "*")
        archived = (self.path / name for name in self._files() or ())
        files = [*first.parent.glob(pattern), *(f for f in archived if f.match(pattern))]
        return sorted((f for f in files if f.stem.rsplit("_", 1)[1].isdecimal()), key=_number)

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        write_json(self.settings, {"schema": SCHEMA, **settings})

    def write_environment(self, record: EnvironmentRecord) -> None:
        """Only names and values as declared: what others write into it is checked first."""
        content = plain(record)
        check_written("environment", content)
        write_json(self.environment, content)

    def append_attempt(self, row: AttemptStart | AttemptEnd) -> None:
        """With a checksum."""
        append_row(self.attempts, vouched(plain(row)))

    def append_epoch(self, row: EpochRow) -> None:
        append_row(self.epochs, row)

    def append_rank(self, row: RankRow) -> None:
        append_row(self.rank(row["rank"]), row)

    def write_failure(self, record: FailureRecord) -> None:
        write_json(self.failure(record["rank"]), record)

    def write_peers(self, peers: Mapping[str, PeerRecord]) -> None:
        write_json(self.peers, peers)

    def write_progress(self, progress: ReportedProgress) -> None:
        """With time and checksum, and not durable, because the next one follows in a second."""
        record = {**progress, "unix": time.time()}
        write_json(self.progress, vouched(plain(record)), durable=False)

    def write_summary(self, record: SummaryRecord) -> None:
        """With a checksum."""
        write_json(self.summary, vouched(plain(record)))

    def outcome(self) -> str | None:
        """The outcome of the run; None while it has none.

        A run whose folder is removed just before its end leaves a summary alone: no outcome.
        """
        summary = self.read_summary()
        outcome = None if summary is None else str(summary.get("outcome"))
        return None if outcome == FINISHED and not self.has(self.settings) else outcome

    def set_aside(self) -> Path:
        """Rename the whole folder to make room for a new record; returns the new path."""
        aside = unused(self.path.parent, f"{self.path.name}{ASIDE}")
        self.path.rename(aside)
        return aside


def update_of(checkpoint: Path) -> int:
    """The number of the update after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix(CHECKPOINT))


def _number(file: Path) -> int:
    return int(file.stem.rsplit("_", 1)[1])


def plain(value: Any, infinite: Callable[[float], Any] = lambda _: None) -> Any:
    """The value in types of JSON, which has no NaN: NaN becomes null, which means unknown.

    infinite: gives what is written for infinity.
    """
    if isinstance(value, Mapping):
        return {str(k): plain(v, infinite) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v, infinite) for v in value]
    if hasattr(value, "item"):  # a scalar of numpy
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else infinite(value)
    return value


def total(values: Iterable[Any]) -> Any:
    """The exact sum; None (unknown) if a value is unknown or not finite, or if there are no values.
    The sum of integers is an integer.
    """
    known = [*values]
    if not known or None in known or not all(map(math.isfinite, known)):
        return None
    return sum(known) if all(isinstance(value, int) for value in known) else math.fsum(known)


def write_json(path: Path, content: Mapping[str, Any], durable: bool = True) -> None:
    """Write a file atomically: no reader sees half of it. durable: on disk when this returns."""
    with writing_to(path.parent):
        make_folder(path.parent)
        with draft_of(path) as draft, draft.open("w", encoding="utf-8") as file:
            json.dump(plain(content), file, indent=2, allow_nan=False)
            file.write("\n")
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if durable:
            sync(path.parent)


def write_sweep(folder: Path, record: SweepRecord) -> None:
    """The plan of a sweep, into its folder."""
    write_json(folder / SWEEP, record)


def read_json(path: Path) -> dict[str, Any] | None:
    """The content, or None where there is no such file or it is not readable as JSON."""
    try:
        return _object_in(path.read_bytes().decode("utf-8"))
    except (OSError, ValueError):
        return None


def _object_in(text: str) -> dict[str, Any] | None:
    try:
        content = parsed(json.loads(text) if text.startswith('"') else text)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _rows_of(archived: str) -> tuple[list[dict[str, Any]], int]:
    try:
        if archived.startswith('"'):  # a text
            return rows_in(unpacked(archived))
        content = parsed(archived)
    except ValueError:
        return [], 1
    rows = content if isinstance(content, list) else [content]
    objects = [row for row in rows if isinstance(row, dict)]
    return objects, len(rows) - len(objects)


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append one row, which is on disk when this returns.

    A row that a killed process left half-written has no line end; the new row then begins on a
    line of its own, so that only the broken row is lost.
    """
    line = json.dumps(plain(row), allow_nan=False) + "\n"
    with writing_to(path.parent):
        make_folder(path.parent)
        with path.open("ab+") as file:
            is_new = file.tell() == 0
            if not is_new:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = "\n" + line
            file.write(line.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            sync(path.parent)


def read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """(rows, number of unreadable lines); a missing file has no rows."""
    try:
        return rows_in(path.read_bytes())
    except OSError:
        return [], 0


def rows_in(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """The lines that are JSON objects, and the number of other lines that are not empty."""
    rows: list[dict[str, Any]] = []
    broken = 0
    for line in content.decode("utf-8", errors="replace").splitlines():
        if not line.strip():
            continue
        try:
            row = parsed(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            broken += 1
    return rows, broken


@contextmanager
def without_collecting() -> Iterator[None]:
    """No garbage collection meanwhile: records hold no cycles, which Python would look for again
    and again while their number grows.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def log_of(log: Path, rank: int) -> Path:
    """The file for the output of one rank of a run in a sweep; rank 0 uses the run's own file."""
    return log if rank == 0 else log.with_name(f"{log.stem}_rank{rank}{log.suffix}")


def find_runs(root: Path) -> list[RunFolder]:
    """Every run at or below a folder or in an archive, in a stable order, except runs set aside,
    and except published ones unless the root is their folder.
    """
    return _find(_is_run, root)


def _is_run(folder: str, files: Container[str]) -> bool:
    """Whether a folder is that of a run. One that has lost its settings.json is found, too, and is
    then named as unreadable. A launcher's record of a run that never began has no such file.
    """
    if SETTINGS in files:
        return True
    lost = EPOCHS in files or (SUMMARY in files and ENVIRONMENT in files)
    return lost and RUN_FOLDER.fullmatch(Path(folder).absolute().name) is not None


def find_folders(name: str, root: Path) -> list[RunFolder]:
    """The folders at or below a root that contain a file of this name; not those inside them."""
    return _find(lambda _, files: name in files, root)


def _find(is_one: IsOne, root: Path) -> list[RunFolder]:
    """The folders at or below a root for which is_one(path, names of files); not those inside them.

    A damaged archive is returned as a folder with a problem.
    """
    folders, archives = walk(is_one, root)
    by_path = {folder: RunFolder(folder) for folder in folders}
    for archive in (root,) if is_archive(root) else (*archives, *archives_above(root)):
        try:
            inside = read_archive(archive)
        except UserError as error:
            by_path[archive] = RunFolder(archive, problem=str(error))
            continue
        below = archive == root or archive in archives
        for path, files in inside.items():
            if is_one(str(path), files) and (below or path.is_relative_to(root)):
                if path in by_path:  # the folder on disk takes precedence
                    same_files(path, archive, files, by_path[path].archived)
                else:
                    by_path[path] = RunFolder(path, files)
    return [by_path[path] for path in sorted(by_path)]

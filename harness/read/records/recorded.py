"""The record in a run's folder, read and checked.

Readers get records from here alone. A record that fails a check stops no reader: it becomes a run
whose `problem` says in a line what is wrong, and of which no number is shown.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from harness.core.attempts import Attempts, ends_of, first_start, starts_of, times_of_attempts
from harness.core.identity import stem
from harness.core.links import FIELDS as LINK_FIELDS
from harness.core.links import Link
from harness.core.process import warn
from harness.core.records import (
    ATTEMPTS,
    ENVIRONMENT,
    EPOCHS,
    FINISHED,
    RUN_FOLDER,
    SCHEMA,
    SETTINGS,
    SUMMARY,
    RunFolder,
)
from harness.core.records.archives import is_archived
from harness.core.records.checksums import OWN, changed_row, is_changed
from harness.core.records.summary import best_of, of_rows, own_metrics, rate_of
from harness.core.schema.checks import check_fields, fields
from harness.core.schema.fields import is_number as is_number
from harness.core.schema.rows import AttemptEnd, AttemptStart, EpochRow, RankRow, SummaryRecord
from harness.core.schema.telemetry import TelemetryRow
from harness.core.settings import SETUP, Settings, UserError, nearest, options_off
from harness.core.strategies import SENT_DIRECTLY, recorded_strategy
from harness.read.labels import counted, listed
from harness.read.records.per_cent import as_shares

# The outcome of a record that is not believed; no file holds this value.
UNREADABLE = "unreadable"
# The state of a run without summary.json: it may still be running, or have been killed.
UNFINISHED = "unfinished"
MOST_NAMED = 10  # records, in the warnings
# The first row of attempts.jsonl, torn after the time of the start was written.
TORN_START = re.compile(r'\{"event": "start", "attempt": 1, "unix": (?P<unix>\d+\.\d+),.*[^}]')
# What to do with a record of another version.
READ_IT = f"read it with the version of this project that wrote it (commit in {ENVIRONMENT})"
NEARLY = 1 - 1e-6  # factor that allows for the rounding of sums


@dataclass
class Recorded:
    """One run as its folder holds it; what could not be checked is empty."""

    folder: RunFolder
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    summary: SummaryRecord | None = None
    epochs: tuple[EpochRow, ...] = ()
    attempts: Attempts = ()  # empty if a row is not as declared
    begun: float | None = None  # the time of its first start
    changed_attempt: int | None = None  # the first row of attempts.jsonl that was changed
    ranks: dict[int, list[RankRow]] = field(default_factory=dict)
    in_per_cent: tuple[str, ...] = ()  # the metrics that its script gave so
    # File -> number of unreadable lines, torn when a process was killed.
    broken_lines: dict[str, int] = field(default_factory=dict)
    problem: str | None = None  # why nothing that it measured is believed

    @property
    def state(self) -> str:
        """What became of the run."""
        if self.problem is not None:
            return UNREADABLE
        return UNFINISHED if self.summary is None else str(self.summary.get("outcome"))

    @property
    def reason(self) -> str | None:
        return self.summary.get("reason") if self.summary else self.problem

    @property
    def shown_settings(self) -> dict[str, Any]:
        """A script may train a model of its own; --model then only names what prepares its data."""
        own_model = (self.environment.get("observed") or {}).get("own_model")
        return self.settings | ({"model": own_model} if own_model else {})

    @property
    def line(self) -> str:
        return f"{self.folder.path}: {self.problem}"

    @property
    def lines(self) -> list[str]:
        """What of this record is not read."""
        torn = torn_lines(self.folder.path, self.broken_lines)
        return [*torn] if self.problem is None else [self.line]


def recorded(folder: RunFolder, with_ranks: bool = False) -> Recorded:
    """The record of a folder, which may hold nothing but an outcome that a launcher wrote."""
    record = Recorded(folder)
    try:
        _read(record, with_ranks)
    except UserError as error:
        record.problem = " ".join(str(error).split())
        record.summary, record.epochs, record.ranks = None, (), {}
    return record


def is_ours(settings: Mapping[str, Any]) -> bool:
    """Whether training of this project made the record: not imported, not LogCallback alone."""
    return "script" in settings and not settings.get("imported")


def none_readable(lines: Sequence[str]) -> UserError:
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    return UserError(f"no run can be read: {lines[0]}{more}")


def torn_lines(path: object, broken: Mapping[str, int]) -> Iterator[str]:
    for file, number in broken.items():
        yield f"{path}: {counted(number, 'line')} of {file} not readable, left out"


def warn_not_read(lines: Sequence[str]) -> None:
    """Warn of records that are left out, a line each: what is printed lacks them."""
    for line in lines[:MOST_NAMED]:
        warn(f"not read: {line}")
    if (more := len(lines) - MOST_NAMED) > 0:
        warn(f"not read: {more} more")


def _read(record: Recorded, with_ranks: bool) -> None:
    folder = record.folder
    attempts, record.changed_attempt, torn_attempts = attempts_of(folder)
    record.begun = begun_unix(folder, attempts, torn_attempts)
    settings = record.settings = settings_of(folder)
    record.environment = _object("environment", folder, folder.environment, settings) or {}
    check_links(record.environment, folder.environment.name)
    rows, torn = folder.read_epochs()
    broken = {folder.epochs.name: torn, folder.attempts.name: torn_attempts}
    record.broken_lines = {file: number for file, number in broken.items() if number}
    _check_rows("epochs", rows, folder.epochs, settings)
    record.epochs, record.attempts = tuple(rows), attempts
    if with_ranks:
        record.ranks = folder.read_ranks()
        for n, of_rank in record.ranks.items():
            _check_rows("ranks", of_rank, folder.rank(n), settings)
    summary = _object("summary", folder, folder.summary, settings)
    _check_epochs(record)
    if summary is not None:
        _check_whole(record, summary)
        record.summary = cast(SummaryRecord, summary)
    if _has_own_metrics(settings):
        record.in_per_cent, record.epochs, record.summary = as_shares(record.epochs, record.summary)


def settings_of(folder: RunFolder) -> dict[str, Any]:
    """The settings of a run; empty where there are none, UserError where they fail a check."""
    if folder.problem is not None:
        raise UserError(folder.problem)
    settings = _object("settings", folder, folder.settings, {})
    if settings is None:
        for file in (folder.epochs, folder.environment):
            if folder.has(file):  # a launcher's outcome has neither
                raise UserError(f"{SETTINGS} is missing beside {file.name}: restore the file")
        return {}
    del settings["schema"]
    if is_ours(settings):
        settings = {**options_off(), **settings}
        _check_settings(settings)
    _check_place(folder.path, settings)
    if settings.get("exchange") == "auto":  # the way that auto chose is what was measured
        environment = folder.read_json(folder.environment)
        observed = environment.get("observed") if isinstance(environment, dict) else None
        way = observed.get("exchange") if isinstance(observed, dict) else None
        settings["exchange"] = way if way in SENT_DIRECTLY else "backend"
    return settings


def _object(
    kind: str, folder: RunFolder, file: Path, settings: Mapping[str, Any]
) -> dict[str, Any] | None:
    """A JSON file of the run, checked; None where there is no such file."""
    content = folder.read_json(file)
    if content is None:
        if folder.has(file):
            raise UserError(f"{file.name} is not readable as JSON: restore it, or delete the run")
        return None
    if kind != "environment":
        check_schema(content.get("schema"), file.name)
    check_fields(kind, content, file.name, _has_own_metrics(settings))
    if kind == "summary" and OWN in content:
        if is_changed(content):
            raise UserError(f"{file.name} is not as it was written: restore the file")
        del content[OWN]
    return content


def _check_rows(
    kind: str, rows: Sequence[Mapping[str, Any]], file: Path, settings: Mapping[str, Any]
) -> None:
    own_metrics = _has_own_metrics(settings)
    for row in rows:
        check_fields(kind, row, file.name, own_metrics)
    if (number := changed_row(rows)) is not None:
        raise UserError(f"{file.name}: row {number} is not as it was written: restore the file")


def _has_own_metrics(settings: Mapping[str, Any]) -> bool:
    """Whether LogCallback ran in a script of its user: accuracy may be in per cent there."""
    return "script" not in settings


def check_schema(schema: object, name: str) -> None:
    if type(schema) is not int or schema != SCHEMA:
        written = f"{name} was written with schema {schema!s:.20}, this reads {SCHEMA}"
        raise UserError(f"{written}: {READ_IT}")


def _check_place(path: Path, settings: Mapping[str, Any]) -> None:
    """UserError where a folder that has the name of a run holds the settings of another run."""
    if not (is_ours(settings) and RUN_FOLDER.fullmatch(path.name)):
        return
    try:
        expected = stem(cast(Settings, SimpleNamespace(**settings)))
    except TypeError:
        raise UserError(f"{SETTINGS} lacks settings that the name of the folder has") from None
    setup = (path if len(path.parts) > 1 else path.absolute()).parent.name
    elsewhere = SETUP.fullmatch(setup) and setup != settings.get("setup")
    if elsewhere or not path.name.startswith(f"{expected}_"):
        named = f"{settings.get('setup')!s:.40}/{expected:.100}"
        raise UserError(f"{SETTINGS} is that of another run: {named}_...")


def _check_settings(settings: Mapping[str, Any]) -> None:
    """UserError where a run of this project lacks a setting that runs record today."""
    lacking = [n for n, f in fields("settings").items() if f.required and n not in settings]
    if lacking:
        raise UserError(f"{SETTINGS} lacks {listed(lacking, ', ', 3)}: {READ_IT}")


def uniform_link(requested: object) -> dict[str, Any] | None:
    """The link that was requested between any two nodes; None where a link was requested for each
    pair, or none at all.
    """
    return requested if isinstance(requested, dict) else None


def link_text(requested: object) -> str | None:
    """A requested link as it is written on the command line."""
    if (link := uniform_link(requested)) is None:
        return None if requested is None else str(requested)
    numbers = {name: value for name in LINK_FIELDS if is_number(value := link.get(name))}
    return str(Link(**numbers))


def check_links(environment: Mapping[str, Any], where: object) -> None:
    """UserError where a requested link is an object with values other than numbers from 0 on."""
    for record, name in (("link", "asked"), ("launch", "link")):
        requested = uniform_link((environment.get(record) or {}).get(name)) or {}
        for key, value in requested.items():
            if value is not None and not (is_number(value) and value >= 0):
                raise UserError(
                    f"{where}: {record}.{name}.{key} is {value!s:.20}: expected a number"
                )


def _check_epochs(record: Recorded) -> None:
    """One row for each epoch, in order. The last may end inside an epoch (--max_steps)."""
    before = 0.0
    # Scripts of users evaluate when they want.
    in_steps = is_ours(record.settings) and not recorded_strategy(record.settings).has_peers
    for n, row in enumerate(record.epochs):
        epoch = row.get("epoch")
        if epoch is None:
            raise UserError(f"{EPOCHS}: row {n + 1} does not say its epoch")
        last = n + 1 == len(record.epochs)
        if epoch <= before or (in_steps and not _is_next(epoch, n + 1, last)):
            raise UserError(
                f"{EPOCHS}: row {n + 1} is of epoch {epoch:g} after {before:g}: rows are "
                "missing, doubled or in disorder"
            )
        before = epoch
    _check_growing(record)


def _check_growing(record: Recorded) -> None:
    """Updates and wall time must grow from row to row, and rates match what was timed."""
    if record.settings.get("imported"):
        return
    starts = starts_of(record.attempts)
    batches = {row.get("effective_batch") for row in (*starts, *record.epochs)}
    names = ["wall_s"] if len(batches - {None}) > 1 else ["updates", "wall_s"]
    # In another batch, attempts from older checkpoints may count fewer updates than kept rows.
    for row, following in itertools.pairwise(record.epochs):
        for name in names:
            one, other = row.get(name), following.get(name)
            if is_number(one) and is_number(other) and other - one < (name == "updates"):
                raise UserError(
                    f"{EPOCHS}: {name} is {other:g} at epoch {following['epoch']:g} after "
                    f"{one:g}: rows were changed, or are of several runs"
                )
    for row in record.epochs:
        stated, rate = row.get("train_samples_per_s"), rate_of([row])
        if is_number(stated) and is_number(rate) and not math.isclose(stated, rate, rel_tol=1e-6):
            raise UserError(
                f"{EPOCHS}: train_samples_per_s of epoch {row['epoch']:g} is {stated:g}, but "
                f"timed_samples / timed_s is {rate:g}"
            )


def _is_next(epoch: float, number: int, last: bool) -> bool:
    return math.isclose(epoch, number, abs_tol=1e-6) or (last and number - 1 < epoch < number)


def measuring_s(row: Mapping[str, Any], environment: Mapping[str, Any]) -> float:
    """Seconds of a row's wall time that measuring itself took. Where a row does not say, the time
    in which the last attempt measured the link and what the exchange adds.
    """
    if is_number(row.get("measuring_s")):
        return float(row["measuring_s"])
    parts = (environment.get("link"), environment.get("comm_probe"))
    times = [part.get("took_s") for part in parts if isinstance(part, Mapping)]
    return math.fsum(time_s for time_s in times if is_number(time_s))


def _check_whole(record: Recorded, summary: Mapping[str, Any]) -> None:
    """UserError where summary, rows and environment cannot be of one run."""
    if summary.get("outcome") == FINISHED:
        _check_finished(record, summary)
    if record.settings.get("imported"):
        return  # imported: a row per evaluation
    ours, done, rows = is_ours(record.settings), summary.get("epochs_done"), record.epochs
    if done is not None and done != len(rows):
        number = record.broken_lines.get(record.folder.epochs.name)
        torn = f" and {number} torn lines" if number else ""
        raise UserError(f"{EPOCHS} has {len(rows)} rows{torn}, {SUMMARY} counts {done:g}")
    if ours and not rows and summary.get("outcome") == FINISHED:
        raise UserError(f"{EPOCHS} has no row beside the summary of a finished run")
    total_s, wall_s = summary.get("train_time_s"), summary.get("wall_s")
    if ours and total_s is not None and wall_s is not None and wall_s < total_s * NEARLY:
        raise UserError(
            f"{SUMMARY}: wall_s ({wall_s:g}) is less than its part train_time_s ({total_s:g})"
        )
    apart_s = measuring_s(rows[-1], record.environment) if rows else 0.0
    parts_s = (total_s or 0.0) + apart_s
    if ours and apart_s and wall_s is not None and wall_s < parts_s * NEARLY:
        raise UserError(
            f"measuring took {apart_s:g} s: with train_time_s that is {parts_s:g}, more than the "
            f"wall_s ({wall_s:g}) of {SUMMARY}"
        )
    by_rows = of_rows(rows)
    if rows:
        _check_values(rows, by_rows, summary)
    _check_batches(record)
    _check_attempts(record, by_rows["train_time_s"], summary)


def _check_values(
    rows: Sequence[EpochRow], by_rows: Mapping[str, Any], summary: Mapping[str, Any]
) -> None:
    """UserError where the summary differs from its rows, in what both hold."""
    own = {name: rows[-1].get(name) for name in {*own_metrics(rows[-1])} - {*fields("summary")}}
    known = {**by_rows, **own}
    if not known["eval_time_s"]:
        del known["eval_time_s"]  # no row holds the time of an evaluation
    _check_equal(known, summary, EPOCHS)
    metric = summary.get("best_metric")
    best = [best_of(rows, f"{metric}{way}") for way in ("", ":min")] if metric else []
    for name in ("best_value", "best_epoch"):
        stated = summary.get(name)
        if best and stated is not None and stated not in (values := [one[name] for one in best]):
            raise _differ(f"{name} ({metric})", values[0], stated)


def _check_attempts(
    record: Recorded, train_time_s: float | None, summary: Mapping[str, Any]
) -> None:
    """UserError where the summary and attempts.jsonl differ in times or interruptions."""
    starts, ends = starts_of(record.attempts), ends_of(record.attempts)
    number = record.changed_attempt
    if number is not None and summary.get("wall_s") is not None:  # null if it was noticed before
        raise UserError(f"{ATTEMPTS}: row {number} is not as it was written: restore the file")
    if not starts or len(starts) != sum(end.get("attempt") is not None for end in ends):
        return  # an attempt has no end, or a row is lost
    known = times_of_attempts(record.attempts, train_time_s)
    _check_equal(known, summary, ATTEMPTS)
    last_s = max((row.get("wall_s") or 0.0 for row in record.epochs), default=0.0)
    wall_s = known["wall_s"] if all(is_number(end.get("wall_s")) for end in ends) else None
    if wall_s is not None and last_s > wall_s + 1:
        raise UserError(f"{EPOCHS}: wall_s is {last_s:g}, more than the {wall_s:g} of all attempts")


def _check_equal(by_rows: Mapping[str, Any], summary: Mapping[str, Any], file: str) -> None:
    for name, value in by_rows.items():
        stated = summary.get(name)
        if not (is_number(stated) and is_number(value)):
            continue
        if not math.isclose(stated, value, rel_tol=1e-6, abs_tol=1e-6):
            raise _differ(name, value, stated, file)


def _differ(name: str, by_rows: Any, stated: Any, file: str = EPOCHS) -> UserError:
    return UserError(
        f"{file} and {SUMMARY} do not belong together: {name:.60} is {by_rows!s:.25} by "
        f"the rows and {stated!s:.25} in the summary"
    )


def _check_batches(record: Recorded) -> None:
    """The effective batch of each row must be that of the attempt that wrote it."""
    starts = starts_of(record.attempts)
    batches = {start.get("attempt"): start.get("effective_batch") for start in starts}
    for row in record.epochs:
        batch, own = batches.get(row.get("attempt")), row.get("effective_batch")
        if None not in (batch, own) and batch != own:
            raise UserError(
                f"{EPOCHS}: effective_batch of epoch {row['epoch']:g} is {own}, but "
                f"{batch} in {ATTEMPTS}"
            )
    environment: Mapping[str, Any] = record.environment
    for name, stated in (
        ("effective_batch", environment.get("effective_batch")),
        ("processes", processes_of(environment)),
    ):
        last = starts[-1].get(name) if starts else None
        if None not in (stated, last) and stated != last:
            raise UserError(f"{ENVIRONMENT}: {name} is {stated}, but {last} in {ATTEMPTS}")


def processes_of(environment: Mapping[str, Any]) -> int | None:
    """The number of processes on all nodes together."""
    nodes, per_node = environment.get("nodes"), environment.get("processes_per_node")
    return None if nodes is None or per_node is None else nodes * per_node


def _check_finished(record: Recorded, summary: Mapping[str, Any]) -> None:
    has_settings = (folder := record.folder).has(folder.settings)
    for file, is_there in ((SETTINGS, has_settings), (ENVIRONMENT, record.environment)):
        if not is_there:
            raise UserError(f"{file} is missing beside the summary of a finished run")
    for name in ("nodes", "processes_per_node"):
        if record.environment.get(name) is None:
            raise UserError(f"{ENVIRONMENT}: {name} is missing")
    # Rows that are not as declared are not in record.attempts; they are no loss.
    starts = starts_of(record.attempts) or starts_of(folder.attempts_as_written()[0])
    if is_ours(record.settings) and not starts:
        without = "has no readable start" if folder.has(folder.attempts) else "is missing"
        raise UserError(f"{ATTEMPTS} {without} beside the summary of a finished run")
    if summary.get("train_samples_per_s") == 0:
        raise UserError(f"{SUMMARY}: train_samples_per_s is 0 in a finished run")


def attempts_of(folder: RunFolder) -> tuple[list[AttemptStart | AttemptEnd], int | None, int]:
    """attempts_as_written(), but no rows if one is not as declared."""
    rows, changed, broken = folder.attempts_as_written()
    try:
        for row in rows:
            check_fields("start" if row.get("event") == "start" else "end", row, folder.attempts)
    except UserError:
        return [], changed, broken
    return rows, changed, broken


def begun_unix(folder: RunFolder, rows: Attempts, torn: int) -> float | None:
    """When the run first started, also where that row was torn after its time was written."""
    if torn and (match := TORN_START.fullmatch(folder.first_line(folder.attempts))):
        return float(match["unix"])
    return first_start(rows)


def telemetry_of(folder: RunFolder) -> dict[int, list[TelemetryRow]]:
    """Node -> its readings by time; nodes with undeclared rows are left out, with a warning."""
    believed = {}
    for node, rows in folder.read_telemetry().items():
        try:
            _check_rows("telemetry", rows, folder.telemetry(node), {})
        except UserError as error:
            warn_not_read([f"{folder.path}: {error}"])
            continue
        believed[node] = [row for row in rows if row.get("unix") is not None]
    return believed


def existing(root: str | Path) -> Path:
    if not Path(root).exists() and not is_archived(Path(root)):
        beside, names = Path(root).parent, list[str]()
        with suppress(OSError):
            names = [entry.name for entry in beside.iterdir() if entry.is_dir()]
        within = str(beside / "x").removesuffix("x")  # the whole path can be typed
        hint = nearest(Path(root).name, names, "", within)
        raise UserError(f"{root}: there is no such folder{hint and f': {hint}'}")
    return Path(root)

"""Whether a record is as it is declared; what is not is named in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from harness.core.schema.environment import (
    EnvironmentRecord,
    SettingsRecord,
    SweepRecord,
    setting_fields,
)
from harness.core.schema.fields import Field, Kind, fields_of
from harness.core.schema.rows import (
    AttemptEnd,
    AttemptStart,
    EpochRow,
    FailureRecord,
    PeerRecord,
    ProgressRecord,
    RankRow,
    SummaryRecord,
    TelemetryRow,
)
from harness.core.settings import UserError

Check = Callable[[Any], bool]


@dataclass(frozen=True)
class Record:
    """One of the files of a run, or a row of it."""

    declared: type
    file: str
    scope: str = "run"
    numbers_of_others: bool = False  # metrics of one's own compute_metrics stand beside the fields


RECORDS = {
    "settings": Record(SettingsRecord, "settings.json"),
    "environment": Record(EnvironmentRecord, "environment.json"),
    "epochs": Record(EpochRow, "epochs.jsonl", numbers_of_others=True),
    "ranks": Record(RankRow, "ranks/rank_<r>.jsonl", scope="rank"),
    "start": Record(AttemptStart, "attempts.jsonl"),
    "end": Record(AttemptEnd, "attempts.jsonl"),
    "telemetry": Record(TelemetryRow, "telemetry/node_<n>.jsonl", scope="node"),
    "progress": Record(ProgressRecord, "progress.json"),
    "failure": Record(FailureRecord, "ranks/failure_<r>.json", scope="rank"),
    "peers": Record(PeerRecord, "peers.json", scope="rank"),
    "summary": Record(SummaryRecord, "summary.json", numbers_of_others=True),
    "sweep": Record(SweepRecord, "sweeps/<name>/sweep.json", scope=""),
}


@cache
def fields(kind: str) -> dict[str, Field]:
    """The fields of a record, settings included."""
    found = fields_of(RECORDS[kind].declared)
    return {**found, **setting_fields()} if kind == "settings" else found


def validate(kind: str, value: Mapping[str, Any], where: str, complete: bool = True) -> None:
    """Raise a UserError that names the place, the field, its value and what was expected.

    Complete: every field that a run of this project writes is there, none is null that it always
    knows, and there is no other. Without it, what is there is checked: records that were imported
    or cut off know less.
    """
    checks = _checks(kind, complete)
    for name, content in value.items():
        check = checks.get(name)
        if check is not None and not check(content):
            raise UserError(f"{where}: {_wrong(fields(kind)[name], content, complete)}")
    if complete and (problem := _incomplete(kind, value)):
        raise UserError(f"{where}: {problem}")


def validate_rows(kind: str, rows: Iterable[Mapping[str, Any]], where: str) -> None:
    """What is there in each row; the message names the row, from 1."""
    checks = _checks(kind, complete=False)
    for number, row in enumerate(rows, 1):
        for name, content in row.items():
            check = checks.get(name)
            if check is not None and not check(content):
                problem = _wrong(fields(kind)[name], content, complete=False)
                raise UserError(f"{where} row {number}: {problem}")


def _incomplete(kind: str, value: Mapping[str, Any]) -> str | None:
    known = fields(kind)
    for name, field in known.items():
        if field.required and name not in value:
            return f"{name} is missing: expected {field.kind}"
    for name, content in value.items():
        number = isinstance(content, (int, float)) or content is None
        if name not in known and not (RECORDS[kind].numbers_of_others and number):
            return f"{name} is {content!r}, which is no field of {RECORDS[kind].file}"
    return None


def _wrong(field: Field, content: Any, complete: bool) -> str:
    """The innermost value that does not fit."""
    name, kind = field.name, field.kind
    while True:
        inner: Iterable[tuple[str, Kind, Any]] = ()
        if kind.record is not None and isinstance(content, dict):
            known = fields_of(kind.record)
            if complete:
                for missing in (n for n, f in known.items() if f.required and n not in content):
                    return f"{name}.{missing} is missing: expected {known[missing].kind}"
                for unknown in (n for n in content if n not in known):
                    return f"{name}.{unknown} is no field of {name}"
            inner = [(f"{name}.{n}", known[n].kind, v) for n, v in content.items() if n in known]
        elif kind.item is not None and isinstance(content, dict):
            inner = [(f"{name}.{n}", kind.item, v) for n, v in content.items()]
        elif kind.item is not None and isinstance(content, list):
            inner = [(f"{name}[{n}]", kind.item, v) for n, v in enumerate(content)]
        wrong = [entry for entry in inner if not _check_of(entry[1], complete)(entry[2])]
        if not wrong:
            return f"{name} is {str(content)[:60]!r}: expected {kind}"
        name, kind, content = wrong[0]


@cache
def _checks(kind: str, complete: bool) -> dict[str, Check]:
    return {name: _check_of(field.kind, complete) for name, field in fields(kind).items()}


@cache
def _check_of(kind: Kind, complete: bool) -> Check:
    """Made once for each kind, as small as can be: a thousand runs have a million values."""
    null = kind.nullable or not complete
    base, low, high = kind.base, kind.value.minimum, kind.value.maximum
    if base is object:
        return lambda value: True
    if base in (int, float):
        whole = base is int

        def check(value: Any) -> bool:
            kind = type(value)
            if kind is not float:
                return low <= value <= high if kind is int else value is None and null
            return low <= value <= high and (not whole or value.is_integer())  # 8.0 as in JSON

        return check
    if base is dict:
        return _check_of_dict(kind, complete, null)
    if base is list:
        of = _check_of(kind.item or Kind(object), complete)
        return lambda value: all(map(of, value)) if type(value) is list else value is None and null
    choices = kind.value.choices
    return lambda value: (
        (not choices or value in choices) if type(value) is base else value is None and null
    )


def _check_of_dict(kind: Kind, complete: bool, null: bool) -> Check:
    if kind.record is None:
        of = _check_of(kind.item or Kind(object), complete)
        return lambda value: (
            all(map(of, value.values())) if type(value) is dict else value is None and null
        )
    known = fields_of(kind.record)
    checks = {name: _check_of(field.kind, complete) for name, field in known.items()}
    needed = [name for name, field in known.items() if field.required] if complete else []

    def check(value: Any) -> bool:
        if type(value) is not dict:
            return value is None and null
        for name, content in value.items():
            of = checks.get(name)
            if complete if of is None else not of(content):
                return False
        return all(name in value for name in needed)

    return check

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
from harness.core.schema.fields import LARGEST, Field, Kind, fields_of
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


def validate(kind: str, value: Mapping[str, Any], where: object) -> None:
    """Raise a UserError unless this is what a run of this project writes.

    The one line names the place, the field, its value and what was expected.
    """
    known = fields(kind)
    for name, field in known.items():
        if field.required and name not in value:
            raise UserError(f"{where}: {name} is missing: expected {field.kind}")
    for name, content in value.items():
        number = isinstance(content, (int, float)) or content is None
        if name not in known and not (RECORDS[kind].numbers_of_others and number):
            raise UserError(
                f"{where}: {name} is {content!r}, which is no field of {RECORDS[kind].file}"
            )
    _check(kind, value, where)


def check_types(kind: str, value: Mapping[str, Any], where: object) -> None:
    """Raise a UserError if a field that is there has another type than the declared one.

    Records that were imported, cut off or written by LogCallback with metrics of its user know
    less, and a metric may have another range.
    """
    for name in _doubtful(fields(kind), value):
        if not _checks(kind, strict=False)[name](value[name]):
            raise UserError(f"{where}: {_wrong(fields(kind)[name], value[name], strict=False)}")


def _check(kind: str, value: Mapping[str, Any], where: object) -> None:
    checks = _checks(kind, strict=True)
    for name, content in value.items():
        if name in checks and not checks[name](content):
            raise UserError(f"{where}: {_wrong(fields(kind)[name], content, strict=True)}")


# What JSON gives for a declared type without anything left to look at.
CERTAIN: dict[type, tuple[type, ...]] = {
    float: (float, int), int: (int,), str: (str,), bool: (bool,),
}  # fmt: skip
NUMBERS = {float, int, type(None)}
_DOUBTS: dict[tuple[Any, ...], tuple[str, ...]] = {}


def _doubtful(known: dict[str, Field], value: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields whose value has to be looked at, since its type alone does not show that it fits.

    Rows of one kind have few combinations of names and types, so that nearly all rows of a
    thousand runs cost one look-up here.
    """
    shape = (id(known), *value, *map(type, value.values()))
    doubts = _DOUBTS.get(shape)
    if doubts is None:
        doubts = _DOUBTS[shape] = tuple(
            name
            for name, content in value.items()
            if name in known
            and content is not None
            and known[name].kind.base is not object
            and type(content) not in CERTAIN.get(known[name].kind.base, ())
        )
    return doubts


def _wrong(field: Field, content: Any, strict: bool) -> str:
    """The innermost value that does not fit."""
    name, kind = field.name, field.kind
    while True:
        inner: Iterable[tuple[str, Kind, Any]] = ()
        if kind.record is not None and isinstance(content, dict):
            known = fields_of(kind.record)
            if strict:
                for missing in (n for n, f in known.items() if f.required and n not in content):
                    return f"{name}.{missing} is missing: expected {known[missing].kind}"
                for unknown in (n for n in content if n not in known):
                    return f"{name}.{unknown} is no field of {name}"
            inner = [(f"{name}.{n}", known[n].kind, v) for n, v in content.items() if n in known]
        elif kind.item is not None and isinstance(content, dict):
            inner = [(f"{name}.{n}", kind.item, v) for n, v in content.items()]
        elif kind.item is not None and isinstance(content, list):
            inner = [(f"{name}[{n}]", kind.item, v) for n, v in enumerate(content)]
        wrong = [entry for entry in inner if not _check_of(entry[1], strict)(entry[2])]
        if not wrong:
            return f"{name} is {str(content)[:60]!r}: expected {kind}"
        name, kind, content = wrong[0]


@cache
def _checks(kind: str, strict: bool) -> dict[str, Check]:
    return {name: _check_of(field.kind, strict) for name, field in fields(kind).items()}


@cache
def _check_of(kind: Kind, strict: bool) -> Check:
    """Made once for each kind, as small as can be: a thousand runs have a million values."""
    null = kind.nullable or not strict
    base, low, high = kind.base, kind.value.minimum, kind.value.maximum
    if not strict:
        low, high = -LARGEST, LARGEST
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
        return _check_of_dict(kind, strict, null)
    if base is list and not strict and kind.item is not None and kind.item.base is float:
        return lambda value: (
            NUMBERS.issuperset(map(type, value)) if type(value) is list else value is None
        )
    if base is list:
        of = _check_of(kind.item or Kind(object), strict)
        return lambda value: all(map(of, value)) if type(value) is list else value is None and null
    choices = kind.value.choices if strict else ()
    return lambda value: (
        (not choices or value in choices) if type(value) is base else value is None and null
    )


def _check_of_dict(kind: Kind, strict: bool, null: bool) -> Check:
    if kind.record is None:
        if kind.item is None or kind.item.base is object:
            return lambda value: type(value) is dict or (value is None and null)
        of = _check_of(kind.item, strict)
        return lambda value: (
            all(map(of, value.values())) if type(value) is dict else value is None and null
        )
    known = fields_of(kind.record)
    checks = {name: _check_of(field.kind, strict) for name, field in known.items()}
    needed = [name for name, field in known.items() if field.required]
    if not strict and all(field.kind.base is float for field in known.values()):
        return lambda value: (
            NUMBERS.issuperset(map(type, value.values())) if type(value) is dict else value is None
        )
    if not strict:
        return lambda value: (
            all(checks[name](value[name]) for name in _doubtful(known, value))
            if type(value) is dict
            else value is None
        )

    def check(value: Any) -> bool:
        if type(value) is not dict:
            return value is None and null
        for name, content in value.items():
            of = checks.get(name)
            if of is None or not of(content):
                return False
        return all(name in value for name in needed)

    return check

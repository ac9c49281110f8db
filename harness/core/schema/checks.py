"""Which records there are, and whether a record matches its declaration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

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
)
from harness.core.schema.telemetry import TelemetryRow
from harness.core.settings import UserError


@dataclass(frozen=True)
class Record:
    """A file of a run, or one row of a file."""

    declared: type
    file: str
    scope: str = "run"
    numbers_of_others: bool = False  # a user's own metrics may stand beside the fields


EMPTY_RANGE = (1.0, 0.0)  # no number is in it
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
    """The fields of a record; for settings, those of all flags included."""
    declared = fields_of(RECORDS[kind].declared)
    return {**declared, **setting_fields()} if kind == "settings" else declared


def check_fields(
    kind: str, value: Mapping[str, Any], where: object, own_metrics: bool = False
) -> None:
    """Raise a UserError if a field that is present violates its declaration.

    Imported and cut-off records lack fields. own_metrics: LogCallback wrote the record in a user's
    script, whose accuracy may be in per cent.
    """
    if wrong := _check_of(kind, own_metrics)(value):
        raise UserError(f"{where}: {wrong.removeprefix('.')}")


def unfit(declared: type, value: Mapping[str, Any]) -> str | None:
    """The first thing in an object that is missing or violates its declaration; None if all fits.

    A field that need not be there, or may be null, may be missing.
    """
    known = fields_of(declared)
    for name, field in known.items():
        content = value.get(name)
        if content is None and field.required and not field.kind.nullable:
            return f"{name} is missing"
        inner = field.kind.record
        if inner is not None and isinstance(content, Mapping) and (wrong := unfit(inner, content)):
            return f"{name}.{wrong}"
    wrong = _of_fields(known)(value)
    return None if wrong is None else wrong.removeprefix(".")


class NotAsDeclaredError(UserError):
    """What is about to be written is not as its record is declared."""


def check_written(kind: str, value: Mapping[str, Any]) -> None:
    """Raise NotAsDeclaredError if a record that is about to be written has a name or value that is
    not as declared; a field may be missing.
    """
    where = RECORDS[kind].file
    for name in undeclared(fields(kind), value):
        problem = f"{where}: {name} is not declared in harness/core/schema: not recorded"
        raise NotAsDeclaredError(problem)
    try:
        check_fields(kind, value, where)
    except UserError as error:
        raise NotAsDeclaredError(str(error)) from None


def undeclared(known: Mapping[str, Field], value: Mapping[str, Any]) -> Iterator[str]:
    """Names in a record and in the records inside it, dotted, that their declarations lack."""
    for name, content in value.items():
        if name not in known:
            yield name
            continue
        kind, inside = known[name].kind, [content]
        if kind.item is not None and isinstance(content, list):
            kind, inside = kind.item, content
        for inner in inside if kind.record is not None else ():
            if isinstance(inner, Mapping):
                yield from (f"{name}.{of}" for of in undeclared(fields_of(kind.record), inner))


# What a check returns: None if the value fits, else the rest of a sentence that begins with the
# value's name: " is 'x': expected number", or ".inner is 'x': expected number" of a value in it.
Check = Callable[[Any], str | None]


@cache
def _check_of(kind: str, own_metrics: bool) -> Check:
    known = _with_own_metrics(kind) if own_metrics else fields(kind)
    return _of_fields(known, _of_other if RECORDS[kind].numbers_of_others else None)


@cache
def _with_own_metrics(kind: str) -> dict[str, Field]:
    return {
        name: replace(field, kind=Kind(float, nullable=True)) if _is_quality(field) else field
        for name, field in fields(kind).items()
    }


@cache
def quality_of_epochs() -> list[str]:
    """Fields of epochs.jsonl that are shares of samples; a user's script may give per cent."""
    return [name for name, field in fields("epochs").items() if _is_quality(field)]


def _is_quality(field: Field) -> bool:
    return field.kind.value.unit == "share" and not field.name.endswith("_share")


def believable(kind: str, value: Mapping[str, Any], own_metrics: bool = False) -> dict[str, Any]:
    """A record that may be damaged, with None for values that do not fit their declaration."""
    known = _with_own_metrics(kind) if own_metrics else fields(kind)
    return {
        name: None if name in known and _check(known[name].kind)(content) else content
        for name, content in value.items()
    }


def summary_of(content: Mapping[str, Any], own_metrics: bool = False) -> SummaryRecord:
    """The summary to write: a value that does not fit its declaration is unknown. No summary is
    rejected, as a run without one has no outcome.
    """
    return cast(SummaryRecord, believable("summary", content, own_metrics))


@cache
def _check(kind: Kind) -> Check:
    """The check of one value and of all inside it; null (unknown) always fits."""
    fits, inner = _fits(kind), _inner(kind)

    def check(value: Any) -> str | None:
        if value is None:
            return None
        if not fits(value):
            return f" is {_shown(value)}: expected {kind}"
        return inner(value) if inner is not None else None

    return check


def _fits(kind: Kind) -> Callable[[Any], bool]:
    """Whether a value is what its kind says, without checking values inside it."""
    base, choices = kind.base, kind.value.choices
    low, high = kind.value.minimum, kind.value.maximum
    if base is object:
        return lambda value: True
    if base is float:
        return lambda value: type(value) in (float, int) and low <= value <= high
    if base is int:  # JSON may give 8.0 for an integer
        return lambda value: (
            (type(value) is int or (type(value) is float and value.is_integer()))
            and low <= value <= high
        )
    return lambda value: type(value) is base and (not choices or value in choices)


def _inner(kind: Kind) -> Check | None:
    """The check of the values inside one that fits; None if anything may be inside."""
    if kind.record is not None:
        return _of_fields(fields_of(kind.record))
    if kind.item is None or kind.item.base is object:
        return None
    check, is_text = _check(kind.item), kind.item == Kind(str)

    def of_items(value: Any) -> str | None:
        named = type(value) is dict
        if is_text and {*map(type, value.values() if named else value)} == {str}:
            return None  # as nearly always: the quick way
        for key, item in value.items() if named else enumerate(value):
            if wrong := check(item):
                return f".{key}{wrong}" if named else f"[{key}]{wrong}"
        return None

    return of_items


def _of_fields(known: Mapping[str, Field], other: Check | None = None) -> Check:
    """The check of an object; other: the check of what is not declared."""
    checks = {name: _check(field.kind) for name, field in known.items()}
    # Most values of a record are numbers in their range: the quick way.
    numbers = {number: _ranges(known, number) for number in (float, int)}

    def check(value: Any) -> str | None:
        for name, content in value.items():
            if content is None:
                continue
            ranges = numbers.get(type(content))
            if ranges is not None:
                low, high = ranges.get(name, EMPTY_RANGE)
                if low <= content <= high:
                    continue
            of_field = checks.get(name, other)
            if of_field is not None and (wrong := of_field(content)):
                return f".{name}{wrong}"
        return None

    return check


def _ranges(known: Mapping[str, Field], number: type) -> dict[str, tuple[float, float]]:
    """The range of each field that may be a number of this type."""
    return {
        name: (field.kind.value.minimum, field.kind.value.maximum)
        for name, field in known.items()
        if field.kind.base is float or field.kind.base is number
    }


def _of_other(value: Any) -> str | None:
    """The check of a user's own metric, which may also be no number at all."""
    if type(value) in (int, float) and not -LARGEST <= value <= LARGEST:
        return f" is {_shown(value)}: expected a number"
    return None


def _shown(value: Any) -> str:
    """At most 60 characters of a value; Python does not print integers of thousands of digits."""
    try:
        return repr(str(value)[:60])
    except ValueError:
        return "an integer of thousands of digits"

"""Which records there are, and whether a record matches its declaration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    if wrong := _wrong_in(_with_own_metrics(kind) if own_metrics else fields(kind), value):
        raise UserError(f"{where}: {wrong}")
    if RECORDS[kind].numbers_of_others:
        for name in value.keys() - fields(kind).keys():
            if type(number := value[name]) in (int, float) and not -LARGEST <= number <= LARGEST:
                raise UserError(f"{where}: {name} is {_shown(number)}: expected a number")


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
        name: None if name in known and _wrong(name, known[name].kind, content) else content
        for name, content in value.items()
    }


def _wrong_in(known: Mapping[str, Field], value: Mapping[str, Any], at: str = "") -> str | None:
    """A line about the innermost value that does not fit; None if all declared fields fit."""
    for name, content in value.items():
        if content is None or name not in known:
            continue
        kind = known[name].kind
        # Most values of a record are such numbers: the quick way.
        if type(content) is kind.base is float and (
            kind.value.minimum <= content <= kind.value.maximum
        ):
            continue
        if wrong := _wrong(at + name, kind, content):
            return wrong
    return None


def _wrong(name: str, kind: Kind, value: Any) -> str | None:
    """A line about one value that does not fit; None if it fits, as null (unknown) always does."""
    if value is None:
        return None
    if not _fits(kind, value):
        return f"{name} is {_shown(value)}: expected {kind}"
    if kind.record is not None:
        return _wrong_in(fields_of(kind.record), value, f"{name}.")
    if kind.item is None or kind.item.base is object:
        return None
    named = type(value) is dict
    for key, item in value.items() if named else enumerate(value):
        if wrong := _wrong(f"{name}.{key}" if named else f"{name}[{key}]", kind.item, item):
            return wrong
    return None


def _fits(kind: Kind, value: Any) -> bool:
    """Whether a value is what its kind says, without checking values inside it."""
    base, about = kind.base, kind.value
    if base is object:
        return True
    if base not in (int, float):
        return type(value) is base and (not about.choices or value in about.choices)
    if type(value) not in (int, float) or not about.minimum <= value <= about.maximum:
        return False
    return base is float or float(value).is_integer()  # JSON may give 8.0 for an integer


def _shown(value: Any) -> str:
    """At most 60 characters of a value; Python does not print integers of thousands of digits."""
    try:
        return repr(str(value)[:60])
    except ValueError:
        return "an integer of thousands of digits"

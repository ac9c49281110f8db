"""The data dictionary: which records there are, and whether one is as it is declared.

python -m harness.core.schema.dictionary        writes outputs/README.md and outputs/schema.json
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from harness.core.schema.environment import (
    EnvironmentRecord,
    SettingsRecord,
    SweepRecord,
    setting_fields,
)
from harness.core.schema.fields import LARGEST, Field, Kind, fields_of
from harness.core.schema.rows import (
    OUTCOMES,
    AttemptEnd,
    AttemptStart,
    EpochRow,
    FailureRecord,
    GpuTelemetry,
    NodeTelemetry,
    PeerRecord,
    ProgressRecord,
    RankRow,
    SummaryRecord,
    TelemetryRow,
)
from harness.core.settings import UserError

TEMPLATE = Path(__file__).with_name("README.template.md")
OUTPUTS = Path(__file__).resolve().parents[3] / "outputs"
# Records inside records that stand in a table of their own, or are explained in words.
APART = ("gpu", "node", "telemetry")
JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array",
              dict: "object"}  # fmt: skip
# What JSON gives for a declared type without anything left to look at.
CERTAIN: dict[type, tuple[type, ...]] = {
    float: (float, int), int: (int,), str: (str,), bool: (bool,),
}  # fmt: skip
NUMBERS = {float, int, type(None)}


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
    declared = fields_of(RECORDS[kind].declared)
    return {**declared, **setting_fields()} if kind == "settings" else declared


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
    _refuse(fields(kind), value, where, strict=True)


def check_fields(
    kind: str, value: Mapping[str, Any], where: object, own_metrics: bool = False
) -> None:
    """Raise a UserError if a field that is there is not what its declaration allows.

    Records that were imported or cut off know less. own_metrics: written by LogCallback in a
    script of its user, whose accuracy may be in per cent.
    """
    _refuse(_with_own_metrics(kind) if own_metrics else fields(kind), value, where, strict=False)
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


def _is_quality(field: Field) -> bool:
    return field.kind.value.unit == "share" and not field.name.endswith("_share")


def believable(kind: str, value: Mapping[str, Any], own_metrics: bool = False) -> dict[str, Any]:
    """A record that may be damaged: what has another type than the declared one is unknown."""
    known = _with_own_metrics(kind) if own_metrics else fields(kind)
    return {
        name: None if name in known and _wrong(name, known[name].kind, content, False) else content
        for name, content in value.items()
    }


def _refuse(known: dict[str, Field], value: Mapping[str, Any], where: object, strict: bool) -> None:
    if not strict and _is_sound(known, value):
        return
    for name, content in value.items():
        if name in known and (wrong := _wrong(name, known[name].kind, content, strict)):
            raise UserError(f"{where}: {wrong}")


Numbers = Callable[[Mapping[str, Any]], tuple[float, ...]]


@dataclass(frozen=True)
class RecordShape:
    """What to look at in records that have these names, with values of these types."""

    ranges: tuple[tuple[float, float, Numbers], ...]  # smallest, largest, of these fields
    records: tuple[tuple[str, dict[str, Field]], ...]  # inside this one
    others: tuple[tuple[str, Callable[[Any], bool]], ...]  # and whether their value fits


_SHAPES: dict[tuple[Any, ...], RecordShape] = {}


def _is_sound(known: dict[str, Field], value: Mapping[str, Any]) -> bool:
    """Whether everything fits that is declared; if not, _wrong() says what.

    Rows of one kind have few combinations of names and types, so that a row costs one look-up
    here, and one comparison for all numbers of a range.
    """
    names = (id(known), *value, *map(type, value.values()))
    shape = _SHAPES.get(names)
    if shape is None:
        shape = _SHAPES[names] = _shape(known, value)
    for low, high, numbers_of in shape.ranges:
        numbers = numbers_of(value)
        if not (low <= min(numbers) and max(numbers) <= high):
            return False
    for name, inner in shape.records:
        if not _is_sound(inner, value[name]):
            return False
    return not shape.others or all(fits(value[name]) for name, fits in shape.others)


def _shape(known: dict[str, Field], value: Mapping[str, Any]) -> RecordShape:
    ranges: dict[tuple[float, float], list[str]] = {}
    records, others = list[tuple[str, dict[str, Field]]](), []
    for name, content in value.items():
        kind = known[name].kind if name in known else Kind(object)
        if content is None or _holds_anything(kind, content):
            continue
        if kind.record is not None and type(content) is dict:
            records.append((name, fields_of(kind.record)))
        elif kind.base in (int, float) and type(content) in CERTAIN[kind.base]:
            ranges.setdefault((kind.value.minimum, kind.value.maximum), []).append(name)
        elif kind.item is not None and kind.item.base is float and type(content) is list:
            others.append((name, partial(_all_fit, kind.item)))
        elif type(content) not in CERTAIN.get(kind.base, ()) or kind.value.choices:
            others.append((name, partial(_all_right, kind)))
    # A name twice: of one name alone itemgetter would give no tuple.
    getters = ((*ends, itemgetter(names[0], *names)) for ends, names in ranges.items())
    return RecordShape(tuple(getters), tuple(records), tuple(others))


def _holds_anything(kind: Kind, content: Any) -> bool:
    """Whether this may hold what it likes, or holds what is not declared more closely."""
    anything = kind.item is not None and kind.item.base is object
    return kind.base is object or (anything and type(content) is kind.base)


def _all_right(kind: Kind, value: Any) -> bool:
    return _wrong("", kind, value, strict=False) is None


def _all_fit(kind: Kind, values: list[Any]) -> bool:
    """Whether a list of numbers is seen to fit without a look at each of them."""
    if not NUMBERS.issuperset(map(type, values)):
        return False
    known = [number for number in values if number is not None]
    return not known or (kind.value.minimum <= min(known) and max(known) <= kind.value.maximum)


def _wrong(name: str, kind: Kind, value: Any, strict: bool) -> str | None:
    """The innermost value that does not fit, in a line; None if all fit."""
    if not _fits(kind, value, strict):
        return f"{name} is {_shown(value)}: expected {kind}"
    inner: Iterable[tuple[str, Kind, Any]] = ()
    if kind.record is not None and type(value) is dict:
        known = fields_of(kind.record)
        if strict:
            for missing in (n for n, f in known.items() if f.required and n not in value):
                return f"{name}.{missing} is missing: expected {known[missing].kind}"
            for unknown in (n for n in value if n not in known):
                return f"{name}.{unknown} is no field of {name}"
        inner = ((f"{name}.{n}", known[n].kind, of) for n, of in value.items() if n in known)
    elif kind.item is not None and type(value) is dict:
        inner = ((f"{name}.{n}", kind.item, item) for n, item in value.items())
    elif kind.item is not None and type(value) is list:
        inner = ((f"{name}[{n}]", kind.item, item) for n, item in enumerate(value))
    for entry in inner:
        if wrong := _wrong(*entry, strict):
            return wrong
    return None


def _shown(value: Any) -> str:
    """As much of it as a line takes; Python does not write integers of thousands of digits."""
    try:
        return repr(str(value)[:60])
    except ValueError:
        return "an integer of thousands of digits"


def _fits(kind: Kind, value: Any, strict: bool) -> bool:
    """Whether a value is what its kind says, without a look at the values inside it."""
    base, about = kind.base, kind.value
    if base is object or (type(value) is base and base in (dict, list)):
        return True
    if value is None:
        return kind.nullable or not strict
    if base not in (int, float):
        return type(value) is base and not (about.choices and value not in about.choices)
    if type(value) not in (int, float) or not about.minimum <= value <= about.maximum:
        return False
    return base is float or float(value).is_integer()  # 8.0 as in JSON


def readme() -> str:
    """The data dictionary: the template with a table in place of each name in double braces."""
    tables = {kind: table(fields(kind)) for kind in RECORDS}
    tables |= {of.__name__: table(fields_of(of)) for of in (GpuTelemetry, NodeTelemetry)}
    rows = [f"| `{name}` | {meaning} |" for name, meaning in OUTCOMES.items()]
    tables["outcomes"] = "\n".join(["| outcome | meaning |", "|---|---|", *rows])
    return re.sub(r"\{\{(\w+)\}\}", lambda match: tables[match[1]], TEMPLATE.read_text("utf-8"))


def table(known: dict[str, Field]) -> str:
    """One row for each meaning: neighbouring fields of one meaning and type share it."""
    rows: list[tuple[list[str], str, str]] = []
    for name, field in flat(known).items():
        kind = f"{field.kind}{'' if field.required else '; optional'}"
        if rows and rows[-1][1:] == (kind, field.meaning):
            rows[-1][0].append(f"`{name}`")
        else:
            rows.append(([f"`{name}`"], kind, field.meaning))
    lines = [f"| {' '.join(names)} | {kind} | {meaning} |" for names, kind, meaning in rows]
    return "\n".join(["| field | type | meaning |", "|---|---|---|", *lines])


def flat(known: dict[str, Field]) -> dict[str, Field]:
    """Fields of records inside a record by their dotted names, after the field that holds them."""
    dotted: dict[str, Field] = {}
    for name, field in known.items():
        dotted[name] = field
        if field.kind.record is not None and name not in APART:
            inner = flat(fields_of(field.kind.record))
            dotted |= {f"{name}.{inner_name}": of for inner_name, of in inner.items()}
    return dotted


def json_schema() -> dict[str, Any]:
    """Each kind of record under $defs, as JSON Schema 2020-12 with unit and scope beside it."""
    named = {}
    for kind, record in RECORDS.items():
        schema = of_record(fields(kind), record.numbers_of_others, record.scope)
        named[kind] = {**schema, "title": record.file}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": "Generated from harness/core/schema. Imported runs know less: what their "
        "source does not state is null or absent.",
        "$defs": named,
    }


def of_record(known: dict[str, Field], more: bool, scope: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: _of_field(field, scope) for name, field in known.items()},
        "required": [name for name, field in known.items() if field.required],
        "additionalProperties": {"type": ["number", "null"]} if more else False,
    }


def _of_field(field: Field, scope: str) -> dict[str, Any]:
    extras = {"description": field.meaning, "unit": field.kind.value.unit,
              "scope": field.scope or scope}  # fmt: skip
    return _of_kind(field.kind, scope) | {name: text for name, text in extras.items() if text}


def _of_kind(kind: Kind, scope: str) -> dict[str, Any]:
    if kind.base is object:
        return {}
    schema: dict[str, Any] = {"type": JSON_TYPES[kind.base]}
    if kind.record is not None:
        schema = of_record(fields_of(kind.record), more=False, scope=scope)
    elif kind.item is not None:
        of = "items" if kind.base is list else "additionalProperties"
        schema[of] = _of_kind(kind.item, scope)
    if kind.value.choices:
        schema["enum"] = [*kind.value.choices, *([None] if kind.nullable else [])]
    if kind.value.minimum > -LARGEST:
        schema["minimum"] = kind.value.minimum
    if kind.value.maximum < LARGEST:
        schema["maximum"] = kind.value.maximum
    return schema | ({"type": [schema["type"], "null"]} if kind.nullable else {})


def main() -> None:
    (OUTPUTS / "README.md").write_text(readme(), "utf-8")
    text = json.dumps(json_schema(), indent=1, ensure_ascii=False)
    (OUTPUTS / "schema.json").write_text(f"{text}\n", "utf-8")


if __name__ == "__main__":
    main()

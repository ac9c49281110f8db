"""The data dictionary of outputs/, from the declarations in harness/core/schema.

python -m docs.generate.dictionary        writes outputs/README.md and outputs/schema.json
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.results import markdown
from harness.core.schema.checks import RECORDS, fields
from harness.core.schema.fields import LARGEST, Field, Kind, fields_of
from harness.core.schema.rows import OUTCOMES
from harness.core.schema.telemetry import GpuTelemetry, NodeTelemetry

TEMPLATE = Path(__file__).with_name("README.template.md")
OUTPUTS = Path(__file__).resolve().parents[2] / "outputs"
# Records inside records that stand in a table of their own, or are explained in words.
APART = ("gpu", "node", "telemetry")
JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array",
              dict: "object"}  # fmt: skip
# Fields that are of something else than the record that they stand in.
SCOPES = {"_per_rank": "rank", "_per_gpu": "device"}


def readme() -> str:
    """The data dictionary: the template with a table in place of each name in double braces."""
    tables = {kind: table(fields(kind)) for kind in RECORDS}
    tables |= {of.__name__: table(fields_of(of)) for of in (GpuTelemetry, NodeTelemetry)}
    outcomes = [(f"`{name}`", meaning) for name, meaning in OUTCOMES.items()]
    tables["outcomes"] = markdown("ll", ("outcome", "meaning"), outcomes, as_is=True)
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
    cells = [(" ".join(names), kind, meaning) for names, kind, meaning in rows]
    return markdown("lll", ("field", "type", "meaning"), cells, as_is=True)


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
    own_scope = next((of for end, of in SCOPES.items() if field.name.endswith(end)), scope)
    extras = {"description": field.meaning, "unit": field.kind.value.unit, "scope": own_scope}
    return of_kind(field.kind, scope) | {name: text for name, text in extras.items() if text}


def of_kind(kind: Kind, scope: str) -> dict[str, Any]:
    if kind.base is object:
        return {}
    schema: dict[str, Any] = {"type": JSON_TYPES[kind.base]}
    if kind.record is not None:
        schema = of_record(fields_of(kind.record), more=False, scope=scope)
    elif kind.item is not None:
        of = "items" if kind.base is list else "additionalProperties"
        schema[of] = of_kind(kind.item, scope)
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

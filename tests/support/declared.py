"""Whether a record is what runs of this project write, by the published schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from harness.core.schema.checks import check_fields

SCHEMA = Path(__file__).resolve().parents[2] / "outputs" / "schema.json"


@cache
def _validators() -> dict[str, Any]:
    kinds = json.loads(SCHEMA.read_text())["$defs"]
    return {kind: jsonschema.Draft202012Validator(schema) for kind, schema in kinds.items()}


def errors_of(kind: str, record: Mapping[str, Any]) -> list[str]:
    errors = _validators()[kind].iter_errors(record)
    return [f"{error.json_path}: {error.message}" for error in errors]


def assert_declared(kind: str, record: Mapping[str, Any], where: object = "") -> None:
    """All that is required is there, nothing else is, and readers accept each value."""
    assert errors_of(kind, record) == [], f"{where}: {kind}"
    check_fields(kind, record, where)

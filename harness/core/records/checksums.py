"""The checksum in a row of JSON: a row that was changed after it was written is not believed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

OF_ROW = "checksum"  # of its other fields


def vouched(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row, which JSON can hold as it is, with its checksum."""
    return {**row, OF_ROW: _of_others(row)}


def changed_row(rows: Iterable[Mapping[str, Any]]) -> int | None:
    """The number of the first row that is not as it was written; older rows have no checksum."""
    changed = (
        n for n, row in enumerate(rows, 1) if OF_ROW in row and row[OF_ROW] != _of_others(row)
    )
    return next(changed, None)


def _of_others(row: Mapping[str, Any]) -> str:
    others = {name: value for name, value in row.items() if name != OF_ROW}
    text = json.dumps(others, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

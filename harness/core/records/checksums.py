"""A JSON object's checksum of itself: readers refuse an object that was changed later."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

OWN = "checksum"  # of the other fields


def vouched(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content, which JSON must hold unchanged, with its checksum."""
    return {**content, OWN: checksum_of(content)}


def is_changed(content: Mapping[str, Any]) -> bool:
    return bool(content[OWN] != checksum_of(content))


def changed_row(rows: Iterable[Mapping[str, Any]]) -> int | None:
    """The number of the first row that was changed since it was written; None if none was."""
    return next((number for number, row in enumerate(_as_written(rows), 1) if row is None), None)


def without_changed(
    rows: Sequence[Mapping[str, Any]], kept: Sequence[str]
) -> list[Mapping[str, Any]]:
    """The rows; of a changed row only the fields named in `kept`."""
    return [
        {name: row.get(name) for name in kept} if written is None else written
        for row, written in zip(rows, _as_written(rows), strict=True)
    ]


def _as_written(rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any] | None]:
    """Each row, or None in place of a changed one. Rows of earlier versions have no checksum; a row
    without one after a row with one was changed.
    """
    vouching = False
    for row in rows:
        vouching = vouching or OWN in row
        yield None if vouching and (OWN not in row or is_changed(row)) else row


def checksum_of(content: Mapping[str, Any]) -> str:
    """The checksum of the other fields; it does not depend on layout or order."""
    others = {name: value for name, value in content.items() if name != OWN}
    text = json.dumps(others, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

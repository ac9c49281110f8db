"""A JSON object's checksum of itself: readers refuse an object that was changed later."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

OWN = "checksum"  # of the other fields
_SORTED = json.JSONEncoder(sort_keys=True)


def vouched(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content, which JSON must hold unchanged, with its checksum."""
    return {**content, OWN: checksum_of(content)}


def is_changed(content: Mapping[str, Any]) -> bool:
    return bool(content[OWN] != checksum_of(content))


def changed_row(rows: Iterable[Mapping[str, Any]]) -> int | None:
    """The number of the first row that was changed since it was written; None if none was."""
    return _first_none(_as_written(rows))


def without_changed(
    rows: Sequence[Mapping[str, Any]], kept: Sequence[str]
) -> tuple[list[Mapping[str, Any]], int | None]:
    """The rows, and the number of the first changed one; of a changed row only the fields named in
    `kept`.
    """
    as_written = [*_as_written(rows)]
    return [
        {name: row.get(name) for name in kept} if written is None else written
        for row, written in zip(rows, as_written, strict=True)
    ], _first_none(as_written)


def _first_none(rows: Iterable[Mapping[str, Any] | None]) -> int | None:
    return next((number for number, row in enumerate(rows, 1) if row is None), None)


def _as_written(rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any] | None]:
    """Each row, or None in place of a changed one. Imported rows have no checksum; a row without
    one after a row with one was changed.
    """
    vouching = False
    for row in rows:
        vouching = vouching or OWN in row
        yield None if vouching and (OWN not in row or is_changed(row)) else row


def checksum_of(content: Mapping[str, Any]) -> str:
    """The checksum of the other fields; it does not depend on layout or order."""
    others = dict(content)
    others.pop(OWN, None)
    return hashlib.blake2b(_SORTED.encode(others).encode(), digest_size=8).hexdigest()

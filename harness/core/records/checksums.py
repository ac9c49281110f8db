"""The checksum that a JSON object has of itself: one that was changed later is not believed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

OWN = "checksum"  # of the other fields


def vouched(content: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON can hold as it is, with its checksum."""
    return {**content, OWN: checksum_of(content)}


def is_changed(content: Mapping[str, Any]) -> bool:
    return bool(content[OWN] != checksum_of(content))


def changed_row(rows: Iterable[Mapping[str, Any]]) -> int | None:
    """The number of the first row that is not as it was written."""
    return next((number for number, row in enumerate(_as_written(rows), 1) if row is None), None)


def without_changed(
    rows: Sequence[Mapping[str, Any]], kept: Sequence[str]
) -> list[Mapping[str, Any]]:
    """The rows; of one that was changed these fields alone."""
    return [
        {name: row.get(name) for name in kept} if written is None else written
        for row, written in zip(rows, _as_written(rows), strict=True)
    ]


def _as_written(rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any] | None]:
    """Each row, None in place of one that was changed. Rows of earlier versions have no checksum;
    one after a row that has is none of them.
    """
    vouching = False
    for row in rows:
        vouching = vouching or OWN in row
        yield None if vouching and (OWN not in row or is_changed(row)) else row


def checksum_of(content: Mapping[str, Any]) -> str:
    """Of the content: layout and the order of its fields do not change it."""
    others = {name: value for name, value in content.items() if name != OWN}
    text = json.dumps(others, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

"""The checksum that a JSON object has of itself: one that was changed later is not believed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

OWN = "checksum"  # of the other fields


def vouched(content: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON can hold as it is, with its checksum."""
    return {**content, OWN: checksum_of(content)}


def is_changed(content: Mapping[str, Any]) -> bool:
    return bool(content[OWN] != checksum_of(content))


def changed_row(rows: Iterable[Mapping[str, Any]]) -> int | None:
    """The number of the first row that is not as it was written. Rows of earlier versions have no
    checksum; one after a row that has is none of them.
    """
    vouching = False
    for number, row in enumerate(rows, 1):
        vouching = vouching or OWN in row
        if vouching and (OWN not in row or is_changed(row)):
            return number
    return None


def checksum_of(content: Mapping[str, Any]) -> str:
    """Of what it says, however it is laid out."""
    others = {name: value for name, value in content.items() if name != OWN}
    text = json.dumps(others, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

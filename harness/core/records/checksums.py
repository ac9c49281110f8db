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
    """The number of the first row that is not as it was written; older rows have no checksum."""
    return next((n for n, row in enumerate(rows, 1) if OWN in row and is_changed(row)), None)


def checksum_of(content: Mapping[str, Any]) -> str:
    """Of what it says, however it is laid out."""
    others = {name: value for name, value in content.items() if name != OWN}
    text = json.dumps(others, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

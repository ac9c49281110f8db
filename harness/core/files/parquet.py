"""The columns and the number of rows of a parquet file, from its footer.

The footer is a struct of Thrift's compact protocol (parquet.thrift in apache/parquet-format).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAGIC = b"PAR1"
# Fields of the footer, and of each element of its schema.
SCHEMA, ROWS = 2, 3
NAME, CHILDREN = 4, 5
# Kinds of values; the others are numbers of variable length.
STOP, TRUE, FALSE, BYTE, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = 0, 1, 2, 3, 7, 8, 9, 10, 11, 12
DEEPEST = 50  # structs inside structs


def parquet_head(file: Path) -> tuple[list[str], int] | None:
    """(columns, rows); None if the file is broken or encrypted, of which its reader says more."""
    try:
        with file.open("rb") as opened:
            end = opened.seek(-8, 2)
            size, magic = int.from_bytes(opened.read(4), "little"), opened.read(4)
            if magic != MAGIC or size > end:
                return None
            opened.seek(end - size)
            footer = dict(_until_rows(_Footer(opened.read(size)).fields()))
        return _columns(footer[SCHEMA]), int(footer[ROWS])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _until_rows(fields: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """What comes behind the number of rows grows with the file."""
    for number, value in fields:
        yield number, value
        if number == ROWS:
            return


def _columns(schema: list[dict[int, Any]]) -> list[str]:
    """The root's children; all elements stand in one list, each before its own children."""
    names, at = [], 1
    for _ in range(schema[0][CHILDREN]):
        names.append(schema[at][NAME].decode("utf-8"))
        left = 1
        while left:
            left += schema[at].get(CHILDREN, 0) - 1
            at += 1
    return names


class _Footer:
    def __init__(self, content: bytes) -> None:
        self.content, self.at, self.depth = content, 0, 0

    def fields(self) -> Iterator[tuple[int, Any]]:
        """The numbers of a struct's fields, with their values."""
        number = 0
        while (head := self.byte()) != STOP:
            number = number + (head >> 4) if head >> 4 else self.signed()
            kind = head & 15
            yield number, kind == TRUE if kind in (TRUE, FALSE) else self.value(kind)

    def value(self, kind: int) -> Any:
        if kind == STRUCT:
            self.depth += 1
            if self.depth > DEEPEST:
                raise ValueError("no footer of parquet is so deep")
            fields = dict(self.fields())
            self.depth -= 1
            return fields
        if kind in (LIST, SET):
            head = self.byte()
            count = head >> 4 if head >> 4 < 15 else self.unsigned()
            return [self.value(head & 15) for _ in range(count)]
        if kind == MAP:
            raise ValueError("a footer of parquet has no maps")
        if kind in (DOUBLE, BINARY):
            return self.take(8 if kind == DOUBLE else self.unsigned())
        return self.byte() if kind in (TRUE, FALSE, BYTE) else self.signed()

    def take(self, count: int) -> bytes:
        self.at += count
        return self.content[self.at - count : self.at]

    def byte(self) -> int:
        self.at += 1
        return self.content[self.at - 1]

    def unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def signed(self) -> int:
        value = self.unsigned()
        return (value >> 1) ^ -(value & 1)

"""Files as a disk, a cut or a hand may leave them, drawn at random."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WHOLE = os.environ.get("HARNESS_FAULTS") == "whole"  # make faults

VALUES: list[Any] = [
    None, True, False, -1, 0, 0.5, 7, 10**30, 10**400, -1e308, 5e-324, "", "x", "NaN", "'",
    "\x1b[2J", "<img src=x>", [], [[]], [None], ["x"], {}, {"a": {"b": 1}}, {"mean": "x"},
    float("nan"), "\ud800", "../..", "1" * 300,
]  # fmt: skip


def amount(bounded: int, whole: int) -> int:
    """How many trials: few in every run of the suite, all by `make faults`."""
    return whole if WHOLE else bounded


def mutated(value: Any, chance: random.Random) -> Any:
    """With one thing changed, at any depth."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        name = chance.choice([*value])
        if chance.random() < 0.1:
            return {n: of for n, of in value.items() if n != name}
        return {**value, name: mutated(value[name], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        return [*value[:at], mutated(value[at], chance), *value[at + 1 :]]
    if type(value) in (int, float) and chance.random() < 0.3:
        return value * chance.choice([-1, 1e-9, 1e9, 1e60, 2])
    return chance.choice(VALUES)


def damaged(text: str, chance: random.Random, rows: bool) -> str:
    """The text of a file of JSON, a value or a row at a time."""
    lines = text.splitlines() if rows else [text]
    at, kind = chance.randrange(len(lines)), chance.random()
    if kind < 0.8:
        lines[at] = json.dumps(mutated(json.loads(lines[at]), chance))
    elif kind < 0.9:
        lines[at] = lines[at][: chance.randrange(len(lines[at]))]
    else:
        lines.insert(at, chance.choice([lines[at], "[" * 5000, "null"]))
    return "\n".join(lines) + "\n"


@contextmanager
def planted(file: Path, chance: random.Random) -> Iterator[None]:
    """A file of a record is damaged inside the block."""
    before = file.read_text()
    file.write_text(damaged(before, chance, rows=file.suffix == ".jsonl"))
    try:
        yield
    finally:
        if file.parent.exists():
            file.write_text(before)

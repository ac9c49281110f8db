"""Whether two sides may be compared, by what is asked: speed, quality, or the way to a target.

What one side knows and the other does not is no ground to stand on: it is refused as a difference
is. What neither knows is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harness.read.groups import without_count
from harness.read.sides import Record, Side
from harness.records import FINISHED

SPEED, QUALITY, TARGET = "speed", "quality", "time to target"


@dataclass(frozen=True)
class Verdict:
    """Why a comparison would be false; no reasons: it may be made, with these notes."""

    reasons: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Check:
    """What two sides must have in common, and for which question."""

    what: str
    of: Callable[[Record], Any]
    refused: tuple[str, ...]
    noted: tuple[str, ...] = ()
    why: str = ""


def _data(record: Record) -> dict[str, Any]:
    return record.run.environment.get("data") or {}


def _test_set(record: Record) -> str | None:
    """What quality is measured on, each epoch and at the end."""
    data = _data(record)
    if data.get("test_samples") is None:
        return None
    parts = [f"{data['test_samples']} samples of {data.get('test_from') or 'an unnamed split'}"]
    if data.get("validation_samples"):
        parts.append(f"validation on {data['validation_samples']} of {data.get('validation_from')}")
    return ", ".join(parts)


def _machine(record: Record) -> str | None:
    """GPUs of one kind are one kind of machine, however many are used."""
    machine = record.run.machine
    return without_count(machine) if machine and record.run.environment.get("gpus") else machine


def _definitions(record: Record) -> str:
    found = record.imported.get("format")
    return f"{found}'s" if found else "this project's"


def _updates(record: Record) -> float | None:
    return record.run.measures.get("updates")


def _versions(record: Record) -> str | None:
    found = record.run.environment.get("versions") or {}
    return (
        f"torch {found.get('torch')}, transformers {found.get('transformers')}" if found else None
    )


CHECKS = (
    Check("number format", lambda r: r.settings["precision"], (SPEED, QUALITY, TARGET),
          why="experiments/precision.yaml measures formats beside each other, as a question"),
    Check("data checksum", lambda r: _data(r).get("data_checksum"), (SPEED, QUALITY, TARGET),
          why="they trained on other samples"),
    Check("test set", _test_set, (QUALITY, TARGET)),
    Check("definition of the metrics", _definitions, (QUALITY, TARGET)),
    Check("effective batch", lambda r: r.run.facts["effective_batch"], (QUALITY,), (SPEED,),
          why="it is another training"),
    Check("updates", _updates, (QUALITY,), (SPEED,), why="it is another training"),
    Check("machine", _machine, (SPEED, TARGET)),
    Check("versions", _versions, (), (SPEED, QUALITY)),
)  # fmt: skip


def judge(one: Side, other: Side) -> dict[str, Verdict]:
    """For each question whether it may be asked."""
    reasons: dict[str, list[str]] = {SPEED: [], QUALITY: [], TARGET: []}
    notes: dict[str, list[str]] = {SPEED: [], QUALITY: [], TARGET: []}
    for side in (one, other):
        said = _not_finished(side)
        if said is not None:
            for kind in reasons:
                (notes if side.finished else reasons)[kind].append(said)
    if one.finished and other.finished:
        for check in CHECKS:
            _apply(check, one, other, reasons, notes)
    return {kind: Verdict(tuple(reasons[kind]), tuple(notes[kind])) for kind in reasons}


def _apply(
    check: Check, one: Side, other: Side,
    reasons: dict[str, list[str]], notes: dict[str, list[str]],
) -> None:  # fmt: skip
    found = [list(dict.fromkeys(map(check.of, side.finished))) for side in (one, other)]
    values = [value for side in found for value in side]
    known = set(values) - {None}
    if not known:
        for kind in (*check.refused, *check.noted):
            notes[kind].append(f"{check.what} is not in the records: taken to be the same")
    elif len(known) > 1 or None in values:
        has = [f"{s.name} has {_listed(v)}" for s, v in zip((one, other), found, strict=True)]
        said = f"{check.what}: {', '.join(has)}"
        said += f" ({check.why})" if check.why and len(known) > 1 else ""
        for kind in check.refused:
            reasons[kind].append(said)
        for kind in check.noted:
            notes[kind].append(said)


def _listed(values: list[Any]) -> str:
    return " and ".join("an unknown one" if v is None else _shown(v) for v in values)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _not_finished(side: Side) -> str | None:
    """What became of the runs that cannot be compared."""
    others = [record.run for record in side.records if record.run.state != FINISHED]
    if not others:
        return None
    states = Counter(run.state for run in others)
    counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    why = next((f": {run.reason}" for run in others if run.reason), "")
    return f"{side.name} has {len(side.finished) or 'no'} finished run(s) and {counts}{why}"

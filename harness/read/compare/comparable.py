"""Whether two sides may be compared, by what is asked: speed, quality, or the way to a target.

What one side knows and the other does not is no ground to stand on: it is refused as a difference
is. What neither knows is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.core.records import FINISHED, RunFolder, find_runs
from harness.core.settings import UserError
from harness.core.strategies import OF_ONE_STRATEGY
from harness.read.records.groups import without_count
from harness.read.records.selection import Record, Side, record_of

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


# ----
# Runs on one node among the records of a run: what several processes or nodes are held against.

BATCH = ("per_gpu_batch", "grad_acc")


# What may differ from a run that is taken unasked: how work is spread and exchanged,
# and what does not change how long a step takes.
MAY_DIFFER = (
    "setup", "strategy", "link", "lr", "epochs", "exchange", "elastic_batch", "rank_dropout",
    "batchnorm", "fsdp_shard", "fsdp_offload", "comm_probe", *BATCH, *OF_ONE_STRATEGY,
)  # fmt: skip


def on_one_node(folders: Iterable[RunFolder]) -> list[Record]:
    """What may be a baseline, of all runs of these folders."""
    found = []
    for folder in folders:
        if not folder.path.parent.name.startswith("1_"):
            continue
        try:
            record = record_of(folder, {}, None)
        except UserError:
            continue  # of other definitions: nothing to hold anything against
        if record.run.facts["nodes"] == 1 and not record.imported:
            found.append(record)
    return found


def runs_beside(side: Side, near: Sequence[Record] | None = None) -> list[Side]:
    """On one node, otherwise like these: of one process, or where these are on several nodes, of
    as many as they have. Of those near, or else of the same folder of records.
    """
    if near is None:
        near = on_one_node(find_runs(side.records[0].path.absolute().parents[2]))
    # Without its label in a sweep, which those beside it may not have.
    wanted = _fixed(record_of(RunFolder(side.records[0].path), {}, None))
    facts = side.finished[0].run.facts
    counts = (1, facts["devices"]) if facts["nodes"] > 1 else (1,)
    groups: dict[Any, list[Record]] = {}
    for record in near:
        if record.run.facts["devices"] in counts and _fixed(record) == wanted:
            groups.setdefault(tuple(record.settings.items()), []).append(record)
    found = [Side("baseline", _described(r), tuple(r)) for r in groups.values()]
    found = [other for other in found if other.finished]
    return [other for other in found if not judge(side, other)[SPEED].reasons]


def nearest(side: Side, beside: list[Side]) -> Side | None:
    """Of one process with the same batch each, else with the same effective batch, else of as many
    processes; the one that is alike in most settings.
    """
    several = [other for other in beside if not is_single(other)]
    for of, among in ((_each, singles(beside)), (_all, singles(beside)), (_each, several)):
        like = [other for other in among if of(other) == of(side) is not None]
        if like:
            return max(like, key=lambda other: _alike(other, side))
    return None


def singles(beside: list[Side]) -> list[Side]:
    return [side for side in beside if is_single(side)]


def is_single(side: Side) -> bool:
    return bool(side.finished[0].run.facts["devices"] == 1)


def micro_batch(side: Side) -> int:
    return int(side.settings["per_gpu_batch"])


def why_not(side: Side, base: Side) -> str | None:
    """In one line why a baseline that was asked for is none; None where it is one."""
    for name in ("script", "model"):
        values = [str(s.settings[name]) for s in (side, base)]
        if values[0] != values[1]:
            return f"the {name} differs: {values[0]} and {values[1]}"
    reasons = judge(side, base)[SPEED].reasons
    return reasons[0] if reasons else None


def _fixed(record: Record) -> dict[str, Any]:
    return {name: v for name, v in record.settings.items() if name not in MAY_DIFFER}


def _all(side: Side) -> Any:
    return side.finished[0].run.facts["effective_batch"]


def _each(side: Side) -> Any:
    batch, devices = _all(side), side.finished[0].run.facts["devices"]
    # Passes of the same size: accumulation is another way to the same batch, at another speed.
    return None if not batch else (batch / devices, micro_batch(side))


def _alike(one: Side, other: Side) -> int:
    return sum(one.settings[name] == other.settings.get(name) for name in one.settings)


def _described(records: list[Record]) -> str:
    """As a reader would find them."""
    path = records[0].path
    return str(_near(path if len(records) == 1 else path.parent))


def _near(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path

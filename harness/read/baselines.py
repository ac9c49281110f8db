"""Runs on one node among the records of a run: what several processes or nodes are held against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from harness.read.comparable import SPEED, judge
from harness.read.sides import Record, Side, record_of
from harness.records import RunFolder, find_runs
from harness.settings import UserError
from harness.strategies import OF_ONE_STRATEGY

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
    found = [Side("baseline", _shown(r), tuple(r)) for r in groups.values()]
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


def _shown(records: list[Record]) -> str:
    """As a reader would find them."""
    path = records[0].path
    return str(_near(path if len(records) == 1 else path.parent))


def _near(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path

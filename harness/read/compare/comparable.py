"""Whether two sides may be compared in speed, quality or time to a target; and which runs on one
node a run of several processes may be compared with.

A fact that only one side records counts as a difference; one that neither records is reported.
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
from harness.read.records.groups import Group
from harness.read.records.runs import Run, read_run

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
    of: Callable[[Run], Any]
    refused: tuple[str, ...]
    noted: tuple[str, ...] = ()
    why: str = ""


def _data(run: Run) -> dict[str, Any]:
    return run.environment.get("data") or {}


def _test_set(run: Run) -> str | None:
    """What quality is measured on, each epoch and at the end."""
    data = _data(run)
    if data.get("test_samples") is None:
        return None
    parts = [f"{data['test_samples']} samples of {data.get('test_from') or 'an unnamed split'}"]
    if data.get("validation_samples"):
        parts.append(f"validation on {data['validation_samples']} of {data.get('validation_from')}")
    return ", ".join(parts)


def _definitions(run: Run) -> str:
    found = run.imported.get("format")
    return f"{found}'s" if found else "this project's"


def _updates(run: Run) -> float | None:
    return run.measures.get("updates")


def _versions(run: Run) -> str | None:
    found = run.environment.get("versions") or {}
    return (
        f"torch {found.get('torch')}, transformers {found.get('transformers')}" if found else None
    )


CHECKS = (
    Check("number format", lambda r: r.identity["precision"], (SPEED, QUALITY, TARGET),
          why="experiments/precision.yaml measures formats beside each other, as a question"),
    Check("data checksum", lambda r: _data(r).get("data_checksum"), (SPEED, QUALITY, TARGET),
          why="they trained on other samples"),
    Check("test set", _test_set, (QUALITY, TARGET)),
    Check("definition of the metrics", _definitions, (QUALITY, TARGET)),
    Check("effective batch", lambda r: r.effective_batch, (QUALITY,), (SPEED,),
          why="it is another training"),
    Check("updates", _updates, (QUALITY,), (SPEED,), why="it is another training"),
    Check("machine", lambda r: r.machine_kind, (SPEED, TARGET)),
    Check("versions", _versions, (), (SPEED, QUALITY)),
)  # fmt: skip


def judge(one: Group, other: Group) -> dict[str, Verdict]:
    """For each question whether it may be asked."""
    reasons: dict[str, list[str]] = {SPEED: [], QUALITY: [], TARGET: []}
    notes: dict[str, list[str]] = {SPEED: [], QUALITY: [], TARGET: []}
    for group in (one, other):
        said = _not_finished(group)
        if said is not None:
            for kind in reasons:
                (notes if group.finished else reasons)[kind].append(said)
    if one.finished and other.finished:
        for check in CHECKS:
            _apply(check, one, other, reasons, notes)
    return {kind: Verdict(tuple(reasons[kind]), tuple(notes[kind])) for kind in reasons}


def _apply(
    check: Check, one: Group, other: Group,
    reasons: dict[str, list[str]], notes: dict[str, list[str]],
) -> None:  # fmt: skip
    found = [list(dict.fromkeys(map(check.of, group.finished))) for group in (one, other)]
    values = [value for group in found for value in group]
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


def _not_finished(group: Group) -> str | None:
    """What became of the runs that cannot be compared."""
    others = [run for run in group.runs if run.state != FINISHED]
    if not others:
        return None
    states = Counter(run.state for run in others)
    counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    why = next((f": {run.reason}" for run in others if run.reason), "")
    return f"{group.name} has {len(group.finished) or 'no'} finished run(s) and {counts}{why}"


BATCH = ("per_gpu_batch", "grad_acc")


# What may differ from a run that is taken unasked: how work is spread and exchanged,
# and what does not change how long a step takes.
MAY_DIFFER = (
    "setup", "strategy", "link", "lr", "epochs", "exchange", "elastic_batch", "rank_dropout",
    "batchnorm", "fsdp_shard", "fsdp_offload", "comm_probe", *BATCH, *OF_ONE_STRATEGY,
)  # fmt: skip


def on_one_node(folders: Iterable[RunFolder]) -> list[Run]:
    """What may be a baseline, of all runs of these folders."""
    found = []
    for folder in folders:
        if not folder.path.parent.name.startswith("1_"):
            continue
        try:
            run = read_run(folder, {}, str(folder.path), None)
        except UserError:
            continue  # of other definitions: nothing to hold anything against
        if run.nodes == 1 and not run.imported:
            found.append(run)
    return found


def runs_beside(group: Group, near: Sequence[Run] | None = None) -> list[Group]:
    """On one node, otherwise like these: of one process, or where these are on several nodes, of
    as many as they have. Of those near, or else of the same folder of records.
    """
    if near is None:
        near = on_one_node(find_runs(group.runs[0].directory.path.absolute().parents[2]))
    wanted, first = _fixed(group.runs[0]), group.finished[0]
    counts = (1, first.devices) if (first.nodes or 1) > 1 else (1,)
    groups: dict[Any, list[Run]] = {}
    for run in near:
        if run.devices in counts and _fixed(run) == wanted:
            groups.setdefault(tuple(run.identity.items()), []).append(run)
    others = [
        Group(tuple(runs), name="baseline", selector=_described(runs)) for runs in groups.values()
    ]
    others = [other for other in others if other.finished]
    return [other for other in others if not judge(group, other)[SPEED].reasons]


def nearest(group: Group, beside: list[Group]) -> Group | None:
    """Of one process with the same batch each, else with the same effective batch, else of as many
    processes; the one that is alike in most settings.
    """
    several = [other for other in beside if not is_single(other)]
    for of, among in ((_each, singles(beside)), (_all, singles(beside)), (_each, several)):
        like = [other for other in among if of(other) == of(group) is not None]
        if like:
            return max(like, key=lambda other: _alike(other, group))
    return None


def singles(beside: list[Group]) -> list[Group]:
    return [group for group in beside if is_single(group)]


def is_single(group: Group) -> bool:
    return bool(group.finished[0].devices == 1)


def micro_batch(group: Group) -> int:
    return int(group.identity["per_gpu_batch"])


def why_not(group: Group, base: Group) -> str | None:
    """In one line why a baseline that was asked for is none; None where it is one."""
    for name in ("script", "model"):
        values = [str(s.identity[name]) for s in (group, base)]
        if values[0] != values[1]:
            return f"the {name} differs: {values[0]} and {values[1]}"
    reasons = judge(group, base)[SPEED].reasons
    return reasons[0] if reasons else None


def _fixed(run: Run) -> dict[str, Any]:
    return {name: v for name, v in run.identity.items() if name not in MAY_DIFFER}


def _all(group: Group) -> Any:
    return group.finished[0].effective_batch


def _each(group: Group) -> Any:
    batch, devices = _all(group), group.finished[0].devices
    # Passes of the same size: accumulation is another way to the same batch, at another speed.
    return None if not batch else (batch / devices, micro_batch(group))


def _alike(one: Group, other: Group) -> int:
    return sum(one.identity[name] == other.identity.get(name) for name in one.identity)


def _described(runs: list[Run]) -> str:
    """As a reader would find them."""
    path = runs[0].directory.path
    return str(_near(path if len(runs) == 1 else path.parent))


def _near(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path

"""The run that a run is explained against: its choice, where the user names none, and how
efficiently the devices are used beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from harness.core.records import RunFolder, find_runs
from harness.core.records.walking import as_typed
from harness.core.settings import SETUP
from harness.core.strategies import OF_EXCHANGE, OF_ONE_STRATEGY
from harness.read.explain.causes import percent
from harness.read.records.baseline import STRONG, WEAK, efficiency
from harness.read.records.comparable import LOAD, SPEED, judge
from harness.read.records.copies import without_copies
from harness.read.records.groups import Group, by_key
from harness.read.records.recorded import UNREADABLE, warn_not_read
from harness.read.records.runs import Run, read_run

# What may differ in a baseline that was not named: how work is split and exchanged, and settings
# that do not change the time of a step.
MAY_DIFFER = (
    "setup", "strategy", "link", "lr", "epochs", "exchange", "elastic_batch", "rank_dropout",
    "balance", "batchnorm", "fsdp_shard", "fsdp_offload", "comm_probe", "per_gpu_batch", "grad_acc",
    "tested",
    *OF_EXCHANGE,
)  # fmt: skip

# Kind of scaling -> what its efficiency compares.
OF_KIND = {
    WEAK: "This is weak scaling: samples/s at the same batch per device.",
    STRONG: "This is strong scaling: training times at the same effective batch.",
}


def why_not(group: Group, base: Group) -> str | None:
    """Why `base` cannot be the baseline of a group, in one line; None if it can."""
    for name in ("script", "model"):
        values = [str(side.identity[name]) for side in (group, base)]
        if values[0] != values[1]:
            return f"the {name} differs: {values[0]} and {values[1]}"
    reasons = judge(group, base)[SPEED].reasons
    return reasons[0] if reasons else None


def efficiency_text(group: Group, base: Group) -> tuple[str, str]:
    """The scaling efficiency, and a sentence on its kind; both empty where tables have none."""
    kind, share = efficiency(group, base)
    if kind is None or share.value is None:
        return "", ""
    return f" ({percent(share.value)} efficiency)", f" {OF_KIND[kind]}"


def runs_on_one_node(folders: Iterable[RunFolder]) -> list[Run]:
    """The runs of these folders that may be a baseline."""
    folders = (folder for folder in folders if folder.path.parent.name.startswith("1_"))
    runs = [read_run(folder, {}, str(folder.path), None) for folder in folders]
    # Name the unreadable ones, as they might have been the runs to compare with.
    warn_not_read([f"{run.path}: {run.reason}" for run in runs if run.state == UNREADABLE])
    return [run for run in runs if may_be_baseline(run)]


def may_be_baseline(run: Run) -> bool:
    return run.state != UNREADABLE and run.nodes == 1 and not run.imported


def runs_beside(group: Group, near: Sequence[Run] | None = None) -> list[Group]:
    """The groups on one node that are otherwise like this one: of one process, and if this one is
    on several nodes, also of as many processes. Taken from `near`, else from its records folder.
    """
    if near is None:
        near = runs_on_one_node(_folders_near(group.recorded.recorded_folder.path.absolute()))
    fixed, first = _fixed(group.recorded), group.finished[0]
    counts = (1, first.devices) if (first.nodes or 1) > 1 else (1,)
    matching = [run for run in near if run.devices in counts and _fixed(run) == fixed]
    alike = by_key(matching, lambda run: (*run.identity.items(), run.machine_kind, run.threads))
    sweep = first.launch.get("sweep")
    groups = []
    for runs in alike.values():
        own = [run for run in runs if sweep and run.launch.get("sweep") == sweep]
        groups.append(Group((*(own or runs),), name="the other", selector=_selector(own or runs)))
    return [each for each in groups if each.finished]


def _folders_near(path: Path) -> list[RunFolder]:
    """The runs of the records folder that holds this path, without those of folders in it. A folder
    of LogCallback alone stands by itself: the folders above it are the user's, not ours to read.
    """
    if not SETUP.fullmatch(path.parent.name):
        return []
    root = path.parents[2]
    return without_copies([f for f in find_runs(root) if f.path.parents[2] == root])[0]


def _fixed(run: Run) -> dict[str, Any]:
    return {name: value for name, value in run.identity.items() if name not in MAY_DIFFER}


def _selector(runs: list[Run]) -> str:
    """The folder of these runs as a reader would name it."""
    path = runs[0].recorded_folder.path
    return str(as_typed(path if len(runs) == 1 else path.parent))


def nearest(group: Group, beside: list[Group]) -> tuple[Group | None, Group | None]:
    """(the nearest comparable group or None, the nearest group). Searched are groups of one process
    with the same batch per device, else of one process with the same effective batch, else of as
    many processes; the first kind that exists decides, as another kind would answer another
    question. Within it, the group that agrees in most settings comes first. Where other programs
    alone forbid that comparison, another group of its strategy is taken, and of no other one.
    """
    single = [other for other in beside if is_single(other)]
    several = [other for other in beside if not is_single(other)]
    for batch, candidates in ((_per_device, single), (_effective, single), (_per_device, several)):
        matching = [other for other in candidates if batch(other) == batch(group) is not None]
        matching.sort(key=lambda other: -len(other.identity.items() & group.identity.items()))
        if not matching:
            continue
        first, kept = matching[0], matching
        if (why_not(group, first) or "").startswith(LOAD):
            kept = [other for other in matching if _strategy_flags(other) == _strategy_flags(first)]
        return next((o for o in kept if why_not(group, o) is None), None), first
    return None, None


def _strategy_flags(group: Group) -> tuple[Any, ...]:
    return tuple(group.identity.get(name) for name in ("strategy", *OF_ONE_STRATEGY))


def is_single(group: Group) -> bool:
    return bool(group.finished[0].devices == 1)


def _effective(group: Group) -> int | None:
    return group.finished[0].effective_batch


def _per_device(group: Group) -> tuple[float, int] | None:
    """The batch per device, and per pass: accumulation changes the speed."""
    first = group.finished[0]
    if not first.effective_batch or not first.devices:
        return None
    return first.effective_batch / first.devices, group.identity["per_gpu_batch"]

"""Everything that was read of a sweep; runs of no sweep are put together like one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.core.identity import SHOWN_ONLY
from harness.core.locks import is_held
from harness.core.records import RunFolder, find_runs, read_json
from harness.core.settings import UserError, flag_fields
from harness.read.records.groups import Group, kind_of_machine, make_groups
from harness.read.records.loading import UNFINISHED, settings_of
from harness.read.records.sweep_runs import SweepRun, read_runs
from harness.read.records.sweeps import FILE, PlannedRun, Sweep, read_sweep, sweep_file

# What makes unlike tasks of runs: they share no figure and no table.
TASK = ("script", "model", "dataset")


RUNNING, INTERRUPTED = "running", "interrupted"


# Progress is told once a second; a long evaluation tells none.
QUIET_S = 120.0


NO_RECORDS = "no records below {}: python vit.py --tiny makes one"


@dataclass(frozen=True)
class Measured:
    """A sweep with its runs and groups, and what could not be read of them."""

    sweep: Sweep
    runs: list[SweepRun]
    groups: list[Group]
    problems: list[str] = field(default_factory=list)

    def folder(self, run: SweepRun) -> RunFolder:
        return RunFolder(self.sweep.output_dir / (run.path or "nowhere"))

    @property
    def machines(self) -> list[str]:
        """The kinds of them: one GPU of a kind and four are of one."""
        kinds = (kind_of_machine(group) for group in self.groups)
        return [*dict.fromkeys(kind for kind in kinds if kind)]


def setting(group: Group, name: str) -> Any:
    """What the group's runs have in common: an axis of the plan, or a setting of all of them."""
    if group.label.get(name) is not None:
        return group.label[name]
    known = [run.settings[name] for run in group.runs if run.settings.get(name) is not None]
    return known[0] if known and all(value == known[0] for value in known) else None


def topology(group: Group) -> str:
    """The set-up without its tag, which names the link."""
    return "_".join(str(setting(group, "setup") or "").split("_")[:2])


def read_measured(path: str | Path) -> Measured:
    """The sweep of a folder, or else all runs below it together."""
    if sweep_file(Path(path)) is not None:
        return _measured(read_sweep(path))
    folders, problems = _readable(_existing(Path(path)))
    if not folders:
        raise UserError("; ".join(problems) or NO_RECORDS.format(path))
    return _measured(_made_up(Path(path), "runs", folders), problems)


def read_all(root: str | Path) -> tuple[list[Measured], list[str]]:
    """Every sweep below a folder, then the runs of none, a part a task; and what is not shown."""
    root = _existing(Path(root))
    if sweep_file(root) is not None:
        return [read_measured(root)], []
    parts, problems, taken = [], [], set()
    for file in sorted(root.rglob(FILE)):
        try:
            part = _measured(read_sweep(file))
        except UserError as error:
            problems.append(f"sweep not shown: {error}")
            continue
        parts.append(part)
        taken |= {part.folder(run).path.resolve() for run in part.runs if run.path}
    folders, unreadable = _readable(root)
    others: dict[tuple[str, ...], dict[RunFolder, dict[str, Any]]] = {}
    for folder, settings in folders.items():
        if folder.path.resolve() not in taken:
            task = tuple(str(settings.get(name)) for name in TASK)
            others.setdefault(task, {})[folder] = settings
    for task, theirs in others.items():
        parts.append(_measured(_made_up(root, "runs of " + ", ".join(task), theirs)))
    if not parts:
        raise UserError("; ".join([*problems, *unreadable]) or NO_RECORDS.format(root))
    return parts, [*problems, *unreadable]


def _existing(root: Path) -> Path:
    if not root.exists():
        raise UserError(f"{root}: there is no such folder")
    return root


def _measured(sweep: Sweep, problems: Iterable[str] = ()) -> Measured:
    runs = read_runs(sweep)
    return Measured(sweep, runs, make_groups(sweep, runs), [*problems, *_broken(runs)])


def _broken(runs: list[SweepRun]) -> Iterator[str]:
    for run in runs:
        if run.broken_lines:
            s = "s" if run.broken_lines > 1 else ""
            yield f"{run.path}: {run.broken_lines} line{s} of epochs.jsonl not readable, left out"


def _readable(root: Path) -> tuple[dict[RunFolder, dict[str, Any]], list[str]]:
    """Folder -> settings of the runs below, and in a line each those of other definitions."""
    found, problems = {}, []
    for folder in find_runs(root):
        try:
            found[folder] = settings_of(folder)
        except UserError as error:
            problems.append(f"run not shown: {error}")
    return found, problems


def _made_up(root: Path, name: str, folders: Mapping[RunFolder, dict[str, Any]]) -> Sweep:
    """What varies between these runs are the axes; one process is what they are compared with."""
    named = {folder: _identity(settings) for folder, settings in folders.items()}
    names = dict.fromkeys(name for values in named.values() for name in values)
    axes = tuple(n for n in names if len({str(v.get(n)) for v in named.values()}) > 1)
    runs = [
        PlannedRun(
            {
                **{axis: values.get(axis) for axis in axes},
                "seed": folders[folder].get("seed"),
                "repeat": folders[folder].get("repeat"),
            },
            str(folder.path.relative_to(root)),
            None,
        )
        for folder, values in named.items()
    ]
    single = "setup" in axes and any(run.label["setup"] == "1_1" for run in runs)
    return Sweep(
        file=root / "sweeps" / "none" / FILE,  # where it would lie: nothing is written there
        name=name,
        question=name,
        tiny=False,
        command=None,
        axes=axes,
        baseline={"setup": "1_1"} if single else None,
        target=None,
        hold=None,
        lr_rule=None,
        columns=None,
        per_node=False,
        runs=tuple(runs),
    )


def _identity(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that can change a result, without those that repeat a measurement."""
    ours = [n for n, f in flag_fields().items() if f.metadata["identity"]]
    kept = ["script", *(name for name in ours if name not in ("tiny", "seed", "repeat"))]
    passed = {k: v for k, v in (settings.get("trainer") or {}).items() if k not in SHOWN_ONLY}
    values = {name: settings.get(name) for name in kept} | passed
    plain = (str, int, float, type(None))
    return {name: v if isinstance(v, plain) else str(v) for name, v in values.items()}


def what_it_is(folder: RunFolder, state: str) -> str:
    """The state in words of now: a run without outcome goes on, or was broken off."""
    if state != UNFINISHED:
        return state
    return RUNNING if _is_running(folder) else INTERRUPTED


def _is_running(folder: RunFolder) -> bool:
    told = (read_json(folder.progress) or {}).get("unix")
    heard = isinstance(told, (int, float)) and time.time() - told < QUIET_S
    return heard or is_held(folder.lock("run"))


def how_far(folder: RunFolder, run: SweepRun) -> str:
    """Where a run without outcome is, as far as it told."""
    told = read_json(folder.progress) or {}
    rows = run.epochs
    parts = [f"{len(rows)} epoch{'' if len(rows) == 1 else 's'} recorded"]
    if told.get("update") is not None and told.get("updates"):
        parts.append(f"update {told['update']} of {told['updates']}")
    return ", ".join(parts)

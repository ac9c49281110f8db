"""The results of a sweep: which runs belong together, what varies between them, what is compared.

    <output_dir>/sweeps/<name>/sweep.json       written by the launcher, read here

outputs/README.md defines its fields. Runs outside any sweep are read as if one had planned them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from harness.core.identity import REPETITIONS
from harness.core.process import working
from harness.core.records import SKIPPED, SWEEP, WAITING, RunFolder, find_folders, find_runs
from harness.core.records.archives import is_archive
from harness.core.schema.checks import check_fields
from harness.core.settings import UserError
from harness.core.strategies import OF_ONE_STRATEGY, recorded_strategy
from harness.read.labels import STRATEGY, counted, group_text, short_text
from harness.read.records.copies import run_key, without_copies
from harness.read.records.groups import Group, group_key, make_groups
from harness.read.records.recorded import (
    UNFINISHED,
    UNREADABLE,
    check_schema,
    existing,
    is_number,
    link_text,
    none_readable,
    settings_of,
    torn_lines,
)
from harness.read.records.runs import Run, Target, identity_settings, read_run

# Runs that differ in these are of different tasks and share no figure and no table.
TASK = ("script", "model", "dataset")

NO_RECORDS = "no records below {}: python vit.py --tiny makes one; ours: outputs/published"


@dataclass(frozen=True)
class PlannedRun:
    label: dict[str, Any]
    path: str | None  # below the output folder; None: refused by the plan before it had a path
    skipped: str | None


@dataclass(frozen=True)
class Expected:
    """One statement of the hypothesis in numbers, about one way to run."""

    of: dict[str, Any]
    against: dict[str, Any] | None  # None: the baseline
    measure: str
    at_least: float  # a ratio; percentage points for a share
    at_most: float


LEFT_OUT = 0.05  # share of the training samples; more are reported


@dataclass(frozen=True)
class SweepResults:
    """The plan of a sweep; its runs and groups are read when they are first used."""

    file: Path
    name: str
    question: str
    axes: tuple[str, ...]
    planned: tuple[PlannedRun, ...]
    tiny: bool = False
    hypothesis: str | None = None  # written down before the runs
    expect: tuple[Expected, ...] = ()
    changed_after: str | None = None  # runs that had finished when the hypothesis changed
    command: str | None = None
    baseline: dict[str, Any] | None = None
    target: Target | None = None
    hold: str | None = None
    lr_rule: str | None = None
    columns: tuple[str, ...] | None = None
    per_node: bool = False
    unreadable: tuple[str, ...] = ()  # records that were left out, each with its reason

    @property
    def folder(self) -> Path:
        return self.file.parent

    @property
    def folder_read(self) -> Path:
        """The folder to name for other verbs: the sweep's, or the root of runs without a sweep."""
        return self.folder.parents[1] if sweep_file(self.folder) is None else self.folder

    @property
    def output_dir(self) -> Path:
        return self.folder.absolute().parents[1]

    @property
    def has_question(self) -> bool:
        """Whether the sweep's file asks a question; runs without a sweep have none."""
        return self.question != self.name

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """All runs, in the order of the plan."""
        with working(f"reading {counted(len(self.planned), 'record')} of {self.name}"):
            return tuple(self._read(planned) for planned in self.planned)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        return make_groups(self.runs, self.axes)

    @property
    def finished(self) -> list[Run]:
        """The finished runs, group by group."""
        return [run for group in self.groups for run in group.finished]

    @cached_property
    def varied(self) -> tuple[str, ...]:
        """The axes with several values; a strategy counts as varied if one of its flags does."""
        values = {axis: {str(run.label.get(axis)) for run in self.planned} for axis in self.axes}
        several = {axis for axis, of_axis in values.items() if len(of_axis) > 1}
        if several & {*OF_ONE_STRATEGY}:
            several.add(STRATEGY)
        return tuple(axis for axis in self.axes if axis in several)

    @property
    def is_for_predictions(self) -> bool:
        """Whether one process was planned with several batches: they tell computing times, from
        which runs over links are predicted.
        """
        alone = any(run.label.get("setup") == "1_1" for run in self.planned)
        return alone and "link" in self.axes and "per_gpu_batch" in self.naming

    @property
    def naming(self) -> tuple[str, ...]:
        """The axes that tell groups apart; all axes where none varies."""
        return self.varied or self.axes

    @property
    def machines(self) -> list[str]:
        """The kinds of machine; the number of GPUs makes no difference."""
        return [*dict.fromkeys(group.machine_kind for group in self.groups if group.machine_kind)]

    def text_of(self, group: Group, without: Collection[str] = ()) -> str:
        """What distinguishes a group from the others, in words; without: axes they share."""
        machine = group.machine_kind if len(self.machines) > 1 else None
        return group_text(group.label, self.naming, machine, without)

    def name_of(self, group: Group) -> str:
        return self.text_of(group) or "all runs"

    def short_name_of(self, group: Group) -> str:
        machine = group.machine_kind if len(self.machines) > 1 else None
        return short_text(group.label, self.naming, machine)

    def only(self, runs: Iterable[Run]) -> SweepResults:
        """The sweep with only these of its runs, which are not read again."""
        kept = {*runs}
        both = [pair for pair in zip(self.planned, self.runs, strict=True) if pair[1] in kept]
        part = replace(self, planned=tuple(planned for planned, _ in both))
        vars(part).update(runs=tuple(run for _, run in both))
        return part

    def against(self, baseline: dict[str, Any] | None) -> SweepResults:
        """The same runs, compared with another baseline."""
        other = replace(self, baseline=baseline)
        vars(other).update(runs=self.runs, groups=self.groups)  # they are not read again
        return other

    @property
    def problems(self) -> list[str]:
        """What could not be read."""
        torn = (line for run in self.runs for line in torn_lines(run.path, run.broken_lines))
        return [*self.unreadable, *self.not_read, *torn]

    @property
    def not_read(self) -> list[str]:
        """A line for each run that is not believed."""
        return [f"{run.path}: {run.reason}" for run in self.runs if run.state == UNREADABLE]

    @property
    def averaged_exchanges(self) -> list[str]:
        """A sentence where groups hold runs that exchanged in different ways; else nothing."""
        ways = [{run.identity["exchange"] for run in group.finished} for group in self.groups]
        mixed = sum(len(of_group) > 1 for of_group in ways)
        text = "--exchange auto chose different ways for runs that are averaged here"
        return [f"{mixed} of {len(ways)} groups: {text}"] if mixed else []

    @property
    def shared_cores(self) -> list[str]:
        """A sentence where runs had more processes than cores, which slow each other; else none."""
        shares = [run.launch.get("processes_per_core") or 0.0 for run in self.finished]
        crowded = sum(share > 1 for share in shares)
        if not crowded:
            return []
        return [
            f"{crowded} of {len(shares)} runs had more processes than cores (up to "
            f"{max(shares):g} per core): the machine, not the set-up, slows their computing"
        ]

    @property
    def left_out_samples(self) -> list[str]:
        """A sentence where so many samples fill no batch that batches trained on unlike data."""
        counts = {
            run: (run.data.get("left_out_samples") or 0, run.data.get("train_samples") or 0)
            for run in self.finished
        }
        if not (many := [run for run, (out, used) in counts.items() if out > LEFT_OUT * used]):
            return []
        out, used = max((counts[run] for run in many), key=lambda pair: pair[0] / (pair[1] or 1))
        padded = all(recorded_strategy(run.settings).can_pad for run in many)
        return [
            f"{len(many)} of {len(counts)} runs left out training samples that fill no batch, "
            f"up to {out:,} of {out + used:,}{': --tail pad trains on them' if padded else ''}"
        ]

    def _read(self, planned: PlannedRun) -> Run:
        if planned.path is None:
            return Run(planned.label, None, SKIPPED, planned.skipped)
        folder = RunFolder.at(self.output_dir / planned.path)
        run = read_run(folder, planned.label, planned.path, self.target)
        if (other := _other_settings(run)) is not None:
            return Run(run.label, run.path, UNREADABLE, other, folder)
        if run.state != UNFINISHED:
            return run
        # A record overrides the plan: a run that was skipped here may have run elsewhere.
        if any(map(folder.has, (folder.settings, folder.epochs, folder.attempts))):
            return run
        state = WAITING if planned.skipped is None else SKIPPED
        return replace(run, state=state, reason=planned.skipped)


def _other_settings(run: Run) -> str | None:
    """Why the record is of another run than the one planned; None if it is that one."""
    for name, planned in run.label.items():
        value = run.settings.get(name)
        if name == "setup" and value is not None:  # the record's may have a tag that names the link
            same = f"{value}_".startswith(f"{planned}_")
        else:
            same = name == "script" or (is_number(value) and is_number(planned))
            same = not same or value in (None, planned)
        if not same:
            file = run.recorded_folder.settings.name
            return f"{file} is that of another run: {name} {value}, planned was {planned}"
    return None


def read_results(path: str | Path) -> SweepResults:
    """The sweep of a folder, or else all runs below it together."""
    if sweep_file(Path(path)) is not None:
        return read_sweep(path)
    folders, problems = _readable(existing(path))
    if not folders:
        raise none_readable(problems) if problems else UserError(NO_RECORDS.format(path))
    kept, copies = without_copies([*folders])
    once = {folder: folders[folder] for folder in kept}
    return _without_plan(Path(path), "runs", once, [*problems, *copies])


def read_all(root: str | Path) -> tuple[list[SweepResults], list[str]]:
    """Every sweep below a folder, then other runs, one part per task; and what is left out."""
    root = existing(root)
    if sweep_file(root) is not None:
        return [read_sweep(root)], []
    sweeps, problems = [], []
    for folder_of_sweep in find_folders(SWEEP, root):
        if folder_of_sweep.problem is not None:
            continue  # named below, where its runs are looked for
        try:
            sweeps.append(read_sweep(folder_of_sweep.path))
        except UserError as error:
            problems.append(f"sweep not shown: {error}")
    in_sweeps = [run.folder for sweep in sweeps for run in sweep.runs if run.folder]
    sweeps, copied = _without_copies_of_sweeps(sweeps)
    planned = {folder.path.resolve() for folder in in_sweeps}
    folders, unreadable = _readable(root)
    of_none = [folder for folder in folders if folder.path.resolve() not in planned]
    once, copies = without_copies(of_none, in_sweeps)
    others: dict[tuple[str, ...], dict[RunFolder, dict[str, Any]]] = {}
    for folder in once:
        task = tuple(str(folders[folder].get(name) or "") for name in TASK)
        others.setdefault(task, {})[folder] = folders[folder]
    for task, runs in others.items():
        sweeps.append(
            _without_plan(root, "runs of " + (", ".join(filter(None, task)) or "unknown"), runs)
        )
    problems += [*unreadable, *copied, *copies]
    if not sweeps:
        raise none_readable(problems) if problems else UserError(NO_RECORDS.format(root))
    return sweeps, problems


def _without_copies_of_sweeps(sweeps: list[SweepResults]) -> tuple[list[SweepResults], list[str]]:
    """The sweeps without copies (same name, runs that another one has), and a line per copy."""
    names = Counter(sweep.name for sweep in sweeps)
    keys = [
        {run_key(run.folder) for run in sweep.runs if run.folder and names[sweep.name] > 1} - {None}
        for sweep in sweeps
    ]
    kept, lines = list[int](), []
    for n in sorted(range(len(sweeps)), key=lambda n: -len(keys[n])):
        of_name = [k for k in kept if sweeps[k].name == sweeps[n].name]
        if holders := [k for k in of_name if keys[n] and keys[n] <= keys[k]]:
            lines.append(
                f"sweep not shown: {sweeps[n].folder} is a copy of {sweeps[holders[0]].folder}"
            )
        else:
            kept.append(n)
    return [sweeps[n] for n in sorted(kept)], lines


def _readable(root: Path) -> tuple[dict[RunFolder, dict[str, Any]], list[str]]:
    """Folder -> settings of the runs below, and a line for each run with none to believe."""
    folders, problems = {}, []
    for folder in find_runs(root):
        try:
            folders[folder] = settings_of(folder)
        except UserError as error:
            problems.append(f"run not shown: {folder.path}: {error}")
    return folders, problems


def _without_plan(
    root: Path, name: str, folders: Mapping[RunFolder, dict[str, Any]],
    problems: Iterable[str] = (),
) -> SweepResults:  # fmt: skip
    """These runs as a sweep: its axes are what varies, its baseline is set-up 1_1, if it ran."""
    plain = (str, int, float, type(None))
    named = {
        folder: {
            name: value if isinstance(value, plain) else str(value)
            for name, value in identity_settings(settings).items()
        }
        for folder, settings in folders.items()
    }
    over = {folder: _requested_link(folder) for folder in folders}
    if len({(named[folder].get("setup"), link) for folder, link in over.items()}) > len(
        {values.get("setup") for values in named.values()}
    ):  # else the set-up alone tells the links apart
        named = {folder: values | {"link": over[folder]} for folder, values in named.items()}
    names = dict.fromkeys(name for values in named.values() for name in values)
    axes = tuple(n for n in names if len({str(v.get(n)) for v in named.values()}) > 1)
    planned = []
    for folder, values in named.items():
        repeats = {repetition: folders[folder].get(repetition) for repetition in REPETITIONS}
        label = {axis: values.get(axis) for axis in axes} | repeats
        planned.append(PlannedRun(label, str(folder.path.relative_to(root)), None))
    single = "setup" in axes and any(run.label["setup"] == "1_1" for run in planned)
    return SweepResults(
        file=root / "sweeps" / "none" / SWEEP,  # where it would be: nothing is written there
        name=name,
        question=name,
        axes=axes,
        planned=tuple(planned),
        baseline={"setup": "1_1"} if single else None,
        unreadable=tuple(problems),
    )


def _requested_link(folder: RunFolder) -> str | None:
    """The link that was requested: a fact of the launch, not a setting of the run."""
    environment: Mapping[str, Any] = folder.read_environment() or {}
    launch = environment.get("launch")
    return link_text(launch.get("link")) if isinstance(launch, dict) else None


def sweep_file(path: Path) -> Path | None:
    """The sweep.json that a path names: itself, its folder or an archive of one sweep."""
    if is_archive(path):
        sweeps = find_folders(SWEEP, path)
        return sweeps[0].path / SWEEP if len(sweeps) == 1 and not sweeps[0].problem else None
    if path.is_file():
        return path
    folder = RunFolder.at(path)
    return path / SWEEP if folder.has(path / SWEEP) else None


def read_sweep(path: str | Path) -> SweepResults:
    """The sweep of a folder, checked; an error is a single line."""
    file = sweep_file(Path(path))
    if file is None:
        raise UserError(f"{path}: there is no {SWEEP}; a sweep writes it to <output_dir>/sweeps/")
    content = RunFolder.at(file.parent).read_json(file)
    if content is None:
        raise UserError(f"{file} is not readable as JSON: move the folder away")
    try:
        check_schema(content.get("schema"), "it")
        check_fields("sweep", content, "its plan")
        return _checked(file, content)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def _checked(file: Path, content: Mapping[str, Any]) -> SweepResults:
    listed = content.get("runs") or ()
    planned = tuple(_planned(f"runs[{n}]", entry) for n, entry in enumerate(listed))
    if not planned:
        raise UserError("runs: is empty, so there is nothing to show")
    # The named axes, then all other names in labels: no difference between runs stays hidden.
    varied = (*(content.get("axes") or ()), *(name for run in planned for name in run.label))
    axes = tuple(dict.fromkeys(axis for axis in varied if axis not in REPETITIONS))
    _check_paths(planned, axes)
    columns = content.get("columns")
    name = content.get("name") or file.absolute().parent.name
    return SweepResults(
        file=file,
        name=name,
        question=content.get("question") or name,
        axes=axes,
        planned=planned,
        tiny=bool(content.get("tiny")),
        hypothesis=_hypothesis(content),
        expect=tuple(_expected(entry, axes) for entry in content.get("expect") or ()),
        changed_after=content.get("changed_after"),
        command=content.get("command"),
        baseline=_baseline(content.get("baseline"), axes),
        target=_target(content.get("target")),
        hold=content.get("hold"),
        lr_rule=content.get("lr_rule"),
        columns=None if columns is None else tuple(columns),
        per_node=bool(content.get("per_node")),
    )


def _hypothesis(content: Mapping[str, Any]) -> str | None:
    text, after = content.get("hypothesis"), content.get("changed_after")
    return f"{text} (Changed after {after} had finished.)" if text and after else text


def _planned(where: str, entry: Mapping[str, Any]) -> PlannedRun:
    label, path, skipped = (entry.get(name) for name in ("label", "path", "skipped"))
    if label is None or (path is None and skipped is None):
        raise UserError(f"{where}.{'label' if label is None else 'path'}: is missing")
    for name, value in label.items():
        if not isinstance(value, (str, int, float, type(None))):
            raise UserError(
                f"{where}.label.{name}: must be a text, a number or null, not {value!r}"
            )
    if path is not None:
        # A file from elsewhere must not make this read other folders than those of its runs.
        parts = PurePosixPath(path).parts
        if not parts or ".." in parts or PurePosixPath(path).is_absolute():
            raise UserError(f"{where}.path: {path} leads out of the folder that holds the runs")
    return PlannedRun(label, path, skipped)


def _check_paths(runs: tuple[PlannedRun, ...], axes: tuple[str, ...]) -> None:
    """UserError for one record twice in a group: its measurements would have no spread."""
    seen = set()
    for run in runs:
        key = (run.path, group_key(run.label, axes))
        if run.path is not None and key in seen:
            raise UserError(f"runs: {run.path} is there twice in one group: one record, one run")
        seen.add(key)


def _expected(entry: Mapping[str, Any], axes: tuple[str, ...]) -> Expected:
    low, high = entry.get("at_least"), entry.get("at_most")
    of, measure = entry.get("of"), entry.get("measure")
    if not of or measure is None or (low is None and high is None):
        raise UserError("expect: an entry lacks of, measure, or both at_least and at_most")
    if low is not None and high is not None and low > high:
        raise UserError(f"expect: at_least {low:g} is more than at_most {high:g}")
    for name in (*of, *(entry.get("against") or ())):
        if name not in axes:
            raise UserError(f"expect: {name} does not vary here: {', '.join(axes) or 'nothing'}")
    return Expected(
        of, entry.get("against"), measure, -math.inf if low is None else low,
        math.inf if high is None else high,
    )  # fmt: skip


def _baseline(named: dict[str, Any] | None, axes: tuple[str, ...]) -> dict[str, Any] | None:
    for axis in named or {}:
        if axis not in axes:
            raise UserError(f"baseline: {axis} does not vary here: {', '.join(axes) or 'nothing'}")
    return named or None


def _target(named: dict[str, Any] | None) -> Target | None:
    if named is None:
        return None
    metric, value = named.get("metric"), named.get("value")
    if not isinstance(metric, str):
        raise UserError(f"target.metric: must be a text, not {metric!r}")
    if not is_number(value):
        raise UserError(f"target.value: must be a number, not {value!r}")
    return Target.of(metric, float(value))

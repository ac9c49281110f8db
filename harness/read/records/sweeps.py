"""sweep.json: which runs belong together, what varies between them, and what is asked.

    <output_dir>/sweeps/<name>/sweep.json       written by the launcher, read here

What its fields mean stands in outputs/README.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

from harness.core.attempts import larger_is_better
from harness.core.settings import UserError

FILE = "sweep.json"


SCHEMA = 1


# What repeats a measurement: runs that differ in nothing else are one group.
REPETITIONS = ("seed", "repeat")


@dataclass(frozen=True)
class Target:
    """The quality whose time is asked for: a field of epochs.jsonl and its value."""

    metric: str
    value: float

    @property
    def smaller_is_better(self) -> bool:
        return not larger_is_better(self.metric) or self.metric.endswith("_loss")

    def reached(self, value: float) -> bool:
        return value <= self.value if self.smaller_is_better else value >= self.value

    def __str__(self) -> str:
        return f"{self.metric} at {'most' if self.smaller_is_better else 'least'} {self.value:g}"


@dataclass(frozen=True)
class PlannedRun:
    label: dict[str, Any]
    path: str | None  # below the output folder; None: was skipped before it had a name
    skipped: str | None


@dataclass(frozen=True)
class Sweep:
    file: Path
    name: str
    question: str
    tiny: bool
    command: str | None
    axes: tuple[str, ...]
    baseline: dict[str, Any] | None
    target: Target | None
    hold: str | None
    lr_rule: str | None
    columns: tuple[str, ...] | None
    per_node: bool
    runs: tuple[PlannedRun, ...]

    @property
    def folder(self) -> Path:
        return self.file.parent

    @property
    def output_dir(self) -> Path:
        return self.folder.absolute().parents[1]


def sweep_file(path: Path) -> Path | None:
    """The sweep.json that a path names, itself or as the folder it lies in."""
    if path.is_file():
        return path
    return path / FILE if (path / FILE).is_file() else None


def read_sweep(path: str | Path) -> Sweep:
    """The sweep of a folder, checked; whatever is wrong with it is said in one line."""
    file = sweep_file(Path(path))
    if file is None:
        raise UserError(f"{path}: there is no {FILE}; a sweep writes it to <output_dir>/sweeps/")
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is not readable as JSON: {error}") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else None
        raise UserError(
            f"{file} was written with schema {found}, this reads {SCHEMA}: "
            "read it with the version of this project that wrote it"
        )
    try:
        return _checked(file, content)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def _checked(file: Path, content: Mapping[str, Any]) -> Sweep:
    listed = _field(content, "runs", list)
    runs = tuple(_run(f"runs[{n}]", entry) for n, entry in enumerate(listed))
    if not runs:
        raise UserError("runs: is empty, so there is nothing to show")
    axes = _axes(_field(content, "axes", list), runs)
    _check_paths(runs, axes)
    columns = _field(content, "columns", list, None)
    name = _field(content, "name", str, file.absolute().parent.name)
    return Sweep(
        file=file,
        name=name,
        question=_field(content, "question", str, None) or name,
        tiny=_field(content, "tiny", bool, False),
        command=_field(content, "command", str, None),
        axes=axes,
        baseline=_baseline(_field(content, "baseline", dict, None), axes),
        target=_target(_field(content, "target", dict, None)),
        hold=_field(content, "hold", str, None),
        lr_rule=_field(content, "lr_rule", str, None),
        columns=None if columns is None else tuple(str(column) for column in columns),
        per_node=_field(content, "per_node", bool, False),
        runs=runs,
    )


_NEEDED = object()


KINDS = {str: "a text", bool: "true or false", list: "a list", dict: "a mapping"}


def _field(content: Mapping[str, Any], name: str, kind: type, default: Any = _NEEDED) -> Any:
    value = content.get(name)
    if value is None:
        if default is _NEEDED:
            raise UserError(f"{name}: is missing")
        return default
    if not isinstance(value, kind):
        raise UserError(f"{name}: must be {KINDS[kind]}, not {value!r}")
    return value


def is_number(value: Any) -> TypeGuard[float]:
    """Unknown is null; what is neither a number nor finite is unknown."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _run(where: str, entry: Any) -> PlannedRun:
    if not isinstance(entry, dict):
        raise UserError(f"{where}: must be a mapping, not {entry!r}")
    try:
        label = _field(entry, "label", dict)
        skipped = _field(entry, "skipped", str, None)
        path = _field(entry, "path", str, _NEEDED if skipped is None else None)
        for name, value in label.items():
            if not isinstance(value, (str, int, float, type(None))):
                raise UserError(f"label.{name}: must be a text, a number or null, not {value!r}")
        if path is not None:
            _check_inside(path)
    except UserError as error:
        raise UserError(f"{where}.{error}") from None
    return PlannedRun(label, path, skipped)


def _check_inside(path: str) -> None:
    """A file from elsewhere must not make this read other folders than those of its runs."""
    parts = PurePosixPath(path).parts
    if not parts or ".." in parts or PurePosixPath(path).is_absolute():
        raise UserError(f"path: {path} leads out of the folder that holds the runs")


def _axes(named: list[Any], runs: tuple[PlannedRun, ...]) -> tuple[str, ...]:
    """The axes named, then whatever else labels hold: no difference between runs goes unseen."""
    axes = [str(axis) for axis in named]
    axes += [name for run in runs for name in run.label]
    return tuple(dict.fromkeys(axis for axis in axes if axis not in REPETITIONS))


def _check_paths(runs: tuple[PlannedRun, ...], axes: tuple[str, ...]) -> None:
    """One record under two seeds would be a measurement with a spread of nothing."""
    seen = set()
    for run in runs:
        key = (run.path, group_key(run.label, axes))
        if run.path is not None and key in seen:
            raise UserError(f"runs: {run.path} stands twice in one group: one record, one run")
        seen.add(key)


def group_key(label: Mapping[str, Any], axes: tuple[str, ...]) -> tuple[Any, ...]:
    """Equal for runs of one group. True is not 1 here, although Python says so."""
    return tuple((isinstance(label.get(axis), bool), label.get(axis)) for axis in axes)


def _baseline(named: dict[str, Any] | None, axes: tuple[str, ...]) -> dict[str, Any] | None:
    for axis in named or {}:
        if axis not in axes:
            raise UserError(f"baseline: {axis} does not vary here: {', '.join(axes) or 'nothing'}")
    return named or None


def parse_target(text: str) -> Target:
    """accuracy=0.9, as on the command line."""
    metric, _, value = text.partition("=")
    try:
        return Target("eval_loss" if metric == "loss" else metric, float(value))
    except ValueError:
        raise UserError(f"--target {text}: expected METRIC=VALUE, such as accuracy=0.9") from None


def _target(named: dict[str, Any] | None) -> Target | None:
    if named is None:
        return None
    metric, value = named.get("metric"), named.get("value")
    if not isinstance(metric, str):
        raise UserError(f"target.metric: must be a text, not {metric!r}")
    if not is_number(value):
        raise UserError(f"target.value: must be a number, not {value!r}")
    return Target("eval_loss" if metric == "loss" else metric, float(value))

"""A sweep file: read and checked as a whole; every mistake is shown with its line.

    # Question: which batch per GPU is fastest, and what does it cost in quality?
    # Hypothesis: 16, at a cost in quality. Written down before the runs
    script: [bert, vit]           one or both
    settings: {epochs: 3}         any flag of the script; bert: and vit: hold those of one script
    grid:                         every combination of these
      setup: [1_1, 1_4, 2_2]
      per_gpu_batch: [1, 4, 16]
    runs:                         points of several settings each, crossed with the grid
      - {strategy: ddp, precision: fp32}
      - {strategy: fsdp, precision: bf16}
    exclude:                      points that are left out
      - {setup: 2_2, per_gpu_batch: 1}
    seeds: [2, 4, 42]             each point is measured with each of them
    order: [seed, setup]          outermost first; without it seeds are outermost
    baseline: {setup: 1_1}        what the tables compare with
    target: {metric: accuracy, value: 0.9}
    expect:                       what the hypothesis says in numbers, to be judged
      - {of: {per_gpu_batch: 4}, measure: accuracy, at_least: -1}
    hold: per_gpu_batch           or effective_batch: per_gpu_batch follows from the baseline's
    lr_rule: none                 or linear, sqrt: lr is the baseline's, scaled by effective batch
    columns: [accuracy, wall_s]   of the table, where the usual ones do not fit
    per_node: false               true: the table has a row for each node
    if_installed: {timm: {...}}   settings to use where a package is installed
    tiny: {...}                   with --tiny each key in here replaces the one above

`link` is an axis too: none, 20ms/200mbit, rack, {places: [2, 1], ...} (core/links.py).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.core.command_line import field_of, reading_yaml, texts_of, typed
from harness.core.identity import REPETITIONS
from harness.core.links import link_of
from harness.core.records.summary import QUALITY_FIELDS, beyond_a_share
from harness.core.schema.environment import BY_RATIO, EXPECTED_MEASURES
from harness.core.settings import UserError, nearest, parse_setup, with_space
from harness.core.strategies import OF_ONE_STRATEGY, is_off
from harness.core.tasks import TASKS, names, task_of

SHIPPED = Path("experiments")
HEADER = re.compile(r"^#\s*(Question|Hypothesis|Command|Needs|Time|Runs):\s*(.*)$")
STRATEGY = "strategy"
HOLDS = ("per_gpu_batch", "effective_batch")
LR_RULES = ("none", "linear", "sqrt")
KEYS = (
    "script", "settings", "if_installed", "grid", "runs", "exclude", "seeds",
    "order", "baseline", "target", "expect", "hold", "lr_rule", "columns", "per_node",
)  # fmt: skip
EXPECT_KEYS = ("of", "against", "measure", "at_least", "at_most")
# Settings that belong on the command line of the sweep.
NOT_IN_A_FILE = {"output_dir": "--output_dir", "tiny": "--tiny", "rerun": "--rerun all"}

COMMENT = "it is a comment above the keys, as # {}: ..."
MISPLACED = {
    "link": "it belongs under grid (link: [1ms, 20ms]), settings (for all runs) or runs",
    **{name: COMMENT.format(name.title()) for name in ("question", "hypothesis")},
}

MOST_PARTS = 100_000  # of a file, with each alias in full

Point = dict[str, Any]  # settings by name, typed; link as a Link or Network
Where = tuple[Any, ...]  # keys and indices that lead to a part of the file


class YamlSource:
    """A file's content with all values as text, and the line number of each part.

    As text, because YAML would read the set-up 1_1 as the number 11.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: dict[Where, int] = {}
        self.parts = 0
        self.around: list[Any] = []  # the nodes that enclose the one being read
        root = _yaml(path)
        content = self._plain(root, ()) if root is not None else None
        if not isinstance(content, dict):
            raise UserError(f"{path}: expected keys such as script and grid, found none")
        self.content: dict[str, Any] = content

    def wrong(self, where: Where, message: object) -> UserError:
        while where and where not in self.lines:
            where = where[:-1]
        line = f" line {self.lines[where]}" if where in self.lines else ""
        return UserError(f"{self.path}{line}: {message}")

    def use_tiny(self) -> None:
        """Replace keys of the file by the keys of the same name below `tiny`."""
        inner = self.content["tiny"]
        self.content |= inner
        lines = self.lines.items()
        kept = {where: line for where, line in lines if not where or where[0] not in inner}
        self.lines = kept | {where[1:]: line for where, line in lines if where[:1] == ("tiny",)}

    def _plain(self, node: Any, path: Where) -> Any:
        """Convert a YAML node to dicts, lists and texts, and note their lines."""
        self.lines.setdefault(path, node.start_mark.line + 1)
        self.parts += 1
        # An alias may contain itself, or nested aliases whose number doubles at each level.
        if node in self.around:
            raise self.wrong(path, "an alias (*) stands inside what it stands for")
        if self.parts > MOST_PARTS:
            raise self.wrong(path, f"more than {MOST_PARTS:,} values: are aliases (*) nested?")
        self.around.append(node)
        try:
            return self._content(node, path)
        finally:
            self.around.pop()

    def _content(self, node: Any, path: Where) -> Any:
        import yaml  # not at the top: `doctor` runs without packages

        if isinstance(node, yaml.MappingNode):
            content: dict[str, Any] = {}
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise self.wrong(path, "expected a name before each colon (are { } doubled?)")
                where = (*path, key.value)
                self.lines[where] = key.start_mark.line + 1
                if key.value in content:
                    raise self.wrong(where, f"{key.value} is given twice")
                if value.value == "" and (spaced := with_space(key.value)):  # {lr:1}
                    raise self.wrong(where, spaced)
                content[key.value] = self._plain(value, where)
            return content
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(v, (*path, i)) for i, v in enumerate(node.value)]
        return node.value


def _yaml(path: Path) -> Any:
    """The root node of the file; None where it is empty."""
    import yaml

    if not path.exists():
        raise UserError(f"{path} does not exist{_nearest_file(path)}")
    if path.is_dir():
        raise UserError(f"{path} is a folder: sweep takes a file, such as experiments/demo.yaml")
    with reading_yaml(str(path)):
        return yaml.compose(path.read_text("utf-8"), Loader=yaml.BaseLoader)


def header_of(path: Path) -> dict[str, str]:
    """The header comment: question, hypothesis, command, needs, time, runs.

    Each entry continues over further lines until an empty one."""
    header: dict[str, str] = {}
    last = ""
    for line in path.read_text("utf-8").strip().splitlines():
        if not line.startswith("#"):
            break
        if match := HEADER.match(line):
            last = match[1].lower()
            header[last] = match[2].strip()
        elif not (more := line.strip("# ")):
            last = ""
        elif last:
            header[last] += f" {more}"
    return header


def _nearest_file(path: Path) -> str:
    """A hint at a file with a similar name in the same folder or in experiments/."""
    folders = (folder for folder in (SHIPPED, path.parent) if folder.is_dir())
    files = {file.stem: file for folder in folders for file in folder.glob("*.yaml")}
    near = difflib.get_close_matches(path.stem, files, n=1)
    return f"; did you mean {files[near[0]]}?" if near else ""


@dataclass(frozen=True)
class Sweep:
    """The content of a sweep file, with typed values."""

    name: str
    file: str
    scripts: tuple[str, ...]
    settings: dict[str, Point]  # by script
    grid: dict[str, list[Any]]
    runs: list[Point]
    exclude: list[Point] = field(default_factory=list)
    order: tuple[str, ...] = ()
    baseline: Point | None = None
    target: dict[str, Any] | None = None
    expect: list[dict[str, Any]] = field(default_factory=list)  # each with all of EXPECT_KEYS
    hold: str = "per_gpu_batch"
    lr_rule: str = "none"
    columns: list[str] | None = None
    per_node: bool = False
    tiny: bool = False
    header: dict[str, str] = field(default_factory=dict)


def load(path: Path, tiny: bool = False, installed: Callable[[str], object] | None = None) -> Sweep:
    """Read a file and check all of it; UserError names the line and the expected value."""
    source = YamlSource(path)
    small = source.content.setdefault("tiny", {})
    if not isinstance(small, dict):
        raise source.wrong(("tiny",), "tiny: expected keys that replace those above")
    for part in (source.content, small):  # read mine.py as mine
        if "script" in part:
            part["script"] = _script_names(part["script"])
    own = (*(source.content.get("script") or ()), *(small.get("script") or ()))
    known = (*KEYS, *dict.fromkeys((*TASKS, *own)), "tiny")
    for where in (*((key,) for key in source.content), *(("tiny", key) for key in small)):
        if where[-1] not in known or where == ("tiny", "tiny"):
            hint = MISPLACED.get(str(where[-1])) or nearest(where[-1], known)
            raise source.wrong(where, f"unknown key {where[-1]}: {hint}")
    if tiny:
        source.use_tiny()
    return _Reader(source, tiny, installed or find_spec).sweep()


def _values_of(grid: dict[str, list[Any]]) -> list[Point]:
    return [{name: value} for name, values in grid.items() for value in values]


def _script_names(named: Any) -> list[str]:
    scripts = named if isinstance(named, list) else [named]
    return [str(script).removesuffix(".py") for script in scripts]


@dataclass
class _Reader:
    """Checks the keys one by one and converts their values."""

    source: YamlSource
    tiny: bool
    installed: Callable[[str], object]
    points: list[Point] = field(default_factory=list)  # what grid and runs vary

    @property
    def content(self) -> dict[str, Any]:
        return self.source.content

    def sweep(self) -> Sweep:
        scripts = self.scripts
        grid = self._grid()
        runs = [self._point(scripts, run, where) for run, where in self._entries("runs")]
        settings = {script: self._settings(script) for script in scripts}
        if "seeds" in self.content:
            if "seed" in grid:
                raise self._wrong("seeds", "seed is in grid already")
            if not isinstance(seeds := self.content["seeds"], list):
                raise self._wrong("seeds", f"seeds {seeds}: write [{seeds}] for this seed alone, "
                                  "or [1, 2, 3] for three")  # fmt: skip
            grid["seed"] = self._values("seed", seeds, ("seeds",))
        varied = {"script", *grid, *(key for run in runs for key in run)}
        if twice := sorted(set(grid) & {key for run in runs for key in run}):
            raise self._wrong("runs", f"{twice[0]} is in grid already")
        for script in scripts:
            if twice := sorted(set(settings[script]) & set(grid)):
                raise self._wrong("grid", f"{twice[0]} is in settings already")
        self.points = [*_values_of(grid), *runs]
        return Sweep(
            name=self.source.path.stem + ("-tiny" if self.tiny else ""),
            file=str(self.source.path),
            scripts=scripts,
            settings=settings,
            grid=grid,
            runs=runs,
            baseline=self._baseline(),
            target=self._target(),
            exclude=[self._point(scripts, e, where) for e, where in self._entries("exclude")],
            order=self._order(varied),
            expect=[self._expected(entry, where) for entry, where in self._entries("expect")],
            hold=self._choice("hold", HOLDS),
            lr_rule=self._choice("lr_rule", LR_RULES),
            columns=self._columns(),
            per_node=self._choice("per_node", ("false", "true")) == "true",
            tiny=self.tiny,
            header=header_of(self.source.path),
        )

    def _wrong(self, key: str, message: object, *deeper: Any) -> UserError:
        return self.source.wrong((key, *deeper), message)

    @cached_property
    def scripts(self) -> tuple[str, ...]:
        """All scripts that the file names; UserError if one belongs to no task."""
        named = self.content.get("script")
        if named is None:
            raise self._wrong("script", f"script is missing: one or several of {names()}")
        scripts = tuple(named)
        for script in scripts:
            try:
                task_of(script)
            except UserError as error:
                raise self._wrong("script", error) from None
        if not scripts or len(set(scripts)) < len(scripts):
            raise self._wrong("script", "name each script once")
        return scripts

    def _settings(self, script: str) -> Point:
        point: Point = {}
        for key in ("settings", script):
            point |= self._point((script,), self.content.get(key) or {}, (key,))
        packages = self.content.get("if_installed") or {}
        if not isinstance(packages, dict):
            raise self._wrong("if_installed", "expected a package and its settings")
        for package, entry in packages.items():
            extra = self._point((script,), entry, ("if_installed", package))
            if self.installed(package):
                point |= extra
        return point

    def _point(self, scripts: tuple[str, ...], entry: Any, where: Where) -> Point:
        """Typed names and values of one point, which may include the script."""
        if not isinstance(entry, dict):
            found = with_space(str(entry)) or f"expected names and values, found {entry!r}"
            raise self.source.wrong(where, found)
        point: Point = {}
        if "script" in entry:
            if entry["script"] not in scripts:
                raise self.source.wrong(where, f"script {entry['script']} is not one of {scripts}")
            scripts = (entry["script"],)
            point["script"] = entry["script"]
        for name, value in entry.items():
            if name == "script":
                continue
            key, typed_value = self._typed(scripts, name, value, (*where, name))
            if key in point:
                raise self.source.wrong((*where, name), f"{key} is given twice")
            point[key] = typed_value
        return point

    def _typed(
        self, scripts: tuple[str, ...], name: str, value: Any, where: Where
    ) -> tuple[str, Any]:
        """The setting that a name stands for, and its typed value."""
        name = name.replace("-", "_")
        if name in NOT_IN_A_FILE:
            flag = NOT_IN_A_FILE[name]
            raise self.source.wrong(where, f"{name} is given on the command line: {flag}")
        if value in ("null", "~"):
            raise self.source.wrong(where, f"{name}: {value} is no value: leave {name} out")
        try:
            if name == "link":
                return "link", link_of(value)
            ((setting, typed_value),) = {
                (field_of(script, name), typed(name, field_of(script, name), texts_of(value)))
                for script in scripts
            }
            if setting == "setup":
                parse_setup(typed_value)
        except UserError as error:
            raise self.source.wrong(where, error) from None
        return setting or name, typed_value

    def _grid(self) -> dict[str, list[Any]]:
        axes = self.content.get("grid") or {}
        if not isinstance(axes, dict):
            raise self._wrong("grid", "expected names and lists of values")
        grid: dict[str, list[Any]] = {}
        for name, values in axes.items():
            first = values[0] if isinstance(values, list) and values else values
            key, _ = self._typed(self.scripts, name, first, ("grid", name))
            if key in grid:
                raise self._wrong("grid", f"{key} is given twice", name)
            grid[key] = self._values(name, values, ("grid", name))
        return grid

    def _values(self, name: str, values: Any, where: Where) -> list[Any]:
        """The typed values of an axis; UserError if one is given twice."""
        axis: list[Any] = []
        for number, value in enumerate(values if isinstance(values, list) else [values]):
            _, typed_value = self._typed(self.scripts, name, value, (*where, number))
            if typed_value in axis:
                raise self.source.wrong((*where, number), f"{name} {value} is given twice")
            axis.append(typed_value)
        if not axis:
            raise self.source.wrong(where, f"{name} has no values")
        return axis

    def _entries(self, key: str) -> list[tuple[Any, Where]]:
        entries = self.content.get(key) or []
        if not isinstance(entries, list):
            raise self._wrong(key, f"{key} is a list of points such as - {{setup: 1_1}}")
        return [(entry, (key, number)) for number, entry in enumerate(entries)]

    def _order(self, varied: set[str]) -> tuple[str, ...]:
        order = self.content.get("order") or []
        order = order if isinstance(order, list) else [order]
        for number, name in enumerate(order):
            if not isinstance(name, str) or name not in varied:
                hint = nearest(str(name), sorted(varied))
                raise self._wrong("order", f"unknown key {name}: {hint}", number)
        return tuple(order)

    def _baseline(self) -> Point | None:
        if "baseline" not in self.content:
            return None
        return self._variant(self.content["baseline"], ("baseline",))

    def _variant(self, entry: Any, where: Where) -> Point:
        """A point that distinguishes some runs from others, without flags of its strategy that it
        turns off although no run does so by name: such runs name the strategy alone.
        """
        variant = self._point(self.scripts, entry, where)
        varied = {name for point in self.points for name in point} - {*REPETITIONS}
        for name in variant:
            if name not in varied and (name != "script" or len(self.scripts) == 1):
                text = f"{name} does not vary: {where[-1]} names values of grid or runs"
                raise self.source.wrong(where, text)
        unnamed = {
            name for name, value in variant.items()
            if STRATEGY in variant and name in OF_ONE_STRATEGY and is_off(value)
            and all(point.get(name) != value for point in self.points)
        }  # fmt: skip
        return {name: value for name, value in variant.items() if name not in unnamed}

    def _expected(self, entry: Any, where: Where) -> dict[str, Any]:
        """One entry of `expect`; keys that it does not give are None."""
        if isinstance(entry, dict) and (unknown := sorted(entry.keys() - {*EXPECT_KEYS})):
            hint = nearest(str(unknown[0]), EXPECT_KEYS)
            raise self.source.wrong((*where, unknown[0]), f"unknown key {unknown[0]}: {hint}")
        if not isinstance(entry, dict) or not {"of", "measure"} <= entry.keys():
            keys = "{of: {setup: 1_2}, measure: accuracy, at_least: -1}; against and at_most beside"
            raise self.source.wrong(where, f"expected {keys}")
        measure = str(entry["measure"])
        if measure not in EXPECTED_MEASURES:
            hint = nearest(measure, EXPECTED_MEASURES)
            raise self.source.wrong((*where, "measure"), f"unknown measure {measure}: {hint}")
        if measure.startswith("tta_") and self.content.get("target") is None:
            raise self.source.wrong((*where, "measure"), f"{measure} needs a target: there is none")
        if "against" not in entry and "baseline" not in self.content:
            raise self.source.wrong(where, "there is no baseline: name against, too")
        variants = {
            key: self._planned_variant(entry[key], (*where, key)) if key in entry else None
            for key in ("of", "against")
        }
        return {**variants, "measure": measure, **self._bounds(entry, measure in BY_RATIO, where)}

    def _planned_variant(self, entry: Any, where: Where) -> Point:
        variant = self._variant(entry, where)
        if not variant:
            raise self.source.wrong(where, f"{where[-1]} names no value of grid or runs")
        for name, value in variant.items():
            if name != "script" and all(point.get(name) != value for point in self.points):
                raise self.source.wrong((*where, name), f"no run has {name} {value}")
        return variant

    def _bounds(self, entry: dict[str, Any], is_ratio: bool, where: Where) -> dict[str, Any]:
        bounds: dict[str, float | None] = {"at_least": None, "at_most": None}
        for key in bounds.keys() & entry.keys():
            try:
                bound = float(entry[key])
            except (TypeError, ValueError):
                bound = math.nan
            bounds[key] = bound
            if not math.isfinite(bound) or (is_ratio and bound <= 0):
                what = "a ratio above 0" if is_ratio else "a number of percentage points"
                raise self.source.wrong((*where, key), f"{key} {entry[key]}: expected {what}")
        low, high = bounds.values()
        if (low is None and high is None) or (low is not None and high is not None and low > high):
            raise self.source.wrong(where, "give at_least, at_most or both, the smaller one first")
        return bounds

    def _target(self) -> dict[str, Any] | None:
        entry = self.content.get("target")
        if entry is None:
            return None
        try:
            metric, value = str(entry["metric"]), float(entry["value"])
        except (TypeError, KeyError, ValueError):
            raise self._wrong(
                "target", "expected {metric: accuracy, value: 0.9} or the like"
            ) from None
        if metric not in QUALITY_FIELDS and TASKS.keys() >= {*self.scripts}:
            hint = nearest(metric, QUALITY_FIELDS)
            raise self._wrong("target", f"unknown metric {metric}: {hint}", "metric")
        if problem := beyond_a_share(metric, value):
            raise self._wrong("target", problem, "value")
        return {"metric": metric, "value": value}

    def _choice(self, key: str, choices: tuple[str, ...]) -> str:
        value = self.content.get(key, choices[0])
        if value not in choices:
            raise self._wrong(key, f"{key} {value}: expected one of {', '.join(choices)}")
        return str(value)

    def _columns(self) -> list[str] | None:
        columns = self.content.get("columns")
        if columns is not None and not (columns and isinstance(columns, list)):
            raise self._wrong("columns", "expected a list of names")
        return columns

"""One side of a comparison: runs that differ in nothing but their seed, wherever they lie.

outputs/vit/1_1/RUN                     one run
outputs/vit/1_1                         all runs below a folder
outputs:script=vit,setup=1_1,lr=0.001   those with these settings
outputs/sweeps/NAME:setup=1_1           those of a sweep with these values in their label
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.core.identity import SHOWN_ONLY, number
from harness.core.links import Link
from harness.core.records import FINISHED, RunFolder, find_runs
from harness.core.settings import UserError, flag_fields
from harness.read.records.loading import settings_of
from harness.read.records.sweep_runs import SweepRun, read_record
from harness.read.records.sweeps import REPETITIONS, Target, read_sweep, sweep_file

# A seed that nobody has used yet is asked for by its number.
SEEDS = range(1, 100)


@dataclass(frozen=True)
class Record:
    """A run with the settings that can change its result."""

    run: SweepRun
    settings: dict[str, Any]
    imported: dict[str, Any]
    label: dict[str, Any]  # as its sweep calls it: 2_1 where the set-up has a tag for the link

    @property
    def path(self) -> Path:
        return Path(str(self.run.path))

    @property
    def seed(self) -> int | None:
        return self.run.label.get("seed")


@dataclass(frozen=True)
class Side:
    """Runs of one kind."""

    name: str  # A or B
    word: str
    records: tuple[Record, ...]
    target: Target | None = None

    @property
    def finished(self) -> list[Record]:
        return [record for record in self.records if record.run.state == FINISHED]

    @property
    def settings(self) -> dict[str, Any]:
        return self.records[0].settings

    def seeds(self) -> list[int]:
        return sorted({r.seed for r in self.finished if r.seed is not None})

    def about(self) -> str:
        """In a few words what it is."""
        machines = dict.fromkeys(str(r.run.machine or "unknown machine") for r in self.records)
        runs = f"{len(self.finished)} finished run{'' if len(self.finished) == 1 else 's'}"
        if len(self.finished) < len(self.records):
            runs += f" of {len(self.records)}"
        seeds = f", seed{'s'[: len(self.seeds()) > 1]} {_listed(self.seeds())}"
        return f"{self.word} ({runs}{seeds if self.seeds() else ''}, {' and '.join(machines)})"


def read_side(name: str, word: str, target: Target | None) -> Side:
    """The runs that a word of the command line names; they must be of one kind."""
    records, target = read_records(word, target)
    side = Side(name, word, tuple(records), target)
    _check_one_kind(side)
    return side


def read_records(word: str, target: Target | None) -> tuple[list[Record], Target | None]:
    """All runs of a word, and the target of their sweep where there is one and none is given."""
    path, wanted = _parsed(word)
    if not path.exists():
        raise UserError(f"{path}: there is no such folder")
    if sweep_file(path) is not None:
        sweep = read_sweep(path)
        target = target or sweep.target
        planned = [run for run in sweep.runs if run.path is not None]
        places = [(RunFolder(sweep.output_dir / str(run.path)), run.label) for run in planned]
    else:
        places = [(folder, {}) for folder in find_runs(path)]
    records = [record_of(f, label, target) for f, label in places if f.settings.exists()]
    if not records:
        raise UserError(f"{path}: there is no record of a run below it")
    return _selected(path, records, wanted), target


def _parsed(word: str) -> tuple[Path, dict[str, str]]:
    if Path(word).exists() or "=" not in word:
        return Path(word), {}
    folder, colon, pairs = word.rpartition(":")
    wanted = {}
    for pair in pairs.split(","):
        name, equals, value = pair.partition("=")
        if not (folder and colon and name and equals and value):
            raise UserError(f"{word}: expected FOLDER:NAME=VALUE,NAME=VALUE")
        wanted[name.strip()] = value.strip()
    return Path(folder), wanted


def record_of(folder: RunFolder, label: dict[str, Any], target: Target | None) -> Record:
    found = settings_of(folder)
    passed = found.get("trainer") or {}
    fields = {n: f for n, f in flag_fields().items() if f.metadata["identity"] and n != "tiny"}
    # What a record does not hold is from before the flag was there: its default was what ran.
    known = {name: found.get(name, f.default) for name, f in fields.items()}
    run = read_record(
        folder, {"seed": known["seed"], "repeat": known["repeat"]}, str(folder.path), target
    )
    settings = {
        "script": found.get("script"),
        **{name: value for name, value in known.items() if name not in REPETITIONS},
        **{f"trainer {n}": v for n, v in passed.items() if n not in SHOWN_ONLY},
        "link": _link(run.environment),
    }
    # A label may say more than the settings do.
    extra = {n: v for n, v in label.items() if n not in settings and n not in REPETITIONS}
    return Record(run, {**settings, **extra}, found.get("imported") or {}, label)


def _link(environment: dict[str, Any]) -> str | None:
    """The link that was asked for, as it is written on the command line."""
    asked = (environment.get("launch") or {}).get("link")
    if not isinstance(asked, dict):
        return None if asked is None else str(asked)
    fields = ("delay_ms", "rate_mbit", "jitter_ms", "loss")
    return str(Link(**{name: asked[name] for name in fields if asked.get(name) is not None}))


def _selected(path: Path, records: list[Record], wanted: dict[str, str]) -> list[Record]:
    for name, text in wanted.items():
        known = {**records[0].settings, **records[0].run.label, **records[0].label}
        if name not in known:
            given = sorted(n for n, v in known.items() if v is not None)
            raise UserError(f"{path}: its runs have no {name}; they have {', '.join(given)}")
        values = dict.fromkeys(_text(_value(record, name)) for record in records)
        records = [record for record in records if _is(_value(record, name), text)]
        if not records:
            raise UserError(f"{path}: no run with {name}={text}; there is {', '.join(values)}")
    return records


def _value(record: Record, name: str) -> Any:
    for known in (record.label, record.run.label):
        if name in known:
            return known[name]
    return record.settings.get(name)


def _text(value: Any) -> str:
    return "none" if value is None else number(value)


def _is(value: Any, text: str) -> bool:
    """Numbers by their value: 1e-3 is 0.001."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(text) == value
        except ValueError:
            return False
    return _text(value).lower() == text.lower()


def _check_one_kind(side: Side) -> None:
    """A mean over runs of unlike settings would be a figure of nothing."""
    for name in dict.fromkeys(name for record in side.records for name in record.settings):
        values = list(dict.fromkeys(_text(record.settings.get(name)) for record in side.records))
        if len(values) > 1:
            raise UserError(
                f"{side.name}, {side.word}: its runs differ in {name} ({', '.join(values)}): "
                f"name one kind, for example {side.word}{',' if '=' in side.word else ':'}"
                f"{name}={_text(_value(side.records[0], name))}"
            )


def differing(one: Side, other: Side) -> Iterator[tuple[str, str, str]]:
    """(setting, its value on either side), where two sides differ; what is unknown is left out."""
    for name in dict.fromkeys((*one.settings, *other.settings)):
        values = one.settings.get(name), other.settings.get(name)
        unknown = any(
            value is None and side.records[0].imported
            for value, side in zip(values, (one, other), strict=True)
        )
        if values[0] != values[1] and not unknown:
            yield name, _text(values[0]), _text(values[1])


def command_for_seeds(side: Side, how_many: int) -> str | None:
    """What measures more seeds; None where only others can, as of imported runs."""
    record = side.records[0]
    command = record.run.environment.get("command")
    if not command or record.imported:
        return None
    script, *flags = _without_seed(shlex.split(command))
    if not any(flag.startswith("--o") for flag in flags) and len(record.path.parents) > 2:
        flags += ["--output_dir", str(record.path.parents[2])]
    taken = {r.seed for r in side.records}
    new = [str(seed) for seed in SEEDS if seed not in taken][:how_many]
    words = [*_launcher(record), script, *flags]
    return f"for seed in {' '.join(new)}; do {shlex.join(words)} --seed $seed; done"


def _without_seed(words: list[str]) -> list[str]:
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word == "--seed":
            skip = True
        elif not word.startswith("--seed="):
            kept.append(word)
    return kept


def _launcher(record: Record) -> list[str]:
    environment = record.run.environment
    nodes, per_node = environment.get("nodes") or 1, environment.get("processes_per_node") or 1
    if record.settings["strategy"] == "hivemind" or nodes * per_node == 1:
        start = ["python"]
    elif nodes == 1:
        return ["torchrun", "--standalone", f"--nproc_per_node={per_node}"]
    else:
        start = ["torchrun", *([f"--nproc_per_node={per_node}"] if per_node > 1 else [])]
    launch = environment.get("launch") or {}
    if nodes > 1 and launch.get("launcher") == "netns":
        link = ["--link", record.settings["link"]] if record.settings["link"] else []
        return ["python", "-m", "harness", "nodes", str(nodes), *link, "--", *start]
    if nodes > 1:
        where = [f"--nnodes={nodes}", "--node_rank=RANK", "--master_addr=ADDRESS"]
        return [start[0], *where, *start[1:]]
    return start


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values))

"""Runs and groups that an argument of the command line selects, wherever they lie.

outputs/vit/1_1/RUN                     one run
outputs/vit/1_1                         all runs below a folder
outputs:script=vit,setup=1_1,lr=0.001   those with these settings
outputs:setup=1_1,threads=2             those whose processes computed with two threads
outputs/sweeps/NAME:setup=1_1           those of a sweep with these values in their label
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from harness.core.identity import number
from harness.core.process import working
from harness.core.records import find_runs, without_collecting
from harness.core.records.walking import as_typed
from harness.core.settings import UserError, flag_fields
from harness.core.strategies import recorded_strategy
from harness.read.labels import counted, listed
from harness.read.records.copies import without_copies
from harness.read.records.groups import Group
from harness.read.records.recorded import (
    UNREADABLE,
    existing,
    is_ours,
    none_readable,
    warn_not_read,
)
from harness.read.records.runs import Run, Target, read_run
from harness.read.records.sweeps import SweepResults, read_all, read_results, read_sweep, sweep_file

# New seeds are requested by their numbers.
SEEDS = range(1, 100)
# As many settings in which runs differ, and values of each, as an error names.
MOST_SETTINGS, MOST_VALUES = 8, 6


class Selected(NamedTuple):
    """The runs of an argument, and the target that was given, else that of their sweep."""

    runs: list[Run]
    target: Target | None
    not_read: tuple[str, ...]  # a line for each run that is not believed, and one for copies


def read_sweep_part(selector: str) -> SweepResults:
    """The sweep that an argument names, or the part of it that it selects."""
    path, conditions = parse_selector(selector)
    return _part(read_sweep(path), path, conditions)


def read_results_part(selector: str) -> SweepResults:
    """The sweep, or all runs below a folder, that an argument names, or the selected part."""
    path, conditions = parse_selector(selector)
    return _part(read_results(path), path, conditions)


def read_all_parts(selector: str) -> tuple[list[SweepResults], list[str]]:
    """Every sweep and task below a folder that has selected runs, reduced to these."""
    path, conditions = parse_selector(selector)
    sweeps, problems = read_all(path)
    parts, refused = [], list[UserError]()
    for sweep in sweeps:
        try:
            parts.append(_part(sweep, path, conditions))
        except UserError as error:
            refused.append(error)
    if not parts:
        raise refused[0]
    return parts, problems


def refuse_part(selector: str, what: str) -> None:
    """UserError, with `what` as advice, if an argument selects only some runs of a folder: files
    beside the records are about all of them.
    """
    if parse_selector(selector)[1]:
        raise UserError(f"{selector}: {what}")


def _part(sweep: SweepResults, path: Path, conditions: Mapping[str, str]) -> SweepResults:
    """The sweep with the selected runs alone; without a baseline if none of them belongs to it."""
    if not conditions:
        return sweep
    part = sweep.only(select(path, sweep.runs, conditions))
    named = (sweep.baseline or {}).items()
    has_baseline = any(named <= run.label.items() for run in part.planned)
    return part if has_baseline else part.against(None)


def read_group(
    name: str, selector: str, target: Target | None, beside: str | None = None,
    command: Sequence[str] = (),
) -> Group:  # fmt: skip
    """The runs that an argument selects; they may differ in nothing but seed and repeat.

    beside: the argument of what they are compared with, to which an error fits its example.
    command: the words after "python -m harness", with {} in place of the argument. The example of
    an error is then that whole command.
    """
    runs, target, not_read = read_selected(selector, target)
    if unlike := settings_that_differ(runs):
        others = list[Run]()
        with suppress(UserError):  # its error comes when that side is read
            others = read_selected(beside, target).runs if beside else others
        raise UserError(f"{name}, {several_kinds(selector, unlike, runs, others, command)}")
    return Group(tuple(runs), name=name, selector=selector, target=target, not_read=not_read)


@without_collecting()
def read_selected(selector: str, target: Target | None) -> Selected:
    """All runs of an argument, each once; those that are not believed are named on stderr."""
    (path, conditions), copies = parse_selector(selector), list[str]()
    if sweep_file(existing(path)) is not None:
        sweep = read_sweep(path)
        target = target or sweep.target
        planned = [run for run in replace(sweep, target=target).runs if run.folder is not None]
        read = [replace(run, path=str(run.recorded_folder.path)) for run in planned]
    else:
        read, copies = runs_below(path, target)
    folders = [run.recorded_folder for run in read]
    runs = [
        run for run, folder in zip(read, folders, strict=True)
        if run.state == UNREADABLE or folder.has(folder.settings)
    ]  # fmt: skip
    if not runs:
        raise UserError(f"{path}: there is no record of a run below it")
    not_read = tuple(f"{run.path}: {run.reason}" for run in runs if run.state == UNREADABLE)
    if len(not_read) == len(runs):
        raise none_readable(not_read)
    not_read = (*not_read, *copies)
    warn_not_read(not_read)
    runs = [run for run in runs if run.state != UNREADABLE]
    return Selected(select(path, runs, conditions), target, not_read)


def runs_below(path: Path, target: Target | None = None) -> tuple[list[Run], list[str]]:
    """All runs of a folder, each once, and a line for copies."""
    folders, copies = without_copies(find_runs(path))
    with working(f"reading {counted(len(folders), 'record')} of {path}"):
        return [read_run(folder, {}, str(folder.path), target) for folder in folders], copies


def describe(group: Group) -> str:
    """The selector of a group, how many runs it has, their seeds and machines."""
    machines = dict.fromkeys(str(run.machine or "unknown machine") for run in group.runs)
    text = counted(len(group.finished), "finished run")
    if len(group.finished) < len(group.runs):
        text += f" of {len(group.runs)}"
    if group.seeds:
        text += f", seed{'s'[: len(group.seeds) > 1]} {', '.join(map(str, group.seeds))}"
    return f"{group.selector} ({text}, {' and '.join(machines)})"


def parse_selector(word: str) -> tuple[Path, dict[str, str]]:
    """The folder that an argument names, and its conditions on the runs below."""
    if Path(word).exists() or "=" not in word:
        return Path(word), {}
    before, _, _ = word.partition("=")  # a value may have colons: strategy=mine.py:Name
    folder, colon, _ = before.rpartition(":")
    pairs = word[len(folder) + 1 :]
    conditions = {}
    for pair in pairs.split(","):
        name, equals, value = pair.partition("=")
        if not (folder and colon and name and equals and value):
            raise UserError(f"{word}: expected FOLDER:NAME=VALUE,NAME=VALUE")
        conditions[name.strip()] = value.strip()
    return Path(folder), conditions


def select(path: Path, runs: Sequence[Run], conditions: Mapping[str, str]) -> list[Run]:
    """The runs with these settings; UserError if there is none."""
    for name, text in conditions.items():
        known = [n for run in runs for n, value in _values(run).items() if value is not None]
        if name not in known and name not in _values(runs[0]):
            names = ", ".join(sorted({*known}))
            if name == "batch":  # of tables, where it is the effective one
                raise UserError(f"{path}: its runs have no batch: select by per_gpu_batch")
            raise UserError(f"{path}: its runs have no {name}; they have {names}")
        values = dict.fromkeys(_text(_values(run).get(name)) for run in runs)
        runs = [run for run in runs if _is(_values(run).get(name), text)]
        if not runs:
            raise UserError(f"{path}: no run with {name}={text}; there is {', '.join(values)}")
    return [*runs]


def _values(run: Run) -> dict[str, Any]:
    """What runs are selected by: labels of the sweep before settings; the machine, and the threads
    of a process, which are no settings.
    """
    seed, repeat = run.repetition
    more = {"seed": seed, "repeat": repeat, "threads": run.threads, "machine": run.machine_kind}
    return {**run.identity, **more, **run.label}


def _text(value: Any) -> str:
    return "none" if value is None else number(value)


def _is(value: Any, text: str) -> bool:
    """Whether a value has this text; numbers are compared by value: 1e-3 is 0.001."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(text) == value
        except ValueError:
            return False
    return _text(value).lower() == text.lower()


def settings_that_differ(runs: Iterable[Run], but: Collection[str] = ()) -> dict[str, list[str]]:
    """Setting -> its values, for each setting in which these runs differ."""
    known = [run.characteristics for run in runs]
    values = {
        name: sorted({_text(each.get(name)) for each in known})
        for name in dict.fromkeys(name for each in known for name in each)
        if name not in but
    }
    return {name: texts for name, texts in values.items() if len(texts) > 1}


def several_kinds(
    selector: str, unlike: Mapping[str, list[str]], among: Sequence[Run],
    beside: Sequence[Run] = (), command: Sequence[str] = (),
) -> str:  # fmt: skip
    """The error that runs differ, with an example that selects one kind of those `among` them that
    have times: the kind that differs least from a run `beside`; of several, the one of most runs.
    """
    texts = [f"{name} ({listed(values, ', ', MOST_VALUES)})" for name, values in unlike.items()]
    among = [run for run in among if run.measures.get("train_samples_per_s")] or among
    names = dict.fromkeys(unlike)
    if len({run.threads for run in among}) > 1:
        names["threads"] = None
    kinds, others = (
        [tuple(_text(_values(run).get(name)) for name in names) for run in runs]
        for runs in (among, beside)
    )
    values = max(kinds, key=lambda kind: (_most_alike(kind, others), kinds.count(kind)))
    # A value with a comma would be read as two.
    can_select = all(value and "," not in value for value in values)
    example = str(among[kinds.index(values)].path)
    if can_select:
        example = selecting(selector, dict(zip(names, values, strict=True)))
    words = [example if word == "{}" else word for word in command]
    example = shlex.join(["python", "-m", "harness", *words] if words else [example])
    return (
        f"{selector}: its runs differ in {listed(texts, ', ', MOST_SETTINGS)}: name one kind, for "
        f"example {example}"
    )


def _most_alike(kind: Sequence[str], others: Iterable[Sequence[str]]) -> int:
    """In how many values a kind agrees with the most similar of the others."""
    return max((sum(map(str.__eq__, kind, other)) for other in others), default=0)


def conditions_of(run: Run, names: Iterable[str]) -> dict[str, str]:
    """Conditions that the run meets; a value with a comma would be read as two."""
    texts = {name: _text(_values(run).get(name)) for name in names}
    return {name: text for name, text in texts.items() if "," not in text}


def selecting(selector: str, conditions: Mapping[str, str]) -> str:
    """The selector, narrowed to those of its runs that have these values."""
    pairs = ",".join(f"{name}={value}" for name, value in conditions.items())
    return f"{selector}{',' if '=' in selector else ':'}{pairs}"


def differing(one: Group, other: Group) -> Iterator[tuple[str, str, str]]:
    """(setting, its value in each group) where these differ. What an imported record does not say
    is left out.
    """
    runs = one.recorded, other.recorded
    for name in dict.fromkeys(name for run in runs for name in run.characteristics):
        values = [run.characteristics.get(name) for run in runs]
        unknown = any(v is None and run.imported for v, run in zip(values, runs, strict=True))
        if values[0] != values[1] and not unknown:
            yield name, _text(values[0]), _text(values[1])


# Every way to name the output folder of a script.
OUTPUT_FLAGS = ["--output_dir", *(f"--{n}" for n in flag_fields()["output_dir"].metadata["names"])]
OWN_OUTPUT = "outputs"  # for runs that must not lie beside published ones


def seeds_for_pairs(one: Group, other: Group, how_many: int) -> list[int]:
    """Seeds for `how_many` more pairs: first those that one side alone has, of the larger side
    before the other, then new ones. What a side tried and did not finish is not tried again.
    """
    larger = max((one, other), key=lambda group: len(group.seeds))
    single = {*one.seeds} ^ {*other.seeds}
    tried = [{run.seed for run in group.runs} for group in (one, other)]
    open_ = single - (tried[0] & tried[1])
    first = sorted(open_, key=lambda seed: (seed not in larger.seeds, seed))
    new = (seed for seed in SEEDS if seed not in tried[0] | tried[1])
    return [*first, *new][:how_many]


def command_for_seeds(group: Group, seeds: Iterable[int]) -> str | None:
    """The command that measures these seeds, with as many threads. None where only others can, as
    for imported runs, or where a script that only calls LogCallback may take no --seed.
    """
    run = group.recorded
    if (words := command_into_its_folder(run, ["--seed"])) is None:
        return None
    return _for_each(seeds, _threads(run) + shlex.join([*_launcher(run), *words]))


def _for_each(seeds: Iterable[int], command: str) -> str:
    return f"for seed in {' '.join(map(str, seeds))}; do {command} --seed $seed; done"


def command_on(
    run: Run, nodes: int, per_node: int, emulated: bool, link: str, *more: str,
    seeds: Sequence[int] = (),
) -> str | None:  # fmt: skip
    """The command that measures the training of a run on other nodes or over another link; None as
    for command_for_seeds(). more: flags that replace those of the run; seeds: instead of its own.
    """
    given = [flag for flag in more if flag.startswith("--")] + ["--seed"] * bool(seeds)
    if (words := command_into_its_folder(run, ["--setup", "--link", *given])) is None:
        return None
    words = [*start_on(nodes, per_node, emulated, link), *words, *more]
    command = _threads(run) + shlex.join(words)
    return _for_each(seeds, command) if seeds else command


def command_into_its_folder(run: Run, without: Sequence[str]) -> list[str] | None:
    """What measured a run, without these flags and --rerun, which was of that time, into the folder
    that the record is in; None where only others can measure it.
    """
    if not run.command or not is_ours(run.settings):
        return None
    script, *flags = (w for w in without_flags(run.command, without) if w != "--rerun")
    path, elsewhere = run.recorded_folder.path, without_flags(flags, OUTPUT_FLAGS)
    named = [word for word in flags if word not in elsewhere]
    # A path of that time, perhaps of another machine: the record's own folder is shorter, and here.
    is_absolute = bool(named) and named[-1].rpartition("=")[2].startswith(("/", "~"))
    if is_published(run):
        flags = [*elsewhere, "--output_dir", OWN_OUTPUT]
    elif (is_absolute or not named) and len(path.parents) > 2:
        flags = [*elsewhere, "--output_dir", str(as_typed(path.parents[2]))]
    return [script, *flags]


def _threads(run: Run) -> str:
    return f"OMP_NUM_THREADS={run.threads} " if run.threads else ""


def is_published(run: Run) -> bool:
    """Whether the record is in an archive: no user's runs belong beside it."""
    folder = run.recorded_folder
    return folder.archived is not None and not folder.path.exists()


def without_flags(words: Iterable[str], flags: Collection[str]) -> list[str]:
    """A command without these flags and their values, as --name VALUE or --name=VALUE."""
    kept, is_value = [], False
    names = {name.replace("-", "_") for name in flags}  # for scripts - and _ are alike
    for word in words:
        name, equals, _ = word.partition("=")
        if is_value:
            is_value = False
        elif name.replace("-", "_") in names:
            is_value = not equals
        else:
            kept.append(word)
    return kept


def _launcher(run: Run) -> list[str]:
    environment = run.environment
    nodes, per_node = environment.get("nodes") or 1, environment.get("processes_per_node") or 1
    if recorded_strategy(run.identity).has_peers or nodes * per_node == 1:
        return ["python"]
    if nodes == 1:
        return ["torchrun", "--standalone", f"--nproc_per_node={per_node}"]
    emulated = (environment.get("launch") or {}).get("launcher") == "netns"
    return start_on(nodes, per_node, emulated, run.identity["link"])


def start_on(nodes: int, per_node: int, emulated: bool, link: str | None) -> list[str]:
    """The words that start processes on several nodes; for real nodes, the words for each node."""
    ranks = [f"--nproc_per_node={per_node}"] if per_node > 1 else []
    if emulated:
        over = ["--link", link] if link else []
        return ["python", "-m", "harness", "nodes", str(nodes), *over, "--", "torchrun", *ranks]
    here = ["--node_rank=RANK_OF_THIS_NODE", "--master_addr=ADDRESS_OF_NODE_0"]
    return ["torchrun", f"--nnodes={nodes}", *here, *ranks]

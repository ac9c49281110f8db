"""Which runs a model is fitted on: of one process and of several on one machine, of one kind."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.core.records import FINISHED
from harness.core.records.walking import as_typed
from harness.core.settings import UserError
from harness.core.strategies import DDP, OF_EXCHANGE, SENT_DIRECTLY, SINGLE
from harness.core.tasks import TASKS
from harness.read.labels import counted
from harness.read.predict.facts import ALIKE, Overrides, missing_facts, shape_of, step_s
from harness.read.records.comparable import THREADS
from harness.read.records.groups import by_key, with_times_that_count
from harness.read.records.processors import by_speed, speed_text
from harness.read.records.recorded import is_ours
from harness.read.records.runs import Run
from harness.read.records.selection import (
    command_into_its_folder,
    conditions_of,
    is_published,
    parse_selector,
    runs_below,
    selecting,
    settings_that_differ,
    several_kinds,
    without_flags,
)
from harness.read.records.sweeps import sweep_file

# Settings in which the runs of one fit may differ: they change the topology, no step's time, or
# are part of the fit.
FREE = (
    "per_gpu_batch", "setup", "link", "strategy", "lr", "epochs", "train_size", "test_size",
    "eval_batch", "rank_dropout", "comm_probe", "tested",
)  # fmt: skip
# Further settings in which a run may differ from those that it is predicted from.
STRATEGY_SETTINGS = (*OF_EXCHANGE, "exchange", "fsdp_shard", "fsdp_offload")
PREDICTED_OVER = (*FREE, *STRATEGY_SETTINGS)
SWITCHES = ("local_updates", "fsdp_offload")  # STRATEGY_SETTINGS whose flags take no value


@dataclass(frozen=True)
class Basis:
    """The runs of a fit, and the others of their kind."""

    singles: list[Run]  # of one process
    runs: list[Run]  # these, and DDP on one machine
    near: list[Run]  # all that were asked for, without others
    others: list[Run]  # those on a processor of another speed
    left_out: int  # disturbed runs, where quiet ones of the same set-up and batch exist
    notes: tuple[str, ...]


def basis_of(selector: str, runs: Sequence[Run], overrides: Overrides) -> Basis:
    """Choose the runs of a fit; UserError, with the missing command, where they are not enough."""
    basis = [run for run in runs if _is_basis(run)]
    singles = [r for r in basis if shape_of(r).ranks == 1 and step_s(r, overrides) is not None]
    if flags := missing_facts(basis, overrides):
        raise UserError(
            f"{selector}: the imported records do not say {', '.join(flags)}: give "
            f"{' '.join(flags.values())}"
        )
    if not singles:
        raise UserError(
            f"{selector}: no finished run of one process. {_how_to_measure_one(selector, runs)}"
        )
    timed = {id(run) for run in singles}
    basis = [run for run in basis if shape_of(run).ranks > 1 or id(run) in timed]
    _check_one_kind(selector, basis, singles)
    _check_threads(selector, runs, basis, singles)
    others = _of_another_speed(runs, singles)
    slower = {id(run) for run in others}
    basis = [run for run in basis if id(run) not in slower]
    counted_ones = _that_count(basis)
    return Basis(
        singles=[run for run in counted_ones if shape_of(run).ranks == 1],
        runs=counted_ones,
        near=[run for run in runs if id(run) not in slower],
        others=others,
        left_out=len(basis) - len(counted_ones),
        notes=tuple(_left_out(others, counted_ones)),
    )


def _how_to_measure_one(selector: str, runs: Sequence[Run]) -> str:
    """The command, and what then selects its run beside the others, where this selector does not:
    a sweep has the runs of its plan alone.
    """
    text = f"Measure one: {missing_command(runs, '1_1', None)}"
    path, conditions = parse_selector(selector)
    is_sweep = sweep_file(path) is not None
    run = next((run for run in runs if run.command and is_ours(run.settings)), None)
    if run is None or is_published(run):  # it is measured elsewhere, or written elsewhere
        return text
    into = run.recorded_folder.path.absolute().parent.with_name("1_1")
    if into.is_relative_to(path.absolute()) and not is_sweep and not conditions:
        return text
    root = as_typed(into.parents[1])
    text += f". Then name {shlex.quote(selecting(str(root), _of_one_fit(root, run)))}"
    more = ", or add setup 1_1 to the sweep's file, under `grid` or `runs`, and sweep again"
    return text + more if is_sweep else text


def _of_one_fit(root: Path, run: Run) -> dict[str, str]:
    """What selects those runs of a folder that a fit with this one takes."""
    names = ["script", *["threads"] * bool(run.threads)]
    alike = conditions_of(run, names)
    runs = [each for each in runs_below(root)[0]
            if _is_basis(each) and conditions_of(each, names) == alike]  # fmt: skip
    names += settings_that_differ(runs, but=PREDICTED_OVER)
    names += ["machine"] * (len({each.machine_kind for each in runs}) > 1)
    return conditions_of(run, names)


def _is_basis(run: Run) -> bool:
    """Whether the model is fitted on this run: DDP or one process, one machine, no --compress."""
    settings = run.identity
    plain = settings.get("compress") in (None, "none")
    known = settings.get("strategy") in (None, SINGLE, DDP)
    return plain and known and is_on_one_machine(run)


def is_on_one_machine(run: Run) -> bool:
    settings = run.identity
    by_backend = settings.get("exchange") not in SENT_DIRECTLY
    if run.state != FINISHED or not by_backend or settings.get("per_gpu_batch") is None:
        return False
    return shape_of(run).nodes == 1 and run.launch.get("packed") is not True


def _that_count(runs: Iterable[Run]) -> list[Run]:
    """Of the runs with the same set-up and batch the quiet ones, or all if none is quiet."""
    alike = by_key(runs, lambda run: (shape_of(run), run.identity["per_gpu_batch"]))
    return [run for those in alike.values() for run in with_times_that_count(those)]


def _of_another_speed(runs: Sequence[Run], singles: Sequence[Run]) -> list[Run]:
    """The runs on processors of another speed than those of the fit: clouds sell several under one
    name. The fit is of the speed of most runs over nodes, else of most runs, among those with a run
    of one process.
    """
    timed = {id(run) for run in singles}
    classes = by_speed(_of_machine(runs, singles[0]))
    with_single = [each for each in classes if any(id(run) in timed for run in each)]
    chosen = max(with_single, key=lambda c: (sum(shape_of(r).nodes > 1 for r in c), len(c)))
    return [run for each in classes if each is not chosen for run in each]


def _of_machine(runs: Iterable[Run], first: Run) -> list[Run]:
    """Finished runs whose calibration is comparable: of its machine, and with as many threads."""
    return [
        run for run in runs
        if run.state == FINISHED and run.machine_kind == first.machine_kind
        and run.threads == first.threads
    ]  # fmt: skip


def _left_out(others: Sequence[Run], basis: Sequence[Run]) -> Iterator[str]:
    if others:
        yield (
            f"left out: {counted(len(others), 'run')} on a processor of {speed_text(others)}; "
            f"under the same name, the others had {speed_text(basis)}"
        )


def _check_one_kind(selector: str, runs: Sequence[Run], singles: Sequence[Run]) -> None:
    machines = sorted({str(run.machine_kind) for run in runs})
    if len(machines) > 1:
        raise UserError(
            f"{selector}: runs of {len(machines)} kinds of machine ({', '.join(machines)}), whose "
            "times do not go together: name a folder with the runs of one"
        )
    if unlike := settings_that_differ(runs, but=FREE):
        # The message proposes the kind of a run of one process, as a prediction needs one.
        raise UserError(several_kinds(selector, unlike, singles))
    facts = {
        name: sorted({str(value) for run in runs if (value := fact(run)) is not None})
        for name, fact in ALIKE.items()
    }
    if texts := [f"{name} ({', '.join(of)})" for name, of in facts.items() if len(of) > 1]:
        raise UserError(
            f"{selector}: its runs differ in {', '.join(texts)}, on which a step's time depends: "
            "name a folder with the runs of one kind"
        )


def _check_threads(
    selector: str, runs: Sequence[Run], basis: Sequence[Run], singles: Sequence[Run]
) -> None:
    """UserError where runs have unlike numbers of threads. Runs over nodes are checked too: they
    tell the time of an evaluation and how much more a step takes than was predicted.
    """
    machine = singles[0].machine_kind
    far = [r for r in runs if r.state == FINISHED and shape_of(r).nodes > 1
           and r.machine_kind == machine]  # fmt: skip
    if len(counts := {THREADS.of(run) for run in (*basis, *far)}) == 1:
        return
    there = Counter(map(THREADS.of, far or basis))
    if both := [run for run in singles if THREADS.of(run) in there]:
        unlike = {"threads": sorted(map(str, counts))}
        raise UserError(f"{several_kinds(selector, unlike, both)} ({THREADS.why})")
    threads = there.most_common(1)[0][0]
    alone = ", ".join(sorted({str(THREADS.of(run)) for run in singles}))
    raise UserError(
        f"{selector}: {THREADS.name}: runs over nodes have {threads}, those of one process "
        # A run's name does not hold its threads: --rerun, as it may be there already.
        f"{alone}: {missing_command(far, '1_1', None)} --rerun, then name "
        f"{selecting(selector, {'threads': str(threads)})}"
    )


def missing_command(runs: Sequence[Run], setup: str, batch: int | None) -> str:
    """The command of the missing measurement, derived from that of an existing run."""
    flags = ["--setup", setup, *(["--per_gpu_batch", str(batch)] if batch else [])]
    run = next((run for run in runs if run.command), None)
    # Without torchrun a process takes every core, so the command must set the number of threads.
    threads = (run or runs[0]).threads
    python = f"OMP_NUM_THREADS={threads} python" if threads else "python"
    if run is None:
        script = runs[0].identity.get("script") or next(iter(TASKS))
        return f"{python} {script}.py {shlex.join(flags)}"
    # DDP and one process refuse the flags of other strategies.
    drop = ["--setup", "--link", *(["--per_gpu_batch", "--b"] if batch else [])]
    drop += [f"--{name}" for name in ("strategy", *STRATEGY_SETTINGS) if name not in SWITCHES]
    kept = command_into_its_folder(run, drop) or without_flags(run.command, drop)
    kept = [word for word in kept if word.removeprefix("--") not in SWITCHES]
    return f"{python} {shlex.join([*kept, *flags])}"

"""Whether two groups may be compared in speed, quality and time to a target, and by which values.

One rule for compare, answers, tables, figures and batches. A fact that only one side records counts
as a difference; one that neither records is noted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.core.identity import number
from harness.core.records import DISTURBING_SHARE, FINISHED
from harness.read.labels import counted, counts_of, duration, listed
from harness.read.measures import TO_TARGET
from harness.read.records import processors
from harness.read.records.groups import Group
from harness.read.records.runs import Run
from harness.read.statistics import Estimate, compared, difference, ratio

SPEED, QUALITY, TARGET = "speed", "quality", "time to target"
NUMBER_FORMAT, LOAD, MISSES = "number format", "other programs", "misses beside disturbed runs"
ACCURACY = "accuracy"
ONE_SEED, ONE_PAIR = "one seed on a side", "one seed in common"
OF_BATCH = ("effective batch", "updates")  # conditions that no two batches have in common
MOST_NAMED = 6  # groups, in a note
FAR_APART_S = 3600.0  # from the last run of one side to the first of the other
SHARES = ("per_gpu_batch", "grad_acc")  # settings that make the effective batch of a device


@dataclass(frozen=True)
class Verdict:
    """The reasons against comparing two groups in one question, if any, and what else to know."""

    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Condition:
    """A fact that both groups must have in common, and for which questions."""

    name: str
    of: Callable[[Run], Any]
    required: tuple[str, ...]
    noted: tuple[str, ...] = ()
    why: str = ""


def _test_set(run: Run) -> str | None:
    """The data that quality is measured on, each epoch and at the end."""
    data = run.data
    if data.get("test_samples") is None:
        return None
    text = f"{data['test_samples']} samples of {data.get('test_from') or 'an unnamed split'}"
    if data.get("validation_samples"):
        text += f", validation on {data['validation_samples']} of {data.get('validation_from')}"
    return text


def _evaluated(run: Run) -> str | None:
    """How many samples the last evaluation had, where the test set is not recorded."""
    if run.data.get("test_samples") is not None:
        return "its test set"
    evaluated = run.epochs[-1].get("eval_samples") if run.epochs else None
    return str(evaluated) if evaluated else None


def _definitions(run: Run) -> str:
    return f"{run.imported['format']}'s" if run.imported.get("format") else "this project's"


def _versions(run: Run) -> str | None:
    versions = run.environment.get("versions")
    names = ("torch", "transformers")
    return ", ".join(f"{name} {versions.get(name)}" for name in names) if versions else None


def _fed(run: Run) -> str:
    """The samples that --tail pad feeds in an epoch: its last update depends on how it is split."""
    fed = run.epochs[0].get("fed_samples") if run.epochs else None
    if run.settings.get("tail") != "pad" or fed is None:
        return "as many as it has"
    batch, passes = run.effective_batch or fed or 1, run.identity["grad_acc"]
    whole, short = divmod(fed % batch, max(1, batch // passes))
    # The Trainer takes the mean of the passes' means, also where the last pass is short.
    unlike = f", in the last update {short} as much as {batch // passes}" if whole and short else ""
    return f"{fed:,}{unlike}"


def _pass(run: Run) -> str:
    """The batch of a forward pass, where the loss of a batch is not the mean of its samples'."""
    of_batch = run.observed.get("loss_of_batch")
    return _with_others(run, run.identity["per_gpu_batch"]) if of_batch else "any"


def _with_others(run: Run, batch: int) -> str:
    return " and ".join(map(str, sorted({batch, *run.other_batches}, reverse=True)))


def _padded(run: Run) -> str:
    reads = run.observed.get("reads_padding")
    return _with_others(run, reads["train_batch"]) if reads else "any"


def _code(run: Run) -> str:
    return (run.environment.get("inputs") or {}).get("code") or "an unknown one"


THREADS = Condition(
    "threads per process", lambda r: r.threads, (SPEED, TARGET),
    why="a sweep gives all runs as many; alone, set OMP_NUM_THREADS for both",
)  # fmt: skip
CONDITIONS = (
    Condition(NUMBER_FORMAT, lambda r: r.identity["precision"], (SPEED, QUALITY, TARGET),
              why="experiments/precision.yaml measures formats beside each other, as a question"),
    Condition("data checksum", lambda r: r.data.get("data_checksum"), (SPEED, QUALITY, TARGET),
              why="they trained on other samples"),
    Condition("test set", _test_set, (QUALITY, TARGET)),
    Condition("evaluated samples", _evaluated, (QUALITY, TARGET)),
    Condition("definition of the metrics", _definitions, (QUALITY, TARGET)),
    Condition("effective batch", lambda r: r.effective_batch, (QUALITY,), (SPEED,),
              why="not the same training: in a sweep, `hold: effective_batch` gives all runs the "
              "same, and `baseline: {per_gpu_batch: N}` compares one batch with another"),
    Condition("updates", lambda r: r.measures.get("updates"), (QUALITY,), (SPEED,),
              why="not the same training"),
    Condition("machine", lambda r: r.machine_kind, (SPEED, TARGET)),
    THREADS,
    Condition("samples fed per epoch", _fed, (), (QUALITY,),
              why="--tail pad: the last updates are not the same"),
    Condition("batch of a forward pass", _pass, (), (QUALITY, TARGET),
              why="the loss of a batch is not the mean of those of its texts"),
    Condition("texts padded together", _padded, (), (QUALITY, TARGET),
              why="scores depend on padding: it is another training"),
    Condition("versions", _versions, (), (SPEED, QUALITY)),
    Condition("code of this project", _code, (), (SPEED, QUALITY)),
)  # fmt: skip


def noted_differences(one: Group, other: Group) -> list[str]:
    """The facts that two groups should have in common, and that stop no comparison of them."""
    runs = [*one.finished, *other.finished]
    noted = [condition for condition in CONDITIONS if not condition.required]
    return [condition.name for condition in noted if len({*map(condition.of, runs)}) > 1]


def judge(one: Group, other: Group) -> dict[str, Verdict]:
    """For each question whether the groups may be compared in it."""
    verdicts = {question: Verdict() for question in (SPEED, QUALITY, TARGET)}
    for group in (one, other):
        if (text := _not_finished(group)) is not None:
            for verdict in verdicts.values():
                (verdict.notes if group.finished else verdict.reasons).append(text)
    if one.finished and other.finished:
        for condition in CONDITIONS:
            _apply(condition, (one, other), verdicts)
        _apply_load((one, other), verdicts)
        verdicts[TARGET].reasons.extend(_unknown_beside_misses((one, other)))
        _apply_units((one, other), verdicts)
        _apply_model((one, other), verdicts)
        _apply_evaluation((one, other), verdicts)
        _apply_resumed((one, other), verdicts)
        _apply_processors(one, other, verdicts)
        _apply_hours(one, other, verdicts)
    return verdicts


def _apply_hours(one: Group, other: Group, verdicts: dict[str, Verdict]) -> None:
    """Note it if the sides did not take turns, as the runs of a sweep do."""
    times = [
        [time for run in group.timed for row in run.attempts if (time := row.get("unix"))]
        for group in (one, other)
    ]
    if not all(times):
        return
    apart_s = max(map(min, times)) - min(map(max, times))
    if apart_s > FAR_APART_S:
        text = f"measured {duration(apart_s)} apart, not in turn: the machine may have changed"
        for question in (SPEED, TARGET):
            verdicts[question].notes.append(text)


def _apply_units(groups: tuple[Group, Group], verdicts: dict[str, Verdict]) -> None:
    """Refuse quality where some runs of users' own scripts gave a metric in per cent and some did
    not: values in per cent that stay below 1 look like shares.
    """
    runs = [run for group in groups for run in group.finished if "script" not in run.settings]
    for name in dict.fromkeys(name for run in runs for name in run.in_per_cent):
        if {name in run.in_per_cent for run in runs if name in run.measures} == {True, False}:
            text = f"unit: {name} is in per cent in some runs and a share in others"
            for question in (QUALITY, TARGET):
                verdicts[question].reasons.append(text)


def _apply_processors(one: Group, other: Group, verdicts: dict[str, Verdict]) -> None:
    """Refuse times if the processors of one side were faster, though the machines have one name;
    note it if they were faster in some runs of a side.
    """
    both = [*one.finished, *other.finished]
    formats = {str(run.identity["precision"]) for run in both}
    here, there = (processors.rates(group.finished, formats) for group in (one, other))
    reasons = []
    for number_format, threads in sorted(here.keys() & there.keys()):
        key = number_format, threads
        did = statistics.median(here[key]), statistics.median(there[key])
        if processors.are_apart(*did):
            reasons.append(
                f"processor: before training it did {did[0]:.2g} TFLOP/s in {number_format} for "
                f"{one.name} and {did[1]:.2g} for {other.name} (medians of products of matrices)"
            )
    for question in (SPEED, TARGET):
        verdicts[question].reasons.extend(reasons)
        verdicts[question].notes.extend(() if reasons else processors.spread_of(both))


def _apply_model(groups: tuple[Group, Group], verdicts: dict[str, Verdict]) -> None:
    """Refuse quality where one --model has had several contents."""
    contents: dict[str, set[str]] = {}
    for run in (run for group in groups for run in group.finished):
        recorded = run.environment.get("inputs") or {}
        if checksum := (recorded.get("model") or {}).get("checksum"):
            contents.setdefault(str(run.settings.get("model")), set()).add(str(checksum))
    for name, checksums in contents.items():
        if len(checksums) > 1:
            text = f"model: {name} had {len(checksums)} contents: some runs began from other files"
            for question in (QUALITY, TARGET):
                verdicts[question].reasons.append(text)


def _way_of_evaluation(run: Run, batch: int | None) -> str:
    """Several processes fill up the last batches, which may then be padded otherwise."""
    if batch is None:
        return "texts of one length"
    processes, samples = run.processes or 1, run.data.get("test_samples") or 0
    filled = processes > 1 and samples % (batch * processes)
    return f"padded batches of {batch}" + (f" in {processes} processes" if filled else "")


def _apply_evaluation(groups: tuple[Group, Group], verdicts: dict[str, Verdict]) -> None:
    """Refuse quality where one model reads padding and had other texts padded together."""
    batches: dict[str, set[str]] = {}
    for run in (run for group in groups for run in group.finished):
        if reads := run.observed.get("reads_padding"):
            ways = batches.setdefault(str(run.settings.get("model")), set())
            ways.add(_way_of_evaluation(run, reads["eval_batch"]))
    for name, ways in batches.items():
        if len(ways) > 1:
            text = f"evaluation: {name} reads padding, and was evaluated on {_listed(sorted(ways))}"
            for question in (QUALITY, TARGET):
                verdicts[question].reasons.append(text)


def _apply_resumed(groups: tuple[Group, Group], verdicts: dict[str, Verdict]) -> None:
    for group in groups:
        verdicts[TARGET].notes.extend(f"{group.name}: {text}" for text in resumed(group.finished))


def disturbed(runs: Sequence[Run], grouped: bool = True) -> list[str]:
    """How many finished runs were disturbed, and what that does to their numbers."""
    texts = []
    if busy := sum(run.is_beside_others for run in runs):
        texts.append(
            f"{counted(busy, 'run')} with others on the machine (--pack, or more than "
            f"{DISTURBING_SHARE:.0%} of the cores in use by others)"
        )
        texts[0] += ": where a group has quiet runs, only their times count" if grouped else ""
    if changed := sum(bool(run.other_batches) for run in runs):
        texts.append(
            f"{counted(changed, 'run')} in another batch per process than asked for "
            "(--auto_batch, or nodes were missing): times and memory are left out"
        )
    return texts


def resumed(runs: Iterable[Run]) -> list[str]:
    """How many finished runs were stopped and went on, and which of their times that adds to."""
    count = sum(run.was_resumed for run in runs)
    if not count:
        return []
    return [f"{counted(count, 'run')} stopped and continued: wall times include the interruption"]


def learned_nothing(runs: Iterable[Run]) -> list[str]:
    """How many finished runs ended no better than naming the largest class for every sample."""
    known = ((run.data.get("majority_share"), run.measures.get(ACCURACY)) for run in runs)
    count = sum(share is not None and end is not None and end <= share for share, end in known)
    if not count:
        return []
    return [
        f"{counted(count, 'run')} with an accuracy that is no better than naming the largest class "
        "for every sample"
    ]


def without_times(
    groups: Sequence[Group], to_target: bool = True, name: Callable[[Group], str] | None = None
) -> list[str]:
    """How many groups have no times, or none to the target, and why; else nothing. name: for a
    figure, in which such groups have no row that could show them.
    """
    kinds = [("times", "whose runs had unlike numbers of threads per process",
              [group for group in groups if group.has_unlike_threads])]  # fmt: skip
    if to_target:
        kinds.append(("time to the target", f"with {MISSES}",
                      [group for group in groups if group.misses_beside_disturbed]))  # fmt: skip
    if name:
        kinds.append(("times", "whose runs all ran in another batch than asked for",
                      [group for group in groups if _all_in_other_batches(group)]))  # fmt: skip
    return [
        f"no {what} of {counted(len(without), 'group')} {why}"
        + (f" ({listed(map(name, without), ', ', MOST_NAMED)})" if name else "")
        for what, why, without in kinds
        if without
    ]


def _all_in_other_batches(group: Group) -> bool:
    return bool(group.finished) and all(run.other_batches for run in group.finished)


def all_beside_others(group: Group) -> bool:
    """Whether the group's times come from no quiet run: all ran beside other programs."""
    return all(run.is_beside_others for run in group.timed)


def _apply_load(groups: tuple[Group, Group], verdicts: dict[str, Verdict]) -> None:
    """Refuse times if one side alone has no quiet run, or a side has no run in the batch asked for;
    note it if only some runs of a side are so.
    """
    busy = [group for group in groups if all_beside_others(group)]
    for group in groups:
        if batches := {batch for run in group.finished for batch in run.other_batches}:
            changed = sum(bool(run.other_batches) for run in group.finished)
            text = f"batch: {changed} of {len(group.finished)} runs of {group.name} ran with "
            text += f"{_listed(sorted(batches))} per process in place of the batch asked for "
            text += "(--auto_batch), and have no times"
            for question in (SPEED, TARGET):
                verdict = verdicts[question]
                all_of_them = changed == len(group.finished)
                (verdict.reasons if all_of_them else verdict.notes).append(text)
        if unknown := sum(run.load_is_unknown for run in group.finished):
            text = f"{LOAD}: not recorded during {unknown} of {len(group.finished)} runs of "
            text += f"{group.name}: counted as none"
            for question in (SPEED, TARGET):
                verdicts[question].notes.append(text)
        if not (count := sum(run.is_beside_others for run in group.finished)):
            continue
        text = f"{LOAD}: {count} of {len(group.finished)} runs of {group.name} "
        text += f"ran beside them (--pack, or more than {DISTURBING_SHARE:.0%} of the cores)"
        for question in (SPEED, TARGET):
            if len(busy) == 1 and group in busy:
                verdicts[question].reasons.append(text)
            else:
                left_out = "" if group in busy else ", which are left out of its times"
                verdicts[question].notes.append(text + left_out)


def _unknown_beside_misses(groups: Iterable[Group]) -> Iterator[str]:
    """A reason for each group whose misses leave its time to the target unknown."""
    for group in groups:
        if group.misses_beside_disturbed:
            yield (
                f"{MISSES}: {len(group.missed(TO_TARGET[0]))} of {len(group.finished)} runs of "
                f"{group.name} miss the target, and not all others have times that count: the "
                "median is unknown"
            )


def _apply(condition: Condition, groups: tuple[Group, Group], verdicts: dict[str, Verdict]) -> None:
    sides = [list(dict.fromkeys(map(condition.of, group.finished))) for group in groups]
    values = {value for side in sides for value in side}
    known = values - {None}
    if not known:
        for question in (*condition.required, *condition.noted):
            text = f"{condition.name} is not in the records: taken to be the same"
            verdicts[question].notes.append(text)
    elif len(values) > 1:
        has = [f"{g.name} has {_listed(side)}" for g, side in zip(groups, sides, strict=True)]
        text = f"{condition.name}: {', '.join(has)}"
        text += f" ({condition.why})" if condition.why and len(known) > 1 else ""
        for question in condition.required:
            verdicts[question].reasons.append(text)
        for question in condition.noted:
            verdicts[question].notes.append(text)


def _listed(values: list[Any]) -> str:
    return " and ".join("an unknown one" if v is None else number(v) for v in values)


def _not_finished(group: Group) -> str | None:
    """A text on the runs that cannot be compared, and what became of them."""
    others = [run for run in group.runs if run.state != FINISHED]
    if not others:
        return None
    counts = counts_of(run.state for run in others)
    why = next((f": {run.reason}" for run in others if run.reason), "")
    return f"{group.name} has {len(group.finished) or 'no'} finished run(s) and {counts}{why}"


def refused(group: Group, base: Group, question: str) -> list[str]:
    """The names of the reasons against comparing a group of a sweep with its baseline.

    A difference that the sweep is about does not count. For quality, a single seed on a side, or in
    common, is a reason: the difference may be the seed's.
    """
    names = [reason.partition(":")[0] for reason in judge(base, group)[question].reasons]
    names = [name for name in names if name not in _asked_for(group, base)]
    if question == QUALITY:
        ours, theirs = (each.repeats(ACCURACY) for each in (group, base))
        if compared(ours, theirs) == 1:
            names.append(ONE_SEED if 1 in (len(ours), len(theirs)) else ONE_PAIR)
    return names


def _asked_for(group: Group, base: Group) -> tuple[str, ...]:
    """The conditions that the sweep varies on purpose: number formats, and batches where the groups
    differ in nothing else.
    """
    differ = {axis for axis in group.label if group.label[axis] != base.label.get(axis)}
    of_batch = OF_BATCH if differ <= {*SHARES} else ()
    return (*of_batch, NUMBER_FORMAT) if "precision" in differ else of_batch


def measured_against(group: Group, base: Group, measure: str, question: str) -> Estimate:
    """A group against another one: the difference of means for quality, the ratio for all else."""
    ours, theirs = (each.repeats(measure) for each in (group, base))
    return difference(ours, theirs) if question == QUALITY else ratio(ours, theirs)

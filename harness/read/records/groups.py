"""Groups: runs that differ only in seed or repeat."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from harness.core.records import FINISHED
from harness.read.labels import machine_kind, without_tag
from harness.read.measures import TO_TARGET, is_timed, is_timed_or_memory
from harness.read.records.runs import STATES, Run, Target
from harness.read.statistics import Repeats, is_rate, spread

Value = TypeVar("Value")
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that repeat one measurement: of a sweep, or those that an argument has selected."""

    runs: tuple[Run, ...]
    label: dict[str, Any] = field(default_factory=dict)  # on the axes of its sweep
    machine: str | None = None
    name: str = ""  # A or B, RUN or BASELINE: its part in a comparison
    selector: str = ""  # the argument that selected its runs
    target: Target | None = None
    not_read: tuple[str, ...] = ()  # lines about selected runs that are left out

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.state == FINISHED]

    def measured(self, measure: str) -> list[Run]:
        """The finished runs whose number counts: for a time, quiet runs if there are any, and none
        where processes had unlike numbers of threads.

        A run that misses its target does so on any machine. Beside misses the times of all others
        must count: without one of them the median is unknown, unless most runs miss.
        """
        if not is_timed(measure):
            return self.finished
        counted = [] if self.has_unlike_threads else self.timed
        if not (missed := self.missed(measure)):
            return counted
        having = [run for run in self.finished if measure in run.measures]
        known = [run for run in having if run in counted or run in missed]
        is_known = len(known) == len(self.finished) or 2 * len(missed) > len(self.finished)
        return known if is_known else []

    def missed(self, measure: str) -> list[Run]:
        """The finished runs that never reached the target."""
        return [run for run in self.finished if math.isinf(run.measures.get(measure, 0.0))]

    @property
    def reached(self) -> str:
        """How many of the finished runs reached the target, in words; each repeat counts."""
        epochs = [run.measures.get("tta_epochs", math.inf) for run in self.finished]
        return f"{sum(map(math.isfinite, epochs))} of {len(epochs)}"

    @property
    def misses_beside_disturbed(self) -> bool:
        """Whether misses make the time to the target unknown, as not all other times count."""
        return bool(self.missed(TO_TARGET[0])) and not self.measured(TO_TARGET[0])

    @property
    def timed(self) -> list[Run]:
        return with_times_that_count(self.finished)

    @property
    def has_unlike_threads(self) -> bool:
        """Whether the timed runs had unlike numbers of threads: such times have no mean."""
        return len({run.threads for run in self.timed}) > 1

    @property
    def disturbed(self) -> int:
        """How many finished runs were disturbed: their times do not count if others' do."""
        return sum(run.is_disturbed for run in self.finished)

    @property
    def outcome(self) -> str:
        """Finished if any run is, else every outcome, the worst first."""
        states = {run.state for run in self.runs}
        if FINISHED in states:
            return FINISHED
        return ", ".join(sorted(states, key=lambda s: STATES.index(s) if s in STATES else 0))

    @property
    def recorded(self) -> Run:
        """The first run that tells what all share: a finished run, or else one with settings, which
        a waiting run lacks. The first of all where no run has begun.
        """
        return next((run for run in (*self.finished, *self.runs) if run.settings), self.runs[0])

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that can change the result, which all runs share."""
        return self.recorded.identity

    @property
    def machine_kind(self) -> str | None:
        """The machine without the number of GPUs: one GPU of a kind is the baseline of four."""
        gpus = any(run.environment.get("gpus") for run in self.runs)
        return machine_kind(self.machine) if self.machine and gpus else self.machine

    @property
    def topology(self) -> str:
        return without_tag(str(self.setting("setup") or ""))

    @property
    def seeds(self) -> list[int]:
        return sorted({run.seed for run in self.finished if run.seed is not None})

    def setting(self, name: str) -> Any:
        """An axis of the plan, or else a setting that all runs share."""
        if self.label.get(name) is not None:
            return self.label[name]
        known = [run.settings[name] for run in self.runs if run.settings.get(name) is not None]
        return known[0] if known and all(value == known[0] for value in known) else None

    def by_run(self, measure: str) -> list[tuple[Run, float]]:
        """The finished runs whose number counts, each with its number, where that is known."""
        runs = self.measured(measure)
        return [(run, run.measures[measure]) for run in runs if measure in run.measures]

    def repeats(self, measure: str) -> Repeats:
        """The values that means, comparisons and their intervals are computed from."""
        return repeats_of(measure, self.by_run(measure), self.name)

    def values(self, measure: str) -> list[float]:
        return [*self.repeats(measure).values()]

    def fact(self, name: str) -> Any:
        """A property of Run that is the same wherever it is known; None where it differs."""
        known = {getattr(run, name) for run in self.finished or self.runs} - {None}
        return known.pop() if len(known) == 1 else None

    def mean(self, measure: str) -> float | None:
        return spread(self.values(measure), is_rate(measure)).mean


def counts_each_run(measure: str) -> bool:
    """Whether repeats of a seed count by themselves. They show the noise of times and of memory,
    but not that of quality, nor of the time to a target, which the seed decides as well.
    """
    return is_timed_or_memory(measure) and not measure.startswith("tta_")


def repeats_of(measure: str, by_run: Iterable[tuple[Run, float]], group: str = "") -> Repeats:
    """The value of each run, by seed and repeat; or one per seed, the mean of its repeats.

    Where runs have the same seed and repeat, nothing tells which of them is whose partner: then the
    times of this group are not paired.
    """
    values = [*by_run]
    if not counts_each_run(measure):
        repeats = {s: statistics.mean(same) for s, same in by_seed(values, group).items()}
    else:
        has_doubles = len({run.repetition for run, _ in values}) < len(values)
        repeats = {
            (group, run.path) if run.seed is None or has_doubles else run.repetition: value
            for run, value in values
        }
    return {key: repeats[key] for key in sorted(repeats, key=str)}


def by_seed(by_run: Iterable[tuple[Run, Value]], group: str = "") -> dict[Hashable, list[Value]]:
    """The values of the repeats of each seed; a run that records no seed repeats none, and has a
    key that no run of another group has.
    """
    values: dict[Hashable, list[Value]] = {}
    for run, value in by_run:
        key: Hashable = (group, run.path) if run.seed is None else run.seed
        values.setdefault(key, []).append(value)
    return values


def with_times_that_count(runs: Sequence[Run]) -> list[Run]:
    """Of runs that repeat one measurement, the quiet ones in the batch asked for; if there is none,
    those in that batch; else all.
    """
    quiet = [run for run in runs if not run.is_disturbed]
    return quiet or [run for run in runs if not run.other_batches] or [*runs]


def by_key(things: Iterable[Value], key: Callable[[Value], Key]) -> dict[Key, list[Value]]:
    """Key -> all things with this key, keys and things in the order of first occurrence."""
    groups: dict[Key, list[Value]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return groups


def make_groups(runs: Iterable[Run], axes: tuple[str, ...]) -> tuple[Group, ...]:
    """The groups, in the order of the runs. Runs on unlike machines are never averaged."""
    groups = []
    for members in by_key(runs, lambda run: group_key(run.label, axes)).values():
        label = {axis: members[0].label.get(axis) for axis in axes}
        by_machine = by_key(members, partial(_machine, members=members))
        groups += [Group(tuple(on), label, machine) for machine, on in by_machine.items()]
    return tuple(groups)


def group_key(label: Mapping[str, Any], axes: tuple[str, ...]) -> tuple[Any, ...]:
    """A key that is equal for runs of one group; unlike in Python, True and 1 differ."""
    return tuple((isinstance(label.get(axis), bool), label.get(axis)) for axis in axes)


def _machine(run: Run, members: list[Run]) -> str | None:
    """The machine of a run; without a record, the machine of its group, if that has only one."""
    if run.machine is not None or run.state == FINISHED:
        return run.machine
    machines = {other.machine for other in members} - {None}
    return machines.pop() if len(machines) == 1 else None

"""What a run takes beside its steps: starting, evaluating, saving, and ending an epoch. The time of
measuring itself is not counted.

Each phase is a fixed time and a number of delays of the link. That number follows from runs over
links, and so belongs to the program that made them; if no run crossed a link, to this program.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from harness.core.collectives import Shape, Wire
from harness.read.predict.computing import least_squares
from harness.read.predict.exchange import joined
from harness.read.predict.lossy.messages import longer_s
from harness.read.records.groups import with_times_that_count
from harness.read.records.recorded import measuring_s
from harness.read.records.runs import Run

START = "starting"
EVALUATION, SAVING, EPOCH_END = "evaluation", "saving", "ending an epoch"
# Delays for which this program waits: an evaluation adds up counts in one round trip, and a save
# takes two messages from each rank to all.
COUNTED = {EVALUATION: 2.0, SAVING: 2.0}


@dataclass(frozen=True)
class PhaseFit:
    """fixed_s + delays x the link's delay, one way."""

    fixed_s: float
    delays: float
    spread: float | None = None  # relative standard deviation of links from the line
    freedom: int = 0
    has_link: bool = False  # whether fixed_s has the time of the one link that is known in it

    def takes_s(self, delay_s: float) -> float:
        return self.fixed_s + self.delays * delay_s


@dataclass(frozen=True)
class Phases:
    """Phases by set-up: those recorded on several nodes, and all of one machine as Shape(1)."""

    of: Mapping[Shape, Mapping[str, PhaseFit]] = field(default_factory=dict)
    over_links: tuple[Run, ...] = ()  # the runs that the fits of these are from

    def recorded(self, shape: Shape) -> Shape | None:
        """The set-up on several nodes with the nearest number of ranks; None if there is none."""
        known = [each for each in self.of if each.nodes > 1]
        return min(known, key=lambda each: abs(each.ranks - shape.ranks), default=None)

    def at(self, shape: Shape, wire: Wire, control: str) -> dict[str, PhaseFit]:
        """The known phases over a link; fixed_s of each includes the part of the link, where each
        delay is a message of one packet.
        """
        near = self.recorded(shape) if shape.nodes > 1 else Shape(1)
        known = dict(self.of.get(near or Shape(1), {}))
        if shape.nodes > 1 and near is not None and EVALUATION in known:
            of_near = known[EVALUATION]  # its ranks share the test set
            if not of_near.has_link:
                own_s = of_near.fixed_s * near.ranks / shape.ranks
                known[EVALUATION] = replace(of_near, fixed_s=own_s)
        if shape.nodes > 1 and near is None:
            known = {
                name: PhaseFit(each.fixed_s / (shape.ranks if name == EVALUATION else 1),
                            COUNTED.get(name, 0.0))
                for name, each in known.items()
            }  # fmt: skip
        elif shape.nodes == 1 and EVALUATION in known:
            known[EVALUATION] = PhaseFit(known[EVALUATION].fixed_s / shape.ranks, 0.0)
        return {
            name: PhaseFit(
                each.takes_s(wire.delay_s)
                + longer_s(wire, control, 1, each.delays, shape.nodes, True),
                0.0,
                each.spread,
                each.freedom,
            )
            for name, each in known.items()
        }


def fit_phases(runs: Iterable[tuple[Shape, Wire | None, Run]]) -> Phases:
    """The line through the medians of links, each from its quiet runs if there are any."""
    samples: dict[Shape, dict[str, dict[Wire, list[float]]]] = {}
    by_link = _by_link([*runs])
    for (shape, over), alike in by_link.items():
        by_name = samples.setdefault(shape if shape.nodes > 1 else Shape(1), {})
        for name, seconds in (pair for run in alike for pair in _phases_of(run, shape)):
            by_name.setdefault(name, {}).setdefault(over, []).append(seconds)
    of = {}
    local = samples.get(Shape(1), {})
    for shape, by_name in samples.items():
        of[shape] = {
            name: _fit([(link.delay_s, statistics.median(many)) for link, many in by_link.items()],
                       # The ranks share the test set.
                       [each / (shape.ranks if name == EVALUATION else 1)
                        for each in local.get(name, {}).get(Wire(), ())])
            for name, by_link in by_name.items()
        }  # fmt: skip
    far = (run for (shape, _), those in by_link.items() if shape.nodes > 1 for run in those)
    return Phases(of, tuple(far))


def _by_link(runs: Sequence[tuple[Shape, Wire | None, Run]]) -> dict[tuple[Shape, Wire], list[Run]]:
    """The runs whose times count, by set-up and link."""
    same = joined(wire for _, wire, _ in runs if wire is not None)
    alike: dict[tuple[Shape, Wire], list[Run]] = {}
    for shape, wire, run in runs:
        if shape.nodes == 1:
            alike.setdefault((shape, Wire()), []).append(run)
        elif wire is not None:
            alike.setdefault((shape, same[wire]), []).append(run)
    return {key: with_times_that_count(those) for key, those in alike.items()}


def _fit(points: list[tuple[float, float]], local: Sequence[float]) -> PhaseFit:
    """Fit a line over delays; links of a single delay are joined with the runs of one machine."""
    if len({delay_s for delay_s, _ in points}) == 1 and points[0][0] > 0 and local:
        points = [(0.0, statistics.median(local)), *points]
    delays, seconds = np.array(points, dtype=float).T
    if len({*delays}) == 1:
        return PhaseFit(float(np.median(seconds)), 0.0, has_link=delays[0] > 0)
    fixed_s, slope = least_squares(delays, seconds)
    off = (seconds - fixed_s - slope * delays) / seconds
    freedom = len(points) - 2
    spread = math.sqrt(float(off @ off) / freedom) if freedom else None
    return PhaseFit(fixed_s, slope, spread, freedom)


def _phases_of(run: Run, shape: Shape) -> Iterator[tuple[str, float]]:
    """The phases in rows and summary; only the evaluation for a run that was restarted."""
    rows, epochs = run.epochs, run.measures.get("epochs_done")
    evaluation_s, saving_s = run.measures.get("eval_time_s"), run.measures.get("save_time_s")
    # On one machine only of a single process: several share the test set and the cores.
    if epochs and evaluation_s and (shape.nodes > 1 or shape.ranks == 1):
        yield EVALUATION, evaluation_s / epochs
    if run.measures.get("attempts", 1) > 1 or run.lacks_epochs:
        return  # the summary has the saving of the last attempt only
    if epochs and saving_s:
        yield SAVING, saving_s / epochs
    if not rows or not all(map(_is_timed, rows)):
        return
    others, before = [], 0
    for row in rows:
        steps_s = row["timed_s"] / row["timed_steps"] * (row["updates"] - before)
        others.append((row["wall_s"] or 0.0) - steps_s - (row.get("eval_time_s") or 0.0))
        before = row["updates"]
    if (start_s := others[0] - measuring_s(rows[0], run.environment)) > 0:
        yield START, start_s
    ends = [
        after - (row["wall_s"] or 0.0) - (saving_s or 0.0) / (epochs or 1)
        for row, after in zip(rows, others[1:], strict=False)
    ]
    if ends and statistics.mean(ends) > 0:
        yield EPOCH_END, statistics.mean(ends)


def _is_timed(row: Mapping[str, object]) -> bool:
    return all(row.get(name) for name in ("timed_steps", "timed_s", "wall_s", "updates"))

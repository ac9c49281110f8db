"""How the time of a run divides into parts that add up to all of it, in seconds per update.

The parts of a step are those of one rank, the median one (the lower of two): its computing, its
waiting for data, its communicating and its waiting for slower ranks make up the step. A step is
timed by rank 0. Other ranks begin and end their first and last step at other moments: their parts
are shares of their own steps, applied to those of rank 0.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.core.records.summary import epochs_lacking, mean_of, sum_of, total_of
from harness.core.settings import UserError
from harness.core.strategies import SENT_DIRECTLY, recorded_strategy
from harness.read.records.runs import Run
from harness.read.statistics import SampleStatistics, spread

COMPUTE, DATA, COMMUNICATION, STRAGGLERS, UNSEPARATED = (
    "computing", "waiting for data", "communicating", "waiting for slower ranks", "not separated"
)  # fmt: skip
FIRST, EVALUATION, SAVING, REST = "first steps", "evaluation", "saving", "startup and other"

# In display order: the parts of a step, then the time outside timed steps.
IN_STEP = (COMPUTE, DATA, COMMUNICATION, STRAGGLERS, UNSEPARATED)
OUTSIDE_STEPS = (FIRST, EVALUATION, SAVING, REST)
PARTS = (*IN_STEP, *OUTSIDE_STEPS)

Parts = dict[str, float | None]  # seconds per update; None: unknown


@dataclass(frozen=True)
class SlowestRank:
    """The rank that the median one waits for, and how much longer its own part takes."""

    rank: int
    more_s: float  # per update, computing and waiting for data
    of_data_s: float  # of that, waiting for data
    spared_s: float = 0.0  # of a step, if ranks had samples in proportion to their speeds


@dataclass(frozen=True)
class TimeBreakdown:
    """The breakdown of one run, or the means over several that differ only in their seed."""

    devices: int
    samples: float  # per update, over all devices
    updates: float
    rate: SampleStatistics  # samples/s of the timed steps
    step_s: float
    parts: Parts
    spreads: Parts  # standard deviations over the runs
    padding: float | None  # share of computing spent on padding
    evaluation_s: float | None  # per sample on one device
    slowest: SlowestRank | None
    train_s: float | None = None  # all training of the run, as its rows say

    @property
    def per_device(self) -> float:
        """Samples per update and device."""
        return self.samples / self.devices

    @property
    def running_s(self) -> float:
        """Seconds per update without the startup, which is independent of run length."""
        if self.train_s is None:
            return math.fsum(v for n, v in self.parts.items() if v is not None and n != REST)
        # Where first steps were faster, training took less than as many timed steps.
        outside_s = math.fsum(self.parts[name] or 0.0 for name in (EVALUATION, SAVING))
        return self.train_s / self.updates + outside_s


def time_breakdown(run: Run) -> TimeBreakdown:
    """The breakdown of one finished run, from its rows."""
    path, rows, measures = run.recorded_folder.path, run.epochs, run.measures
    steps, timed_s, samples = (
        total_of(rows, name) for name in ("timed_steps", "timed_s", "timed_samples")
    )
    updates = _updates(run)
    if run.imported:
        raise UserError(f"{path} is imported: its source does not record single steps")
    if steps and samples is None:
        raise UserError(
            f"{path} does not know the samples of its steps: its data were a stream, or the peer "
            "that records was away while others trained"
        )
    if not (steps and timed_s and samples and updates and run.devices):
        raise UserError(f"{path} has no timed steps: measure a longer run, or more epochs")
    train_s = total_of(rows, "epoch_time_s")
    step_s = min(timed_s / steps, _longest_step(measures, train_s, updates))
    in_step, slowest = _in_step(run, step_s, steps)
    eval_samples, eval_s = total_of(rows, "eval_samples"), total_of(rows, "eval_time_s")
    parts = in_step | _outside_steps(run, step_s, updates)
    return TimeBreakdown(
        devices=run.devices,
        samples=samples / steps,
        updates=updates,
        rate=spread([samples / timed_s]),
        step_s=step_s,
        parts=parts,
        spreads=dict.fromkeys(parts),
        padding=_padding(rows),
        evaluation_s=run.devices * eval_s / eval_samples if eval_samples and eval_s else None,
        slowest=slowest,
        train_s=train_s,
    )


def _updates(run: Run) -> float | None:
    """The updates that its rows are about."""
    updates, lacking = run.measures.get("updates"), epochs_lacking(run.settings, run.epochs)
    if updates is None or not lacking:
        return updates
    first = run.epochs[0]  # as many updates in each epoch
    return updates - round((first.get("updates") or 0) * lacking / first["epoch"])


def _longest_step(measures: Mapping[str, float], train_s: float | None, updates: float) -> float:
    """The longest step that fits into the recorded time. Where first steps were faster than timed
    ones, less time is left outside steps; what this does not cover makes all steps shorter.
    """
    wall_s = measures.get("wall_s")
    if train_s is None or wall_s is None:
        return math.inf
    outside_s = math.fsum(measures.get(name) or 0.0 for name in ("eval_time_s", "save_time_s"))
    return max(wall_s - outside_s, train_s) / updates


def _in_step(run: Run, step_s: float, steps: float) -> tuple[Parts, SlowestRank | None]:
    """The parts of a step, from the ranks' records; else from data waits and the probe."""
    ranks = _recorded_by_ranks(run)
    known = bool(ranks) and all("compute_s" in rank for rank in ranks)
    is_single = known and len(ranks) == 1
    if is_single or (known and all("comm_wait_s" in rank for rank in ranks)):
        parts, slowest = _from_ranks(ranks, step_s, steps)
        if not is_single and _takes_delays_for_waiting(run):
            waited_s = parts[STRAGGLERS] or 0.0
            parts |= {COMMUNICATION: (parts[COMMUNICATION] or 0.0) + waited_s, STRAGGLERS: None}
        return dict.fromkeys(IN_STEP, 0.0) | parts, None if is_single else slowest
    data_s, share = _data_wait(run.epochs, step_s), run.measures.get("comm_share")
    communication_s = None if share is None else max(share, 0.0) * step_s
    if data_s is not None and communication_s is not None:
        # One is measured over the epoch, one over a few passes: together they can exceed a step.
        fits = step_s / max(step_s, data_s + communication_s)
        data_s, communication_s = data_s * fits, communication_s * fits
    left_s = max(step_s - (data_s or 0.0) - (communication_s or 0.0), 0.0)
    parts = dict.fromkeys(IN_STEP) | {DATA: data_s}
    if run.devices == 1 and not recorded_strategy(run.identity).has_peers:
        # One device has no other parts.
        return parts | {
            COMPUTE: left_s,
            COMMUNICATION: 0.0,
            STRAGGLERS: 0.0,
            UNSEPARATED: 0.0,
        }, None
    return parts | {COMMUNICATION: communication_s, UNSEPARATED: left_s}, None


def _takes_delays_for_waiting(run: Run) -> bool:
    """Whether delays of a direct exchange count as waiting. What is sent directly is on its
    way while the receiver computes: without the round trip, that is waiting for slower ranks.
    """
    directly = run.identity["exchange"] in SENT_DIRECTLY and (run.nodes or 1) > 1
    return directly and not run.observed.get("exchange_early_s")


def _from_ranks(
    ranks: Sequence[Mapping[str, float]], step_s: float, steps: float
) -> tuple[Parts, SlowestRank]:
    scales = [step_s / _own_step(rank, step_s, steps) / steps for rank in ranks]
    computing, exposed, waited = (
        [scale * rank.get(name, 0.0) for scale, rank in zip(scales, ranks, strict=True)]
        for name in ("compute_s", "comm_exposed_s", "comm_wait_s")
    )
    data = [max(step_s - c - e, 0.0) for c, e in zip(computing, exposed, strict=True)]
    own = [c + d for c, d in zip(computing, data, strict=True)]
    median, last = own.index(statistics.median_low(own)), own.index(max(own))
    parts: Parts = {COMPUTE: computing[median], DATA: data[median]}
    if len(ranks) > 1:
        parts |= {COMMUNICATION: exposed[median] - waited[median], STRAGGLERS: waited[median]}
    spared_s = own[last] - statistics.harmonic_mean(own)
    slowest = SlowestRank(last, own[last] - own[median], data[last] - data[median], spared_s)
    return parts, slowest


def _own_step(rank: Mapping[str, float], step_s: float, steps: float) -> float:
    """The mean step on a rank's own clock: that of rank 0, unless the rank was busy for longer, or
    waited for too little data to have taken so long.
    """
    busy_s = (rank["compute_s"] + rank.get("comm_exposed_s", 0.0)) / steps
    most_s = busy_s + rank.get("data_wait_s", math.inf) / steps
    return max(busy_s, min(step_s, most_s))


def _recorded_by_ranks(run: Run) -> list[dict[str, float]]:
    """Per rank the sums over all epochs; a value that is missing in one epoch is left out."""
    ranks = []
    for rows in run.ranks.values():
        names = ("compute_s", "comm_exposed_s", "comm_wait_s", "data_wait_s")
        sums = {name: total_of(rows, name) for name in names if len(rows) == len(run.epochs)}
        ranks.append({name: value for name, value in sums.items() if value is not None})
    return ranks


def _data_wait(rows: Sequence[Mapping[str, Any]], step_s: float) -> float | None:
    """Seconds of waiting for data per step, from rank 0's share of whole epochs."""
    share = mean_of(rows, "data_wait_share", "epoch_time_s")
    return None if share is None else step_s * share


def _outside_steps(run: Run, step_s: float, updates: float) -> Parts:
    """Seconds per update outside the timed steps; saving is that of the last attempt."""
    train_s, wall_s = total_of(run.epochs, "epoch_time_s"), run.measures.get("wall_s")
    parts: Parts = {
        FIRST: None if train_s is None else max(train_s - step_s * updates, 0.0),
        EVALUATION: run.measures.get("eval_time_s", sum_of(run.epochs, "eval_time_s")),
        SAVING: run.measures.get("save_time_s"),
    }
    known = math.fsum(value for value in parts.values() if value is not None)
    parts[REST] = None if wall_s is None else max(wall_s - step_s * updates - known, 0.0)
    return {name: None if value is None else value / updates for name, value in parts.items()}


def _padding(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The share of padding, by operations if known, else by tokens; None for images."""
    share = mean_of(rows, "padding_share", "timed_s")
    done, needed = (
        mean_of(rows, name, "timed_s") for name in ("tflops_per_s", "tflops_per_s_without_padding")
    )
    if share is None or done is None or needed is None:
        return share
    return 1 - needed / done if done else None


def mean_breakdown(breakdowns: Sequence[TimeBreakdown]) -> TimeBreakdown:
    """The means. A part that one run does not separate is separated in none, so they add up."""
    parts = [dict(each.parts) for each in breakdowns]
    for names, rest in ((IN_STEP, UNSEPARATED), (OUTSIDE_STEPS, REST)):
        unknown = [n for n in names if n != rest and any(each[n] is None for each in parts)]
        for each in parts:
            left = each[rest]
            if left is not None:
                each[rest] = left + math.fsum(each[name] or 0.0 for name in unknown)
            each.update(dict.fromkeys(unknown))
    spreads = {name: _spread_if_known([each[name] for each in parts]) for name in PARTS}
    return TimeBreakdown(
        devices=breakdowns[0].devices,
        samples=statistics.fmean(each.samples for each in breakdowns),
        updates=statistics.fmean(each.updates for each in breakdowns),
        rate=spread(
            [value for each in breakdowns if (value := each.rate.mean) is not None], harmonic=True
        ),
        step_s=statistics.fmean(each.step_s for each in breakdowns),
        parts={name: values.mean for name, values in spreads.items()},
        spreads={name: values.sd for name, values in spreads.items()},
        padding=_spread_if_known([each.padding for each in breakdowns]).mean,
        evaluation_s=_spread_if_known([each.evaluation_s for each in breakdowns]).mean,
        slowest=_usually_slowest([each.slowest for each in breakdowns]),
        train_s=_spread_if_known([each.train_s for each in breakdowns]).mean,
    )


def _spread_if_known(values: Sequence[float | None]) -> SampleStatistics:
    """The spread of all values; of none if one is unknown."""
    known = [value for value in values if value is not None]
    return spread(known if len(known) == len(values) else [])


def _usually_slowest(candidates: Sequence[SlowestRank | None]) -> SlowestRank | None:
    """A rank that is the slowest in most of the runs; one that is so once is noise."""
    known = [slowest for slowest in candidates if slowest is not None]
    if not known:
        return None
    rank, count = Counter(slowest.rank for slowest in known).most_common(1)[0]
    if count <= len(candidates) / 2:
        return None
    same = [slowest for slowest in known if slowest.rank == rank]
    return SlowestRank(
        rank,
        statistics.fmean(slowest.more_s for slowest in same),
        statistics.fmean(slowest.of_data_s for slowest in same),
        statistics.fmean(slowest.spared_s for slowest in same),
    )

"""What makes a run slower than it could be: each cause with its seconds and what it leaves at most.

Two questions. Of scaling: what does a part of an update cost beyond its share of what the same
samples take on the baseline? Of the run alone: what would be saved if a part took nothing?
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.read import causes_text as text
from harness.read.account import (
    COMPUTE,
    DATA,
    EVALUATION,
    EXCHANGE,
    FIRST,
    OF_STEP,
    PARTS,
    SAVING,
    STRAGGLERS,
    UNTOLD,
    Account,
)
from harness.read.facts import Facts

SLOW_RANK, BATCH, CORES, PADDING = "slow rank", "batch", "cores", "padding"
OUTSIDE = "evaluation and saving"
# Below it, as a share of the time of the run, a cause does not stand out.
LARGE = 0.10
# The backward pass takes twice the operations of the forward pass, which evaluation makes alone.
PASSES = 3
# An estimate by evaluation's speed is rough: it counts from twice that on, and where evaluation's
# batches are so many times as large.
ROUGH, LARGER = 2, 4


@dataclass(frozen=True)
class Cause:
    """Seconds an update that something costs, and its share of the run without its start."""

    key: str
    lost_s: float
    share: float
    of_step: bool  # else beside the timed steps
    words: str
    change: str


def ideal(run: Account, base: Account) -> dict[str, float | None]:
    """Seconds an update if the baseline's cost of a sample were spread over all devices evenly."""
    more = run.per_device / base.per_device
    return {name: None if (s := base.parts[name]) is None else s * more for name in PARTS}


def lost(run: Account, base: Account) -> dict[str, float]:
    """Part -> seconds an update more than that; less where it is below 0. What is unknown of
    either side is missing.
    """
    does, should = dict(run.parts), ideal(run, base)
    # What one side does not tell apart is held against all of the other's that belongs to it.
    unknown = [n for n in OF_STEP if does[n] is None or should[n] is None or n == UNTOLD]
    does[UNTOLD], should[UNTOLD] = (
        math.fsum(side[name] or 0.0 for name in unknown) for side in (does, should)
    )
    pairs = {name: (does[name], should[name]) for name in PARTS}
    return {n: a - b for n, (a, b) in pairs.items() if a is not None and b is not None}


def share_lost(run: Account, base: Account) -> float:
    """Of the run without its start, all causes together."""
    return 1 - base.at_work_s * (run.per_device / base.per_device) / run.at_work_s


def of_scaling(run: Account, base: Account, facts: Facts) -> list[Cause]:
    """What the run loses against its baseline, the largest first."""
    more = lost(run, base)
    found = [
        _step_cause(run, DATA, more.get(DATA), *text.data(run)),
        _step_cause(run, EXCHANGE, more.get(EXCHANGE), *text.exchange(run, facts)),
        _step_cause(run, SLOW_RANK, more.get(STRAGGLERS), *text.stragglers(run, facts)),
        _step_cause(run, UNTOLD, more.get(UNTOLD), *text.untold(run, more.get(UNTOLD), facts)),
        _beside(run, FIRST, more.get(FIRST), *text.first(run)),
    ]
    smaller = facts.micro_batch < facts.baseline_micro_batch
    words = text.smaller_batch if smaller else text.slower_computing
    found.append(
        _step_cause(run, BATCH if smaller else CORES, more.get(COMPUTE), *words(run, base, facts))
    )
    if EVALUATION in more:
        outside = more[EVALUATION] + more.get(SAVING, 0.0)
        found.append(_beside(run, OUTSIDE, outside, *text.outside(run)))
    return _sorted(found)


def of_run(run: Account, facts: Facts, others: Sequence[tuple[int, Account]] = ()) -> list[Cause]:
    """What the run alone shows, the largest first. Others: (batch, account) of one process."""
    parts, computing = run.parts, run.parts[COMPUTE]
    evaluating_s, saving_s = parts[EVALUATION], parts[SAVING]
    found = [
        _step_cause(run, DATA, parts[DATA], *text.data(run)),
        _step_cause(run, EXCHANGE, parts[EXCHANGE], *text.exchange(run, facts)),
        _step_cause(run, SLOW_RANK, parts[STRAGGLERS], *text.stragglers(run, facts)),
        _beside(run, FIRST, parts[FIRST], *text.first(run)),
        _batch(run, facts, others),
    ]
    if evaluating_s is not None:
        outside = evaluating_s + (saving_s or 0.0)
        found.append(_beside(run, OUTSIDE, outside, *text.outside(run)))
    if run.padding is not None and computing is not None:
        words = text.padding(run, facts)
        found.append(_step_cause(run, PADDING, run.padding * computing, *words))
    return _sorted(found)


def _batch(run: Account, facts: Facts, others: Sequence[tuple[int, Account]]) -> Cause | None:
    """What computing would be spared at the cost that a sample has in larger batches."""
    computing = run.parts[COMPUTE]
    if computing is None:
        return None
    measured = list(_costs(facts, others))
    if measured:
        cost_s, batch = min(measured)
        words = text.batch_measured(run, cost_s, batch)
    elif run.evaluation_s is not None and facts.eval_batch >= LARGER * facts.micro_batch:
        cost_s = PASSES * run.evaluation_s
        if computing < ROUGH * cost_s * run.per_device:
            return None
        words = text.batch_estimated(run, cost_s, facts)
    else:
        return None
    return _step_cause(run, BATCH, computing - cost_s * run.per_device, *words)


def _costs(facts: Facts, others: Sequence[tuple[int, Account]]) -> Iterator[tuple[float, int]]:
    for batch, account in others:
        computing = account.parts[COMPUTE]
        if batch > facts.micro_batch and computing is not None:
            yield computing / account.per_device, batch


def _step_cause(run: Account, key: str, lost_s: float | None, words: str, change: str) -> Cause:
    lost_s = lost_s or 0.0
    return Cause(key, lost_s, lost_s / run.at_work_s, True, words, change)


def _beside(run: Account, key: str, lost_s: float | None, words: str, change: str) -> Cause:
    lost_s = lost_s or 0.0
    return Cause(key, lost_s, lost_s / run.at_work_s, False, words, change)


def _sorted(found: Sequence[Cause | None]) -> list[Cause]:
    return sorted((c for c in found if c is not None and c.lost_s > 0), key=lambda c: -c.lost_s)


def bound(run: Account, cause: Cause) -> tuple[float, float]:
    """Without this cause: samples/s at most, or beside the steps the run's seconds at least;
    and by how much that is more or less, as a share.
    """
    if cause.of_step:
        spared_s = cause.lost_s
        if cause.key == BATCH:  # of larger ones there are fewer, and so are exchanges
            spared_s += math.fsum(run.parts[name] or 0.0 for name in (EXCHANGE, STRAGGLERS))
        left_s = run.step_s - spared_s
        return run.samples / left_s, run.step_s / left_s - 1
    return (run.at_work_s - cause.lost_s) * run.updates, -cause.share

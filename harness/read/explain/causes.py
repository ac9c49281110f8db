"""The words for each cause: what it is, with its numbers, and what would change it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.read.explain.account import (
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
from harness.read.explain.facts import Facts

Words = tuple[str, str]


# Cores that other programs took, for each process, from which on they are named.
OTHERS = 0.25


LARGER_BATCH = "a larger --per_gpu_batch, which also exchanges more rarely (another training)"


def seconds(value: float) -> str:
    """With three digits, in the unit that a reader would choose."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if value >= factor:
            return f"{number(value / factor)} {unit}"
    return f"{number(value / 1e-6)} µs" if value >= 1e-6 else "0 s"


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else "under 1 %"


def _of_step(run: Account, value: float | None) -> str:
    value = value or 0.0
    return f"{seconds(value)} of a step of {seconds(run.step_s)} ({percent(value / run.step_s)})"


def data(run: Account) -> Words:
    return (
        f"waiting for data takes {_of_step(run, run.parts[DATA])}",
        "processes that load data beside the training (--num_workers), or less work for each "
        "batch where it is put together",
    )


def exchange(run: Account, facts: Facts) -> Words:
    took_s = run.parts[EXCHANGE]
    words = f"exchanging, with nothing computed meanwhile, takes {_of_step(run, took_s)}"
    limit = _limit(facts, took_s or 0.0)
    words += _over(facts)
    if limit is not None:
        words += f"; the {limit} is the limit"
    rarely = "exchanging more rarely: a larger batch or --grad_acc (another training)"
    if facts.strategy == "ddp":
        rarely += ", --strategy diloco or local_sgd"
    if limit == "delay":
        return words, f"{rarely}, or --exchange direct; --compress does little against a delay"
    if facts.strategy == "ddp" and facts.compress in (None, "none"):
        return words, f"{rarely}, or smaller gradients: --compress"
    return words, rarely


def _over(facts: Facts) -> str:
    """What is sent, and over which link."""
    said = ""
    if facts.payload_bytes:
        said += f"; each process hands over {facts.payload_bytes / 1e6:.3g} MB an update"
    if facts.rtt_ms is not None:
        said += f"; the link takes {number(facts.rtt_ms)} ms there and back"
        if facts.bandwidth_mbit is not None:
            said += f" and carries {number(facts.bandwidth_mbit)} Mbit/s"
        said += f" (asked for: {facts.link_asked})" if facts.link_asked else ""
    return said


def _limit(facts: Facts, took_s: float) -> str | None:
    """Rate or delay, whichever makes up more than half of what the exchange takes."""
    if not facts.payload_bytes or not facts.bandwidth_mbit or took_s <= 0:
        return None
    # A ring sends each byte 2 (n - 1) / n times.
    sent = facts.payload_bytes * 2 * (facts.processes - 1) / facts.processes
    return "rate" if sent * 8 / (facts.bandwidth_mbit * 1e6) > took_s / 2 else "delay"


def stragglers(run: Account, facts: Facts) -> Words:
    waited_s, slow = run.parts[STRAGGLERS], run.slowest
    took = _of_step(run, waited_s)
    if slow is None or slow.more_s < (waited_s or 0.0) / 2:
        return (
            f"waiting for slower ranks takes {took}, but none of them is slow for good: they "
            "take turns",
            "batches of equal work, and cores or devices that nobody else uses",
        )
    what = "waiting for its data" if slow.of_data_s > slow.more_s / 2 else "computing"
    words = (
        f"rank {slow.rank} is slower than others: over the run it takes {seconds(slow.more_s)} an "
        f"update longer for {what}, and waiting for it takes {took}"
    )
    if facts.throttled:
        words += f"; a device was slowed down in {percent(facts.throttled)} of the readings"
    where = f" on node {slow.rank // max(facts.processes // facts.nodes, 1)}" * (facts.nodes > 1)
    return (
        words,
        f"finding out what else runs beside rank {slow.rank}{where}, or what more it has to do",
    )


def untold(run: Account, lost_s: float | None, facts: Facts) -> Words:
    return (
        f"exchanging, waiting for others and slower computing, which this record of "
        f"{facts.strategy} does not tell apart, take {_of_step(run, lost_s)} more than in the "
        f"baseline{_over(facts)}",
        "fewer exchanges or a faster link, as far as they are the reason",
    )


def smaller_batch(run: Account, base: Account, facts: Facts) -> Words:
    return (
        f"the batch is small: with {facts.micro_batch} samples a process, computing takes "
        f"{_a_sample(run)} a sample, where the baseline with {facts.baseline_micro_batch} takes "
        f"{_a_sample(base)}",
        LARGER_BATCH,
    )


def batch_measured(run: Account, cost_s: float, batch: int) -> Words:
    return (
        f"the batch is small: computing takes {_a_sample(run)} a sample, where one process with "
        f"a batch of {batch} takes {seconds(cost_s)}",
        LARGER_BATCH,
    )


def batch_estimated(run: Account, cost_s: float, facts: Facts) -> Words:
    return (
        f"the batch is small: computing takes {_a_sample(run)} a sample, where evaluation, in "
        f"batches of {number(facts.eval_batch)}, leads to expect {seconds(cost_s)} (three times "
        "its own; an estimate)",
        LARGER_BATCH,
    )


def _a_sample(account: Account) -> str:
    return seconds((account.parts[COMPUTE] or 0.0) / account.per_device)


def slower_computing(run: Account, base: Account, facts: Facts) -> Words:
    before_s = (base.parts[COMPUTE] or 0.0) * run.per_device / base.per_device
    words = (
        f"computing takes {seconds(run.parts[COMPUTE] or 0.0)} a step, where the baseline would "
        f"take {seconds(before_s)} for as many samples"
    )
    if facts.threads != facts.baseline_threads and facts.threads and facts.baseline_threads:
        words += (
            f"; it computes with {facts.threads} thread(s) a process, the baseline with "
            f"{facts.baseline_threads}"
        )
        return words, "the same OMP_NUM_THREADS for both, for a fair comparison"
    if facts.on_cpu and (facts.nodes == 1 or facts.emulated):
        words += f": {facts.processes} processes share cores, caches and memory of one machine"
        if facts.cpu_percent is not None:
            words += f", whose cores were busy {number(facts.cpu_percent)} % of the time"
        if (facts.others_cores or 0.0) >= OTHERS * facts.processes:
            words += f", about {number(facts.others_cores or 0.0)} cores for other programs"
            return words, "ending other programs on this machine while the run is measured"
        return words, "a machine for each process, or fewer processes on this one"
    if facts.throttled:
        words += f"; a device was slowed down in {percent(facts.throttled)} of the readings"
        return words, "cooling or power for the devices"
    return words, "what else runs on these nodes; the record does not say why they are slower"


def first(run: Account) -> Words:
    took_s = (run.parts[FIRST] or 0.0) * run.updates
    return (
        f"first steps and the edges of epochs take {seconds(took_s)} beyond what as many steps "
        f"take later ({percent(took_s / (run.at_work_s * run.updates))} of the run)",
        "a longer run: they come once a process and epoch",
    )


def outside_words(run: Account) -> Words:
    eval_s = (run.parts[EVALUATION] or 0.0) * run.updates
    save_s = (run.parts[SAVING] or 0.0) * run.updates
    train_s = run.at_work_s * run.updates - eval_s - save_s
    if save_s > eval_s:
        change = "--save none, or a faster disk for --output_dir"
    else:
        change = "a smaller --test_size, or a larger --eval_batch"
    return (
        f"evaluation takes {seconds(eval_s)} and saving {seconds(save_s)} beside "
        f"{seconds(train_s)} of training",
        change,
    )


def padding(run: Account, facts: Facts) -> Words:
    share = run.padding or 0.0
    return (
        f"{percent(share)} of computing is for padding",
        "--padding auto" if facts.padding_setting == "batch" else "texts of more equal lengths",
    )


def unknown(run: Account) -> str | None:
    """The parts of a step that the record does not tell."""
    names = [name for name in (COMPUTE, EXCHANGE, STRAGGLERS) if run.parts[name] is None]
    if not run.parts[UNTOLD] or not names:
        return None
    left = _of_step(run, run.parts[UNTOLD])
    return f"Not known from this record: {', '.join(names)}, together {left}."


# ----
# What makes a run slower than it could be: each cause with its seconds and what it leaves at most.
#
# Two questions. Of scaling: what does a part of an update cost beyond its share of what the same
# samples take on the baseline? Of the run alone: what would be saved if a part took nothing?

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
        _step_cause(run, DATA, more.get(DATA), *data(run)),
        _step_cause(run, EXCHANGE, more.get(EXCHANGE), *exchange(run, facts)),
        _step_cause(run, SLOW_RANK, more.get(STRAGGLERS), *stragglers(run, facts)),
        _step_cause(run, UNTOLD, more.get(UNTOLD), *untold(run, more.get(UNTOLD), facts)),
        _beside(run, FIRST, more.get(FIRST), *first(run)),
    ]
    smaller = facts.micro_batch < facts.baseline_micro_batch
    words = smaller_batch if smaller else slower_computing
    found.append(
        _step_cause(run, BATCH if smaller else CORES, more.get(COMPUTE), *words(run, base, facts))
    )
    if EVALUATION in more:
        outside = more[EVALUATION] + more.get(SAVING, 0.0)
        found.append(_beside(run, OUTSIDE, outside, *outside_words(run)))
    return _sorted(found)


def of_run(run: Account, facts: Facts, others: Sequence[tuple[int, Account]] = ()) -> list[Cause]:
    """What the run alone shows, the largest first. Others: (batch, account) of one process."""
    parts, computing = run.parts, run.parts[COMPUTE]
    evaluating_s, saving_s = parts[EVALUATION], parts[SAVING]
    found = [
        _step_cause(run, DATA, parts[DATA], *data(run)),
        _step_cause(run, EXCHANGE, parts[EXCHANGE], *exchange(run, facts)),
        _step_cause(run, SLOW_RANK, parts[STRAGGLERS], *stragglers(run, facts)),
        _beside(run, FIRST, parts[FIRST], *first(run)),
        _batch(run, facts, others),
    ]
    if evaluating_s is not None:
        outside = evaluating_s + (saving_s or 0.0)
        found.append(_beside(run, OUTSIDE, outside, *outside_words(run)))
    if run.padding is not None and computing is not None:
        words = padding(run, facts)
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
        words = batch_measured(run, cost_s, batch)
    elif run.evaluation_s is not None and facts.eval_batch >= LARGER * facts.micro_batch:
        cost_s = PASSES * run.evaluation_s
        if computing < ROUGH * cost_s * run.per_device:
            return None
        words = batch_estimated(run, cost_s, facts)
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

"""What makes a run slower than it could be: each cause with its cost, its text and a remedy.

Two questions. Scaling: what does each part of an update cost beyond its share of what the same
samples take on the baseline? The run alone: what would be saved if a part took no time?
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.core.strategies import recorded_strategy
from harness.read.explain.context import BOTH, RunContext, limit_of
from harness.read.explain.time_breakdown import (
    COMMUNICATION,
    COMPUTE,
    DATA,
    EVALUATION,
    FIRST,
    IN_STEP,
    PARTS,
    SAVING,
    STRAGGLERS,
    UNSEPARATED,
    Parts,
    TimeBreakdown,
)
from harness.read.records.recorded import is_number

SLOW_RANK, BATCH, CORES, PADDING = "slow rank", "batch", "cores", "padding"
OUTSIDE = "evaluation and saving"

# Evaluating and saving wait for the other nodes some tens of times an epoch.
MANY_TRIPS = 100
LARGE = 0.10  # share of the run from which on a cause stands out
PASSES = 3  # forward and backward cost three times the forward pass that evaluation makes alone
# An estimate from evaluation is rough: computing must be this many times as slow, and
# evaluation's batches this many times as large.
ROUGH, LARGER = 2, 4
WHOLE = 0.99  # share of a time from which on it counts as all of it
OTHERS_CORES = 0.25  # cores per process used by other programs, from which on they are mentioned

WORTH_BALANCING = 1.05  # times as many samples/s, from which on --balance is advised

LARGER_BATCH = "a larger --per_gpu_batch, which also communicates less often (a different training)"
MOST_PLACES = 6
ROUNDING = 1e-9  # share of a rate: rates that differ by less are equal


@dataclass(frozen=True)
class Cause:
    """Seconds per update that something costs, and its share of the run without its startup."""

    key: str
    lost_s: float
    share: float
    in_step: bool  # else outside the timed steps
    text: str
    remedy: str


def ideal(run: TimeBreakdown, base: TimeBreakdown) -> Parts:
    """Seconds per update if the baseline's cost per sample were spread evenly over all devices."""
    more = run.per_device / base.per_device
    return {name: None if (s := base.parts[name]) is None else s * more for name in PARTS}


def lost(run: TimeBreakdown, base: TimeBreakdown) -> dict[str, float]:
    """Part -> seconds per update above the ideal. A part unknown on either side is missing."""
    actual, should = dict(run.parts), ideal(run, base)
    # What one side does not separate is compared with everything that it may contain.
    unknown = [n for n in IN_STEP if actual[n] is None or should[n] is None or n == UNSEPARATED]
    actual[UNSEPARATED], should[UNSEPARATED] = (
        math.fsum(side[name] or 0.0 for name in unknown) for side in (actual, should)
    )
    pairs = {name: (actual[name], should[name]) for name in PARTS}
    return {n: a - b for n, (a, b) in pairs.items() if a is not None and b is not None}


def share_lost(run: TimeBreakdown, base: TimeBreakdown) -> float:
    """The share of the run, without startup, that all causes together cost."""
    return 1 - base.running_s * (run.per_device / base.per_device) / run.running_s


def of_scaling(run: TimeBreakdown, base: TimeBreakdown, context: RunContext) -> list[Cause]:
    """The losses of the run relative to its baseline, the largest first."""
    more = lost(run, base)
    smaller = context.micro_batch < context.baseline_micro_batch
    computing = _smaller_batch(run, base, context) if smaller else _slower(run, base, context)
    return _sorted(run, [
        *_of_parts(run, more, context),
        (UNSEPARATED, more.get(UNSEPARATED), _unseparated(run, more.get(UNSEPARATED), context)),
        (BATCH if smaller else CORES, more.get(COMPUTE), computing),
    ])  # fmt: skip


def of_run(
    run: TimeBreakdown, context: RunContext, others: Sequence[tuple[int, TimeBreakdown]] = ()
) -> list[Cause]:
    """The costs that need no baseline, largest first. others: (batch, breakdown) of one process."""
    known = {name: value for name, value in run.parts.items() if value is not None}
    causes = _of_parts(run, known, context)
    if (computing_s := known.get(COMPUTE)) is not None:
        if batch := _larger_batch(run, computing_s, context, others):
            causes.append((BATCH, computing_s - batch[0] * run.per_device, batch[1]))
        if run.padding is not None:
            causes.append((PADDING, run.padding * computing_s, _padding(run.padding, context)))
    return _sorted(run, causes)


# The key of a cause, what it costs, and (text, remedy).
Candidate = tuple[str, float | None, tuple[str, str]]


def _of_parts(run: TimeBreakdown, cost: dict[str, float], context: RunContext) -> list[Candidate]:
    """The causes of either question, from what each part costs."""
    outside_s = cost[EVALUATION] + cost.get(SAVING, 0.0) if EVALUATION in cost else None
    return [
        (DATA, cost.get(DATA), _data(run)),
        (COMMUNICATION, cost.get(COMMUNICATION), communication(run, context)),
        (SLOW_RANK, cost.get(STRAGGLERS), stragglers(run, context)),
        (FIRST, cost.get(FIRST), _first(run, context)),
        (OUTSIDE, outside_s, _outside(run, outside_s, context)),
    ]


def _sorted(run: TimeBreakdown, causes: Iterable[Candidate]) -> list[Cause]:
    known = [
        Cause(key, lost_s, lost_s / run.running_s, key not in (FIRST, OUTSIDE), text, remedy)
        for key, lost_s, (text, remedy) in causes
        if lost_s is not None and lost_s > 0
    ]
    return sorted(known, key=lambda cause: -cause.lost_s)


def _larger_batch(
    run: TimeBreakdown, computing_s: float, context: RunContext,
    others: Sequence[tuple[int, TimeBreakdown]],
) -> tuple[float, tuple[str, str]] | None:  # fmt: skip
    """What a sample would cost in larger batches, measured or estimated, and its text."""
    if not context.micro_batch:
        return None
    of_batch = [
        (other_s / other.per_device, batch)
        for batch, other in others
        if (other_s := other.parts[COMPUTE]) is not None
    ]
    measured = [pair for pair in of_batch if pair[1] > context.micro_batch]
    text = f"the batch is small: computing takes {_per_sample(run)} per sample"
    if measured:
        cost_s, batch = min(measured)
        if not context.shares_machine:
            text += f"; one process with a batch of {batch} takes {seconds(cost_s)}"
            return cost_s, (text, LARGER_BATCH)
        # Sharing a machine costs the same in any batch: compare one process alone with another.
        alone_s = min((s for s, of in of_batch if of == context.micro_batch), default=None)
        if alone_s is None:
            return None
        text = (
            f"the batch is small: one process alone takes {seconds(alone_s)} per sample with a "
            f"batch of {context.micro_batch}, and {seconds(cost_s)} with one of {batch}"
        )
        return computing_s / run.per_device * cost_s / alone_s, (text, LARGER_BATCH)
    if run.evaluation_s is None or context.eval_batch < LARGER * context.micro_batch:
        return None
    cost_s = PASSES * run.evaluation_s
    if computing_s < ROUGH * cost_s * run.per_device:
        return None
    text += (
        f". Evaluation in batches of {three_digits(context.eval_batch)} suggests {seconds(cost_s)}"
    )
    return cost_s, (f"{text} (three times its own time: an estimate)", LARGER_BATCH)


def bound(run: TimeBreakdown, cause: Cause) -> tuple[float, float]:
    """Without this cause: samples/s at most, or outside the steps the run's seconds at least;
    and the relative change.
    """
    if not cause.in_step:
        return (run.running_s - cause.lost_s) * run.updates, -cause.share
    spared_s = cause.lost_s
    if cause.key == BATCH:  # a larger one makes fewer steps, and so fewer exchanges
        spared_s += math.fsum(run.parts[name] or 0.0 for name in (COMMUNICATION, STRAGGLERS))
    left_s = run.step_s - spared_s
    return run.samples / left_s, run.step_s / left_s - 1


def is_beyond_a_share(run: TimeBreakdown, cost_s: float) -> bool:
    """Whether the cost is less than evaluation and saving take, as the baseline has them too."""
    takes_s = (run.parts[EVALUATION] or 0.0) + (run.parts[SAVING] or 0.0)
    return 0 < cost_s < WHOLE * takes_s


def seconds(value: float) -> str:
    """A duration with three digits, in s, ms or µs."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if value >= factor:
            return f"{three_digits(value / factor)} {unit}"
    return f"{three_digits(value / 1e-6)} µs" if value >= 1e-6 else "0 s"


def three_digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def with_spread(mean: float, sd: float) -> str:
    """Mean ± standard deviation: that with two digits, and the mean to the same place; equal
    values have a spread of exactly nothing.
    """
    if sd <= abs(mean) * ROUNDING:
        return f"{three_digits(mean)} ± 0"
    places = min(1 - math.floor(math.log10(float(f"{sd:.1e}"))), MOST_PLACES)
    return " ± ".join(f"{round(value, places):,.{max(places, 0)}f}" for value in (mean, sd))


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else "under 1 %"


def _of_step(run: TimeBreakdown, value: float | None) -> str:
    value = value or 0.0
    return f"{seconds(value)} of a step of {seconds(run.step_s)} ({percent(value / run.step_s)})"


def _per_sample(run: TimeBreakdown) -> str:
    return seconds((run.parts[COMPUTE] or 0.0) / run.per_device)


# What follows returns (text, remedy) of one cause each.


def _data(run: TimeBreakdown) -> tuple[str, str]:
    return (
        f"waiting for data takes {_of_step(run, run.parts[DATA])}",
        "more loader processes (--num_workers), or less work per batch in the collator",
    )


def communication(run: TimeBreakdown, context: RunContext) -> tuple[str, str]:
    took_s = run.parts[COMMUNICATION]
    text = f"communication that overlaps no computing takes {_of_step(run, took_s)}{_link(context)}"
    limit = limit_of(context, took_s or 0.0)
    if limit is not None:
        text += f". The {limit} {'are limits' if limit == BOTH else 'is the limit'}"
    less_often = "communicating less often: a larger batch or --grad_acc (a different training)"
    strategy = recorded_strategy(vars(context))
    if strategy.shards:  # whose weights are gathered in each pass
        less_often = f"{LARGER_BATCH}, or --strategy ddp where memory allows it"
    if strategy.reduces_gradients:
        less_often += ", --strategy diloco or local_sgd"
    if limit in ("delay", BOTH) and context.other_exchange:
        less_often += f", or --exchange {context.other_exchange}"
    if limit == "delay":
        return text, f"{less_often}. --compress hardly helps against a delay"
    if strategy.reduces_gradients and context.compress in (None, "none"):
        return text, f"{less_often}, or smaller gradients: --compress"
    return text, less_often


def _link(context: RunContext) -> str:
    """Sentences about the bytes sent and the link."""
    text = ""
    if context.payload_bytes:
        text += f". Each process contributes {context.payload_bytes / 1e6:.3g} MB per update"
    if context.rtt_ms is not None:
        text += f". The link has a round trip of {three_digits(context.rtt_ms)} ms"
        if context.bandwidth_mbit is not None:
            text += f" and carries {three_digits(context.bandwidth_mbit)} Mbit/s"
        text += f" (requested: {context.requested_link})" if context.requested_link else ""
    return text + _disturbed(context)


def _disturbed(context: RunContext) -> str:
    """A sentence about the packets that the link was asked to lose, and its jitter."""
    loss, jitter_ms = (
        max((value for link in context.requested_links if is_number(value := link.get(name))),
            default=0.0)
        for name in ("loss", "jitter_ms")
    )  # fmt: skip
    most = "up to " if len(context.requested_links) > 1 else ""
    asked = [f"lose {most}{three_digits(100 * loss)} % of its packets"] if loss else []
    asked += [f"have a jitter of {most}{three_digits(jitter_ms)} ms"] if jitter_ms else []
    return f". The link was asked to {' and to '.join(asked)}" if asked else ""


def stragglers(run: TimeBreakdown, context: RunContext) -> tuple[str, str]:
    waited_s, slow = run.parts[STRAGGLERS], run.slowest
    waiting = _of_step(run, waited_s)
    if slow is None or slow.more_s < (waited_s or 0.0) / 2:
        return (
            f"waiting for slower ranks takes {waiting}. No rank is always the slow one: they take "
            "turns",
            "batches of equal work, and cores or devices that nothing else uses",
        )
    what = "waiting for its data" if slow.of_data_s > slow.more_s / 2 else "computing"
    node = f" on node {slow.rank // max(context.processes // context.nodes, 1)}"
    beside = f"rank {slow.rank}{node if context.nodes > 1 else ''}"
    remedy = f"finding out what else runs beside {beside}, or what extra work it has"
    gain = run.step_s / (run.step_s - slow.spared_s)
    if what == "computing" and context.balances and gain >= WORTH_BALANCING:
        remedy = (
            f"--balance measured, for about {three_digits(gain)} times as many samples/s, or "
            f"finding out what else runs beside {beside}"
        )
    more = f"it takes {seconds(slow.more_s)} longer per update for {what}"
    waits = f"Waiting for it takes {waiting}{_throttling(context)}"
    if len({*context.shares}) > 1:
        own, all_of_them = context.shares[slow.rank], sum(context.shares)
        return (
            f"rank {slow.rank}, with {own} of the {all_of_them} samples of an update (--balance): "
            f"{more}. {waits}",
            f"shares that fit, as --balance measured finds them, or {remedy}",
        )
    return f"rank {slow.rank} is slower: {more}. {waits}", remedy


def _throttling(context: RunContext) -> str:
    if not context.throttled:
        return ""
    return f". A device was throttled in {percent(context.throttled)} of the readings"


def _unseparated(run: TimeBreakdown, lost_s: float | None, context: RunContext) -> tuple[str, str]:
    return (
        f"communication, slower ranks and slower computing take {_of_step(run, lost_s)} more than "
        f"the baseline. This record of {context.strategy} does not separate them{_link(context)}",
        "communicating less often or a faster link, as far as communication is the reason",
    )


def _smaller_batch(run: TimeBreakdown, base: TimeBreakdown, context: RunContext) -> tuple[str, str]:
    """The text and remedy; computing here includes what sharing one CPU costs."""
    shared, others = _shared(context)
    text = (
        f"the batch is small: computing takes {_per_sample(run)} per sample with "
        f"{context.micro_batch} a process, and {_per_sample(base)} in the baseline with "
        f"{context.baseline_micro_batch}{shared}"
    )
    return text, f"{others}, or {LARGER_BATCH}" if others else LARGER_BATCH


def _slower(run: TimeBreakdown, base: TimeBreakdown, context: RunContext) -> tuple[str, str]:
    before_s = (base.parts[COMPUTE] or 0.0) * run.per_device / base.per_device
    shared, others = _shared(context)
    text = (
        f"computing takes {seconds(run.parts[COMPUTE] or 0.0)} per step, where the baseline would "
        f"take {seconds(before_s)} for as many samples{shared}"
    )
    if shared:
        return text, others or "a machine for each process, or fewer processes on this one"
    if context.throttled:
        return text + _throttling(context), "better cooling or power supply for the devices"
    return text, "checking what else runs on these nodes; the record does not show the reason"


def _shared(context: RunContext) -> tuple[str, str | None]:
    """A text on processes that share a machine, and the remedy if other programs share it, too."""
    if not context.shares_machine:
        return "", None
    text = f". {context.processes} processes share cores, caches and memory of one machine"
    if context.cpu_percent is not None:
        text += f", whose cores were busy {three_digits(context.cpu_percent)} % of the time"
    if (context.others_cores or 0.0) < OTHERS_CORES * context.processes:
        return text, None
    text += f". Other programs used about {three_digits(context.others_cores or 0.0)} cores"
    return text, "stopping other programs on this machine while the run is measured"


def _first(run: TimeBreakdown, context: RunContext) -> tuple[str, str]:
    took_s = (run.parts[FIRST] or 0.0) * run.updates
    text = (
        f"first steps and epoch boundaries take {seconds(took_s)} more than as many later steps "
        f"({percent(took_s / (run.running_s * run.updates))} of the run)"
    )
    if context.sync_first:
        text += (
            f". Each of the first {context.sync_first} updates waits for an exchange "
            "(--sync_first), which is part of that"
        )
    return text, "a longer run: this cost occurs once per process and epoch"


def _outside(run: TimeBreakdown, cost_s: float | None, context: RunContext) -> tuple[str, str]:
    eval_s = (run.parts[EVALUATION] or 0.0) * run.updates
    save_s = (run.parts[SAVING] or 0.0) * run.updates
    train_s = run.running_s * run.updates - eval_s - save_s
    text = (
        f"evaluation takes {seconds(eval_s)} and saving {seconds(save_s)} beside "
        f"{seconds(train_s)} of training"
    )
    if cost_s is not None and is_beyond_a_share(run, cost_s):
        share_s = eval_s + save_s - cost_s * run.updates
        text += f". The baseline's share of that is {seconds(share_s)}"
    if context.nodes > 1 and recorded_strategy(vars(context)).shards and save_s > eval_s:
        return text, "--save none, or fewer epochs: each save gathers the shards over the link"
    if context.nodes > 1 and context.rtt_ms and context.epochs:
        trips = (eval_s + save_s) / context.epochs / (context.rtt_ms / 1e3)
        if trips < MANY_TRIPS:  # few enough to be what took the time
            text += f". Per epoch that is {three_digits(trips)} round trips of the link"
            return text, "--save none, or fewer epochs: a smaller test set saves no round trips"
    return (
        text,
        "--save none, or a faster disk for --output_dir"
        if save_s > eval_s
        else "a smaller test set (--test_size), or a larger --eval_batch",
    )


def _padding(share: float, context: RunContext) -> tuple[str, str]:
    return (
        f"{percent(share)} of computing is spent on padding",
        "--padding auto" if context.padding_setting == "batch" else "texts of more equal lengths",
    )


def not_known(run: TimeBreakdown) -> str | None:
    """The parts of a step that the record does not separate."""
    names = [name for name in (COMPUTE, COMMUNICATION, STRAGGLERS) if run.parts[name] is None]
    if names == [STRAGGLERS] and not run.parts[UNSEPARATED]:
        return (
            f"Not known from this record: {STRAGGLERS}, which may be part of {COMMUNICATION}. It "
            "does not tell that from the delay of what is sent directly."
        )
    if not run.parts[UNSEPARATED] or not names:
        return None
    left = _of_step(run, run.parts[UNSEPARATED])
    return f"Not known from this record: {', '.join(names)}, together {left}."

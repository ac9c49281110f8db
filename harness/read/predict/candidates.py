"""What reaches a target over a link, how long it takes, and how sure that is.

How many epochs a training needs is never modelled: it is counted in recorded runs of the same
strategy, period, effective batch and nodes. How long an epoch takes over another link is predicted,
and corrected by what runs of the same training took over the links that were recorded.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.core.collectives import BACKEND, DIRECT, TCP_SHARE, Shape, Wire
from harness.core.records import FINISHED
from harness.core.settings import UserError
from harness.core.strategies import OF_OPTIMIZER, chooses_exchange, is_coded
from harness.core.topology import batch_of_device, effective_batch
from harness.read.labels import counted
from harness.read.predict.cases import as_timed, scenario_of
from harness.read.predict.exchange import ALIKE_SHARE, joined
from harness.read.predict.facts import (
    Overrides,
    effective_batch_of,
    grad_acc_of,
    is_emulated,
    model_of,
    setting_of,
    shape_of,
    step_s,
)
from harness.read.predict.fitting import Fitted, steady_wire, wire_between
from harness.read.predict.model import EXCHANGE, Prediction, predict
from harness.read.predict.phases import (
    EPOCH_END,
    EVALUATION,
    SAVING,
    START,
)
from harness.read.predict.ratios import NEAREST_S, STEPS, OverLinks, half_s, of_epochs
from harness.read.predict.scenario import APART, Scenario
from harness.read.records.groups import Group, by_key, repeats_of, with_times_that_count
from harness.read.records.runs import Run, Target, check_target, time_to_target
from harness.read.records.selection import command_on
from harness.read.statistics import spread

WALL = "tta_wall_s"

# Outcomes that count as missing the target; a run stopped from outside says nothing about it.
NOT_REACHED = ("diverged", "failed", "oom")
# Settings that may differ within one training; the way of exchange changes only the last bits of
# sums, unless codes are sent, and --exchange auto chooses it by the link.
ELSEWHERE = ("link", "setup", "comm_probe", "save", "exchange", "tested")
SHOWN = ("strategy", "compress", "sync_every", "sync_first", "per_gpu_batch")  # named in tables
# A link this many times as slow as all over which a training was timed is outside its runs.
FURTHEST = 10


def training_text(strategy: Any, batch: Any, shape: Shape, settings: str = "") -> str:
    """What a training is called: diloco h10, batch 16 on 4_1 (outer_lr 0.7)."""
    return f"{strategy}, batch {batch} on {shape}{f' ({settings})' if settings else ''}"


@dataclass(frozen=True)
class Candidate:
    """A training that reached the target, over the link that is asked for."""

    plan: Scenario
    samples: int  # of an update
    runs: int
    epochs: float  # to the target, the mean over seeds
    parts: dict[str, float]  # seconds of all of it
    share: float  # of a step, spent waiting for the exchange
    half_s: float | None  # of the 95 % interval; None: not known
    links: int  # over which its steps were recorded
    between: bool  # the link's delay and rate lie between recorded ones
    direct_s: float | None  # by the closed form, where no run exchanged directly; None: cannot
    run: Run  # one of those recorded
    settings: str = ""  # that distinguish it from others of its strategy, batch and set-up
    measured_s: tuple[float, ...] = ()  # to the target, of its runs over this very link
    other_nodes: int = 0  # runs over this link on real nodes where emulated ones are asked for

    @property
    def name(self) -> str:
        return training_text(self.plan.label, self.plan.batch, self.plan.shape, self.settings)

    @property
    def wall_s(self) -> float:
        return sum(self.parts.values())

    @property
    def interval(self) -> tuple[float, float] | None:
        if self.half_s is None:
            return None
        return max(0.0, self.wall_s - self.half_s), self.wall_s + self.half_s

    @property
    def mean_measured_s(self) -> float | None:
        return spread(self.measured_s).mean

    @property
    def node_hours(self) -> float:
        return self.plan.shape.nodes * self.wall_s / 3600


@dataclass(frozen=True)
class Candidates:
    reached: list[Candidate]  # the fastest first
    missed: list[str]  # trainings that did not reach the target in every run, or failed in one
    left_out: list[str]  # those that cannot be predicted, with the reason
    elsewhere: int = 0  # runs whose times are not comparable with those on one machine
    lossy: int = 0  # other runs whose times correct none, as their link has loss or jitter


def candidates(
    fitted: Fitted, runs: Sequence[Run], nodes: Sequence[int], wire: Wire, target: Target,
    batch: int | None = None, emulated: bool = False, link: str = "LINK",
) -> Candidates:  # fmt: skip
    """The trainings on these nodes as Candidates; UserError where there is none."""
    done = _of_several(runs)
    here = [run for run in done if shape_of(run).nodes in nodes]
    lost = [run for run in runs if run.state in NOT_REACHED and run.settings]
    lost = [run for run in lost if shape_of(run).nodes in nodes]
    asked = " or ".join(map(str, nodes))
    if missing := missing_quality(runs, nodes, target, batch, link):
        raise UserError(missing)
    if batch is not None:
        sizes = sorted({run.effective_batch for run in here if run.effective_batch})
        here = [run for run in here if run.effective_batch == batch]
        lost = [run for run in lost if effective_batch_of(run) == batch]
        if not here:
            raise UserError(f"--effective_batch {batch}: runs on {asked} nodes have "
                            f"{', '.join(map(str, sizes))}")  # fmt: skip
    timed = [run for run in here if fitted.is_timed_like(run)]
    wires = [wire_between(run.measured_link) for run in timed]
    lossy = sum(over is not None and not over.is_steady for over in wires)
    measured = {shape_of(run).nodes for run in done}
    unknown = []
    for count in sorted({*nodes} - {shape_of(run).nodes for run in (*here, *lost)}):
        why = f"no run has --effective_batch {batch}"
        if count not in measured:
            why = f"quality was not measured: {_to_measure(runs, target, count, link, batch)}"
        unknown.append(f"{counted(count, 'node')}: {why}")
    choices = Candidates([], [], [], len(here) - len(timed), lossy)
    trainings = trainings_of([*here, *lost])
    steps = by_key(here, _of_steps)
    for same, settings in zip(trainings, distinguishing(trainings), strict=True):
        _add(choices, fitted, same, settings, wire, target, emulated, steps)
    if not choices.reached:
        raise UserError("; ".join([_nothing(choices, asked, target, here), *unknown]))
    choices.reached.sort(key=lambda each: each.wall_s)
    choices.left_out.extend(unknown)
    return choices


def _of_several(runs: Iterable[Run]) -> list[Run]:
    return [run for run in runs if run.state == FINISHED and shape_of(run).ranks > 1]


def missing_quality(
    runs: Sequence[Run], nodes: Sequence[int], target: Target, batch: int | None, link: str
) -> str | None:
    """What measures the quality on these nodes, if no run did; UserError for an unknown target."""
    measured = sorted({shape_of(run).nodes for run in _of_several(runs)})
    if {*measured} & {*nodes}:
        return None
    check_target(target, runs)
    return (
        f"--nodes {' or '.join(map(str, nodes))}: quality was not measured on as many nodes, but "
        f"on {', '.join(map(str, measured)) or 'one alone'}: "
        f"{_to_measure(runs, target, nodes[0], link, batch)}"
    )


def _to_measure(
    runs: Sequence[Run], target: Target, nodes: int, link: str, batch: int | None
) -> str:
    """What measures the quality of the likeliest training on so many nodes, with this effective
    batch; or that nodes cannot share it equally.
    """
    same = _most_likely(runs, target)
    seeds = sorted({run.seed for run in same if run.seed is not None})
    grad_acc = grad_acc_of(same[0])
    each = batch_of_device(batch, grad_acc, nodes) if batch else None
    if batch and each is None:
        passes = f" in {grad_acc} passes each" if grad_acc > 1 else ""
        return (
            f"{nodes} nodes cannot share --effective_batch {batch} equally{passes}: name a "
            f"multiple of {nodes * grad_acc}"
        )
    more = ["--per_gpu_batch", str(each)] if each else []
    command = command_on(same[0], nodes, 1, True, link, *more, seeds=seeds)
    how = command or "python -m harness nodes"
    return f"measure it over any link, emulated nodes will do: {how}"


def _most_likely(runs: Sequence[Run], target: Target) -> list[Run]:
    """The training to measure on more nodes: of those on most nodes, the one whose runs reached the
    target most often.
    """

    def rank(same: list[Run]) -> tuple[int, float]:
        reached = sum(math.isfinite(needed) for needed in _epochs(same, target))
        return shape_of(same[0]).nodes, reached / len(same)

    return max(trainings_of(runs), key=rank)


def _nothing(choices: Candidates, asked: str, target: Target, runs: Sequence[Run]) -> str:
    values = [row.get(target.metric) for run in runs for row in run.epochs]
    best = [float(value) for value in values if isinstance(value, (int, float))]
    if not best:
        check_target(target, runs)
        return f"--target {target}: no run on {asked} nodes has {target.metric}"
    if choices.left_out:
        missed = f"; all else missed {target} in some run" if choices.missed else ""
        # Each reason once, of the first training that has it.
        reasons = {each.partition(": ")[2]: each for each in reversed(choices.left_out)}
        first = "; ".join(reversed(reasons.values()))
        return f"runs on {asked} nodes cannot be predicted: {first}{missed}"
    value = min(best) if target.smaller_is_better else max(best)
    return (f"{target}: on {asked} nodes no strategy and period reached it in every run; the best "
            f"epoch has {value:.4g}: measure more --epochs or a smaller batch, or name another "
            "--target")  # fmt: skip


def trainings_of(runs: Iterable[Run]) -> list[list[Run]]:
    """Runs by training: those of a topology that differ in seed and in ELSEWHERE alone."""

    def kind(run: Run) -> str:
        coded = is_coded(str(run.identity["compress"] or "none"), run.identity["strategy"] in APART)
        return f"{_kind(run, ELSEWHERE)} {run.identity['exchange'] if coded else None}"

    return [*by_key(runs, kind).values()]


def _kind(run: Run, but: Sequence[str]) -> str:
    same = {name: setting_of(run, name) for name in run.identity if name not in but}
    return f"{shape_of(run)} {sorted(same.items(), key=str)}"


def _of_steps(run: Run) -> str:
    """A key that is equal for runs whose steps are alike: those of a training with one way of
    exchange, whatever their number of epochs.
    """
    return f"{_kind(run, (*ELSEWHERE, 'epochs'))} {_way(run)}"


def _way(run: Run) -> str:
    return str(run.identity["exchange"] or BACKEND)


def distinguishing(trainings: Sequence[Sequence[Run]]) -> list[str]:
    """For each training the settings that tell it from others that tables name alike."""
    namesakes = by_key((run for run, *_ in trainings), _shown)
    differences = []
    for run, *_ in trainings:
        alike = namesakes[_shown(run)]
        names = [name for name in run.identity if name not in ELSEWHERE]
        unlike = [
            name for name in names
            if len({str(setting_of(each, name)) for each in alike}) > 1
            or (name in OF_OPTIMIZER and setting_of(run, name))
        ]  # fmt: skip
        differences.append(", ".join(f"{name} {setting_of(run, name)}" for name in unlike))
    return differences


def _shown(run: Run) -> tuple[Any, ...]:
    return shape_of(run), *(run.identity.get(name) for name in SHOWN)


def _add(
    choices: Candidates, fitted: Fitted, runs: list[Run], settings: str, wire: Wire, target: Target,
    emulated: bool, steps: Mapping[str, list[Run]],
) -> None:  # fmt: skip
    """Add a candidate for each exchange that was recorded. Step time comes from runs of this
    exchange only, of any number of epochs; epochs to target from runs of all exchanges, in which a
    failed run is a miss.
    """
    name = f"{runs[0].identity.get('strategy')} on {shape_of(runs[0])}"
    epochs = _epochs(runs, target)
    lost = Counter(run.state for run in runs if run.state != FINISHED)
    failed = "".join(f"; {counted(lost[s], 'run')}: {s}" for s in NOT_REACHED if lost[s])
    finished = [run for run in runs if run.state == FINISHED]
    ways = by_key(finished or runs, _way)
    reached = sum(map(math.isfinite, epochs))
    seeds = f"by {reached} of {len(epochs)} seeds" if epochs else "in no run"
    for exchanged in ways.values():
        missed = f"{_named(exchanged[0], settings, fitted.blocks)}: reached {seeds}{failed}"
        if reached < len(epochs):  # whether it can be predicted or not
            choices.missed.append(missed)
            continue
        try:
            plan = replace(scenario_of(exchanged[:1], wire, fitted.blocks), emulated=emulated)
            if not epochs:
                choices.missed.append(missed)
                continue
            _check_alike(fitted, exchanged[0])
            ratios = ratios_of(fitted, steps[_of_steps(exchanged[0])])
            choice = _candidate(fitted, exchanged, plan, epochs, ratios, DIRECT in ways)
            there = [
                run.toward(target) for run in exchanged
                if fitted.is_timed_like(run) and wire_between(run.measured_link) == wire
            ]  # fmt: skip
            alike = Group(tuple(run for run in there if is_emulated(run) == emulated))
            choices.reached.append(replace(
                choice, settings=settings, other_nodes=len(there) - len(alike.runs),
                measured_s=tuple(seconds for _, seconds in alike.by_run(WALL)),
            ))  # fmt: skip
        except UserError as error:
            choices.left_out.append(f"{name}: {error}")


def _named(run: Run, settings: str, blocks: int | None) -> str:
    """What a training is called, also one that is not modelled."""
    try:
        label = scenario_of([run], Wire(), blocks).label
    except UserError:
        label = str(run.identity["strategy"])
    return training_text(label, run.identity["per_gpu_batch"], shape_of(run), settings)


def _check_alike(fitted: Fitted, run: Run) -> None:
    """UserError where a step computes or sends something else than the runs on one machine."""
    grad_acc = grad_acc_of(run)
    if grad_acc != fitted.model.grad_acc:
        raise UserError(
            f"--grad_acc {grad_acc}: runs on one machine have {fitted.model.grad_acc}: measure one"
        )
    if tuple(model_of(run)) != fitted.of_model:
        raise UserError(
            "--model, --lora or --muon differs from that of the runs on one machine: measure one"
        )


def _epochs(runs: Iterable[Run], target: Target) -> list[float]:
    """Epochs to the target: of each seed the mean of its repeats. A miss is infinite, and so is a
    run that failed. A run without the metric is left out.
    """
    known = ((run, needed) for run in runs if (needed := _needed(run, target)) is not None)
    return [*repeats_of("tta_epochs", known).values()]


def _needed(run: Run, target: Target) -> float | None:
    if run.state != FINISHED:
        return math.inf
    if run.lacks_epochs:
        return None
    return time_to_target(run.epochs, target, settings=run.settings).get("tta_epochs")


def ratios_of(fitted: Fitted, runs: Iterable[Run]) -> OverLinks:
    """Logarithms of measured / predicted step times by link, for runs whose times are comparable
    with those on one machine; of quiet runs if there are any. Runs may differ in their epochs, on
    which depends how often they exchange.
    """
    over = _timed_over(fitted, runs)
    same = joined(wire for wire, _ in over)
    by_link: dict[Wire, list[Run]] = {}
    for wire, run in over:
        by_link.setdefault(same[wire], []).append(run)
    logs = {}
    for wire, there in by_link.items():
        quiet = with_times_that_count(there)
        measured, predicted = list[float](), list[float]()
        for alike in by_key(quiet, lambda run: run.identity["epochs"]).values():
            timed = as_timed(scenario_of(alike[:1], wire, fitted.blocks), alike[0])
            predicted += [predict(fitted.model, timed).step_s] * len(alike)
            measured += [step_s(run, Overrides()) or predicted[-1] for run in alike]
        logs[wire] = math.log(statistics.mean(measured) / statistics.mean(predicted))
    return OverLinks(logs)


def _timed_over(fitted: Fitted, runs: Iterable[Run]) -> list[tuple[Wire, Run]]:
    """The runs whose times are comparable with those on one machine, each with its link."""
    return [
        (wire, run) for run in runs
        if step_s(run, Overrides()) and fitted.is_timed_like(run)
        and (wire := steady_wire(run.measured_link)) is not None
    ]  # fmt: skip


def _candidate(
    fitted: Fitted, runs: list[Run], plan: Scenario, epochs: list[float], ratios: OverLinks,
    with_direct: bool,
) -> Candidate:  # fmt: skip
    samples = effective_batch(plan.batch, fitted.model.grad_acc, plan.shape.ranks)
    if plan.epoch_updates is None:
        raise UserError("updates of an epoch are in no record")
    prediction = predict(fitted.model, plan)
    _check_reach(fitted, ratios.by_link, plan.wire)
    needed = statistics.mean(epochs)
    longer = math.exp(ratios.at(plan.wire))  # measured / predicted
    updates = [each * plan.epoch_updates for each in epochs]
    steps_s = _steps_s(fitted, prediction, updates)
    alone_s = prediction.step_s - prediction.parts[EXCHANGE]
    exchange_s = steps_s - needed * plan.epoch_updates * alone_s
    phases = fitted.phases.at(plan.shape, plan.wire, fitted.model.congestion)
    between = max(needed - 1, 0.0)
    times = {START: 1.0, EVALUATION: max(needed, 1.0), SAVING: between, EPOCH_END: between}
    parts = {STEPS: longer * steps_s}
    parts |= {name: times[name] * phase.fixed_s for name, phase in phases.items()}
    epoch_s = parts[STEPS] + sum(parts.get(n, 0.0) for n in (EVALUATION, SAVING, EPOCH_END))
    return Candidate(
        plan, samples, len(runs), needed, parts,
        share=exchange_s / steps_s,
        half_s=half_s(prediction, ratios, phases, parts, of_epochs(epochs, epoch_s / needed)),
        links=len(ratios.by_link),
        direct_s=None if with_direct else _direct_s(fitted, prediction, parts, updates, longer),
        run=runs[0],
        between=_is_between(ratios.by_link, plan.wire),
    )  # fmt: skip


def _check_reach(fitted: Fitted, links: Iterable[Wire], wire: Wire) -> None:
    """UserError for a link that is much slower than all of these, as far as they have a rate; of a
    training without any, than all over which other trainings were timed.
    """
    known, timed = list(links), "timed"
    if not known:
        far = [r for r in fitted.selected if r.state == FINISHED and shape_of(r).nodes > 1]
        known = [over for over, _ in _timed_over(fitted, far)]
        timed = "timed over no link on this machine, other trainings"
    longest_s = max((link.delay_s for link in known), default=math.inf)
    least = min((link.bytes_per_s for link in known), default=0.0)
    slow = wire.bytes_per_s * FURTHEST < least < math.inf
    if slow or wire.delay_s + NEAREST_S > FURTHEST * (longest_s + NEAREST_S):
        rate = "" if math.isinf(least) else f" and at least {8e-6 * least / TCP_SHARE:.3g} Mbit/s"
        raise UserError(
            f"{timed} over at most {1e3 * longest_s:.3g} ms{rate}, and this link is more than "
            f"{FURTHEST} times as slow: measure it over a link nearer to that"
        )


def _is_between(links: Iterable[Wire], wire: Wire) -> bool:
    """Whether there are links on both sides of this one, in delay and in rate."""
    known = list(links)
    delays, rates = ([link.delay_s for link in known], [link.bytes_per_s for link in known])
    alike = 1 + ALIKE_SHARE
    return (
        bool(known)
        and min(delays) <= wire.delay_s <= max(delays)
        and (min(rates) / alike <= wire.bytes_per_s <= max(rates) * alike)
    )


def _steps_s(fitted: Fitted, prediction: Prediction, updates: Iterable[float]) -> float:
    """Mean of the seconds that these numbers of updates take; updates together come first."""
    plan = prediction.plan
    if not plan.sync_first or plan.updates is None:
        return statistics.mean(updates) * prediction.step_s
    first, others = plan.sync_first, plan.updates - plan.sync_first
    apart_s = predict(fitted.model, replace(plan, sync_first=0, updates=others)).step_s
    together_s = (plan.updates * prediction.step_s - others * apart_s) / first
    return statistics.mean(
        min(count, first) * together_s + max(0.0, count - first) * apart_s for count in updates
    )


def _direct_s(
    fitted: Fitted, prediction: Prediction, parts: Mapping[str, float], updates: Sequence[float],
    longer: float,
) -> float | None:  # fmt: skip
    plan = prediction.plan
    if not chooses_exchange({**vars(plan), "setup": str(plan.shape)}):
        return None
    direct = predict(fitted.model, replace(plan, exchange=DIRECT))
    saved_s = _steps_s(fitted, prediction, updates) - _steps_s(fitted, direct, updates)
    return sum(parts.values()) - longer * saved_s

"""python -m harness predict RECORDS --setup 16_8 --link 25gbit,0.1ms: what a step, epochs, energy
and cost come to there, where the curve over nodes bends, and what keeps a deadline or a budget.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.figure import Figure

from harness.core.command_line import print_json
from harness.core.links import Link, link_of
from harness.core.settings import UserError, parse_setup
from harness.core.strategies import STRATEGIES
from harness.read.drawing import FAINT, LINES, calm
from harness.read.labels import UNKNOWN, duration
from harness.read.predict.exchange import Shape, wire_of
from harness.read.predict.fitting import Fitted, Overrides, fit_records
from harness.read.predict.model import (
    APART,
    EXCHANGE,
    Prediction,
    Scenario,
    bend,
    neighbours,
    over_nodes,
    predict,
)
from harness.read.table import Table, screen, show, table_of

NOT_KNOWN = "unknown"  # in a sentence; in tables it is UNKNOWN
SHOWN = 5  # choices of --advise
MOST_LEFT_OUT = 0.05  # of the training set, by an effective batch that does not divide it
MOST = 100_000  # nodes; what is beyond is a typing error
# What --advise tries beside the strategy named; fsdp only where it is named.
ALTERNATIVES = (("ddp", "none"), ("ddp", "bf16"), ("diloco", "none"))


@dataclass(frozen=True)
class Outcome:
    """A prediction for an epoch of the records' training set; None: unknown."""

    prediction: Prediction
    updates: int | None
    epoch_s: float | None  # training alone
    eval_s: float | None
    energy_j: float | None  # of the devices, in training
    cost: float | None  # evaluation included where it is known

    @property
    def whole_s(self) -> float | None:
        """An epoch with its evaluation, as far as that is known."""
        return None if self.epoch_s is None else self.epoch_s + (self.eval_s or 0.0)


def outcome(fitted: Fitted, prediction: Prediction, cost_per_gpu_hour: float | None) -> Outcome:
    ranks = prediction.plan.shape.ranks
    # As with --tail cut: what fills no whole effective batch is left out.
    updates = fitted.train_samples // prediction.samples if fitted.train_samples else None
    whole = Outcome(
        prediction,
        updates,
        epoch_s=updates * prediction.step_s if updates else None,
        eval_s=fitted.eval_s / ranks if fitted.eval_s is not None else None,
        energy_j=_energy(fitted, prediction, updates),
        cost=None,
    )
    if cost_per_gpu_hour is None or whole.whole_s is None:
        return whole
    return replace(whole, cost=cost_per_gpu_hour * ranks * whole.whole_s / 3600)


def _energy(fitted: Fitted, prediction: Prediction, updates: int | None) -> float | None:
    """Devices that wait draw their idle power; where that is unknown, the energy of steps that
    wait is unknown too.
    """
    waits_s = prediction.parts[EXCHANGE]
    if fitted.power_w is None or not updates or (waits_s > 0 and fitted.idle_w is None):
        return None
    busy_j = fitted.power_w * (prediction.step_s - waits_s)
    return updates * prediction.plan.shape.ranks * (busy_j + (fitted.idle_w or 0.0) * waits_s)


def as_fields(result: Outcome) -> dict[str, Any]:
    """For programs (--json)."""
    each, plan = result.prediction, result.prediction.plan
    return {
        "setup": str(plan.shape),
        "strategy": plan.strategy,
        "compress": plan.compress,
        "sync_every": plan.sync_every if plan.strategy in APART else 1,
        "per_gpu_batch": plan.batch,
        "effective_batch": each.samples,
        "step_s": each.step_s,
        "step_low_s": each.low_s,
        "step_high_s": each.high_s,
        "parts_s": each.parts,
        "dominating": each.dominating,
        "alpha_beta_step_s": each.baseline_s,
        "link_measured": each.correction.of_link,
        "samples_per_s": each.samples_per_s,
        "efficiency": each.efficiency,
        **{name: value for name, value in vars(result).items() if name != "prediction"},
    }


@dataclass(frozen=True)
class Choice:
    """A candidate within the limit; all amounts are of the whole run, all epochs of it."""

    outcome: Outcome
    hours: float
    device_hours: float
    energy_kwh: float | None
    cost: float | None


def advise(
    fitted: Fitted, plan: Scenario, epochs: int, deadline_h: float | None, budget: float | None,
    cost_per_gpu_hour: float | None,
) -> list[Choice]:  # fmt: skip
    """Under a deadline the fewest device hours first, under a budget the fastest."""
    if budget is not None and cost_per_gpu_hour is None:
        raise UserError("--budget needs --cost_per_gpu_hour: what would it be spent on?")
    if fitted.train_samples is None:
        raise UserError("the size of the training set is in no record: give --train_size")
    kept = []
    for candidate in candidates(fitted, plan):
        result = outcome(fitted, predict(fitted.model, candidate), cost_per_gpu_hour)
        if result.whole_s is None or not _is_sound(fitted, result, epochs):
            continue
        hours = epochs * result.whole_s / 3600
        cost = None if result.cost is None else epochs * result.cost
        late = deadline_h is not None and hours > deadline_h
        dear = budget is not None and cost is not None and cost > budget
        if not (late or dear):
            kwh = None if result.energy_j is None else epochs * result.energy_j / 3.6e6
            kept.append(Choice(result, hours, hours * candidate.shape.ranks, kwh, cost))
    if budget is not None:
        return sorted(kept, key=lambda choice: (choice.hours, choice.device_hours))
    return sorted(kept, key=lambda choice: (choice.device_hours, choice.hours))


def _is_sound(fitted: Fitted, result: Outcome, epochs: int) -> bool:
    """Not cheap because it leaves samples out, or ends before its replicas first exchange."""
    plan, updates, samples = result.prediction.plan, result.updates or 0, fitted.train_samples or 0
    left_out = samples - updates * result.prediction.samples
    exchanges = plan.strategy not in APART or epochs * updates >= plan.sync_every
    return exchanges and left_out <= MOST_LEFT_OUT * samples


def candidates(fitted: Fitted, plan: Scenario) -> Iterator[Scenario]:
    """Halves of the set-up, every batch that was measured, the alternatives of the strategy."""
    named = (plan.strategy, plan.compress)
    strategies = [named, *(each for each in ALTERNATIVES if each != named)]
    for nodes in halves(plan.shape.nodes):
        for per_node in halves(plan.shape.per_node):
            shape = Shape(nodes, per_node)
            for batch in fitted.model.line.batches:
                # On one node the model does not distinguish strategies.
                for strategy, compress in strategies if nodes > 1 else [("ddp", "none")]:
                    yield replace(
                        plan, shape=shape, batch=batch, strategy=strategy, compress=compress
                    )


def halves(most: int) -> list[int]:
    return [*halves(most // 2), most] if most > 1 else [most]


def curve_figure(curve: list[Prediction], title: str) -> Figure:
    """With the line without any waiting, and the 95 % interval where it is known."""
    figure = Figure(figsize=(6.0, 4.0), layout="constrained")
    axes = figure.add_subplot()
    nodes = [each.plan.shape.nodes for each in curve]
    (blue, marker), (orange, _) = LINES[:2]
    ideal = [each.samples / each.alone_s for each in curve]
    axes.plot(nodes, ideal, color=FAINT, linestyle="--", linewidth=1.2, label="no waiting")
    rates = [each.samples_per_s for each in curve]
    axes.plot(nodes, rates, color=blue, marker=marker, markersize=5, label="predicted")
    known = [
        (each.plan.shape.nodes, each.samples / each.high_s, each.samples / each.low_s)
        for each in curve
        if each.low_s and each.high_s
    ]
    if known:
        at, low, high = zip(*known, strict=True)
        axes.fill_between(at, low, high, color=blue, alpha=0.2, linewidth=0, label="95 % interval")
    bends = bend(curve)
    if bends is not None:
        label = f"efficiency below 0.5 from {bends.plan.shape.nodes} on"
        axes.axvline(bends.plan.shape.nodes, color=orange, linewidth=1.2, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(nodes, [f"{count:,}" for count in nodes], rotation=45 if len(nodes) > 8 else 0)
    axes.minorticks_off()
    axes.set_xlabel(f"nodes of {curve[0].plan.shape.per_node} process(es)")
    axes.set_ylabel("training samples/s")
    axes.set_title(title, fontsize=10)
    calm(axes)
    axes.legend(frameon=False, fontsize=8)
    return figure


def fit_lines(fitted: Fitted) -> Iterator[str]:
    """What the prediction is based on, residuals included."""
    model, line = fitted.model, fitted.model.line
    yield f"{fitted.name} on {fitted.machine}: fitted on {fitted.runs} runs of one machine"
    if len(line.batches) > 1:
        formula = f"{line.fixed_s * 1e3:.3g} ms + {line.per_sample_s * 1e3:.3g} ms a sample"
        yield f"a step of one process computes {formula}, over batches {_listed(line.batches)}"
    else:
        yield f"a step of one process takes {line.fixed_s * 1e3:.4g} ms at {_listed(line.batches)}"
    off = ", ".join(f"{batch}: {each:+.1%}" for batch, each in line.residuals)
    yield f"residuals by batch, of single runs: {off}"
    if model.sharing is not None:
        yield f"each more process on a machine slows all by {model.sharing:.1%}"
    if model.gradient_bytes is not None:
        yield f"gradient: {model.gradient_bytes / 1e6:.4g} MB, exchanged by {model.backend}"
    for assumption in fitted.assumed:
        yield f"assumed: {assumption}"


def prediction_lines(fitted: Fitted, result: Outcome, link: Link, epochs: int) -> Iterator[str]:
    each = result.prediction
    plan = each.plan
    over = f" over {link}" if plan.shape.nodes > 1 else ""
    batch = f"batch {plan.batch} each ({each.samples} an update)"
    yield f"{plan.shape} {_strategy(each)}, {batch}{over}"
    interval = (
        f"{NOT_KNOWN}: {why_no_interval(fitted, each)}"
        if each.low_s is None or each.high_s is None
        else f"{_ms(each.low_s)} to {_ms(each.high_s)}"
    )
    yield f"  step time    {_ms(each.step_s)} (95 % interval {interval})"
    parts = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in each.parts.items())
    yield f"  made of      {parts}; most: {each.dominating}"
    yield f"  samples/s    {each.samples_per_s:,.4g}"
    yield f"  efficiency   {each.efficiency:.3f} of {plan.shape.ranks} x one process"
    evaluation = _duration(result.eval_s)
    yield f"  epoch        {_duration(result.epoch_s)} of training, evaluation {evaluation}"
    total = None if result.whole_s is None else epochs * result.whole_s
    yield f"  {epochs:>3} epochs   {_duration(total)}"
    energy = (
        NOT_KNOWN if result.energy_j is None else f"{epochs * result.energy_j / 3.6e6:,.4g} kWh"
    )
    yield f"  energy       {energy} (devices alone)"
    yield f"  cost         {NOT_KNOWN if result.cost is None else f'{epochs * result.cost:,.4g}'}"
    if plan.shape.nodes > 1:
        yield f"  the textbook's ring would say {_ms(each.baseline_s)}"
        yield _link_note(each)
    if fitted.model.extrapolates(plan):
        yield (
            f"note: {neighbours(plan)} processes of a machine are extrapolated: at most "
            f"{fitted.model.shared_by} were measured"
        )
    batches = fitted.model.line.batches
    if not batches[0] <= plan.batch <= batches[-1]:
        yield f"note: batch {plan.batch} is extrapolated: {_listed(batches)} were measured"


def _link_note(prediction: Prediction) -> str:
    sizes = prediction.correction.sizes
    if prediction.correction.of_link:
        measured = ", ".join(f"{size / 1e6:.3g}" for size in sizes)
        return f"note: all-reduce over this link was measured, at {measured} MB"
    if sizes:
        return "note: this link was not measured: the closed form, corrected as over other links"
    return (
        "note: no all-reduce was measured: the closed form alone; measure the link with "
        "torchrun ... -m harness link --json > RECORDS/link.json"
    )


def why_no_interval(fitted: Fitted, prediction: Prediction) -> str:
    if fitted.model.line.spread is None:
        return "too few runs of one process repeat a batch"
    if fitted.model.extrapolates(prediction.plan):
        return f"at most {fitted.model.shared_by} processes of a machine were measured"
    if prediction.plan.shape.nodes > 1 and prediction.plan.strategy in APART:
        return (
            "connections that rest between exchanges begin slowly again, which is not modelled: "
            "over long delays a step takes longer"
        )
    if prediction.plan.shape.nodes > 1 and prediction.correction.spread is None:
        return "no spread of all-reduces over links was measured"
    return "what processes of a machine cost each other was measured once"


def curve_table(curve: list[Prediction]) -> Table:
    rows = []
    for each in curve:
        interval = (
            UNKNOWN if each.low_s is None or each.high_s is None
            else f"{each.low_s * 1e3:,.4g} to {each.high_s * 1e3:,.4g}"
        )  # fmt: skip
        rows.append((
            f"{each.plan.shape.nodes:,}", f"{each.step_s * 1e3:,.4g}", interval,
            f"{each.samples_per_s:,.4g}", f"{each.efficiency:.3f}", each.dominating,
        ))  # fmt: skip
    headings = ("nodes", "step ms", "95 % interval", "samples/s", "efficiency", "most")
    return table_of(headings, rows)


def bend_line(curve: list[Prediction]) -> str:
    bends = bend(curve)
    if bends is None:
        return f"no bend up to {curve[-1].plan.shape.nodes:,} nodes: efficiency stays above 0.5"
    return f"the curve bends: from {bends.plan.shape.nodes:,} nodes on efficiency is below 0.5"


def advice_table(choices: list[Choice]) -> Table:
    rows = []
    for choice in choices:
        each = choice.outcome.prediction
        rows.append((
            str(each.plan.shape), _strategy(each), str(each.plan.batch),
            duration(3600 * choice.hours), duration(3600 * choice.device_hours),
            UNKNOWN if choice.energy_kwh is None else f"{choice.energy_kwh:,.3g}",
            UNKNOWN if choice.cost is None else f"{choice.cost:,.2f}", f"{each.efficiency:.2f}",
        ))  # fmt: skip
    headings = (
        "setup", "strategy", "batch", "time", "device time", "kWh", "cost", "efficiency",
    )  # fmt: skip
    return table_of(headings, rows, keys=2)


def _strategy(prediction: Prediction) -> str:
    plan = prediction.plan
    compress = "" if plan.compress == "none" else f" {plan.compress}"
    every = f" every {plan.sync_every}" if plan.strategy in APART else ""
    return f"{plan.strategy}{compress}{every}"


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.4g} ms"


def _duration(seconds: float | None) -> str:
    return NOT_KNOWN if seconds is None else duration(seconds)


def run(options: argparse.Namespace) -> int:
    overrides = Overrides(options.gradient_mb, options.backend, options.sharing, options.train_size)
    fitted = fit_records(options.records, overrides)
    link = _link(options.link)
    plan = _scenario(options, fitted, link)
    if options.advise:
        return _advise(options, fitted, plan)
    result = outcome(fitted, predict(fitted.model, plan), options.cost_per_gpu_hour)
    curve = over_nodes(fitted.model, plan, plan.shape.nodes) if plan.shape.nodes > 1 else []
    if options.json:
        print_json({**as_fields(result), "assumed": fitted.assumed, "not_read": fitted.not_read})
    else:
        console = screen()
        lines = prediction_lines(fitted, result, link, options.epochs)
        for line in (*fit_lines(fitted), "", *lines):
            console.print(line)
        if curve:
            show(curve_table(curve))
            console.print(bend_line(curve))
    if options.plot:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        figure = curve_figure(curve or [result.prediction], f"{fitted.name} over {link}")
        figure.savefig(options.plot, dpi=150)
    return 0


def _scenario(options: argparse.Namespace, fitted: Fitted, link: Link) -> Scenario:
    nodes, per_node, _ = parse_setup(options.setup)
    if nodes > MOST:
        raise UserError(f"--setup {options.setup}: {MOST:,} nodes at most")
    if options.strategy not in STRATEGIES:
        raise UserError(f"--strategy {options.strategy}: there is {', '.join(STRATEGIES)}")
    if nodes > 1 and options.link is None:
        raise UserError(
            f"--setup {options.setup} has {nodes} nodes and the link between them is not known: "
            "give --link, for example 25gbit,0.1ms; torchrun ... -m harness link measures one"
        )
    if options.sync_every % options.fragments:
        raise UserError(f"--fragments {options.fragments}: must divide --sync_every")
    if (options.deadline or options.budget) and not options.advise:
        raise UserError("--deadline and --budget go with --advise")
    batch = options.batch or fitted.model.line.batches[-1]
    return Scenario(
        Shape(nodes, per_node), batch, wire_of(link), options.strategy, options.compress,
        options.sync_every, options.sync_scope, options.fragments, options.overlap, options.blocks,
        options.emulated,
    )  # fmt: skip


def _link(text: str | None) -> Link:
    """Commas are accepted for slashes; what the model has no place for is refused."""
    link = link_of("none" if text is None else text)
    if not isinstance(link, Link):
        raise UserError(f"--link {text}: pairs of nodes that differ are not modelled: "
                        "give the slowest of them")  # fmt: skip
    if link.loss or link.jitter_ms:
        raise UserError(f"--link {text}: loss and jitter are not modelled: leave them out")
    return link


def _totals(choice: Choice) -> dict[str, Any]:
    """For programs: what the whole run takes; of one epoch are epoch_s and eval_s alone."""
    of_run = {name: value for name, value in vars(choice).items() if name != "outcome"}
    of_epoch = as_fields(choice.outcome)
    return of_run | {name: of_epoch[name] for name in of_epoch if name not in ("cost", "energy_j")}


def _advise(options: argparse.Namespace, fitted: Fitted, plan: Scenario) -> int:
    if (options.deadline is None) == (options.budget is None):
        raise UserError("--advise needs --deadline (hours) or --budget, one of them")
    choices = advise(
        fitted, plan, options.epochs, options.deadline, options.budget, options.cost_per_gpu_hour
    )
    if options.json:
        print_json({
            "choices": [_totals(choice) for choice in choices],
            "not_read": fitted.not_read,
        })  # fmt: skip
        return 0 if choices else 1
    console = screen()
    limit = f"{options.deadline:g} h" if options.deadline else f"a budget of {options.budget:g}"
    for line in (*fit_lines(fitted), ""):
        console.print(line)
    if not choices:
        console.print(f"nothing up to {options.setup} keeps {limit} for {options.epochs} epochs")
        return 1
    how = "least device time" if options.deadline else "fastest"
    console.print(f"{options.epochs} epochs within {limit}, {how} first:")
    show(advice_table(choices[:SHOWN]))
    console.print(
        f"what leaves out more than {MOST_LEFT_OUT:.0%} of the training set, or ends before its "
        "first exchange, is not proposed; quality is not predicted: other effective batches and "
        "diloco are other trainings "
        "(python -m harness batches says from which batch on larger ones do not pay); "
        "over long delays diloco takes longer than predicted here (its connections rest)"
    )
    return 0

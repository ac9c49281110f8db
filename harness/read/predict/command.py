"""Samples per second over nodes as predicted, and where the curve bends."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure

from harness.core.command_line import print_json
from harness.core.links import Link, link_of
from harness.core.settings import UserError, parse_setup
from harness.core.strategies import STRATEGIES
from harness.read.drawing import LINES, calm
from harness.read.predict.advice import Choice, Outcome, advise, as_fields, outcome
from harness.read.predict.exchange import Shape, wire_of
from harness.read.predict.fitting import Fitted, Given, fit_records
from harness.read.predict.model import APART, Plan, Prediction, bend, over_nodes, predict
from harness.read.table import Table, screen, show, table_of


def curve_figure(curve: list[Prediction], title: str) -> Figure:
    """With the line that no waiting would give, and the 95 % interval where it is known."""
    figure = Figure(figsize=(6.0, 4.0), layout="constrained")
    axes = figure.add_subplot()
    nodes = [each.plan.shape.nodes for each in curve]
    rates = [each.samples_per_s for each in curve]
    (blue, marker), (orange, _) = LINES[:2]
    ideal = [each.samples / each.alone_s for each in curve]
    axes.plot(nodes, ideal, color="#777777", linestyle="--", linewidth=1.2, label="no waiting")
    axes.plot(nodes, rates, color=blue, marker=marker, markersize=5, label="predicted")
    known = [each for each in curve if each.low_s and each.high_s]
    if known:
        axes.fill_between(
            [each.plan.shape.nodes for each in known],
            [each.samples / (each.high_s or 1.0) for each in known],
            [each.samples / (each.low_s or 1.0) for each in known],
            color=blue, alpha=0.2, linewidth=0, label="95 % interval",
        )  # fmt: skip
    bends = bend(curve)
    if bends is not None:
        at = bends.plan.shape.nodes
        axes.axvline(at, color=orange, linewidth=1.2, label=f"efficiency below 0.5 from {at} on")
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


# ----
# A prediction in words: figures, what they were fitted on, and what was assumed.

UNKNOWN = "not known"


def fit_lines(fitted: Fitted) -> Iterator[str]:
    """What it stands on, residuals included."""
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
        f"{UNKNOWN}: {why_no_interval(fitted, each)}"
        if each.low_s is None or each.high_s is None
        else f"{_ms(each.low_s)} to {_ms(each.high_s)}"
    )
    yield f"  step time    {_ms(each.step_s)} (95 % interval {interval})"
    parts = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in each.parts.items())
    yield f"  made of      {parts}; most: {each.dominating}"
    yield f"  samples/s    {each.samples_per_s:,.4g}"
    yield f"  efficiency   {each.efficiency:.3f} of {plan.shape.ranks} x one process"
    evaluation = _of_time(result.eval_s)
    yield f"  epoch        {_of_time(result.epoch_s)} of training, evaluation {evaluation}"
    total = None if result.whole_s is None else epochs * result.whole_s
    yield f"  {epochs:>3} epochs   {_of_time(total)}"
    energy = UNKNOWN if result.energy_j is None else f"{epochs * result.energy_j / 3.6e6:,.4g} kWh"
    yield f"  energy       {energy} (devices alone)"
    yield f"  cost         {UNKNOWN if result.cost is None else f'{epochs * result.cost:,.4g}'}"
    if plan.shape.nodes > 1:
        yield f"  the textbook's ring would say {_ms(each.baseline_s)}"
        yield from _of_the_link(each)
    batches = fitted.model.line.batches
    if not batches[0] <= plan.batch <= batches[-1]:
        yield f"note: batch {plan.batch} is extrapolated: {_listed(batches)} were measured"


def _of_the_link(prediction: Prediction) -> Iterator[str]:
    sizes = prediction.correction.sizes
    if prediction.correction.of_link:
        measured = ", ".join(f"{size / 1e6:.3g}" for size in sizes)
        yield f"note: all-reduce over this link was measured, at {measured} MB"
    elif sizes:
        yield "note: this link was not measured: the closed form, corrected as over other links"
    else:
        yield (
            "note: no all-reduce was measured: the closed form alone; measure the link with "
            "torchrun ... -m harness link --json > RECORDS/link.json"
        )


def why_no_interval(fitted: Fitted, prediction: Prediction) -> str:
    if fitted.model.line.spread is None:
        return "too few runs of one process repeat a batch"
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
            "-" if each.low_s is None or each.high_s is None
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
        each = choice.found.prediction
        rows.append((
            str(each.plan.shape), _strategy(each), str(each.plan.batch), f"{choice.hours:,.3g}",
            f"{choice.device_hours:,.3g}", "-" if choice.cost is None else f"{choice.cost:,.2f}",
            f"{each.efficiency:.2f}",
        ))  # fmt: skip
    headings = ("setup", "strategy", "batch", "hours", "device hours", "cost", "efficiency")
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


def _of_time(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    return f"{seconds:,.4g} s" if seconds < 3600 else f"{seconds / 3600:,.3g} h"


# ----
# python -m harness predict RECORDS --setup 16_8 --link 25gbit,0.1ms: what it would take.

SHOWN = 5  # choices of --advise


MOST = 100_000  # nodes; what is beyond is a slip of the finger


def run(options: argparse.Namespace) -> int:
    given = Given(options.gradient_mb, options.backend, options.sharing, options.train_size)
    fitted = fit_records(options.records, given)
    link = _link(options.link)
    plan = _plan(options, fitted, link)
    if options.advise:
        return _advise(options, fitted, plan)
    result = outcome(fitted, predict(fitted.model, plan), options.cost_per_gpu_hour)
    curve = over_nodes(fitted.model, plan, plan.shape.nodes) if plan.shape.nodes > 1 else []
    if options.json:
        print_json({**as_fields(result), "assumed": fitted.assumed})
    else:
        console = screen()
        for line in (*fit_lines(fitted), "",
                     *prediction_lines(fitted, result, link, options.epochs)):  # fmt: skip
            console.print(line)
        if curve:
            show(curve_table(curve))
            console.print(bend_line(curve))
    if options.plot:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        figure = curve_figure(curve or [result.prediction], f"{fitted.name} over {link}")
        figure.savefig(options.plot, dpi=150)
    return 0


def _plan(options: argparse.Namespace, fitted: Fitted, link: Link) -> Plan:
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
    return Plan(
        Shape(nodes, per_node), batch, wire_of(link), options.strategy, options.compress,
        options.sync_every, options.sync_scope, options.fragments, options.overlap, options.blocks,
        options.emulated,
    )  # fmt: skip


def _link(text: str | None) -> Link:
    """A comma does as well as a stroke; what the model has no place for is refused."""
    found = link_of("none" if text is None else text.replace(",", "/"))
    if not isinstance(found, Link):
        raise UserError(f"--link {text}: pairs of nodes that differ are not modelled: "
                        "give the slowest of them")  # fmt: skip
    if found.loss or found.jitter_ms:
        raise UserError(f"--link {text}: loss and jitter are not modelled: leave them out")
    return found


def _advise(options: argparse.Namespace, fitted: Fitted, plan: Plan) -> int:
    if (options.deadline is None) == (options.budget is None):
        raise UserError("--advise needs --deadline (hours) or --budget, one of them")
    choices = advise(
        fitted, plan, options.epochs, options.deadline, options.budget, options.cost_per_gpu_hour
    )
    if options.json:
        print_json({"choices": [_choice_fields(choice) for choice in choices]})
        return 0 if choices else 1
    console = screen()
    limit = f"{options.deadline:g} h" if options.deadline else f"a budget of {options.budget:g}"
    for line in (*fit_lines(fitted), ""):
        console.print(line)
    if not choices:
        console.print(f"nothing up to {options.setup} keeps {limit} for {options.epochs} epochs")
        return 1
    how = "fewest device hours" if options.deadline else "fastest"
    console.print(f"{options.epochs} epochs within {limit}, {how} first:")
    show(advice_table(choices[:SHOWN]))
    console.print(
        "quality is not predicted: other effective batches and diloco are other trainings "
        "(python -m harness batches says from which batch on larger ones do not pay); "
        "over long delays diloco takes longer than is said here (its connections rest)"
    )
    return 0


def _choice_fields(choice: Choice) -> dict[str, Any]:
    own = {"hours": choice.hours, "device_hours": choice.device_hours, "cost": choice.cost}
    return {**own, **as_fields(choice.found)}

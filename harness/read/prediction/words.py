"""A prediction in words: figures, what they were fitted on, and what was assumed."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.table import Table

from harness.links import Link
from harness.read.prediction.advice import Choice
from harness.read.prediction.fitting import Fitted
from harness.read.prediction.model import APART, Prediction, bend
from harness.read.prediction.outcome import Outcome

UNKNOWN = "not known"


def fit_lines(fitted: Fitted) -> Iterator[str]:
    """What it stands on, residuals included."""
    model, line = fitted.model, fitted.model.line
    yield f"{fitted.name} on {fitted.machine}: fitted on {fitted.runs} runs of one machine"
    if len(line.batches) > 1:
        said = f"{line.fixed_s * 1e3:.3g} ms + {line.per_sample_s * 1e3:.3g} ms a sample"
        yield f"a step of one process computes {said}, over batches {_listed(line.batches)}"
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


def prediction_lines(fitted: Fitted, found: Outcome, link: Link, epochs: int) -> Iterator[str]:
    each = found.prediction
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
    evaluation = _of_time(found.eval_s)
    yield f"  epoch        {_of_time(found.epoch_s)} of training, evaluation {evaluation}"
    total = None if found.whole_s is None else epochs * found.whole_s
    yield f"  {epochs:>3} epochs   {_of_time(total)}"
    energy = UNKNOWN if found.energy_j is None else f"{epochs * found.energy_j / 3.6e6:,.4g} kWh"
    yield f"  energy       {energy} (devices alone)"
    yield f"  cost         {UNKNOWN if found.cost is None else f'{epochs * found.cost:,.4g}'}"
    if plan.shape.nodes > 1:
        yield f"  the textbook's ring would say {_ms(each.baseline_s)}"
        yield from _of_the_link(each)
    batches = fitted.model.line.batches
    if not batches[0] <= plan.batch <= batches[-1]:
        yield f"note: batch {plan.batch} is extrapolated: {_listed(batches)} were measured"


def _of_the_link(found: Prediction) -> Iterator[str]:
    sizes = found.correction.sizes
    if found.correction.of_link:
        measured = ", ".join(f"{size / 1e6:.3g}" for size in sizes)
        yield f"note: all-reduce over this link was measured, at {measured} MB"
    elif sizes:
        yield "note: this link was not measured: the closed form, corrected as over other links"
    else:
        yield (
            "note: no all-reduce was measured: the closed form alone; measure the link with "
            "torchrun ... -m harness link --json > RECORDS/link.json"
        )


def why_no_interval(fitted: Fitted, found: Prediction) -> str:
    if fitted.model.line.spread is None:
        return "too few runs of one process repeat a batch"
    if found.plan.shape.nodes > 1 and found.plan.strategy in APART:
        return (
            "connections that rest between exchanges begin slowly again, which is not modelled: "
            "over long delays a step takes longer"
        )
    if found.plan.shape.nodes > 1 and found.correction.spread is None:
        return "no spread of all-reduces over links was measured"
    return "what processes of a machine cost each other was measured once"


def curve_table(curve: list[Prediction]) -> Table:
    table = _table("nodes", "step ms", "95 % interval", "samples/s", "efficiency", "most")
    for each in curve:
        interval = (
            "-" if each.low_s is None or each.high_s is None
            else f"{each.low_s * 1e3:,.4g} to {each.high_s * 1e3:,.4g}"
        )  # fmt: skip
        table.add_row(
            f"{each.plan.shape.nodes:,}", f"{each.step_s * 1e3:,.4g}", interval,
            f"{each.samples_per_s:,.4g}", f"{each.efficiency:.3f}", each.dominating,
        )  # fmt: skip
    return table


def bend_line(curve: list[Prediction]) -> str:
    bends = bend(curve)
    if bends is None:
        return f"no bend up to {curve[-1].plan.shape.nodes:,} nodes: efficiency stays above 0.5"
    return f"the curve bends: from {bends.plan.shape.nodes:,} nodes on efficiency is below 0.5"


def advice_table(choices: list[Choice]) -> Table:
    table = _table("setup", "strategy", "batch", "hours", "device hours", "cost", "efficiency")
    for choice in choices:
        each = choice.found.prediction
        table.add_row(
            str(each.plan.shape), _strategy(each), str(each.plan.batch), f"{choice.hours:,.3g}",
            f"{choice.device_hours:,.3g}", "-" if choice.cost is None else f"{choice.cost:,.2f}",
            f"{each.efficiency:.2f}",
        )  # fmt: skip
    return table


def _strategy(found: Prediction) -> str:
    plan = found.plan
    compress = "" if plan.compress == "none" else f" {plan.compress}"
    every = f" every {plan.sync_every}" if plan.strategy in APART else ""
    return f"{plan.strategy}{compress}{every}"


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.4g} ms"


def _of_time(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    return f"{seconds:,.4g} s" if seconds < 3600 else f"{seconds / 3600:,.3g} h"

"""python -m harness predict RECORDS --setup 16_8 --link 0.1ms/25gbit: what a step, epochs, energy
and cost come to there, and from how many nodes on efficiency is below 0.5.
"""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from harness.core.collectives import BACKEND, MEANS, Shape, wire_of
from harness.core.command_line import print_json
from harness.core.links import Link, link_of
from harness.core.records import FINISHED
from harness.core.rules import FLAGS_OF_A_STRATEGY, OF_FRAGMENTS, Combination, refuse
from harness.core.settings import Settings, UserError, parse_setup
from harness.core.strategies import OF_ONE_STRATEGY, STRATEGIES
from harness.core.topology import effective_batch
from harness.read.labels import UNKNOWN, counted, digits, duration
from harness.read.predict.cases import measured_as, measured_otherwise
from harness.read.predict.facts import Overrides, shape_of
from harness.read.predict.fitting import Fitted, fit_records
from harness.read.predict.lossy.messages import assumption
from harness.read.predict.model import (
    EXCHANGE,
    Prediction,
    below_half_efficiency,
    over_nodes,
    predict,
)
from harness.read.predict.phases import EPOCH_END, EVALUATION, SAVING, START
from harness.read.predict.scenario import (
    APART,
    Scenario,
    exchanges_of_update,
    is_allreduce,
    is_simulated,
    neighbours,
    spread_of_form,
)
from harness.read.records.runs import Run
from harness.read.records.selection import start_on
from harness.read.table import Table, screen, show

NOT_KNOWN = "unknown"  # in a sentence; in tables it is UNKNOWN
BETWEEN = " (after each epoch but the last)"
ON_EACH_NODE = (
    " (on each node; typed alone, python -m harness link prints it with address and ranks, also "
    "for SLURM)"
)
OFTEN = 1.1  # times the exchanges per update of a long run
MOST = 100_000  # nodes; what is beyond is a typing error
INNER = ("prediction", "phases", "price")  # fields of an Outcome that --json gives in other fields


@dataclass(frozen=True)
class Outcome:
    """A prediction for an epoch of the records' training set; None: unknown."""

    prediction: Prediction
    updates: int | None
    epoch_s: float | None  # training alone
    eval_s: float | None
    energy_j: float | None  # of the devices, in training
    phases: dict[str, float]  # what else a run takes, as far as it is known
    price: float | None = None  # of an hour of one device

    @property
    def evaluated_epoch_s(self) -> float | None:
        """An epoch with its evaluation, as far as that is known."""
        return None if self.epoch_s is None else self.epoch_s + (self.eval_s or 0.0)

    @property
    def cost(self) -> float | None:
        """Of an epoch, evaluation included where it is known."""
        return self._cost_of(self.evaluated_epoch_s)

    def run_s(self, epochs: int, restarts: int = 0) -> float | None:
        """Seconds until the last epoch is evaluated; its saving comes after that. A restart starts
        up again, and repeats half an epoch on average.
        """
        if self.evaluated_epoch_s is None:
            return None
        between_s = sum(self.phases.get(name, 0.0) for name in (SAVING, EPOCH_END))
        once_s = self.phases.get(START, 0.0)
        again_s = restarts * (once_s + self.evaluated_epoch_s / 2)
        return once_s + epochs * self.evaluated_epoch_s + (epochs - 1) * between_s + again_s

    def run_cost(self, epochs: int, restarts: int = 0) -> float | None:
        """The cost of all the time that run_s counts."""
        return self._cost_of(self.run_s(epochs, restarts))

    def _cost_of(self, seconds: float | None) -> float | None:
        if self.price is None or seconds is None:
            return None
        return self.price * self.prediction.plan.shape.ranks * seconds / 3600


def outcome(fitted: Fitted, prediction: Prediction, cost_per_gpu_hour: float | None) -> Outcome:
    updates = fitted.updates_of(prediction.samples)
    plan = prediction.plan
    known = fitted.phases.at(plan.shape, plan.wire, fitted.model.congestion)
    phases = {name: phase.fixed_s for name, phase in known.items()}
    return Outcome(
        prediction,
        updates,
        epoch_s=updates * prediction.step_s if updates else None,
        eval_s=phases.get(EVALUATION),
        energy_j=_energy(fitted, prediction, updates),
        phases=phases,
        price=cost_per_gpu_hour,
    )


def _energy(fitted: Fitted, prediction: Prediction, updates: int | None) -> float | None:
    """Joules of the devices per epoch. Devices that wait draw their idle power; where that is
    unknown, the energy of steps that wait is unknown too.
    """
    waits_s = prediction.parts[EXCHANGE]
    if fitted.power_w is None or not updates or (waits_s > 0 and fitted.idle_w is None):
        return None
    busy_j = fitted.power_w * (prediction.step_s - waits_s)
    return updates * prediction.plan.shape.ranks * (busy_j + (fitted.idle_w or 0.0) * waits_s)


def as_fields(result: Outcome) -> dict[str, Any]:
    """The outcome as plain values, for programs (--json)."""
    each, plan = result.prediction, result.prediction.plan
    return {
        **plan.fields,
        "effective_batch": each.samples,
        "step_s": each.step_s,
        "step_low_s": each.low_s,
        "step_high_s": each.high_s,
        "parts_s": each.parts,
        "dominating": each.dominating,
        "alpha_beta_step_s": each.baseline_s,
        "simulated": is_simulated(plan),
        "link_measured": each.correction.of_link and is_allreduce(plan),
        "samples_per_s": each.samples_per_s,
        "efficiency": each.efficiency,
        **{name: value for name, value in vars(result).items() if name not in INNER},
        "cost": result.cost,
        "phases_s": result.phases,
    }


def fit_lines(fitted: Fitted) -> Iterator[str]:
    """What the prediction is based on, residuals included."""
    model, line = fitted.model, fitted.model.line
    yield fitted.about
    if len(line.batches) > 1:
        formula = f"{line.fixed_s * 1e3:.3g} ms + {line.per_sample_s * 1e3:.3g} ms a sample"
        yield f"a step of one process computes {formula}, over batches {_listed(line.batches)}"
    else:
        yield f"a step of one process takes {line.fixed_s * 1e3:.4g} ms at {_listed(line.batches)}"
    off = ", ".join(f"{batch}: {each:+.1%}" for batch, each in line.residuals)
    known = (
        f" by batch, of single runs: {off}" if line.freedom > 0 else ": none, as no run is repeated"
    )
    yield f"residuals{known}"
    if model.sharing is not None:
        slower = f"{100 * model.sharing:.3g} %"
        yield (
            f"each additional process on a machine makes all of them {slower} slower"
            f"{fitted.of_sharing}"
        )
    if model.gradient_bytes is not None:
        yield f"gradient: {model.gradient_bytes / 1e6:.4g} MB, exchanged by {model.backend}"
    for each in fitted.assumed:
        yield f"assumed: {each}"


def prediction_lines(
    fitted: Fitted, result: Outcome, link: Link, epochs: int, restarts: int = 0,
    measured_s: Sequence[float] = (),
) -> Iterator[str]:  # fmt: skip
    each = result.prediction
    plan = each.plan
    over = f" over {link}" if plan.shape.nodes > 1 else ""
    batch = f"batch {plan.batch} each ({each.samples} an update)"
    yield f"{plan.shape} {plan.label}, {batch}{over}"
    # Of what is simulated it is.
    without_error = {*fitted.assumed} - {assumption(fitted.model.congestion)}
    interval = (
        f"{NOT_KNOWN}: {why_no_interval(fitted, each)}"
        if each.low_s is None or each.high_s is None
        else f"{_ms(each.low_s)} to {_ms(each.high_s)}"
        f"{'; the error of what is assumed is not in it' if without_error else ''}"
    )
    yield f"  step time    {_ms(each.step_s)} (95 % interval {interval})"
    yield from _measured_lines(fitted, each, measured_s)
    parts = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in each.parts.items())
    yield f"  made of      {parts}; most: {each.dominating}"
    yield f"  samples/s    {digits(each.samples_per_s)}"
    yield f"  efficiency   {each.efficiency:.3f} of {plan.shape.ranks} x one process"
    evaluation = _duration(result.eval_s)
    yield f"  epoch        training {_duration(result.epoch_s)}, evaluation {evaluation}"
    if result.updates == 0:
        yield (
            f"               an update takes {each.samples:,} samples, and the records have "
            f"{fitted.train_samples:,}: choose fewer processes or a smaller --batch"
        )
    run_time = _duration(result.run_s(epochs, restarts))
    several = "epochs" if epochs > 1 else "epoch "
    yield f"  {epochs:>3} {several}   {run_time}, with start, evaluation and saving where known"
    beside = [
        f"{name} {_ms(seconds)}{BETWEEN if name in (SAVING, EPOCH_END) else ''}"
        for name, seconds in result.phases.items()
    ]
    yield f"  beside steps {', '.join(beside) or NOT_KNOWN}"
    energy = (
        NOT_KNOWN if result.energy_j is None else f"{digits(epochs * result.energy_j / 3.6e6)} kWh"
    )
    yield f"  energy       {energy} (of the devices, without processors and fans)"
    cost = result.run_cost(epochs, restarts)
    known = NOT_KNOWN if cost is None else f"{digits(cost)} (unit of --cost_per_gpu_hour)"
    yield f"  cost         {known}"
    if plan.shape.nodes > 1:
        yield f"  textbook     {_ms(each.baseline_s)} (a ring's delays and bytes, after computing)"
        yield _link_note(each, link, fitted.folder)
        yield _phases_note(fitted, plan.shape)
        yield from _ratio_note(fitted)
        yield from _host_note(fitted, plan)
        if math.isinf(plan.wire.bytes_per_s) and link.delay_ms:
            yield f"note: --link {link} has no rate: bytes take no time"
        yield from _few_updates_note(plan)
    if fitted.model.extrapolates(plan):
        yield (
            f"note: {neighbours(plan)} processes of a machine are extrapolated: at most "
            f"{fitted.model.shared_by} were measured"
        )
    batches = fitted.model.line.batches
    if not batches[0] <= plan.batch <= batches[-1]:
        yield f"note: batch {plan.batch} is extrapolated: {_listed(batches)} were measured"


def _measured_lines(
    fitted: Fitted, prediction: Prediction, measured_s: Sequence[float]
) -> Iterator[str]:
    """What runs measured; where none is like the prediction, what they did otherwise."""
    plan = prediction.plan
    other = None if measured_s or plan.shape.nodes == 1 else measured_otherwise(fitted, plan)
    if measured_s:
        off = f"{prediction.step_s / statistics.mean(measured_s) - 1:+.1%}"
        yield f"  measured     {_mean_text(measured_s)}: the prediction is off by {off}"
    elif other is not None:
        alike, seconds = other
        nodes = "emulated" if alike.emulated else "real"
        emulated = " --emulated" if alike.emulated else ""
        flags = f"--exchange {alike.exchange}{emulated}"
        without = " without --emulated" if plan.emulated and not alike.emulated else ""
        yield (
            f"  measured     {_mean_text(seconds)} with --exchange {alike.exchange} on {nodes} "
            f"nodes: {flags}{without} compares with them"
        )
    elif plan.shape.nodes > 1:
        yield from _exchange_note(fitted, plan)


def _mean_text(seconds: Sequence[float]) -> str:
    return f"{_ms(statistics.mean(seconds))}, mean of {counted(len(seconds), 'run')}"


def _link_note(prediction: Prediction, link: Link, folder: str) -> str:
    sizes, plan = prediction.correction.sizes, prediction.plan
    if plan.exchange in MEANS:
        return (
            f"note: --exchange {plan.exchange}, by a closed form. Measured all-reduces only tell "
            f"--exchange auto what the backend takes: there {'are some' if sizes else 'are none'}"
        )
    if not is_allreduce(plan):
        form = "by a closed form; measured all-reduces do not apply"
        return f"note: --compress {plan.compress}, {form}"
    if prediction.correction.of_link:
        measured = ", ".join(f"{size / 1e6:.3g}" for size in sizes)
        return f"note: all-reduce over this link was measured, at {measured} MB"
    if is_simulated(plan):
        corrected = ", corrected as over other links," if sizes else ""
        return f"note: the closed form{corrected} and the link's loss and jitter by simulation"
    if sizes:
        return "note: this link was not measured: the closed form, corrected as over other links"
    start = start_on(plan.shape.nodes, plan.shape.per_node, plan.emulated, str(link))
    return (
        "note: no all-reduce was measured: the closed form alone; measure the link with "
        f"{shlex.join([*start, '-m', 'harness', 'link', '--json'])} > "
        f"{shlex.quote(f'{folder}/link.json')}{'' if plan.emulated else ON_EACH_NODE}"
    )


def _exchange_note(fitted: Fitted, plan: Scenario) -> Iterator[str]:
    """A note where runs on several nodes exchanged in another way than is predicted."""
    runs = [run for run in _over_nodes(fitted) if run.identity.get("strategy") == plan.strategy]
    ways = sorted({str(run.identity.get("exchange") or BACKEND) for run in runs})
    if runs and plan.exchange not in ways:
        yield (
            f"  note: predicted with --exchange {plan.exchange}, while {counted(len(runs), 'run')} "
            f"of {plan.strategy} on several nodes exchanged by {', '.join(ways)}: --exchange "
            f"{ways[0]} predicts {'these' if len(ways) == 1 else 'the first'}"
        )


def _ratio_note(fitted: Fitted) -> Iterator[str]:
    """A note where `plan` may give other times."""
    if _over_nodes(fitted):
        yield (
            "note: these are the model's times; plan multiplies those of steps by measured / "
            "modelled times of runs over links, which gives others"
        )


def _over_nodes(fitted: Fitted) -> list[Run]:
    return [run for run in fitted.selected
            if run.state == FINISHED and shape_of(run).nodes > 1]  # fmt: skip


def _phases_note(fitted: Fitted, shape: Shape) -> str:
    recorded = fitted.phases.recorded(shape)
    if recorded is None:
        return (
            "note: no run crossed a link: what starting takes over it is not known; evaluation and "
            "saving are assumed to wait as the current version's do"
        )
    of = f"setup {recorded}{'' if recorded == shape else f', as none of {shape} was measured'}"
    return f"note: the times of starting, evaluation and saving are from runs of {of}"


def _host_note(fitted: Fitted, plan: Scenario) -> Iterator[str]:
    reduces = STRATEGIES[plan.strategy].reduces_gradients
    if reduces and plan.compress not in ("none", *fitted.model.hosts):
        yield (
            f"note: what compressing by {plan.compress} takes is in no record, and counts as "
            f"nothing: measure one run, with --setup 1_2 --compress {plan.compress}"
        )


def _few_updates_note(plan: Scenario) -> Iterator[str]:
    """A note where a run is so short that it exchanges more, or less, often than a long one."""
    if plan.strategy not in APART or not plan.updates:
        return
    apart, every = plan.updates - plan.sync_first, plan.sync_every // plan.fragments
    if apart < every:
        yield (
            f"note: {apart} updates are fewer than --sync_every {plan.sync_every}: only the last "
            "exchange happens; --epochs gives the length of your run"
        )
    elif exchanges_of_update(plan) * every > OFTEN:
        yield (
            f"note: a run of {apart} updates exchanges {exchanges_of_update(plan) * apart:.0f} "
            "times, the last time after its last update; --epochs gives the length of your run"
        )


def why_no_interval(fitted: Fitted, prediction: Prediction) -> str:
    plan = prediction.plan
    if is_simulated(plan) and plan.shape.nodes > 2:
        return "how far simulated loss and jitter are off was measured on two nodes alone"
    if plan.shape.nodes > 1 and spread_of_form(fitted.model.backend, plan) is None:
        return "how far this exchange is off its closed form was not measured"
    if fitted.model.line.spread is None:
        return "too few runs of one process repeat a batch"
    if fitted.model.extrapolates(prediction.plan):
        return f"at most {fitted.model.shared_by} processes of a machine were measured"
    if not fitted.model.line.spans(plan.batch):
        return f"batch {plan.batch} is outside those that were measured"
    if prediction.correction.sizes and prediction.correction.spread is None:
        return "one all-reduce over a link was measured, once"
    return "the slowdown of processes that share a machine was measured only once"


def curve_table(curve: list[Prediction]) -> Table:
    ways = dict.fromkeys(each.plan.exchange for each in curve if each.plan.shape.nodes > 1)
    differ, rows = len(ways) > 1, []
    for each in curve:
        interval = (
            UNKNOWN if each.low_s is None or each.high_s is None
            else f"{digits(each.low_s * 1e3)} to {digits(each.high_s * 1e3)}"
        )  # fmt: skip
        rows.append((
            f"{each.plan.shape.nodes:,}", digits(each.step_s * 1e3), interval,
            digits(each.samples_per_s), f"{each.efficiency:.3f}", each.dominating,
            *([each.plan.exchange] if differ else []),
        ))  # fmt: skip
    headings = ("nodes", "step ms", "95 % interval", "samples/s", "efficiency", "most")
    return Table((*headings, "exchange") if differ else headings, rows)


def half_efficiency_line(curve: list[Prediction]) -> str:
    below = below_half_efficiency(curve)
    low = [f"{each.plan.shape.nodes:,}" for each in curve if each.efficiency < 0.5]
    if below is None and low:
        return f"efficiency is below 0.5 on {', '.join(low)} of these numbers of nodes"
    if below is None:
        return f"efficiency stays above 0.5 up to {curve[-1].plan.shape.nodes:,} nodes"
    if below is curve[0]:
        return "efficiency is below 0.5 on one node already, and on more"
    return f"from {below.plan.shape.nodes:,} nodes on efficiency is below 0.5"


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


def _ms(seconds: float) -> str:
    return f"{digits(seconds * 1e3)} ms"


def _duration(seconds: float | None) -> str:
    return NOT_KNOWN if seconds is None else duration(seconds)


def print_prediction(options: argparse.Namespace) -> tuple[list[Prediction], str]:
    """Print the prediction; return those over the numbers of nodes, with a title."""
    link = uniform(options.link)  # before the records, whose reading takes longer
    fitted = fit_records(options.records, Overrides.of(options))
    plan = _scenario(options, fitted, link)
    if not plan.wire.is_steady and plan.shape.nodes > 1:
        fitted = replace(fitted, assumed=(*fitted.assumed, assumption(fitted.model.congestion)))
    result = outcome(fitted, predict(fitted.model, plan), options.cost_per_gpu_hour)
    measured_s = measured_as(fitted, result.prediction.plan)
    nodes = plan.shape.nodes
    curve = over_nodes(fitted.model, plan, nodes, fitted.updates_of) if nodes > 1 else []
    if options.json:
        print_json({
            **as_fields(result), "run_s": result.run_s(options.epochs, options.restarts),
            "run_cost": result.run_cost(options.epochs, options.restarts),
            "assumed": fitted.assumed, "not_read": fitted.not_read, "measured_step_s": measured_s,
        })  # fmt: skip
    else:
        console = screen()
        run = options.epochs, options.restarts
        lines = prediction_lines(fitted, result, link, *run, measured_s)
        for line in (*fit_lines(fitted), "", *lines):
            console.print(line)
        if curve:
            show(curve_table(curve))
            console.print(half_efficiency_line(curve))
    return curve or [result.prediction], f"{fitted.name} over {link}"


def _scenario(options: argparse.Namespace, fitted: Fitted, link: Link) -> Scenario:
    nodes, per_node, _ = parse_setup(options.setup)
    if nodes > MOST:
        raise UserError(f"--setup {options.setup}: {MOST:,} nodes at most")
    if options.strategy not in STRATEGIES:
        raise UserError(f"--strategy {options.strategy}: there is {', '.join(STRATEGIES)}")
    if nodes > 1 and options.link is None:
        raise UserError(
            f"--setup {options.setup} has {nodes} nodes and the link between them is not known: "
            "give --link, for example 0.1ms/25gbit; torchrun ... -m harness link measures one"
        )
    _check_flags(options)
    batch = options.batch or fitted.model.line.batches[-1]
    samples = effective_batch(batch, fitted.model.grad_acc, nodes * per_node)
    updates = fitted.updates_of(samples) or None
    return Scenario(
        Shape(nodes, per_node), batch, wire_of(link), options.strategy, options.compress,
        options.sync_every, options.sync_scope, options.fragments, options.overlap,
        fitted.blocks if STRATEGIES[options.strategy].shards else None,
        options.emulated, options.exchange, sync_first=options.sync_first,
        epoch_updates=updates, updates=updates and updates * options.epochs,
    )  # fmt: skip


def _check_flags(options: argparse.Namespace) -> None:
    """UserError for a flag that this strategy does not have, as a training refuses it."""
    known = {each.name: each.default for each in fields(Scenario) if each.name in OF_ONE_STRATEGY}
    given = {name: value for name, value in vars(options).items()
             if name in known and value != known[name]}  # fmt: skip
    settings = Settings("", strategy=options.strategy, **given)
    refuse(FLAGS_OF_A_STRATEGY, Combination(settings))
    whole = replace(settings, sync_every=options.sync_every, fragments=options.fragments)
    refuse(OF_FRAGMENTS, Combination(whole))
    if options.blocks and not STRATEGIES[options.strategy].shards:
        owners = ", ".join(name for name, strategy in STRATEGIES.items() if strategy.shards)
        raise UserError(f"--blocks does nothing with --strategy {options.strategy}: it belongs to "
                        f"{owners}")  # fmt: skip


def uniform(text: str | None) -> Link:
    """The link of --link, with commas accepted for slashes; UserError if pairs of nodes differ."""
    link = link_of("none" if text is None else text)
    if not isinstance(link, Link):
        raise UserError(f"--link {text}: pairs of nodes that differ are not modelled: "
                        "give the slowest of them")  # fmt: skip
    return link

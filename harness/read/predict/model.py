"""The step of a topology, predicted from what was measured on one machine and what links carry.

Computing is a line over the batch; processes of one machine slow each other; the exchange counts as
far as it outlasts the backward pass that it overlaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile

from harness.core.collectives import (
    ALL_TO_ALL,
    BACKEND,
    FAR_S,
    GLOO,
    MEANS,
    TCP_SEGMENT,
    Cost,
    Shape,
    fastest,
    ring_share,
    ways,
)
from harness.core.rules import FLAGS_OF_A_STRATEGY, SCHEDULES, Combination, refuse
from harness.core.settings import Settings, UserError
from harness.core.strategies import GRADIENT_CODES, STRATEGIES, chooses_exchange, is_coded
from harness.core.topology import effective_batch
from harness.read.predict import exchange
from harness.read.predict.computing import StepTime, crowd, slowdown
from harness.read.predict.exchange import Correction, Reduction
from harness.read.predict.lossy.tcp import CUBIC, usual_window
from harness.read.predict.scenario import (
    APART,
    Scenario,
    exchanges_of_update,
    form_of,
    is_allreduce,
    is_simulated,
    neighbours,
    one_sends,
    rested_of_update,
    spread_of_form,
    spread_of_simulation,
    timed_apart,
    together_of,
    trains_apart,
    units_of,
)
from harness.read.statistics import Error, welch_half, welch_sum

# Bytes per number on the wire as a share of four, where no record says what was sent: int8 adds a
# scale of four bytes per block of 1024 numbers, int4 one per block of 256.
WIRE_SHARES = {
    "none": 1.0,
    "bf16": 0.5,
    "fp16": 0.5,
    "int8": 0.25 + 1 / 1024,
    "int4": 0.125 + 1 / 256,
}
AUTO = "auto"
COMPUTE, SHARING, EXCHANGE = "computing", "sharing a machine", "waiting for the exchange"
# The following were fitted on prediction_fresh, prediction_same_hour and prediction_next: twelve
# links between two emulated nodes, on two machines.
# On one machine, replicas that train apart and have a core each slow each other by this share of
# what DDP's processes do. The rest is DDP's exchange, beside the exposed part of it.
SHARED_APART = 0.25
# Replicas do not reach an exchange at the same time. This takes part of an update; and part of
# a round trip, unless all-reduces were measured over a link: their factor includes it.
APART_ROUND_TRIPS, APART_UPDATES = 0.3, 0.8
# Where connections keep their windows while they rest (bbr): by how much an exchange takes longer
# after a rest, and the first direct exchange of replicas.
KEPT_WINDOW_ROUND_TRIPS, OPENING_ROUND_TRIPS = 0.5, 1.0
# Packets between emulated nodes also pass the emulation of the link, on the same cores.
EMULATED_HOST = 1.5


@dataclass(frozen=True)
class Model:
    """The model of a step, as fitted."""

    line: StepTime  # of one process, over its batch
    sharing: float | None  # each further process with its own cores slows all by this share
    sharing_spread: float | None  # standard deviation of that share
    inside_s: float  # exposed exchange of two processes on one machine
    gradient_bytes: int | None
    backend: str
    grad_acc: int = 1
    cap_mb: float | None = None
    table: tuple[Reduction, ...] = ()
    shared_by: int = 1  # the most processes of one machine that were measured
    # (strategy, compress) -> bytes that were sent as a share of the gradient's
    payloads: Mapping[tuple[str, str], float] = field(default_factory=dict)
    # compress -> seconds that an exchange of two processes takes on one machine, where measured
    hosts: Mapping[str, float] = field(default_factory=dict)
    sharing_freedom: int = 0  # degrees, of sharing_spread
    slow_start_after_idle: bool = True  # TCP restarts with a small window after a rest
    congestion: str = CUBIC  # TCP's, which decides what losses cost
    own_cores: int | None = None  # for how many processes a machine has cores; None: GPUs, unknown
    notes: tuple[str, ...] = ()  # on runs that were left out of the fit

    def payload(self, plan: Scenario) -> float:
        """Bytes that a unit hands over when it exchanges all of its weights or gradients."""
        known = self.payloads.get((plan.strategy, plan.compress))
        share = WIRE_SHARES[plan.compress] if known is None else known
        return (self.gradient_bytes or 0) * share

    def slower(self, plan: Scenario, share: float) -> float:
        """How many times as long processes of a machine compute, at this share of `sharing`."""
        return slowdown((self.sharing or 0.0) * share, neighbours(plan), self.own_cores)

    def extrapolates(self, plan: Scenario) -> bool:
        """Whether more processes share a machine than were ever measured."""
        return neighbours(plan) > self.shared_by and bool(self.sharing)


@dataclass(frozen=True)
class Prediction:
    """The prediction of one update; its parts add up to it."""

    plan: Scenario
    step_s: float
    parts: dict[str, float]
    low_s: float | None  # 95 % interval; None: too little is known
    high_s: float | None
    baseline_s: float  # with the textbook's ring after the backward pass
    samples: int  # of an update
    alone_s: float  # a step of one process
    correction: Correction
    error: Error | None  # of step_s; None: too little is known

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.step_s

    @property
    def efficiency(self) -> float:
        """Weak scaling: the rate as a share of that of as many processes that never wait."""
        return self.alone_s / self.step_s

    @property
    def dominating(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name])


def predict(model: Model, plan: Scenario) -> Prediction:
    """Predict an update; UserError where the model cannot. --exchange auto becomes its choice."""
    if plan.exchange == AUTO:
        plan = replace(plan, exchange=BACKEND)
        check(model, plan)
        plan = replace(plan, exchange=chosen_way(model, plan))
    check(model, plan)
    alone_s = model.line.step_s(plan.batch)
    slower = model.slower(plan, _shared(model, plan))
    factors = exchange.UNMEASURED
    if plan.shape.nodes > 1:
        factors = exchange.correction(model.table, model.backend, plan.shape, plan.wire)
    exposed = EXPOSED[plan.strategy]
    exposed_s = exposed(model, plan, slower, factors) if plan.shape.ranks > 1 else 0.0
    parts = {COMPUTE: alone_s, SHARING: alone_s * (slower - 1), EXCHANGE: exposed_s}
    step_s = sum(parts.values())
    baseline_s = alone_s * slower + _textbook(model, plan)
    low_s, high_s, error = None, None, _error(model, plan, parts, factors)
    if error is not None:
        half_s = welch_half(error)
        low_s, high_s = max(0.0, step_s - half_s), step_s + half_s
    samples = effective_batch(plan.batch, model.grad_acc, plan.shape.ranks)
    return Prediction(
        plan, step_s, parts, low_s, high_s, baseline_s, samples, alone_s, factors, error
    )


def _shared(model: Model, plan: Scenario) -> float:
    """How much processes of this training slow each other, as a share of what DDP costs."""
    together = together_of(plan) if trains_apart(plan) else 1.0
    return together + (1 - together) * _shared_apart(model, plan)


def _shared_apart(model: Model, plan: Scenario) -> float:
    """The same share for updates apart: all of it for replicas that exchange gradients inside, and
    for those that take turns on a core, as the processor time of four nodes on two cores shows.
    """
    _, turns = crowd(neighbours(plan), model.own_cores)
    exchange_inside = units_of(plan).ranks < plan.shape.ranks
    return 1.0 if exchange_inside or turns > 1 else SHARED_APART


def chosen_way(model: Model, plan: Scenario) -> str:
    """The way that a run with --exchange auto would take, by what the model knows of the link."""
    settings = vars(plan) | {"sync_scope": plan.scope, "setup": str(plan.shape)}
    if not chooses_exchange(settings) or model.backend != GLOO or plan.wire.round_trip_s < FAR_S:
        return BACKEND
    size, nodes = model.payload(plan) / plan.fragments, Shape(plan.shape.nodes)
    shape = nodes if plan.strategy in APART else plan.shape
    factors = exchange.correction(model.table, model.backend, shape, plan.wire)
    longer = None if is_coded(plan.compress, plan.strategy in APART) else factors.at(size)
    expected = ways(size, shape, plan.wire, plan.emulated, longer)
    for way in expected:
        sending = shape if way == BACKEND else nodes
        expected[way] += _longer_s(model, size, sending, replace(plan, exchange=way))
    return fastest(expected)


def check(model: Model, plan: Scenario) -> None:
    if plan.strategy not in EXPOSED:
        raise UserError(f"--strategy {plan.strategy}: not modelled; there is {', '.join(EXPOSED)}")
    if plan.exchange not in (known := (BACKEND, *MEANS)):
        raise UserError(f"--exchange {plan.exchange} is not modelled; there is {', '.join(known)}")
    own = STRATEGIES[plan.strategy].own.keys() & vars(plan).keys()
    settings = {name: getattr(plan, name) for name in ("strategy", "compress", "exchange", *own)}
    # Refuse what a training refuses.
    refuse((*FLAGS_OF_A_STRATEGY, *SCHEDULES), Combination(Settings("", **settings)))
    if plan.sync_first and (plan.updates is None or plan.sync_first >= plan.updates):
        count = plan.updates or "an unknown number of"
        raise UserError(
            f"--sync_first {plan.sync_first}: the run has {count} updates, and needs more than that"
        )
    if missing := [*_missing(model, plan)]:
        raise UserError("; ".join(missing))


def _missing(model: Model, plan: Scenario) -> Iterator[str]:
    """What a prediction needs and no record says, each with what mends it."""
    if plan.compress not in WIRE_SHARES and (plan.strategy, plan.compress) not in model.payloads:
        yield (
            f"--compress {plan.compress}: how many bytes it sends is in no record: measure one "
            f"run, with --setup 1_2 --strategy {plan.strategy} --compress {plan.compress}"
        )
    if STRATEGIES[plan.strategy].shards and plan.blocks is None:
        yield (
            "--strategy fsdp gathers layer by layer, and how many there are is in no record: "
            "give --blocks, 12 for BERT-base and ViT-B"
        )
    if plan.shape.ranks > 1 and model.gradient_bytes is None:
        yield "the size of the gradient is in no record: give --gradient_mb"
    if not model.line.knows(plan.batch):
        (only,) = model.line.batches
        yield (
            f"batch {plan.batch}: only batch {only} was measured on one process, which says "
            f"nothing of others; measure one more, with --setup 1_1 --per_gpu_batch {plan.batch}"
        )
    if neighbours(plan) > 1 and model.sharing is None:
        yield (
            f"{plan.shape}: what several processes of one machine cost each other is not known: "
            "measure --setup 1_2 as well, or say it with --sharing (0 for nothing)"
            f"{''.join(f'; {note}' for note in model.notes)}"
        )


def _ddp(model: Model, plan: Scenario, slower: float, factors: Correction) -> float:
    """The exchange beyond the end of the update's last backward pass."""
    if plan.shape.nodes == 1:
        return _on_machine(model, plan)
    if plan.compress in GRADIENT_CODES:
        size = model.payload(plan)
        between_s = _cost(model, size, plan.shape, plan, factors).alone_s
        between_s += _rested_each_step_s(
            model, size, plan.shape, plan, model.line.step_s(plan.batch) * slower, between_s
        )
        return _with_host(model, plan, factors, between_s)
    sizes = exchange.buckets(model.gradient_bytes or 0, model.cap_mb)
    share = model.payload(plan) / (sum(sizes) or 1)
    # Sent directly, each node's sum goes between nodes; a ring goes through all processes.
    shape = Shape(plan.shape.nodes) if plan.exchange in MEANS else plan.shape
    costs = [_cost(model, share * size, shape, plan, factors) for size in sizes]
    backward_s = model.line.backward_s(plan.batch) * slower / model.grad_acc
    ready_s = exchange.ready_times(sizes, backward_s)
    lanes = len(sizes) if plan.exchange in MEANS else exchange.LANES[model.backend]
    between_s = max(0.0, exchange.last_end(ready_s, costs, lanes) - backward_s)
    return _with_host(model, plan, factors, between_s)


def _fsdp(model: Model, plan: Scenario, slower: float, factors: Correction) -> float:
    """Weights are gathered before either pass, gradients scattered in the second: each is half of
    an all-reduce. Only the first layer's gathering and the last one's scattering overlap nothing.
    """
    assert plan.blocks is not None
    if plan.shape.nodes == 1:
        raise UserError("--strategy fsdp on one node: what its exchange takes is in no record")
    size = (model.gradient_bytes or 0) / plan.blocks
    half_s = _cost(model, size, plan.shape, plan, factors).alone_s / 2
    backward_s = model.line.backward_s(plan.batch) * slower
    forward_s = backward_s / 2
    gathering_s, both_s = plan.blocks * half_s, 2 * plan.blocks * half_s
    forward = half_s + max(0.0, gathering_s - half_s - forward_s)
    backward = 2 * half_s + max(0.0, both_s - 2 * half_s - backward_s)
    return model.grad_acc * (forward + backward)


def _textbook(model: Model, plan: Scenario) -> float:
    """Seconds of an update's exchange after all else; local_sgd and diloco exchange as modelled."""
    size = model.payload(plan)
    if plan.strategy not in APART:
        return exchange.alpha_beta(size, plan.shape, plan.wire)
    together = together_of(plan)
    together_s = together * exchange.alpha_beta(size, units_of(plan), plan.wire)
    each_s = exchange.alpha_beta(size / plan.fragments, units_of(plan), plan.wire)
    return together_s + (1 - together) * exchanges_of_update(plan) * each_s


def _apart(model: Model, plan: Scenario, slower: float, factors: Correction) -> float:
    """Inside a unit as ddp; between units every sync_every updates, piece by piece. An exchange
    takes longer where its connections have rested.
    """
    inside_s = _inside(model, plan) if plan.scope == "node" else 0.0
    units = units_of(plan)
    if units.ranks == 1:
        return inside_s
    if units.nodes == 1:  # what DDP takes inside a machine, at fewer updates
        whole_s, together = _on_machine(model, plan), together_of(plan)
        going_on_s = plan.overlap * model.line.step_s(plan.batch) * slower
        waiting_s = max(0.0, whole_s / plan.fragments - going_on_s)
        return together * whole_s + (1 - together) * exchanges_of_update(plan) * waiting_s
    size = model.payload(plan) / plan.fragments
    cost = _cost(model, size, units, plan, factors)
    update_s = model.line.step_s(plan.batch) * slower + inside_s
    if plan.compress != "none":
        cost = replace(cost, slack_s=0.0)  # slack is seen only where one exchange follows another
    host_s = 0.0 if _has_passed_hosts(model, plan, factors) else _host(model, plan, units)
    corrected = (factors.sizes and is_allreduce(plan)) or model.backend != GLOO
    later_s = 0.0 if corrected else APART_ROUND_TRIPS * plan.wire.round_trip_s
    alone_s = cost.alone_s + later_s + (host_s + _unequal_s(model, plan, update_s)) / plan.fragments
    going_on_s = plan.overlap * update_s
    more_s = _rested_s(model, size, units, plan)
    often = exchanges_of_update(plan)
    rested = rested_of_update(plan, update_s)
    waiting_s = (often - rested) * max(0.0, alone_s - going_on_s)
    apart_s = waiting_s + rested * max(0.0, alone_s + more_s - going_on_s)
    begins_timed = plan.sync_every // plan.fragments > plan.untimed and not plan.sync_first
    keeps_windows = plan.exchange in MEANS and not model.slow_start_after_idle
    if plan.updates and begins_timed and keeps_windows:
        # The first direct exchange sends more at once than its connections have carried before.
        apart_s += OPENING_ROUND_TRIPS * plan.wire.round_trip_s / timed_apart(plan)
    if not plan.sync_first:
        return inside_s + apart_s
    # Updates together: an exchange of one row, as large as the weights, after each backward pass.
    whole = model.payload(plan)
    together_s = _cost(model, whole, units, plan, factors).alone_s + host_s
    together_s += _rested_each_step_s(model, whole, units, plan, update_s, together_s)
    share = together_of(plan)
    return inside_s + share * together_s + (1 - share) * apart_s


def _unequal_s(model: Model, plan: Scenario, update_s: float) -> float:
    """Seconds that replicas wait for the slowest at an exchange, over all of its pieces:
    APART_UPDATES of an update, but at most the time saved since the last exchange by sharing a
    machine less than DDP does. 0 for a process alone on its machine.
    """
    less = model.slower(plan, 1.0) - model.slower(plan, _shared_apart(model, plan))
    less_s = less * plan.sync_every * model.line.step_s(plan.batch)
    return min(APART_UPDATES * update_s, less_s)


def _rested_each_step_s(
    model: Model, size: float, units: Shape, plan: Scenario, update_s: float, between_s: float
) -> float:
    """The extra seconds after a rest (_rested_s) where each update exchanges; 0 if connections do
    not rest. With codes, the time of their own exchange counts as rest; why, is not known.
    """
    silent_s = update_s + (0.0 if plan.compress == "none" else between_s)
    rests = silent_s > exchange.rests_after_s(plan.wire)
    return _rested_s(model, size, units, plan) if rests else 0.0


def _rested_s(model: Model, size: float, units: Shape, plan: Scenario) -> float:
    """By how much an exchange takes longer over connections that have rested."""
    if model.slow_start_after_idle:
        left = usual_window(plan.wire, model.congestion) * TCP_SEGMENT  # by losses
        return exchange.slow_start_s(min(size / units.ranks, left), plan.wire)
    return KEPT_WINDOW_ROUND_TRIPS * plan.wire.round_trip_s


def _cost(model: Model, size: float, shape: Shape, plan: Scenario, factors: Correction) -> Cost:
    """The cost of averaging so many bytes of weights or gradients between nodes."""
    cost = form_of(model.backend, size, shape, plan)(plan.wire)
    if is_allreduce(plan):
        cost = cost.scaled(factors.at(size))
    return cost.later(_longer_s(model, size, shape, plan))


def _longer_s(model: Model, size: float, shape: Shape, plan: Scenario) -> float:
    """How much longer the link's loss and jitter make it."""
    if not is_simulated(plan):
        return 0.0
    form, to_all = form_of(model.backend, size, shape, plan), plan.exchange in MEANS
    return exchange.longer_over(form, shape, plan.wire, model.congestion, to_all, plan.emulated)


def _inside(model: Model, plan: Scenario) -> float:
    """The exposed exchange on one machine: that of two processes, scaled as a ring's bytes grow."""
    return model.inside_s * ring_share(plan.shape.per_node)


def _on_machine(model: Model, plan: Scenario) -> float:
    """The exposed exchange of processes of a single machine, with what compressing takes."""
    return model.hosts.get(plan.compress, model.inside_s) * ring_share(plan.shape.per_node)


def _has_passed_hosts(model: Model, plan: Scenario, factors: Correction) -> bool:
    """Whether the known time of the exchange includes its time beside the link. With the factor of
    other links it does not: what these make longer grows with the link.
    """
    return (factors.of_link and is_allreduce(plan)) or model.backend != GLOO


def _with_host(model: Model, plan: Scenario, factors: Correction, between_s: float) -> float:
    if between_s > 0 and _has_passed_hosts(model, plan, factors):
        return max(between_s, _inside(model, plan))
    return between_s + _host(model, plan, plan.shape)


def _host(model: Model, plan: Scenario, shape: Shape) -> float:
    """The time of an exchange between nodes beside its link: as much as inside a machine."""
    host_s = model.hosts.get(plan.compress, model.inside_s) * ring_share(shape.ranks)
    return EMULATED_HOST * host_s + _relay_s(model, plan, shape) if plan.emulated else host_s


def _relay_s(model: Model, plan: Scenario, shape: Shape) -> float:
    """By how much the emulation of links lengthens a direct exchange: not at all where each process
    has a core, as that core rests during the exchange; else by its processor time on all cores.
    All-reduces include it, as their form was fitted between emulated nodes.
    """
    cores, turns = crowd(neighbours(plan), model.own_cores)
    if plan.exchange not in MEANS or turns == 1:
        return 0.0
    sending = Shape(shape.nodes) if one_sends(plan) else shape
    all_cores_s = exchange.relay_s(
        model.payload(plan), sending, plan.wire, plan.exchange == ALL_TO_ALL
    )
    return all_cores_s / cores


EXPOSED = {"ddp": _ddp, "fsdp": _fsdp, "local_sgd": _apart, "diloco": _apart}


def _error(
    model: Model, plan: Scenario, parts: dict[str, float], factors: Correction
) -> Error | None:
    """The error of a step, whose parts err independently; None where one has an unknown spread, for
    more processes of a machine than were measured, and for a batch outside the measured ones.
    """
    if model.extrapolates(plan) or not model.line.spans(plan.batch):
        return None
    errors = [(parts[COMPUTE], model.line.spread_at(plan.batch), model.line.freedom)]
    cores, turns = crowd(neighbours(plan), model.own_cores)
    if cores > 1:
        shared_s = parts[COMPUTE] * _shared(model, plan) * (cores - 1) * turns
        errors.append((shared_s, model.sharing_spread, model.sharing_freedom))
    if parts[EXCHANGE] > 0 and plan.shape.nodes > 1:
        if factors.sizes and is_allreduce(plan):
            errors.append((parts[EXCHANGE], factors.spread, factors.freedom))
        off = spread_of_form(model.backend, plan)
        errors.append((parts[EXCHANGE], off, exchange.TRAINING_FREEDOM))
        if is_simulated(plan):
            errors.append((parts[EXCHANGE], *spread_of_simulation(plan)))
    known = [
        ((size * spread) ** 2, freedom) for size, spread, freedom in errors
        if spread is not None and freedom > 0
    ]  # fmt: skip
    return welch_sum(*known) if len(known) == len(errors) else None


def over_nodes(
    model: Model, plan: Scenario, most: int, updates_of: Callable[[int], int | None] | None = None
) -> list[Prediction]:
    """Predictions on 1, 2, 4 ... nodes and on `most`: as many epochs, of fewer updates each."""
    counts = sorted({2**power for power in range(most.bit_length())} | {most})
    shapes = [Shape(nodes, plan.shape.per_node) for nodes in counts]
    if not (updates_of and plan.updates and plan.epoch_updates):
        return [predict(model, replace(plan, shape=shape)) for shape in shapes]
    epochs, curve = plan.updates // plan.epoch_updates, []
    for shape in shapes:
        updates = updates_of(effective_batch(plan.batch, model.grad_acc, shape.ranks)) or 0
        whole = replace(plan, shape=shape, epoch_updates=updates, updates=epochs * updates)
        curve.append(predict(model, whole))
    return curve


def below_half_efficiency(curve: list[Prediction]) -> Prediction | None:
    """The first prediction from which on all have less than half of the ideal rate, if any."""
    below = [*takewhile(lambda each: each.efficiency < 0.5, reversed(curve))]
    return below[-1] if below else None

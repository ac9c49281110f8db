"""The scenario of a prediction: a training over nodes, and how often it exchanges."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from harness.core.collectives import (
    BACKEND,
    GLOO,
    MEANS,
    Shape,
    Wire,
    allreduce,
    coded_mean,
    powersgd_mean,
)
from harness.core.strategies import (
    DDP,
    GRADIENT_CODES,
    SINGLE,
    STRATEGIES,
    is_coded,
    usual_scope,
)
from harness.read.labels import STRATEGY, strategy_text
from harness.read.predict.exchange import (
    APART_CODED_SPREAD,
    APART_SPREAD,
    CODED_SPREAD,
    SIMULATED_FREEDOM,
    SIMULATED_SPREAD,
    TRAINING_SPREAD,
    Form,
    rests_after_s,
)

APART = tuple(name for name, strategy in STRATEGIES.items() if strategy.apart)


@dataclass(frozen=True)
class Scenario:
    """The training that is to be predicted, and the link that it runs over."""

    shape: Shape
    batch: int  # per process and forward pass
    wire: Wire = field(default_factory=Wire)
    strategy: str = DDP
    compress: str = "none"
    sync_every: int = 10
    sync_scope: str | None = None
    fragments: int = 1
    overlap: int = 0
    blocks: int | None = None  # layers that fsdp gathers one at a time
    emulated: bool = False  # its nodes share one machine, and have a link for each pair
    exchange: str = BACKEND
    epoch_updates: int | None = None  # connections rest after each epoch
    updates: int | None = None  # of the run; after the last one, replicas exchange once more
    untimed: int = 0  # first updates, which are not in the mean that is predicted
    sync_first: int = 0  # first updates, made together before replicas train apart

    @property
    def scope(self) -> str:
        """What trains apart: as asked for, else as a run on as many nodes has it."""
        return self.sync_scope or usual_scope(self.shape.nodes)

    @property
    def label(self) -> str:
        """The strategy as tables name it, and how it exchanges where not by the backend."""
        if self.shape.ranks == 1:
            return SINGLE
        flags: dict[str, Any] = {STRATEGY: self.strategy, "compress": self.compress}
        if self.strategy in APART:
            flags |= {"sync_every": self.sync_every, "sync_first": self.sync_first or None}
        way = "" if self.exchange == BACKEND else f" {self.exchange}"
        return f"{strategy_text(flags)}{way}"

    @property
    def fields(self) -> dict[str, Any]:
        """The scenario as plain values, for programs (--json)."""
        return {
            "setup": str(self.shape),
            "strategy": self.strategy,
            "compress": self.compress,
            "sync_every": self.sync_every if self.strategy in APART else 1,
            "sync_first": self.sync_first,
            "sync_scope": self.scope if self.strategy in APART else None,
            "exchange": self.exchange,
            "per_gpu_batch": self.batch,
        }


def neighbours(plan: Scenario) -> int:
    """Processes that share a machine."""
    return plan.shape.ranks if plan.emulated else plan.shape.per_node


def units_of(plan: Scenario) -> Shape:
    """The units that train apart from each other: nodes or ranks."""
    return Shape(plan.shape.nodes, plan.shape.per_node if plan.scope == "rank" else 1)


def trains_apart(plan: Scenario) -> bool:
    return plan.strategy in APART and units_of(plan).ranks > 1


def together_of(plan: Scenario) -> float:
    """The share of the timed updates that are made together before replicas train apart."""
    if not plan.updates:
        return 0.0
    return max(0, plan.sync_first - plan.untimed) / (plan.updates - plan.untimed)


def exchanges_of_update(plan: Scenario) -> float:
    """Exchanges per timed update apart, counting the one after the last update of the run."""
    every = plan.sync_every // plan.fragments
    if not plan.updates:
        return 1 / every
    # After the last update follow the fragments that were not due then.
    apart = plan.updates - plan.sync_first
    turns, rest = divmod(apart, every)
    timed = timed_apart(plan)
    return (turns + plan.fragments - (rest == 0) - (apart - timed) // every) / timed


def timed_apart(plan: Scenario) -> int:
    """The number of timed updates after those that are made together."""
    assert plan.updates is not None
    return plan.updates - max(plan.untimed, plan.sync_first)


def rested_of_update(plan: Scenario, update_s: float) -> float:
    """Exchanges per timed update over connections that have rested: all of them if the updates
    between two exchanges take long enough, else the first of each epoch.
    """
    often = exchanges_of_update(plan)
    if plan.sync_every // plan.fragments * update_s > rests_after_s(plan.wire):
        return often
    return min(often, 1 / plan.epoch_updates) if plan.epoch_updates else 0.0


def one_sends(plan: Scenario) -> bool:
    """Whether one process of a node sends for all: gradients of ddp, unless they are codes."""
    return plan.strategy not in APART and plan.compress not in GRADIENT_CODES


def is_allreduce(plan: Scenario) -> bool:
    """Whether the plan exchanges by all-reduces, as they are measured over a link."""
    other = is_coded(plan.compress, plan.strategy in APART) or plan.compress.startswith("powersgd")
    return plan.exchange == BACKEND and not other


def is_simulated(plan: Scenario) -> bool:
    """Whether the exchange's time is in part simulated, for the link's loss or jitter."""
    return plan.shape.nodes > 1 and not plan.wire.is_steady


def form_of(backend: str, size: float, shape: Shape, plan: Scenario) -> Form:
    """The closed form of averaging so many bytes of weights or gradients between nodes."""
    if plan.exchange in MEANS:
        return lambda wire: MEANS[plan.exchange](size, shape, wire, plan.emulated)
    if is_coded(plan.compress, plan.strategy in APART):
        return lambda wire: coded_mean(size, shape, wire, plan.emulated)
    if plan.compress.startswith("powersgd"):
        return lambda wire: powersgd_mean(size, shape, wire)
    return lambda wire: allreduce(backend, size, shape, wire)


def spread_of_form(backend: str, plan: Scenario) -> float | None:
    """How far exchanges of trainings are from their closed form; None where none were compared.
    Compared were DDP by gloo's all-reduce, and on two nodes all strategies but fsdp.
    """
    coded = is_coded(plan.compress, plan.strategy in APART)
    strategy = STRATEGIES[plan.strategy]
    plain = strategy.reduces_gradients and plan.exchange == BACKEND and not coded
    compared = plain or (plan.shape.nodes == 2 and not strategy.shards)
    if backend != GLOO or not compared:
        return None
    if trains_apart(plan):
        return APART_CODED_SPREAD if coded else APART_SPREAD
    return CODED_SPREAD if coded else TRAINING_SPREAD


def spread_of_simulation(plan: Scenario) -> tuple[float | None, int]:
    """How far exchanges over links with loss or jitter are from simulated ones, and the degrees of
    freedom; None for more than two nodes, on which none were compared.
    """
    return SIMULATED_SPREAD if plan.shape.nodes == 2 else None, SIMULATED_FREEDOM

"""What a predicted step comes to: epochs, energy, cost. Unknown is None, never a guess."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from harness.core.settings import UserError
from harness.read.predict.exchange import Shape
from harness.read.predict.fitting import Fitted
from harness.read.predict.model import APART, EXCHANGE, Plan, Prediction, predict


@dataclass(frozen=True)
class Outcome:
    """Of a prediction, for so many epochs of the records' training set."""

    prediction: Prediction
    updates: int | None  # of an epoch
    epoch_s: float | None  # training alone
    eval_s: float | None  # of an epoch's evaluation
    energy_j: float | None  # of the devices in an epoch's training
    cost: float | None  # of an epoch, evaluation included where it is known

    @property
    def whole_s(self) -> float | None:
        """An epoch with its evaluation, as far as that is known."""
        return None if self.epoch_s is None else self.epoch_s + (self.eval_s or 0.0)


def outcome(fitted: Fitted, found: Prediction, cost_per_gpu_hour: float | None) -> Outcome:
    ranks = found.plan.shape.ranks
    # As --tail cut has it: what fills no whole effective batch is left out.
    updates = fitted.train_samples // found.samples if fitted.train_samples else None
    epoch_s = updates * found.step_s if updates else None
    eval_s = fitted.eval_s / ranks if fitted.eval_s is not None else None
    whole = Outcome(found, updates, epoch_s, eval_s, _energy(fitted, found, updates), None)
    if cost_per_gpu_hour is None or whole.whole_s is None:
        return whole
    cost = cost_per_gpu_hour * ranks * whole.whole_s / 3600
    return Outcome(found, updates, epoch_s, eval_s, whole.energy_j, cost)


def _energy(fitted: Fitted, found: Prediction, updates: int | None) -> float | None:
    """Devices that wait take what they take when idle; without that figure nothing is said of
    steps that wait.
    """
    waits_s = found.parts[EXCHANGE]
    if fitted.power_w is None or not updates or (waits_s > 0 and fitted.idle_w is None):
        return None
    busy_j = fitted.power_w * (found.step_s - waits_s)
    return updates * found.plan.shape.ranks * (busy_j + (fitted.idle_w or 0.0) * waits_s)


def as_fields(found: Outcome) -> dict[str, Any]:
    """For programs (--json)."""
    each = found.prediction
    return {
        "setup": str(each.plan.shape),
        "strategy": each.plan.strategy,
        "compress": each.plan.compress,
        "sync_every": each.plan.sync_every if each.plan.strategy in APART else 1,
        "per_gpu_batch": each.plan.batch,
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
        "updates": found.updates,
        "epoch_s": found.epoch_s,
        "eval_s": found.eval_s,
        "energy_j": found.energy_j,
        "cost": found.cost,
    }


# ----
# Which topology, batch and strategy would do under a deadline or a budget.

# What is tried beside the strategy asked for; fsdp only where it is asked for.
STRATEGIES: tuple[tuple[str, str], ...] = (("ddp", "none"), ("ddp", "bf16"), ("diloco", "none"))


@dataclass(frozen=True)
class Choice:
    """A candidate that keeps the limit."""

    found: Outcome
    hours: float
    device_hours: float
    cost: float | None


def advise(
    fitted: Fitted, plan: Plan, epochs: int, deadline_h: float | None, budget: float | None,
    cost_per_gpu_hour: float | None,
) -> list[Choice]:  # fmt: skip
    """Under a deadline the fewest device hours first, under a budget the fastest."""
    if budget is not None and cost_per_gpu_hour is None:
        raise UserError("--budget needs --cost_per_gpu_hour: what would it be spent on?")
    if fitted.train_samples is None:
        raise UserError("the size of the training set is in no record: give --train_size")
    kept = []
    for candidate in candidates(fitted, plan):
        found = outcome(fitted, predict(fitted.model, candidate), cost_per_gpu_hour)
        if found.whole_s is None:
            continue  # the training set fills no effective batch
        hours = epochs * found.whole_s / 3600
        cost = None if found.cost is None else epochs * found.cost
        late = deadline_h is not None and hours > deadline_h
        dear = budget is not None and cost is not None and cost > budget
        if not (late or dear):
            kept.append(Choice(found, hours, hours * candidate.shape.ranks, cost))
    by_time = budget is not None
    return sorted(kept, key=lambda c: (c.hours, c.device_hours) if by_time
                  else (c.device_hours, c.hours))  # fmt: skip


def candidates(fitted: Fitted, plan: Plan) -> Iterator[Plan]:
    """Halves of the set-up asked for, every batch that was measured, the strategies above."""
    asked = (plan.strategy, plan.compress)
    strategies = [asked, *(each for each in STRATEGIES if each != asked)]
    for nodes in halves(plan.shape.nodes):
        for per_node in halves(plan.shape.per_node):
            shape = Shape(nodes, per_node)
            for batch in fitted.model.line.batches:
                # On one node strategies differ in nothing that is modelled.
                for strategy, compress in strategies if nodes > 1 else [("ddp", "none")]:
                    yield replace(
                        plan, shape=shape, batch=batch, strategy=strategy, compress=compress
                    )


def halves(most: int) -> list[int]:
    found = [most]
    while found[-1] > 1:
        found.append(found[-1] // 2)
    return found[::-1]

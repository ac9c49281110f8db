"""Which topology, batch and strategy would do under a deadline or a budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from harness.read.prediction.exchange import Shape
from harness.read.prediction.fitting import Fitted
from harness.read.prediction.model import Plan, predict
from harness.read.prediction.outcome import Outcome, outcome
from harness.settings import UserError

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

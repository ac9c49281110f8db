"""What a predicted step comes to: epochs, energy, cost. Unknown is None, never a guess."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.read.prediction.fitting import Fitted
from harness.read.prediction.model import APART, EXCHANGE, Prediction


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

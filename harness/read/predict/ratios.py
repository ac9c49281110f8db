"""What times over recorded links say of another link, and how far off a planned time may be."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.core.collectives import Wire
from harness.read.predict.model import EXCHANGE, Prediction
from harness.read.predict.phases import PhaseFit
from harness.read.predict.scenario import is_simulated, spread_of_simulation
from harness.read.statistics import Error, spread, welch_half

STEPS = "steps"
LEAST_LINKS = 3  # for an interval: each is predicted from the others
NEAREST_S = 1e-4  # added to delays, so that a link without any is not infinitely far away
MINOR = 0.05  # of the whole: a part whose error is not known counts as exact below this


@dataclass(frozen=True)
class OverLinks:
    """Logarithms of ratios measured over links, and the estimate for another link from them."""

    by_link: Mapping[Wire, float]

    def at(self, wire: Wire, without: Wire | None = None) -> float:
        """The estimate for a link: interpolated over log delays, for each from the nearest rate."""
        known = {link: log for link, log in self.by_link.items() if link != without}
        nearest: dict[float, tuple[float, float]] = {}
        for link, log in known.items():
            off = abs(_log_rate(link) - _log_rate(wire))
            nearest[link.delay_s] = min(nearest.get(link.delay_s, (math.inf, 0.0)), (off, log))
        delays = sorted(nearest)
        if not delays:
            return 0.0
        places = [math.log(delay + NEAREST_S) for delay in delays]
        logs = [nearest[delay][1] for delay in delays]
        return float(np.interp(math.log(wire.delay_s + NEAREST_S), places, logs))

    @property
    def spread(self) -> tuple[float | None, int]:
        """How far links are from their estimates by the others (RMS), and degrees of freedom."""
        if len(self.by_link) < LEAST_LINKS:
            return None, 0
        off = [log - self.at(link, without=link) for link, log in self.by_link.items()]
        return math.sqrt(statistics.mean(each**2 for each in off)), len(off) - 1


def _log_rate(wire: Wire) -> float:
    return math.log(min(wire.bytes_per_s, 1e12))


def of_epochs(epochs: Sequence[float], epoch_s: float) -> Error | None:
    """The error of the mean over seeds, in seconds; None for a single seed."""
    known = spread(epochs)
    return None if known.sd is None else ((known.sd * epoch_s) ** 2 / known.n, known.n - 1)


def half_s(
    prediction: Prediction, ratios: OverLinks, phases: Mapping[str, PhaseFit],
    parts: Mapping[str, float], of_seeds: Error | None,
) -> float | None:  # fmt: skip
    """Half of the interval, from independent errors of seeds, steps and phases. Phases: how far
    links are from the line.
    """
    of_steps = _of_steps(prediction, ratios, parts[STEPS])
    if of_seeds is None or of_steps is None:
        return None
    errors = [of_seeds, *of_steps]
    for name, phase in phases.items():
        if phase.spread is not None and phase.freedom > 0:
            errors.append(((phase.spread * parts[name]) ** 2, phase.freedom))
        elif parts[name] > MINOR * sum(parts.values()):
            return None
    return welch_half(*errors)


def _of_steps(prediction: Prediction, ratios: OverLinks, steps_s: float) -> list[Error] | None:
    """The errors of all steps: how far each recorded link is from its estimate by the others, and
    how far simulations are off, as recorded links have no loss and no jitter; or else the error of
    the prediction, which includes that. None where one is not known.
    """
    times = steps_s / prediction.step_s
    off, freedom = ratios.spread
    if off is None:
        if prediction.error is None:
            return None
        square, of_step = prediction.error
        return [(square * times**2, of_step)]
    errors: list[Error] = [((off * steps_s) ** 2, freedom)]
    if is_simulated(prediction.plan):
        simulated, of_simulation = spread_of_simulation(prediction.plan)
        if simulated is None:
            return None
        waited_s = times * prediction.parts[EXCHANGE]
        errors.append(((simulated * waited_s) ** 2, of_simulation))
    return errors

"""What watching the machine costs in a step: the sampler at work against asleep, in short turns.

One training takes turns of some seconds in which the sampler's process is awake, reading once a
second, or stopped: the same memory, the same model. Each turn with it is compared with the mean of
the turns before and after, so that a machine that becomes slower or faster changes nothing. Means
are taken and not medians: a sampler that wakes once a second disturbs one step of many.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from typing import Any

import psutil
import torch
from transformers import TrainerCallback

from benchmarks.results import markdown
from harness.read.statistics import spread

GOAL = 0.005  # share of a step, at 1 Hz
HEADINGS = ("model", "pairs of turns", "step ms, unwatched", "step time ratio, mean (95 %)",
            "smallest to largest", "sampler's share of a core")  # fmt: skip


class Sampler:
    """The sampler's process, which can be stopped and woken."""

    def __init__(self, watch: Any) -> None:
        self.process = psutil.Process(watch.process.pid)

    def used_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def awake(self, yes: bool) -> None:
        os.kill(self.process.pid, signal.SIGCONT if yes else signal.SIGSTOP)


class Turns(TrainerCallback):
    """Measures the mean step of each turn; the first turn, with the sampler, is the warm-up."""

    SKIPPED = 2  # first steps of a turn

    def __init__(self, sampler: Sampler, turns: int, turn_s: float, cuda: bool) -> None:
        self.sampler, self.turns, self.turn_s, self.cuda = sampler, turns, turn_s, cuda
        self.means: list[float] = []
        self.watched_s, self.used_s = 0.0, 0.0  # of the turns with the sampler, but for the first
        self.steps: list[float] = []  # of this turn
        self.last: float | None = None
        self.before_s = 0.0

    def _is_watched(self) -> bool:
        return len(self.means) % 2 == 0

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        self.last = None  # time between epochs is in no step
        self.sampler.awake(self._is_watched())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self.last is not None:
            self.steps.append(now - self.last)
        self.last = now
        if sum(self.steps) >= self.turn_s and len(self.steps) > self.SKIPPED:
            self._turn_ends(control)
        if float(state.epoch).is_integer():
            self.sampler.awake(True)  # the end of an epoch needs it

    def _turn_ends(self, control: Any) -> None:
        if self.means and self._is_watched():
            self.watched_s += sum(self.steps)
            self.used_s += self.sampler.used_s() - self.before_s
        kept = self.steps[self.SKIPPED :]
        self.means.append(sum(kept) / len(kept))
        # Unwatched, watched, ... and unwatched once more: each watched one has two neighbours.
        control.should_training_stop |= len(self.means) == 2 * self.turns + 2
        self.sampler.awake(self._is_watched())
        self.before_s, self.steps = self.sampler.used_s(), []

    def found(self) -> dict[str, Any]:
        return {
            "unwatched_s": self.means[1::2], "watched_s": self.means[2::2],
            "sampler_core_share": self.used_s / self.watched_s,
        }  # fmt: skip


def paired(watched: list[float], unwatched: list[float]) -> list[float]:
    """Each watched turn / the mean of its two neighbours; the first turn is unwatched."""
    pairs = zip(watched, unwatched, unwatched[1:], strict=False)
    return [on / ((before + after) / 2) for on, before, after in pairs]


def table(found: dict[str, dict[str, Any]], threads: int) -> str:
    rows = []
    for name, case in found.items():
        ratios = paired(case["watched_s"], case["unwatched_s"])
        known = spread(ratios)  # of neighbours that share a turn, as if they did not
        ends = "" if known.low is None else f" ({known.low:.4f} to {known.high:.4f})"
        rows.append((
            name, str(len(ratios)), f"{1000 * statistics.median(case['unwatched_s']):.2f}",
            f"{known.mean:.4f}{ends}", f"{min(ratios):.3f} to {max(ratios):.3f}",
            f"{100 * case['sampler_core_share']:.2f} %",
        ))  # fmt: skip
    return (
        f"Telemetry at 1 Hz, {threads} thread(s); the goal is a ratio of at most {1 + GOAL:.3f}."
        f"\n\n{markdown('lrrrrr', HEADINGS, rows)}"
    )

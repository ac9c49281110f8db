"""What watching the machine costs in a step: --telemetry_hz 1 against 0, in short turns.

Two trainings of one process take turns of some seconds; the sampler of the one that is watched
sleeps while it is not its turn. Each turn of it is compared with the mean of the turns before and
after, so that a machine that becomes slower or faster changes nothing. Means and not medians: a
sampler that wakes once a second disturbs one step of many.
"""

from __future__ import annotations

import os
import signal
import statistics
from typing import Any

import psutil

GOAL = 0.005  # of a step, at 1 Hz


class Sampler:
    """The process that looks, sent to sleep and woken."""

    def __init__(self, watch: Any) -> None:
        self.process = psutil.Process(watch.process.pid) if watch is not None else None
        self.before_s: float | None = None  # what its start took

    def used_s(self) -> float:
        if self.process is None:
            return 0.0
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def awake(self, yes: bool) -> None:
        if self.process is not None:
            os.kill(self.process.pid, signal.SIGCONT if yes else signal.SIGSTOP)
        if self.before_s is None:
            self.before_s = self.used_s()

    def worked_s(self) -> float:
        """Processor time after the first turn."""
        return self.used_s() - (self.before_s or 0.0)


def paired(watched: list[float], unwatched: list[float]) -> list[float]:
    """Each watched turn over the mean of its two neighbours; the unwatched one began."""
    pairs = zip(watched, unwatched, unwatched[1:], strict=False)
    return [on / ((before + after) / 2) for on, before, after in pairs]


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Mean and the interval that holds it with 95 %; neighbours share a turn, which widens it."""
    mean = statistics.mean(ratios)
    if len(ratios) < 3:
        return mean, min(ratios), max(ratios)
    error = 1.96 * statistics.stdev(ratios) / len(ratios) ** 0.5
    return mean, mean - error, mean + error


def table(found: dict[str, dict[str, Any]], threads: int) -> str:
    lines = [
        f"Telemetry at 1 Hz, {threads} thread(s); the goal is a ratio of at most {1 + GOAL:.3f}.",
        "",
        "| model | pairs of turns | step ms, unwatched | step time ratio, mean (95 %) "
        "| smallest to largest | sampler's share of a core |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, case in found.items():
        ratios = paired(case["watched_s"], case["unwatched_s"])
        mean, low, high = interval(ratios)
        lines.append(
            f"| {name} | {len(ratios)} | {1000 * statistics.median(case['unwatched_s']):.2f} "
            f"| {mean:.4f} ({low:.4f} to {high:.4f}) | {min(ratios):.3f} to {max(ratios):.3f} "
            f"| {100 * case['sampler_core_share']:.2f} % |"
        )
    return "\n".join(lines)

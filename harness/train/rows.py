"""Parts of an epoch's row that depend on nothing but their arguments."""

from __future__ import annotations

import statistics
from typing import Any

from harness.train.clock import StepClock
from harness.train.environment import peak_memory_gib


def rank_row(
    epoch: float, rank: int, train_s: float, timed: list[tuple[int, float]], clock: StepClock
) -> dict[str, Any]:
    """What differs between ranks, as it stands in ranks/rank_<r>.jsonl."""
    seconds = [s for _, s in timed]
    return {
        "epoch": epoch,
        "rank": rank,
        "epoch_time_s": train_s,
        "step_time_median_s": statistics.median(seconds) if seconds else None,
        "step_time_p95_s": quantile(seconds, 0.95),
        "data_wait_s": clock.data_wait_s,
        "peak_memory_gib": peak_memory_gib(clock.cuda),
    }


def mean_of_log(losses: list[tuple[int, float]], first: int) -> float | None:
    """Of logged (update, loss), each for the updates since the one before; None without any."""
    total, before = 0.0, first
    for update, loss in losses:
        total += loss * (update - before)
        before = update
    return total / (before - first) if losses else None


def size_of(loader: Any) -> int | None:
    """Samples of a loader's data; a stream does not know."""
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):
        return None


def quantile(values: list[float], share: float) -> float | None:
    """The value that this share of all values does not exceed; None of none."""
    if not values:
        return None
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]

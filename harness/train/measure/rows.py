"""The rows of an epoch: what they are made of, and that each is written once."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.core.records import append_row, read_rows

# Of what evaluation gives, not quality: the Trainer's own timing, and what stands elsewhere.
TIMING = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


ELSEWHERE = ("epoch", "samples")


class Pending:
    """The row of an epoch that has ended, kept until its evaluation is known, and written once."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.row: dict[str, Any] | None = None
        self.recorded: set[float] = set()

    def begin(self, goes_on: bool = True) -> None:
        """What an attempt before has written is not written again."""
        self.row = None
        rows, _ = read_rows(self.file) if goes_on else ([], 0)
        self.recorded = {row["epoch"] for row in rows}

    def write(self, quality: dict[str, Any], more: dict[str, Any]) -> dict[str, Any] | None:
        """The row as it was written now; None where there is none to write."""
        row, self.row = self.row, None
        if row is None or row["epoch"] in self.recorded:
            return None
        self.recorded.add(row["epoch"])
        # A metric of the user's that has the name of a field of ours keeps both.
        row |= {f"eval_{k}" if k in row else k: v for k, v in quality.items()}
        row |= more
        append_row(self.file, row)
        return row


def rank_row(
    epoch: float, rank: int, train_s: float, timed: list[tuple[int, float]], data_wait_s: float
) -> dict[str, Any]:
    """What differs between ranks, as it stands in ranks/rank_<r>.jsonl."""
    seconds = [s for _, s in timed]
    return {
        "epoch": epoch,
        "rank": rank,
        "epoch_time_s": train_s,
        "step_time_median_s": statistics.median(seconds) if seconds else None,
        "step_time_p95_s": quantile(seconds, 0.95),
        "data_wait_s": data_wait_s,
    }


def added_up(exact: dict[str, float], fed: int, logged_loss: float | None) -> dict[str, Any]:
    """Sums and means over the epoch, as far as the trainer has added up anything."""
    return {
        "fed_samples": int(exact.get("train_samples", fed)),
        "train_loss": exact.get("train_loss", logged_loss),
        **{name: exact.get(name) for name in ("grad_norm", "clipped_share", "skipped_updates")},
    }


def rates(timed: list[tuple[int, float]], devices: int) -> dict[str, Any]:
    """Of (samples, seconds) of the timed steps: their sums, and samples a second."""
    samples, seconds = sum(n for n, _ in timed), sum(s for _, s in timed)
    rate = samples / seconds if seconds else None
    return {
        "train_samples_per_s": rate,
        "train_samples_per_s_per_gpu": rate / devices if rate else None,
        "timed_steps": len(timed),
        "timed_samples": samples,
        "timed_s": seconds,
    }


def peaks_of(
    name: str, ranks: Sequence[dict[str, Any]], devices: list[float] | None
) -> list[float] | None:
    """Peak memory by rank; of one process with several devices, by device."""
    if devices is None:
        return None
    return devices if len(devices) > 1 else [rank[name] for rank in ranks]


def steps(
    found: list[tuple[int, float]], of_peers: int | None, short: float
) -> list[tuple[int, float]]:
    """(samples, seconds) of each step: of peers in equal parts of what they brought together."""
    if of_peers:
        found = [(of_peers / len(found), seconds) for _, seconds in found]  # type: ignore[misc]
    if found and short > 0:
        # The last batch was not full, or was filled up with samples that had been fed before.
        found[-1] = (found[-1][0] - int(short), found[-1][1])
    return found


def quality_of(given: dict[str, Any], samples: int | None, eval_s: float) -> dict[str, Any]:
    """Of what an evaluation gives, without its prefix: the metrics, as a row names them."""
    quality = {
        "eval_loss" if name == "loss" else name: value
        for name, value in given.items()
        if name not in ELSEWHERE and not name.endswith(TIMING) and isinstance(value, (int, float))
    }
    return quality | {
        "eval_samples": samples,
        "eval_time_s": eval_s,
        "eval_samples_per_s": samples / eval_s if samples else None,
    }


def stock_rate(history: list[dict[str, Any]]) -> float | None:
    """The Trainer's own figure: evaluation, saving and warm-up are in it."""
    stock = [log["train_samples_per_second"] for log in history if "train_runtime" in log]
    return stock[-1] if stock else None


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

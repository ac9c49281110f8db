"""What epoch rows say about a run: its summary, and whether other programs disturbed it.

Computed from the rows alone, so that a reader can check a summary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from harness.core.records import DISTURBING_SHARE, total
from harness.core.schema.checks import fields

# Rows as read from files: any field may be missing; it is then unknown and must not raise.
Rows = Sequence[Mapping[str, Any]]

# Copied from the last epoch's row.
QUALITY_FIELDS = (
    "train_loss", "eval_loss", "accuracy", "top5_accuracy", "precision", "recall", "f1",
    "precision_macro", "recall_macro", "f1_macro",
)  # fmt: skip
# Endings of metrics that the Trainer adds to an evaluation: its own timing, which is no quality.
TIMING = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
MEANS = ("tflops_per_s", "mfu", "comm_exposed_share", "compute_skew")
SUMS = ("payload_bytes", "network_sent_bytes", "energy_j")


def beyond_a_share(metric: str, value: float) -> str | None:
    """Why no run can reach this value of a metric; None if a run can, as far as is known."""
    if metric not in QUALITY_FIELDS or metric.endswith("_loss") or 0 <= value <= 1:
        return None
    fix = f"for {value:g} % write {value / 100:g}" if 2 <= value <= 100 else "write 0.9 for 90 %"
    return f"{metric} lies between 0 and 1, not at {value:g}: {fix}"


def of_rows(rows: Rows) -> dict[str, Any]:
    """The fields of a summary that are computed from the rows alone."""
    last: Mapping[str, Any] = rows[-1] if rows else {}
    samples = total_of(rows, "samples") if rows else 0
    rate = rate_of(rows)
    sums = {name: total_of(rows, name) for name in SUMS}
    energy_j = sums["energy_j"]
    return {
        "epochs_done": len(rows),
        "updates": last.get("updates"),
        "samples": None if samples is None else int(samples),
        **{name: last[name] for name in QUALITY_FIELDS if name in last},
        "train_samples_per_s": rate,
        "train_samples_per_s_per_gpu": _rate_of_a_device(rows, rate),
        "train_time_s": total_of(rows, "epoch_time_s") if rows else 0.0,
        "eval_time_s": sum_of(rows, "eval_time_s"),
        "peak_memory_gib": _largest(rows, "peak_memory_gib_per_rank"),
        "reserved_memory_gib": _largest(rows, "reserved_memory_gib_per_rank"),
        **sums,
        **{name: _timed_mean_of(rows, [row.get(name) for row in rows]) for name in MEANS},
        "gpu_utilisation_percent": _timed_mean_of(rows, [*map(gpu_utilisation_percent, rows)]),
        "joules_per_sample": energy_j / samples if energy_j is not None and samples else None,
    }


def epochs_of(rows: Rows, settings: Mapping[str, Any] | None = None) -> float | None:
    """The epochs in which these rows were trained: the last may be a part of one (--max_steps).

    Of a stream the Trainer does not number passes, and a pass is measured by the one before it;
    None where there is none. settings: as recorded, they tell whether a single row may be of one.
    """
    if _are_of_stream(rows, settings):
        return _passes_of(rows)
    last: float = rows[-1]["epoch"]
    return len(rows) - 1 + last - _whole_before(last)


def epochs_until(
    rows: Rows, number: int, settings: Mapping[str, Any] | None = None
) -> float | None:
    """The epochs until the end of the row of this number, from 1; None if unknown."""
    if not _are_of_stream(rows, settings):
        epoch: float | None = rows[number - 1].get("epoch")
        return epoch
    return number if number < len(rows) else _passes_of(rows)


def _are_of_stream(rows: Rows, settings: Mapping[str, Any] | None) -> bool:
    """Whether these are passes over a stream, not evaluations. Nobody knows the samples of one, nor
    those of some samplers; but a pass that others follow ends inside an epoch of the Trainer, which
    asks for max_steps.
    """
    samples = (row.get(name, 0) for row in rows for name in ("samples", "fed_samples"))
    if any(number is not None for number in samples) or any("attempt" not in row for row in rows):
        return False
    most = ((settings or {}).get("training_arguments") or {}).get("max_steps")
    if isinstance(most, int) and most <= 0:
        return False
    ends = [row.get("epoch") or 0.0 for row in rows[:-1]]
    return not ends or any(abs(end - round(end)) > 1e-6 for end in ends)


def _passes_of(rows: Rows) -> float | None:
    """Passes over a stream: its epochs end at fractions of the updates that were asked for."""
    ends: list[Any] = [row.get("updates") for row in rows[-3:]]
    if len(rows) < 2 or None in ends:
        return None
    first = [0] if len(rows) == 2 else []
    before, last = (end - begin for begin, end in pairwise([*first, *ends]))
    return len(rows) - 1 + min(last / before, 1.0) if before > 0 else None


def epochs_lacking(settings: Mapping[str, Any], rows: Rows) -> int:
    """How many epochs a record of LogCallback alone lacks before its last row: the training went on
    in a new folder, or was killed between a checkpoint and the row of its epoch. Rows of other
    records begin with the first epoch, or are evaluations of an import.
    """
    ends = [row["epoch"] for row in rows if row.get("epoch") is not None]
    if not ends or "script" in settings:
        return 0
    whole = {_whole_before(end) for end in ends}
    return max(whole) + 1 - len(whole)


def _whole_before(epoch: float) -> int:
    """Whole epochs before the one that ends at this number."""
    return max(math.ceil(epoch - 1e-6) - 1, 0)


def rate_of(rows: Rows) -> float | None:
    """Samples per second over the timed steps."""
    timed_s, timed_samples = sum_of(rows, "timed_s"), total_of(rows, "timed_samples")
    return timed_samples / timed_s if timed_s and timed_samples is not None else None


def device_counts(rows: Rows) -> list[int | None]:
    """The number of devices that trained each row: peers and nodes may come and go."""
    rates = [[row.get(f"train_samples_per_s{of}") for of in ("", "_per_gpu")] for row in rows]
    return [round(all_s / one_s) if all_s and one_s else None for all_s, one_s in rates]


def _rate_of_a_device(rows: Rows, rate: float | None) -> float | None:
    """Samples per second and device over the timed steps."""
    counts = device_counts(rows)
    if not rate or None in counts[-1:]:
        return None
    if len({*counts}) == 1:
        share: float = rows[-1]["train_samples_per_s_per_gpu"] / rows[-1]["train_samples_per_s"]
        return rate * share
    timed = [(row.get("timed_s"), count) for row, count in zip(rows, counts, strict=True)]
    device_s = [seconds * count for seconds, count in timed if seconds and count]
    timed_samples = total_of(rows, "timed_samples")
    return timed_samples / sum(device_s) if timed_samples and len(device_s) == len(rows) else None


def sum_of(rows: Rows, name: str) -> float:
    """The sum of the known values."""
    return sum(row.get(name) or 0 for row in rows)


def total_of(rows: Rows, name: str) -> float | None:
    """The sum of a field; None if a row lacks it, or if there are no rows."""
    known: float | None = total(row.get(name) for row in rows)
    return known


def mean_of(rows: Rows, name: str, weight: str) -> float | None:
    """The mean weighted by another field; None if a row lacks either, or if there are no rows."""
    if not total_of(rows, weight) or total_of(rows, name) is None:
        return None
    return fmean([row[name] for row in rows], [row[weight] for row in rows])


def _timed_mean_of(rows: Rows, values: Sequence[float | None]) -> float | None:
    """The mean weighted by timed seconds; None if an epoch with timed steps lacks a value."""
    timed = [(v, row["timed_s"]) for row, v in zip(rows, values, strict=True) if row.get("timed_s")]
    known = [(value, seconds) for value, seconds in timed if value is not None]
    return fmean(*zip(*known, strict=True)) if known and len(known) == len(timed) else None


def _largest(rows: Rows, name: str) -> float | None:
    """The largest value of all ranks and epochs."""
    values = (value for row in rows for value in row.get(name) or [])
    return max((value for value in values if value is not None), default=None)


def gpu_utilisation_percent(row: Mapping[str, Any]) -> float | None:
    """Mean over an epoch and its devices; None if unknown."""
    gauge: Mapping[str, float] = (row.get("gpu") or {}).get("utilisation_percent") or {}
    return gauge.get("mean")


def others_share_of_run(rows: Rows) -> float | None:
    """Share of the cores' time that others used in these epochs; None if no row knows it."""
    known = [(row.get("others_cpu_share"), row.get("epoch_time_s")) for row in rows]
    parts = [(a, s) for a, s in known if isinstance(a, int | float) and isinstance(s, int | float)]
    known_s = math.fsum(s for _, s in parts)
    return math.fsum(share * s for share, s in parts) / known_s if known_s else None


def disturbance(launch: Mapping[str, Any] | None, rows: Rows) -> str | None:
    """What disturbed a run before or while it trained, in words; None if little did."""
    launch = launch or {}
    before, during = launch.get("cpu_busy_share") or 0, others_share_of_run(rows) or 0
    if launch.get("packed"):
        return "other runs beside it (--pack)"
    if max(before, during) <= DISTURBING_SHARE:
        return None
    if during > DISTURBING_SHARE:
        return f"other programs used {during:.0%} of the cores"
    return f"other programs used {before:.0%} of the cores before it began"


def own_metrics(row: Mapping[str, Any]) -> list[str]:
    """The numbers of an epoch's row that the script's own compute_metrics gave."""
    names = (name for name in row if name not in fields("epochs"))
    return [name for name in names if isinstance(row[name], (int, float))]


def metric_name(metric: str) -> str:
    """The metric's name without prefix or suffix: rmse for rmse:min or eval_rmse."""
    return metric.removesuffix(":min").removeprefix("eval_")


def larger_is_better(metric: str) -> bool:
    """Whether larger is better: not for the loss, nor for metrics given as NAME:min."""
    return not metric.endswith(":min") and metric_name(metric) != "loss"


def best_of(rows: Rows, metric: str | None) -> dict[str, Any]:
    """The epoch with the best value of a metric; of equal ones the earliest."""
    name = metric_name(str(metric))
    column = "eval_loss" if name == "loss" else name
    scored = [row for row in rows if row.get(column) is not None]
    if not scored:
        return {"best_metric": None, "best_value": None, "best_epoch": None}
    choose = max if larger_is_better(str(metric)) else min
    best = choose(scored, key=lambda row: row[column])
    return {"best_metric": column, "best_value": best[column], "best_epoch": best.get("epoch")}

"""summary.json: what became of a run, from its rows. Written last, by rename."""

from __future__ import annotations

from typing import Any

from harness import attempts
from harness.records import FINISHED, SCHEMA, RunFolder, read_json, read_rows, write_json

# Taken from the last epoch's row.
QUALITY = (
    "train_loss", "eval_loss", "accuracy", "top5_accuracy", "precision", "recall", "f1",
    "precision_macro", "recall_macro", "f1_macro",
)  # fmt: skip

MEANS = ("tflops_per_s", "mfu", "comm_exposed_share", "compute_skew")
SUMS = ("payload_bytes", "network_sent_bytes", "energy_j")


def write_summary(
    folder: RunFolder,
    outcome: str,
    reason: str | None = None,
    best_metric: str | None = None,
    facts: dict[str, Any] | None = None,
) -> None:
    """The same fields for a run that finished and for one that did not get far."""
    rows, _ = read_rows(folder.epochs)
    last = rows[-1] if rows else {}
    timed_s = sum(row["timed_s"] for row in rows)
    rate = sum(row["timed_samples"] for row in rows) / timed_s if timed_s else None
    per_gpu = last.get("train_samples_per_s_per_gpu")
    share = per_gpu / last["train_samples_per_s"] if per_gpu else None
    train_time_s = sum(row["epoch_time_s"] for row in rows)
    elapsed_s = attempts.elapsed_s(folder)
    write_json(
        folder.summary,
        {
            "schema": SCHEMA,
            "outcome": outcome,
            "reason": reason,
            "epochs_done": len(rows),
            "updates": last.get("updates"),
            "samples": sum(row["samples"] for row in rows),
            **{name: last[name] for name in QUALITY if name in last},
            **best_of(rows, best_metric),
            "train_samples_per_s": rate,
            "train_samples_per_s_per_gpu": rate * share if rate and share else None,
            "train_time_s": train_time_s,
            "eval_time_s": sum(row.get("eval_time_s") or 0.0 for row in rows),
            "wall_s": attempts.wall_s(folder),
            **attempts.totals(folder),
            "goodput_share": train_time_s / elapsed_s if elapsed_s else None,
            **attempts.cpu_time(folder),
            "peak_memory_gib": _most(rows, "peak_memory_gib_per_rank"),
            "reserved_memory_gib": _most(rows, "reserved_memory_gib_per_rank"),
            "comm_share": (probe_of(folder) or {}).get("comm_share"),
            **{name: _sum_of(rows, name) for name in SUMS},
            **{name: _mean_of(rows, [row.get(name) for row in rows]) for name in MEANS},
            "gpu_utilisation_percent": _mean_of(rows, [*map(gpu_utilisation_percent, rows)]),
            "joules_per_sample": _share(_sum_of(rows, "energy_j"), rows),
            **(facts or {}),
        },
    )


def _sum_of(rows: list[dict[str, Any]], name: str) -> float | None:
    """Unknown where one row does not know it, or there is none."""
    known = [row[name] for row in rows if row.get(name) is not None]
    return sum(known) if known and len(known) == len(rows) else None


def gpu_utilisation_percent(row: dict[str, Any]) -> float | None:
    """Mean over an epoch and its devices; None where nobody knows."""
    found = (row.get("gpu") or {}).get("utilisation_percent")
    return None if found is None else found["mean"]


def _mean_of(rows: list[dict[str, Any]], values: list[float | None]) -> float | None:
    """Over the timed seconds; unknown where one epoch that has any does not know it."""
    timed = [(row["timed_s"], v) for row, v in zip(rows, values, strict=True) if row["timed_s"]]
    known = [(seconds, value) for seconds, value in timed if value is not None]
    if not known or len(known) < len(timed):
        return None
    return sum(s * v for s, v in known) / sum(s for s, _ in known)


def _most(rows: list[dict[str, Any]], name: str) -> float | None:
    """Of all ranks and epochs."""
    return max((of for row in rows for of in row.get(name) or []), default=None)


def probe_of(folder: RunFolder) -> dict[str, Any] | None:
    """What was measured of exchanging, in any start of the run."""
    found: dict[str, Any] | None = (read_json(folder.environment) or {}).get("comm_probe")
    return found


def _share(total: float | None, rows: list[dict[str, Any]]) -> float | None:
    samples = sum(row["samples"] for row in rows)
    return total / samples if total is not None and samples else None


def finish(
    folder: RunFolder,
    best_metric: str | None,
    wall_s: float,
    cpu_time: dict[str, list[float] | None],
    update: int,
    facts: dict[str, Any],
) -> None:
    """The run has been trained to its end."""
    attempts.end(folder, FINISHED, None, wall_s, cpu_time, update)
    write_summary(folder, FINISHED, None, best_metric, facts)
    folder.progress.unlink(missing_ok=True)


def larger_is_better(metric: str) -> bool:
    """Of what can choose the best epoch, only a loss is better when it is small."""
    return metric.removeprefix("eval_") != "loss"


def best_of(rows: list[dict[str, Any]], metric: str | None) -> dict[str, Any]:
    """The epoch with the best value of a metric, the earlier one if two are equal."""
    name = str(metric).removeprefix("eval_")
    column = "eval_loss" if name == "loss" else name
    sign = 1 if larger_is_better(name) else -1
    scored = [row for row in rows if row.get(column) is not None]
    if not scored:
        return {"best_metric": None, "best_value": None, "best_epoch": None}
    best = max(scored, key=lambda row: sign * row[column])
    return {"best_metric": column, "best_value": best[column], "best_epoch": best["epoch"]}

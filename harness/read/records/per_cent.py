"""Metrics that a script of its user gives in per cent, as the shares that all readers expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from harness.core.schema.checks import quality_of_epochs
from harness.core.schema.fields import is_number
from harness.core.schema.rows import EpochRow, SummaryRecord


def as_shares(
    epochs: tuple[EpochRow, ...], summary: SummaryRecord | None
) -> tuple[tuple[str, ...], tuple[EpochRow, ...], SummaryRecord | None]:
    """The metrics that were in per cent, and rows and summary with shares instead. A metric has one
    unit in a run, whichever evaluation set it is of.
    """
    rows: Sequence[Mapping[str, Any]] = epochs
    every = {name for row in rows for name in row}
    losses = (name.removeprefix("trainer_") for name in every if name.endswith("_loss"))
    sets = {"", "test_", *(name.removesuffix("loss") for name in losses)}
    most: dict[str, float] = {}
    metric_of = {f"{of_set}{name}": name for of_set in sets for name in quality_of_epochs()}
    for name, metric in metric_of.items():
        values = (value for row in rows if is_number(value := row.get(name)))
        most[metric] = max(most.get(metric, 0.0), *values, 0.0)
    # A share that was rounded in half precision may be a little above 1.
    in_per_cent = tuple(name for name, value in most.items() if 1.01 < value <= 100)

    def shares(row: Mapping[str, Any]) -> dict[str, Any]:
        best = str(row.get("best_metric"))
        metrics = {name: metric_of.get(best if name == "best_value" else name) for name in row}
        return {
            name: value / 100 if is_number(value) and metrics[name] in in_per_cent else value
            for name, value in row.items()
        }

    if in_per_cent:
        epochs = cast(tuple[EpochRow, ...], tuple(map(shares, rows)))
        summary = None if summary is None else cast(SummaryRecord, shares(summary))
    return in_per_cent, epochs, summary

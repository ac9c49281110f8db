"""What benchmarks/prediction.py has found, as a table."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from benchmarks.results import markdown
from harness.read.predict.model import Model, predict
from harness.read.predict.scenario import Scenario

HEADINGS = ("what", "set-up", "link, one way", "step, ms", "predicted", "off", "closed form",
            "alpha-beta")  # fmt: skip
WAYS = {"table": "with the link's probe", "form": "closed form alone", "alpha_beta": "alpha-beta"}
Row = dict[str, Any]


def compared(what: str, link: str, measured_s: float, model: Model, plan: Scenario) -> Row:
    """A row: predicted with the probe's table, by the closed form alone, by the textbook's ring."""
    with_table = predict(model, plan)
    form = predict(replace(model, table=()), plan)
    predicted = {
        "table": with_table.step_s,
        "form": form.step_s,
        "alpha_beta": with_table.baseline_s,
    }
    errors = {name: seconds / measured_s - 1 for name, seconds in predicted.items()}
    return {"what": what, "setup": str(plan.shape), "link": link, "measured_s": measured_s,
            "predicted_s": predicted, "errors": errors}  # fmt: skip


def table(rows: list[Row]) -> str:
    cells = [
        (
            row["what"], row["setup"], row["link"], f"{row['measured_s'] * 1e3:,.1f}",
            f"{row['predicted_s']['table'] * 1e3:,.1f}",
            *(f"{row['errors'][name]:+.1%}" for name in WAYS),
        ) for row in rows
    ]  # fmt: skip
    lines = [markdown("lllrrrrr", HEADINGS, cells), ""]
    for name, words in WAYS.items():
        sizes = [abs(row["errors"][name]) for row in rows]
        lines.append(f"{words}: {len(sizes)} cases, off by {statistics.median(sizes):.1%} in the "
                     f"median, by {max(sizes):.1%} at most  ")  # fmt: skip
    return "\n".join(lines)

"""The record of overhead.py as tables in Markdown."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import start_up
from benchmarks.results import markdown, spread

HEADINGS = (
    "model", "against", "step ms", "step time ratio", "all steps ratio", "thread time ratio",
    "thread ms more a step", "train() without evaluation ratio", "first step ms later",
)  # fmt: skip


def table(record: dict[str, Any]) -> str:
    facts = record["environment"]
    versions = ", ".join(f"{k} {v}" for k, v in facts["versions"].items() if v)
    rows, written = [], []
    for name, pairs in record["cases"].items():
        for arm in ("bare", "stock", "loop"):
            both = [(pair["ours"], pair[arm]) for pair in pairs]
            step, steps, thread, train = (
                spread([ours[key] / other[key] for ours, other in both], ".4f")
                for key in ("step_s", "all_steps_s", "step_thread_s", "train_s")
            )
            more, later = (
                spread([1000 * (ours[key] - other[key]) for ours, other in both], form)
                for key, form in (("step_thread_s", "+.3f"), ("first_step_s", "+.0f"))
            )
            ms = f"{1000 * statistics.median(other['step_s'] for _, other in both):.2f}"
            rows.append((name, arm, ms, step, steps, thread, more, train, later))
        writing = [[1000 * s for s in pair["ours"]["writing_s"]] for pair in pairs]
        first = spread([w[0] for w in writing], ".1f")
        later = spread([s for w in writing for s in w[1:]], ".1f")
        written.append((name, first, later))
    parts = [
        f"{facts['machine']}, {record['threads']} thread(s), Python {facts['python']}, {versions}; "
        f"{record['pairs']} pairs: median (smallest to largest)",
        markdown("lllllllll", HEADINGS, rows),
        markdown("lll", ("model", "row writing, first epoch, ms", "later epochs, ms"), written),
    ]
    parts += [start_up.table(record["start_up"])] if record["start_up"] else []
    return "\n\n".join(parts)

"""Attributes of the rows of a page, by which a reader can filter all its tables at once."""

from __future__ import annotations

from harness.read.labels import STRATEGY, UNKNOWN, plain_text, strategy_text, without_tag
from harness.read.records.runs import Run

FILTERS = ("script", "setup", STRATEGY, "link")
PART = "part"  # marks a row that stays below the previous one, as a node below its group

Filters = dict[str, str]


def filters_of(run: Run) -> Filters:
    """The value of each filter, in the words of the tables."""
    # A run that was skipped has no settings, only its place in the plan.
    known = {name: run.label.get(name) or run.identity.get(name) for name in FILTERS}
    if known["setup"] is not None:
        known["setup"] = without_tag(str(known["setup"]))
    if run.label.get(STRATEGY) is not None:
        known[STRATEGY] = strategy_text(run.label)
    return {name: plain_text(value) or UNKNOWN for name, value in known.items()}

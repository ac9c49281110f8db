"""The parts that a report is made of, whatever it is written as."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.read.drawing import Drawn
from harness.read.results import Rows
from harness.read.sweep_table import Shown


@dataclass
class Section:
    """What the report says of one sweep, or of the runs of one task that are of no sweep."""

    name: str  # of its folder of files
    title: str
    about: str
    table: Shown
    results: Rows
    nodes: Rows
    figures: dict[str, Drawn]
    not_drawn: dict[str, str]
    explained: list[str]
    failures: list[tuple[str, str, str]]  # which, what became of it, where
    fairness: list[str]
    problems: list[str]
    drawings: dict[str, str] = field(default_factory=dict)  # as they stand in the page

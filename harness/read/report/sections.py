"""What a report says of one sweep, ready to be written as a page or as Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from harness.read.table import Item, Table
from harness.read.tables.definitions import IF_USED, OF_HYPOTHESIS, OF_REPORT
from harness.read.tables.sweep_table import SweepTable


@dataclass(frozen=True)
class Shown:
    """A figure as it stands on the page."""

    svg: str
    alt: str
    notes: list[str]  # on what it leaves out


@dataclass(frozen=True)
class Section:
    """One sweep, or the runs of one task that belong to no sweep."""

    name: str  # of the folder with its files
    table: SweepTable
    headline: str  # what was found, in short
    hypothesis: str  # or a text that there is none; empty for runs of no sweep
    answers: list[Item]
    next_question: str  # answered by its records or another sweep, with the command
    repeat: str  # the command to repeat it, if other programs disturbed it
    results: Table
    nodes: Table
    not_finished: Table
    figures: dict[str, Shown]
    answering: int  # as many of the first figures answer the question
    not_drawn: dict[str, str]
    lists: dict[str, list[Item]]  # by title; none is empty


def definitions(sections: Sequence[Section]) -> dict[str, str]:
    """Definitions of the words of all tables, and of other words that these sections use."""
    answers = (chain([text], below) for s in sections for text, below in s.answers)
    cells = (row for s in sections for row in s.results.rows)
    shown = "\n".join(chain(*answers, *cells))
    used = {word: text for pattern, (word, text) in IF_USED.items() if re.search(pattern, shown)}
    supposed = OF_HYPOTHESIS if any(section.hypothesis for section in sections) else {}
    return {**supposed, **used, **OF_REPORT}

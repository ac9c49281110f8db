"""What a report says of one sweep, ready to be written as a page or as Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from harness.read.statistics import Noise
from harness.read.table import Item, Table
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

    name: str  # of its folder of files
    table: SweepTable
    hypothesis: str  # or that there is none; nothing for runs of no sweep
    answers: list[Item]
    next_question: str  # which its records or another sweep answer, with the command
    repeat: str  # the command, where other programs disturbed what was measured
    results: Table
    nodes: Table
    not_finished: Table
    figures: dict[str, Shown]
    answering: int  # so many of the figures, the first ones, answer the question
    not_drawn: dict[str, str]
    lists: dict[str, list[Item]]  # by title; none is empty


def definitions(sections: Sequence[Section]) -> dict[str, str]:
    """What all tables use, and of the other words those that these sections use."""
    answers = (chain([text], below) for s in sections for text, below in s.answers)
    cells = (row for s in sections for row in s.results.rows)
    shown = "\n".join(chain(*answers, *cells))
    used = {word: text for pattern, (word, text) in IF_USED.items() if re.search(pattern, shown)}
    supposed = HYPOTHESIS if any(section.hypothesis for section in sections) else {}
    return {**supposed, **used, **DEFINITIONS}


HYPOTHESIS = {
    "hypothesis": "free text of the sweep file. What it says in numbers (expect) holds where the "
    "whole 95 % interval is within them, does not hold where all of it is outside, and is open in "
    "between."
}

# By the pattern of what is used.
IF_USED = {
    r"\b\d+_\d+\b": (
        "set-up 1_2", "one node with two processes; a word behind it names the link between nodes."
    ),
    Noise.UNKNOWN: (
        Noise.UNKNOWN, "a side has too few runs that count for an interval: the difference may be "
        "chance."
    ),
    Noise.NO_SPREAD: (
        Noise.NO_SPREAD, "all seeds differ from the baseline by the same amount: it may be chance, "
        "and more seeds tell."
    ),
}  # fmt: skip

# Words that all tables use; each table defines its own besides.
DEFINITIONS = {
    "samples/s": "training samples of the timed steps over all processes, divided by their time; "
    "evaluation, saving and the first steps are left out.",
    "training time": "the training part of all epochs, without evaluation and saving.",
    "wall time": "everything from the start of a run to its end, all attempts added up.",
    "loss, top-1, top-5": "of the last epoch, over the whole evaluation set, each sample once.",
    "effective batch": "samples of one update over all processes.",
    "±": "sample standard deviation over the seeds; bands and bars in figures are 95 % intervals "
    "of the mean (Student's t), points are single runs.",
    "scaling efficiency": "weak X_N/(N X_1) of samples/s at equal batch per device, strong "
    "T_1/(N T_N) of training time at equal effective batch; in figures 1 is one device, and what "
    "has no run on one is not drawn; in tables 1 is the baseline, and N counts its devices as one.",
    "time to accuracy": "wall time, and training time, to the end of the first epoch that reaches "
    "the target; a miss is infinite, and is counted.",
    "where the time went": "of the median rank, means over the seeds; what the records do not "
    "separate is one part.",
}

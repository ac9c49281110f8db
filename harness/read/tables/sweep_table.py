"""A sweep's table as text, the same for the screen, for an issue and for a README."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from harness.core.records import FINISHED, SKIPPED, WAITING
from harness.core.records.submitted import JOBS, open_entries
from harness.core.settings import UserError, nearest
from harness.core.strategies import SINGLE
from harness.read.compare.answers import Answer, answers
from harness.read.compare.compare import OF_UNCERTAIN, TOO_UNCERTAIN
from harness.read.compare.disturbed import all_disturbed
from harness.read.compare.expected import verdicts
from harness.read.compare.fastest import best_learning_rate, fastest_batch
from harness.read.labels import (
    STRATEGY,
    UNKNOWN,
    column_of,
    counted,
    heading_of,
    label_text,
    shown_axes,
)
from harness.read.records.baseline import (
    EFFICIENCY,
    GAIN,
    POINTS,
    RATIOS,
    STRONG,
    WEAK,
    baseline_of,
    compared_groups,
    differs_from_single,
    group_rows,
    measures_of,
)
from harness.read.records.comparable import (
    QUALITY,
    SPEED,
    TARGET,
    disturbed,
    learned_nothing,
    noted_differences,
    refused,
    resumed,
    without_times,
)
from harness.read.records.processors import spread_of
from harness.read.records.recorded import UNFINISHED
from harness.read.records.runs import Run
from harness.read.records.sweeps import SweepResults
from harness.read.table import Table
from harness.read.tables.columns import (
    AGAINST_BASE,
    DISTURBED,
    OTHER_LINK,
    OTHER_TRAINING,
    PAIRS,
    PART,
    Column,
    Row,
    columns_of,
    filters_of,
    number_text,
)
from harness.read.tables.definitions import OF_COLUMNS, OF_LAST_EPOCH, OF_SCALING

NODE = "node"


class NotFinished(NamedTuple):
    """Which run or how many, what became of it, and where its record is."""

    which: str
    what: str
    path: str | None = None


@dataclass(frozen=True)
class SweepTable:
    """The table of a sweep with its texts, which only has to be shown."""

    title: str
    hypothesis: str | None
    about: str  # what is the same for all rows
    table: Table
    verdicts: list[str]  # on what the hypothesis says in numbers
    best: list[str]  # a sentence on the fastest batch, and one on the best learning rate
    answers: list[Answer]
    legend: list[str]
    notes: list[str]
    not_finished: list[NotFinished]
    environment: list[str]
    command: str | None


def sweep_table(sweep: SweepResults) -> tuple[SweepTable, list[Row]]:
    """The table, and the rows of numbers that it was made of."""
    runs = sweep.runs
    rows: list[Row] = list(group_rows(sweep))
    columns = columns_of(sweep, rows, measures_of(sweep))
    same = [column for column in columns if column.setting and _is_same(column, rows)]
    left = [column for column in columns if column not in same]
    keys = sum(column.axis for column in left)
    headings = [column.heading for column in left]
    right = [column.right for column in left]
    lines, attributes = [], []
    for row, group in zip(rows, sweep.groups, strict=True):
        first, *parts = (tuple(cells) for cells in _lines(sweep, row, left, keys))
        lines += [first, *parts]
        of_group = filters_of(group.recorded)
        attributes += [of_group, *[of_group | {PART: ""}] * len(parts)]
    if sweep.per_node:
        headings.insert(keys, NODE)
        right.insert(keys, True)
    finished = sweep.finished
    names = {column.name for column in left}
    all_answers = answers(sweep)
    shown = SweepTable(
        title=sweep.question,
        hypothesis=sweep.hypothesis,
        about=_about(sweep, rows, same),
        table=Table(headings, lines, keys + sweep.per_node, tuple(right), attributes),
        verdicts=verdicts(sweep),
        best=_best(sweep),
        answers=all_answers,
        legend=[
            *legend(sweep, rows, columns),
            *(f"{DISTURBED} {text}" for text in disturbed(finished)),
            *resumed(finished),
            *spread_of(finished),
            *_links(runs),
            *(
                [OF_UNCERTAIN]
                if any(TOO_UNCERTAIN in str(answer) for answer in all_answers)
                else []
            ),
        ],
        notes=_notes(sweep, rows, names),
        not_finished=_not_finished(sweep, runs, names),
        environment=environment_lines(runs),
        command=sweep.command,
    )
    return shown, rows


def _best(sweep: SweepResults) -> list[str]:
    """The sentences on the best values; that on what the baseline alone names comes first."""
    rate, batch = best_learning_rate(sweep), fastest_batch(sweep)
    return [*rate, *batch] if [*(sweep.baseline or {})] == ["lr"] else [*batch, *rate]


def table_of_begun(sweep: SweepResults) -> tuple[SweepResults, SweepTable, list[Row]]:
    """The sweep without the groups of which no run began, such as those that nobody selected, and
    its table, with a line that counts their runs.
    """
    submitted = _submitted(sweep)
    begun = [
        group for group in sweep.groups
        if any(run.state != WAITING or run.path in submitted for run in group.runs)
    ]  # fmt: skip
    part = sweep.only(run for group in begun for run in group.runs) if begun else sweep
    shown, rows = sweep_table(part)
    if left_out := len(sweep.runs) - len(part.runs):
        what = f"{WAITING}: not begun, or not selected"
        line = NotFinished(counted(left_out, "run"), what)
        shown = replace(shown, not_finished=[*shown.not_finished, line])
    return part, shown, rows


def _is_same(column: Column, rows: list[Row]) -> bool:
    """Whether several rows show one known value; a row that failed before it had a batch or updates
    does not differ, one that has not run may.
    """
    texts = {column.text(row) for row in rows} - {UNKNOWN}
    may_lack = column.name in ("effective_batch", "updates")
    unknown = [row["outcome"] for row in rows if column.text(row) == UNKNOWN]
    may_differ = any(not may_lack or WAITING in outcome for outcome in unknown)
    return len(rows) > 1 and len(texts) == 1 and not may_differ


def _about(sweep: SweepResults, rows: list[Row], same: list[Column]) -> str:
    machines = [*dict.fromkeys(row["machine"] for row in rows if row["machine"])]
    shared = [machines[0]] if len(machines) == 1 else []
    if same:
        texts = ((c, next(t for row in rows if (t := c.text(row)) != UNKNOWN)) for c in same)
        shared.append("all: " + ", ".join(f"{c.heading} {text}" for c, text in texts))
    if named := _unvaried_strategy(sweep):
        shared.append(f"strategy {named}")
    if why := all_disturbed(sweep.groups):
        shared.append(why)
    if not sweep.has_question:  # the title says what they are
        return ", ".join(shared)
    return ", ".join([f"sweep {sweep.name}{' (--tiny)' if sweep.tiny else ''}", *shared])


def _unvaried_strategy(sweep: SweepResults) -> str | None:
    """The strategy of all groups where no column has it; one process needs none."""
    if STRATEGY in sweep.axes:
        return None
    known = {run.identity[STRATEGY] for run in sweep.runs} - {None}
    known = known - {SINGLE} or known
    return str(known.pop()) if len(known) == 1 else None


def _lines(sweep: SweepResults, row: Row, columns: list[Column], keys: int) -> list[list[str]]:
    cells = [column.text(row) for column in columns]
    if row["outcome"] != FINISHED:
        # Numbers of runs that did not finish would be read as if they had.
        measured = [n for n, column in enumerate(columns) if not (column.axis or column.setting)]
        for n in measured:
            cells[n] = UNKNOWN
        cells[measured[0] if measured else keys - 1] = row["outcome"]
    if not sweep.per_node:
        return [cells]
    cells.insert(keys, "all")
    nodes = len(row["user_s_per_node"])
    return [cells, *(_node_line(row, columns, keys, node) for node in range(nodes))]


def _node_line(row: Row, columns: list[Column], keys: int, node: int) -> list[str]:
    """What is known of one node; the rest is of the whole run and stands above."""
    cells = []
    for column in columns:
        values = row.get(f"{column.name}_per_node")
        empty = "" if column.axis else UNKNOWN
        cells.append(number_text(column.name, values[node]) if values else empty)
    cells.insert(keys, str(node))
    return cells


def legend(sweep: SweepResults, rows: list[Row], columns: list[Column]) -> list[str]:
    names = {column.name for column in columns}
    lines = ["; ".join(_definitions(sweep, names)), "; ".join(_comparison(sweep, rows, names))]
    if sweep.target is not None:
        lines.append(
            f"target: first epoch with {sweep.target}; target train s: its training and that "
            "before; target wall s: everything until its row but the measuring; "
            "reached: of the finished runs; a run that misses counts as infinite"
        )
    return [line for line in lines if line]


def _definitions(sweep: SweepResults, names: set[str]) -> list[str]:
    texts = [
        "n: runs finished/planned; numbers are means over the finished ones",
        "±: sample standard deviation",
        *(text for name, text in OF_COLUMNS.items() if name in names),
    ]
    if keeps_best(sweep.runs):
        texts.append(OF_LAST_EPOCH)
    if sweep.per_node:
        texts.append(
            "node: from the last epoch's rows of its ranks, user s and system s added up, accuracy "
            "weighted by their test samples"
        )
    return texts


def keeps_best(runs: Iterable[Run]) -> bool:
    return any(run.settings.get("save") == "best" for run in runs)


def _comparison(sweep: SweepResults, rows: list[Row], names: set[str]) -> list[str]:
    texts, fixed = [], sweep.hold not in sweep.axes
    if sweep.baseline is not None:
        pairs = [(group, baseline_of(sweep, group)) for group in sweep.groups]
        unlike = set().union(*(differs_from_single(*pair, sweep.axes) for pair in pairs))
        hold = str(sweep.hold)  # not fixed where the batch itself is compared
        fixed = all(b is None or g.label.get(hold) == b.label.get(hold) for g, b in pairs)
        axes = [a for a in shown_axes(sweep.axes) if a not in {*sweep.baseline, *unlike}]
        others = [heading_of(column_of(axis)) for axis in axes]
        same = f" with the same {', '.join(others)}" if others else ""
        texts.append(f"base: {label_text(sweep.baseline, sweep.axes)}{same}")
    if GAIN in names:
        texts.append("vs base: samples/s, ratio of geometric means (those shown are harmonic)")
    if names & set(RATIOS):
        texts.append("target vs base: ratio of geometric means, unknown where the baseline misses")
    bracketed = names & {POINTS, *RATIOS} if sweep.columns is not None else set()
    if any(
        row.get(f"{n}_low") is not None and not row["baseline"] for n in bracketed for row in rows
    ):
        texts.append("in brackets: 95 % interval over the seeds, Student's t")
    texts += _of_pairs(rows, names)
    kinds = {row["scaling_kind"] for row in rows} if EFFICIENCY in names else set()
    if kinds & {WEAK, STRONG}:
        forms = [OF_SCALING[kind] for kind in (WEAK, STRONG) if kind in kinds]
        texts.append(f"eff.: scaling efficiency, {', '.join(forms)}")
    if any(row["other_updates"] for row in rows):
        meaning = "other number of updates than the baseline: not the same training"
        if any(row["other_updates"] and row.get(POINTS) is not None for row in rows):
            meaning += " (accuracy is compared where the batch itself is the question)"
        texts.append(f"{OTHER_TRAINING} {meaning}")
    held = {"per_gpu_batch": "batch per GPU", "effective_batch": "effective batch"}
    if sweep.hold and fixed:
        texts.append(f"held fixed: {held.get(sweep.hold, sweep.hold)}")
    return [*texts, f"learning-rate rule: {sweep.lr_rule}"] if sweep.lr_rule else texts


def _of_pairs(rows: Sequence[Row], names: set[str]) -> list[str]:
    """A text on how many rows are compared by only some of their runs, and by how many pairs."""
    pairs = [
        {row[f"{name}_n"] for name in names & {*AGAINST_BASE} if row.get(f"{name}_unpaired")}
        for row in rows
    ]
    counts = {n for of_row in pairs for n in of_row}
    if not counts:
        return []
    few, most = min(counts), max(counts)
    many = counted(most, "pair") if few == most else f"{few} to {most} pairs"
    rows_of_pairs = counted(sum(map(bool, pairs)), "row")
    text = f"{rows_of_pairs}: by {many} with the same seed alone, beside means of all that count"
    return [f"{PAIRS} {text}"]


def _links(runs: Sequence[Run]) -> list[str]:
    """How many finished runs had another link than the one asked for, and how one of them did."""
    warnings = (run.link_warning for run in runs if run.state == FINISHED)
    texts = Counter(text for text in warnings if text is not None)
    if not texts:
        return []
    first, _ = texts.most_common(1)[0]
    number = texts.total()
    return [
        f"{OTHER_LINK} {counted(number, 'run')}: {one_line(first)}"
        + (", ..." if len(texts) > 1 else "")
    ]


def _notes(sweep: SweepResults, rows: list[Row], shown: set[str]) -> list[str]:
    notes = []
    finished = [row for row in rows if row["finished"]]
    if sweep.baseline is not None:
        named = label_text(sweep.baseline, sweep.axes)
        if any(row["baseline_finished"] is None for row in finished):
            notes.append(
                f"{UNKNOWN}: no run of the baseline ({named}) with the same other settings on the "
                "same kind of machine"
            )
        if any(row["baseline_finished"] == 0 for row in finished):
            notes.append(f"{UNKNOWN}: no run of the baseline ({named}) has finished")
    notes += _not_compared(sweep, shown)
    notes += _unlike_baseline(sweep)
    notes += [f"{UNKNOWN}: {text}" for text in without_times(sweep.groups)]
    notes += learned_nothing(sweep.finished)
    notes += sweep.averaged_exchanges + sweep.shared_cores + sweep.left_out_samples
    if sweep.target is not None and finished and not any(row["tta_train_s_n"] for row in finished):
        known = {name for run in sweep.runs for row in run.epochs for name in row}
        metric = sweep.target.metric
        named = f"target: no epoch of any run has a number named {metric}"
        if metric not in known:
            notes.append(f"{named}: {near}" if (near := nearest(metric, known, "")) else named)
    return notes


# Question of a comparison -> the columns that answer it, and what they compare.
COMPARED = {
    SPEED: ((GAIN, EFFICIENCY), "samples/s"),
    QUALITY: ((POINTS,), "accuracy"),
    TARGET: (RATIOS, "time to the target"),
}


def _not_compared(sweep: SweepResults, shown: set[str]) -> Iterator[str]:
    """Why cells of comparisons are empty, in the words of `compare` and of the answers."""
    pairs = compared_groups(sweep)
    for question, (names, what) in COMPARED.items():
        reasons = [refused(*pair, question) for pair in pairs if shown & {*names}]
        refusals = Counter(", ".join(of_pair) for of_pair in reasons if of_pair)
        for why, number in refusals.items():
            rows = counted(number, "row")
            yield f"{UNKNOWN}: {what} not compared with the baseline in {rows} ({why})"


def _unlike_baseline(sweep: SweepResults) -> Iterator[str]:
    """The properties in which rows differ from the baseline that they are compared with."""
    differ = Counter(name for pair in compared_groups(sweep) for name in noted_differences(*pair))
    for name, number in differ.items():
        yield f"{counted(number, 'row')} differ{'s' * (number == 1)} from the baseline in {name}"


def _not_finished(sweep: SweepResults, runs: Sequence[Run], shown: set[str]) -> list[NotFinished]:
    """Each unfinished run with its reason; skipped and waiting runs are counted."""
    axes = tuple(axis for axis in sweep.axes if column_of(axis) in shown)
    lines = []
    for run in runs:
        if run.state not in (FINISHED, WAITING, SKIPPED):
            reason = run.reason or "no reason was recorded"
            if run.state == UNFINISHED:
                reason = run.progress
            what = f"{run.current_state}: {one_line(reason)}"
            lines.append(NotFinished(label_text(run.label, axes), what, run.path))
    skipped = Counter(run.reason or "" for run in runs if run.state == SKIPPED)
    lines += [
        NotFinished(counted(n, "run"), f"{SKIPPED}: {one_line(reason)}")
        for reason, n in skipped.items()
    ]
    submitted = _submitted(sweep)
    waiting = Counter(run.path in submitted for run in runs if run.state == WAITING)
    texts = {True: "submitted to the cluster", False: "not begun"}
    lines += [
        NotFinished(counted(n, "run"), f"{WAITING}: {texts[known]}") for known, n in waiting.items()
    ]
    return lines


def _submitted(sweep: SweepResults) -> Mapping[str, Any]:
    """The runs that are in the queue of a cluster; none where that is not known."""
    try:
        return open_entries(sweep.folder / JOBS)
    except UserError:
        return {}


def one_line(text: str) -> str:
    return " ".join(text.split())


def environment_lines(runs: Sequence[Run]) -> list[str]:
    """Machines, versions and commits: of all runs together, every one that occurs."""
    known = [run.environment for run in runs if run.environment]
    if not known:
        return []
    versions = [e.get("versions") or {} for e in known]
    lines = [_distinct(_machine(e) for e in known)]
    for name in ("torch", "transformers"):
        lines.append(f"{name} {_distinct(v.get(name) for v in versions)}")
    lines.append(f"commit {_distinct(_commit(e) for e in known)}")
    return lines


def _distinct(texts: Any) -> str:
    return " and ".join(dict.fromkeys(str(text) for text in texts if text)) or "unknown"


def _machine(environment: dict[str, Any]) -> str | None:
    """The label of the machine, with its hardware in brackets."""
    cores, memory = environment.get("cpu_cores"), environment.get("memory_gib")
    gpus = Counter(environment.get("gpus") or ())
    texts = [f"{n} x {name}" for name, n in gpus.items()]
    texts += [str(environment["cpu"])] if environment.get("cpu") else []
    texts += [f"{cores} cores"] if cores else []
    texts += [f"{memory:g} GiB"] if memory else []
    label = environment.get("machine")
    return f"{label} ({', '.join(texts)})" if label and texts else label


def _commit(environment: dict[str, Any]) -> str | None:
    commit = environment.get("commit")
    dirty = " with changed files" if environment.get("dirty") else ""
    return f"{str(commit)[:12]}{dirty}" if commit else None

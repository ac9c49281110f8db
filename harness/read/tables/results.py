"""The tables of a report: accuracy, loss and time by group and by node, and what disturbed them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from harness.core.records import DISTURBING_SHARE, FINISHED
from harness.read.labels import TIMES_TO_TARGET, UNKNOWN, duration, listed
from harness.read.records.baseline import GAIN, RATE, per_node
from harness.read.records.groups import Group, by_key
from harness.read.records.runs import PER_NODE, Run
from harness.read.records.sweeps import SweepResults
from harness.read.table import Table
from harness.read.tables.columns import Row, filters_of, measure_column

MOST_VALUES = 6  # named in a sentence

# Name in a sentence -> place in environment.json; all runs of a script should have one value.
SHOULD_AGREE = {
    "the data (data_checksum)": ("data", "data_checksum"),
    "the training samples": ("data", "train_samples"),
    "the test samples": ("data", "test_samples"),
    "torch": ("versions", "torch"),
    "transformers": ("versions", "transformers"),
    "the commit of this project": ("commit",),
}
# Numbers that tell different trainings apart.
TRAININGS: dict[str, Callable[[Group], float | None]] = {
    "updates": lambda group: group.mean("updates"),
    "effective batches": lambda group: group.fact("effective_batch"),
}


def fairness(sweep: SweepResults) -> list[str]:
    """A sentence for each thing that differs between runs, or that disturbed them."""
    runs = [run for run in sweep.runs if run.environment]
    exchanges = (f"{text}." for text in sweep.averaged_exchanges)
    return [*_trainings(sweep), *_machines(sweep), *_idle_cores(sweep), *exchanges, *_differ(runs),
            *_disturbed(runs)]  # fmt: skip


def _trainings(sweep: SweepResults) -> Iterator[str]:
    finished = [group for group in sweep.groups if group.finished]
    by_script = by_key(finished, lambda group: _script(group.recorded))
    for what, value_of in TRAININGS.items():
        differing = []
        for script, groups in by_script.items():
            known = sorted({value for g in groups if (value := value_of(g)) is not None})
            if len(known) > 1:
                values = _some(f"{value:g}" for value in known)
                differing.append(f"{script}: {values}" if script else values)
        if differing:
            yield (
                f"Different {what} ({'; '.join(differing)}): rows that differ in them are not the "
                "same training."
            )
    counts = {len(group.finished) for group in finished}
    if 1 in counts:
        yield "Groups of one run have no spread: a difference between them may be the seed's."


def _machines(sweep: SweepResults) -> Iterator[str]:
    if len(sweep.machines) > 1:
        yield (
            f"Several kinds of machine ({_some(sweep.machines)}): each has its own rows, "
            "none is averaged with another."
        )


def _idle_cores(sweep: SweepResults) -> Iterator[str]:
    """A sentence on CPUs where one process was given only the threads of one of several."""
    runs = sweep.finished
    shares = {(run.threads or 0, run.environment.get("cpu_cores") or 0) for run in runs}
    processes = {run.processes for run in runs}
    has_single = 1 in processes and len(processes) > 1
    if has_single and all(0 < threads < cores for threads, cores in shares):
        counts = " or ".join(f"{threads} of {cores}" for threads, cores in sorted(shares))
        yield f"Each process had {counts} cores: one process that uses all was not measured."


def _differ(runs: list[Run]) -> Iterator[str]:
    for what, path in SHOULD_AGREE.items():
        # Texts and images differ in their data by their nature.
        for script in sorted({_script(run) for run in runs}):
            values = {_at(run.environment, path) for run in runs if _script(run) == script} - {None}
            if len(values) > 1:
                of = f" of {script}" if script else ""
                yield f"Runs{of} differ in {what}: {_some(sorted(str(v)[:12] for v in values))}."


def _script(run: Run) -> str:
    return str(run.label.get("script") or run.settings.get("script") or "")


def _at(environment: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        environment = (environment or {}).get(name)
    return environment


def _disturbed(runs: list[Run]) -> Iterator[str]:
    """What happened to how many runs. What changes times is of finished runs, as below tables."""
    of_all: dict[str, list[Any]] = {
        "ran from a checkout with changed files": [r.environment.get("dirty") for r in runs],
        "had more processes than cores": [
            (r.launch.get("processes_per_core") or 0) > 1 for r in runs
        ],
        "had more processes than GPUs": [
            (r.launch.get("processes_per_gpu") or 0) > 1 for r in runs
        ],
    }
    finished = [run for run in runs if run.state == FINISHED]
    of_finished: dict[str, list[Any]] = {
        "had a link far from the one asked for": [r.link_warning for r in finished],
        "ran in another batch per process than asked for": [r.other_batches for r in finished],
        "ran beside others of the sweep (--pack)": [r.launch.get("packed") for r in finished],
        f"began or trained while others used more than {DISTURBING_SHARE:.0%} of the cores": [
            r.is_beside_others and not r.launch.get("packed") for r in finished
        ],
    }
    kind = "runs" if len(finished) == len(runs) else "finished runs"
    for counted, of_kind in ((of_all, "runs"), (of_finished, kind)):
        for what, states in counted.items():
            if number := sum(map(bool, states)):
                yield f"{number} of {len(states)} {of_kind} {what}."


def _some(texts: Iterable[str]) -> str:
    return listed(texts, ", ", MOST_VALUES)


# Measures of the table of results, in the form that the table of a sweep gives them.
QUALITIES = ("accuracy", "top5_accuracy", "eval_loss", "test_accuracy", "test_loss")
SPEEDS = (RATE, GAIN, *TIMES_TO_TARGET)


def results(sweep: SweepResults, rows: list[Row]) -> Table:
    """A row per group; a column that no group has a value for is left out. rows: its numbers."""
    cells = {
        "run": [*map(sweep.name_of, sweep.groups)],
        "runs": [f"{len(group.finished)}/{len(group.runs)}" for group in sweep.groups],
        **_measures(QUALITIES, rows),
        **_measures(SPEEDS, rows),
        "training time": [_time(group, "train_time_s") for group in sweep.groups],
        "wall time": [_time(group, "wall_s") for group in sweep.groups],
        "effective batch": [str(g.fact("effective_batch") or UNKNOWN) for g in sweep.groups],
        "outcome": [group.outcome for group in sweep.groups],
    }
    shown = {heading: texts for heading, texts in cells.items() if set(texts) != {UNKNOWN}}
    attributes = [filters_of(group.recorded) for group in sweep.groups]
    return Table([*shown], [*zip(*shown.values(), strict=True)], attributes=attributes)


def _measures(names: Iterable[str], rows: list[Row]) -> dict[str, list[str]]:
    columns = [measure_column(name, rows, reached=False, with_spread=True) for name in names]
    return {
        column.heading: [column.text(row) if row["finished"] else UNKNOWN for row in rows]
        for column in columns
    }


def _time(group: Group, measure: str) -> str:
    mean = group.mean(measure)
    return UNKNOWN if mean is None else duration(mean)


def by_node(sweep: SweepResults) -> Table:
    """Groups on several nodes, a row per node: processor time and accuracy of its own samples."""
    rows, attributes = [], []
    for group in sweep.groups:
        if (group.fact("nodes") or 1) > 1:
            of_nodes = zip(*per_node(group).values(), strict=True)
            for node, values in enumerate(of_nodes):
                texts = map(_of_node, PER_NODE, values)
                rows.append([sweep.name_of(group), str(node), *texts])
                attributes.append(filters_of(group.recorded))
    of_share = ["accuracy of its share", "top-5 of its share"]  # of the test set
    headings = ["run", "node", "user time", "system time", *of_share]
    return Table(headings, rows, attributes=attributes)


def _of_node(name: str, value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return duration(value) if name.endswith("_s") else f"{value:.4f}"

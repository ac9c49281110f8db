"""What a reader must know before taking two rows for the same thing but one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from harness.read.links import link_warning
from harness.read.measured import Measured
from harness.read.sweep_runs import SweepRun

# Name in the sentence -> where environment.json has it; all runs of a part should have one.
SHOULD_AGREE = {
    "the data (data_checksum)": ("data", "data_checksum"),
    "the training samples": ("data", "train_samples"),
    "the test samples": ("data", "test_samples"),
    "torch": ("versions", "torch"),
    "transformers": ("versions", "transformers"),
    "the commit of this project": ("commit",),
}


def fairness(measured: Measured) -> list[str]:
    """A sentence for each thing that differs, or that disturbed."""
    runs = [run for run in measured.runs if run.environment]
    return [*_trainings(measured), *_machines(measured), *_differ(runs), *_disturbed(runs)]


def _trainings(measured: Measured) -> Iterator[str]:
    finished = [group for group in measured.groups if group.finished]
    for script in dict.fromkeys(_script(group.runs[0]) for group in finished):
        of = f" of {script}" if script else ""
        theirs = [group for group in finished if _script(group.runs[0]) == script]
        for words, values in (
            ("updates", {group.mean("updates") for group in theirs}),
            ("effective batches", {group.fact("effective_batch") for group in theirs}),
        ):
            known = sorted(value for value in values if value is not None)
            if len(known) > 1:
                yield (
                    f"Different {words}{of} ({_some(f'{value:g}' for value in known)}): rows that "
                    "differ in them are not the same training."
                )
    counts = {len(group.finished) for group in finished}
    if 1 in counts:
        yield "Groups of one run have no spread: a difference between them may be the seed's."


def _machines(measured: Measured) -> Iterator[str]:
    if len(measured.machines) > 1:
        yield (
            f"Several kinds of machine ({_some(measured.machines)}): each has its own rows, "
            "none is averaged with another."
        )


def _differ(runs: list[SweepRun]) -> Iterator[str]:
    for words, path in SHOULD_AGREE.items():
        # Texts and images differ in their data by their nature.
        for script in sorted({_script(run) for run in runs}):
            values = {_at(run.environment, path) for run in runs if _script(run) == script} - {None}
            if len(values) > 1:
                of = f" of {script}" if script else ""
                yield f"Runs{of} differ in {words}: {_some(sorted(map(_short, values)))}."


def _script(run: SweepRun) -> str:
    return str(run.label.get("script") or run.settings.get("script") or "")


def _at(environment: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        environment = (environment or {}).get(name)
    return environment


def _short(value: Any) -> str:
    return str(value)[:12]


def _disturbed(runs: list[SweepRun]) -> Iterator[str]:
    counted = {
        "ran from a checkout with changed files": [r.environment.get("dirty") for r in runs],
        "had a link far from the one asked for": [link_warning(r.environment) for r in runs],
        "had more processes than cores": [
            (_launch(r, "processes_per_core") or 0) > 1 for r in runs
        ],
        "ran beside others of the sweep (--pack)": [_launch(r, "packed") for r in runs],
        "began while others used more than a tenth of the cores": [
            (_launch(r, "cpu_busy_share") or 0) > 0.1 for r in runs
        ],
    }
    for words, found in counted.items():
        if number := sum(map(bool, found)):
            yield f"{number} of {len(runs)} runs {words}."


def _launch(run: SweepRun, name: str) -> Any:
    return (run.environment.get("launch") or {}).get(name)


def _some(texts: Iterable[str], most: int = 6) -> str:
    told = [*texts]
    return ", ".join(told[:most]) + (f" and {len(told) - most} more" if len(told) > most else "")

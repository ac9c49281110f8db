"""What is measured beside the time of steps, and comes into the rows when an epoch has ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any


class Measure:
    """Of one rank, epoch by epoch. Nothing of it may wait for a device or for others in a step."""

    name = ""  # in a checkpoint
    clock: Any = None  # the StepClock; None where nobody records the training

    def begin(self, clock: Any) -> None:
        """A training is about to begin or to go on."""
        self.clock = clock

    def epoch_begins(self) -> None:
        """Before the epoch's time begins."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is done meanwhile is no step of the training, and does not count."""
        yield

    def of_rank(self, untimed: int) -> dict[str, Any]:
        """The epoch has ended: for this rank's row. The first so many updates are not timed."""
        return {}

    def of_run(self, ranks: Sequence[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
        """For the run's row, from those of all ranks and from what is in it already; on rank 0."""
        return {}

    def facts(self) -> dict[str, Any]:
        """What the record of the machine is to say; on rank 0."""
        return {}

    def so_far(self) -> Any:
        """What a checkpoint inside an epoch has to know of that epoch."""
        return None


@contextmanager
def aside(clock: Any, measures: Sequence[Measure]) -> Iterator[None]:
    """Inside an epoch, after a step: what is done meanwhile counts in nothing that is told."""
    with ExitStack() as stack:
        stack.enter_context(clock.paused())
        for measure in measures:
            stack.enter_context(measure.aside())
        yield


def of_rank(measures: Sequence[Measure], untimed: int) -> dict[str, Any]:
    return _merged(measure.of_rank(untimed) for measure in measures)


def of_run(
    measures: Sequence[Measure], ranks: Sequence[dict[str, Any]], row: dict[str, Any]
) -> dict[str, Any]:
    return _merged(measure.of_run(ranks, row) for measure in measures)


def facts(measures: Sequence[Measure]) -> dict[str, Any]:
    return _merged(measure.facts() for measure in measures)


def so_far(measures: Sequence[Measure]) -> dict[str, Any]:
    return {measure.name: measure.so_far() for measure in measures if measure.name}


def total(values: Sequence[Any]) -> Any:
    """Never a part of it: unknown where one is, or where there is none."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _merged(parts: Any) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}

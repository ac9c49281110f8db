"""The interface of what is measured beside the step time and enters the rows at an epoch's end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any


class EpochMeasure:
    """A measure on one rank, by epoch. In a step it must wait for no device and no other rank."""

    name = ""  # of its state in a checkpoint, if it has any
    clock: Any = None  # the StepClock; None if nobody records the training

    def begin(self, clock: Any) -> None:
        """A training is about to begin or to go on."""
        self.clock = clock

    def epoch_begins(self) -> None:
        """Called before the epoch's time begins."""

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """What is done meanwhile is excluded from this measure."""
        yield

    def rank_fields(self, untimed: int) -> dict[str, Any]:
        """This rank's row of the epoch that has ended; its first `untimed` updates are warm-up."""
        return {}

    def run_fields(self, ranks: Sequence[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
        """The run's row, from those of all ranks and from what it holds already; on rank 0."""
        return {}

    def facts(self) -> dict[str, Any]:
        """For the record of the environment; on rank 0."""
        return {}

    def state(self) -> Any:
        """What a checkpoint inside an epoch has to keep of that epoch."""
        return None


@contextmanager
def excluded(clock: Any, measures: Sequence[EpochMeasure]) -> Iterator[None]:
    """Inside an epoch, after a step: time spent here is excluded from all measures."""
    with ExitStack() as stack:
        stack.enter_context(clock.paused())
        for measure in measures:
            stack.enter_context(measure.excluded())
        yield


def rank_fields(measures: Sequence[EpochMeasure], untimed: int) -> dict[str, Any]:
    return _merge(measure.rank_fields(untimed) for measure in measures)


def run_fields(
    measures: Sequence[EpochMeasure], ranks: Sequence[dict[str, Any]], row: dict[str, Any]
) -> dict[str, Any]:
    return _merge(measure.run_fields(ranks, row) for measure in measures)


def facts(measures: Sequence[EpochMeasure]) -> dict[str, Any]:
    return _merge(measure.facts() for measure in measures)


def states(measures: Sequence[EpochMeasure]) -> dict[str, Any]:
    return {measure.name: measure.state() for measure in measures if measure.name}


def total(values: Sequence[Any]) -> Any:
    """The sum if all values are known, never a part of it; None if there are no values."""
    return None if not values or None in values else sum(values)


def _merge(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}

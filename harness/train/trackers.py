"""What is recorded of a run, also for the trackers that --report_to names.

They are the Trainer's own callbacks, and are told in the way in which the Trainer tells them what
it logs: one path for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import get_reporting_integration_callbacks

from harness.records import plain, read_json
from harness.train.run import Run

PREFIX = "harness"


class Trackers(TrainerCallback):
    """Hands on each epoch's row and, at the end, the summary; on rank 0."""

    def __init__(self, run: Run, trackers: list[TrainerCallback]) -> None:
        self.run, self.trackers = run, trackers
        self.sent: dict[str, Any] | None = None

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.run.last_row is not None and self.run.last_row is not self.sent:
            self.sent = self.run.last_row
            self._tell(numbers(self.sent, PREFIX), args, state, control, kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        summary = read_json(self.run.folder.summary) or {}
        self._tell(numbers(summary, f"{PREFIX}/summary"), args, state, control, kwargs)

    def _tell(
        self, logs: dict[str, float], args: Any, state: Any, control: Any, more: dict[str, Any]
    ) -> None:
        for tracker in self.trackers if logs else ():
            tracker.on_log(args, state, control, logs=logs, model=more.get("model"))


def follow(trainer: Any) -> None:
    """Only rank 0 has trackers, and those after whoever writes the record; nothing without any."""
    if not trainer.args.report_to:
        return
    kinds = tuple(get_reporting_integration_callbacks(trainer.args.report_to))
    handler, run = trainer.callback_handler, trainer.run
    trackers = [one for one in handler.callbacks if isinstance(one, kinds)]
    others = [one for one in handler.callbacks if one not in trackers]
    handler.callbacks = [*others, Trackers(run, trackers), *trackers] if run.leader else others


def numbers(content: Mapping[str, Any], name: str) -> dict[str, float]:
    """Every number that is known, by its path: harness/gpu/power_w/mean; of a list by its place."""
    return dict(_walk(plain(content), name))


def _walk(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, (dict, list)):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in inner:
            yield from _walk(part, f"{name}/{key}")
    elif isinstance(value, (int, float)):
        yield name, value

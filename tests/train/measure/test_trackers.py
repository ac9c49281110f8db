"""What --report_to trackers are told: all fields, by stable names, by rank 0 alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from harness.core.records import read_json, read_rows
from harness.train.loop.progress import Trackers, numbers
from harness.train.run import start
from tests.support.broken_runs import only_run
from tests.support.ranks import ranks, script
from tests.support.toys import Net, Points, ours

SMALL = ["--tiny", "--train_size", "64", "--test_size", "32", "--epochs", "2", "--b", "8"]


def test_numbers_by_their_path() -> None:
    row = {
        "mfu": 0.4, "none": None, "text": "cpu", "nan": float("nan"), "count": 3,
        "gpu": {"power_w": {"mean": 71.5, "max": None}}, "peaks": [1.5, 2.5],
    }  # fmt: skip
    assert numbers(row, "harness") == {
        "harness/mfu": 0.4, "harness/count": 3, "harness/gpu/power_w/mean": 71.5,
        "harness/peaks/0": 1.5, "harness/peaks/1": 2.5,
    }  # fmt: skip


@pytest.mark.process
def test_tensorboard_has_every_number_of_the_record(tmp_path: Path) -> None:
    # Epochs of which the kernel counts processor time, in hundredths of a second.
    longer = ["512" if word == "64" else word for word in SMALL]
    argv = [*longer, "--report_to", "tensorboard", "--o", str(tmp_path)]
    done = script("vit", *argv, count=2)
    assert done.code == 0, done.err
    folder = only_run(tmp_path)
    (events,) = folder.path.glob("runs/*/events*")  # rank 0's, closed once
    tracked = EventAccumulator(str(events))
    tracked.Reload()
    rows, _ = read_rows(folder.epochs)
    assert len(rows) == 2 and rows[-1]["node"]["cpu_percent"] is not None
    known = [(row["updates"], numbers(row, "harness")) for row in rows]  # no null among them
    for name in {name for _, values in known for name in values}:
        result = [(event.step, event.value) for event in tracked.Scalars(f"train/{name}")]
        expected = [(updates, values[name]) for updates, values in known if name in values]
        assert [step for step, _ in result] == [step for step, _ in expected], name
        for (_, value), (_, reference) in zip(result, expected, strict=True):
            assert value == pytest.approx(reference, rel=1e-6), name  # it keeps 32 bits
    summary = numbers(read_json(folder.summary) or {}, "harness/summary")
    assert {"harness/summary/accuracy", "harness/summary/wall_s"} <= set(summary)
    for name, value in summary.items():
        (event,) = tracked.Scalars(f"train/{name}")
        assert event.value == pytest.approx(value, rel=1e-6), name
    # What the Trainer logs by itself stands beside it.
    assert "eval/accuracy" in tracked.Tags()["scalars"]


class StandIn(TrainerCallback):
    """Another tracker, as transformers knows it: it is made by the Trainer, and told by on_log."""

    events: ClassVar[list[tuple[str, int, dict[str, Any]]]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
        self.events.append(("log", state.global_step, dict(logs)))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(("closed", state.global_step, {}))


def tracked(folder: str, *names: str) -> tuple[list[Any], list[bool]]:
    """What the trackers of this rank were told, and whether there is one who tells."""
    for name in names:
        integration_utils.INTEGRATION_TO_CALLBACK[name] = type(name, (StandIn,), {})
    start.get_available_reporting_integrations = lambda: names
    requested = ["--report_to", *names] if names else []
    trainer, run = ours(folder, Net(), Points(32), Points(8), "--epochs=2", *requested)
    handlers = trainer.callback_handler.callbacks
    run.train(trainer)
    return StandIn.events, [isinstance(one, Trackers) for one in handlers]


@pytest.mark.process
def test_other_trackers_are_told_the_same_on_rank_0_alone(tmp_path: Path) -> None:
    (events, tells), (others, other_tells) = ranks(2, tracked, str(tmp_path), "wandb")
    assert any(tells) and others == [] and not any(other_tells)
    folder = only_run(tmp_path)
    rows, _ = read_rows(folder.epochs)
    ours = [(step, logs) for kind, step, logs in events if "harness/epoch" in logs]
    assert ours == [(row["updates"], numbers(row, "harness")) for row in rows]
    # The summary comes before they close, after everything else.
    assert events[-1][0] == "closed" and [kind for kind, *_ in events].count("closed") == 1
    assert events[-2][2] == numbers(read_json(folder.summary) or {}, "harness/summary")


@pytest.mark.process
def test_several_trackers_are_told_the_same(tmp_path: Path) -> None:
    ((events, _),) = ranks(1, tracked, str(tmp_path), "mlflow", "trackio")
    # One after the other, each time.
    assert events[:-4:2] == events[1:-4:2] and len(events) > 8
    assert events[-4] == events[-3] and [kind for kind, *_ in events[-2:]] == ["closed"] * 2


@pytest.mark.process
def test_nobody_is_told_where_none_is_asked_for(tmp_path: Path) -> None:
    ((events, tells),) = ranks(1, tracked, str(tmp_path))
    assert events == [] and not any(tells) and not list(tmp_path.rglob("events*"))

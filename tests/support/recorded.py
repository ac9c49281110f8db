"""The stock Trainer with LogCallback, and what it has recorded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import Trainer

from harness.core.records import RunFolder, read_json, read_rows
from harness.train.measure.rows import EpochMeasure
from logcallback import LogCallback
from tests.support.ranks import ranks
from tests.support.toys import CPU, Net, Points, stock


def trainer_for(
    folder: str | Path,
    model: Any = None,
    train: Any = None,
    test: Any = None,
    callbacks: Iterable[Any] = (),
    **more: Any,
) -> Trainer:
    """Two epochs of four steps; checkpoints lie beside the record."""
    chosen = {"output_dir": f"{folder}-checkpoints", "num_train_epochs": 2, "logging_steps": 1}
    data = Points(16) if train is None else train
    watchers = [*callbacks, LogCallback(folder)]
    return stock(model or Net(), data, test, callbacks=watchers, **{**chosen, **more})


def alone(tmp_path: Path, function: Any, *args: Any) -> tuple[str, Any]:
    """The function in a process of its own, with a folder to record into; folder and result."""
    folder = str(tmp_path / "record")
    (result,) = ranks(1, function, folder, *args, env=CPU)
    return folder, result


def train(folder: str, **more: Any) -> None:
    trainer_for(folder, **more).train()


def two_ranks(folder: str) -> None:
    train(folder, train=Points(22), test=Points(13, draw=1), eval_strategy="epoch")


def rows_of(folder: str | Path) -> list[dict[str, Any]]:
    rows, broken = read_rows(RunFolder(Path(folder)).epochs)
    assert broken == 0
    return rows


def summary_of(folder: str | Path) -> dict[str, Any]:
    return read_json(RunFolder(Path(folder)).summary) or {}


def environment_of(folder: str | Path) -> dict[str, Any]:
    return read_json(RunFolder(Path(folder)).environment) or {}


def settings_of(folder: str | Path) -> dict[str, Any]:
    return read_json(RunFolder(Path(folder)).settings) or {}


class NoTelemetry(EpochMeasure):
    def open(self, folder: RunFolder) -> None: ...

    def close(self) -> None: ...


def without_telemetry(*args: Any) -> NoTelemetry:
    """In place of the callback's Telemetry: no process is started."""
    return NoTelemetry()

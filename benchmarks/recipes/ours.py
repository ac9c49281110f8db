"""The arm of this project: bert.py or vit.py with a command line, and the clock."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

from benchmarks.recipes.clock import EpochClock
from benchmarks.recipes.task import Task, main, quality_row, world
from harness.core.command_line import command_line
from harness.core.records import read_rows


def flags(task: Task) -> list[str]:
    """The flags of a task, with defaults where it says nothing. --comm_probe is off: no other arm
    measures the cost of exchanging, by a few passes in the first epoch, which is not timed.
    """
    return [
        "--model", task.model, "--dataset", task.data, "--output_dir", task.out,
        "--train_size", "all", "--test_size", "all", "--per_gpu_batch", str(task.batch),
        "--epochs", str(task.epochs), "--lr", str(task.lr), "--seed", str(task.seed),
        "--precision", task.precision, "--dropout", "0", "--num_workers", str(task.workers),
        "--comm_probe", "off", "--rerun", *task.flags,
    ]  # fmt: skip


def run(task: Task) -> dict[str, Any]:
    script: Any = importlib.import_module(task.script)
    settings = command_line(task.script, flags(task))
    load, took = script.load_data, []

    def timed(run: Any) -> Any:
        began_s = time.perf_counter()
        data = load(run)
        took.append(time.perf_counter() - began_s)
        return data

    script.load_data = timed
    clock = EpochClock()
    clock.watch_trainers()
    code = script.main(settings)
    if code:
        raise RuntimeError(f"{task.script}.py ended with {code}")
    found = []
    if world()[0] == 0:
        (file,) = Path(task.out).glob("*/*/*/epochs.jsonl")
        found = [quality_row(row) for row in read_rows(file)[0]]
    return {"prepare_s": sum(took), "quality": found, **clock.result()}


if __name__ == "__main__":
    main(run)

"""Records and sweeps that the tests of reading build, as runs and launchers write them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from harness.core.command_line import parse
from harness.core.records import FINISHED, SCHEMA, RunFolder
from harness.core.records.summary import of_rows
from harness.core.settings import as_mapping
from harness.read import load_sweep

# What torchrun tells each of two processes.
TWO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}


ENVIRONMENT = {
    "machine": "a-cpux2", "cpu": "A CPU", "cpu_cores": 2, "memory_gib": 8.0, "gpus": [],
    "versions": {"torch": "2.13.0", "transformers": "5.23.0"}, "commit": "0123456789abcdef",
    "dirty": False, "nodes": 1, "processes_per_node": 1, "effective_batch": 4, "observed": {},
}  # fmt: skip
SUMMARY = {
    "schema": 1, "outcome": "finished", "reason": None, "epochs_done": 2, "updates": 100,
    "samples": 400, "accuracy": 0.8, "f1": 0.7, "eval_loss": 0.5, "train_samples_per_s": 100.0,
    "train_samples_per_s_per_gpu": 100.0, "train_time_s": 30.0, "wall_s": 40.0,
    "peak_memory_gib": 1.5,
}  # fmt: skip
TARGET = {"metric": "accuracy", "value": 0.9}
STARTED = [{"event": "start", "attempt": 1}]  # when is unknown


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def record(
    path: Path,
    *flags: str,
    epochs: int = 2,
    outcome: str | None = "finished",
    reason: str | None = None,
    machine: str | None = "a-cpux2",
    schema: int = SCHEMA,
) -> RunFolder:
    """A record as a run writes it, with the fields that matter here; no outcome: unfinished."""
    folder = RunFolder(path)
    settings = as_mapping(parse("bert", ["--tiny", *flags], TWO))
    arguments = {"weight_decay": 0.0, "seed": 1234}
    path.mkdir(parents=True)
    folder.settings.write_text(
        json.dumps({"schema": schema, **settings, "training_arguments": arguments})
    )
    facts = {
        "machine": machine, "nodes": 1, "processes_per_node": 2, "effective_batch": 64,
        "updates": 60,
    }  # fmt: skip
    folder.environment.write_text(json.dumps(facts))
    lines(
        folder.epochs,
        [
            {"epoch": n + 1, "updates": 30 * (n + 1), "accuracy": 0.5 + n / 10, "precision": 0.25}
            for n in range(epochs)
        ],
    )
    if outcome is not None:
        summary = {
            "schema": SCHEMA, "outcome": outcome, "reason": reason, "epochs_done": epochs,
            "updates": 30 * epochs or None, "train_samples_per_s": 1234.5, "wall_s": 9.87,
        }  # fmt: skip
        if epochs:
            summary |= {"accuracy": 0.5 + (epochs - 1) / 10, "precision": 0.25, "f1": 0.7654}
        if outcome == FINISHED:
            lines(folder.attempts, STARTED)
        folder.summary.write_text(json.dumps(summary))
    return folder


def epochs(
    *accuracies: float, seconds: float = 2.0, loss: float | None = None
) -> list[dict[str, Any]]:
    return [
        {"epoch": n + 1.0, "accuracy": a, "eval_loss": 1 - a if loss is None else loss,
         "train_loss": 1.5 - a, "samples": 200, "epoch_time_s": seconds,
         "wall_s": 3 * seconds * (n + 1), "unix": 1000.0 + n}
        for n, a in enumerate(accuracies)
    ]  # fmt: skip


def bare_epochs(count: int) -> list[dict[str, Any]]:
    """Rows that say nothing but their epoch."""
    return [{"epoch": n + 1.0} for n in range(count)]


def with_epochs(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """The folder of a record, which has these epochs from now on."""
    lines(folder / "epochs.jsonl", rows)
    file = folder / "summary.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | totals(rows)))
    return folder


def totals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What a summary says of these rows."""
    known = {name: value for name, value in of_rows(rows).items() if value is not None}
    return {name: value for name, value in known.items() if value or name != "eval_time_s"}


def with_ranks(folder: Path, *rows: dict[str, Any]) -> None:
    for rank, row in enumerate(rows):
        lines(folder / "ranks" / f"rank_{rank}.jsonl", [{"epoch": 1.0, "rank": rank, **row}])


class Plan:
    """A sweep that a test builds: folders as runs write them, sweep.json as the launcher does."""

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir
        self.folder = output_dir / "sweeps" / "sizes"
        self.content: dict[str, Any] = {
            "schema": 1, "name": "sizes", "question": "Which batch?", "file": "sizes.yaml",
            "tiny": True, "command": "python -m harness sweep sizes.yaml --tiny",
            "axes": ["setup", "per_gpu_batch"], "baseline": {"setup": "1_1"}, "target": None,
            "hold": "per_gpu_batch", "lr_rule": "none", "columns": None, "per_node": False,
            "runs": [],
        }  # fmt: skip

    def planned(
        self, setup: str = "1_1", batch: Any = 4, seed: int = 1, skipped: str | None = None,
        **more: Any,
    ) -> Path:  # fmt: skip
        """A run that the plan names; its folder, which does not exist."""
        label = {"setup": setup, "per_gpu_batch": batch, "seed": seed, **more}
        path = "bert/" + "_".join(str(part).replace("/", "-") for part in label.values())
        self.content["runs"].append({"label": label, "path": path, "skipped": skipped})
        return self.output_dir / path

    def run(
        self, setup: str = "1_1", batch: Any = 4, seed: int = 1, devices: int = 1,
        machine: str = "a-cpux2", environment: dict[str, Any] | None = None,
        epochs: list[dict[str, Any]] | None = None, label: dict[str, Any] | None = None,
        **summary: Any,
    ) -> Path:  # fmt: skip
        """A run with an outcome."""
        folder = self.planned(setup, batch, seed, **(label or {}))
        facts = {
            **ENVIRONMENT, "machine": machine, "processes_per_node": devices,
            "effective_batch": batch * devices if isinstance(batch, int) else 4,
            **(environment or {}),
        }  # fmt: skip
        folder.mkdir(parents=True)
        (folder / "settings.json").write_text(json.dumps({"schema": 1}))
        (folder / "environment.json").write_text(json.dumps(facts))
        if epochs is None:
            epochs = bare_epochs(summary.get("epochs_done", SUMMARY["epochs_done"]))
            summary = {**SUMMARY, **summary}
        else:
            summary = {**SUMMARY, **summary, **totals(epochs)}
        (folder / "summary.json").write_text(json.dumps(summary))
        lines(folder / "epochs.jsonl", epochs)
        return folder

    def write(self, **changes: Any) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "sweep.json").write_text(json.dumps({**self.content, **changes}))
        return self.folder

    def groups(self, **changes: Any) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = load_sweep(self.write(**changes)).to_dict("records")
        # A frame writes unknown as NaN.
        return [
            {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}
            for row in rows
        ]


def with_rates(plan: Plan, setup: str, *rates: float, **more: Any) -> None:
    for seed, rate in enumerate(rates):
        plan.run(setup, seed=seed, train_samples_per_s=rate, **more)


def row_of(said: str, *words: str) -> list[str]:
    """The words of the one line of the table that begins with these."""
    (line,) = (line for line in said.splitlines() if tuple(line.split()[: len(words)]) == words)
    return line.replace(" ± ", "±").split()


def timed_epochs(*quality: float | None, metric: str = "accuracy") -> list[dict[str, Any]]:
    """Epochs of 10 s and 200 samples; 13 s with their evaluation."""
    return [
        {"epoch": n, metric: value, "epoch_time_s": 10.0, "samples": 200, "wall_s": 13.0 * n}
        for n, value in enumerate(quality, start=1)
    ]

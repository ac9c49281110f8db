"""Records that the tests of comparing, explaining, predicting and importing build."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.core.collectives import GLOO, Shape, allreduce, wire_of
from harness.core.command_line import parse
from harness.core.links import Link
from harness.core.records import SCHEMA
from harness.core.settings import as_mapping
from tests.support.records import STARTED, bare_epochs, lines

DATA = {
    "dataset": "embedded:english", "data_checksum": "aaaa", "test_samples": 500,
    "test_from": "split test", "train_samples": 1000,
}  # fmt: skip
GRADIENT = 4_000_000  # bytes


def written(
    path: Path, script: str, words: list[str], world: tuple[int, int],
    environment: Mapping[str, Any], summary: Mapping[str, Any], schema: int = SCHEMA,
) -> Path:  # fmt: skip
    """A record without epochs, of so many nodes and processes of each."""
    nodes, per_node = world
    launched = {"RANK": "0", "WORLD_SIZE": str(nodes * per_node), "LOCAL_WORLD_SIZE": str(per_node)}
    settings = as_mapping(parse(script, ["--tiny", *words], launched))
    facts = {"nodes": nodes, "processes_per_node": per_node, **environment}
    path.mkdir(parents=True)
    (path / "settings.json").write_text(json.dumps({"schema": schema, **settings}))
    (path / "environment.json").write_text(json.dumps(facts))
    content = {"schema": SCHEMA, "outcome": "finished", "reason": None, "epochs_done": 2, **summary}
    (path / "summary.json").write_text(json.dumps(content))
    lines(path / "attempts.jsonl", STARTED)
    lines(path / "epochs.jsonl", bare_epochs(content["epochs_done"]))
    return path


def pair(
    folder: Path, seed: int, *flags: str, accuracy: float | None = 0.8, rate: float = 100.0,
    environment: Mapping[str, Any] | None = None, data: Mapping[str, Any] | None = None,
    schema: int = SCHEMA, **summary: Any,
) -> Path:  # fmt: skip
    """A run of two processes, with what a comparison reads."""
    path = folder / "bert" / "1_2" / f"run_{seed}_{len(list(folder.glob('*/*/*')))}"
    facts = {
        "machine": "a-cpux2", "gpus": [], "threads": 1, "effective_batch": 64,
        "command": f"bert.py --tiny --seed {seed} --lr 1e-3",
        "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
        "data": {**DATA, **(data or {})}, **(environment or {}),
    }  # fmt: skip
    measured = {
        "updates": 60, "samples": 2000, "accuracy": accuracy, "train_samples_per_s": rate,
        "train_time_s": 20.0,
    }  # fmt: skip
    words = ["--seed", str(seed), *flags]
    return written(path, "bert", words, (1, 2), facts, {**measured, **summary}, schema)


def pairs(folder: Path, accuracies: list[float], *flags: str, first: int = 1, **more: Any) -> Path:
    """Runs with the seeds from the first on; their folder."""
    for n, accuracy in enumerate(accuracies):
        pair(folder, first + n, *flags, accuracy=accuracy, **more)
    return folder


def planted_s(batch: int, per_node: int = 1) -> float:
    """10 ms and 1 ms a sample; two processes slow each other by a tenth."""
    return (0.010 + 0.001 * batch) * (1 + 0.1 * (per_node - 1))


def timed(
    root: Path, batch: int, nodes: int = 1, per_node: int = 1, *flags: str,
    step_s: float | None = None, machine: str = "a-cpux2", link: dict[str, Any] | None = None,
    seed: int = 1, backend: str | None = GLOO, **summary: Any,
) -> Path:  # fmt: skip
    """A run whose step takes what is planted."""
    path = root / "vit" / f"{nodes}_{per_node}" / f"b{batch}_s{seed}_{machine}_{len(flags)}"
    samples = batch * nodes * per_node
    facts = {
        "machine": machine, "effective_batch": samples, "link": link,
        "gpus": ["NVIDIA H200"] * per_node if machine.startswith("h200") else [],
        "command": f"vit.py --tiny --per_gpu_batch {batch}",
        "observed": {"backend": backend, "device": "cpu" if backend else None,
                     "trained_bytes": GRADIENT},
        "data": {"train_samples": 1408, "left_out_samples": 29},
    }  # fmt: skip
    rate = samples / (step_s or planted_s(batch, per_node))
    times = {"train_samples_per_s": rate, "train_time_s": 4.0, "eval_time_s": 0.8}
    words = ["--per_gpu_batch", str(batch), "--seed", str(seed), *flags]
    return written(path, "vit", words, (nodes, per_node), facts, {**times, **summary})


def changed(folder: Path, **facts: Any) -> Path:
    """The folder of a record, with other facts of its environment."""
    file = folder / "environment.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))
    return folder


def measured(delay_ms: float, rate_mbit: float, factor: float, nodes: int = 2) -> dict[str, Any]:
    """A link as a run records it, whose all-reduce takes so much of the closed form."""
    asked = {"delay_ms": delay_ms, "rate_mbit": rate_mbit, "jitter_ms": 0.0, "loss": 0.0}
    cost = allreduce(GLOO, GRADIENT, Shape(nodes), wire_of(Link(delay_ms, rate_mbit)))
    return {"asked": asked, "gradient_bytes": GRADIENT, "allreduce_bytes": GRADIENT,
            "allreduce_s": factor * cost.alone_s}  # fmt: skip


# What others have left: a text file, as a callback wrote it.
NAME = "2_1_2e-05_16_P100far.txt"
TEXT = """f1=[0.85,0.91]
accuracy=[0.86,0.92]
precision=[0.87,0.93]
recall=[0.86,0.92]
times=[120.5,118.25]
loss=[0.31,0.27]
samples/s=[196.2,200.0]
"""


def text_file(tmp_path: Path, text: str = TEXT, name: str = NAME, folder: str = "bert") -> Path:
    file = tmp_path / "theirs" / folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def imported(out: Path, *words: Any) -> Path:
    """The folder into which these files and flags were imported."""
    assert main(["import", *map(str, words), "--output_dir", str(out)]) == 0
    return out


class Verb:
    """A verb as a person types it; the file of a test makes a fixture of it."""

    def __init__(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.name, self.capsys = name, capsys

    def __call__(self, *words: Any, code: int = 0, warned: str = "") -> str:
        """What it prints; warned: what it says on stderr, where it leaves a record out."""
        self.capsys.readouterr()
        assert main([self.name, *map(str, words)]) == code
        out = self.capsys.readouterr()
        assert warned in out.err if warned else out.err == ""
        return out.out

    def refused(self, *words: Any) -> str:
        """The one line with which it refuses."""
        self.capsys.readouterr()
        assert main([self.name, *map(str, words)]) == 2
        out = self.capsys.readouterr()
        assert out.out == "" and len(out.err.splitlines()) == 1
        assert out.err.startswith(f"harness {self.name}: error: ")
        return out.err

    def in_one_line(self, *words: Any, code: int = 0) -> str:
        """What it prints, with single spaces for all white space."""
        return " ".join(self(*words, code=code).split())

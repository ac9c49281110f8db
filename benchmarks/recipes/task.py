"""The training that every arm of benchmarks/speed.py does alike, and the form of its result.

    python -m benchmarks.recipes.examples TASK.json      or seed, loop, ours; torchrun for several

prints the result as JSON. benchmarks/speed.py writes these files and starts the same functions.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from sklearn.metrics import accuracy_score, precision_recall_fscore_support
from transformers import set_seed

from harness.core.command_line import parse
from harness.core.settings import Settings
from harness.train.data import models

TEXT, IMAGE = "text", "image"
SCRIPTS = {TEXT: "bert", IMAGE: "vit"}
SPLITS = ("train", "test")


@dataclass(frozen=True)
class Task:
    """What is trained on which data. Rates, orders and metrics are the same for all arms."""

    kind: str  # text or image
    model: str  # folder: weights, configuration, tokenizer or image processor
    data: str  # folder: train.csv and test.csv, or parquet files, or pictures in folders by class
    out: str  # folder for checkpoints and records
    batch: int  # samples of a process and forward pass
    epochs: int  # the first one is not timed
    lr: float
    seed: int = 42
    precision: str = "fp32"  # or bf16
    workers: int = 0  # processes that load data
    batches: str = "own"  # loop only: own or ideal
    flags: tuple[str, ...] = ()  # ours only: more of them

    @property
    def script(self) -> str:
        return SCRIPTS[self.kind]

    def settings(self) -> Settings:
        return parse(self.script, ["--model", self.model, "--dropout", "0"], environ={})

    def build(self, labels: list[str]) -> Any:
        """The model that all arms begin with; the seed fixes weights that its folder lacks."""
        set_seed(self.seed)
        return models.build(self.settings(), labels)

    def load(self) -> datasets.DatasetDict:
        """The samples as they are on disk."""
        folder = Path(self.data)
        for ending, builder in ((".csv", "csv"), (".parquet", "parquet")):
            if (folder / f"train{ending}").is_file():
                files = {split: str(folder / f"{split}{ending}") for split in SPLITS}
                return datasets.load_dataset(builder, data_files=files)
        return datasets.load_dataset("imagefolder", data_dir=str(folder))

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=2) + "\n")


def read(file: Path) -> Task:
    content = json.loads(file.read_text())
    content["flags"] = tuple(content.get("flags", ()))
    return Task(**content)


def labels_of(data: datasets.DatasetDict) -> list[str]:
    """The names of the classes; in a csv file, their numbers as text."""
    feature = data["train"].features["label"]
    if isinstance(feature, datasets.ClassLabel):
        return list(feature.names)
    return [str(number) for number in sorted({n for split in SPLITS for n in data[split]["label"]})]


def quality(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The metrics of the arms other than ours, computed in the plain way."""
    predicted = logits.argmax(-1)
    precision, recall, f1, _ = precision_recall_fscore_support(
        labels, predicted, average="weighted", zero_division=0
    )
    found = {"accuracy": accuracy_score(labels, predicted), "precision": precision,
             "recall": recall, "f1": f1, "samples": len(labels)}  # fmt: skip
    return {name: float(value) for name, value in found.items()}


QUALITY = ("eval_loss", "accuracy", "precision", "recall", "f1", "eval_samples")


def quality_row(found: dict[str, Any]) -> dict[str, float]:
    """One set of names for the Trainer's metrics, a record's row, and the loop's results."""
    plain = {name.removeprefix("eval_"): value for name, value in found.items()}
    return {name: float(plain[name.removeprefix("eval_")]) for name in QUALITY}


def world() -> tuple[int, int]:
    """(rank, processes)"""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def cuda() -> bool:
    return bool(torch.cuda.is_available())


def start(recipe: str, task: dict[str, Any]) -> dict[str, Any]:
    """Run an arm's recipe; benchmarks/speed.py calls this in each process of the arm."""
    found: dict[str, Any] = importlib.import_module(recipe).run(Task(**task))
    return found


def main(run: Callable[[Task], dict[str, Any]]) -> None:
    """The command line of an arm."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        names = ", ".join(field.name for field in fields(Task))
        sys.exit(f"usage: {Path(sys.argv[0]).name} TASK.json, a file with {names}")
    found = run(read(Path(sys.argv[1])))
    if world()[0] == 0:
        print(json.dumps(found, indent=2))

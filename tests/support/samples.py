"""Small data sets whose samples say which ones they are, and texts as they are prepared."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict
from PIL import Image

from harness.core.settings import Settings
from harness.train.data.sources import Source, checksum
from harness.train.data.texts import TextBatches

PAD = 1
WORDS = ("good", "bad")


def settings(dataset: Path | str, **more: Any) -> Settings:
    sizes = {"train_size": "all", "test_size": "all"}
    return Settings(**{"script": "bert", "dataset": str(dataset), **sizes, **more})


def rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Sample i is 'text i', of class i % 2."""
    return [{"text": f"text {i}", "label": WORDS[i % 2]} for i in range(first, first + count)]


def texts(data: Dataset) -> list[str]:
    return list(data["text"])


def check_pairs(source: Source) -> None:
    """Each text keeps the class that it was written with."""
    for data, labels in (
        (source.train, source.classes[0]),
        (source.test, source.classes[1]),
    ):
        assert labels.dtype == np.int64 and len(labels) == len(data)
        for text, label in zip(texts(data), labels, strict=True):
            assert source.labels[label] == WORDS[int(text.split()[1]) % 2]


def content(data: DatasetDict) -> str:
    """The checksum of all samples and their classes, in order."""
    column = "image" if "image" in data["train"].features else "text"
    return checksum([(split, np.array(split["label"])) for split in data.values()], [column])[0]


def text_batches(folder: Path, lengths: Any, pair: bool = True, side: str = "right") -> TextBatches:
    """Random texts of these lengths, as load_texts leaves them on disk."""
    random, total = np.random.default_rng(3), int(np.sum(lengths))
    tokens = random.integers(5, 60, total).astype(np.int32)
    np.save(folder / "tokens.npy", tokens)
    np.save(folder / "counts.npy", np.bincount(tokens))
    np.save(folder / "types.npy", random.integers(0, 2, total).astype(np.int8))
    np.save(folder / "offsets.npy", np.concatenate([[0], np.cumsum(lengths)]))
    labels = random.integers(0, 3, len(lengths))
    return TextBatches(folder, labels, SimpleNamespace(pad_token_id=PAD, padding_side=side), pair)


def stored(image: Image.Image, kind: str) -> dict[str, Any]:
    """An image as a data set holds it."""
    file = io.BytesIO()
    image.save(file, kind)
    return {"bytes": file.getvalue(), "path": f"ramp.{kind.lower()}"}


def columns(table: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in table] for name in table[0]}


def write_csv(file: Path, table: list[dict[str, Any]], delimiter: str = ",") -> None:
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, table[0], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(table)

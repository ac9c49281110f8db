"""The recipe that this project began with: no preparation, and a checkpoint every epoch.

Texts are tokenised and padded to 500 tokens at every access; pictures are decoded and go through
the model's image processor at every access. A whole checkpoint is saved after every epoch.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import AutoImageProcessor, AutoTokenizer

from benchmarks.recipes import stock
from benchmarks.recipes.task import TEXT, Task, labels_of, main

LENGTH = 500


class Texts(Dataset):
    def __init__(self, data: Any, tokenizer: Any) -> None:
        self.data, self.tokenizer = data, tokenizer

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.data[index]
        encoded = self.tokenizer(
            row["text"], padding="max_length", max_length=LENGTH, truncation=True
        )
        return {**encoded, "labels": row["label"]}


def run(task: Task) -> dict[str, Any]:
    began_s = time.perf_counter()
    data = task.load()
    parts: dict[str, Any]
    if task.kind == TEXT:
        tokenizer = AutoTokenizer.from_pretrained(task.model)
        sets = {name: Texts(part, tokenizer) for name, part in data.items()}
        parts = {"processing_class": tokenizer}
    else:
        processor = AutoImageProcessor.from_pretrained(task.model)

        def transform(rows: dict[str, Any]) -> dict[str, Any]:
            pictures = [picture.convert("RGB") for picture in rows["image"]]
            return {**processor(pictures, return_tensors="pt"), "labels": rows["label"]}

        sets = {name: part.with_transform(transform) for name, part in data.items()}
        parts = {"processing_class": processor, "data_collator": _stack}
    prepare_s = time.perf_counter() - began_s
    args = stock.arguments(
        task, save_strategy="epoch", remove_unused_columns=False,
        per_device_eval_batch_size=task.batch,
    )  # fmt: skip
    parts |= {"train_dataset": sets["train"], "eval_dataset": sets["test"]}
    return stock.train(task, args, prepare_s, task.build(labels_of(data)), **parts)


def _stack(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    pixels = torch.stack([torch.as_tensor(row["pixel_values"]) for row in rows])
    return {"pixel_values": pixels, "labels": torch.tensor([row["labels"] for row in rows])}


if __name__ == "__main__":
    main(run)

"""The recipe of transformers' example scripts for text and image classification, at their defaults.

Texts are tokenised once by datasets.map and padded to 128 tokens. Pictures are decoded, resized and
normalised with PIL and torch when they are fetched, by the training process itself; the random crop
and flip of the examples are left out, so that all arms train on the same pictures. Everything else
is the Trainer's default: evaluation batch 8, a checkpoint every 500 steps and at the end.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, default_data_collator

from benchmarks.recipes import stock
from benchmarks.recipes.task import TEXT, Task, labels_of, main

LENGTH = 128


def run(task: Task) -> dict[str, Any]:
    args = stock.arguments(task, remove_unused_columns=task.kind == TEXT)
    began_s = time.perf_counter()
    data = task.load()
    labels = labels_of(data)
    parts: dict[str, Any]
    if task.kind == TEXT:
        tokenizer = AutoTokenizer.from_pretrained(task.model)

        def tokenise(rows: dict[str, Any]) -> Any:
            return tokenizer(rows["text"], padding="max_length", max_length=LENGTH, truncation=True)

        with args.main_process_first():
            data = data.map(tokenise, batched=True)
        parts = {"processing_class": tokenizer, "data_collator": default_data_collator}
    else:
        processor = AutoImageProcessor.from_pretrained(task.model)
        data.set_transform(_transform(processor))
        parts = {"processing_class": processor, "data_collator": _stack}
    prepare_s = time.perf_counter() - began_s
    parts |= {"train_dataset": data["train"], "eval_dataset": data["test"]}
    return stock.train(task, args, prepare_s, task.build(labels), **parts)


def _transform(processor: Any) -> Any:
    size = (processor.size["width"], processor.size["height"])
    mean = torch.tensor(processor.image_mean)[:, None, None]
    deviation = torch.tensor(processor.image_std)[:, None, None]

    def one(picture: Image.Image) -> torch.Tensor:
        resized = picture.convert("RGB").resize(size, Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(resized)).permute(2, 0, 1).contiguous()
        return pixels.float().div_(255).sub_(mean).div_(deviation)

    def transform(rows: dict[str, Any]) -> dict[str, Any]:
        return {"pixel_values": [one(p) for p in rows["image"]], "labels": rows["label"]}

    return transform


def _stack(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    pixels = torch.stack([row["pixel_values"] for row in rows])
    return {"pixel_values": pixels, "labels": torch.tensor([row["labels"] for row in rows])}


if __name__ == "__main__":
    main(run)

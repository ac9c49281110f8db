"""The samples and the first weights of a case, written once for all arms of benchmarks/speed.py."""

from __future__ import annotations

import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image
from transformers import AutoTokenizer, set_seed
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from benchmarks.recipes.task import SCRIPTS, SPLITS, TEXT, labels_of
from benchmarks.speed_cases import Case
from harness.core.command_line import parse
from harness.train.data import embedded, models
from harness.train.measure.flops import work_of

LONGEST = 128  # tokens: recipe (b) cuts longer texts, so they are cut for all
VOCABULARY = 30522  # at most
NUMBER = datasets.Value("int64")  # the type of a class in a csv file
GRAIN = 4.0  # of 255; makes files of 512 px 58 kB; those of Food-101 have about 50
REAL = {"text": ("AG News", "ag_news"), "image": ("CIFAR-10", "cifar10")}


def prepare(case: Case, folder: Path, real: Path | None) -> dict[str, Any]:
    """Write folder/data and folder/model; return a description of both."""
    (folder / "data").mkdir(parents=True)
    data, named = _samples(case, real)
    facts = (_texts if case.kind == TEXT else _pictures)(case, folder, data)
    flags = ["--model", case.model, "--dropout", "0"]
    if case.image_size:
        flags += ["--image_size", str(case.image_size)]
    settings = parse(SCRIPTS[case.kind], flags, environ={})
    config = models.configuration(settings, facts.pop("labels"))
    for name, value in case.changed.items():
        setattr(config, name, value)
    if case.kind == TEXT:
        config.vocab_size = max(config.vocab_size, facts["vocabulary"])
    set_seed(0)
    model = models.class_of(SCRIPTS[case.kind], config).from_config(config)
    model.save_pretrained(folder / "model")
    side = int(case.image_size or getattr(config, "image_size", 0) or 0)
    fed = {"pixel_values": torch.zeros(1, 3, side, side)}
    if case.kind == TEXT:
        fed = {"input_ids": torch.ones(1, LONGEST).long()}
    one = {**fed, "labels": torch.zeros(1).long()}
    work = work_of(model, lambda: one, (side, side) if side else None)
    flop = work.of(facts.get("mean_tokens", 0.0), facts.get("mean_square"))
    return {
        **facts, "data": named, "parameters": sum(p.numel() for p in model.parameters()),
        "gflop_per_sample": flop / 1e9,
    }  # fmt: skip


def _samples(case: Case, real: Path | None) -> tuple[datasets.DatasetDict, str]:
    """The first samples of each split, and their name; real data if the folder has this kind."""
    name, inside = REAL[case.kind]
    folder = real / inside if real is not None else None
    if folder is not None and folder.is_dir():
        data = datasets.load_dataset(str(folder))
    elif case.kind == TEXT:
        name, data = "embedded:english", embedded.english()
    else:
        name, data = "embedded:digits", embedded.digits()
    sizes = {"train": case.train, "test": case.test}
    chosen = {}
    for split in SPLITS:
        have = len(data[split])
        # Embedded data are few: some samples are repeated, which costs as much as others would.
        rows = np.arange(sizes[split]) % have
        chosen[split] = data[split].select(rows)
        if sizes[split] > have:
            name += f" ({split}: {have} repeated)"
    return datasets.DatasetDict(chosen), name


def _texts(case: Case, folder: Path, data: datasets.DatasetDict) -> dict[str, Any]:
    texts = list(data["train"]["text"])
    tokenizer = embedded.train_tokenizer(texts, folder / "tokenizer", VOCABULARY)
    tokenizer.save_pretrained(folder / "model")
    lengths = np.empty(0)
    for split in SPLITS:
        short = [_cut(text, tokenizer) for text in data[split]["text"]]
        labels = list(data[split]["label"])
        rows = datasets.Dataset.from_dict({"text": short, "label": labels})
        rows.to_csv(folder / "data" / f"{split}.csv")
        if split == "train":
            ids = AutoTokenizer.from_pretrained(folder / "model")(short)["input_ids"]
            lengths = np.array([len(text) for text in ids])
    return {
        "labels": labels_of(datasets.DatasetDict(data).cast_column("label", NUMBER)),
        "vocabulary": len(tokenizer), "mean_tokens": float(lengths.mean()),
        "mean_square": float((lengths.astype(float) ** 2).mean()),
        "longest": int(lengths.max()),
    }  # fmt: skip


def _cut(text: str, tokenizer: Any) -> str:
    """Cut a text to whole words, no more of them than all arms read."""
    encoded = tokenizer(text, return_offsets_mapping=True)
    if len(encoded["input_ids"]) <= LONGEST:
        return text
    words = encoded.word_ids()
    # The separator takes one place; a word that would be cut there is left out as a whole.
    first_out = words.index(words[LONGEST - 1])
    return text[: encoded["offset_mapping"][first_out][0]].rstrip()


def _pictures(case: Case, folder: Path, data: datasets.DatasetDict) -> dict[str, Any]:
    written = 0
    for split in SPLITS:
        if (px := case.jpeg_px) is None:
            data[split].to_parquet(folder / "data" / f"{split}.parquet")
            continue
        images = folder / "data" / split

        def write(number: int, images: Path = images, rows: Any = data[split], px: int = px) -> int:
            row = rows[number]
            target = images / f"class{row['label']}" / f"{number:06d}.jpg"
            target.write_bytes(_jpeg(row["image"], px, number))
            return target.stat().st_size

        for label in set(data[split]["label"]):
            (images / f"class{label}").mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            written += sum(pool.map(write, range(len(data[split]))))
    side = {"height": case.image_size, "width": case.image_size}
    processor = ViTImageProcessorPil(size=side, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    processor.save_pretrained(folder / "model")
    if case.jpeg_px is None:
        labels = data["train"].features["label"].names
    else:
        labels = sorted({f"class{label}" for split in SPLITS for label in data[split]["label"]})
    return {"labels": labels, "kb_per_file": written / 1e3 / (case.train + case.test)}


def _jpeg(picture: Image.Image, side: int, number: int) -> bytes:
    """A JPEG of the enlarged picture, with grain: without it, a third of a photograph's bytes."""
    large = picture.convert("RGB").resize((side, side), Image.Resampling.BICUBIC)
    grain = np.random.default_rng(number).normal(0, GRAIN, (side, side, 1))
    pixels = np.clip(np.asarray(large) + grain, 0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=90)
    return out.getvalue()


def environment_of() -> dict[str, Any]:
    """The machine and versions, for a process that must not load torch itself."""
    from harness.train.measure.environment import environment

    return {**environment(), "threads": torch.get_num_threads()}

"""Operations and tokens of real runs, against counts by hand from the data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import DataLoader

from harness.core.command_line import parse
from harness.core.records import RunFolder, read_json, read_rows
from harness.core.tasks import TASKS
from harness.read import load_runs
from harness.train.data.samples import SHAPE, BatchShape, Indices
from harness.train.data.texts import load_texts
from harness.train.loop.progress import utilisation
from harness.train.measure import flops
from harness.train.measure.flops import (
    COUNTED,
    SUMS,
    Work,
    batch_shape,
    peak_of,
    rates,
    sums_of,
)
from tests.support.broken_runs import broken_off, only_run
from tests.support.ranks import ranks, script
from tests.support.toys import CLASSES, FEATURES, ours

SMALL = ["--tiny", "--test_size", "32", "--save", "none", "--telemetry_hz", "0"]
PEAK = 0.25


def record(root: Path) -> tuple[list[dict[str, Any]], dict[str, Any], RunFolder]:
    folder = only_run(root)
    rows, _ = read_rows(folder.epochs)
    environment = read_json(folder.environment)
    assert environment is not None
    return rows, environment, folder


# ---- texts ----


def lengths_of(argv: list[str]) -> np.ndarray:
    """Of every text, in tokens, as the scripts prepare them."""
    collate = load_texts(parse("bert", argv, {}), 1).collate
    return np.diff(collate.offsets)  # type: ignore[attr-defined]


def by_hand(lengths: np.ndarray, order: np.ndarray, batch: int) -> tuple[float, float, int, int]:
    """(operations with padding and without it, tokens padded and real) of batches one by one.

    From the sizes of bert-nano, as the design has it: 6 N T + 12 L d T^2, and the head.
    """
    sizes, classes = TASKS["bert"].architectures["bert-nano"], 4
    wide, layers = sizes["hidden_size"], sizes["num_hidden_layers"]
    matrices = layers * (4 * wide**2 + 2 * wide * sizes["intermediate_size"])

    def of(length: int) -> float:
        head = 6 * (wide**2 + wide * classes)
        return 6 * matrices * length + 12 * layers * wide * length**2 + head

    padded = without = 0.0
    tokens = real = 0
    for first in range(0, len(order), batch):
        texts = lengths[order[first : first + batch]]
        padded += len(texts) * of(max(texts))
        without += sum(map(of, texts))
        tokens += len(texts) * max(texts)
        real += sum(texts)
    return padded, without, tokens, real


@pytest.mark.process
@pytest.mark.parametrize(
    ("count", "accumulation", "padding"), [(1, 3, "batch"), (2, 2, "batch"), (1, 2, "auto")]
)
def test_operations_and_tokens_of_texts_by_hand(
    tmp_path: Path, count: int, accumulation: int, padding: str
) -> None:
    # 144 samples in updates of 24 or 32; the first of them are not timed.
    argv = [*SMALL, "--train_size", "144", "--b", "8", "--grad_acc", str(accumulation)]
    argv += ["--epochs", "2", "--peak_tflops", str(PEAK), "--padding", padding]
    done = script("bert", *argv, "--o", str(tmp_path), count=count)
    assert done.code == 0, done.err
    rows, environment, folder = record(tmp_path)
    lengths, used = lengths_of(argv), environment["data"]["train_samples"]
    whole = 8 * accumulation * count
    left_out = environment["timing_warmup_steps"]
    for epoch, (row, untimed) in enumerate(zip(rows, (left_out, 0), strict=True)):
        order = np.random.default_rng([42, epoch]).permutation(used)[untimed * whole :]
        padded, without, tokens, real = by_hand(lengths, order, 8)
        if padding == "auto":  # on a CPU this model reads texts in a row
            padded, tokens = without, real
        seconds = row["timed_s"]
        assert row["timed_samples"] == len(order)
        assert row["tflops_per_s"] * seconds * 1e12 == pytest.approx(padded, rel=1e-9)
        result = row["tflops_per_s_without_padding"] * seconds * 1e12
        assert result == pytest.approx(without, rel=1e-9)
        assert row["tokens_per_s"] * seconds == pytest.approx(real, rel=1e-9)
        assert row["padding_share"] == pytest.approx(1 - real / tokens, rel=1e-9)
        assert row["mfu"] == pytest.approx(padded / seconds / (count * PEAK * 1e12), rel=1e-9)
        by_rank = [read_rows(folder.rank(rank))[0][epoch] for rank in range(count)]
        assert sum(of_rank["timed_tokens"] for of_rank in by_rank) == real
        assert sum(of_rank["timed_padded_tokens"] for of_rank in by_rank) == tokens
    summary = read_json(folder.summary) or {}
    seconds = sum(row["timed_s"] for row in rows)
    for name in ("mfu", "tflops_per_s"):
        mean = sum(row[name] * row["timed_s"] for row in rows) / seconds
        assert summary[name] == pytest.approx(mean)
    assert summary["gpu_utilisation_percent"] is None
    assert environment["flops"]["peak_from"] == "flag"
    assert f"MFU {rows[1]['mfu']:.1%}  epoch" in done.out
    assert load_runs(tmp_path)["mfu"].item() == summary["mfu"]


# ---- images ----


@pytest.mark.process
def test_operations_of_images_count_what_is_fed_twice(tmp_path: Path) -> None:
    argv = [*SMALL, "--train_size", "60", "--b", "8", "--epochs", "2", "--tail", "pad"]
    done = script("vit", *argv, "--o", str(tmp_path), count=2)
    assert done.code == 0, done.err
    rows, environment, _ = record(tmp_path)
    flops = environment["flops"]
    peak = environment["cpu_calibration"]["fp32_tflops"]  # unknown beside other programs
    assert flops["how"] == "closed form" and flops["peak_tflops_per_gpu"] == peak
    assert flops["peak_from"] == ("calibration" if peak else None)
    last = rows[-1]
    assert last["timed_samples"] == 60 and last["fed_samples"] == 64
    result = last["tflops_per_s"] * last["timed_s"] * 1e12
    assert result == pytest.approx(64 * flops["per_sample"], rel=1e-9)
    assert last["tflops_per_s_without_padding"] == last["tflops_per_s"]
    assert last["tokens_per_s"] is last["padding_share"] is None
    assert (last["mfu"] or 0) > 0 if peak else last["mfu"] is None


@pytest.mark.process
def test_an_epoch_that_was_broken_off_counts_what_is_timed_of_it(tmp_path: Path) -> None:
    argv = [*SMALL[:-4], "--train_size", "320", "--b", "16", "--epochs", "2", "--save_steps", "7"]
    argv += ["--max_steps", "33", "--o", str(tmp_path)]
    broken_off(1, argv, 29, "crash", name="vit")
    assert script("vit", *argv).code == 0
    rows, environment, _ = record(tmp_path)
    # From update 28 to 33: the first of the process are not timed.
    assert rows[-1]["timed_steps"] == 5 - environment["timing_warmup_steps"] > 0
    for row in rows:
        result = row["tflops_per_s"] * row["timed_s"] * 1e12
        assert result == pytest.approx(row["timed_samples"] * environment["flops"]["per_sample"])


# ---- models without a closed form ----


class Layer(nn.Module):
    def __init__(self, planted: str = "") -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.planted = planted

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.planted and len(x) == 2:  # as many as are counted
            raise RuntimeError(self.planted)
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Plain(torch.utils.data.Dataset):
    """Points, each with a little noise that is drawn when it is read."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        x = torch.full((FEATURES,), float(i % 7)) + torch.randn(FEATURES)
        return {"x": x, "labels": torch.tensor(i % CLASSES)}


def train_plain(folder: str, planted: str, *flags: str) -> float:
    """What is drawn at random when the trainer has been made."""
    trainer, run = ours(folder, Layer(planted), Plain(32), Plain(8), *flags)
    drawn = torch.rand(1).item()
    run.train(trainer)
    return drawn


@pytest.mark.process
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_another_model_is_counted_before_it_is_wrapped_or_split(
    tmp_path: Path, strategy: str
) -> None:
    ranks(2, train_plain, str(tmp_path), "", "--epochs=2", "--strategy", strategy)
    rows, environment, _ = record(tmp_path)
    # Forward, and the gradient of the weights; the input needs none.
    assert environment["flops"]["how"] == COUNTED and environment["flops"]["missing"] is None
    assert environment["flops"]["per_sample"] == 4 * FEATURES * CLASSES
    tflop = rows[-1]["tflops_per_s"] * rows[-1]["timed_s"]
    assert tflop * 1e12 == pytest.approx(32 * 4 * FEATURES * CLASSES)


@pytest.mark.process
def test_what_cannot_be_counted_is_null_and_disturbs_nothing(tmp_path: Path) -> None:
    (known,) = ranks(1, train_plain, str(tmp_path / "known"), "")
    (unknown,) = ranks(1, train_plain, str(tmp_path / "unknown"), "planted")
    # A sample was read, noise and all, and no random number is missing for it.
    expected = torch.rand(1, generator=torch.Generator().manual_seed(42)).item()
    assert known == unknown == expected
    rows, environment, _ = record(tmp_path / "unknown")
    assert environment["flops"]["how"] is None and "planted" in environment["flops"]["missing"]
    assert environment["flops"]["per_sample"] is None
    assert rows[-1]["tflops_per_s"] is rows[-1]["mfu"] is None
    losses = [record(tmp_path / name)[0][-1]["train_loss"] for name in ("known", "unknown")]
    assert losses[0] == losses[1]


# ---- shapes ----


def ids(mask: list[list[int]], device: str = "cpu") -> dict[str, Any]:
    tensor = torch.tensor(mask)
    labels = torch.zeros(len(mask), dtype=torch.long)
    batch = {"input_ids": tensor, "attention_mask": tensor, "labels": labels}
    return {name: value.to(device) for name, value in batch.items()}


MASK = [[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]]


def test_shapes_by_hand() -> None:
    shape = BatchShape(samples=3, tokens=12, squares=48, text_tokens=8, text_squares=26)
    assert batch_shape({**ids(MASK), SHAPE: shape}) == shape
    # What is on a device is not asked for.
    there = batch_shape(ids(MASK, "meta"))
    assert there == batch_shape(ids(MASK)) == BatchShape(3, 12, 48)
    assert shape + shape == BatchShape(6, 24, 96, 16, 52)
    assert shape + there == BatchShape(6, 24, 96)
    images = {"pixel_values": torch.zeros(5, 3, 2, 2), "labels": torch.zeros(5)}
    assert batch_shape(images) == BatchShape(5)


def collate(numbers: np.ndarray) -> dict[str, Any]:
    tokens = int(numbers.sum())
    return {"labels": torch.zeros(2), SHAPE: BatchShape(2, tokens, 0, tokens, 0)}


@pytest.mark.process
def test_amounts_come_out_of_the_processes_that_load_data() -> None:
    loader = DataLoader(Indices(4), batch_size=2, collate_fn=collate, num_workers=1)
    moved = [send_to_device(batch, torch.device("meta"), non_blocking=True) for batch in loader]
    assert [batch_shape(batch).text_tokens for batch in moved] == [1, 5]


# ---- numbers ----


def test_what_is_not_known_is_null() -> None:
    work = Work(fixed=5, per_token=3, per_pair=2)
    whole = sums_of(work, BatchShape(2, 8, 32, 6, 20))
    assert list(whole.values()) == [(10 + 24 + 64) / 1e12, (10 + 18 + 40) / 1e12, 6, 8]
    assert sums_of(work, BatchShape(2, 8, 32))["timed_tflop_without_padding"] is None
    assert sums_of(work, BatchShape(2))["timed_tflop"] is None  # its texts came as something else
    assert list(sums_of(None, BatchShape(2, 8, 32, 6, 20)).values()) == [None, None, 6, 8]
    assert not any(rates(dict.fromkeys(SUMS), 0.0, None).values())
    # An epoch of which nothing was timed has no rates.
    assert rates(dict.fromkeys(SUMS, 1.0), 0.0, 2.0)["mfu"] is None
    assert math.isclose(rates(dict.fromkeys(SUMS, 3.0), 2.0, 6.0)["mfu"] or 0, 0.25)


def test_the_peak_is_that_of_the_number_format(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = parse("bert", ["--precision", "bf16"], {})
    assert peak_of(settings) == (None, None)  # a CPU that is not calibrated
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert peak_of(settings) == (989, "table")
    assert peak_of(parse("bert", ["--precision", "fp32"], {})) == (67, "table")
    assert peak_of(parse("bert", ["--peak_tflops", "790"], {})) == (790, "flag")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card of tomorrow")
    assert peak_of(settings) == (None, None)


@pytest.mark.parametrize(("other", "peak"), [(312.0, (650.5, "table")), (None, (None, None))])
def test_the_peak_of_unlike_gpus_is_their_mean(
    other: float | None, peak: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(flops, "gather", lambda own: [own, other])
    assert peak_of(parse("bert", ["--precision", "bf16"], {})) == peak


def test_mfu_stands_beside_gpu_utilisation() -> None:
    busy = {"utilisation_percent": {"mean": 97.4, "p95": 100, "max": 100}}
    assert utilisation({"mfu": 0.412, "gpu": busy}) == ["MFU 41.2% (GPU utilisation 97%)"]
    assert utilisation({"mfu": None, "gpu": busy}) == ["MFU unknown (GPU utilisation 97%)"]
    assert utilisation({"mfu": None, "gpu": None}) == []
    assert utilisation({"mfu": 0.6, "gpu": None}) == ["MFU 60.0%"]  # a CPU

"""Whether data come faster than a model takes them: both alone, on one core.

    OMP_NUM_THREADS=1 python -m benchmarks.loader --out loader.json

    loader    what the Trainer iterates over, and what is then done to a batch on its device:
              gathering, padding, augmenting, normalising; nothing is trained
    collate   of that, putting a batch together: the host's part where there is a GPU
    model     training steps on one batch that lies ready

The images lie in memory, as after a first pass; decoding is done once, before (--augment and sizes
stand in the cases). Target: a loader that is at least twice as fast as its model.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import sys
import tempfile
import time
from typing import Any

import torch

from benchmarks.prepared import prepared
from benchmarks.results import markdown, parser_of, show
from harness.train.loop.trainer import ExactTrainer
from harness.train.measure.environment import environment

TARGET = 2.0
CASES = {
    "vit-nano, 8 px": "vit",
    "resnet-18, 32 px": "vit --model resnet-18 --image_size 32 --b 64",
    "resnet-18-cifar, 32 px, crop_flip": "vit --model resnet-18-cifar --b 64 --augment crop_flip "
    "--train_size 128",
    "vit-tiny-patch32, 224 px": "vit --model vit-tiny-patch32 --b 32 --train_size 256",
    "vit-tiny-patch32, 224 px, crop_flip": "vit --model vit-tiny-patch32 --b 32 "
    "--train_size 256 --augment crop_flip",
    "resnet-18, 224 px": "vit --model resnet-18 --b 16 --train_size 64",
    "bert-nano, 48 tokens": "bert",
    "bert-mini, 48 tokens": "bert --model bert-mini --train_size 256",
}
FLAGS = ("--tiny", "--epochs", "1", "--test_size", "8", "--dropout", "0", "--telemetry_hz", "0")
HEADINGS = ("model and data", "loader samples/s", "of it collate us a sample", "model samples/s",
            "loader / model")  # fmt: skip
ENOUGH_S = 1.0  # the least time of a part of a round


def loading(trainer: ExactTrainer) -> tuple[float, float]:
    """Seconds per sample: of the loader, and of putting batches together."""
    samples, began = 0, time.perf_counter()
    while time.perf_counter() - began < ENOUGH_S:
        for batch in trainer.get_train_dataloader():
            samples += len(trainer._prepare_inputs(batch)["labels"])
    loader_s = (time.perf_counter() - began) / samples
    train: Any = trainer.train_dataset
    size = trainer.args.train_batch_size
    order = torch.randperm(len(train))[: len(train) // size * size].view(-1, size).tolist()
    samples, began = 0, time.perf_counter()
    while time.perf_counter() - began < ENOUGH_S / 4:
        for numbers in order:
            trainer.data_collator(train.__getitems__(numbers))
            samples += size
    return loader_s, (time.perf_counter() - began) / samples


def training(trainer: ExactTrainer) -> float:
    """Seconds per sample of training steps on one batch, by hand."""
    model: Any = trainer.model.train()
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    took: list[float] = []
    while len(took) < 3 or sum(took) < ENOUGH_S:
        began = time.perf_counter()
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:]) / len(inputs["labels"])


def measure(case: str, rounds: int) -> dict[str, float]:
    """Medians of rounds in which loader and model take turns; the first round is dropped."""
    script, *flags = case.split()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = prepared(script, [*flags, *FLAGS, "--output_dir", folder]).trainer()
        found = [(*loading(trainer), training(trainer)) for _ in range(rounds + 1)][1:]
    loader_s, collate_s, model_s = map(statistics.median, zip(*found, strict=True))
    return {"loader_s": loader_s, "collate_s": collate_s, "model_s": model_s}


def table(record: dict[str, Any]) -> str:
    facts = record["environment"]
    rows = [
        (
            name, f"{1 / of['loader_s']:,.0f}", f"{1e6 * of['collate_s']:.2f}",
            f"{1 / of['model_s']:,.1f}", f"{of['model_s'] / of['loader_s']:.1f}",
        ) for name, of in record["cases"].items()
    ]  # fmt: skip
    return (
        f"{facts['machine']}, {facts['threads']} thread(s), torch {facts['versions']['torch']}; "
        f"median of {record['rounds']} rounds\n\n{markdown('lllll', HEADINGS, rows)}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("loader", __doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of loader and model (3)")
    parser.add_argument("--quick", action="store_true", help="one small round: does it run?")
    options = parser.parse_args(argv)
    chosen, rounds = CASES, options.rounds
    if options.quick:
        chosen, rounds = {"vit-nano, 8 px": "vit --train_size 64 --augment crop_flip"}, 1
    cases = {name: measure(case, rounds) for name, case in chosen.items()}
    record = {"environment": environment(), "rounds": rounds, "cases": cases}
    show(table(record), options.out, record)
    slow = any(of["model_s"] < TARGET * of["loader_s"] for of in cases.values())
    return int(slow and not options.quick)


if __name__ == "__main__":
    sys.exit(main())

"""What padding costs: the same texts laid out in several ways, through the same model.

    python -m benchmarks.padding --dataset FOLDER --batches 16,32,64

Arms take turns, step by step, on the same samples: a step is collating, forward, backward and
AdamW in a plain loop, an evaluation is a forward pass over test samples.

    packed   one row of tokens, as --padding auto trains this model
    parts    at most four parts of like length, as models that read no rows are trained
    batch    padded to the longest text of the batch, as --padding batch
    pad128   padded to 128 tokens, longer texts cut
    pad500   padded to 500 tokens
    ideal    texts of one length, as long as the mean of the others' batch: the limit

No dropout. Evaluation: 64 texts a batch, for pad128 8 as in the examples of transformers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch

from benchmarks.results import markdown, parser_of, spread
from harness.core.command_line import parse
from harness.train.data import models, text_layout
from harness.train.data.texts import Layout, TextBatches, for_model, load_texts, parts_of

ARMS = ("packed", "parts", "batch", "pad128", "pad500", "ideal")
EVAL_BATCH = {"pad128": 8}
LEFT_OUT = 1  # first steps of an arm, not counted
THREADS = int(os.environ.get("OMP_NUM_THREADS", 1))


class Texts:
    """Lays out batches of the same samples for each arm."""

    def __init__(self, batches: TextBatches, first_position: int) -> None:
        self.batches, self.first_position = batches, first_position
        self.lengths = np.diff(batches.offsets)
        self.order = np.argsort(self.lengths, kind="stable")

    def of(self, arm: str, samples: np.ndarray) -> list[dict[str, Any]]:
        if arm == "ideal":
            mean = self.lengths[samples].mean()
            begin = int(np.searchsorted(self.lengths[self.order], mean))
            alike = np.flatnonzero(self.lengths == self.lengths[self.order[begin]])
            samples = np.resize(alike, len(samples))
        kind = {"packed": "packed", "parts": "parts"}.get(arm, "batch")
        attention = "runs" if kind == "packed" else ""
        self.batches.layout = Layout(kind, attention, self.first_position)
        batch = self.batches(samples)
        if parts := parts_of(batch):
            return parts
        inputs = for_model(batch)
        if arm.startswith("pad"):
            inputs = {name: _to(value, int(arm[3:])) for name, value in inputs.items()}
        return [inputs]


def _to(value: torch.Tensor, columns: int) -> torch.Tensor:
    if value.ndim == 1:
        return value
    return torch.nn.functional.pad(value[:, :columns], (0, max(0, columns - value.shape[1])))


def train(model: Any, optimizer: Any, texts: Texts, arm: str, samples: np.ndarray) -> float:
    """Train one step; return its seconds."""
    began = time.perf_counter()
    for inputs in texts.of(arm, samples):
        loss = model(**inputs).loss * (len(inputs["labels"]) / len(samples))
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - began


def evaluate(model: Any, texts: Texts, arm: str, samples: np.ndarray) -> float:
    """Evaluate these samples; return the seconds."""
    size = EVAL_BATCH.get(arm, 64)
    began = time.perf_counter()
    with torch.no_grad():
        for start in range(0, len(samples), size):
            for inputs in texts.of(arm, samples[start : start + size]):
                model(**inputs)
    return time.perf_counter() - began


def measure(options: argparse.Namespace, size: int, arms: list[str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--tiny", "--model", options.model, "--dataset", options.dataset, "--dropout", "0"]
        settings = parse("bert", [*flags, "--max_length", "512", "--o", folder], environ={})
        data = load_texts(settings, 1)
        torch.manual_seed(0)
        model: Any = models.build(settings, data.labels)
    text_layout.accept_packed(model)
    assert isinstance(data.collate, TextBatches)
    texts = Texts(data.collate, models.first_position(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    random = np.random.default_rng(0)
    steps: dict[str, list[float]] = {arm: [] for arm in arms}
    evals: dict[str, list[float]] = {arm: [] for arm in arms}
    count, test = data.facts["train_samples"] or 0, data.facts["test_samples"] or 0
    for step in range(options.steps + LEFT_OUT):
        samples = random.choice(count, size, replace=False)
        tested = count + random.choice(test, min(64, test), replace=False)
        for arm in arms[:: -1 if step % 2 else 1]:
            model.train()
            took = train(model, optimizer, texts, arm, samples), 0.0
            if step % 4 == 0:
                model.eval()
                took = took[0], evaluate(model, texts, arm, tested) / len(tested)
            if step >= LEFT_OUT:
                steps[arm].append(took[0])
                evals[arm] += [took[1]] if took[1] else []
    return table(size, steps, evals, count, test)


def table(
    size: int,
    steps: dict[str, list[float]],
    evals: dict[str, list[float]],
    count: int,
    test: int,
) -> str:
    ours = next(iter(steps))
    epochs = {
        arm: statistics.median(steps[arm]) * (count // size)
        + (statistics.median(evals[arm]) * test if evals[arm] else 0)
        for arm in steps
    }
    heads = ("layout", "step ms (lowest to highest)", "epoch with evaluation s",
             f"{ours} is faster by")  # fmt: skip
    rows = [
        (
            arm, spread([1000 * s for s in took], ".1f"), f"{epochs[arm]:.1f}",
            f"{epochs[arm] / epochs[ours]:.2f}",
        ) for arm, took in steps.items()
    ]  # fmt: skip
    return (
        f"{count} training and {test} test texts, batch {size}, {THREADS} thread(s), medians of "
        f"{len(steps[ours])} steps\n\n{markdown('llll', heads, rows)}\n"
    )


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("padding", __doc__, out=False)
    parser.add_argument("--dataset", default="embedded:english", help="texts (embedded:english)")
    parser.add_argument("--model", default="bert-mini", help="an architecture (bert-mini)")
    parser.add_argument("--batches", default="16,32,64", help="samples a batch (16,32,64)")
    parser.add_argument("--steps", type=int, default=8, help="steps of each arm (8)")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"of {', '.join(ARMS)} (all)")
    parser.add_argument("--quick", action="store_true", help="two small steps: does it run?")
    options = parser.parse_args(argv)
    torch.set_num_threads(THREADS)
    if options.quick:
        options.model, options.batches, options.steps = "bert-tiny", "4", 4
    for size in options.batches.split(","):
        print(measure(options, int(size), options.arms.split(",")))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Toy trainings of replicas that exchange now and then, and the same calculated by hand."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import TrainerCallback

from tests.support import toys

BATCH, UPDATES = 4, 20
CLIPPED = ["--optim", "sgd", "--lr", "0.1", "--lr_scheduler_type", "constant", "--max_grad_norm"]
SGD = [*CLIPPED, "0"]
# Evaluated in the middle of a run, between two exchanges.
TWO_EPOCHS = ["--epochs", "2"]
# On one node: no link is measured between ranks, and a test takes half the time.
BY_RANK = ["--sync_scope", "rank"]


class Diary(TrainerCallback):
    """The weights after every update, and those that were evaluated."""

    def __init__(self) -> None:
        self.weights: list[np.ndarray] = []
        self.evaluated: list[np.ndarray] = []
        self.evaluating = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights.append(toys.weights(kwargs["model"]))
        self.evaluating = False

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.evaluating:
            self.evaluated.append(toys.weights(kwargs["model"]))
        self.evaluating = True


def run_arm(folder: str, argv: list[str], model: Any = None, samples: int | None = None) -> Any:
    """One training on this rank: (trainer, run, what the diary holds)."""
    epochs = 2 if "--epochs" in argv else 1
    world = int(os.environ.get("WORLD_SIZE", 1))
    data = toys.Points(samples or BATCH * UPDATES * world // epochs)
    diary = Diary()
    model = toys.Net() if model is None else model
    trainer, run = toys.trained(folder, model, data, toys.Points(9, 1), *argv, callbacks=[diary])
    return trainer, run, diary


def arms(folder: str, commands: list[list[str]]) -> list[dict[str, Any]]:
    """Each arm on this rank, one after the other."""
    results = []
    for argv in commands:
        trainer, run, diary = run_arm(folder, argv)
        results.append({
            "weights": np.stack(diary.weights), "evaluated": np.stack(diary.evaluated),
            "fed": trainer.model.fed, "observed": trainer.observations.observed,
            "bytes": getattr(trainer.exchange, "payload_bytes", None),
            "rows": toys.rows(run) if run.context.is_rank0 else None,
        })  # fmt: skip
    return results


def by_hand(
    fed: list[list[list[int]]],
    each: int,
    every: int,
    outer_lr: float = 1.0,
    momentum: float = 0.0,
    fragments: int = 1,
    overlap: int = 0,
    first: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """The weights of every replica after every update, and the shared ones: from the definitions.

    fed: of each rank, the samples of each of its batches. each: ranks of a replica.
    """
    data = toys.Points(max(n for rank in fed for batch in rank for n in batch) + 1)
    nets = [toys.Net() for _ in range(len(fed) // each)]
    updates = len(fed[0])
    start = torch.from_numpy(toys.weights(nets[0]))
    outer, buffers = start.clone(), torch.zeros_like(start)
    edges = [len(start) * i // fragments for i in range(fragments + 1)]
    sent: list[tuple[int, slice, list[torch.Tensor]]] = []
    seen, shared = [], []
    for update in range(1, updates + 1):
        for replica, net in enumerate(nets):
            batches = fed if update <= first else fed[replica * each : (replica + 1) * each]
            numbers = [n for rank in batches for n in rank[update - 1]]
            net.zero_grad()
            index = torch.tensor(numbers)
            net(data.x[index], data.labels[index], index)["loss"].backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= 0.1 * parameter.grad  # type: ignore[operator]
        own = [torch.from_numpy(toys.weights(net)) for net in nets]
        last = update == updates
        exchanged = None
        if update <= first:
            outer = own[0].clone()
            seen.append(torch.stack(own).numpy())
            shared.append(outer.numpy().copy())
            continue
        turn, rest = divmod(update - first, every // fragments)
        if rest == 0:
            exchanged = (turn - 1) % fragments
            piece = slice(edges[exchanged], edges[exchanged + 1])
            sent.append((update, piece, [w[piece].clone() for w in own]))
        while sent and (last or sent[0][0] + overlap <= update):
            _, piece, before = sent.pop(0)
            delta = outer[piece] - sum(before) / len(nets)  # type: ignore[operator]
            buffers[piece] = momentum * buffers[piece] + delta
            outer[piece] -= outer_lr * (delta + momentum * buffers[piece])
            for weights, w in zip(own, before, strict=True):
                weights[piece] += outer[piece] - w
        if last:
            for number in range(fragments):
                piece = slice(edges[number], edges[number + 1])
                if number != exchanged:
                    outer[piece] = sum(w[piece] for w in own) / len(nets)
                for weights in own:
                    weights[piece] = outer[piece]
        for net, weights in zip(nets, own, strict=True):
            nn.utils.vector_to_parameters(weights.float(), net.parameters())
        seen.append(torch.stack(own).numpy())
        shared.append(outer.numpy().copy())
    return np.stack(seen, 1), np.stack(shared)


def follows(results: list[dict[str, Any]], each: int, tolerance: float = 2e-6, **more: Any) -> None:
    """All ranks have the calculated weights after every update, and evaluate the shared ones."""
    fed = [rank["fed"] for rank in results]
    seen, shared = by_hand(fed, each, **more)
    first = [seen[0]] if len(seen) == 1 else seen
    assert len(first) == 1 or toys.apart(seen[0], seen[1]) > 1e-3  # replicas do differ
    for number, rank in enumerate(results):
        assert toys.apart(rank["weights"], seen[number // each]) < tolerance
        assert rank["weights"][-1].tobytes() == results[0]["weights"][-1].tobytes()
        for other, mine in zip(results[0]["evaluated"], rank["evaluated"], strict=True):
            assert other.tobytes() == mine.tobytes()
    half = len(shared) // 2
    assert toys.apart(results[0]["evaluated"][-1], shared[-1]) < tolerance
    if len(results[0]["evaluated"]) == 2:
        assert toys.apart(results[0]["evaluated"][0], shared[half - 1]) < tolerance


class Slope(nn.Module):
    """One weight, and a gradient that is this rank's own and always the same."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1, bias=False)  # begins at 0
        nn.init.zeros_(self.line.weight)
        self.slope = 1.0 + 2 * rank

    def forward(self, x: Any, labels: Any, index: Any) -> dict[str, torch.Tensor]:
        weight = self.line(x.new_ones(1))
        logits = weight + torch.arange(toys.CLASSES).expand(len(labels), -1)
        return {"loss": (weight * self.slope).sum(), "logits": logits}


def one_weight(folder: str, argv: list[str]) -> list[float]:
    _, _, diary = run_arm(folder, [*SGD, *argv], Slope(int(os.environ["RANK"])), samples=80)
    return [float(weights[0]) for weights in diary.weights]

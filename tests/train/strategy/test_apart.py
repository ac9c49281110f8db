"""Units that train apart: the same weights at every update as a calculation by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from tests.support import toys
from tests.support.ranks import ranks

pytestmark = pytest.mark.process

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
    import os

    epochs = 2 if "--epochs" in argv else 1
    world = int(os.environ.get("WORLD_SIZE", 1))
    data = toys.Points(samples or BATCH * UPDATES * world // epochs)
    diary = Diary()
    model = toys.Net() if model is None else model
    trainer, run = toys.ours(folder, model, data, toys.Points(9, 1), *argv, callbacks=[diary])
    trainer.train()
    return trainer, run, diary


def arms(folder: str, asked: list[list[str]]) -> list[dict[str, Any]]:
    """Each arm on this rank, one after the other."""
    found = []
    for argv in asked:
        trainer, run, diary = run_arm(folder, argv)
        found.append({
            "weights": np.stack(diary.weights), "evaluated": np.stack(diary.evaluated),
            "fed": trainer.model.fed, "observed": trainer.observations.observed,
            "bytes": getattr(trainer.exchange, "payload_bytes", None),
            "rows": toys.rows(run) if run.context.is_rank0 else None,
        })  # fmt: skip
    return found


def by_hand(
    fed: list[list[list[int]]],
    each: int,
    every: int,
    outer_lr: float = 1.0,
    momentum: float = 0.0,
    fragments: int = 1,
    overlap: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """What every unit weighs after every update, and what is shared: from the definitions.

    fed: of each rank, the samples of each of its batches. each: ranks of a unit.
    """
    data = toys.Points(max(n for rank in fed for batch in rank for n in batch) + 1)
    units = [toys.Net() for _ in range(len(fed) // each)]
    updates = len(fed[0])
    start = torch.from_numpy(toys.weights(units[0]))
    outer, buffers = start.clone(), torch.zeros_like(start)
    edges = [len(start) * i // fragments for i in range(fragments + 1)]
    sent: list[tuple[int, slice, list[torch.Tensor]]] = []
    seen, shared = [], []
    for update in range(1, updates + 1):
        for unit, net in enumerate(units):
            numbers = [n for rank in fed[unit * each : (unit + 1) * each] for n in rank[update - 1]]
            net.zero_grad()
            index = torch.tensor(numbers)
            net(data.x[index], data.labels[index], index)["loss"].backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= 0.1 * parameter.grad  # type: ignore[operator]
        own = [torch.from_numpy(toys.weights(net)) for net in units]
        last = update == updates
        exchanged = None
        if update % (every // fragments) == 0:
            exchanged = (update // (every // fragments) - 1) % fragments
            piece = slice(edges[exchanged], edges[exchanged + 1])
            sent.append((update, piece, [w[piece].clone() for w in own]))
        while sent and (last or sent[0][0] + overlap <= update):
            _, piece, before = sent.pop(0)
            delta = outer[piece] - sum(before) / len(units)  # type: ignore[operator]
            buffers[piece] = momentum * buffers[piece] + delta
            outer[piece] -= outer_lr * (delta + momentum * buffers[piece])
            for weights, w in zip(own, before, strict=True):
                weights[piece] += outer[piece] - w
        if last:
            for number in range(fragments):
                piece = slice(edges[number], edges[number + 1])
                if number != exchanged:
                    outer[piece] = sum(w[piece] for w in own) / len(units)
                for weights in own:
                    weights[piece] = outer[piece]
        for net, weights in zip(units, own, strict=True):
            nn.utils.vector_to_parameters(weights.float(), net.parameters())
        seen.append(torch.stack(own).numpy())
        shared.append(outer.numpy().copy())
    return np.stack(seen, 1), np.stack(shared)


def follows(found: list[dict[str, Any]], each: int, tolerance: float = 2e-6, **more: Any) -> None:
    """All ranks weigh after every update what was calculated, and evaluate what is shared."""
    fed = [rank["fed"] for rank in found]
    seen, shared = by_hand(fed, each, **more)
    first = [seen[0]] if len(seen) == 1 else seen
    assert len(first) == 1 or toys.apart(seen[0], seen[1]) > 1e-3  # units do train apart
    for number, rank in enumerate(found):
        assert toys.apart(rank["weights"], seen[number // each]) < tolerance
        assert rank["weights"][-1].tobytes() == found[0]["weights"][-1].tobytes()
        for other, mine in zip(found[0]["evaluated"], rank["evaluated"], strict=True):
            assert other.tobytes() == mine.tobytes()
    half = len(shared) // 2
    assert toys.apart(found[0]["evaluated"][-1], shared[-1]) < tolerance
    if len(found[0]["evaluated"]) == 2:
        assert toys.apart(found[0]["evaluated"][0], shared[half - 1]) < tolerance


@pytest.mark.parametrize("count", [2, 3])
def test_exchanged_at_every_update_it_is_ddp(count: int, tmp_path: Path) -> None:
    outer = ["--strategy", "diloco", "--outer_lr", "1", "--outer_momentum", "0"]
    asked = [
        SGD,
        [*SGD, "--strategy", "local_sgd", "--sync_every", "1", *BY_RANK],
        [*SGD, *outer, "--sync_every", "1", *BY_RANK],
    ]
    for ddp, *others in ranks(count, arms, str(tmp_path), asked):
        assert ddp["weights"].shape[0] == UPDATES
        assert toys.apart(ddp["weights"][0], ddp["weights"][-1]) > 0.01
        for other in others:
            assert toys.apart(ddp["weights"], other["weights"]) < 1e-6
            assert other["fed"] == ddp["fed"]


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_on_one_node_local_sgd_is_ddp_bit_for_bit(optim: str, tmp_path: Path) -> None:
    more = [*TWO_EPOCHS, "--optim", optim]
    for ddp, local in ranks(2, arms, str(tmp_path), [more, ["--strategy", "local_sgd", *more]]):
        assert ddp["weights"].tobytes() == local["weights"].tobytes()
        assert ddp["evaluated"][-1].tobytes() == local["evaluated"][-1].tobytes()
        if ddp["rows"]:
            for one, other in zip(ddp["rows"], local["rows"], strict=True):
                same = ("train_loss", "grad_norm", "clipped_share", "eval_loss", "accuracy")
                assert [one[name] for name in same] == [other[name] for name in same]
        assert local["observed"]["units"] == 1 and local["bytes"] == 0


def test_two_nodes_of_two_ranks_share_gradients_inside_only(tmp_path: Path) -> None:
    local = [*SGD, "--strategy", "local_sgd", "--sync_every", "7"]
    asked = [[*local, *TWO_EPOCHS], [*local, *BY_RANK, *TWO_EPOCHS]]
    found = ranks(4, arms, str(tmp_path), asked, env={"LOCAL_WORLD_SIZE": "2"})
    by_node, by_rank = ([rank[arm] for rank in found] for arm in range(2))
    follows(by_node, each=2, every=7)
    follows(by_rank, each=1, every=7)
    for rank in (0, 2):  # bit for bit, between exchanges, too
        assert by_node[rank]["weights"].tobytes() == by_node[rank + 1]["weights"].tobytes()
    whole = by_node[0]["weights"][0].size * 4
    # Three exchanges over the link, by one rank of each node, beside its gradients.
    gradients = UPDATES * whole
    assert [rank["bytes"] for rank in by_node] == [gradients + 3 * whole, gradients] * 2
    assert [rank["bytes"] for rank in by_rank] == [3 * whole] * 4
    assert by_node[0]["observed"]["first_exchange_update"] == 7
    assert by_node[0]["observed"]["exchanges"] == 3


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
    import os

    _, _, diary = run_arm(folder, [*SGD, *argv], Slope(int(os.environ["RANK"])), samples=80)
    return [float(weights[0]) for weights in diary.weights]


def test_one_weight_follows_the_closed_form_of_local_sgd(tmp_path: Path) -> None:
    argv = ["--strategy", "local_sgd", "--sync_every", "4", *BY_RANK]
    for rank, seen in enumerate(ranks(2, one_weight, str(tmp_path), argv)):
        # 10 updates of 0.1 times 1 on rank 0 and 3 on rank 1: 2 on average, where all is shared.
        for update, weight in enumerate(seen, 1):
            alone = 0 if update == 10 else update % 4
            expected = -0.1 * (2 * (update - alone) + (1 + 2 * rank) * alone)
            assert weight == pytest.approx(expected, abs=1e-6)


def norms(folder: str, argv: list[str]) -> Any:
    import os

    model = Slope(int(os.environ["RANK"]))
    _, run, _ = run_arm(folder, argv, model, samples=80)
    return toys.rows(run)[0] if run.context.is_rank0 else None


def test_the_gradient_of_a_row_is_that_of_all_ranks(tmp_path: Path) -> None:
    argv = [*CLIPPED, "2", "--strategy", "local_sgd", *BY_RANK]
    row, _ = ranks(2, norms, str(tmp_path), argv)
    assert row["grad_norm"] == pytest.approx(2)  # 1 on rank 0 and 3 on rank 1
    assert (row["clipped_share"], row["skipped_updates"]) == (0.5, 0)

"""Local SGD: at every update the weights that a calculation by hand gives."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import toys
from tests.support.ranks import ranks
from tests.support.replicas import (
    BY_RANK,
    CLIPPED,
    SGD,
    TWO_EPOCHS,
    UPDATES,
    Slope,
    arms,
    follows,
    one_weight,
    run_arm,
)

pytestmark = pytest.mark.process


@pytest.mark.parametrize("count", [2, 3])
def test_exchanging_at_every_update_equals_ddp(count: int, tmp_path: Path) -> None:
    outer = ["--strategy", "diloco", "--outer_lr", "1", "--outer_momentum", "0"]
    commands = [
        SGD,
        [*SGD, "--strategy", "local_sgd", "--sync_every", "1", *BY_RANK],
        [*SGD, *outer, "--sync_every", "1", *BY_RANK],
    ]
    for ddp, *others in ranks(count, arms, str(tmp_path), commands):
        assert ddp["weights"].shape[0] == UPDATES
        assert toys.apart(ddp["weights"][0], ddp["weights"][-1]) > 0.01
        for other in others:
            assert toys.apart(ddp["weights"], other["weights"]) < 1e-6
            assert other["fed"] == ddp["fed"]


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_on_one_node_local_sgd_is_ddp_bit_for_bit(optim: str, tmp_path: Path) -> None:
    more = [*TWO_EPOCHS, "--optim", optim]
    local_sgd = ["--strategy", "local_sgd", "--sync_scope", "node", *more]
    for ddp, local in ranks(2, arms, str(tmp_path), [more, local_sgd]):
        assert ddp["weights"].tobytes() == local["weights"].tobytes()
        assert ddp["evaluated"][-1].tobytes() == local["evaluated"][-1].tobytes()
        if ddp["rows"]:
            for one, other in zip(ddp["rows"], local["rows"], strict=True):
                same = ("train_loss", "grad_norm", "clipped_share", "eval_loss", "accuracy")
                assert [one[name] for name in same] == [other[name] for name in same]
        assert local["observed"]["units"] == 1 and 0 < local["bytes"] == ddp["bytes"]


def test_two_nodes_of_two_ranks_share_gradients_inside_only(tmp_path: Path) -> None:
    local = [*SGD, "--strategy", "local_sgd", "--sync_every", "7"]
    commands = [[*local, *TWO_EPOCHS], [*local, *BY_RANK, *TWO_EPOCHS]]
    results = ranks(4, arms, str(tmp_path), commands, env={"LOCAL_WORLD_SIZE": "2"})
    by_node, by_rank = ([rank[arm] for rank in results] for arm in range(2))
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


def test_one_weight_follows_the_closed_form_of_local_sgd(tmp_path: Path) -> None:
    argv = ["--strategy", "local_sgd", "--sync_every", "4", *BY_RANK]
    for rank, seen in enumerate(ranks(2, one_weight, str(tmp_path), argv)):
        # 10 updates of 0.1 times 1 on rank 0 and 3 on rank 1: 2 on average, where all is shared.
        for update, weight in enumerate(seen, 1):
            alone = 0 if update == 10 else update % 4
            expected = -0.1 * (2 * (update - alone) + (1 + 2 * rank) * alone)
            assert weight == pytest.approx(expected, abs=1e-6)


FIRST = ["--sync_first", "8"]


def test_updates_made_together_are_those_of_ddp_bit_for_bit(tmp_path: Path) -> None:
    local = [*SGD, "--strategy", "local_sgd", "--sync_every", "4", *BY_RANK, *FIRST]
    for ddp, backend, direct in ranks(
        2, arms, str(tmp_path), [SGD, local, [*local, "--exchange", "direct"]]
    ):
        for way in (backend, direct):
            assert way["weights"][:8].tobytes() == ddp["weights"][:8].tobytes()
            assert toys.apart(way["weights"][8], ddp["weights"][8]) > 1e-4
            assert (way["observed"]["sync_first"], way["observed"]["exchanges"]) == (8, 3)
            assert way["observed"]["first_exchange_update"] == 12
            # Of each gradient, and then of the weights three times.
            assert way["bytes"] == (8 + 3) * ddp["weights"][0].size * 4


def test_first_together_and_then_apart_on_two_nodes_of_two_ranks(tmp_path: Path) -> None:
    local = [*SGD, "--strategy", "local_sgd", "--sync_every", "5"]
    # Evaluated before and after replicas part.
    commands = [[*local, *TWO_EPOCHS, "--sync_first", "13"], [*local, *FIRST, *TWO_EPOCHS]]
    results = ranks(4, arms, str(tmp_path), commands, env={"LOCAL_WORLD_SIZE": "2"})
    for arm, first in enumerate((13, 8)):
        by_node = [rank[arm] for rank in results]
        follows(by_node, each=2, every=5, first=first)
        whole = by_node[0]["weights"][0].size * 4
        exchanges = by_node[0]["observed"]["exchanges"]
        assert exchanges == -(-(UPDATES - first) // 5)
        # All ranks share gradients of their node, and one sends those of the node and its weights.
        assert by_node[1]["bytes"] == UPDATES * whole
        assert by_node[0]["bytes"] == (UPDATES + first + exchanges) * whole


def test_one_weight_follows_the_closed_form_of_a_start_together(tmp_path: Path) -> None:
    argv = ["--strategy", "local_sgd", "--sync_every", "4", "--sync_first", "3", *BY_RANK]
    for rank, seen in enumerate(ranks(2, one_weight, str(tmp_path), argv)):
        for update, weight in enumerate(seen, 1):
            alone = 0 if update in (1, 2, 3, 10) else (update - 3) % 4
            expected = -0.1 * (2 * (update - alone) + (1 + 2 * rank) * alone)
            assert weight == pytest.approx(expected, abs=1e-6)


def norms(folder: str, argv: list[str]) -> Any:
    model = Slope(int(os.environ["RANK"]))
    _, run, _ = run_arm(folder, argv, model, samples=80)
    return toys.rows(run)[0] if run.context.is_rank0 else None


def test_the_gradient_of_a_row_is_that_of_all_ranks(tmp_path: Path) -> None:
    argv = [*CLIPPED, "2", "--strategy", "local_sgd", *BY_RANK]
    row, _ = ranks(2, norms, str(tmp_path), argv)
    assert row["grad_norm"] == pytest.approx(2)  # 1 on rank 0 and 3 on rank 1
    assert (row["clipped_share"], row["skipped_updates"]) == (0.5, 0)

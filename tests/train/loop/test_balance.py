"""--balance: the same samples and the same update, in shares that fit the ranks' speeds."""

from __future__ import annotations

import time
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from harness.core.command_line import parse
from harness.core.settings import Settings, UserError
from harness.core.topology import World
from harness.train.data.samples import EpochOrder
from harness.train.loop import balance
from harness.train.loop.balance import Balance, RankBatches, shares_of
from harness.train.strategy.verify import observe
from tests.support.own_time import go_before_others
from tests.support.ranks import ranks
from tests.support.toys import Net, Points, ours

RANK = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("speeds", "samples", "shares"),
    [
        ([1, 1], 32, [16, 16]),
        ([2, 1], 48, [32, 16]),
        ([2, 1], 32, [22, 10]),
        ([1, 1, 1], 32, [11, 11, 10]),
        ([1000, 1], 4, [3, 1]),  # a rank without samples has no gradient
        ([1, 1000, 1], 3, [1, 1, 1]),
    ],
)
def test_shares_are_in_proportion_to_speed(
    speeds: list[float], samples: int, shares: list[int]
) -> None:
    assert shares_of(speeds, samples) == shares


def test_each_step_has_the_samples_that_it_has_in_equal_shares() -> None:
    order = EpochOrder(96, seed=3)
    batches = list(RankBatches(order, [12, 3, 1]))
    assert [len(batch) for batch in batches] == [12, 3, 1] * 6
    assert len(RankBatches(order, [12, 3, 1])) == 18
    steps = np.array(list(order)).reshape(6, 16)
    for number, step in enumerate(steps):
        assert list(chain(*batches[3 * number : 3 * number + 3])) == step.tolist()


def balance_of(model: Any, asked: str | None, rank: int = 0, **before: Any) -> Balance:
    args = SimpleNamespace(
        per_device_train_batch_size=8, process_index=rank, device=torch.device("cpu")
    )
    settings = Settings(script="bert", balance=asked)
    context: Any = SimpleNamespace(settings=settings, args=args, epoch_so_far=before)
    return Balance(context, model, lambda count: pytest.fail("measured"))


def test_a_resumed_run_keeps_its_shares() -> None:
    assert balance_of(Net(), "measured", shares=[13, 3]).shares == [13, 3]
    assert balance_of(Net(), "3,1", rank=1).weight == 4 / 8
    assert balance_of(Net(), None).weight == 1.0
    with pytest.raises(UserError, match="--balance 3,1: Net has BatchNorm, whose statistics"):
        balance_of(Net(batchnorm=True), "3,1")
    for normed in (True, False):  # as the record says it, for explain
        observed = observe(Net(batchnorm=normed), Settings("bert", strategy="single"), World())
        assert (observed["batchnorm_layers"] > 0) == normed


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--balance", "fast"], "--balance fast: expected measured, or a number above 0 for each"),
        (["--balance", "2,0.0"], "expected measured, or a number above 0"),
        (["--balance", "2,1,1"], "--balance 2,1,1: 2 ranks were started, and each needs a number"),
        (["--balance", "2,1", "--strategy", "diloco"], "does not go with --strategy diloco, but w"),
        (["--balance", "2,1", "--tail", "pad"], "does not go with --tail pad"),
        (["--balance", "2,1", "--auto_batch"], "does not go with --auto_batch or torchrun --max_r"),
    ],
)
def test_what_cannot_be_balanced_is_refused(argv: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse("bert", ["--tiny", *argv], RANK)
    assert parse("bert", ["--tiny", "--balance", "2.5,1"], RANK).balance == "2.5,1"
    alone = {**RANK, "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    with pytest.raises(UserError, match="--balance measured: one process has no other to share"):
        parse("bert", ["--tiny", "--strategy", "ddp", "--balance", "measured"], alone)


def test_speeds_are_measured_in_the_runs_number_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is told, whichever it is, and none is measured before it is ready."""
    formats: list[tuple[str, str]] = []
    ready: list[int] = []

    def autocast(settings: Settings, device: Any) -> Any:
        formats.append((settings.precision, device.type))
        return torch.autocast("cpu", torch.bfloat16)

    class Half(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            half = super().forward(x)
            assert half.dtype == torch.bfloat16
            return {"loss": half.sum()}

    monkeypatch.setattr(balance, "SECONDS", 0.0)
    monkeypatch.setattr(balance, "autocast", autocast)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: ready.append(len(formats)))
    args = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    context: Any = SimpleNamespace(settings=Settings(script="bert", precision="fp16"), args=args)
    assert balance._passes_per_s(context, Half(2, 2), {"x": torch.ones(1, 2)}) > 0
    assert formats == [("fp16", "cuda")] * 3 and ready == [1, 2, 3]


class Slow(Net):
    """The second rank takes three times as long for its passes, which is much beside what they
    compute: that makes the two more alike, the more so on a busy machine.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.3 if torch.distributed.get_rank() else 0.1)
        return super().forward(*args, **kwargs)


def measured(folder: str) -> tuple[list[int], list[list[int]]]:
    """The shares and what this rank was fed."""
    go_before_others()
    trainer, _ = ours(folder, net := Slow(), Points(64), Points(8), "--balance=measured")
    trainer.train()
    return trainer.observations.observed["shares"], net.fed


@pytest.mark.process
def test_a_rank_that_takes_three_times_as_long_gets_a_quarter(tmp_path: Path) -> None:
    (shares, fed), (same, others) = ranks(2, measured, str(tmp_path))
    assert shares == same == [6, 2]
    assert [len(step) for step in fed] == [6] * 8 and [len(step) for step in others] == [2] * 8
    assert sorted(chain(*fed, *others)) == list(range(64))

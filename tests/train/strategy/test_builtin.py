"""nn.DataParallel and FSDP behind the contract of an Exchange (trained: test_identities.py)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from harness.core.settings import UserError
from harness.train.strategy import exchange_of, sharding
from harness.train.strategy.base import Exchange
from harness.train.strategy.builtin import DataParallelExchange


def exchange(strategy: str = "dp", precision: str = "fp32") -> Exchange:
    settings = SimpleNamespace(strategy=strategy, precision=precision)
    args = SimpleNamespace(device=torch.device("cpu"))
    context: Any = SimpleNamespace(settings=settings, args=args)
    return exchange_of(context)


def test_a_model_is_wrapped_once() -> None:
    """The Trainer wraps it itself where there are several GPUs."""
    dp, model = exchange(), nn.Linear(2, 2)
    assert isinstance(dp, DataParallelExchange) and dp.payload_bytes is None
    wrapped = dp.wrap(model, model)
    assert isinstance(wrapped, nn.DataParallel) and wrapped.module is model
    assert dp.wrap(model, wrapped) is wrapped
    assert not model._forward_pre_hooks
    assert exchange("single").wrap(model, model) is model


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_forward_passes_are_in_the_precision_that_was_asked_for(
    precision: str, dtype: torch.dtype
) -> None:
    dp, model = exchange(precision=precision), nn.Linear(2, 2)
    before = torch.get_autocast_dtype("cpu")
    wrapped = dp.wrap(model, model)
    with dp.computing():
        torch.set_autocast_dtype("cpu", torch.float16)  # as in the thread of another GPU
        assert wrapped(torch.ones(1, 2)).dtype is (dtype if precision == "bf16" else torch.float32)
    torch.set_autocast_dtype("cpu", before)
    with exchange("single", precision).computing():
        assert not torch.is_autocast_enabled("cpu")


def test_layers_that_are_skipped_are_refused_before_the_model_is_sharded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr(sharding, "skips_layers", lambda model, batch: batch["skip"])
    monkeypatch.setattr(sharding, "shard", lambda *_: done.append("sharded"))
    model = nn.Linear(2, 2)
    with pytest.raises(UserError, match="--strategy fsdp: Linear skips layers at random"):
        exchange("fsdp").spread(model, lambda: {"skip": True})
    assert not done and exchange("fsdp").spread(model, lambda: {"skip": False})
    assert done == ["sharded"] and not exchange("single").spread(model, dict)


def test_who_saves_optimizer_and_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer, unless they are in shards, or each rank has its own, which save() keeps."""
    done: list[Any] = []
    for name in ("save_optimizer", "load_optimizer"):
        monkeypatch.setattr(sharding, name, lambda *args, name=name: done.append((name, *args)))
    single, trainer, folder = exchange("single"), object(), Path("there")
    for apart in (False, True):
        single.apart = apart
        assert single.save_optimizer(trainer, folder) is apart
        assert single.load_optimizer(trainer, folder) is apart
    assert not done and single.whole_weights(nn.Linear(2, 2)) is None
    fsdp = exchange("fsdp")
    assert fsdp.save_optimizer(trainer, folder) and fsdp.load_optimizer(trainer, folder)
    assert done == [("save_optimizer", trainer, folder), ("load_optimizer", trainer, folder)]

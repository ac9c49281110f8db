"""Weights are compared between ranks, and sent only where they differ."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DistributedDataParallelKwargs
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.parallel import distributed

from harness.core.records import RunFolder
from harness.core.topology import World
from harness.train.strategy.sharding import _in_memory_of_their_own
from harness.train.strategy.weights import arrange_ddp, checksum_of
from tests.support.ranks import ranks, script
from tests.support.toys import CPU

pytestmark = pytest.mark.process

SEND_ALL = distributed._sync_module_states


def wrapped(nodes: int, unlike: str) -> tuple[int, str]:
    """How often DDP sent all weights, and the weights that it starts with."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    model[0].requires_grad_(False)
    with torch.no_grad():
        if unlike == "one frozen weight" and rank == 1:
            model[0].weight[2, 3].nextafter_(torch.tensor(9.0))
        if unlike == "two that are exchanged" and rank == 1:
            model[2].bias[[0, 1]] = model[2].bias[[1, 0]]
    accelerator: Any = SimpleNamespace(ddp_handler=DistributedDataParallelKwargs(bucket_cap_mb=7))
    world = World(nodes, 2 // nodes, rank=rank, local_rank=rank % (2 // nodes), launched=True)
    arrange_ddp(accelerator, model, world)
    flags = accelerator.ddp_handler.to_kwargs()
    assert flags["gradient_as_bucket_view"] and flags["bucket_cap_mb"] == 7
    with mock.patch.object(distributed, "_sync_module_states", wraps=SEND_ALL) as sends:
        ddp = nn.parallel.DistributedDataParallel(model, **flags)
    return sends.call_count, checksum_of(ddp.module)


@pytest.mark.parametrize(("nodes", "unlike", "sent"), [
    (2, "", 0), (2, "one frozen weight", 1), (2, "two that are exchanged", 1), (1, "", 1),
])  # fmt: skip
def test_weights_are_sent_between_nodes_only_where_they_differ(
    nodes: int, unlike: str, sent: int
) -> None:
    (times, first), (other_times, other) = ranks(2, wrapped, nodes, unlike, env=CPU)
    assert times == other_times == sent and first == other


def test_shards_on_two_nodes_are_compared_with_nothing(tmp_path: Path) -> None:
    """fsdp has no DDP around the model, and no rank has all weights."""
    sizes = ["--tiny", "--train_size", "64", "--test_size", "32", "--epochs", "1", "--b", "16"]
    where = ["--setup", "2_1", "--strategy", "fsdp", "--o", str(tmp_path)]
    done = script("vit", *sizes, *where, count=2, env={"LOCAL_WORLD_SIZE": "1"})
    assert done.code == 0, done.err
    (folder,) = map(RunFolder, (tmp_path / "vit" / "2_1").iterdir())
    environment = folder.read_environment()
    assert folder.outcome() == "finished" and environment is not None
    assert environment["observed"]["strategy"] == "fsdp"


def test_tied_weights_are_written_twice_where_names_are(tmp_path: Path) -> None:
    tied = torch.arange(6.0)
    weights = _in_memory_of_their_own(
        {"a": tied, "b": tied, "part": tied[2:], "turned": tied.view(2, 3).T, "c": torch.ones(2)}
    )
    save_file(weights, tmp_path / "w.safetensors")
    read = load_file(tmp_path / "w.safetensors")
    assert torch.equal(read["a"], tied) and torch.equal(read["b"], tied) and weights["a"] is tied
    assert torch.equal(read["part"], tied[2:]) and torch.equal(read["turned"], tied.view(2, 3).T)

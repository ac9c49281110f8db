"""Local SGD and DiLoCo: what is refused and why, what is announced, what is checked at the end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.core.command_line import parse
from harness.core.settings import UserError
from harness.core.strategies import STRATEGIES
from harness.core.topology import World
from harness.train.strategy import exchange_of
from harness.train.strategy.diloco import Diloco
from harness.train.strategy.local_sgd import FlatWeights, LocalSgd, checksum
from tests.support.settings import launched

DILOCO, LOCAL = "--strategy diloco", "--strategy local_sgd"
REFUSED = {
    f"{DILOCO} --sync_every 0": ["--sync_every 0", "at least 1"],
    f"{LOCAL} --sync_every -3": ["--sync_every -3", "at least 1"],
    f"{LOCAL} --sync_scope gpu": ["--sync_scope gpu", "node, rank"],
    f"{DILOCO} --outer_lr 0": ["--outer_lr 0", "above 0"],
    f"{DILOCO} --outer_momentum 1": ["--outer_momentum 1", "below 1"],
    f"{DILOCO} --fragments 0": ["--fragments 0", "at least 1"],
    f"{DILOCO} --overlap -1": ["--overlap -1"],
    f"{DILOCO} --sync_every 10 --fragments 3": ["--fragments 3", "--sync_every 10", "divided"],
    f"{DILOCO} --sync_every 4 --overlap 4": ["--overlap 4", "below --sync_every 4"],
    f"{LOCAL} --outer_lr 0.5": ["--outer_lr does nothing", "local_sgd", "diloco"],
    f"{LOCAL} --outer_momentum 0": ["--outer_momentum does nothing", "local_sgd"],
    f"{LOCAL} --overlap 0": ["--overlap does nothing", "local_sgd"],
    f"{LOCAL} --sync_first -1": ["--sync_first -1"],
    "--sync_first 5": ["--sync_first does nothing", "ddp", "local_sgd, diloco"],
    "--sync_every 5": ["--sync_every does nothing", "ddp", "local_sgd, diloco"],
    f"{LOCAL} --compress fp16": ["--compress fp16", "local_sgd has none, bf16, int8, int4"],
    f"{DILOCO} --compress int8:2": ["--compress int8:2", "none, bf16, int8, int4"],
    f"{DILOCO} --fsdp_shard grads": ["--fsdp_shard grads", "--strategy fsdp", "diloco", "alone"],
    f"{LOCAL} --fsdp_offload": ["--fsdp_offload", "--strategy fsdp", "local_sgd", "alone"],
    f"{DILOCO} --batchnorm sync": ["--batchnorm sync", "diloco", "--batchnorm local"],
    f"{LOCAL} --elastic_batch scale": ["--elastic_batch scale", "local_sgd", "apart"],
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_be_is_refused_with_the_reason(flags: str) -> None:
    with pytest.raises(UserError) as refusal:
        parse("bert", flags.split(), launched(2, 2))
    line = str(refusal.value)
    assert "\n" not in line and all(word in line for word in REFUSED[flags]), line


@pytest.mark.parametrize("strategy", [s.name for s in STRATEGIES.values() if s.apart])
def test_nodes_that_come_and_go_are_refused(strategy: str) -> None:
    environ = {**launched(2, 1), "TORCHELASTIC_MAX_RESTARTS": "3"}
    argv = ["--strategy", strategy, "--setup", "2_1"]
    with pytest.raises(UserError, match=f"{strategy} does not go with --max_restarts"):
        parse("bert", argv, environ)


def test_a_momentum_of_nothing_is_not_the_default() -> None:
    parsed = parse("bert", [*DILOCO.split(), "--outer_momentum", "0"], launched(2, 1))
    assert parsed.outer_momentum == 0
    assert parse("bert", DILOCO.split(), launched(2, 1)).outer_momentum == 0.9


def exchange(
    *argv: str, size: int = 7, dtype: torch.dtype = torch.float32, world: World | None = None
) -> Any:
    """Of one process, or of the replicas that world has, with a model of so many weights."""
    settings = parse("bert", list(argv), launched(1, 1))
    run: Any = SimpleNamespace(
        settings=settings, world=world or World(), observed={}, is_rank0=True
    )
    replica = exchange_of(run)
    replica.model = torch.nn.Linear(size, 1, bias=False, dtype=dtype)
    replica.attach(replica.model, None)
    return replica


def test_a_run_that_would_never_train_apart_is_refused() -> None:
    replica = exchange(*LOCAL.split(), "--sync_first", "12")
    with pytest.raises(UserError, match=r"--sync_first 12: the run has 12 updates.*--strategy ddp"):
        replica.begin(12)
    replica.begin(13)


@pytest.mark.parametrize(("argv", "changes"), [(LOCAL, False), (DILOCO, True)])
def test_on_one_process_only_diloco_changes_weights_in_an_exchange(
    argv: str, changes: bool
) -> None:
    """A sweep says so of local_sgd: its runs repeat those of ddp."""
    replica = exchange(*argv.split(), "--sync_every", "1")
    with torch.no_grad():
        replica.model.weight.add_(0.3)
    trained = replica.model.weight.detach().clone()
    replica.after_update(1, last=False)
    assert torch.equal(replica.model.weight, trained) != changes


def test_few_updates_after_a_start_together_are_announced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    exchange(*LOCAL.split(), "--sync_first", "3").begin(12)
    assert "has 9 updates after --sync_first 3, and only the last" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [LOCAL.split(), [*DILOCO.split(), "--fragments", "2"]])
def test_a_run_without_its_exchanges_is_not_recorded_as_one(argv: list[str]) -> None:
    """Two pieces after 2, 4, ... 12 and the other one after 12: seven; or 4, 8 and 12: three."""
    for left_out, last in ((None, 12), (4, 12), (None, 11)):
        replica = exchange(*argv, "--sync_every", "4")
        replica.begin(12)
        for update in range(1, last + 1):
            if update != left_out:
                replica.after_update(update, last=update == 12)
        if (left_out, last) == (None, 12):
            replica.end()
            assert replica.observed["exchanges"] == (3 if argv == LOCAL.split() else 7)
            continue
        with pytest.raises(RuntimeError, match="refusing to record one as the other"):
            replica.end()


def test_a_run_that_is_too_short_to_exchange_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    replica = exchange(*LOCAL.split(), "--sync_every", "13")
    replica.begin(13)
    assert capsys.readouterr().err == ""
    replica.begin(12)
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "--sync_every 13" in line and "12 updates" in line


@pytest.mark.parametrize("strategy", ["local_sgd", "diloco"])
def test_the_processes_of_a_single_node_train_apart(strategy: str) -> None:
    scopes = [
        parse("bert", ["--strategy", strategy, *more], launched(*shape)).sync_scope
        for shape, more in (
            ((1, 2), ()),
            ((2, 2), ()),
            ((1, 2), ("--sync_scope", "node")),
            ((2, 2), ("--sync_scope", "rank")),
        )
    ]
    assert scopes == ["rank", "node", "node", "rank"]


@pytest.mark.parametrize("strategy", ["local_sgd", "diloco"])
def test_on_one_node_it_says_that_it_exchanges_as_ddp(
    strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = World(per_node=2)
    way = ["--strategy", strategy, "--sync_every", "20", "--sync_scope", "node"]
    replica = exchange(*way, world=pair)
    replica.begin(12)
    line = capsys.readouterr().err
    assert line == (
        f"warning: --strategy {strategy} on one node: gradients are exchanged at every update, as "
        "with ddp; with --sync_scope rank processes train apart\n"
    )
    replica.after_update(1, last=False)
    assert replica.payload_bytes == 7 * 4
    alone = exchange("--strategy", strategy)
    alone.begin(12)
    alone.after_update(1, last=False)
    assert capsys.readouterr().err == "" and alone.payload_bytes == 0


def test_memory_of_local_sgd_is_recorded() -> None:
    kinds = {LocalSgd: LOCAL.split(), Diloco: DILOCO.split()}
    for kind, argv in kinds.items():
        assert type(exchange(*argv)) is kind
    kept = {
        (): 4 * 4,  # the last exchange's weights, momentum, what is sent and what comes back
        ("--outer_momentum", "0"): 3 * 4,
        ("--fragments", "5"): 2 * 4 + 2 * 4 / 5,
        ("--fragments", "5", "--overlap", "3"): 2 * 4 + 4 * 4 / 5,  # two pieces on their way
    }
    for argv, bytes_each in kept.items():
        replica = exchange(*DILOCO.split(), "--sync_every", "10", *argv, size=100)
        assert replica.observed["kept_bytes"] == 100 * bytes_each
    assert exchange(*LOCAL.split(), size=100).observed["kept_bytes"] == 800


def test_memory_of_a_start_together_is_that_of_whole_gradients() -> None:
    """The anchor and a row of all gradients, or more: the momentum and two rows of a fragment."""
    argv = [*DILOCO.split(), "--sync_every", "20", "--fragments", "4", "--outer_momentum"]
    for momentum, first, bytes_each in (("0", "0", 6), ("0", "9", 8), ("0.9", "9", 10)):
        replica = exchange(*argv, momentum, "--sync_first", first, size=100)
        assert replica.observed["kept_bytes"] == 100 * bytes_each


def test_no_fragment_is_empty() -> None:
    """Neither coded nor plain: 5 weights are no 6 fragments."""
    for more in ([], ["--compress", "int4"]):
        flags = ["--strategy", "diloco", "--sync_every", "6", "--fragments", "6", *more]
        with pytest.raises(UserError, match="--fragments 6: 5 weights are trained: use at most 5"):
            exchange(*flags, size=5)


def test_weights_are_read_and_written_piece_by_piece() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1, bias=False))
    weights = FlatWeights(model.parameters(), 3)
    row = weights.row()
    assert row.tolist() == torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    assert [weights.row(fragment).numel() for fragment in weights.fragments] == [6, 7, 7]
    changed = torch.arange(20.0)
    for number in (2, 0, 1):
        weights.put(changed[weights.fragments[number]], weights.fragments[number])
    assert weights.row().tolist() == changed.tolist()
    assert row.tolist() != changed.tolist()  # a copy
    assert checksum(row) == checksum(row.clone()) != checksum(changed)
    row[3] = -row[3]
    assert checksum(row) != checksum(weights.row())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outer_weights_stay_exact_where_the_model_is_coarse(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Resumed from weights that are rounded, the next outer step must be the same."""
    argv = [*DILOCO.split(), "--sync_every", "4", "--fragments", "2"]
    replica = exchange(*argv, size=50, dtype=dtype)

    def go_on(one: Any, first: int, last: int) -> list[float]:
        for update in range(first, last + 1):
            with torch.no_grad():
                one.model.weight += 0.01 * update
            one.after_update(update, last=False)
        return [*one.anchor.tolist(), *one.weights.row().tolist()]

    go_on(replica, 1, 5)
    replica.save(tmp_path)
    other = exchange(*argv, size=50, dtype=dtype)
    with replica.shared(), torch.no_grad():
        other.model.weight.copy_(replica.model.weight)  # what a checkpoint holds of the model
    other.attach(other.model, None)
    other.load(tmp_path)
    assert go_on(other, 6, 11) == go_on(replica, 6, 11)

"""Direct sends: the same sums as gloo's all-reduce, in fewer latencies and no more bytes."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout
from transformers import TrainerCallback

from harness.core.command_line import parse
from harness.core.records import read_json
from harness.core.settings import Settings, UserError
from harness.train.devices import refuse_impossible
from harness.train.strategy.direct_allreduce import DirectAllreduce, Plain
from harness.train.strategy.verify import observe_hook
from tests.support import toys
from tests.support.broken_runs import assert_same_weights, broken_off, only_run
from tests.support.exchanges import SHAPES, Arm, drawn, flat, group
from tests.support.ranks import ranks, script
from tests.support.replicas import BY_RANK, SGD, arms
from tests.support.settings import launched
from tests.support.sweeps import untimed_rows, wait_for

SIZES = (0, 1, 2, 3, 7, 1001)  # also fewer numbers than ranks


def rows_of(size: int, draw: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of each rank one, over many orders of magnitude."""
    results = []
    for rank in range(dist.get_world_size()):
        generator = torch.Generator().manual_seed(1000 * draw + rank)
        scale = 10.0 ** torch.randint(-6, 3, (size,), generator=generator)
        results.append((torch.randn(size, generator=generator) * scale).to(dtype))
    return results


def closed_form(
    rows: list[torch.Tensor], sent_as: torch.dtype | None, one_delay: bool = False
) -> torch.Tensor:
    """The mean, added up in the order of the ranks, in fp32 at least."""
    dtype = rows[0].dtype
    sent = [(row * (1 / len(rows))).to(sent_as or dtype) for row in rows]
    total = sent[0].to(torch.promote_types(dtype, torch.float32))
    for row in sent[1:]:
        total = total + row
    sums = len(rows) > 2 and not one_delay  # two send no sums back
    back = total.to(sent_as) if sent_as and sums else total
    return back.to(dtype)


def means() -> int:
    """Several in flight at once, of all sizes and formats, with the next receives posted early."""
    rank, checked = group(), 0
    for dtype, sent_as, one_delay in (
        (torch.float32, None, False), (torch.float64, None, False), (torch.bfloat16, None, False),
        (torch.float32, torch.bfloat16, False), (torch.float32, torch.float16, False),
        (torch.float32, None, True), (torch.float32, torch.bfloat16, True),
    ):  # fmt: skip
        form = Plain(dist.get_world_size(), sent_as)
        direct = DirectAllreduce(dist.new_group(), form, one_delay)
        for time_ in range(3):
            inputs = [rows_of(size, 10 * time_ + n, dtype) for n, size in enumerate(SIZES)]
            mine = [rows[rank].clone() for rows in inputs]
            finish = [direct.begin(row, slot, time_ < 2) for slot, row in enumerate(mine)]
            for slot in (3, 1, 5, 0, 2, 4):
                finish[slot]()
            for row, rows in zip(mine, inputs, strict=True):
                true = closed_form(rows, sent_as, one_delay)
                assert torch.equal(row, true), (dtype, sent_as, len(row))
                checked += 1
    return checked


@pytest.mark.process
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_mean_is_the_closed_form_to_the_bit(count: int) -> None:
    assert ranks(count, means, env={"RANK": "0", **ALONE} if count == 1 else None) == [126] * count


ALONE = {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def gradients(step: int, rank: int) -> list[torch.Tensor]:
    """Some are so small that a half of them is not exact, some the largest there are."""
    results = drawn(step, rank)
    results[0][0, :4] = torch.tensor([1e-45, 3e-45, -1.2e-38, 3.4e38])
    return results


def steps_of(compress: str, exchange: str, small: bool) -> tuple[np.ndarray, int]:
    """What comes of six updates, the fourth of two accumulated passes; and bytes handed over."""
    rank, arm, results = group(), Arm(compress, exchange=exchange, small=small), []
    for step in range(6):
        if step == 3:
            with arm.ddp.no_sync():
                arm.ddp(gradients(30, rank)).backward()
            arm.ddp(gradients(31, rank)).backward()
            results.append(flat([p.grad for p in arm.model.parameters()]))  # type: ignore[misc]
        else:
            results.append(flat(arm.step(gradients(step, rank))))
    return np.stack(results), arm.exchange.payload_bytes


def both_ways() -> list[tuple[bytes, bytes, int, int]]:
    results = []
    for small in (False, True):
        ours, theirs = (steps_of("none", way, small) for way in ("direct", "backend"))
        results.append((ours[0].tobytes(), theirs[0].tobytes(), ours[1], theirs[1]))
    return results


@pytest.mark.process
def test_of_two_ranks_gradients_are_those_of_ddp_to_the_bit() -> None:
    """In one bucket and in several, which DDP puts together anew after the first update."""
    for of_rank in ranks(2, both_ways):
        for ours, theirs, sent, sent_there in of_rank:
            assert ours == theirs and sent == sent_there


def summed(ways: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
    """What comes, and the closed form, which does not know of buckets."""
    rank, results = group(), []
    numbers = sum(int(np.prod(shape)) for shape in SHAPES)
    for compress in ways:
        arm = Arm(compress, exchange="direct", small=True)
        sent_as = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}[compress]
        for step in range(4):
            inputs = [drawn(step, r) for r in range(dist.get_world_size())]
            came = arm.step([g.clone() for g in inputs[rank]])
            rows = [[g.flatten() for g in of] for of in zip(*inputs, strict=True)]
            results.append((flat(came), flat([closed_form(of, sent_as) for of in rows])))
        assert arm.exchange.payload_bytes == 4 * numbers * (2 if sent_as else 4)
    return results


@pytest.mark.process
@pytest.mark.parametrize(
    ("count", "ways"), [(2, ["bf16", "fp16"]), (3, ["none", "fp16"]), (4, ["none", "bf16"])]
)
def test_gradients_are_the_closed_form_to_the_bit(count: int, ways: list[str]) -> None:
    for of_rank in ranks(count, summed, ways):
        for came, true in of_rank:
            assert np.array_equal(came, true)


def summed_by_nodes(ways: list[tuple[str, str]], nodes: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """What comes, and the closed form: the mean over nodes of the mean of each."""
    rank, size, results = group(), dist.get_world_size(), []
    inside = size // nodes
    for compress, way in ways:
        arm = Arm(compress, exchange=way, small=True, nodes=nodes)
        assert observe_hook(arm.ddp, arm.run.settings, way, arm.run.world)  # it may be recorded
        sent_as = {"none": None, "bf16": torch.bfloat16}[compress]
        for step in range(4):
            inputs = [drawn(step, r) for r in range(size)]
            came = arm.step([g.clone() for g in inputs[rank]])
            rows = [[g.flatten() for g in of] for of in zip(*inputs, strict=True)]
            of_nodes = [
                [closed_form(row[first : first + inside], None) for first in range(0, size, inside)]
                for row in rows
            ]
            true = [closed_form(of, sent_as, way == "all_to_all") for of in of_nodes]
            results.append((flat(came), flat(true)))
    return results


@pytest.mark.process
@pytest.mark.parametrize(("count", "nodes"), [(4, 2), pytest.param(6, 3, marks=pytest.mark.slow)])
def test_ranks_of_a_node_are_added_up_before_one_of_them_sends(count: int, nodes: int) -> None:
    ways = [("none", "direct"), ("bf16", "direct"), ("none", "all_to_all")]
    for of_rank in ranks(count, summed_by_nodes, ways, nodes):
        for came, true in of_rank:
            assert np.array_equal(came, true)


class Counts(TrainerCallback):
    """Collectives of this process by the end of each update, and messages sent directly."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.messages = 0
        send = dist.isend

        def noting(*args: Any, **more: Any) -> Any:
            self.messages += 1
            return send(*args, **more)

        dist.isend = noting  # type: ignore[assignment]

    def on_step_end(self, *args: Any, **more: Any) -> None:
        world: Any = dist.group.WORLD
        collectives = world._get_backend(torch.device("cpu"))._get_sequence_number_for_group()
        self.seen.append((collectives, self.messages))

    def by_step(self) -> list[tuple[int, ...]]:
        return [tuple(np.subtract(*pair)) for pair in zip(self.seen[1:], self.seen, strict=False)]


def counted(folder: str, commands: list[list[str]]) -> list[list[tuple[int, ...]]]:
    results = []
    for argv in commands:
        counts = Counts()
        net, data = toys.Net(dropout=0.1), toys.Points(64)
        _, run = toys.trained(folder, net, data, toys.Points(8), *argv, callbacks=[counts])
        assert run.context.args.max_grad_norm > 0
        results.append(counts.by_step())
    return results


@pytest.mark.process
def test_a_step_exchanges_its_gradients_and_nothing_else(tmp_path: Path) -> None:
    """No gathering of sample counts, no buffers, no search for unused parameters, no norm. A bucket
    is enough for this model; DDP agrees once, before the second step, what is in it, by two
    collectives. What is sent directly counts as two: a message sent and one awaited, which from the
    second step on is posted ahead.
    """
    ways = [(way, passes) for way in ("backend", "direct") for passes in (1, 2)]
    commands = [[f"--exchange={way}", f"--grad_acc={passes}"] for way, passes in ways]
    for results in ranks(2, counted, str(tmp_path), commands):
        for (way, passes), steps in zip(ways, results, strict=True):
            assert len(steps) == 8 // passes - 1
            each, first = ((1, 0), 2) if way == "backend" else ((2, 1), 2 + 1)
            assert steps[0] == (each[0] + first, each[1])
            assert set(steps[1:]) == {each}


def messages_between(nodes: int) -> list[int]:
    """The ranks to which this one sends in an update, one for each message."""
    rank, arm = group(), Arm("none", exchange="direct", nodes=nodes)
    for step in range(2):  # DDP puts its buckets together anew
        arm.step(drawn(step, rank))
    receivers: list[int] = []
    send = dist.isend

    def noting(*args: Any, group: Any, group_dst: int, **more: Any) -> Any:
        receivers.append(dist.get_global_rank(group, group_dst))
        return send(*args, group=group, group_dst=group_dst, **more)

    dist.isend = noting
    arm.step(drawn(2, rank))
    dist.isend = send
    return receivers


@pytest.mark.process
def test_only_one_rank_of_a_node_sends_to_other_nodes() -> None:
    assert ranks(4, messages_between, 2) == [[2, 1], [0], [0, 3], [2]]


def left_alone(folder: str, how: str) -> str:
    """The error of a rank whose peer does not take part in the third update, and stays as long."""
    told = Path(folder, "told")
    rank, arm = group(), Arm("none", exchange="direct", small=True)
    for step in range(2):
        arm.step(drawn(step, rank))
    _set_pg_timeout(timedelta(seconds=1 if how == "silent" else 60))
    if rank == 1:
        if how == "gone":
            del arm
            dist.destroy_process_group()  # closes its connections, as the end of a process does
        wait_for(told.exists)
        return ""
    with pytest.raises(RuntimeError) as error:
        arm.step(drawn(2, rank))
    told.touch()
    return str(error.value)


@pytest.mark.process
@pytest.mark.parametrize(("how", "flags"), [("silent", "imed out|timeout"), ("gone", "by peer")])
def test_a_peer_that_is_silent_or_gone_ends_the_step(how: str, flags: str, tmp_path: Path) -> None:
    message, _ = ranks(2, left_alone, str(tmp_path), how)
    assert re.search(flags, message), message


SAME = ("epoch", "updates", "samples", "train_loss", "grad_norm", "eval_loss", "accuracy",
        "payload_bytes")  # fmt: skip


@pytest.mark.process
def test_a_broken_off_run_goes_on_and_is_that_of_the_backend(tmp_path: Path) -> None:
    argv = ["--tiny", "--train_size", "128", "--test_size", "65", "--epochs", "2", "--b", "16"]
    argv += ["--full_determinism", "--save_steps", "5", "--max_grad_norm", "0.5"]
    direct = [*argv, "--exchange", "direct"]
    broken_off(2, [*direct, "--o", str(tmp_path / "broken")], 6, "kill", "vit")
    for out, flags in (("broken", direct), ("whole", argv)):
        done = script("vit", *flags, "--o", str(tmp_path / out), count=2)
        assert done.code == 0, done.err
    folder, whole = only_run(tmp_path / "broken"), only_run(tmp_path / "whole")
    assert folder.path.name != whole.path.name and "_ddp-direct_" in folder.path.name
    for row, expected in zip(untimed_rows(folder), untimed_rows(whole), strict=True):
        assert {name: row[name] for name in SAME} == {name: expected[name] for name in SAME}
    assert_same_weights(folder, whole)
    observed = (read_json(folder.environment) or {})["observed"]
    assert observed["gradient_hook"] == "DirectGradients.hook"


@pytest.mark.process
def test_two_nodes_of_two_train_as_by_the_backend(tmp_path: Path) -> None:
    """Sums are made in another order."""
    commands = [[*SGD, f"--exchange={way}"] for way in ("backend", "direct", "all_to_all")]
    env = {"LOCAL_WORLD_SIZE": "2"}
    for theirs, *ours in ranks(4, arms, str(tmp_path), commands, env=env):
        assert theirs["observed"]["gradient_hook"] is None
        for one, how in zip(ours, ("", " by all_to_all"), strict=True):
            expected = f"DirectGradients.hook{how} between nodes"
            assert one["observed"]["gradient_hook"] == expected
            assert toys.apart(one["weights"], theirs["weights"]) <= 1e-6
            assert one["bytes"] == theirs["bytes"] > 0


REPLICAS = {
    "local_sgd": ["--strategy", "local_sgd", "--sync_every", "7"],
    "diloco": ["--strategy", "diloco", "--sync_every=6", "--fragments=3", "--overlap=5"],
}


@pytest.mark.process
@pytest.mark.parametrize(
    ("count", "tolerance"), [(2, 0.0), pytest.param(3, 1e-6, marks=pytest.mark.slow)]
)
def test_replicas_exchange_the_same(count: int, tolerance: float, tmp_path: Path) -> None:
    commands = [[*SGD, *way, *BY_RANK] for way in REPLICAS.values()]
    commands = [[*argv, f"--exchange={way}"] for argv in commands for way in ("backend", "direct")]
    for results in ranks(count, arms, str(tmp_path), commands):
        for theirs, ours in zip(results[::2], results[1::2], strict=True):
            assert toys.apart(ours["weights"], theirs["weights"]) <= tolerance
            assert toys.apart(ours["evaluated"], theirs["evaluated"]) <= tolerance
            assert ours["bytes"] == theirs["bytes"] > 0
            ways = ours["observed"].pop("exchange"), theirs["observed"].pop("exchange")
            assert ours["observed"] == theirs["observed"] and ways == ("direct", "backend")


REFUSED = {
    "--strategy fsdp": "--exchange direct does not go with --strategy fsdp, but with ddp, local_",
    "--strategy hivemind": "--exchange direct does not go with --strategy hivemind",
    "--compress powersgd:2": "--exchange direct does not go with --compress powersgd",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_direct_sends_cannot_do_is_refused(flags: str) -> None:
    with pytest.raises(UserError) as refusal:
        parse("bert", [*flags.split(), "--exchange", "direct"], launched(2, 1))
    assert REFUSED[flags] in str(refusal.value) and "\n" not in str(refusal.value)


def test_direct_exchange_needs_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = Settings(script="bert", exchange="direct")
    with pytest.raises(UserError, match=r"--exchange direct is for gloo.*--use_cpu"):
        refuse_impossible(commands, cuda=True)
    refuse_impossible(
        Settings(script="bert", exchange="direct", trainer=(("use_cpu", True),)), True
    )
    refuse_impossible(commands, cuda=False)
    monkeypatch.setattr(dist, "get_backend", lambda group: "mpi")
    with pytest.raises(UserError, match="this run has mpi"):
        DirectAllreduce(None)

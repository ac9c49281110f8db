"""PowerSGD: exact where it can be, honest about what it owes, and the same after a break."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.nn.parallel import DistributedDataParallel

from harness.core.records import COMPLETE, read_json, read_rows
from harness.core.settings import UserError
from harness.train.manifest import write_manifest
from harness.train.strategy.compress import PowerSGD, _mean_state, memory_file
from tests.support.broken_runs import alone, assert_same_training, broken_off, only_run
from tests.support.exchanges import SHAPES, Arm, Given, drawn, exact, flat, group
from tests.support.manifests import facts_of
from tests.support.ranks import ranks, script
from tests.support.sweeps import untimed_rows
from tests.support.toys import Net, Points, apart, ours


def low_rank(step: int, rank: int) -> list[torch.Tensor]:
    """Matrices whose mean over the ranks has rank 1: all have the same columns but for a factor,
    which is positive, so that the factors of one step are a good start for the next.
    """
    one = torch.Generator().manual_seed(step)
    mine = torch.Generator().manual_seed(1000 * step + rank)
    return [
        torch.outer(torch.randn(s[0], generator=one), torch.rand(s[1], generator=mine))
        if len(s) == 2
        else torch.randn(s, generator=mine)
        for s in SHAPES
    ]


def of_low_rank() -> list[tuple[np.ndarray, np.ndarray]]:
    """Two whole updates, a gradient of zero, and five compressed ones that are not."""
    before = torch.get_rng_state()
    rank, arm, results = group(), Arm("powersgd", small=True), []
    for step in range(8):
        of = [low_rank(step, r) for r in range(dist.get_world_size())]
        if step == 2:
            of = [[torch.zeros_like(g) for g in gradients] for gradients in of]
        true = [torch.stack(g).mean(0) for g in zip(*of, strict=True)]
        results.append((flat(arm.step(of[rank])), flat(true)))
    assert torch.equal(torch.get_rng_state(), before)  # the training's random numbers
    return results


@pytest.mark.process
def test_rank_one_loses_nothing_of_rank_one_gradients() -> None:
    """Nor after a gradient of zero, which leaves factors of zero behind."""
    for of_rank in ranks(2, of_low_rank):
        largest = max(np.abs(true).max() for _, true in of_rank)
        for came, true in of_rank:
            assert apart(came, true) < 1e-5 * largest


def of_full_rank() -> float:
    """The largest error of any value, relative to the largest of its parameter."""
    rank, shapes = group(), [(6, 2), (2, 6), (7, 5), (9,)]
    model = Given(shapes)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0001)
    powersgd = PowerSGD(model, rank=6, least_rate=0)
    ddp.register_comm_hook(powersgd.state, powersgd.hook)
    worst = 0.0
    for step in range(5):
        ddp.zero_grad()
        ddp(drawn(step, rank, shapes)).backward()
        for p, true in zip(model.parameters(), exact(step, shapes), strict=True):
            assert p.grad is not None
            worst = max(worst, float((p.grad - true).abs().max() / true.abs().max()))
    assert len(powersgd.factor_shapes) == len(shapes)
    return worst


@pytest.mark.process
def test_full_rank_is_the_exact_mean() -> None:
    assert max(ranks(3, of_full_rank)) < 2e-5


def with_feedback() -> dict[str, Any]:
    """Of one matrix, the same gradient at every step: the sum of what was sent."""
    rank, shapes, steps = group(), [(40, 30)], 60
    gradient = [drawn(3, r, shapes) for r in range(dist.get_world_size())]
    true = torch.stack([g[0] for g in gradient]).double().mean(0)
    arm = Arm("powersgd:2", shapes)
    for _ in range(2):
        arm.step(gradient[rank])
    sent = torch.zeros(shapes[0], dtype=torch.float64)
    for _ in range(steps):
        sent += arm.step(gradient[rank])[0]
    owed = arm.exchange.memory.state_dict()["owed own.0"].double().view(shapes[0])
    dist.all_reduce(owed)
    values = torch.linalg.svdvals(true)
    return {
        "size": float(true.norm()),
        "kept back": float((sent + owed / dist.get_world_size() - steps * true).norm()),
        "mean": float((sent / steps - true).norm()),
        "without": float(values[2:].norm()),  # the best that rank 2 can do in one step
    }


@pytest.mark.process
def test_what_was_not_sent_is_sent_later() -> None:
    results = ranks(2, with_feedback)[0]
    # Sent and still owed are together all that there was.
    assert results["kept back"] < 1e-3 * results["size"]
    assert results["without"] > 0.7 * results["size"]
    assert results["mean"] < 0.25 * results["without"]


def in_other_buckets(folder: str) -> bool:
    """In many buckets, gone on with from a file after four updates, and in one without a break."""
    rank, whole, first = group(), Arm("powersgd:2"), Arm("powersgd:2", small=True)
    for step in range(4):
        if not all(map(torch.equal, whole.step(drawn(step, rank)), first.step(drawn(step, rank)))):
            return False
    first.exchange.save(Path(folder))
    dist.barrier()
    second = Arm("powersgd:2", small=True)
    second.exchange.load(Path(folder))
    for step in range(4, 8):  # DDP makes new buckets after the first of them
        if not all(map(torch.equal, whole.step(drawn(step, rank)), second.step(drawn(step, rank)))):
            return False
    assert len(second.exchange.memory.buckets) > 1 == len(whole.exchange.memory.buckets)
    one, other = whole.exchange.memory.state_dict(), second.exchange.memory.state_dict()
    assert one.keys() == other.keys()
    return all(torch.equal(one[name].flatten(), other[name].flatten()) for name in one)


@pytest.mark.process
def test_its_memory_does_not_depend_on_buckets_and_outlives_a_process(tmp_path: Path) -> None:
    assert ranks(2, in_other_buckets, str(tmp_path)) == [True, True]
    assert {p.name for p in tmp_path.iterdir()} == {
        memory_file("powersgd", 0),
        memory_file("powersgd", 1),
    }


@pytest.mark.process
def test_a_run_with_powersgd_that_is_broken_off_goes_on_exactly(tmp_path: Path) -> None:
    """Killed inside its second epoch, behind a checkpoint inside it; the bytes are those of a run
    that was not, in every row.
    """
    argv = ["--tiny", "--train_size", "128", "--test_size", "65", "--epochs", "2", "--b", "16"]
    argv += ["--full_determinism", "--compress", "powersgd:2", "--save_steps", "5"]
    broken_off(2, [*argv, "--o", str(tmp_path / "broken")], 6, "kill", "vit")
    for out in ("broken", "whole"):
        done = script("vit", *argv, "--o", str(tmp_path / out), count=2)
        assert done.code == 0, done.err
    folder, whole = only_run(tmp_path / "broken"), only_run(tmp_path / "whole")
    assert [r["from_update"] for r in read_rows(folder.attempts)[0] if "processes" in r] == [0, 5]
    assert_same_training(folder, whole)
    assert all(row["payload_bytes"] > 0 for row in untimed_rows(whole))
    for rank in (0, 1):
        of_rank = [
            [r["payload_bytes"] for r in read_rows(f.rank(rank))[0]] for f in (folder, whole)
        ]
        assert of_rank[0] == of_rank[1]
    observed = (read_json(folder.environment) or {})["observed"]
    assert observed["gradient_hook"] == "PowerSGD.hook of rank 2"


def test_what_was_owed_is_mean_state_when_processes_come_or_go(tmp_path: Path) -> None:
    write_manifest(tmp_path / COMPLETE, facts_of(processes=3))
    owed = {rank: torch.randn(5, generator=torch.Generator().manual_seed(rank)) for rank in (0, 2)}
    for rank, value in owed.items():  # what rank 1 had is lost with its disk
        content = {"updates": torch.tensor(9), "owed w": value, "right w": torch.ones(2, 1)}
        save_file(content, tmp_path / memory_file("powersgd", rank))
    results = _mean_state(tmp_path, "powersgd")
    assert torch.allclose(results["owed w"], (owed[0] + owed[2]) / 3)
    assert int(results["updates"]) == 9 and torch.equal(results["right w"], torch.ones(2, 1))


def of_lost_memory(folder: str) -> dict[str, Any]:
    """Files of another number of processes, and one file too few."""
    rank, file = group(), Path(folder) / memory_file("powersgd", group())
    first = Arm("powersgd")
    for step in range(4):
        first.step(drawn(step, rank))
    first.exchange.save(Path(folder))
    dist.barrier()
    everyone = [load_file(Path(folder) / memory_file("powersgd", r)) for r in range(2)]
    joined = Arm("powersgd", elastic=True, other_processes=True)
    joined.exchange.load(Path(folder))
    content = joined.exchange.memory.state_dict()
    owed = [name for name in content if name.startswith("owed ")]
    means = {name: (everyone[0][name] + everyone[1][name]) / 2 for name in owed}
    mean = all(torch.equal(content[n].flatten(), means[n].flatten()) for n in owed) and bool(owed)
    dist.barrier()
    if rank == 1:
        file.unlink()
    dist.barrier()
    try:
        Arm("powersgd").exchange.load(Path(folder))
    except UserError as error:
        return {"mean": mean, "refusal": str(error)}
    return {}


@pytest.mark.process
def test_a_memory_that_is_lost_is_never_taken_for_none(tmp_path: Path) -> None:
    write_manifest(tmp_path / COMPLETE, facts_of(processes=2))
    for results in ranks(2, of_lost_memory, str(tmp_path)):
        assert results["mean"]
        refusal = results["refusal"]
        assert "lacks powersgd_1.safetensors" in refusal and "--rerun" in refusal


def accumulated(folder: str) -> tuple[Any, Any]:
    trainer, run = ours(
        folder, Net(), Points(128), Points(8), "--compress=powersgd", "--grad_acc=4",
        "--strategy=ddp", "--precision=bf16",
    )  # fmt: skip
    with run:
        run.train(trainer)
    return read_rows(run.context.folder.epochs)[0], trainer.observations.observed


@pytest.mark.process
def test_it_goes_with_accumulation_mixed_precision_and_one_process(tmp_path: Path) -> None:
    """Exchanged once an update. Net's 16 x 8 and 3 x 16 are worth it at rank 1, its biases not."""
    env = {**alone(), "TORCHELASTIC_MAX_RESTARTS": "0"}
    for count, variables in ((1, env), (2, {})):
        (row,), observed = ranks(count, accumulated, str(tmp_path / str(count)), env=variables)[0]
        updates = 128 // (4 * 4 * count)
        whole, small = 4 * (16 * 8 + 16 + 3 * 16 + 3), 4 * (16 + 8 + 16 + 3 + 16 + 3)
        assert row["updates"] == updates
        by_two = 2 * (2 * whole + (updates - 2) * small)
        assert row["payload_bytes"] == (by_two if count == 2 else 0)  # alone, it sends nothing
        assert observed["gradient_hook"] == "PowerSGD.hook of rank 1"
        assert (observed["strategy"], observed["dtype"]) == ("ddp", "bfloat16")


def of_a_number() -> str:
    group()
    try:
        Arm("powersgd", [(4, 4), ()])
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.process
def test_a_parameter_that_is_one_number_is_refused() -> None:
    assert "own.1 of this model is a single number" in ranks(2, of_a_number)[0]

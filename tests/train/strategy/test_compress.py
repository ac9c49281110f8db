"""Compressed gradients: what they may differ by from the exact mean, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from harness.core.records import read_json
from harness.train.run.failures import Diverged
from harness.train.strategy.verify import observe_hook
from tests.support.exchanges import SHAPES, Arm, drawn, exact, flat, group
from tests.support.ranks import ranks
from tests.support.toys import Net, Points, apart, ours, weights

pytestmark = pytest.mark.process

BF16, FP16 = 2.0**-8, 2.0**-11  # half a unit of the last place


def one_step(kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(what came, what is exact, mean size of what was averaged)."""
    rank = group()
    came = Arm(kind, small=True).step(drawn(7, rank))
    sizes = [[g.abs() for g in drawn(7, r)] for r in range(dist.get_world_size())]
    size = [torch.stack(of).double().mean(0) for of in zip(*sizes, strict=True)]
    return flat(came), flat(exact(7)), flat(size)


@pytest.mark.parametrize(("kind", "unit"), [("bf16", BF16), ("fp16", FP16)])
@pytest.mark.parametrize("count", [2, 3])
def test_half_precision_rounds_and_does_nothing_else(kind: str, unit: float, count: int) -> None:
    """Each value is rounded when it is cast, when it is divided by the ranks (by 3, not by 2), and
    at each of the count - 1 additions; below 2^-14 fp16 has steps of 2^-24.
    """
    everyone = ranks(count, one_step, kind)
    roundings = count + (count == 3)
    for came, true, size in everyone:
        steps = roundings * 2.0**-25 if kind == "fp16" else 0.0
        bound = size * ((1 + unit) ** roundings - 1) + steps
        assert (np.abs(came - true) <= bound * (1 + 1e-6)).all()
        assert np.abs(came - true).max() > bound.max() / 6  # it was rounded, and so coarsely
        assert np.array_equal(came, everyone[0][0])


def twenty_steps(folder: str) -> tuple[np.ndarray, np.ndarray]:
    """Weights by ExactTrainer with --strategy ddp, and by torch's DDP and SGD in a bare loop."""
    flags = ("--strategy=ddp", "--optim=sgd", "--lr_scheduler_type=constant", "--max_grad_norm=0")
    data = Points(160)
    trainer, run = ours(folder, Net(), data, Points(8), *flags, "--per_gpu_batch=4", "--lr=0.1")
    with run:
        run.train(trainer)
        model = Net()
        bare = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert len(trainer.model.fed) == 20
        for numbers in trainer.model.fed:
            optimizer.zero_grad()
            bare(data.x[numbers], data.labels[numbers], torch.tensor(numbers))["loss"].backward()
            optimizer.step()
        assert apart(weights(model), weights(Net())) > 0.01
        return weights(trainer.model), weights(model)


def test_without_compression_it_is_plain_ddp_to_the_bit(tmp_path: Path) -> None:
    for trained, bare in ranks(2, twenty_steps, str(tmp_path)):
        assert np.array_equal(trained, bare)


def overflowing(folder: str) -> tuple[str, Any]:
    """A gradient that fp16 cannot hold; in fp32 it would be clipped, and nothing be wrong."""

    class Steep(Net):
        def forward(self, **inputs: Any) -> Any:
            results = super().forward(**inputs)
            return {**results, "loss": results["loss"] * 1e7}

    trainer, run = ours(folder, Steep(), Points(16), Points(8), "--compress=fp16")
    try:
        with run:
            run.train(trainer)
    except Diverged as error:
        return str(error), read_json(run.context.folder.summary) if run.context.is_rank0 else None
    return "", None


def test_a_gradient_that_fp16_cannot_hold_is_a_result(tmp_path: Path) -> None:
    (message, summary), _ = ranks(2, overflowing, str(tmp_path))
    assert "--compress fp16 carries no gradient above 65504: bf16 does" in message
    assert summary["outcome"] == "diverged" and message in summary["reason"]


def counted(kinds: list[str]) -> dict[str, tuple[list[int], list[int]]]:
    """Of each: bytes of six updates by the exchange's own count, and those given to all_reduce."""
    rank, seen, results = group(), [0], {}
    reduce: Callable[..., Any] = dist.all_reduce

    def noting(tensor: torch.Tensor, *args: Any, **more: Any) -> Any:
        seen[0] += tensor.numel() * tensor.element_size()
        return reduce(tensor, *args, **more)

    dist.all_reduce = noting  # type: ignore[assignment]
    for kind in kinds:
        arm, own_count, reduced = Arm(kind, small=True), [], []
        for step in range(6):
            count_before, seen_before = arm.exchange.payload_bytes, seen[0]
            arm.step(drawn(step, rank))
            own_count.append(arm.exchange.payload_bytes - count_before)
            reduced.append(seen[0] - seen_before)
        results[kind] = (own_count, reduced)
    return results


def test_bytes_of_an_update_are_those_of_theory_and_those_that_are_reduced() -> None:
    numbers = sum(int(np.prod(shape)) for shape in SHAPES)
    sides = (40 + 30) + (24 + 40) + (40 + 30)
    rest = 30 + 3 * 5  # a vector, and a matrix too small to be worth it
    theory = {
        "none": 4 * numbers,
        "bf16": 2 * numbers,
        "fp16": 2 * numbers,
        "powersgd": 4 * (sides + rest),
        "powersgd:3": 4 * (3 * sides + rest),
    }
    for results in ranks(2, counted, list(theory)):
        for kind, each in theory.items():
            own_count, reduced = results[kind]
            first = 4 * numbers if "powersgd" in kind else each  # PowerSGD begins with whole ones
            assert own_count == [first] * 2 + [each] * 4, kind
            # DDP's own exchange does not pass by here: the interface is read in test_traffic.py.
            assert reduced == (own_count if kind != "none" else [0] * 6), kind


HOOKED = ("none backend", "bf16 backend", "fp16 backend", "powersgd:2 backend", "none direct",
          "bf16 direct", "fp16 direct", "int8 backend", "int8 direct", "int4 direct",
          "none all_to_all")  # fmt: skip


def accepted_claims() -> list[str]:
    """Each hook recorded as each of the others."""
    group()
    accepted = []
    for registered in HOOKED:
        kind, way = registered.split()
        arm = Arm(kind, exchange=way)
        for claimed in (*HOOKED, "powersgd backend"):
            kind, way = claimed.split()
            settings: Any = SimpleNamespace(strategy="ddp", compress=kind)
            try:
                observe_hook(arm.ddp, settings, way, arm.run.world)
                accepted.append(f"{registered} is {claimed}")
            except RuntimeError as error:
                more = f" --exchange {way}" if way != "backend" else ""
                if f"asked for --compress {kind}{more}, but DDP exchanges" not in str(error):
                    raise
    return accepted


def test_one_hook_is_not_recorded_as_another() -> None:
    (accepted,) = set(map(tuple, ranks(2, accepted_claims)))
    assert accepted == tuple(f"{way} is {way}" for way in HOOKED)

"""Number formats, learning rate, clipping and weight decay: the stock stack and this harness.

Each test first shows the trap on the stock Trainer, then that this harness is free of it, refuses
it or says it. docs/traps.md is the account.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from transformers import TrainerCallback

from harness.core.command_line import parse
from harness.core.records import RunFolder, read_json
from harness.core.settings import UserError
from tests.support.exchanges import Arm, flat, group
from tests.support.ranks import ranks, script
from tests.support.toys import (
    CPU,
    Net,
    Points,
    argv,
    head,
    logged,
    rows,
    sixteen,
    stock,
    trained,
)

pytestmark = pytest.mark.process


class Watched(Net):
    """Net that notes the number format of its first layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.first.register_forward_hook(lambda m, i, out: self.seen.append(str(out.dtype)))


def stock_formats() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in ("fp32", "fp16", "bf16"):
        net = Watched()
        more = {name: True} if name != "fp32" else {}
        trainer = stock(net, Points(8), logging_steps=1, **more)
        trainer.train()
        results[name] = (net.seen[0], logged(trainer, "loss"), getattr(trainer.args, name, None))
    net = Net()
    stock(net, None, Points(8), bf16_full_eval=True).evaluate()
    results["after_full_eval"] = str(net.first.weight.dtype)
    return results


def test_trap_11_fp16_on_a_cpu_is_fp32(tmp_path: Path) -> None:
    (theirs,) = ranks(1, stock_formats, env=CPU)
    assert theirs["fp16"] == (theirs["fp32"][0], theirs["fp32"][1], True)
    assert theirs["fp16"][0] == "torch.float32"
    assert theirs["bf16"][0] == "torch.bfloat16"
    assert theirs["after_full_eval"] == "torch.bfloat16"

    done = script("bert", *argv(tmp_path, "--precision=fp16"), env=CPU)
    assert done.code == 2 and "silently run in fp32" in done.err
    for refused, why in (
        ("--fp16=true", "--precision"),
        ("--bf16_full_eval=true", "for good"),
        ("--fp16_full_eval=true", "for good"),
    ):
        with pytest.raises(UserError, match=why):
            parse("bert", argv(tmp_path, refused))
    for precision, dtype in (("fp32", "float32"), ("bf16", "bfloat16")):
        sizes = ("--train_size=16", "--test_size=8", "--max_length=16")
        done = script("bert", *argv(tmp_path, f"--precision={precision}", *sizes), env=CPU)
        assert done.code == 0, done.err
        folders = [RunFolder(p.parent) for p in tmp_path.glob("bert/1_1/*/summary.json")]
        formats = {
            read_json(f.settings)["precision"]: read_json(f.environment)["observed"]["dtype"]
            for f in folders
        }
        assert formats[precision] == dtype


class Rates(TrainerCallback):
    """The learning rate with which each update is really made."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rates.append(kwargs["optimizer"].param_groups[0]["lr"])


def warm_ups(folder: str) -> dict[str, Any]:
    theirs, own = Rates(), Rates()
    trainer = stock(Net(), Points(16), warmup_steps=0.1)
    trainer.add_callback(theirs)
    trainer.train()
    _, run = trained(folder, Net(), Points(16), Points(8), "--warmup_steps=0.1", callbacks=[own])
    plain = Rates()
    _, plain_run = trained(folder, Net(), Points(16), Points(8), callbacks=[plain])
    return {
        "stock": theirs.rates,
        "ours": own.rates,
        "row": (rows(run) or [None])[0],
        "environment": read_json(run.context.folder.environment),
        "plain": plain.rates,
        "plain_row": (rows(plain_run) or [None])[0],
    }


def test_trap_15_a_warm_up_throws_the_first_update_away(tmp_path: Path) -> None:
    (results,) = ranks(1, warm_ups, str(tmp_path / "1"), env=CPU)
    assert results["stock"] == pytest.approx([0, 0.01, 0.01 * 2 / 3, 0.01 / 3])
    # Not mended but said: the schedule is the Trainer's, and what it came to is recorded.
    assert results["ours"] == pytest.approx(results["stock"])
    assert results["row"]["learning_rate"] == pytest.approx(results["ours"][-1])
    assert results["row"]["updates"] == results["environment"]["updates"] == 4
    assert results["environment"]["effective_batch"] == 4
    # Unless a warm-up is asked for there is none.
    assert results["plain"] == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
    assert results["plain_row"]["learning_rate"] == pytest.approx(0.0025)
    two = ranks(2, warm_ups, str(tmp_path / "2"), env=CPU)[0]
    # Half the updates, twice the batch, the same peak: never scaled, by neither.
    assert two["stock"] == two["ours"] == pytest.approx([0, 0.01])
    assert two["plain"] == pytest.approx([0.01, 0.005])
    assert two["environment"]["effective_batch"] == 8


def clippings(folder: str) -> dict[str, Any]:
    """With a vanishing learning rate the weights stand still: gradients are known beforehand."""
    fixed = {"learning_rate": 1e-30, "logging_steps": 1}
    free = stock(Net(), Points(32), max_grad_norm=1e9, **fixed)
    free.train()
    norms = logged(free, "grad_norm")
    bound = float(np.median(norms) * 1.0001)
    clipped = stock(Net(), Points(32), max_grad_norm=1e-3, **fixed)
    clipped.train()
    trainer, run = trained(
        folder, Net(), Points(32), Points(8), "--lr=1e-30", f"--max_grad_norm={bound}"
    )
    return {
        "norms": norms,
        "clipped_norms": logged(clipped, "grad_norm"),
        "keys": sorted({key for entry in clipped.state.log_history for key in entry}),
        "bound": bound,
        "fed": trainer.model.fed,
        "row": rows(run)[0],
    }


def test_trap_16_clipping_is_invisible(tmp_path: Path) -> None:
    (results,) = ranks(1, clippings, str(tmp_path), env=CPU)
    # A thousandth is left of every gradient; the log shows the norm before, and nothing else.
    assert results["clipped_norms"] == pytest.approx(results["norms"])
    assert min(results["norms"]) > 0.1
    assert not [key for key in results["keys"] if "clip" in key]
    # Ours: how many updates were clipped, of gradients computed here from the same batches.
    norms = [_norm(batch) for batch in results["fed"]]
    share = float(np.mean([norm > results["bound"] for norm in norms]))
    assert 0 < share < 1
    assert results["row"]["clipped_share"] == pytest.approx(share)
    assert results["row"]["grad_norm"] == pytest.approx(np.mean(norms), rel=1e-5)


def _norm(batch: list[int]) -> float:
    net, data = Net(), Points(32)
    net(data.x[batch], data.labels[batch], torch.tensor(batch))["loss"].backward()
    return float(torch.cat([p.grad.flatten() for p in net.parameters()]).norm())


def decays(folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in ("bert", "vit", "resnet"):
        model = head(name)
        data = sixteen(name)
        results[name] = stock(model, data).get_decay_parameter_names(model)
    for decay in (0.0, 0.1):
        more = [f"--weight_decay={decay}"] if decay else []
        trainer, run = trained(f"{folder}/{decay}", head("vit"), data, data, *more)
        results[decay] = {
            "groups": [group["weight_decay"] for group in trainer.optimizer.param_groups],
            "recorded": read_json(run.context.folder.settings)["training_arguments"][
                "weight_decay"
            ],
        }
    return results


def test_trap_17_weight_decay_of_embeddings_and_batchnorm(tmp_path: Path) -> None:
    (results,) = ranks(1, decays, str(tmp_path), env=CPU)
    assert not [name for name in results["bert"] if "bias" in name or "LayerNorm" in name]
    decayed_in_vit = {"vit.embeddings.cls_token", "vit.embeddings.position_embeddings"}
    assert decayed_in_vit <= set(results["vit"])
    assert [name for name in results["resnet"] if name.endswith("normalization.weight")]
    # Ours: the same groups, so off unless asked for, and then on record.
    assert results[0.0] == {"groups": [0.0, 0.0], "recorded": 0.0}
    assert results[0.1] == {"groups": [0.1, 0.0], "recorded": 0.1}


def powersgd(epsilon: float | None) -> list[tuple[np.ndarray, np.ndarray]]:
    """What comes and what is exact: two whole updates, one of zeros, three compressed ones."""
    rank, results = group(), []
    arm = Arm("powersgd" if epsilon is None else "none", [(40, 30)])
    if epsilon is not None:
        state = PowerSGDState(None, 1, start_powerSGD_iter=2, orthogonalization_epsilon=epsilon)
        arm.ddp.register_comm_hook(state, powerSGD_hook)
    for number in range(6):
        size = 0.0 if number == 2 else 1.0
        gradient = [size * torch.outer(torch.arange(1.0, 41.0), torch.ones(30))]
        results.append((flat(arm.step([g * (rank + 1) for g in gradient])), flat(gradient) * 1.5))
    return results


def test_trap_27_powersgd_does_not_outlive_a_gradient_of_zero() -> None:
    by_default, never_nan, own = (ranks(2, powersgd, e)[0] for e in (0.0, 1e-8, None))
    for came, true in own:
        assert came == pytest.approx(true, rel=1e-5)
    for came, true in by_default[:2]:
        assert came == pytest.approx(true)
    assert all(np.isnan(came).all() for came, _ in by_default[2:])
    # The other way of torch's: from then on nothing is sent at all, and everything is owed.
    for came, true in never_nan[3:]:
        assert not came.any() and true.any()

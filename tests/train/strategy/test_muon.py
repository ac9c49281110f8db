"""--muon: Muon trains the matrices between embeddings and head, AdamW the rest."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from harness.core.command_line import parse
from harness.core.settings import UserError
from harness.train.strategy import verify
from harness.train.strategy.muon import WithMuon, inner_matrices, with_muon
from tests.support.broken_runs import only_run
from tests.support.ranks import script

SIZE: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 20,
}
LR, DECAY = 1e-2, 0.1


def model() -> Any:
    torch.manual_seed(0)
    more: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(**SIZE, **more, intermediate_size=16, max_position_embeddings=8)
    return BertForSequenceClassification(config)


def adamw(of: nn.Module) -> torch.optim.AdamW:
    named = list(of.named_parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for _, p in named if p.ndim > 1], "weight_decay": DECAY},
            {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=LR,
    )


def loss_of(of: Any) -> torch.Tensor:
    ids = torch.tensor([[1, 5, 7, 2], [1, 9, 3, 2]])
    loss: torch.Tensor = of(input_ids=ids, labels=torch.tensor([0, 1])).loss
    return loss


def test_linear_layers_of_the_body_are_inner() -> None:
    of = model()
    names = {name for name, p in of.named_parameters() if any(p is m for m in inner_matrices(of))}
    layer = "bert.encoder.layer.0."
    assert names == {
        *(f"{layer}attention.self.{part}.weight" for part in ("query", "key", "value")),
        f"{layer}attention.output.dense.weight", f"{layer}intermediate.dense.weight",
        f"{layer}output.dense.weight", "bert.pooler.dense.weight",
    }  # fmt: skip


def by_formula(weight: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Muon by its formula: Nesterov momentum 0.95, made nearly orthogonal by five iterations of
    a Newton-Schulz polynomial, at 0.2 of the square root of the longer side.
    """
    momentum = torch.zeros_like(weight)
    for gradient in gradients:
        momentum = 0.95 * momentum + 0.05 * gradient
        x = (0.95 * momentum + 0.05 * gradient).bfloat16()
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(5):
            square = x @ x.T
            polynomial = torch.addmm(square, square, square, beta=-4.7750, alpha=2.0315)
            x = torch.addmm(x, polynomial, x, beta=3.4445)
        x = x.T if tall else x
        scale = 0.2 * max(weight.shape) ** 0.5
        weight = weight * (1 - LR * DECAY) - LR * scale * x.float()
    return weight


def test_updates_are_those_of_the_formulas() -> None:
    """Inner matrices by Muon's formula, the others to the bit as AdamW alone trains them."""
    of = model()
    plain = copy.deepcopy(of)
    optimizer, alone = with_muon(of, adamw(of)), adamw(plain)
    gradients: dict[str, list[torch.Tensor]] = {}
    inner = {name for name, p in of.named_parameters() if any(p is m for m in inner_matrices(of))}
    first = {name: p.detach().clone() for name, p in of.named_parameters()}
    for _ in range(3):
        for (name, p), other in zip(of.named_parameters(), plain.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            gradients.setdefault(name, []).append(p.grad.clone())
            other.grad = p.grad.clone()
        optimizer.step()
        alone.step()
        optimizer.zero_grad()
    assert optimizer.matrices == len(inner) == 7
    for (name, p), other in zip(of.named_parameters(), plain.parameters(), strict=True):
        if name in inner:
            expected = by_formula(first[name], gradients[name])
            moved = (expected - first[name]).norm()
            assert (p - expected).norm() < 0.01 * moved, name
            assert (p - other).norm() > 0.1 * moved, name
        else:
            assert torch.equal(p, other), name


def test_schedules_and_checkpoints_reach_both(tmp_path: Path) -> None:
    of = model()
    optimizer = with_muon(of, adamw(of))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
    loss_of(of).backward()
    optimizer.step()
    schedule.step()
    assert {g["lr"] for one in optimizer.both for g in one.param_groups} == {LR / 2}
    torch.save([optimizer.state_dict(), of.state_dict()], tmp_path / "saved.pt")
    saved, weights = torch.load(tmp_path / "saved.pt", weights_only=True)

    def go_on(twin: Any, of_twin: WithMuon) -> dict[str, torch.Tensor]:
        loss_of(twin).backward()
        of_twin.step()
        return dict(twin.state_dict())

    twin = model()
    of_twin = with_muon(twin, adamw(twin))
    twin.load_state_dict(weights)
    of_twin.load_state_dict(saved)
    assert {g["lr"] for g in of_twin.param_groups} == {LR / 2}
    optimizer.zero_grad()
    expected, found = go_on(of, optimizer), go_on(twin, of_twin)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    of_twin.param_groups[-1]["lr"] = 0.0
    assert of_twin.both[1].param_groups[-1]["lr"] == 0.0


def test_a_model_without_inner_matrices_is_refused() -> None:
    of = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 2))
    with pytest.raises(UserError, match="--muon: Sequential has no linear layers between"):
        with_muon(of, torch.optim.AdamW(of.parameters()))


def test_a_second_training_keeps_the_optimizer() -> None:
    of = model()
    optimizer = with_muon(of, adamw(of))
    assert with_muon(of, optimizer) is optimizer and optimizer.matrices == 7
    wrapped: Any = accelerate.Accelerator(cpu=True).prepare(optimizer)
    assert with_muon(of, wrapped) is wrapped and wrapped.optimizer is optimizer


def test_another_optimizer_beside_it_is_refused() -> None:
    of = model()
    with pytest.raises(UserError, match="--muon: the script gives SGD, and beside Muon AdamW"):
        with_muon(of, torch.optim.SGD(of.parameters()))


def test_another_optimizer_than_asked_for_is_not_recorded() -> None:
    asked = parse("bert", ["--tiny", "--muon"], {})
    of = model()
    with pytest.raises(RuntimeError, match="--muon is True, but Muon trains 0 matrices"):
        verify.observe_optimizer(adamw(of), asked)
    found = verify.observe_optimizer(with_muon(of, adamw(of)), asked)
    assert found["muon_matrices"] == 7 and found["decayed_vectors"] == 0


REFUSED = [
    (["--strategy", "fsdp"], "--muon does nothing with --strategy fsdp"),
    (["--strategy", "hivemind"], "--muon does nothing with --strategy hivemind"),
    (["--lora", "4"], "--lora 4 does not go with --muon"),
    (["--optim", "adafactor"], "--optim adafactor does not go with --muon"),
]


@pytest.mark.parametrize(("flags", "says"), REFUSED, ids=[" ".join(each[0]) for each in REFUSED])
def test_what_does_not_go_with_it_is_refused(flags: list[str], says: str) -> None:
    with pytest.raises(UserError) as refused:
        parse("bert", ["--tiny", "--muon", *flags], {})
    assert says in str(refused.value)


@pytest.mark.process
def test_a_run_says_what_muon_trains(tmp_path: Path) -> None:
    argv = ["--tiny", "--train_size", "128", "--test_size", "32", "--b", "8", "--epochs", "2"]
    argv += ["--strategy", "diloco", "--sync_every", "4", "--sync_first", "3", "--compress", "int8"]
    done = script("vit", *argv, "--muon", "--o", str(tmp_path), count=2)
    assert done.code == 0, done.err
    run = only_run(tmp_path)
    matrices = run.read_environment()["observed"]["muon_matrices"]
    assert f"Muon trains {matrices} matrices, AdamW the rest" in done.out and matrices == 18
    assert "-muon" in run.path.name

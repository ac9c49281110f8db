"""--muon: Muon (Jordan et al. 2024) for the matrices between embeddings and head.

Muon makes the momentum of a matrix nearly orthogonal before it is applied, and scales it to the
usual size of AdamW's updates; both have one learning rate. AdamW trains embeddings, head, biases
and norms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers.pytorch_utils import Conv1D

from harness.core.settings import UserError
from harness.train.data.lora import head_of


class WithMuon(Optimizer):
    """AdamW and Muon as one optimizer. Both share their groups with it, so that a schedule reaches
    them.
    """

    def __init__(self, adamw: Optimizer, muon: Optimizer) -> None:
        self.both = (adamw, muon)
        super().__init__([*adamw.param_groups, *muon.param_groups], {})

    @property
    def matrices(self) -> int:
        """How many Muon trains."""
        return sum(len(group["params"]) for group in self.both[1].param_groups)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for one in self.both:
            one.step()

    def state_dict(self) -> dict[str, Any]:
        adamw, muon = self.both
        return {"adamw": adamw.state_dict(), "muon": muon.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for one, state in zip(self.both, (state_dict["adamw"], state_dict["muon"]), strict=True):
            one.load_state_dict(state)
        # Loading makes new groups.
        self.param_groups = [group for one in self.both for group in one.param_groups]


def with_muon(model: nn.Module, adamw: Optimizer) -> Optimizer:
    """Take the inner matrices from the groups of AdamW, and give them to Muon."""
    # At a second train(), inside accelerate's wrapper.
    if isinstance(getattr(adamw, "optimizer", adamw), WithMuon):
        return adamw
    if not isinstance(adamw, torch.optim.AdamW):
        raise UserError(
            f"--muon: the script gives {type(adamw).__name__}, and beside Muon AdamW trains the "
            "rest: leave --muon out"
        )
    inner = {id(matrix) for matrix in inner_matrices(model)}
    groups = []
    for group in adamw.param_groups:
        own = [p for p in group["params"] if id(p) in inner]
        group["params"] = [p for p in group["params"] if id(p) not in inner]
        if own:
            shared = {name: group[name] for name in ("lr", "weight_decay")}
            groups.append({"params": own, **shared})
    if not groups:
        raise UserError(
            f"--muon: {type(model).__name__} has no linear layers between embeddings and head "
            "that are trained; leave --muon out"
        )
    return WithMuon(adamw, torch.optim.Muon(groups, adjust_lr_fn="match_rms_adamw"))


def inner_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The weights of linear layers of the body; not those that are embeddings as well."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = set(head_of(model))
    return [
        module.weight
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
        and module.weight.requires_grad
        and f"{name}.weight" not in head
        and id(module.weight) not in tables
    ]

"""Models in DDP with an exchange, and gradients whose mean is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.core.topology import World

SHAPES = [(40, 30), (30,), (24, 40), (40, 30), (3, 5)]


class Given(nn.Module):
    """Parameters whose gradients are what it is given."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.own = nn.ParameterList([nn.Parameter(torch.zeros(s)) for s in shapes])

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        products = [(p * g).sum() for p, g in zip(self.own, gradients, strict=True)]
        return torch.stack(products).sum()


def run_of(
    compress: str, exchange: str = "backend", elastic: bool = False, other_processes: bool = False,
    nodes: int = 1,
) -> Any:  # fmt: skip
    """As much of a run as an exchange asks for."""
    per_node = dist.get_world_size() // nodes
    world = World(rank=dist.get_rank(), nodes=nodes, per_node=per_node, elastic=elastic)
    settings = SimpleNamespace(strategy="ddp", compress=compress, exchange=exchange)
    return SimpleNamespace(settings=settings, world=world, other_processes=other_processes)


def group() -> int:
    """This rank's number; torchrun's variables say the rest."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank()


class Arm:
    """A model in DDP with its exchange, as training has it."""

    def __init__(
        self, compress: str, shapes: list[tuple[int, ...]] = SHAPES, small: bool = False, **run: Any
    ) -> None:
        from harness.train.strategy import exchange_of

        self.run = run_of(compress, **run)
        self.model = Given(shapes)
        cap = 0.004 if small else 25.0  # MiB: a bucket for each parameter or two, or one for all
        self.ddp = DistributedDataParallel(
            self.model, bucket_cap_mb=cap, gradient_as_bucket_view=True
        )
        self.exchange: Any = exchange_of(self.run)
        self.exchange.way = self.run.settings.exchange
        self.exchange.attach(self.ddp, None)

    def step(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """What the optimizer is given."""
        self.ddp.zero_grad()
        self.ddp(gradients).backward()
        self.exchange.after_update(1, last=False)
        return [p.grad.clone() for p in self.model.parameters()]  # type: ignore[union-attr]


def drawn(step: int, rank: int, shapes: list[tuple[int, ...]] = SHAPES) -> list[torch.Tensor]:
    """This step's gradients on this rank, over seven orders of magnitude."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    scale = 10.0 ** torch.randint(-6, 1, (len(shapes),), generator=generator)
    return [torch.randn(s, generator=generator) * x for s, x in zip(shapes, scale, strict=True)]


def exact(step: int, shapes: list[tuple[int, ...]] = SHAPES) -> list[torch.Tensor]:
    """The mean over all ranks."""
    everyone = [drawn(step, rank, shapes) for rank in range(dist.get_world_size())]
    return [torch.stack(of).double().mean(0) for of in zip(*everyone, strict=True)]


def flat(tensors: list[torch.Tensor]) -> np.ndarray:
    return torch.cat([t.flatten().double() for t in tensors]).numpy()

"""A strategy of one's own: of each gradient its signs and one scale for a bucket are exchanged.

torchrun --standalone --nproc_per_node=2 vit.py --tiny --strategy docs/sign_mean.py:SignMean
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from harness.train.strategy.base import Exchange


class SignMean(Exchange):
    """signSGD with a scale. The weights stay the same on all ranks, as with ddp."""

    def attach(self, model: nn.Module, optimizer: Any) -> None:
        ddp = getattr(model, "_orig_mod", model)  # where torch.compile has wrapped it
        ddp.register_comm_hook(self, SignMean.average)
        self.observed["exchanges"] = 0

    def average(self, bucket):  # type: ignore[no-untyped-def] # torch reads it
        """Called by DDP for each bucket of gradients, while the backward pass goes on."""
        gradient = bucket.buffer()
        signs = gradient.sign() * (gradient.abs().mean() / dist.get_world_size())
        self.count_sent(gradient.numel() // 8 + 4)  # what packed bits would take
        self.observed["exchanges"] += 1
        return dist.all_reduce(signs, async_op=True).get_future().then(lambda sent: sent.value()[0])

    def end(self) -> None:
        if not self.observed["exchanges"]:
            raise RuntimeError("no gradient was exchanged")

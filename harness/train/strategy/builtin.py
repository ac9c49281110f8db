"""Strategies whose exchange torch makes by itself: nn.DataParallel and FSDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.train.context import HALF_PRECISION, autocast
from harness.train.strategy import sharding
from harness.train.strategy.base import Exchange


class DataParallelExchange(Exchange):
    """nn.DataParallel: one process splits its batch over all GPUs that it sees."""

    def wrap(self, model: nn.Module, wrapped: nn.Module) -> nn.Module:
        if dtype := HALF_PRECISION.get(self.context.settings.precision):
            # The threads of several GPUs enter autocast without its dtype.
            device = self.context.args.device.type
            model.register_forward_pre_hook(lambda *_: torch.set_autocast_dtype(device, dtype))
        # The Trainer would not use DataParallel on one GPU.
        return nn.DataParallel(wrapped) if wrapped is model else wrapped

    def computing(self) -> torch.autocast:
        # accelerate adds autocast to the models that it prepares; it does not prepare DataParallel.
        return autocast(self.context.settings, self.context.args.device)


class FsdpExchange(Exchange):
    """fully_shard: each rank keeps a shard of weights and optimizer; files have them whole."""

    def spread(self, model: nn.Module, batch: Callable[[], dict[str, Any]]) -> bool:
        settings, device = self.context.settings, self.context.args.device
        with autocast(settings, device):
            sharding.refuse_skipped_layers(model, batch(), settings)
        sharding.shard(model, settings, device)
        return True

    def whole_weights(self, model: nn.Module) -> dict[str, Any]:
        return sharding.full_weights(model)

    def save_optimizer(self, trainer: Any, folder: Path) -> bool:
        sharding.save_optimizer(trainer, folder)
        return True

    def load_optimizer(self, trainer: Any, folder: Path) -> bool:
        sharding.load_optimizer(trainer, folder)
        return True

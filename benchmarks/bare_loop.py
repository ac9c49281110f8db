"""The arm of overhead.py without a Trainer: a loop by hand on batches that are ready in memory."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import get_linear_schedule_with_warmup

from benchmarks.baton import Marks
from harness.train.data.samples import EpochOrder


class Loop:
    """Trains like the Trainers of the other arms, with the attributes that measuring them uses."""

    def __init__(self, context: Any, data: Any, model: torch.nn.Module, marks: Marks) -> None:
        self.settings, self.model, self.marks = context.settings, model, marks
        self.device = context.args.device
        self.state = SimpleNamespace(log_history=[])
        order = EpochOrder(len(data.train), self.settings.seed)
        self.batches: list[list[dict[str, Any]]] = []
        for epoch in range(self.settings.epochs):
            order.set_epoch(epoch)
            parts = np.array(list(order)).reshape(-1, self.settings.per_gpu_batch)
            self.batches.append([self._ready(data, part) for part in parts])
        test = data.test.__getitems__(list(range(len(data.test))))
        self.test = self._ready(data, test)

    def _ready(self, data: Any, numbers: np.ndarray) -> dict[str, Any]:
        batch = {  # values that are no tensors stay on the host
            name: value.to(self.device) if isinstance(value, torch.Tensor) else value
            for name, value in data.collate(numbers).items()
        }
        return dict(data.to_device(batch))

    def train(self) -> None:
        model = self.model.to(self.device)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.settings.lr, weight_decay=0.0, fused=True
        )
        updates = sum(len(epoch) for epoch in self.batches)
        schedule = get_linear_schedule_with_warmup(optimizer, 0, updates)
        for epoch in self.batches:
            model.train()
            self.marks.on_epoch_begin()
            for batch in epoch:
                with self._format():
                    loss = model(**batch).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                self.marks.on_step_end()
        self.evaluation_loop()

    @torch.no_grad()
    def evaluation_loop(self) -> None:
        self.model.eval()
        with self._format():
            self.state.log_history.append({"eval_loss": float(self.model(**self.test).loss)})

    def _format(self) -> Any:
        if self.settings.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

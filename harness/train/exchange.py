"""What a strategy does between processes besides DDP's exchange of gradients, or instead of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from harness.train import parallel
from harness.train.run import Run


class Exchange:
    """What the trainer tells a strategy. This one: plain DDP, FSDP or one process, which need
    nothing more.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def observe(self, model: nn.Module) -> dict[str, Any]:
        """What the model that training uses really is; raises if it is not what was asked for."""
        return parallel.observe(model, self.run.settings, self.run.world)

    def attach(self, model: nn.Module, optimizer: Any) -> None:
        """The model as training uses it, wrapped in DDP, before its first step; with the weights
        and the optimizer of a checkpoint, if there is one.
        """

    def after_update(self, update: int, last: bool) -> None:
        """So many updates have been made; called inside the time of the step, on every rank."""

    @contextmanager
    def shared(self) -> Iterator[None]:
        """The model has the weights that all ranks share: to be evaluated, and to be saved."""
        yield

    def save(self, folder: Path) -> None:
        """What a checkpoint of this rank needs besides the weights that all share."""

    def load(self, folder: Path) -> None:
        """Go on exactly from what was saved; after attach."""

"""What a strategy does between processes besides DDP's exchange of gradients, or instead of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from harness.train.run import Run


class Exchange:
    """What the trainer tells a strategy. This one: plain DDP, FSDP or one process, which need
    nothing more.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        # What a checkpoint must hold of every process that trains apart: optimizer, schedule ...
        self.states: dict[str, Any] = {}

    def attach(self, model: nn.Module, optimizer: Any) -> None:
        """The model as training uses it, wrapped in DDP, before its first step; with the weights
        and the optimizer of a checkpoint, if there is one.
        """

    def begin(self, updates: int) -> None:
        """The training is about to begin or to go on, and ends with this update."""

    def after_update(self, update: int, last: bool) -> None:
        """So many updates have been made; called inside the time of the step, on every rank."""

    def end(self) -> None:
        """The training has come to its end: was there everything that was asked for?"""

    @contextmanager
    def shared(self) -> Iterator[None]:
        """The model has the weights that all ranks share: to be evaluated, and to be saved."""
        yield

    def save(self, folder: Path) -> None:
        """What a checkpoint of this rank needs besides the weights that all share."""

    def load(self, folder: Path) -> None:
        """Go on exactly from what was saved; after attach."""


def exchange_of(run: Run) -> Exchange:
    """What goes with the strategy of a run."""
    # Here, because they are made of what stands above.
    from harness.train.apart import LocalSgd
    from harness.train.diloco import Diloco

    kinds = {"local_sgd": LocalSgd, "diloco": Diloco}
    return kinds.get(str(run.settings.strategy), Exchange)(run)

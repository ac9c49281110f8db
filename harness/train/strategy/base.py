"""What a strategy does between processes besides DDP's exchange of gradients, or instead of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from harness.train.context import Context
from harness.train.measure.resources import of_all_ranks
from harness.train.strategy import parallel


class Exchange:
    """What the trainer tells a strategy. This one: plain DDP, FSDP or one process, which need
    nothing more.
    """

    # To be said beside a loss or a gradient that is not finite.
    caution = ""

    def __init__(self, context: Context) -> None:
        self.context = context
        # What this rank has handed over for sending, since it attached; None: not known.
        self.payload_bytes: int | None = 0 if context.settings.strategy == "single" else None
        # For the record: what it does and has done, and what it adds to an epoch's row.
        self.observed: dict[str, Any] = {}
        self.epoch_fields: dict[str, Any] = {}
        # What a checkpoint must hold of every process that trains apart: optimizer, schedule ...
        self.states: dict[str, Any] = {}

    def sends(self, count: int) -> None:
        """So many bytes more have been handed over, whatever else a backend makes of them."""
        self.payload_bytes = (self.payload_bytes or 0) + count

    def observe(self, model: nn.Module) -> dict[str, Any]:
        """What the model that training uses really is; raises if it is not what was asked for."""
        return parallel.observe(model, self.context.settings, self.context.world)

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

    def gather(self, row: dict[str, Any], world_size: int) -> list[dict[str, Any]]:
        """The rows of all ranks (a collective)."""
        return of_all_ranks(row, world_size)

    @contextmanager
    def rehearsed(self) -> Iterator[None]:
        """What is exchanged meanwhile is part of no update, and leaves no trace."""
        yield

    @contextmanager
    def shared(self) -> Iterator[None]:
        """The model has the weights that all ranks share: to be evaluated, and to be saved."""
        yield

    def save(self, folder: Path) -> None:
        """What a checkpoint of this rank needs besides the weights that all share."""

    def load(self, folder: Path) -> None:
        """Go on exactly from what was saved; after attach."""

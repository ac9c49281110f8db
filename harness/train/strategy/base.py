"""The contract of a strategy: what the trainer calls, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.core.collectives import BACKEND
from harness.core.schema.environment import ObservedRecord
from harness.core.strategies import strategy_of
from harness.train.context import Context
from harness.train.data.samples import EpochOrder
from harness.train.session import gather
from harness.train.strategy import verify


class Exchange:
    """What processes exchange in training, besides what DDP and FSDP do by themselves.

    This one adds nothing: it serves a single process.
    """

    # True: weights differ between processes from one exchange to the next, and save() keeps what is
    # needed to go on, optimizer and schedule (self.states) included. False: the harness keeps
    # these, and takes every update's gradient to be the same on all ranks.
    apart = False
    # Whether a checkpoint may be written before the end of an epoch.
    saves_inside_epoch = True
    # Printed beside a loss or a gradient that is not finite.
    caution = ""

    def __init__(self, context: Context) -> None:
        self.context = context
        # Bytes that this rank has handed over for sending since attach(); None: not known.
        alone = strategy_of(context.settings).exchanges_nothing
        self.payload_bytes: int | None = 0 if alone else None
        # For the record: what was exchanged and how, and what is added to an epoch's row.
        self.observed: ObservedRecord = {}
        self.epoch_fields: dict[str, Any] = {}
        self.way = BACKEND  # how sums are exchanged, see --exchange: set before attach()
        # How many devices trained in the epoch that has ended; None: all ranks.
        self.devices: int | None = None
        # Norm of the last update's gradient where the exchange itself clips the average gradient of
        # all processes; take_norms() then returns all of them.
        self.update_norm: torch.Tensor | None = None
        self.states: dict[str, Any] = {}

    def count_sent(self, count: int) -> None:
        """Add to the payload; what a backend adds on the wire is not part of it."""
        self.payload_bytes = (self.payload_bytes or 0) + count

    def spread(self, model: nn.Module, batch: Callable[[], dict[str, Any]]) -> bool:
        """Before the model is wrapped: place its weights; False: each rank has all, as they are.
        batch: makes a batch of one sample, to try the model out. Only of built-in strategies, as
        what training uses is verified: it must be DDP of others.
        """
        return False

    def wrap(self, model: nn.Module, wrapped: nn.Module) -> nn.Module:
        """The model for training, instead of what the Trainer has wrapped it in."""
        return wrapped

    def computing(self) -> AbstractContextManager[Any]:
        """Entered around each forward pass and its loss, besides what the Trainer enters."""
        return nullcontext()

    def observe(self, model: nn.Module) -> ObservedRecord:
        """What the model that training uses really is; raises if it is not what was asked for."""
        return verify.observe(model, self.context.settings, self.context.world)

    def prepare(self, **states: Any) -> None:
        """Called before attach(), with what each replica has of its own and a checkpoint must hold:
        optimizer, schedule, scaler.
        """
        self.states = states

    def attach(self, model: nn.Module, optimizer: Any) -> None:
        """Called before the first step, with the model as training uses it (wrapped in DDP) and the
        optimizer; both have the state of the checkpoint if there is one.
        """

    def updates_apart(self) -> int | None:
        """How many updates a rank may be ahead of another before it has to wait; None: not known,
        and a run that nears its time limit is not saved inside an epoch.
        """
        return None if self.apart else 1

    def begin(self, updates: int) -> None:
        """Training begins or goes on, and ends after update number `updates`."""

    def after_update(self, update: int, last: bool) -> None:
        """After each update, on every rank, inside the measured time of the step."""

    def end(self) -> None:
        """Training has ended; raises if not everything was exchanged that should have been."""

    def sampler(self, samples: int) -> EpochOrder | None:
        """The order of the samples; None: the run's own (seed, epoch)."""
        return None

    def training_values(self) -> tuple[Any, ...] | None:
        """What the Trainer's set_initial_training_values() returns; None: its own values."""
        return None

    def resume_at(self, update: int) -> tuple[int, int] | None:
        """(epochs completed, batches to skip) of a checkpoint; None: the Trainer's own count."""
        return None

    def take_norms(self) -> Sequence[torch.Tensor]:
        """The norms of the gradients that the exchange itself has clipped since the last call."""
        return ()

    def count_step(self, state: Any, control: Any) -> bool:
        """After a step of the Trainer: set its count to the run's; False: it is right already."""
        return False

    def logged_loss(self, loss: float, update: int) -> float:
        """The mean loss since the last log entry, computed from the Trainer's mean."""
        return loss

    def begin_epoch(self) -> None:
        """Before the first batch of an epoch is drawn."""

    def end_epoch(self, epoch: float, totals: list[float]) -> list[float]:
        """The sums of an epoch over everything that trained; totals: the sums over all ranks."""
        return totals

    def gather(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """The rows of all ranks (a collective)."""
        return gather(row)

    @contextmanager
    def rehearsed(self) -> Iterator[None]:
        """Exchanges inside belong to no update and leave no trace."""
        yield

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Inside, the model holds the weights that all ranks share, to be evaluated or saved."""
        yield

    def whole_weights(self, model: nn.Module) -> dict[str, Any] | None:
        """The weights to save, put together on rank 0 (a collective); None: the model has them."""
        return None

    def save_optimizer(self, trainer: Any, folder: Path) -> bool:
        """Save optimizer and schedule for all ranks; False: the Trainer does, from rank 0."""
        return self.apart  # then save() keeps those of each rank

    def load_optimizer(self, trainer: Any, folder: Path) -> bool:
        """Restore what save_optimizer() wrote; False: the Trainer does."""
        return self.apart

    def save(self, folder: Path) -> Sequence[Path]:
        """Write to a checkpoint what this rank needs beside the shared weights; returns files."""
        return ()

    def load(self, folder: Path) -> None:
        """Restore exactly what save() wrote; called after attach()."""

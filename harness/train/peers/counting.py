"""The Trainer's counting where updates are those of all peers.

Its step is a batch of this peer. What it counts, plans and decides by is the number of updates
that all peers have made together: an epoch ends when they make its last update.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from harness.train.by_samples import BySamples
from harness.train.epoch import EpochOrder

ENDLESS = 10**12  # batches: a peer brings what it can


class EndlessOrder(EpochOrder):
    """Permutations drawn from (seed, pass, peer), one after the other: each peer its own.

    The first peer's are those of a run in one process. Two peers do not begin with the same
    samples, and each sees all samples equally often; over all peers that holds on average only.
    """

    def __init__(self, size: int, seed: int, peer: int) -> None:
        super().__init__(size, seed)
        self.peer = peer
        self.position = 0  # samples that have been trained on

    def __iter__(self) -> Iterator[int]:
        number, begun = divmod(self.position, self.size)
        while True:
            drawn_from = [self.seed, number, *([self.peer] if self.peer else [])]
            yield from np.random.default_rng(drawn_from).permutation(self.size)[begun:].tolist()
            number, begun = number + 1, 0


class ByPeers(BySamples):
    """The Trainer's counting in a run of peers; self.exchange.update is None elsewhere."""

    run: Any
    exchange: Any
    order: Any
    sums: Any
    logged_at = logged_steps = steps = 0  # updates, batches of this peer
    epoch_begun = 0

    @property
    def among_peers(self) -> bool:
        return self.run.peers is not None

    @property
    def updates_an_epoch(self) -> int:
        return len(self.train_dataset) // self.run.settings.target_batch

    def is_world_process_zero(self) -> bool:
        return bool(super().is_world_process_zero()) and (not self.among_peers or self.run.leader)

    def set_initial_training_values(self, *args: Any) -> Any:
        if not self.among_peers:
            return super().set_initial_training_values(*args)
        asked, an_epoch = self.args.max_steps, self.updates_an_epoch
        updates = asked if asked > 0 else an_epoch * int(self.args.num_train_epochs)
        samples, batch = len(self.train_dataset), self.run.settings.target_batch
        batches = ENDLESS * self.args.gradient_accumulation_steps
        epochs = math.ceil(updates / an_epoch)
        return epochs, ENDLESS, samples, updates * batch, batch, batches, updates

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        found: tuple[int, int] = super()._init_training_state(*args)
        if not self.among_peers:
            return found
        return self.state.global_step // self.updates_an_epoch, 0

    def begin_epoch(self) -> None:
        if self.among_peers:
            self.epoch_begun = self.exchange.update // self.updates_an_epoch
            self.exchange.clipped = lambda norm, bound: self.sums.add_norm(norm, bound)
            self.exchange.begin_epoch(self.epoch_begun)
            self.order.position = self.exchange.position

    def norm_of_all(self) -> Any:
        """Of the last average of all peers, which is clipped in the place of a peer's own part."""
        return self.exchange.norm

    def of_all_peers(self, totals: list[float]) -> list[float]:
        """The sums of an epoch, over all peers where there are others."""
        if not self.among_peers:
            return totals
        found: list[float] = self.exchange.end_epoch(self.state.epoch, totals)
        return found

    def count_samples(self) -> None:
        if not self.among_peers:
            return super().count_samples()
        self.steps += 1
        an_epoch, most = self.updates_an_epoch, self.state.max_steps
        update = min(self.exchange.update, most)
        while self.lr_scheduler.last_epoch < update:
            self.lr_scheduler.step()
        epoch = update // an_epoch
        self.state.global_step, self.state.epoch = update, update / an_epoch
        if epoch > self.epoch_begun:
            # Who has fallen behind may be in the middle of the next one: its row is of this edge.
            self.state.epoch = float(epoch)
            self.control.should_epoch_stop = True
        if self.run.peers.over:
            self.control.should_training_stop = True

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.among_peers and "loss" in logs:
            # The Trainer has divided the sum over this peer's batches by the updates of all.
            made = self.state.global_step - self.logged_at
            logs["loss"] *= made / max(self.steps - self.logged_steps, 1)
            self.logged_at, self.logged_steps = self.state.global_step, self.steps
        super().log(logs, start_time)

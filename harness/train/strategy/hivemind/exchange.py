"""The Trainer's counting where updates are those of all peers.

Its step is a batch of this peer. What it counts, plans and decides by is the number of updates
that all peers have made together: an epoch ends when they make its last update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from harness.core.identity import run_id
from harness.core.records import read_json, write_json
from harness.core.topology import World
from harness.train.context import Context
from harness.train.data.order import EpochOrder
from harness.train.measure.resources import CpuTime, peak_memory_gib, reserved_memory_gib
from harness.train.measure.telemetry import told
from harness.train.measure.traffic import carried, interfaces_sent
from harness.train.strategy import verify
from harness.train.strategy.base import Exchange
from harness.train.strategy.hivemind.network import forking
from harness.train.strategy.hivemind.optimizer import PeerOptimizer, Progress, peer_optimizer


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


# ----
# What the trainer tells a run of peers, and what the records are told of them.

TOLD_S = 10.0  # for all peers to tell what they have done in an epoch


COUNTS = ("samples", "fed", "loss", "payload", "network", "failed_averages")


TOLD = ("peak_memory_gib", "reserved_memory_gib", "user_s", "system_s", "telemetry")


class _Step:
    """In the place of torch's optimizer inside accelerate's wrapper: a step is one of all peers."""

    def __init__(self, optimizer: torch.optim.Optimizer, step: Callable[[], None]) -> None:
        self._optimizer, self._step = optimizer, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self, closure: Any = None) -> None:
        self._step()


class PeersExchange(Exchange):
    """Gradients are averaged inside the optimizer's step."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.settings, self.peers = context.settings, context.peers
        self.other_peers: list[dict[str, Any]] = []  # their rows of the epoch that has ended
        self.own_batch = int(self.settings.per_gpu_batch or 1) * self.settings.grad_acc
        self.samples = 0  # of this peer, that went into updates
        self.fed = 0
        self.waiting = 0  # accumulated for the next one
        self.before = 0  # fed by the attempt before, where its order goes on
        self.loss = 0.0  # sum over what was fed
        self.sent_before = 0  # by this node's interfaces, when training began
        self.optimizer: Any = None
        self.norm = torch.zeros(())
        self.clipped: Callable[[torch.Tensor, float], None] = lambda norm, bound: None

    @property
    def update(self) -> int:
        """That all peers have made together."""
        return int(self.optimizer.local_epoch)

    @property
    def position(self) -> int:
        """In this peer's own order of the samples."""
        return self.before + self.fed

    def observe(self, model: nn.Module) -> dict[str, Any]:
        """The model of a peer is a plain one; what is shared is shared by the optimizer."""
        plain = verify.observe(model, replace(self.settings, strategy="single"), World())
        return plain | {"strategy": "hivemind"}

    def attach(self, model: nn.Module, optimizer: Any) -> None:
        context = self.context
        self.payload_bytes, self.sent_before = 0, interfaces_sent() or 0
        bare = optimizer.optimizer
        an_epoch = context.data_facts["train_samples"] // int(self.settings.target_batch or 1)
        self.peers.let_go = Progress.let_go
        with self.peers.board.quiet, forking():
            self.optimizer = peer_optimizer(
                self.peers.board.table,
                run_id(self.settings).replace(".", "-"),
                bare,
                model,
                own_batch=self.own_batch,
                target_batch=int(self.settings.target_batch or 1),
                updates_an_epoch=an_epoch,
                compress=self.settings.compress,
                local_updates=self.settings.local_updates,
                count_peers=self.peers.count,
                newest_update=self.peers.newest_update,
            )
        self.peers.optimizer = self.optimizer
        bound = context.args.max_grad_norm
        if bound > 0:
            parameters = [p for group in bare.param_groups for p in group["params"]]
            bare.register_step_pre_hook(lambda *_: self._clip(parameters, bound))
        optimizer.optimizer = _Step(bare, lambda: self._step(optimizer))
        if context.position.update:
            self.optimizer.begin_at(context.position.update)
        if self.optimizer.tracker.global_epoch > self.update:
            self.optimizer.load_state_from_peers()

    def _clip(self, parameters: list[torch.Tensor], bound: float) -> None:
        """What is clipped is what the step is made with: the average, not one peer's part."""
        self.norm = nn.utils.clip_grad_norm_(parameters, bound)
        self.clipped(self.norm, bound)

    def _step(self, wrapper: Any) -> None:
        optimizer: PeerOptimizer = self.optimizer
        before, dropped = optimizer.local_epoch, optimizer.dropped_samples
        optimizer.step()
        self.payload_bytes = optimizer.payload_bytes
        # The Trainer is not to move the schedule with each batch of this peer.
        wrapper._is_overflow = True
        self.fed += self.own_batch
        if optimizer.dropped_samples != dropped:
            self.waiting = 0  # neither these nor this batch
        else:
            self.waiting += self.own_batch
        if optimizer.local_epoch != before:
            self.samples, self.waiting = self.samples + self.waiting, 0
            self.peers.tell(update=self.update, samples=self.samples, fed=self.fed)

    # ---- epochs ----

    def begin_epoch(self, epoch: int) -> None:
        if not self.peers.told.get("ready"):
            self.peers.tell(ready=True, update=self.update)
            self.peers.wait_for_all()
        self.peers.begin_epoch(epoch)
        self.optimizer.rested()

    def end_epoch(self, epoch: float, totals: list[float]) -> list[float]:
        """The sums of the epoch over all peers; what the record is to know of them."""
        loss, _, *rest = totals
        self.loss += loss
        values = (
            self.samples, self.fed, self.loss, self.payload_bytes or 0, self._network(),
            self.optimizer.failed_averages,
        )  # fmt: skip
        counts = dict(zip(COUNTS, values, strict=True))
        edges = [*self.peers.told.get("edges", []), [round(epoch, 6), *values]][-3:]
        cuda = self.context.args.device.type == "cuda"
        reserved = reserved_memory_gib(cuda)
        self.peers.tell(
            edges=edges,
            peak_memory_gib=max(peak_memory_gib(cuda)),
            reserved_memory_gib=max(reserved) if reserved else None,
            **counts,
            **CpuTime.of(self.context).own(),
            **told(self.context.watch, goes_on=True),  # until the row is made
        )
        if not self.peers.records:
            return totals
        found = self._of_all(round(epoch, 6))
        self.epoch_fields = {
            "samples": int(found["samples"]),
            "fed_samples": int(found["fed"]),
            "peers": found["peers"],
            "failed_averages": int(found["failed_averages"]),
            "payload_bytes": int(found["payload"]),
            "network_sent_bytes": carried(int(found["payload"]), self._sent(found)),
        }
        return [found["loss"], found["fed"], *rest]

    def _network(self) -> int:
        """What this node has sent; one of its peers counts it."""
        world = self.peers.world
        counts = self.peers.shape.nodes > 1 and world.local_rank == 0
        return (interfaces_sent() or 0) - self.sent_before if counts else 0

    def _sent(self, found: dict[str, Any]) -> int | None:
        return int(found["network"]) if self.peers.shape.nodes > 1 else None

    def _of_all(self, epoch: float) -> dict[str, Any]:
        """What all peers have done since the last row; counted by peers, so that no one is lost."""
        board = self.peers.board

        def all_told() -> bool:
            living = [p for p in board.living.values() if p.get("ready")]
            return all(_edge(p, epoch) or p.get("ended") for p in living)

        board.wait(all_told, TOLD_S)
        file = self.context.folder.path / "peers.json"
        kept = read_json(file) or {}
        found: dict[str, Any] = dict.fromkeys(COUNTS, 0) | {"peers": 0}
        for name, peer in board.seen.items():
            values = _edge(peer, epoch) or [peer.get(count, 0) for count in COUNTS]
            before = kept.get(name, {})
            gained = {c: v - before.get(c, 0) for c, v in zip(COUNTS, values, strict=True)}
            if gained["fed"] <= 0:
                continue
            found["peers"] += gained["samples"] > 0
            for count, value in gained.items():
                found[count] += value
            kept[name] = {
                "rank": peer["number"],
                "from_epoch": before.get("from_epoch", epoch),
                "to_epoch": epoch,
                **dict(zip(COUNTS, values, strict=True)),
            }
        write_json(file, kept)
        others = [p for n, p in board.seen.items() if n != board.id and "peak_memory_gib" in p]
        self.other_peers = [
            {"rank": p["number"], **{name: p[name] for name in TOLD if name in p}}
            for p in sorted(others, key=lambda p: p["number"])
        ]
        return found

    def gather(self, row: dict[str, Any], world_size: int) -> list[dict[str, Any]]:
        """This peer's row and what the others published at the end of the epoch."""
        return [row, *self.other_peers]

    # ---- checkpoints ----

    def save(self, folder: Path) -> None:
        write_json(folder / "peer.json", {"position": self.position})

    def load(self, folder: Path) -> None:
        """The order goes on where it was; counts are those of a new peer."""
        kept = read_json(folder / "peer.json") or {}
        self.before = int(kept.get("position", 0))


def _edge(peer: dict[str, Any], epoch: float) -> list[float] | None:
    """What a peer had done at the end of an epoch."""
    for number, *values in peer.get("edges", []):
        if number == epoch:
            return list(values)
    return None

"""Training among peers: gradients are averaged inside the optimizer's step.

A step of the Trainer is a batch of this peer. The Trainer's count, schedule and epochs are those of
the updates that all peers have made together: an epoch ends when they make its last update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import torch
from torch import nn

from harness.core.identity import run_id
from harness.core.records.manifests import read_peer_position, write_peer_position
from harness.core.schema.environment import ObservedRecord
from harness.core.topology import World, own_batch
from harness.train.context import Context
from harness.train.data.samples import EpochOrder
from harness.train.measure.resources import (
    CpuTime,
    counts_network,
    interfaces_sent,
    peak_memory_gib,
    related,
    reserved_memory_gib,
)
from harness.train.measure.telemetry import node_fields
from harness.train.patches import check_patched
from harness.train.strategy import verify
from harness.train.strategy.base import Exchange
from harness.train.strategy.hivemind import forking
from harness.train.strategy.hivemind.optimizer import PeerOptimizer
from harness.train.strategy.hivemind.session import Peers

ENDLESS = 10**12  # batches in the Trainer's epoch: a peer contributes what it can
EPOCH_END_S = 10.0  # for all peers to publish what they have done in an epoch
# A peer publishes COUNTS (kept in peers.json) and RESOURCES (for rows) at the end of an epoch.
# Between two ends it publishes how much it has fed; its loss is of the `loss_samples` only.
COUNTS = ("samples", "fed", "loss", "loss_samples", "payload", "network", "failed_averages")
OF_PEER = "peer.json"  # in a checkpoint: where in the order of samples the peer was
RESOURCES = ("peak_memory_gib", "reserved_memory_gib", "user_s", "system_s", "telemetry")
# Fields of a row that are unknown if this process was away for a part of it.
NOT_SEEN = (
    "epoch_time_s", "train_samples_per_s", "train_samples_per_s_per_gpu", "timed_samples",
    "energy_j",
)  # fmt: skip


class EndlessOrder(EpochOrder):
    """Permutations drawn from (seed, pass, peer), one after the other.

    The first peer's permutations are those of a run in one process. Peers begin with different
    samples, and each of them sees all samples equally often; over all peers that holds only on
    average.
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


class _Step:
    """Stands in for torch's optimizer in accelerate's wrapper: a step is one of all peers."""

    def __init__(self, optimizer: torch.optim.Optimizer, step: Callable[[], None]) -> None:
        self._optimizer, self._step = optimizer, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self, closure: Any = None) -> None:
        self._step()


class PeersExchange(Exchange):
    # Peers have equal weights only at the end of an epoch, and one of them saves.
    saves_inside_epoch = False

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        assert isinstance(context.session, Peers)
        self.settings, self.peers = context.settings, context.session
        self.own_batch = own_batch(self.settings)
        self.target_batch = int(self.settings.target_batch or 1)
        self.updates_per_epoch = self._samples_of_data // self.target_batch
        self.samples = 0  # of this peer that went into updates
        self.fed = 0  # samples of this peer, including those that were dropped
        self.pending = 0  # samples accumulated for the next update
        self.loss = 0.0  # sum over what was fed
        self.steps = 0  # of the Trainer
        self.logged = (context.position.update, 0)  # (updates, steps) at the last log entry
        self.order_began_at = 0  # samples fed by earlier attempts
        self.order: EndlessOrder | None = None
        self.epoch = 0  # the epoch that has begun
        self.away = False  # whether others made the first updates of the next row without this peer
        self.sent_before = 0  # bytes, by this node's interfaces, when training began
        self.other_rows: list[dict[str, Any]] = []  # of the other peers, for the epoch that ended
        self.recorded: dict[str, Any] | None = None  # of each peer, what the rows have counted
        self.gone: dict[str, Any] = {}  # what peers of an earlier attempt did that no row counts
        self.all_reported = True  # whether all peers of that epoch reported its end
        self.optimizer: Any = None
        self.norms: list[torch.Tensor] = []  # of gradients that were clipped, not yet taken

    @property
    def _samples_of_data(self) -> int:
        samples = self.context.data_facts["train_samples"]
        assert samples is not None  # counted when the data were prepared
        return samples

    @property
    def update(self) -> int:
        """The last update that all peers have made together."""
        return int(self.optimizer.local_epoch)

    def observe(self, model: nn.Module) -> ObservedRecord:
        """A peer's model is a plain one; the optimizer shares it."""
        return verify.observe(model, self.settings, World())

    def attach(self, model: nn.Module, optimizer: Any) -> None:
        check_patched(accelerate, "for --strategy hivemind", [(optimizer, "_is_overflow")])
        context, bare = self.context, optimizer.optimizer
        self.payload_bytes, self.sent_before = 0, interfaces_sent()
        with self.peers.state.quiet, forking():
            self.optimizer = PeerOptimizer(
                self.peers.state.dht,
                run_id(self.settings).replace(".", "-"),
                bare,
                model,
                own_batch=self.own_batch,
                target_batch=self.target_batch,
                updates_per_epoch=self.updates_per_epoch,
                compress=self.settings.compress,
                local_updates=self.settings.local_updates,
                count_peers=self.peers.count,
                newest_update=self.peers.newest_update,
            )
        self.peers.optimizer = self.optimizer
        self.update_norm = torch.zeros(())
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
        """Clip the average gradient that the step uses, not one peer's part."""
        self.update_norm = nn.utils.clip_grad_norm_(parameters, bound)
        self.norms.append(self.update_norm)

    def take_norms(self) -> Sequence[torch.Tensor]:
        taken, self.norms = self.norms, []
        return taken

    def _step(self, wrapper: Any) -> None:
        optimizer: PeerOptimizer = self.optimizer
        before, loads = optimizer.local_epoch, optimizer.loads
        optimizer.step()
        self.payload_bytes = optimizer.payload_bytes
        wrapper._is_overflow = True  # keeps the Trainer from stepping the schedule at each batch
        self.fed += self.own_batch
        if optimizer.loads != loads:
            self.pending = 0  # this batch was dropped as well
        else:
            self.pending += self.own_batch
        if optimizer.local_epoch != before:
            self.samples, self.pending = self.samples + self.pending, 0
            self.peers.publish(update=self.update, samples=self.samples, fed=self.fed)

    def sampler(self, samples: int) -> EpochOrder:
        self.order = EndlessOrder(samples, self.settings.seed, self.peers.number)
        return self.order

    def training_values(self) -> tuple[Any, ...]:
        args, batch = self.context.args, self.target_batch
        updates = args.max_steps
        if updates <= 0:
            updates = self.updates_per_epoch * int(args.num_train_epochs)
        epochs = math.ceil(updates / self.updates_per_epoch)
        batches = ENDLESS * args.gradient_accumulation_steps
        return epochs, ENDLESS, self._samples_of_data, updates * batch, batch, batches, updates

    def resume_at(self, update: int) -> tuple[int, int]:
        return update // self.updates_per_epoch, 0

    def count_step(self, state: Any, control: Any) -> bool:
        self.steps += 1
        update, schedule = min(self.update, state.max_steps), self.states["schedule"]
        while schedule.last_epoch < update:
            schedule.step()
        state.global_step, state.epoch = update, update / self.updates_per_epoch
        if (epoch := update // self.updates_per_epoch) > self.epoch:
            # A peer that has caught up may be inside the next epoch: its row is for the last end.
            state.epoch = float(epoch)
            control.should_epoch_stop = True
        if self.peers.over:
            control.should_training_stop = True
        return True

    def logged_loss(self, loss: float, update: int) -> float:
        """The Trainer has divided the sum over this peer's batches by the updates of all peers."""
        updates, steps = self.logged
        self.logged = update, self.steps
        return loss * (update - updates) / max(self.steps - steps, 1)

    def begin_epoch(self) -> None:
        assert self.order is not None
        self.epoch = self.update // self.updates_per_epoch
        if not self.peers.own.get("ready"):
            self.peers.publish(ready=True, update=self.update)
            self.peers.wait_for_all()
            # A recorder that was killed and goes on: its clock and sampler have seen only a part.
            self.away = self.peers.newest_update() > self.context.position.update
        self.peers.begin_epoch(self.epoch)
        self.optimizer.resume_after_pause()
        self.order.position = self.order_began_at + self.fed

    def end_epoch(self, epoch: float, totals: list[float]) -> list[float]:
        """The sums over all peers, on the peer that records."""
        epoch = round(epoch, 6)
        loss, _, *rest = totals
        self.loss += loss
        assert self.payload_bytes is not None  # counted since attach()
        values = (
            self.samples, self.fed, self.loss, self.fed, self.payload_bytes,
            self._network_bytes(), self.optimizer.failed_averages,
        )  # fmt: skip
        cuda = self.context.args.device.type == "cuda"
        reserved = reserved_memory_gib(cuda)
        self.peers.publish(
            edges=[*self.peers.own.get("edges", []), [epoch, *values]][-3:],
            peak_memory_gib=max(peak_memory_gib(cuda)),
            reserved_memory_gib=max(reserved) if reserved else None,
            **dict(zip(COUNTS, values, strict=True)),
            **CpuTime.of(self.context).own(),
            **node_fields(self.context.sampler, resumes=True),  # until the row is made
        )
        if not self.peers.is_recorder:
            return totals
        sums = self._sum_over_peers(epoch)
        several_nodes = self.peers.recorded_world.nodes > 1
        network = int(sums["network"]) if several_nodes else None
        self.devices = sums["peers"]
        self.epoch_fields = {
            "samples": int(sums["samples"]),
            "fed_samples": int(sums["fed"]),
            "peers": sums["peers"],
            "failed_averages": int(sums["failed_averages"]),
            "payload_bytes": int(sums["payload"]),
            "network_sent_bytes": related(int(sums["payload"]), network),
            **dict.fromkeys(NOT_SEEN if self.away else ()),
        }
        self.away = False
        return [sums["loss"], sums["loss_samples"], *rest]

    def _network_bytes(self) -> int:
        """Bytes that this node has sent; one of its peers counts them."""
        counts = counts_network(self.peers.recorded_world.nodes, self.peers.world)
        return interfaces_sent() - self.sent_before if counts else 0

    def _sum_over_peers(self, epoch: float) -> dict[str, Any]:
        """What all peers have done since the last row; counted by peer, so that none is lost."""
        state = self.peers.state

        def all_published() -> bool:
            ready = [p for p in state.alive.values() if p.get("ready")]
            return all(_counts_at(epoch, p) or p.get("ended") for p in ready)

        state.wait(all_published, EPOCH_END_S)
        recorded = self.recorded = self._recorded() if self.recorded is None else self.recorded
        sums: dict[str, Any] = dict.fromkeys(COUNTS, 0) | {"peers": 0}
        for name, peer in {**self.gone, **state.known}.items():
            values = _counts_at(epoch, peer) or [peer.get(count, 0) for count in COUNTS]
            before = recorded.get(name, {})
            gained = {c: v - before.get(c, 0) for c, v in zip(COUNTS, values, strict=True)}
            if gained["fed"] <= 0:
                continue
            sums["peers"] += gained["samples"] > 0
            for count, value in gained.items():
                sums[count] += value
            before.pop("before", None)
            recorded[name] = {
                "before": before or None,
                "rank": peer["number"],
                "from_epoch": before.get("from_epoch", epoch),
                "to_epoch": epoch,
                **dict(zip(COUNTS, values, strict=True)),
            }
        self.context.folder.write_peers(recorded)
        took_part = {name for name, kept in recorded.items() if kept["to_epoch"] == epoch}
        self.all_reported = all(
            _counts_at(epoch, peer) for name, peer in state.known.items() if name in took_part
        )
        others = [
            _resources(epoch, peer)
            for name, peer in state.known.items()
            if name != state.id and "peak_memory_gib" in peer
        ]
        self.other_rows = sorted(others, key=lambda row: row["rank"])
        return sums

    def _recorded(self) -> dict[str, Any]:
        """The amounts of each peer that rows have counted. An epoch whose row a crash prevented is
        counted by the next row, unless this peer trains it again.
        """
        folder = self.context.folder
        kept: Mapping[str, Any] = folder.read_peers()
        # A row that lacks its epoch counts no epoch.
        epochs = (row.get("epoch") for row in folder.read_epochs()[0])
        last = max((epoch for epoch in epochs if epoch is not None), default=0.0)
        late = {name: peer for name, peer in kept.items() if peer["to_epoch"] > last + 1e-6}
        if self.away:
            self.gone = {name: {**peer, "number": peer["rank"]} for name, peer in late.items()}
        before = {name: peer["before"] for name, peer in late.items() if peer.get("before")}
        return {name: peer for name, peer in kept.items() if name not in late} | before

    def gather(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """This peer's row, and what the others published at the end of the epoch.

        The telemetry of all peers is unknown if a peer took part and did not report the end.
        """
        if not self.all_reported and "telemetry" in row:
            row = {**row, "telemetry": None}
        return [row, *self.other_rows]

    def save(self, folder: Path) -> Sequence[Path]:
        write_peer_position(folder / OF_PEER, self.order_began_at + self.fed)
        return ()  # each peer keeps a folder of its own

    def load(self, folder: Path) -> None:
        """Restore the position in the order of samples; counts are those of a new peer."""
        self.order_began_at = read_peer_position(folder / OF_PEER)


def _counts_at(epoch: float, peer: dict[str, Any]) -> list[float] | None:
    """What a peer had done at the end of an epoch."""
    for end, *values in peer.get("edges", []):
        if end == epoch:
            return list(values)
    return None


def _resources(epoch: float, peer: dict[str, Any]) -> dict[str, Any]:
    """What a peer used, as it published last; its telemetry only if that is of this epoch."""
    resources = {name: peer[name] for name in RESOURCES if name in peer}
    if not _counts_at(epoch, peer):
        resources.pop("telemetry", None)
    return {"rank": peer["number"], **resources}

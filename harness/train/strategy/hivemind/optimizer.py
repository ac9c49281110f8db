"""Gradients between peers in 8 bits."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import hivemind
import numpy as np
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage
from hivemind.compression import (
    CompressionBase,
    Float16Compression,
    NoCompression,
    Uniform8BitQuantization,
    serialization,
)
from hivemind.compression.quantization import average_buckets
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.progress_tracker import ProgressTracker
from hivemind.optim.state_averager import TrainingStateAverager
from hivemind.utils import get_dht_time
from torch import nn

from harness.train.strategy.hivemind.network import end_with_peer

HEAD = 8  # bytes in which the number of entries of the codebook stands


class Int8(Uniform8BitQuantization):
    """hivemind's, which fails where all are equal, and unpacks in a way that numpy gave up."""

    def quantize(
        self, tensor: torch.Tensor, allow_inplace: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        first = tensor.flatten()[:1]
        if bool((tensor == first).all()):  # a gradient of zeros, or of one value
            return np.zeros(tuple(tensor.shape), np.uint8), first.float().numpy()
        values = tensor.float()
        centred = values - values.mean()
        step = self.RANGE_IN_SIGMAS * centred.std() / self.n_bins
        places = (centred / step).round_().add_(self.n_bins // 2).clamp_(0, self.n_bins - 1)
        codes = places.to(torch.uint8)
        return codes.numpy(), average_buckets(values, codes, self.n_bins).numpy()

    def extract(self, serialized_tensor: Any) -> torch.Tensor:
        packed = serialized_tensor.buffer
        entries = int.from_bytes(packed[:HEAD], "little")
        book = np.frombuffer(packed, np.float32, entries, HEAD)
        codes = np.frombuffer(packed, np.uint8, offset=HEAD + book.nbytes)
        values = torch.from_numpy(book[codes]).reshape(tuple(serialized_tensor.size))
        values = values.to(getattr(torch, serialized_tensor.dtype))
        return values.requires_grad_(serialized_tensor.requires_grad)


# Whoever receives it, in whichever process, unpacks it with this.
serialization._BASE_COMPRESSION_TYPES["UNIFORM_8BIT"] = Int8()


# ----
# hivemind's averagers and its count of progress, and what had to be made of them.

RETRY_S = 0.5


LOOK_S = (0.05, 1.0)  # how often a peer looks what the others have done, at most and at least


async def _keep(group: Any) -> None:
    """The key of a group stays as it is."""


class _Grouped:
    """An averager that does not wait any longer when all who are there have come."""

    def run(self: Any) -> None:
        end_with_peer(self._parent_pid)
        super().run()  # type: ignore[misc]

    def expect(self: Any, peers: int, update: int) -> None:
        self._outer_pipe.send(("_expect", [peers, update], {}))

    async def _expect(self: Any, peers: int, update: int) -> None:
        self._matchmaking.target_group_size = max(peers, 2)
        # A group is of one update: what belongs to another is never averaged with it. hivemind
        # would draw another key once it has met, and who tries again would meet nobody.
        keys = self._matchmaking.group_key_manager
        keys.group_bits, keys.update_key_on_group_assembled = f"{update:b}", _keep


class Gradients(_Grouped, GradientAverager):
    def load_state_from_peers(self, **kwargs: Any) -> None:
        """Of a gradient nothing is to be taken over."""


class Weights(_Grouped, TrainingStateAverager):
    count_peers: Callable[[], int] = staticmethod(lambda: 1)
    at_most_s = 0.0  # for an average
    averaged_rounds = 0

    def step(self, **kwargs: Any) -> Any:
        if not kwargs.get("averaging_opts"):
            return super().step(**kwargs)
        limit = kwargs["averaging_opts"] = {"timeout": self.at_most_s}
        # hivemind would arrange it in the same way, and keep to itself what becomes of it.
        control = kwargs["averaging_control"] = DecentralizedAverager.step(
            self, gather=self.local_epoch + 1, require_trigger=True, wait=False, **limit
        )
        result = super().step(**kwargs)
        self.averaged_rounds += succeeded(control)
        return result

    def get_current_state(self) -> Any:
        with self.lock_optimizer:  # not in the middle of a step
            return super().get_current_state()

    def load_state_from_peers(self, **kwargs: Any) -> None:
        """hivemind would go on with its old weights where nobody answers, and call them new."""
        before = self.local_epoch
        super().load_state_from_peers(**kwargs)
        if self.local_epoch <= before and self.count_peers() > 1:
            time.sleep(RETRY_S)
            raise RuntimeError("no peer has given its state")  # and is asked again


def succeeded(control: Any) -> bool:
    return control.done() and not control.cancelled() and control.exception() is None


class MissedError(Exception):
    """The others have made the update without this peer."""


class Progress(ProgressTracker):
    """Decides when the peers have enough samples together.

    hivemind looks at the others' progress now and then, and a peer that has not looked yet would
    go on to fill the batch by itself. Here one that has done its share looks, and begins another
    batch only where the target is further away than half of it.
    """

    count_peers: Callable[[], int] = staticmethod(lambda: 1)
    own_batch = 1
    made: ClassVar[list[Progress]] = []  # whose threads keep a process from ending

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.made.append(self)
        super().__init__(*args, **kwargs)

    @classmethod
    def let_go(cls) -> None:
        for tracker in cls.made:
            for event in ("shutdown_triggered", "should_report_progress", "global_state_updated"):
                if hasattr(tracker, event):
                    getattr(tracker, event).set()

    def _parse_swarm_progress_data(self, metadata: Any) -> Any:
        """hivemind learns of a peer when it has brought samples: too late for the first update."""
        found = super()._parse_swarm_progress_data(metadata)
        found.num_peers = self.count_peers()
        return found

    @property
    def ready_to_update_epoch(self) -> bool:
        own = self.local_progress
        if self.global_epoch > own.epoch:
            return True
        share = self.target_batch_size / self.count_peers()
        if own.samples_accumulated >= share:
            self.fetched_global_progress_this_epoch.wait(LOOK_S[1])
        progress = self.global_progress
        half_s = self.own_batch / 2 / self.performance_ema.samples_per_second
        near = get_dht_time() + half_s >= progress.eta_next_epoch
        # What was fetched may be older than what this peer has done since.
        known = max(progress.samples_accumulated, own.samples_accumulated)
        enough: bool = known >= self.target_batch_size
        return enough or (own.samples_accumulated >= share and near)


# ----
# hivemind's optimizer around torch's, and what had to be made of it.
#
# It keeps to what hivemind calls its synchronous mode: an update takes the gradients of all peers
# that are there, each weighted with its samples, as soon as they have target_batch together. Its
# epoch is an update here. A peer that finds nobody to average with goes on by itself, and one that
# has fallen behind takes weights and optimizer over from another.

# To find each other: at 160 ms there and back a peer asks the table, connects and asks to join in
# about ten round trips. Who is known is not waited for longer than it takes; this is for the dead.
MATCH_S = 5.0


ASK_S = 2.0  # for one answer in it


CHUNK_S = 5.0  # without a word of 512 KiB: less than 1 Mbit/s, or gone


PROGRESS_S = 10.0  # how long a peer that has gone is counted on


AVERAGE_S = 60.0  # for one average, and as long as the model takes at SLOWEST


SLOWEST_BYTES_S = 10e6 / 8


STATE_EVERY = 16  # updates after which weights are averaged, which rounding has moved apart


def divisor(updates: int, most: int = STATE_EVERY) -> int:
    """The largest that divides the updates of an epoch: at its end all have the same weights."""
    return max(d for d in range(1, most + 1) if updates % d == 0)


class PeerOptimizer(hivemind.Optimizer):
    """Counts what it averages."""

    averaged_rounds = failed_averages = dropped_samples = payload_bytes = 0
    newest_update: Callable[[], int] = staticmethod(lambda: 0)
    count_peers: Callable[[], int] = staticmethod(lambda: 1)

    def _make_progress_tracker(self, target_batch_size: int, **kwargs: Any) -> Any:
        tracker = Progress(
            self.dht, self.run_id, target_batch_size, client_mode=self.client_mode, start=True,
            **kwargs,
        )  # fmt: skip
        tracker.count_peers, tracker.own_batch = self.count_peers, self.batch_size_per_step
        return tracker

    def _make_state_averager(self, **kwargs: Any) -> Any:
        return Weights(
            dht=self.dht,
            prefix=f"{self.run_id}_state_averager",
            min_matchmaking_time=self.matchmaking_time,
            allreduce_timeout=self.allreduce_timeout,
            shutdown_timeout=self.shutdown_timeout,
            status_loglevel=self.status_loglevel,
            next_chunk_timeout=self.next_chunk_timeout,
            client_mode=self.client_mode,
            request_timeout=ASK_S,
            start=True,
            **kwargs,
        )

    @property
    def state_averager(self) -> Any:
        return self._weights

    @state_averager.setter
    def state_averager(self, weights: Any) -> None:
        weights.count_peers = self.count_peers
        weights.at_most_s = self.averaging_timeout - AVERAGE_S + 2 * MATCH_S
        self._weights = weights

    def _should_load_state_from_peers(self) -> bool:
        return self.local_epoch < self.tracker.global_epoch

    def _maybe_schedule_gradient_averaging(self) -> None:
        """Not ahead of time: a group that is arranged with a peer waits for it when it is gone."""

    def _maybe_schedule_state_averaging(self) -> None:
        pass

    def _update_global_epoch(self, grad_scaler: Any) -> None:
        if self._should_load_state_from_peers():
            self.load_state_from_peers()
            return
        peers = self.tracker.global_progress.num_peers = self.count_peers()
        for averager in filter(None, (self.grad_averager, self.state_averager)):
            averager.expect(peers, self.local_epoch)
        # One that has been used would be taken for one that is arranged, and no average made.
        self.scheduled_grads = self.scheduled_state = None
        before, weights_before = self.averaged_rounds, self.state_averager.averaged_rounds
        try:
            super()._update_global_epoch(grad_scaler)
        except MissedError:
            self.load_state_from_peers()
            return
        if peers > 1 and self.use_gradient_averaging:
            self.failed_averages += self.averaged_rounds == before
        if peers > 1 and self.local_epoch % self.average_state_every == 0:
            if self.state_averager.averaged_rounds > weights_before:
                self.payload_bytes += sent_bytes(self.state_averager)
            else:
                self.failed_averages += 1
        self.look_again()

    def _average_gradients_and_load_into_optimizer(self, control: Any) -> None:
        until = time.monotonic() + self.averaging_timeout
        while control is not None and not control.done() and time.monotonic() < until:
            if control.stage == AveragingStage.LOOKING_FOR_GROUP:
                if self.newest_update() > self.local_epoch:
                    control.cancel()
                    raise MissedError
                if self.count_peers() == 1:
                    control.cancel()
                    break
            with suppress(TimeoutError):
                control.result(LOOK_S[0])
        super()._average_gradients_and_load_into_optimizer(control)
        if control is not None and succeeded(control):
            self.averaged_rounds += 1
            self.payload_bytes += sent_bytes(self.grad_averager)

    def load_state_from_peers(self, **kwargs: Any) -> None:
        self.dropped_samples += self.tracker.local_progress.samples_accumulated
        super().load_state_from_peers(**kwargs)

    def look_again(self) -> None:
        """At the others' progress, now: what it was estimated to be is about the last update."""
        self.tracker.global_progress.next_fetch_time = 0.0
        self.tracker.global_state_updated.set()

    def rested(self) -> None:
        """All have waited for an evaluation: nobody's progress is extrapolated over it."""
        tracker = self.tracker
        tracker.report_local_progress(self.local_epoch, tracker.local_progress.samples_accumulated)
        tracker.global_progress.eta_next_epoch = float("inf")
        self.look_again()

    def begin_at(self, update: int) -> None:
        """Go on from a checkpoint."""
        self.state_averager.local_epoch = update
        self.tracker.report_local_progress(update, samples_accumulated=0)


def sent_bytes(averager: Any) -> int:
    """Of the tensors that a peer hands to one average, as they are packed."""
    packing = averager.allreduce_kwargs["compression"]
    return sum(
        int(t.numel() * t.element_size() * packing.estimate_compression_ratio(_info(t)))
        for t in averager._averaged_tensors
    )


def _info(tensor: torch.Tensor) -> Any:
    return hivemind.compression.CompressionInfo.from_tensor(tensor)


def compression_of(name: str) -> tuple[CompressionBase, CompressionBase]:
    """For gradients and for weights. In 8 bits weights would lose what an update changes."""
    if name == "none":
        return NoCompression(), NoCompression()
    return Int8() if name == "int8" else Float16Compression(), Float16Compression()


def empty_state(optimizer: torch.optim.Optimizer) -> None:
    """The tensors that it keeps, as if no step had been made: peers exchange them by their place.

    hivemind would make a step with a zero gradient, which decays weights and is counted.
    """
    groups, rates = optimizer.param_groups, [group["lr"] for group in optimizer.param_groups]
    parameters = [p for group in groups for p in group["params"]]
    for group in groups:
        group["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    for parameter in parameters:
        parameter.grad = None
        for kept in optimizer.state[parameter].values():
            if torch.is_tensor(kept):
                kept.zero_()


def statistics_of(model: nn.Module) -> list[torch.Tensor]:
    """What a model learns without a gradient: the means and variances of BatchNorm."""
    buffers = [b for b in model.buffers() if b.is_floating_point()]
    return [b for b in buffers if b.numel()]


def peer_optimizer(
    table: Any,
    name: str,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    *,
    own_batch: int,
    target_batch: int,
    updates_an_epoch: int,
    compress: str,
    local_updates: bool,
    count_peers: Callable[[], int],
    newest_update: Callable[[], int],
) -> PeerOptimizer:
    """How many peers there are now, this one included; the last update that one of them made."""
    gradients, weights = compression_of(compress)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    size = sum(p.numel() * p.element_size() for p in parameters)
    average_s = AVERAGE_S + 2 * size / SLOWEST_BYTES_S
    if not optimizer.state:
        empty_state(optimizer)
    most: dict[str, Any] = {}
    if not local_updates:
        most["grad_averager_factory"] = partial(Gradients, request_timeout=ASK_S)
    made = type(
        "Made",
        (PeerOptimizer,),
        {"count_peers": staticmethod(count_peers), "newest_update": staticmethod(newest_update)},
    )
    return made(
        dht=table,
        run_id=name,
        optimizer=optimizer,
        target_batch_size=target_batch,
        batch_size_per_step=own_batch,
        matchmaking_time=MATCH_S,
        averaging_timeout=average_s,
        next_chunk_timeout=CHUNK_S,
        load_state_timeout=average_s,
        shutdown_timeout=3,
        delay_state_averaging=False,
        average_state_every=1 if local_updates else divisor(updates_an_epoch),
        use_local_updates=local_updates,
        grad_compression=gradients,
        state_averaging_compression=weights,
        extra_tensors=statistics_of(model),
        averager_opts={"initialize_optimizer": False, "declare_state_period": PROGRESS_S},
        tracker_opts={
            "min_refresh_period": LOOK_S[0],
            "default_refresh_period": LOOK_S[1],
            "max_refresh_period": LOOK_S[1],
            "metadata_expiration": PROGRESS_S,
            # Peers that are not there yet are not reckoned with.
            "expected_drift_peers": 0,
            "expected_drift_rate": 0.0,
        },
        **most,
    )

"""hivemind's optimizer around torch's, in what hivemind calls its synchronous mode.

An update uses the gradients of all peers that are there, each weighted with its samples, as soon as
they have target_batch samples together. What hivemind calls an epoch is an update here. A peer that
finds nobody to average with goes on by itself; one that has fallen behind takes weights and
optimizer state over from another.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import hivemind
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage
from hivemind.compression import (
    CompressionBase,
    CompressionInfo,
    Float16Compression,
    NoCompression,
)
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.progress_tracker import ProgressTracker
from hivemind.optim.state_averager import TrainingStateAverager
from hivemind.utils import get_dht_time
from torch import nn

from harness.train.strategy.hivemind import Int8, end_with_peer

# Time to form a group: at 160 ms round trip a peer asks the DHT, connects and asks to join in about
# ten round trips. The wait ends early once all known peers are there; the limit is for peers that
# are gone.
MATCH_S = 5.0
ASK_S = 2.0  # for one answer while a group forms
CHUNK_S = 5.0  # without a chunk of 512 KiB: the peer is slower than 1 Mbit/s, or gone
PROGRESS_S = 10.0  # how long a peer that has gone is counted on
RETRY_S = 0.5
REFRESH_S = (0.05, 1.0)  # least and most time between two looks at the others' progress
# One average may take AVERAGE_S, and as long as the model takes at the slowest rate.
AVERAGE_S = 60.0
SLOWEST_BYTES_S = 10e6 / 8
STATE_EVERY = 16  # most updates between two averages of weights, which rounding moves apart


def learned_buffers(model: nn.Module) -> list[torch.Tensor]:
    """What a model learns without a gradient, such as BatchNorm's statistics; not what it computes
    again whenever it is loaded.
    """
    saved = model.state_dict().keys()
    named = ((name, buffer) for name, buffer in model.named_buffers() if name in saved)
    return [buffer for _, buffer in named if buffer.is_floating_point() and buffer.numel()]


async def _keep_group_key(group: Any) -> None:
    """Replaces a method of hivemind that draws another key."""


class _OneGroupPerUpdate:
    """An averager that starts as soon as all peers that are there have joined its group."""

    def run(self: Any) -> None:
        end_with_peer(self._parent_pid)
        super().run()  # type: ignore[misc]

    def expect(self: Any, peers: int, update: int) -> None:
        self._outer_pipe.send(("_expect", [peers, update], {}))

    async def _expect(self: Any, peers: int, update: int) -> None:
        self._matchmaking.target_group_size = max(peers, 2)
        # The key of a group is the update's number: gradients of different updates are never
        # averaged, and a peer that tries again finds the group, as the key stays.
        keys = self._matchmaking.group_key_manager
        keys.group_bits, keys.update_key_on_group_assembled = f"{update:b}", _keep_group_key


class PeerGradients(_OneGroupPerUpdate, GradientAverager):
    def step(self, **kwargs: Any) -> Any:
        """Keep this peer's gradients until the update is made: the update uses them if the average
        fails, and hivemind would have emptied them.
        """
        return super().step(**{**kwargs, "reset_accumulators": False})

    def load_state_from_peers(self, **kwargs: Any) -> None:
        """Do nothing: a gradient is not taken over from others."""


class PeerState(_OneGroupPerUpdate, TrainingStateAverager):
    """Weights and optimizer state."""

    def __init__(self, *, count_peers: Callable[[], int], timeout_s: float, **kwargs: Any) -> None:
        self.count_peers, self.timeout_s, self.averaged_rounds = count_peers, timeout_s, 0
        self.unmade: int | None = None  # the update that local_epoch counts before it is made
        super().__init__(**kwargs)
        self.optimizer.register_step_post_hook(self._made)

    def _made(self, *_: Any) -> None:
        self.unmade = None

    def step(self, **kwargs: Any) -> Any:
        if kwargs.get("increment_epoch") and kwargs.get("optimizer_step"):
            self.unmade = self.local_epoch + 1
        if not kwargs.get("averaging_opts"):
            return super().step(**kwargs)
        timeout = kwargs["averaging_opts"] = {"timeout": self.timeout_s}
        # hivemind would schedule the round in the same way, but not tell what became of it.
        control = kwargs["averaging_control"] = DecentralizedAverager.step(
            self, gather=self.local_epoch + 1, require_trigger=True, wait=False, **timeout
        )
        result = super().step(**kwargs)
        self.averaged_rounds += succeeded(control)
        return result

    def get_current_state(self) -> Any:
        """Copies, with the number of their update: hivemind would hand the tensors themselves to
        another process, which moves them to other memory while this one trains on them, so that
        updates get lost. It also counts an update before it is made. (One that loads a state of
        the update before the newest still takes it for the newest.)
        """
        with self.lock_optimizer:  # not in the middle of a step
            counted = self.local_epoch  # read once: an update may be counted at any time
            update = counted - (counted == self.unmade)
            metadata, tensors, infos = super().get_current_state()
            with self.lock_averaged_tensors:  # nor while an average is written
                return metadata | {"epoch": update}, [each.clone() for each in tensors], infos

    def load_state_from_peers(self, **kwargs: Any) -> None:
        """Raises where nobody answers: hivemind would go on with the old weights as if new."""
        before = self.local_epoch
        super().load_state_from_peers(**kwargs)
        if self.local_epoch <= before and self.count_peers() > 1:
            time.sleep(RETRY_S)
            raise RuntimeError("no peer has given its state")  # the caller tries again


def succeeded(control: Any) -> bool:
    return bool(control.done() and not control.cancelled() and control.exception() is None)


class Progress(ProgressTracker):
    """Decides when the peers have enough samples together.

    hivemind looks at the others' progress now and then, and a peer that has not looked yet would
    fill the batch by itself. Here a peer that has done its share looks, and begins another batch
    only if the target is further away than half a batch.
    """

    instances: ClassVar[list[Progress]] = []  # their threads keep a process from ending

    def __init__(
        self, *args: Any, count_peers: Callable[[], int], own_batch: int, **kwargs: Any
    ) -> None:
        self.count_peers, self.own_batch = count_peers, own_batch
        self.instances.append(self)
        super().__init__(*args, **kwargs)

    @classmethod
    def release_threads(cls) -> None:
        for tracker in cls.instances:
            for event in ("shutdown_triggered", "should_report_progress", "global_state_updated"):
                if hasattr(tracker, event):
                    getattr(tracker, event).set()

    def _parse_swarm_progress_data(self, metadata: Any) -> Any:
        """hivemind counts a peer once it has reported samples: too late for the first update."""
        progress = super()._parse_swarm_progress_data(metadata)
        progress.num_peers = self.count_peers()
        return progress

    @property
    def ready_to_update_epoch(self) -> bool:
        own = self.local_progress
        if self.global_epoch > own.epoch:
            return True
        per_peer = self.target_batch_size / self.count_peers()
        if own.samples_accumulated >= per_peer:
            self.fetched_global_progress_this_epoch.wait(REFRESH_S[1])
        progress = self.global_progress
        half_batch_s = self.own_batch / 2 / self.performance_ema.samples_per_second
        near = get_dht_time() + half_batch_s >= progress.eta_next_epoch
        # What was fetched may be older than what this peer has done since.
        done = max(progress.samples_accumulated, own.samples_accumulated)
        enough: bool = done >= self.target_batch_size
        return enough or (own.samples_accumulated >= per_peer and near)


class MissedUpdateError(Exception):
    """The others have made the update without this peer."""


class PeerOptimizer(hivemind.Optimizer):
    """hivemind's optimizer, which counts what it averages.

    count_peers: how many peers there are now, this one included. newest_update: the last update
    that any of them has made.
    """

    averaged_rounds = failed_averages = payload_bytes = 0
    loads = 0  # of another peer's state; what was accumulated and the batch at hand are discarded

    def __init__(
        self,
        dht: Any,
        name: str,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        *,
        own_batch: int,
        target_batch: int,
        updates_per_epoch: int,
        compress: str,
        local_updates: bool,
        count_peers: Callable[[], int],
        newest_update: Callable[[], int],
    ) -> None:
        self.count_peers, self.newest_update = count_peers, newest_update
        gradients, weights = compressions(compress)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        size = sum(p.nbytes for p in parameters)
        average_s = AVERAGE_S + 2 * size / SLOWEST_BYTES_S
        if not optimizer.state:
            create_state(optimizer)
        averager = None if local_updates else partial(PeerGradients, request_timeout=ASK_S)
        super().__init__(
            dht=dht,
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
            average_state_every=1 if local_updates else state_interval(updates_per_epoch),
            use_local_updates=local_updates,
            grad_averager_factory=averager,
            grad_compression=gradients,
            state_averaging_compression=weights,
            extra_tensors=learned_buffers(model),
            averager_opts={"initialize_optimizer": False, "declare_state_period": PROGRESS_S},
            tracker_opts={
                "min_refresh_period": REFRESH_S[0],
                "default_refresh_period": REFRESH_S[1],
                "max_refresh_period": REFRESH_S[1],
                "metadata_expiration": PROGRESS_S,
                # Peers that may still come are not extrapolated.
                "expected_drift_peers": 0,
                "expected_drift_rate": 0.0,
            },
        )

    def _make_progress_tracker(self, target_batch_size: int, **kwargs: Any) -> Any:
        return Progress(
            self.dht, self.run_id, target_batch_size, client_mode=self.client_mode, start=True,
            count_peers=self.count_peers, own_batch=self.batch_size_per_step, **kwargs,
        )  # fmt: skip

    def _make_state_averager(self, **kwargs: Any) -> Any:
        return PeerState(
            dht=self.dht,
            prefix=f"{self.run_id}_state_averager",
            count_peers=self.count_peers,
            timeout_s=self.averaging_timeout - AVERAGE_S + 2 * MATCH_S,
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

    def _should_load_state_from_peers(self) -> bool:
        return bool(self.local_epoch < self.tracker.global_epoch)

    def _maybe_schedule_gradient_averaging(self) -> None:
        """Nothing is scheduled ahead: a scheduled group waits for a peer that has gone."""

    def _maybe_schedule_state_averaging(self) -> None:
        pass

    def _update_global_epoch(self, grad_scaler: Any) -> None:
        if self._should_load_state_from_peers():
            self.load_state_from_peers()
            return
        peers = self.tracker.global_progress.num_peers = self.count_peers()
        for averager in filter(None, (self.grad_averager, self.state_averager)):
            averager.expect(peers, self.local_epoch)
        # A used control would be taken for a scheduled one, and nothing would be averaged.
        self.scheduled_grads = self.scheduled_state = None
        before, state_before = self.averaged_rounds, self.state_averager.averaged_rounds
        try:
            super()._update_global_epoch(grad_scaler)
        except MissedUpdateError:
            self.load_state_from_peers()
            return
        if peers > 1 and self.use_gradient_averaging:
            self.failed_averages += self.averaged_rounds == before
        if peers > 1 and self.local_epoch % self.average_state_every == 0:
            if self.state_averager.averaged_rounds > state_before:
                self.payload_bytes += sent_bytes(self.state_averager)
            else:
                self.failed_averages += 1
        self.refresh_progress()

    def _begin_averaging_gradients(self, grad_scaler: Any) -> bool:
        """Where no average begins, as there is nobody to average with, hivemind would step with the
        gradient of the last batch alone.
        """
        begun = bool(super()._begin_averaging_gradients(grad_scaler))
        if not begun:
            self._load_local_gradients_into_optimizer()
        return begun

    def _average_gradients_and_load_into_optimizer(self, control: Any) -> None:
        until = time.monotonic() + self.averaging_timeout
        while control is not None and not control.done() and time.monotonic() < until:
            if control.stage == AveragingStage.LOOKING_FOR_GROUP:
                if self.newest_update() > self.local_epoch:
                    control.cancel()
                    raise MissedUpdateError
                if self.count_peers() == 1:
                    control.cancel()
                    break
            with suppress(TimeoutError):
                control.result(REFRESH_S[0])
        super()._average_gradients_and_load_into_optimizer(control)
        if control is not None and succeeded(control):
            self.averaged_rounds += 1
            self.payload_bytes += sent_bytes(self.grad_averager)

    def load_state_from_peers(self, **kwargs: Any) -> None:
        self.loads += 1
        super().load_state_from_peers(**kwargs)

    def refresh_progress(self) -> None:
        """Look at the others' progress now: the estimate was made for the update before."""
        self.tracker.global_progress.next_fetch_time = 0.0
        self.tracker.global_state_updated.set()

    def resume_after_pause(self) -> None:
        """All peers have waited for an evaluation: do not extrapolate progress over the pause."""
        tracker = self.tracker
        tracker.report_local_progress(self.local_epoch, tracker.local_progress.samples_accumulated)
        tracker.global_progress.eta_next_epoch = float("inf")
        self.refresh_progress()

    def begin_at(self, update: int) -> None:
        """Go on from a checkpoint."""
        self.state_averager.local_epoch = update
        self.tracker.report_local_progress(update, samples_accumulated=0)


def sent_bytes(averager: Any) -> int:
    """Bytes that a peer hands to one average, in the format in which they are sent."""
    share_of = averager.allreduce_kwargs["compression"].estimate_compression_ratio
    tensors = averager._averaged_tensors
    return sum(int(t.nbytes * share_of(CompressionInfo.from_tensor(t))) for t in tensors)


def compressions(name: str) -> tuple[CompressionBase, CompressionBase]:
    """Compression of gradients and of weights; 8-bit weights would lose an update's change."""
    if name == "none":
        return NoCompression(), NoCompression()
    return Int8() if name == "int8" else Float16Compression(), Float16Compression()


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's tensors, which peers exchange by position, as if before any step.

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
        for value in optimizer.state[parameter].values():
            if torch.is_tensor(value):
                value.zero_()


def state_interval(updates_per_epoch: int) -> int:
    """Updates between two averages of the weights: the most that divide an epoch's updates, so that
    all peers have the same weights at its end.
    """
    return max(n for n in range(1, STATE_EVERY + 1) if updates_per_epoch % n == 0)

"""hivemind's averagers and its count of progress, and what had to be made of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

from hivemind.averaging import DecentralizedAverager
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.progress_tracker import ProgressTracker
from hivemind.optim.state_averager import TrainingStateAverager
from hivemind.utils import get_dht_time

from harness.train.peers.network import end_with_peer

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

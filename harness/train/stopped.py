"""An elastic agent that ends a rank of its own whose process is stopped: nobody else would notice
the only rank of a run, or ranks that have not met.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api

from harness.core.process import is_stopped
from harness.core.settings import Settings

LOOK_EVERY_S = 0.5


class StoppedRanks:
    """Those that were ended: their process, and the reason."""

    def __init__(self, hang_after_s: float) -> None:
        self.hang_after_s = hang_after_s
        self.reasons: dict[int, str] = {}
        self.stopped_s: dict[int, float] = {}
        self.looked_s = time.monotonic()

    def look(self, workers: Sequence[Any], node: int) -> None:
        passed_s = time.monotonic() - self.looked_s
        if not self.hang_after_s or passed_s < LOOK_EVERY_S:
            return
        self.looked_s += passed_s
        for worker in workers:
            if not is_stopped(worker.id):
                self.stopped_s.pop(worker.id, None)
                continue
            # A longer pause means that this process was stopped, too: no time of the run.
            stopped_s = self.stopped_s.get(worker.id, 0.0) + min(passed_s, 2 * LOOK_EVERY_S)
            self.stopped_s[worker.id] = stopped_s
            # Ranks that have met find it themselves, and print their stacks: they come first.
            limit_s = self.hang_after_s * (1 if worker.world_size == 1 else 2)
            if stopped_s > limit_s and worker.id not in self.reasons:
                who = f"rank {worker.global_rank} (node {node})"
                reason = f"{who} does not answer for {limit_s:g} s: its process is stopped"
                self.reasons[worker.id] = reason
                print(f"harness: {reason}", file=sys.stderr, flush=True)
                with suppress(ProcessLookupError):
                    os.kill(worker.id, signal.SIGKILL)


class EndingAgent(LocalElasticAgent):
    """Looks at its ranks each time that torch's own does."""

    def __init__(self, *args: Any, stopped: StoppedRanks, **more: Any) -> None:
        super().__init__(*args, **more)
        self.stopped = stopped

    def _monitor_workers(self, worker_group: Any) -> Any:
        self.stopped.look(worker_group.workers, worker_group.group_rank)
        return super()._monitor_workers(worker_group)


@contextmanager
def ending_stopped_ranks(hang_after_s: float, **of_agent: Any) -> Iterator[StoppedRanks]:
    """The launcher's agents are EndingAgents with these arguments.

    LaunchConfig has no field for it, and its launcher makes the agent itself: the name under which
    it finds the class is replaced, as checked with torch 2.13.
    """
    before, stopped = api.LocalElasticAgent, StoppedRanks(hang_after_s)
    api.LocalElasticAgent = functools.partial(EndingAgent, stopped=stopped, **of_agent)
    try:
        yield stopped
    finally:
        api.LocalElasticAgent = before


def hang_after_of(argv: Sequence[str]) -> float:
    """The script's --hang_after among torchrun's arguments; 0 where the script will refuse it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--hang_after", type=float, default=Settings.hang_after)
    try:
        return float(parser.parse_known_args(argv)[0].hang_after)
    except argparse.ArgumentError:
        return 0.0

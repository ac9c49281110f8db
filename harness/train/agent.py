"""An elastic agent that kills those of its ranks whose process is stopped."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api

from harness.train.patches import check_patched
from harness.train.stopped import StoppedRanks


class EndingAgent(LocalElasticAgent):
    """torch's agent, which also looks for stopped ranks whenever it polls."""

    def __init__(self, *args: Any, stopped: StoppedRanks, **more: Any) -> None:
        super().__init__(*args, **more)
        self.stopped = stopped

    def _monitor_workers(self, worker_group: Any) -> Any:
        self.stopped.look(worker_group.workers, worker_group.group_rank)
        return super()._monitor_workers(worker_group)


@contextmanager
def ending_stopped_ranks(
    hang_after_s: float, later_s: float = 0.0, **of_agent: Any
) -> Iterator[StoppedRanks]:
    """Inside, the launcher's agents are EndingAgents with these arguments.

    LaunchConfig has no field for it, and its launcher makes the agent itself: the name under which
    it finds the class is replaced.
    """
    replaced = [(api, "LocalElasticAgent"), (LocalElasticAgent, "_monitor_workers")]
    check_patched(torch, "so that stopped ranks are ended", replaced)
    before, stopped = api.LocalElasticAgent, StoppedRanks(hang_after_s, later_s=later_s)
    api.LocalElasticAgent = functools.partial(EndingAgent, stopped=stopped, **of_agent)
    try:
        yield stopped
    finally:
        api.LocalElasticAgent = before

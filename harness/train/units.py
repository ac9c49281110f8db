"""Who trains apart from whom, and how something gets from one to the other.

A unit is what trains apart: a node, whose processes share gradients at every update as DDP does,
or a single process (--sync_scope rank).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from harness.world import World


class Units:
    """Who trains apart from whom, and the groups in which they meet."""

    def __init__(self, world: World, scope: str | None) -> None:
        self.each = world.per_node if scope == "node" else 1  # processes of one
        self.count = world.size // self.each
        self.own, self.place = divmod(world.rank, self.each)
        self.leads = self.place == 0  # goes over the link for all of its unit
        self.first = self.own * self.each  # the rank that leads this unit
        self.inside = self.between = None
        if self.count == 1:
            return
        # Every rank makes every group, in one order. Those between units are groups of their own
        # even where they hold all ranks: what is on its way must not stand in the way of others.
        if self.each > 1:
            for unit in range(self.count):
                members = range(unit * self.each, (unit + 1) * self.each)
                group = dist.new_group(list(members))
                if unit == self.own:
                    self.inside = group
        self.between = dist.new_group(list(range(0, world.size, self.each)))


class Sending:
    """A row on its way to become the mean over all units."""

    def __init__(self, row: torch.Tensor, wait: Callable[[], Any] | None = None) -> None:
        self.row, self.wait = row, wait

    def arrived(self) -> None:
        if self.wait is not None:
            self.wait()
            self.wait = None


class Aside:
    """Work in a thread of its own, after the work before it: in one order on all ranks.

    The thread does not keep a process from ending, whatever it waits for.
    """

    def __init__(self, work: Callable[[], Any], before: Aside | None, device: torch.device) -> None:
        self.before = before
        self.error: BaseException | None = None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))
        self.thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self.thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        if self.before is not None:
            self.before.thread.join()
            self.before = None
        try:
            if self.stream is None:
                work()
                return
            with torch.cuda.stream(self.stream):
                work()
            self.stream.synchronize()
        except BaseException as error:
            self.error = error

    def wait(self) -> None:
        self.thread.join()
        if self.error is not None:
            raise self.error

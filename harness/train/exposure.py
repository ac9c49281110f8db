"""Where a step's time goes on each rank: computing, and what DDP's exchange adds to it.

Until a rank's last own gradient is ready, communication is hidden behind computing. What is exposed
lies between then and the end of the backward pass: on the rank that is ready last it is
communication itself, on the others also waiting for that rank.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.train.measures import Measure
from harness.train.run import Run

FIELDS = ("compute_s", "comm_exposed_s", "comm_wait_s")


class Exposure(Measure):
    """Of one rank, update by update; a stamp costs microseconds and never waits for the GPU."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.device = run.args.device
        self.handles: dict[nn.Parameter, Any] = {}
        self.ready: Any = None
        self.last: nn.Parameter | None = None
        self.marks: list[tuple[Any, Any]] = []  # None: it is not known when that was

    def watch(self, model: nn.Module) -> bool:
        """From the next backward pass on; False where DDP exchanges no gradients between all."""
        ddp = getattr(model, "_orig_mod", model)  # inside torch.compile
        if not isinstance(ddp, DistributedDataParallel) or self.run.settings.strategy != "ddp":
            return False
        if dist.get_world_size() == 1:
            return False
        for parameter in ddp.parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(self._gradient)
                self.handles[parameter] = hook
        return True

    def _stamp(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        # On the stream of the backward pass. DDP makes that stream wait for the last exchange
        # before backward() returns: an event recorded then has the exchange behind it, although
        # the host is ahead of both.
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _gradient(self, parameter: nn.Parameter) -> None:
        # Before DDP's own hook on this gradient, which begins the last exchange.
        self.last, self.ready = parameter, self._stamp()

    def backward_ended(self, exchanged: bool) -> None:
        """A backward pass has ended, at which gradients were exchanged or were not."""
        if not self.handles:
            return
        if exchanged:
            self.marks.append((self.ready, self._stamp()))
        self.ready = None
        if len(self.handles) > 1 and self.last is not None:
            # Gradients become ready in one order: of the others nothing more need be known.
            for parameter, hook in self.handles.items():
                if parameter is not self.last:
                    hook.remove()
            self.handles = {self.last: self.handles[self.last]}

    def epoch_begins(self) -> None:
        self.marks = []

    @contextmanager
    def aside(self) -> Iterator[None]:
        marks, self.marks = self.marks, []
        yield
        self.marks = marks

    def exposed(self) -> list[float]:
        """Seconds of each update of the epoch, NaN where unknown; once the device has finished."""
        cuda = self.device.type == "cuda"
        return [
            math.nan if ready is None else ready.elapsed_time(end) / 1000 if cuda else end - ready
            for ready, end in self.marks
        ]

    def of_rank(self, untimed: int) -> dict[str, Any]:
        """Sums over the timed steps; a collective where gradients are exchanged."""
        steps = [seconds for _, seconds in self.run.clock.steps()][untimed:]
        waits = self.run.clock.waits()[untimed:]
        found: dict[str, float | None] = dict.fromkeys(FIELDS)
        own = math.fsum(steps) - math.fsum(waits)
        if self.handles:
            parts = self._parts(self.exposed()[untimed:], len(steps))
            if parts is not None:
                exposed, waited = parts
                found = dict(zip(FIELDS, (own - exposed, exposed, waited), strict=True))
        elif steps and self._alone():
            found["compute_s"] = own
        return found

    def _alone(self) -> bool:
        """Whether nothing is exchanged, between processes or devices."""
        run = self.run
        return run.world.size == 1 and run.peers is None and run.settings.strategy != "dp"

    def _parts(self, exposed: list[float], count: int) -> tuple[float, float] | None:
        """Seconds of so many updates that were exposed, and those of them in which others were
        waited for: at each update the rank that was ready last waits the least.
        """
        if not count:
            return None
        known = len(exposed) == count and not any(map(math.isnan, exposed))
        # Less than nothing: one rank does not know, and so no rank does.
        least = torch.tensor(exposed if known else [-1.0] * count, dtype=torch.float64)
        least = least.to(self.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return parts(exposed, least.tolist()) if min(least.tolist()) >= 0 else None

    def of_run(self, ranks: Sequence[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
        share = None
        if ranks[0].get("comm_exposed_s") is not None:
            share = (ranks[0]["comm_exposed_s"] - ranks[0]["comm_wait_s"]) / row["timed_s"]
        return {"comm_exposed_share": share, **skew([rank.get("compute_s") for rank in ranks])}


def parts(exposed: Sequence[float], least: Sequence[float]) -> tuple[float, float]:
    """Of one rank, over updates: seconds exposed, and those beyond the least of all ranks."""
    whole = math.fsum(exposed)
    return whole, whole - math.fsum(least)


def skew(compute: Sequence[float | None]) -> dict[str, Any]:
    """How much longer than the median rank the slowest one computes, and which one that is."""
    known = [seconds for seconds in compute if seconds is not None]
    if len(known) < max(2, len(compute)):
        return {"compute_skew": None, "slowest_rank": None}
    most, middle = max(known), statistics.median(known)
    return {
        "compute_skew": most / middle if middle > 0 else None,
        "slowest_rank": known.index(most),
    }

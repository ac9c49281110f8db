"""What DDP's exchange of gradients adds to a step: from the moment when this rank's last own
gradient is ready to the end of the backward pass.

Until then communication is hidden behind computing. What is exposed on the rank that is ready last
is communication itself; what is more on the others, they wait for that rank.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Exposure:
    """Of one rank, update by update; a stamp costs microseconds and never waits for the GPU."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.handles: dict[nn.Parameter, Any] = {}
        self.ready: Any = None
        self.last: nn.Parameter | None = None
        self.marks: list[tuple[Any, Any]] = []

    def watch(self, model: nn.Module) -> bool:
        """From the next backward pass on; False where gradients are not exchanged by DDP."""
        ddp = getattr(model, "_orig_mod", model)  # inside torch.compile
        if not isinstance(ddp, DistributedDataParallel):
            return False
        for parameter in ddp.parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(self._gradient)
                self.handles[parameter] = hook
        return True

    def _stamp(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _gradient(self, parameter: nn.Parameter) -> None:
        self.last, self.ready = parameter, self._stamp()

    def backward_ended(self, exchanged: bool) -> None:
        """A backward pass has ended, at which gradients were exchanged or were not."""
        if self.ready is not None and exchanged:
            self.marks.append((self.ready, self._stamp()))
        self.ready = None
        if len(self.handles) > 1 and self.last is not None:
            # Gradients become ready in one order: of the others nothing more need be known.
            for parameter, hook in self.handles.items():
                if parameter is not self.last:
                    hook.remove()
            self.handles = {self.last: self.handles[self.last]}

    def take(self) -> list[float]:
        """Seconds that were exposed at each update since this was asked before; after the device
        has been waited for.
        """
        marks, self.marks = self.marks, []
        if self.cuda:
            return [ready.elapsed_time(end) / 1000 for ready, end in marks]
        return [end - ready for ready, end in marks]


def shares(by_rank: Sequence[Sequence[float]]) -> tuple[float, list[float]] | None:
    """Seconds of all updates: of communication itself, and for each rank of waiting for others.

    At each update the rank that was ready last waits the least. None where a rank knows nothing.
    """
    if not by_rank or len({len(of) for of in by_rank}) != 1 or not by_rank[0]:
        return None
    least = [min(update) for update in zip(*by_rank, strict=True)]
    waited = [sum(own) - sum(least) for own in by_rank]
    return sum(least), waited

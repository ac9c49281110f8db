"""How long processors worked for a run: the kernel's count of each rank's process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import psutil
import torch
from accelerate.utils import gather_object

from harness.train.context import Context
from harness.train.measure.base import Measure
from harness.train.measure.rows import peaks_of

KINDS = ("user_s", "system_s")


def of_all_ranks(mine: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """What each tells, by rank."""
    return list(gather_object([mine])) if size > 1 else [mine]


class CpuTime:
    """Processor time since this was made, of this process and of the others as far as they told.

    Reading it is one call of the system. What worker processes took is known when they have ended.
    """

    def __init__(self, ranks: int = 1, since: os.times_result | None = None) -> None:
        self.alone = ranks == 1
        self.restart(since)

    @classmethod
    def of(cls, context: Context) -> Self:
        """Since this process opened the run."""
        return cls(1 if context.session.alone else 2, since=context.cpu_began)

    def restart(self, since: os.times_result | None = None) -> None:
        self.before = since or os.times()
        self.of_ranks: list[dict[str, Any]] | None = None

    def own(self) -> dict[str, float]:
        """Of this process and of its worker processes that have ended."""
        now, then = os.times(), self.before
        user_s = now.user + now.children_user - then.user - then.children_user
        system_s = now.system + now.children_system - then.system - then.children_system
        return {"user_s": round(user_s, 3), "system_s": round(system_s, 3)}  # counted in 0.01 s

    def heard(self, of_ranks: list[dict[str, Any]]) -> None:
        """What all ranks told when they met; of one process there is always something newer."""
        self.of_ranks = of_ranks

    def per_rank(self) -> dict[str, list[float] | None]:
        """Lists by rank, null before the ranks have told anything."""
        told = [self.own()] if self.alone else self.of_ranks
        return {f"{kind}_per_rank": [r[kind] for r in told] if told else None for kind in KINDS}


# ----
# Peak memory of a process: of each of its GPUs, or of itself.

GIB = 2**30


def peak_memory_gib(cuda: bool, devices: int = 1) -> list[float]:
    """The most memory of this process, by device: of torch since the last reset, else resident.

    Only DataParallel has several devices in one process.
    """
    if cuda:
        numbers = range(devices) if devices > 1 else [torch.cuda.current_device()]
        return [float(torch.cuda.max_memory_allocated(n) / GIB) for n in numbers]
    try:
        # A CPU has no allocator to ask; the kernel keeps the high-water mark of the process.
        status = Path("/proc/self/status").read_text()
        return [int(status.split("VmHWM:")[1].split()[0]) * 1024 / GIB]
    except (OSError, IndexError):
        return [float(psutil.Process().memory_info().rss / GIB)]


def reserved_memory_gib(cuda: bool, devices: int = 1) -> list[float] | None:
    """The most that torch's allocator has taken from each device; None where it takes none."""
    if not cuda:
        return None
    numbers = range(devices) if devices > 1 else [torch.cuda.current_device()]
    return [float(torch.cuda.max_memory_reserved(n) / GIB) for n in numbers]


def forget_peak_memory(devices: int) -> None:
    """Count the peak of these GPUs from now on."""
    for number in range(devices) if devices > 1 else [torch.cuda.current_device()]:
        torch.cuda.reset_peak_memory_stats(number)


class Memory(Measure):
    """The peaks of this process, epoch by epoch."""

    def __init__(self, cuda: bool, devices: int) -> None:
        self.cuda, self.devices = cuda, devices
        self.before: list[list[float]] = []  # in this epoch, before something that does not count
        self.own: list[list[float] | None] = [None, None]  # of the last epoch: allocated, reserved

    def _peaks(self) -> list[list[float]]:
        """Allocated, and on a GPU reserved, by device."""
        allocated = peak_memory_gib(self.cuda, self.devices)
        reserved = reserved_memory_gib(self.cuda, self.devices)
        found = [allocated] if reserved is None else [allocated, reserved]
        if self.before:
            pairs = zip(found, self.before, strict=True)
            found = [list(map(max, now, then)) for now, then in pairs]
        return found

    def epoch_begins(self) -> None:
        self.before = []
        if self.cuda:
            forget_peak_memory(self.devices)

    @contextmanager
    def aside(self) -> Iterator[None]:
        if not self.cuda:
            yield  # nobody can take back the peak of a process
            return
        self.before = self._peaks()
        yield
        forget_peak_memory(self.devices)

    def of_rank(self, untimed: int) -> dict[str, Any]:
        found = self._peaks()
        self.own = [found[0], found[1] if self.cuda else None]
        allocated, reserved = (of and max(of) for of in self.own)
        return {"peak_memory_gib": allocated, "reserved_memory_gib": reserved}

    def of_run(self, ranks: Sequence[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
        named = zip(("peak_memory_gib", "reserved_memory_gib"), self.own, strict=True)
        return {f"{name}_per_rank": peaks_of(name, ranks, own) for name, own in named}

"""Peak memory of a process: of each of its GPUs, or of itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from harness.train.measures import Measure
from harness.train.rows import peaks_of

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

"""Peak memory of a process: of each of its GPUs, or of itself."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

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


def forget_peak_memory(devices: int) -> None:
    """Count the peak of these GPUs from now on."""
    for number in range(devices) if devices > 1 else [torch.cuda.current_device()]:
        torch.cuda.reset_peak_memory_stats(number)

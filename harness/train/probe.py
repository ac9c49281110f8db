"""Exchanges between ranks as training makes them, timed.

A slow link must not cost minutes: sizes grow as long as the next one fits into the time that is
left, and what did not fit is unknown.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from harness.world import World

SMALLEST, GROWTH = 2**16, 4  # bytes of the first size, and how many times larger the next one is
SAMPLES, SAMPLES_S = 3, 1.0  # of which the median counts; those that take long need no more


def busbw(algbw: float, ranks: int) -> float:
    """What each rank's link has to carry in an all-reduce, whatever the number of ranks."""
    return algbw * 2 * (ranks - 1) / ranks


def climb(
    once: Callable[[int], float],
    target: int,
    until_s: float,
    long_enough_s: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[int, float] | None:
    """(size, median seconds) at the target or the largest size for which there was time.

    once(size) does it and gives the seconds that count; what it costs besides is seen here. The
    first one of each size counts only where there is time for no other: it opens TCP's window.
    """
    size, seconds = 0, 0.0
    larger, cost_s, slope = min(SMALLEST, target), 0.0, 0.0
    while larger > size and clock() + cost_s + slope * (larger - size) <= until_s:
        before = size, seconds
        began_s = clock()
        size, seconds = larger, once(larger)
        cost_s = clock() - began_s
        # The same latency is in both, so what more bytes take is what the last ones took.
        slope = max(0.0, seconds - before[1]) / (size - before[0])
        larger = size if seconds >= long_enough_s else min(GROWTH * size, target)
    if not size:
        return None
    samples: list[float] = []
    while len(samples) < SAMPLES and sum(samples) < SAMPLES_S and clock() + cost_s <= until_s:
        samples.append(once(size))
    return size, statistics.median(samples or [seconds])


@dataclass
class Wire:
    """Tensors between ranks, of the kind and where training has them."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    group: Any = None  # None: that of the training
    buffer: torch.Tensor | None = None

    def finish(self) -> None:
        """NCCL only begins an exchange."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def say(self, rank: int, *numbers: float) -> None:
        """Four numbers: what is asked for, or what was found."""
        padded = [*numbers, 0.0, 0.0, 0.0][:4]
        self.send(torch.tensor(padded, dtype=torch.float64, device=self.device), rank)

    def hear(self, rank: int) -> list[float]:
        message = torch.zeros(4, dtype=torch.float64, device=self.device)
        self.receive(message, rank)
        return list(message.tolist())

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        dist.send(tensor, rank, group=self.group)
        self.finish()

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        dist.recv(tensor, rank, group=self.group)
        self.finish()

    def elements(self, count: int) -> torch.Tensor:
        """Zeros, whose sum stays what it is; kept for the next time."""
        if self.buffer is None or len(self.buffer) < count:
            self.buffer = None  # before there is another
            self.buffer = torch.zeros(count, dtype=self.dtype, device=self.device)
        return self.buffer[:count]

    def count_of(self, size: int) -> int:
        return max(1, size // self.dtype.itemsize)


def measure_allreduce(
    world: World, device: torch.device, dtype: torch.dtype, sizes: list[int], until_s: float
) -> list[dict[str, Any]]:
    """A row a size, on rank 0; the other ranks reduce as much as it tells them."""
    wire = Wire(device, dtype)
    if world.rank != 0:
        while _reduce(wire, 0) is not None:
            pass
        return []
    rows = []

    def once(size: int) -> float:
        seconds = _reduce(wire, wire.count_of(size))
        assert seconds is not None
        return seconds

    for number, size in enumerate(sizes):
        now_s = time.perf_counter()
        share_s = (until_s - now_s) / (len(sizes) - number)
        found = climb(once, size, now_s + share_s)
        rows.append(_reduction(size, found, world.size))
    _reduce(wire, 0)
    return rows


def _reduce(wire: Wire, count: int) -> float | None:
    """Seconds of an all-reduce as large as rank 0 says, the others say 0; None: that was all."""
    # Also lets the ranks begin together, as far as the link lets them.
    told = torch.tensor([count], dtype=torch.int64, device=wire.device)
    dist.all_reduce(told)
    if (told_count := int(told.item())) == 0:
        return None
    tensor = wire.elements(told_count)
    began_s = time.perf_counter()
    dist.all_reduce(tensor)
    wire.finish()
    return time.perf_counter() - began_s


def _reduction(asked: int, found: tuple[int, float] | None, ranks: int) -> dict[str, Any]:
    size, seconds = found or (None, None)
    algbw = size * 8 / seconds / 1e6 if size and seconds else None
    return {
        "asked_bytes": asked,
        "bytes": size,
        "s": seconds,
        "algbw_mbit": algbw,
        "busbw_mbit": None if algbw is None else busbw(algbw, ranks),
    }

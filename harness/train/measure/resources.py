"""The resources that a run uses, besides time: processor time, memory and network traffic."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypedDict

import psutil
import torch

from harness.core.records import total
from harness.core.topology import World
from harness.train.measure.environment import launch
from harness.train.measure.rows import EpochMeasure
from harness.train.measure.sampler import GIB, interfaces

if TYPE_CHECKING:  # `harness link` measures traffic without a Trainer
    from harness.train.context import Context

TRAFFIC_FIELDS = ("payload_bytes", "network_sent_bytes")
STRAY_BYTES = 10_000  # that a machine may send in an epoch for reasons of its own
Bytes = tuple[int | None, int | None]  # of each traffic field; None: unknown


class CpuOfRanks(TypedDict):
    """Processor time by rank, as in progress.json and at the end of an attempt."""

    user_s_per_rank: list[float] | None
    system_s_per_rank: list[float] | None


class CpuTime:
    """Processor time of this process since this was made, and of the other ranks once they report.

    Reading it is one system call. The time of worker processes is known when they have ended.
    """

    def __init__(self, is_single: bool = True, since: os.times_result | None = None) -> None:
        self.is_single = is_single
        self.restart(since)

    @classmethod
    def of(cls, context: Context) -> Self:
        """The processor time since this process opened the run."""
        return cls(context.session.is_single, since=context.cpu_began)

    def restart(self, since: os.times_result | None = None) -> None:
        self.before = since or os.times()
        self.reported: list[dict[str, Any]] | None = None

    def own(self) -> dict[str, float]:
        """The time of this process and of its worker processes that have ended."""
        now, then = os.times(), self.before
        user_s = now.user + now.children_user - then.user - then.children_user
        system_s = now.system + now.children_system - then.system - then.children_system
        return {"user_s": round(user_s, 3), "system_s": round(system_s, 3)}  # counted in 0.01 s

    def report(self, ranks: list[dict[str, Any]]) -> None:
        """Take the times from the rows of all ranks, which have been gathered."""
        self.reported = ranks

    def per_rank(self) -> CpuOfRanks:
        """Lists by rank, null before the ranks have reported; a single process is up to date."""
        rows = [self.own()] if self.is_single else self.reported
        return {
            "user_s_per_rank": [row["user_s"] for row in rows] if rows else None,
            "system_s_per_rank": [row["system_s"] for row in rows] if rows else None,
        }


def device_numbers(devices: int) -> Sequence[int]:
    """The GPUs of this process; only DataParallel has several of them."""
    return range(devices) if devices > 1 else [torch.cuda.current_device()]


def peak_memory_gib(cuda: bool, devices: int = 1) -> list[float]:
    """Peak memory of this process: by GPU, of torch since the last reset; on a CPU, resident."""
    if cuda:
        return [float(torch.cuda.max_memory_allocated(n) / GIB) for n in device_numbers(devices)]
    try:
        # A CPU has no allocator to ask; the kernel keeps the high-water mark of the process.
        status = Path("/proc/self/status").read_text()
        return [int(status.split("VmHWM:")[1].split()[0]) * 1024 / GIB]
    except (OSError, IndexError):
        return [float(psutil.Process().memory_info().rss / GIB)]


def reserved_memory_gib(cuda: bool, devices: int = 1) -> list[float] | None:
    """The most that torch's allocator has reserved on each GPU; None on a CPU."""
    if not cuda:
        return None
    return [float(torch.cuda.max_memory_reserved(n) / GIB) for n in device_numbers(devices)]


def reset_peak_memory(devices: int) -> None:
    for number in device_numbers(devices):
        torch.cuda.reset_peak_memory_stats(number)


class Memory(EpochMeasure):
    """Peak memory of this process, epoch by epoch."""

    def __init__(self, cuda: bool, devices: int) -> None:
        self.cuda, self.devices = cuda, devices
        self.before: list[list[float]] = []  # in this epoch, before something that is excluded
        self.own: list[list[float] | None] = [None, None]  # of the last epoch: allocated, reserved

    def _peaks(self) -> list[list[float]]:
        """Allocated, and on a GPU reserved, by device."""
        allocated = peak_memory_gib(self.cuda, self.devices)
        reserved = reserved_memory_gib(self.cuda, self.devices)
        peaks = [allocated] if reserved is None else [allocated, reserved]
        if self.before:
            pairs = zip(peaks, self.before, strict=True)
            peaks = [list(map(max, now, then)) for now, then in pairs]
        return peaks

    def epoch_begins(self) -> None:
        self.before = []
        if self.cuda:
            reset_peak_memory(self.devices)

    @contextmanager
    def excluded(self) -> Iterator[None]:
        if not self.cuda:
            yield  # the peak of a process cannot be reset
            return
        self.before = self._peaks()
        yield
        reset_peak_memory(self.devices)

    def rank_fields(self, untimed: int) -> dict[str, Any]:
        peaks = self._peaks()
        self.own = [peaks[0], peaks[1] if self.cuda else None]
        allocated, reserved = (by_device and max(by_device) for by_device in self.own)
        return {"peak_memory_gib": allocated, "reserved_memory_gib": reserved}

    def run_fields(self, ranks: Sequence[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
        """The peaks by rank, or by device for one process with several devices."""
        fields: dict[str, Any] = {}
        for name, own in zip(("peak_memory_gib", "reserved_memory_gib"), self.own, strict=True):
            by_rank = own and [rank[name] for rank in ranks]
            fields[f"{name}_per_rank"] = own if own and len(own) > 1 else by_rank
        return fields


def interfaces_sent() -> int:
    """Bytes that have left this node since boot."""
    return sum(counters.bytes_sent for counters in interfaces())


def counts_network(nodes: int, world: World) -> bool:
    """Whether this process reads its node's counter.

    Nodes of a sweep that are all this machine (--launcher local) have no counter: what its
    interfaces send is something else.
    """
    local = launch().get("launcher") == "local"
    return nodes > 1 and world.local_rank == 0 and not local


def _grown(sent: int | None, now: int | None, began: int | None) -> int | None:
    return None if sent is None or now is None or began is None else sent + now - began


class Traffic:
    """What one rank sends between the edges of an epoch's time; evaluation and saving are excluded.

    The payload is what was handed over for exchange, the network bytes what left the node.
    """

    def __init__(
        self, read: Callable[[], Bytes] = lambda: (None, None), sent: Bytes = (0, 0)
    ) -> None:
        self.read = read
        self.sent = sent  # in this epoch, until the checkpoint or the last call of so_far()
        self.began: Bytes = (None, None)  # the reading at that time
        self.paused = False

    def start(self) -> None:
        self.began, self.paused = self.read(), False

    def so_far(self) -> Bytes:
        """What was sent in this epoch until now; what is sent from here to resume() is excluded."""
        now = self.read()
        fields = zip(self.sent, now, self.began, strict=True)
        payload, network = (_grown(*field) for field in fields)
        self.sent, self.began, self.paused = (payload, network), now, True
        return self.sent

    def resume(self) -> None:
        if self.paused:
            self.began, self.paused = self.read(), False

    def stop(self) -> dict[str, int | None]:
        """The epoch has ended: its fields in the rank's row."""
        sent, self.sent = self.so_far(), (0, 0)
        return dict(zip(TRAFFIC_FIELDS, sent, strict=True))


def traffic_of(context: Context | None, payload_bytes: Callable[[], int | None]) -> Traffic:
    """Unknown without a context. A node has one counter, which its first rank reads."""
    if context is None:
        return Traffic()
    reads = counts_network(context.world.nodes, context.world)
    return Traffic(
        lambda: (payload_bytes(), interfaces_sent() if reads else None), _sent_before(context)
    )


def _sent_before(context: Context) -> Bytes:
    """This rank's part of the epoch in which the checkpoint was written."""
    if "samples" not in context.epoch_so_far:  # it was written between two epochs
        return 0, 0
    by_rank = context.epoch_so_far.get("sent")
    if by_rank is None:
        return None, None
    if not context.other_processes:
        payload, network = by_rank[context.world.rank]
        return payload, network
    # The number of processes has changed: all of it counts once, on rank 0.
    ranks = [dict(zip(TRAFFIC_FIELDS, sent, strict=True)) for sent in by_rank]
    payload, network = over_ranks(ranks, context.world.per_node).values()
    return (payload, network) if context.is_rank0 else (0, 0)


def over_ranks(ranks: Sequence[dict[str, Any]], per_node: int) -> dict[str, int | None]:
    """The fields of the epoch's row: sums over the ranks, and over the first rank of each node."""
    payload = total([rank.get(TRAFFIC_FIELDS[0]) for rank in ranks])
    network = total([rank.get(TRAFFIC_FIELDS[1]) for rank in ranks[::per_node]])
    return dict(zip(TRAFFIC_FIELDS, (payload, related(payload, network)), strict=True))


def related(payload: int | None, network: int | None) -> int | None:
    """The network bytes, if the interfaces carry the payload.

    They do not between nodes on one machine, nor where a network has counters of its own.
    """
    stray = network is not None and network < STRAY_BYTES
    return None if payload and payload > STRAY_BYTES and stray else network

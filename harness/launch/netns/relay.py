"""The links between emulated nodes in user space: packets wait here as their link demands.

Each node has a TUN device, an interface whose packets a process reads and writes instead of a wire.
The kernel hands over up to 64 KB of one TCP stream at a time, with a header that says how to cut it
into packets of the interface's size (virtio_net_hdr of linux/virtio_net.h, 10 bytes). That is what
lets a relay written in Python carry gigabits; the streams still see a network of 1500 bytes.
"""

from __future__ import annotations

import fcntl
import gc
import heapq
import math
import os
import random
import select
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from harness.core.links import Link
from harness.core.settings import UserError
from harness.launch.netns import LARGEST_HANDOVER, ONE_PACKET, PACKET, Matrix, queue_s

DEVICE = "/dev/net/tun"
BATCH = 32  # packets of one node before the others get their turn
MOMENT_S = 0.0005  # what is handed over at once must not occupy a link for longer
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0  # linux/if_tun.h
TUN_NO_INFO_WITH_HEADER = 0x0001 | 0x1000 | 0x4000  # IFF_TUN, IFF_NO_PI, IFF_VNET_HDR
CHECKSUM_AND_SEGMENTS = 0x1 | 0x2 | 0x8  # TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO_ECN
HEADER = 10
LARGEST = HEADER + 65535
LAST_OF_DESTINATION = HEADER + 19  # byte of an IPv4 packet's address, the node's number


def open_device(name: str, device: str = DEVICE) -> int:
    """A new device in the network namespace of this process; it disappears when closed."""
    try:
        opened = os.open(device, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        request = struct.pack("16sH22x", name.encode(), TUN_NO_INFO_WITH_HEADER)
        fcntl.ioctl(opened, TUNSETIFF, request)
        fcntl.ioctl(opened, TUNSETOFFLOAD, CHECKSUM_AND_SEGMENTS)
    except FileNotFoundError:
        raise UserError(f"{device} is missing: modprobe tun, as root") from None
    except PermissionError:
        raise UserError(f"{device} may not be opened: chmod 666 {device}, as root") from None
    except OSError as error:
        raise UserError(f"{device}: {error.strerror}: modprobe tun, as root") from None
    return opened


def size_and_packets(data: bytes) -> tuple[int, int]:
    """On a wire: bytes with the headers of every packet, and packets."""
    size = len(data) - HEADER
    if not data[1]:
        return size, 1
    ip = (data[HEADER] & 15) * 4
    headers = ip + (data[HEADER + ip + 12] >> 4) * 4
    segment = data[4] | data[5] << 8
    packets = -(-(size - headers) // segment)
    return size + (packets - 1) * headers, packets


@dataclass(slots=True)
class Channel:
    """One direction between two nodes: its link, its queue, and what has passed."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    byte_s: float = 0.0  # per byte; 0: no limit
    loss: float = 0.0
    queue_s: float = 0.0  # the longest wait; what would wait longer is dropped
    free_at: float = 0.0
    last_at: float = 0.0
    bytes: int = 0
    packets: int = 0
    lost: int = 0

    def delivery(self, now: float, size: int, packets: int, draw: random.Random) -> float | None:
        """When a packet sent now arrives, None if it does not."""
        if self.loss and draw.random() < self.loss:
            self.lost += packets
            return None
        at = now
        if self.byte_s:
            begins = self.free_at if self.free_at > now else now
            if begins - now > self.queue_s:
                self.lost += packets
                return None
            at = self.free_at = begins + size * self.byte_s
        at += self.delay_s
        if self.jitter_s:
            at += draw.uniform(-self.jitter_s, self.jitter_s)
        # One route has one order, whatever the jitter.
        if at < self.last_at:
            at = self.last_at
        self.last_at = at
        self.bytes += size
        self.packets += packets
        return at


def channel_of(link: Link, back: Link) -> Channel:
    return Channel(
        delay_s=link.delay_ms / 1e3,
        jitter_s=link.jitter_ms / 1e3,
        byte_s=8e-6 / link.rate_mbit if link.rate_mbit else 0.0,
        loss=link.loss,
        queue_s=queue_s(link, back),
    )


def handover(links: Sequence[Link]) -> tuple[int, int]:
    """Single packets on lossy links, otherwise what the slowest link sends in a moment."""
    rates = [link.rate_mbit for link in links if link.rate_mbit]
    size = int(min(rates, default=math.inf) * 1e6 / 8 * MOMENT_S) if rates else 0
    if any(link.loss for link in links) or 0 < size < 2 * PACKET:
        return ONE_PACKET
    return LARGEST_HANDOVER if not size else (65535, min(size, 65536))


class Relay:
    """Reads the device of every node and writes each packet to the device of its destination."""

    def __init__(self, devices: Sequence[int], draw: random.Random | None = None) -> None:
        count = len(devices)
        self.devices = devices
        self.channels = [[Channel() for _ in range(count)] for _ in range(count)]
        self.cut_off: set[int] = set()
        self.draw = draw or random.Random()  # noqa: S311 - nothing secret about it
        self.waiting: list[tuple[float, int, int, int, bytes]] = []
        self.read = 0

    def change(self, links: Matrix) -> None:
        """Packets in flight arrive as they would have; the counters stay."""
        for i, row in enumerate(self.channels):
            for j, channel in enumerate(row):
                new = channel_of(links[i][j], links[j][i])
                for name in ("delay_s", "jitter_s", "byte_s", "loss", "queue_s"):
                    setattr(channel, name, getattr(new, name))

    def cut(self, node: int) -> None:
        self.cut_off.add(node)

    def join(self, node: int) -> None:
        self.cut_off.discard(node)

    def counters(self) -> list[list[dict[str, int]]]:
        """By sender and receiver: what has passed, and what was dropped."""
        return [
            [{"bytes": c.bytes, "packets": c.packets, "lost": c.lost} for c in row]
            for row in self.channels
        ]

    def run(self, control: int, answer: Callable[[], bool]) -> None:
        """Until answer() returns False; it is called when control is readable."""
        node_of = {device: node for node, device in enumerate(self.devices)}
        watched = [control, *self.devices]
        gc.disable()  # nothing here makes reference cycles
        while True:
            now = time.monotonic()
            while self.waiting and self.waiting[0][0] <= now:
                _, _, source, target, data = heapq.heappop(self.waiting)
                self._deliver(source, target, data)
            wait_s = max(0.0, self.waiting[0][0] - time.monotonic()) if self.waiting else None
            # Not epoll: its timeout in milliseconds is too coarse.
            ready, _, _ = select.select(watched, (), (), wait_s)
            for device in ready:
                if device != control:
                    self._read_batch(node_of[device], device)
                elif not answer():
                    return

    def _read_batch(self, source: int, device: int) -> None:
        """Send on a batch of the packets that a node has sent."""
        channels = self.channels[source]
        for _ in range(BATCH):
            try:
                data = os.read(device, LARGEST)
            except BlockingIOError:
                return
            target = data[LAST_OF_DESTINATION] - 1
            if not 0 <= target < len(channels) or data[HEADER] >> 4 != 4 or target == source:
                continue  # a broadcast, or nobody's address
            channel = channels[target]
            size, packets = size_and_packets(data)
            if self.cut_off and (source in self.cut_off or target in self.cut_off):
                channel.lost += packets
                continue
            now = time.monotonic()
            at = channel.delivery(now, size, packets, self.draw)
            if at is None:
                continue
            if at <= now:
                self._deliver(source, target, data)
            else:
                self.read += 1
                heapq.heappush(self.waiting, (at, self.read, source, target, data))

    def _deliver(self, source: int, target: int, data: bytes) -> None:
        if self.cut_off and (source in self.cut_off or target in self.cut_off):
            return  # it was in flight when the cable was pulled
        # A node whose interface is down gets nothing, as on a real network.
        with suppress(OSError):
            os.write(self.devices[target], data)

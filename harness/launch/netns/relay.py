"""What carries packets between emulated nodes: a relay in user space.

Each node has a TUN device, an interface whose packets the relay reads and writes instead of a
wire. The kernel hands over up to 64 KB of one TCP stream at a time, with a header that says how to
cut it into packets of the interface's size (virtio_net_hdr of linux/virtio_net.h, 10 bytes). That
is what lets a relay written in Python carry gigabits; the streams still see a network of 1500
bytes.
"""

from __future__ import annotations

import fcntl
import gc
import heapq
import os
import random
import select
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from harness.core.links import HANDOVER_BYTES, PACKET, Link, handover_bytes
from harness.core.settings import UserError

INTERFACE = "link0"  # the same name in every node
SHORTEST_QUEUE_S = 0.1
# (segments, bytes) that a kernel may hand over at once: a single packet, or up to 64 KiB.
ONE_PACKET = (1, HANDOVER_BYTES)
LARGEST_HANDOVER = (65535, HANDOVER_BYTES)

DEVICE = "/dev/net/tun"
BATCH = 32  # packets of one node before the other nodes get their turn
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0  # linux/if_tun.h
TUN_NO_INFO_WITH_HEADER = 0x0001 | 0x1000 | 0x4000  # IFF_TUN, IFF_NO_PI, IFF_VNET_HDR
CHECKSUM_AND_SEGMENTS = 0x1 | 0x2 | 0x8  # TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO_ECN
HEADER = 10
LARGEST = HEADER + 65535
LAST_OF_DESTINATION = HEADER + 19  # last byte of the IPv4 destination address; it encodes the node

Matrix = Sequence[Sequence[Link]]  # [from][to]
Counters = list[list[dict[str, int]]]  # [from][to]: bytes, packets, lost


def address(node: int) -> str:
    """The address of a node; invisible outside, so all sets of emulated nodes may use the same."""
    return f"10.117.0.{node + 1}"


def queue_s(link: Link, back: Link) -> float:
    """How long a packet may wait for a link with a rate: two round trips, as in routers.

    Longer queues would only lengthen the round trip of a busy link, shorter ones starve TCP.
    """
    return max(SHORTEST_QUEUE_S, 2 * (link.delay_ms + back.delay_ms) / 1e3)


def open_device(name: str, device: str = DEVICE) -> int:
    """Create a TUN device in this process's network namespace; closing it removes it."""
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
    """Bytes on the wire, including the headers of every packet, and number of packets."""
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
    """One direction between two nodes: its link, its queue, and its counters."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    byte_s: float = 0.0  # per byte; 0: no limit
    loss: float = 0.0
    queue_s: float = 0.0  # the longest wait; a packet that would wait longer is dropped
    free_at: float = 0.0
    last_at: float = 0.0
    bytes: int = 0
    packets: int = 0
    lost: int = 0

    def change(self, link: Link, back: Link) -> None:
        """Change the link; packets in flight keep their arrival times, counters go on."""
        self.delay_s, self.jitter_s = link.delay_ms / 1e3, link.jitter_ms / 1e3
        self.byte_s = 8e-6 / link.rate_mbit if link.rate_mbit else 0.0
        self.loss, self.queue_s = link.loss, queue_s(link, back)

    def delivery(self, now: float, size: int, packets: int, draw: random.Random) -> float | None:
        """When a packet that is sent now arrives; None if it is lost."""
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
        # Packets stay in order, whatever the jitter, as on one route.
        if at < self.last_at:
            at = self.last_at
        self.last_at = at
        self.bytes += size
        self.packets += packets
        return at


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

    @staticmethod
    def handover(links: Sequence[Link]) -> tuple[int, int]:
        """Single packets on lossy links, else what the slowest link sends in MOMENT_S."""
        rates = [link.rate_mbit for link in links if link.rate_mbit]
        size = handover_bytes(min(rates) * 1e6 / 8) if rates else 0
        if any(link.loss for link in links) or 0 < size < 2 * PACKET:
            return ONE_PACKET
        return (65535, size) if size else LARGEST_HANDOVER

    def change(self, links: Matrix) -> None:
        for i, row in enumerate(self.channels):
            for j, channel in enumerate(row):
                channel.change(links[i][j], links[j][i])

    def cut(self, node: int) -> None:
        self.cut_off.add(node)

    def join(self, node: int) -> None:
        self.cut_off.discard(node)

    def counters(self) -> Counters:
        return [
            [{"bytes": c.bytes, "packets": c.packets, "lost": c.lost} for c in row]
            for row in self.channels
        ]

    def run(self, control: int, answer: Callable[[], bool]) -> None:
        """Carry packets until answer(), called when control is readable, returns False."""
        node_of = {device: node for node, device in enumerate(self.devices)}
        watched = [control, *self.devices]
        gc.disable()  # this loop creates no reference cycles
        while True:
            now = time.monotonic()
            while self.waiting and self.waiting[0][0] <= now:
                _, _, source, target, data = heapq.heappop(self.waiting)
                self._deliver(source, target, data)
            wait_s = max(0.0, self.waiting[0][0] - time.monotonic()) if self.waiting else None
            # select rather than epoll, whose timeout in milliseconds is too coarse.
            ready, _, _ = select.select(watched, (), (), wait_s)
            for device in ready:
                if device != control:
                    self._read_batch(node_of[device], device)
                elif not answer():
                    return

    def _read_batch(self, source: int, device: int) -> None:
        """Forward a batch of packets that a node has sent."""
        channels = self.channels[source]
        for _ in range(BATCH):
            try:
                data = os.read(device, LARGEST)
            except BlockingIOError:
                return
            target = data[LAST_OF_DESTINATION] - 1
            if not 0 <= target < len(channels) or data[HEADER] >> 4 != 4 or target == source:
                continue  # a broadcast, or an address of no node
            channel = channels[target]
            size, packets = size_and_packets(data)
            if self._is_cut(source, target):
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

    def _is_cut(self, source: int, target: int) -> bool:
        return source in self.cut_off or target in self.cut_off

    def _deliver(self, source: int, target: int, data: bytes) -> None:
        if self._is_cut(source, target):
            return  # the packet was in flight when the node was cut off
        # A node whose interface is down receives nothing, as on a real network.
        with suppress(OSError):
            os.write(self.devices[target], data)

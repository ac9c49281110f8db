"""The relay as far as it is arithmetic: no namespaces, no waiting."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from harness.core.links import PACKET, Link, link_of, packets_at_once
from harness.launch.netns.relay import (
    HEADER,
    LARGEST_HANDOVER,
    ONE_PACKET,
    Channel,
    Relay,
    address,
    queue_s,
    size_and_packets,
)

MS = 1e-3


def channel_of(link: Link, back: Link) -> Channel:
    channel = Channel()
    channel.change(link, back)
    return channel


def sent(wire: Channel, times: list[float], size: int = 1500, seed: int = 0) -> list[float | None]:
    draw = random.Random(seed)
    return [wire.delivery(now, size, 1, draw) for now in times]


def test_a_delay_is_a_delay() -> None:
    assert sent(channel_of(Link(20), Link(20)), [0, 1, 1.5]) == pytest.approx([0.02, 1.02, 1.52])
    assert sent(channel_of(Link(), Link()), [3.0]) == [3.0]


def test_a_rate_takes_packets_one_after_the_other() -> None:
    # 1500 bytes at 12 Mbit/s take a millisecond; a queue that ran empty starts anew.
    wire = channel_of(Link(5, 12), Link(5, 12))
    got = sent(wire, [0, 0, 0, 1.0])
    assert got == pytest.approx([6 * MS, 7 * MS, 8 * MS, 1.006])


def test_a_full_queue_drops_what_comes() -> None:
    wire = channel_of(Link(0, 12), Link(0, 12))
    got = sent(wire, [0.0] * 150, size=1400)
    # A tenth of a second holds 107.1 of them, and the one that is on the wire counts as well.
    assert [at is None for at in got] == [False] * 108 + [True] * 42
    assert (wire.packets, wire.lost, wire.bytes) == (108, 42, 108 * 1400)


def test_a_queue_holds_two_round_trips() -> None:
    assert queue_s(Link(20), Link(30)) == pytest.approx(0.1)
    assert queue_s(Link(50), Link(70)) == pytest.approx(0.24)


def test_jitter_is_even_and_keeps_the_order() -> None:
    wire = channel_of(Link(20, None, 5), Link(20))
    apart = [at - now for now, at in zip(range(2000), sent(wire, list(range(2000))), strict=True)]
    assert min(apart) >= 15 * MS and max(apart) <= 25 * MS
    assert sum(apart) / 2000 == pytest.approx(20 * MS, rel=0.01)
    assert sum(1 for wait in apart if wait < 17.5 * MS) == pytest.approx(500, abs=80)
    dense = sent(channel_of(Link(20, None, 5), Link(20)), [n * 0.1 * MS for n in range(2000)])
    assert dense == sorted(dense)


def test_loss_is_a_share_of_the_packets() -> None:
    wire = channel_of(Link(0, None, 0, 0.1), Link())
    got = sent(wire, [0.0] * 10_000)
    lost = sum(at is None for at in got)
    assert lost == wire.lost and wire.lost + wire.packets == 10_000
    assert abs(lost - 1000) < 4 * (10_000 * 0.1 * 0.9) ** 0.5


def packet(source: int, target: int, payload: bytes = b"", segment: int = 0) -> bytes:
    """As a TUN device hands it over: its header, IPv4, TCP, payload."""
    offload = struct.pack("<BBHHHH", 1, 1 if segment else 0, 40, segment, 20, 16)
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 40 + len(payload), 0, 0, 64, 6, 0)
    ip += bytes([10, 117, 0, source + 1, 10, 117, 0, target + 1])
    return offload + ip + bytes(12) + bytes([5 << 4]) + bytes(7) + payload


def test_what_is_handed_over_at_once_counts_as_its_packets() -> None:
    payload = bytes(4000)
    whole = size_and_packets(packet(0, 1, payload, segment=1460))
    cut = [payload[at : at + 1460] for at in range(0, 4000, 1460)]
    alone = [size_and_packets(packet(0, 1, part)) for part in cut]
    assert whole == (sum(size for size, _ in alone), len(cut)) == (4120, 3)


HANDOVERS = [
    (["none", "20ms"], LARGEST_HANDOVER),
    (["loss1%", "none"], ONE_PACKET),
    (["10mbit"], ONE_PACKET),  # two packets would take 2.4 ms
    (["100mbit", "2000mbit"], (65535, 6250)),  # of the slowest link, half a millisecond
    (["2000mbit"], LARGEST_HANDOVER),
]


@pytest.mark.parametrize(("links", "handover"), HANDOVERS)
def test_no_more_is_handed_over_than_a_link_takes(
    links: list[str], handover: tuple[int, int]
) -> None:
    assert Relay.handover([link_of(text).between(0, 1) for text in links]) == handover


@pytest.mark.parametrize("rate_mbit", [1, 30, 100, 1000, 2000])
def test_predictions_count_the_packets_of_a_handover(rate_mbit: float) -> None:
    handover = Relay.handover([Link(rate_mbit=rate_mbit)])
    expected = 1 if handover == ONE_PACKET else handover[1] // PACKET
    assert packets_at_once(rate_mbit * 1e6 / 8) == expected


class Rig:
    def __init__(self, count: int) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(count)]
        self.nodes = [inside for inside, _ in pairs]
        self.devices = [device for _, device in pairs]
        for inside, device in pairs:
            inside.settimeout(2)
            device.setblocking(False)
        self.relay = Relay([device.fileno() for device in self.devices], random.Random(0))
        self.read, self.write = os.pipe()
        self.thread = threading.Thread(target=self.relay.run, args=(self.read, lambda: False))
        self.thread.start()

    def close(self) -> None:
        os.write(self.write, b"x")
        self.thread.join()
        for end in (*self.nodes, *self.devices):
            end.close()
        os.close(self.read)
        os.close(self.write)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(3)
    yield rig
    rig.close()


def test_packets_reach_the_node_that_they_are_for(rig: Rig) -> None:
    # IPv6, nobody's address and a broadcast go nowhere, and stop nothing.
    version_6 = bytearray(packet(0, 2))
    version_6[HEADER] = 0x60
    rig.nodes[0].send(version_6)
    for target in (9, 254, -1):
        rig.nodes[0].send(packet(0, target))
    rig.nodes[0].send(packet(0, 2, b"one"))
    rig.nodes[0].send(packet(0, 1, b"two"))
    assert rig.nodes[2].recv(9999) == packet(0, 2, b"one")
    assert rig.nodes[1].recv(9999) == packet(0, 1, b"two")
    counters = rig.relay.counters()
    assert counters[0][2] == {"bytes": 43, "packets": 1, "lost": 0} == counters[0][1]
    assert counters[2][0] == {"bytes": 0, "packets": 0, "lost": 0}


def test_packets_keep_their_order_when_a_link_gets_shorter(rig: Rig) -> None:
    def links(delay_ms: float) -> list[list[Link]]:
        return [[Link(delay_ms)] * 3] * 3

    rig.relay.change(links(200))
    rig.nodes[0].send(packet(0, 1, b"slow"))
    rig.nodes[0].send(packet(0, 2, b"far"))
    while rig.relay.counters()[0][2]["packets"] == 0:
        pass
    rig.relay.change(links(0))
    rig.nodes[0].send(packet(0, 1, b"fast"))
    assert [rig.nodes[1].recv(9999)[-4:] for _ in range(2)] == [b"slow", b"fast"]


def test_a_node_that_is_cut_off_hears_and_says_nothing(rig: Rig) -> None:
    rig.relay.cut(1)
    rig.nodes[0].send(packet(0, 1, b"lost"))
    rig.nodes[0].send(packet(0, 2, b"here"))
    assert rig.nodes[2].recv(9999)[-4:] == b"here"
    rig.relay.join(1)
    rig.nodes[0].send(packet(0, 1, b"back"))
    assert rig.nodes[1].recv(9999)[-4:] == b"back"
    assert rig.relay.counters()[0][1]["lost"] == 1


def test_addresses_are_one_each() -> None:
    assert len({address(node) for node in range(200)}) == 200
    assert address(199) == "10.117.0.200"

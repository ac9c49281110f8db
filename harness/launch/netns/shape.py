"""What both ways to emulate a link share: addresses, the length of a queue, sizes."""

from __future__ import annotations

from collections.abc import Sequence

from harness.core.links import Link

INTERFACE = "link0"  # the same name in every node
Matrix = Sequence[Sequence[Link]]  # [from][to]
MOST_NODES = 200
PACKET = 1500  # bytes on an Ethernet, headers of IP and TCP included
ONE_PACKET = (1, 65536)  # segments and bytes that a kernel may hand over at once
LARGEST_HANDOVER = (65535, 65536)
SHORTEST_QUEUE_S = 0.1
QUEUE = 10_000  # packets before the emulator; those that wait for the link are counted there


def address(node: int) -> str:
    """Nobody outside sees it: every set of emulated nodes may use the same."""
    return f"10.117.0.{node + 1}"


def queue_s(link: Link, back: Link) -> float:
    """How long a packet may wait at a link with a rate: two round trips, as routers are given.

    Longer queues would only lengthen the round trip of a busy link, shorter ones starve TCP.
    """
    return max(SHORTEST_QUEUE_S, 2 * (link.delay_ms + back.delay_ms) / 1e3)

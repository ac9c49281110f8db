"""Emulated nodes: one machine stands in for several, in network namespaces joined by slow links.

Here: what both ways to emulate a link share, the kernel's (netem.py) and ours (relay.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.core.links import Link

INTERFACE = "link0"  # the same name in every node
MOST_NODES = 200
PACKET = 1500  # bytes on an Ethernet, IP and TCP headers included
QUEUE = 10_000  # packets before the emulator; those that wait for the link are counted there
SHORTEST_QUEUE_S = 0.1
# Segments and bytes that a kernel may hand over at once as one packet.
ONE_PACKET = (1, 65536)
LARGEST_HANDOVER = (65535, 65536)

Matrix = Sequence[Sequence[Link]]  # [from][to]


def address(node: int) -> str:
    """Invisible from outside: every set of emulated nodes may use the same addresses."""
    return f"10.117.0.{node + 1}"


def queue_s(link: Link, back: Link) -> float:
    """How long a packet may wait at a link with a rate: two round trips, as in routers.

    Longer queues would only lengthen the round trip of a busy link, shorter ones starve TCP.
    """
    return max(SHORTEST_QUEUE_S, 2 * (link.delay_ms + back.delay_ms) / 1e3)

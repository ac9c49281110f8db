"""Loss and jitter by simulation: how much longer an exchange takes than over a steady link.

The messages of one TCP connection are simulated (tcp.py). Nodes then exchange with messages drawn
from these, each waiting for what it needs. Beyond LONG packets, a message goes on at the rate of
its second half: windows over lossy links are much smaller, so that more packets tell nothing new.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from harness.core.collectives import TCP_SEGMENT, Wire
from harness.read.predict.lossy.tcp import Connection, packet_s

SEED = 1
LONG = 2048  # packets
PACKETS, MESSAGES = 60_000, 10_000  # of a simulation, at most
# Exchanges of a simulation have so many rounds in all, each at most MOST_ROUNDS; the time of more
# is scaled. More nodes than MOST_NODES count as these.
ROUNDS, MOST_ROUNDS, MOST_NODES = 3200, 32, 32


@lru_cache(256)
def messages_s(wire: Wire, control: str, packets: int) -> NDArray[np.float64]:
    """By how much each of many messages, one after the other, is later than without loss."""
    sent = min(packets, LONG)
    count = min(MESSAGES, max(20, PACKETS // sent))
    connection = Connection(wire, control, random.Random(SEED))  # noqa: S311 - nothing secret
    later, halves, begins_s = [], [], 0.0
    for _ in range(count + count // 4):  # the first ones open or close the window
        half_s, end_s = connection.send(begins_s, sent)
        later.append(end_s - begins_s - wire.delay_s - sent * packet_s(wire))
        halves.append(end_s - half_s - (sent // 2) * packet_s(wire))
        begins_s = end_s + wire.delay_s
    found = np.array(later[count // 4 :])
    if packets <= LONG:
        return found
    more_s = max(0.0, float(np.mean(halves[count // 4 :]))) * (packets - LONG) / (LONG // 2)
    middle_s = found.mean()
    return np.asarray(middle_s + more_s + (found - middle_s) * math.sqrt(packets / LONG))


def waited_s(
    late_s: NDArray[np.float64], message_s: NDArray[np.float64], least_s: float, to_all: bool
) -> NDArray[np.float64]:
    """By how much nodes are late after a round of messages: in a ring each waits for one other,
    else for all others. message_s: by which their messages (to, from) are later than least_s.
    """
    if not to_all:
        return np.maximum(late_s - least_s, np.roll(late_s, 1) + message_s[:, 0])
    arrive_s = late_s[np.newaxis, :] + message_s
    np.fill_diagonal(arrive_s, late_s - least_s)
    return np.asarray(arrive_s.max(axis=1))


@dataclass(frozen=True)
class Longer:
    """How much longer an exchange takes, and the standard deviation over drawn exchanges."""

    mean_s: float = 0.0
    sd_s: float = 0.0
    draws: int = 0


@lru_cache(1024)
def longer(
    wire: Wire, control: str, size: float, rounds: float, nodes: int, to_all: bool
) -> Longer:
    """Of an exchange with so many bytes on a link, in rounds of messages of which each waits for
    the one before.
    """
    if wire.is_steady or nodes < 2:
        return Longer()
    played = min(MOST_ROUNDS, max(1, round(rounds)))
    packets = max(1, math.ceil(size / max(1, round(rounds)) / TCP_SEGMENT))
    pool = messages_s(wire, control, packets)
    least_s = wire.delay_s + packets * packet_s(wire)
    draw, count = np.random.default_rng(SEED), min(nodes, MOST_NODES)
    late_s, ends = np.zeros(count), [0.0]
    for _ in range(ROUNDS // played):
        drawn = pool[draw.integers(len(pool), size=(played, count, count if to_all else 1))]
        for message_s in drawn:
            late_s = waited_s(late_s, message_s, least_s, to_all)
        ends.append(float(late_s.mean()))
    each = np.diff(ends) * max(1.0, rounds) / played
    return Longer(float(each.mean()), float(each.std(ddof=1)), len(each))


def assumption(control: str) -> str:
    return (
        f"loss and jitter by simulation (seed {SEED}, {ROUNDS:,} drawn rounds of messages): each "
        f"packet is lost independently, jitter keeps the order, and TCP has {control}"
    )

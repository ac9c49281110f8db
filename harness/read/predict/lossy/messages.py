"""Loss and jitter by simulation: how much longer an exchange takes than over a steady link.

The messages of one TCP connection are simulated (tcp.py). Nodes then exchange with messages drawn
from these, each waiting for what it needs. Beyond LONG packets, a message goes on at the rate of
its second half: windows over lossy links are much smaller, so that more packets tell nothing new.
"""

from __future__ import annotations

import math
import random
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from harness.core.collectives import TCP_SEGMENT, Wire
from harness.core.settings import UserError
from harness.read.predict.lossy.tcp import Connection, packet_s

SEED = 1
LONG = 2048  # packets
PACKETS, MESSAGES = 60_000, 10_000  # of a simulation, at most
ROUNDS, AT_ONCE = 3200, 32  # of messages between nodes, and how many are drawn at a time
MOST_NODES = 32  # more count as these
MOST_LOSS = 0.5


def messages_s(wire: Wire, control: str, packets: int) -> NDArray[np.float64]:
    """By how much each of many messages, one after the other, is later than without loss."""
    later, half_s = _sent(wire, control, min(packets, LONG))
    if packets <= LONG:
        return later
    more_s = max(0.0, half_s) * (packets - LONG) / (LONG // 2)
    middle_s = later.mean()
    return np.asarray(middle_s + more_s + (later - middle_s) * math.sqrt(packets / LONG))


@lru_cache(256)
def _sent(wire: Wire, control: str, packets: int) -> tuple[NDArray[np.float64], float]:
    """By how much each message is later, and on average its second half."""
    if wire.loss > MOST_LOSS:
        raise UserError(f"a loss of {wire.loss:.3g} is not simulated: {MOST_LOSS:g} at most")
    count = min(MESSAGES, max(20, PACKETS // packets))
    connection = Connection(wire, control, random.Random(SEED))  # noqa: S311 - nothing secret
    later, halves, begins_s = [], [], 0.0
    for _ in range(count + count // 4):  # the first ones open or close the window
        half_s, end_s = connection.send(begins_s, packets)
        later.append(end_s - begins_s - wire.delay_s - packets * packet_s(wire))
        halves.append(end_s - half_s - (packets // 2) * packet_s(wire))
        begins_s = end_s + wire.delay_s
    return np.array(later[count // 4 :]), float(np.mean(halves[count // 4 :]))


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


def longer_s(
    wire: Wire, control: str, size: float, rounds: float, nodes: int, to_all: bool
) -> float:
    """How much longer an exchange takes that puts so many bytes on a link, in rounds of messages of
    which each waits for the one before.
    """
    if wire.is_steady or nodes < 2 or rounds <= 0:
        return 0.0
    packets = max(1, math.ceil(size / max(1.0, rounds) / TCP_SEGMENT))
    return rounds * _round_s(wire, control, packets, min(nodes, MOST_NODES), to_all)


@lru_cache(1024)
def _round_s(wire: Wire, control: str, packets: int, nodes: int, to_all: bool) -> float:
    """By how much a round of messages between nodes is later, of many without a barrier."""
    pool = messages_s(wire, control, packets)
    least_s = wire.delay_s + packets * packet_s(wire)
    draw, late_s = np.random.default_rng(SEED), np.zeros(nodes)
    for _ in range(ROUNDS // AT_ONCE):
        size = (AT_ONCE, nodes, nodes if to_all else 1)
        for message_s in pool[draw.integers(len(pool), size=size)]:
            late_s = waited_s(late_s, message_s, least_s, to_all)
    return float(late_s.mean()) / ROUNDS


def assumption(control: str) -> str:
    return (
        f"loss and jitter by simulation (seed {SEED}, {ROUNDS:,} drawn rounds of messages): each "
        f"packet is lost independently, jitter keeps the order, and TCP has {control}"
    )

"""What a rank sends while it trains: bytes handed over, and bytes that left its node.

Counted between the edges of the epoch's time: evaluation and saving are no part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.train.context import Context
from harness.train.measure.base import total

FIELDS = ("payload_bytes", "network_sent_bytes")
STRAY_BYTES = 10_000  # that a machine may send in an epoch for reasons of its own
INTERFACES = Path("/proc/self/net/dev")  # of this process's network namespace
Bytes = tuple[int | None, int | None]  # of each field; None: not known


def interfaces_sent(file: Path = INTERFACES) -> int | None:
    """Bytes that all interfaces but lo have sent since they are there; None where Linux is not."""
    try:
        lines = file.read_text().splitlines()[2:]
    except OSError:
        return None
    counters = {name.strip(): of.split() for name, _, of in (line.partition(":") for line in lines)}
    return sum(int(of[8]) for name, of in counters.items() if name != "lo")


class Traffic:
    """Of one rank, epoch by epoch."""

    def __init__(
        self, read: Callable[[], Bytes] = lambda: (None, None), before: Bytes = (0, 0)
    ) -> None:
        self.read = read
        self.before = before  # in the epoch in which a checkpoint was made, by then
        self.began: Bytes = (None, None)
        self.paused: Bytes | None = None  # what was read when a pause began

    def start(self) -> None:
        self.began, self.paused = self.read(), None

    def so_far(self) -> Bytes:
        """In this epoch until now; what is sent from here to resume() does not count."""
        self.paused = self.read()
        return _each(lambda now, began, before: now - began + before, self.paused, self.began,
                     self.before)  # fmt: skip

    def resume(self) -> None:
        if self.paused is not None:
            self.began = _each(
                lambda b, now, at: b + now - at, self.began, self.read(), self.paused
            )
            self.paused = None

    def stop(self) -> dict[str, int | None]:
        """The epoch has ended: its fields of the rank's row."""
        found = self.so_far()
        self.before = (0, 0)
        return dict(zip(FIELDS, found, strict=True))


def traffic_of(context: Context | None, payload_bytes: Callable[[], int | None]) -> Traffic:
    """Unknown without a context. A node has one counter, which its first rank reads."""
    if context is None:
        return Traffic()
    reads = context.world.nodes > 1 and context.world.local_rank == 0
    return Traffic(
        lambda: (payload_bytes(), interfaces_sent() if reads else None), _before(context)
    )


def _before(context: Context) -> Bytes:
    """This rank's part of the epoch in which the checkpoint was made."""
    if "samples" not in context.epoch_so_far:  # it was made between two epochs
        return 0, 0
    by_rank = context.epoch_so_far.get("sent")
    if by_rank is None:
        return None, None
    if not context.other_processes:
        payload, network = by_rank[context.world.rank]
        return payload, network
    # Others have come or gone: counted once, with rank 0.
    ranks = [dict(zip(FIELDS, of, strict=True)) for of in by_rank]
    whole = over_ranks(ranks, context.world.per_node)
    return (whole[FIELDS[0]], whole[FIELDS[1]]) if context.is_rank0 else (0, 0)


def over_ranks(ranks: Sequence[dict[str, Any]], per_node: int) -> dict[str, int | None]:
    """The fields of the epoch's row: sums over the ranks, and over the first rank of each node."""
    payload = total([rank.get(FIELDS[0]) for rank in ranks])
    network = total([rank.get(FIELDS[1]) for rank in ranks[::per_node]])
    return {FIELDS[0]: payload, FIELDS[1]: carried(payload, network)}


def carried(payload: int | None, network: int | None) -> int | None:
    """What the interfaces have sent, if it is they that carry what is handed over: not of nodes on
    one machine, and not where a network has counters of its own.
    """
    stray = network is not None and network < STRAY_BYTES
    return None if payload and payload > STRAY_BYTES and stray else network


def _each(what: Callable[..., int], *of: Bytes) -> Bytes:
    first, second = (None if None in field else what(*field) for field in zip(*of, strict=True))
    return first, second

"""Direct sends and receives between ranks, without a ring: what a rank has for the others leaves at
once, to all of them.

gloo sends nothing before the receiver has announced its receive. A receive that is posted before it
is needed saves that latency; so what comes again is posted ahead.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from harness.core.collectives import GLOO
from harness.core.topology import World

BLOCK = 4096  # bytes of a message that arrive in one latency: its length and its beginning
LENGTH = 8  # bytes of the length
# Tags in the group of all ranks, where rows have the numbers from 0 on, and messages of collectives
# have numbers of another kind.
TAG, REST_TAG, ROWS_TAG = 2**31 - 3, 2**31 - 2, 2**31 - 1


class Units:
    """Nodes, or single ranks, and the process groups inside and between them.

    The group of all ranks has its connections already: a new group takes eight round trips, and its
    first exchanges as many more. The link probe has opened the TCP windows of those that it used.
    """

    def __init__(self, world: World, scope: str | None, background: bool = False) -> None:
        """background: exchanges go on while the training makes others."""
        self.size = world.per_node if scope == "node" else 1  # ranks of a unit
        self.count = world.size // self.size
        self.index = world.rank // self.size
        self.leader = self.index * self.size  # the rank that communicates for its unit
        self.leads = world.rank == self.leader
        self.inside = self.between = None
        if self.count == 1:
            return
        if self.size == 1 and not background and dist.get_backend() == GLOO:
            self.between = dist.group.WORLD
            return
        # new_group is collective: every rank creates every group, in the same order. The group
        # between units is a new one even if it holds all ranks, so that an exchange in the
        # background cannot block other collectives.
        if self.size > 1:
            for leader in range(0, world.size, self.size):
                group = dist.new_group(list(range(leader, leader + self.size)))
                if leader == self.leader:
                    self.inside = group
        self.between = dist.new_group(list(range(0, world.size, self.size)))


class Direct:
    """One rank of a group whose ranks send to each other."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.others = [rank for rank in range(self.ranks) if rank != self.rank]

    def send(self, part: torch.Tensor, to: int, tag: int) -> Any:
        return dist.isend(part, group=self.group, group_dst=to, tag=tag)

    def receive(self, part: torch.Tensor, of: int, tag: int) -> Any:
        return dist.irecv(part, group=self.group, group_src=of, tag=tag)

    def wait(self, works: Iterable[Any]) -> None:
        for work in works:
            work.wait(collective_timeout())


def collective_timeout() -> timedelta:
    """How long collectives of the training wait. It may change: an elastic run shortens it when
    training begins.
    """
    world: Any = dist.group.WORLD
    timeout: timedelta = world._get_backend(torch.device("cpu")).options._timeout
    return timeout


class Messages(Direct):
    """Messages from every rank to all others; all ranks take part in each exchange."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self.posted = self._post()

    def _post(self) -> tuple[dict[int, torch.Tensor], list[Any]]:
        """Receives of the next message of every rank."""
        blocks = {of: torch.empty(BLOCK, dtype=torch.uint8) for of in self.others}
        return blocks, [self.receive(block, of, TAG) for of, block in blocks.items()]

    def exchange(self, own: bytes) -> list[bytes]:
        """The messages in the order of ranks. A message longer than a block takes one more round
        trip.
        """
        blocks, receives = self.posted
        self.posted = self._post()  # before this one is sent: a rank that has it knows of the next
        head = (len(own).to_bytes(LENGTH) + own)[:BLOCK]
        sends = self._to_all(head.ljust(BLOCK, b"\0"), TAG)
        self.wait(receives)
        heads = {of: block.numpy().tobytes() for of, block in blocks.items()}
        rests = {of: _rest(int.from_bytes(head[:LENGTH])) for of, head in heads.items()}
        receives = [self.receive(rest, of, REST_TAG) for of, rest in rests.items() if len(rest)]
        if rest := own[BLOCK - LENGTH :]:
            sends += self._to_all(rest, REST_TAG)
        self.wait([*receives, *sends])
        messages = {self.rank: own}
        for of, head in heads.items():
            length, rest = int.from_bytes(head[:LENGTH]), rests[of].numpy().tobytes()
            messages[of] = (head[LENGTH:] + rest)[:length]
        return [messages[rank] for rank in range(self.ranks)]

    def _to_all(self, message: bytes, tag: int) -> list[Any]:
        part = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        return [self.send(part, to, tag) for to in self.others]

    def rows(self, own: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, which are of one shape, in one round trip."""
        everyone = [torch.empty_like(own) for _ in range(self.ranks)]
        everyone[self.rank] = own
        receives = [self.receive(everyone[of], of, ROWS_TAG) for of in self.others]
        self.wait([*receives, *(self.send(own, to, ROWS_TAG) for to in self.others)])
        return everyone


def _rest(length: int) -> torch.Tensor:
    return torch.empty(max(0, length - (BLOCK - LENGTH)), dtype=torch.uint8)

"""The mean of a row of numbers over ranks, each part sent straight to the rank that adds it up.

gloo's own all-reduce has two segments of 1 MB under way, and waits a round trip for more. Here all
of a row is under way at once: of two ranks each sends the other everything, in one delay; of more,
each adds up one part and sends the result to all, in two. No rank sends more bytes than in a ring.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from harness.core.settings import UserError

Parts = dict[int, torch.Tensor]  # by the rank that sends them


Expected = tuple[Parts, list[Any]]  # where they will be, and the receiving of them


class Direct:
    """Means over the ranks of a group, several at a time: every rank begins the same ones.

    The group is its own: what was expected for a row that never came would take what others send.
    """

    def __init__(self, group: Any, sent_as: torch.dtype | None = None) -> None:
        if (backend := dist.get_backend(group)) != "gloo":
            raise UserError(
                f"--exchange direct sends through gloo, and this run has {backend}: leave it out"
            )
        self.group = group
        self.sent_as = sent_as  # None: as it is
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.others = [rank for rank in range(self.ranks) if rank != self.rank]
        # By slot: the others' parts of the next row, and memory for those of the one after it.
        self.expected: dict[int, Expected] = {}
        self.spare: dict[int, Parts] = {}

    def begin(self, row: torch.Tensor, slot: int = 0, again: bool = False) -> Callable[[], None]:
        """Send what the others need of this row; what is returned waits until the row is the mean.

        Rows that are under way together have slots of their own. again: the slot's next row is of
        the same size. Its parts are expected from now on, since gloo sends nothing before it has
        heard that it is expected, which would take a delay more.
        """
        row.mul_(1 / self.ranks)  # before anything is added, as DDP does it
        wire = row if self.sent_as is None else row.to(self.sent_as)
        whole = self.ranks == 2
        parts = [wire, wire] if whole else list(wire.tensor_split(self.ranks))
        own = parts[self.rank]
        total = row if whole else row.tensor_split(self.ranks)[self.rank]
        expected = self.expected.pop(slot) if slot in self.expected else self._expect(own, slot)
        received, receiving = expected
        assert all(part.shape == own.shape for part in received.values())
        if again:
            self.expected[slot] = self._expect(own, slot)
        sending = [self._send(parts[to], to, 2 * slot) for to in self.others]
        # A sum may come to where a part was: it contains the part, which has been sent then.
        sums = [] if whole else [self._receive(parts[of], of, 2 * slot + 1) for of in self.others]

        def finish() -> None:
            self._wait(receiving)
            if whole:
                self._wait(sending)  # from where the sum will be
            total.copy_(own)
            add(total, self.rank, received)
            if again:
                self.spare[slot] = received
            if not whole:
                own.copy_(total)
                returning = [self._send(own, to, 2 * slot + 1) for to in self.others]
                self._wait([*sums, *sending, *returning])
                row.copy_(wire)

        return finish

    def _expect(self, own: torch.Tensor, slot: int) -> Expected:
        """The others' parts, each as large as this rank's own."""
        parts = self.spare.pop(slot, None) or {of: torch.empty_like(own) for of in self.others}
        return parts, [self._receive(part, of, 2 * slot) for of, part in parts.items()]

    def _send(self, part: torch.Tensor, to: int, tag: int) -> Any:
        return dist.isend(part, group=self.group, group_dst=to, tag=tag)

    def _receive(self, part: torch.Tensor, of: int, tag: int) -> Any:
        return dist.irecv(part, group=self.group, group_src=of, tag=tag)

    def _wait(self, works: list[Any]) -> None:
        for work in works:
            work.wait(patience())


def patience() -> timedelta:
    """How long the training's own exchanges wait for a rank. Asked each time: where nodes come and
    go it becomes shorter when the training begins.
    """
    world: Any = dist.group.WORLD
    found: timedelta = world._get_backend(torch.device("cpu")).options._timeout
    return found


def add(own: torch.Tensor, rank: int, received: Parts) -> None:
    """Add what has been received to this rank's own, in the order of the ranks; in fp32 where what
    is sent is coarser, and rounded once. What has been received is spoilt.
    """
    total = own.to(torch.promote_types(own.dtype, torch.float32))
    before = [part for other, part in received.items() if other < rank]
    if before:
        first = before[0].to(total.dtype)
        for part in before[1:]:
            first.add_(part)
        total.add_(first)
    for other, part in received.items():
        if other > rank:
            total.add_(part)
    if total is not own:
        own.copy_(total)


class DirectGradients:
    """DDP's exchange of gradients: a bucket is a row, and others are under way meanwhile."""

    def __init__(self, sent_as: torch.dtype | None = None) -> None:
        self.sent_as = sent_as
        self.direct = Direct(dist.new_group(), sent_as)
        self.exchanges = 0

    def hook(self, state, bucket):  # type: ignore[no-untyped-def] # torch reads annotations
        gradients = bucket.buffer()
        # DDP puts its buckets together anew after the first exchange, and never again.
        finish = self.direct.begin(gradients, bucket.index(), again=self.exchanges > 0)
        self.exchanges += bucket.is_last()
        done: torch.futures.Future[Any] = torch.futures.Future()
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                finish()
            except BaseException as error:
                errors.append(error)
            done.set_result(None)

        def result(_: Any) -> torch.Tensor:
            if errors:
                raise errors[0]  # in here it ends the backward pass
            return gradients

        returned = done.then(result)
        # The thread does not keep a process from ending, whatever it waits for.
        threading.Thread(target=wait, daemon=True).start()
        return returned

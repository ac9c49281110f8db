"""All-reduce (mean) with direct sends: every part goes straight to the rank that adds it up.

gloo's own all-reduce keeps two segments of 1 MB in flight and then waits for a round trip. Here the
whole row is in flight at once. Two ranks exchange everything, in one latency; with more ranks each
one reduces a part and sends the result to all, in two. No rank sends more bytes than in a ring.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from harness.core.settings import UserError
from harness.train.direct import Direct

Parts = dict[int, torch.Tensor]  # by the rank that sends them
Receives = tuple[Parts, list[Any]]  # the buffers, and the pending receives into them


class DirectAllreduce(Direct):
    """Means over the ranks of a group, several at a time: every rank begins the same ones.

    The group must serve nothing else: a receive that was posted for a row that never came would
    take the message of another operation.
    """

    def __init__(self, group: Any, sent_as: torch.dtype | None = None) -> None:
        if (backend := dist.get_backend(group)) != "gloo":
            raise UserError(
                f"--exchange direct sends through gloo, and this run has {backend}: leave it out"
            )
        super().__init__(group)
        self.sent_as = sent_as  # None: the dtype of the row
        # By slot: receives posted for the next row, and buffers for those of the row after it.
        self.posted: dict[int, Receives] = {}
        self.spare: dict[int, Parts] = {}

    def begin(self, row: torch.Tensor, slot: int = 0, again: bool = False) -> Callable[[], None]:
        """Send what the others need of this row; the returned function waits for the mean in it.

        Rows in flight at the same time have different slots. again: the next row in this slot has
        the same size, and its receives are posted now. gloo sends nothing before the receiver has
        announced its receive, which would cost one more latency.
        """
        row.mul_(1 / self.ranks)  # before anything is added, as DDP does it
        wire = row if self.sent_as is None else row.to(self.sent_as)
        pair = self.ranks == 2
        parts = [wire, wire] if pair else list(wire.tensor_split(self.ranks))
        own = parts[self.rank]
        total = row if pair else row.tensor_split(self.ranks)[self.rank]
        posted = self.posted.pop(slot) if slot in self.posted else self._post_receives(own, slot)
        received, receives = posted
        assert all(part.shape == own.shape for part in received.values())
        if again:
            self.posted[slot] = self._post_receives(own, slot)
        sends = [self.send(parts[to], to, 2 * slot) for to in self.others]
        # A sum may overwrite the part that this rank has sent for it: whoever returns the sum has
        # received the part.
        sums = [] if pair else [self.receive(parts[of], of, 2 * slot + 1) for of in self.others]

        def finish() -> None:
            self.wait(receives)
            if pair:
                self.wait(sends)  # the sum is written where they read
            total.copy_(own)
            add_in_rank_order(total, self.rank, received)
            if again:
                self.spare[slot] = received
            if not pair:
                own.copy_(total)
                returns = [self.send(own, to, 2 * slot + 1) for to in self.others]
                self.wait([*sums, *sends, *returns])
                row.copy_(wire)

        return finish

    def _post_receives(self, own: torch.Tensor, slot: int) -> Receives:
        """The others' parts are each as large as this rank's own."""
        parts = self.spare.pop(slot, None) or {of: torch.empty_like(own) for of in self.others}
        return parts, [self.receive(part, of, 2 * slot) for of, part in parts.items()]


def add_in_rank_order(own: torch.Tensor, rank: int, received: Parts) -> None:
    """Add the received parts to this rank's own, in the order of ranks, at least in fp32, rounded
    once: the result does not depend on who adds. The received parts are overwritten.
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
    """A DDP communication hook: each bucket is a row, and several are in flight."""

    def __init__(self, sent_as: torch.dtype | None = None) -> None:
        self.sent_as = sent_as
        self.allreduce = DirectAllreduce(dist.new_group(), sent_as)
        self.exchanges = 0

    def hook(self, state, bucket):  # type: ignore[no-untyped-def] # torch reads annotations
        gradients = bucket.buffer()
        # DDP rebuilds its buckets after the first exchange, and never again.
        finish = self.allreduce.begin(gradients, bucket.index(), again=self.exchanges > 0)
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
                raise errors[0]  # raised here it ends the backward pass
            return gradients

        returned = done.then(result)
        # A daemon thread: whatever it waits for, it does not keep the process from ending.
        threading.Thread(target=wait, daemon=True).start()
        return returned

"""All-reduce (mean) with direct sends: every part goes straight to the rank that adds it up.

gloo's own all-reduce keeps two segments of 1 MB in flight and then waits for a round trip. Here the
whole row is in flight at once. Two ranks exchange everything, in one latency. With more ranks each
one reduces a part and sends the result to all, in two latencies, and no rank sends more bytes than
in a ring. With all_to_all any number of ranks exchange everything, in one latency.

If nodes have several ranks, one rank of each node exchanges what it has added up for its node.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from harness.core.collectives import ALL_TO_ALL, BACKEND, DIRECT, GLOO
from harness.core.settings import UserError
from harness.core.topology import World
from harness.train.direct import Direct, Units
from harness.train.strategy.coded import Coded, CollectiveMean

NUMBERS = 1 << 16  # numbers of messages of a group: two for each slot
Parts = dict[int, torch.Tensor]  # by the rank that sends them
Receives = tuple[Parts, list[Any]]  # the buffers, and the pending receives into them


class Plain:
    """Rows as they are, or in a smaller dtype; sums are made at least in fp32, and rounded once."""

    def __init__(self, ranks: int, sent_as: torch.dtype | None = None) -> None:
        self.ranks, self.sent_as = ranks, sent_as  # None: the dtype of the row

    def encode(
        self, row: torch.Tensor, slot: int, count: int
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        row.mul_(1 / self.ranks)  # before anything is added, as DDP does it
        wire = row if self.sent_as is None else row.to(self.sent_as)
        return wire, wire.tensor_split(count)

    def mean(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        first, *others = parts
        total = first.to(torch.promote_types(first.dtype, torch.float32))
        if others:
            total = total + others[0]
            for part in others[1:]:
                total.add_(part)
        return total

    def encode_mean(self, mean: torch.Tensor, slot: int) -> torch.Tensor:
        return mean

    def decode(self, wire: torch.Tensor) -> torch.Tensor:
        return wire


class DirectAllreduce(Direct):
    """Means over the ranks of a group, several at a time: every rank begins the same ones.

    No other operation of the group may use the message numbers of its slots: a receive that was
    posted for a row that never came would take the message. A process may create several of these
    over the group of all ranks, one after the other: each of them has numbers of its own.
    """

    of_all_ranks = itertools.count(1)  # the same on each rank; other operations send with 0

    def __init__(
        self, group: Any, encoding: Plain | Coded | None = None, all_to_all: bool = False
    ) -> None:
        if (backend := dist.get_backend(group)) != GLOO:
            raise UserError(
                f"--exchange direct sends through gloo, and this run has {backend}: leave it out"
            )
        super().__init__(group)
        is_world = group is dist.group.WORLD
        self.first_number = next(self.of_all_ranks) * NUMBERS if is_world else 0
        self.encoding = encoding or Plain(self.ranks)
        self.all_to_all = all_to_all or self.ranks <= 2
        self.parts = 1 if self.all_to_all else self.ranks
        # By slot: receives posted for the next row, and buffers for those of the row after it.
        self.posted: dict[int, Receives] = {}
        self.spare: dict[int, Parts] = {}

    def begin(self, row: torch.Tensor, slot: int = 0, again: bool = False) -> Callable[[], None]:
        """Send what the others need of this row; the returned function waits for the mean in it.

        Rows in flight at the same time have different slots. again: the next row in this slot has
        the same size, and its receives are posted now. gloo sends nothing before the receiver has
        announced its receive, which would cost one more latency.
        """
        wire, parts = self.encoding.encode(row, slot, self.parts)
        if self.all_to_all:
            parts = list(parts) * self.ranks
        own = parts[self.rank]
        posted = self.posted.pop(slot) if slot in self.posted else self._post_receives(own, slot)
        received, receives = posted
        assert all(part.shape == own.shape for part in received.values())
        if again:
            self.posted[slot] = self._post_receives(own, slot)
        number = self.first_number + 2 * slot
        sends = [self.send(parts[to], to, number) for to in self.others]
        # A sum may overwrite the part that this rank has sent for it: whoever returns the sum has
        # received the part.
        returned = [] if self.all_to_all else self.others
        sums = [self.receive(parts[of], of, number + 1) for of in returned]

        def finish() -> None:
            self.wait(receives)
            # In the order of ranks: the result does not depend on who adds.
            of_all = received | {self.rank: own}
            mean = self.encoding.mean([of_all[rank] for rank in range(self.ranks)])
            if again:
                self.spare[slot] = received
            if self.all_to_all:
                self.wait(sends)  # the mean is written where they read
                row.copy_(mean.view(-1)[: len(row)])
                return
            own.copy_(self.encoding.encode_mean(mean, slot))
            sends.extend(self.send(own, to, number + 1) for to in self.others)
            self.wait([*sums, *sends])
            row.copy_(self.encoding.decode(wire).view(-1)[: len(row)])

        return finish

    def _post_receives(self, own: torch.Tensor, slot: int) -> Receives:
        """Post receives for the others' parts, each as large as this rank's own."""
        parts = self.spare.pop(slot, None) or {of: torch.empty_like(own) for of in self.others}
        number = self.first_number + 2 * slot
        return parts, [self.receive(part, of, number) for of, part in parts.items()]


def coded_mean(encoding: Coded, way: str, group: Any) -> CollectiveMean | DirectAllreduce:
    """Coded rows by the way of --exchange; the backend's collectives carry codes as well."""
    if way == BACKEND:
        return CollectiveMean(encoding, group)
    return DirectAllreduce(group, encoding, way == ALL_TO_ALL)


class NodeMean:
    """Means over the ranks of several nodes: the first rank of each node adds up the rows of its
    node, exchanges the mean with the first ranks of the others, and hands the result to its node.
    """

    def __init__(self, nodes: Units, sent_as: torch.dtype | None, all_to_all: bool) -> None:
        self.inside, self.encoding = Direct(nodes.inside), Plain(nodes.size)
        self.leads = nodes.leads
        if self.leads:
            encoding = Plain(nodes.count, sent_as)
            self.between = DirectAllreduce(nodes.between, encoding, all_to_all)

    def begin(self, row: torch.Tensor, slot: int = 0, again: bool = False) -> Callable[[], None]:
        """As DirectAllreduce.begin()."""
        inside, to_leader, to_node = self.inside, 2 * slot, 2 * slot + 1
        self.encoding.encode(row, slot, 1)
        if not self.leads:
            # The mean may overwrite the row: who returns it has received the row.
            works = [inside.send(row, 0, to_leader), inside.receive(row, 0, to_node)]
            return lambda: inside.wait(works)
        received = {of: torch.empty_like(row) for of in inside.others}
        receives = [inside.receive(part, of, to_leader) for of, part in received.items()]

        def finish() -> None:
            inside.wait(receives)
            row.copy_(self.encoding.mean([row, *received.values()]))
            self.between.begin(row, slot, again)()
            inside.wait([inside.send(row, to, to_node) for to in inside.others])

        return finish


class DirectGradients:
    """A DDP communication hook: each bucket is a row, and several are in flight."""

    def __init__(self, world: World, sent_as: torch.dtype | None = None, way: str = DIRECT) -> None:
        self.how = "" if sent_as is None else f" in {str(sent_as).removeprefix('torch.')}"
        self.how += f" by {way}" if way == ALL_TO_ALL else ""
        self.mean: NodeMean | DirectAllreduce
        if world.is_two_level:
            self.how += " between nodes"
            self.mean = NodeMean(Units(world, "node"), sent_as, way == ALL_TO_ALL)
        else:
            encoding = Plain(world.size, sent_as)
            self.mean = DirectAllreduce(dist.group.WORLD, encoding, way == ALL_TO_ALL)
        self.exchanges = 0

    def hook(self, state, bucket):  # type: ignore[no-untyped-def] # torch reads annotations
        gradients = bucket.buffer()
        # DDP rebuilds its buckets after the first exchange, and never again.
        finish = self.mean.begin(gradients, bucket.index(), again=self.exchanges > 0)
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

"""Means of rows that are sent in fewer bits: the error of the codes is added to the next row.

This error feedback (Seide et al. 2014) works in both directions, as in DoubleSqueeze (Tang et al.
2019): each rank keeps the error of its own row, and the rank that adds up a part keeps the error of
its sum. The means given so far, the mean over ranks of the errors owed of rows, and the errors owed
of sums add up to the true means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Codec:
    """How values become bytes: rows of fp32 (whole blocks) to rows of uint8 and back."""

    block: int  # values that share a scale
    bits: float  # a value, including its share of the scale
    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor], torch.Tensor]


def _to_levels(rows: torch.Tensor, block: int, bits: int) -> torch.Tensor:
    blocks, most = rows.view(len(rows), -1, block), 2 ** (bits - 1) - 1
    # amax propagates NaN and infinity: such a block gets such a scale and decodes as non-finite.
    scales = blocks.abs().amax(2, keepdim=True) / most
    levels = torch.where(scales > 0, blocks / scales, 0.0).round().nan_to_num(1.0, 1.0, 1.0)
    levels = levels.clamp(-most, most).to(torch.int8).flatten(1)
    if bits == 4:
        levels = (levels[:, ::2] & 15) | (levels[:, 1::2] << 4)
    return torch.cat([levels.view(torch.uint8), scales.flatten(1).view(torch.uint8)], 1)


def _from_levels(coded: torch.Tensor, block: int, bits: int) -> torch.Tensor:
    of_block = block * bits // 8
    count = coded.shape[1] // (of_block + 4)  # blocks
    levels = coded[:, : count * of_block].view(torch.int8)
    if bits == 4:  # shifted up and down again, for the sign
        levels = torch.stack([levels << 4 >> 4, levels >> 4], 2)
    # Copied, because the bytes behind the levels may not be aligned for fp32.
    scales = coded[:, count * of_block :].clone().view(torch.float32).view(len(coded), count, 1)
    return (levels.reshape(len(coded), count, block) * scales).flatten(1)


def _levels(bits: int, block: int) -> Codec:
    encode, decode = (partial(f, block=block, bits=bits) for f in (_to_levels, _from_levels))
    return Codec(block, bits + 32 / block, encode, decode)


CODECS = {
    "bf16": Codec(
        1,
        16,
        encode=lambda rows: rows.to(torch.bfloat16).view(torch.uint8),
        decode=lambda coded: coded.view(torch.bfloat16).float(),
    ),
    "int8": _levels(8, 1024),
    "int4": _levels(4, 256),
}


def coded_bytes(values: int, parts: int, codec: Codec) -> int:
    """Size of a row as it is sent: whole blocks, the same number in each part."""
    return round(parts * part_size(values, parts, codec) * codec.bits / 8)


def part_size(values: int, parts: int, codec: Codec) -> int:
    """Values of each part, filled up to whole blocks."""
    return -(-values // (parts * codec.block)) * codec.block


class Coded:
    """Rows as codes, with the errors still owed, by slot.

    Values that are not finite stay so, with their whole block.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.owed: dict[str, torch.Tensor] = {}  # of rows ("owed 0") and of sums ("sum 0")
        self.sent = 0  # bytes of rows

    def encode(
        self, row: torch.Tensor, slot: int, count: int
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """(the whole coded row, its parts)."""
        size = part_size(row.numel(), count, self.codec)
        padded = torch.zeros(count * size, dtype=torch.float32, device=row.device)
        padded[: row.numel()] = row
        coded = self._code(padded.view(count, size), f"owed {slot}")
        self.sent += coded.nbytes
        return coded, coded.split(1)

    def _code(self, values: torch.Tensor, name: str) -> torch.Tensor:
        if (owed := self.owed.get(name)) is not None:
            # Saved by another number of processes, it may be padded with zeros to another length.
            both = min(len(owed), values.numel())
            values.view(-1)[:both] += owed[:both].to(values.device)
        coded = self.codec.encode(values)
        self.owed[name] = values.sub_(self.codec.decode(coded)).view(-1)
        return coded

    def mean(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Add the parts up in the order of the ranks: the mean does not depend on who adds."""
        total = self.codec.decode(parts[0])
        for part in parts[1:]:
            total.add_(self.codec.decode(part))
        return total.div_(len(parts))

    def encode_mean(self, mean: torch.Tensor, slot: int) -> torch.Tensor:
        return self._code(mean, f"sum {slot}")

    def decode(self, coded: torch.Tensor) -> torch.Tensor:
        return self.codec.decode(coded)

    def take_sent(self) -> int:
        """Return the bytes of rows sent since the last call."""
        sent, self.sent = self.sent, 0
        return sent

    @contextmanager
    def rehearsed(self) -> Iterator[None]:
        """Rows inside leave no trace."""
        owed, sent = {name: value.clone() for name, value in self.owed.items()}, self.sent
        yield
        self.owed, self.sent = owed, sent

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: value.cpu() for name, value in self.owed.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.owed = dict(state)


class CollectiveMean:
    """Means of coded rows over a group, the same to the bit on each rank, by the backend.

    The backend's all-reduce would add codes. As in a ring, each rank reduces one part of the row
    and hands the result to all: two collectives send 2(n-1)/n of the row.
    """

    def __init__(self, encoding: Coded, group: Any = None) -> None:
        self.encoding, self.group, self.parts = encoding, group, dist.get_world_size(group)

    def begin(self, row: torch.Tensor, slot: int = 0, again: bool = False) -> Callable[[], None]:
        """The returned function replaces the row by the mean."""
        coded, _ = self.encoding.encode(row, slot, self.parts)

        def finish() -> None:
            received = torch.empty_like(coded)
            dist.all_to_all_single(received, coded, group=self.group)
            own = self.encoding.encode_mean(self.encoding.mean(received.split(1)), slot)
            # torch 2.12 and older have it under the older name alone.
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            gather(coded, own, group=self.group)
            row.copy_(self.encoding.decode(coded).view(-1)[: row.numel()])

        return finish


class GradientRow:
    """A DDP communication hook: exchanges all gradients of an update as one row.

    The row is in the order of the parameters, since a run that goes on has other buckets at first.
    This one exchange begins after the backward pass.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], begin: Callable[..., Any], how: str = ""
    ):
        self.parameters, self.begin, self.how = parameters, begin, how
        self.views: dict[int, torch.Tensor] = {}

    def hook(self, state, bucket):  # type: ignore[no-untyped-def] # torch reads annotations
        parts = zip(bucket.parameters(), bucket.gradients(), strict=True)
        self.views |= {id(parameter): gradient.view(-1) for parameter, gradient in parts}
        if bucket.is_last():
            views = [self.views[id(parameter)] for parameter in self.parameters]
            row = torch.cat([view.float() for view in views])
            self.begin(row, again=True)()
            for view, mean in zip(views, row.split([len(view) for view in views]), strict=True):
                view.copy_(mean)
            self.views.clear()
        # DDP reads no bucket before the last one is there.
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

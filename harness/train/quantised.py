"""The mean of a row of numbers over ranks, sent in bf16, or in int8 with a scale a block.

As in a ring, each rank adds up one part of the row and hands the result to all: 2(n-1)/n of the
row is sent, in two collectives. A plain all-reduce could not do it: it would add in what is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

BLOCK = 1024  # numbers that share a scale
LEVELS = 127


@dataclass(frozen=True)
class Code:
    """How numbers become bytes: rows of fp32 (whole blocks) to rows of uint8 and back."""

    bits: float  # a number takes, scales included
    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor], torch.Tensor]


def _to_bf16(rows: torch.Tensor) -> torch.Tensor:
    return rows.to(torch.bfloat16).view(torch.uint8)


def _from_bf16(coded: torch.Tensor) -> torch.Tensor:
    return coded.view(torch.bfloat16).float()


def _to_int8(rows: torch.Tensor) -> torch.Tensor:
    blocks = rows.view(len(rows), -1, BLOCK)
    # amax hands on what is not finite: such a block has such a scale, and comes out as no number.
    scales = blocks.abs().amax(2, keepdim=True) / LEVELS
    levels = torch.where(scales > 0, blocks / scales, 0.0).round().nan_to_num(1.0, 1.0, 1.0)
    levels = levels.clamp(-LEVELS, LEVELS).to(torch.int8)
    return torch.cat([levels.flatten(1).view(torch.uint8), scales.flatten(1).view(torch.uint8)], 1)


def _from_int8(coded: torch.Tensor) -> torch.Tensor:
    count = coded.shape[1] // (BLOCK + 4)  # blocks
    levels = coded[:, : count * BLOCK].view(torch.int8).view(len(coded), count, BLOCK)
    # Copied, because the bytes behind the levels need not begin where a number may.
    scales = coded[:, count * BLOCK :].clone().view(torch.float32).view(len(coded), count, 1)
    return (levels * scales).flatten(1)


CODES = {
    "bf16": Code(16, _to_bf16, _from_bf16),
    "int8": Code(8 + 32 / BLOCK, _to_int8, _from_int8),
}


def coded_bytes(numbers: int, ranks: int, code: Code) -> int:
    """Of a row as it is sent: whole blocks, equally many for each rank."""
    return round(ranks * _part(numbers, ranks) * code.bits / 8)


def _part(numbers: int, ranks: int) -> int:
    return -(-numbers // (ranks * BLOCK)) * BLOCK


def mean(row: torch.Tensor, code: Code, group: Any = None) -> None:
    """The row becomes the mean of the rows of all ranks of the group, bit for bit the same on each.

    What of it is not finite stays so, with the whole block in int8.
    """
    ranks = dist.get_world_size(group)
    part = _part(row.numel(), ranks)
    parts = row.new_zeros(ranks * part)
    parts[: row.numel()] = row
    sent = code.encode(parts.view(ranks, part))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    own = code.encode(code.decode(received).mean(0, keepdim=True))
    dist.all_gather_single(sent, own, group=group)
    row.copy_(code.decode(sent).flatten()[: row.numel()])

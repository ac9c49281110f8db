"""The trained weights of a model as one row of numbers, in pieces that can be sent alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Weights:
    """Reads and writes parameters through copies: fp32, one after the other."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], pieces: int = 1) -> None:
        self.parameters = list(parameters)
        self.size = sum(p.numel() for p in self.parameters)
        self.pieces = [
            slice(i * self.size // pieces, (i + 1) * self.size // pieces) for i in range(pieces)
        ]

    @property
    def exact(self) -> bool:
        return all(parameter.dtype == torch.float32 for parameter in self.parameters)

    def rounded(self, row: torch.Tensor) -> torch.Tensor:
        """As it would be read again, had it been written to all parameters."""
        parts = row.split([parameter.numel() for parameter in self.parameters])
        kept = zip(parts, self.parameters, strict=True)
        return torch.cat([part.to(parameter.dtype).float() for part, parameter in kept])

    def _parts(self, piece: slice) -> list[torch.Tensor]:
        """The weights themselves that lie in a piece, tensor by tensor."""
        found, begin = [], 0
        for parameter in self.parameters:
            first = max(piece.start - begin, 0)
            last = min(piece.stop - begin, parameter.numel())
            if first < last:
                found.append(parameter.detach().view(-1)[first:last])
            begin += parameter.numel()
        return found

    def row(self, piece: slice | None = None) -> torch.Tensor:
        """A copy."""
        parts = self._parts(piece or slice(0, self.size))
        return torch.cat([part.float() for part in parts])

    def put(self, row: torch.Tensor, piece: slice | None = None) -> None:
        parts = self._parts(piece or slice(0, self.size))
        for part, values in zip(parts, row.split([p.numel() for p in parts]), strict=True):
            part.copy_(values)


def checksum(row: torch.Tensor) -> int:
    """The same for the same bits, on any device."""
    return int(row.contiguous().view(torch.int32).sum(dtype=torch.int64))

"""Training images in other versions each epoch: flipped and shifted, batch by batch on the device.

What a sample looks like follows from (seed, epoch, number of the sample) and from nothing else:
not from the batch, the rank or the attempt in which it has its turn.
"""

from __future__ import annotations

import numpy as np
import torch

# A shift is at most this part of the side: 4 of 32 pixels, as is usual for CIFAR.
SHARE = 8
# Bits are spread by the two multiplications of splitmix64 (Steele, Lea and Flood 2014).
FIRST, SECOND = (np.array([n], np.uint64).view(np.int64).item() for n in (
    0xBF58476D1CE4E5B9, 0x94D049BB133111EB,
))  # fmt: skip
DRAWN_BITS = (1 << 30) - 1


class Augment:
    """crop_flip: padded with black, cut out at a random place, mirrored or not; flip: mirrored."""

    def __init__(self, kind: str, seed: int) -> None:
        self.crop, self.seed = kind == "crop_flip", seed
        self.key = 0
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        drawn = np.random.SeedSequence([self.seed, epoch, 5]).generate_state(1, np.uint64)
        self.key = drawn.view(np.int64).item()

    def __call__(self, pixels: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
        """Bytes (sample, channel, row, column) -> the same, of the samples with these numbers."""
        height, width = pixels.shape[2:]
        drawn = _spread(_spread(samples) + self.key)
        rows, down = _window(height, drawn >> 32 if self.crop else None, pixels)
        columns, right = _window(width, drawn >> 1 if self.crop else None, pixels)
        columns = torch.where((drawn & 1).bool()[:, None], columns.flip(1), columns)
        right = torch.where((drawn & 1).bool()[:, None], right.flip(1), right)
        # Whole rows first, which lie together in memory.
        images = torch.arange(len(pixels), device=pixels.device)[:, None]
        moved = pixels.transpose(1, 2)[images, rows].transpose(1, 2)
        moved = moved.gather(3, columns[:, None, None, :].expand_as(moved))
        if not self.crop:
            return moved
        return moved * (down[:, None, :, None] & right[:, None, None, :])


def _window(
    side: int, drawn: torch.Tensor | None, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each sample the places along a side that it shows, and which of them are in the image."""
    places = torch.arange(side, device=like.device).expand(len(like), side)
    if drawn is not None:
        margin = side // SHARE
        places = places + ((drawn & DRAWN_BITS) % (2 * margin + 1) - margin)[:, None]
    inside = (places >= 0) & (places < side)
    return places.clamp(0, side - 1), inside


def _spread(numbers: torch.Tensor) -> torch.Tensor:
    """Whole numbers that differ in any bit -> 64 bits that look drawn; the same on every device."""
    for shift, factor in ((30, FIRST), (27, SECOND)):
        numbers = (numbers ^ _shifted(numbers, shift)) * factor
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, with zeros from the left: torch's own shift repeats the sign."""
    return (numbers >> by) & ((1 << (64 - by)) - 1)

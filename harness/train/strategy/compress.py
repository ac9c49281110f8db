"""The mean of a row of numbers over ranks, sent in bf16, or in int8 with a scale a block.

As in a ring, each rank adds up one part of the row and hands the result to all: 2(n-1)/n of the
row is sent, in two collectives. A plain all-reduce could not do it: it would add in what is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from harness.core.records import read_json
from harness.core.settings import UserError
from harness.train.context import COMPLETE, Context
from harness.train.strategy.base import Exchange
from harness.train.strategy.direct import DirectGradients

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


# ----
# DDP's exchange of gradients: how many bytes it is, and made smaller by torch's own hooks.
#
# Two of them need help. torch takes its bf16 hook, which it knows by its name, in builds for CUDA
# only; gloo adds bf16 up as well. PowerSGD's memory has a class of its own here.

# Updates whose gradients go out whole: the fewest that torch allows. DDP puts its buckets together
# after the first, and the very first gradients are far from the later ones.
WHOLE_UPDATES = 2


# Added to the length of a column before it is divided by it: nothing beside any length but 0, and
# the gradient of a matrix that is 0 does not become NaN.
TINY = 1e-20


SENT_AS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Gradients(Exchange):
    """DDP's exchange at each update."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.kind, _, rank = context.settings.compress.partition(":")
        self.rank = int(rank or 1)
        self.payload_bytes = self.update_bytes = 0
        self.powersgd: PowerSGD | None = None
        if self.kind == "fp16":
            self.caution = " (--compress fp16 carries no gradient above 65504: bf16 does)"

    def attach(self, model: nn.Module, optimizer: Any) -> None:
        ddp: Any = getattr(model, "_orig_mod", model)  # inside torch.compile
        trained = [p for p in ddp.parameters() if p.requires_grad]
        self.update_bytes = sum(p.numel() * self._bytes_of(p) for p in trained)
        if self.context.settings.exchange == "direct":
            direct = DirectGradients(SENT_AS.get(self.kind))
            ddp.register_comm_hook(direct, direct.hook)
        elif self.kind == "bf16":
            ddp.register_comm_hook(None, bf16_hook)
        elif self.kind == "fp16":
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif self.kind == "powersgd":
            self.powersgd = PowerSGD(ddp.module, self.rank)
            ddp.register_comm_hook(self.powersgd.state, self.powersgd.hook)

    def _bytes_of(self, parameter: torch.Tensor) -> int:
        return SENT_AS[self.kind].itemsize if self.kind in SENT_AS else parameter.element_size()

    def after_update(self, update: int, last: bool) -> None:
        sent = self.update_bytes if self.powersgd is None else self.powersgd.take_sent()
        self.sends(sent if self.context.world.size > 1 else 0)  # nobody is there to have it

    @contextmanager
    def rehearsed(self) -> Iterator[None]:
        if self.powersgd is None:
            yield
            return
        with self.powersgd.rehearsed():
            yield

    def save(self, folder: Path) -> None:
        """Each rank its own file, and on its own disk where it has one: what a rank still owes is
        as large as the gradient, and would be sent whole, over the links that are too slow for it.
        """
        if self.powersgd is not None:
            file = folder / memory_of(self.context.world.rank)
            safetensors.torch.save_file(self.powersgd.content(), file)

    def load(self, folder: Path) -> None:
        if self.powersgd is None:
            return
        world, file = self.context.world, folder / memory_of(self.context.world.rank)
        missing: list[Any] = [None] * world.size
        dist.all_gather_object(missing, None if file.is_file() else file.name)
        if not any(missing) and not self.context.other_processes:
            self.powersgd.restore(safetensors.torch.load_file(file))
            return
        if not world.elastic:
            raise UserError(
                f"{folder} lacks {', '.join(filter(None, missing))}, what PowerSGD still owed "
                "there: copy it from the disk of the node that had this rank, or use --rerun"
            )
        box = [_shared_out(folder) if world.rank == 0 else None]
        dist.broadcast_object_list(box, src=0)
        assert box[0] is not None
        self.powersgd.restore(box[0])


def memory_of(rank: int) -> str:
    """The name of the file in a checkpoint's folder."""
    return f"powersgd_{rank}.safetensors"


def _shared_out(folder: Path) -> dict[str, torch.Tensor]:
    """Processes have come or gone: what all of them still owed is shared out evenly, so that its
    mean over the ranks, which is what the weights miss, stays the same. What a node that is gone
    had on a disk of its own is lost.
    """
    mark = read_json(folder / COMPLETE) or {}
    files = [folder / memory_of(rank) for rank in range(mark["processes"])]
    found = [safetensors.torch.load_file(file) for file in files if file.is_file()]
    return {
        name: sum(of[name] for of in found) / len(files) if name.startswith("owed ") else first
        for name, first in found[0].items()
    }


def bf16_hook(state, bucket):  # type: ignore[no-untyped-def] # torch takes no annotations in quotes
    return default_hooks.bf16_compress_hook(state, bucket)


class PowerSGD:
    """torch's PowerSGD, with error feedback and warm start, with its memory kept by parameter.

    torch keeps it by bucket. But DDP starts with one bucket and makes others after the first
    update, in a run that goes on from a checkpoint as well.
    """

    def __init__(self, model: nn.Module, rank: int, least_rate: float = 2) -> None:
        self.state = PowerSGDState(
            None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=WHOLE_UPDATES,
            min_compression_rate=least_rate,
            orthogonalization_epsilon=TINY,
        )
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        for name, parameter in self.parameters.items():
            if parameter.ndim == 0:
                raise UserError(
                    f"--compress powersgd: {name} of this model is a single number, which torch's "
                    "PowerSGD cannot take; use --compress bf16"
                )
        self.names = {id(p): name for name, p in self.parameters.items()}
        self.factors = {n: f for n, p in self.parameters.items() if (f := self._factor(p))}
        self.fresh = self._drawn()
        # What is not in torch's memory, by parameter: what has not been sent yet, right factors.
        self.owed: dict[str, torch.Tensor] = {}
        self.right = dict(self.fresh)
        self.buckets: dict[int, list[str]] = {}  # the parameters that torch's memory is made for
        self.sent = 0
        self.waits = dist.get_backend() == "gloo"

    def _factor(self, parameter: torch.Tensor) -> tuple[int, int, int] | None:
        """(rows, columns, rank); None for what is not worth a factorisation."""
        rows, columns = parameter.view(len(parameter), -1).shape
        rank = min(rows, columns, self.state.matrix_approximation_rank)
        smaller = (rows + columns) * rank * self.state.min_compression_rate < rows * columns
        return (rows, columns, rank) if smaller else None

    def _drawn(self) -> dict[str, torch.Tensor]:
        """The first right factors, equal on all ranks. From a generator of their own: torch would
        draw them, and seed every GPU for it, in the middle of the training's random numbers.
        """
        generator = torch.Generator().manual_seed(0)
        return {
            name: torch.randn(columns, rank, generator=generator).to(self.parameters[name])
            for name, (_, columns, rank) in self.factors.items()
        }

    def hook(self, state, bucket):  # type: ignore[no-untyped-def] # as above
        numbers, before = bucket.buffer().numel(), state.total_numel_after_compression
        if state.iter >= WHOLE_UPDATES:
            self._arrange(bucket.index(), bucket.parameters())
            self._revive(bucket.index())
        future = powerSGD_hook(state, bucket)
        if self.waits:
            # Three reductions follow one another in callbacks, on gloo's own few threads, where
            # those of two buckets wait for each other for ever, or come in another order on
            # another rank.
            future.wait()
        sent = state.total_numel_after_compression - before or numbers
        self.sent += sent * bucket.buffer().element_size()
        return future

    @contextmanager
    def rehearsed(self) -> Iterator[None]:
        """Gradients that belong to no update go through; buckets are no longer made anew."""
        updates, sent, right = self.state.iter, self.sent, self.state.q_memory_dict
        # As large as the gradient: not on a GPU that may be full.
        owed = {i: error.to("cpu") for i, error in self.state.error_dict.items()}
        self.state.q_memory_dict = {i: factors.clone() for i, factors in right.items()}
        yield
        self.state.iter, self.sent, self.state.q_memory_dict = updates, sent, right
        for index, error in owed.items():
            self.state.error_dict[index] = error.to(self.state.error_dict[index].device)

    def take_sent(self) -> int:
        """Bytes since this was asked before."""
        sent, self.sent = self.sent, 0
        return sent

    def _arrange(self, index: int, parameters: list[torch.Tensor]) -> None:
        """torch's memory of this bucket, from that by parameter."""
        names = [self.names[id(p)] for p in parameters]
        if self.buckets.get(index) == names:
            return
        if index in self.buckets:  # DDP has made new ones
            self.owed, self.right = self._by_parameter()
            self.buckets.clear()
        self.buckets[index] = names
        none = parameters[0].new_empty(0)
        owed = [self.owed.get(n, torch.zeros_like(self.parameters[n])).flatten() for n in names]
        inside = self._inside(names)
        self.state.error_dict[index] = torch.cat(owed)
        self.state.q_memory_dict[index] = torch.cat(
            [none, *(self.right[n].flatten() for n in inside)]
        )
        lefts = sum(self.factors[n][0] * self.factors[n][2] for n in inside)
        self.state.p_memory_dict[index] = none.new_empty(lefts)

    def _inside(self, names: list[str]) -> list[str]:
        """Those that have factors, in the order in which torch lays these out: shape by shape."""
        by_shape: dict[tuple[int, int, int], list[str]] = {}
        for name in names:
            if name in self.factors:
                by_shape.setdefault(self.factors[name], []).append(name)
        return [name for of_shape in by_shape.values() for name in of_shape]

    def _by_parameter(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        owed, right = dict(self.owed), dict(self.right)
        for index, names in self.buckets.items():
            parts = self.state.error_dict[index].split([self.parameters[n].numel() for n in names])
            owed |= zip(names, parts, strict=True)
            right |= self._right_in(index)
        return owed, right

    def _right_in(self, index: int) -> dict[str, torch.Tensor]:
        """The right factors in torch's memory of a bucket."""
        names = self._inside(self.buckets[index])
        shapes = [self.factors[name][1:] for name in names]
        parts = self.state.q_memory_dict[index].split([c * rank for c, rank in shapes])
        return {n: part.view(s) for n, part, s in zip(names, parts, shapes, strict=True)}

    def _revive(self, index: int) -> None:
        """A column that has become 0, as with a gradient that was 0 once, would stay 0, and with it
        whatever the matrix has to send from then on.
        """
        for name, factor in self._right_in(index).items():
            dead = factor.norm(dim=0) == 0
            factor.copy_(torch.where(dead, self.fresh[name], factor))

    def content(self) -> dict[str, torch.Tensor]:
        """What a checkpoint needs."""
        owed, right = self._by_parameter()
        return {
            "updates": torch.tensor(self.state.iter),
            **{f"owed {name}": value.clone() for name, value in owed.items()},
            **{f"right {name}": value.clone() for name, value in right.items()},
        }

    def restore(self, content: dict[str, torch.Tensor]) -> None:
        self.state.iter = int(content["updates"])
        self.buckets.clear()
        for name, parameter in self.parameters.items():
            for kept, of in ((self.owed, "owed"), (self.right, "right")):
                if (value := content.get(f"{of} {name}")) is not None:
                    kept[name] = value.to(parameter)

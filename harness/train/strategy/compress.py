"""DDP's exchange of gradients, in fewer bits: by torch's hooks, or coded (coded.py).

Two of torch's hooks need help. torch refuses its bf16 hook (by function name) outside CUDA builds,
though gloo adds bf16 as well, so it is wrapped. torch keeps PowerSGD's memory by bucket; here it is
kept by parameter, because buckets change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from harness.core.collectives import BACKEND, GLOO
from harness.core.records.manifests import read_checkpoint
from harness.core.settings import UserError
from harness.core.strategies import GRADIENT_CODES
from harness.train.context import HALF_PRECISION, Context
from harness.train.measure.communication import uncompiled
from harness.train.session import broadcast_object, gather
from harness.train.strategy.base import Exchange
from harness.train.strategy.coded import CODECS, Coded, GradientRow
from harness.train.strategy.direct_allreduce import DirectGradients, coded_mean

# The first updates send whole gradients; torch allows no fewer. DDP rebuilds its buckets after the
# first, and the very first gradients are far from the later ones.
WHOLE_UPDATES = 2
# Added to the norm of a column before dividing by it: negligible, and a zero matrix gives no NaN.
EPSILON = 1e-20


class DdpExchange(Exchange):
    """DDP's exchange of gradients at each update."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.kind, _, rank = context.settings.compress.partition(":")
        self.rank = int(rank or 1)
        self.payload_bytes = self.update_bytes = 0
        self.memory: PowerSGD | Coded | None = None  # of what was not sent
        if self.kind == "fp16":
            self.caution = " (--compress fp16 carries no gradient above 65504: bf16 does)"

    def attach(self, model: nn.Module, optimizer: Any) -> None:
        ddp = uncompiled(model)
        trained = [p for p in ddp.parameters() if p.requires_grad]
        dtype = HALF_PRECISION.get(self.kind)
        self.update_bytes = sum(
            p.numel() * (dtype.itemsize if dtype else p.element_size()) for p in trained
        )
        if self.kind in GRADIENT_CODES:
            self._attach_coded(ddp, trained)
        elif self.way != BACKEND:
            direct = DirectGradients(self.context.world, dtype, self.way)
            ddp.register_comm_hook(direct, direct.hook)
        elif self.kind == "bf16":
            ddp.register_comm_hook(None, bf16_hook)
        elif self.kind == "fp16":
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif self.kind == "powersgd":
            self.memory = PowerSGD(ddp.module, self.rank)
            ddp.register_comm_hook(self.memory.state, self.memory.hook)

    def _attach_coded(self, ddp: Any, trained: list[nn.Parameter]) -> None:
        self.memory = Coded(CODECS[self.kind])
        begin: Callable[..., Any] = _nothing
        if self.context.world.size > 1:
            # DDP has collectives of its own in the group of all ranks.
            group = dist.new_group() if self.way == BACKEND else dist.group.WORLD
            begin = coded_mean(self.memory, self.way, group).begin
        coded = GradientRow(trained, begin, f" in {self.kind} by {self.way}")
        ddp.register_comm_hook(coded, coded.hook)

    def after_update(self, update: int, last: bool) -> None:
        sent = self.update_bytes if self.memory is None else self.memory.take_sent()
        self.count_sent(sent if self.context.world.size > 1 else 0)  # a single rank sends nothing

    @contextmanager
    def rehearsed(self) -> Iterator[None]:
        with self.memory.rehearsed() if self.memory else nullcontext():
            yield

    def save(self, folder: Path) -> Sequence[Path]:
        """Each rank writes its own file, on its own disk where it has one: its residual is as large
        as the gradient, too large for a link that needs compression.
        """
        if self.memory is None:
            return ()
        file = folder / memory_file(self.kind, self.context.world.rank)
        safetensors.torch.save_file(self.memory.state_dict(), file)
        return (file,)

    def load(self, folder: Path) -> None:
        if self.memory is None:
            return
        world = self.context.world
        file = folder / memory_file(self.kind, world.rank)
        missing = gather(None if file.is_file() else file.name)
        if not any(missing) and not self.context.other_processes:
            self.memory.load_state_dict(safetensors.torch.load_file(file))
            return
        if not world.elastic:
            raise UserError(
                f"{folder} lacks {', '.join(filter(None, missing))}, what "
                f"--compress {self.kind} still owed there: copy it from the disk of the node that "
                "had this rank, or use --rerun"
            )
        state = _mean_state(folder, self.kind) if world.rank == 0 else None
        self.memory.load_state_dict(broadcast_object(state))


def _nothing(row: torch.Tensor, again: bool) -> Callable[[], None]:
    return lambda: None


def memory_file(kind: str, rank: int) -> str:
    """Name of what a rank still owes, in a checkpoint's folder."""
    return f"{kind}_{rank}.safetensors"


def _mean_state(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """The state for another number of processes than saved it: the residuals of all are spread
    evenly, so that their mean over ranks, which is what the weights lack, stays the same. The
    residual of a node that is gone with its disk is lost.
    """
    manifest = read_checkpoint(folder)
    assert manifest is not None  # a checkpoint without one is not resumed from
    files = [folder / memory_file(kind, rank) for rank in range(manifest["processes"])]
    read = {file: safetensors.torch.load_file(file) for file in files if file.is_file()}
    states = list(read.values())
    result = {
        name: sum(s[name] for s in states) / len(files) if name.startswith("owed ") else first
        for name, first in states[0].items()
    }
    if (owed := result.pop("sum 0", None)) is not None:  # each rank has the error of its part
        parts = [read[f]["sum 0"] if f in read else torch.zeros_like(owed) for f in files]
        result["owed 0"] += torch.cat(parts)
    return result


def bf16_hook(state, bucket):  # type: ignore[no-untyped-def] # torch takes no annotations in quotes
    return default_hooks.bf16_compress_hook(state, bucket)


class PowerSGD:
    """torch's PowerSGD, with error feedback and warm start, and with its memory by parameter.

    torch keeps the memory by bucket, but DDP starts with one bucket and builds others after the
    first update, also in a run that goes on from a checkpoint.
    """

    def __init__(self, model: nn.Module, rank: int, least_rate: float = 2) -> None:
        self.state = PowerSGDState(
            None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=WHOLE_UPDATES,
            min_compression_rate=least_rate,
            orthogonalization_epsilon=EPSILON,
        )
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        for name, parameter in self.parameters.items():
            if parameter.ndim == 0:
                raise UserError(
                    f"--compress powersgd: {name} of this model is a single number, which torch's "
                    "PowerSGD cannot take; use --compress bf16"
                )
        self.names = {id(p): name for name, p in self.parameters.items()}
        shapes = {name: self._factor_shape(p) for name, p in self.parameters.items()}
        self.factor_shapes = {name: shape for name, shape in shapes.items() if shape is not None}
        self.initial_right = self._draw_right_factors()
        # By parameter, what is not in torch's memory: error-feedback residuals and right factors.
        self.residual: dict[str, torch.Tensor] = {}
        self.right = dict(self.initial_right)
        self.buckets: dict[int, list[str]] = {}  # parameters whose memory torch has, by bucket
        self.sent = 0
        self.blocking = dist.get_backend() == GLOO

    def _factor_shape(self, parameter: torch.Tensor) -> tuple[int, int, int] | None:
        """(rows, columns, rank); None where factors would not be enough smaller."""
        rows, columns = parameter.view(len(parameter), -1).shape
        rank = min(rows, columns, self.state.matrix_approximation_rank)
        smaller = (rows + columns) * rank * self.state.min_compression_rate < rows * columns
        return (rows, columns, rank) if smaller else None

    def _draw_right_factors(self) -> dict[str, torch.Tensor]:
        """The first right factors, equal on all ranks, from a generator of their own: torch would
        reseed the CPU's and every GPU's in the middle of training to draw them.
        """
        generator = torch.Generator().manual_seed(0)
        return {
            name: torch.randn(columns, rank, generator=generator).to(self.parameters[name])
            for name, (_, columns, rank) in self.factor_shapes.items()
        }

    def hook(self, state, bucket):  # type: ignore[no-untyped-def] # as above
        numbers, before = bucket.buffer().numel(), state.total_numel_after_compression
        if state.iter >= WHOLE_UPDATES:
            self._fill_torch_memory(bucket.index(), bucket.parameters())
            self._revive_zero_columns(bucket.index())
        future = powerSGD_hook(state, bucket)
        if self.blocking:
            # Its three reductions are chained by callbacks on gloo's few threads, where those of
            # two buckets would deadlock, or come in different orders on different ranks.
            future.wait()
        sent = state.total_numel_after_compression - before or numbers
        self.sent += sent * bucket.buffer().element_size()
        return future

    @contextmanager
    def rehearsed(self) -> Iterator[None]:
        """Inside, gradients belong to no update; DDP has built its last buckets before."""
        updates, sent, right = self.state.iter, self.sent, self.state.q_memory_dict
        # As large as the gradient: kept in host memory, since the GPU's may be full.
        residual = {i: error.to("cpu") for i, error in self.state.error_dict.items()}
        self.state.q_memory_dict = {i: factors.clone() for i, factors in right.items()}
        yield
        self.state.iter, self.sent, self.state.q_memory_dict = updates, sent, right
        for index, error in residual.items():
            self.state.error_dict[index] = error.to(self.state.error_dict[index].device)

    def take_sent(self) -> int:
        """Return the bytes sent since the last call."""
        sent, self.sent = self.sent, 0
        return sent

    def _fill_torch_memory(self, index: int, parameters: list[torch.Tensor]) -> None:
        """Fill torch's memory of this bucket from the memory by parameter."""
        names = [self.names[id(p)] for p in parameters]
        if self.buckets.get(index) == names:
            return
        if index in self.buckets:  # DDP has built new buckets
            self.residual, self.right = self._by_parameter()
            self.buckets.clear()
        self.buckets[index] = names
        empty = parameters[0].new_empty(0)
        residuals = [
            self.residual.get(n, torch.zeros_like(self.parameters[n])).flatten() for n in names
        ]
        factored = self._in_torch_order(names)
        self.state.error_dict[index] = torch.cat(residuals)
        self.state.q_memory_dict[index] = torch.cat(
            [empty, *(self.right[n].flatten() for n in factored)]
        )
        left = sum(self.factor_shapes[n][0] * self.factor_shapes[n][2] for n in factored)
        self.state.p_memory_dict[index] = empty.new_empty(left)

    def _in_torch_order(self, names: list[str]) -> list[str]:
        """Names with factors, in the order in which torch lays factors out: shape by shape."""
        by_shape: dict[tuple[int, int, int], list[str]] = {}
        for name in names:
            if name in self.factor_shapes:
                by_shape.setdefault(self.factor_shapes[name], []).append(name)
        return [name for of_shape in by_shape.values() for name in of_shape]

    def _by_parameter(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """(residuals, right factors)."""
        residual, right = dict(self.residual), dict(self.right)
        for index, names in self.buckets.items():
            parts = self.state.error_dict[index].split([self.parameters[n].numel() for n in names])
            residual |= zip(names, parts, strict=True)
            right |= self._right_factors(index)
        return residual, right

    def _right_factors(self, index: int) -> dict[str, torch.Tensor]:
        """Views of torch's memory of a bucket."""
        names = self._in_torch_order(self.buckets[index])
        shapes = [self.factor_shapes[name][1:] for name in names]
        parts = self.state.q_memory_dict[index].split([c * rank for c, rank in shapes])
        return {n: part.view(s) for n, part, s in zip(names, parts, shapes, strict=True)}

    def _revive_zero_columns(self, index: int) -> None:
        """A column that became 0, as after one zero gradient, would stay 0 for ever, and its share
        of the matrix would never be sent.
        """
        for name, factor in self._right_factors(index).items():
            dead = factor.norm(dim=0) == 0
            factor.copy_(torch.where(dead, self.initial_right[name], factor))

    def state_dict(self) -> dict[str, torch.Tensor]:
        residual, right = self._by_parameter()
        return {
            "updates": torch.tensor(self.state.iter),
            **{f"owed {name}": value.clone() for name, value in residual.items()},
            **{f"right {name}": value.clone() for name, value in right.items()},
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.state.iter = int(state["updates"])
        self.buckets.clear()
        for name, parameter in self.parameters.items():
            for kept, kind in ((self.residual, "owed"), (self.right, "right")):
                if (value := state.get(f"{kind} {name}")) is not None:
                    kept[name] = value.to(parameter)

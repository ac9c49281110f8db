"""Who trains apart from whom, and how something gets from one to the other.

A unit is what trains apart: a node, whose processes share gradients at every update as DDP does,
or a single process (--sync_scope rank).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.core.settings import UserError
from harness.core.topology import World
from harness.train.strategy.base import Exchange
from harness.train.strategy.compress import CODES, coded_bytes, mean
from harness.train.strategy.direct import Direct


class Units:
    """Who trains apart from whom, and the groups in which they meet."""

    def __init__(self, world: World, scope: str | None) -> None:
        self.each = world.per_node if scope == "node" else 1  # processes of one
        self.count = world.size // self.each
        self.own, self.place = divmod(world.rank, self.each)
        self.leads = self.place == 0  # goes over the link for all of its unit
        self.first = self.own * self.each  # the rank that leads this unit
        self.inside = self.between = None
        if self.count == 1:
            return
        # Every rank makes every group, in one order. Those between units are groups of their own
        # even where they hold all ranks: what is on its way must not stand in the way of others.
        if self.each > 1:
            for unit in range(self.count):
                members = range(unit * self.each, (unit + 1) * self.each)
                group = dist.new_group(list(members))
                if unit == self.own:
                    self.inside = group
        self.between = dist.new_group(list(range(0, world.size, self.each)))


class Sending:
    """A row on its way to become the mean over all units."""

    def __init__(self, row: torch.Tensor, wait: Callable[[], Any] | None = None) -> None:
        self.row, self.wait = row, wait

    def arrived(self) -> None:
        if self.wait is not None:
            self.wait()
            self.wait = None


class Aside:
    """Work in a thread of its own, after the work before it: in one order on all ranks.

    The thread does not keep a process from ending, whatever it waits for.
    """

    def __init__(self, work: Callable[[], Any], before: Aside | None, device: torch.device) -> None:
        self.before = before
        self.error: BaseException | None = None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))
        self.thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self.thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        if self.before is not None:
            self.before.thread.join()
            self.before = None
        try:
            if self.stream is None:
                work()
                return
            with torch.cuda.stream(self.stream):
                work()
            self.stream.synchronize()
        except BaseException as error:
            self.error = error

    def wait(self) -> None:
        self.thread.join()
        if self.error is not None:
            raise self.error


# ----
# The trained weights of a model as one row of numbers, in pieces that can be sent alone.


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


# ----
# Processes that train apart and exchange only now and then: local SGD, and what diloco shares.
#
# DDP goes on wrapping the model over all processes, which begins them with the same weights; its
# exchange of gradients is replaced by one inside a unit (units.py). Every rank keeps a copy of the
# weights of the last exchange: these are what is evaluated and saved. BatchNorm's statistics are
# averaged then as they are with ddp, which no training step sees.


class Apart(Exchange):
    """What all have that train apart: gradients stay inside a unit, and there are two sets of
    weights, a process's own and those of the last exchange.
    """

    pieces = 1

    def attach(self, model: nn.Module, optimizer: Any) -> None:
        settings = self.context.settings
        self.every = int(settings.sync_every or 1)
        self.units = Units(self.context.world, settings.sync_scope)
        wrapped: Any = getattr(model, "_orig_mod", model)  # inside torch.compile
        trained = [p for p in wrapped.parameters() if p.requires_grad]
        self.weights = Weights(trained, self.pieces)
        self.anchor = self.weights.row()  # the weights of the last exchange
        self.update = self.exchanges = self.payload_bytes = 0
        self.updates: int | None = None
        self.first_exchange: int | None = None
        self.together = False  # nothing is apart any more: the last update has been made
        self.aside: Aside | None = None
        self.begun = 0  # exchanges by way of
        self.direct: Direct | None = None
        if settings.exchange == "direct" and self.units.count > 1 and self.units.leads:
            self.direct = Direct(self.units.between)
        if self.units.count > 1:
            # With one unit DDP does all of it, bit for bit.
            wrapped.register_comm_hook(None, self._inside)
        self.observed = {
            "sync_every": self.every,
            "sync_scope": settings.sync_scope,
            "units": self.units.count,
            "exchanged_bytes": self._coded_bytes(),
            "kept_bytes": self._kept_bytes(),
        }

    def _inside(self, state, bucket):  # type: ignore[no-untyped-def] # torch reads annotations
        """DDP's exchange of gradients, among the processes of this unit."""
        gradients = bucket.buffer()
        if self.units.inside is None:
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(gradients)
            return done
        self.sends(gradients.nbytes)
        gradients.mul_(1 / self.units.each)
        work = dist.all_reduce(gradients, group=self.units.inside, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    # ---- what goes between units ----

    def _send(self, row: torch.Tensor, wait: bool = True) -> Sending:
        """Begin to make a row the mean of all units' rows; _arrive() ends it."""
        units, code = self.units, CODES.get(self.context.settings.compress)
        if units.count == 1 or not units.leads:
            return Sending(row)
        if code is None and self.direct is None:
            self.sends(row.nbytes)
            work = dist.all_reduce(row, group=units.between, async_op=True)

            def divided() -> None:
                work.wait()
                row.div_(units.count)

            return Sending(row, divided)

        if self.direct is not None:
            self.sends(row.nbytes)
            self.begun += 1
            averaged = self.direct.begin(row, self.begun)
        else:
            assert code is not None
            self.sends(coded_bytes(row.numel(), units.count, code))
            averaged = partial(mean, row, code, units.between)
        if wait:
            return Sending(row, averaged)
        self.aside = Aside(averaged, self.aside, row.device)
        return Sending(row, self.aside.wait)

    def _arrive(self, sending: Sending) -> torch.Tensor:
        """The mean, the same on all ranks."""
        sending.arrived()
        if self.units.inside is not None:
            dist.broadcast(sending.row, src=self.units.first, group=self.units.inside)
        if self.first_exchange is None:
            self.first_exchange = self.observed["first_exchange_update"] = self.update
        self.exchanges += 1
        return sending.row

    def _average(self, piece: slice) -> None:
        """All units go on with the mean of their weights."""
        row = self._arrive(self._send(self.weights.row(piece)))
        self.anchor[piece] = row
        self.weights.put(row, piece)

    def after_update(self, update: int, last: bool) -> None:
        self.update = update
        self._exchange(last)
        self.together = last

    def _exchange(self, last: bool) -> None:
        raise NotImplementedError

    def _planned(self, updates: int) -> int:
        """How many pieces have been exchanged when so many updates are the whole training."""
        step = self.every // self.pieces
        return updates // step + self.pieces - (updates % step == 0)

    # ---- the run ----

    def begin(self, updates: int) -> None:
        self.updates = updates
        if self.every > updates and self.context.is_rank0:
            print(
                f"warning: --sync_every {self.every}: the run has {updates} updates, and only "
                "the last one exchanges anything",
                file=sys.stderr,
                flush=True,
            )

    def end(self) -> None:
        planned = self._planned(self.update)
        if not self.together or self.exchanges != planned:
            strategy = self.context.settings.strategy
            raise RuntimeError(
                f"asked for --strategy {strategy} with {planned} exchanges over "
                f"{self.updates} updates, but there were {self.exchanges} over {self.update}: "
                "refusing to record one as the other"
            )
        self.observed |= {
            "exchanges": self.exchanges,
            "first_exchange_update": self.first_exchange,
        }

    def _coded_bytes(self) -> int:
        """Of all weights, as one unit hands them over when all have been exchanged once."""
        code, count = CODES.get(self.context.settings.compress), self.units.count
        if count == 1 or code is None:
            return self.anchor.nbytes if count > 1 else 0
        rows = (piece.stop - piece.start for piece in self.weights.pieces)
        return sum(coded_bytes(numbers, count, code) for numbers in rows)

    def _kept_bytes(self) -> int:
        """What a rank keeps in memory for it at most, besides what DDP does."""
        return 2 * self.anchor.nbytes  # the last exchange's, and what is being averaged

    @contextmanager
    def shared(self) -> Iterator[None]:
        if self.together:  # and the model may hold the best weights instead of the last
            yield
            return
        own = self.weights.row()
        self.weights.put(self.anchor)
        try:
            yield
        finally:
            self.weights.put(own)

    # ---- checkpoints ----

    def _file(self, folder: Path) -> Path:
        return folder / f"apart_{self.units.own}.pt"

    def _marks(self) -> dict[str, Any]:
        """What a file must agree with to belong to the weights beside it."""
        return {
            "unit": self.units.own,
            "units": self.units.count,
            "size": self.weights.size,
            "shared": checksum(self.weights.rounded(self.anchor)),
        }

    def _own_state(self) -> dict[str, Any]:
        return {
            "own": self.weights.row().cpu(),
            # The weights beside the file are the same, unless they are coarser.
            "anchor": None if self.weights.exact else self.anchor.cpu(),
            "states": {n: s.state_dict() for n, s in self.states.items() if s is not None},
            "update": self.update,
            "exchanges": self.exchanges,
            "first_exchange": self.first_exchange,
            "together": self.together,
        }

    def save(self, folder: Path) -> None:
        state = self._own_state()  # on all ranks: what is on its way has to arrive
        if self.units.leads:
            file = self._file(folder)
            draft = file.with_name(f".{file.name}.{os.getpid()}")
            torch.save({"marks": self._marks(), **state}, draft)
            draft.replace(file)

    def load(self, folder: Path) -> None:
        saved, problem = self._read(self._file(folder))
        problems: list[str | None] = [problem]
        if dist.is_initialized() and self.context.world.size > 1:
            problems *= self.context.world.size
            dist.all_gather_object(problems, problem)
        for found in problems:
            if found is not None:
                raise UserError(f"{found}: use --rerun to start afresh; the old record is kept")
        self._restore(saved)

    def _read(self, file: Path) -> tuple[dict[str, Any], str | None]:
        """What was saved, or what is wrong with it."""
        node = self.context.world.rank // self.context.world.per_node
        what = f"{file}, with which node {node} goes on,"
        if not file.is_file():
            return {}, f"{what} is missing: it lies on the disk of the machine that wrote it"
        try:
            saved = torch.load(file, map_location="cpu", weights_only=True)
        except Exception:  # a torn file fails in many ways
            return {}, f"{what} cannot be read"
        if saved.get("marks") != self._marks():
            return {}, f"{what} does not belong to the weights beside it"
        return saved, None

    def _restore(self, saved: dict[str, Any]) -> None:
        self.weights.put(saved["own"].to(self.anchor.device))
        if saved["anchor"] is not None:
            self.anchor.copy_(saved["anchor"])
        for name, state in saved["states"].items():
            self.states[name].load_state_dict(state)
        self.update, self.exchanges = saved["update"], saved["exchanges"]
        self.together = saved["together"]
        if saved["first_exchange"] is not None:
            self.first_exchange = saved["first_exchange"]
            self.observed["first_exchange_update"] = self.first_exchange


class LocalSgd(Apart):
    """The weights themselves are averaged, all at once."""

    def _exchange(self, last: bool) -> None:
        if last or self.update % self.every == 0:
            self._average(self.weights.pieces[0])

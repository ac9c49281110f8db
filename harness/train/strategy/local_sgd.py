"""Replicas that train by themselves and exchange every sync_every updates: local SGD, and what
DiLoCo (diloco.py) shares with it.

A replica is a node, whose ranks average gradients at every update as in DDP, or a single rank
(--sync_scope rank, or a single node). DDP still wraps the model over all ranks, which starts them
with equal weights; a hook restricts its exchange to the replica. Every rank keeps a copy of the
weights of the last exchange, the anchor, which is evaluated and saved. BatchNorm's statistics,
which no training step reads, are averaged before evaluating and saving, as with ddp.

--sync_first: the first updates are made together, with the mean gradient of all replicas. Until
then, the anchor is the weights that all replicas have in common.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.core.collectives import ALL_TO_ALL, BACKEND
from harness.core.process import warn
from harness.core.records.disk import draft_of
from harness.core.settings import UserError
from harness.train.direct import Units
from harness.train.measure.communication import uncompiled
from harness.train.session import gather
from harness.train.strategy.base import Exchange
from harness.train.strategy.coded import (
    CODECS,
    Coded,
    CollectiveMean,
    GradientRow,
    coded_bytes,
    part_size,
)
from harness.train.strategy.direct_allreduce import DirectAllreduce, coded_mean


class PendingMean:
    """A row that is becoming the mean over all replicas."""

    def __init__(self, row: torch.Tensor, wait: Callable[[], Any] | None = None) -> None:
        self.row, self._wait = row, wait

    def wait(self) -> None:
        if self._wait is not None:
            self._wait()
            self._wait = None


class BackgroundTask:
    """Work in a daemon thread that begins after the previous task: in the same order on all ranks.

    On a GPU the work runs in a stream, for which the host does not wait: threads would start
    exchanges of two groups in different orders on different ranks, with which NCCL may never end.
    """

    def __init__(
        self, work: Callable[[], Any], previous: BackgroundTask | None, device: torch.device
    ) -> None:
        self.previous = previous
        self.work: Callable[[], Any] | None = work  # a stream needs its tensors until wait()
        self.error: BaseException | None = None
        self.stream = None
        if device.type == "cuda":
            # One stream for all: memory that was freed in one is of no use to others.
            self.stream = previous.stream if previous else torch.cuda.Stream(device)
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(self.stream):
                work()
            self.done = self.stream.record_event()  # later tasks follow in this stream
            return
        self.thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self.thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        if self.previous is not None:
            self.previous.thread.join()
            self.previous = None
        try:
            work()
        except BaseException as error:
            self.error = error

    def wait(self) -> None:
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(self.done)
            self.work = self.previous = None
            return
        self.thread.join()
        if self.error is not None:
            raise self.error


class FlatWeights:
    """The trained weights as one row of fp32, which can be read and written in fragments."""

    def __init__(self, parameters: Iterable[nn.Parameter], fragments: int = 1) -> None:
        self.parameters = list(parameters)
        self.size = size = sum(p.numel() for p in self.parameters)
        self.fragments = [
            slice(i * size // fragments, (i + 1) * size // fragments) for i in range(fragments)
        ]

    @property
    def exact(self) -> bool:
        """Whether weights written from a row are read back unchanged."""
        return all(parameter.dtype == torch.float32 for parameter in self.parameters)

    def rounded(self, row: torch.Tensor) -> torch.Tensor:
        """The row as it would be read back after writing it to the parameters."""
        parts = row.split([parameter.numel() for parameter in self.parameters])
        pairs = zip(parts, self.parameters, strict=True)
        return torch.cat([part.to(parameter.dtype).float() for part, parameter in pairs])

    def _views(self, fragment: slice) -> list[torch.Tensor]:
        """Views of the weights in a fragment, parameter by parameter."""
        views, begin = [], 0
        for parameter in self.parameters:
            first = max(fragment.start - begin, 0)
            last = min(fragment.stop - begin, parameter.numel())
            if first < last:
                views.append(parameter.detach().view(-1)[first:last])
            begin += parameter.numel()
        return views

    def row(self, fragment: slice | None = None) -> torch.Tensor:
        """Copy the weights, or a fragment of them, into a row."""
        return torch.cat([v.float() for v in self._views(fragment or slice(0, self.size))])

    def put(self, row: torch.Tensor, fragment: slice | None = None) -> None:
        views = self._views(fragment or slice(0, self.size))
        for view, values in zip(views, row.split([v.numel() for v in views]), strict=True):
            view.copy_(values)


def checksum(row: torch.Tensor) -> int:
    """A checksum of a row, equal for equal bits, on any device."""
    return int(row.contiguous().view(torch.int32).sum(dtype=torch.int64))


class ReplicaExchange(Exchange):
    """Keeps gradients inside a replica, and two sets of weights: the replica's own and the anchor.

    A subclass decides what is exchanged, and when.
    """

    apart = True
    fragments = 1

    def attach(self, model: nn.Module, optimizer: Any) -> None:
        settings = self.context.settings
        self.every = int(settings.sync_every or 1)
        self.first = int(settings.sync_first or 0)  # updates made together before the others
        self.replicas = Units(self.context.world, settings.sync_scope, bool(settings.overlap))
        ddp = uncompiled(model)
        self.weights = FlatWeights((p for p in ddp.parameters() if p.requires_grad), self.fragments)
        if self.weights.size < self.fragments:
            raise UserError(
                f"--fragments {self.fragments}: {self.weights.size} weights are trained: use at "
                f"most {self.weights.size}"
            )
        self.gradient_bytes = sum(p.nbytes for p in self.weights.parameters)
        self.anchor = self.weights.row()
        self.update = self.exchanges = self.payload_bytes = 0
        self.updates: int | None = None
        self.merged = False  # the last update has been made: all replicas are equal
        self.background: BackgroundTask | None = None
        codec = CODECS.get(settings.compress) if self.replicas.count > 1 else None
        self.coded = None if codec is None else Coded(codec)
        self.mean: DirectAllreduce | CollectiveMean | None = None  # None: the backend's all-reduce
        if self.replicas.count > 1 and self.replicas.leads:
            self.mean = self._mean_of()
        if self.replicas.count > 1:
            # A single replica is plain DDP, bit for bit.
            self.gradients = GradientRow(self.weights.parameters, self._begin_mean_of_all)
            ddp.register_comm_hook(None, self._average_gradients)
        self.observed |= {
            "sync_every": self.every,
            "sync_first": self.first,
            "sync_scope": str(settings.sync_scope),
            "units": self.replicas.count,
            "exchanged_bytes": self._exchanged_bytes(),
            "kept_bytes": self._kept_bytes(),
        }

    def _mean_of(self) -> DirectAllreduce | CollectiveMean | None:
        group, way = self.replicas.between, self.way
        if self.coded is not None:
            return coded_mean(self.coded, way, group)
        return None if way == BACKEND else DirectAllreduce(group, None, way == ALL_TO_ALL)

    @property
    def _is_ddp(self) -> bool:
        """Whether gradients of all ranks are averaged at every update: none trains apart."""
        return self.replicas.count == 1 and self.context.world.size > 1

    @property
    def in_sync(self) -> bool:
        """Whether replicas are equal, bit for bit, as none has trained apart yet."""
        return self.update <= self.first

    def _average_gradients(self, state, bucket):  # type: ignore[no-untyped-def] # torch reads it
        """DDP's communication hook: restricted to the ranks of this replica, except before replicas
        train apart.
        """
        if self.update < self.first:
            return self.gradients.hook(state, bucket)  # type: ignore[no-untyped-call]
        gradients = bucket.buffer()
        if self.replicas.inside is None:
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(gradients)
            return done
        self.count_sent(gradients.nbytes)
        gradients.mul_(1 / self.replicas.size)
        work = dist.all_reduce(gradients, group=self.replicas.inside, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def _begin_mean_of_all(self, row: torch.Tensor, again: bool) -> Callable[[], Any]:
        """Average an update's gradients over all ranks; one rank of each replica sends."""
        replicas = self.replicas
        if replicas.inside is not None:
            self.count_sent(row.nbytes)
            dist.all_reduce(row, group=replicas.inside)
            row.div_(replicas.size)
        # In a slot of its own: the errors of coded gradients are not added to weights.
        pending = self._begin_mean(row, self.fragments, again=self.update + 1 < self.first)

        def finish() -> None:
            pending.wait()
            if replicas.inside is not None:
                dist.broadcast(row, src=replicas.leader, group=replicas.inside)

        return finish

    def _begin_mean(
        self, row: torch.Tensor, number: int, wait: bool = True, again: bool = True
    ) -> PendingMean:
        """Begin to average a row over replicas, in slot (or fragment) `number`; see _finish_mean().

        wait: the mean is awaited at once, and needs no thread. again: another row of this number
        follows.
        """
        replicas = self.replicas
        if replicas.count == 1 or not replicas.leads:
            return PendingMean(row)
        if self.mean is not None:
            average = self.mean.begin(row, number, again=again)
            self.count_sent(row.nbytes if self.coded is None else self.coded.take_sent())
        else:
            self.count_sent(row.nbytes)
            work = dist.all_reduce(row, group=replicas.between, async_op=True)

            def divide() -> None:
                work.wait()
                row.div_(replicas.count)

            return PendingMean(row, divide)  # already asynchronous
        if wait:
            return PendingMean(row, average)
        self.background = BackgroundTask(average, self.background, row.device)
        return PendingMean(row, self.background.wait)

    def _finish_mean(self, pending: PendingMean) -> torch.Tensor:
        """The mean, equal on all ranks."""
        pending.wait()
        if self.replicas.inside is not None:
            dist.broadcast(pending.row, src=self.replicas.leader, group=self.replicas.inside)
        self.observed.setdefault("first_exchange_update", self.update)
        self.exchanges += 1
        return pending.row

    def _average_weights(self, number: int) -> None:
        """Average the weights of all replicas; each continues with the mean.

        Codes are of changes, which are smaller than weights.
        """
        fragment = self.weights.fragments[number]
        row = self.weights.row(fragment)
        if self.coded is None:
            row = self._finish_mean(self._begin_mean(row, number))
        else:
            change = self._begin_mean(self.anchor[fragment] - row, number)
            row = self.anchor[fragment] - self._finish_mean(change)
        self.anchor[fragment] = row
        self.weights.put(row, fragment)

    def after_update(self, update: int, last: bool) -> None:
        self.update = update
        if self._is_ddp:  # DDP does not report what it exchanges
            self.count_sent(self.gradient_bytes)
        if not self.in_sync:
            self._exchange(last)
        elif update == self.first:
            self._follow()
        self.merged = last

    def _follow(self) -> None:
        """The anchor becomes the weights that all replicas have."""
        self.anchor.copy_(self.weights.row())

    def _exchange(self, last: bool) -> None:
        raise NotImplementedError

    def updates_apart(self) -> int | None:
        if self._is_ddp:
            return 1
        # The next exchange stops all ranks; one in the background does when it takes effect.
        return self.every // self.fragments + int(self.context.settings.overlap or 0)

    def begin(self, updates: int) -> None:
        self.updates = updates
        if self.first >= updates:
            raise UserError(
                f"--sync_first {self.first}: the run has {updates} updates, and would never train "
                "apart: use --strategy ddp"
            )
        warning = self._warning(updates - self.first)
        if warning is not None and self.context.is_rank0:
            warn(warning)

    def _warning(self, updates: int) -> str | None:
        """A warning if a run exchanges otherwise than its flags suggest; updates: updates apart."""
        if self._is_ddp:
            return (
                f"--strategy {self.context.settings.strategy} on one node: gradients are exchanged "
                "at every update, as with ddp; with --sync_scope rank processes train apart"
            )
        if self.every <= updates:
            return None
        after = f" after --sync_first {self.first}" if self.first else ""
        return (
            f"--sync_every {self.every}: the run has {updates} updates{after}, and only the last "
            "one exchanges anything"
        )

    @property
    def apart_updates(self) -> int:
        """Updates since replicas train apart."""
        return self.update - self.first

    def end(self) -> None:
        # One fragment every few updates, and the other ones after the last update.
        step = self.every // self.fragments
        planned = self.apart_updates // step + self.fragments - (self.apart_updates % step == 0)
        if not self.merged or self.exchanges != planned:
            strategy = self.context.settings.strategy
            raise RuntimeError(
                f"asked for --strategy {strategy} with {planned} exchanges over "
                f"{self.updates} updates, but there were {self.exchanges} over {self.update}: "
                "refusing to record one as the other"
            )
        self.observed["exchanges"] = self.exchanges

    def _exchanged_bytes(self) -> int:
        """What one replica sends to exchange all weights once."""
        count = self.replicas.count
        if self.coded is None:
            return self.anchor.nbytes if count > 1 else 0
        parts = self.mean.parts if self.mean else count
        return sum(coded_bytes(size, parts, self.coded.codec) for size in self._row_sizes())

    def _row_sizes(self) -> list[int]:
        return [fragment.stop - fragment.start for fragment in self.weights.fragments]

    def _kept_bytes(self) -> int:
        """The most memory that a rank needs for this strategy, in addition to DDP's."""
        # The anchor, and the row that is being averaged.
        return 2 * int(self.anchor.nbytes) + self._owed_bytes()

    def _owed_bytes(self) -> int:
        """Bytes of errors owed: of each row, and of this rank's own sum if rows are in parts."""
        if self.coded is None:
            return 0
        parts = self.mean.parts if self.mean else self.replicas.count
        sizes = [*self._row_sizes(), *([self.weights.size] if self.first else [])]
        own = (part_size(size, parts, self.coded.codec) for size in sizes)
        return 4 * sum(own) * (parts + (parts > 1))

    @contextmanager
    def shared(self) -> Iterator[None]:
        if self.merged:  # and the model may hold the best weights instead of the last
            yield
            return
        if self.in_sync:
            self._follow()
        own = self.weights.row()
        self.weights.put(self.anchor)
        try:
            yield
        finally:
            self.weights.put(own)

    def _file(self, folder: Path) -> Path:
        return folder / f"apart_{self.replicas.index}.pt"

    def _marks(self) -> dict[str, Any]:
        """What must agree for a file to belong to the weights beside it."""
        return {
            "unit": self.replicas.index,
            "units": self.replicas.count,
            "size": self.weights.size,
            "shared": checksum(self.weights.rounded(self.anchor)),
        }

    def _own_state(self) -> dict[str, Any]:
        return {
            "own": self.weights.row().cpu(),
            # The weights saved beside the file hold the anchor, unless their dtype is coarser.
            "anchor": None if self.weights.exact else self.anchor.cpu(),
            "owed": self.coded.state_dict() if self.coded else {},
            "states": {n: s.state_dict() for n, s in self.states.items() if s is not None},
            "update": self.update,
            "exchanges": self.exchanges,
            "first_exchange": self.observed.get("first_exchange_update"),
            "together": self.merged,  # another name would need another CHECKPOINT_FORMAT
        }

    def save(self, folder: Path) -> Sequence[Path]:
        if self.in_sync:
            self._follow()
        state = self._own_state()  # on all ranks: it waits for exchanges in the background
        if not self.replicas.leads:
            return ()
        file = self._file(folder)
        with draft_of(file) as draft:
            torch.save({"marks": self._marks(), **state}, draft)
        return (file,)

    def load(self, folder: Path) -> None:
        saved, problem = self._read(self._file(folder))
        for line in filter(None, gather(problem)):
            raise UserError(f"{line}: use --rerun to start afresh; the old record is kept")
        self._restore(saved)

    def _read(self, file: Path) -> tuple[dict[str, Any], str | None]:
        """(what was saved, what is wrong with it)."""
        world = self.context.world
        what = f"{file}, with which node {world.rank // world.per_node} goes on,"
        if not file.is_file():
            return {}, f"{what} is missing: it lies on the disk of the machine that wrote it"
        try:
            saved = torch.load(file, map_location="cpu", weights_only=True)
        except Exception:  # a truncated file fails in many ways
            return {}, f"{what} cannot be read"
        if saved.get("marks") != self._marks():
            return {}, f"{what} does not belong to the weights beside it"
        return saved, None

    def _restore(self, saved: dict[str, Any]) -> None:
        self.weights.put(saved["own"].to(self.anchor.device))
        if saved["anchor"] is not None:
            self.anchor.copy_(saved["anchor"])
        if self.coded is not None:
            self.coded.load_state_dict(saved["owed"])
        for name, state in saved["states"].items():
            self.states[name].load_state_dict(state)
        self.update, self.exchanges = saved["update"], saved["exchanges"]
        self.merged = saved["together"]
        if saved["first_exchange"] is not None:
            self.observed["first_exchange_update"] = saved["first_exchange"]


class LocalSgd(ReplicaExchange):
    """The weights themselves are averaged, all at once."""

    def _exchange(self, last: bool) -> None:
        if last or self.apart_updates % self.every == 0:
            self._average_weights(0)

"""Tensors and short messages between two ranks, for measuring what is between them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from harness.core.collectives import GLOO

MESSAGE = 4  # numbers


@dataclass
class TensorChannel:
    """Sends tensors between ranks, of the kind and on the device that training uses."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    group: Any = None  # None: that of the training
    buffer: torch.Tensor | None = None

    def finish(self) -> None:
        """Wait for the exchange: NCCL calls return before it is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        self._pass(dist.isend, {rank: tensor})

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        self._pass(dist.irecv, {rank: tensor})

    def _pass(self, operation: Any, tensors: Mapping[int, torch.Tensor]) -> None:
        """As a batch: outside of a batch NCCL makes another communicator."""
        batch = [
            dist.P2POp(operation, tensor, rank, self.group) for rank, tensor in tensors.items()
        ]
        for work in dist.batch_isend_irecv(batch) if batch else ():
            work.wait()
        self.finish()

    def send_message(self, rank: int, *numbers: float) -> None:
        """A kind with its arguments, or a result; filled up to four numbers."""
        padded = [*numbers, *[0.0] * MESSAGE][:MESSAGE]
        self.send(torch.tensor(padded, dtype=torch.float64, device=self.device), rank)

    def receive_message(self, rank: int) -> list[float]:
        return self.receive_messages([rank])[0]

    def receive_messages(self, ranks: list[int], count: int = MESSAGE) -> list[list[float]]:
        """One of each rank. All are waited for at once: one by one each takes a round trip."""
        messages = [torch.zeros(count, dtype=torch.float64, device=self.device) for _ in ranks]
        self._pass(dist.irecv, dict(zip(ranks, messages, strict=True)))
        return [list(message.tolist()) for message in messages]

    @property
    def streams(self) -> bool:
        """Whether several tensors follow each other without a pause. gloo sends nothing before the
        receiver has announced its receive, so all receives are announced at once.
        """
        return bool(dist.get_backend(self.group) == GLOO)

    def send_each(self, tensor: torch.Tensor, rank: int, times: int) -> Iterator[float]:
        """Send it several times; yields when each is acknowledged by a message."""
        answers = [
            torch.zeros(MESSAGE, dtype=torch.float64, device=self.device) for _ in range(times)
        ]
        if not self.streams:
            for answer in answers:
                self.send(tensor, rank)
                self.receive(answer, rank)
                yield time.perf_counter()
            return
        receives = [dist.irecv(answer, rank, self.group) for answer in answers]
        sends = [dist.isend(tensor, rank, self.group) for _ in answers]
        for receive in receives:
            receive.wait()
            yield time.perf_counter()
        for send in sends:
            send.wait()

    def receive_each(self, tensor: torch.Tensor, rank: int, times: int, ready: float) -> None:
        """The other side: says that it is ready, and acknowledges each."""
        announced = [dist.irecv(tensor, rank, self.group) for _ in range(times * self.streams)]
        self.send_message(rank, ready)
        for number in range(times):
            if announced:
                announced[number].wait()
            else:
                self.receive(tensor, rank)
            self.send_message(rank)

    def elements(self, count: int) -> torch.Tensor:
        """Zeros, which stay zeros when summed; the memory is reused."""
        if self.buffer is None or len(self.buffer) < count:
            self.buffer = None  # free it before allocating another
            self.buffer = torch.zeros(count, dtype=self.dtype, device=self.device)
        return self.buffer[:count]

    def count_of(self, size: int) -> int:
        return max(1, size // int(self.dtype.itemsize))

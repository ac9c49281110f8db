"""When steps ended: host time on a CPU, CUDA events on a GPU, read only at the epoch's end.

A step is the time from the end of one optimizer step to the end of the next, loading of its data
included. Evaluation and saving are not in any step: after them the clock starts afresh.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from harness.train.traffic import Traffic


class StepClock:
    """Marks of one epoch. mark() costs microseconds and never waits for the GPU."""

    def __init__(self, cuda: bool, traffic: Traffic | None = None) -> None:
        self.cuda = cuda
        self.traffic = traffic or Traffic()  # between the same edges
        self.marks: list[tuple[int | None, Any]] = []  # (samples of the step, stamp); None: restart
        self.began_s = 0.0
        self.data_wait_s = 0.0
        self.paused_s = 0.0
        self.last_s = 0.0  # when the last step, or what paused the epoch, ended
        self.running = False

    def _stamp(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """An epoch begins."""
        self.running = True
        self.marks = [(None, self._stamp())]
        self.data_wait_s = self.paused_s = 0.0
        self.began_s = self.last_s = time.perf_counter()
        self.traffic.start()

    def data_ready(self) -> None:
        """The batches of the next step have been fetched."""
        self.data_wait_s += time.perf_counter() - self.last_s

    def waited(self) -> None:
        """A batch has been trained on that makes no step yet: the next is waited for from now."""
        self.last_s = time.perf_counter()

    def step(self, samples: int) -> None:
        """A step has ended."""
        self.marks.append((samples, self._stamp()))
        self.last_s = time.perf_counter()

    def resume(self) -> None:
        """Something that is not training (evaluation, saving) has ended inside the epoch."""
        self.traffic.resume()
        self.marks.append((None, self._stamp()))
        now = time.perf_counter()
        self.paused_s += now - self.last_s
        self.last_s = now

    def stop(self) -> float:
        """The epoch's training part has ended: its length, without what paused it."""
        if self.cuda:
            torch.cuda.synchronize()
        self.running = False
        return self.so_far()

    def so_far(self) -> float:
        """Seconds of training in this epoch until now."""
        return time.perf_counter() - self.began_s - self.paused_s

    def steps(self) -> list[tuple[int, float]]:
        """(samples, seconds) of each step; call after stop()."""
        found = []
        for (_, before), (samples, after) in zip(self.marks, self.marks[1:], strict=False):
            if samples is not None:
                seconds = before.elapsed_time(after) / 1000 if self.cuda else after - before
                found.append((samples, seconds))
        return found

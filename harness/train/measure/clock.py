"""Times of steps: the host's clock on a CPU, CUDA events on a GPU, read at the epoch's end only.

A step lasts from the end of one optimizer step to the end of the next, including the loading of its
data. Evaluation and saving are in no step: after them the clock restarts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from harness.train.measure.resources import Traffic


def stamp(cuda: bool) -> Any:
    """A point in time; on a GPU an event on the current stream; nothing is waited for."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(before: Any, after: Any) -> float:
    """Seconds between two stamps; on a GPU, once it is done with the later one."""
    is_event = isinstance(before, torch.cuda.Event)
    return float(before.elapsed_time(after) / 1000 if is_event else after - before)


class Measuring:
    """How long this process has measured for the record alone, which a plain training would not;
    what is measured within another measurement counts once.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self.running = False

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the time of the enclosed measurement; also a decorator."""
        if self.running:
            yield
            return
        self.running, began_s = True, time.perf_counter()
        try:
            yield
        finally:
            self.running = False
            self.total_s += time.perf_counter() - began_s


MEASURING = Measuring()


class StepClock:
    """The marks of one epoch. A mark costs microseconds and never waits for the GPU."""

    def __init__(self, cuda: bool, traffic: Traffic | None = None, untimed: int = 0) -> None:
        self.cuda = cuda
        self.untimed = untimed  # first steps, which are warm-up and not timed
        self.traffic = traffic or Traffic()  # measured between the same edges
        self.marks: list[tuple[int | None, Any]] = []  # (samples of the step, stamp); None: restart
        self.fetched: Any = None  # stamp: the batches of the current step have been fetched
        self.fetches: list[Any] = []  # the same of the steps that have ended
        self.began_s = 0.0
        self.data_wait_s = 0.0
        self.log: Any = None  # stamp: the log entry at the beginning of the current step was made
        self.logs: list[Any] = []  # the same of the steps that have ended
        self.paused_s = 0.0
        self.last_s = 0.0  # when the last step, or the last pause, ended
        self.running = False

    def start(self) -> None:
        """An epoch begins."""
        self.running = True
        self.data_wait_s = self.paused_s = 0.0
        # Before the first mark, here and in resume(): the steps are never longer than the epoch.
        self.began_s = self.last_s = time.perf_counter()
        self.marks, self.fetches = [(None, stamp(self.cuda))], []
        self.log, self.logs = None, []
        self.traffic.start()

    def data_ready(self) -> None:
        """The batches of the next step have been fetched."""
        self.data_wait_s += time.perf_counter() - self.last_s
        self.fetched = stamp(self.cuda)

    def wait_begins(self) -> None:
        """A batch of an unfinished step is done; waiting for the next one begins."""
        self.last_s = time.perf_counter()

    def logged(self) -> None:
        """A log entry has been made, for which ranks have exchanged their loss since the last step
        ended: waiting for the next batch begins.
        """
        self.wait_begins()
        self.log = stamp(self.cuda)

    def step(self, samples: int) -> None:
        """A step has ended."""
        self.marks.append((samples, stamp(self.cuda)))
        self.fetches.append(self.fetched)
        self.logs.append(self.log)
        self.log = None
        self.last_s = time.perf_counter()

    def settle(self) -> None:
        """Wait for the GPU, so that what follows is not counted in the last step."""
        if self.cuda:
            torch.cuda.synchronize()
            self.last_s = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the enclosed work from the epoch's time and traffic."""
        if self.cuda:
            torch.cuda.synchronize()  # the steps before it are included
        self.last_s = time.perf_counter()
        self.traffic.so_far()
        yield
        if self.cuda:
            torch.cuda.synchronize()
        self.resume()

    def resume(self) -> None:
        """Something other than training (evaluation, saving) has ended inside the epoch."""
        self.traffic.resume()
        now = time.perf_counter()
        self.paused_s += now - self.last_s
        self.last_s, self.log = now, None
        self.marks.append((None, stamp(self.cuda)))

    def stop(self) -> float:
        """The epoch's training part has ended: its seconds, without pauses."""
        if self.cuda:
            torch.cuda.synchronize()
        self.running = False
        return self.so_far()

    def so_far(self) -> float:
        """Seconds of training in this epoch so far."""
        return time.perf_counter() - self.began_s - self.paused_s

    def steps(self) -> list[tuple[int, float]]:
        """(samples, seconds) of each step; call it after stop()."""
        return [(samples, seconds_between(*edges)) for samples, *edges in self._edges()]

    def waits(self) -> list[float]:
        """Seconds of each step, after its log entry, until its batches were fetched; call it after
        stop().

        On a GPU this is the time in which it was idle: while the host waits for data, the GPU may
        still be busy with the previous step.
        """
        steps = zip(self._edges(), self.logs, self.fetches, strict=True)
        return [
            seconds_between(before if log is None else log, fetched)
            for (_, before, _), log, fetched in steps
        ]

    def log_waits(self) -> list[float]:
        """Seconds of each step until its log entry was made, or 0; call it after stop()."""
        steps = zip(self._edges(), self.logs, strict=True)
        return [
            0.0 if log is None else seconds_between(before, log) for (_, before, _), log in steps
        ]

    def _edges(self) -> Iterator[tuple[int, Any, Any]]:
        """(samples, beginning, end) of each step."""
        for (_, before), (samples, after) in zip(self.marks, self.marks[1:], strict=False):
            if samples is not None:
                yield samples, before, after

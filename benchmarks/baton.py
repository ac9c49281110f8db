"""Arms that train in turns within one process, and the clock that they share."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import TrainerCallback

LEFT_OUT = 5  # first steps of a round


class Baton:
    """One arm runs at a time: what slows the machine for a while slows all alike."""

    def __init__(self, order: Sequence[str]) -> None:
        self.order, self.turn = list(order), threading.Condition()

    def take(self, arm: str) -> None:
        with self.turn:
            self.turn.wait_for(lambda: self.order[0] == arm)

    def give(self, arm: str, stay: bool = True) -> None:
        with self.turn:
            self.order.remove(arm)
            self.order += [arm] if stay else []
            self.turn.notify_all()


class Marks(TrainerCallback):
    """Time each step from the end of the one before in its epoch; then let another arm run.

    The processor time of the training thread is taken too: other programs disturb it less. This
    callback is the last one, so that the step includes what the others do.
    """

    def __init__(self, arm: str, baton: Baton, cuda: bool) -> None:
        self.arm, self.baton, self.cuda = arm, baton, cuda
        self.seen, self.first_s, self.waited_s = 0, 0.0, 0.0
        self.steps: list[tuple[float, float]] = []
        self.last: tuple[float, float] | None = None

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        self.last = None  # an evaluation lies between two epochs

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self.cuda:
            torch.cuda.synchronize()  # count host work in full: none is hidden behind the GPU
        now, thread = time.perf_counter(), time.thread_time()
        self.seen += 1
        self.first_s = self.first_s or now
        if self.last is not None and self.seen > LEFT_OUT:
            self.steps.append((now - self.last[0], thread - self.last[1]))
        self.baton.give(self.arm)
        self.baton.take(self.arm)
        self.last = (time.perf_counter(), time.thread_time())
        self.waited_s += self.last[0] - now

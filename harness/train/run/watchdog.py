"""Finds a run that stalls: a rank, a launcher or a link that gives no sign of life.

Every rank has two threads. One publishes this rank's progress in the store in which the ranks met,
and reads the progress of some other ranks. The other judges by a clock that stops when this process
is stopped. The first verdict counts for all: each rank prints its stacks and ends. A step costs two
assignments.
"""

from __future__ import annotations

import faulthandler
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from transformers import TrainerCallback

from harness.core.process import forked, is_stopped
from harness.train.context import Context
from harness.train.measure.sampler import interfaces
from harness.train.session import gather

WATCHED = 8  # ranks that one rank looks at; all, where there are fewer
LONGEST_S = 10.0  # between two messages of a rank
SLOW_STEPS = 3  # a step may take so many times the longest so far
# Work without a time limit, known by the functions and files that a thread is in.
TRAINER = "/harness/train/loop/trainer.py"
LONG = {"evaluate", "test", "_save_checkpoint", "save_model"}  # of the trainer
COMPILING = ("/_dynamo/convert_frame.py", "/_inductor/compile_fx.py")
VERDICT = "verdict"
# A node whose traffic exceeds this exchanges more than the watchdogs' own messages (some hundred
# bytes a rank and period): an exchange over a slow link gets on, however long it takes.
MOVED_BYTES = 2**18  # and as much for each process of the node
MOVED_BYTES_PER_RANK = 2**16


class Hung(RuntimeError):
    """The run has stalled."""

    def __init__(self, reason: str, records: bool, settle_s: float = 0.0) -> None:
        super().__init__(reason)
        # Whether this rank records the outcome: rank 0 may be the silent one.
        self.records = records
        self.settle_s = settle_s  # until every rank has read the verdict and printed its stacks


class Watchdog(TrainerCallback):
    """Calls end() from its own thread when the run has stalled for hang_after_s."""

    def __init__(
        self,
        context: Context,
        hang_after_s: float,
        end: Callable[[Hung], None],
        store: Any = None,
        token: str = "",
        pids: Sequence[int] = (),
    ) -> None:
        world = context.world
        self.rank, self.size, self.per_node = world.rank, world.size, world.per_node
        self.hang_after_s, self.end, self.store = hang_after_s, end, store
        self.token = token  # of this start of the ranks: one store may serve several
        self.pids = pids  # of the ranks; a rank may be stopped before it has published anything
        self.period_s = min(hang_after_s / 8, LONGEST_S)
        self.watched = [(world.rank + i) % world.size for i in range(1, WATCHED + 1)][
            : world.size - 1
        ]
        self.training = False  # before the first update and after the last, ranks may wait long
        self.clock_s = self.moved_s = self.heard_s = self.slowest_s = 0.0
        self.seen: dict[int, tuple[Any, float]] = dict.fromkeys(self.watched, (None, 0.0))
        self.known: dict[int, dict[str, Any]] = {}  # what the ranks have published
        self.loaders: dict[int, float] = {}  # processes of data loaders, and when they were stopped
        self.answered = False  # whether the store has answered since the last look
        self.declared: dict[str, Any] | None = None  # the verdict that this rank proposes
        self.verdict: dict[str, Any] | None = None
        self.traffic = traffic() if world.nodes > 1 else None  # bytes, at the time traffic_s
        self.traffic_s = 0.0
        self.closed = threading.Event()
        self.done = False  # this rank has nothing left to train, and may end before the others
        tasks = [self._judge] if store is None else [self._judge, self._exchange]
        self.threads = [
            threading.Thread(target=task, daemon=True) for task in tasks if hang_after_s
        ]

    @classmethod
    def of(cls, context: Context, end: Callable[[Hung], None]) -> Watchdog:
        """The watchdog of a run, idle where it is switched off or where silence is no failure."""
        hang_after_s = context.settings.hang_after if context.session.ends_when_silent else 0.0
        # Not torchrun's count of restarts, which differs on a node that has come back.
        tokens, pids = zip(*gather([secrets.token_hex(8), os.getpid()]), strict=True)
        connected = hang_after_s and dist.is_initialized()
        store = _get_default_store() if connected else None
        return cls(context, hang_after_s, end, store, tokens[0], pids)

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def close(self, done: bool = False) -> None:
        """done: the run has ended well here; from now on this rank's silence is no failure."""
        self.done = done
        self.closed.set()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.moved_s = self.clock_s

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.slowest_s = max(self.slowest_s, self.clock_s - self.moved_s)
        self.moved_s = self.clock_s

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_substep_end(args, state, control)
        self.training = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.training = False

    def name(self, rank: int) -> str:
        return f"rank {rank} (node {rank // self.per_node})"

    def _exchange(self) -> None:
        """Publish this rank's progress, and read that of the ranks that it watches."""
        number = 0
        try:
            # A connection of its own: the main thread may wait on the other one. Made here, as over
            # a slow link it takes two round trips.
            self.store = self.store.clone()
            while not self.closed.wait(self.period_s):
                number += 1
                self._talk(number)
            if self.done:
                self._publish(number + 1)
        except RuntimeError:  # the connection is gone, or the store with its launcher
            return

    def _talk(self, number: int) -> None:
        self._publish(number)
        if self.declared is not None:
            self.store.compare_set(self._key(VERDICT), "", json.dumps(self.declared))
        suspicious = self.rank == 0 and self._idle_s() > self.hang_after_s / 2
        for rank in range(self.size) if suspicious else self.watched:
            if (published := self._read(rank)) is not None:
                self.known[rank] = published
        self.verdict = self._read(VERDICT)
        self.answered = True

    def _publish(self, number: int) -> None:
        own = {"number": number, "idle_s": self._idle_s(), "done": self.done}
        self.store.set(self._key(self.rank), json.dumps(own | {"in": where(main_frame())}))

    def _key(self, name: int | str) -> str:
        return f"harness/watchdog/{self.token}/{name}"

    def _read(self, name: int | str) -> dict[str, Any] | None:
        key = self._key(name)
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def _judge(self) -> None:
        last_s = time.monotonic()
        while not self.closed.wait(self.period_s / 2):
            now_s = time.monotonic()
            if self._look(now_s - last_s):
                return
            last_s = now_s

    def _look(self, passed_s: float) -> bool:
        """Judge once, passed_s after the last time; returns whether the run was ended."""
        # A longer pause means that this process itself was stopped: no time of the run.
        self.clock_s += min(passed_s, self.period_s)
        # All threads: on a GPU autograd compiles the backward pass in a thread of its own.
        if any(map(takes_long, sys._current_frames().values())):
            self.moved_s = self.clock_s
        if self._link_moves():
            self.moved_s = self.heard_s = self.clock_s
            self.seen = {rank: (number, self.clock_s) for rank, (number, _) in self.seen.items()}
        verdict = self.verdict or self._unanswered()
        if verdict is not None and not self.closed.is_set():
            self._pronounce(verdict)
            return True
        if self.declared is None:
            self.declared = self._silent() or self._stalled() or self._of_loaders()
            if self.store is None:
                self.verdict = self.declared
        return False

    def _link_moves(self) -> bool:
        """Whether the nodes have exchanged more than signs of life in a short time."""
        if self.traffic is None:
            return False
        now = traffic()
        least = MOVED_BYTES * (1 + self.per_node) + MOVED_BYTES_PER_RANK * self.size
        has_moved = now - self.traffic >= least
        # Else a trickle of others, as of shared storage, would add up to it at some time.
        if has_moved or self.clock_s - self.traffic_s > self.hang_after_s / 2:
            self.traffic, self.traffic_s = now, self.clock_s
        return has_moved

    def _idle_s(self) -> float:
        return self.clock_s - self.moved_s if self.training else 0.0

    def _unanswered(self) -> dict[str, Any] | None:
        if self.store is None or self.answered:
            self.answered, self.heard_s = False, self.clock_s
        if self.clock_s - self.heard_s <= self.hang_after_s:
            return None
        if self.rank and not launcher_has_store():
            return self._does_not_answer(0)
        reason = f"the store of the run has not answered for {self.hang_after_s:g} s"
        return {"reason": f"{reason}: its launcher or the link to it is down", "silent": []}

    def _silent(self) -> dict[str, Any] | None:
        """Why the run ends, if a rank publishes nothing any more."""
        for rank in self.watched:
            published = self.known.get(rank, {})
            before, since_s = self.seen[rank]
            if published.get("number") != before or published.get("done"):
                self.seen[rank] = published.get("number"), self.clock_s
            elif self.clock_s - since_s > self.hang_after_s:
                return self._does_not_answer(rank)
        return None

    def _does_not_answer(self, rank: int) -> dict[str, Any]:
        here = rank // self.per_node == self.rank // self.per_node
        stopped = here and rank < len(self.pids) and is_stopped(self.pids[rank])
        why = ": its process is stopped" if stopped else ""
        what = f"{self.name(rank)} has not answered for {self.hang_after_s:g} s"
        return {"reason": what + why, "silent": [rank]}

    def _stalled(self) -> dict[str, Any] | None:
        """Why the run ends, if all ranks answer and none progresses; only rank 0 reads of all."""
        limit_s = max(self.hang_after_s, SLOW_STEPS * self.slowest_s)
        if self.rank != 0 or self._idle_s() <= limit_s:
            return None
        others = {rank: self.known.get(rank) for rank in range(1, self.size)}
        if any(other is None or other["idle_s"] < limit_s / 2 for other in others.values()):
            return None  # one evaluates, saves or computes, and the others wait for it
        at = {self.rank: where(main_frame())} | {r: o["in"] for r, o in others.items() if o}
        places = [f"{self.name(rank)} in {at[rank]}" for rank in sorted(at)[:4]]
        return {"reason": f"no update for {limit_s:g} s: {', '.join(places)}", "silent": []}

    def _of_loaders(self) -> dict[str, Any] | None:
        """Why the run ends, if a data loader of this rank is stopped, also before any update."""
        stopped = [*filter(is_stopped, forked())]
        self.loaders = {pid: self.loaders.get(pid, self.clock_s) for pid in stopped}
        for pid, since_s in self.loaders.items():
            if self.clock_s - since_s > self.hang_after_s:
                what = f"process {pid}, which loads data for {self.name(self.rank)}"
                reason = f"{what}, has been stopped for {self.hang_after_s:g} s"
                return {"reason": reason, "silent": []}
        return None

    def _pronounce(self, verdict: Mapping[str, Any]) -> None:
        reason, silent = str(verdict["reason"]), verdict["silent"]
        print(f"harness: {reason}; stacks of {self.name(self.rank)}:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=2)
        recorder = min(rank for rank in range(self.size) if rank not in silent)
        # One period until the others have read the verdict, and half of one until they judge by it.
        settle_s = 0.0 if self.store is None else 1.5 * self.period_s
        self.end(Hung(reason, self.rank == recorder, settle_s))


def launcher_has_store() -> bool:
    """Whether torchrun has the store in which the ranks met; else rank 0 has it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def traffic() -> int:
    """Bytes that this node has sent to others and received from them."""
    return sum(counters.bytes_sent + counters.bytes_recv for counters in interfaces())


def main_frame() -> FrameType | None:
    """What the main thread does at this moment."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def takes_long(frame: FrameType | None) -> bool:
    """Whether a thread that is in this frame compiles, evaluates or saves."""
    while frame is not None:
        if is_beside_steps(frame) or frame.f_code.co_filename.endswith(COMPILING):
            return True
        frame = frame.f_back
    return False


def is_beside_steps(frame: FrameType) -> bool:
    """Whether this frame evaluates or saves."""
    return frame.f_code.co_name in LONG and frame.f_code.co_filename.endswith(TRAINER)


def where(frame: FrameType | None) -> str:
    if frame is None:
        return "no function"
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"

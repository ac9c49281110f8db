"""A sweep whose clock and processes are simulated; runner, launcher, locks and records are real.

A history is its seed: random.Random(seed) draws how long each step takes and when what fails.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest

from harness.core import attempts, records
from harness.core.attempts import Opened
from harness.core.records import FINISHED, append_row, locks, read_json, write_json
from harness.core.records.locks import Lock
from harness.core.records.redact import settings_of
from harness.launch import runner
from harness.launch.agents import Event, LaunchRequest, Node, Rendezvous, WarmAgent
from harness.launch.launcher import Launcher
from harness.launch.outcome import State
from harness.launch.places import Local, Machine, Options
from harness.launch.plan import Job
from harness.launch.runner import Runner
from tests.support.sweeps import Watcher

EPOCHS, UPDATES, SAVE_EVERY = 3, 4, 3  # updates of an epoch, and between two checkpoints
FAULTS = ("kill rank", "crash", "oom", "kill launcher", "kill runner", "stop", "stop twice",
          "clock", "torn row", "stall", "another")  # fmt: skip
ONE_HOUR_S = 3600.0


class RunnerKilled(BaseException):
    """kill -9 of the runner: the kernel ends what it has started, and gives its locks back."""


class Training:
    """The processes of one run, a write at a time, as harness.train makes them."""

    def __init__(self, world: SimulatedWorld, job: Job) -> None:
        self.world, self.folder = world, job.folder
        self.settings = settings_of(job.settings)
        self.lock = Lock(self.folder.lock("run"))
        self.wall_s, self.update, self.begun = 0.0, 0, False
        self.began_s = world.passed_s
        self.asked = job.settings
        self.batch = int(job.settings.per_gpu_batch or 1)
        self.fault: str | None = None  # what the next step meets
        self.steps = self._train()

    def step(self) -> int | None:
        """The exit code, once it has ended."""
        try:
            next(self.steps)
            self.wall_s = self.world.passed_s - self.began_s
        except StopIteration as ended:
            self.lock.release()
            return int(ended.value)
        return None

    def die(self) -> None:
        """No code runs any more; the kernel gives the lock back."""
        if self.lock.file is not None:
            os.close(self.lock.file)
            self.lock.file = None

    def _train(self) -> Iterator[float]:
        folder, draw = self.folder, self.world.draw
        if not self.lock.take():
            return 2
        if folder.outcome() == FINISHED:
            return 0
        self.world.begun[folder.path] += 1
        folder.write_settings(self.settings)
        write_json(folder.environment, {"nodes": 1, "processes_per_node": 1})
        yield draw.uniform(0.1, 3)
        saved = read_json(folder.path / "checkpoint.json") or {"update": 0}
        assert saved["update"] == self.world.saved[folder.path]  # nothing of it was lost
        self.update = saved["update"]
        if self.asked.auto_batch:
            half = attempts.batch_to_try(folder, self.asked)
            self.batch = half or attempts.last_batch(folder, self.asked)
        opened = Opened(time.time() - self.wall_s)
        attempts.begin(folder, self.update, 1, 4, opened, self.batch)
        self.begun = True
        folder.summary.unlink(missing_ok=True)
        while self.update < EPOCHS * UPDATES:
            yield draw.uniform(0.1, 2)
            if self.batch > self.world.memory:
                return self._fail("oom")
            if self.fault is not None:
                return self._fail(self.fault)
            self.update += 1
            epoch, at_end = divmod(self.update, UPDATES)
            facts = {"attempt": len(attempts.starts_of(folder.read_attempts()))}
            cpu = {name: [self.wall_s] for name in attempts.CPU_TIME}
            attempts.write_progress(
                folder, {**facts, "update": self.update, "wall_s": self.wall_s, **cpu}
            )
            if at_end == 0 and epoch > len(folder.read_epochs()[0]):
                yield 0.0
                append_row(folder.epochs, row_of(epoch))
            if self.update % SAVE_EVERY == 0:
                yield 0.0
                write_json(folder.path / "checkpoint.json", {"update": self.update})
                self.world.saved[folder.path] = self.update
        yield 0.0
        self._end(FINISHED, None)
        return 0

    def _fail(self, how: str) -> int:
        kind = {"oom": "oom", "stop": "interrupted"}.get(how, "failed")
        if kind != "interrupted":
            row = {"rank": 0, "outcome": kind, "reason": how, "unix": time.time()}
            write_json(self.folder.failure(0), row)
        self._end(kind, how)
        return 1

    def _end(self, kind: str, reason: str | None) -> None:
        attempts.end(
            self.folder, kind, reason, self.wall_s, None, self.update, self.begun, self.batch
        )
        self.folder.progress.unlink(missing_ok=True)
        attempts.write_summary(self.folder, kind, reason)


def row_of(epoch: int) -> dict[str, Any]:
    return {"epoch": float(epoch), "updates": epoch * UPDATES, "samples": 4 * UPDATES,
            "accuracy": epoch / 10, "epoch_time_s": 1.0, "eval_time_s": 0.1}  # fmt: skip


class SimulatedAgent(WarmAgent):
    """Starts trainings of the simulated world."""

    world: ClassVar[SimulatedWorld]

    def __init__(self, node: Node, environment: Mapping[str, str], log: Path) -> None:
        self.node, self.opened_s, self.heard_s = node, time.monotonic(), time.monotonic()
        self.events: list[Event] = [{"event": "ready", "cuda_in_server": False}]
        self.training: Training | None = None
        self.alive, self.stalled = True, False
        self.world.agents.append(self)

    @property
    def usable(self) -> bool:
        return self.alive

    def request_port(self) -> int | None:
        return 4000

    def begin(self, request: LaunchRequest, number: int, meeting: Rendezvous) -> None:
        self.heard_s = time.monotonic()
        if self.alive:
            if "--rerun" in request.argv and attempts.RESUMES not in request.environment:
                self.world.saved[request.job.folder.set_aside()] = 0
                self.world.saved[request.job.folder.path] = 0
            self.training = Training(self.world, request.job)
            self.world.never_two(request.job.folder.path)

    def step(self) -> None:
        if self.alive and not self.stalled:
            self.heard_s = time.monotonic()
            try:
                code = self.training.step() if self.training is not None else None
            except OSError:  # the disk refuses: nothing of it can be recorded
                assert self.training is not None
                self.training.die()
                code = 1
            if code is not None:
                self._ended(code, code)

    def _ended(self, code: int, of_rank: int) -> None:
        self.training = None
        failures = [{"rank": 0, "exit_code": of_rank, "unix": time.time()}] if code else []
        self.events.append({"event": "ended", "code": code, "failures": failures})

    def kill_rank(self) -> None:
        if self.training is not None:
            self.training.die()
            self._ended(1, -9)

    def receive(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def stop(self) -> None:
        if self.training is not None and not self.stalled:
            if self.training.begun:
                self.training.fault = "stop"
            else:
                self.kill_rank()

    def kill(self) -> None:
        if self.alive:
            self.end()
            self.events = [{"event": "died", "code": -9}]

    def end(self) -> None:
        if self.training is not None:
            self.training.die()
        self.alive, self.training = False, None

    def close(self) -> None:
        """A rank prints until its launcher is gone."""
        self.end()
        if self.heard_s > self.opened_s:  # it has had a run
            with suppress(OSError):  # a full disk is its own affair
                self.run_log.parent.mkdir(parents=True, exist_ok=True)
                with self.run_log.open("ab") as log:
                    log.write(b"/home/eve/late\n")


class SimulatedPlace(Local):
    def start(self, log: Path) -> Launcher:
        return Launcher(self.nodes(), {}, log, SimulatedAgent)


class SimulatedWorld:
    """Clock, processes and faults of one history."""

    def __init__(self, seed: int, jobs: list[Job], folder: Path) -> None:
        self.draw = random.Random(seed)
        self.jobs, self.folder = jobs, folder
        self.passed_s, self.set_s = 0.0, 0.0  # since the beginning; by which the clock was set
        self.agents: list[SimulatedAgent] = []
        self.others: list[Training] = []  # by other people
        self.touched: set[Path] = set()  # what they have trained
        self.begun: Counter[Path] = Counter()  # trainings, by folder
        self.saved: Counter[Path] = Counter()  # updates of the last checkpoint
        self.plan = sorted(
            (self.draw.uniform(0, 60), self.draw.choice(FAULTS))
            for _ in range(self.draw.randrange(7))
        )
        self.memory = self.draw.choice([1, 4, 1000])  # samples of a forward pass that fit
        self.log: list[str] = []
        self.runner: Runner | None = None

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        """All that the launch code knows of time, disks and processes."""
        patch.setattr(time, "monotonic", lambda: 1e4 + self.passed_s)
        patch.setattr(time, "time", lambda: 1.8e9 + self.passed_s + self.set_s)
        patch.setattr(time, "sleep", self.tick)
        patch.setattr(runner.select, "select", lambda *streams: self.tick(0.1))
        patch.setattr(os, "fsync", lambda file: None)
        write = records.write_json

        def write_now(path: Path, content: Mapping[str, Any], durable: bool = True) -> None:
            write(path, content, durable)
            os.utime(path, (time.time(), time.time()))

        patch.setattr(records, "write_json", write_now)
        patch.setattr(SimulatedAgent, "world", self, raising=False)
        assert locks.time is time

    def tick(self, least_s: float) -> None:
        self.passed_s += max(least_s, self.draw.uniform(0.1, 2))
        for agent in self.agents:
            agent.step()
        for other in list(self.others):
            if other.step() is not None:
                self.others.remove(other)
        if self.plan and self.plan[0][0] <= self.passed_s:
            self._meet(self.plan.pop(0)[1])

    def _meet(self, fault: str) -> None:
        busy = [agent for agent in self.agents if agent.training is not None]
        self.log.append(f"{self.passed_s:.1f} s: {fault}{'' if busy else ' (nothing runs)'}")
        if fault == "clock":
            self.set_s += self.draw.choice([-ONE_HOUR_S, ONE_HOUR_S])
        elif fault.startswith("stop") and self.runner is not None:
            self.runner.stops += 2 if "twice" in fault else 1
        elif fault == "kill runner" and self.runner is not None:
            raise RunnerKilled
        elif fault == "another":
            other = Training(self, self.draw.choice(self.jobs))
            self.touched.add(other.folder.path)
            self.others.append(other)
        for agent in busy[:1]:
            self._harm(agent, fault)

    def _harm(self, agent: SimulatedAgent, fault: str) -> None:
        training = agent.training
        assert training is not None
        if fault == "torn row" and training.begun:
            with training.folder.epochs.open("ab") as file:
                file.write(b'{"epoch": 1.0, "upda')
        if fault in ("kill rank", "torn row"):
            agent.kill_rank()
        elif fault in ("crash", "oom") and training.begun:
            training.fault = fault
        elif fault == "kill launcher":
            agent.kill()
        elif fault == "stall":
            agent.stalled = True

    def never_two(self, path: Path) -> None:
        running = [a for a in self.agents if a.training and a.training.folder.path == path]
        assert len(running) == 1, f"{path} is trained twice at once"

    def work(self, options: Options) -> list[State]:
        """One runner to its end, by whatever; its states."""
        states = [State(job) for job in self.jobs]
        machine = Machine((), (0, 1))
        place = SimulatedPlace(options, machine)
        self.runner = Runner(states, options, self.folder, Watcher(), place, machine)
        try:
            self.runner.work()
        except RunnerKilled:
            pass
        finally:
            for agent in self.agents:
                assert not agent.alive or self.runner is None
            self.agents, self.runner = [], None
        return states

"""Works off the runs of a sweep: claims, starts, watches and settles them, alone or with others."""

from __future__ import annotations

import json
import select
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from harness.core.locks import Lock
from harness.core.records import read_json
from harness.core.settings import UserError
from harness.launch import machine, outcome
from harness.launch.agents import LaunchRequest
from harness.launch.launcher import Exit, Launcher
from harness.launch.machine import Machine
from harness.launch.outcome import written_since
from harness.launch.places import Devices, Machines
from harness.launch.plan import (
    ELSEWHERE,
    RUNNING,
    WAITING,
    Options,
    State,
    in_short,
    launched,
    new_log,
    settled,
)

GRACE_S = 20.0  # for ranks that were asked to end, before they are killed
LOOK_AGAIN_S = 1.0  # at runs of other runners
ISOLATION_S = 60.0  # between two looks at who else uses the machine


@dataclass
class Running:
    """A run that goes on, and what it occupies."""

    state: State
    launcher: Launcher
    lock: Lock
    devices: Devices
    log: Path
    began_unix: float
    oom_kills: int
    asked: str | None = None  # why it was asked to end
    asked_s: float = 0.0


class Watcher(Protocol):
    """Whoever is told what happens (screen.py)."""

    def say(self, line: str) -> None: ...
    def note(self, line: str, ended: bool = False) -> None: ...
    def show(self) -> None: ...


@dataclass
class Runner:
    states: list[State]
    options: Options
    place: Machines
    machine: Machine
    folder: Path  # of the sweep
    screen: Watcher
    running: list[Running] = field(default_factory=list)
    idle: list[Launcher] = field(default_factory=list)
    stops: int = 0  # how often a person asked to stop; a signal handler counts here
    obeyed: int = 0
    began_unix: float = field(default_factory=time.time)
    looked_s: float = 0.0
    isolation_s: float = -ISOLATION_S
    found: dict[str, object] = field(default_factory=dict)

    def work(self) -> None:
        """Until every run has an outcome, or somebody stops it. No run is left behind running."""
        try:
            while True:
                self._collect()
                self._obey()
                if not self.obeyed:
                    self._start_what_fits()
                if not self.running and (self.obeyed or not self._left()):
                    return
                self.screen.show()
                self._wait()
        finally:
            for launcher in (*self.idle, *(r.launcher for r in self.running)):
                launcher.close()
            for running in self.running:
                running.lock.release()

    def _wait(self) -> None:
        """A moment, or until a launcher has something to say."""
        select.select([s for r in self.running for s in r.launcher.streams], [], [], 0.1)

    def _obey(self) -> None:
        """Asked to stop once: the runs that go on record and end. Twice: they are killed."""
        if self.obeyed == self.stops:
            return
        self.obeyed = self.stops
        for running in self.running:
            if self.obeyed > 1:
                running.launcher.kill()
            elif running.asked is None:
                self._ask(running, "interrupted")

    # ---- which run is next ----

    def _left(self) -> list[State]:
        return [s for s in self.states if s.state in (WAITING, ELSEWHERE)]

    def _start_what_fits(self) -> None:
        if self.running and not self.options.pack:
            return
        again = time.monotonic() - self.looked_s >= LOOK_AGAIN_S
        if again:
            self.looked_s = time.monotonic()
        for state in self._left():
            if state.state == ELSEWHERE and not again:
                continue
            taken = {name for r in self.running for node in r.devices for name in node}
            devices = self.place.free(state.job, taken)
            if devices is None:
                if self.options.pack:
                    continue
                return
            if self._begin(state, devices) and not self.options.pack:
                return

    def _begin(self, state: State, devices: Devices) -> bool:
        """Start a run, unless it is done already or somebody else is at it."""
        job = state.job
        lock = Lock(job.folder.lock("claim"))
        if not lock.take():
            state.state = ELSEWHERE
            return False
        if outcome.is_measured(job.folder):  # by a person, without a sweep
            state.state = ELSEWHERE
            lock.release()
            return False
        told = read_json(job.folder.summary) or {}
        # What another runner has measured meanwhile is not to be measured again.
        fresh = written_since(job.folder.summary, self.began_unix)
        known = settled(told.get("outcome"), None if fresh else self.options.rerun)
        if known is not None:
            state.state, state.reason, state.known = known, told.get("reason"), not fresh
            lock.release()
            return False
        try:
            self._look_around()
            self.place.prepare(job)
            launcher = self.idle.pop() if self.idle else self._launcher()
        except UserError:
            lock.release()
            raise
        log = new_log(self.folder / "logs", job)
        argv = (*job.argv, *(("--rerun",) if self.options.rerun == "all" else ()))
        state.state, state.reason, state.began_s = RUNNING, None, time.monotonic()
        running = Running(state, launcher, lock, devices, log, time.time(), outcome.oom_kills())
        self.running.append(running)
        launcher.begin(
            LaunchRequest(
                job,
                argv,
                self._variables(state),
                self._cores(devices),
                log,
                self.place.visible(devices),
                self.options.elastic,
            )
        )
        self.screen.note(f"{self._number(state)} {job}: started")
        return True

    def _launcher(self) -> Launcher:
        return self.place.start(self.folder / "logs" / "launcher.txt")

    def _variables(self, state: State) -> dict[str, str]:
        """For the ranks: what their record says of how they were started."""
        launch = launched(self.folder.name, self.options, self.found, self.place.facts(state.job))
        return {"HARNESS_LAUNCH": json.dumps(launch), **self.place.variables(state.job)}

    def _cores(self, devices: Devices) -> tuple[int, ...] | None:
        if self.options.pack and not self.machine.gpus:
            return tuple(int(core) for node in devices for core in node)
        return None

    def _look_around(self) -> None:
        """Say, or refuse, when others use this machine; only while nothing of ours runs."""
        now_s = time.monotonic()
        early = now_s - self.isolation_s < ISOLATION_S
        if self.options.isolation == "off" or not self.place.here or self.running or early:
            return
        self.isolation_s = now_s
        self.found = machine.others(self.machine)
        disturbance = machine.disturbed(self.found)
        if disturbance is None:
            return
        if self.options.isolation == "error":
            raise UserError(f"{disturbance}: wait, or measure all the same with --isolation warn")
        self.screen.say(f"warning: {disturbance}: what is measured now is disturbed")

    # ---- runs that go on, and that end ----

    def _collect(self) -> None:
        for running in list(self.running):
            found = running.launcher.poll()
            if not running.launcher.ready:
                # Loading is done once for all runs: it is no part of this one.
                running.state.began_s = time.monotonic()
            if found is not None:
                self._settle(running, found)
            elif running.asked is None and self._too_long(running):
                self._ask(running, "timeout")
            elif running.asked is not None and time.monotonic() - running.asked_s > GRACE_S:
                running.launcher.kill()

    def _too_long(self, running: Running) -> bool:
        limit_s, began_s = self.options.timeout_s, running.state.began_s
        assert began_s is not None
        return limit_s is not None and time.monotonic() - began_s > limit_s

    def _ask(self, running: Running, why: str) -> None:
        running.asked, running.asked_s = why, time.monotonic()
        running.launcher.stop()

    def _settle(self, running: Running, found: Exit) -> None:
        state, job = running.state, running.state.job
        kills = outcome.oom_kills() - running.oom_kills
        if (lost := self.place.collect(job)) is not None:
            # Whatever it is, it lies where it was written: the next start brings it.
            found = replace(found, error=f"no record came back: {lost}", launcher_died=True)
        state.state = outcome.settle(
            job, found, running.began_unix, running.log, running.asked, kills
        )
        assert state.began_s is not None
        took_s = time.monotonic() - state.began_s
        state.took_s = took_s if state.state != ELSEWHERE else None
        summary = read_json(job.folder.summary) or {}
        state.reason = summary.get("reason")
        self.running.remove(running)
        running.lock.release()
        self.idle.append(running.launcher)
        line = f"{self._number(state)} {job}: {state.state} after {took_s:.1f} s, "
        if state.failed:
            self.screen.say(f"{line}{state.reason}; its output is in {running.log}")
        else:
            self.screen.note(line + in_short(summary), ended=True)
        if state.failed and self.options.fail_fast and not self.stops:
            self.screen.say("stopped at the first failure (--fail_fast)")
            self.stops += 1

    def _number(self, state: State) -> str:
        return f"[{self.states.index(state) + 1}/{len(self.states)}]"

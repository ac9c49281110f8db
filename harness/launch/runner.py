"""Works through the runs of a sweep: claims, starts, watches and settles them."""

from __future__ import annotations

import json
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.core import attempts
from harness.core.identity import REPETITIONS
from harness.core.process import GRACE_S
from harness.core.records import FINISHED, LOGS, RUNNING, SKIPPED, WAITING
from harness.core.records.locks import Lock
from harness.core.records.redact import redact_logs
from harness.core.settings import UserError
from harness.launch import outcome, places
from harness.launch.agents import LaunchRequest
from harness.launch.ahead import runs
from harness.launch.choices import as_typed
from harness.launch.launcher import Exit, Launcher
from harness.launch.outcome import (
    ELSEWHERE,
    Began,
    State,
    disturbance_of,
    quality_and_speed,
    settled,
)
from harness.launch.places import Devices, Machine, Machines, Options, launched
from harness.launch.plan import Job
from harness.launch.screen import Screen, exact

CHECK_AGAIN_S = 1.0  # between two looks at runs of other runners
LAUNCHER_LOG = "launcher.txt"
ISOLATION_S = 60.0  # between two checks of who else uses the machine


@dataclass
class Worker(ABC):
    """Brings every run of a sweep to an outcome: here (Runner), or through a cluster (Queue)."""

    states: list[State]
    options: Options
    folder: Path  # the folder of the sweep
    screen: Screen
    command: str = field(default="", kw_only=True)  # the command that started the sweep
    stops: int = field(default=0, kw_only=True)  # requests to stop; a signal handler counts here

    @property
    def log_folder(self) -> Path:
        return self.folder / LOGS

    @property
    def hosts(self) -> list[tuple[str, str]]:
        """The names by which logs may call each host."""
        return [(str(host), host.name) for host in self.options.remote.hosts]

    @abstractmethod
    def work(self) -> None:
        """Work until every run has an outcome, or a person stops it."""

    @abstractmethod
    def stop_at_failure(self) -> None:
        """End the sweep (--fail_fast)."""

    def name_of(self, state: State) -> str:
        return f"[{self.states.index(state) + 1}/{len(self.states)}] {state.job}"

    def is_settled(self, state: State, rerun: str | None) -> bool:
        """Whether the record has an outcome that is to be kept; if so, copy it into the state."""
        summary: Mapping[str, Any] = state.job.folder.read_summary() or {}
        known = settled(state.job.folder.outcome(), rerun)
        if known is None or (known == "oom" and self.batch_to_try(state) is not None):
            return False
        state.state, state.reason, state.known = known, summary.get("reason"), True
        return True

    def batch_to_try(self, state: State) -> int | None:
        """The smaller batch for a run out of memory (--auto_batch); None if that was just tried."""
        batch = attempts.batch_to_try(state.job.folder, state.job.settings)
        return None if batch == state.batch else batch

    def report(self, state: State, took_s: float, log: Path) -> None:
        """Show the outcome of a run that was just settled. took_s: time since its last start."""
        redact_logs(log, state.job.settings, self.hosts)
        tried = attempts.believed(state.job.folder)
        state.took_s = max(took_s, attempts.total_wall_s(tried))
        tries = len(attempts.starts_of(tried))
        summary: Mapping[str, Any] = state.job.folder.read_summary() or {}
        state.reason = summary.get("reason")
        if state.failed and summary.get("outcome") == FINISHED:  # it began no new record
            cause = "it had not begun its record"
            if state.state in ("failed", "oom", "diverged"):
                cause = outcome.line_of_error(log) or "it gave no reason"
            state.reason = f"{cause}; the finished record stays, --rerun all tries again"
        line = f"{self.name_of(state)}: {state.state} after {exact(state.took_s)}"
        line += f" in {tries} attempts, " if tries > 1 else ", "
        if not state.failed:
            why = disturbance_of(state.job.folder)
            line += quality_and_speed(summary) + (f"; disturbed: {why}" if why else "")
            self.screen.note(line, ended=True)
            return
        output = f"its output is in {log}" if log.is_file() else "it printed nothing"
        self.screen.print(f"{line}{state.reason}; {output}")
        if self.options.fail_fast:
            self.stop_at_failure()


@dataclass
class Running:
    """A run in progress, and the resources it occupies."""

    state: State
    launcher: Launcher
    lock: Lock
    devices: Devices
    log: Path
    began: Began
    stopped: tuple[str, str] | None = None  # outcome and reason, if the run was asked to exit
    stopped_s: float = 0.0


@dataclass
class Runner(Worker):
    """Starts the runs itself, alone or beside other runners of the same sweep."""

    place: Machines
    machine: Machine
    running: list[Running] = field(default_factory=list)
    idle: list[Launcher] = field(default_factory=list)
    stops_obeyed: int = 0
    earlier: dict[Path, object] = field(default_factory=dict)  # summaries when this runner began
    checked_s: float = 0.0  # when it last looked at runs of other runners
    isolation_s: float = -ISOLATION_S  # when it last checked who else uses the machine
    others: dict[str, object] = field(default_factory=dict)
    logs: dict[Path, Job] = field(default_factory=dict)
    refused: list[State] = field(default_factory=list)  # failed before their training began
    any_begun: bool = False  # a run of this call began its training

    def work(self) -> None:
        """Work as declared in Worker; when this returns or raises, no run is left running."""
        folders = (state.job.folder for state in self.states)
        self.earlier = {folder.path: folder.read_summary() for folder in folders}
        try:
            while True:
                self._collect()
                self._obey()
                if not self.stops_obeyed:
                    self._start_what_fits()
                if not self.running and (self.stops_obeyed or not self._unsettled()):
                    return
                self.screen.show()
                # Wait for a moment, or until a launcher has news.
                select.select([s for r in self.running for s in r.launcher.streams], [], [], 0.1)
        finally:
            for launcher in (*self.idle, *(r.launcher for r in self.running)):
                launcher.close()
            for running in self.running:
                running.lock.release()
            if self.states:
                self.logs[self.log_folder / LAUNCHER_LOG] = self.states[0].job
            for log, job in self.logs.items():  # once more: no process is left that could print
                redact_logs(log, job.settings, self.hosts)

    def stop_at_failure(self) -> None:
        if not self.stops:
            self.screen.print("stopped at the first failure (--fail_fast)")
            self.stops += 1

    def _obey(self) -> None:
        """Obey stops: after one, running runs record and exit; after two, they are killed."""
        if self.stops_obeyed == self.stops:
            return
        self.stops_obeyed = self.stops
        for running in self.running:
            if self.stops_obeyed > 1:
                running.launcher.kill()
            elif running.stopped is None:
                self._stop(running, outcome.STOPPED)

    def _unsettled(self) -> list[State]:
        return [s for s in self.states if s.state in (WAITING, ELSEWHERE)]

    def _start_what_fits(self) -> None:
        if self.running and not self.options.pack:
            return
        again = time.monotonic() - self.checked_s >= CHECK_AGAIN_S
        if again:
            self.checked_s = time.monotonic()
        for state in self._unsettled():
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
        """Start a run, unless it is already done or somebody else measures it."""
        job = state.job
        lock = Lock(job.folder.lock("claim"))
        if not lock.take():
            state.state = ELSEWHERE
            return False
        try:
            if self._needs_no_start(state):
                lock.release()
                return False
            self._check_isolation()
            self.place.prepare(job)
            launcher = (
                self.idle.pop() if self.idle else self.place.start(self.log_folder / LAUNCHER_LOG)
            )
            log = _new_log(self.log_folder, job, self.hosts)
        except BaseException:
            lock.release()
            raise
        if state.resumes:
            state.batch = self.batch_to_try(state) or state.batch
        self.logs[log] = job
        state.state, state.reason, state.began_s = RUNNING, None, time.monotonic()
        fresh = self.options.rerun == "all" and not state.resumes
        state.before_s = 0.0 if fresh else attempts.total_wall_s(attempts.believed(job.folder))
        self.running.append(Running(state, launcher, lock, devices, log, Began.now(job.folder)))
        launcher.begin(self._request(state, devices, log))
        # The libraries are loaded once for all runs; that time is no part of this run's.
        loading = "" if launcher.ready else "; the libraries are loaded first"
        self.screen.note(f"{self.name_of(state)}: started{loading}")
        return True

    def _needs_no_start(self, state: State) -> bool:
        folder = state.job.folder
        if outcome.is_measured(folder):  # by a person, without a sweep
            state.state = ELSEWHERE
            return True
        # Do not repeat what another runner has measured meanwhile.
        fresh = folder.read_summary() != self.earlier.get(folder.path)
        known = self.is_settled(state, None if fresh else self.options.rerun)
        state.known = known and not fresh
        return known

    def _request(self, state: State, devices: Devices, log: Path) -> LaunchRequest:
        job, resumes = state.job, {attempts.RESUMES: "1"} if state.resumes else {}
        launch = launched(self.folder.name, self.options, self.others, self.place.facts(job))
        on_cores = self.options.pack and not self.machine.of(job).gpus
        return LaunchRequest(
            job,
            argv=(*job.argv, *(("--rerun",) if self.options.rerun == "all" else ())),
            environment={
                "HARNESS_LAUNCH": json.dumps(launch),
                **self.place.variables(job),
                **resumes,
            },
            cores=tuple(int(core.removeprefix(places.CORE)) for node in devices for core in node)
            if on_cores
            else None,
            log=log,
            devices=self.place.visible(devices),
            elastic=self.options.elastic,
        )

    def _check_isolation(self) -> None:
        """Warn or refuse if others use this machine; only while no run of ours is active."""
        now_s = time.monotonic()
        early = now_s - self.isolation_s < ISOLATION_S
        if self.options.isolation == "off" or not self.place.here or self.running or early:
            return
        self.isolation_s = now_s
        self.others = places.others(self.machine)
        busy = places.disturbed_by(self.others)
        if busy and self.options.isolation == "error":
            raise UserError(f"{busy}: wait, or measure anyway with --isolation warn")
        if warning := places.warning_of(self.others):
            self.screen.warn(warning)

    def _collect(self) -> None:
        for running in list(self.running):
            run_exit = running.launcher.poll()
            if not running.launcher.ready:
                # The libraries are loaded once for all runs; that time is no part of this run's.
                running.state.began_s = time.monotonic()
            if run_exit is not None:
                self._settle(running, run_exit)
            elif running.stopped is None and (why := self._too_long(running)) is not None:
                self._stop(running, why)
            elif running.stopped is not None and time.monotonic() - running.stopped_s > GRACE_S:
                running.launcher.kill()

    def _too_long(self, running: Running) -> tuple[str, str] | None:
        """Outcome and reason of a run that exceeds its time limit; None for others."""
        limit_s, began_s = self.options.timeout_s, running.state.began_s
        assert began_s is not None
        if limit_s is None or time.monotonic() - began_s <= limit_s:
            return None
        return "timeout", f"longer than --timeout {as_typed(limit_s)}"

    def _stop(self, running: Running, why: tuple[str, str]) -> None:
        running.stopped, running.stopped_s = why, time.monotonic()
        running.launcher.stop()

    def _settle(self, running: Running, run_exit: Exit) -> None:
        state, job = running.state, running.state.job
        if (lost := self.place.collect(job)) is not None:
            # The record stays on its host; the next start fetches it.
            run_exit = replace(run_exit, error=f"no record came back: {lost}", launcher_died=True)
        assert state.began_s is not None
        took_s = time.monotonic() - state.began_s
        if run_exit.wall_s is None:  # by a clock that cannot be set
            run_exit = replace(run_exit, wall_s=took_s)
        state.state = outcome.settle(job, run_exit, running.began, running.log, running.stopped)
        state.command = self.command
        self.running.remove(running)
        running.lock.release()
        self.idle.append(running.launcher)
        if state.state == "oom" and (batch := self.batch_to_try(state)) is not None:
            self.screen.print(f"{self.name_of(state)}: oom; resumes with --per_gpu_batch {batch}")
            redact_logs(running.log, job.settings, self.hosts)
            state.state, state.resumes = WAITING, True
            return
        self.report(state, took_s, running.log)
        if state.state == ELSEWHERE:
            state.took_s = None
        elif attempts.starts_of(attempts.believed(job.folder)):
            self.any_begun = True
        elif state.state == "failed":
            self.refused.append(state)
            self._skip_like(state)

    def _skip_like(self, last: State) -> None:
        """Skip runs that the mistake of the last one would refuse, too, such as a wrong column, as
        runs that were refused in its words show. No run of the sweep may have begun its training,
        now or earlier.
        """
        alike = [state.job.label for state in self.refused if state.reason == last.reason]
        finished = any(state.job.folder.outcome() == FINISHED for state in self.states)
        waiting = [state for state in self.states if state.state == WAITING]
        same = [state for state in waiting if _is_covered(state.job.label, alike)]
        if self.any_begun or self.running or finished or not same:
            return
        for state in same:
            state.state, state.reason = SKIPPED, f"as {self.name_of(last)}: {last.reason}"
        self.screen.print(f"{runs(len(same))} skipped: each would fail in the same way")


def _is_covered(label: Mapping[str, Any], refused: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a run is refused as others were: it differs from one of them in names without effect
    alone. A name has none if two refused runs differ in nothing else. Each value, but a seed's or a
    repeat's, must have been refused: a third dataset may have the column that two others lack.
    """
    names = sorted({name for each in (label, *refused) for name in each})
    own, *rows = (tuple(str(each.get(name)) for name in names) for each in (label, *refused))
    tried = {*rows}
    of_effect = {
        at
        for at in range(len(names))
        if len({row[:at] + row[at + 1 :] for row in tried}) == len(tried)
    }
    return any(all(own[at] == row[at] for at in of_effect) for row in tried) and all(
        name in REPETITIONS or any(value == row[at] for row in tried)
        for at, (name, value) in enumerate(zip(names, own, strict=True))
    )


def _new_log(folder: Path, job: Job, hosts: Sequence[Sequence[str]]) -> Path:
    """A new file for the output of one start of a run."""
    stem = job.path.replace("/", "_")
    number = 1
    while (log := folder / f"{stem}_{number}.txt").exists():
        redact_logs(log, job.settings, hosts)  # its runner may have been killed
        number += 1
    return log

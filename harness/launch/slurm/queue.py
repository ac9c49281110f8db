"""Gives the runs of a sweep to a cluster, waits for them or leaves, and picks up what has ended.

Jobs outlive whoever submitted them: what is known of them is in files alone (submitted.py), so
that a runner that was stopped, killed or detached is followed by another that loses nothing.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.core.locks import Lock
from harness.core.records import FINISHED, read_json
from harness.core.settings import UserError
from harness.launch import outcome
from harness.launch.places import Place
from harness.launch.plan import (
    ELSEWHERE,
    RUNNING,
    SKIPPED,
    WAITING,
    Job,
    Options,
    State,
    in_short,
    settled,
)
from harness.launch.runner import Watcher
from harness.launch.slurm import cluster, scripts
from harness.launch.slurm.cluster import ENDED, Entry, Note, Queued, Submitted, code_of, ending_of

ASK_EVERY_S = 5.0  # the cluster; it has others to answer
# After the end of a job: until other machines see on shared storage what it wrote last.
NOTE_S, RECORD_S = 10.0, 30.0
# Why a job waits that only has to wait; any other reason is worth a line.
PATIENCE = ("None", "Priority", "Resources", "BeginTime", "JobArrayTaskLimit", "Cleaning")
SECOND_S = 3.0  # in which a second Ctrl-C still cancels
AGAIN = "the same command shows and settles them"


@dataclass
class Watched:
    """A run that was submitted, until it is settled."""

    state: State
    entry: Entry
    ended_s: float | None = None  # when its end was seen first
    said: str = ""  # why it waits

    @property
    def number(self) -> str:
        return f"job {self.entry.id or self.entry.name}"


@dataclass
class Queue:
    states: list[State]
    options: Options
    folder: Path  # of the sweep
    screen: Watcher
    watched: list[Watched] = field(default_factory=list)
    stops: int = 0  # how often a person asked to stop; a signal handler counts here
    obeyed: int = 0
    obeyed_s: float = 0.0
    asked_s: float = -ASK_EVERY_S
    trouble: str = ""  # what the cluster said last instead of an answer
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.submitted = Submitted(self.folder)

    def work(self) -> None:
        """Until every run has an outcome, or somebody stops it; jobs that wait or run stay."""
        cluster.check_here()
        with self._alone() as lock:
            self._pick_up()
            self._submit(lock)
        while self._waits() and not self._left():
            if time.monotonic() - self.asked_s >= ASK_EVERY_S:
                self._look()
            self.screen.show()
            time.sleep(0.1)
        if self.options.slurm.detach and self.watched:
            self.screen.say(f"runs that wait or run on the cluster: {len(self.watched)}; {AGAIN}")

    def _waits(self) -> bool:
        """Detached, it waits for nothing but records of jobs that have ended."""
        if self.options.slurm.detach:
            return any(watched.ended_s is not None for watched in self.watched)
        return bool(self.watched)

    @contextmanager
    def _alone(self) -> Iterator[int]:
        """Two runners that submit at once would both submit everything."""
        lock = Lock(self.folder / ".submitting")
        if not lock.take(cluster.PATIENCE_S):
            raise UserError(f"{self.folder}: {lock.holder()} submits these runs: try again later")
        assert lock.file is not None
        try:
            yield lock.file
        finally:
            lock.release()

    def _left(self) -> bool:
        """Asked to stop once: the jobs stay, unless it is asked again soon: they are cancelled."""
        if self.obeyed != self.stops:
            self.obeyed, self.obeyed_s = self.stops, time.monotonic()
            if self.stops > 1:
                self._cancel()
            else:
                self.screen.say(f"the jobs stay; {AGAIN}; Ctrl-C now cancels them")
        return self.obeyed == 1 and time.monotonic() - self.obeyed_s > SECOND_S

    def _cancel(self) -> None:
        self.cancelled = True
        ids = [w.entry.id for w in self.watched if w.entry.id is not None]
        self.screen.say(f"cancelling {len(ids)} jobs")
        try:
            cluster.cancel(ids)
        except cluster.Unreachable as error:
            self._complain(error)

    # ---- what is given to the cluster ----

    def _pick_up(self) -> None:
        """What an earlier runner has submitted."""
        open_entries = self.submitted.open()
        for state in self.states:
            entry = open_entries.get(state.job.path)
            if state.state == SKIPPED or entry is None:
                continue
            found = entry if entry.job is not None else self._recovered(entry)
            if found is not None:
                self.watched.append(Watched(state, found))
                self.screen.note(f"{self._number(state)} {state.job}: is job {found.id}")
        if self.watched:
            self._go_on()

    def _go_on(self) -> None:
        """What was interrupted before this call goes on with it, as it would elsewhere."""
        before = [watched.state for watched in self.watched]
        self._look()
        # A job that has ended by now is what --rerun all asked for.
        rerun = None if self.options.rerun == "all" else self.options.rerun
        for state in before:
            if state.failed and settled(state.state, rerun) is None:
                state.state, state.took_s = WAITING, None

    def _recovered(self, entry: Entry) -> Entry | None:
        """An entry whose runner was killed while it submitted; None if it did not come to that."""
        try:
            jobs = cluster.queued([entry.name])
        except cluster.Unreachable as error:
            raise UserError(f"whether {entry.name} was submitted is unknown: {error}") from None
        note = self.submitted.note(entry)
        job = jobs[0].id.partition("_")[0] if jobs else note.job if note else None
        if job is None:
            self.submitted.withdraw(entry.name)
            return None
        self.submitted.tell(entry.name, job)
        return self.submitted.open()[entry.path]

    def _submit(self, lock: int) -> None:
        taken = {watched.entry.path for watched in self.watched}
        new = [s for s in self.states if s.state == WAITING and s.job.path not in taken]
        wanted = {s.job.path: s for s in new if self._wanted(s)}
        for jobs in scripts.alike([state.job for state in wanted.values()]):
            if self.stops:
                return
            name = scripts.job_name(self.folder.name, secrets.token_hex(3))
            path = self.submitted.script(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            (self.folder / "logs").mkdir(exist_ok=True)
            path.write_text(scripts.text_of(jobs, self.options, self.folder, name), "utf-8")
            self.submitted.intend(name, [job.path for job in jobs])
            self.submitted.tell(name, cluster.submit(path, lock))
            entries = self.submitted.open()
            for job in jobs:
                state, entry = wanted[job.path], entries[job.path]
                self.watched.append(Watched(state, entry))
                self.screen.note(f"{self._number(state)} {job}: submitted as job {entry.id}")

    def _wanted(self, state: State) -> bool:
        """Whether a run is to be measured, and nobody is at it."""
        told = read_json(state.job.folder.summary) or {}
        known = settled(told.get("outcome"), self.options.rerun)
        if known is not None:
            state.state, state.reason, state.known = known, told.get("reason"), True
        elif outcome.is_measured(state.job.folder):  # by a person, without a sweep
            state.state = ELSEWHERE
            self.screen.say(f"{self._number(state)} {state.job}: is measured by somebody else")
        return state.state == WAITING

    # ---- jobs that wait, run and end ----

    def _look(self) -> None:
        self.asked_s = time.monotonic()
        try:
            jobs = cluster.queued({watched.entry.name for watched in self.watched})
        except cluster.Unreachable as error:
            return self._complain(error)
        found = {(job.name, job.index): job for job in jobs}
        for watched in list(self.watched):
            self._follow(watched, found.get((watched.entry.name, watched.entry.index)))

    def _complain(self, error: cluster.Unreachable) -> None:
        if str(error) != self.trouble:
            self.trouble = str(error)
            self.screen.say(
                f"warning: the cluster does not answer, it will be asked again: {error}"
            )

    def _follow(self, watched: Watched, job: Queued | None) -> None:
        state, note = watched.state, self.submitted.note(watched.entry)
        if job is None or job.state in ENDED or (note is not None and note.tells):
            return self._end(watched, job, note)
        watched.ended_s = None
        if job.state == "PENDING":
            if state.state == RUNNING:
                self.screen.say(f"{self._number(state)} {state.job}: is back in the queue")
            state.state, state.reason = WAITING, job.reason
            if job.reason not in (*PATIENCE, watched.said):
                self.screen.say(f"{self._number(state)} {state.job}: waits: {job.reason}")
            watched.said = job.reason
        elif state.state != RUNNING:
            state.state, state.reason = RUNNING, None
            gone_s = max(0.0, time.time() - note.began) if note is not None else 0.0
            state.began_s = time.monotonic() - gone_s
            self.screen.note(f"{self._number(state)} {state.job}: runs as {watched.number}")

    def _end(self, watched: Watched, job: Queued | None, note: Note | None) -> None:
        """Settle a run whose job has ended, once all that it wrote can be seen."""
        word = job.state if job is not None and job.state in ENDED else None
        told = note is not None and note.tells
        if word is None and not told:
            word = cluster.accounted(str(watched.entry.id))
        now_s = time.monotonic()
        watched.ended_s = now_s if watched.ended_s is None else watched.ended_s
        waits_s = 0.0
        if code_of(word, note) == 0 and watched.state.job.folder.outcome() != FINISHED:
            waits_s = RECORD_S
        elif not told and word in ("COMPLETED", "FAILED"):
            waits_s = NOTE_S
        if now_s - watched.ended_s >= waits_s:
            self._settle(watched, word, note)

    def _settle(self, watched: Watched, word: str | None, note: Note | None) -> None:
        state, job, entry = watched.state, watched.state.job, watched.entry
        self.watched.remove(watched)
        if self.cancelled and note is None:
            state.state = WAITING  # it had not begun
            return self.submitted.settle(entry, "cancelled")
        log = self.submitted.log(entry)
        found = ending_of(watched.number, word, note, log, job.folder.path)
        asked = "interrupted" if self.cancelled and found.code else None
        with _claimed(job):
            if self.submitted.settled(entry):
                state.state = job.folder.outcome() or WAITING
            else:
                state.state = outcome.settle(job, found, entry.unix, log, asked, oom_kills=0)
                self.submitted.settle(entry, state.state)
        state.took_s = found.wall_s
        summary = read_json(job.folder.summary) or {}
        state.reason = summary.get("reason")
        self._tell_end(state, summary, log)

    def _tell_end(self, state: State, summary: dict[str, Any], log: Path) -> None:
        line = f"{self._number(state)} {state.job}: {state.state} after {state.took_s:.0f} s, "
        if not state.failed:
            return self.screen.note(line + in_short(summary))
        self.screen.say(f"{line}{state.reason}; its output is in {log}")
        if self.options.fail_fast and not self.cancelled and self.watched:
            self.screen.say("stopped at the first failure (--fail_fast)")
            self._cancel()

    def _number(self, state: State) -> str:
        return f"[{self.states.index(state) + 1}/{len(self.states)}]"


@contextmanager
def _claimed(job: Job) -> Iterator[None]:
    """Against another runner that settles the same run at this moment."""
    lock = Lock(job.folder.lock("claim"))
    lock.take(wait_s=10)
    try:
        yield
    finally:
        lock.release()


# ----
# A SLURM cluster as a place where runs can run: each is a job, and waits its turn.


class Cluster(Place):
    name = "slurm"
    in_turn = False

    def why_not(self, job: Job) -> str | None:
        return scripts.why_not(job, self.options.slurm)

    def dry_run(self, states: list[State], folder: Path) -> list[str]:
        return scripts.dry_run(states, self.options, folder)

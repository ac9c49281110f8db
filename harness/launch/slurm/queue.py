"""A SLURM cluster as a place for runs: submits them as jobs, waits or leaves, and settles them.

Jobs outlive the process that submitted them. All that is known of them is in files (cluster.py), so
a runner that was stopped, killed or detached can be followed by another, and nothing is lost.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from harness.core.records import FINISHED, RUNNING, SKIPPED, WAITING
from harness.core.records.locks import Lock
from harness.core.records.submitted import Entry
from harness.core.settings import UserError
from harness.launch import outcome
from harness.launch.outcome import ELSEWHERE, State, settled
from harness.launch.places import Place
from harness.launch.plan import Job
from harness.launch.runner import Worker
from harness.launch.slurm import cluster, scripts
from harness.launch.slurm.cluster import ENDED, Note, Queued, Submitted, code_of, exit_of

ASK_EVERY_S = 5.0  # the cluster also serves others
# How long after the end of a job its last writes may still become visible on shared storage.
NOTE_S, RECORD_S = 10.0, 30.0
# How long squeue does not list a job until it counts as lost, where nothing tells of its end.
LOST_S = 60.0
# Reasons for which a job merely has to wait; any other reason is shown.
PATIENCE = ("None", "Priority", "Resources", "BeginTime", "JobArrayTaskLimit", "Cleaning")
# Reasons that persist unless the job requests something else.
ENDLESS = (
    "PartitionTimeLimit", "PartitionNodeLimit", "PartitionConfig", "BadConstraints",
    "InvalidAccount", "InvalidQOS",
)  # fmt: skip
SECOND_S = 3.0  # in which a second Ctrl-C cancels the jobs
AGAIN = "the same command shows and settles them"


@dataclass
class Watched:
    """A run that was submitted, until it is settled."""

    state: State
    entry: Entry
    ended_s: float | None = None  # when its end was first seen
    reason: str = ""  # why the job waits

    @property
    def number(self) -> str:
        return f"job {self.entry.id or self.entry.name}"


@dataclass
class Queue(Worker):
    watched: list[Watched] = field(default_factory=list)
    stops_obeyed: int = 0
    obeyed_s: float = 0.0
    asked_s: float = -ASK_EVERY_S
    trouble: str = ""  # the last error of the cluster
    cancelled: bool = False
    over: bool = False  # whether --fail_fast has ended the sweep
    resuming: bool = False  # whether it settles what was interrupted before it came
    cancel_sent: bool = False  # whether the cluster has taken it

    def __post_init__(self) -> None:
        self.submitted = Submitted(self.folder)

    def work(self) -> None:
        """Work until every run has an outcome, or a person stops it; jobs that wait or run stay."""
        cluster.check_here()
        with self._alone() as lock:
            self._pick_up()
            self._submit(lock)
        while self._waits() and not self._is_left():
            if time.monotonic() - self.asked_s >= ASK_EVERY_S:
                self._look()
            self.screen.show()
            time.sleep(0.1)
        if self.options.slurm.detach and self.watched:
            self.screen.print(f"runs that wait or run on the cluster: {len(self.watched)}; {AGAIN}")

    def stop_at_failure(self) -> None:
        if not (self.over or self.resuming or self.stops):
            self.over = True
            self.screen.print("stopped at the first failure (--fail_fast)")

    def _waits(self) -> bool:
        """Whether there are jobs to wait for; if detached, only ended ones without a record yet."""
        if self.options.slurm.detach:
            to_cancel = self.cancelled and not self.cancel_sent and bool(self.watched)
            return to_cancel or self._awaits_an_end()
        return bool(self.watched)

    @contextmanager
    def _alone(self) -> Iterator[Lock]:
        """Exclude other runners: two that submit at once would both submit every run."""
        lock = Lock(self.folder / ".submitting")
        if not lock.take(cluster.PATIENCE_S):
            raise UserError(f"{self.folder}: {lock.holder()} submits these runs: try again later")
        try:
            yield lock
        finally:
            lock.release()

    def _is_left(self) -> bool:
        """Whether to leave. The first stop leaves the jobs as they are, a second one soon after it
        cancels them, and a third one does not wait for their end.
        """
        if self.stops_obeyed != self.stops:
            self.stops_obeyed, self.obeyed_s = self.stops, time.monotonic()
            if self.stops > 1 and not self.cancel_sent:
                self._cancel()
            if self.cancelled and not self.cancel_sent:
                self.screen.print(f"the cluster has not cancelled them: the jobs stay; {AGAIN}")
            elif self.stops == 1 and self.cancelled:
                self.screen.print(f"the jobs were told to end; {AGAIN}")
            elif self.stops == 1:
                self.screen.print(f"the jobs stay; {AGAIN}; Ctrl-C now cancels them")
        waited = time.monotonic() - self.obeyed_s > SECOND_S
        return self.stops_obeyed > 2 or (self.stops_obeyed == 1 and waited)

    def _cancel(self) -> None:
        ids = [w.entry.id for w in self.watched if w.entry.id is not None]
        if not self.cancelled:
            self.screen.print(f"cancelling {len(ids)} jobs")
        self.cancelled, self.cancel_sent = True, False
        try:
            cluster.cancel(ids)
        except cluster.Unreachable as error:
            self._complain(error)
        else:
            self.cancel_sent = True

    def _pick_up(self) -> None:
        """Watch the jobs that an earlier runner submitted."""
        open_entries = self.submitted.open()
        for state in self.states:
            entry = open_entries.get(state.job.path)
            if state.state != SKIPPED and entry is not None and entry.job is None:
                entry = self._recovered(entry)
            if state.state != SKIPPED and entry is not None:
                self.watched.append(Watched(state, entry))
                self.screen.note(f"{self.name_of(state)}: is job {entry.id}")
        submitted = {watched.entry.name: watched for watched in self.watched}
        if self.watched:
            self._resume_interrupted()
        for watched in submitted.values():
            self._warn_of_other_flags(watched)

    def _warn_of_other_flags(self, watched: Watched) -> None:
        """Warn if a job was submitted with flags other than this call's: the job keeps its own."""
        entry, jobs = watched.entry, [watched.state.job]
        try:
            text = self.submitted.script(entry.name).read_text("utf-8")
        except OSError:
            return
        asked = scripts.text_of(jobs, self.options, self.folder, entry.name)
        then, now = scripts.flags_in(text), scripts.flags_in(asked)
        if then != now:
            only_then = " ".join(flag for flag in then if flag not in now) or "none"
            only_now = " ".join(flag for flag in now if flag not in then) or "none"
            line = f"job {entry.job} was submitted with other flags ({only_then}) than "
            line += f"this call's ({only_now}) and "
            is_watched = any(each.entry.name == entry.name for each in self.watched)
            self.screen.warn(
                line + f"keeps them: to submit it anew, scancel {entry.job}, then repeat this "
                "command"
                if is_watched
                else line + "has ended with them"
            )

    def _resume_interrupted(self) -> None:
        """Make runs that were interrupted before this call due again, as other launchers do."""
        before = [watched.state for watched in self.watched]
        self.resuming = True
        self._look()
        until_s = time.monotonic() + LOST_S + ASK_EVERY_S + 1
        while not self.stops and time.monotonic() < until_s and self._awaits_an_end():
            if time.monotonic() - self.asked_s >= ASK_EVERY_S:
                self._look()
            self.screen.show()
            time.sleep(0.1)
        self.resuming = False
        # --rerun all is satisfied by a job of this sweep that has ended by now.
        rerun = None if self.options.rerun == "all" else self.options.rerun
        for state in before:
            if state.failed and settled(state.state, rerun) is None:
                state.state, state.took_s = WAITING, None
        if self.options.fail_fast and any(state.failed for state in before):
            self.stop_at_failure()
            if self.watched:
                self._cancel()

    def _awaits_an_end(self) -> bool:
        """Whether a job seems to have ended, and what it wrote may not be there yet."""
        return any(watched.ended_s is not None for watched in self.watched)

    def _recovered(self, entry: Entry) -> Entry | None:
        """An entry whose runner was killed while submitting; None if its job was not submitted."""
        try:
            jobs = cluster.queued([entry.name])
        except cluster.Unreachable as error:
            raise UserError(f"whether {entry.name} was submitted is unknown: {error}") from None
        note = self.submitted.note(entry)
        job = jobs[0].id.partition("_")[0] if jobs else note.job if note else None
        if job is None:
            self.submitted.withdraw(entry.name)
            return None
        self.submitted.confirm(entry.name, job)
        return self.submitted.open()[entry.path]

    def _submit(self, lock: Lock) -> None:
        watched = {watched.entry.path for watched in self.watched}
        new = [s for s in self.states if s.state == WAITING and s.job.path not in watched]
        due = {s.job.path: s for s in new if self._is_due(s)}
        for jobs in scripts.alike([state.job for state in due.values()]):
            if self.stops or self.over:
                return
            name = scripts.job_name(self.folder.name, secrets.token_hex(3))
            script = self.submitted.script(name)
            script.parent.mkdir(parents=True, exist_ok=True)
            self.log_folder.mkdir(exist_ok=True)
            script.write_text(scripts.text_of(jobs, self.options, self.folder, name), "utf-8")
            self.submitted.intend(name, [job.path for job in jobs], self.command)
            assert lock.file is not None
            job = cluster.submit(script, lock.file, lambda: self.stops > 1)
            if job is None:  # sbatch holds the lock; the next call finds the job by its name
                lock.leave()
                self.screen.print(f"sbatch has not answered: {AGAIN}")
                return
            self.submitted.confirm(name, job)
            entries = self.submitted.open()
            for path in (job.path for job in jobs):
                state, entry = due[path], entries[path]
                self.watched.append(Watched(state, entry))
                self.screen.note(f"{self.name_of(state)}: submitted as job {entry.id}")

    def _is_due(self, state: State) -> bool:
        """Whether a run is to be measured, and nobody else measures it now."""
        if self.is_settled(state, self.options.rerun):
            return False
        if outcome.is_measured(state.job.folder):  # by a person, without a sweep
            state.state = ELSEWHERE
            self.screen.print(f"{self.name_of(state)}: somebody else measures it now")
        return state.state == WAITING

    def _look(self) -> None:
        """Ask the cluster for the state of every watched job."""
        self.asked_s = time.monotonic()
        if self.cancelled and not self.cancel_sent:
            self._cancel()
        try:
            jobs = cluster.queued({watched.entry.name for watched in self.watched})
        except cluster.Unreachable as error:
            return self._complain(error)
        by_entry = {(job.name, job.index): job for job in jobs}
        for watched in list(self.watched):
            self._follow(watched, by_entry.get((watched.entry.name, watched.entry.index)))
        # Not before all that has ended is settled: its end has nothing to do with this.
        if self.over and self.watched and not self.cancelled:
            self._cancel()

    def _complain(self, error: cluster.Unreachable) -> None:
        if str(error) != self.trouble:
            self.trouble = str(error)
            self.screen.warn(f"the cluster does not answer and will be asked again: {error}")

    def _follow(self, watched: Watched, job: Queued | None) -> None:
        state, note = watched.state, self.submitted.note(watched.entry)
        if job is None or job.state in ENDED or (note is not None and note.is_final):
            return self._end(watched, job, note)
        watched.ended_s = None
        if job.state == "PENDING":
            if state.state == RUNNING:
                self.screen.print(f"{self.name_of(state)}: is back in the queue")
            state.state, state.reason = WAITING, job.reason
            if job.reason not in (*PATIENCE, watched.reason):
                line = f"{self.name_of(state)}: waits: {job.reason}"
                if job.reason in ENDLESS:
                    line += (
                        f", which does not end by itself: scancel {job.id} (or Ctrl-C twice), "
                        "then repeat with other flags"
                    )
                self.screen.print(line)
            watched.reason = job.reason
        elif state.state != RUNNING:
            state.state, state.reason = RUNNING, None
            elapsed_s = max(0.0, time.time() - note.began) if note is not None else 0.0
            state.began_s = time.monotonic() - elapsed_s
            self.screen.note(f"{self.name_of(state)}: runs as {watched.number}")

    def _end(self, watched: Watched, job: Queued | None, note: Note | None) -> None:
        """Settle a run whose job has ended, once everything that it wrote is visible."""
        job_state = job.state if job is not None and job.state in ENDED else None
        final = note is not None and note.is_final
        if job_state is None and not final:
            answer = cluster.accounted(str(watched.entry.id))
            job_state = answer if answer in ENDED else None  # it may live: squeue can miss a job
        now_s = time.monotonic()
        watched.ended_s = now_s if watched.ended_s is None else watched.ended_s
        waits_s = 0.0
        if code_of(job_state, note) == 0 and watched.state.job.folder.outcome() != FINISHED:
            waits_s = RECORD_S
        elif not final and job_state in ("COMPLETED", "FAILED"):
            waits_s = NOTE_S
        elif not final and job_state is None and not self.cancelled:
            waits_s = LOST_S
        if now_s - watched.ended_s >= waits_s:
            self._settle(watched, job_state, note)

    def _settle(self, watched: Watched, job_state: str | None, note: Note | None) -> None:
        state, job, entry = watched.state, watched.state.job, watched.entry
        self.watched.remove(watched)
        if self.cancelled and note is None:
            state.state = WAITING  # the job had not begun
            return self.submitted.settle(entry, "cancelled")
        log = self.submitted.log(entry)
        run_exit = exit_of(watched.number, job_state, note, log, job.folder.path)
        stopped = outcome.STOPPED if self.cancelled and run_exit.code else None
        claim = Lock(job.folder.lock("claim"))  # another runner may settle the run at this moment
        claim.take(wait_s=10)
        try:
            if self.submitted.settled(entry):
                state.state = job.folder.outcome() or WAITING
            else:
                began = outcome.Began(entry.unix)
                state.state = outcome.settle(job, run_exit, began, log, stopped)
                state.command = entry.command
                self.submitted.settle(entry, state.state)
        finally:
            claim.release()
        self.report(state, run_exit.wall_s or 0.0, log)


class Cluster(Place):
    name = "slurm"
    in_turn = False  # the cluster decides

    def why_not(self, job: Job) -> str | None:
        return scripts.why_not(job, self.options.slurm)

    def dry_run(self, states: list[State], folder: Path) -> list[str]:
        return scripts.dry_run(states, self.options, folder)

"""Jobs in the queue of a cluster that a stand-in plays: submitted, watched, lost, cancelled."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.core.records import WAITING, RunFolder, read_json, write_json
from harness.core.records.locks import Lock
from harness.core.settings import UserError
from harness.launch import sweep as sweep_module
from harness.launch.outcome import ELSEWHERE
from harness.launch.screen import standing
from harness.launch.slurm import queue
from harness.launch.slurm.cluster import Submitted
from harness.launch.slurm.queue import Queue, Watched
from tests.support.slurm_cluster import TORCHRUN
from tests.support.slurm_commands import StandIn
from tests.support.slurm_queue import planned, queue_of, says_of, seen, stand_in, worked
from tests.support.sweeps import Watcher, start, sweep_file, wait_for
from tests.support.sweeps import harness_sweep as main

S = ["--launcher", "slurm"]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return stand_in(tmp_path, monkeypatch)


@pytest.mark.process
def test_a_job_is_submitted_once_however_often_it_is_asked_for(
    tmp_path: Path, cluster: StandIn
) -> None:
    first = worked(tmp_path)
    assert "submitted as job 12" in seen(first)
    cluster.says("squeue", says_of(first, "PENDING", "ReqNodeNotAvail"))
    again = worked(tmp_path, rerun="all")
    screen = seen(again)
    assert cluster.asked("sbatch") == 1 and "is job 12" in screen
    assert "waits: ReqNodeNotAvail" in screen and "run on the cluster: 1" in screen
    (state,) = again.states
    assert state.state == WAITING and standing(state) == "waiting (ReqNodeNotAvail)"


@pytest.mark.process
def test_a_job_that_waits_with_other_flags_than_the_call_has(
    tmp_path: Path, cluster: StandIn
) -> None:
    setup = tmp_path / "setup.sh"
    text = "script: vit\nseeds: [1, 2]"

    def lines(seeds: str = text, timeout_s: float = 60.0, **flags: Any) -> list[str]:
        waiting = queue_of(tmp_path, seeds, timeout_s=timeout_s)
        slurm = replace(waiting.options.slurm, **flags)
        waiting.options = replace(waiting.options, slurm=slurm)
        waiting.work()
        both = [f"12_{i}|PENDING|{why}|{waiting.watched[0].entry.name}\n" for i in range(2)]
        cluster.says("squeue", "".join(both))
        return [line for line in seen(waiting).lines if "waits" in line or "warning" in line]

    why = "Priority"
    assert lines(partition="old", requeue=2) == []
    # The same flags, also for one of both runs.
    assert lines(partition="old", requeue=2, detach=True) == []
    why = "PartitionTimeLimit"
    assert lines(f"{text[:-4]}]", partition="old", requeue=2) == []
    sent, anew = "warning: job 12 was submitted with other flags", "to submit it anew, scancel 12,"
    told = lines(timeout_s=7200.0, partition="new", setup_script=str(setup), sbatch=("--mem=1G",))
    assert told[-1] == (
        f"{sent} (--partition=old --timeout 1m --requeue 2) than this call's (--partition=new "
        f"--timeout 2h --mem=1G --setup_script {setup} --requeue 0) and keeps them: {anew} then "
        "repeat this command"
    )
    assert told[0].endswith(
        "waits: PartitionTimeLimit, which does not end by itself: scancel 12_0 (or Ctrl-C twice), "
        "then repeat with other flags"
    )
    assert sum("warning" in line for line in told) == 1  # of one array
    assert cluster.asked("sbatch") == 1
    assert f"{sent} (--partition=old) than this call's (none)" in lines(requeue=2)[-1]
    for script in (tmp_path / "sweep" / "jobs").glob("*.sh"):
        script.unlink()
    assert not any("warning" in line for line in lines())


@pytest.mark.process
def test_other_flags_of_a_job_that_has_ended_are_told_as_well(
    tmp_path: Path, cluster: StandIn
) -> None:
    first = worked(tmp_path, timeout_s=60.0)
    ended(tmp_path, first, 1)
    then = seen(worked(tmp_path, timeout_s=7200.0))
    assert (
        "warning: job 12 was submitted with other flags (--timeout 1m) than this call's "
        "(--timeout 2h) and has ended with them"
    ) in then
    assert "scancel" not in then


@pytest.mark.process
def test_the_command_of_a_plan_is_that_whose_jobs_measured(
    tmp_path: Path, cluster: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call's job is cancelled, the second's measures, and a third one finds that."""
    monkeypatch.setattr(sweep_module, "_table", lambda *_, **__: None)
    file, out = sweep_file(tmp_path, "script: vit"), tmp_path / "out"
    folder = out / "sweeps" / "mine-tiny"

    def called(*flags: str) -> str:
        argv = [str(file), "--tiny", "--output_dir", str(out), *S, "--gres", "none", "--detach"]
        assert main([*argv, *flags]) == 0
        return str((read_json(folder / "sweep.json") or {})["command"]).partition("detach ")[2]

    assert called("--partition", "wrong") == "--partition wrong"
    cluster.says("sacct", "CANCELLED by 1000\n")
    cluster.says("sbatch", "13\n")
    called("--partition", "right")
    (entry,) = Submitted(folder).open().values()
    assert entry.job == "13" and str(entry.command).endswith("--partition right")
    now = int(time.time())
    note = {"job": "13", "began": now, "ended": now + 7, "code": 0, "signal": ""}
    write_json(folder / "jobs" / f"{entry.name}_0.json", note)
    record = RunFolder(out / entry.path)
    record.write_settings({})
    write_json(record.summary, {"outcome": "finished"})
    assert called("--account", "me") == "--partition right"


@pytest.mark.process
def test_a_runner_that_was_killed_while_it_submitted(tmp_path: Path, cluster: StandIn) -> None:
    job = planned(tmp_path, "script: vit")[0]
    submitted = Submitted(tmp_path / "sweep")
    # The job is there, under its name: its number is found.
    submitted.intend("mine.1", [job.path], "a sweep")
    cluster.says("squeue", "77|PENDING|Priority|mine.1\n")
    worked(tmp_path)
    assert cluster.asked("sbatch") == 0 and submitted.open()[job.path].id == "77"
    # It has come and gone, and has left its note.
    submitted.withdraw("mine.1")
    submitted.intend("mine.2", [job.path], "a sweep")
    cluster.says("squeue", "")
    write_json(tmp_path / "sweep/jobs/mine.2_0.json",
               {"job": "78", "began": 5, "ended": None, "code": None, "signal": ""})  # fmt: skip
    cluster.says("sacct", "FAILED\n")
    worked(tmp_path)
    assert cluster.asked("sbatch") == 0 and submitted.open() == {}
    assert (read_json(job.folder.summary) or {})["outcome"] == "failed"
    # It never was: now it is.
    submitted.intend("mine.3", [job.path], "a sweep")
    worked(tmp_path, rerun="failed")
    assert cluster.asked("sbatch") == 1 and submitted.open()[job.path].id == "12"
    # Nobody knows.
    submitted.intend("mine.4", [job.path], "a sweep")
    cluster.does("squeue", "echo no controller >&2; exit 1")
    with pytest.raises(UserError, match=r"whether mine\.4 was submitted is unknown: no controller"):
        worked(tmp_path)
    assert cluster.asked("sbatch") == 1


def ended(folder: Path, waiting: Queue, code: int, signal: str = "") -> None:
    """What the scripts of these jobs leave."""
    now = int(time.time())
    for watched in waiting.watched:
        entry = watched.entry
        write_json(
            folder / "sweep" / "jobs" / f"{entry.name}_{entry.index}.json",
            {"job": "12", "began": now, "ended": now + 7, "code": code, "signal": signal},
        )


@pytest.mark.process
def test_a_record_that_is_not_on_shared_storage(
    tmp_path: Path, cluster: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = worked(tmp_path)
    ended(tmp_path, first, 0)
    monkeypatch.setattr(queue, "RECORD_S", 0.2)
    then = worked(tmp_path)
    (state,) = then.states
    assert state.state == "failed" and state.took_s == 7
    assert str(state.reason).startswith("job 12 succeeded, but its record is not in ")
    assert "storage that all nodes share" in str(state.reason)


@pytest.mark.process
def test_a_script_that_refuses_says_why(tmp_path: Path, cluster: StandIn) -> None:
    first = worked(tmp_path)
    ended(tmp_path, first, 1)
    log = first.submitted.log(first.watched[0].entry)
    log.write_text("vit.py: error: --dataset x: no\n" + TORCHRUN.format(now="2020-01-01_00:00:00"))
    then = worked(tmp_path)
    assert (then.states[0].state, then.states[0].reason) == (
        "failed",
        "vit.py: error: --dataset x: no",
    )


@pytest.mark.process
def test_a_job_that_squeue_has_forgotten(tmp_path: Path, cluster: StandIn) -> None:
    worked(tmp_path)
    cluster.says("sacct", "CANCELLED by 1000\n")
    then = worked(tmp_path)
    # It goes on with this call, as what was interrupted always does.
    assert "interrupted after 0.0 s, the job was cancelled" in seen(then)
    assert cluster.asked("sbatch") == 2 and len(then.submitted.open()) == 1
    cluster.does("sacct", "echo accounting storage is disabled >&2; exit 1")
    last = worked(tmp_path)
    assert "job 12 ended without a trace" in seen(last)
    row = json.loads(last.states[0].job.folder.attempts.read_text().splitlines()[0])
    assert row["wall_s"] == 0.0 and row["attempt"] is None
    # Measured again once, not each time that it is looked after.
    again = queue_of(tmp_path, rerun="all")
    ended(tmp_path, again_watched(again), 0)
    write_json(again.states[0].job.folder.summary, {"outcome": "finished"})
    again.work()
    assert again.states[0].state == "finished" and cluster.asked("sbatch") == 3


def again_watched(waiting: Queue) -> Queue:
    """A queue that knows what was submitted, and has not looked after it."""
    other = Queue(waiting.states, waiting.options, waiting.folder, Watcher())
    entries = other.submitted.open()
    other.watched = [Watched(state, entries[state.job.path]) for state in other.states]
    return other


@pytest.mark.process
def test_a_job_that_failed_before_its_script_began(tmp_path: Path, cluster: StandIn) -> None:
    first = worked(tmp_path)
    cluster.says("squeue", says_of(first, "FAILED", "NonZeroExitCode"))
    then = worked(tmp_path)
    assert then.states[0].state == "failed"
    assert str(then.states[0].reason).startswith("job 12 failed before it began: is ")


@pytest.mark.process
def test_the_first_failure_cancels_the_rest(tmp_path: Path, cluster: StandIn) -> None:
    text = "script: vit\nseeds: [1, 2]"
    first = worked(tmp_path, text)
    one, two = first.watched
    cluster.says(
        "squeue", f"12_0|FAILED|None|{one.entry.name}\n12_1|PENDING|None|{two.entry.name}\n"
    )
    cluster.does(
        "scancel", f"echo '12_1|CANCELLED|None|{two.entry.name}' > {cluster.folder}/squeue.says"
    )
    then = worked(tmp_path, text, detach=False, fail_fast=True)
    # What had not begun is as if nobody had asked for it.
    assert [s.state for s in then.states] == ["failed", WAITING]
    assert not then.states[1].job.folder.path.exists() and then.submitted.open() == {}


@pytest.mark.process
def test_after_the_first_failure_nothing_more_is_submitted(
    tmp_path: Path, cluster: StandIn
) -> None:
    """Where the failed job was the last one watched, the other runs were submitted."""
    first = worked(tmp_path)
    cluster.says("squeue", says_of(first, "FAILED"))
    then = worked(tmp_path, "script: vit\nseeds: [42, 2]", fail_fast=True)
    assert [s.state for s in then.states] == ["failed", WAITING]
    assert cluster.asked("sbatch") == 1 and cluster.asked("scancel") == 0
    assert sum("stopped at the first failure" in line for line in seen(then).lines) == 1


@pytest.mark.process
def test_what_was_interrupted_before_is_no_first_failure(tmp_path: Path, cluster: StandIn) -> None:
    """A job that was preempted while nobody watched goes on."""
    worked(tmp_path)
    cluster.says("sacct", "PREEMPTED\n")
    then = worked(tmp_path, fail_fast=True)
    assert cluster.asked("sbatch") == 2 and len(then.submitted.open()) == 1
    assert "stopped at the first failure" not in seen(then)


@pytest.mark.process
def test_jobs_that_are_left_detached_are_cancelled_before(tmp_path: Path, cluster: StandIn) -> None:
    text = "script: vit\nseeds: [1, 2]"
    first = worked(tmp_path, text)
    one, two = first.watched
    cluster.says(
        "squeue", f"12_0|FAILED|None|{one.entry.name}\n12_1|RUNNING|None|{two.entry.name}\n"
    )
    answers = f"[ $(grep -c scancel {cluster.folder}/asked) -gt 2 ] || {{ echo no >&2; exit 1; }}"
    cluster.does("scancel", answers)
    worked(tmp_path, text, fail_fast=True)
    assert cluster.asked("scancel") == 3


@pytest.mark.process
def test_a_cluster_that_does_not_cancel_is_asked_again_and_can_be_left(
    tmp_path: Path, cluster: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = worked(tmp_path)
    cluster.says("squeue", says_of(first, "RUNNING"))
    cluster.does("scancel", "echo no controller >&2; exit 1")
    twice = queue_of(tmp_path, detach=False)
    twice.stops = 2
    look = twice._look

    def looked() -> None:
        look()
        if cluster.asked("scancel") > 2:
            twice.stops = 3

    monkeypatch.setattr(twice, "_look", looked)
    twice.work()  # which would not end otherwise
    # Once more for the third Ctrl-C.
    assert cluster.asked("scancel") == 4 and len(twice.submitted.open()) == 1
    assert sum("cancelling 1 jobs" in line for line in seen(twice).lines) == 1
    assert "the cluster has not cancelled them: the jobs stay" in seen(twice)
    cluster.does("scancel", "true")
    once_more = queue_of(tmp_path, detach=False)
    once_more.stops, looks = 2, iter((2, 2, 3))
    look = once_more._look

    def followed() -> None:
        look()
        once_more.stops = next(looks)

    monkeypatch.setattr(once_more, "_look", followed)
    once_more.work()
    assert cluster.asked("scancel") == 5  # once it has been asked, it knows


@pytest.mark.process
def test_three_stops_at_once_cancel_the_jobs(tmp_path: Path, cluster: StandIn) -> None:
    cluster.says("squeue", says_of(worked(tmp_path), "RUNNING"))
    waiting = queue_of(tmp_path, detach=False)
    waiting.stops = 3  # while it waited for an answer
    waiting.work()
    assert cluster.asked("scancel") == 1


@pytest.mark.process
def test_jobs_that_failed_by_themselves_are_told_as_such(tmp_path: Path, cluster: StandIn) -> None:
    text = "script: vit\nseeds: [1, 2]"
    first = worked(tmp_path, text)
    ended(tmp_path, first, 1)
    then = worked(tmp_path, text, detach=False, fail_fast=True)
    assert [state.state for state in then.states] == ["failed", "failed"]
    assert cluster.asked("scancel") == 0


@pytest.mark.process
def test_stopped_once_the_jobs_stay_and_twice_they_are_cancelled(
    tmp_path: Path, cluster: StandIn
) -> None:
    first = worked(tmp_path)
    cluster.says("squeue", says_of(first, "RUNNING"))
    once = queue_of(tmp_path, detach=False)
    once.stops = 1
    once.work()
    assert cluster.asked("scancel") == 0 and len(once.submitted.open()) == 1
    twice = queue_of(tmp_path, detach=False)
    twice.stops = 2
    ended(tmp_path, first, 1, "TERM")
    cluster.does(
        "scancel",
        f"echo '12|CANCELLED|None|{first.watched[0].entry.name}' > {cluster.folder}/squeue.says",
    )
    twice.work()
    assert cluster.asked("scancel") == 1
    assert (twice.states[0].state, twice.states[0].reason) == (
        "interrupted",
        "the sweep was stopped",
    )


@pytest.mark.process
def test_what_somebody_else_measures_or_settles(tmp_path: Path, cluster: StandIn) -> None:
    waiting = queue_of(tmp_path)
    by_hand = Lock(waiting.states[0].job.folder.lock("run"))
    assert by_hand.take()
    waiting.work()
    assert "somebody else measures it now" in seen(waiting)
    assert waiting.states[0].state == ELSEWHERE and cluster.asked("sbatch") == 0
    by_hand.release()
    first, second = queue_of(tmp_path), queue_of(tmp_path)
    first.work()
    cluster.says("squeue", says_of(first, "RUNNING"))
    second.work()
    ended(tmp_path, first, 1, "USR1")
    first._look()
    rows = first.states[0].job.folder.attempts.read_bytes()
    second._look()
    assert [q.states[0].state for q in (first, second)] == ["timeout", "timeout"]
    assert second.states[0].job.folder.attempts.read_bytes() == rows


@pytest.mark.process
def test_a_cluster_that_does_not_answer_is_asked_again(
    tmp_path: Path, cluster: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = queue_of(tmp_path)
    cluster.does("squeue", "echo Unable to contact slurm controller >&2; exit 1")
    waiting.work()
    waiting._look()
    screen = seen(waiting)
    assert sum("does not answer" in line for line in screen.lines) == 1
    assert waiting.states[0].state == WAITING and len(waiting.watched) == 1


def test_two_runners_do_not_submit_at_once(
    tmp_path: Path, cluster: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue.cluster, "PATIENCE_S", 0.1)
    with queue_of(tmp_path)._alone(), pytest.raises(UserError, match="submits these runs"):
        worked(tmp_path)
    assert cluster.asked("sbatch") == 0


SLOW = """sleep 1
for script in "$@"; do :; done
sed -n 's/^#SBATCH --job-name=\\(.*\\)/12|PENDING|None|\\1/p' $script > {folder}/squeue.says
echo 12"""


@pytest.mark.process
def test_a_runner_is_killed_while_sbatch_is_at_work(
    tmp_path: Path, cluster: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next one waits until sbatch is done, and finds the job."""
    cluster.does("sbatch", SLOW.format(folder=cluster.folder))
    file, out = sweep_file(tmp_path, "script: vit"), tmp_path / "out"
    runner = start(file, out, "--tiny", *S)
    wait_for(lambda: cluster.asked("sbatch") == 1)
    runner.kill()
    runner.communicate()
    assert main([str(file), "--tiny", "--output_dir", str(out), *S, "--detach"]) == 0
    assert "is job 12" in capsys.readouterr().out and cluster.asked("sbatch") == 1


@pytest.mark.process
def test_what_sbatch_says_is_one_line(
    tmp_path: Path, cluster: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    file = sweep_file(tmp_path, "script: vit")
    argv = [str(file), "--tiny", "--output_dir", str(tmp_path / "out"), *S]
    cluster.does(
        "sbatch", "echo 'sbatch: error: Invalid generic resource (gres) specification' >&2; exit 1"
    )
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "sbatch refuses: Invalid generic resource" in error
    assert "--gres none" in error
    assert Path(error.rsplit(" ", 1)[1].strip()).read_text().startswith("#!/bin/bash")
    # Refused, as far as it said: the next call submits it.
    cluster.does("sbatch", "echo 12")
    assert main([*argv, "--detach"]) == 0
    assert cluster.asked("sbatch") == 2

"""Odd answers of a cluster: jobs that squeue does not list, lines of other forms, no answer."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import threading
import time
from pathlib import Path

import pytest

from harness.core.settings import UserError
from harness.launch.slurm import queue
from harness.launch.slurm.cluster import outside_a_job
from harness.launch.slurm.scripts import NOTE
from tests.support.slurm_commands import StandIn
from tests.support.slurm_queue import queue_of, says_of, seen, stand_in, worked
from tests.support.sweeps import wait_for

pytestmark = pytest.mark.process


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return stand_in(tmp_path, monkeypatch)


@pytest.mark.parametrize("accounting", ["RUNNING\n", ""])
def test_a_job_that_squeue_misses_once_is_not_lost(
    accounting: str, tmp_path: Path, cluster: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = worked(tmp_path)
    cluster.says("sacct", accounting)
    monkeypatch.setattr(queue, "LOST_S", 60.0)
    listed = says_of(first, "RUNNING").strip()
    # It is in squeue's second answer.
    cluster.does("squeue", f"[ -e {tmp_path}/missed ] && echo {shlex.quote(listed)}; "
                           f"touch {tmp_path}/missed")  # fmt: skip
    again = worked(tmp_path)
    assert (tmp_path / "missed").exists() and cluster.asked("squeue") == 2
    assert cluster.asked("sbatch") == 1 and len(again.submitted.open()) == 1
    assert again.states[0].state == "running" and "without a trace" not in seen(again)


def test_a_job_that_squeue_never_lists_is_lost_whatever_accounting_has(
    tmp_path: Path, cluster: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    worked(tmp_path)
    cluster.says("sacct", "RUNNING\n")  # of a job whose end was never accounted for
    monkeypatch.setattr(queue, "LOST_S", 0.3)
    began = time.monotonic()
    then = worked(tmp_path)
    assert time.monotonic() - began >= 0.3
    assert "interrupted after 0.0 s, job 12 ended without a trace" in seen(then)
    assert cluster.asked("sbatch") == 2


def test_headers_are_no_jobs_and_other_forms_are_no_answer(
    tmp_path: Path, cluster: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = worked(tmp_path)
    monkeypatch.setattr(queue, "LOST_S", 60.0)
    cluster.says("squeue", "CLUSTER: main\n" + says_of(first, "PENDING", "Priority"))
    assert worked(tmp_path).states[0].state == "waiting"
    cluster.says("squeue", says_of(first, "PENDING").replace("12|", "12_[0-1%1]|"))
    then = worked(tmp_path)
    assert "asked again: squeue lists a job as 12_[0-1%1], in place of one by one" in seen(then)
    assert cluster.asked("sbatch") == 1 and len(then.submitted.open()) == 1


def test_a_greeting_before_the_number_of_a_job(tmp_path: Path, cluster: StandIn) -> None:
    cluster.says("sbatch", "Welcome to cluster X\n77;main\n")
    (entry,) = worked(tmp_path).submitted.open().values()
    assert entry.job == "77"


@pytest.mark.parametrize("said", ["", "queued\n"])
def test_an_answer_without_a_number(said: str, tmp_path: Path, cluster: StandIn) -> None:
    cluster.says("sbatch", said)
    with pytest.raises(UserError, match=f"sbatch --parsable answers '{said.strip()}', which is no"):
        worked(tmp_path)
    (script,) = (tmp_path / "sweep" / "jobs").glob("*.sh")
    cluster.says("squeue", f"78|PENDING|Priority|{script.stem}\n")
    (entry,) = worked(tmp_path).submitted.open().values()
    assert entry.job == "78" and cluster.asked("sbatch") == 1


def test_two_stops_do_not_wait_for_sbatch(
    tmp_path: Path, cluster: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.does("sbatch", f"while [ ! -e {tmp_path}/end ]; do sleep 0.1; done")
    waiting = queue_of(tmp_path)
    stopped_s: list[float] = []

    def stop() -> None:
        wait_for(lambda: cluster.asked("sbatch"))
        stopped_s.append(time.monotonic())
        waiting.stops = 2

    threading.Thread(target=stop).start()
    waiting.work()
    (at_s,) = stopped_s  # not before
    assert time.monotonic() - at_s < 10
    assert "sbatch has not answered: the same command shows and settles them" in seen(waiting)
    (entry,) = waiting.submitted.open().values()
    assert entry.job is None  # the next call looks for it, once sbatch has ended
    monkeypatch.setattr("harness.launch.slurm.cluster.PATIENCE_S", 0.5)
    with pytest.raises(UserError, match="submits these runs: try again later"):
        worked(tmp_path)
    (tmp_path / "end").touch()
    cluster.does("sbatch", "echo 12")
    monkeypatch.setattr("harness.launch.slurm.cluster.PATIENCE_S", 20.0)
    assert "submitted as job 12" in seen(worked(tmp_path))


def test_what_the_script_asks_for_comes_before_variables(
    tmp_path: Path, cluster: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep that is started within a job."""
    of_job = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "2", "SLURM_MEM_PER_NODE": "9"}
    for name, value in {**of_job, "SLURM_CONF": "/etc/slurm.conf", "SBATCH_QOS": "low"}.items():
        monkeypatch.setenv(name, value)
    cluster.does("sbatch", f"env > {tmp_path}/environment; echo 12")
    worked(tmp_path, timeout_s=7200.0)
    had = (tmp_path / "environment").read_text().splitlines()
    assert {"SLURM_CONF=/etc/slurm.conf", "SBATCH_QOS=low"} <= {*had}
    assert not any(line.partition("=")[0] in of_job for line in had)
    (asked,) = (tmp_path / "bin" / "asked").read_text().splitlines()[:1]
    (script,) = (tmp_path / "sweep" / "jobs").glob("*.sh")
    assert " --time=120 " in asked and asked.endswith(f" {script}")
    more = {"SBATCH_CLUSTERS": "other"}
    assert outside_a_job({"SLURM_JOB_ID": "1", "SLURM_JWT": "x", "A": "", **more}) == {
        "SLURM_JWT": "x", "A": "",
    }  # fmt: skip


def test_a_full_disk_does_not_take_the_note_of_a_job(tmp_path: Path) -> None:
    note = tmp_path / "mine_0.json"
    note.write_text('{"job": "12"}')
    os.symlink("/dev/full", f"{note}.new")
    text = NOTE.format(note=shlex.quote(str(tmp_path / "mine")), patience=1)
    subprocess.run(["bash", "-c", text], capture_output=True, check=False)
    assert json.loads(note.read_text()) == {"job": "12"}

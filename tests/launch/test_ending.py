"""What a runner writes of a run that has ended, and what it leaves to others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.core import attempts
from harness.core.records import COMPLETE, read_json, write_json
from harness.core.records.locks import Lock
from harness.launch.agents import failures_in
from harness.launch.ahead import ahead
from harness.launch.launcher import Exit
from harness.launch.outcome import ELSEWHERE, Began, State, quality_and_speed, settle
from harness.launch.places import Local, Machine, Options
from harness.launch.plan import Job
from harness.launch.runner import Runner
from tests.support.ranks import ROOT
from tests.support.sweeps import Watcher, jobs_of


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return jobs_of(tmp_path, "script: vit", tmp_path / "out")[0]


def settled(job: Job, ending: Exit, stopped: tuple[str, str] | None = None) -> str:
    log = Path(job.settings.output_dir) / "log.txt"
    return settle(job, ending, Began(time.time() - 1), log, stopped)


def test_what_another_process_measures_is_its_to_record(job: Job) -> None:
    by_hand = Lock(job.folder.lock("run"))
    assert by_hand.take()
    assert settled(job, Exit(1, [{"rank": 0, "exit_code": 2, "unix": time.time()}])) == ELSEWHERE
    assert not job.folder.path.exists()
    by_hand.release()
    assert settled(job, Exit(1)) == "failed"
    assert (read_json(job.folder.summary) or {})["reason"] == "exit code 1"


@pytest.mark.parametrize("odd", [{}, {"outcome": None}, {"outcome": []}, {"outcome": "done"}])
def test_a_summary_without_an_outcome_is_as_good_as_none(odd: dict[str, Any], job: Job) -> None:
    write_json(job.folder.summary, odd)
    state = State(job)
    runner = Runner([state], Options(), Path(), Watcher(), Local(Options()), Machine((), (0,)))
    assert not runner.is_settled(state, rerun=None) and state.state == "waiting"
    assert settled(job, Exit(3)) == "failed"
    assert (read_json(job.folder.summary) or {})["reason"] == "exit code 3"
    assert runner.is_settled(state, rerun=None) and state.known
    assert (state.state, state.reason) == ("failed", "exit code 3")


def test_a_finished_record_is_never_written_over(job: Job) -> None:
    job.folder.write_settings({})
    write_json(job.folder.summary, {"outcome": "finished", "accuracy": 0.5})
    before = job.folder.summary.read_bytes()
    time.sleep(1.1)  # it is older than the start of this run
    assert settled(job, Exit(0)) == "finished"  # found done: somebody was quicker
    assert settled(job, Exit(1), stopped=("timeout", "longer than --timeout 1h")) == "timeout"
    assert job.folder.summary.read_bytes() == before
    assert not job.folder.attempts.exists()


def test_a_new_start_that_never_began_says_why_and_that_the_record_stays(
    job: Job, tmp_path: Path
) -> None:
    """The reason was None, and --rerun failed was named, which finds a finished run."""
    job.folder.write_settings({})
    write_json(job.folder.summary, {"outcome": "finished"})
    log = tmp_path / "log.txt"
    log.write_text("vit.py: error: --dataset x: there is no such folder or file\n")
    state, screen = State(job, state="failed"), Watcher()
    runner = Runner([state], Options(), Path(), screen, Local(Options()), Machine((), (0,)))
    runner.report(state, 1.0, log)
    (line,) = screen.lines
    assert "no such folder or file; the finished record stays, --rerun all tries again;" in line
    state.state = "timeout"  # the log does not say why
    runner.report(state, 1.0, log)
    assert ", it had not begun its record; the finished record stays, --rerun" in screen.lines[1]


def test_a_summary_alone_is_no_finished_run(job: Job) -> None:
    """The folder was removed just before the run wrote that it had finished."""
    began = Began.now(job.folder)
    attempts.end(job.folder, "finished", None, 3.0)
    attempts.write_summary(job.folder, "finished")
    state = State(job)
    runner = Runner([state], Options(), Path(), Watcher(), Local(Options()), Machine((), (0,)))
    assert not runner.is_settled(state, rerun=None) and state.state == "waiting"
    assert ahead([state], None)[0] == "0 done before, 1 to go"
    assert settle(job, Exit(0), began, Path("log.txt"), None) == "failed"
    reason = (job.folder.read_summary() or {})["reason"]
    assert reason == f"{job.folder.path} was removed while the run was in progress"


def test_a_run_that_ended_well_without_a_record_has_failed(job: Job) -> None:
    """All outputs were removed just after the run had written that it had finished."""
    began, log = Began.now(job.folder), Path(job.settings.output_dir) / "log.txt"
    log.parent.mkdir(parents=True)
    log.write_text("  epoch 3/3\n")
    assert settle(job, Exit(0), began, log, None) == "failed"
    reason = (job.folder.read_summary() or {})["reason"]
    assert reason == f"it ended without an error, and no record is in {job.folder.path}"


def test_a_runner_waits_for_a_run_that_a_person_started(job: Job, tmp_path: Path) -> None:
    by_hand = Lock(job.folder.lock("run"))
    assert by_hand.take()
    state = State(job)
    runner = Runner([state], Options(), tmp_path, Watcher(), Local(Options()), Machine((), (0,)))
    runner._start_what_fits()
    assert state.state == ELSEWHERE and not runner.running
    # Its claim is free again: another runner may look, too.
    assert Lock(job.folder.lock("claim")).take()


def test_the_reason_is_in_the_log_where_the_record_had_no_room(job: Job) -> None:
    log = Path(job.settings.output_dir) / "log.txt"
    log.parent.mkdir(parents=True)
    log.write_text("[b] failed: no space on out/x; it cannot be recorded\n[b] last words\n")
    assert settled(job, Exit(1, [{"rank": 0, "exit_code": 1, "unix": 1.0}])) == "failed"
    assert (read_json(job.folder.summary) or {})["reason"] == "no space on out/x (rank 0)"


OUTSIDE = "outside training steps: if in an evaluation, try a smaller --eval_batch"
IN_A_STEP = "to try: --per_gpu_batch 8 --grad_acc 2, which is the same effective batch"


@pytest.mark.parametrize(
    ("epoch", "saving", "advice"),
    [(1.0, False, OUTSIDE), (1.5, False, IN_A_STEP), (1.5, True, OUTSIDE)],
)
def test_a_lack_of_memory_beside_training_steps_halves_no_batch(
    epoch: float, saving: bool, advice: str, job: Job
) -> None:
    """The kernel kills without a word: what the attempt left says where it was."""
    attempts.begin(job.folder, 0, 1, per_gpu_batch=16)
    for name in ("checkpoint-8", *(["checkpoint-12"] if saving else [])):
        (job.folder.path / name).mkdir()
    (job.folder.path / "checkpoint-8" / COMPLETE).touch()
    position = {"attempt": 1, "epoch": epoch, "update": int(8 * epoch), "updates": 24}
    attempts.write_progress(job.folder, position)
    failure = {"rank": 0, "exit_code": -9, "unix": time.time(), "no_memory": "the machine"}
    killed = Exit(1, [failure])
    assert settle(job, killed, Began(time.time() - 1), Path("none"), None) == "oom"
    reason = (read_json(job.folder.summary) or {})["reason"]
    killer = "rank 0 was killed by the kernel: the machine is out of memory"
    assert reason == f"{killer}; {advice}"
    auto = replace(job.settings, auto_batch=True)
    assert attempts.batch_to_try(job.folder, auto) == (8 if advice == IN_A_STEP else None)


@pytest.mark.parametrize("code", [-11, -6])
@pytest.mark.parametrize("limited", [True, False])
def test_a_crash_may_be_a_lack_of_memory_where_the_shell_limits_it(
    code: int, limited: bool, job: Job
) -> None:
    failure = {"rank": 0, "exit_code": code, "unix": time.time(), "limited": limited}
    assert settled(job, Exit(1, [failure])) == "failed"
    reason = (read_json(job.folder.summary) or {})["reason"]
    assert reason.endswith(", perhaps out of memory: ulimit -v is set") == (limited and code == -11)
    assert reason.startswith("rank 0 died of SIG")


@pytest.mark.parametrize("by_s", [-3600.0, 3600.0])
def test_the_clock_does_not_say_which_outcome_is_new(
    job: Job, by_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier run has left is not taken for that of this one, and what is new is."""
    row = {"rank": 0, "outcome": "oom", "reason": "earlier", "unix": time.time()}
    write_json(job.folder.failure(0), row)
    write_json(job.folder.summary, {"outcome": "oom", "reason": "earlier"})
    runner = Runner(
        [state := State(job)], Options(rerun="failed"), Path(), Watcher(), Local(Options()),
        Machine((), (0,)),
    )  # fmt: skip
    runner.stops = runner.stops_obeyed = 1
    now_unix = time.time() + by_s
    monkeypatch.setattr(time, "time", lambda: now_unix)
    runner.work()
    assert not runner._needs_no_start(state)
    began, log = Began.now(job.folder), Path("none")
    now_unix += by_s
    assert settle(job, Exit(3), began, log, None) == "failed"
    assert (read_json(job.folder.summary) or {})["reason"] == "exit code 3"
    # Another runner has measured it meanwhile.
    assert runner._needs_no_start(state) and state.state == "failed"
    began = Began.now(job.folder)
    write_json(job.folder.failure(0), row | {"reason": "now"})
    assert settle(job, Exit(1), began, log, None) == "oom"
    assert (read_json(job.folder.summary) or {})["reason"].startswith("now")


def test_a_finished_run_names_the_metric_that_was_asked_for() -> None:
    row = {"accuracy": 0.8, "cost": 12.5, "train_samples_per_s": 1234.5}
    assert quality_and_speed(row) == "accuracy 0.8000, 1,234 samples/s"
    for metric, said in (("cost", ", cost 12.5000"), ("accuracy", ""), ("mcc", "")):
        summary = row | {"best_metric": metric, "best_value": 9.0}
        assert quality_and_speed(summary) == f"accuracy 0.8000{said}, 1,234 samples/s"


@pytest.mark.process
def test_the_time_of_a_failed_rank_is_read_wherever_it_ran(tmp_path: Path) -> None:
    """The clock of a node may be in another zone than that of whoever reads its log."""
    script, log = tmp_path / "fails.py", tmp_path / "log.txt"
    script.write_text("raise SystemExit(3)\n")
    torchrun = [sys.executable, "-m", "harness.train.torchrun", "--standalone"]
    with log.open("w") as output:
        done = subprocess.run(
            [*torchrun, "--nproc_per_node=1", str(script)], cwd=ROOT,
            env={**os.environ, "TZ": "THERE-9"}, stdout=output, stderr=output, check=False,
        )  # fmt: skip
    (failure,) = failures_in(log)
    assert done.returncode == 1 and failure["exit_code"] == 3
    assert abs(failure["unix"] - time.time()) < 60


@pytest.mark.process
@pytest.mark.parametrize(("given", "code", "told"), [("'no column x'", 1, "no column x\n"),
                                                     ("3", 3, ""), ("", 0, "")])  # fmt: skip
def test_a_rank_exits_as_python_does(given: str, code: int, told: str) -> None:
    request = "{'log': None, 'environment': {}, 'cores': [], 'script': 'mine', 'argv': []}"
    program = (
        "import sys; from harness.train.run import warm\n"
        f"warm.command_line = lambda *_: sys.exit({given})\nwarm.rank_main({request})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (code, told)


def test_a_busy_machine_is_warned_of_on_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = {"cpu_busy_share": 0.9, "gpu_processes": 0}
    monkeypatch.setattr("harness.launch.places.others", lambda machine: busy)
    screen = Watcher()
    runner: Any = SimpleNamespace(
        isolation_s=-1e9, options=Options(), place=SimpleNamespace(here=True), running=[],
        machine={}, screen=screen,
    )  # fmt: skip
    Runner._check_isolation(runner)
    said = "others use 90% of the cores: this disturbs what is measured now"
    assert screen.lines == [f"warning: {said}"]

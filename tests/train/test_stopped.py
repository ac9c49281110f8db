"""A launcher ends a rank whose process is stopped, which nobody else would notice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.core.attempts import unended
from harness.core.process import is_stopped, ranks_beside
from harness.core.records import find_runs, read_rows
from harness.core.settings import UserError
from harness.read.records.recorded import recorded
from harness.train import agent, only_rank, stopped
from harness.train.agent import LocalElasticAgent, api, ending_stopped_ranks
from harness.train.stopped import StoppedRanks, UntilMet, hang_after_of
from tests.support import peers, warm_sweeps
from tests.support.broken_runs import alone, attempts_of
from tests.support.sweeps import ROOT, family, sweep_file, wait_for


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.process
@pytest.mark.parametrize(("size", "limit_s"), [(1, 3), (2, 6)])
def test_a_rank_that_is_stopped_is_ended_with_the_reason(
    size: int, limit_s: int, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of several later: the others find it themselves, and print their stacks."""
    now_s = 0.0
    monkeypatch.setattr(stopped, "time", SimpleNamespace(monotonic=lambda: now_s))
    rank: Any = SimpleNamespace(id=sleeper.pid, global_rank=5, world_size=size)
    never, ranks = StoppedRanks(0.0), StoppedRanks(3.0)

    def pass_by(seconds: float, step_s: float = 1.0) -> None:
        nonlocal now_s
        for _ in range(round(seconds / step_s)):
            now_s += step_s
            for each in (never, ranks):
                each.look([rank], 2)

    pass_by(20)
    sleeper.send_signal(signal.SIGSTOP)
    assert wait_for(lambda: is_stopped(sleeper.pid))
    pass_by(limit_s - 1)
    sleeper.send_signal(signal.SIGCONT)
    assert wait_for(lambda: not is_stopped(sleeper.pid))
    pass_by(1)
    sleeper.send_signal(signal.SIGSTOP)
    assert wait_for(lambda: is_stopped(sleeper.pid))
    pass_by(3600, step_s=3600)  # the launcher was stopped, too
    pass_by(limit_s - 1)
    assert not ranks.reasons and sleeper.poll() is None
    pass_by(1)
    reason = f"rank 5 (node 2) has not answered for {limit_s} s: its process is stopped"
    assert ranks.reasons == {sleeper.pid: reason} and not never.reasons
    assert sleeper.wait(20) == -signal.SIGKILL


def test_the_time_is_that_of_the_script() -> None:
    for words, seconds in (
        (["--nnodes", "1", "vit.py", "--b", "8"], 120.0),
        (["vit.py", "--hang_after", "7"], 7.0),
        (["vit.py", "--hang_after=0", "-x"], 0.0),
        (["vit.py", "--hang-after=0"], 0.0),
        (["vit.py", "--hang-after", "9"], 9.0),
        (["vit.py", "--hang_after", "soon"], 0.0),
    ):
        assert hang_after_of(words) == seconds


@pytest.mark.parametrize(
    ("owner", "name"), [(api, "LocalElasticAgent"), (LocalElasticAgent, "_monitor_workers")]
)
def test_a_torch_whose_agent_cannot_be_replaced_is_refused(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bare:
        """An agent without the method, or a module without the agent."""

    for attribute in (a for a in ("LocalElasticAgent", "_monitor_workers") if a != name):
        monkeypatch.setattr(Bare, attribute, None, raising=False)
    Bare.__name__ = owner.__name__
    monkeypatch.setattr(agent, "api" if owner is api else "LocalElasticAgent", Bare)
    said = f"{owner.__name__} has no {name}, which must be replaced so that stopped ranks are ended"
    with pytest.raises(UserError, match=said), ending_stopped_ranks(1.0):
        raise AssertionError("not reached")


@pytest.mark.process
@pytest.mark.parametrize("count", [1, 2])
def test_torchrun_ends_ranks_that_stop_before_they_have_met(root: Path, count: int) -> None:
    begun = "test $RANK = 0 && kill -STOP $$$$; exec sleep 600"  # torchrun takes $$ for $
    done = subprocess.run(
        [sys.executable, "-m", "harness.train.torchrun", "--standalone", "--no_python",
         f"--nproc_per_node={count}", "sh", "-c", begun, "vit.py", "--hang_after", "1"],
        cwd=root, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    named = f"rank 0 (node 0) has not answered for {count} s: its process is stopped"
    assert done.returncode == 1 and f"harness: {named}\n" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.process
@pytest.mark.parametrize("number", [0, 1])
def test_a_plain_torchrun_ends_ranks_that_stop_before_they_have_met(
    tmp_path: Path, number: int
) -> None:
    """By the other rank: nobody else looks. Nothing is recorded of a run that has not begun."""
    words = ["--tiny", "--train_size", "64", "--test_size", "16", "--setup", "1_2",
             "--hang_after", "2", "--o", str(tmp_path / "out")]  # fmt: skip
    begun = f'test $RANK = {number} && kill -STOP $$$$; exec "$0" "$@"'
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no_python",
         "--nproc_per_node=2", "sh", "-c", begun, sys.executable, "vit.py", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    named = f"rank {number} (node 0) has not answered for 2 s: its process is stopped"
    assert done.returncode == 1 and f"harness: {named}\n" in done.stderr
    assert f"failed: {named}" in done.stderr.partition("error_file")[2]  # in torchrun's words
    assert done.stderr.count("harness: stacks of rank") == 1 and "init_process_group" in done.stderr
    assert not find_runs(tmp_path / "out")


def test_the_lowest_rank_that_runs_looks_at_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none where the launcher is stopped, too."""
    seen: list[tuple[int, list[int]]] = []
    halted: set[int] = set()
    monkeypatch.setattr(stopped, "is_stopped", halted.__contains__)
    monkeypatch.setattr(stopped, "ranks_beside", lambda: {rank: 100 + rank for rank in range(3)})
    ranks = [UntilMet(5.0, rank, 0) for rank in range(3)]
    for each in ranks:
        look: Any = lambda others, node, by=each.rank: seen.append((by, [o.id for o in others]))  # noqa: E731
        monkeypatch.setattr(each.ranks, "look", look)

    def lookers() -> list[int]:
        seen.clear()
        for each in ranks:
            each.look()
        assert all(pids == [100, 101, 102] for _, pids in seen)
        return [rank for rank, _ in seen]

    assert lookers() == [0]
    halted.update({100, 102})
    assert lookers() == [1]
    halted.add(os.getppid())
    assert lookers() == []
    monkeypatch.setattr(stopped, "ranks_beside", dict)  # as in a process that was forked
    assert lookers() == []


@pytest.mark.process
def test_the_ranks_of_a_torchrun_are_told_from_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By their parent, and the run's id with which they began."""
    began = {"TORCHELASTIC_RUN_ID": "mine", "RANK": "3"}
    environments = [began, began | {"RANK": "5"}, began | {"TORCHELASTIC_RUN_ID": "b", "RANK": "4"},
                    {"RANK": "6"}, began | {"RANK": ""}]  # fmt: skip
    sleepers = [subprocess.Popen(["sleep", "600"], env=each) for each in environments]
    try:
        monkeypatch.setattr(os, "getppid", os.getpid)
        assert ranks_beside() == {}  # not of a torchrun
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
        assert ranks_beside() == {3: sleepers[0].pid, 5: sleepers[1].pid}
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


@pytest.mark.process
@pytest.mark.parametrize(("restarts", "hz"), [(0, 0), (3, 1)])
def test_the_only_rank_that_torchrun_started_is_ended_on_record(
    tmp_path: Path, restarts: int, hz: int
) -> None:
    """By its own sampler, which also runs where it reads nothing. torchrun starts the rank again
    where it may: the run has no outcome yet.
    """
    argv = ["--tiny", "--train_size", "64", "--test_size", "16", "--b", "16", "--epochs", "4000",
            "--setup", "1_1", "--save_steps", "8", "--hang_after", "2", "--o",
            str(tmp_path), "--telemetry_hz", str(hz)]  # fmt: skip
    env = alone() | {"TORCHELASTIC_MAX_RESTARTS": str(restarts)}
    rank = peers.script(tmp_path / "printed", "vit", *argv, env=env)
    wait_for(lambda: rank.ended() or any(read_rows(r.epochs)[0] for r in find_runs(tmp_path)))
    assert not rank.ended(), rank.err
    rank.kill(signal.SIGSTOP)
    assert rank.code() == -signal.SIGKILL
    (run,) = find_runs(tmp_path)
    reason = "rank 0 (node 0) has not answered for 2 s: its process is stopped"
    assert f"failed: {reason}; the record is in" in rank.err
    failure, summary = run.read_failure(0), run.read_summary()
    assert failure is not None and failure["reason"] == reason
    if restarts:
        assert summary is None and unended(run) is not None
        return
    assert summary is not None and (summary["outcome"], summary["reason"]) == ("failed", reason)
    assert attempts_of(run)[1][-1]["reason"] == reason
    assert recorded(run).problem is None


@pytest.mark.process
def test_a_run_that_its_user_has_paused_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: subprocess.Popen[bytes]
) -> None:
    """Ctrl-Z stops torchrun, too."""
    halted, seconds = {sleeper.pid, 5}, iter(range(1000))
    monkeypatch.setattr(only_rank, "is_stopped", halted.__contains__)
    monkeypatch.setattr(stopped, "is_stopped", halted.__contains__)
    monkeypatch.setattr(stopped, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    rank = only_rank.OnlyRank(sleeper.pid, 5, 1.0, 3.0, str(tmp_path), False, 2)
    for _ in range(60):
        rank.look()
    halted.remove(5)
    for _ in range(3):
        rank.look()
    assert not rank.ranks.reasons and sleeper.poll() is None
    rank.look()
    assert rank.ranks.reasons and sleeper.wait(20) == -signal.SIGKILL
    assert not [*tmp_path.iterdir()]  # nothing was begun


@pytest.mark.process
def test_a_sweep_ends_a_run_whose_only_rank_is_stopped(tmp_path: Path) -> None:
    text = "script: vit\nsettings: {epochs: 4000, train_size: 256, test_size: 64, hang_after: 2}\n"
    file, out = sweep_file(tmp_path, text + "seeds: [1]\n"), tmp_path / "out"
    process = warm_sweeps.start(file, out, "--tiny")
    assert wait_for(lambda: any(read_rows(run.epochs)[0] for run in find_runs(out)), 100)
    for rank in family(process.pid)["rank"]:
        os.kill(rank.pid, signal.SIGSTOP)
    stdout, _ = process.communicate(timeout=120)
    (run,) = find_runs(out)
    summary = run.read_summary()
    assert process.returncode == 1 and summary is not None
    reason = "rank 0 (node 0) has not answered for 2 s: its process is stopped"
    assert (summary["outcome"], summary["reason"]) == ("failed", reason) and reason in stdout

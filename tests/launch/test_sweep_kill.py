"""kill -9 of the runner, of a rank, of the launcher, at random moments: nothing is lost."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.core.records import find_runs, read_rows
from harness.read import load_sweep
from tests.support.sweeps import (
    ROOT,
    alive,
    family,
    gone,
    outcomes,
    start,
    sweep,
    sweep_file,
    untimed_rows,
    wait_for,
)

pytestmark = pytest.mark.process

FILE = """
script: vit
settings: {epochs: 3, train_size: 640, test_size: 100}
grid: {setup: [1_1, 1_2]}
seeds: [2, 4, 42]
baseline: {setup: 1_1}
"""


# Of the table: everything that no kill may change.
SAME = ["setup", "planned", "finished", "effective_batch", "updates", "samples", "accuracy",
        "accuracy_sd", "f1", "eval_loss", "train_loss", "accuracy_gain_points"]  # fmt: skip


def found(out: Path) -> dict[str, Any]:
    """The rows of every run and the table of the sweep, without times."""
    rows = {str(run.path.relative_to(out)): untimed_rows(run) for run in find_runs(out)}
    table = load_sweep(out / "sweeps" / "mine-tiny")[SAME].to_dict("records")
    return {"rows": rows, "table": table}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    done = sweep(sweep_file(folder, FILE), folder, "--tiny")
    assert done.returncode == 0, done.stderr
    whole = found(folder)
    assert len(whole["rows"]) == 6 and all(len(run) == 3 for run in whole["rows"].values())
    assert [row["finished"] for row in whole["table"]] == [3, 3]
    return whole


def victims(runner: int, draw: random.Random) -> list[psutil.Process]:
    """One process to be killed: usually a rank, now and then what holds the ranks."""
    processes = family(runner)
    kind = draw.choice(["runner", "launcher", "server", "rank", "rank", "rank"])
    if kind == "runner":
        return [psutil.Process(runner)]
    return draw.sample(processes[kind], 1) if processes[kind] else []


def kill_until_done(file: Path, out: Path, kills: int, seed: int) -> int:
    """Kill at random moments and start again, until all is measured; how many were killed."""
    draw = random.Random(seed)
    killed, runner = 0, start(file, out, "--tiny")
    next_s = time.monotonic() + draw.uniform(0.2, 6)
    calls = 1
    while True:
        if runner.poll() is not None:
            error = runner.stderr.read() if runner.stderr else ""
            assert runner.returncode in (0, 1, -9), error
            if runner.returncode == 0:
                return killed
            calls += 1
            assert calls < 3 * kills + 3, error
            runner = start(file, out, "--tiny")
        everyone = [p for kind in family(runner.pid).values() for p in kind]
        if killed < kills and time.monotonic() >= next_s:
            for victim in victims(runner.pid, draw):
                victim.kill()
                killed += 1
                if victim.pid == runner.pid:
                    runner.wait()
                    assert gone(everyone), f"kill {killed}: {list(alive(everyone))} live on"
            next_s = time.monotonic() + draw.uniform(0.05, 1.5)
        time.sleep(0.01)


def check_trials(tmp_path: Path, undisturbed: dict[str, Any], kills: int, seed: int) -> None:
    file = sweep_file(tmp_path, FILE)
    # A sweep may be done before it has been killed often enough: then another one.
    killed = sweeps = 0
    while killed < kills:
        out = tmp_path / f"out{sweeps}"
        killed += kill_until_done(file, out, kills - killed, seed + sweeps)
        sweeps += 1
        assert set(outcomes(out).values()) == {"finished"}
        # No row lost, none twice, and every number as if nothing had happened.
        assert found(out) == undisturbed


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 100])
def test_killed_at_random_moments(seed: int, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    check_trials(tmp_path, undisturbed, kills=20, seed=seed)


@pytest.mark.slow
def test_a_rank_does_not_outlive_torchrun(tmp_path: Path) -> None:
    """Also without a sweep, where a person started it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    flags = ["--tiny", "--epochs", "4000", "--output_dir", str(tmp_path)]
    with subprocess.Popen(
        [*command, "vit.py", *flags], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as torchrun:
        wait_for(lambda: any(read_rows(run.epochs)[0] for run in find_runs(tmp_path)))
        ranks = psutil.Process(torchrun.pid).children()
        assert len(ranks) == 2
        torchrun.kill()
        assert gone(ranks)

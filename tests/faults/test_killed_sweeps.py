"""A real sweep whose runner, launcher, fork server or ranks are killed: nothing is lost.

Killed at random moments and started again until all is measured, it ends with the rows and the
table of one that nothing disturbed.
"""

from __future__ import annotations

import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.core.records import find_runs
from harness.read import load_sweep
from tests.support import warm_sweeps
from tests.support.mutants import amount
from tests.support.sweeps import (
    alive,
    family,
    gone,
    outcomes,
    start,
    sweep_file,
    untimed_rows,
)

pytestmark = [pytest.mark.process, pytest.mark.slow]

SIX = """
script: vit
settings: {epochs: 3, train_size: 640, test_size: 100}
grid: {setup: [1_1, 1_2]}
seeds: [2, 4, 42]
baseline: {setup: 1_1}
"""


# Of the table: everything that no kill may change.
SAME = ["setup", "planned", "finished", "effective_batch", "updates", "samples", "accuracy",
        "accuracy_sd", "f1", "eval_loss", "train_loss", "accuracy_gain_points"]  # fmt: skip


def whole_sweep(out: Path) -> dict[str, Any]:
    """The rows of every run and the table of the sweep, without times."""
    rows = {str(run.path.relative_to(out)): untimed_rows(run) for run in find_runs(out)}
    table = load_sweep(out / "sweeps" / "mine-tiny")[SAME].astype(object)
    known = table.where(table.notna(), None)  # NaN is unlike itself
    return {"rows": rows, "table": known.to_dict("records")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    done = warm_sweeps.sweep(sweep_file(folder, SIX), folder, "--tiny")
    assert done.returncode == 0, done.stderr
    whole = whole_sweep(folder)
    assert len(whole["rows"]) == 6 and all(len(run) == 3 for run in whole["rows"].values())
    assert [row["finished"] for row in whole["table"]] == [3, 3]
    return whole


def victims(pid: int, draw: random.Random) -> list[psutil.Process]:
    """One process to be killed: usually a rank, now and then what holds the ranks."""
    processes = family(pid)
    kind = draw.choice(["runner", "launcher", "server", "rank", "rank", "rank"])
    if kind == "runner":
        return [psutil.Process(pid)]
    return draw.sample(processes[kind], 1) if processes[kind] else []


def kill_until_done(file: Path, out: Path, kills: int, seed: int, begin: Any) -> int:
    """Kill at random moments and start again, until all is measured; how many were killed."""
    draw = random.Random(seed)
    killed, process = 0, begin(file, out, "--tiny")
    next_s = time.monotonic() + draw.uniform(0.2, 6)
    calls = 1
    while True:
        if process.poll() is not None:
            _, error = process.communicate()
            assert process.returncode in (0, 1, -9), error
            if process.returncode == 0:
                return killed
            calls += 1
            assert calls < 3 * kills + 3, error
            process = begin(file, out, "--tiny")
        if killed < kills and time.monotonic() >= next_s:
            everyone = [p for kind in family(process.pid).values() for p in kind]
            for victim in victims(process.pid, draw):
                with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                    victim.kill()
                    killed += 1
                if victim.pid == process.pid:
                    process.wait()
                    assert gone(everyone), f"kill {killed}: {list(alive(everyone))} live on"
            next_s = time.monotonic() + draw.uniform(0.05, 1.5)
        time.sleep(0.02)


def check_trials(
    tmp_path: Path, undisturbed: dict[str, Any], kills: int, seed: int, begin: Any
) -> None:
    file = sweep_file(tmp_path, SIX)
    # A sweep may be done before it has been killed often enough: then another one.
    killed = sweeps = 0
    while killed < kills:
        out = tmp_path / f"out{sweeps}"
        killed += kill_until_done(file, out, kills - killed, seed + sweeps, begin)
        sweeps += 1
        assert set(outcomes(out).values()) == {"finished"}
        # No row lost, none twice, and every number as if nothing had happened.
        assert whole_sweep(out) == undisturbed


# One that loads its libraries for most of its time, and one that has loaded them.
@pytest.mark.parametrize(
    ("seed", "begin"), [(1, start), (100, warm_sweeps.start)], ids=["1", "100"]
)
def test_killed_at_random_moments(
    seed: int, begin: Any, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    check_trials(tmp_path, undisturbed, kills=amount(8, 50), seed=seed, begin=begin)

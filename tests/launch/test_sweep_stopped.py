"""Sweeps with real processes: stopped, killed, shared by several runners; nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.core.records import find_runs, read_rows
from tests.support import warm_sweeps
from tests.support.ranks import script
from tests.support.sweeps import (
    SMALL,
    family,
    gone,
    start,
    sweep_file,
    wait_for,
)
from tests.support.warm_python import Python

LONG = """
script: vit
settings: {epochs: 4000, train_size: 256, test_size: 64}
seeds: [1, 2]
"""


def epochs_of(out: Path) -> int:
    return sum(len(read_rows(folder.epochs)[0]) for folder in find_runs(out))


@pytest.mark.process
@pytest.mark.parametrize(
    "signals",
    [["SIGINT"], *(pytest.param(s, marks=pytest.mark.slow) for s in (["SIGTERM"], ["SIGINT"] * 2))],
)
def test_stopped_by_a_person(signals: list[str], tmp_path: Path) -> None:
    file, out = sweep_file(tmp_path, LONG), tmp_path / "out"
    # As a person starts it; what else may be asked of it, of one that has loaded everything.
    begin = start if signals == ["SIGINT"] else warm_sweeps.start
    process = begin(file, out, "--tiny")
    wait_for(lambda: epochs_of(out) >= 2)
    everyone = [p for kind in family(process.pid).values() for p in kind]
    assert everyone
    for name in signals:
        process.send_signal(getattr(signal, name))
        time.sleep(0.05)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 128 + getattr(signal, signals[0])
    assert "stopped, 2 runs to go: the same command continues" in stderr
    if len(signals) == 1:
        assert "accuracy" in stdout  # the table; a second signal may come too late to prevent it
    assert gone(everyone)
    (folder,) = find_runs(out)
    assert folder.outcome() == "interrupted" and list(folder.path.glob("checkpoint-*"))
    if signals == ["SIGTERM"]:
        before = len(read_rows(folder.epochs)[0])
        again = begin(file, out, "--tiny", "--limit", "0:1")
        wait_for(lambda: epochs_of(out) > before)
        again.kill()
        again.communicate()
        rows = read_rows(folder.epochs)[0]
        assert [row["epoch"] for row in rows] == [float(n) for n in range(1, len(rows) + 1)]
        assert {row["attempt"] for row in rows} == {1, 2}


@pytest.mark.process
@pytest.mark.slow
def test_two_runners_share_the_work(tmp_path: Path) -> None:
    text = f"script: vit\n{SMALL}\nseeds: [1, 2, 3, 4, 5, 6]\n"
    file, out = sweep_file(tmp_path, text), tmp_path / "out"
    both = [warm_sweeps.start(file, out, "--tiny") for _ in range(2)]
    printed = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    started = [text.count(": started") for text in printed]
    assert sum(started) == 6 and min(started) >= 1
    for folder in find_runs(out):
        assert [row["attempt"] for row in read_rows(folder.epochs)[0]] == [1, 1]
    # Both waited for the other's runs: each ends with the whole table.
    assert all("6/6" in text for text in printed)


@pytest.mark.process
@pytest.mark.slow
def test_packed_side_by_side(tmp_path: Path) -> None:
    file, out = sweep_file(tmp_path, LONG), tmp_path / "out"
    done = warm_sweeps.sweep(file, out, "--tiny", "--pack", "--set", "epochs=15")
    assert done.returncode == 0, done.stderr
    first, second = [json.loads(f.environment.read_text()) for f in find_runs(out)]
    assert first["launch"]["packed"] and second["launch"]["packed"]
    rows = [read_rows(folder.epochs)[0] for folder in find_runs(out)]
    # At the same time: each had rows before the other ended.
    assert rows[0][0]["unix"] < rows[1][-1]["unix"] and rows[1][0]["unix"] < rows[0][-1]["unix"]


@pytest.mark.process
@pytest.mark.slow
def test_a_run_is_measured_by_one_process_at_a_time(tmp_path: Path) -> None:
    """Also when a person starts by hand what a sweep is measuring."""
    file, out = sweep_file(tmp_path, LONG), tmp_path / "out"
    process = warm_sweeps.start(file, out, "--tiny", "--limit", "0:1")
    wait_for(lambda: epochs_of(out) >= 1)
    flags = ["--tiny", "--epochs", "4000", "--train_size", "256", "--test_size", "64"]
    by_hand = script("vit", *flags, "--seed", "1", "--output_dir", str(out))
    assert by_hand.code == 2
    assert "is being measured by process" in by_hand.err and by_hand.err.count("\n") == 1
    # Killed, not asked: no rank outlives it.
    everyone = [p for kind in family(process.pid).values() for p in kind]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert gone(everyone)


@pytest.mark.process
@pytest.mark.slow
def test_a_rank_does_not_outlive_torchrun(tmp_path: Path) -> None:
    """Also without a sweep, where a person started it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    flags = ["--tiny", "--epochs", "4000", "--output_dir", str(tmp_path)]
    torchrun = Python([*command, "vit.py", *flags])
    wait_for(lambda: any(read_rows(run.epochs)[0] for run in find_runs(tmp_path)))
    ranks = psutil.Process(torchrun.pid).children()
    assert len(ranks) == 2
    torchrun.kill()
    assert gone(ranks)

"""A run that stands still is found, named and ended."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import vit
from harness.train.run import watchdog
from harness.train.run.watchdog import Hung, Watchdog, takes_long
from tests.support.broken_runs import only_run
from tests.support.ranks import ran, run_script

ARGV = ["--tiny", "--train_size", "64", "--test_size", "16", "--epochs", "2", "--b", "8",
        "--setup", "1_2", "--telemetry_hz", "0", "--comm_probe", "off"]  # fmt: skip
WORLD = SimpleNamespace(rank=0, size=1, per_node=1)


@contextmanager
def alone(hang_after_s: float) -> Iterator[tuple[Watchdog, list[Hung]]]:
    """The watchdog of a process without others."""
    found: list[Hung] = []
    context: Any = SimpleNamespace(world=WORLD)
    dog = Watchdog(context, hang_after_s, found.append)
    dog.start()
    yield dog, found
    dog.close()
    for thread in dog.threads:
        thread.join()


def wait(seconds: float, found: list[Hung]) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not found:
        time.sleep(0.02)


def evaluate(seconds: float, found: list[Hung]) -> None:
    """By its name, it may take as long as it takes."""
    wait(seconds, found)


def step(dog: Watchdog) -> None:
    dog.on_step_end(None, None, None)


def test_a_process_that_stands_still_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    with alone(0.4) as (dog, found):
        wait(1, found)
        assert not found  # nothing was trained yet
        step(dog)
        wait(10, found)
    assert "no update for 0.4 s: rank 0 (node 0) in wait (test_watchdog.py:" in str(found[0])
    assert found[0].records
    stacks = capfd.readouterr().err
    assert "stacks of rank 0 (node 0):" in stacks and "in wait" in stacks


def test_what_takes_long_is_no_hang() -> None:
    with alone(0.4) as (dog, found):
        step(dog)
        evaluate(1.2, found)
        for _ in range(12):
            dog.on_substep_end(None, None, None)
            wait(0.1, found)
        dog.on_train_end(None, None, None)
        wait(1, found)
    assert not found


def test_a_step_may_take_three_times_the_longest() -> None:
    with alone(0.4) as (dog, found):
        step(dog)
        wait(0.3, found)
        step(dog)
        dog.slowest_s = 1.0
        wait(1.5, found)
        assert not found
        wait(5, found)
        assert found


def test_compiling_is_known_by_its_files() -> None:
    frame = SimpleNamespace(
        f_code=SimpleNamespace(co_name="f", co_filename="/torch/_dynamo/convert_frame.py"),
        f_back=None,
    )
    inner = SimpleNamespace(f_code=SimpleNamespace(co_name="g", co_filename="x.py"), f_back=frame)
    assert takes_long(inner)  # type: ignore[arg-type]
    assert not takes_long(None) and watchdog.where(None) == "no function"


def test_it_is_off_at_zero_and_for_peers() -> None:
    for hang_after, strategy, threads in ((0.0, "ddp", 0), (9.0, "hivemind", 0), (9.0, "ddp", 1)):
        settings = SimpleNamespace(hang_after=hang_after, strategy=strategy)
        context: Any = SimpleNamespace(world=WORLD, settings=settings)
        assert len(Watchdog.of(context, print).threads) == threads


def standing_still(name: str, argv: list[str], cwd: str, number: int, how: str) -> int:
    """The script, whose rank of this number stands still after its third update."""

    class Still(vit.Console):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            super().on_step_end(args, state, control, **kwargs)
            if state.global_step == 3 and args.process_index == number:
                os.kill(os.getpid(), signal.SIGSTOP) if how == "stopped" else sleep_for_ever()

    vit.Console = Still  # type: ignore[misc]
    return run_script(name, argv, cwd)


def sleep_for_ever() -> None:
    while True:
        time.sleep(1)


def reason_of(folder: Path, number: int, how: str, *argv: str) -> tuple[str, str]:
    """What is recorded of such a run, and what its ranks print."""
    stopped: list[psutil.Process] = []

    def kill_what_is_stopped() -> None:
        # As torchrun does, which gives a rank half a minute to end by itself.
        while not stopped and not done.wait(0.2):
            if any(folder.rglob("failure_*.json")) or any(folder.rglob("summary.json")):
                time.sleep(1)
                children = psutil.Process().children(recursive=True)
                stopped.extend(c for c in children if c.status() == psutil.STATUS_STOPPED)
                for child in stopped:
                    child.kill()

    done = threading.Event()
    killer = threading.Thread(target=kill_what_is_stopped)
    killer.start()
    try:
        ended = ran(2, standing_still, "vit", [*ARGV, *argv, "--o", str(folder)], ".", number, how)
    finally:
        done.set()
        killer.join()
    assert ended.code != 0 and bool(stopped) == (how == "stopped")
    summary = only_run(folder).read_summary()
    assert summary is not None and summary["outcome"] == "failed"
    return str(summary["reason"]), ended.err


@pytest.mark.process
@pytest.mark.parametrize("number", [0, 1])
def test_a_stopped_rank_is_found_and_named(tmp_path: Path, number: int) -> None:
    reason, printed = reason_of(tmp_path, number, "stopped", "--hang_after", "3")
    named = f"rank {number} (node 0) does not answer for 3 s: its process is stopped"
    assert reason == named
    if number:
        assert f"harness: {named}; stacks of rank 0 (node 0):" in printed
        assert "all_reduce" in printed or "backward" in printed


@pytest.mark.process
def test_a_rank_that_waits_for_ever_is_found_with_all_stacks(tmp_path: Path) -> None:
    reason, printed = reason_of(tmp_path, 1, "waiting", "--hang_after", "3")
    assert "no update for 3 s: rank 0 (node 0) in" in reason
    assert "rank 1 (node 0) in sleep_for_ever (test_watchdog.py:" in reason
    assert "stacks of rank 0 (node 0):" in printed


@pytest.mark.process
def test_the_timeout_of_collectives_takes_effect_on_gloo(tmp_path: Path) -> None:
    reason, _ = reason_of(tmp_path, 1, "stopped", "--hang_after", "0", "--ddp_timeout", "3")
    assert "3000ms" in reason

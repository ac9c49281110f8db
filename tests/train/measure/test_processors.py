"""Whose a machine's processor time was: a run's, or that of others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.train.measure import processors
from harness.train.measure.processors import Processors, others_share

BURN_S = 0.5
BURN = f"import time\nwhile time.process_time() < {BURN_S}: pass\n"


@pytest.mark.process
def test_what_a_process_starts_is_its_own_also_when_it_has_ended() -> None:
    ours, others = Processors([os.getpid()]), Processors([])
    subprocess.run([sys.executable, "-c", BURN], check=True)
    mine, theirs = ours.since_edge(), others.since_edge()
    assert mine["own_s"] > 0.9 * BURN_S and theirs["own_s"] == 0
    # Ended processes of others are in what the cores did; that is counted in 0.01 s.
    assert theirs["busy_s"] > 0.9 * BURN_S
    assert mine["machine"] == theirs["machine"]
    assert mine["core_s"] == pytest.approx(mine["seconds"] * (psutil.cpu_count() or 1))
    twice = Processors([os.getpid(), os.getpid()])
    assert twice.last[2] == pytest.approx(Processors([os.getpid()]).last[2], abs=0.1)
    ours.edge()
    assert ours.since_edge()["own_s"] < 0.5 * BURN_S


@pytest.mark.process
def test_a_process_that_still_runs_counts_with_the_one_that_started_it() -> None:
    parent = Processors([os.getpid()])
    endless = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        child = Processors([endless.pid])
        while child.since_edge()["own_s"] < 0.1:
            time.sleep(0.01)
        assert parent.since_edge()["own_s"] >= 0.1
    finally:
        endless.kill()
        endless.wait()


def test_a_process_that_is_gone_used_nothing() -> None:
    assert Processors([2**22 + 1]).since_edge()["own_s"] == 0


def test_a_machine_without_a_boot_id_is_told_by_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = Processors([]).since_edge()["machine"]
    monkeypatch.setattr(processors, "BOOT_ID", tmp_path / "none")
    assert Processors([]).since_edge()["machine"] not in (here, os.uname().nodename)


def test_networks_of_one_machine_are_told_apart_and_one_without_namespaces_has_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []
    for name in ("one", "two", "none"):
        (tmp_path / name).symlink_to(f"net:[{name}]")
        monkeypatch.setattr(processors, "NETWORK", str(tmp_path / name))
        seen.append(Processors([]).since_edge()["network"])
    (tmp_path / "none").unlink()
    seen += [Processors([]).since_edge()["network"] for _ in range(2)]
    assert seen[3] == seen[4] and len(set(seen)) == 4 and "one" not in seen[0]


def node(machine: str, busy_s: float, own_s: float, seconds: float = 10.0) -> dict[str, Any]:
    """Of two cores."""
    times = {"busy_s": busy_s, "own_s": own_s, "seconds": seconds, "core_s": 2 * seconds}
    return {"machine": machine, **times}


def test_the_share_of_others_is_that_of_the_busiest_machine() -> None:
    assert others_share([node("a", 15.0, 10.0)]) == 0.25
    assert others_share([node("a", 15.0, 10.0), node("b", 19.0, 5.0)]) == 0.7
    assert others_share([]) is None


def test_emulated_nodes_are_not_others_to_each_other() -> None:
    assert others_share([node("a", 18.0, 9.0), node("a", 18.2, 9.0, 10.1)]) == pytest.approx(
        0.2 / 20.2
    )


def test_counted_ticks_never_give_less_than_nothing_nor_more_than_all() -> None:
    assert others_share([node("a", 9.98, 10.0)]) == 0
    assert others_share([node("a", 20.3, 0.0)]) == 1


def test_too_short_a_time_tells_nothing() -> None:
    assert others_share([node("a", 0.1, 0.0, 0.1)]) is None
    assert others_share([node("a", -5.0, 0.0)]) is None  # the counter began again

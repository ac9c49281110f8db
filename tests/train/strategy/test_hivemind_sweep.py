"""Peers in a sweep: one per process of the set-up, and one record of them all."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from harness.core.records import find_runs, read_json, read_rows
from tests.support.sweeps import command, gone, launchers, sweep_file, wait_for
from tests.support.warm_sweeps import start

pytestmark = pytest.mark.process


def three_peers(folder: Path, **more: object) -> Path:
    named = "".join(f", {name}: {value}" for name, value in more.items())
    return sweep_file(
        folder,
        "script: vit\nsettings: {strategy: hivemind, setup: 3_1, per_gpu_batch: 16, "
        f"target_batch: 192, local_updates: true{named}}}",
    )


@pytest.mark.root
@pytest.mark.slow
def test_three_nodes_are_three_peers_and_a_lost_one_ends_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = ("--tiny", "--launcher", "netns", "--oversubscribe")
    runner = start(three_peers(tmp_path, epochs=4, link="2ms"), out, *flags)
    assert wait_for(lambda: list(out.glob("vit/*/*/ranks/rank_2.jsonl")), 120)
    everyone = psutil.Process(runner.pid).children(recursive=True)
    third = max(launchers(runner.pid), key=lambda p: p.pid)
    lost = [third, *third.children(recursive=True)]
    assert any("p2pd" in command(p) for p in lost)
    third.kill()
    assert gone(lost)
    printed, err = runner.communicate(timeout=200)
    assert runner.returncode == 0, printed + err
    assert gone(everyone)
    (folder,) = find_runs(out)
    summary, environment = read_json(folder.summary) or {}, read_json(folder.environment) or {}
    rows, _ = read_rows(folder.epochs)
    assert summary["outcome"] == "finished" and environment["nodes"] == 3
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4]
    assert [row["peers"] for row in rows][::3] == [3, 2]
    # All samples of all peers, whoever is there: as many as the updates that were planned.
    whole = rows[0]["updates"] * 192
    assert all(whole <= row["samples"] < 1.6 * whole for row in rows)
    assert summary["samples"] == sum(row["samples"] for row in rows)
    of_peers = read_json(folder.path / "peers.json") or {}
    assert sorted(peer["rank"] for peer in of_peers.values()) == [0, 1, 2]
    assert sum(peer["samples"] for peer in of_peers.values()) == summary["samples"]
    assert all(row["payload_bytes"] < row["network_sent_bytes"] for row in rows)
    # Each has its own file; evaluated was on one.
    ranks = [read_rows(folder.rank(rank))[0] for rank in range(3)]
    assert len(ranks[0]) == len(ranks[1]) == 4 and 1 <= len(ranks[2]) < 4
    assert "eval_accuracy" in ranks[0][0] and "eval_accuracy" not in ranks[1][0]


@pytest.mark.slow
def test_without_emulated_nodes_peers_share_this_machine(tmp_path: Path) -> None:
    out = tmp_path / "out"
    runner = start(three_peers(tmp_path, epochs=2), out, "--tiny", "--oversubscribe")
    assert wait_for(lambda: list(out.glob("vit/*/*/ranks/rank_2.jsonl")), 120)
    everyone = psutil.Process(runner.pid).children(recursive=True)
    assert len(everyone) > 3
    printed, err = runner.communicate(timeout=200)
    assert runner.returncode == 0 and gone(everyone), printed + err
    (folder,) = find_runs(out)
    rows, _ = read_rows(folder.epochs)
    assert [row["peers"] for row in rows] == [3, 3]
    assert all(row["network_sent_bytes"] is None for row in rows)
    environment = read_json(folder.environment) or {}
    assert environment["nodes"] == 3 and environment["launch"]["launcher"] == "local"

"""Real torchrun agents, one a node, that are killed, cut off the network, late and back again."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.records import read_json, read_rows
from tests.ranks import script
from tests.sweeps import wait_for
from tests.test_elastic import attempts_of
from tests.test_resume import only_run, rows_of, weights_of

ROOT = Path(__file__).resolve().parents[1]
ARGV = [
    "--tiny", "--train_size", "640", "--test_size", "65", "--epochs", "3", "--b", "16",
    "--dropout", "0", "--save_steps", "5", "--setup", "2_1",
]  # fmt: skip
RENDEZVOUS = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=4,read_timeout=20"


class Nodes:
    """A store and the agents that meet there, each where `inside` puts it."""

    def __init__(self, folder: Path, addresses: dict[str, str], inside: Any) -> None:
        self.folder, self.addresses, self.inside = folder, addresses, inside
        self.planted = folder / "planted"
        self.planted.mkdir()
        self.port = free_port()
        self.started: list[subprocess.Popen[bytes]] = []
        store = self._start("store", ["-m", "harness", "store", str(self.port)])
        wait_for(lambda: "meets here" in self.log("store"))
        assert store.poll() is None

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _start(self, node: str, words: list[str], **env: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{node}.log").open("ab") as log:
            process = subprocess.Popen(
                [*self.inside(node), sys.executable, *words],
                cwd=ROOT, env={**os.environ, **env}, stdout=log, stderr=log,
            )  # fmt: skip
        self.started.append(process)
        return process

    def agent(self, node: str, *argv: str, **env: str) -> subprocess.Popen[bytes]:
        return self._start(
            node,
            ["-m", "torch.distributed.run", "--nnodes=1:2", "--nproc_per_node=1",
             "--max_restarts=3", "--rdzv_backend=c10d",
             f"--rdzv_endpoint={self.addresses['store']}:{self.port}",
             f"--rdzv_conf=is_host=0,{RENDEZVOUS}", f"--local_addr={self.addresses[node]}",
             "--monitor_interval=0.1", "tests/planted.py", *ARGV, *argv,
             "--o", str(self.folder / "out")],
            NODE=node, PLANTED=str(self.planted), TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", **env,
        )  # fmt: skip

    def plant(self, *faults: str) -> None:
        for fault in faults:
            (self.planted / fault).touch()

    def reached(self, fault: str) -> bool:
        file = self.planted / "reached"
        return file.exists() and file.read_text() == fault

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def same_training(folder: Path, other: Path) -> None:
    """What the undisturbed run of the whole set-up gives, to rounding."""
    argv = [*ARGV, "--o", str(other)]
    done = script("vit", *argv, count=2, env={"LOCAL_WORLD_SIZE": "1"})
    assert done.code == 0, done.err
    elastic, undisturbed = only_run(folder), only_run(other)
    for row, expected in zip(rows_of(elastic), rows_of(undisturbed), strict=True):
        assert row == pytest.approx(expected, rel=1e-4)
    expected_weights = weights_of(undisturbed)
    for key, weight in weights_of(elastic).items():
        torch.testing.assert_close(weight, expected_weights[key], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_nodes_that_are_late_killed_and_back(tmp_path: Path) -> None:
    """B comes late, its process is killed, then the whole node; at last it is back."""
    nodes = Nodes(tmp_path, dict.fromkeys(("store", "A", "B"), "127.0.0.1"), lambda node: [])
    try:
        nodes.plant("8.A.wait", "17.B.rank", "28.B.agent", "38.A.wait")
        # Every attempt is told to run again: only the first must set a record aside.
        first = nodes.agent("A", "--rerun")
        wait_for(lambda: nodes.reached("8.A.wait"))
        second = nodes.agent("B", "--rerun")
        assert second.wait(timeout=100) == -9
        wait_for(lambda: nodes.reached("38.A.wait"))
        third = nodes.agent("B", "--rerun")
        assert first.wait(timeout=60) == third.wait(timeout=60) == 0, nodes.log("A")
    finally:
        nodes.end()
    folder = only_run(tmp_path / "out")
    starts, ends = attempts_of(folder)
    assert [s["processes"] for s in starts] == [1, 2, 2, 1, 2]
    assert [s["effective_batch"] for s in starts] == [32] * 5
    assert [s["from_update"] for s in starts] == [0, 5, 15, 25, 35]
    assert [s["redone_updates"] for s in starts] == [None, 3, 2, 3, 3]
    assert [e["update"] for e in ends] == [8, 17, 28, 38, 60]
    assert [e["outcome"] for e in ends] == [
        "interrupted", "failed", "failed", "interrupted", "finished",
    ]  # fmt: skip
    assert all(s["gap_s"] > 0 and s["lost_s"] > s["gap_s"] for s in starts[1:])
    summary = read_json(folder.summary)
    assert summary is not None
    assert (summary["outcome"], summary["restarts"], summary["redone_updates"]) == (
        "finished", 4, 11,
    )  # fmt: skip
    assert 0 < summary["goodput_share"] < summary["train_time_s"] / summary["wall_s"]
    same_training(tmp_path / "out", tmp_path / "whole")


@pytest.fixture
def namespaces() -> Iterator[str]:
    """Three network namespaces on one bridge, as nodes on a switch: store, A and B."""
    name = f"el{os.getpid()}"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for node in ("store", "A", "B"):
            ip("netns", "add", f"{name}{node}")
            ip("-n", f"{name}{node}", "link", "set", "lo", "up")
        switch = f"{name}store"
        ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        ip("-n", switch, "addr", "add", "10.213.7.1/24", "dev", "bridge0")
        ip("-n", switch, "link", "set", "bridge0", "up")
        for number, node in enumerate(("A", "B"), start=2):
            ip("-n", f"{name}{node}", "link", "add", "net0", "type", "veth",
               "peer", "name", f"to{node}", "netns", switch)  # fmt: skip
            ip("-n", f"{name}{node}", "addr", "add", f"10.213.7.{number}/24", "dev", "net0")
            ip("-n", f"{name}{node}", "link", "set", "net0", "up")
            ip("-n", switch, "link", "set", f"to{node}", "master", "bridge0", "up")
        yield name
    finally:
        for node in ("store", "A", "B"):
            subprocess.run(["ip", "netns", "del", f"{name}{node}"], capture_output=True)


@pytest.mark.slow
@pytest.mark.root
def test_a_node_that_is_cut_off_the_network(namespaces: str, tmp_path: Path) -> None:
    """Nothing arrives any more, not even an end. It is the node of rank 0, if it can be."""
    addresses = {"store": "10.213.7.1", "A": "10.213.7.2", "B": "10.213.7.3"}
    nodes = Nodes(tmp_path, addresses, lambda node: ["ip", "netns", "exec", f"{namespaces}{node}"])
    try:
        nodes.plant("8.A.pause")
        agents = {n: nodes.agent(n, "--ddp_timeout", "8", GLOO_SOCKET_IFNAME="net0") for n in "AB"}
        wait_for(lambda: nodes.reached("8.A.pause"))
        cut = ["ip", "-n", f"{namespaces}A", "link", "set", "net0", "down"]
        subprocess.run(cut, check=True)
        nodes.plant("go")
        assert agents["B"].wait(timeout=80) == 0, nodes.log("B")
        assert agents["A"].poll() is None  # it waits for the network
    finally:
        nodes.end()
    folder = only_run(tmp_path / "out")
    starts, ends = attempts_of(folder)
    assert [s["processes"] for s in starts] == [2, 1]
    assert starts[1]["from_update"] == 5 and starts[1]["redone_updates"] == 3
    assert ends[0]["outcome"] == "failed" and "Timed out" in ends[0]["reason"]
    assert starts[1]["lost_s"] > 8
    assert folder.outcome() == "finished"
    assert read_rows(folder.epochs)[0][-1]["effective_batch"] == 32
    same_training(tmp_path / "out", tmp_path / "whole")

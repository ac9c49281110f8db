"""Real torchrun agents on emulated nodes: killed, cut off the network, late and back again.

They and their ranks are forked; test_netns.py has some that are not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness.core.links import Link
from harness.core.records import RunFolder, read_json, read_rows
from harness.launch.netns.emulation import EmulatedNodes
from tests.support.broken_runs import attempts_of, only_run, weights_of
from tests.support.ranks import script
from tests.support.sweeps import untimed_rows, wait_for
from tests.support.warm_python import Python

pytestmark = pytest.mark.process

ARGV = [
    "--tiny", "--train_size", "640", "--test_size", "65", "--epochs", "3", "--b", "16",
    "--dropout", "0", "--save_steps", "5", "--setup", "2_1",
    # By direct sends a node may have all of an update when it is cut off, and complete it.
    "--exchange", "backend",
]  # fmt: skip
PORT = 29400
PATIENCE_S = 150
RENDEZVOUS = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=4,read_timeout=20"


class Nodes:
    """A store and the agents that meet there, each on a node of its own."""

    numbers = {"store": 0, "A": 1, "B": 2}  # noqa: RUF012

    def __init__(self, folder: Path, emulated: EmulatedNodes) -> None:
        self.folder, self.emulated = folder, emulated
        self.planted = folder / "planted"
        self.planted.mkdir()
        self.started: list[Python] = []
        store = self._start("store", ["-m", "harness", "store", f"{self.address('store')}:{PORT}"])
        wait_for(lambda: "meets here" in self.log("store"))
        assert store.poll() is None

    def log(self, name: str) -> str:
        log = self.folder / f"{name}.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def _start(self, node: str, arguments: list[str], **env: str) -> Python:
        words = [*self.emulated.enter(self.numbers[node]), sys.executable, *arguments]
        env["GLOO_SOCKET_IFNAME"] = "link0"
        self.started.append(Python(words, env, log=self.folder / f"{node}.log"))
        return self.started[-1]

    def agent(self, node: str, *argv: str, **env: str) -> Python:
        return self._start(
            node,
            ["-m", "harness.train.torchrun", "--nnodes=1:2", "--nproc_per_node=1",
             "--max_restarts=3", "--rdzv_backend=c10d",
             f"--rdzv_endpoint={self.address('store')}:{PORT}",
             f"--rdzv_conf=is_host=0,{RENDEZVOUS}", f"--local_addr={self.address(node)}",
             "--monitor_interval=0.1", "tests/support/planted.py", *ARGV, *argv,
             "--o", str(self.folder / "out")],
            NODE=node, PLANTED=str(self.planted), TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", **env,
        )  # fmt: skip

    def address(self, node: str) -> str:
        return self.emulated.nodes[self.numbers[node]].address

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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The run of the whole set-up, from which no node is lost."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = script("vit", *ARGV, "--o", str(folder), count=2, env={"LOCAL_WORLD_SIZE": "1"})
    assert done.code == 0, done.err
    return only_run(folder)


def same_training(folder: Path, undisturbed: RunFolder) -> None:
    """What the undisturbed run gives, to rounding."""
    elastic = only_run(folder)
    for row, expected in zip(untimed_rows(elastic), untimed_rows(undisturbed), strict=True):
        # Fewer processes hand over less.
        assert row.pop("payload_bytes") <= expected.pop("payload_bytes")
        assert row == pytest.approx(expected, rel=1e-4)
    expected_weights = weights_of(undisturbed)
    for key, weight in weights_of(elastic).items():
        torch.testing.assert_close(weight, expected_weights[key], rtol=1e-3, atol=1e-5)


@pytest.fixture
def emulated() -> Iterator[EmulatedNodes]:
    with EmulatedNodes.open(3, Link(delay_ms=1)) as nodes:
        yield nodes


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(600)
def test_nodes_that_are_late_killed_and_back(
    emulated: EmulatedNodes, undisturbed: RunFolder, tmp_path: Path
) -> None:
    """B comes late, its process is killed, then the whole node; at last it is back."""
    nodes = Nodes(tmp_path, emulated)
    try:
        nodes.plant("8.A.wait", "17.B.rank", "28.B.agent", "38.A.wait")
        # Every attempt is told to run again: only the first must set a record aside.
        first = nodes.agent("A", "--rerun")
        wait_for(lambda: nodes.reached("8.A.wait"))
        second = nodes.agent("B", "--rerun")
        assert second.wait(PATIENCE_S) == -9
        wait_for(lambda: nodes.reached("38.A.wait"))
        third = nodes.agent("B", "--rerun")
        assert first.wait(PATIENCE_S) == third.wait(PATIENCE_S) == 0, nodes.log("A")
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
    same_training(tmp_path / "out", undisturbed)


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(600)
def test_a_node_that_is_cut_off_the_network(
    emulated: EmulatedNodes, undisturbed: RunFolder, tmp_path: Path
) -> None:
    """Nothing arrives any more, not even an end. It is the node of rank 0, if it can be."""
    nodes = Nodes(tmp_path, emulated)
    try:
        nodes.plant("8.A.pause")
        agents = {n: nodes.agent(n, "--ddp_timeout", "8") for n in "AB"}
        wait_for(lambda: nodes.reached("8.A.pause"))
        emulated.cut(nodes.numbers["A"])
        nodes.plant("go")
        assert agents["B"].wait(PATIENCE_S) == 0, nodes.log("B")
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
    same_training(tmp_path / "out", undisturbed)

"""A run over several nodes: one fails, one is lost, one comes back. The nodes are puppets here."""

from __future__ import annotations

import itertools
import json
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from harness.core.process import OutOfMemory, is_stopped
from harness.core.settings import UserError
from harness.launch import agents
from harness.launch import launcher as supervisor
from harness.launch.agents import LaunchRequest, Node, TorchrunAgent, WarmAgent
from harness.launch.launcher import Exit, Launcher
from harness.launch.plan import Elastic, Job, torchrun
from tests.support.sweeps import jobs_of, wait_for

NODES = [Node(f"node{n}", f"10.0.0.{n + 1}") for n in range(3)]
READY = {"event": "ready", "cuda_in_server": False}


class Puppet(WarmAgent):
    """A warm agent that has no process, and reports what a test makes it report."""

    made: ClassVar[list[Puppet]] = []
    usable = True  # type: ignore[assignment]

    def __init__(self, node: Node, environment: Any, log: Path) -> None:
        self.node, self.ready, self.opened_s = node, False, time.monotonic()
        self.messages: list[Any] = []
        self.events: list[dict[str, Any]] = [READY]
        self.killed = False
        Puppet.made.append(self)

    def _send(self, message: Any) -> None:
        self.messages.append(message)
        if message["do"] == "port":
            self.events.append({"event": "port", "port": 4000 + len(self.messages)})

    def receive(self) -> list[dict[str, Any]]:
        events, self.events = self.events, []
        return events

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None: ...

    def last_line(self) -> str:
        return "Connection refused"

    def ends(self, code: int = 0, **more: Any) -> None:
        self.events.append({"event": "ended", "code": code, "failures": [], **more})

    def dies(self, code: int = -9) -> None:
        self.events.append({"event": "died", "code": code})

    def requests(self, what: str) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["do"] == what]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (job,) = jobs_of(tmp_path, "script: vit\nsettings: {setup: 3_1}")
    return job


@pytest.fixture
def start(tmp_path: Path, job: Job) -> Callable[..., Launcher]:
    """A run that its nodes have not got yet."""
    Puppet.made = []

    def begin(elastic: Elastic | None = None) -> Launcher:
        launcher = Launcher(NODES, {}, tmp_path / "launcher.txt", Puppet)
        log = tmp_path / "log.txt"
        launcher.begin(LaunchRequest(job, ("--tiny",), {}, None, log, elastic=elastic))
        return launcher

    return begin


Begin = Callable[..., tuple[Launcher, list[Puppet]]]


@pytest.fixture
def begin(start: Callable[..., Launcher]) -> Begin:
    """A run that goes on, on three nodes."""

    def run(elastic: Elastic | None = None) -> tuple[Launcher, list[Puppet]]:
        launcher = start(elastic)
        assert launcher.poll() is None  # all are ready: the first is asked for a port
        assert launcher.poll() is None  # which all get with the run
        return launcher, list(Puppet.made)

    return run


def test_all_nodes_get_the_run_with_one_place_to_meet(begin: Begin) -> None:
    launcher, puppets = begin()
    requests = [puppet.requests("run")[0] for puppet in puppets]
    assert {r["rendezvous"] for r in requests} == {"10.0.0.1:4001"}
    assert [(r["node"], r["nodes"], r["address"]) for r in requests] == [
        (0, 3, "10.0.0.1"), (1, 3, "10.0.0.2"), (2, 3, "10.0.0.3")
    ]  # fmt: skip
    for puppet in puppets:
        assert launcher.poll() is None
        puppet.ends()
    assert launcher.poll() == Exit(0)


def test_nothing_is_sent_before_all_are_there(
    monkeypatch: pytest.MonkeyPatch, start: Callable[..., Launcher]
) -> None:
    launcher = start()
    late = Puppet.made[2]
    late.events = []
    for _ in range(3):
        assert launcher.poll() is None and not launcher.ready
    assert not Puppet.made[0].messages
    monkeypatch.setattr(supervisor, "READY_S", -1.0)
    with pytest.raises(UserError, match="node2 has not answered for"):
        launcher.poll()


def test_a_run_that_is_stopped_before_it_began_does_not_begin(
    start: Callable[..., Launcher],
) -> None:
    launcher = start()
    launcher.stop()
    assert launcher.poll() == Exit(143)
    assert not any(puppet.requests("run") for puppet in Puppet.made)


@pytest.mark.parametrize("loaded", [False, True])
def test_an_agent_that_is_killed_before_it_got_the_run(
    loaded: bool, start: Callable[..., Launcher]
) -> None:
    launcher = start()
    if loaded:
        assert launcher.poll() is None  # the first is asked for a port, and has not answered
    Puppet.made[0].events = []
    Puppet.made[1].dies()
    assert launcher.poll() == Exit(
        -9, error="the launcher on node 1 was killed", launcher_died=True
    )
    assert not any(puppet.requests("run") for puppet in Puppet.made)


def test_an_agent_that_died_between_two_runs_is_replaced(begin: Begin) -> None:
    launcher, puppets = begin()
    for puppet in puppets:
        puppet.ends()
    assert launcher.poll() == Exit(0)
    puppets[1].usable = False  # type: ignore[misc]
    launcher.begin(launcher.attempt.request)
    assert [puppet.node.name for puppet in Puppet.made[3:]] == ["node1"]
    assert launcher.poll() is None and launcher.poll() is None
    assert len(puppets[0].requests("run")) == 2 and len(Puppet.made[3].requests("run")) == 1


@pytest.mark.parametrize("elastic", [None, Elastic(3, 1)])
@pytest.mark.parametrize("meets", [True, False])
def test_a_node_that_is_not_in_the_run_may_die(
    begin: Begin, tmp_path: Path, meets: bool, elastic: Elastic | None
) -> None:
    launcher, puppets = begin()
    for puppet in puppets:
        puppet.ends()
    assert launcher.poll() == Exit(0)
    (smaller,) = jobs_of(tmp_path, "script: vit\nsettings: {setup: 2_1}")
    launcher.begin(replace(launcher.attempt.request, job=smaller, elastic=elastic))
    port = [puppets[0].events.pop()]  # the first node takes its time to choose it
    if not meets:
        puppets[0].events, port = port, []
        assert launcher.poll() is None
    puppets[2].dies(255)
    assert launcher.poll() is None
    assert not launcher.attempt.lost and not launcher.attempt.exits
    puppets[0].events += port
    assert launcher.poll() is None
    puppets[0].ends()
    puppets[1].ends()
    assert launcher.poll() == Exit(0)


def test_the_first_failure_stops_the_others(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, (first, second, third) = begin()
    failure = {"rank": 1, "exit_code": 3, "unix": 5.0}
    second.ends(1, failures=[failure])
    assert launcher.poll() is None
    assert first.requests("stop") and third.requests("stop") and not second.requests("stop")
    first.ends(143)
    assert launcher.poll() is None and not third.killed
    monkeypatch.setattr(supervisor, "GRACE_S", -1.0)
    assert launcher.poll() is None and third.killed  # it did not obey
    third.dies()
    ending = launcher.poll()
    # The node that was killed because it did not exit is not the cause.
    assert ending == Exit(1, [failure])


def test_a_node_that_is_lost_is_the_reason(begin: Begin) -> None:
    launcher, (first, second, third) = begin()
    third.dies(255)
    assert launcher.poll() is None and first.requests("stop")
    first.ends(1, failures=[{"rank": 0, "exit_code": 1, "unix": 1.0}], error="connection reset")
    second.ends(143)
    ending = launcher.poll()
    assert ending is not None and ending.launcher_died and ending.error == "node 2 is lost"
    # The next run gets a new agent there.
    launcher.begin(launcher.attempt.request)
    assert len(Puppet.made) == 4 and Puppet.made[3].node.name == "node2"


def test_a_launcher_that_does_not_answer_is_ended_and_named(begin: Begin) -> None:
    launcher, (first, second, third) = begin()
    assert launcher.poll() is None and not third.killed
    third.heard_s -= 121  # --hang_after is 120
    assert launcher.poll() is None and third.killed and not first.killed
    third.dies()
    launcher.poll()
    first.ends(143)
    second.ends(143)
    ending = launcher.poll()
    assert ending is not None and ending.launcher_died
    assert ending.error == "the launcher on node 2 has not answered for 120 s"


@pytest.mark.process
def test_a_torchrun_that_is_stopped_gives_no_sign_of_life(tmp_path: Path) -> None:
    agent = TorchrunAgent(Node(), {}, tmp_path / "log")
    agent.process = subprocess.Popen(["sleep", "60"])
    try:
        assert agent.receive() == []
        heard_s = agent.heard_s
        assert agent.receive() == [] and agent.heard_s > heard_s
        agent.process.send_signal(signal.SIGSTOP)
        assert wait_for(lambda: is_stopped(agent.process.pid))  # type: ignore[union-attr]
        heard_s = agent.heard_s
        assert agent.receive() == [] and agent.heard_s == heard_s
    finally:
        agent.close()


def test_a_node_that_does_not_reach_the_first_is_named(begin: Begin) -> None:
    launcher, (first, second, third) = begin()
    third.ends(1, error="the first node cannot be reached from here (timed out)")
    launcher.poll()
    first.ends(143)
    second.ends(143)
    ending = launcher.poll()
    assert ending is not None and ending.error == (
        "node 2: the first node cannot be reached from here (timed out)"
    )


def test_a_node_that_does_not_even_start(begin: Begin) -> None:
    launcher, puppets = begin()
    puppets[1].ready = False
    puppets[1].dies(1)
    with pytest.raises(UserError, match="what training needs does not start on node1: see"):
        launcher.poll()


def test_a_port_that_somebody_else_was_quicker_to_take(begin: Begin) -> None:
    launcher, puppets = begin()
    for left in (2, 1):
        puppets[0].ends(1, error="DistNetworkError: EADDRINUSE")
        assert launcher.poll() is None
        for other in puppets[1:]:
            other.ends(143)
        assert launcher.poll() is None
        assert launcher.attempt.tries == left
        launcher.poll(), launcher.poll()
        assert len(puppets[2].requests("run")) == 4 - left
    ports = [request["rendezvous"] for request in puppets[1].requests("run")]
    assert len(set(ports)) == 3
    for puppet in puppets:
        puppet.ends(1, error="DistNetworkError: EADDRINUSE")
    ending = launcher.poll()
    assert ending is not None and "EADDRINUSE" in str(ending.error)


def test_an_elastic_run_goes_on_without_a_node_and_takes_it_back(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, (first, second, third) = begin(Elastic(max_restarts=3, min_nodes=2))
    request = third.requests("run")[0]
    assert (request["min_nodes"], request["nodes"], request["max_restarts"]) == (2, 3, 3)
    configs = [p.requests("run")[0]["rendezvous_config"] for p in (first, second, third)]
    assert [config["is_host"] for config in configs] == [1, 0, 0]
    third.dies()
    assert launcher.poll() is None and not first.requests("stop")
    monkeypatch.setattr(supervisor, "RETRY_S", -1.0)
    launcher.poll()
    back = Puppet.made[3]
    assert back.node.name == "node2" and not back.requests("run")  # not before it is ready
    launcher.poll()
    assert back.requests("run") == [request]
    for puppet in (first, second, back):
        puppet.ends()
    assert launcher.poll() == Exit(0)


@pytest.fixture
def peers(begin: Begin, job: Job) -> tuple[Launcher, list[Puppet]]:
    """A run whose nodes need no launcher to go on without each other."""
    launcher, puppets = begin()
    assert puppets[0].requests("run")[0]["exit_barrier_s"] is None
    as_peers = replace(job, settings=replace(job.settings, strategy="hivemind"))
    launcher.attempt.request = replace(launcher.attempt.request, job=as_peers)
    return launcher, puppets


def test_peers_go_on_without_each_other(peers: tuple[Launcher, list[Puppet]]) -> None:
    launcher, (first, second, third) = peers
    second.ends(1, failures=[{"rank": 1, "exit_code": -9, "unix": 5.0}])
    third.dies()
    assert launcher.poll() is None and not first.requests("stop")
    first.ends()
    assert launcher.poll() == Exit(0)  # it has the record
    # The next run gets a new agent where one was lost.
    launcher.begin(launcher.attempt.request)
    assert len(Puppet.made) == 4 and Puppet.made[3].node.name == "node2"


def test_peers_that_do_not_end_with_the_first_are_ended(
    peers: tuple[Launcher, list[Puppet]], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, (first, second, third) = peers
    first.ends(3, failures=[{"rank": 0, "exit_code": 3, "unix": 5.0}])
    third.ends(1)
    assert launcher.poll() is None and not second.requests("stop") and not second.killed
    monkeypatch.setattr(supervisor, "GRACE_S", -1.0)
    assert launcher.poll() is None and second.killed
    second.dies()
    ending = launcher.poll()
    assert ending is not None and (ending.code, ending.launcher_died) == (3, False)
    assert [failure["rank"] for failure in ending.failures] == [0]


@pytest.mark.parametrize("lost", [(0,), (1, 2)], ids=["the first", "too many"])
def test_an_elastic_run_cannot_lose_everything(begin: Begin, lost: tuple[int, ...]) -> None:
    launcher, puppets = begin(Elastic(max_restarts=3, min_nodes=2))
    for number in lost:
        puppets[number].dies()
        launcher.poll()
    for number, puppet in enumerate(puppets):
        if number not in lost:
            assert puppet.requests("stop")
            puppet.ends(143)
    ending = launcher.poll()
    assert ending is not None and ending.launcher_died
    assert ending.error == f"the launcher on node {lost[-1]} was killed"


def test_torchrun_of_an_elastic_run(job: Job) -> None:
    assert torchrun(job, 1, "a", 29500, Elastic(3, 1)) == [
        "--nnodes=1:3", "--nproc_per_node=1", "--max_restarts=3", "--rdzv_backend=c10d",
        "--rdzv_endpoint=a:29500",
        "--rdzv_conf=is_host=0,last_call_timeout=5,keep_alive_interval=1,"
        "keep_alive_max_attempt=5,read_timeout=20",
    ]  # fmt: skip
    assert torchrun(job, 0, "a", 29500, Elastic(3))[0] == "--nnodes=3:3"
    assert torchrun(job, 0, "a", 29500, Elastic(3), "10.0.0.1")[-1] == "--local_addr=10.0.0.1"


class Quiet:
    """A torchrun that ends when a test says so."""

    pid, stdin, stdout, stderr = 0, None, None, None

    def __init__(self) -> None:
        self.code: int | None = None
        self.signals: list[str] = []

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.signals.append("term")

    def kill(self) -> None:
        if self.code is None:
            self.signals.append("kill")

    def wait(self) -> None: ...


Torchruns = Callable[[Job], tuple[Launcher, list[Quiet]]]


@pytest.fixture
def torchruns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Torchruns:
    """A cold run that goes on, and the torchrun of each of its nodes."""
    started: list[Quiet] = []

    def run(job: Job) -> tuple[Launcher, list[Quiet]]:
        monkeypatch.setattr(Node, "start", lambda *_, **__: started.append(Quiet()) or started[-1])
        launcher = Launcher(NODES, {}, tmp_path / "launcher.txt", TorchrunAgent)
        launcher.begin(LaunchRequest(job, (), {}, None, tmp_path / "log.txt"))
        assert launcher.ready and launcher.poll() is None
        return launcher, started

    return run


def test_torchrun_on_each_node_ends_with_the_first_that_fails(
    job: Job, torchruns: Torchruns, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, (one, other, third) = torchruns(job)
    one.code = 7
    assert launcher.poll() is None and other.signals == third.signals == ["term"]
    third.code = 1
    monkeypatch.setattr(supervisor, "GRACE_S", -1.0)
    assert launcher.poll() is None and other.signals == ["term", "kill"]
    other.code = -9
    assert launcher.poll() == Exit(7)


LOST = """{0}Failures:
{0}[1]:
{0}  time      : 2026-01-02_03:04:05
{0}  host      : localhost
{0}  rank      : {1} (local_rank: 0)
{0}  exitcode  : -9 (pid: 16577) (SIGKILL)
"""


@pytest.mark.parametrize("kills", [0, 1])
def test_the_ranks_that_torchrun_has_lost_are_those_that_it_prints(
    kills: int, job: Job, torchruns: Torchruns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = itertools.chain([3, 3, 3], itertools.repeat(3 + kills))
    monkeypatch.setattr(agents.OutOfMemory, "now", lambda: OutOfMemory(next(counts), 0, 0))
    launcher, (one, other, third) = torchruns(job)
    (tmp_path / "log.txt").write_text(LOST.format("", 5) + LOST.format("", 1))
    one.code = other.code = third.code = 1
    found = launcher.poll()
    assert found is not None and {f["rank"] for f in found.failures} == {1, 5}
    assert all(f["exit_code"] == -9 for f in found.failures)
    lacked = "the machine or a control group" if kills else None
    assert {f["no_memory"] for f in found.failures} == {lacked}


def test_the_reason_is_read_from_what_torchrun_printed(tmp_path: Path) -> None:
    log, reason = tmp_path / "log.txt", "rank 1 (node 0) has not answered for 3 s: its process is"
    log.write_text(f"harness: {reason} stopped\n" + LOST.format("", 1) + LOST.format("", 0))
    told = {failure["rank"]: failure["stopped"] for failure in agents.failures_in(log)}
    assert told == {1: f"{reason} stopped", 0: None}


def test_the_lines_of_another_host_have_its_mark(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(LOST.format("[b] ", 1) + LOST.format("[a] ", 0))
    assert [f["rank"] for f in agents.failures_in(log, "[b] ")] == [1]
    assert agents.failures_in(tmp_path / "none") == []


def test_torchrun_of_peers_goes_on_without_a_node(
    job: Job, torchruns: Torchruns, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_peers = replace(job, settings=replace(job.settings, strategy="hivemind"))
    launcher, (one, other, third) = torchruns(as_peers)
    other.code = 1
    assert launcher.poll() is None and not one.signals
    one.code = 0
    assert launcher.poll() is None and not third.signals
    monkeypatch.setattr(supervisor, "GRACE_S", -1.0)
    assert launcher.poll() is None and third.signals == ["kill"]
    third.code = -9
    assert launcher.poll() == Exit(0)


class NoisyHost(Node):
    """Its shell prints a line when it starts, as a .bashrc may."""

    def start(self, *_: Any, **pipes: Any) -> subprocess.Popen[bytes]:
        told = ["Hello", '{"load": 2}', '{"event": "ended"}', '{"event": [1]}', json.dumps(READY)]
        lines = "".join(f"echo {shlex.quote(line)}; " for line in told)
        return subprocess.Popen(["sh", "-c", f"{lines} cat"], **pipes)


@pytest.mark.process
def test_a_line_of_a_shell_is_no_event(tmp_path: Path) -> None:
    agent = WarmAgent(NoisyHost("a"), {}, tmp_path / "log")
    assert agent.process is not None and agent.process.stdin is not None
    agent.process.stdin.close()
    agent.process.wait(10)
    assert agent.receive() == [READY, {"event": "died", "code": 0}]
    agent.close()

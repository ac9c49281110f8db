"""Starts a run on its nodes and supervises it there, with any kind of agent."""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import IO

from harness.core.process import GRACE_S
from harness.core.settings import UserError
from harness.launch.agents import (
    Agent,
    Event,
    FailedRank,
    LaunchRequest,
    Node,
    Rendezvous,
    WarmAgent,
)

READY_S = 300.0  # for loading libraries, even from a slow disk
RETRY_S = 5.0  # between two attempts to reach a node that an elastic run has lost
TRIES = 3  # to find a port that no other process takes meanwhile


@dataclass(frozen=True)
class Exit:
    """How a run ended, as its launcher or a cluster saw it from outside."""

    code: int
    failures: list[FailedRank] = field(default_factory=list)
    error: str | None = None
    launcher_died: bool = False
    verdict: tuple[str, str] | None = None  # outcome and reason, where a cluster gave them
    wall_s: float | None = None  # None: from the start until now


class Phase(Enum):
    """Progress of a launcher's current run."""

    LOADING = auto()  # agents load the libraries
    MEETING = auto()  # the first node has been asked for a free port
    RUNNING = auto()
    ENDING = auto()  # a node failed or rank 0 is done: the other nodes have GRACE_S to exit


@dataclass
class Attempt:
    """One try to run a job on its nodes."""

    request: LaunchRequest
    tries: int = TRIES  # tries left, if another process takes the port
    phase: Phase = Phase.LOADING
    meeting: Rendezvous | None = None
    running: set[int] = field(default_factory=set)  # nodes on which the run is active
    lost: dict[int, float] = field(default_factory=dict)  # nodes it continues without; since when
    killed: set[int] = field(default_factory=set)  # nodes that did not exit in time
    silent: set[int] = field(default_factory=set)  # nodes killed because they did not answer
    exits: dict[int, Exit] = field(default_factory=dict)  # by node, in the order of their end
    ending_s: float = 0.0

    def end(self) -> None:
        self.phase, self.ending_s = Phase.ENDING, time.monotonic()


class Launcher:
    """Runs one job at a time; when it is closed, everything that it started has ended.

    The first failure ends the run on all nodes. Where the strategy survives the loss of nodes, a
    run goes on until its first node is done; an elastic run goes on while enough nodes are left,
    and takes back those that it lost.
    """

    attempt: Attempt  # set by begin()

    def __init__(
        self,
        nodes: Sequence[Node],
        environment: Mapping[str, str],
        log: Path,
        agent_type: Callable[[Node, Mapping[str, str], Path], Agent] = WarmAgent,
    ) -> None:
        self.nodes, self.environment, self.log = nodes, environment, log
        self.agent_type = agent_type
        self.agents: dict[int, Agent] = {}

    @property
    def ready(self) -> bool:
        """Whether the libraries are loaded on all nodes."""
        return self.attempt.phase is not Phase.LOADING

    @property
    def streams(self) -> Iterator[IO[bytes]]:
        """The streams that become readable when there is news."""
        yield from (agent.output for agent in self.agents.values() if agent.output is not None)

    def begin(self, request: LaunchRequest) -> None:
        self.attempt = Attempt(request)
        for number in range(request.job.nodes):
            if number in self.agents and not self.agents[number].usable:  # died between two runs
                self.agents.pop(number).close()
            if number not in self.agents:
                self._open(number)
            self.agents[number].run_log = request.log
        self._meet_when_ready()

    def poll(self) -> Exit | None:
        """How the run ended; None while it is running."""
        for number, agent in list(self.agents.items()):
            for event in agent.receive():
                self._handle(number, agent, event)
        self._meet_when_ready()
        self._check_deadlines()
        self._readmit()
        attempt = self.attempt
        return self._result() if attempt.exits and not attempt.running else None

    def stop(self) -> None:
        """Ask the ranks to record and exit."""
        if self.attempt.phase in (Phase.LOADING, Phase.MEETING):
            self.attempt.exits = {0: Exit(128 + signal.SIGTERM)}
            self.attempt.end()
        for agent in self.agents.values():
            agent.stop()

    def kill(self) -> None:
        """Kill everything now."""
        for agent in self.agents.values():
            agent.kill()

    def close(self) -> None:
        """End everything and wait until it has ended."""
        for agent in self.agents.values():
            agent.close()
        self.agents = {}

    def _open(self, number: int) -> Agent:
        agent = self.agent_type(self.nodes[number], self.environment, self.log)
        agent.run_log = self.attempt.request.log
        self.agents[number] = agent
        return agent

    def _meet_when_ready(self) -> None:
        """Once every node is ready, ask the first one for a port."""
        attempt = self.attempt
        nodes = range(attempt.request.job.nodes)
        loaded = all(number in self.agents and self.agents[number].ready for number in nodes)
        if attempt.phase is Phase.LOADING and loaded:
            attempt.phase = Phase.MEETING
            if (port := self.agents[0].request_port()) is not None:
                self._run_on_all(port)

    def _run_on_all(self, port: int) -> None:
        # Secret: whoever knows it could write into the rendezvous.
        self.attempt.meeting = Rendezvous(secrets.token_hex(16), self.nodes[0].address, port)
        self.attempt.phase = Phase.RUNNING
        for number in range(self.attempt.request.job.nodes):
            self._run_on(number)

    def _run_on(self, number: int) -> None:
        attempt = self.attempt
        assert attempt.meeting is not None
        attempt.running.add(number)
        self.agents[number].heard_s = time.monotonic()
        self.agents[number].begin(attempt.request, number, attempt.meeting)

    def _handle(self, number: int, agent: Agent, event: Event) -> None:
        match event["event"]:
            case "ready":
                agent.ready = True
                if event["cuda_in_server"]:
                    raise UserError(
                        "the fork server has a CUDA context: use --cold, and report this"
                    )
            case "port" if self.attempt.phase is Phase.MEETING:
                self._run_on_all(event["port"])
            case "ended":
                error = event.get("error")
                if error and self.attempt.request.job.nodes > 1:
                    error = f"node {number}: {error}"
                self._node_ended(number, Exit(event["code"], event["failures"], error))
            case "died":
                self._agent_died(number, agent, event["code"])

    def _node_ended(self, number: int, node_exit: Exit) -> None:
        attempt = self.attempt
        if number not in attempt.running:
            return
        attempt.running.discard(number)
        attempt.exits[number] = node_exit
        if attempt.phase is Phase.ENDING:
            return
        if attempt.request.job.survives_node_loss:
            if number == 0:  # node 0 has the record; the others notice that the run is over
                attempt.end()
        elif node_exit.code:
            attempt.end()
            for other in attempt.running:
                self.agents[other].stop()

    def _agent_died(self, number: int, agent: Agent, code: int) -> None:
        """An agent and its ranks are gone; the next run gets a new agent."""
        attempt = self.attempt
        del self.agents[number]
        agent.close()
        if number >= attempt.request.job.nodes:
            return  # an idle agent from an earlier run on more nodes
        if number in attempt.lost or self._can_lose(number):
            attempt.running.discard(number)
            attempt.lost[number] = time.monotonic()
            return
        if isinstance(agent, WarmAgent) and code >= 0 and not agent.ready:
            raise UserError(self._why_not_started(agent))
        # Name the node by number: host names do not belong in records.
        name = f"on node {number} " if len(self.nodes) > 1 else ""
        error = f"the launcher {name}was killed" if code < 0 else f"node {number} is lost"
        if number in attempt.silent:
            waited_s = attempt.request.job.settings.hang_after
            error = f"the launcher {name}has not answered for {waited_s:g} s"
        if attempt.phase in (Phase.LOADING, Phase.MEETING):
            attempt.running.add(number)  # no node has the run yet; it needs all to begin
        self._node_ended(number, Exit(code or 1, error=error, launcher_died=True))

    def _why_not_started(self, agent: WarmAgent) -> str:
        remote, last_line = agent.node.remote, agent.last_line()
        where = f"on {agent.node.name}" if len(self.nodes) > 1 or remote else "here"
        reason = last_line if remote and last_line else f"see {self.log}"
        return f"what training needs does not start {where}: {reason}"

    def _can_lose(self, number: int) -> bool:
        """Whether an elastic run can continue without this node until it returns."""
        attempt, elastic = self.attempt, self.attempt.request.elastic
        # The first node hosts the store in which the others meet.
        if elastic is None or number == 0 or attempt.phase is not Phase.RUNNING:
            return False
        left = {*attempt.running, *attempt.exits} - {number}
        return len(left) >= elastic.least(attempt.request.job)

    def _readmit(self) -> None:
        """Take lost nodes back once they can be reached again."""
        attempt = self.attempt
        if attempt.phase is not Phase.RUNNING or 0 in attempt.exits:
            return
        for number, since_s in list(attempt.lost.items()):
            if number not in self.agents:
                if time.monotonic() - since_s > RETRY_S:
                    self._open(number)
            elif self.agents[number].ready:
                del attempt.lost[number]
                self._run_on(number)

    def _check_deadlines(self) -> None:
        """Act on nodes that do not answer, do not become ready, or do not exit in time."""
        attempt, now_s = self.attempt, time.monotonic()
        hang_after_s = attempt.request.job.settings.hang_after
        for number in attempt.running if hang_after_s else ():
            if now_s - self.agents[number].heard_s > hang_after_s:
                attempt.silent.add(number)
                self.agents[number].kill()
        if attempt.phase is Phase.LOADING:
            for agent in self.agents.values():
                if not agent.ready and now_s - agent.opened_s > READY_S:
                    raise UserError(
                        f"{agent.node.name} has not answered for {READY_S:.0f} s: see {self.log}"
                    )
        elif attempt.phase is Phase.ENDING and now_s - attempt.ending_s > GRACE_S:
            attempt.killed |= attempt.running
            for number in attempt.running:
                self.agents[number].kill()

    def _result(self) -> Exit | None:
        """The exit of the run, from the exits of its nodes; None if the run is tried again."""
        attempt = self.attempt
        exits = list(attempt.exits.values())
        first = attempt.exits.get(0) or exits[0]
        if first.error and "DistNetworkError" in first.error and attempt.tries > 1:
            self.begin(attempt.request)  # another process took the port first
            self.attempt.tries = attempt.tries - 1
            return None
        if attempt.request.job.survives_node_loss:
            return first  # the first node's record tells what became of the others
        failures = sorted((f for e in exits for f in e.failures), key=lambda f: f["unix"])
        # The cause is a lost node, not the ranks elsewhere that miss it, and not a node that was
        # killed because it did not exit.
        died = [e for n, e in attempt.exits.items() if e.launcher_died and n not in attempt.killed]
        failed = [e for e in exits if e.error is not None and not e.launcher_died]
        cause = (died or failed or [e for e in exits if e.code] or exits)[0]
        return Exit(cause.code, failures, cause.error, bool(died))

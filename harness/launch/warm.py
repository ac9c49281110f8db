"""Launchers that stay on their nodes, loaded: a run starts in well under a second.

On each node a process of train/run/warm.py takes requests as lines of JSON, wherever it runs:
on this machine, in an emulated node, behind ssh. Whatever becomes of this process, even kill -9,
they and their ranks end with it: the kernel sees to it, or the end of their input.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from harness.core.settings import UserError
from harness.launch.launcher import Ending, Launcher, Node, Start

# In a process of its own: the part that torch elastic takes for the main module must be empty.
SERVE = (
    "import sys; from harness.core.process import end_with_parent; "
    "end_with_parent(int(sys.argv[1]) or None); "
    "from harness.train.run.warm import main; main(sys.argv[2:])"
)


READY_S = 300.0  # to load what training needs, from a slow disk as well


GRACE_S = 20.0  # for the other nodes to record and end when one has failed


AGAIN_S = 5.0  # between two tries to reach a node that an elastic run has lost


TRIES = 3  # to find a port that nobody takes at the same moment


class Agent:
    """The process on one node, and what has come from it."""

    def __init__(self, node: Node, environment: Mapping[str, str], log: Path) -> None:
        self.node, self.log = node, log
        self.ready, self.ended, self.unread = False, False, b""
        self.printed_to = log  # where the output of a node with its own disk goes
        self.opened_s = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        words = [node.python, "-c", SERVE, str(node.parent or 0), "bert", "vit"]
        with log.open("ab") as file:
            self.process = node.start(
                words,
                environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if node.remote else file,
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        os.set_blocking(self.output.fileno(), False)
        self.printer: threading.Thread | None = None
        if node.remote:
            self.printer = threading.Thread(target=self._print, daemon=True)
            self.printer.start()

    def say(self, message: Mapping[str, Any]) -> None:
        try:
            self.input.write(json.dumps(message).encode() + b"\n")
            self.input.flush()
        except OSError:
            pass  # it has died: hear() says so

    def hear(self) -> list[dict[str, Any]]:
        """What it has said since; that it has died comes last."""
        messages: list[dict[str, Any]] = []
        while True:
            try:
                read = os.read(self.output.fileno(), 65536)
            except BlockingIOError:
                return messages
            if not read:
                return [*messages, {"event": "died", "code": self.process.wait()}]
            *lines, self.unread = (self.unread + read).split(b"\n")
            messages += [json.loads(line) for line in lines]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.printer is not None:
            self.printer.join(timeout=1)
        for pipe in (self.input, self.output, self.process.stderr):
            if pipe is not None:
                with suppress(OSError):  # what was not yet written has no reader any more
                    pipe.close()

    def last_words(self) -> str:
        """The line in which it says why it ended, as far as it said anything."""
        if self.printer is not None:
            self.printer.join(timeout=1)
        lines = self.log.read_text("utf-8", errors="replace").strip().splitlines()
        if self.node.remote:
            mark = self.node.mark
            lines = [line.removeprefix(mark) for line in lines if line.startswith(mark)]
        return " ".join(lines[-1].split())[:300] if lines else ""

    def _print(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.node.print_line(line, self.printed_to)


class Warm(Launcher):
    """One agent a node; the first failure ends the run on all of them, unless they are peers."""

    def __init__(self, nodes: Sequence[Node], environment: Mapping[str, str], log: Path) -> None:
        super().__init__(nodes, environment, log)
        self.agents: dict[int, Agent] = {}
        self.start: Start | None = None
        self.count = self.tries = self.port = 0
        self.asked = False  # for a port, on the first node
        self.sent: set[int] = set()  # the nodes that have got the run
        self.lost: dict[int, float] = {}  # when the run went on without them
        self.endings: dict[int, Ending] = {}
        self.failed_s: float | None = None  # since when the nodes that are left are to end

    @property
    def ready(self) -> bool:  # type: ignore[override]
        return bool(self.agents) and all(agent.ready for agent in self._used())

    @property
    def streams(self) -> Iterator[IO[bytes]]:
        yield from (agent.output for agent in self.agents.values())

    def begin(self, start: Start) -> None:
        self.start, self.tries = start, TRIES
        for number in range(start.job.nodes):
            if number not in self.agents:
                self._open(number)
            self.agents[number].printed_to = start.log
        self._begin()

    def poll(self) -> Ending | None:
        assert self.start is not None
        for number, agent in list(self.agents.items()):
            for message in agent.hear():
                self._take(number, agent, message)
        if not self.asked and self.ready and not self.endings:
            self.asked = True
            self.agents[0].say({"do": "port"})
        self._look_for_lost()
        self._take_back()
        return self._ending() if self.endings and not self.sent - set(self.endings) else None

    def stop(self) -> None:
        if not self.sent and self.start is not None:
            self.endings = {0: Ending(128 + signal.SIGTERM)}
        for agent in self.agents.values():
            agent.say({"do": "stop"})

    def kill(self) -> None:
        for agent in self.agents.values():
            agent.process.kill()

    def close(self) -> None:
        for agent in self.agents.values():
            agent.close()
        self.agents = {}

    # ---- a run over all nodes ----

    def _used(self) -> list[Agent]:
        nodes = self.start.job.nodes if self.start else 0
        return [agent for number, agent in self.agents.items() if number < nodes]

    def _open(self, number: int) -> None:
        self.agents[number] = Agent(self.nodes[number], self.environment, self.log)

    def _begin(self) -> None:
        self.endings, self.asked, self.failed_s = {}, False, None
        self.sent, self.lost = set(), {}

    def _take(self, number: int, agent: Agent, message: dict[str, Any]) -> None:
        match message["event"]:
            case "ready":
                agent.ready = True
                if message["cuda_in_server"]:
                    raise UserError(
                        "the fork server has a CUDA context: use --cold, and report this"
                    )
            case "port":
                if not self.endings:
                    self.port = message["port"]
                    self.count += 1
                    for other in range(len(self._used())):
                        self._send(other)
            case "ended":
                error = message.get("error")
                if error and len(self._used()) > 1:
                    error = f"node {number}: {error}"
                self._ended(number, Ending(message["code"], message["failures"], error))
            case "died":
                self._died(number, agent, message["code"])

    def _send(self, number: int) -> None:
        """The run, to one of its nodes."""
        assert self.start is not None
        self.sent.add(number)
        job, node, elastic = self.start.job, self.nodes[number], self.start.elastic
        request = {
            "do": "run",
            "id": f"{os.getpid()}-{self.count}",
            "script": job.settings.script,
            "argv": self.start.argv,
            "nodes": job.nodes,
            "node": number,
            "address": node.address,
            "rendezvous": f"{self.nodes[0].address}:{self.port}",
            "rendezvous_config": elastic.rendezvous_config(number) if elastic else {"rank": number},
            "processes": job.processes,
            "peers": job.peers,
            "min_nodes": elastic.least(job) if elastic else job.nodes,
            "max_restarts": elastic.max_restarts if elastic else 0,
            "environment": self.start.environment_of(number),
            "cores": self.start.cores,
            "log": None if node.remote else str(self.start.log.absolute()),
        }
        self.agents[number].say(request)

    def _goes_on_without(self, number: int) -> bool:
        """Whether the rest of an elastic run can do without this node, until it is back."""
        assert self.start is not None
        elastic = self.start.elastic
        # The first node holds the store in which the others meet.
        if elastic is None or number == 0 or number not in self.sent or self.failed_s is not None:
            return False
        return len(self.sent - {number}) >= elastic.least(self.start.job)

    def _take_back(self) -> None:
        """Nodes that were lost, as soon as they are there again."""
        if self.start is None or self.failed_s is not None or 0 in self.endings:
            return
        for number, since_s in list(self.lost.items()):
            if number in self.agents and self.agents[number].ready:
                del self.lost[number]
                self._send(number)
            elif number not in self.agents and time.monotonic() - since_s > AGAIN_S:
                self._open(number)
                self.agents[number].printed_to = self.start.log

    def _ended(self, number: int, ending: Ending) -> None:
        if number not in self.sent or number in self.endings:
            return
        self.endings[number] = ending
        assert self.start is not None
        if self.start.job.peers:
            if number == 0:
                # It has the record. The others see by themselves that the run is over.
                self.failed_s = time.monotonic()
        elif ending.code and self.failed_s is None:
            self.failed_s = time.monotonic()
            for other, agent in self.agents.items():
                if other not in self.endings:
                    agent.say({"do": "stop"})

    def _died(self, number: int, agent: Agent, code: int) -> None:
        """Gone, with the ranks that it had started; the next run gets another."""
        del self.agents[number]
        words = agent.last_words()
        agent.close()
        if self._goes_on_without(number) or number in self.lost:
            self.sent.discard(number)
            self.lost[number] = time.monotonic()
            return
        if code >= 0 and not agent.ready:
            where = f" on {agent.node.name}" if len(self.nodes) > 1 or agent.node.remote else ""
            said = f": {words}" if agent.node.remote and words else f": see {self.log}"
            raise UserError(f"what training needs does not start{where or ' here'}{said}")
        # By its number: the record is no place for the name of a host.
        name = f"on node {number} " if len(self.nodes) > 1 else ""
        lost = f"the launcher {name}was killed" if code < 0 else f"node {number} is lost"
        self._ended(number, Ending(code or 1, error=lost, launcher_died=True))

    def _look_for_lost(self) -> None:
        """Nodes that do not come, and those that do not end when another has failed."""
        now_s = time.monotonic()
        for agent in self._used():
            if not agent.ready and not self.sent and now_s - agent.opened_s > READY_S:
                raise UserError(
                    f"{agent.node.name} has not answered for {READY_S:.0f} s: see {self.log}"
                )
        if self.failed_s is not None and now_s - self.failed_s > GRACE_S:
            for number in range(len(self.nodes)):
                if number in self.agents and number not in self.endings:
                    self.agents[number].process.kill()

    def _ending(self) -> Ending | None:
        """Of the whole run, from those of the nodes."""
        endings = self.endings.values()
        first = self.endings.get(0) or next(iter(endings))
        if first.error and "DistNetworkError" in first.error and self.tries > 1:
            self.tries -= 1
            self._begin()  # somebody else was quicker to take the port
            return None
        assert self.start is not None
        if self.start.job.peers:
            return first  # its record tells what became of the others
        failures = sorted((f for e in endings for f in e.failures), key=lambda f: f["unix"])
        told = [e for e in endings if e.error is not None]
        died = [e for e in endings if e.launcher_died]
        # A node that was lost is the cause, not the ranks elsewhere that miss it.
        cause = (died or told or [first])[0]
        code = next((e.code for e in endings if e.code), 0)
        return Ending(cause.code or code, failures, cause.error, bool(died))

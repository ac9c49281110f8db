"""Agents start the ranks on one node: a warm process that stays, or a new torchrun for each run.

The node may be this machine, an emulated one, or a host behind ssh. Agents and ranks end when this
process ends, even by kill -9: the kernel kills them, or they notice that their input has ended.
"""

from __future__ import annotations

import calendar
import itertools
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NotRequired, TypedDict

from harness.core.process import OutOfMemory, is_stopped, last_line, limits_memory, text_of
from harness.core.provenance import ROOT
from harness.core.records import rows_in
from harness.core.tasks import TASKS
from harness.launch.choices import SSH_FAILED
from harness.launch.plan import PORT, Elastic, Job, torchrun

# In a process of its own, since torch elastic needs an empty main module.
SERVE = (
    "import sys; from harness.core.process import end_with_parent; "
    "end_with_parent(int(sys.argv[1]) or None); "
    "from harness.train.run.warm import main; main(sys.argv[2:])"
)
# Each run of torchrun takes the next port: connections of the previous run may linger. Runners
# begin at different ones.
PORTS = (PORT + 1 + n % 1000 for n in itertools.count(os.getpid()))

# When a run that survives the loss of nodes ends, no node waits longer than this for the others.
EXIT_BARRIER_S = 3.0

# torchrun's report of a rank that failed.
FAILURE = re.compile(
    r"^  time +: (\S+)\n  host +: .*\n  rank +: (\d+) .*\n  exitcode +: (-?\d+) ", re.MULTILINE
)
# The report of harness.train.torchrun about a rank that it has ended.
STOPPED = re.compile(
    r"^harness: (rank (\d+) \(node \d+\) .*: its process is stopped)$", re.MULTILINE
)


class FailedRank(TypedDict):
    rank: int
    exit_code: int  # negative: the number of a signal
    unix: float
    stopped: NotRequired[str | None]  # why torchrun ended the rank
    # no_memory: what ran out, so that the kernel killed a process; limited: ulimit -v is set.
    no_memory: NotRequired[str | None]
    limited: NotRequired[bool]


Event = dict[str, Any]  # "event" is ready, port, ended or died; further keys depend on it
# Events of a warm process, with their required keys; a shell on its host may print other lines.
EVENTS = {"ready": {"cuda_in_server"}, "port": {"port"}, "ended": {"code", "failures"}}


@dataclass(frozen=True)
class Node:
    """A machine, real or emulated, on which processes are started."""

    name: str = "this machine"
    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()  # put before a command to run it on the node
    environment: Mapping[str, str] = field(default_factory=dict)  # of every process on the node
    remote: bool = False  # has its own disk; output comes back through a pipe
    python: str = sys.executable

    @property
    def parent(self) -> int | None:
        """The process whose end also ends those on the node; None where the kernel cannot do it."""
        return None if self.remote else os.getpid()

    @property
    def mark(self) -> str:
        """The prefix of every line that a remote node prints; empty for other nodes."""
        return f"[{self.name}] " if self.remote else ""

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], **pipes: Any
    ) -> subprocess.Popen[bytes]:
        """Start a process in a session of its own, so that Ctrl-C reaches only the runner."""
        return subprocess.Popen(
            [*self.prefix, *command],
            env=environment_with({**environment, **self.environment}),
            start_new_session=True,
            **pipes,
        )


@dataclass(frozen=True)
class LaunchRequest:
    """One start of a job."""

    job: Job
    argv: tuple[str, ...]
    environment: Mapping[str, str]  # of the ranks, added to this process's
    cores: tuple[int, ...] | None  # None: the system chooses
    log: Path
    devices: tuple[tuple[str, ...], ...] = ()  # GPUs by node; empty: all visible ones
    elastic: Elastic | None = None

    def environment_of(self, node: int) -> dict[str, str]:
        """The environment of the ranks of one node."""
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(self.devices[node])} if self.devices else {}
        return {**self.environment, **visible}


@dataclass(frozen=True)
class Rendezvous:
    """Where the nodes of a run meet; the same for all nodes."""

    run_id: str
    address: str  # of the first node
    port: int


def environment_with(more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, extended so that harness can be imported from any folder."""
    paths = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    return {
        **os.environ,
        # Otherwise a check for GPUs would initialise CUDA in the server, and no rank could use it.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "PYTHONPATH": os.pathsep.join([*paths, str(ROOT)]),
        **more,
    }


class Agent(ABC):
    """Takes one run at a time on its node."""

    ready = True  # whether a run can begin at once; a WarmAgent loads libraries first
    heard_s = math.inf  # its last sign of life since it was given a run
    output: IO[bytes] | None = None  # becomes readable when events arrive

    def __init__(self, node: Node, environment: Mapping[str, str], log: Path) -> None:
        self.node, self.environment, self.log = node, environment, log
        self.run_log = log  # receives the output of a remote node
        self.opened_s = time.monotonic()
        self.process: subprocess.Popen[bytes] | None = None
        self.printer: threading.Thread | None = None

    @abstractmethod
    def request_port(self) -> int | None:
        """A free port of the node; None if it arrives later as an event."""

    @abstractmethod
    def begin(self, request: LaunchRequest, number: int, meeting: Rendezvous) -> None:
        """Start the ranks of node `number`."""

    @abstractmethod
    def receive(self) -> list[Event]:
        """Events since the last call."""

    @abstractmethod
    def stop(self) -> None:
        """Ask the ranks to record and exit."""

    @property
    def usable(self) -> bool:
        """Whether the agent can take another run."""
        return True

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    def close(self) -> None:
        """End the process and wait for its end."""
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        self._join_printer()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with suppress(OSError):  # unwritten data has no reader any more
                    pipe.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self.process is not None and self.process.stdin is not None
        with suppress(OSError):  # the process has died: receive() reports it
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def _print(self, pipe: IO[bytes] | None) -> None:
        """Append the lines of a remote node to the log of the run, each with its mark."""
        assert pipe is not None

        def forward() -> None:
            for line in pipe:  # read on even if the disk is full: otherwise the node would block
                with suppress(OSError), self.run_log.open("ab") as file:
                    file.write(self.node.mark.encode() + line.rstrip(b"\r\n") + b"\n")

        self.printer = threading.Thread(target=forward, daemon=True)
        self.printer.start()

    def _join_printer(self) -> None:
        if self.printer is not None:
            self.printer.join(timeout=1)


class WarmAgent(Agent):
    """A process of train/run/warm.py: a run starts in well under a second.

    Requests and events are lines of JSON.
    """

    ready = False

    def __init__(self, node: Node, environment: Mapping[str, str], log: Path) -> None:
        super().__init__(node, environment, log)
        self.unread = b""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            self.process = node.start(
                [node.python, "-c", SERVE, str(node.parent or 0), *TASKS],
                environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if node.remote else file,
            )
        self.output = self.process.stdout
        assert self.output is not None
        os.set_blocking(self.output.fileno(), False)
        if node.remote:
            self._print(self.process.stderr)

    @property
    def usable(self) -> bool:
        assert self.process is not None
        return self.process.poll() is None

    def request_port(self) -> int | None:
        self._send({"do": "port"})
        return None

    def begin(self, request: LaunchRequest, number: int, meeting: Rendezvous) -> None:
        job, elastic = request.job, request.elastic
        self._send(
            {
                "do": "run",
                "id": meeting.run_id,
                "script": job.settings.script,
                "argv": request.argv,
                "nodes": job.nodes,
                "node": number,
                "address": self.node.address,
                "rendezvous": f"{meeting.address}:{meeting.port}",
                "rendezvous_config": (
                    elastic.rendezvous_config(number) if elastic else {"rank": number}
                ),
                "processes": job.processes,
                "exit_barrier_s": EXIT_BARRIER_S if job.survives_node_loss else None,
                "min_nodes": elastic.least(job) if elastic else job.nodes,
                "max_restarts": elastic.max_restarts if elastic else 0,
                "environment": request.environment_of(number),
                "cores": request.cores,
                "hang_after_s": job.settings.hang_after,
                "log": None if self.node.remote else str(request.log.absolute()),
            }
        )

    def receive(self) -> list[Event]:
        """Events since the last call; the death of the process is the last."""
        assert self.process is not None and self.output is not None
        events: list[Event] = []
        while True:
            try:
                read = os.read(self.output.fileno(), 65536)
            except BlockingIOError:
                return events
            self.heard_s = time.monotonic()  # the process sends a line each second
            if not read:
                return [*events, {"event": "died", "code": self.process.wait()}]
            lines, _, self.unread = (self.unread + read).rpartition(b"\n")
            events += filter(is_event, rows_in(lines)[0])

    def stop(self) -> None:
        self._send({"do": "stop"})

    def close(self) -> None:
        assert self.process is not None and self.process.stdin is not None
        # At the end of its input the process removes its files and exits.
        with suppress(OSError, subprocess.TimeoutExpired):
            self.process.stdin.close()
            self.process.wait(timeout=2)
        super().close()

    def last_line(self) -> str:
        """The last line that the process printed: why it ended; may be empty."""
        self._join_printer()
        return last_line(_marked(self.log, self.node.mark))


def is_event(row: Mapping[str, Any]) -> bool:
    name = row.get("event")
    return isinstance(name, str) and name in EVENTS and row.keys() >= EVENTS[name]


def _marked(log: Path, mark: str) -> str:
    """The lines of a log that begin with a mark, with the mark removed."""
    lines = text_of(log).split("\n")
    return "\n".join(line.removeprefix(mark) for line in lines if line.startswith(mark))


def failures_in(log: Path, mark: str = "") -> list[FailedRank]:
    """The failed ranks that torchrun reported, in the lines of a log that begin with a mark."""
    text = _marked(log, mark)
    stopped = {rank: reason for reason, rank in STOPPED.findall(text)}
    return [
        {
            "rank": int(rank),
            "exit_code": int(code),
            "unix": _unix_of(stamp),
            "stopped": stopped.get(rank),
        }
        for stamp, rank, code in FAILURE.findall(text)
    ]


def _unix_of(stamp: str) -> float:
    """Seconds since the epoch; harness.train.torchrun prints times in UTC."""
    return float(calendar.timegm(time.strptime(stamp, "%Y-%m-%d_%H:%M:%S")))


class TorchrunAgent(Agent):
    """Starts torchrun for each run, as a person would: slower; a reference for the warm agent."""

    memory = OutOfMemory(0, 0, 0)  # counts at the beginning of the run

    def request_port(self) -> int | None:
        return next(PORTS)

    def begin(self, request: LaunchRequest, number: int, meeting: Rendezvous) -> None:
        node, job = self.node, request.job
        script = f"{job.settings.script}.py"
        in_folder = node.remote or Path(script).is_file()
        command = [
            *(node.python, "-m", "harness.core.process"),
            "-" if node.remote else str(node.parent),
            *(node.python, "-m", "harness.train.torchrun"),
            *torchrun(job, number, meeting.address, meeting.port, request.elastic, node.address),
            script if in_folder else str(ROOT / script),
            *request.argv,
        ]
        self.run_log, self.memory = request.log, OutOfMemory.now()
        environment = {**self.environment, **request.environment_of(number)}
        secret = {"PET_RDZV_ID": meeting.run_id}  # torchrun's --rdzv_id
        request.log.parent.mkdir(parents=True, exist_ok=True)
        if node.remote:
            pipe = subprocess.PIPE
            self.process = node.start(
                command, environment, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT
            )
            self._send(secret)
            self._print(self.process.stdout)
        else:
            with request.log.open("ab") as log:
                self.process = node.start(
                    command,
                    {**environment, **secret},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
        if request.cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(self.process.pid, request.cores)

    def receive(self) -> list[Event]:
        code = self.process.poll() if self.process is not None else None
        if code is None:
            if self.process is not None and not is_stopped(self.process.pid):
                self.heard_s = time.monotonic()
            return []
        self.close()
        self.process = None
        if code < 0 or (self.node.remote and code == SSH_FAILED):
            return [{"event": "died", "code": code}]
        failures = failures_in(self.run_log, self.node.mark)
        if not self.node.remote:
            no_memory, limited = self.memory.since(), limits_memory()
            for failure in failures:
                failure |= {"no_memory": no_memory, "limited": limited}
        return [{"event": "ended", "code": code, "failures": failures if code else []}]

    def stop(self) -> None:
        if self.process is None:
            return
        if self.process.stdin is None:
            self.process.terminate()
        else:
            with suppress(OSError):
                self.process.stdin.close()  # signals do not pass through ssh

"""What every place to run has: nodes, a way to start processes on them, and how a run ended."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from harness.launch.plan import PORT, Elastic, Job, torchrun
from harness.launch.ssh.hosts import SSH_FAILED

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Node:
    """A machine, or what stands in for one, where processes are started and reached."""

    name: str = "this machine"
    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()  # before a command, so that it runs there
    environment: Mapping[str, str] = field(default_factory=dict)  # of every process there
    remote: bool = False  # it has its own disk: what it prints comes back on the pipe

    @property
    def python(self) -> str:
        return sys.executable

    @property
    def parent(self) -> int | None:
        """The process that one started there ends with, where the kernel can see to it."""
        return os.getpid()

    @property
    def mark(self) -> str:
        """In front of every line that comes from there."""
        return f"[{self.name}] "

    def print_line(self, line: bytes, log: Path) -> None:
        with log.open("ab") as file:
            file.write(self.mark.encode() + line.rstrip(b"\r\n") + b"\n")

    def start(
        self, words: Sequence[str], environment: Mapping[str, str], **pipes: Any
    ) -> subprocess.Popen[bytes]:
        """A process there, in a session of its own: Ctrl-C is for the runner alone."""
        return subprocess.Popen(
            [*self.prefix, *words],
            env=environment_with({**environment, **self.environment}),
            start_new_session=True,
            **pipes,
        )


@dataclass(frozen=True)
class Ending:
    """What a launcher says of a run that has ended."""

    code: int
    failures: list[dict[str, Any]] = field(default_factory=list)  # rank, exit_code, unix
    error: str | None = None
    launcher_died: bool = False
    outside: tuple[str, str] | None = None  # outcome and reason, where a cluster told them
    wall_s: float | None = None  # None: until now


@dataclass(frozen=True)
class Start:
    """One start of a job."""

    job: Job
    argv: tuple[str, ...]
    environment: Mapping[str, str]  # of the ranks, beside that of this process
    cores: tuple[int, ...] | None  # None: whatever the system gives
    log: Path
    devices: tuple[tuple[str, ...], ...] = ()  # GPUs by node; empty: all that are visible there
    elastic: Elastic | None = None

    def environment_of(self, node: int) -> dict[str, str]:
        """Of the ranks of one node."""
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(self.devices[node])} if self.devices else {}
        return {**self.environment, **visible}


class Launcher(ABC):
    """Takes one run at a time; whatever it has started ends with it."""

    ready = True  # nothing is to be loaded before the first run

    def __init__(self, nodes: Sequence[Node], environment: Mapping[str, str], log: Path) -> None:
        self.nodes, self.environment, self.log = nodes, environment, log

    @abstractmethod
    def begin(self, start: Start) -> None: ...

    @abstractmethod
    def poll(self) -> Ending | None:
        """How the run ended; None while it goes on."""

    @property
    def streams(self) -> Iterator[IO[bytes]]:
        """What becomes readable when there is news."""
        yield from ()

    @abstractmethod
    def stop(self) -> None:
        """Ask the ranks to record and end."""

    @abstractmethod
    def kill(self) -> None:
        """End everything now."""

    @abstractmethod
    def close(self) -> None:
        """End everything, and see that it has ended."""


def environment_with(more: Mapping[str, str]) -> dict[str, str]:
    """That of this process and more; harness and the scripts are found from any folder."""
    paths = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    return {
        **os.environ,
        # Otherwise asking for GPUs would touch CUDA in the server, and no rank could use it.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "PYTHONPATH": os.pathsep.join([*paths, str(ROOT)]),
        **more,
    }


# ----
# torchrun anew for each run, as a person would type it: slower, for those who doubt the other.

PORTS = 1000  # from PORT on; each run takes the next


GRACE_S = 20.0  # for the other nodes to record and end when one has failed


class Cold(Launcher):
    """One torchrun a node; the first failure ends the run on all of them, unless they are peers."""

    def __init__(self, nodes: Sequence[Node], environment: Mapping[str, str], log: Path) -> None:
        super().__init__(nodes, environment, log)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.printers: list[threading.Thread] = []
        self.port = PORT
        self.failed_s: float | None = None  # since when the nodes that are left are to end
        self.first = 0  # node that failed first
        self.peers = False

    def begin(self, start: Start) -> None:
        self.failed_s, self.peers = None, start.job.peers
        self.port = PORT + (self.port + 1 - PORT) % PORTS
        start.log.parent.mkdir(parents=True, exist_ok=True)
        for number in range(start.job.nodes):
            process = self._start(start, number)
            if start.cores and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(process.pid, start.cores)
            self.processes.append(process)

    def _start(self, start: Start, number: int) -> subprocess.Popen[bytes]:
        node = self.nodes[number]
        script = f"{start.job.settings.script}.py"
        here = node.remote or Path(script).is_file()
        first = self.nodes[0].address
        words = torchrun(start.job, number, first, self.port, start.elastic, node.address)
        command = [
            node.python,
            "-m",
            "harness.core.process",
            "-" if node.remote else str(node.parent),
            node.python,
            "-m",
            "torch.distributed.run",
            *words,
            script if here else str(ROOT / script),
            *start.argv,
        ]
        environment = {**self.environment, **start.environment_of(number)}
        if not node.remote:
            with start.log.open("ab") as log:
                pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                return node.start(command, environment, **pipes)
        process = node.start(
            command,
            environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        printer = threading.Thread(target=_print, args=(node, process, start.log), daemon=True)
        printer.start()
        self.printers.append(printer)
        return process

    def poll(self) -> Ending | None:
        codes = [process.poll() for process in self.processes]
        if self.peers:
            if codes[0] is not None and self.failed_s is None:
                # It has the record. The others see by themselves that the run is over.
                self.failed_s, self.first = time.monotonic(), 0
        elif any(codes) and self.failed_s is None:
            self.failed_s = time.monotonic()
            self.first = next(node for node, code in enumerate(codes) if code)
            self.stop()
        if None in codes:
            if self.failed_s is not None and time.monotonic() - self.failed_s > GRACE_S:
                self.kill()
            return None
        for printer in self.printers:
            printer.join(timeout=1)
        self.processes, self.printers = [], []
        return self._ending(codes[self.first] or 0) if self.failed_s is not None else Ending(0)

    def _ending(self, code: int) -> Ending:
        """Of the node that failed first."""
        node = self.nodes[self.first]
        if node.remote and code == SSH_FAILED:
            return Ending(code, error=f"node {self.first} is lost", launcher_died=True)
        return Ending(code, launcher_died=code < 0)

    def stop(self) -> None:
        for process in self.processes:
            if process.stdin is None:
                process.terminate()
            else:
                with suppress(OSError):
                    process.stdin.close()  # signals do not pass through ssh

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        self.kill()
        for process in self.processes:
            process.wait()
        self.processes = []


def _print(node: Node, process: subprocess.Popen[bytes], log: Path) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        node.print_line(line, log)

"""What every place to run has: nodes, a way to start processes on them, and how a run ended."""

from __future__ import annotations

import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from harness.launch.plan import Elastic, Job

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

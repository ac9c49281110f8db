"""Runs on this machine: a launcher that stays warm, and torchrun itself for those who doubt it.

Whatever becomes of this process, even kill -9, launchers and their ranks end with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from harness.launch.plan import Job
from harness.settings import UserError

ROOT = Path(__file__).resolve().parents[2]
# In a process of its own: the part that torch elastic takes for the main module must be empty.
SERVE = (
    "import sys; from harness.parent import end_with_parent; end_with_parent(int(sys.argv[1])); "
    "from harness.train.warm import main; main(sys.argv[2:])"
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


class Launcher(ABC):
    """Takes one run at a time; whatever it has started ends with it."""

    ready = True  # nothing is to be loaded before the first run

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self.environment, self.log = environment, log
        self.process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def begin(self, start: Start) -> None: ...

    @abstractmethod
    def poll(self) -> Ending | None:
        """How the run ended; None while it goes on."""

    @property
    def stream(self) -> IO[bytes] | None:
        """What becomes readable when there is news."""
        return self.process.stdout if self.process is not None else None

    def stop(self) -> None:
        """Ask the ranks to record and end."""
        if self.process is not None:
            self.process.terminate()

    def kill(self) -> None:
        """End everything now."""
        if self.process is not None:
            self.process.kill()

    def close(self) -> None:
        self.kill()
        if self.process is not None:
            self.process.wait()
            self.process = None


class Warm(Launcher):
    """Keeps a fork server that has loaded everything; a run starts in well under a second."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        super().__init__(environment, log)
        self.ready = False
        self.unread = b""
        self.count = 0

    def begin(self, start: Start) -> None:
        if self.process is None:
            self._open()
        assert self.process is not None and self.process.stdin is not None
        self.count += 1
        request = {
            "id": f"{os.getpid()}-{self.count}",
            "script": start.job.settings.script,
            "argv": start.argv,
            "processes": start.job.processes,
            "environment": dict(start.environment),
            "cores": start.cores,
            "log": str(start.log.absolute()),
        }
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            pass  # it has died: poll() says so

    def poll(self) -> Ending | None:
        if self.process is None or self.process.stdout is None:
            return Ending(1, launcher_died=True)
        try:
            read = os.read(self.process.stdout.fileno(), 65536)
        except BlockingIOError:
            return None
        if not read:
            code = self.process.wait()
            self.process = None
            if code >= 0 and not self.ready:
                raise UserError(f"what training needs does not start here: see {self.log}")
            return Ending(code, launcher_died=True)
        *lines, self.unread = (self.unread + read).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            if answer["event"] == "ended":
                return Ending(answer["code"], answer["failures"], answer.get("error"))
            self.ready = True
            if answer["cuda_in_server"]:
                raise UserError("the fork server has a CUDA context: use --cold, and report this")
        return None

    def _open(self) -> None:
        self.ready, self.unread = False, b""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVE, str(os.getpid()), "bert", "vit"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment_with(self.environment),
                start_new_session=True,  # Ctrl-C is for the runner alone
            )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)


class Cold(Launcher):
    """torchrun for each run, as a person would type it."""

    def begin(self, start: Start) -> None:
        script = f"{start.job.settings.script}.py"
        path = script if Path(script).is_file() else str(ROOT / script)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, f"--nproc_per_node={start.job.processes}", path, *start.argv]
        start.log.parent.mkdir(parents=True, exist_ok=True)
        with start.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "harness.parent", str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment_with({**self.environment, **start.environment}),
                start_new_session=True,
            )
        if start.cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(self.process.pid, start.cores)

    def poll(self) -> Ending | None:
        assert self.process is not None
        code = self.process.poll()
        if code is None:
            return None
        self.process = None
        return Ending(code, launcher_died=code < 0)


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

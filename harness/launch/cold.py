"""torchrun anew for each run, as a person would type it: slower, for those who doubt the other."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from harness.launch.launcher import ROOT, Ending, Launcher, Node, Start
from harness.launch.plan import PORT, torchrun
from harness.launch.ssh.hosts import SSH_FAILED

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
            "harness.parent",
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

"""torchrun anew for each run, as a person would type it: slower, for those who doubt the other."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.launch.launcher import ROOT, Ending, Launcher, Node, Start
from harness.launch.plan import PORT, torchrun

PORTS = 1000  # from PORT on; each run takes the next
GRACE_S = 20.0  # for the other nodes to record and end when one has failed


class Cold(Launcher):
    """One torchrun a node; the first failure ends the run on all of them."""

    def __init__(self, nodes: Sequence[Node], environment: Mapping[str, str], log: Path) -> None:
        super().__init__(nodes, environment, log)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.port = PORT
        self.failed_s: float | None = None
        self.code = 0  # of the node that failed first

    def begin(self, start: Start) -> None:
        self.failed_s, self.code = None, 0
        self.port = PORT + (self.port + 1 - PORT) % PORTS
        script = f"{start.job.settings.script}.py"
        path = script if Path(script).is_file() else str(ROOT / script)
        start.log.parent.mkdir(parents=True, exist_ok=True)
        for number in range(start.job.nodes):
            node = self.nodes[number]
            words = torchrun(start.job, number, self.nodes[0].address, self.port, start.elastic)
            command = [node.python, "-m", "torch.distributed.run", *words, path, *start.argv]
            with start.log.open("ab") as log:
                process = node.start(
                    [node.python, "-m", "harness.parent", str(node.parent or 0), *command],
                    {**self.environment, **start.environment_of(number)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            if start.cores and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(process.pid, start.cores)
            self.processes.append(process)

    def poll(self) -> Ending | None:
        codes = [process.poll() for process in self.processes]
        if any(codes) and self.failed_s is None:
            self.failed_s, self.code = time.monotonic(), next(code for code in codes if code)
            self.stop()
        if None in codes:
            if self.failed_s is not None and time.monotonic() - self.failed_s > GRACE_S:
                self.kill()
            return None
        self.processes = []
        return Ending(self.code, launcher_died=self.code < 0)

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        self.kill()
        for process in self.processes:
            process.wait()
        self.processes = []

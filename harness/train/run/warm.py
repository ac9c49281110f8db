"""A launcher that stays: it starts runs in new processes that have everything loaded already.

torch elastic starts the ranks of one run after another. They are forked from a server that has
imported the scripts and has no thread, no process group and no CUDA context. Requests are lines of
JSON on standard input, events are lines of JSON on standard output (launch/agents.py).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import queue
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from harness.core.command_line import command_line
from harness.core.process import (
    PARENT,
    OutOfMemory,
    end_with_parent,
    is_stopped,
    limits_memory,
    print_if_possible,
)
from harness.core.records import SERVER_KILLED, log_of
from harness.core.tasks import TASKS, module_from, script_file

SCRIPTS = "HARNESS_PRELOAD"  # names, in the environment: a fork server takes no arguments
# Modules that libraries load on first use: each run of a fork server would load them anew.
LOADED_LATER = (
    "torch.profiler", "transformers.masking_utils", "transformers.models.bert.modeling_bert",
    "transformers.models.vit.modeling_vit", "rich._emoji_codes", "PIL.BmpImagePlugin",
    "PIL.GifImagePlugin", "PIL.JpegImagePlugin", "PIL.PngImagePlugin", "PIL.PpmImagePlugin",
)  # fmt: skip
OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
TRIES = 5  # to start the fork server
BEAT_S = 1.0  # between two signs of life


class Server:
    """Starts the runs that are asked for, one after the other, and can be asked to stop one."""

    def __init__(self, events: Any) -> None:
        self.events = events  # the file that messages are written to
        self.hang_after_s = 0.0  # of the run in progress; 0: never
        self._sending = threading.Lock()
        self._changing = threading.Lock()  # held while the state below is checked and changed
        self._is_asked = self._is_running = False  # a run is asked for until it begins
        self._stops_early = False  # the run that is asked for is to stop before it begins

    def serve(self, scripts: list[str]) -> None:
        """Handle requests until there are no more."""
        facts = _in_fresh_process(inspect, scripts)
        requests: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self.receive, args=(requests,), daemon=True).start()
        threading.Thread(target=self.beat, daemon=True).start()
        self._send({"event": "ready", **facts})
        while True:
            request = requests.get()
            if request["do"] == "port":
                self._send({"event": "port", "port": free_port()})
            else:
                self._send({"event": "ended", "id": request["id"], **self.run(request)})

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending:
            print(json.dumps(message), file=self.events, flush=True)

    def beat(self) -> None:
        """Send signs of life; end a fork server that is stopped, so that it is replaced."""
        stopped_s = 0.0
        while True:
            time.sleep(BEAT_S)
            self._send({"event": "alive"})
            server: Any = multiprocessing.forkserver._forkserver
            pid = server._forkserver_pid
            stopped_s = stopped_s + BEAT_S if pid and is_stopped(pid) else 0.0
            if self.hang_after_s and stopped_s > self.hang_after_s:
                os.kill(pid, signal.SIGKILL)

    def receive(self, requests: queue.Queue[dict[str, Any]]) -> None:
        """Queue requests; a stop is a message, because signals do not reach other machines."""
        for line in sys.stdin:
            message = json.loads(line)
            if message["do"] == "stop":
                self._stop_run()
            else:
                if message["do"] == "run":
                    with self._changing:
                        self._is_asked = True
                requests.put(message)
        shutil.rmtree(multiprocessing.util.get_temp_dir(), ignore_errors=True)  # the fork server's
        os._exit(0)  # the sender is gone; the ranks end with this process

    def _stop_run(self) -> None:
        """Stop the run in progress, or the one that is about to begin."""
        with self._changing:
            if self._is_running:
                os.kill(os.getpid(), signal.SIGTERM)
            elif self._is_asked:
                self._stops_early = True

    def _begin_run(self) -> bool:
        """Whether the run may begin: no stop has come for it."""
        with self._changing:
            may_begin = not self._stops_early
            self._stops_early = self._is_asked = False
            self._is_running = True
        return may_begin

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """This node's part of a run: exit code, and the ranks that failed."""
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.launcher.api import elastic_launch

        from harness.train.agent import ending_stopped_ranks
        from harness.train.rendezvous import unreachable

        over = False

        def stop(signum: int, frame: Any) -> None:
            if not over:  # a signal may come while the run ends
                raise SignalException("asked to stop", signal.Signals(signum))

        # Elastic sets its own handlers later; these hold before and after.
        handlers = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGINT)}
        self.hang_after_s = request["hang_after_s"]
        memory = OutOfMemory.now()
        ended: dict[str, Any] = {"code": 0, "failures": []}
        reasons: dict[int, str] = {}  # of ranks that were stopped, by process
        try:
            if not self._begin_run():
                stop(signal.SIGTERM, None)
            host, _, port = request["rendezvous"].rpartition(":")
            if request["node"] and (reason := unreachable(host, int(port))):
                return {"code": 1, "failures": [], "error": reason}
            # torch would leave a folder of its own.
            folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            within_s = request["exit_barrier_s"]  # None: torch's five minutes
            barrier = {} if within_s is None else {"exit_barrier_timeout": within_s}
            with ending_stopped_ranks(self.hang_after_s, **barrier) as stopped, folder as logs:
                reasons = stopped.reasons
                elastic_launch(_launch_config(request, logs), rank_main)(request)
        except Exception as error:  # whatever it is, the next run must still be possible
            over = True
            ended = _failed(error, reasons)
        finally:
            over = True
            with self._changing:
                self._is_running = False
            for number, handler in handlers.items():
                signal.signal(number, handler)
        of_node = {"no_memory": memory.since(), "limited": limits_memory()}
        return ended | {"failures": [{**rank, **of_node} for rank in ended["failures"]]}


def _failed(error: Exception, reasons: Mapping[int, str]) -> dict[str, Any]:
    """The answer about a run that this error has ended."""
    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from harness.core.settings import UserError

    if isinstance(error, ChildFailedError):
        failures = [
            {
                "rank": rank,
                "exit_code": failure.exitcode,
                "unix": failure.timestamp,
                "stopped": reasons.get(failure.pid),
            }
            for rank, failure in error.failures.items()
        ]
        return {"code": 1, "failures": failures}
    if isinstance(error, SignalException):
        return {"code": 128 + int(error.sigval), "failures": []}
    if isinstance(error, (EOFError, ConnectionError)):
        # The fork server was killed while it started the ranks; the next run starts another.
        failures = [{"rank": 0, "exit_code": SERVER_KILLED, "unix": time.time()}]
        return {"code": 1, "failures": failures}
    if isinstance(error, UserError):
        return {"code": 1, "failures": [], "error": str(error)}
    if not isinstance(error, DistNetworkError):
        traceback.print_exception(error)
    return {"code": 1, "failures": [], "error": f"{type(error).__name__}: {error}"}


def _launch_config(request: dict[str, Any], logs: str) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=request["min_nodes"],
        max_nodes=request["nodes"],
        nproc_per_node=request["processes"],
        # As torchrun does where every node has its number; c10d would negotiate for seconds.
        rdzv_backend="c10d" if request["max_restarts"] > 0 else "static",
        rdzv_endpoint=request["rendezvous"],
        rdzv_configs=request["rendezvous_config"],
        local_addr=request["address"],
        run_id=request["id"],
        max_restarts=request["max_restarts"],
        monitor_interval=0.03,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=logs),
    )


def free_port(outgoing: Path = OUTGOING_PORTS) -> int:
    """A port that nobody listens on, and that the system gives to no outgoing connection.

    A port that the system picks may belong to a connection by the time the store listens on it.
    """
    with contextlib.suppress(OSError):  # not on Linux
        ports = range(10_000, int(outgoing.read_text().split()[0]))
        for port in random.SystemRandom().sample(ports, min(20, len(ports))):
            if _bound(port):
                return port
    return _bound(0) or 0


def _bound(port: int) -> int | None:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("", port))
        return int(probe.getsockname()[1])
    return None


def rank_main(request: dict[str, Any]) -> None:
    """A rank: what torchrun would start as a new Python process, but with everything loaded."""
    end_with_parent()
    if request["log"] is not None:
        _print_to(log_of(Path(request["log"]), int(os.environ["RANK"])))
    print_if_possible()
    os.environ.update(request["environment"])
    if request["cores"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, request["cores"])
    script, argv = request["script"], request["argv"]
    sys.argv = [f"{script}.py", *argv]
    code = 1
    try:
        settings = command_line(script, argv)
        code = imported(script).main(settings)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):  # as Python itself takes it
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)  # elastic would make every failure a 1


def imported(script: str) -> Any:
    """The module of a script: ours is loaded already, a user's is loaded from its file."""
    if script in TASKS:
        return importlib.import_module(script)
    file = script_file(script)
    assert file is not None  # command_line() has read it
    return module_from(file)


def inspect(scripts: list[str]) -> dict[str, Any]:
    """Look for a CUDA context in the server, which would break the first rank (when forked)."""
    import torch

    for script in scripts:
        importlib.import_module(script)  # immediate, unless the server failed to import it
    return {"cuda_in_server": torch.cuda.is_initialized()}


def _in_fresh_process(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """A function's result in a process forked from the server, which starts if necessary."""
    context = multiprocessing.get_context("forkserver")
    for _ in range(TRIES):
        try:
            with ProcessPoolExecutor(1, context) as pool:
                return pool.submit(function, *args).result()
        except (BrokenProcessPool, EOFError, ConnectionError):
            time.sleep(0.3)  # the server was killed while it was loading: until it is gone
    raise RuntimeError(f"the fork server ended {TRIES} times while it was loading")


def _print_to(log: Path) -> None:
    """Print into a file rather than a pipe: the output survives a killed process."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def main(scripts: list[str]) -> None:
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep what libraries print apart from the events
    os.environ |= {SCRIPTS: " ".join(scripts), PARENT: str(os.getpid())}
    multiprocessing.set_forkserver_preload(["harness.train.run.preload", "harness.train.run.warm"])
    # The server loads what the ranks need while this process loads what starts them.
    multiprocessing.forkserver.ensure_running()
    importlib.import_module("torch.distributed.launcher.api")
    importlib.import_module("harness.train.rendezvous").harden()
    Server(events).serve(scripts)

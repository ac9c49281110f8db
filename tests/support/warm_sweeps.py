"""Sweeps whose processes are forked from the server of ranks.py, so that none of them loads
anything: 0.3 s instead of 15 s of imports for each launcher.

The processes are those of a sweep that a person starts: a runner, a launcher for each node (in the
network of that node), its fork server, and the ranks. They run the same code, meet, are killed and
end in the same way; they differ only in how they begin. What begins them is tested with start() and
sweep() of sweeps.py.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver, process, resource_tracker, util
from pathlib import Path
from typing import Any

from harness import cli
from harness.core.process import end_with_parent
from harness.launch import sweep as sweep_module
from harness.launch.agents import SERVE, Node, environment_with
from harness.train.run import warm
from tests.support.killed import ENTER_NETWORK
from tests.support.ranks import ROOT, SERVER, _printing_to
from tests.support.sweeps import LAUNCHER, STARTED, arguments

NAME_PROCESS = 15  # PR_SET_NAME of linux/prctl.h
# As a new process has them, and Python ignores the last two.
SIGNALS = {
    signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL,
    signal.SIGCHLD: signal.SIG_DFL, signal.SIGPIPE: signal.SIG_IGN, signal.SIGXFSZ: signal.SIG_IGN,
}  # fmt: skip
start_anew, table_anew, spawn_anew = Node.start, sweep_module._table, util.spawnv_passfds


class Runner:
    """As far as tests need it, what start() of sweeps.py gives."""

    def __init__(self, words: list[str], environment: Mapping[str, str], cwd: Path) -> None:
        self.args, self.printed = words, tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        told = (self.printed.name, words, dict(environment), str(cwd))
        self.process = SERVER.Process(target=_run, args=told)
        self.process.start()
        assert self.process.pid is not None
        self.pid: int = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it has printed, once it has ended."""
        self.wait(timeout)
        files = (Path(self.printed.name, name) for name in ("out_0", "err_0"))
        out, err = (file.read_text() if file.exists() else "" for file in files)
        return out, err

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if self.returncode is None:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(
    file: Path, out: Path, *flags: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> Runner:
    runner = Runner(arguments(file, out, *flags), {**os.environ, **(env or {})}, cwd)
    STARTED.append(runner)
    return runner


def sweep(file: Path, out: Path, *flags: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """A runner to its end."""
    runner = start(file, out, *flags, **more)
    stdout, stderr = runner.communicate(timeout=150)
    return subprocess.CompletedProcess(runner.args, runner.wait(), stdout, stderr)


def _run(printed: str, words: list[str], environment: dict[str, str], cwd: str) -> None:
    """The runner: python -m harness sweep ..."""
    os.setsid()
    os.chdir(cwd)
    _take(environment)
    fork_launchers()
    sys.argv = ["harness", *words]
    _printing_to(printed, cli.main, ())
    os._exit(0)


def fork_launchers() -> None:
    """From now on, in this process, which must have been forked from the server of ranks.py."""
    Node.start = _start  # type: ignore[method-assign]
    sweep_module._table = _table


def _take(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _table(folder: Path, *flags: str, **how: Any) -> subprocess.CompletedProcess[str]:
    if "capture_output" in how:
        return table_anew(folder, *flags, **how)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _end_with(partial(cli.main, ["table", str(folder), *flags]))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return subprocess.CompletedProcess(["table"], code)


def _start(
    node: Node, command: Sequence[str], environment: Mapping[str, str], **pipes: Any
) -> subprocess.Popen[bytes]:
    """A launcher, on this machine or on a node that root has made: forked, with its pipes."""
    as_root = not any(word.startswith("--user=") for word in node.prefix)
    if node.remote or list(command[1:3]) != ["-c", SERVE] or not as_root:
        return start_anew(node, command, environment, **pipes)
    own = environment_with({**environment, **node.environment})
    become = partial(_launcher, node.prefix, own, command[3:])
    return subprocess.Popen(
        [sys.executable], preexec_fn=partial(_end_with, become), start_new_session=True, **pipes
    )


def _launcher(prefix: Sequence[str], environment: Mapping[str, str], words: Sequence[str]) -> int:
    """What SERVE does, in a process that has been forked and is never replaced."""
    ctypes.CDLL(None).prctl(NAME_PROCESS, LAUNCHER.encode(), 0, 0, 0)
    _forget(keep=())  # also the pipe by which subprocess learns that it has begun
    _take(environment)
    end_with_parent(int(words[0]) or None)
    for network in (word.removeprefix("--net=") for word in prefix if word.startswith("--net=")):
        with open(network) as opened:
            assert ctypes.CDLL(None, use_errno=True).setns(opened.fileno(), ENTER_NETWORK) == 0
    util.spawnv_passfds = _spawn
    sys.argv = ["-c", *words]
    warm.main(list(words[1:]))
    return 0


def _spawn(path: str, words: Sequence[Any], keep: Sequence[int]) -> int:
    """The fork server of a launcher: forked as well, unless it is one that replaces another: with
    threads beside it, as there are by then, no process is forked.
    """
    serves = str(words[-1]).startswith("from multiprocessing.forkserver import main")
    if not serves or threading.active_count() > 1:
        return spawn_anew(path, words, keep)
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        _forget(keep)
        _end_with(partial(exec, words[-1], {}))
    return child


def _forget(keep: Sequence[int]) -> None:
    """What a new process would not have: open files but these, handlers, the state of libraries.

    Nothing that holds one of those files is ever freed: it would close another's of that number.
    """
    gc.freeze()
    gc.enable()
    for file in {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, *keep}:
        with suppress(OSError):  # the one that has listed them
            os.close(file)
    hangup = signal.getsignal(signal.SIGHUP)  # under nohup it stays ignored
    handlers = {signal.SIGHUP: signal.SIG_DFL} if hangup is not signal.SIG_IGN else {}
    for number, handler in {**SIGNALS, **handlers}.items():
        signal.signal(number, handler)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, buffering=1, closefd=False)  # noqa: SIM115
        for number, mode in enumerate(("r", "w", "w"))
    )
    forkserver._forkserver.__init__()  # type: ignore[misc]
    resource_tracker._resource_tracker.__init__()  # type: ignore[misc]
    process.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]
    process._children.clear()  # type: ignore[attr-defined]


def _end_with(function: Callable[[], Any]) -> None:
    """The rest of this process."""
    code = 1
    try:
        code = int(function() or 0)
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

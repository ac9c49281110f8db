"""Python processes that are forked from the server of ranks.py: 0.3 s instead of 10 s of imports.

    Python([sys.executable, "-m", "harness", "sweep", ...])    as subprocess.Popen would start it

The process does what the interpreter does with these words, and so do those that it starts in turn
with subprocess.Popen: torchrun and its ranks, launchers and their fork servers. They have the same
parents, sessions, networks and variables, meet, are killed and end in the same way; they differ
only in how they begin.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver, process, resource_tracker, util
from pathlib import Path
from typing import Any

import psutil

from harness.core.process import end_with_parent
from harness.launch.agents import SERVE
from tests.support.killed import ENTER_NETWORK
from tests.support.ranks import ROOT, SERVER
from tests.support.sweeps import LAUNCHER, STARTED, command

NAME_PROCESS = 15  # PR_SET_NAME of linux/prctl.h
ENDS_WITH = [sys.executable, "-m", "harness.core.process"]
# What loads libraries for seconds: other processes of Python's are small, and begin as always.
HEAVY = (["-u"], ["-c", SERVE], ["-m", "harness"], ["-m", "harness.train.torchrun"],
         ["-m", "torch.distributed.run"])  # fmt: skip
# As a new process has them, and Python ignores the last two.
SIGNALS = {
    signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL,
    signal.SIGQUIT: signal.SIG_DFL, signal.SIGCHLD: signal.SIG_DFL,
    signal.SIGPIPE: signal.SIG_IGN, signal.SIGXFSZ: signal.SIG_IGN,
}  # fmt: skip
popen_anew, spawn_anew = subprocess.Popen.__init__, util.spawnv_passfds


class Python:
    """As far as tests need it, what subprocess.Popen gives; what it prints goes to files."""

    def __init__(
        self, words: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path = ROOT,
        log: Path | None = None,
    ) -> None:  # fmt: skip
        self.args, self.printed = words, tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.files = [log or Path(self.printed.name, name) for name in ("out", "err")]
        told = (list(words), {**os.environ, **(env or {})}, str(cwd), self.files)
        self.process = SERVER.Process(target=_run, args=told)
        self.process.start()
        assert self.process.pid is not None
        self.pid: int = self.process.pid
        STARTED.append(self)

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.returncode is None:
            late = subprocess.TimeoutExpired(self.args, timeout or 0)
            late.add_note(self._state())
            raise late
        return self.returncode

    def _state(self) -> str:
        """Where it is and what it has said, for whoever wonders why it does not end."""
        lines = []
        with suppress(psutil.Error):
            whole = psutil.Process(self.pid)
            for one in (whole, *whole.children(recursive=True)):
                with suppress(psutil.Error, OSError):
                    waits = Path(f"/proc/{one.pid}/wchan").read_text()
                    lines.append(f"{one.pid} of {one.ppid()} {one.status()} {waits} {command(one)}")
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR2)  # prints its stacks
        time.sleep(1)
        return "\n".join([*lines, *(file.read_text()[-4000:] for file in self.files)])

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it has printed, once it has ended."""
        self.wait(timeout)
        out, err = (file.read_text() if file.exists() else "" for file in self.files)
        return out, err

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if self.returncode is None:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(words: list[str], environment: dict[str, str], cwd: str, files: list[Path]) -> None:
    os.setsid()
    os.chdir(cwd)
    for number, path in enumerate(files, 1):
        file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    fork_pythons()
    become = _forked(words, environment)
    assert become is not None, words
    _end_with(become)


def fork_pythons() -> None:
    """From now on, in this process, which must have been forked from the server of ranks.py."""
    subprocess.Popen.__init__ = _popen  # type: ignore[method-assign]


def _popen(started: Any, args: Any, *more: Any, **how: Any) -> None:
    environment = how.get("env")
    become = _forked(args, os.environ if environment is None else environment)
    if become is not None:
        args, how["preexec_fn"] = [sys.executable], partial(_end_with, become)
    popen_anew(started, args, *more, **how)


def _forked(words: Any, environment: Mapping[str, str]) -> Callable[[], Any] | None:
    """What a process does that is forked in place of this command; None where it begins anew."""
    if isinstance(words, (str, bytes, os.PathLike)):
        return None
    words, network, parent = [*map(str, words)], None, None
    if words[:1] == ["nsenter"] and "--" in words:
        options, words = words[1 : words.index("--")], words[words.index("--") + 1 :]
        network = options.pop().removeprefix("--net=")
        if options:  # a user namespace: who is root needs none
            return None
    if words[:3] == ENDS_WITH and words[3] != "-":
        parent, words = int(words[3]), words[4:]
    if words[:1] != [sys.executable] or not any(words[1 : 1 + len(of)] == of for of in HEAVY):
        return None
    return partial(_become, words[1:], dict(environment), network, parent)


def _become(
    words: list[str], environment: dict[str, str], network: str | None, parent: int | None
) -> None:
    """What the interpreter does with these words, in a process that is never replaced."""
    _forget(keep=())  # also the pipe by which subprocess learns that it has begun
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
    os.environ.clear()
    os.environ.update(environment)
    if network is not None:
        with open(network) as opened:
            assert ctypes.CDLL(None, use_errno=True).setns(opened.fileno(), ENTER_NETWORK) == 0
    if parent is not None:
        end_with_parent(parent)
    words = words[words[0] == "-u" :]
    if words[0] == "-c":
        ctypes.CDLL(None).prctl(NAME_PROCESS, LAUNCHER.encode(), 0, 0, 0)
        util.spawnv_passfds = _spawn
        sys.argv = ["-c", *words[2:]]
        exec(words[1], {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def _spawn(path: str, words: Sequence[Any], keep: Sequence[int]) -> int:
    """The fork server of a launcher: forked as well, unless it is one that replaces another: with
    threads beside it, as there are by then, no server is forked.
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
    sys.excepthook = sys.__excepthook__
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open(number, "w" if number else "r", buffering=1, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    forkserver._forkserver.__init__()  # type: ignore[misc]
    resource_tracker._resource_tracker.__init__()  # type: ignore[misc]
    process.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]
    process._children.clear()  # type: ignore[attr-defined]
    process._parent_process = None  # type: ignore[attr-defined]


def _end_with(function: Callable[[], Any]) -> None:
    """The rest of this process."""
    code = 1
    try:
        code = int(function() or 0)
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

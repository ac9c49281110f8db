"""How processes end: children with their parent, even after kill -9; mistakes, signals and lack of
memory with one line.

    python -m harness.core.process PID COMMAND...    becomes COMMAND, and ends with process PID
    python -m harness.core.process - COMMAND...      runs COMMAND; asks it to end at end of input

Otherwise the ranks of a killed launcher would continue to train, occupy the GPUs and disturb the
next measurement.
"""

# Imported before everything else, so that Ctrl-C prints one line: slow imports come later.

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

GRACE_S = 20.0  # for a process to record and exit, before it is killed
SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h
# Where the kernel counts processes killed for lack of memory: on the machine, and in a control
# group (of version 2, with the groups below it, or of version 1).
VMSTAT, CGROUPS = Path("/proc/vmstat"), Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
OOM, COUNT = re.compile(r"^oom (\d+)$", re.MULTILINE), re.compile(r"^(\d+)$", re.MULTILINE)
PARENT = "HARNESS_PARENT"  # variable with its PID, for a process without arguments


# Messages about a lack of memory, from allocators, libraries, the loader and the kernel. oneDNN
# does not say what is missing; "primitive descriptor" instead means an unsupported operation.
NO_MEMORY = re.compile(
    r"can't allocate memory|cannot allocate memory(?! in static TLS)|bad_alloc|MemoryError|"
    r"could not create a primitive(?! descriptor)|out of memory|not enough memory|"
    r"_STATUS_ALLOC_FAILED|failed to map segment from shared object(?!:)|"
    r"Memory allocation still failed",
    re.IGNORECASE,
)
# Python's messages about a library that failed without saying why, as it may if it was refused
# memory, or about a thread that did not start (its stack takes memory).
WITHOUT_REASON = re.compile(r"without (setting an exception|exception set)|can't start new thread")


def install_quit_handlers() -> None:
    """Until other handlers are set, Ctrl-C, a hangup and a lack of memory end this process with one
    line.

    Imports take seconds, and an error during one prints pages of traceback.
    """
    sys.excepthook = _tell_lack_of_memory
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored, as under nohup: leave it so
            signal.signal(number, _end)


def open_closed_streams() -> None:
    """Open closed standard streams (>&-) on /dev/null, or the next file would get their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


class _IgnoringErrors(io.FileIO):
    """Drops output that cannot be written: full disk, closed pipe, vanished terminal."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError:
            return len(content)


def print_if_possible() -> None:
    """From now on, drop output that cannot be written: only the records matter.

    Streams that replaced the process's own are left alone.
    """
    open_closed_streams()
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue
        with suppress(OSError, ValueError):
            stream.flush()
        raw, unbuffered = _IgnoringErrors(number, "w", closefd=False), stream.write_through
        text = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw),  # python -u
            stream.encoding, stream.errors, line_buffering=stream.line_buffering,
            write_through=unbuffered,
        )  # fmt: skip
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)


def lacks_memory(error: BaseException) -> bool:
    """Whether the error names a lack of memory, or may hide one while the shell limits memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    says = isinstance(error, (ImportError, RuntimeError)) and NO_MEMORY.search(str(error))
    return isinstance(error, MemoryError) or bool(says) or is_without_reason(error)


def is_without_reason(error: BaseException) -> bool:
    matched = isinstance(error, (RuntimeError, SystemError)) and WITHOUT_REASON.search(str(error))
    return bool(matched) and limits_memory()


def causes_of(error: BaseException | None) -> list[BaseException]:
    """The error first, then what it was raised from."""
    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__
    return causes


def lack_of_memory(error: BaseException) -> BaseException | None:
    """The earliest lack of memory among an error and its causes; None if there is none."""
    return next(filter(lacks_memory, reversed(causes_of(error))), None)


def _tell_lack_of_memory(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """The excepthook: one line if an uncaught error, as of an import, is a lack of memory."""
    if (lack := lack_of_memory(error)) is None:
        sys.__excepthook__(kind, error, trace)
        return
    file, why = Path(sys.argv[0]), f"{type(lack).__name__}: {lack}".strip(": ")
    program = file.parent.name if file.name == "__main__.py" else file.name
    complain(program, MemoryError(f"out of memory: {why}"))


def restore_excepthook() -> None:
    """Undo install_quit_handlers() for errors: the outcome of a run tells a lack of memory."""
    if sys.excepthook is _tell_lack_of_memory:
        sys.excepthook = sys.__excepthook__


def restore_interrupt() -> None:
    """Undo install_quit_handlers() for Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def ending_signals() -> list[signal.Signals]:
    """The signals that ask a process to end; a hangup is none under nohup."""
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hangup]


def _end(signum: int, frame: Any) -> None:
    if is_leader():
        cleared = CLEARED if _shows_work() else ""  # erase the line of working()
        os.write(2, f"{cleared}stopped by {signal.Signals(signum).name}\n".encode())
    os._exit(128 + signum)


def end_at_once(code: int) -> NoReturn:
    """Exit without Python's teardown, after output has been flushed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def usable_cores() -> list[int]:
    """The numbers of the cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    return sorted(affinity(0) if affinity else range(os.cpu_count() or 1))


def is_leader() -> bool:
    """Whether this is the only process of its launcher, or its rank 0."""
    return os.environ.get("RANK", "0") == "0"


def complain(program: str, error: Exception | str, leader: bool = True) -> int:
    """Print one line on stderr, on the leader only; returns the exit code for a mistake."""
    line = f"{program}: error: {_in_one_line(str(error))}"
    if leader:
        print(line, file=sys.stderr, flush=True)
    else:
        time.sleep(1)  # the launcher stops all ranks when one exits: let the leader print first
    report_to_torchrun(line)
    return 2


def warn(text: str) -> None:
    """Print a warning on stderr, in one line."""
    print(f"warning: {_in_one_line(text)}", file=sys.stderr, flush=True)


def _in_one_line(text: str) -> str:
    return " ".join(printable(text).splitlines())


def printable(text: str) -> str:
    """The text with control characters escaped: a record may hold anything."""
    return CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


# Control characters except tab and newline, and characters that change the writing direction.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@contextmanager
def quiet_when_closed() -> Iterator[None]:
    """Treat a closed output pipe as success: its reader (such as head) has seen enough."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Flushing the remaining buffer must not fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_says_work = False  # False in libraries; True in a command that a person typed
CLEARED = "\r\x1b[K"  # erases a terminal's current line


def say_work() -> None:
    """From now on, working() prints its line on a terminal."""
    global _says_work
    _says_work = True


def _shows_work() -> bool:
    return _says_work and sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def working(text: str) -> Iterator[None]:
    """On a terminal, show a line about the work in progress until it is done."""
    if not _shows_work():
        yield
        return
    with suppress(OSError):
        print(f"{CLEARED}{printable(text)} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        with suppress(OSError):
            print(CLEARED, end="", file=sys.stderr, flush=True)


_begun = ExitStack()


def begin_work(text: str) -> None:
    """Show the line of working() from here until end_work()."""
    say_work()
    _begun.enter_context(working(text))


def end_work() -> None:
    """Erase that line and show no more: training prints lines of its own."""
    global _says_work
    _begun.close()
    _says_work = False


def report_to_torchrun(line: str) -> None:
    """Leave the line for torchrun, which ends with a block about the failed rank: there it repeats
    this line instead of a hint at tracebacks.
    """
    import multiprocessing

    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if name is None or multiprocessing.parent_process() is not None:
        return
    about = {"py_callstack": line, "timestamp": str(int(time.time()))}
    with suppress(OSError):  # the line itself has been printed, or will be
        file = Path(name)
        file.parent.mkdir(parents=True, exist_ok=True)  # start.py removes it
        file.write_text(json.dumps({"message": {"message": line, "extraInfo": about}}), "utf-8")


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP; False where the kernel does not tell."""
    state = text_of(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[:1]
    return state in (["T"], ["t"])


def ranks_beside() -> dict[int, int]:
    """Rank -> process, for the ranks started by the torchrun of this one, itself included; empty in
    a forked process, or where the kernel does not tell.
    """
    run_id, parent = os.environ.get("TORCHELASTIC_RUN_ID"), os.getppid()
    found: dict[int, int] = {}
    if run_id is None:
        return found
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        for pid in map(int, text_of(children).split()):
            began = _environment_of(pid)
            if began.get("TORCHELASTIC_RUN_ID") == run_id and began.get("RANK", "").isdigit():
                found[int(began["RANK"])] = pid
    return found


def _environment_of(pid: int) -> dict[str, str]:
    """The environment variables that a process was started with."""
    text = text_of(Path(f"/proc/{pid}/environ"))
    return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)


def forked() -> list[int]:
    """The processes that the main thread has forked, as a data loader does; empty where the kernel
    does not tell.
    """
    own = os.getpid()
    children = text_of(Path(f"/proc/{own}/task/{own}/children")).split()
    return [int(child) for child in children if _command_of(child) == _command_of(own)]


def _command_of(pid: int | str) -> str:
    return text_of(Path(f"/proc/{pid}/cmdline"))


def end_with_parent(parent: int | None = None) -> None:
    """Kill this process when its parent ends; at once if the parent is already gone."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        watch = threading.Thread(target=end_when_orphaned, args=(parent or os.getppid(),))
        watch.daemon = True
        watch.start()


def end_when_orphaned(parent: int, every_s: float = 0.5) -> None:
    """Kill this process once its parent has ended, where the kernel cannot: by polling."""
    while os.getppid() == parent:
        time.sleep(every_s)
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class OutOfMemory:
    """The kernel's counts of lacking memory; only the difference of two counts has a meaning."""

    on_machine: int  # processes that were killed
    in_group: int  # processes killed in this process's control group
    group_full: int  # how often that group, or one above it, reached its limit

    @classmethod
    def now(cls) -> Self:
        on_machine, in_group, full = _sum(OOM_KILLS, VMSTAT), 0, 0
        for line in text_of(OWN_GROUPS).splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers in ("", "memory"):
                root = CGROUPS / controllers
                own = root / name.lstrip("/")
                in_group += _sum(OOM_KILLS, own / "memory.events", own / "memory.oom_control")
                for group in (own, *own.parents):
                    if group.is_relative_to(root):
                        full += _sum(OOM, group / "memory.events")
                        full += _sum(COUNT, group / "memory.failcnt")
        return cls(on_machine, in_group, full)

    def since(self) -> str | None:
        """What has run out of memory since, so that a process was killed; None if nothing."""
        now = OutOfMemory.now()
        if now.in_group > self.in_group:
            full = now.group_full > self.group_full
            return "its control group" if full else "the machine"
        # The killed process may have been in a control group of its own.
        return "the machine or a control group" if now.on_machine > self.on_machine else None


def _sum(pattern: re.Pattern[str], *files: Path) -> int:
    return sum(int(count) for file in files for count in pattern.findall(text_of(file)))


def limits_memory() -> bool:
    """Whether this process may not use all memory of the machine (ulimit -v)."""
    import resource

    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def text_of(file: Path) -> str:
    """The text of a file; empty if it does not exist or cannot be read."""
    try:
        return file.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def last_line(text: str) -> str:
    """The last line (why a program ended), shortened to be part of another line; may be empty."""
    lines = text.strip().splitlines() or [""]
    return " ".join(lines[-1].split())[:300]


def run_while_connected(command: list[str]) -> int:
    """Run a command and return its exit code; ask it to end when our input closes, as signals do
    not pass through ssh.

    The first line of the input is JSON: variables that must not appear on a command line.
    """
    import subprocess

    end_with_parent()
    variables = json.loads(sys.stdin.buffer.readline() or b"{}")
    child = subprocess.Popen(
        [sys.executable, "-m", "harness.core.process", str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **variables},
    )

    def listen() -> None:
        os.read(0, 1)
        child.terminate()
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()

    threading.Thread(target=listen, daemon=True).start()
    return code if (code := child.wait()) >= 0 else 128 - code


def main(argv: list[str]) -> None:
    parent, *command = argv
    if parent == "-":
        sys.exit(run_while_connected(command))
    if sys.platform == "linux":
        end_with_parent(int(parent))  # remains set after exec
    os.execvp(command[0], command)  # noqa: S606 - a list of words, no shell


if __name__ == "__main__":
    main(sys.argv[1:])

"""A command that ends with the input of whoever started it, where signals do not reach."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from harness.core import process as parent
from harness.core.process import end_when_orphaned
from tests.support.sweeps import ROOT, gone, wait_for

pytestmark = pytest.mark.process

# Says that it runs, and what it was asked.
CHILD = """
import signal, sys, time
def stop(number, frame):
    print("asked", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, stop)
print("runs", flush=True)
time.sleep(60)
"""


def started(*command: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "harness.core.process", "-", sys.executable, *command]
    process = subprocess.Popen(
        words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    process.stdin.write('{"SECRET": "by its input"}\n')
    process.stdin.flush()
    return process


def test_its_exit_code_is_that_of_the_command() -> None:
    assert started("-c", "raise SystemExit(5)").wait(20) == 5
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert started("-c", killed).wait(20) == 128 + signal.SIGKILL


def test_what_must_not_stand_on_a_command_line_comes_by_its_input() -> None:
    process = started("-c", "import os; print(os.environ['SECRET'])")
    assert process.stdout is not None and process.stdout.read() == "by its input\n"
    assert process.wait(20) == 0


def test_the_end_of_its_input_asks_the_command_to_end() -> None:
    process = started("-c", CHILD)
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "runs\n"
    process.stdin.close()
    assert process.stdout.readline() == "asked\n" and process.wait(20) == 7


def test_a_killed_parent_leaves_no_children() -> None:
    import psutil

    process = started("-c", CHILD)
    assert process.stdout is not None and process.stdout.readline() == "runs\n"
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert children and gone(children)


def test_a_command_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf:
        """A child that ignores what it is asked."""

        ended: Any = None

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def terminate(self) -> None: ...

        def kill(self) -> None:
            self.ended = -9

        def wait(self, timeout: float | None = None) -> int:
            if timeout is not None:
                raise subprocess.TimeoutExpired("deaf", timeout)
            return int(wait_for(lambda: self.ended, 5))

    monkeypatch.setattr(parent, "end_with_parent", lambda: None)
    monkeypatch.setattr(subprocess, "Popen", Deaf)
    monkeypatch.setattr(parent.os, "read", lambda *_: b"")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    assert parent.run_while_connected(["deaf"]) == 128 + signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread looks now and then")
def test_what_loads_for_the_ranks_is_tied_to_its_launcher_before_it_loads() -> None:
    """Its launcher may be killed in these seconds: then another process is its parent."""
    env = {**os.environ, parent.PARENT: "1", "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "import harness.train.run.preload"],
        cwd=ROOT, env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "harness.core.process" in imported and "torch" not in imported


def test_a_command_ends_with_the_process_it_is_tied_to() -> None:
    """Even when that is killed; also where the kernel does not see to it."""
    code = (
        "import os, subprocess, sys; child = subprocess.Popen([sys.executable, '-m', "
        "'harness.core.process', str(os.getpid()), 'sleep', '60']); print(child.pid, flush=True); "
        "child.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        name = Path(f"/proc/{child}/comm")
        until = time.monotonic() + 10
        while name.read_text().strip() != "sleep" and time.monotonic() < until:
            time.sleep(0.02)
        parent.kill()
    until = time.monotonic() + 5
    while name.exists() and "Z" not in name.with_name("stat").read_text().split(")")[1][:3]:
        assert time.monotonic() < until, "it lives on"
        time.sleep(0.02)
    # The parent of another process is not ours: the watcher ends this fork at once.
    fork = os.fork()
    if fork == 0:
        end_when_orphaned(parent=1 << 22, every_s=0.01)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == -signal.SIGKILL


# Commands, and what they are about to load: torch, or what is needed to read a command line.
LOADING = {
    "script": (["vit.py", "--tiny"], "torch"),
    "script, at its first lines": (["bert.py", "--tiny"], "textwrap"),
    "verb": (["-m", "harness", "store", "1"], "torch"),
    "verb, at its first lines": (["-m", "harness", "table"], "textwrap"),
    "torchrun": (["-m", "harness.train.torchrun", "--standalone", "vit.py"], "torch"),
}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("what", LOADING)
def test_a_signal_while_loading_is_one_line(
    what: str, signum: signal.Signals, tmp_path: Path
) -> None:
    words, package = LOADING[what]
    slow, loading = tmp_path / package, tmp_path / "loading"
    slow.mkdir()
    (slow / "__init__.py").write_text(
        f"import pathlib, time\npathlib.Path({str(loading)!r}).touch()\ntime.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert wait_for(loading.exists, 60)
    process.send_signal(signum)
    _, printed = process.communicate(timeout=20)
    assert process.returncode == 128 + signum and printed == f"stopped by {signum.name}\n"


def test_ignored_signals_stay_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: dict[int, Any] = {signal.SIGINT: signal.default_int_handler}
    monkeypatch.setattr(signal, "getsignal", lambda n: set_to.get(n, signal.SIG_IGN))
    monkeypatch.setattr(signal, "signal", set_to.__setitem__)
    parent.install_quit_handlers()
    assert set_to == {signal.SIGINT: parent._end}  # with nohup SIGHUP stays ignored
    assert parent.ending_signals() == [signal.SIGTERM, signal.SIGINT]
    parent.restore_interrupt()
    assert set_to == {signal.SIGINT: signal.default_int_handler}
    set_to[signal.SIGHUP] = signal.SIG_DFL
    assert signal.SIGHUP in parent.ending_signals()


KILLED = "oom_kill_disable 0\noom_kill 2\noom_group_kill 7\n"


@pytest.mark.parametrize(("group", "files", "what"), [
    ("0::/job/step", {"job/step/memory.events": f"oom 9\n{KILLED}"}, "its control group"),
    ("0::/job/step", {"job/step/memory.events": f"oom 0\n{KILLED}"}, "the machine"),
    ("0::/job/step", {"job/step/memory.events": KILLED, "job/memory.events": "oom 1\n"},
     "its control group"),
    ("4:memory:/job", {"memory/job/memory.oom_control": KILLED}, "the machine"),
    ("4:memory:/job", {"memory/job/memory.oom_control": KILLED, "memory/memory.failcnt": "8\n"},
     "its control group"),
    ("4:memory:/job", {"memory/job/memory.failcnt": "8\n"}, None),  # it got along
    ("4:memory:/job", {"vmstat": KILLED, "memory/job/memory.failcnt": "8\n"},
     "the machine or a control group"),
    ("", {"vmstat": KILLED}, "the machine or a control group"),
])  # fmt: skip
def test_what_the_kernel_has_killed_is_told_by_its_counts(
    group: str,
    files: dict[str, str],
    what: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In files that are planted here, as a machine has one version of control groups."""
    (tmp_path / "own").write_text(f"3:cpu:/elsewhere\n{group}\n".replace("\n\n", "\n"))
    monkeypatch.setattr(parent, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(parent, "CGROUPS", tmp_path)
    monkeypatch.setattr(parent, "VMSTAT", tmp_path / "vmstat")
    before = parent.OutOfMemory.now()
    assert before.since() is None
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert before.since() == what
    assert parent.OutOfMemory.now().since() is None


def test_a_limit_of_the_shell_is_seen(root: Path) -> None:
    tell = "from harness.core.process import limits_memory; print(limits_memory())"
    for limit, seen in (("ulimit -v 8000000; ", True), ("", False)):
        words = ["sh", "-c", f'{limit}exec "$0" -c "$1"', sys.executable, tell]
        said = subprocess.run(words, cwd=root, capture_output=True, text=True)
        assert said.stdout == f"{seen}\n", said.stderr


def test_imports_that_lack_memory_end_with_one_line(root: Path) -> None:
    torchrun = "-m harness.train.torchrun --standalone vit.py --tiny"
    for words, program in (("vit.py --tiny", "vit.py"), (torchrun, "torchrun.py")):
        command = ["sh", "-c", f'ulimit -v 300000; exec "$0" {words}', sys.executable]
        said = subprocess.run(command, cwd=root, capture_output=True, text=True)
        assert said.returncode == 1 and said.stderr.count("\n") == 1, said.stderr
        assert said.stderr.startswith(f"{program}: error: out of memory: ImportError: ")


def test_what_lacks_memory_is_told_from_what_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parent, "limits_memory", lambda: False)
    segment = "libx.so: failed to map segment from shared object"
    unsaid = RuntimeError("can't start new thread")
    assert parent.lacks_memory(ImportError(segment)) and parent.lacks_memory(MemoryError())
    assert not parent.lacks_memory(ImportError(f"{segment}: Operation not permitted"))
    assert not parent.lacks_memory(ImportError("cannot allocate memory in static TLS block"))
    assert not parent.lacks_memory(unsaid)
    monkeypatch.setattr(parent, "limits_memory", lambda: True)
    assert parent.lacks_memory(unsaid)
    monkeypatch.setattr(sys, "argv", ["a/vit.py"])
    wrapped = ValueError("could not import")
    wrapped.__cause__ = MemoryError()
    parent._tell_lack_of_memory(ValueError, wrapped, None)
    line = "vit.py: error: out of memory: MemoryError\n"
    assert capsys.readouterr().err == line
    monkeypatch.setattr(sys, "argv", ["a/harness/__main__.py"])
    pages = ImportError(f"please read this\nfor advice: {segment}")  # as numpy raises it
    pages.__cause__ = ImportError(segment)
    parent._tell_lack_of_memory(ImportError, pages, None)
    assert capsys.readouterr().err == f"harness: error: out of memory: ImportError: {segment}\n"
    parent._tell_lack_of_memory(ValueError, ValueError("another"), None)
    assert capsys.readouterr().err == "ValueError: another\n"
    monkeypatch.setattr(sys, "excepthook", parent._tell_lack_of_memory)
    parent.restore_excepthook()
    assert sys.excepthook is sys.__excepthook__


def test_errors_and_warnings_are_one_escaped_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert parent.complain("harness", "red \x1b[31m\nand more") == 2
    parent.warn("red \x1b[31m\nand more")
    text = r"red \x1b[31m and more"
    assert capsys.readouterr().err == f"harness: error: {text}\nwarning: {text}\n"

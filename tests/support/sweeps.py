"""What the tests of sweeps share: a file, a runner in a process of its own, what it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from harness import cli
from harness.core.records import RunFolder, find_runs, read_rows
from harness.launch.launcher import Launcher
from harness.launch.places import Local, Options
from harness.launch.plan import Job, plan
from harness.launch.screen import Screen
from harness.launch.sweep import options_of
from harness.launch.sweepfile import load

ROOT = Path(__file__).resolve().parents[2]
SMALL = "settings: {epochs: 2, train_size: 256, test_size: 64}"  # of a sweep file
# Seconds and what follows from them, and what the network adds; everything else must not depend on
# what a run went through.
TIMES = ("_s", "checksum", "_share", "per_gpu", "attempt", "unix", "memory_gib_per_rank",
         "timed_samples", "timed_steps", "network_sent_bytes", "tflops_per_s_without_padding",
         "mfu", "gpu", "node", "energy_j", "compute_skew", "slowest_rank")  # fmt: skip


GRID = """
# Question: which?
script: vit
grid: {setup: [1_1, 1_2, 2_1], lr: [0.001, 0.002]}
seeds: [2, 4]
baseline: {setup: 1_1}
"""
STARTED: list[Any] = []  # runners; conftest ends those that a failed test leaves
LAUNCHER = "launcher"  # the name of a launcher that warm_python.py has forked


def sweep_file(folder: Path, text: str, name: str = "mine") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return path


def jobs_of(
    folder: Path, text: str, out: Path | str = "out", tiny: bool = False, repeat: int = 1
) -> list[Job]:
    """The runs that a sweep file with this text plans."""
    return plan(load(sweep_file(folder, text), tiny), str(out), repeat)


class Watcher(Screen):
    """What a person would see of a sweep, as lines."""

    def __init__(self) -> None:
        super().__init__("", [])
        self.lines: list[str] = []

    def print(self, line: str) -> None:
        self.lines.append(line)

    def warn(self, text: str) -> None:
        self.lines.append(f"warning: {text}")

    def note(self, line: str, ended: bool = False) -> None:
        self.lines.append(line)

    def show(self) -> None: ...

    def __contains__(self, part: str) -> bool:
        return any(part in line for line in self.lines)


def arguments(file: Path, out: Path, *flags: str) -> list[str]:
    """What follows python -m harness; it warns of nothing, because tests run while others do."""
    calm = [] if "slurm" in flags else ["--isolation", "off"]
    return ["sweep", str(file), "--output_dir", str(out), *calm, *flags]


def start(
    file: Path, out: Path, *flags: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.Popen[str]:
    """A runner, as a person starts it; warm_sweeps.py has one that starts sooner."""
    process = subprocess.Popen(
        [sys.executable, "-m", "harness", *arguments(file, out, *flags)],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    STARTED.append(process)
    return process


def sweep(file: Path, out: Path, *flags: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """A runner to its end."""
    process = start(file, out, *flags, **more)
    stdout, stderr = process.communicate(timeout=150)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def command(process: psutil.Process) -> str:
    """The words a process was started with, none once it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie too
        return ""


def launchers(runner: int) -> list[psutil.Process]:
    """Those that a runner has started, one for each node."""
    children = psutil.Process(runner).children()
    return [p for p in children if "train.run.warm" in command(p) or name_of(p) == LAUNCHER]


def family(runner: int) -> dict[str, list[psutil.Process]]:
    """The processes below a runner, by what they are."""
    by_kind: dict[str, list[psutil.Process]] = {"launcher": [], "server": [], "rank": []}
    try:
        for launcher in launchers(runner):
            by_kind["launcher"].append(launcher)
            for server in launcher.children():
                if "multiprocessing.forkserver" in command(server):
                    by_kind["server"].append(server)
                    by_kind["rank"] += server.children()
    except psutil.NoSuchProcess:
        pass
    return by_kind


def gone(processes: list[psutil.Process], within_s: float = 5.0) -> bool:
    """Whether all of these end within a time.

    torch's manager of shared memory waits two seconds by its own clock before it looks whether
    anybody still uses it: it has the time once more.
    """
    managers = [p for p in alive(processes) if name_of(p) == "torch_shm_manager"]
    ours = [p for p in processes if p not in managers]
    return _end(ours, within_s) and _end(managers, within_s)


def name_of(process: psutil.Process) -> str | None:
    """Its name, or None when it has ended meanwhile."""
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return None


def _end(processes: list[psutil.Process], within_s: float) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if not any(alive(processes)):
            return True
        time.sleep(0.02)
    return False


def alive(processes: list[psutil.Process]) -> Iterator[psutil.Process]:
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except psutil.NoSuchProcess:
            continue


def wait_for(what: Any, within_s: float = 120.0) -> Any:
    """The first true value of a function."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if value := what():
            return value
        time.sleep(0.02)
    raise AssertionError("waited in vain")


def outcomes(out: Path) -> dict[str, str | None]:
    """What became of every run, by its place below the folder."""
    return {str(run.path.relative_to(out)): run.outcome() for run in find_runs(out)}


def summary(out: Path, part: str = "") -> dict[str, Any]:
    """The summary of the one run whose place has this in its name."""
    (run,) = [run for run in find_runs(out) if part in str(run.path)]
    content: dict[str, Any] = json.loads(run.summary.read_text())
    return content


def untimed_rows(folder: RunFolder) -> list[dict[str, Any]]:
    rows, broken = read_rows(folder.epochs)
    assert broken == 0
    return [{k: v for k, v in row.items() if not k.endswith(TIMES)} for row in rows]


def harness_sweep(argv: list[str]) -> int:
    """python -m harness sweep ... in this process: its exit code."""
    return cli.main(["sweep", *argv])


def sweep_options(argv: list[str]) -> Options:
    """How these flags have a sweep run; UserError if they are wrong."""
    return options_of(cli.parser_of("sweep").read(argv))


@contextmanager
def one_launcher() -> Iterator[None]:
    """Sweeps of this process share one launcher, which loads once."""
    launchers: list[Launcher] = []
    start, close = Local.start, Launcher.close

    def start_once(place: Local, log: Path) -> Launcher:
        launchers.extend([] if launchers else [start(place, log)])
        return launchers[0]

    stays = patch.object(Launcher, "close", lambda launcher: None)
    try:
        with patch.object(Local, "start", start_once), stays:
            yield
    finally:
        for launcher in launchers:
            close(launcher)

"""Peers as processes of their own, forked from the warm server: started, listened to, killed."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from harness.core.records import RunFolder, find_runs, read_json, read_rows
from tests.support.ranks import ROOT, SERVER, _printing_to, run_script
from tests.support.sweeps import wait_for

# Two processes, with what they compute in a fixed order: sums differ by rounding otherwise.
QUICK = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


class Peer:
    """One process; what it prints goes to files, so that it stays when it is killed."""

    def __init__(
        self, folder: Path, function: Callable[..., Any], *args: Any, env: Any = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.process = SERVER.Process(
            target=_in_environment, args=(QUICK | (env or {}), str(folder), function, args)
        )
        self.process.start()
        assert self.process.pid is not None
        self.pid: int = self.process.pid

    @property
    def out(self) -> str:
        file = self.folder / "out_0"
        return file.read_text() if file.is_file() else ""

    @property
    def err(self) -> str:
        file = self.folder / "err_0"
        return file.read_text() if file.is_file() else ""

    def address(self) -> str:
        """Where others join it."""
        told = re.compile(r"(?:--initial_peers|answers at) (\S+)")
        match = wait_for(lambda: told.search(self.out) or self.ended())
        assert isinstance(match, re.Match), self.err
        return match[1]

    def ended(self) -> bool:
        return self.process.exitcode is not None

    def code(self, within_s: float = 150) -> int | None:
        self.process.join(within_s)
        return self.process.exitcode

    def family(self) -> list[psutil.Process]:
        """All that it has started."""
        return psutil.Process(self.pid).children(recursive=True)

    def kill(self, signum: int = signal.SIGKILL) -> None:
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            psutil.Process(self.pid).send_signal(signum)


def script(folder: Path, name: str, *argv: str, env: Any = None) -> Peer:
    return Peer(folder, run_script, name, list(argv), str(ROOT), env=env)


def lingers(update: int, pause_s: float, peers_ready: int, argv: list[str]) -> int:
    """vit.py, which pauses after each update from this one on until so many peers train.

    One long pause would leave those that are there first without an answer.
    """
    import vit as module

    class Lingering(module.Console):
        all_there = False

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            super().on_step_end(args, state, control, **kwargs)
            self.all_there = self.all_there or self.context.session.count() >= peers_ready
            if state.global_step >= update and not self.all_there:
                time.sleep(pause_s)

    module.Console = Lingering  # type: ignore[misc]
    return run_script("vit", argv, str(ROOT))


def impatient(once: str, argv: list[str]) -> int:
    """vit.py, which waits no longer for a recorder that is gone once there is this file."""
    from harness.train.strategy.hivemind import session

    def look() -> None:
        while not Path(once).exists():
            time.sleep(0.1)
        session.GONE_S = 1.0

    threading.Thread(target=look, daemon=True).start()
    return run_script("vit", argv, str(ROOT))


def record(out: Path) -> RunFolder:
    (found,) = find_runs(out)
    return found


def rows(folder: RunFolder) -> list[dict[str, Any]]:
    found, broken = read_rows(folder.epochs)
    assert broken == 0
    return found


def summary(folder: RunFolder) -> dict[str, Any]:
    return read_json(folder.summary) or {}


def _in_environment(
    env: dict[str, str], folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import os

    from harness.train.run.start import leave

    os.environ.update(env)
    _printing_to(folder, function, args)
    leave(0)  # as the scripts do: Python's teardown would wait for threads of the library

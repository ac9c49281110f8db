"""Runs whose rank is stopped, or waits for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil

import vit
from tests.support.broken_runs import only_run
from tests.support.ranks import ran, run_script

ARGV = ["--tiny", "--train_size", "64", "--test_size", "16", "--epochs", "2", "--b", "8",
        "--setup", "1_2", "--telemetry_hz", "0", "--comm_probe", "off"]  # fmt: skip


def stalling(name: str, argv: list[str], cwd: str, number: int, how: str) -> int:
    """The script, whose rank of this number stalls after its third update."""
    # As after a node has come back: the count is that of its own torchrun.
    rank = os.environ["RANK"]
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(rank) + 1)
    stderr = os.open(Path(argv[-1], f"stderr_{rank}"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(stderr, 2)

    class Stalling(vit.Console):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            super().on_step_end(args, state, control, **kwargs)
            if state.global_step == 3 and args.process_index == number:
                os.kill(os.getpid(), signal.SIGSTOP) if how == "stopped" else sleep_for_ever()

    vit.Console = Stalling  # type: ignore[misc]
    return run_script(name, argv, cwd)


def sleep_for_ever() -> None:
    while True:
        time.sleep(1)


def reason_of(
    folder: Path, number: int, how: str, *argv: str, env: dict[str, str] | None = None
) -> tuple[str, str]:
    """What is recorded of such a run, and what all of its ranks print."""
    stopped: list[psutil.Process] = []

    def kill_what_is_stopped() -> None:
        # As torchrun does, which gives a rank half a minute to end by itself.
        while not stopped and not done.wait(0.2):
            if any(folder.rglob("failure_*.json")) or any(folder.rglob("summary.json")):
                time.sleep(1)
                children = psutil.Process().children(recursive=True)
                stopped.extend(c for c in children if c.status() == psutil.STATUS_STOPPED)
                for child in stopped:
                    child.kill()

    done = threading.Event()
    killer = threading.Thread(target=kill_what_is_stopped)
    killer.start()
    try:
        words = [*ARGV, *argv, "--o", str(folder)]
        ended = ran(2, stalling, "vit", words, ".", number, how, env=env)
    finally:
        done.set()
        killer.join()
    assert ended.code != 0 and bool(stopped) == (how == "stopped")
    summary = only_run(folder).read_summary()
    assert summary is not None and summary["outcome"] == "failed"
    return str(summary["reason"]), "".join(f.read_text() for f in folder.glob("stderr_*"))

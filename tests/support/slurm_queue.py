"""Queues of jobs before a cluster that a stand-in plays."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from harness.launch.choices import Slurm
from harness.launch.outcome import State
from harness.launch.places import Options
from harness.launch.plan import Job
from harness.launch.slurm import queue
from harness.launch.slurm.queue import Queue
from tests.support.slurm_commands import StandIn
from tests.support.sweeps import Watcher, jobs_of


def planned(folder: Path, text: str) -> list[Job]:
    return jobs_of(folder, text, folder / "out", tiny=True)


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The commands of a cluster in the PATH, and no waiting for it."""
    commands = StandIn(folder / "bin")
    monkeypatch.setenv("PATH", f"{commands.folder}{os.pathsep}{os.environ['PATH']}")
    for name in ("ASK_EVERY_S", "NOTE_S", "RECORD_S", "LOST_S", "SECOND_S"):
        monkeypatch.setattr(queue, name, 0.0)
    commands.says("sbatch", "12\n")
    return commands


def queue_of(folder: Path, text: str = "script: vit", **options: Any) -> Queue:
    states = [State(job) for job in planned(folder, text)]
    slurm = Slurm(gres="none", detach=options.pop("detach", True))
    (folder / "sweep").mkdir(exist_ok=True)
    how = Options(launcher="slurm", slurm=slurm, **options)
    return Queue(states, how, folder / "sweep", Watcher())


def worked(folder: Path, text: str = "script: vit", **options: Any) -> Queue:
    """A queue that has done its work."""
    waiting = queue_of(folder, text, **options)
    waiting.work()
    return waiting


def seen(queue: Queue) -> Watcher:
    assert isinstance(queue.screen, Watcher)
    return queue.screen


def says_of(waiting: Queue, state: str, reason: str = "None") -> str:
    """What squeue prints of the jobs that a queue watches."""
    return "".join(f"{w.entry.id}|{state}|{reason}|{w.entry.name}\n" for w in waiting.watched)

"""Processes that load data belong to the rank that they load for, and end with it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import TrainerCallback

from tests.support.ranks import Ended, ranks
from tests.support.toys import CPU, Net, Points, trained

pytestmark = pytest.mark.process


class KillRank(TrainerCallback):
    """After the first update, write down the rank's children and kill it."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        children = [process.pid for process in psutil.Process().children()]
        self.notes.write_text(" ".join(map(str, children)))
        os.kill(os.getpid(), signal.SIGKILL)


def killed(folder: str) -> None:
    data = Points(32)
    callbacks = [KillRank(Path(folder, "children"))]
    trained(folder, Net(), data, data, "--num_workers=2", "--telemetry_hz=0", callbacks=callbacks)


def test_no_worker_outlives_a_rank_that_is_killed(tmp_path: Path) -> None:
    with pytest.raises(Ended):
        ranks(1, killed, str(tmp_path), env=CPU)
    workers = [int(pid) for pid in (tmp_path / "children").read_text().split()]
    assert len(workers) == 2
    until = time.monotonic() + 60
    while any(map(psutil.pid_exists, workers)) and time.monotonic() < until:
        time.sleep(0.2)
    assert not any(map(psutil.pid_exists, workers))

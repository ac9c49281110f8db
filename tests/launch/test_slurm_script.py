"""The script of a job as bash runs it, with stand-ins for the commands of SLURM."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from harness.launch.choices import Slurm
from harness.launch.slurm.scripts import Site, script
from tests.support.sweeps import jobs_of

pytestmark = pytest.mark.process


def ran(tmp_path: Path, does: dict[str, str]) -> tuple[int, dict[str, Any]]:
    """Exit code and note of a job that may go back into the queue once, with these commands."""
    commands = tmp_path / "bin"
    commands.mkdir(exist_ok=True)
    for name, text in does.items():
        (commands / name).write_text(f"#!/bin/bash\n{text}\n")
        (commands / name).chmod(0o755)
    (tmp_path / "jobs").mkdir(exist_ok=True)
    here = str(tmp_path)
    site = Site("mine.ab12", here, cwd=here, scripts="", root=here, python="python", environment={})
    jobs = jobs_of(tmp_path, "script: vit", tmp_path / "out", tiny=True)
    text = script(jobs, Slurm(requeue=1), site, None, rerun=False)
    done = subprocess.run(
        ["bash", "-c", text], env={**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    (file,) = (file for file in (tmp_path / "jobs").iterdir() if file.suffix != ".preemption")
    assert file.name == f"{site.name}_0.json"  # nothing else is left
    return done.returncode, json.loads(file.read_text())


# In a stand-in for srun, whose parent only waits for it: the script itself.
JOB = "job=$(ps -o ppid= -p $PPID);"
# Until the script has dealt with the signal, and a moment in which it waits again.
HEARD = 'while [ ! -e "$HARNESS_PREEMPTION" ]; do sleep 0.05; done; sleep 0.3;'


def test_a_job_that_is_requeued_while_it_asks_for_it_leaves_no_end(tmp_path: Path) -> None:
    """SLURM ends all of a job that it requeues, scontrol too, which has no answer yet."""
    asks = f"touch {tmp_path}/asked; kill -TERM $$ $PPID; sleep 0.3"
    does = {"srun": f"{JOB} kill -USR1 $job; {HEARD} exit 1", "scontrol": asks, "scancel": "exit 1"}
    code, note = ran(tmp_path, does)
    assert code == 1 and (tmp_path / "asked").exists()
    assert note["ended"] is None and note["signal"] == "", note


def test_a_job_that_is_cancelled_near_its_limit_does_not_go_back(tmp_path: Path) -> None:
    # A TERM comes to every process of the job.
    ends = f"{JOB} kill -USR1 $job; {HEARD} kill -TERM $job $PPID; sleep 0.3; exit 1"
    does = {"srun": ends, "scontrol": f"touch {tmp_path}/asked", "scancel": "exit 1"}
    began_s = time.monotonic()
    code, note = ran(tmp_path, does)
    assert code == 1 and not (tmp_path / "asked").exists()
    assert note["ended"] is not None and note["code"] == 1
    # Of what would end the step later, nothing is left that holds the output open.
    assert time.monotonic() - began_s < 30


def test_a_signal_as_the_step_ends_does_not_change_its_exit_code(tmp_path: Path) -> None:
    """bash may lose the exit code of a process that ends while a signal interrupts wait."""
    does = {"scontrol": f"touch {tmp_path}/asked", "scancel": "exit 1"}
    for attempt in range(60):
        # Moments around the end: before, while the script hears of it, and after.
        signals = f"{JOB} (sleep 0.{attempt % 20:03}; exec kill -USR1 $job) 2>/dev/null & exit 0"
        code, note = ran(tmp_path, does | {"srun": signals})
        assert (code, note["code"]) == (0, 0) and note["ended"] is not None, (attempt, note)
    assert not (tmp_path / "asked").exists()


def test_the_step_gets_the_signals_that_the_job_does_not_obey(tmp_path: Path) -> None:
    """As if nothing stood between srun and the script."""
    ends = f"trap 'touch {tmp_path}/heard; exit 3' TERM; kill -TERM $PPID $$; sleep 5"
    code, note = ran(tmp_path, {"srun": ends, "scancel": "exit 1"})
    assert (code, note["code"]) == (3, 3) and (tmp_path / "heard").exists()
    code, note = ran(tmp_path, {"srun": "kill -USR1 $$; exit 1", "scancel": "exit 1"})
    assert (code, note["code"]) == (138, 138)

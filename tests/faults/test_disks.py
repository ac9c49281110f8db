"""A disk that is full, has no names left, is read-only or gone, from any write of a run on."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from harness.core.records import RunFolder, find_runs
from harness.read.records.recorded import recorded
from tests.support.broken_runs import assert_same_training
from tests.support.disks import FAULTS, Writes, failing, trials
from tests.support.mutants import amount
from tests.support.ranks import ranks
from tests.support.toys import CPU, Net, Points, started, trainer_of

pytestmark = [pytest.mark.process, pytest.mark.root]

FLAGS = ["--save=last", "--save_steps=5", "--hang_after=0", "--telemetry_hz=0", "--epochs=2"]
MOST = 400  # more than a run writes


def train(folder: Path) -> tuple[int, str]:
    """Its exit code, and what it prints to stderr."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as said:
        try:
            with started(folder, *FLAGS) as run:
                run.train(trainer_of(run, Net(), Points(32), Points(8)))
        except SystemExit as error:
            return int(error.code or 0), said.getvalue()
    return 0, said.getvalue()


def run_of(folder: Path) -> RunFolder:
    (found,) = find_runs(folder)
    return found


def trial(writes: Writes, disk: Path, fault: str, at: int, healthy: RunFolder) -> str | None:
    """What is wrong after a run whose disk fails at this write; None if nothing is."""
    with failing(writes, disk, fault, at):
        code, said = train(disk / "out")
    runs = find_runs(disk / "out") if (disk / "out").exists() else []
    outcomes = [recorded(run).problem or run.outcome() for run in runs]
    told = said.count("\n") == 1 and (code == 2 or fault == "removed" or FAULTS[fault][1] in said)
    if (code and (not told or "finished" in outcomes)) or (said and not code):
        return f"code {code}, {outcomes}: {said}"
    if code and (ended := train(disk / "out"))[0]:
        return f"then {ended}"
    if not code and not runs:
        return None  # it was removed when all was written
    assert_same_training(run_of(disk / "out"), healthy)
    return None


def of_a_run(folder: str, chosen: int) -> list[str]:
    healthy, disk = Path(folder, "healthy"), Path(folder, "disk")
    writes = Writes(healthy)
    assert train(healthy) == (0, "")
    one = run_of(healthy)
    return trials(writes, disk, chosen, lambda fault, at: trial(writes, disk, fault, at, one))


def test_a_full_disk_at_any_write_of_a_run(tmp_path: Path) -> None:
    (wrong,) = ranks(1, of_a_run, str(tmp_path), amount(1, MOST), env=CPU)
    assert wrong == [], "\n".join(wrong)

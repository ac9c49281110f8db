"""A disk that fails at any write of a sweep, of its runs, or of the table at its end."""

from __future__ import annotations

import io
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.core.records import find_runs, read_json
from harness.launch import sweep as sweep_module
from harness.read.records.recorded import recorded
from tests.support.disks import Writes, failing, trials
from tests.support.mutants import amount
from tests.support.ranks import ranks
from tests.support.simulated import EPOCHS, SimulatedPlace, SimulatedWorld, row_of
from tests.support.sweeps import jobs_of, sweep_file
from tests.support.toys import CPU

pytestmark = [pytest.mark.process, pytest.mark.root]

SWEEP = "script: vit\ngrid: {seed: [1, 2]}\nsettings: {setup: 1_1}"
MOST = 400  # more than a sweep writes


def table(folder: Path, *flags: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """In this process, whose writes are counted."""
    return subprocess.CompletedProcess([], main(["table", str(folder), *flags]), "", "")


def sweep(folder: Path, out: Path) -> tuple[int, str]:
    """Its exit code, and what it prints to stderr."""
    file = sweep_file(folder, SWEEP)
    world = SimulatedWorld(0, jobs_of(folder, SWEEP, out=out), out / "sweeps" / "mine")
    world.plan, world.memory = [], 1000
    for job in world.jobs:
        saved = read_json(job.folder.path / "checkpoint.json") or {"update": 0}
        world.saved[job.folder.path] = saved["update"]
    with pytest.MonkeyPatch.context() as patch:
        world.patch(patch)
        patch.setitem(sweep_module.PLACES, "local", SimulatedPlace)
        patch.setattr(sweep_module, "_table", table)
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as said:
            flags = ["--isolation", "off", "--rerun", "failed"]
            code = main(["sweep", str(file), "--output_dir", str(out), *flags])
    return code, said.getvalue()


def trial(writes: Writes, folder: Path, disk: Path, fault: str, at: int) -> str | None:
    """What is wrong after a sweep whose disk fails at this write; None if nothing is."""
    out = disk / "out"
    with failing(writes, disk, fault, at):
        code, said = sweep(folder, out)
    # One line of its own, or of the table at its end.
    if said.count("\n") > 1 or (said and not (code and said.startswith("harness "))):
        return f"code {code}: {said}"
    wrong = [recorded(run).line for run in find_runs(out) if recorded(run).problem]
    if wrong:
        return f"records: {wrong}"
    if (ended := sweep(folder, out))[0]:
        return f"then {ended}"
    rows = [run.read_epochs() for run in find_runs(out) if not recorded(run).problem]
    whole = ([row_of(n + 1) for n in range(EPOCHS)], 0)
    return None if rows == [whole] * 2 else f"rows: {rows}"


def of_a_sweep(name: str, chosen: int) -> list[str]:
    folder, disk = Path(name), Path(name, "disk")
    writes = Writes(folder / "healthy")
    assert sweep(folder, folder / "healthy")[0] == 0
    return trials(writes, disk, chosen, lambda fault, at: trial(writes, folder, disk, fault, at))


def test_a_full_disk_at_any_write_of_a_sweep(tmp_path: Path) -> None:
    (wrong,) = ranks(1, of_a_sweep, str(tmp_path), amount(4, MOST), env=CPU)
    assert wrong == [], "\n".join(wrong)

"""Published records, for tests that damage copies of real ones."""

from __future__ import annotations

import shutil
from pathlib import Path

from harness.core.records import find_runs
from harness.read.records.packing import texts, write_folder
from harness.read.records.sweeps import read_sweep

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "outputs" / "published"
# A process and two, one epoch and several.
DEMO = PUBLISHED / "sweeps" / "demo-tiny"


def copied(tmp_path: Path) -> tuple[Path, list[Path]]:
    """The records of the demonstration, and its sweep."""
    root = tmp_path / "outputs"
    for run in read_sweep(DEMO).runs:
        write_folder(root / str(run.path), texts(run.recorded_folder))
    (root / "sweeps" / DEMO.name).mkdir(parents=True)
    shutil.copy(DEMO / "sweep.json", root / "sweeps" / DEMO.name)
    return root, [run.path for run in find_runs(root)]

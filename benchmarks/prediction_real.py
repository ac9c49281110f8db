"""Two emulated nodes that really compute, one core each, for benchmarks/prediction.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.prediction_table import Row, compared
from harness.core.collectives import Shape, wire_of
from harness.core.links import plain_link
from harness.read.predict.facts import Overrides, step_s
from harness.read.predict.fitting import all_reduces_of, fit_records, measured_beside
from harness.read.predict.scenario import Scenario
from harness.read.records.selection import read_selected

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ("--tiny", "--epochs", "1", "--telemetry_hz", "0", "--save", "none")
BATCHES, BATCH = (8, 16, 32), 16


def real_rows(out: Path, links: list[str], measure: bool) -> Iterator[Row]:
    """A row per link; the script itself does not repeat runs that are finished."""
    if measure:
        for batch in BATCHES:
            _run([sys.executable], out / "fit", "1_1", batch)
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        _run([*torchrun, "--standalone", "--nproc_per_node=2"], out / "fit", "1_2", BATCH)
        for link in links:
            nodes = [sys.executable, "-m", "harness", "nodes", "2", "--link", link, "--"]
            setup = f"2_1_{plain_link(link).tag}"
            _run([*nodes, "torchrun"], out / "far", setup, BATCH)
    if not ((out / "fit").exists() and (out / "far").exists()):
        return
    fitted = fit_records(str(out / "fit"), Overrides())
    # Only the probes of the link before the first steps are used, not the steps.
    records = read_selected(str(out / "far"), None).runs
    table = (*all_reduces_of(records), *measured_beside(str(out / "far")))
    for link in links:
        plan = Scenario(Shape(2), BATCH, wire_of(plain_link(link)), emulated=True)
        tag = plain_link(link).tag
        for record in records:
            measured_s = step_s(record, Overrides())
            if measured_s is None or not str(record.identity["setup"]).endswith(f"_{tag}"):
                continue
            yield compared(
                "vit.py --tiny", link, measured_s, replace(fitted.model, table=table), plan
            )


def _run(start: list[str], out: Path, setup: str, batch: int) -> None:
    words = ["vit.py", *FLAGS, "--per_gpu_batch", str(batch), "--setup", setup, "--o", str(out)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*start, *words], cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)

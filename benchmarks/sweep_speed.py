"""What the warm launcher saves: a sweep of short runs against the same commands in a shell loop.

    python -m benchmarks.sweep_speed                   12 runs on 2 processes, 3 pairs in turn
    python -m benchmarks.sweep_speed --out found.json  and found.md beside it

Both arms measure the same runs into fresh folders; the loop runs the very lines that --dry_run
prints. The time of the sweep includes its own start, the loading and its table. What the runs
themselves measured is compared too: the sweep must be sooner done, not the training faster.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import harness.read
from benchmarks.results import ROOT, markdown, parser_of, show

FILE = """
script: vit
settings: {{epochs: 1, setup: 1_{processes}, save: none}}
seeds: [{seeds}]
"""
# What must not depend on how a run was started, to the last digit.
EXACT = ("seed", "epoch", "train_loss", "eval_loss", "accuracy", "updates", "samples")


def main(argv: list[str]) -> int:
    parser = parser_of("sweep_speed", __doc__)
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args(argv)
    pairs = [pair(options.runs, options.processes) for _ in range(options.pairs)]
    record = {"runs": options.runs, "processes": options.processes, "pairs": pairs}
    show(table(options.runs, options.processes, pairs), options.out, record)
    return 0


def pair(runs: int, processes: int) -> dict[str, Any]:
    """One sweep and one loop, one after the other, on the same runs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "speed.yaml"
        seeds = ", ".join(str(seed) for seed in range(1, runs + 1))
        file.write_text(FILE.format(processes=processes, seeds=seeds))
        command = [sys.executable, "-m", "harness", "sweep", str(file), "--tiny"]
        bin_first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": bin_first}

        prepare(command, folder, env)
        dry = [*command, "--dry_run", "--output_dir", str(folder / "loop")]
        lines = subprocess.run(
            dry, cwd=ROOT, env=env, check=True, capture_output=True, text=True
        ).stdout
        sweep_s = _timed([*command, "--output_dir", str(folder / "sweep")], env)
        loop_s = _timed(["bash", "-e", "-c", lines], env)
        return {
            "sweep_s": sweep_s,
            "loop_s": loop_s,
            "sweep_samples_per_s": _rates(folder / "sweep"),
            "loop_samples_per_s": _rates(folder / "loop"),
            "equal": _rows(folder / "sweep") == _rows(folder / "loop"),
        }


def prepare(command: list[str], folder: Path, env: dict[str, str]) -> None:
    """One run, so that prepared data are in the cache for both."""
    _timed([*command, "--limit", "0:1", "--output_dir", str(folder / "cache")], env)


def _timed(command: list[str], env: dict[str, str]) -> float:
    began_s = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[:4]} failed: {done.stdout[-500:]} {done.stderr[-500:]}")
    return time.perf_counter() - began_s


def _rates(folder: Path) -> list[float]:
    return [float(rate) for rate in harness.read.load_runs(folder)["train_samples_per_s"]]


def _rows(folder: Path) -> list[dict[str, Any]]:
    epochs = harness.read.load(folder).sort_values(["seed", "epoch"])
    rows: list[dict[str, Any]] = json.loads(epochs[list(EXACT)].to_json(orient="records"))
    return rows


def table(runs: int, processes: int, pairs: list[dict[str, Any]]) -> str:
    ratio = [p["loop_s"] / p["sweep_s"] for p in pairs]
    rates = {arm: [median(p[f"{arm}_samples_per_s"]) for p in pairs]
             for arm in ("sweep", "loop")}  # fmt: skip
    speed = [a / b for a, b in zip(rates["sweep"], rates["loop"], strict=True)]
    equal = "equal in every digit" if all(p["equal"] for p in pairs) else "NOT EQUAL"
    walls = (f"{median(p[name] for p in pairs):.1f}" for name in ("sweep_s", "loop_s"))
    middle = (f"{median(of):,.0f}" for of in rates.values())
    cells = markdown("llll", ("", "sweep", "shell loop of torchrun", "ratio, median (all)"), [
        ("wall s", *walls, _with_each(ratio)), ("samples/s of a run", *middle, _with_each(speed)),
    ])  # fmt: skip
    return (
        f"{runs} runs of vit.py --tiny --epochs 1 on {processes} process(es), {len(pairs)} pair(s)"
        f"\n\n{cells}\n\nLosses and accuracies of all runs: {equal}."
    )


def _with_each(values: list[float]) -> str:
    every = ", ".join(f"{v:.2f}" for v in sorted(values))
    return f"{median(values):.2f} ({every})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

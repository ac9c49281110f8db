"""What the stamps on the exchange of gradients cost a step: the same steps of DDP, with them and
without, in turns.

    python -m benchmarks.exposure                      2 processes, gloo, 40 pairs of 25 steps
    python -m benchmarks.exposure --pairs 100 --out found.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harness.core.records import write_json

ROOT = Path(__file__).resolve().parents[1]
MARK = "exposure: "
WIDTH, LAYERS, BATCH = 256, 6, 32
LEFT_OUT = 5  # first steps of a turn


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="exposure")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=25, help="of a turn")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.inside:
        inside(options.pairs, options.steps)
        return 0
    words = [f"--{name}={getattr(options, name)}" for name in ("pairs", "steps")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={options.processes}", "-m", "benchmarks.exposure", "--inside"]
    env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(
        [*command, *words], cwd=ROOT, env=env, check=True, stdout=subprocess.PIPE, text=True
    )
    (line,) = [text for text in done.stdout.splitlines() if MARK in text]
    found = json.loads(line.split(MARK, 1)[1])
    print(as_text(found))
    if options.out:
        write_json(options.out, found)
    return 0


def as_text(found: dict[str, list[float]]) -> str:
    """Medians, and the quartiles of the differences of each pair: most of them are noise."""
    pairs = zip(found["with_s"], found["without_s"], strict=True)
    added = sorted((a - b) * 1e6 for a, b in pairs)
    step_ms = statistics.median(found["without_s"]) * 1e3
    middle, low, high = (added[int(len(added) * share)] for share in (0.5, 0.25, 0.75))
    return (
        f"{len(added)} pairs, step {step_ms:.3f} ms: {middle:+.1f} us with stamps "
        f"({low:+.1f} to {high:+.1f}), {middle / step_ms / 10:+.2f} %; "
        f"the stamps by themselves {statistics.median(found['alone_s']) * 1e6:.1f} us"
    )


def inside(pairs: int, steps: int) -> None:
    """What each process does."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from harness.train.measure.communication import Exposure
    from harness.train.run.start import leave

    dist.init_process_group("gloo")
    layers = [m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    batch = torch.randn(BATCH, WIDTH)
    settings = SimpleNamespace(strategy="ddp")
    run: Any = SimpleNamespace(args=SimpleNamespace(device=torch.device("cpu")), settings=settings)
    found: dict[str, list[float]] = {"with_s": [], "without_s": [], "alone_s": []}
    for number in range(-1, pairs):
        for name in ("with_s", "without_s") if number % 2 else ("without_s", "with_s"):
            exposure = Exposure(run)
            if name == "with_s":
                exposure.watch(model)
            took = []
            for _ in range(steps + LEFT_OUT):
                began_s = time.perf_counter()
                model(batch).sum().backward()
                exposure.backward_ended(exchanged=True)
                model.zero_grad()
                took.append(time.perf_counter() - began_s)
            if number >= 0:
                found[name].append(statistics.median(took[LEFT_OUT:]))
            for hook in exposure.handles.values():
                hook.remove()
        found["alone_s"].append(alone(Exposure(run), next(model.parameters())))
    if dist.get_rank() == 0:
        print(MARK + json.dumps(found), flush=True)
    dist.barrier()
    leave(0)  # not by returning: DDP may wait for ever for a thread of gloo


def alone(exposure: Any, parameter: Any, times: int = 1000) -> float:
    """Seconds of one step's stamps, without a step."""
    from harness.train.measure.clock import stamp

    began_s = time.perf_counter()
    for _ in range(times):
        exposure._gradient(parameter)
        exposure.marks.append((exposure.ready, stamp(exposure.cuda)))
    return (time.perf_counter() - began_s) / times


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""What --balance gains where one of two processes is held to half a core.

    python -m benchmarks.unequal                     3 rounds of both ways, taking turns
    python -m benchmarks.unequal --rounds 5 --out found.json -- --b 16

Each process has a core of its own, and on that of the second a program computes without end, so
that the kernel gives either of them half of it. Equal shares wait for the second process; the most
that shares by speed can gain is (1 + 1/2) / (2 x 1/2) = 1.5. After -- stand flags of vit.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.core.records import write_json

ROOT = Path(__file__).resolve().parents[1]
MARK = "unequal: "
WAYS = {"equal": [], "measured": ["--balance", "measured"]}
BUSY = "import os; os.sched_setaffinity(0, {core})\nwhile True: pass"
FLAGS = ["--model=vit-tiny-patch32", "--image_size=224", "--train_size=640", "--epochs=1"]
Found = dict[str, list[float]]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="unequal")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a JSON file; the table is written beside it")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help="of vit.py")
    options = parser.parse_args(argv)
    if options.inside:
        inside(options)
        return 0
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
        "-m", "benchmarks.unequal", "--inside", f"--rounds={options.rounds}", "--", *options.flags,
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.PIPE, text=True)
    (line,) = [text for text in done.stdout.splitlines() if MARK in text]
    found = json.loads(line.split(MARK, 1)[1])
    text = table(found)
    print(text)
    if options.out:
        write_json(options.out, {"flags": options.flags, **found})
        options.out.with_suffix(".md").write_text(text + "\n")
    return 0


def table(found: Found) -> str:
    """Medians, and the ratios of each round: the machine changes less within one."""
    lines = ["| shares | samples/s | times as fast, by round |", "|---|--:|--:|"]
    for name, rates in found.items():
        ratios = [a / b for a, b in zip(rates, found["equal"], strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"| {name} | {statistics.median(rates):.1f} | {spread} |")
    return "\n".join(lines)


def inside(options: argparse.Namespace) -> None:
    """What each process does; it begins once without being counted."""
    from benchmarks.overlap import train

    rank = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    busy = None
    if rank == 1:
        code = BUSY.format(core={cores[rank % len(cores)]})
        busy = subprocess.Popen([sys.executable, "-c", code])
    try:
        found: Found = {name: [] for name in WAYS}
        with tempfile.TemporaryDirectory() as folder:
            for number in range(-1, options.rounds):
                for name, flags in WAYS.items():
                    rows = train(f"{folder}/{number}", [*FLAGS, *options.flags, *flags])
                    if number >= 0:
                        found[name] += [row["train_samples_per_s"] for row in rows]
    finally:
        if busy is not None:
            busy.kill()
    if rank == 0:
        print(MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

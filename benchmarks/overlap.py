"""What --overlap and --fragments of diloco gain: the same updates, over an emulated link.

    python -m benchmarks.overlap                        two nodes, 20 ms and 50 Mbit/s, 3 rounds
    python -m benchmarks.overlap --link 80ms/50mbit --rounds 5 --out found.json

Every round trains once in each way, one after the other, in the same two processes; what is
compared is the time of the updates alone, round by round. Who trains apart and exchanges nothing
until the end is the bound: what no overlap can beat.
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
from typing import Any

from harness.core.records import write_json

ROOT = Path(__file__).resolve().parents[1]
MARK = "overlap: "


def ways(every: int) -> dict[str, list[str]]:
    """Name -> flags; the first is what the others are compared with."""
    half, quarter = str(every // 2), str(every // 4)
    return {
        "it waits": [],
        f"overlap {half}": ["--overlap", half],
        "4 fragments": ["--fragments", "4"],
        f"4 fragments, overlap {quarter}": ["--fragments", "4", "--overlap", quarter],
        f"4 fragments, overlap {half}": ["--fragments", "4", "--overlap", half],
        f"int8, overlap {half}": ["--compress", "int8", "--overlap", half],
        "nothing to wait for": ["--sync_every", "100000"],
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="overlap")
    parser.add_argument("--link", default="20ms/50mbit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sync_every", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--out", type=Path, help="a JSON file; the table is written beside it")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.inside:
        inside(options)
        return 0
    words = [f"--{n}={getattr(options, n)}" for n in ("rounds", "sync_every", "epochs")]
    command = [sys.executable, "-m", "harness", "nodes", "2", "--link", options.link, "--"]
    command += ["torchrun", "-m", "benchmarks.overlap", "--inside", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.PIPE, text=True)
    (line,) = [text for text in done.stdout.splitlines() if MARK in text]
    found = json.loads(line.split(MARK, 1)[1])
    text = table(found)
    print(text)
    if options.out:
        about = {"link": options.link, "sync_every": options.sync_every, "load": os.getloadavg()[0]}
        write_json(options.out, {**about, "seconds": found})
        options.out.with_suffix(".md").write_text(text + "\n")
    return 0


def table(found: dict[str, list[float]]) -> str:
    """Medians, and the ratios of each round: the machine changes less within one."""
    first = next(iter(found.values()))
    lines = ["| diloco | updates take, s | times as fast, by round |", "|---|--:|--:|"]
    for name, seconds in found.items():
        ratios = [a / b for a, b in zip(first, seconds, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"| {name} | {statistics.median(seconds):.2f} | {spread} |")
    return "\n".join(lines)


def inside(options: argparse.Namespace) -> None:
    """What each node's process does."""
    found: dict[str, list[float]] = {name: [] for name in ways(options.sync_every)}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(-1, options.rounds):
            for name, flags in ways(options.sync_every).items():
                if number < 0 and flags:
                    continue  # once in advance, to warm up
                every = [] if "--sync_every" in flags else [f"--sync_every={options.sync_every}"]
                argv = ["--strategy=diloco", f"--epochs={options.epochs}", *every, *flags]
                rows = train(f"{folder}/{number}", argv)
                if number >= 0:
                    found[name].append(sum(row["epoch_time_s"] for row in rows))
    if os.environ["RANK"] == "0":
        print(MARK + json.dumps(found), flush=True)


def train(folder: str, flags: list[str]) -> list[dict[str, Any]]:
    """The epochs' rows, on rank 0."""
    import harness.train.loop.trainer as trainers
    from harness.core.command_line import parse
    from harness.core.records import read_rows
    from harness.train.data.images import load_images
    from harness.train.data.models import build
    from harness.train.measure.metrics import BatchMetrics
    from harness.train.run.start import start
    from logcallback import LogCallback

    # Measuring the link is not the subject, and it takes its time.
    vars(trainers)["link_of_run"] = lambda *given: None
    run: Any = start(parse("vit", ["--tiny", "--save=none", f"--o={folder}", *flags]))
    images = load_images(run.context.settings, run.context.data_parallel_size)
    context = run.resume(images.facts)
    trainer = trainers.ExactTrainer(
        context=context,
        model=build(context.settings, images.labels),
        args=context.args,
        train_dataset=images.train,
        eval_dataset=images.test,
        data_collator=images.collate,
        to_device=images.to_device,
        compute_metrics=BatchMetrics(len(images.labels)),
        callbacks=[LogCallback(context)],
    )
    trainer.train()
    return read_rows(context.folder.epochs)[0] if context.is_rank0 else []


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

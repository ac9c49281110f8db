"""What --overlap and --fragments of diloco gain: the same updates, over an emulated link.

    python -m benchmarks.overlap                        two nodes, 20 ms and 50 Mbit/s, 3 rounds
    python -m benchmarks.overlap --link 80ms/50mbit --rounds 5 --out found.json

Every round trains once in each way, one after the other, in the same two processes; the time of the
updates alone is compared, round by round. Replicas that train apart and exchange nothing until the
end give the bound, which no overlap can beat.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from typing import Any

from benchmarks.results import markdown, parser_of, ratios, result_of, send_result, show


def ways(every: int) -> dict[str, list[str]]:
    """Name of a way -> its flags; the others are compared with the first."""
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
    parser = parser_of("overlap", __doc__, rounds=3)
    parser.add_argument("--link", default="20ms/50mbit")
    parser.add_argument("--sync_every", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args(argv)
    if options.inside:
        inside(options)
        return 0
    words = [f"--{n}={getattr(options, n)}" for n in ("rounds", "sync_every", "epochs")]
    command = [sys.executable, "-m", "harness", "nodes", "2", "--link", options.link, "--"]
    command += ["torchrun", "-m", "benchmarks.overlap", "--inside", *words]
    found = result_of(command)
    about = {"link": options.link, "sync_every": options.sync_every, "load": os.getloadavg()[0]}
    show(table(found), options.out, {**about, "seconds": found})
    return 0


def table(found: dict[str, list[float]]) -> str:
    """A table of medians, and of the ratios in each round."""
    first = next(iter(found.values()))
    rows = [(name, f"{statistics.median(of):.2f}", ratios(first, of)) for name, of in found.items()]
    return markdown("lrr", ("diloco", "updates take, s", "times as fast, by round"), rows)


def inside(options: argparse.Namespace) -> None:
    """Run the rounds, in the process of each node."""
    found: dict[str, list[float]] = {name: [] for name in ways(options.sync_every)}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(-1, options.rounds):
            for name, flags in ways(options.sync_every).items():
                if number < 0 and flags:
                    continue  # one way is enough to warm up
                every = [] if "--sync_every" in flags else [f"--sync_every={options.sync_every}"]
                argv = ["--strategy=diloco", f"--epochs={options.epochs}", *every, *flags]
                rows = train(f"{folder}/{number}", argv)
                if number >= 0:
                    found[name].append(sum(row["epoch_time_s"] for row in rows))
    send_result(found)


def train(folder: str, flags: list[str]) -> list[dict[str, Any]]:
    """Train once; return the rows of the epochs on rank 0."""
    import harness.train.loop.trainer as trainers
    from benchmarks.prepared import prepared
    from harness.core.records import read_rows
    from logcallback import LogCallback

    # Skip measuring the link, which takes time and is not the subject.
    vars(trainers)["link_of_run"] = lambda *given: None
    run = prepared("vit", ["--tiny", f"--o={folder}", *flags])
    run.trainer(LogCallback(run.context)).train()
    return read_rows(run.context.folder.epochs)[0] if run.context.is_rank0 else []


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

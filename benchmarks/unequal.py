"""What --balance gains where one of two processes has half a core: equal shares against measured.

    python -m benchmarks.unequal                           bert.py --tiny, 5 rounds
    python -m benchmarks.unequal --rounds 3 --flags "--model FOLDER --dataset FILE.csv"

Each process keeps to a core of its own, and the second one shares its core with a process that
only computes. Every round trains once with equal and once with measured shares, in the same two
processes; what is compared is the time of the updates alone, round by round.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.results import markdown, parser_of, ratios, result_of, send_result, show, spread

WAYS: dict[str, list[str]] = {"equal shares": [], "--balance measured": ["--balance", "measured"]}


def main(argv: list[str]) -> int:
    parser = parser_of("unequal", __doc__, rounds=5)
    parser.add_argument("--flags", default="--tiny", help="of bert.py, as one word")
    options = parser.parse_args(argv)
    if options.inside:
        inside(options)
        return 0
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        parser.error("two processes need a core each, and this machine has one")
    words = [f"--rounds={options.rounds}", f"--flags={options.flags}", "--inside"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    with busy(cores[1]):
        found = result_of([*command, "-m", "benchmarks.unequal", *words])
    show(table(found), options.out, {"flags": options.flags, **found})
    return 0


@contextmanager
def busy(core: int) -> Iterator[None]:
    """Keep this core busy with a process that never waits, and that ends with this one."""
    spin = f"while os.getppid() == {os.getpid()}: pass"
    code = f"import os; os.sched_setaffinity(0, [{core}])\n{spin}"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            yield
        finally:
            process.kill()


def table(found: dict[str, list[float]]) -> str:
    first, *_ = of_ways = [found[name] for name in WAYS]
    rows = [(name, spread(of), ratios(first, of)) for name, of in zip(WAYS, of_ways, strict=True)]
    return markdown("lrr", ("", "updates take, s", "times as fast, by round"), rows)


def inside(options: argparse.Namespace) -> None:
    """Run the rounds, in each of the two processes."""
    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, [sorted(os.sched_getaffinity(0))[rank]])
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    shares: list[list[int]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(-1, options.rounds):
            for name, flags in WAYS.items():
                took_s, observed = train(f"{folder}/{number}", shlex.split(options.flags) + flags)
                if number < 0:
                    continue  # the warm-up is not counted
                found[name].append(took_s)
                if flags:
                    shares.append(observed)
    send_result({**found, "shares": shares})


def train(folder: str, flags: list[str]) -> tuple[float, list[int]]:
    """Train once; return, on rank 0, the seconds of all updates and the shares of the ranks."""
    from benchmarks.prepared import prepared
    from harness.core.records import read_rows
    from logcallback import LogCallback

    run = prepared("bert", ["--strategy=ddp", f"--o={folder}", *flags])
    trainer = run.trainer(LogCallback(run.context))
    trainer.train()
    rows = read_rows(run.context.folder.epochs)[0] if run.context.is_rank0 else []
    return sum(row["epoch_time_s"] for row in rows), trainer.balance.shares


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""What a run exchanges besides its updates, over an emulated link: how much, and how long it waits.

    python -m benchmarks.collectives                         two nodes, 80 ms and 50 Mbit/s one way
    python -m benchmarks.collectives --nodes 4 --link 20ms/200mbit --out found.json
    python -m benchmarks.collectives -- --strategy diloco --sync_every 50

Two epochs of vit.py --tiny, with the flags after --. An exchange is counted for the innermost
function in PURPOSES that makes it; exchanges of updates are left out. Bytes are what one rank hands
over for all others. The floor is one delay per exchange, and its bytes at the rate of a link that a
node shares with no other. Waiting is the mean over the ranks; it includes what one rank has to do
before another, such as turns at preparing the data.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.results import ROOT, markdown, parser_of, show
from harness.core.links import link_of

START, EPOCH, END, UPDATES = "start", "each epoch", "end", "updates"
EPOCHS = 2
# (file, function) -> (when, what for).
PURPOSES = {
    ("start", "training_arguments"): (START, "the process group"),
    ("start", "_exchange_facts"): (START, "an earlier record, the devices"),
    ("watchdog", "of"): (START, "the watchdogs"),
    ("cache", "in_turn"): (START, "turns at the data and the model"),
    ("checkpoints", "usable_checkpoint"): (START, "a checkpoint to go on from"),
    ("flops", "__init__"): (START, "operations, speed of the processors"),
    ("weights", "arrange_ddp"): (START, "whether weights are equal"),
    ("link", "link_of_run"): (START, "measuring the link"),
    ("choice", "set_way"): (START, "the way of the exchange"),
    ("logcallback", "on_train_begin"): (START, "the ranks' machines"),
    ("epoch", "on_epoch_end"): (EPOCH, "loss of the epoch"),
    ("logcallback", "on_epoch_end"): (EPOCH, "rows of the ranks"),
    ("trainer", "evaluate"): (EPOCH, "evaluation"),
    ("trainer", "_save_checkpoint"): (EPOCH, "saving"),
    ("trainer", "_run_epoch"): (EPOCH, "loss of log entries"),
    ("checkpoints", "on_own_disk"): (END, "whether disks are shared"),
    ("logcallback", "on_train_end"): (END, "rows of the ranks"),
    ("lifecycle", "__exit__"): (END, "the end of all ranks"),
    ("trainer", "training_step"): (UPDATES, "gradients"),
    ("epoch", "on_optimizer_step"): (UPDATES, "weights"),
    ("communication", "on_step_end"): (UPDATES, "the probe of the communication"),
}
OTHER = "elsewhere"  # in place of "when", for functions that PURPOSES lacks
HEADINGS = ("when", "what for", "exchanges", "bytes", "floor, ms", "waited, ms", "round trips")
CARRIERS = ("direct", "session", "base", "recorder", "collectives")
# These have no floor: how the process group connects is its own, and measuring the link takes time.
NO_FLOOR = ("the process group", "measuring the link")
Found = dict[str, dict[str, float]]  # when and what for -> exchanges, bytes, seconds


def main(argv: list[str]) -> int:
    parser = parser_of("collectives", __doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--link", default="80ms/50mbit")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help="of vit.py")
    options = parser.parse_args(argv)
    if options.inside is not None:
        inside(options.inside, options.flags)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "harness", "nodes", str(options.nodes), "--link",
                   options.link, "--", "torchrun", "-m", "benchmarks.collectives",
                   f"--inside={folder}", "--", *options.flags]  # fmt: skip
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
        ranks = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json"))]
    about = {"nodes": options.nodes, "link": options.link, "flags": options.flags}
    show(table(ranks, options.link), options.out, {**about, "ranks": ranks})
    return 0


def table(ranks: Sequence[Found], link: str) -> str:
    of = link_of(link).between(0, 1)
    delay_s, rate = of.delay_ms / 1000, (of.rate_mbit or float("inf")) * 1e6 / 8
    cells = []
    known = [f"{when}: {what}" for when, what in PURPOSES.values() if when != UPDATES]
    known += sorted(name for rank in ranks for name in rank if name.startswith(OTHER))
    for name in dict.fromkeys(known):
        rows = [rank[name] for rank in ranks if name in rank]
        if not rows:
            continue
        when, what = name.split(": ")
        each = EPOCHS if when == EPOCH else 1
        count, size, waited_s = (
            statistics.fmean(row[key] for row in rows) / each
            for key in ("exchanges", "bytes", "seconds")
        )
        others = len(ranks) - 1
        floor = "-" if what in NO_FLOOR else f"{1e3 * (count * delay_s + size / others / rate):.0f}"
        trips = f"{waited_s / (2 * delay_s):.1f}" if delay_s else "-"
        waited = f"{1e3 * waited_s:.0f}"
        cells.append((when, what, f"{count:.1f}", f"{size:,.0f}", floor, waited, trips))
    return markdown("llrrrrr", HEADINGS, cells)


# ---- what each node's process does ----


def inside(folder: Path, flags: list[str]) -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    from harness.core.command_line import command_line
    from harness.train.direct import Direct, Messages
    from harness.train.measure import link
    from harness.train.run.warm import imported

    found: Found = {}
    for owner, name in ((Messages, "exchange"), (Messages, "rows"), (link, "measure"),
                        (distributed_c10d, "_new_process_group_helper")):  # fmt: skip
        _count_calls(owner, name, found)
    for name in ("all_reduce", "all_gather", "broadcast"):
        _count_calls(dist, name, found)
        setattr(distributed_c10d, name, getattr(dist, name))
    direct: Any = Direct  # Any, because its method is replaced
    send = direct.send

    def counted(self: Direct, part: Any, to: int, tag: int) -> Any:
        _row(found)["bytes"] += part.nbytes
        return send(self, part, to, tag)

    direct.send = counted
    argv = ["--tiny", f"--epochs={EPOCHS}", f"--o={folder}/records", *flags]
    sys.argv = ["vit.py", *argv]
    imported("vit").main(command_line("vit", argv))
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def _count_calls(owner: Any, name: str, found: Found) -> None:
    """Replace the function by one that counts and times its outermost calls."""
    function: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(function)
    def timed(*args: Any, **more: Any) -> Any:
        row = _row(found)
        if row["depth"]:
            return function(*args, **more)
        row["depth"], began_s = 1, time.perf_counter()
        try:
            return function(*args, **more)
        finally:
            row["depth"] = 0
            row["exchanges"] += 1
            row["seconds"] += time.perf_counter() - began_s

    setattr(owner, name, timed)


def _row(found: Found) -> dict[str, float]:
    when, what = _purpose()
    empty = {"exchanges": 0, "bytes": 0, "seconds": 0.0, "depth": 0}
    return found.setdefault(f"{when}: {what}", empty)


def _purpose() -> tuple[str, str]:
    frame: FrameType | None = sys._getframe(1)
    unknown = ""
    while frame is not None:
        file, function = Path(frame.f_code.co_filename), frame.f_code.co_name
        if (file.stem, function) in PURPOSES:
            return PURPOSES[file.stem, function]
        if not unknown and "harness" in file.parts and file.stem not in CARRIERS:
            unknown = f"{file.stem} {function}"
        frame = frame.f_back
    return OTHER, unknown


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

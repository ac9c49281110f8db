"""Whether a long sweep stays as it began: its memory, its descriptors, and the time of each run.

    python -m benchmarks.long_sweep                      500 runs of one update of bert.py
    python -m benchmarks.long_sweep --minutes 40         as many of them as end in this time
    python -m benchmarks.long_sweep --out found.json     and found.md beside it

The runs are real, one after the other, through the warm launcher. Watched are the processes that
stay from run to run: the runner, its launcher and the fork server. Their processor time is shown
beside the time from start to start, because other programs disturb it less.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.results import ROOT, markdown, parser_of, show
from harness.core.attempts import starts_of
from harness.core.records import FINISHED, find_runs

FILE = """
script: bert
settings: {{epochs: 1, setup: 1_1, per_gpu_batch: 16, train_size: 16, test_size: 16, save: none,
            telemetry_hz: 0}}
seeds: [{seeds}]
"""
LOOK_S = 0.1  # a run of one update may take half a second


@dataclass(frozen=True)
class Look:
    """A reading of one process at one moment."""

    unix: float
    memory_mib: float
    descriptors: int
    cpu_s: float  # since the process began


def main(argv: list[str]) -> int:
    parser = parser_of("long_sweep", __doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--minutes", type=float, default=math.inf)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        looks = watched_sweep(Path(name), options.runs, options.minutes * 60)
        starts, finished = starts_below(Path(name, "out"))
    found = {"runs": options.runs, "finished": finished, "starts_unix": starts}
    every = [[asdict(look) for look in of] for of in looks.values()]
    show(table(starts, finished, staying(looks)), options.out, {**found, "processes": every})
    return 0 if finished == options.runs or options.minutes < math.inf else 1


def watched_sweep(folder: Path, runs: int, within_s: float) -> dict[int, list[Look]]:
    """Run the sweep; return process id -> readings of that process while it lasted."""
    file = folder / "long.yaml"
    file.write_text(FILE.format(seeds=", ".join(map(str, range(1, runs + 1)))))
    words = ["sweep", str(file), "--tiny", "--yes", "--isolation", "off"]
    looks: dict[int, list[Look]] = {}
    with (folder / "printed.txt").open("wb") as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", "harness", *words, "--output_dir", str(folder / "out")],
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=printed, stderr=printed,
        )  # fmt: skip
        runner = psutil.Process(process.pid)
        until_s, stopped = time.monotonic() + within_s, False
        while process.poll() is None:
            if time.monotonic() > until_s and not stopped:
                runner.send_signal(signal.SIGINT)
                stopped = True
            with suppress(psutil.Error):
                for one in (runner, *runner.children(recursive=True)):
                    if (look := look_at(one)) is not None:
                        looks.setdefault(one.pid, []).append(look)
            time.sleep(LOOK_S)
    if process.returncode not in (0, 128 + signal.SIGINT):
        raise RuntimeError(f"the sweep failed: {(folder / 'printed.txt').read_text()[-500:]}")
    return looks


def look_at(process: psutil.Process) -> Look | None:
    try:
        with process.oneshot():
            cpu, memory = process.cpu_times(), process.memory_info().rss / 2**20
            if not (descriptors := process.num_fds()):
                return None  # it is ending
            return Look(time.time(), memory, descriptors, cpu.user + cpu.system)
    except psutil.Error:
        return None  # it has ended


def starts_below(out: Path) -> tuple[list[float], int]:
    """When the runs began, and how many have finished."""
    runs = find_runs(out)
    rows = [row for run in runs for row in starts_of(run.read_attempts())]
    return sorted(row["unix"] for row in rows), sum(run.outcome() == FINISHED for run in runs)


def staying(looks: dict[int, list[Look]]) -> list[list[Look]]:
    """The readings of processes that were there most of the time, which no rank is."""
    most = max(map(len, looks.values()))
    return [of for of in looks.values() if len(of) > most / 2]


def table(starts: Sequence[float], finished: int, processes: Sequence[Sequence[Look]]) -> str:
    """A table of the first tenth of the runs, without the very first, against the last tenth."""
    tenth = max(1, len(starts) // 10)
    parts = [starts[1 : tenth + 2], starts[-tenth - 1 :]]
    runs = [max(1, len(part) - 1) for part in parts]

    def each(value: Callable[[Sequence[Look]], float]) -> list[float]:
        """For each part, the value summed over the processes."""
        found = []
        for part in parts:
            inside = [[look for look in of if part[0] <= look.unix <= part[-1]] for of in processes]
            found.append(sum(value(of) for of in inside if of))
        return found

    apart = [[b - a for a, b in itertools.pairwise(part)] for part in parts]
    cpu_s = each(lambda of: of[-1].cpu_s - of[0].cpu_s)
    memory_mib = each(lambda of: statistics.median(look.memory_mib for look in of))
    descriptors = each(lambda of: statistics.median(look.descriptors for look in of))
    rows = [
        ("start to start, median s", ".2f", [statistics.median(a or [0.0]) for a in apart]),
        ("processor time a run of the processes that stay, s", ".3f",
         [seconds / count for seconds, count in zip(cpu_s, runs, strict=True)]),
        ("their memory, MiB", ".1f", memory_mib),
        ("their descriptors", ".0f", descriptors),
    ]  # fmt: skip
    heads = ("", f"first {runs[0]} runs", f"last {runs[1]} runs")
    cells = [(name, *(format(value, form) for value in values)) for name, form, values in rows]
    return (
        f"{finished} of {len(starts)} runs finished; {len(processes)} processes stay\n\n"
        f"{markdown('lrr', heads, cells)}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

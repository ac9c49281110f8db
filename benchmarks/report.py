"""How long a report takes, and how large its page is, over many run folders.

    python -m benchmarks.report            1,000 runs of 5 epochs; targets: 6 s and 10 MB

The folders are those of benchmarks/loading.py: two kinds of machine, a seed a run.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from benchmarks.loading import EPOCHS, make_runs
from benchmarks.results import markdown, parser_of
from harness.read.report.report import make_report

TARGET_S, TARGET_MB = 6.0, 10.0
HEADINGS = ("figures", "best s", "worst s", "target s", "page MB", "target MB")


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("report", __doc__, out=False)
    parser.add_argument("--runs", type=int, default=1000, help="run folders (1000)")
    parser.add_argument("--times", type=int, default=3, help="reports, one after the other (3)")
    parser.add_argument("--quick", action="store_true", help="20 run folders, one report")
    options = parser.parse_args(argv)
    count, times = (20, 1) if options.quick else (options.runs, options.times)
    print(f"{count} runs of {EPOCHS} epochs, made anew; best and worst of {times}\n")
    took = []
    with tempfile.TemporaryDirectory() as folder:
        records, out = Path(folder) / "outputs", Path(folder) / "report"
        make_runs(records, count)
        for _ in range(times):
            began = time.perf_counter()
            page, *_ = make_report(records, out)
            took.append(time.perf_counter() - began)
        size = page.stat().st_size / 1e6
        figures = page.read_text("utf-8").count("<figure ")
    cells = (str(figures), f"{min(took):.2f}", f"{max(took):.2f}", f"{TARGET_S:g}", f"{size:.2f}",
             f"{TARGET_MB:g}")  # fmt: skip
    print(markdown("llllll", HEADINGS, [cells]))
    slow = max(took) > TARGET_S and not options.quick
    return int(slow or size > TARGET_MB)


if __name__ == "__main__":
    sys.exit(main())

"""How benchmarks pass on and print what they found."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from harness.cli import Parser
from harness.core.command_line import integer
from harness.core.process import complain
from harness.core.records import write_json
from harness.core.settings import UserError

ROOT = Path(__file__).resolve().parents[1]
MARK = "benchmark result: "  # before the line that send_result() prints


class Flags(Parser):
    """Flags of a benchmark: what is wrong is one line, as with harness."""

    def error(self, message: str) -> NoReturn:
        try:
            super().error(message)
        except UserError as error:
            sys.exit(complain(self.prog.removeprefix("python -m "), error))


def parser_of(name: str, doc: str | None, out: bool = True, rounds: int = 0) -> Flags:
    """rounds: their usual number, where they are compared in processes of their own (--inside)."""
    about = (doc or "").splitlines()[0]
    parser = Flags(prog=f"python -m benchmarks.{name}", description=about, allow_abbrev=False)
    if out:
        parser.add_argument("--out", type=Path, help="a JSON file; the table is written beside it")
    if rounds:
        parser.add_argument("--rounds", type=integer, default=rounds)
        parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser


def markdown(
    align: str, headings: Sequence[str], rows: Iterable[Sequence[str]], as_is: bool = False
) -> str:
    """A table in Markdown; align: l or r of each column."""
    # Here, because the processes that are measured import this module, and pandas takes time.
    from harness.read.table import Table, markdown_lines

    table = Table(headings, [*rows], numeric=[side == "r" for side in align])
    return "\n".join(markdown_lines(table, as_is))


def show(text: str, out: Path | None, record: Mapping[str, Any]) -> None:
    """Print the table; where a file is named, write the record there and the table beside it."""
    print(text)
    if out is not None:
        write_json(out, record)
        out.with_suffix(".md").write_text(text + "\n")


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """The text "median (smallest to largest)", of one value the value."""
    low, middle, high = (format(f(values), form) for f in (min, statistics.median, max))
    return f"{middle} ({low} to {high})" if len(values) > 1 else middle


def ratios(theirs: Sequence[float], ours: Sequence[float]) -> str:
    """How many times as fast ours is, by round, as the machine changes less within a round."""
    return spread([a / b for a, b in zip(theirs, ours, strict=True)])


def off(errors: Sequence[float]) -> str:
    """A text on errors, given as sorted absolute values."""
    half, most = statistics.median(errors), errors[int(0.9 * len(errors))]
    return f"off by {half:.1%} in the median, {most:.1%} in 9 of 10, {errors[-1]:.1%} at most"


def result_of(command: Sequence[str]) -> Any:
    """Run a command, with one thread a process; return what its rank 0 gives to send_result()."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.PIPE, text=True)
    (line,) = [text for text in done.stdout.splitlines() if MARK in text]
    return json.loads(line.split(MARK, 1)[1])


def send_result(found: Mapping[str, Any]) -> None:
    """Pass a result on from rank 0 of a command that result_of() has started."""
    if os.environ["RANK"] == "0":
        print(MARK + json.dumps(found), flush=True)

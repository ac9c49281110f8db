"""Figures of sweeps, drawn from their records: python -m harness figures SWEEP."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files, no windows

from matplotlib.figure import Figure

from harness.read.figure_propagation import propagation
from harness.read.figure_strategies import strategies
from harness.read.groups import load_sweep
from harness.read.sweep_runs import load_sweep_runs, read_runs
from harness.read.sweeps import Sweep, read_sweep
from harness.records import FINISHED
from harness.settings import UserError
from harness.strategies import OF_ONE_STRATEGY

FIGURES = {
    "strategies": lambda sweep: strategies(sweep),
    "propagation": lambda sweep: propagation(load_sweep_runs(sweep.file), load_sweep(sweep.file)),
}


def figure_for(sweep: Sweep) -> str:
    """The figure that answers a sweep's question, by what varies in it."""
    if "link" not in sweep.axes:
        raise UserError(f"{sweep.file}: link does not vary: there is no figure for it yet")
    ways = {"strategy", *OF_ONE_STRATEGY} & set(sweep.axes)
    return "strategies" if ways else "propagation"


def draw(sweep: Sweep) -> tuple[str, Figure]:
    name = figure_for(sweep)
    return name, FIGURES[name](sweep)


def missing(sweep: Sweep) -> str | None:
    """In one line what the figure does not show."""
    states = Counter(run.state for run in read_runs(sweep))
    total, finished = states.total(), states.pop(FINISHED, 0)
    if finished == total:
        return None
    counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    return f"missing: {total - finished} of {total} runs ({counts})"


def main(argv: list[str]) -> int:
    """python -m harness figures SWEEP"""
    if len(argv) != 1 or argv[0] in ("-h", "--help"):
        print("usage: python -m harness figures SWEEP\n\nthe folder of a sweep with links")
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    try:
        sweep = read_sweep(argv[0])
        name, figure = draw(sweep)
    except UserError as error:
        print(f"harness figures: error: {error}", file=sys.stderr)
        return 2
    path = Path(sweep.file).parent / f"{name}.png"
    figure.savefig(path, dpi=200)
    if (said := missing(sweep)) is not None:
        print(said)
    print(f"written: {path}")
    return 0

"""Figures drawn from records, all in one list: python -m harness figures FOLDER."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

from harness.core.command_line import print_json
from harness.core.process import working
from harness.core.settings import UserError
from harness.core.strategies import OF_ONE_STRATEGY
from harness.read.compare.answers import answers, finding
from harness.read.compare.fastest import best_learning_rate
from harness.read.compare.wording import MEMORY
from harness.read.drawing import WIDTH, Drawn, NothingToDraw, has_room, page_width
from harness.read.figures.breakdown import where_time_went
from harness.read.figures.curves import (
    accuracy_by_learning_rate,
    epoch_time_by_batch,
    groups_by_batch,
    scaling_efficiency,
    throughput,
)
from harness.read.figures.epochs import accuracy_by_epoch, loss_by_epoch, own_metrics_by_epoch
from harness.read.figures.links import propagation, strategies
from harness.read.figures.panels import Styles, failures, set_title
from harness.read.figures.prediction import errors_of, prediction
from harness.read.figures.time import (
    frontier,
    script_of,
    targets_of,
    time_to_accuracy,
    toward,
)
from harness.read.figures.usage import usage
from harness.read.files import KINDS, save
from harness.read.labels import STRATEGY, TIMES_TO_TARGET, file_name, shown_axes, unfinished
from harness.read.records.baseline import RATE
from harness.read.records.comparable import ACCURACY, disturbed, without_times
from harness.read.records.groups import Group
from harness.read.records.selection import (
    parse_selector,
    read_all_parts,
    read_results_part,
    refuse_part,
)
from harness.read.records.sweeps import SweepResults, sweep_file

matplotlib.use("Agg")  # files, no windows


class FigureKind(NamedTuple):
    """A figure that can be asked for by the name of its file."""

    draw: Callable[[SweepResults, Styles], Drawn]
    title: str
    about: tuple[str, ...] = ()  # the measures of the finding that stands above it
    of_times: bool = True
    of_single_runs: bool = False  # it draws runs and not means, or names each that it leaves out
    of_target: bool = False
    of_medians: bool = False


# The one list of figures.
FIGURES = {
    "accuracy": FigureKind(accuracy_by_epoch, "Accuracy by epoch", (ACCURACY,), of_times=False),
    "loss": FigureKind(loss_by_epoch, "Loss by epoch", of_times=False),
    "own_metrics": FigureKind(own_metrics_by_epoch, "Own metrics by epoch", of_times=False),
    "epoch_time": FigureKind(epoch_time_by_batch, "Time and accuracy by batch", (RATE, ACCURACY)),
    "learning_rate": FigureKind(
        accuracy_by_learning_rate, "Accuracy by learning rate", (ACCURACY,), of_target=True
    ),
    "throughput": FigureKind(throughput, "Throughput by number of devices", (RATE,)),
    "efficiency": FigureKind(scaling_efficiency, "Scaling efficiency"),
    "time_to_accuracy": FigureKind(
        time_to_accuracy, "Time to accuracy", (*TIMES_TO_TARGET, ACCURACY),
        of_target=True, of_medians=True,
    ),
    "propagation": FigureKind(propagation, "Propagation delay", (RATE,), of_target=True),
    "strategies": FigureKind(
        strategies, "Strategies on slow links", ("tta_wall_s", ACCURACY),
        of_target=True, of_medians=True,
    ),
    "usage": FigureKind(usage, "Utilisation, power and memory over time", of_single_runs=True),
    "where_time_went": FigureKind(where_time_went, "Where the time went", of_single_runs=True),
    "frontier": FigureKind(frontier, "What accuracy costs", (RATE, ACCURACY), of_target=True),
    "prediction": FigureKind(prediction, "Prediction against measurement", of_single_runs=True),
}  # fmt: skip


def _aimed(sweep: SweepResults) -> Sequence[Group]:
    """The groups with times to the target that the figures choose where a sweep names none."""
    if sweep.target is not None or not any(group.values(ACCURACY) for group in sweep.groups):
        return sweep.groups
    targets = targets_of(sweep)
    return [
        toward(g, targets[script_of(g)]) if script_of(g) in targets else g for g in sweep.groups
    ]


def draw(name: str, sweep: SweepResults, styles: Styles | None = None) -> Drawn:
    """Draw a figure. styles: those of the page that it stands on, which has the finding as text;
    alone, those of its sweep, with the finding as its title.
    """
    figure, missing_times = FIGURES[name], list[str]()
    if figure.of_times and not figure.of_single_runs:
        groups = _aimed(sweep) if figure.of_target else sweep.groups
        missing_times = without_times(groups, figure.of_target, sweep.short_name_of)
    try:
        drawn = figure.draw(sweep, styles or Styles([sweep]))
    except NothingToDraw as error:
        raise NothingToDraw("; ".join([str(error), *missing_times])) from None
    drawn.notes += sweep.averaged_exchanges
    if figure.of_times:
        drawn.notes += disturbed(sweep.finished)
    drawn.notes += missing_times
    # In a column of a paper the finding is left to the caption, which the author writes.
    if styles is None and has_room(WIDTH) and (text := _finding(name, sweep)):
        set_title(drawn.figure, text)
        if figure.of_medians:
            drawn.notes.append("drawn: medians; in the title: ratios of geometric means")
    return drawn


def headline(sweep: SweepResults) -> str:
    """What a sweep found, in one sentence with intervals; "" where nothing is compared."""
    name = figure_for(sweep)
    return errors_of(sweep) if name == "prediction" else _finding(name, sweep)


def _finding(name: str, sweep: SweepResults) -> str:
    about = FIGURES[name].about
    if name == "learning_rate" and (best := best_learning_rate(sweep)):
        return best[0].removesuffix(".")
    if name == "frontier":  # whose costs depend on the sweep
        costs = [*TIMES_TO_TARGET] if _reaches_target(sweep) else [RATE]
        about = (*costs, *[MEMORY] * (MEMORY in (sweep.columns or ())), ACCURACY)
    if name == "epoch_time" and (apart := groups_by_batch(sweep)[1]):
        not_drawn = {run for group in apart for run in group.runs}
        sweep = sweep.only(run for run in sweep.runs if run not in not_drawn)
    return finding(sweep, *about) if about else ""


def draw_all(
    sweep: SweepResults, styles: Styles | None = None
) -> tuple[dict[str, Drawn], dict[str, str]]:
    """The figures that the records have data for; and why there is none, for the others."""
    drawn, missing = {}, {}
    for name in FIGURES:
        try:
            drawn[name] = draw(name, sweep, styles)
        except UserError as error:
            missing[name] = str(error)
    return drawn, missing


def figure_for(sweep: SweepResults) -> str:
    """The figure that answers a sweep's question, by what varies in it."""
    has_link, varied = "link" in sweep.axes, sweep.naming
    if (of_rates := _figure_of_rates(sweep)) and [*(sweep.baseline or {})] == ["lr"]:
        return of_rates  # whatever else varies, the question is about the rate
    if sweep.is_for_predictions:
        return "prediction"
    ways = {STRATEGY, *OF_ONE_STRATEGY} & {*varied}
    if ((ways and "link" not in varied) or "exchange" in varied) and _reaches_target(sweep):
        return "time_to_accuracy"
    if has_link and ways:
        return "strategies"
    # A line over the delay would join several set-ups.
    over_links = {group.label.get("setup") for group in sweep.groups if group.label.get("link")}
    links_alone = {*shown_axes(varied)} <= {"script", "setup", "link"}
    if "link" in varied and links_alone and len(over_links) < 2:
        return "propagation"
    for axis, name in (
        ("per_gpu_batch", "epoch_time"),
        ("lr", of_rates or "accuracy"),
        ("setup", "throughput"),
    ):
        if axis in varied and _varies(sweep, axis):
            return name
    return "frontier"


def _figure_of_rates(sweep: SweepResults) -> str:
    """Its name, where two learning rates or more were measured: of one there is a curve."""
    rates = {group.label.get("lr") for group in sweep.groups if group.finished}
    return "learning_rate" if "lr" in sweep.naming and len(rates) > 1 else ""


def _varies(sweep: SweepResults, axis: str) -> bool:
    """Whether an axis varies among the groups that were run, or among all if fewer than two were.

    A single group counts as varying.
    """
    begun = [group for group in sweep.groups if group.finished or failures(group)]
    groups = begun if len(begun) > 1 else sweep.groups
    return len(groups) == 1 or len({str(group.label.get(axis)) for group in groups}) > 1


def figures_for(sweep: SweepResults) -> tuple[str, ...]:
    """The figures that answer the question on a page: the time to the target is added if it is
    reached; otherwise the frontier is added to a figure of speed alone.
    """
    name = figure_for(sweep)
    if _reaches_target(sweep):
        return tuple(dict.fromkeys((name, "time_to_accuracy")))
    return (name, "frontier") if name == "throughput" else (name,)


def _reaches_target(sweep: SweepResults) -> bool:
    times = (time for group in sweep.groups for time in group.values("tta_train_s"))
    return sweep.target is not None and any(map(math.isfinite, times))


def show(name: str, folder: str) -> Drawn | None:
    """For a notebook: print the question of a sweep and what its records answer; return this figure
    of it, or None and print the reason. FOLDER:NAME=VALUE,... is a part of a sweep.
    """
    if name not in FIGURES:
        raise UserError(f"no figure {name}: there are {', '.join(FIGURES)}")
    sweep = read_results_part(folder)
    asked = [f"{sweep.question} ({sweep.name})"] * sweep.has_question
    drawn = None
    try:
        drawn = draw(name, sweep)
        last = "; ".join([FIGURES[name].title, *drawn.notes])
    except UserError as error:
        last = _not_drawn(name, error)
    # A figure about measures answers a question; for any other, its description is printed.
    answer = [*map(str, answers(sweep))] if FIGURES[name].about else []
    answer = [*best_learning_rate(sweep), *answer] if name == "learning_rate" else answer
    shown = answer or ([drawn.alt] if drawn else [])
    print(*asked, *shown, *_missing_lines(sweep), "", last, sep="\n")
    return drawn


def run(options: argparse.Namespace) -> int:
    if options.out is None:
        refuse_part(str(options.folder), "give --out DIR for the figures of a part")
    draw, kinds = (_every, KINDS) if options.all else (_answering, ("png",))
    with page_width(options.width):
        kinds = (options.format,) if options.format else kinds
        files, notes = draw(options.folder, options.out, kinds)
    if options.json:
        print_json({"written": files, "notes": notes})
    else:
        print(*notes, *(f"written: {file}" for file in files), sep="\n")
    return 0


Saved = tuple[list[Path], list[str]]  # files, and lines on what they do not show
Figures = tuple[dict[str, Drawn], dict[str, str]]  # by name, and why there is none, by name


def _answering(folder: Path, out: Path | None, kinds: Sequence[str]) -> Saved:
    """Draw the figure that answers the question of each sweep, and of other runs by task."""
    files, notes, reasons = _saved(folder, out, kinds, _answer, beside_sweeps=True)
    if not files:
        is_sweep = sweep_file(parse_selector(str(folder))[0]) is not None
        more = "" if is_sweep else "; --all draws every figure for which they have something"
        raise UserError(f"{reasons[0]}{more}")
    return files, notes


def _answer(sweep: SweepResults) -> Figures:
    name = figure_for(sweep)
    try:
        return {name: draw(name, sweep)}, {}
    except UserError as error:
        return {}, {name: str(error)}


def _every(folder: Path, out: Path | None, kinds: Sequence[str]) -> Saved:
    """Draw every figure of each sweep, and of other runs by task: these share no figure."""
    files, notes, _ = _saved(folder, out, kinds, draw_all)
    if not files:
        raise UserError(f"{folder}: there is nothing to draw: no run has numbers")
    return files, notes


def _saved(
    folder: Path, out: Path | None, kinds: Sequence[str],
    figures_of: Callable[[SweepResults], Figures], beside_sweeps: bool = False,
) -> tuple[list[Path], list[str], list[str]]:  # fmt: skip
    """Draw figures of each sweep and save them, in the folder of the sweep if that is asked for;
    return the files, lines on what they do not show, and why there is no figure.
    """
    sweeps, notes = read_all_parts(str(folder))
    files, taken, reasons = list[Path](), list[str](), list[str]()
    for sweep in sweeps:
        is_beside = beside_sweeps and sweep_file(sweep.folder) is not None
        into = out or (sweep.folder if is_beside else folder / "figures")
        if len(sweeps) > 1 and not (beside_sweeps and into == sweep.folder):
            taken.append(file_name(sweep.name, taken))
            into /= taken[-1]
        with working(f"drawing {sweep.name}"):
            drawn, left_out = figures_of(sweep)
        for name, figure in drawn.items():
            try:
                with working(f"writing {name}"):
                    files += save(figure, into, name, kinds)
            except UserError as error:
                left_out[name] = str(error)
        whose = f"{sweep.name}: " if len(sweeps) > 1 else ""
        lines = [*_missing_lines(sweep), *(_not_drawn(n, why) for n, why in left_out.items())]
        notes += [f"{whose}{line}" for line in lines]
        reasons += left_out.values()
    return files, notes, reasons


def _missing_lines(sweep: SweepResults) -> list[str]:
    return [*sweep.problems, *unfinished([run.state for run in sweep.runs])]


def _not_drawn(name: str, why: object) -> str:
    return f"not drawn: {FIGURES[name].title}: {why}"

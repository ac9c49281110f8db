"""python -m harness plan RECORDS --nodes 4 --link 80ms/50mbit --target accuracy=0.9: which
strategy, period, batch and exchange reach the target first there, what that takes, and why.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import filterfalse
from typing import Any

from harness.core.collectives import wire_of
from harness.core.command_line import print_json
from harness.core.links import Link
from harness.core.records import FINISHED
from harness.core.settings import UserError
from harness.core.strategies import is_coded
from harness.read.labels import BATCH, STRATEGY, UNKNOWN, counted, duration, heading_of
from harness.read.predict.candidates import (
    FURTHEST,
    NOT_REACHED,
    WALL,
    Candidate,
    Candidates,
    candidates,
    missing_quality,
    training_text,
    trainings_of,
)
from harness.read.predict.command import uniform
from harness.read.predict.facts import Overrides, effective_batch_of, model_of, shape_of
from harness.read.predict.fitting import Fitted, fit_read
from harness.read.predict.lossy.compared import check_compared, limits_of
from harness.read.predict.lossy.messages import assumption
from harness.read.predict.ratios import STEPS
from harness.read.predict.scenario import APART, is_simulated, trains_apart
from harness.read.records.groups import Group
from harness.read.records.processors import by_speed
from harness.read.records.runs import Run, Target, parse_target
from harness.read.records.selection import command_on, read_selected
from harness.read.table import Table, screen, show

SHOWN = 6
CLOSE = 1.1  # times the fastest: predictions without an interval do not tell these apart


def run(options: argparse.Namespace) -> int:
    nodes = _nodes(options.nodes)
    link = uniform(options.link)
    check_compared(link, FURTHEST)
    target = parse_target(options.target)
    fitted = _fitted(options, nodes, target, str(link))
    choices = candidates(
        fitted, fitted.selected, nodes, wire_of(link), target, options.effective_batch,
        options.emulated, str(link),
    )  # fmt: skip
    fitted = replace(fitted, assumed=(*fitted.assumed, *_simulated(fitted, link, choices)))
    kept = within(choices.reached, options.deadline, options.budget, options.cost_per_gpu_hour)
    alone = on_one_machine(fitted, target, options.effective_batch)
    beside = alone_text(fitted, alone, choices.reached[0], target, options.effective_batch)
    if options.json:
        fields = [as_fields(each, options.cost_per_gpu_hour) for each in kept]
        print_json({"model": fitted.name, "machine": fitted.machine, "choices": fields,
                    "on_one_machine_s": _compared_s(fitted, alone), "on_one_machine": beside,
                    "missed": choices.missed, "left_out": choices.left_out,
                    "elsewhere": choices.elsewhere, "lossy": choices.lossy,
                    "assumed": fitted.assumed, "not_read": fitted.not_read})  # fmt: skip
        return 0 if kept else 1
    console = screen()
    console.print(fitted.about)
    if kept:
        show(plan_table(kept[:SHOWN], options.cost_per_gpu_hour))
        if more := kept[SHOWN:]:
            screen().print(f"and {len(more)} more, the slowest takes {duration(more[-1].wall_s)}: "
                           "--json lists all")  # fmt: skip
        console.print(reasons(kept, len(choices.reached), str(target), str(link)))
        if command := command_of(kept[0], str(link)):
            console.print(f"measure {'the first' if is_open(kept) else 'it'} with: {command}")
        for line in measured_lines(kept):
            console.print(line)
    else:
        fastest = choices.reached[0]
        console.print(
            f"nothing is within the limit: the fastest, {fastest.name}, takes "
            f"{duration(fastest.wall_s)} and {fastest.node_hours:.3g} node-hours"
        )
    console.print(beside)
    for line in (*notes(choices), *(f"assumed: {each}" for each in fitted.assumed)):
        console.print(line)
    return 0 if kept else 1


def _fitted(options: argparse.Namespace, nodes: list[int], target: Target, link: str) -> Fitted:
    """The fit on the records; where runs are missing, the error names those of the target, too."""
    runs, _, not_read = read_selected(options.records, None)
    missing = missing_quality(runs, nodes, target, options.effective_batch, link)
    try:
        return fit_read(options.records, runs, not_read, Overrides.of(options))
    except UserError as error:
        raise UserError("; ".join(filter(None, (str(error), missing)))) from error


def _simulated(fitted: Fitted, link: Link, choices: Candidates) -> Iterator[str]:
    """What is assumed where the link has loss or jitter."""
    if wire_of(link).is_steady:
        return
    plans = [each.plan for each in choices.reached]
    yield assumption(fitted.model.congestion)
    yield from limits_of(
        link,
        max(plan.shape.nodes for plan in plans),
        any(trains_apart(p) or is_coded(p.compress, p.strategy in APART) for p in plans),
    )


def on_one_machine(fitted: Fitted, target: Target, batch: int | None = None) -> Group | None:
    """The training, of this effective batch if any is asked for, that reached the target first, in
    every run on the machine of the fit, without a link: of runs whose times are comparable with
    those of the fit, or of others where only these reached it. A failed run is a miss.
    """
    ended = [run for run in fitted.selected if run.settings and shape_of(run).nodes == 1]
    runs = [
        run.toward(target) for run in ended
        if tuple(model_of(run)) == fitted.of_model and run.state in (FINISHED, *NOT_REACHED)
        and (batch is None or effective_batch_of(run) == batch)
        and (run.machine_kind == fitted.first.machine_kind
             or (run.machine_kind is None and run.state != FINISHED))
    ]  # fmt: skip
    reached = [same for same in trainings_of(runs) if all(map(_reached, same))]
    alike = [tuple(filter(fitted.is_timed_like, same)) for same in reached]
    unlike = (filterfalse(fitted.is_timed_like, same) for same in reached)
    others = (tuple(each) for same in unlike for each in by_speed(same))
    for parts in (alike, others):
        groups = [group for part in parts if (group := Group(part)).values(WALL)]
        if groups:
            return min(groups, key=lambda group: group.mean(WALL) or math.inf)
    return None


def _reached(run: Run) -> bool:
    return run.state == FINISHED and math.isfinite(run.measures.get("tta_epochs", math.inf))


def _compared_s(fitted: Fitted, alone: Group | None) -> float | None:
    """The time on one machine, where it is comparable with those that are predicted."""
    return alone.mean(WALL) if alone and fitted.is_timed_like(alone.runs[0]) else None


def alone_text(
    fitted: Fitted, alone: Group | None, best: Candidate, target: Target, batch: int | None = None
) -> str:
    wanted = f"{target}{'' if batch is None else f' with --effective_batch {batch}'}"
    if alone is None:
        return f"one machine: {wanted} is not known to be reached there in every run"
    run, took_s = alone.runs[0], alone.mean(WALL) or math.nan
    name = training_text(run.identity["strategy"], run.identity[BATCH], shape_of(run))
    of_runs = counted(len(alone.by_run(WALL)), "run")
    if not fitted.is_timed_like(run):
        return (
            f"one machine: {wanted} is known to be reached only {fitted.unlike_text(run)}, whose "
            f"times are not comparable with those above: {name} took {duration(took_s)} there "
            f"({of_runs})"
        )
    less = ", less than anything over the link" if took_s < best.wall_s else ""
    return f"one machine: {name} took {duration(took_s)}{less} ({of_runs})"


def _nodes(text: str) -> list[int]:
    counts = [int(word) for word in text.split(",") if word.strip().isdecimal()]
    if len(counts) != len(text.split(",")) or min(counts) < 2:
        raise UserError(f"--nodes {text}: expected 2 or more, or several of them: 2,4")
    return [*dict.fromkeys(counts)]


def within(
    reached: list[Candidate], deadline_h: float | None, budget: float | None, price: float | None
) -> list[Candidate]:
    """Candidates within the limits, the fastest first; with a deadline alone, by node-hours."""
    kept = [
        each for each in reached
        if (deadline_h is None or each.wall_s <= 3600 * deadline_h)
        and (budget is None or (cost_of(each, price) or each.node_hours) <= budget)
    ]  # fmt: skip
    if deadline_h is not None and budget is None:
        return sorted(kept, key=lambda each: (each.node_hours, each.wall_s))
    return kept


def cost_of(each: Candidate, price: float | None) -> float | None:
    """The cost of a candidate at a price per device-hour; None where no price is given."""
    return None if price is None else price * each.plan.shape.ranks * each.wall_s / 3600


def as_fields(each: Candidate, price: float | None) -> dict[str, Any]:
    plan, interval = each.plan, each.interval or (None, None)
    return {
        **plan.fields,
        "effective_batch": each.samples,
        "epochs": each.epochs,
        "runs": each.runs,
        "links": each.links,
        "extrapolated": not each.between,
        "simulated": is_simulated(plan),
        "settings": each.settings,
        "wall_s": each.wall_s,
        "wall_low_s": interval[0],
        "wall_high_s": interval[1],
        "measured_wall_s": list(each.measured_s),
        "parts_s": each.parts,
        "node_hours": each.node_hours,
        "cost": cost_of(each, price),
    }


def plan_table(choices: list[Candidate], price: float | None) -> Table:
    rows = []
    named = any(each.settings for each in choices)
    for each in choices:
        plan, most = each.plan, max(each.parts, key=lambda name: each.parts[name])
        ends = each.interval
        cost = cost_of(each, price)
        rows.append((
            plan.label, str(plan.shape), str(plan.batch), str(each.samples), f"{each.epochs:.3g}",
            duration(each.wall_s) + _star(each),
            UNKNOWN if ends is None else f"{duration(ends[0])} to {duration(ends[1])}",
            f"{each.node_hours:.3g}", UNKNOWN if cost is None else f"{cost:,.2f}",
            f"{most} {each.parts[most] / each.wall_s:.0%}", *([each.settings or UNKNOWN] * named),
        ))  # fmt: skip
    headings = (STRATEGY, "setup", heading_of(BATCH), heading_of("effective_batch"), "epochs",
                "wall", "95 % interval", "node-hours", "cost", "most",
                *(["settings"] * named))  # fmt: skip
    return Table(headings, rows, keys=2)


def _star(each: Candidate) -> str:
    """Marks an extrapolated time, with two stars where no link's times correct it."""
    if not each.links:
        return "**"
    return "" if each.between else "*"


def _extrapolated(each: Candidate) -> str:
    """The star in words."""
    words = {"": "", "*": ", extrapolated", "**": ", extrapolated by the model alone"}
    return words[_star(each)]


def reasons(kept: list[Candidate], reached: int, target: str, link: str) -> str:
    """What to take, and why it is the best; where that is open, a line per close candidate."""
    best = kept[0]
    if is_open(kept):
        return _undecided([each for each in kept if _is_close(each, best)], target, link)
    interval = ""
    if (ends := best.interval) is not None:
        interval = f" (95 % interval {duration(ends[0])} to {duration(ends[1])})"
    text = (
        f"take {best.name}, --exchange {best.plan.exchange}: {duration(best.wall_s)}{interval} "
        f"to {target} over {link}{_extrapolated(best)}; its steps are "
        f"{best.parts[STEPS] / best.wall_s:.0%} of it and wait for the exchange {best.share:.0%} "
        "of their time"
    )
    if best.direct_s is not None:
        text += f" (about {duration(best.direct_s)} with --exchange direct, of which no run tells)"
    if len(kept) == 1:
        of_all = "that can be predicted reached the target in every run"
        others = "is within the limit" if reached > 1 else of_all
        return f"{text}; nothing else {others}"
    other = kept[1]
    counts = [f"{each.epochs:.3g}" for each in (other, best)]
    epochs = "" if len({*counts}) == 1 else f"{' epochs instead of '.join(counts)}, "
    text += (
        f"; {other.name} takes {other.wall_s / best.wall_s:.3g} times as long"
        f" ({epochs}of its steps {other.share:.0%} waiting{_extrapolated(other)})"
    )
    ends, theirs = best.interval, other.interval
    if ends is None or theirs is None:
        return f"{text}; without an interval of both, this order may be chance"
    # With a deadline the second may be the faster one.
    overlap = theirs[0] < ends[1] and ends[0] < theirs[1]
    return f"{text}; their intervals overlap" if overlap else text


def measured_lines(kept: list[Candidate]) -> Iterator[str]:
    """What the records say of this very link, the fastest first."""
    known = [(each, s) for each in kept if (s := each.mean_measured_s) is not None]
    known.sort(key=lambda pair: pair[1])
    if known:
        yield "measured over this link:"
        for each, s in known[:SHOWN]:
            runs = counted(len(each.measured_s), "run")
            yield f"  {each.name}: {duration(s)}, mean of {runs} (planned {duration(each.wall_s)})"
        best, first = kept[0], known[0][0]
        if first.wall_s > best.wall_s and best.measured_s:
            yield f"by these means {first.name} is faster than {best.name}"
    if count := sum(each.other_nodes for each in kept):
        nodes, how = ("real", "leave out") if kept[0].plan.emulated else ("emulated", "give")
        yield (
            f"{counted(count, 'run')} of these over this link on {nodes} nodes: {how} --emulated "
            "to compare with them"
        )


def is_open(kept: list[Candidate]) -> bool:
    """Whether several are close to the first, and intervals do not tell which is the fastest."""
    close = [each for each in kept if _is_close(each, kept[0])]
    return len(close) > 1 and any(each.interval is None for each in close)


def command_of(each: Candidate, link: str) -> str | None:
    """The command that measures the candidate over the link."""
    plan = each.plan
    more = ("--exchange", plan.exchange)
    return command_on(each.run, plan.shape.nodes, plan.shape.per_node, plan.emulated, link, *more)


def _is_close(one: Candidate, other: Candidate) -> bool:
    """Whether two candidates are close in time and, as nodes may differ, in node-hours."""
    ratios = one.wall_s / other.wall_s, one.node_hours / other.node_hours
    return all(1 / CLOSE <= ratio <= CLOSE for ratio in ratios)


def _undecided(close: list[Candidate], target: str, link: str) -> str:
    """The candidates that cannot be ranked."""
    times = [each.wall_s for each in close]
    named = [
        f"  {each.name}, --exchange {each.plan.exchange}: {duration(each.wall_s)}"
        f"{_extrapolated(each)}"
        for each in close
    ]
    first = (
        f"the fastest to {target} over {link} is not known: these are within "
        f"{max(times) / min(times) - 1:.1%}, and not all have an interval"
    )
    return "\n".join([first, *named])


def notes(choices: Candidates) -> list[str]:
    lines = [f"missed the target in some run: {each}" for each in dict.fromkeys(choices.missed)]
    lines += [f"not predicted: {each}" for each in dict.fromkeys(choices.left_out)]
    if choices.elsewhere:
        lines.append(
            f"{counted(choices.elsewhere, 'run')} of another machine, processor speed, torch or "
            "number of threads: they count for the epochs to the target, not for the time of a step"
        )
    if choices.lossy:
        lines.append(
            f"{counted(choices.lossy, 'run')} over links with loss or jitter: they count for the "
            "epochs to the target, not for the time of a step"
        )
    if any(each.links for each in choices.reached):
        lines.append(
            "times of steps are the model's, which predict gives, multiplied by measured / "
            "modelled times of runs over links"
        )
    if any(each.links and not each.between for each in choices.reached):
        lines.append(
            "*: extrapolated: no times over links on each side of this one, in delay and rate"
        )
    if any(not each.links for each in choices.reached):
        steady = " without loss and jitter" if choices.lossy else ""
        lines.append(
            "**: extrapolated by the model alone: no run of this machine timed it over any link"
            f"{steady}"
        )
    return lines

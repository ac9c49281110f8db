"""python -m harness explain RUN [BASELINE]: where the time went, and why N processes are not N
times as fast."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.core.command_line import print_json
from harness.core.settings import UserError
from harness.read import table
from harness.read.compare.comparable import (
    MAY_DIFFER,
    micro_batch,
    nearest,
    on_one_node,
    runs_beside,
    singles,
    why_not,
)
from harness.read.explain import causes
from harness.read.explain.causes import LARGE, Cause, number, percent, seconds
from harness.read.explain.time_breakdown import (
    COMMUNICATION,
    PARTS,
    REST,
    STRAGGLERS,
    UNSEPARATED,
    TimeBreakdown,
    mean_breakdown,
    time_breakdown,
)
from harness.read.labels import strategy_text
from harness.read.records.groups import Group
from harness.read.records.runs import Run
from harness.read.records.selection import differing, read_group
from harness.read.records.sweeps import SweepResults

MOST_CAUSES = 2  # beside the main cause
LONG_STARTUP = 0.25  # share of the run from which on the startup is mentioned
MOST_GROUPS = 6  # of a sweep, in a report
PER_DEVICE = "train_samples_per_s_per_gpu"


@dataclass(frozen=True)
class Explanation:
    """A few sentences, the key of the main cause (None: nothing stands out), and the parts."""

    sentences: tuple[str, ...]
    main: str | None
    # name, seconds per update, their standard deviation, the baseline's share
    parts: tuple[tuple[str, float | None, float | None, float | None], ...]


def run(options: argparse.Namespace) -> int:
    baseline = options.baseline and read_group("BASELINE", options.baseline, None)
    found = explain(read_group("RUN", options.run, None), baseline)
    if options.json:
        names = ("name", "s", "sd_s", "baseline_s")
        parts = [dict(zip(names, part, strict=True)) for part in found.parts]
        print_json({**vars(found), "parts": parts})
    else:
        show(found)
    return 0


def explain(
    run: Group, baseline: Group | None = None, near: Sequence[Run] | None = None
) -> Explanation:
    """Of runs that differ only in their seed. Without a baseline one is searched for among the
    runs near, or else beside the run.
    """
    if baseline is not None and (reason := why_not(run, baseline)) is not None:
        raise UserError(f"{run.selector} and {baseline.selector} are not comparable: {reason}")
    breakdown, given = group_breakdown(run), baseline
    beside = runs_beside(run, near)
    if baseline is None and breakdown.devices > 1:
        baseline = nearest(run, beside)
    base = None if baseline is None else group_breakdown(baseline)
    context = causes.run_context(run, baseline)
    single = singles([*beside, *([given] if given else [])])
    others = [(micro_batch(group), group_breakdown(group)) for group in single]
    alone = causes.of_run(breakdown, context, others)
    scaling, does_lose = [], False
    if base is not None and (does_lose := causes.share_lost(breakdown, base) >= LARGE):
        scaling = causes.of_scaling(breakdown, base, context)
    candidates = scaling if does_lose else alone
    main = next((cause for cause in candidates if cause.share >= LARGE), None)
    hidden_s = 0.0 if does_lose else breakdown.parts[UNSEPARATED] or 0.0
    if main is not None and main.lost_s < hidden_s:
        main = None  # what is not known may be larger
    sentences = [_headline(run, breakdown)]
    if baseline is not None and base is not None:
        sentences += _against(run, breakdown, baseline, base, found=given is None)
    elif breakdown.devices > 1:
        sentences.append(
            "No comparable run on one process was found beside it, so it is unknown whether "
            "computing is slower than on one process."
        )
    if base is not None and not does_lose:
        sentences.append(f"Less than {percent(LARGE)} is lost against the baseline.")
    if main is not None:
        scales = breakdown.devices == 1 or (base is not None and not does_lose)
        kind = "Largest remaining cost" if scales else "Main cause"
        sentences.append(f"{kind}: {_cause_text(breakdown, main)}")
    elif hidden_s >= LARGE * breakdown.running_s:
        sentences.append(
            "The main cause is not known: the record does not separate the parts of its steps."
        )
    else:
        sentences.append(f"Nothing stands out: no cause takes {percent(LARGE)} of the run.")
    also = _others(main, [*scaling, *alone])
    sentences += [f"Also: {_cause_text(breakdown, cause)}" for cause in also]
    sentences += filter(None, [causes.not_known(breakdown), *_notes(run, breakdown)])
    should = dict.fromkeys(PARTS) if base is None else causes.ideal(breakdown, base)
    parts = tuple(
        (name, value, breakdown.spreads[name], should[name])
        for name, value in breakdown.parts.items()
        if value != 0.0 or name not in (COMMUNICATION, STRAGGLERS, UNSEPARATED)
    )
    return Explanation(tuple(sentences), None if main is None else main.key, parts)


def group_breakdown(group: Group) -> TimeBreakdown:
    """The means over its finished runs."""
    if not group.finished:
        states = ", ".join(run.state for run in group.runs)
        why = next((f" ({run.reason})" for run in group.runs if run.reason), "")
        raise UserError(f"{group.selector} has no finished run to explain: {states}{why}")
    return mean_breakdown([time_breakdown(run) for run in group.finished])


def _others(main: Cause | None, candidates: Sequence[Cause]) -> list[Cause]:
    """Causes that also stand out, each once: a loss in scaling comes before a large cost."""
    by_key: dict[str, Cause] = {}
    for cause in candidates:
        if cause.share >= LARGE and (main is None or cause.key != main.key):
            by_key.setdefault(cause.key, cause)
    return [*by_key.values()][:MOST_CAUSES]


def _headline(group: Group, breakdown: TimeBreakdown) -> str:
    settings, run = group.identity, group.finished[0]
    processes, nodes = run.processes or 1, run.nodes or 1
    where = f"{processes} process{'es' * (processes > 1)} on {nodes} node{'s' * (nodes > 1)}"
    batch = f"batch {settings['per_gpu_batch']}"
    if settings["grad_acc"] > 1:
        batch += f" x {settings['grad_acc']}"
    return (
        f"{settings['model']} with {settings['strategy']} on {where}, {batch} each: "
        f"{_rate(breakdown)}, {seconds(breakdown.step_s)} a step."
    )


def _rate(breakdown: TimeBreakdown) -> str:
    rate = breakdown.rate
    assert rate.mean is not None
    if rate.sd is None:
        return f"{number(rate.mean)} samples/s"
    return (
        f"{number(rate.mean)} ± {number(rate.sd)} samples/s "
        f"(mean and standard deviation of {rate.n} runs)"
    )


def _against(
    group: Group, breakdown: TimeBreakdown, baseline: Group, base: TimeBreakdown, found: bool
) -> list[str]:
    assert breakdown.rate.mean is not None and base.rate.mean is not None
    times, devices = breakdown.rate.mean / base.rate.mean, breakdown.devices / base.devices
    one = "one process" if base.devices == 1 else f"{base.devices} processes"
    if base.devices > 1 and baseline.finished[0].nodes == 1 < (group.finished[0].nodes or 1):
        one += " on one node"
    source = f"{baseline.selector}{', found beside it' if found else ''}"
    speed = f"{number(times)}x faster" if times >= 1 else f"{number(1 / times)}x slower"
    scaling = f" on {devices:g}x the devices ({percent(times / devices)} efficiency)"
    sentences = [
        f"The baseline is {one} with batch {micro_batch(baseline)} ({source}): {_rate(base)}.",
        f"Training is {speed}{scaling if devices != 1 else ''}.",
    ]
    unlike = [name for name, _, _ in differing(group, baseline) if name not in MAY_DIFFER]
    if unlike:
        sentences.append(f"They also differ in {', '.join(unlike)}.")
    return sentences


def _cause_text(breakdown: TimeBreakdown, cause: Cause) -> str:
    value, more = causes.bound(breakdown, cause)
    if cause.in_step:
        gain = f"{100 * more:+.0f} %" if more < 1 else f"{1 + more:.1f} times as many"
        without = f"at most {number(value)} samples/s ({gain})"
    else:
        without = f"at least {seconds(value)} after startup ({100 * more:+.0f} %)"
    return f"{cause.text}. Without it: {without}. Remedy: {cause.remedy}."


def _notes(group: Group, breakdown: TimeBreakdown) -> Iterator[str]:
    startup_s = breakdown.parts[REST]
    wall_s = sum(value or 0 for value in breakdown.parts.values())
    if startup_s is not None and startup_s > LONG_STARTUP * wall_s:
        startup, wall = (seconds(value * breakdown.updates) for value in (startup_s, wall_s))
        yield (
            f"Startup and time outside epochs took {startup} of {wall}: a fixed cost, independent "
            "of run length."
        )
    resumed = [run for run in group.finished if (run.measures.get("attempts") or 1) > 1]
    if resumed:
        lost_s = sum(run.measures.get("lost_s", 0.0) for run in resumed)
        yield f"{len(resumed)} run(s) were interrupted and resumed: {seconds(lost_s)} lost."
    if left_out := len(group.runs) - len(group.finished):
        yield f"{left_out} run(s) did not finish and are not counted."


def show(explanation: Explanation) -> None:
    console = table.screen()
    for sentence in explanation.sentences:
        console.print(sentence)
    whole_s = sum(value for _, value, _, _ in explanation.parts if value is not None)
    against = any(should is not None for _, _, _, should in explanation.parts)
    rows = []
    for name, value, sd, should in explanation.parts:
        cells = [_ms(value, sd), "-" if value is None else percent(value / whole_s)]
        rows.append([name, *cells, *([_ms(should, None)] if against else [])])
    headings = ["per update", "ms", "of the run", *(["baseline's share, ms"] if against else [])]
    table.show(table.table_of(headings, rows))


def _ms(value: float | None, sd: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{1e3 * value:,.2f}" + (f" ± {1e3 * sd:,.2f}" if sd is not None else "")


def explain_sweep(sweep: SweepResults) -> list[str]:
    """A text for each chosen group; where it cannot be explained, the reason."""
    chosen = list(_chosen(sweep))
    folders = (run.folder for run in sweep.runs if run.folder)
    near = on_one_node(folders) if chosen else []
    texts = []
    for group in chosen[:MOST_GROUPS]:
        name = sweep.name_of(group)
        runs = tuple(run for run in group.runs if run.folder)
        try:
            found = explain(Group(runs, name="RUN", selector=name), near=near)
            text = " ".join(found.sentences)
        except UserError as error:
            text = str(error)
        texts.append(f"{name}. {text}")
    return texts


def _chosen(sweep: SweepResults) -> Iterator[Group]:
    """Per script, set-up and strategy the group that uses its devices least; those of one process
    only where there are no others.
    """
    finished = [g for g in sweep.groups if g.finished and g.mean(PER_DEVICE) is not None]
    several = [g for g in finished if (g.fact("devices") or 1) > 1]
    kinds: dict[tuple[str, str, str], list[Group]] = {}
    for group in several or finished:
        script, strategy = str(group.setting("script")), strategy_text(group.label) or ""
        kinds.setdefault((script, group.topology, strategy), []).append(group)
    for groups in kinds.values():
        yield min(groups, key=lambda group: group.mean(PER_DEVICE) or 0.0)

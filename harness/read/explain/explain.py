"""python -m harness explain RUN [BASELINE]: where the time went, and why N processes are not N
times as fast.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

from harness.core import tasks
from harness.core.attempts import ends_of, starts_of
from harness.core.command_line import print_json
from harness.core.records import DISTURBING_SHARE, EPOCHS
from harness.core.settings import UserError
from harness.core.strategies import SINGLE
from harness.read import table
from harness.read.explain import causes
from harness.read.explain.baseline import (
    MAY_DIFFER,
    efficiency_text,
    is_single,
    nearest,
    runs_beside,
    why_not,
)
from harness.read.explain.causes import (
    LARGE,
    Cause,
    percent,
    seconds,
    three_digits,
    with_spread,
)
from harness.read.explain.context import not_counted, run_context
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
from harness.read.labels import UNKNOWN, listed
from harness.read.records.baseline import RATE
from harness.read.records.comparable import LOAD, SPEED, all_beside_others, measured_against
from harness.read.records.groups import Group
from harness.read.records.recorded import is_number, is_ours
from harness.read.records.runs import Run
from harness.read.records.selection import differing, read_group, several_kinds
from harness.read.statistics import spread

MOST_CAUSES = 2  # beside the main cause
LONG_STARTUP = 0.25  # share of the run from which on the startup is mentioned
WORTH_HALF = 1.15  # times as fast, from which on bf16 is advised, as when a run starts
MOST_EPOCHS = 6  # named of those that were interrupted


class Part(NamedTuple):
    """A part of an update."""

    name: str
    s: float | None
    sd_s: float | None
    baseline_s: float | None  # the baseline's share of it


# Flag of this project -> argument of the Trainer, for scripts of users.
TRAINER_ARGUMENTS = {
    "--per_gpu_batch": "per_device_train_batch_size",
    "--grad_acc": "gradient_accumulation_steps",
    "--num_workers": "dataloader_num_workers",
    "--save none": 'save_strategy="no"',
    "--output_dir": "output_dir",
    " (--test_size)": "",
    "--eval_batch": "per_device_eval_batch_size",
}


@dataclass(frozen=True)
class Explanation:
    """A few sentences, the key of the main cause (None: nothing stands out), and the parts."""

    sentences: tuple[str, ...]
    main: str | None
    parts: tuple[Part, ...]


def run(options: argparse.Namespace) -> int:
    baseline, words = None, ["explain", "{}"]
    if options.baseline:
        command = ("explain", options.run, "{}")
        baseline = read_group("BASELINE", options.baseline, None, options.run, command)
        words.append(options.baseline)
    group = read_group("RUN", options.run, None, options.baseline, words)
    explanation = explain(group, baseline)
    if options.json:
        parts = [part._asdict() for part in explanation.parts]
        not_read = [*group.not_read, *(baseline.not_read if baseline else ())]
        print_json({**vars(explanation), "parts": parts, "not_read": not_read})
    else:
        show(explanation)
    return 0


@dataclass(frozen=True)
class Findings:
    """The time of a run, that of its baseline if there is one, and their causes."""

    breakdown: TimeBreakdown
    baseline: Group | None
    base: TimeBreakdown | None  # the baseline's
    was_searched: bool  # for the baseline, as none was named
    refused: Group | None  # the nearest one that was found and is not comparable
    own_causes: Sequence[Cause]  # of the run's own time
    scaling: Sequence[Cause]  # of a large loss against the baseline
    does_lose: bool  # whether there is such a loss

    @property
    def in_steps(self) -> list[Cause]:
        """Those of samples/s, which do not count evaluation, saving and first steps."""
        least_s = LARGE * self.breakdown.step_s
        return [cause for cause in self.scaling if cause.in_step and cause.lost_s >= least_s]

    @property
    def hidden_s(self) -> float:
        """Seconds of an update in parts that the record does not separate."""
        return 0.0 if self.does_lose else self.breakdown.parts[UNSEPARATED] or 0.0

    @property
    def main(self) -> Cause | None:
        """The cause that stands out; None also where what is not separated may be larger."""
        large = _large(self.scaling if self.does_lose else self.own_causes)
        main = next(iter([*self.in_steps, *large]), None)
        return None if main is not None and main.lost_s < self.hidden_s else main


def explain(
    run: Group, baseline: Group | None = None, near: Sequence[Run] | None = None
) -> Explanation:
    """Explain runs that differ only in their seed. Without a baseline, one is searched for among
    the runs `near`, or else beside the run.
    """
    if baseline is not None and (reason := why_not(run, baseline)) is not None:
        raise UserError(f"{run.selector} and {baseline.selector} are not comparable: {reason}")
    findings = _findings(run, baseline, near)
    breakdown, base, main = findings.breakdown, findings.base, findings.main
    should = dict.fromkeys(PARTS) if base is None else causes.ideal(breakdown, base)
    parts = tuple(
        Part(name, value, breakdown.spreads[name], should[name])
        for name, value in breakdown.parts.items()
        if value != 0.0 or name not in (COMMUNICATION, STRAGGLERS, UNSEPARATED)
    )
    return Explanation(tuple(_sentences(run, findings)), None if main is None else main.key, parts)


def _findings(run: Group, named: Group | None, near: Sequence[Run] | None) -> Findings:
    breakdown, beside = group_breakdown(run), runs_beside(run, near)
    baseline, refused = named, None
    if named is None and breakdown.devices > 1:
        baseline, refused = nearest(run, beside)
    base = None if baseline is None else group_breakdown(baseline)
    context = run_context(run, baseline)
    single = [other for other in beside if is_single(other) and why_not(run, other) is None]
    single += [named] if named and is_single(named) else []
    own_causes = _for_its_script(run, causes.of_run(breakdown, context, [*_broken_down(single)]))
    scaling, does_lose = list[Cause](), False
    if base is not None and (does_lose := causes.share_lost(breakdown, base) >= LARGE):
        scaling = _for_its_script(run, causes.of_scaling(breakdown, base, context))
    return Findings(
        breakdown, baseline, base, named is None, refused, own_causes, scaling, does_lose
    )


def _sentences(run: Group, findings: Findings) -> Iterator[str]:
    breakdown, base, main = findings.breakdown, findings.base, findings.main
    yield _headline(run, breakdown)
    if findings.baseline is not None and base is not None:
        yield from _against(run, breakdown, findings.baseline, base, findings.was_searched)
    elif breakdown.devices > 1:
        yield _alone(run, findings.refused)
    if base is not None and not findings.does_lose:
        yield f"Less than {percent(LARGE)} is lost against the baseline."
    slowed = _slowed(run)
    if slowed and main is None:
        yield slowed
    yield _main_cause(breakdown, main, findings.hidden_s, base is not None, findings.does_lose)
    also = [*findings.in_steps, *_large([*findings.scaling, *findings.own_causes])]
    for cause in _others(main, also):
        yield f"Also: {cause_text(breakdown, cause)}"
    notes = (causes.not_known(breakdown), slowed if main else "", *_notes(run, breakdown))
    yield from filter(None, notes)


def _main_cause(
    breakdown: TimeBreakdown,
    main: Cause | None,
    hidden_s: float,
    is_compared: bool,
    does_lose: bool,
) -> str:
    """The sentence about the main cause. hidden_s: seconds of an update in parts that the record
    does not separate. A large part is the cause of a loss only against a baseline.
    """
    if main is not None:
        if breakdown.devices == 1 or (is_compared and not does_lose):
            kind = "Largest remaining cost"
        elif is_compared:
            kind = "Main cause"
        else:
            of_computing = main.key in (causes.BATCH, causes.PADDING)
            kind = "Largest cost" if of_computing else "Largest part beside computing"
        return f"{kind}: {cause_text(breakdown, main)}"
    if hidden_s >= LARGE * breakdown.running_s:
        return "The main cause is not known: the record does not separate the parts of its steps."
    return f"Nothing stands out: no cause takes {percent(LARGE)} of the run without its startup."


def group_breakdown(group: Group) -> TimeBreakdown:
    """The means over finished runs: the quiet ones in the batch asked for, if there are any."""
    if not group.finished:
        states = ", ".join(run.state for run in group.runs)
        why = next((f" ({run.reason})" for run in group.runs if run.reason), "")
        raise UserError(f"{group.selector} has no finished run to explain: {states}{why}")
    if group.has_unlike_threads:
        unlike = {"threads": sorted({str(run.threads) for run in group.timed})}
        raise UserError(f"{group.name}, {several_kinds(group.selector, unlike, group.timed)}")
    if len(machines := {str(run.machine_kind) for run in group.timed}) > 1:
        unlike = {"machine": sorted(machines)}
        raise UserError(f"{group.name}, {several_kinds(group.selector, unlike, group.timed)}")
    return mean_breakdown([*map(time_breakdown, group.timed)])


def _broken_down(groups: Sequence[Group]) -> Iterator[tuple[int, TimeBreakdown]]:
    """(batch, breakdown) of the groups of which enough was timed."""
    for group in groups:
        with suppress(UserError):
            yield group.identity["per_gpu_batch"], group_breakdown(group)


def _alone(run: Group, refused: Group | None) -> str:
    reason = None if refused is None else why_not(run, refused)
    if reason is not None and reason.startswith(LOAD) and all_beside_others(run):
        rerun = " with --rerun added" if is_ours(run.finished[0].settings) else ""
        return (
            "It ran beside other programs, so its times are not compared with quiet runs on one "
            f"process: when nothing else runs, repeat its command{rerun}."
        )
    why = ""
    if refused is not None:
        why = f" ({refused.selector} is not: {reason})"
    disturbed = ""
    if all_beside_others(run):
        disturbed = " It ran beside other programs, so quiet runs would not be compared with it."
    return (
        f"No comparable run on one process was found beside it{why}, so it is unknown whether "
        f"computing is slower than on one process.{disturbed}"
    )


def _slowed(run: Group) -> str:
    """A sentence where other programs ran beside all runs; they may have slowed every part."""
    if not all_beside_others(run):
        return ""
    during = max((one.others_cpu_share or 0.0 for one in run.finished), default=0.0)
    before = max((one.launch.get("cpu_busy_share") or 0.0 for one in run.finished), default=0.0)
    share, when = (during, "") if during > DISTURBING_SHARE else (before, " before it began")
    used = f" used {percent(share)} of the cores{when} and" if share > DISTURBING_SHARE else ""
    return f"Other programs{used} may have slowed every part."


def _large(candidates: Sequence[Cause]) -> list[Cause]:
    """The causes that take at least LARGE of the run."""
    return [cause for cause in candidates if cause.share >= LARGE]


def _others(main: Cause | None, candidates: Sequence[Cause]) -> list[Cause]:
    """Causes that also stand out, each once: a loss in scaling comes before a large cost."""
    by_key: dict[str, Cause] = {}
    for cause in candidates:
        if main is None or cause.key != main.key:
            by_key.setdefault(cause.key, cause)
    return [*by_key.values()][:MOST_CAUSES]


def _headline(group: Group, breakdown: TimeBreakdown) -> str:
    settings, run = group.identity, group.finished[0]
    processes, nodes = run.processes or 1, run.nodes or 1
    where = f"{processes} process{'es' * (processes > 1)} on {nodes} node{'s' * (nodes > 1)}"
    # A record of LogCallback alone may lack some of these settings.
    strategy = f" with {settings['strategy']}" if settings["strategy"] else ""
    batch = f", batch {settings['per_gpu_batch']}" if settings["per_gpu_batch"] else ""
    if (settings["grad_acc"] or 1) > 1:
        batch += f" x {settings['grad_acc']}"
    return (
        f"{settings['model'] or 'A model'}{strategy} on {where}{batch}{' each' if batch else ''}. "
        f"It reaches {_rate(breakdown)}, {seconds(breakdown.step_s)} a step."
    )


def _rate(breakdown: TimeBreakdown) -> str:
    rate = breakdown.rate
    assert rate.mean is not None
    if rate.sd is None:
        return f"{three_digits(rate.mean)} samples/s"
    return (
        f"{with_spread(rate.mean, rate.sd)} samples/s "
        f"(harmonic mean and standard deviation of {rate.n} runs)"
    )


def _against(
    group: Group, breakdown: TimeBreakdown, baseline: Group, base: TimeBreakdown, was_searched: bool
) -> list[str]:
    assert breakdown.rate.mean is not None and base.rate.mean is not None
    # The ratio of `compare`; if a summary lacks the rate, that of the rates of the breakdowns.
    compared = measured_against(group, baseline, RATE, SPEED)
    times = compared.value or breakdown.rate.mean / base.rate.mean
    seeds = f"{compared.n} pair{'s' * (compared.n > 1)} with the same seed alone"
    by = f", by {seeds}" if compared.value and compared.unpaired else ""
    devices = breakdown.devices / base.devices
    one = "one process" if base.devices == 1 else f"{base.devices} processes"
    if base.devices > 1 and baseline.finished[0].nodes == 1 < (group.finished[0].nodes or 1):
        one += " on one node"
    source = f"{baseline.selector}{', found beside it' if was_searched else ''}"
    batch, strategy = (baseline.identity[name] for name in ("per_gpu_batch", "strategy"))
    if strategy not in (None, SINGLE, group.identity["strategy"]):
        one += f" of {strategy}"
    share, kind = efficiency_text(group, baseline)
    scaling = f" on {devices:g}x the devices{share}" if devices != 1 else ""
    sentences = [
        f"The baseline is {one}{f' with batch {batch}' if batch else ''} ({source}). "
        f"It reaches {_rate(base)}.",
        f"Training reaches {_times(times)} times its samples/s{scaling}{by}.{kind}",
    ]
    shared = group.finished[0].launch.get("processes_per_gpu") or 0
    if shared > 1:
        sentences.append("Its processes share GPUs and slow each other.")
    if all_beside_others(baseline):
        sentences.append("Other programs ran beside it and its baseline: neither time is certain.")
    unlike = [name for name, _, _ in differing(group, baseline) if name not in MAY_DIFFER]
    if unlike:
        sentences.append(f"They also differ in {', '.join(unlike)}.")
    return sentences


def _times(ratio: float) -> str:
    """Three digits with their zeros: 1.00 times says more than 1."""
    return three_digits(ratio) if ratio >= 100 else f"{ratio:#.3g}"


def _for_its_script(group: Group, candidates: list[Cause]) -> list[Cause]:
    """The causes; for scripts of users with LogCallback, remedies name the Trainer's arguments."""
    run = group.finished[0]
    if is_ours(run.settings):
        return candidates
    return [replace(cause, remedy=_for_any_trainer(cause.remedy)) for cause in candidates]


def _for_any_trainer(remedy: str) -> str:
    for flag, argument in TRAINER_ARGUMENTS.items():
        remedy = remedy.replace(flag, argument)
    ours = f" (flags of {tasks.names('.py, ')}.py and scripts made from them)"
    return remedy + (ours if "--" in remedy else "")


def cause_text(breakdown: TimeBreakdown, cause: Cause) -> str:
    value, more = causes.bound(breakdown, cause)
    if cause.in_step:
        gain = f"{100 * more:+.0f} %" if more < 1 else f"{1 + more:.1f} times as many"
        without = f"at most {three_digits(value)} samples/s ({gain})"
    else:
        without = f"the run takes at least {seconds(value)} after startup ({100 * more:+.0f} %)"
    is_part = cause.key == causes.OUTSIDE and causes.is_beyond_a_share(breakdown, cause.lost_s)
    spared = "what is beyond it" if is_part else "it"
    return f"{cause.text}. Without {spared}: {without}. Remedy: {cause.remedy}."


def _notes(group: Group, breakdown: TimeBreakdown) -> Iterator[str]:
    changed = [run for run in group.finished if run.other_batches]
    if changed:
        all_of_them = len(changed) == len(group.finished)
        what = "not those of the batch asked for" if all_of_them else "left out here"
        yield (
            f"{len(changed)} run(s) ran in another batch per process than asked for "
            f"(--auto_batch, or nodes were missing): their times are {what}."
        )
    for fits, lacks in dict.fromkeys(filter(None, map(memory_bounds, changed))):
        each = "samples per process and forward pass"
        yield f"Memory sufficed for {fits} {each}, but not for {lacks}."
    if (startup := _startup(group, breakdown)) is not None:
        links = ((run.environment.get("link") or {}).get("took_s") for run in group.timed)
        probe_s = spread([*filter(is_number, links)]).mean
        of_link = f" Measuring the link took {seconds(probe_s)} of it." if probe_s else ""
        yield (
            f"Startup and time outside epochs took {startup}: a fixed cost, independent of run "
            f"length.{of_link}"
        )
    gains = [gain for run in group.finished if (gain := run.calibration.get("bf16_gain"))]
    if gains and min(gains) >= WORTH_HALF:
        yield (
            f"A few passes before training were {min(gains):.1f} times as fast with "
            "`--precision bf16` on this processor."
        )
    yield from _resumed_notes(group)
    torn = sum((Counter(run.broken_lines) for run in group.finished), Counter[str]())
    for file, number in torn.items():
        whole = "; every epoch has a whole one" if file == EPOCHS else ""
        yield f"{number} torn line(s) of {file} are left out{whole}."
    yield from not_counted(group)


def _startup(group: Group, breakdown: TimeBreakdown) -> str | None:
    """The time of startup, without what interruptions cost; None unless it is a large share."""
    outside = breakdown.parts[REST]
    if outside is None:
        return None
    lost_s = fmean(run.measures.get("lost_s") or 0.0 for run in group.timed)
    wall_s = sum(value or 0 for value in breakdown.parts.values()) * breakdown.updates
    startup_s = outside * breakdown.updates - lost_s
    return (
        f"{seconds(startup_s)} of {seconds(wall_s)}" if startup_s > LONG_STARTUP * wall_s else None
    )


def _resumed_notes(group: Group) -> Iterator[str]:
    resumed = [run for run in group.finished if run.was_resumed]
    if resumed:
        known = [run.measures["lost_s"] for run in resumed if "lost_s" in run.measures]
        lost = seconds(sum(known)) if len(known) == len(resumed) else "an unknown time"
        yield f"{len(resumed)} run(s) were interrupted and resumed: {lost} lost."
    for run in resumed:
        if epochs := interrupted_epochs(run):
            which = f"epoch{'s'[: len(epochs) > 1]} {listed(map(str, epochs), ', ', MOST_EPOCHS)}"
            yield (
                f"{run.path}: {which} interrupted inside and continued: its parts are sums over "
                "the attempts, with first steps in each."
            )


def memory_bounds(run: Run) -> tuple[int, int] | None:
    """The largest batch per process with which the run made updates, and the smallest whose step
    ran out of memory: the largest batch that fits lies between them.
    """
    ends: dict[Any, Mapping[str, Any]] = {row.get("attempt"): row for row in ends_of(run.attempts)}
    fits, lacks = set(), set()
    for start in starts_of(run.attempts):
        end = ends.get(start.get("attempt"), {})
        batch = end.get("per_gpu_batch") or start.get("per_gpu_batch") or 0
        if (end.get("update") or 0) > (start.get("from_update") or 0):
            fits.add(batch)
        if end.get("outcome") == "oom" and end.get("in_step") is not False:
            lacks.add(batch)
    least = min(lacks - {0}, default=0)
    most = max((batch for batch in fits if batch < least), default=0)
    return (most, least) if most else None


def interrupted_epochs(run: Run) -> list[int]:
    """The epochs, from 1, inside which an attempt went on from a checkpoint."""
    edges = [row.get("updates") or 0 for row in run.epochs]
    begun = [start.get("from_update") or 0 for start in starts_of(run.attempts)]
    inside = {update for update in begun if update and update not in edges}
    return sorted({1 + sum(edge < update for edge in edges) for update in inside})


def show(explanation: Explanation) -> None:
    console = table.screen()
    for sentence in explanation.sentences:
        console.print(sentence)
    whole_s = sum(part.s or 0.0 for part in explanation.parts)
    against = any(part.baseline_s is not None for part in explanation.parts)
    rows = []
    for name, value, sd, should in explanation.parts:
        cells = [_ms(value, sd), UNKNOWN if value is None else percent(value / whole_s)]
        rows.append([name, *cells, *([_ms(should, None)] if against else [])])
    headings = ["per update", "ms", "of the run", *(["baseline's share, ms"] if against else [])]
    # "under 1 %" does not begin with a digit, and stands with numbers nevertheless.
    numeric = (False, *(True for _ in headings[1:]))
    table.show(table.Table(headings, rows, numeric=numeric))


def _ms(value: float | None, sd: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{1e3 * value:,.2f}" if sd is None else with_spread(1e3 * value, 1e3 * sd)

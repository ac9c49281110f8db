"""python -m harness explain RUN [BASELINE]: why N processes were not N times as fast."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from harness.core.command_line import print_json
from harness.core.settings import UserError
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
from harness.read.explain.account import (
    EXCHANGE,
    PARTS,
    REST,
    STRAGGLERS,
    UNTOLD,
    Account,
    account_of,
    together,
)
from harness.read.explain.causes import (
    LARGE,
    Cause,
    bound,
    ideal,
    number,
    of_run,
    of_scaling,
    percent,
    seconds,
    share_lost,
)
from harness.read.explain.facts import facts_of
from harness.read.labels import strategy_text
from harness.read.records.groups import Group
from harness.read.records.runs import Run
from harness.read.records.selection import differing, read_group
from harness.read.records.sweeps import SweepResults

# Of what stands out beside the main cause, so many are told.
OTHERS = 2


# A start that takes more of a run than this is worth a word.
LONG_START = 0.25


@dataclass(frozen=True)
class Explanation:
    """A few sentences, the key of the main cause (None: nothing stands out), and the parts."""

    title: str
    sentences: tuple[str, ...]
    main: str | None
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
    """Of runs that differ in their seed alone; without a baseline one is looked for, among those
    near or else beside the run.
    """
    if baseline is not None and (reason := why_not(run, baseline)) is not None:
        raise UserError(f"{run.selector} and {baseline.selector} are not comparable: {reason}")
    account, given = read_account(run), baseline is not None
    beside = runs_beside(run, near)
    if baseline is None and account.devices > 1:
        baseline = nearest(run, beside)
    base = None if baseline is None else read_account(baseline)
    facts = facts_of(run, baseline)
    named = [baseline] if baseline is not None and given else []
    single = singles([*beside, *named])
    others = [(micro_batch(group), read_account(group)) for group in single]
    scaling = [] if base is None else of_scaling(account, base, facts)
    alone = of_run(account, facts, others)
    is_lost = base is not None and share_lost(account, base) >= LARGE
    main = _main(scaling if is_lost else alone)
    hidden_s = 0.0 if is_lost else account.parts[UNTOLD] or 0.0
    if main is not None and main.lost_s < hidden_s:
        main = None  # what is not known may be larger
    told = _also(main, scaling if is_lost else [], alone)
    sentences = [
        _headline(run, account),
        *(
            _against(run, account, baseline, base, given)
            if baseline and base
            else _no_baseline(account)
        ),
        *_of_main(account, main, None if base is None else is_lost, hidden_s),
        *(_of_other(account, cause) for cause in told),
        *([said] if (said := causes.unknown(account)) else []),
        *_notes(run, account),
    ]
    return Explanation(
        title=f"{run.selector}: where the time went",
        sentences=tuple(sentences),
        main=None if main is None else main.key,
        parts=_parts(account, base),
    )


def read_account(group: Group) -> Account:
    """The means over its finished runs."""
    if not group.finished:
        states = ", ".join(f"{r.state}" for r in group.runs)
        why = next((f" ({r.reason})" for r in group.runs if r.reason), "")
        raise UserError(f"{group.selector} has no finished run to explain: {states}{why}")
    return together([account_of(run) for run in group.finished])


def _main(causes: Sequence[Cause]) -> Cause | None:
    return next((cause for cause in causes if cause.share >= LARGE), None)


def _also(main: Cause | None, scaling: Sequence[Cause], alone: Sequence[Cause]) -> list[Cause]:
    """Others that stand out, each once: what is lost in scaling comes before what is large."""
    found = {} if main is None else {main.key: main}
    for cause in (*scaling, *alone):
        if cause.share >= LARGE:
            found.setdefault(cause.key, cause)
    return [cause for cause in found.values() if cause is not main][:OTHERS]


def _headline(group: Group, account: Account) -> str:
    settings, run = group.identity, group.finished[0]
    processes, nodes = run.processes or 1, run.nodes or 1
    where = f"{processes} process{'es' * (processes > 1)} on {nodes} node{'s' * (nodes > 1)}"
    batch = f"batch {settings['per_gpu_batch']}"
    if settings["grad_acc"] > 1:
        batch += f" x {settings['grad_acc']}"
    return (
        f"{settings['model']} with {settings['strategy']} on {where}, {batch} each: "
        f"{_rate(account)}, {seconds(account.step_s)} a step."
    )


def _rate(account: Account) -> str:
    assert account.rate.mean is not None
    if account.rate.sd is None:
        return f"{number(account.rate.mean)} samples/s"
    spread = f"{number(account.rate.mean)} ± {number(account.rate.sd)} samples/s"
    return f"{spread} (mean and standard deviation of {account.rate.n} runs)"


def _against(
    group: Group, account: Account, baseline: Group, base: Account, given: bool
) -> list[str]:
    assert account.rate.mean is not None and base.rate.mean is not None
    times, devices = account.rate.mean / base.rate.mean, account.devices / base.devices
    found = "" if given else ", found beside it"
    one = "one process" if base.devices == 1 else f"{base.devices} processes"
    on_one = baseline.finished[0].nodes == 1
    if base.devices > 1 and on_one and (group.finished[0].nodes or 1) > 1:
        one += " on one node"
    said = (
        f"The baseline is {one} with batch {micro_batch(baseline)} ({baseline.selector}{found}): "
        f"{_rate(base)}."
    )
    unlike = [n for n, _, _ in differing(group, baseline) if n not in MAY_DIFFER]
    than = f"Its training is {times:.2f} times as fast as that"
    if devices != 1:
        share = percent(times / devices)
        than += f", on {devices:g} times as many devices: an efficiency of {share}"
    besides = [f"They also differ in {', '.join(unlike)}."] if unlike else []
    return [said, f"{than}.", *besides]


def _no_baseline(account: Account) -> list[str]:
    if account.devices == 1:
        return []
    return [
        "No run of one process beside it is like it in all else, so this is from the run alone; "
        "whether computing is slower than on one process is not known."
    ]


def _of_main(
    account: Account, main: Cause | None, is_lost: bool | None, hidden_s: float
) -> list[str]:
    """Lost: against a baseline; None without one."""
    said = [f"Under {percent(LARGE)} is lost against it."] if is_lost is False else []
    if main is None and hidden_s >= LARGE * account.at_work_s:
        return [*said, "The main cause is not known: the record does not tell its steps apart."]
    if main is None:
        return [*said, f"Nothing stands out: no cause takes {percent(LARGE)} of the run."]
    scales = is_lost is False or account.devices == 1
    kind = "What would still make it faster" if scales else "Main cause"
    return [*said, f"{kind}: {main.words}. {_bound(account, main)} {_change(main)}"]


def _of_other(account: Account, cause: Cause) -> str:
    return f"Also: {cause.words}. {_bound(account, cause)} {_change(cause)}"


def _bound(account: Account, cause: Cause) -> str:
    value, more = bound(account, cause)
    if cause.of_step:
        gain = f"{100 * more:+.0f} %" if more < 1 else f"{1 + more:.1f} times as many"
        return f"Without it: at most {number(value)} samples/s ({gain})."
    return (
        f"Without it the run takes at least {seconds(value)} after its start ({100 * more:+.0f} %)."
    )


def _change(cause: Cause) -> str:
    return f"What would change it: {cause.change}."


def _notes(group: Group, account: Account) -> list[str]:
    notes = []
    start_s, wall_s = account.parts[REST], sum(v or 0 for v in account.parts.values())
    if start_s is not None and start_s > LONG_START * wall_s:
        notes.append(
            f"Starting and what else is in no epoch took {seconds(start_s * account.updates)} of "
            f"{seconds(wall_s * account.updates)}, which a longer run does not have more of."
        )
    restarted = [r for r in group.finished if (r.measures.get("attempts") or 1) > 1]
    if restarted:
        lost_s = sum(r.measures.get("lost_s", 0.0) for r in restarted)
        notes.append(
            f"{len(restarted)} run(s) were broken off and went on: {seconds(lost_s)} lost."
        )
    left_out = len(group.runs) - len(group.finished)
    if left_out:
        notes.append(f"{left_out} run(s) did not finish and are not counted.")
    return notes


def _parts(
    account: Account, base: Account | None
) -> tuple[tuple[str, float | None, float | None, float | None], ...]:
    should: dict[str, Any] = dict.fromkeys(PARTS) if base is None else ideal(account, base)
    return tuple(
        (name, account.parts[name], account.spreads[name], should[name])
        for name in PARTS
        if account.parts[name]
        or name not in (EXCHANGE, STRAGGLERS, UNTOLD)
        or account.parts[name] is None
    )


def show(found: Explanation) -> None:
    screen = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    for sentence in found.sentences:
        screen.print(sentence)
    whole_s = sum(value for _, value, _, _ in found.parts if value is not None)
    against = any(should is not None for _, _, _, should in found.parts)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("an update", no_wrap=True)
    for heading in ("ms", "of the run", *(["baseline's share, ms"] if against else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, value, sd, should in found.parts:
        cells = [_ms(value, sd), "-" if value is None else percent(value / whole_s)]
        table.add_row(name, *cells, *([_ms(should, None)] if against else []))
    Console(highlight=False, width=100).print(table)


def _ms(value: float | None, sd: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{1e3 * value:,.2f}" + (f" ± {1e3 * sd:,.2f}" if sd is not None else "")


# ----
# Why the runs of a sweep were as fast as they were: what explain says of some of its groups.

MOST = 6


PER_DEVICE = "train_samples_per_s_per_gpu"


def explained(sweep: SweepResults) -> list[str]:
    """A text for each group chosen; where explain refuses, its reason."""
    chosen = list(_chosen(sweep))
    folders = (run.folder for run in sweep.runs if run.folder)
    near = on_one_node(folders) if chosen else []
    return [f"{sweep.name_of(group)}. {_text(sweep, group, near)}" for group in chosen[:MOST]]


def _chosen(sweep: SweepResults) -> Iterator[Group]:
    """Of each script, set-up and strategy that which makes the least of its devices; those of
    one process only where there are no others.
    """
    finished = [g for g in sweep.groups if g.finished and g.mean(PER_DEVICE) is not None]
    several = [g for g in finished if (g.fact("devices") or 1) > 1]
    kinds: dict[tuple[str, str, str], list[Group]] = {}
    for group in several or finished:
        script, strategy = str(group.setting("script")), strategy_text(group.label) or ""
        kinds.setdefault((script, group.topology, strategy), []).append(group)
    for groups in kinds.values():
        yield min(groups, key=lambda group: group.mean(PER_DEVICE) or 0.0)


def _text(sweep: SweepResults, group: Group, near: list[Run]) -> str:
    runs = tuple(run for run in group.runs if run.folder)
    group = Group(runs, name="RUN", selector=sweep.name_of(group))
    try:
        return " ".join(explain(group, near=near).sentences)
    except UserError as error:
        return str(error)

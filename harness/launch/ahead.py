"""What a sweep will do, checked and shown before it starts: data, runs, time, what is skipped."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.core.process import warn, working
from harness.core.provenance import changed_inputs, check_inputs, inputs, recorded_inputs
from harness.core.records import FINISHED, SKIPPED
from harness.core.schema.checks import believable
from harness.core.schema.environment import InputsRecord
from harness.core.settings import Settings, UserError, flag_fields
from harness.core.strategies import DDP, OF_EXCHANGE, SINGLE, strategy_of, with_exchange
from harness.launch.outcome import State, settled
from harness.launch.places import Machines, Place
from harness.launch.plan import Job, as_text
from harness.launch.screen import has_strategy_of, short, usual_s
from harness.launch.sweepfile import Sweep

CHECKED = ("script", "dataset", "dataset_config", "model", "text_column", "image_column",
           "label_column")  # fmt: skip
LONG_S = 1800.0  # a user is asked before a longer sweep
UNIT_S = {"s": 1.0, "min": 60.0, "h": 3600.0}


def check_data(chosen: Sequence[State], place: Place) -> None:
    """Refuse missing data or models, which would fail one run after the other."""
    if not (isinstance(place, Machines) and place.here):  # other places have other disks
        return
    rerun = place.options.rerun
    left = (s.job.settings for s in chosen if settled(s.job.folder.outcome(), rerun) is None)
    with working("checking data and models"):
        # Settings that check_inputs() reads; many runs have them in common.
        for one in {tuple(getattr(s, n) for n in CHECKED): s for s in left}.values():
            check_inputs(one)


def refuse_changed_inputs(jobs: Sequence[Job]) -> None:
    """Refuse changed inputs of finished runs: the table would compare old data with new."""
    now: dict[tuple[str, ...], InputsRecord] = {}
    changed = {}
    for job in jobs:
        earlier = recorded_inputs(job.folder)
        if earlier and job.folder.outcome() == FINISHED:
            chosen = job.settings
            source = tuple(map(str, (chosen.script, chosen.dataset, chosen.model, chosen.strategy)))
            if source not in now:
                now[source] = inputs(chosen)
            if change := changed_inputs(earlier, now[source]):
                changed[job.path] = change
    if changed:
        path, change = next(iter(changed.items()))
        others = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise UserError(
            f"{path} is finished{others}, but {change}: --rerun all measures again and keeps the "
            "earlier records; another --output_dir keeps both"
        )


def check_start(
    sweep: Sweep, states: list[State], chosen: list[State], place: Place, yes: bool,
    changed: bool = False,
) -> None:  # fmt: skip
    """Show what will happen; a user at a terminal is asked before a long sweep. changed: whether
    settings differ from those of the file.
    """
    for line in (*skipped(chosen), *links_apart(sweep, states), *repeating(chosen)):
        print(line)
    if isinstance(place, Machines):
        again = {id(s) for s in chosen} if place.options.rerun == "all" else set()
        kept = [state for state in states if id(state) not in again]
        for line in with_other_threads(kept, place.environment.get("OMP_NUM_THREADS")):
            warn(line)
    line, left_s = outlook(sweep, states, chosen, place, changed)
    print(line, flush=True)
    person = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    if place.in_turn and left_s > LONG_S and person and not yes and not _agreed():
        raise UserError("not started; --select and --limit choose fewer runs, --yes does not ask")


def outlook(
    sweep: Sweep, states: list[State], chosen: list[State], place: Place, changed: bool
) -> tuple[str, float]:
    """ahead() of the chosen runs, with the time in the header of the file where that is of them."""
    expected_s = None if changed else _expected_s(sweep, len(chosen), len(states))
    line, left_s = ahead(chosen, place.options.rerun, expected_s)
    some = "by the header" in line and chosen != states
    return line + (", if its runs take equally long" if some else ""), left_s


def _agreed() -> bool:
    try:
        return input("Start? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D
        print()
        return False
    except KeyboardInterrupt:
        print()  # the following output gets a line of its own
        raise


def _expected_s(sweep: Sweep, number: int, of: int) -> float | None:
    """How long so many of its runs take by the header of the file; None if it does not say."""
    parts = sweep.header.get("time", "").split(";")
    match = re.search(
        r"([\d.]+) (s|min|h)\b", " ".join(p for p in parts if ("--tiny" in p) == sweep.tiny)
    )
    counts = re.search(r"(\d+)(?:, --tiny (\d+))?", sweep.header.get("runs", ""))
    if match is None:
        return None
    of = int(counts[sweep.tiny + 1] or counts[1]) if counts else of
    return float(match[1]) * UNIT_S[match[2]] * number / of


def ahead(
    states: list[State], rerun: str | None, expected_s: float | None = None
) -> tuple[str, float]:
    """How many runs are done and left, and how long the latter take, by earlier runs or else by the
    file: as a text, and in seconds (0 if unknown).
    """
    left, took = [], []
    for state in (s for s in states if s.state != SKIPPED):
        summary: Mapping[str, Any] = state.job.folder.read_summary() or {}
        outcome, wall_s = state.job.folder.outcome(), summary.get("wall_s")
        if outcome == FINISHED and isinstance(wall_s, (int, float)):
            took.append((state.job.label, float(wall_s)))
        if settled(outcome, rerun) is None:
            left.append(state)
    skips = sum(state.state == SKIPPED for state in states)
    known = len(states) - len(left) - skips
    line, left_s = f"{known} done before, {len(left)} to go", 0.0
    alike = [state for state in left if has_strategy_of(state.job.label, took)]
    if alike:
        left_s = sum(usual_s(state.job.label, took) for state in alike)
        of_strategy = len(left) - len(alike)  # runs whose strategy no finished run had
        line += f", {'at least' if of_strategy else 'about'} {short(left_s)} plus loading libraries"
        if of_strategy:
            line += f"; no finished run had the strategy of {runs(of_strategy)}"
        known_links = {None, *(label.get("link") for label, _ in took)}
        if unknown := sum(state.job.label.get("link") not in known_links for state in left):
            line += f"; no finished run had the link of {runs(unknown)}"
    elif expected_s and left:
        left_s = expected_s * len(left) / max(known + len(left), 1)
        # The header may count runs that are skipped here.
        line += f", {'at most' if skips else 'about'} {short(left_s)} by the header of the file"
    return line, left_s


def links_apart(sweep: Sweep, states: list[State]) -> list[str]:
    """A line if links vary while each run is compared only with runs over the same link."""
    labels = [state.job.label for state in states]
    links = dict.fromkeys(label["link"] for label in labels if "link" in label)
    base = as_text(sweep.baseline or {})
    bases = [label for label in labels if base.items() <= label.items()]
    if len(links) < 2 or "link" in base or any("link" not in label for label in bases):
        return []
    entry = ", ".join(f"{n}: {value}" for n, value in {**base, "link": next(iter(links))}.items())
    warning = "links are not compared with each other: that takes a baseline with a link, as"
    return [f"{warning} {{{entry}}}"]


def repeating(states: list[State]) -> list[str]:
    """A line if runs with local_sgd on one process train as others do. With diloco they do not:
    its outer step changes the weights of a single process, too.
    """
    seen: dict[Settings, State] = {}
    again: list[tuple[State, State]] = []
    for state in sorted(states, key=lambda s: strategy_of(s.job.settings).idle_alone):
        if state.job.nodes * state.job.devices == 1:
            first = seen.setdefault(_trained(state.job.settings), state)
            if state is not first and strategy_of(state.job.settings).idle_alone:
                again.append((state, first))
    if not again:
        return []
    (one, other), count = again[0], len(again)
    equal_runs = "1 run trains exactly as another does"
    if count > 1:
        equal_runs = f"{count} runs train exactly as others do"
    name = one.job.settings.strategy
    return [f"on one process {name} exchanges nothing: {equal_runs} ({one.job} as {other.job})"]


def _trained(settings: Settings) -> Settings:
    """Settings of one process, without what changes nothing in its training."""
    if settings.strategy == SINGLE:
        return replace(settings, strategy=DDP)
    if not strategy_of(settings).idle_alone:
        return settings
    off = {name: flag_fields()[name].default for name in (*OF_EXCHANGE, "exchange")}
    return with_exchange(replace(settings, strategy=DDP, **off))


def with_other_threads(states: list[State], threads: str | None) -> list[str]:
    """Warnings about finished runs on CPUs whose number of threads differs from this sweep's."""
    unlike: dict[str, list[State]] = {}
    for state in states:
        facts = believable("environment", dict(state.job.folder.read_environment() or {}))
        known = str(facts.get("threads") or threads)
        on_cpu = (facts.get("observed") or {}).get("device") == "cpu"
        if on_cpu and known != threads and state.job.folder.outcome() == FINISHED:
            unlike.setdefault(known, []).append(state)
    return [
        f"{runs(len(done))} done before with OMP_NUM_THREADS={known} ({done[0].job}"
        f"{', ...' if done[1:] else ''}), here it is {threads}: their times are not compared with "
        "the others'; --rerun all measures again what --select chooses, and keeps these records"
        for known, done in unlike.items()
    ]


def planned(
    sweep: Sweep, states: list[State], lines: list[str], place: Place | None = None
) -> dict[str, Any]:
    """What a dry run shows, for a program (--json); `place` is not known without runs."""
    return {
        "sweep": sweep.name,
        "runs": [
            {"label": state.job.label, "path": state.job.path,
             "commands": place.commands(state) if place else [],
             "outcome": state.job.folder.outcome(),
             "skipped": state.reason if state.state == SKIPPED else None}
            for state in states
        ],
        "lines": lines,
    }  # fmt: skip


def counts(sweep: Sweep, chosen: list[State], line: str) -> str:
    """How many runs a dry run has shown, and how many are skipped. line: ahead() without a time, or
    "" where it stands above the commands.
    """
    skips = sum(state.state == SKIPPED for state in chosen)
    texts = [runs(len(chosen)), *[line] * bool(line), *[f"{skips} skipped"] * bool(skips)]
    texts += ["how long they take is known after the first"] * bool(line)
    return f"{sweep.name}: {', '.join(texts)}"


def runs(number: int) -> str:
    return f"{number} run" if number == 1 else f"{number} runs"


def refuse_if_nothing_starts(chosen: list[State]) -> None:
    """UserError if a sweep can measure nothing here and has measured nothing before."""
    if all(s.state == SKIPPED and s.job.folder.outcome() is None for s in chosen):
        lines = [line.removeprefix("skipped: ") for line in skipped(chosen)]
        others = f"{len(lines) - 1} other reason{'s' if len(lines) > 2 else ''}"
        more = f" (and {others})" if len(lines) > 1 else ""
        raise UserError(f"no run can start here: {lines[0]}{more}")


def skipped(states: list[State]) -> list[str]:
    """The runs that cannot start here, one line for each reason."""
    by_reason: dict[str, list[State]] = {}
    for state in states:
        if state.state == SKIPPED:
            by_reason.setdefault(str(state.reason), []).append(state)
    return [
        f"skipped: {skipped[0].job}"
        + (f" and {len(skipped) - 1} more" if skipped[1:] else "")
        + f": {reason}"
        for reason, skipped in by_reason.items()
    ]

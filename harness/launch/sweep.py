"""python -m harness sweep FILE: many runs from one file, and nothing that was measured is lost."""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.core.command_line import field_of, natural, one_of, typed, whole
from harness.core.identity import number
from harness.core.links import link_of
from harness.core.provenance import command_line, without_home
from harness.core.records import SCHEMA, read_json, write_json
from harness.core.settings import UserError
from harness.core.strategies import why_not_elastic
from harness.launch.agents import environment_with
from harness.launch.machine import this_machine
from harness.launch.netns.nodes import Netns
from harness.launch.outcome import ELSEWHERE, RUNNING, SKIPPED, WAITING, State
from harness.launch.places import Local, Machines, Options, Place
from harness.launch.plan import Elastic, Job, as_text, axes_of, plan
from harness.launch.runner import Runner, Worker
from harness.launch.screen import Screen
from harness.launch.slurm import flags
from harness.launch.slurm.flags import slurm_of
from harness.launch.slurm.queue import Cluster, Queue
from harness.launch.ssh import hosts
from harness.launch.ssh.hosts import remote_of
from harness.launch.ssh.place import Ssh
from harness.launch.sweepfile import NOT_IN_A_FILE, Sweep, load

TIME = re.compile(r"^([0-9.]+)(s|m|h)?$")
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}


@dataclass
class Arguments:
    file: str
    tiny: bool = False
    dry_run: bool = False
    select: list[dict[str, str]] = field(default_factory=list)
    exclude: list[dict[str, str]] = field(default_factory=list)
    limit: slice = field(default_factory=lambda: slice(None))
    settings: dict[str, list[str]] = field(default_factory=dict)
    repeat: int = 1
    options: Options = field(default_factory=Options)


def arguments_of(options: argparse.Namespace) -> Arguments:
    """What the flags mean together; UserError if they do not fit."""
    given = vars(options)
    return Arguments(
        file=options.file,
        tiny=options.tiny,
        dry_run=options.dry_run,
        select=[_conditions("--select", text) for text in options.select],
        exclude=[_conditions("--exclude", text) for text in options.exclude],
        limit=_limit(options.limit),
        settings=_settings(options.set),
        repeat=options.repeat,
        options=Options(
            output_dir=options.output_dir,
            launcher=options.launcher,
            oversubscribe=options.oversubscribe,
            elastic=_elastic(options.max_restarts, options.min_nodes),
            timeout_s=_seconds(options.timeout),
            rerun=options.rerun,
            fail_fast=options.fail_fast,
            pack=options.pack,
            cold=options.cold,
            isolation=options.isolation or "warn",
            slurm=slurm_of(given),
            remote=remote_of(given),
        ),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Run what a sweep file asks for and was not run; go on where it stopped."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "Ctrl-C once: the current run is recorded and the sweep stops; twice: at once. The\n"
        "same command goes on from there. Exit code: 0, 1 if a run failed, 2 for a mistake."
    )
    add = parser.add_argument
    add("file", metavar="FILE", help="for example experiments/batch_size.yaml")
    add("--tiny", action="store_true", help="laptop size: embedded data, no network")
    add("--dry_run", action="store_true", help="print the commands, one a line, and stop")
    add(
        *("--out", "-o", "--o", "--output_dir"),
        dest="output_dir",
        default="outputs",
        metavar="DIR",
        help="folder of the records (outputs)",
    )
    add(
        "--launcher",
        type=one_of(*PLACES),
        metavar="NAME",
        default="local",
        help="local: this machine; netns: emulated nodes on it, with the links that the file asks "
        "for; ssh: machines over ssh; slurm: a cluster (local)",
    )
    add(
        "--oversubscribe",
        action="store_true",
        help="more processes than cores, for nodes without GPUs that share one machine: they slow "
        "one another down, and the record says so",
    )
    add(
        "--max_restarts",
        type=natural,
        default=0,
        metavar="N",
        help="how often lost processes are started again, from the last checkpoint (0)",
    )
    add("--min_nodes", type=whole, metavar="N", help="how many nodes are enough to go on (all)")
    add(
        "--select",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="only these runs, for example setup=1_2,seed=4*; given again: or these",
    )
    add("--exclude", action="append", default=[], metavar="KEY=VALUE,...", help="not these runs")
    add(
        "--limit",
        default=":",
        metavar="A:B",
        help="of those, the A-th up to before the B-th, from 0",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting for all runs, instead of what the file says; again with another value: "
        "an axis",
    )
    add("--repeat", type=whole, default=1, metavar="N", help="measure everything N times (1)")
    add(
        "--rerun",
        type=one_of("failed", "all"),
        metavar="WHICH",
        help="failed: runs that failed, from where they failed; all: the old records kept aside",
    )
    add("--timeout", metavar="TIME", help="a run that takes longer is ended: 90, 30m, 2h")
    add("--fail_fast", action="store_true", help="stop at the first failure")
    add(
        "--isolation",
        type=one_of("warn", "error", "off"),
        metavar="HOW",
        help="warn, error or off: when others use the GPUs or the cores before a run (warn)",
    )
    add(
        "--pack",
        action="store_true",
        help="small runs side by side on disjoint devices; this disturbs what is measured",
    )
    add("--cold", action="store_true", help="torchrun anew for each run: seconds slower each")
    hosts.add_flags(parser)
    flags.add_flags(parser)


def _elastic(max_restarts: int, min_nodes: int | None) -> Elastic | None:
    if min_nodes is not None and not max_restarts:
        raise UserError(f"--min_nodes {min_nodes}: needs --max_restarts, for example 3")
    return Elastic(max_restarts, min_nodes) if max_restarts else None


def _conditions(flag: str, text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",")]
    if any(not name or not equals for name, equals, _ in pairs):
        raise UserError(f"{flag} {text}: expected KEY=VALUE,..., for example setup=1_2")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _limit(text: str) -> slice:
    if not re.match(r"^-?\d*:-?\d*$", text):
        raise UserError(f"--limit {text}: expected A:B, for example 0:10, 10: or :-1")
    first, last = (int(part) if part else None for part in text.split(":"))
    return slice(first, last)


def _settings(pairs: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise UserError(f"--set {pair}: expected KEY=VALUE, for example --set epochs=1")
        found.setdefault(name.strip().replace("-", "_"), []).append(value.strip())
    return found


def _seconds(text: Any) -> float | None:
    if text is None:
        return None
    match = TIME.match(text)
    try:
        seconds = float(match[1]) * SECONDS[match[2]] if match else 0.0
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise UserError(f"--timeout {text}: expected a time such as 90, 30m or 2h")
    return seconds


PLACES: dict[str, Callable[[Options], Place]] = {
    "local": Local,
    "netns": Netns,
    "ssh": Ssh,
    "slurm": Cluster,
}


def run(options: argparse.Namespace) -> int:
    asked = arguments_of(options)
    sweep = overridden(load(Path(asked.file), asked.tiny), asked.settings)
    states = [State(job) for job in plan(sweep, asked.options.output_dir, asked.repeat)]
    chosen = choose(states, asked)
    place = PLACES[asked.options.launcher](asked.options)
    try:
        if not asked.dry_run:
            place.open([state.job for state in chosen])
        for state in states:
            reason = place.why_not(state.job)
            if reason is None and place.options.elastic is not None:
                reason = why_not_elastic(state.job.settings)
            if reason is not None:
                state.state, state.reason = SKIPPED, reason
        folder = Path(asked.options.output_dir) / "sweeps" / sweep.name
        if asked.dry_run:
            print("\n".join(place.dry_run(chosen, folder)))
            return 0
        return _run(sweep, states, chosen, place, folder, asked, options.words)
    finally:
        place.close()


def overridden(sweep: Sweep, given: dict[str, list[str]]) -> Sweep:
    """--set: one value holds for all runs, several make an axis, whatever the file says."""
    for name, texts in given.items():
        if name in NOT_IN_A_FILE:
            raise UserError(f"--set {name}: use {NOT_IN_A_FILE[name]}")
        values: list[Any] = []
        key = name
        for text in texts:
            for script in sweep.scripts:
                field = None if name == "link" else field_of(script, name)
                key = field or name
                value = link_of(text) if name == "link" else typed(name, field, [text])
            values.append(value)
        grid = {k: v for k, v in sweep.grid.items() if k != key}
        settings = {s: {k: v for k, v in p.items() if k != key} for s, p in sweep.settings.items()}
        baseline = dict(sweep.baseline or {})
        if len(values) > 1:
            grid[key] = values
        else:
            settings = {script: {**point, key: values[0]} for script, point in settings.items()}
            baseline.pop(key, None)
        sweep = replace(
            sweep,
            grid=grid,
            settings=settings,
            runs=[{k: v for k, v in run.items() if k != key} for run in sweep.runs],
            exclude=[point for point in sweep.exclude if key not in point],
            baseline=baseline or None,
            order=tuple(n for n in sweep.order if n != key or key in grid),
        )
    return sweep


def choose(states: list[State], asked: Arguments) -> list[State]:
    """The runs that --select, --exclude and --limit leave, in order."""
    for flag, conditions in (("--select", asked.select), ("--exclude", asked.exclude)):
        for name in (name for condition in conditions for name in condition):
            known = sorted({key for state in states for key in state.job.label})
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
                raise UserError(f"{flag} {name}: no run varies it; {hint}")
    kept = [
        state
        for state in states
        if (not asked.select or any(_matches(state.job, c) for c in asked.select))
        and not any(_matches(state.job, c) for c in asked.exclude)
    ]
    kept = kept[asked.limit]
    if not kept:
        raise UserError("no run is left: see --dry_run without --select, --exclude and --limit")
    return kept


def _matches(job: Job, condition: dict[str, str]) -> bool:
    return all(
        name in job.label and fnmatch.fnmatchcase(number(job.label[name]), pattern)
        for name, pattern in condition.items()
    )


def _run(
    sweep: Sweep,
    states: list[State],
    chosen: list[State],
    place: Place,
    folder: Path,
    asked: Arguments,
    argv: list[str],
) -> int:
    try:
        describe(sweep, states, folder, argv)
    except OSError as error:
        where = asked.options.output_dir
        raise UserError(f"--output_dir {where}: cannot be written: {error.strerror}") from None
    if sweep.columns:
        _check_columns(folder, sweep.file)
    screen = Screen(sweep.header.get("question", sweep.name), chosen, place.in_turn)
    with screen:
        for line in skipped(chosen):
            screen.print(line)
        worker = _worker(place, chosen, folder, screen)
        with _signals(worker) as signals:
            worker.work()
            screen.close()
            if done := sum(state.known for state in chosen):
                screen.print(f"{done} of {len(chosen)} runs had been done before")
            # Signals are still counted here, so that a late second Ctrl-C is no crash.
            if worker.stops < 2:
                _table(folder, "--write", start_new_session=True)
    if signals:
        to_go = (WAITING, RUNNING, ELSEWHERE, "interrupted")
        left = sum(state.state in to_go for state in chosen)
        print(f"stopped, {left} runs to go: the same command continues", file=sys.stderr)
        return 128 + signals[0]
    return 1 if any(state.failed for state in chosen) else 0


def skipped(states: list[State]) -> list[str]:
    """What cannot run here, one line for each reason."""
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


def _worker(place: Place, states: list[State], folder: Path, screen: Screen) -> Worker:
    if isinstance(place, Machines):
        return Runner(states, place.options, folder, screen, place, this_machine())
    return Queue(states, place.options, folder, screen)


@contextmanager
def _signals(worker: Worker) -> Iterator[list[int]]:
    """SIGINT and SIGTERM are counted here and obeyed by the worker's loop."""
    received: list[int] = []

    def count(signum: int, frame: Any) -> None:
        received.append(signum)
        worker.stops += 1

    before = {s: signal.signal(s, count) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def describe(sweep: Sweep, states: list[State], folder: Path, argv: list[str]) -> None:
    """sweep.json: what readers need to know of the plan; a different earlier one is kept aside."""
    path = folder / "sweep.json"
    content = {
        "schema": SCHEMA,
        "name": sweep.name,
        "question": sweep.header.get("question"),
        "file": without_home(sweep.file),
        "tiny": sweep.tiny,
        "command": command_line(["python", "-m", "harness", "sweep", *argv]),
        "axes": axes_of(sweep),
        "baseline": as_text(sweep.baseline) if sweep.baseline else None,
        "target": sweep.target,
        "hold": sweep.hold,
        "lr_rule": sweep.lr_rule,
        "columns": sweep.columns,
        "per_node": sweep.per_node,
        "runs": [
            {
                "label": state.job.label,
                "path": state.job.path,
                "skipped": state.reason if state.state == SKIPPED else None,
            }
            for state in states
        ],
    }
    before = read_json(path)
    planned = [run.get("path") for run in (before or {}).get("runs", [])]
    if before is not None and planned != [state.job.path for state in states]:
        count = 1
        while (aside := folder / f"sweep.earlier-{count}.json").exists():
            count += 1
        path.rename(aside)
    write_json(path, content)


def _table(folder: Path, *flags: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """Print the table from a process of its own, which loads pandas: this one does not."""
    sys.stdout.flush()
    command = [sys.executable, "-m", "harness", "table", str(folder), *flags]
    return subprocess.run(command, env=environment_with({}), check=False, text=True, **how)


def _check_columns(folder: Path, file: str) -> None:
    """Whether the table can be shown, before hours are spent on measuring."""
    done = _table(folder, capture_output=True)
    if done.returncode:
        message = done.stderr.strip().removeprefix("harness table: error: ")
        raise UserError(f"{file}: {message}")

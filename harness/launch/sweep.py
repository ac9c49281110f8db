"""python -m harness sweep FILE: measures many runs from one file and loses no measurement."""

from __future__ import annotations

import argparse
import fnmatch
import glob
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    closing,
    contextmanager,
    nullcontext,
    redirect_stdout,
)
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

from harness.core.command_line import field_of, print_json, typed
from harness.core.identity import number
from harness.core.links import link_of
from harness.core.process import ending_signals, print_if_possible, warn, working
from harness.core.records import (
    ASIDE,
    FINISHED,
    RUNNING,
    SKIPPED,
    SWEEP,
    WAITING,
    RunFolder,
    read_json,
    write_sweep,
)
from harness.core.records.disk import check_writable, unused
from harness.core.records.redact import redacted_command, without_home
from harness.core.records.walking import as_typed
from harness.core.rules import why_not_elastic
from harness.core.schema.checks import believable
from harness.core.schema.environment import SweepRecord
from harness.core.settings import UserError, nearest
from harness.launch import slurm, ssh
from harness.launch.agents import environment_with
from harness.launch.ahead import (
    check_data,
    check_start,
    counts,
    links_apart,
    outlook,
    planned,
    refuse_changed_inputs,
    refuse_if_nothing_starts,
    repeating,
    runs,
)
from harness.launch.flags import LAUNCHERS
from harness.launch.netns.nodes import Netns
from harness.launch.outcome import ELSEWHERE, State, was_disturbed
from harness.launch.places import Local, Machines, Options, Place, this_machine
from harness.launch.plan import Elastic, Job, plan, plan_record
from harness.launch.runner import Runner, Worker
from harness.launch.screen import Screen
from harness.launch.slurm.cluster import Submitted
from harness.launch.slurm.queue import Cluster, Queue
from harness.launch.ssh.place import Ssh
from harness.launch.sweepfile import NOT_IN_A_FILE, Point, Sweep, load

# Within which a repeated signal counts once: a closed terminal hangs up on the shell's job
# and then on its group, and `timeout` ends a process and then its group.
TWICE_S = {signal.SIGHUP: 1.0, signal.SIGTERM: 0.05}
PLACES: dict[str, Callable[[Options], Place]] = {
    "local": Local,
    "netns": Netns,
    "ssh": Ssh,
    "slurm": Cluster,
}
assert tuple(PLACES) == LAUNCHERS


def options_of(flags: argparse.Namespace) -> Options:
    """How the sweep is run, from its flags; UserError if they contradict each other."""
    if flags.min_nodes is not None and not flags.max_restarts:
        raise UserError(f"--min_nodes {flags.min_nodes}: needs --max_restarts, for example 3")
    by_name = vars(flags)
    same = {f.name: by_name[f.name] for f in fields(Options) if f.name in by_name}
    return Options(
        **same | {"isolation": flags.isolation or "warn"},
        elastic=Elastic(flags.max_restarts, flags.min_nodes) if flags.max_restarts else None,
        slurm=slurm.slurm_of(by_name),
        remote=ssh.remote_of(by_name),
    )


def run(flags: argparse.Namespace) -> int:
    options = options_of(flags)
    if not flags.dry_run:
        print_if_possible()
    sweep = overridden(load(Path(flags.file), flags.tiny), flags.set)
    states = [State(job) for job in plan(sweep, options.output_dir, flags.repeat)]
    chosen = choose(states, flags.select, flags.exclude, flags.limit)
    chosen, options = _only_disturbed(chosen, options)
    folder = Path(options.output_dir) / "sweeps" / sweep.name
    if not chosen:
        return _nothing_to_repeat(sweep, folder, flags)
    place = PLACES[options.launcher](options)
    with closing(place), _for_people(to_stderr=flags.json and not flags.dry_run):
        if flags.dry_run:
            check_data(chosen, place)
        else:
            check_writable(Path(options.output_dir))
            _check_owner(folder, sweep.file)
            # Printed at once: the next steps may be slow.
            print(f"{sweep.name}: {runs(len(chosen))}, --launcher {options.launcher}", flush=True)
            if flags.rerun != "all":
                refuse_changed_inputs([state.job for state in chosen])
            check_data(chosen, place)
            place.open([state.job for state in chosen])
        _skip_what_cannot_start(states, place)
        if flags.dry_run:
            line, left_s = outlook(sweep, states, chosen, place, changed=bool(flags.set))
            lines = [*place.dry_run(chosen, folder), *links_apart(sweep, states)]
            lines += [f"# {line}" for line in repeating(chosen)]
            lines = [*([f"# {line}"] if left_s else []), *lines]
            print_json(planned(sweep, chosen, lines, place)) if flags.json else print(
                *lines, sep="\n", flush=True
            )
            refuse_if_nothing_starts(chosen)
            if sys.stderr.isatty() and not flags.json:  # for people: stdout may be pasted or read
                print(counts(sweep, chosen, "" if left_s else line), file=sys.stderr)
            return 0
        words = [word for word in flags.argv if word != "--json"]
        command = redacted_command(["python", "-m", "harness", "sweep", *words])
        _describe(sweep, states, folder, command)
        check_start(sweep, states, chosen, place, flags.yes, changed=bool(flags.set))
        refuse_if_nothing_starts(chosen)
        return _work(sweep, chosen, place, folder, command, flags.json)


def _for_people(to_stderr: bool) -> AbstractContextManager[object]:
    """Print lines for people to stdout, or to stderr, so that stdout holds one JSON document."""
    return redirect_stdout(sys.stderr) if to_stderr else nullcontext()


def _skip_what_cannot_start(states: list[State], place: Place) -> None:
    for state in states:
        reason = place.why_not(state.job)
        if reason is None and place.options.elastic is not None:
            reason = why_not_elastic(state.job.settings)
        if reason is not None:
            state.state, state.reason = SKIPPED, reason


def _only_disturbed(chosen: list[State], options: Options) -> tuple[list[State], Options]:
    """With --rerun disturbed, these runs alone, and those that were stopped while they repeated a
    run; all of them are measured again.
    """
    if options.rerun != "disturbed":
        return chosen, options
    folders = [(state, state.job.folder) for state in chosen]
    again = [state for state, folder in folders if was_disturbed(folder) or _repeats(folder)]
    return again, replace(options, rerun="all")


def _nothing_to_repeat(sweep: Sweep, folder: Path, flags: argparse.Namespace) -> int:
    """The end of a sweep with --rerun disturbed that has nothing to measure; its exit code."""
    nothing = f"{sweep.name}: no finished run of this choice was disturbed"
    if flags.json and not flags.dry_run and (folder / SWEEP).exists():
        print(nothing, file=sys.stderr)
        return _table(folder, "--json").returncode
    print_json(planned(sweep, [], [nothing])) if flags.json else print(nothing)
    return 0


def _repeats(folder: RunFolder) -> bool:
    """Whether a record without an end stands in the place of an earlier one, which is kept."""
    path = folder.path
    is_open = folder.outcome() in (None, "interrupted")
    return is_open and any(path.parent.glob(f"{glob.escape(path.name)}{ASIDE}*"))


def overridden(sweep: Sweep, assignments: Sequence[tuple[str, str]]) -> Sweep:
    """Apply --set, which overrides the file: one value holds for all runs, several make an axis."""
    by_name: dict[str, list[str]] = {}
    for name, text in assignments:
        by_name.setdefault(name, []).append(text)
    for name, texts in by_name.items():
        sweep = _with_values(sweep, name, texts)
    return sweep


def _with_values(sweep: Sweep, name: str, texts: list[str]) -> Sweep:
    if name in NOT_IN_A_FILE:
        raise UserError(f"--set {name}: use {NOT_IN_A_FILE[name]}")
    key, values = name, []
    for text in texts:
        value: Any = link_of(text) if name == "link" else None
        for script in sweep.scripts if name != "link" else ():
            field = field_of(script, name)
            key, value = field or name, typed(name, field, [text])
        values.append(value)

    def others(point: Point) -> Point:
        return {k: v for k, v in point.items() if k != key}

    grid, single = others(sweep.grid), len(values) == 1
    settings = {script: others(point) for script, point in sweep.settings.items()}
    baseline, expect = sweep.baseline or {}, sweep.expect
    if single:
        settings = {script: {**point, key: values[0]} for script, point in settings.items()}
        baseline = others(baseline)
        sides = ("of", "against")
        expect = [e for e in expect if all(key not in (e[side] or ()) for side in sides)]
        if left := len(sweep.expect) - len(expect):
            text = f"{left} of {len(sweep.expect)} entries of expect are left out"
            warn(f"--set {name}: {text}")
    else:
        grid[key] = values
    return replace(
        sweep,
        grid=grid,
        settings=settings,
        runs=[others(run) for run in sweep.runs],
        exclude=[point for point in sweep.exclude if key not in point],
        baseline=baseline or None,
        expect=expect,
        order=tuple(n for n in sweep.order if n != key or not single),
    )


def choose(
    states: list[State],
    select: Sequence[dict[str, str]],
    exclude: Sequence[dict[str, str]],
    limit: slice,
) -> list[State]:
    """The runs that remain after --select, --exclude and --limit, in order."""
    known = sorted({key for state in states for key in state.job.label})
    for flag, conditions in (("--select", select), ("--exclude", exclude)):
        for name in (name for condition in conditions for name in condition if name not in known):
            raise UserError(f"{flag} {name}: no run varies it; {nearest(name, known)}")
    chosen = [s for s in states if not select or any(_matches(s.job, c) for c in select)]
    chosen = [s for s in chosen if not any(_matches(s.job, c) for c in exclude)][limit]
    if not chosen:
        raise UserError(f"no run is left: {_unmatched(states, select)}")
    return chosen


def _unmatched(states: list[State], select: Sequence[dict[str, str]]) -> str:
    """Which --select condition no run matches, and the values that exist instead."""
    for name, pattern in (pair for condition in select for pair in condition.items()):
        values = dict.fromkeys(number(s.job.label[name]) for s in states if name in s.job.label)
        if not fnmatch.filter(values, pattern):
            return f"none has {name} {pattern}; there is {', '.join(values)}"
    return "see --dry_run without --select, --exclude and --limit"


def _matches(job: Job, condition: dict[str, str]) -> bool:
    return all(
        name in job.label and fnmatch.fnmatchcase(number(job.label[name]), pattern)
        for name, pattern in condition.items()
    )


def _work(
    sweep: Sweep, chosen: list[State], place: Place, folder: Path, command: str, json: bool
) -> int:
    """Measure the missing runs and show the table (as JSON if asked); returns the exit code."""
    if sweep.columns:
        _check_columns(folder, sweep.file)
    screen = Screen(sweep.header.get("question", sweep.name), chosen, place.in_turn)
    with screen:
        worker: Worker = (
            Runner(chosen, place.options, folder, screen, place, this_machine(), command=command)
            if isinstance(place, Machines)
            else Queue(chosen, place.options, folder, screen, command=command)
        )
        with _signals(worker) as signals:
            try:
                worker.work()
            finally:
                _record(folder, chosen, screen)
            screen.close()
            if done := sum(state.known for state in chosen):
                screen.print(f"{done} of {len(chosen)} runs had been done before")
            # Signals are still caught here, so that a late second Ctrl-C causes no traceback.
            table = ["--write", *(["--json"] if json else [])]
            shown = worker.stops < 2 and _table(folder, *table, start_new_session=True)
    if signals:
        to_go = (WAITING, RUNNING, ELSEWHERE, "interrupted")
        left = sum(state.state in to_go for state in chosen)
        print(f"stopped, {runs(left)} to go: {_how_to_resume(place, command)}", file=sys.stderr)
        return 128 + signals[0]
    if disturbed := sum(was_disturbed(state.job.folder) for state in chosen):
        print(_how_to_repeat(disturbed, place.options.pack))
    if failed := sum(state.failed for state in chosen):
        print(f"{runs(failed)} failed: the same command with --rerun failed tries again")
    print(shlex.join(["next:", "python", "-m", "harness", "report", str(as_typed(folder))]))
    return 1 if failed or (shown and shown.returncode) else 0


def _how_to_repeat(disturbed: int, packed: bool) -> str:
    """What measures runs again that had other programs, or each other, beside them."""
    if packed:
        return (
            f"{runs(disturbed)} beside one another (--pack): the same command without --pack and "
            "with --rerun disturbed measures each alone, and keeps the old records aside"
        )
    return (
        f"{runs(disturbed)} disturbed by other programs: when nothing else runs, the same command "
        "with --rerun disturbed --isolation error measures again, and keeps the old records aside"
    )


def _how_to_resume(place: Place, command: str) -> str:
    """What measures the rest of a sweep that was stopped."""
    if place.options.rerun != "all":
        return "the same command continues"
    if _repeats_disturbed(command):
        return "the same command measures these again"
    if place.name == "slurm":
        return "the same command settles the jobs that are out, and measures the others again"
    return "the same command measures all again; --select or --limit choose the rest"


def _record(folder: Path, chosen: list[State], screen: Screen) -> None:
    """Record in sweep.json the command that measured, and which runs were skipped meanwhile."""
    plan = _earlier(folder)
    why = {state.job.path: state.reason for state in chosen if state.state == SKIPPED}
    of_runs = [
        run | {"skipped": why.get(run.get("path"), run.get("skipped"))}
        for run in plan.get("runs") or ()
    ]
    now = plan | {"command": _measured_by(plan, folder, chosen), "runs": of_runs}
    if not plan or now == plan:
        return
    try:
        write_sweep(folder, cast(SweepRecord, now))
    except OSError as error:  # no measurement is lost by this
        screen.warn(f"{folder / SWEEP} stays as it was: {error.strerror}")


def _measured_by(plan: dict[str, Any], folder: Path, chosen: list[State]) -> str | None:
    """The last command that measured a run; a command that chose some runs does not replace one
    that chose all, as long as other finished runs exist.
    """
    measured = [s.command for s in chosen if s.state == FINISHED and s.command]
    before: str | None = plan.get("command")
    if not measured:
        return before
    if before and _chooses(measured[-1]) and not _chooses(before):
        paths = {s.job.path for s in chosen if s.command}
        others = {run.get("path") for run in plan.get("runs") or ()} - {*paths, None}
        root = folder.parents[1]
        if any(RunFolder(root / path).outcome() == FINISHED for path in others):
            return before
    return measured[-1]


def _chooses(command: str) -> bool:
    words = {word.partition("=")[0] for word in command.split()}
    chooses = words & {"--select", "--exclude", "--limit"}
    return bool(chooses) or _repeats_disturbed(command)


def _repeats_disturbed(command: str) -> bool:
    return re.search(r"--rerun[ =]disturbed\b", command) is not None


def _check_owner(folder: Path, file: str) -> None:
    """Refuse a second sweep file of the same name, which would overwrite the first one's table."""
    owner = os.path.expanduser(_earlier(folder).get("file") or file)
    if os.path.exists(owner) and not os.path.samefile(owner, file):
        raise UserError(
            f"{file}: {folder} belongs to {without_home(owner)}: rename one of the files, or "
            "use another --output_dir"
        )


def _earlier(folder: Path) -> dict[str, Any]:
    """The earlier plan, if any; None for values that do not fit the schema."""
    return believable("sweep", read_json(folder / SWEEP) or {})


@contextmanager
def _signals(worker: Worker) -> Iterator[list[int]]:
    """Count signals that ask for an end; the loop of the worker obeys them."""
    received: list[int] = []
    last_s: dict[int, float] = dict.fromkeys(ending_signals(), -math.inf)

    def count(signum: int, frame: Any) -> None:
        before_s, last_s[signum] = last_s[signum], time.monotonic()
        if last_s[signum] - before_s < TWICE_S.get(signal.Signals(signum), 0.0):
            return
        received.append(signum)
        worker.stops += 1

    before = {s: signal.signal(s, count) for s in ending_signals()}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _describe(sweep: Sweep, states: list[State], folder: Path, command: str) -> None:
    """Write sweep.json, what readers need to know of the plan; an earlier, different plan is kept.

    `command` is one that measured: the earlier one stays until another has measured a run.
    """
    path = folder / SWEEP
    with_reasons = [
        (state.job, state.reason if state.state == SKIPPED else None) for state in states
    ]
    content = plan_record(sweep, with_reasons, command)
    try:
        before = _earlier(folder)
        paths = [run.get("path") for run in before.get("runs") or ()]
        is_same = bool(before) and paths == [state.job.path for state in states]
        # With other axes (--set), some expectations are left out: that is no change.
        names = ("hypothesis", "expect") if is_same else ("hypothesis",)
        now: Mapping[str, Any] = content
        changed = [name for name in names if name in before and before[name] != now[name]]
        content["changed_after"] = _changed_after(sweep, before, changed, states)
        if is_same:
            measured = any(state.job.folder.outcome() == FINISHED for state in states)
            if measured or Submitted(folder).open():  # submitted jobs may still measure
                content["command"] = before.get("command") or command
        elif path.exists():
            aside = unused(folder, f"{path.stem}{ASIDE}", path.suffix)
            path.rename(aside)
            print(
                f"{sweep.name}: the plan differs from the last one (now {aside.name}), whose table "
                "is replaced; its runs stay: the sweep with its earlier settings shows them again",
                flush=True,
            )
        write_sweep(folder, content)
    except OSError as error:
        where = folder.parent.parent
        raise UserError(f"--output_dir {where}: cannot be written: {error.strerror}") from None


def _changed_after(
    sweep: Sweep, before: dict[str, Any], changed: list[str], states: list[State]
) -> str | None:
    """How many runs had finished when the hypothesis or an expectation was first changed."""
    known: str | None = before.get("changed_after")
    finished = sum(state.job.folder.outcome() == FINISHED for state in states)
    if not changed or not finished:
        return known
    after = f"{finished} of {len(states)} runs"
    print(
        f"{sweep.name}: {' and '.join(changed)} changed after {after} had finished: table and "
        "report say so. To ask something new of the same runs, use a sweep file of another name",
        flush=True,
    )
    return known or after


def _table(folder: Path, *flags: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """Print the table in a separate process, so that only that process loads pandas."""
    sys.stdout.flush()
    command = [sys.executable, "-m", "harness", "table", str(folder), *flags]
    return subprocess.run(command, env=environment_with({}), check=False, text=True, **how)


def _check_columns(folder: Path, file: str) -> None:
    """UserError if the table cannot be shown, before hours are spent on measuring."""
    with working("checking the columns of the table"):
        done = _table(folder, capture_output=True)
    if done.returncode:
        message = done.stderr.strip().removeprefix("harness table: error: ")
        raise UserError(f"{file}: {message}")

"""python -m harness sweep FILE: many runs from one file, and nothing that was measured is lost."""

from __future__ import annotations

import difflib
import fnmatch
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.identity import number
from harness.launch.arguments import Arguments, parse
from harness.launch.launcher import environment_with
from harness.launch.local import Local
from harness.launch.machine import this_machine
from harness.launch.netns.place import Netns
from harness.launch.places import Machines, Place
from harness.launch.plan import Job, axes_of, plan
from harness.launch.runner import Runner
from harness.launch.screen import Screen
from harness.launch.slurm.place import Cluster
from harness.launch.slurm.queue import Queue
from harness.launch.ssh.place import Ssh
from harness.launch.state import ELSEWHERE, RUNNING, SKIPPED, WAITING, Options, State
from harness.launch.sweepfile import NOT_IN_A_FILE, Sweep, load
from harness.networks import link_of
from harness.public import command_line, without_home
from harness.records import SCHEMA, read_json, write_json
from harness.settings import UserError
from harness.strategies import why_not_elastic
from harness.values import field_of, typed

PLACES: dict[str, Callable[[Options], Place]] = {
    "local": Local,
    "netns": Netns,
    "ssh": Ssh,
    "slurm": Cluster,
}


def main(argv: list[str]) -> int:
    try:
        asked = parse(argv)
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
            return _run(sweep, states, chosen, place, folder, asked, argv)
        finally:
            place.close()
    except UserError as error:
        print(f"harness sweep: error: {error}", file=sys.stderr)
        return 2


def overridden(sweep: Sweep, given: dict[str, list[str]]) -> Sweep:
    """--set: one value stands for all runs, several make an axis, whatever the file says."""
    for name, texts in given.items():
        if name in NOT_IN_A_FILE:
            raise UserError(f"--set {name}: use {NOT_IN_A_FILE[name]}")
        values: list[Any] = []
        key = name
        for text in texts:
            for script in sweep.scripts:
                field = None if name == "link" else field_of(script, name)
                key = field or name
                value = str(link_of(text)) if name == "link" else typed(name, field, [text])
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
                raise UserError(f"{flag} {name}: no run differs by that; {hint}")
    kept = [
        state
        for state in states
        if (not asked.select or any(_meets(state.job, c) for c in asked.select))
        and not any(_meets(state.job, c) for c in asked.exclude)
    ]
    kept = kept[asked.limit]
    if not kept:
        raise UserError("no run is left: see --dry_run without --select, --exclude and --limit")
    return kept


def _meets(job: Job, condition: dict[str, str]) -> bool:
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
            screen.say(line)
        worker = _worker(place, chosen, folder, screen)
        with _signals(worker) as came:
            worker.work()
            screen.close()
            if done := sum(state.known for state in chosen):
                screen.say(f"{done} of {len(chosen)} runs had been done before")
            # Still with the signals counted: a second Ctrl-C that comes late is no crash.
            if worker.stops < 2:
                _table(folder, "--write", start_new_session=True)
    if came:
        to_go = (WAITING, RUNNING, ELSEWHERE, "interrupted")
        left = sum(state.state in to_go for state in chosen)
        print(f"stopped, {left} runs to go: the same command goes on", file=sys.stderr)
        return 128 + came[0]
    return 1 if any(state.failed for state in chosen) else 0


def skipped(states: list[State]) -> list[str]:
    """What cannot run here, a line a reason."""
    reasons: dict[str, list[State]] = {}
    for state in states:
        if state.state == SKIPPED:
            reasons.setdefault(str(state.reason), []).append(state)
    return [
        f"skipped: {state[0].job}"
        + (f" and {len(state) - 1} more" if state[1:] else "")
        + f": {reason}"
        for reason, state in reasons.items()
    ]


def _worker(place: Place, states: list[State], folder: Path, screen: Screen) -> Runner | Queue:
    """Who works the runs off: a cluster does it in its own order."""
    if isinstance(place, Machines):
        return Runner(states, place.options, place, this_machine(), folder, screen)
    return Queue(states, place.options, folder, screen)


@contextmanager
def _signals(worker: Runner | Queue) -> Iterator[list[int]]:
    """SIGINT and SIGTERM are counted, and obeyed by the runner's loop."""
    came: list[int] = []

    def count(signum: int, frame: Any) -> None:
        came.append(signum)
        worker.stops += 1

    before = {s: signal.signal(s, count) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def describe(sweep: Sweep, states: list[State], folder: Path, argv: list[str]) -> None:
    """sweep.json: what the readers need to know of the plan. Another plan is kept aside."""
    path = folder / "sweep.json"
    content = {
        "schema": SCHEMA,
        "name": sweep.name,
        "question": sweep.header.get("question"),
        "file": without_home(sweep.file),
        "tiny": sweep.tiny,
        "command": command_line(["python", "-m", "harness", "sweep", *argv]),
        "axes": axes_of(sweep),
        "baseline": sweep.baseline,
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
    """By the reading tower, in a process of its own: it loads pandas, this one does not."""
    sys.stdout.flush()
    command = [sys.executable, "-m", "harness", "table", str(folder), *flags]
    return subprocess.run(command, env=environment_with({}), check=False, text=True, **how)


def _check_columns(folder: Path, file: str) -> None:
    """Before hours of measuring: whether the table at their end can be shown."""
    done = _table(folder, capture_output=True)
    if done.returncode:
        message = done.stderr.strip().removeprefix("harness table: error: ")
        raise UserError(f"{file}: {message}")

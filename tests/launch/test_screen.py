"""What a person sees of a sweep that goes on, and of the time that it will take."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.core import attempts
from harness.core.records import (
    FINISHED,
    RUNNING,
    SCHEMA,
    SKIPPED,
    append_row,
    read_json,
    write_json,
)
from harness.core.settings import UserError, as_mapping
from harness.launch import flags
from harness.launch import sweep as sweep_module
from harness.launch.ahead import (
    ahead,
    links_apart,
    refuse_if_nothing_starts,
    repeating,
    skipped,
)
from harness.launch.choices import as_typed
from harness.launch.outcome import State
from harness.launch.places import Options
from harness.launch.runner import Worker
from harness.launch.screen import Screen, progress_of, short, time_left_s, window
from harness.launch.sweep import choose
from harness.launch.sweepfile import load
from tests.support.sweeps import GRID, jobs_of, sweep_file
from tests.support.sweeps import harness_sweep as main


def states_of(tmp_path: Path, out: Path) -> list[State]:
    return [State(job) for job in jobs_of(tmp_path, GRID, out)]


def test_a_warning_leaves_stdout_alone_unless_a_terminal_shows_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Screen("which?", []) as screen:
        screen.warn("planted [bold]")
    assert capsys.readouterr() == ("", "warning: planted [bold]\n")
    file = io.StringIO()
    screen = Screen("which?", [])
    screen.console = Console(file=file, force_terminal=True, highlight=False)
    with screen:
        screen.warn("planted [bold]")
    assert " warning: planted [bold]" in file.getvalue() and capsys.readouterr() == ("", "")


def text_of(screen: Screen, width: int, height: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(screen.picture(height))
    return file.getvalue()


def test_the_table_of_a_sweep_that_goes_on(tmp_path: Path) -> None:
    states = states_of(tmp_path, tmp_path / "out")
    screen = Screen("which?", states)
    folder = states[0].job.folder
    write_json(folder.settings, {"schema": SCHEMA, **as_mapping(states[0].job.settings)})
    append_row(
        folder.epochs,
        {"epoch": 1.0, "accuracy": 0.91234, "eval_loss": 0.5, "train_samples_per_s": 1234.5},
    )
    write_json(folder.progress, {"epoch": 1.5})
    states[0].state, states[0].began_s = RUNNING, time.monotonic() - 75
    states[1].state, states[1].took_s = "oom", 12.0
    states[2].state, states[2].took_s = "finished", 100.0
    states[4].state = SKIPPED
    text = text_of(screen, 100, 40)
    (line,) = [line for line in text.splitlines() if "running" in line]
    assert re.search(r"1\.5/3 +0\.9123 +0\.5000 +1,23[45] +1:15", line), line
    assert "setup=1_1 lr=0.001 seed=2" in line
    # 1 run of 1_1 has taken 12 s, one of 1_2 100 s: three of each to go, and 2_1 like any.
    assert "1 finished, 1 failed, 1 skipped, 8 to go" in text and " left" in text
    # No wider and no higher than the terminal.
    narrow = text_of(screen, 80, 10)
    assert "... and 7 more" in narrow and "running" in narrow
    assert len(narrow.splitlines()) <= 10
    assert max(len(line) for line in narrow.splitlines()) <= 80


@pytest.mark.parametrize("color", [True, False])
def test_on_a_terminal_the_table_is_drawn_over_itself(
    color: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not color:
        monkeypatch.setenv("NO_COLOR", "1")
    states = states_of(tmp_path, tmp_path)
    states[0].state = "finished"
    file = io.StringIO()
    screen = Screen("which?", states)
    screen.console = Console(file=file, force_terminal=True, width=100, height=30)
    with screen:
        screen.note("the table shows it")
        screen.print("a failure")
        screen.show()
    text = file.getvalue()
    assert "a failure" in text and "the table shows it" not in text
    assert "finished" in text and "\x1b[" in text
    assert ("\x1b[32m" in text) == color  # green, unless the user wants none


def test_without_a_terminal_lines_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = states_of(tmp_path, tmp_path)[:3]
    with Screen("which?", states) as screen:
        screen.note("one [bold]")
        screen.print("two")
        screen.show()
        screen.note("three", ended=True)  # nothing is known yet
        states[0].state, states[0].took_s = "finished", 50.0
        screen.note("four", ended=True)
    lines = capsys.readouterr().out.splitlines()
    expected = ["one [bold]", "two", "three", "four; about 1:40 left"]
    assert [line[9:] for line in lines] == expected


class Reporting(Worker):
    def work(self) -> None:
        raise NotImplementedError

    def stop_at_failure(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("launch", "shares", "said"),
    [
        (None, (None, None), ""),
        ({"cpu_busy_share": 0.2}, (0.2, 0.3), ""),
        ({"cpu_busy_share": 0.9}, (0.2, 0.7), "; disturbed: other programs used 45% of the cores"),
        (
            {"cpu_busy_share": 0.4}, (0.0, 0.1),
            "; disturbed: other programs used 40% of the cores before it began",
        ),
        ({"packed": True}, (None, None), "; disturbed: other runs beside it (--pack)"),
    ],
)  # fmt: skip
def test_a_run_that_others_disturbed_says_so_when_it_ends(
    launch: Any, shares: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = states_of(tmp_path, tmp_path)[0]
    folder = state.job.folder
    write_json(folder.environment, {"schema": SCHEMA, "launch": launch})
    for epoch, share in enumerate(shares, 1):
        row = {"epoch": epoch, "epoch_time_s": 2.0, "others_cpu_share": share}
        append_row(folder.epochs, row)
    write_json(folder.summary, {"schema": SCHEMA, "outcome": FINISHED, "accuracy": 0.5})
    state.state = FINISHED
    worker = Reporting([state], Options(), tmp_path, Screen("which?", [state], in_turn=False))
    worker.report(state, 3.0, tmp_path / "log.txt")
    assert capsys.readouterr().out.endswith(f"finished after 3.0 s, accuracy 0.5000{said}\n")


def test_a_resumed_run_took_what_all_of_its_attempts_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, three = states_of(tmp_path, tmp_path)[:3]
    folder = one.job.folder
    for took_s in (100.0, 20.0):
        attempts.begin(folder, 0, 1)
        attempts.end(folder, "interrupted", "SIGTERM", took_s)
    write_json(folder.summary, {"schema": SCHEMA, "outcome": "failed", "reason": "why"})
    one.state = "failed"
    worker = Reporting([one, two], Options(), tmp_path, Screen("which?", [one, two]))
    worker.report(one, 21.0, tmp_path / "log.txt")
    assert "failed after 2:00 in 2 attempts, why; it printed nothing" in capsys.readouterr().out
    (tmp_path / "log.txt").touch()
    worker.report(one, 130.0, tmp_path / "log.txt")
    assert "failed after 2:10 in 2 attempts, why; its output is in" in capsys.readouterr().out
    # Another one has 50 s of its attempts behind it.
    two.state, two.before_s, two.began_s = "running", 50.0, time.monotonic() - 20
    assert time_left_s([one, two]) == pytest.approx(60, abs=1)
    three.state, three.before_s, three.began_s = two.state, two.before_s, two.began_s
    assert progress_of(three)[-1] == "1:10"


@pytest.mark.parametrize(
    ("limit_s", "text"),
    [(0.5, "0.5s"), (90.0, "90s"), (1800.0, "30m"), (7200.0, "2h"), (1234567.0, "1234567s")],
)
def test_a_limit_is_told_as_it_is_typed(limit_s: float, text: str) -> None:
    assert as_typed(limit_s) == text and flags.seconds(text) == limit_s


def test_the_window_follows_what_runs(tmp_path: Path) -> None:
    states = states_of(tmp_path, tmp_path)
    assert window(states, 99) == states
    states[10].state = RUNNING
    assert states[10] in window(states, 4) and len(window(states, 4)) == 4
    states[10].state = "finished"
    assert window(states, 4) == states[:4]  # around the next to run
    for state in states:
        state.state = "finished"
    assert window(states, 4) == states[-4:]


def test_time_left_is_that_of_like_runs(tmp_path: Path) -> None:
    states = states_of(tmp_path, tmp_path)[:4]  # 1_1 twice, 1_2 twice
    assert time_left_s(states) is None
    states[0].state, states[0].took_s = "finished", 10.0
    assert time_left_s(states) == 30.0  # nothing is known of 1_2: like any
    states[2].state, states[2].took_s = "finished", 50.0
    assert time_left_s(states) == 60.0
    # Of one script and set-up, a strategy may take ten times as long as another.
    ways = [{"strategy": way, "seed": seed} for seed in (1, 2) for way in ("ddp", "diloco")]
    for state, label in zip(states, ways, strict=True):
        state.job = replace(state.job, label=label)
        state.state, state.took_s = "waiting", None
    for state, took_s in zip(states, (100.0, 10.0), strict=False):
        state.state, state.took_s = "finished", took_s
    assert time_left_s(states) == 110.0
    assert [short(s) for s in (5.4, 65, 7200)] == ["5 s", "1:05", "2:00:00"]


def test_equal_reasons_of_skipped_runs_are_one_line(tmp_path: Path) -> None:
    states = states_of(tmp_path, tmp_path)
    for state in states[4:6]:
        state.state, state.reason = SKIPPED, "needs 2 nodes"
    assert skipped(states) == ["skipped: setup=2_1 lr=0.001 seed=2 and 1 more: needs 2 nodes"]
    assert choose(states, [], [], slice(None)) == states


@pytest.mark.parametrize(
    ("count", "more"),
    [(1, ""), (2, " (and 1 other reason)"), (3, " (and 2 other reasons)")],
)
def test_where_nothing_can_start_the_first_reason_is_said(
    tmp_path: Path, count: int, more: str
) -> None:
    states = states_of(tmp_path, tmp_path)[:count]
    for number, state in enumerate(states):
        state.state, state.reason = SKIPPED, f"needs {number + 2} nodes"
    with pytest.raises(UserError) as refused:
        refuse_if_nothing_starts(states)
    first = "no run can start here: setup=1_1 lr=0.001 seed=2: needs 2 nodes"
    assert str(refused.value) == first + more


REPEATING = {
    "grid: {setup: [1_1, 1_2], strategy: [local_sgd, ddp]}\nseeds: [1, 2]": (
        "2 runs train exactly as others do (setup=1_1 strategy=local_sgd seed=1 as setup=1_1 "
        "strategy=ddp seed=1)"
    ),
    "runs: [{strategy: single}, {strategy: local_sgd, sync_every: 5, compress: int8}]": (
        "1 run trains exactly as another does (strategy=local_sgd sync_every=5 compress=int8 as "
        "strategy=single)"
    ),
    "settings: {strategy: local_sgd}\ngrid: {sync_every: [5, 10]}": (
        "1 run trains exactly as another does (sync_every=10 as sync_every=5)"
    ),
    "runs: [{strategy: ddp, muon: true}, {strategy: local_sgd, muon: true}]": (
        "1 run trains exactly as another does (strategy=local_sgd muon=True as strategy=ddp "
        "muon=True)"
    ),
    "runs: [{strategy: ddp}, {strategy: local_sgd, muon: true}]": None,
    "grid: {setup: [1_1, 1_2], strategy: [diloco, ddp]}": None,
    "grid: {setup: [1_2, 2_1], strategy: [local_sgd, ddp]}": None,
    "grid: {strategy: [single, ddp]}": None,  # what the wrapper costs may be the question
    "runs: [{strategy: ddp}, {strategy: local_sgd, lr: 1}]": None,
    "runs: [{strategy: ddp, compress: bf16}, {strategy: local_sgd, compress: bf16}]": None,
}


@pytest.mark.parametrize("text", REPEATING)
def test_runs_of_one_process_that_train_alike_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    said = "on one process local_sgd exchanges nothing: "
    line = REPEATING[text]
    lines = [said + line] if line else []
    text = f"script: vit\n{text}"
    assert repeating([State(job) for job in jobs_of(tmp_path, text)]) == lines
    file = sweep_file(tmp_path, text)
    assert main([str(file), "--launcher", "netns", "--oversubscribe", "--dry_run"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [x for x in out if said in x] == [f"# {each}" for each in lines]


FOUR = "script: vit\nseeds: [1, 2, 3, 4]"


def test_the_time_ahead_is_that_of_earlier_runs(tmp_path: Path) -> None:
    states = [State(job) for job in jobs_of(tmp_path, FOUR, tmp_path / "out")]
    assert ahead(states, None)[0] == "0 done before, 4 to go"
    for state, outcome in zip(states, ("finished", "failed", "interrupted"), strict=False):
        state.job.folder.write_settings({})
        write_json(state.job.folder.summary, {"outcome": outcome, "wall_s": 100.0})
    plus = "plus loading libraries"
    assert ahead(states, None)[0] == f"2 done before, 2 to go, about 3:20 {plus}"
    assert ahead(states, "all")[0] == f"0 done before, 4 to go, about 6:40 {plus}"
    states[3].state = "skipped"
    assert ahead(states, None)[0] == f"2 done before, 1 to go, about 1:40 {plus}"


LINKS = """script: vit
settings: {setup: 2_1}
grid: {strategy: [ddp, local_sgd], link: [none, 20ms, 80ms]}
seeds: [1, 2]"""


def test_the_time_ahead_is_that_over_the_same_link(tmp_path: Path) -> None:
    states = [State(job) for job in jobs_of(tmp_path, LINKS, tmp_path / "out")]
    for state in states[:6]:
        label = state.job.label
        if label["link"] == "80ms":
            continue
        state.job.folder.write_settings({})
        took_s = {"none": 10.0, "20ms": 100.0}[label["link"]] * (1 + (label["strategy"] == "ddp"))
        write_json(state.job.folder.summary, {"outcome": "finished", "wall_s": took_s})
    # None in the second seed: 20 + 10, 20 ms: 200 + 100, 80 ms: twice as the others of a strategy.
    line, left_s = ahead(states, None)
    assert left_s == 20 + 10 + 200 + 100 + 2 * (110 + 55)
    plus = "plus loading libraries; no finished run had the link of 4 runs"
    assert line == f"4 done before, 8 to go, about 11:00 {plus}"


NODES = "setup: 2_1, link"


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        (LINKS, "{link: none}"),
        (LINKS + "\nbaseline: {strategy: ddp}", "{strategy: ddp, link: none}"),
        (LINKS + "\nbaseline: {strategy: ddp, link: 20ms}", None),
        (LINKS.replace("none, 20ms, ", "") + "\nbaseline: {strategy: ddp}", None),
        # One machine is the baseline of each link.
        (f"script: vit\nruns: [{{setup: 1_2}}, {{{NODES}: 1ms}}, {{{NODES}: 9ms}}]"
         "\nbaseline: {setup: 1_2}", None),
    ],
)  # fmt: skip
def test_where_links_are_not_compared_a_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, entry: str | None
) -> None:
    file = sweep_file(tmp_path, text)
    said = "links are not compared with each other: that takes a baseline with a link, as"
    lines = [f"{said} {entry}"] if entry else []
    assert links_apart(load(file), [State(job) for job in jobs_of(tmp_path, text)]) == lines
    assert main([str(file), "--launcher", "netns", "--oversubscribe", "--dry_run"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if said in line] == lines


def test_the_time_of_the_header_is_a_bound_where_runs_are_skipped(tmp_path: Path) -> None:
    states = [State(job) for job in jobs_of(tmp_path, FOUR, tmp_path / "out")]
    time = "4 to go, about 1:40 by the header of the file"
    assert ahead(states, None, 100.0) == (f"0 done before, {time}", 100.0)
    states[3].state = "skipped"  # the header may have counted it
    time = "3 to go, at most 1:40 by the header of the file"
    assert ahead(states, None, 100.0) == (f"0 done before, {time}", 100.0)


@pytest.mark.parametrize(
    ("flags", "time"),
    [
        ([], "2 to go, about 10:00 by the header of the file"),
        (["--repeat", "4"], "8 to go, about 40:00 by the header of the file"),
        (["--set", "epochs=50"], "2 to go"),
        (
            ["--limit", "0:1"],
            "1 to go, about 5:00 by the header of the file, if its runs take equally long",
        ),
    ],
)
def test_the_time_of_the_header_is_for_the_runs_of_the_file(
    flags: list[str], time: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    text = "# Time: 3 h; --tiny 10 min\n# Runs: 4, --tiny 2\nscript: vit\nseeds: [1, 2]\n"
    monkeypatch.setattr("harness.launch.sweep._work", lambda *_: 0)
    out = ["-o", str(tmp_path / "out")]
    assert main([str(sweep_file(tmp_path, text)), "--tiny", *out, *flags]) == 0
    assert f"0 done before, {time}\n" in capsys.readouterr().out
    assert main([str(tmp_path / "mine.yaml"), "--tiny", *out, *flags, "--dry_run"]) == 0
    shown = capsys.readouterr().out.startswith(f"# 0 done before, {time}\n")
    assert shown == ("header" in time)
    file = tmp_path / "mine.yaml"  # without Runs: the file's own are counted
    file.write_text(file.read_text().replace("# Runs: 4, --tiny 2\n", ""))
    assert main([str(file), "--tiny", *out, *flags]) == 0
    same = time if "40:00" not in time else "8 to go, about 10:00 by the header of the file"
    assert f"0 done before, {same}\n" in capsys.readouterr().out


def test_what_takes_long_is_asked_for_at_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "# Time: 30 s on 8 cores; --tiny 2 h on 2 cores\nscript: vit\nseeds: [1, 2]\n"
    file = sweep_file(tmp_path, text)
    flags = [str(file), "--tiny", "-o", str(tmp_path / "out")]
    asked, started = list[str](), list[str]()

    def answer(question: str) -> str:
        asked.append(question)
        return "n"

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr("harness.launch.sweep._work", lambda *_: started.append("started") or 0)
    assert main(flags) == 0 and started == ["started"] and asked == []  # no terminal
    assert "0 done before, 2 to go, about 2:00:00 by the header" in capsys.readouterr().out
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(flags) == 2 and len(started) == 1 and asked == ["Start? [y/N] "]
    assert "not started" in capsys.readouterr().err

    def ended(_: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", ended)  # Ctrl-D
    assert main(flags) == 2 and len(started) == 1
    assert "not started" in capsys.readouterr().err

    def interrupted(_: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    capsys.readouterr()
    assert main(flags) == 130 and len(started) == 1
    said = capsys.readouterr()
    assert said.out.endswith("\n\n") and said.err == "harness sweep: stopped by SIGINT\n"
    assert main([*flags, "--yes"]) == 0 and len(started) == 2
    monkeypatch.setattr("builtins.input", lambda _: "y")
    assert main(flags) == 0 and len(started) == 3
    assert main([a for a in flags if a != "--tiny"]) == 0 and len(started) == 4  # 30 s


def test_a_document_stands_alone_on_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of the table, which prints it itself; what is for people goes to stderr."""
    asked = list[tuple[str, ...]]()
    shown = subprocess.CompletedProcess([], 0, "")
    monkeypatch.setattr(
        sweep_module, "_table", lambda _, *flags, **__: asked.append(flags) or shown
    )
    monkeypatch.setattr(sweep_module.Runner, "work", lambda self: None)
    out = tmp_path / "out"
    argv = [str(sweep_file(tmp_path, GRID)), "--isolation", "off", "--o", str(out), "--json"]
    assert main(argv) == 0
    said = capsys.readouterr()
    assert said.out == "" and "to go" in said.err and "next: " in said.err
    assert asked == [("--write", "--json")]
    plan = read_json(out / "sweeps" / "mine" / "sweep.json") or {}
    assert plan["command"] and "--json" not in plan["command"]
    # Also where there is nothing to measure again; a dry run has the plan, which is empty.
    assert main([*argv, "--rerun", "disturbed"]) == 0
    said = capsys.readouterr()
    assert said.out == "" and said.err.endswith("no finished run of this choice was disturbed\n")
    assert asked == [("--write", "--json"), ("--json",)]
    for more in (["--dry_run"], ["--tiny"]):  # with --tiny it has not been run
        assert main([*argv, "--rerun", "disturbed", *more]) == 0
        assert json.loads(capsys.readouterr().out)["runs"] == []
    assert len(asked) == 2
    # A run that cannot start here says why.
    assert main([*argv, "--dry_run"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert len(runs) == 12 and sum("needs 2 nodes" in (run["skipped"] or "") for run in runs) == 4
    # Each has the commands that the plain dry run shows, of skipped runs as comments.
    assert main([*(word for word in argv if word != "--json"), "--dry_run"]) == 0
    shown = capsys.readouterr().out.splitlines()
    for run in runs:
        mark = "# " if run["skipped"] else ""
        assert run["commands"] and {mark + line for line in run["commands"]} <= {*shown}
    slurm = ["--launcher", "slurm", "--partition", "cpu", "--timeout", "1h", "--dry_run"]
    assert main([argv[0], *argv[3:], *slurm]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert {tuple(run["commands"]) for run in runs} == {()}  # its lines hold the scripts of arrays

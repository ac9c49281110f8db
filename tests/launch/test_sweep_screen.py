"""The command line of a sweep and what a person sees of it; no training."""

from __future__ import annotations

import io
import json
import re
import sys
import time
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
    RunFolder,
    append_row,
    read_json,
    write_json,
)
from harness.core.settings import UserError, as_mapping
from harness.launch import places
from harness.launch import sweep as sweep_module
from harness.launch.ahead import ahead, skipped
from harness.launch.outcome import State, settled
from harness.launch.places import Machine, Options
from harness.launch.plan import plan
from harness.launch.runner import Worker
from harness.launch.screen import Screen, as_typed, progress_of, short, time_left_s, window
from harness.launch.sweep import choose, overridden
from harness.launch.sweepfile import load
from tests.support.sweeps import ROOT, jobs_of, sweep_file
from tests.support.sweeps import harness_sweep as main

GRID = """
# Question: which?
script: vit
grid: {setup: [1_1, 1_2, 2_1], lr: [0.001, 0.002]}
seeds: [2, 4]
baseline: {setup: 1_1}
"""


def printed(tmp_path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
    """The lines of a dry run."""
    file = sweep_file(tmp_path, GRID)
    assert main([str(file), "--dry_run", *flags]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.launch.places.this_machine", lambda: Machine((), (0, 1)))


def test_dry_run_prints_commands_to_be_pasted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("OMP_NUM_THREADS")
    lines = printed(tmp_path, capsys, "--tiny", "--o=some where")
    assert lines[0] == (
        "OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node=1 vit.py --tiny --lr 0.001 "
        "--seed 2 --setup 1_1 --output_dir 'some where'"
    )
    commands = [line for line in lines if not line.startswith("#")]
    assert len(commands) == 8 and not list(tmp_path.glob("some*"))
    # What cannot run here is shown as a comment, with the reason and each node's command.
    at = lines.index("# skipped: needs 2 nodes: the local launcher has one; use --launcher netns")
    assert "--nnodes=2" in lines[at + 1] and "--node_rank=1" in lines[at + 2]
    assert len(lines) == 8 + 4 * 3
    # From elsewhere the scripts are named in full.
    monkeypatch.chdir(tmp_path)
    assert f" {ROOT}/vit.py " in printed(tmp_path, capsys)[0]


def test_on_gpus_the_visible_ones_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "harness.launch.places.this_machine", lambda: Machine(("0", "3"), tuple(range(8)))
    )
    monkeypatch.delenv("OMP_NUM_THREADS")
    lines = printed(tmp_path, capsys, "--select", "lr=0.001,seed=2")
    assert lines[0].startswith("CUDA_VISIBLE_DEVICES=0 OMP_NUM_THREADS=4 torchrun ")
    assert lines[1].startswith("OMP_NUM_THREADS=4 torchrun ")


def test_runs_are_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def count(*flags: str) -> int:
        lines = printed(tmp_path, capsys, *flags)
        return len([x for x in lines if "--node_rank=1" not in x and "# skipped" not in x])

    assert count() == 12
    assert count("--select", "setup=1_1") == 4
    assert count("--select", "setup=1_1,lr=0.001") == 2
    assert count("--select", "setup=1_1", "--select", "setup=1_2") == 8
    assert count("--select", "setup=1_*", "--exclude", "seed=2") == 4
    assert count("--limit", "0:3") == 3 and count("--select", "setup=1_*", "--limit=-2:") == 2
    assert count("--select", "setup=1_2", "--limit", "3:9") == 1
    assert count("--repeat", "2") == 24
    assert count("--set", "lr=0.01") == 6  # in place of the axis
    assert count("--set", "epochs=1", "--set", "epochs=2") == 24  # another axis


def test_set_replaces_whatever_the_file_says(tmp_path: Path) -> None:
    text = """
script: [bert, vit]
settings: {epochs: 3}
grid: {setup: [1_1, 1_2]}
runs: [{lr: 1, seed: 2}, {lr: 2, seed: 4}]
exclude: [{setup: 1_2, lr: 2}]
baseline: {setup: 1_1}
order: [setup]
"""
    assignments = [("setup", "1_2"), ("b", "4"), ("link", "none"), ("b", "8")]
    sweep = overridden(load(sweep_file(tmp_path, text)), assignments)
    jobs = plan(sweep)
    assert len(jobs) == 2 * 2 * 2 and sweep.baseline is None and sweep.order == ()
    assert {job.settings.setup for job in jobs} == {"1_2"}
    assert {job.settings.per_gpu_batch for job in jobs} == {4, 8}


MISTAKES = {
    "no file": ([], "missing FILE; usage: python -m harness sweep"),
    "unknown flag": (["x.yaml", "--dryrun"], "unknown flag --dryrun: did you mean --dry_run?"),
    "far flag": (["x.yaml", "--zzz"], "unknown flag --zzz: there are --account,"),
    "two files": (["x.yaml", "y.yaml"], "unexpected y.yaml; usage:"),
    "missing file": (["none.yaml"], "none.yaml does not exist"),
    "select": (["FILE", "--select", "setup"], "--select setup: expected KEY=VALUE"),
    "select key": (
        ["FILE", "--select", "setpu=1_1"],
        "--select setpu: no run varies it; did you mean setup?",
    ),
    "far key": (["FILE", "--exclude", "q=1"], "--exclude q: no run varies it; there are lr,"),
    "nothing left": (["FILE", "--select", "setup=9_9"], "no run is left"),
    "limit": (["FILE", "--limit", "3"], "--limit 3: expected A:B"),
    "set": (["FILE", "--set", "epochs"], "--set epochs: expected KEY=VALUE"),
    "set unknown": (["FILE", "--set", "epohs=1"], "unknown flag --epohs: did you mean --epochs?"),
    "set value": (["FILE", "--set", "epochs=x"], "--epochs x: expected a whole number"),
    "set not here": (["FILE", "--set", "output_dir=x"], "--set output_dir: use --output_dir"),
    "set link": (["FILE", "--set", "link=fast"], "link fast: expected none"),
    "repeat": (["FILE", "--repeat", "0"], "--repeat 0: must be at least 1"),
    "timeout": (["FILE", "--timeout", "soon"], "--timeout soon: expected a time such as 90"),
    "no time": (["FILE", "--timeout", "0m"], "--timeout 0m: expected a time"),
    "no number": (["FILE", "--timeout", "1.2.3m"], "--timeout 1.2.3m: expected a time"),
    "rerun": (["FILE", "--rerun", "some"], "--rerun some: expected one of failed, all"),
    "isolation": (["FILE", "--isolation", "no"], "no: expected one of warn, error, off"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_written(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    argv, message = MISTAKES[name]
    file = sweep_file(tmp_path, GRID)
    assert main([str(file) if word == "FILE" else word for word in argv]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("harness sweep: error: ") and captured.err.count("\n") == 1
    assert message in captured.err and captured.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = sweep_file(tmp_path, GRID)
    (tmp_path / "out").write_text("a file")
    assert main([str(file), "--tiny", "--o", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "out is not a folder that can be written to" in message and message.count("\n") == 1


def test_a_link_to_nothing_is_refused_before_the_plan_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    argv = [str(sweep_file(tmp_path, GRID)), "--tiny", "--o", str(tmp_path / "out")]
    assert main(argv) == 2
    said = capsys.readouterr()
    assert said.out == "" and "disk, which is not there: make that folder" in said.err


@pytest.mark.process
def test_an_unknown_column_is_noticed_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = sweep_file(tmp_path, GRID + "columns: [acuracy]\n")
    assert main([str(file), "--tiny", "--o", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "mine.yaml: " in message and "did you mean accuracy?" in message
    assert message.count("\n") == 1 and not list(tmp_path.glob("out/vit"))


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in ("tiny", "dry_run", "select", "exclude", "limit", "set", "repeat", "rerun",
                 "timeout", "fail_fast", "isolation", "pack", "cold"):  # fmt: skip
        assert f"--{name}" in text


def test_kebab_case_and_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(tmp_path, capsys, "--fail-fast", "--timeout", "1.5h", "--dry-run")


def test_a_run_with_an_outcome_is_not_run_again() -> None:
    assert settled(None, None) is None and settled("interrupted", None) is None
    assert settled("finished", None) == settled("finished", "failed") == "finished"
    assert settled("oom", None) == "oom" and settled("oom", "failed") is None
    assert settled("finished", "all") is None


def states_of(tmp_path: Path, out: Path) -> list[State]:
    return [State(job) for job in jobs_of(tmp_path, GRID, out)]


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


def test_elsewhere_lines_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize(("limit_s", "text"), [(90.0, "90s"), (1800.0, "30m"), (7200.0, "2h")])
def test_a_limit_is_told_as_it_is_typed(limit_s: float, text: str) -> None:
    assert as_typed(limit_s) == text and sweep_module._seconds(text) == limit_s


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
    assert [short(s) for s in (5.4, 65, 7200)] == ["5 s", "1:05", "2:00:00"]


def test_a_reason_is_said_once(tmp_path: Path) -> None:
    states = states_of(tmp_path, tmp_path)
    for state in states[4:6]:
        state.state, state.reason = SKIPPED, "needs 2 nodes"
    assert skipped(states) == ["skipped: setup=2_1 lr=0.001 seed=2 and 1 more: needs 2 nodes"]
    assert choose(states, [], [], slice(None)) == states


BUSY = {"cpu_busy_share": 0.9, "gpu_processes": 1}


def test_others_on_the_machine_are_refused_on_demand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "others", lambda _: BUSY)
    file, out = sweep_file(tmp_path, GRID), tmp_path / "out"
    argv = [str(file), "--tiny", "--output_dir", str(out), "--isolation", "error"]
    assert main(argv) == 2
    message = capsys.readouterr().err
    assert "1 other process(es) use the GPUs and others use 90% of the cores" in message
    assert "--isolation warn" in message
    assert not list(out.glob("vit/*/*/settings.json"))


@pytest.mark.process
def test_what_training_needs_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for script in ("bert", "vit"):  # either would load all that training needs
        (tmp_path / f"{script}.py").write_text(f"raise RuntimeError('no {script} today')")
    monkeypatch.chdir(tmp_path)
    file = sweep_file(tmp_path, GRID)
    assert main([str(file), "--tiny", "--o", str(tmp_path / "out"), "--isolation", "off"]) == 2
    message = capsys.readouterr().err
    assert "what training needs does not start here: see" in message
    log = Path(message.rsplit(" see ", 1)[1].strip())
    assert "no vit today" in log.read_text()


@pytest.mark.process
def test_a_cuda_context_in_the_server_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = '{"event": "ready", "cuda_in_server": true, "pid": 1}'
    fake = f"import sys, time; print({answer!r}, flush=True); time.sleep(60)"
    monkeypatch.setattr("harness.launch.agents.SERVE", fake)
    file = sweep_file(tmp_path, GRID)
    assert main([str(file), "--tiny", "--o", str(tmp_path / "out"), "--isolation", "off"]) == 2
    assert "the fork server has a CUDA context: use --cold" in capsys.readouterr().err


def test_mistakes_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run is the baseline lr=9"):
        jobs_of(tmp_path, GRID.replace("{setup: 1_1}", "{lr: 9}"))


def test_runs_that_cannot_lose_nodes_are_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "script: vit\nsettings: {setup: 1_2}\ngrid: {strategy: [ddp, local_sgd, hivemind]}"
    file = sweep_file(tmp_path, text)
    assert main([str(file), "--tiny", "--dry_run", "--max_restarts", "2"]) == 0
    skips = [line for line in capsys.readouterr().out.splitlines() if "skipped" in line]
    assert skips == [
        "# skipped: --strategy local_sgd does not go with --max_restarts: no process can take over "
        "what another trained apart",
        "# skipped: --strategy hivemind does not need --max_restarts: its peers come and go by "
        "themselves",
    ]


@pytest.mark.parametrize("odd", [
    {"file": "~nobody-of-this-name/x"}, {"file": "x" * 5000}, {"file": 5}, {"runs": 5},
    {"runs": [5]}, {"runs": [{"path": {}}], "command": 7}, [],
])  # fmt: skip
def test_a_damaged_plan_stands_in_the_way_of_none(
    odd: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "_table", lambda *_, **__: None)
    file, out = tmp_path / "mine.yaml", tmp_path / "out"
    file.write_text("script: vit\ngrid: {setup: [9_9]}")  # no run that fits here
    plan = out / "sweeps" / "mine-tiny" / "sweep.json"
    plan.parent.mkdir(parents=True)
    plan.write_text(json.dumps(odd))
    assert main([str(file), "--output_dir", str(out), "--isolation", "off", "--tiny"]) == 2
    assert "no run can start here" in capsys.readouterr().err
    assert (read_json(plan) or {})["name"] == "mine-tiny"
    assert json.loads((plan.parent / "sweep.earlier-1.json").read_text()) == odd


def test_two_files_of_one_name_do_not_share_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "_table", lambda *_, **__: None)
    text, out = "script: vit\ngrid: {setup: [9_9]}", tmp_path / "out"  # no run that fits here
    first, second = (tmp_path / name / "same.yaml" for name in ("one", "two"))
    for file in (first, second):
        file.parent.mkdir()
        file.write_text(text)
    flags = ["--output_dir", str(out), "--isolation", "off", "--tiny"]
    assert main([str(first), *flags]) == 2
    table = (out / "sweeps" / "same-tiny" / "sweep.json").read_text()
    printed, refusal = capsys.readouterr()
    assert printed.startswith("same-tiny: 1 run, --launcher local\n")
    assert "\n0 done before, 0 to go\n" in printed
    assert refusal.count("\n") == 1 and "no run can start here: setup=9_9: needs 9 nodes" in refusal
    assert main([str(second), *flags]) == 2
    refusal = capsys.readouterr().err
    assert refusal.count("\n") == 1 and f"same-tiny belongs to {first}" in refusal
    assert (out / "sweeps" / "same-tiny" / "sweep.json").read_text() == table
    assert main([str(first), *flags]) == 2
    assert (out / "sweeps" / "same-tiny" / "sweep.json").read_text() == table
    assert main([str(first), *flags, "--rerun", "all"]) == 2
    command = (read_json(out / "sweeps" / "same-tiny" / "sweep.json") or {})["command"]
    assert command.endswith("--rerun all")  # no earlier call has measured


def test_data_that_are_not_there_are_missed_before_the_first_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = sweep_file(tmp_path, "script: bert\ngrid: {setup: [1_1, 1_2]}"), tmp_path / "out"
    argv = [str(file), "--output_dir", str(out), "--isolation", "off", "--tiny"]
    for name, value in (("dataset", "missing.csv"), ("model", "./missing")):
        assert main([*argv, "--set", f"{name}={value}"]) == 2
        refusal = capsys.readouterr().err
        assert refusal.count("\n") == 1 and f"--{name} {value}: there is no such" in refusal
        assert not out.exists()
    # Of a machine that only submits the runs, the disk tells nothing.
    assert main([*argv, "--set", "dataset=missing.csv", "--dry_run"]) == 0


def test_what_was_measured_elsewhere_is_shown_where_nothing_can_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep_module, "_table", lambda *_, **__: None)
    file, out = sweep_file(tmp_path, "script: vit\ngrid: {setup: [9_9]}"), tmp_path / "out"
    argv = [str(file), "--output_dir", str(out), "--isolation", "off", "--tiny"]
    assert main([*argv, "--dry_run"]) == 2 and not out.exists()
    said = capsys.readouterr()
    assert "--setup 9_9" in said.out and said.err.count("no run can start here: setup=9_9") == 1
    assert main(argv) == 2
    (run,) = (read_json(out / "sweeps" / "mine-tiny" / "sweep.json") or {})["runs"]
    folder = RunFolder(out / run["path"])
    folder.write_settings({})
    write_json(folder.summary, {"outcome": FINISHED})
    assert main(argv) == 0 and main([*argv, "--dry_run"]) == 0
    assert capsys.readouterr().err.count("\n") == 1


FOUR = "script: vit\nseeds: [1, 2, 3, 4]"


def test_the_time_ahead_is_that_of_earlier_runs(tmp_path: Path) -> None:
    states = [State(job) for job in jobs_of(tmp_path, FOUR, tmp_path / "out")]
    assert ahead(states, None)[0] == "0 done before, 4 to go"
    for state, outcome in zip(states, ("finished", "failed", "interrupted"), strict=False):
        state.job.folder.write_settings({})
        write_json(state.job.folder.summary, {"outcome": outcome, "wall_s": 100.0})
    assert ahead(states, None)[0] == "2 done before, 2 to go, about 3:20"
    assert ahead(states, "all")[0] == "0 done before, 4 to go, about 6:40"
    states[3].state = "skipped"
    assert ahead(states, None)[0] == "2 done before, 1 to go, about 1:40"


def test_the_time_of_the_header_is_a_bound_where_runs_are_skipped(tmp_path: Path) -> None:
    states = [State(job) for job in jobs_of(tmp_path, FOUR, tmp_path / "out")]
    time = "4 to go, about 1:40 by the header of the file"
    assert ahead(states, None, 100.0) == (f"0 done before, {time}", 100.0)
    states[3].state = "skipped"  # the header may have counted it
    time = "3 to go, at most 1:40 by the header of the file"
    assert ahead(states, None, 100.0) == (f"0 done before, {time}", 100.0)


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


def test_a_sweep_says_before_it_starts_that_hivemind_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = jobs_of(tmp_path, "script: vit\nsettings: {strategy: hivemind, setup: 2_1}", tiny=True)
    monkeypatch.setattr("harness.launch.places.find_spec", lambda name: None)
    reason = places.why_not_on(places.this_machine(), job)
    assert reason and reason.startswith("hivemind is not installed: pip install hivemind==")

"""The command line of a sweep, and what it refuses before anything starts; no training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.core.records import (
    ASIDE,
    FINISHED,
    SCHEMA,
    RunFolder,
    read_json,
    write_json,
)
from harness.core.settings import UserError
from harness.launch import places
from harness.launch import sweep as sweep_module
from harness.launch.ahead import check_start, with_other_threads
from harness.launch.outcome import State, settled
from harness.launch.places import Local, Machine, Options
from harness.launch.plan import plan
from harness.launch.screen import Screen
from harness.launch.sweep import overridden
from harness.launch.sweepfile import load
from tests.support.sweeps import GRID, ROOT, jobs_of, sweep_file
from tests.support.sweeps import harness_sweep as main


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


def test_set_replaces_whatever_the_file_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
script: [bert, vit]
settings: {epochs: 3}
grid: {setup: [1_1, 1_2]}
runs: [{lr: 1, seed: 2}, {lr: 2, seed: 4}]
exclude: [{setup: 1_2, lr: 2}]
baseline: {setup: 1_1}
expect:
  - {of: {setup: 1_2}, measure: accuracy, at_most: 0}
  - {of: {lr: 1}, against: {setup: 1_2}, measure: accuracy, at_most: 0}
  - {of: {lr: 1}, against: {lr: 2}, measure: accuracy, at_most: 0}
order: [setup]
"""
    assignments = [("setup", "1_2"), ("b", "4"), ("link", "none"), ("b", "8")]
    sweep = overridden(load(sweep_file(tmp_path, text)), assignments)
    jobs = plan(sweep)
    assert len(jobs) == 2 * 2 * 2 and sweep.baseline is None and sweep.order == ()
    assert [entry["against"] for entry in sweep.expect] == [{"lr": 2.0}]
    assert "--set setup: 2 of 3 entries of expect are left out\n" in capsys.readouterr().err
    assert {job.settings.setup for job in jobs} == {"1_2"}
    assert {job.settings.per_gpu_batch for job in jobs} == {4, 8}


MISTAKES = {
    "no file": ([], "missing FILE; usage: python -m harness sweep"),
    "unknown flag": (["x.yaml", "--dryrun"], "unknown flag --dryrun: did you mean --dry_run?"),
    "flag of runs": (["x.yaml", "--epochs", "2"], "unknown flag --epochs: it is one of runs: --set "
                     "epochs=VALUE gives it to all"),
    "flag of the trainer": (["x.yaml", "--use_cpu"], "--set use_cpu=VALUE gives it to all"),
    "flag that no run takes": (["x.yaml", "--do_train"], "--do_train: training always runs"),
    "flag of other programs": (["x.yaml", "--steps", "9"], "unknown flag --steps: use --max_steps"),
    "far flag": (["x.yaml", "--zzz"], "unknown flag --zzz: there are --account,"),
    "two files": (["x.yaml", "y.yaml"], "unexpected y.yaml; usage:"),
    "missing file": (["none.yaml"], "none.yaml does not exist"),
    "select": (["FILE", "--select", "setup"], "--select setup: expected KEY=VALUE"),
    "select a key twice": (
        ["FILE", "--select", "lr=1,setup=1_1,lr=2"],
        "--select lr=1,setup=1_1,lr=2: lr is given twice: give the flag again for another value",
    ),
    "select key": (
        ["FILE", "--select", "setpu=1_1"],
        "--select setpu: no run varies it; did you mean setup?",
    ),
    "far key": (["FILE", "--exclude", "q=1"], "--exclude q: no run varies it; there are lr,"),
    "nothing left": (["FILE", "--select", "setup=9_9"], "left: none has setup 9_9; there is 1_1"),
    "limit": (["FILE", "--limit", "3"], "--limit 3: expected A:B"),
    "set": (["FILE", "--set", "epochs"], "--set epochs: expected KEY=VALUE"),
    "set unknown": (["FILE", "--set", "epohs=1"], "unknown flag --epohs: did you mean --epochs?"),
    "set value": (["FILE", "--set", "epochs=x"], "--epochs x: expected a whole number"),
    "set not here": (["FILE", "--set", "output_dir=x"], "--set output_dir: use --output_dir"),
    "set link": (["FILE", "--set", "link=fast"], "link fast: expected none"),
    "repeat": (["FILE", "--repeat", "0"], "--repeat 0: must be at least 1"),
    "digits": (["FILE", "--timeout", "\u0663s"], "--timeout \u0663s: expected a time such as 90"),
    "timeout": (["FILE", "--timeout", "soon"], "--timeout soon: expected a time such as 90"),
    "no time": (["FILE", "--timeout", "0m"], "--timeout 0m: expected a time"),
    "no number": (["FILE", "--timeout", "1.2.3m"], "--timeout 1.2.3m: expected a time"),
    "rerun": (["FILE", "--rerun", "some"], "--rerun some: expected one of failed, disturbed, all"),
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
        for dry in ((), ("--dry_run",)):
            assert main([*argv, "--set", f"{name}={value}", *dry]) == 2
            said = capsys.readouterr()
            assert said.err.count("\n") == 1 and f"--{name} {value}: there is no such" in said.err
            assert not out.exists() and "--setup" not in said.out
    rows = "".join(f"a {n},{n % 2}\n" for n in range(40))
    (data := tmp_path / "reviews.csv").write_text(f"review,sentiment\n{rows}")
    columns = [*argv, "--set", f"dataset={data}", "--set", "label_column=sentimant"]
    for dry in ((), ("--dry_run",)):
        assert main([*columns, *dry]) == 2
        said = capsys.readouterr()
        assert "--label_column sentimant: did you mean sentiment? the columns are" in said.err
        assert not out.exists() and "--setup" not in said.out
    # Of a machine that only submits the runs, the disk tells nothing.
    slurm = ["--launcher", "slurm", "--partition", "cpu", "--timeout", "1h"]
    assert main([*argv[:3], "--tiny", "--set", "dataset=missing.csv", "--dry_run", *slurm]) == 0


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


def test_a_sweep_says_before_it_starts_that_hivemind_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = jobs_of(tmp_path, "script: vit\nsettings: {strategy: hivemind, setup: 2_1}", tiny=True)
    monkeypatch.setattr("harness.core.provenance.find_spec", lambda name: None)
    reason = places.why_not_on(places.this_machine(), job)
    assert reason and reason.startswith("hivemind is not installed: pip install hivemind==")


def done_before(tmp_path: Path, threads: int, device: str = "cpu") -> list[State]:
    """A sweep whose first run was made by hand, with so many threads."""
    tmp_path.mkdir(exist_ok=True)
    states = [State(job) for job in jobs_of(tmp_path, GRID, tmp_path / "out")]
    folder = states[0].job.folder
    folder.write_settings({})
    write_json(folder.environment, {"threads": threads, "observed": {"device": device}})
    write_json(folder.summary, {"outcome": FINISHED})
    return states


def test_runs_that_were_made_with_other_threads_are_named(tmp_path: Path) -> None:
    assert with_other_threads(done_before(tmp_path / "a", 2), "1") == [
        "1 run done before with OMP_NUM_THREADS=2 (setup=1_1 lr=0.001 seed=2), here it is "
        "1: their times are not compared with the others'; --rerun all measures again what "
        "--select chooses, and keeps these records"
    ]
    assert with_other_threads(done_before(tmp_path / "b", 1), "1") == []
    assert with_other_threads(done_before(tmp_path / "c", 4, "cuda"), "1") == []


@pytest.mark.parametrize(("rerun", "chosen", "warned"), [
    (None, slice(None), True), (None, slice(1, 2), True),
    ("all", slice(1, 2), True),  # with --rerun disturbed, too
    ("all", slice(None), False),  # it is measured again
])  # fmt: skip
def test_other_threads_are_named_of_all_runs_that_stay(
    rerun: str | None, chosen: slice, warned: bool, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    states = done_before(tmp_path, 2)
    sweep, place = load(sweep_file(tmp_path, GRID), False), Local(Options(rerun=rerun))
    check_start(sweep, states, states[chosen], place, yes=True)
    said = capsys.readouterr()
    assert ("warning: 1 run done before with OMP_NUM_THREADS=2" in said.err) is warned
    assert "done before with" not in said.out


def test_disturbed_runs_are_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """These alone; and nothing where there are none."""
    flags = ["--o", str(tmp_path / "out"), "--rerun", "disturbed"]
    first, *_ = done_before(tmp_path, 1)
    (line,) = printed(tmp_path, capsys, *flags)
    assert line == "mine: no finished run of this choice was disturbed"
    launch = {"launch": {"cpu_busy_share": 0.9}, "threads": 1, "observed": {"device": "cpu"}}
    write_json(first.job.folder.environment, launch)
    commands = [line for line in printed(tmp_path, capsys, *flags) if not line.startswith("#")]
    assert len(commands) == 1 and commands[0].endswith(" --rerun")
    folder = first.job.folder
    write_json(folder.summary, {"outcome": "failed"})
    (line,) = printed(tmp_path, capsys, *flags)
    assert "no finished run" in line
    write_json(folder.summary, {"outcome": "interrupted"})
    (line,) = printed(tmp_path, capsys, *flags)
    assert "no finished run" in line
    # Stopped while it repeated a disturbed run.
    folder.path.with_name(folder.path.name + f"{ASIDE}1").mkdir()
    assert [line for line in printed(tmp_path, capsys, *flags) if not line.startswith("#")] == (
        commands
    )


def test_a_dry_run_shows_what_is_done_as_a_comment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done_before(tmp_path, 1)
    lines = printed(tmp_path, capsys, "--o", str(tmp_path / "out"))
    assert lines[0] == "# finished" and lines[1].startswith("# OMP_NUM_THREADS=")
    assert len([line for line in lines if not line.startswith("#")]) == 7
    assert not any("--rerun" in line for line in lines)
    again = printed(tmp_path, capsys, "--o", str(tmp_path / "out"), "--rerun", "all")
    commands = [line for line in again if not line.startswith("#")]
    assert len(commands) == 8 and all(line.endswith(" --rerun") for line in commands)


def test_a_dry_run_prints_no_command_that_would_train_without_its_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "script: vit\nsettings: {setup: 2_1, link: 20ms}"
    flags = ["--tiny", "--dry_run", "--launcher", "netns", "--oversubscribe"]
    file = sweep_file(tmp_path, text)
    assert main([str(file), *flags]) == 0
    assert " nodes 2 --link=20ms -- torchrun" in capsys.readouterr().out
    assert main([str(file), *flags, "--max_restarts", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "# on emulated nodes, node by node (link 20ms):" and len(lines) == 3
    assert all(line.startswith("# ") for line in lines) and "torchrun --nnodes=2:2" in lines[1]


@pytest.mark.parametrize(
    ("before", "now", "kept"),
    [
        ("sweep a.yaml", "sweep a.yaml --select setup=1_1 --rerun all", True),
        ("sweep a.yaml", "sweep a.yaml --limit=0:1", True),
        ("sweep a.yaml", "sweep a.yaml --rerun all", False),
        ("sweep a.yaml", "sweep a.yaml --rerun disturbed", True),
        ("sweep a.yaml", "sweep a.yaml --rerun=disturbed", True),
        ("sweep a.yaml --limit 0:1", "sweep a.yaml --limit 1:2", False),
    ],
)
def test_a_table_keeps_the_command_that_chose_all(
    before: str, now: str, kept: bool, tmp_path: Path
) -> None:
    states = done_before(tmp_path, 1)
    chosen, folder = states[1:2], tmp_path / "out" / "sweeps" / "mine"
    chosen[0].state, chosen[0].command = FINISHED, now
    runs = [{"label": s.job.label, "path": s.job.path, "skipped": None} for s in states]
    write_json(folder / "sweep.json", {"schema": SCHEMA, "command": before, "runs": runs})
    sweep_module._record(folder, chosen, Screen("which?", chosen))
    assert (read_json(folder / "sweep.json") or {})["command"] == (before if kept else now)

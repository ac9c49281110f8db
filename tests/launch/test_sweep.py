"""Sweeps with real processes: what is run, skipped, resumed, recorded, and what a person sees."""

from __future__ import annotations

import errno
import getpass
import io
import itertools
import json
import os
import re
import shutil
import signal
import socket
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

from harness.core.records import RunFolder, find_runs, read_json, read_rows, write_json
from harness.core.settings import UserError
from harness.launch import runner
from harness.launch import sweep as sweep_module
from harness.launch.runner import Runner, Running
from harness.launch.slurm.cluster import Submitted
from tests.support import sockets, warm_python, warm_sweeps
from tests.support.memory import CGROUP, limited_group
from tests.support.ranks import ranks
from tests.support.sweeps import ROOT, SMALL, outcomes, sweep, sweep_file, untimed_rows
from tests.support.sweeps import harness_sweep as main

TWO = f"script: vit\n{SMALL}\ngrid: {{setup: [1_1, 1_2]}}\nbaseline: {{setup: 1_1}}\n"


def run(out: Path, folder: RunFolder) -> str:
    return str(folder.path.relative_to(out))


@pytest.mark.process
def test_a_sweep_from_start_to_table_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out, scratch = sweep_file(tmp_path, TWO), tmp_path / "out", tmp_path / "t"
    scratch.mkdir()
    with sockets.watched() as seen:
        done = sweep(file, out, "--tiny", env={"TMPDIR": str(scratch)})
    # On a busy machine a sweep warns of that alone.
    said = [line for line in done.stderr.splitlines() if not line.startswith("warning: others use")]
    assert done.returncode == 0 and said == [], done.stderr
    assert {p.name for p in scratch.iterdir()} <= {"torchinductor_" + getpass.getuser()}
    assert seen.addresses == {"127.0.0.1"} and seen.looks > 5 and not seen.secrets
    assert list(outcomes(out).values()) == ["finished", "finished"]
    # Plain lines where there is no terminal, then the table.
    assert "[1/2] setup=1_1: started" in done.stdout and "\x1b" not in done.stdout
    assert "[2/2] setup=1_2: finished after" in done.stdout and "vs base" in done.stdout
    folder = out / "sweeps" / "mine-tiny"
    assert {"sweep.json", "table.md", "table.csv", "runs.csv"} <= {p.name for p in folder.iterdir()}
    for found in find_runs(out):
        launch = json.loads(found.environment.read_text())["launch"]
        assert launch["sweep"] == "mine-tiny" and launch["start"] == "warm"
        assert launch["packed"] is False
        variables = json.loads(found.environment.read_text())["variables"]
        assert variables["OMP_NUM_THREADS"] == "1"

    # The same command once more: nothing is run, and quickly.
    before = {run(out, f): f.epochs.read_bytes() for f in find_runs(out)}
    argv = [str(file), "--tiny", "--output_dir", str(out), "--isolation", "off"]
    monkeypatch.setattr(sweep_module, "_table", lambda *_, **__: None)  # seen above
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert "2 of 2 runs had been done before" in printed and "started" not in printed
    assert {run(out, f): f.epochs.read_bytes() for f in find_runs(out)} == before

    # A failure of before stays a result, and the next step is named.
    summary = find_runs(out)[0].summary
    as_it_was = summary.read_text()
    summary.write_text(json.dumps({**json.loads(as_it_was), "outcome": "diverged"}))
    said = "1 run failed: the same command with --rerun failed tries again\nnext: "
    monkeypatch.chdir(tmp_path)  # below which folders are named as they are typed
    command = "python -m harness report out/sweeps/mine-tiny"  # of this sweep, and of no other
    assert main(argv) == 1 and capsys.readouterr().out.endswith(f"{said}{command}\n")
    summary.write_text(as_it_was)

    # Measured again on demand, one of them; its old record is kept, and torchrun says the same.
    flags = ("--tiny", "--rerun", "all", "--select", "setup=1_2", "--cold")
    with sockets.watched() as seen:
        cold = sweep(file, out, *flags, env={"TMPDIR": str(scratch)})
    assert seen.addresses == {"127.0.0.1"} and not seen.secrets
    assert cold.returncode == 0, cold.stderr
    assert {p.name for p in scratch.iterdir()} <= {"torchinductor_" + getpass.getuser()}
    (aside,) = (out / "vit/1_2").glob("*.earlier-1")
    (fresh,) = [f for f in find_runs(out) if "1_2" in str(f.path)]
    assert untimed_rows(RunFolder(aside)) == untimed_rows(fresh)
    assert (read_json(fresh.environment) or {})["launch"]["start"] == "cold"

    # Another plan under the same name: the earlier one is kept.
    assert main([*argv, "--set", "setup=1_1"]) == 0
    assert "1 of 1 runs had been done before" in capsys.readouterr().out
    earlier = json.loads((folder / "sweep.earlier-1.json").read_text())
    assert len(earlier["runs"]) == 2
    assert len(json.loads((folder / "sweep.json").read_text())["runs"]) == 1


def test_the_command_in_the_plan_is_one_that_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = sweep_file(tmp_path, TWO), tmp_path / "out"
    folder = out / "sweeps" / "mine-tiny"
    does: str | type[Exception] = "timeout"

    def work(self: Runner) -> None:
        """Each run that is not known yet is started, and ends so."""
        for state in self.states:
            if not self.is_settled(state, self.options.rerun):
                if not isinstance(does, str):
                    raise does("--isolation error")
                state.command, state.state = self.command, does
                state.job.folder.write_settings({})
                write_json(state.job.folder.summary, {"outcome": does})

    monkeypatch.setattr(Runner, "work", work)
    monkeypatch.setattr(sweep_module, "_table", lambda *_, **__: None)

    def called(*flags: str) -> str:
        argv = [str(file), "--output_dir", str(out), "--tiny", "--isolation", "off", *flags]
        main(argv)
        return str((read_json(folder / "sweep.json") or {})["command"]).partition("off")[2].strip()

    assert called("--timeout", "1") == "--timeout 1"  # nothing has measured yet
    does = UserError
    assert called("--isolation", "error", "--rerun", "failed") == "--isolation error --rerun failed"
    does = "finished"
    assert called("--rerun", "failed", "--limit", "0:1") == "--rerun failed --limit 0:1"
    # Nothing is left to measure, or what is measured fails: the one that measured stays.
    assert called("--limit", "0:1", "--cold") == "--rerun failed --limit 0:1"
    does = "timeout"
    assert called("--rerun", "failed", "--timeout", "2") == "--rerun failed --limit 0:1"
    does = "finished"
    assert called("--rerun", "failed", "--timeout", "9h") == "--rerun failed --timeout 9h"
    # Jobs that wait on a cluster may yet measure.
    for run_folder in find_runs(out):
        run_folder.summary.unlink()
    does = "timeout"
    Submitted(folder).intend("mine.1", ["vit/1_1/a"], "another")
    assert called("--timeout", "3") == "--rerun failed --timeout 9h"
    # Another plan is another sweep; the earlier one is kept aside, and a line says so.
    said = "mine-tiny: the plan differs from the last one (now sweep.earlier-1.json), whose"
    assert said not in capsys.readouterr().out
    assert called("--set", "seed=1") == "--set seed=1"
    assert f"{said} table is replaced; its runs stay: " in capsys.readouterr().out
    assert (folder / "sweep.earlier-1.json").exists()


def test_the_same_wish_to_stop_twice_at_once_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that is closed hangs up on the shell's job, and again on its group."""
    worker: Any = SimpleNamespace(stops=0)
    with sweep_module._signals(worker) as received:
        for signum in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(signum)
        assert (worker.stops, received) == (2, [signal.SIGHUP, signal.SIGTERM])
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # a person who presses Ctrl-C twice
        assert worker.stops == 4
        monkeypatch.setattr(sweep_module, "TWICE_S", {})
        signal.raise_signal(signal.SIGHUP)
        assert worker.stops == 5


def test_what_goes_on_with_a_sweep_that_was_stopped() -> None:
    place: Any = SimpleNamespace(name="local", options=SimpleNamespace(rerun=None))

    def said(command: str = "sweep a.yaml") -> str:
        return sweep_module._how_to_resume(place, command)

    assert said() == "the same command continues"
    place.options.rerun = "all"
    assert "measures all again; --select or --limit choose" in said()
    assert said("sweep a.yaml --rerun disturbed") == "the same command measures these again"
    place.name = "slurm"
    assert "settles the jobs that are out, and measures the others" in said()


def test_packed_runs_are_repeated_one_at_a_time() -> None:
    assert "without --pack and with --rerun disturbed" in sweep_module._how_to_repeat(2, True)
    assert "--rerun disturbed --isolation error" in sweep_module._how_to_repeat(1, False)
    assert "1 run disturbed by other programs" in sweep_module._how_to_repeat(1, False)


def test_a_hypothesis_that_changes_after_its_runs_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = sweep_file(tmp_path, TWO), tmp_path / "out"
    plan, text = out / "sweeps" / "mine-tiny" / "sweep.json", file.read_text()
    measures = False

    def work(self: Runner) -> None:
        for state in self.states if measures else ():
            state.state = "finished"
            state.job.folder.write_settings({})
            write_json(state.job.folder.summary, {"outcome": "finished"})

    monkeypatch.setattr(Runner, "work", work)
    monkeypatch.setattr(sweep_module, "_table", lambda *_, **__: None)

    def called(hypothesis: str, bound: float = 1.5, *flags: str) -> Any:
        entry = f"{{of: {{setup: 1_2}}, measure: train_samples_per_s, at_least: {bound}}}"
        file.write_text(f"# Hypothesis: {hypothesis}\n{text}expect: [{entry}]\n")
        main([str(file), "--output_dir", str(out), "--tiny", "--isolation", "off", *flags])
        return (read_json(plan) or {})["changed_after"]

    assert called("more is faster.") is None
    measures = True
    assert called("less is faster.") is None  # no run had finished
    assert called("less is faster.") is None
    assert "changed after" not in capsys.readouterr().out
    assert called("all are alike.") == "2 of 2 runs" == called("all are alike.")
    said = capsys.readouterr().out
    assert said.count("mine-tiny: hypothesis changed after 2 of 2 runs had finished: ") == 1
    assert called("all are alike.", 1.2) == "2 of 2 runs"
    assert "mine-tiny: expect changed after 2 of 2" in capsys.readouterr().out
    called("all are alike.", 1.2, "--set", "setup=1_1")  # expect has no place in this plan
    assert "changed after" not in capsys.readouterr().out


@pytest.mark.parametrize("gone", [False, True])
def test_a_command_that_cannot_be_written_is_no_loss(
    gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk is full when all has been measured, or the plan was removed."""
    file, out = sweep_file(tmp_path, TWO), tmp_path / "out"
    plan = out / "sweeps" / "mine-tiny" / "sweep.json"
    argv = [str(file), "--output_dir", str(out), "--tiny", "--isolation", "off"]
    real, full = sweep_module.write_sweep, False

    def write(path: Path, content: Any) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, content)

    def work(self: Runner) -> None:
        nonlocal full
        for state in self.states:
            state.command, state.state = self.command, "finished"
            state.job.folder.write_settings({})
            write_json(state.job.folder.summary, {"outcome": "finished"})
        if "--cold" in self.command:
            full = not gone
            if gone:
                plan.unlink()

    monkeypatch.setattr(Runner, "work", work)
    monkeypatch.setattr(sweep_module, "write_sweep", write)
    monkeypatch.setattr(sweep_module, "_table", lambda *_, **__: None)
    assert main(argv) == 0
    before = read_json(plan)
    assert main([*argv, "--cold"]) == 0
    said = capsys.readouterr()
    line = f"warning: {plan} stays as it was: No space left on device"
    assert said.err == ("" if gone else f"{line}\n") and "warning" not in said.out
    assert read_json(plan) == (None if gone else before)


# What a script may print, and what its user has chosen to call things.
PRIVATE = ["/home/ada-l/data", str(Path.home() / "data"), f"{socket.gethostname()}:29500",
           "https://ada:hunter2@example.org", f"hf_{'a' * 20}", "my-secret-plan"]  # fmt: skip
# A vit.py that fails in as many ways as there are seeds; the real one does the rest.
PLANTED = f"""
import importlib.util, os, resource, signal, sys, time
spec = importlib.util.spec_from_file_location("real_vit", {str(ROOT / "vit.py")!r})
real = importlib.util.module_from_spec(spec)
spec.loader.exec_module(real)
load_data = real.load_data

def sleep(rank):
    if rank == 0:
        open("asleep", "w").close()
    time.sleep(1000)

def planted(run):
    from harness.core.settings import UserError
    from harness.train.session import barrier
    seed, rank = run.settings.seed, run.world.rank
    print("PROCESS", os.getpid(), "MARK" in os.environ, flush=True)
    print({" ".join(PRIVATE)!r}, "commit {"c0ffee12" * 5}", flush=True)
    os.environ["MARK"] = "left by a run"
    barrier()  # a rank that fails at once would end the other one before it has printed
    if os.path.exists("mended"):
        return load_data(run)
    if seed == 2 and rank == 1:
        raise MemoryError("planted")
    if seed == 3:
        size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + 2**25,) * 2)
    if seed == 4:
        sleep(rank)
    if seed == 5 and rank == 1:
        os._exit(3)
    if seed == 6 and rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    if seed == 7:
        raise UserError("--planted is wrong: leave it out")
    if seed == 8 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if seed == 9:
        os.write(2, b"terminate called after throwing std::bad_alloc\\n")
        os.abort()
    if seed == 11 and rank == 1:
        with open({str(CGROUP)!r} + "/cgroup.procs", "w") as group:
            group.write(str(os.getpid()))
        bytearray(2**28)
    if seed == 10:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sleep(rank)
    return load_data(run)

real.load_data = planted
main = real.main
"""
FAILING = """
script: vit
settings: {epochs: 1, train_size: 1200, test_size: 64, setup: 1_2, per_gpu_batch: 600,
           run_name: my-secret-plan}
seeds: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
"""


def put_clocks_forward(asleep: Path, by_s: float) -> None:
    """A run that sleeps is at once as old as if it had slept for that long."""
    too_long = Runner._too_long

    def sooner(worker: Runner, running: Running) -> bool:
        if asleep.exists():
            asleep.unlink()
            assert running.state.began_s is not None and not too_long(worker, running)
            running.state.began_s -= by_s
        return too_long(worker, running)

    Runner._too_long = sooner  # type: ignore[method-assign]


def failing_sweeps(folder: str, skipped: list[str]) -> dict[str, Any]:
    """Three calls, in a process that the test has for itself, and what they leave."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    del sys.modules["vit"]  # the launchers load that of the folder
    warm_python.fork_pythons()
    file, out = sweep_file(Path(folder), FAILING), Path(folder, "out")
    mended = Path(folder, "mended")
    put_clocks_forward(Path(folder, "asleep"), by_s=60)
    argv = [str(file), "--tiny", "--output_dir", str(out), "--isolation", "off", "--timeout", "60"]
    # A rank that does not obey is killed with its launcher: that run comes last.
    runner.GRACE_S = 10.0
    codes = [main([*argv, "--exclude", "seed=10", *skipped])]
    runs = (out / "sweeps" / "mine-tiny" / "runs.csv").read_text()
    first = {s["seed"]: (s["outcome"], s["reason"]) for s in seeds_of(out)}
    # The next call goes on with what was interrupted, and with what failed if asked to.
    mended.touch()
    sweep_module._table = lambda *_, **__: None
    chosen = [f"--select=seed={seed}" for seed in (1, 2, 7, 8)]
    with redirect_stdout(io.StringIO()) as printed:
        codes.append(main([*argv, "--rerun", "failed", *chosen]))
    mended.unlink()
    runner.GRACE_S = 1.0
    codes.append(main([*argv, "--select", "seed=10"]))
    return {"codes": codes, "runs": runs, "first": first, "printed": printed.getvalue()}


@pytest.mark.process
def test_failures_are_results_and_the_sweep_goes_on(tmp_path: Path) -> None:
    (tmp_path / "vit.py").write_text(PLANTED)
    out = tmp_path / "out"
    with limited_group() as limited:
        skipped = [] if limited else ["--exclude", "seed=11"]
        (left,) = ranks(1, failing_sweeps, str(tmp_path), skipped)
    assert left["codes"] == [1, 0, 1]
    runs, first, printed = left["runs"], left["first"], left["printed"]
    assert first[1] == ("finished", None)
    assert first[2] == ("oom", "planted (rank 1)")  # while loading: a smaller batch is no help
    assert first[3][0] == "oom" and "memory" in first[3][1]
    assert first[4] == ("timeout", "longer than --timeout 1m")
    assert first[5] == ("failed", "rank 1 ended with exit code 3")
    assert first[7][0] == "failed"
    assert first[7][1].endswith("--planted is wrong: leave it out")
    assert first[6] == ("failed", "rank 1 died of SIGSEGV")
    assert first[8] == ("interrupted", "rank 1 was killed (SIGKILL)")
    assert first[9][0] == "oom" and "bad_alloc" in first[9][1]
    if limited:
        killed = "rank 1 was killed by the kernel: the machine or a control group is out of memory"
        assert first[11] == ("oom", killed)
    # They stand in the table as rows, with their reasons.
    assert runs.count("oom") >= 3 and "planted (rank 1)" in runs
    assert "[4/4] seed=8: finished" in printed and printed.count("started") == 3
    last = {s["seed"]: (s["outcome"], s["reason"]) for s in seeds_of(out)}
    assert [last[seed][0] for seed in (2, 7, 8, 3)] == ["finished", "finished", "finished", "oom"]
    assert last[10] == first[4]
    # Each run had processes of its own, and an environment of its own.
    logs = [p.read_text() for p in (out / "sweeps/mine-tiny/logs").glob("vit_*")]
    marks = [re.findall(r"PROCESS (\d+) (\w+)", text) for text in logs]
    pids = [pid for run in marks for pid, _ in run]
    assert len(marks) == 26 + 2 * limited and all(marks) and len(set(pids)) == len(marks)
    assert {left for run in marks for _, left in run} == {"False"}
    assert all("commit " + "c0ffee12" * 5 in text for text in logs)
    for path in (p for p in out.rglob("*") if p.is_file()):
        found = [
            word for word in (*PRIVATE, "hunter2", "ada-l") if word.encode() in path.read_bytes()
        ]
        assert found == [], path
    for folder in find_runs(out):
        rows, broken = read_rows(folder.attempts)
        events = [row["event"] for row in rows]
        assert broken == 0 and events.count("end") >= max(1, events.count("start"))
        assert not folder.progress.exists()


def seeds_of(out: Path) -> list[dict[str, Any]]:
    """Settings and summary of every run."""
    found = [{**json.loads(f.settings.read_text()), **json.loads(f.summary.read_text())}
             for f in find_runs(out)]  # fmt: skip
    return found


@pytest.mark.process
@pytest.mark.slow
def test_fail_fast_stops_at_the_first_failure(tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text("text,label\na,1\n")
    data = f"[{tmp_path}/texts.csv, embedded:digits]"
    text = f"script: vit\n{SMALL}\nbert: {{}}\ngrid: {{dataset: {data}}}"
    file, out = sweep_file(tmp_path, text), tmp_path / "out"
    done = warm_sweeps.sweep(file, out, "--tiny", "--fail_fast")
    assert done.returncode == 1 and "stopped at the first failure" in done.stdout
    assert [s["outcome"] for s in seeds_of(out)] == ["failed"]
    assert "texts.csv has no column of images" in seeds_of(out)[0]["reason"]


@pytest.mark.process
def test_a_mistake_of_every_run_is_not_tried_in_every_run(tmp_path: Path) -> None:
    """Two values of each axis are refused, and so their other combinations are not tried. Where it
    is mended, the same command measures all. Of other files, a check before it finds that.
    """
    data, out = tmp_path / "texts", tmp_path / "out"
    texts = [f"{'red blue' if n % 2 else 'cat dog'} {n}" for n in range(60)]
    kinds = ["ab"[n % 2] for n in range(60)]
    Dataset.from_dict({"words": texts, "kind": kinds}).save_to_disk(data)
    grid = "grid: {per_gpu_batch: [4, 8], lr: [0.1, 0.01], seed: [1, 2]}"
    settings = f"settings: {{epochs: 1, text_column: said, dataset: {data}}}"
    file = sweep_file(tmp_path, f"script: bert\n{settings}\n{grid}\n")
    done = warm_sweeps.sweep(file, out, "--tiny")
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert done.stdout.count(": started") == 4
    skipped = re.findall(r"(\d runs? skipped): each would fail in the same way", done.stdout)
    assert skipped == ["1 run skipped", "3 runs skipped"]
    # The table says it once, and names each run.
    _, reason = done.stdout.split("\nfailed: bert.py: error: --text_column said: ")
    assert reason.partition("\n")[0].count("seed") == 4 and reason.count("\n  bert/1_1/") == 4
    # Those that were not tried say so, and why.
    assert re.findall(r"\nskipped: as \[\d/8\] .*: bert.py: error: --text_column said: .*"
                      r" \((\d runs?)\)", reason) == ["1 run", "3 runs"]  # fmt: skip
    assert "not begun" not in reason
    shutil.rmtree(data)
    Dataset.from_dict({"said": texts, "kind": kinds}).save_to_disk(data)
    again = warm_sweeps.sweep(file, out, "--tiny", "--rerun", "failed")
    assert again.returncode == 0, again.stdout
    assert sorted(outcomes(out).values()) == ["finished"] * 8
    assert "skipped" not in again.stdout


def test_runs_that_may_fail_for_another_reason_are_tried() -> None:
    """A value that was never refused, and a first seed: its split may lack a class."""
    label = {"strategy": "fsdp", "setup": "1_2", "seed": 3}
    seeds = [{**label, "seed": seed} for seed in (1, 2)]
    assert runner._is_covered(label, seeds) and not runner._is_covered(label, seeds[:1])
    assert not runner._is_covered(label, []) and not runner._is_covered({}, [])
    # A run that lacks the setting which others have, as in a list of runs.
    assert not runner._is_covered({"lr": 0.1}, [{"text_column": "said", "lr": 0.1}])
    assert not runner._is_covered({**label, "strategy": "ddp"}, seeds)
    # Each of its values was refused, but beside another value of the other setting.
    apart = [{**label, "setup": "1_1"}, {**label, "strategy": "ddp"}]
    assert not runner._is_covered(label, apart)
    assert runner._is_covered(label, [*apart, {**label, "setup": "1_1", "strategy": "ddp"}])
    # The baseline has neither of the flags of the others.
    plain = {"setup": "1_1"}
    assert not runner._is_covered(plain, [{**plain, "lora": 4}, {**plain, "balance": "measured"}])


def test_few_runs_of_a_grid_are_tried_where_all_fail_alike() -> None:
    axes = {"seed": [1, 2, 3], "per_gpu_batch": [4, 8, 16], "strategy": ["ddp", "fsdp"]}
    for order in itertools.permutations(axes):
        tried = list[dict[str, Any]]()
        for values in itertools.product(*(axes[name] for name in order)):
            label = dict(zip(order, values, strict=True))
            if not runner._is_covered(label, tried):
                tried.append(label)
        assert len(tried) == 5  # of 18: one, another strategy, two other batches, another seed

"""Sweeps over emulated nodes, and commands inside them: real namespaces, torchrun, gloo."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest

from harness.cli import main
from harness.core.process import GRACE_S
from harness.core.provenance import NODES_LINK
from harness.core.records import find_runs, read_json, read_rows
from harness.core.settings import UserError
from harness.launch.agents import Node
from harness.launch.netns import nodes as nodes_module
from harness.launch.netns.nodes import (
    Netns,
    gpus_of,
    refuse_apart,
    refuse_missing_script,
    torchrun_of_ours,
)
from harness.launch.places import Machine, Options
from harness.launch.plan import Elastic, Job
from tests.support import sockets, warm_sweeps
from tests.support.sweeps import (
    ROOT,
    STARTED,
    command,
    gone,
    jobs_of,
    launchers,
    start,
    sweep,
    sweep_file,
    untimed_rows,
    wait_for,
)
from tests.support.warm_python import Python

TWO = Machine((), (0, 1))
SMALL = "{epochs: 2, per_gpu_batch: 16, train_size: 256, test_size: 64}"


def job(folder: Path, text: str) -> Job:
    return jobs_of(folder, text, folder / "out")[0]


def test_the_commands_are_those_of_a_person(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    linked = job(tmp_path, "script: vit\nsettings: {setup: 2_1, link: region}")
    (command,) = Netns(Options(), TWO).plan(linked, "")
    assert command == (
        "OMP_NUM_THREADS=1 python -m harness nodes 2 --link=1ms/2000mbit -- "
        "torchrun --nnodes=2 --nproc_per_node=1 vit.py --setup 2_1_1ms-2000mbit "
        f"--output_dir {tmp_path}/out"
    )
    about, *elastic = Netns(Options(elastic=Elastic(3, 1)), TWO).plan(linked, "")
    assert about == "# on emulated nodes, node by node (link 1ms/2000mbit):"
    assert len(elastic) == 2  # a line a node, with what an elastic run is told
    for line in elastic:
        assert line.startswith("# ")  # outside of the nodes it would train without the link
        assert "torchrun --nnodes=1:2 --nproc_per_node=1 --max_restarts=3 " in line
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in line


def test_what_emulated_nodes_can_host(tmp_path: Path) -> None:
    wide = job(tmp_path, "script: vit\nsettings: {setup: 4_1, link: 2+2:between=20ms}")
    assert "needs 4 devices: this machine has 2 cores" in str(Netns(Options(), TWO).why_not(wide))
    assert Netns(Options(oversubscribe=True), TWO).why_not(wide) is None
    assert wide.settings.setup == "4_1_2-2-within-none-between-20ms"
    gpus = Netns(Options(), Machine(("0", "1", "2", "3"), tuple(range(8))))
    assert gpus.why_not(wide) is None
    assert gpus.visible(gpus.free(wide, set()) or ()) == (("0",), ("1",), ("2",), ("3",))
    assert gpus.variables(wide) == {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    for setup in ("1_2", "2_2"):
        near = job(tmp_path, f"script: vit\nsettings: {{setup: {setup}}}")
        assert gpus.variables(near) == {}
    with pytest.raises(UserError, match="--pack: runs side by side would share the links"):
        Netns(Options(pack=True), TWO)


def test_no_two_nodes_share_a_gpu_unless_they_are_told_to() -> None:
    assert gpus_of(2, (), False) == []
    assert gpus_of(2, ("0", "1", "2", "3", "4"), False) == [("0", "1"), ("2", "3")]
    with pytest.raises(UserError, match=r"2 nodes and 1 GPU\(s\): .*--oversubscribe lets nodes"):
        gpus_of(2, ("GPU-5a",), False)
    assert gpus_of(3, ("0", "1"), True) == [("0",), ("1",), ("0",)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none"], "N none: expected a whole number"),
        (["2", "--link", "10km"], "link 10km: expected none, 20ms"),
        (["2", "--lnk", "1ms"], "unknown flag --lnk: did you mean --link?"),
        (["500"], "500 emulated nodes: 1 to 200 are possible"),
        (
            ["2", "torchrun", "vit.py", "--tiny"],
            "the command stands after --: python -m harness nodes 2 -- torchrun vit.py --tiny",
        ),
        (["2", "vit.py"], "nodes 2 -- torchrun vit.py"),
        (
            ["2", "--link", "20ms", "--", "torchrun", "--nproc_per_node=1", "vti.py", "--tiny"],
            "error: vti.py: there is no such file: did you mean vit.py?",
        ),
        (["1", "--", "python", "no/such.py"], "error: no/such.py: there is no such file\n"),
        (
            ["2", "--", "python3", "vit.py", "--tiny"],
            "each node would train alone: did you mean -- torchrun vit.py --tiny?",
        ),
        (["2", "--"], "a command is expected after --"),
        (["4", "--link", "2+1:between=1ms"], "has 3 nodes in its places, and the set-up 4"),
    ],
)
def test_mistakes_in_a_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["nodes", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("harness nodes: error: ") and message in error
    assert error.count("\n") == 1


def test_a_torchrun_that_was_forgotten() -> None:
    with pytest.raises(
        UserError, match=r"vit\.py is not a command: did you mean -- torchrun vit\.py"
    ):
        torchrun_of_ours(["vit.py", "--tiny"])
    with pytest.raises(UserError, match="did you mean -- torchrun --nproc_per_node=1"):
        torchrun_of_ours(["--nproc_per_node=1", "vit.py"])
    assert torchrun_of_ours(["torchrun", "x.py"])[1:] == ["-m", "harness.train.torchrun", "x.py"]
    assert torchrun_of_ours(["sleep", "1"]) == ["sleep", "1"]
    with pytest.raises(
        UserError, match=r"alone: did you mean -- torchrun \./vit\.py --o hivemind\?"
    ):
        refuse_apart(["python3", "-u", "./vit.py", "--o", "hivemind"])
    for fine in (["--strategy", "hivemind"], ["--strategy=hivemind"]):
        refuse_apart(["python", "vit.py", *fine])
    refuse_apart(["python", "-m", "harness", "link"])


@pytest.mark.parametrize(
    "line",
    ["torchrun vit.py --tiny", "python -m none --file none.py", "bash none.py", "python -c 0 a.py",
     "torchrun --no-python none.py", "python -mnone none.py", "python . none.py", "sleep 1"],
)  # fmt: skip
def test_only_a_script_that_python_would_read_must_be_there(line: str) -> None:
    refuse_missing_script(line.split())


def test_other_programs_are_named_before_the_command_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[str] = []
    busy = {"cpu_busy_share": 0.9, "gpu_processes": 0}

    def use(machine: Machine) -> dict[str, Any]:
        order.append("looked")
        return busy

    def opened(count: int, link: Any) -> Any:
        order.append("opened")  # which is work of ours
        return nullcontext(SimpleNamespace(nodes=[]))

    def begun(*args: Any) -> int:
        assert capsys.readouterr().err == (
            "warning: others use 90% of the cores: this disturbs what is measured now\n"
        )
        order.append(str(json.loads(os.environ["HARNESS_LAUNCH"])["cpu_busy_share"]))
        return 0

    monkeypatch.setattr(nodes_module, "others", use)
    monkeypatch.setattr(nodes_module.EmulatedNodes, "open", opened)
    monkeypatch.setattr(nodes_module, "run_on", begun)
    for name in ("HARNESS_LAUNCH", NODES_LINK):
        monkeypatch.setenv(name, "")  # and removed after the test
    assert main(["nodes", "2", "--", "true"]) == 0
    assert order == ["looked", "opened", "0.9"]


COMMAND = [sys.executable, "-m", "harness", "nodes"]


def nodes(*words: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*COMMAND, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    STARTED.append(process)
    return process


def end_of(process: subprocess.Popen[str] | Python) -> tuple[str, str]:
    """What it prints until it ends, without what it says of a machine on which others are busy."""
    out, err = process.communicate(timeout=120)
    return out, re.sub(r"^warning: others use \d+% of the cores: .*\n", "", err)


def asleep(process: subprocess.Popen[str]) -> bool:
    """Whether the command has begun on both nodes."""
    family = psutil.Process(process.pid).children(recursive=True)
    return sum(command(p) == "sleep 61" for p in family) == 2


@pytest.mark.process
@pytest.mark.root
def test_a_command_on_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        'echo "$PET_NODE_RANK of $PET_NNODES at $PET_MASTER_ADDR"; ip -4 -br address show link0; '
        'echo "launch $HARNESS_LAUNCH, threads $OMP_NUM_THREADS"'
    )
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    process = nodes("3", "--link", "2ms/100mbit", "--", "sh", "-c", script)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    launch = json.loads(re.findall(r"launch (.*),", out)[0])  # of the records of what runs there
    assert out.count("threads 1\n") == 3  # torchrun alone would give one process every core
    asked = {"delay_ms": 2.0, "rate_mbit": 100.0, "jitter_ms": 0.0, "loss": 0.0}
    assert (launch["sweep"], launch["launcher"], launch["link"]) == (None, "netns", asked)
    assert launch["emulator"] == "relay" and launch["cpu_busy_share"] is not None
    for n in range(3):
        assert f"[node{n}] {n} of 3 at 10.117.0.1\n" in out
        assert re.search(rf"\[node{n}\] link0 .*10\.117\.0\.{n + 1}/", out)


@pytest.mark.process
@pytest.mark.root
def test_the_first_failure_ends_all_and_a_signal_ends_everything() -> None:
    process = nodes("2", "--", "sh", "-c", "test $PET_NODE_RANK = 0 && sleep 600; exit 7")
    process.communicate(timeout=120)
    assert process.returncode == 7
    codes = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
    codes[signal.SIGKILL] = -signal.SIGKILL
    for ended, code in codes.items():
        # In a session of its own, as torchrun starts its ranks: no signal for a group gets there.
        apart = ["sh", "-c", "setsid sleep 61 & wait"]
        alone = ended == signal.SIGKILL  # nobody is left to look for it
        process = nodes("2", "--", *(["sleep", "61"] if alone else apart))
        assert wait_for(partial(asleep, process))
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(ended)
        printed, said = end_of(process)
        assert printed == ""
        assert said == ("harness nodes: stopped by SIGINT\n" if ended == signal.SIGINT else "")
        assert process.returncode == code
        assert gone(family)


class Polled(subprocess.Popen[bytes]):
    """A process at whose second look, which must not be cut off, a signal for the command comes."""

    signals: ClassVar[list[int]] = []
    looks: ClassVar[list[str]] = []

    def poll(self) -> int | None:
        Polled.looks.append("begun")
        if len(Polled.looks) == 3:
            signal.raise_signal(Polled.signals.pop())
        Polled.looks.append("done")
        return super().poll()


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cuts_off_no_look_at_a_process(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception at the wrong moment would leave the lock of Popen taken: nothing would end."""
    monkeypatch.setattr(Polled, "signals", [number])
    monkeypatch.setattr(Polled, "looks", [])
    monkeypatch.setattr(subprocess, "Popen", Polled)
    before = signal.getsignal(number)
    with pytest.raises((KeyboardInterrupt, SystemExit)) as ended:
        nodes_module.run_on([Node(), Node("other")], ["sleep", "61"], [], {})
    assert ended.type is (KeyboardInterrupt if number == signal.SIGINT else SystemExit)
    assert getattr(ended.value, "code", 130) == 128 + number
    assert not Polled.signals and Polled.looks.count("begun") == Polled.looks.count("done") > 3
    assert signal.getsignal(number) is before


@pytest.mark.process
def test_a_second_ctrl_c_does_not_wait_for_records() -> None:
    process = subprocess.Popen(
        ["sh", "-c", "trap '' TERM; echo; sleep 61"], stdout=subprocess.PIPE, start_new_session=True
    )
    STARTED.append(process)
    assert process.stdout is not None and process.stdout.readline()  # it ignores the first one
    muted = threading.Event()
    began_s = time.monotonic()
    nodes_module._wait([process], [signal.SIGINT] * 2, muted)
    assert time.monotonic() - began_s < GRACE_S / 2
    assert muted.is_set() and process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.process
@pytest.mark.root
@pytest.mark.slow
def test_torchrun_on_nodes_ends_quietly(tmp_path: Path) -> None:
    """At its end by itself, and by Ctrl-C, which every rank records."""
    flags = ["vit.py", "--tiny", "--output_dir", str(tmp_path)]
    done = nodes("2", "--", "torchrun", "--nproc_per_node=1", *flags, "--epochs", "1")
    out, err = end_of(done)
    assert done.returncode == 0 and "Traceback" not in out and "exit barrier" not in out, out
    assert err == ""
    lasting = ["2", "--", "torchrun", "--nproc_per_node=1", *flags, "--epochs", "900"]
    stopped = Python([*COMMAND, *lasting])
    wait_for(lambda: list(tmp_path.glob("vit/*/*_e900_*/epochs.jsonl")))
    stopped.send_signal(signal.SIGINT)
    out, err = end_of(stopped)
    assert (stopped.returncode, err) == (130, "harness nodes: stopped by SIGINT\n")
    assert "Traceback" not in out, out
    (folder,) = [run for run in find_runs(tmp_path) if "_e900_" in run.path.name]
    assert (read_json(folder.summary) or {})["outcome"] == "interrupted"


@pytest.mark.process
@pytest.mark.root
def test_a_command_that_is_not_there_and_a_look_around() -> None:
    process = nodes("2", "--", "no_such_command")
    where = f"on the PATH, nor beside {sys.executable}"
    assert end_of(process)[1] == f"harness nodes: error: no_such_command: no such command {where}\n"
    assert process.returncode == 2
    process = nodes("2")
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("node0  10.117.0.1  nsenter ")
    inside = line.split("  ")[2].removesuffix("bash\n").split()
    shown = subprocess.run([*inside, "ip", "-br", "address"], capture_output=True, text=True)
    assert "10.117.0.1/24" in shown.stdout
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)


@pytest.mark.process
@pytest.mark.root
@pytest.mark.slow
def test_the_same_sweep_on_one_node_and_on_two(tmp_path: Path) -> None:
    file = sweep_file(
        tmp_path,
        f"script: vit\nsettings: {SMALL}\n"
        "runs: [{setup: 1_2}, {setup: 2_1, link: none}, {setup: 2_1, link: 10ms/100mbit}]",
    )
    with sockets.watched() as seen:
        done = warm_sweeps.sweep(file, tmp_path / "out", "--tiny", "--launcher", "netns")
    assert done.returncode == 0, done.stdout + done.stderr
    # The set-up of one node runs on the first emulated one.
    assert seen.addresses <= {"10.117.0.1", "10.117.0.2", "127.0.0.1"} and not seen.secrets
    assert "10.117.0.1" in seen.addresses
    runs = {f.path.parent.name: f for f in find_runs(tmp_path / "out")}
    assert sorted(runs) == ["1_2", "2_1", "2_1_10ms-100mbit"]
    one, *others = (untimed_rows(folder) for folder in runs.values())
    assert all(other == one for other in others)  # every digit of loss and accuracy
    facts = {name: read_json(folder.environment) or {} for name, folder in runs.items()}
    assert facts["1_2"]["link"] is None
    far = facts["2_1_10ms-100mbit"]
    asked = {"delay_ms": 10.0, "rate_mbit": 100.0, "jitter_ms": 0.0, "loss": 0.0}
    assert far["launch"]["link"] == far["link"]["asked"] == asked
    assert far["launch"]["launcher"] == "netns"
    assert far["launch"]["emulator"] == "relay"
    assert far["link"]["interface"] == "link0" and far["link"]["rtt_min_ms"] >= 20
    assert far["nodes"] == 2 and far["processes_per_node"] == 1
    assert "round trip ms" in (tmp_path / "out/sweeps/mine-tiny/table.md").read_text()


@pytest.mark.process
@pytest.mark.root
@pytest.mark.slow
def test_nothing_is_left_of_a_killed_runner(tmp_path: Path) -> None:
    file = sweep_file(
        tmp_path, "script: vit\nsettings: {epochs: 50}\nruns: [{setup: 2_1, link: 5ms}]"
    )
    out = tmp_path / "out"
    runner = start(file, out, "--tiny", "--launcher", "netns")
    assert wait_for(lambda: list(out.glob("vit/*/*/epochs.jsonl")))
    family = psutil.Process(runner.pid).children(recursive=True)
    inside = [p for p in family if os.stat(f"/proc/{p.pid}/ns/net").st_ino != own_network()]
    assert len(inside) >= 6  # two agents, two fork servers, two ranks
    runner.kill()
    runner.communicate()
    assert gone(family)
    done = warm_sweeps.sweep(file, out, "--tiny", "--launcher", "netns", "--set", "epochs=1")
    assert done.returncode == 0, done.stderr


def own_network() -> int:
    return os.stat("/proc/self/ns/net").st_ino


@pytest.mark.process
@pytest.mark.root
@pytest.mark.slow
def test_a_sweep_that_loses_a_node_and_takes_it_back(tmp_path: Path) -> None:
    text = "script: vit\nsettings: {epochs: 12, setup: 2_1, link: 2ms, save_steps: 5}"
    file, out = sweep_file(tmp_path, text), tmp_path / "out"
    flags = ("--tiny", "--launcher", "netns", "--max_restarts", "3", "--min_nodes", "1")
    runner = warm_sweeps.start(file, out, *flags)
    assert wait_for(lambda: list(out.glob("vit/*/*/epochs.jsonl")))
    max(launchers(runner.pid), key=lambda p: p.pid).kill()  # of the second node
    printed, err = runner.communicate(timeout=150)
    assert runner.returncode == 0, printed + err
    (folder,) = find_runs(out)
    summary = read_json(folder.summary) or {}
    rows, _ = read_rows(folder.attempts)
    starts = [row for row in rows if row["event"] == "start"]
    assert summary["outcome"] == "finished" and summary["restarts"] >= 1
    assert 0 < summary["goodput_share"] < 1 and summary["redone_updates"] >= 0
    assert starts[0]["processes"] == starts[-1]["processes"] == 2
    assert {row["effective_batch"] for row in starts} == {64}
    assert [row["epoch"] for row in untimed_rows(folder)] == list(range(1, 13))


@pytest.mark.process
@pytest.mark.root
@pytest.mark.slow
def test_torchrun_itself_meets_where_hosts_have_no_names(tmp_path: Path) -> None:
    text = f"script: vit\nsettings: {SMALL}\nruns: [{{setup: 2_1, link: 2ms}}]"
    flags = ("--tiny", "--launcher", "netns", "--cold", "--max_restarts", "2", "--timeout", "90")
    done = sweep(sweep_file(tmp_path, text), tmp_path / "out", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = find_runs(tmp_path / "out")
    assert (read_json(folder.environment) or {})["launch"]["start"] == "cold"

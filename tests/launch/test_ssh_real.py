"""The real ssh, against a real sshd in each of two network namespaces that share no disk."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.core.records import RunFolder, find_runs, read_json, read_rows
from tests.support import sockets, warm_sweeps
from tests.support.ssh_hosts import SSHD, Host, Machines, hosts
from tests.support.sweeps import (
    ROOT,
    gone,
    outcomes,
    start,
    summary,
    sweep,
    sweep_file,
    untimed_rows,
    wait_for,
)

pytestmark = [pytest.mark.process, pytest.mark.root, pytest.mark.slow]

OUT = Path("out")  # below the caller's folder here, below the checkout on a host
SHORT = "script: vit\nsettings: {epochs: 2, train_size: 256, test_size: 100}\n"
LONG = "script: vit\nsettings: {setup: 2_1, epochs: 300, train_size: 256, test_size: 100}\n"
RESUMING = "        context = run.resume("
# A line of the script, and what stands in its place; the run of seed 8 fails before it trains.
FAILS = 'if run.context.settings.seed == 8:\n            raise RuntimeError("planted early")'
LOADING = (RESUMING, f"        {FAILS}\n{RESUMING}")
PLANT = """
        from transformers import TrainerCallback

        class Planted(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                if state.global_step == 3:
                    raise RuntimeError("planted")

        trainer.add_callback(Planted())
        run.train(trainer)
"""


TRAINING = ("        run.train(trainer)\n", PLANT)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, calibrated: None) -> Iterator[Machines]:
    if SSHD is None:
        pytest.skip("needs sshd (openssh-server)")
    with hosts(tmp_path_factory.mktemp("hosts")) as found:
        yield found


@pytest.fixture
def here(tmp_path: Path) -> dict[str, Any]:
    """The caller: a folder of its own, from which the harness is called."""
    return {"cwd": tmp_path, "env": {"PYTHONPATH": str(ROOT)}}


def nothing_runs(two: Machines) -> bool:
    return all(gone(host.processes(), within_s=10) for host in (two.a, two.b))


def only_run(folder: Path) -> RunFolder:
    (found,) = find_runs(folder)
    return found


def test_a_sweep_over_two_hosts_is_that_of_one_machine(
    two: Machines, here: dict[str, Any], tmp_path: Path
) -> None:
    local = warm_sweeps.start(
        sweep_file(tmp_path, f"{SHORT}grid: {{setup: [1_1, 1_2]}}", "local"),
        tmp_path / "local",
        "--tiny",
    )
    file = sweep_file(tmp_path, f"{SHORT}grid: {{setup: [1_1, 2_1]}}")
    with sockets.watched(lambda: two.a.called("harness") + two.b.called("harness")) as seen:
        done = sweep(file, OUT, "--tiny", *two.flags, **here)
    assert done.returncode == 0, done.stderr
    assert seen.addresses <= {two.a.address, two.b.address, "127.0.0.1"} and not seen.secrets
    assert two.a.address in seen.addresses
    assert nothing_runs(two)
    local.communicate(timeout=120)
    rows = {r.path.parent.name: untimed_rows(r) for r in find_runs(tmp_path / "out")}
    expected = {r.path.parent.name: untimed_rows(r) for r in find_runs(tmp_path / "local")}
    assert rows["1_1"] == expected["1_1"] and rows["2_1"] == expected["1_2"]
    (run,) = [r for r in find_runs(tmp_path / "out") if "2_1" in str(r.path)]
    assert all(len(read_rows(run.rank(rank))[0]) == 2 for rank in (0, 1))
    environment = read_json(run.environment) or {}
    assert environment["nodes"] == 2 and environment["launch"]["launcher"] == "ssh"
    assert environment["variables"]["GLOO_SOCKET_IFNAME"] == "eth0"
    (log,) = (tmp_path / "out/sweeps/mine-tiny/logs").glob("vit_2_1*")
    assert "[node 0]   epoch 2/2" in log.read_text()
    # Each disk has its own part, and the checkpoint stays there.
    assert not list(run.path.glob("checkpoint-*"))
    there = two.a.checkout / run.path.relative_to(tmp_path)
    assert (there / "ranks/rank_0.jsonl").exists() and not (there / "ranks/rank_1.jsonl").exists()
    # A caller that was killed before the records came finds them.
    shutil.rmtree(tmp_path / "out")
    done = sweep(file, OUT, "--tiny", *two.flags, "--select", "setup=2_1", **here)
    assert done.returncode == 0 and untimed_rows(only_run(tmp_path / "out")) == rows["2_1"]
    (log,) = (tmp_path / "out/sweeps/mine-tiny/logs").glob("vit_2_1*")
    assert "already finished" in log.read_text()


def test_the_rank_on_the_other_host_is_the_reason(
    two: Machines, here: dict[str, Any], tmp_path: Path
) -> None:
    """While it loads and while it trains."""
    script = two.b.checkout / "vit.py"
    before = script.read_text()
    assert LOADING[0] in before and TRAINING[0] in before
    script.write_text(before.replace(*LOADING).replace(*TRAINING))
    file = sweep_file(tmp_path, f"{SHORT}grid: {{setup: [2_1]}}\nseeds: [8, 7]")
    try:
        done = sweep(file, OUT, "--tiny", *two.flags, **here)
    finally:
        script.write_text(before)
    assert "warning: b: its files differ from those here, at the same commit" in done.stderr
    early, late = (summary(tmp_path / "out", f"_s{seed}_") for seed in (8, 7))
    assert early["outcome"] == late["outcome"] == "failed", done.stdout
    assert early["reason"] == "RuntimeError: planted early (rank 1)"
    assert late["reason"] == "RuntimeError: planted (rank 1)"
    assert done.returncode == 1 and nothing_runs(two)


def saved(host: Host) -> bool:
    """Whether there is something to go on from."""
    return any(host.checkout.glob("out/vit/2_1/*/checkpoint-*/complete.json"))


def test_a_connection_that_is_lost_and_a_runner_that_is_killed(
    two: Machines, here: dict[str, Any], tmp_path: Path
) -> None:
    for host in (two.a, two.b):
        shutil.rmtree(host.checkout / "out", ignore_errors=True)
    file = sweep_file(tmp_path, LONG)
    runner = start(file, OUT, "--tiny", *two.flags, **here)
    wait_for(lambda: saved(two.a))
    for session in two.b.sessions():
        session.kill()
    runner.communicate(timeout=120)
    run = only_run(tmp_path / "out")
    ended = summary(tmp_path / "out")
    assert (ended["outcome"], ended["reason"]) == ("interrupted", "node 1 is lost")
    assert runner.returncode == 1 and nothing_runs(two)
    done_before = len(read_rows(run.epochs)[0])
    # The same command goes on, and this time nobody is left to record anything.
    runner = start(file, OUT, "--tiny", *two.flags, **here)
    there = RunFolder(two.a.checkout / run.path.relative_to(tmp_path))
    wait_for(lambda: len(read_rows(there.epochs)[0]) > done_before + 2)
    os.kill(runner.pid, signal.SIGKILL)
    runner.communicate(timeout=120)
    assert nothing_runs(two)
    starts = [row for row in read_rows(there.attempts)[0] if row["event"] == "start"]
    assert len(starts) == 2 and starts[1]["from_update"] > 0


def test_cold_over_ssh(two: Machines, here: dict[str, Any], tmp_path: Path) -> None:
    text = LONG.replace("epochs: 300", "epochs: 1") + "grid: {seed: [3]}\n"
    done = sweep(sweep_file(tmp_path, text), OUT, "--tiny", "--cold", *two.flags, **here)
    assert done.returncode == 0, done.stderr
    assert list(outcomes(tmp_path / "out").values()) == ["finished"] and nothing_runs(two)
    (log,) = (tmp_path / "out/sweeps/mine-tiny/logs").glob("vit_2_1*")
    assert "[node 0]   epoch 1/1" in log.read_text()


def refused(two: Machines, here: dict[str, Any], *flags: str) -> str:
    """The error of a sweep that does not start."""
    file = sweep_file(here["cwd"], SHORT)
    done = sweep(file, OUT, "--tiny", "--launcher", "ssh", *flags, **here)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert not (here["cwd"] / "out").exists() and nothing_runs(two)
    return done.stderr


def test_hosts_that_cannot_measure(two: Machines, here: dict[str, Any]) -> None:
    both = ["--hosts", "a,b", *two.way]
    text = refused(two, here, "--hosts", "a,b", "--checkout", "~/nowhere", *two.way[2:])
    assert "a: no folder ~/nowhere" in text and "b: no folder ~/nowhere" in text
    text = refused(two, here, *both, "--remote_python", "no/python")
    assert "a: no no/python in ~/harness: run make there" in text
    assert "a: --interface ib0: no such interface" in refused(
        two, here, *both, "--interface", "ib0"
    )
    assert "nohost: ssh: Could not resolve hostname" in refused(
        two, here, "--hosts", "a,nohost", *two.way
    )
    network = two.a.address.rpartition(".")[0]
    fast = [*two.way[:2], "--ssh", f"ssh -F {two.config} -o ConnectTimeout=1"]
    text = refused(two, here, "--hosts", f"a,{network}.77", *fast)
    assert f"{network}.77: ssh: connect to host" in text
    config = two.folder / "stranger"
    config.write_text(two.config.read_text().replace(f"{two.folder}/key", "/nowhere"))
    stranger = [*two.way[:2], "--ssh", f"ssh -F {config}"]
    text = refused(two, here, "--hosts", "a", *stranger)
    assert "a: root@" in text and "Permission denied" in text
    assert "it must let you in without a password (ssh-copy-id)" in text
    git = ["git", "-C", str(two.b.checkout), "-c", "user.name=x", "-c", "user.email=x@y"]
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "other"], check=True)
    try:
        text = refused(two, here, *both)
    finally:
        subprocess.run([*git, "reset", "-q", "--soft", "HEAD~1"], check=True)
    assert "b: ~/harness is at commit" in text and "check out the same" in text
    assert re.search(r"\ba: ", text) is None, text

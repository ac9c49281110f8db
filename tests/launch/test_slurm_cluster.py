"""Sweeps on a real SLURM of two nodes, as far as one machine can stand in for them."""

from __future__ import annotations

import base64
import json
import os
import pickle  # noqa: TID251 - as an intruder would
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from harness.core.records import find_runs, read_rows
from harness.train.measure.link import STARTS
from harness.train.run.warm import free_port
from tests.support import slurm_cluster, warm_sweeps
from tests.support.ranks import ROOT
from tests.support.sockets import Planted, answers_at, places
from tests.support.sweeps import start, summary, sweep, sweep_file, untimed_rows, wait_for

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.skipif(slurm_cluster.missing() is not None, reason=str(slurm_cluster.missing())),
]

SMALL = "settings: {epochs: 2, train_size: 256, test_size: 64}"
LONG = "script: vit\nsettings: {epochs: 4000, train_size: 256, test_size: 64}\n"


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    with slurm_cluster.cluster() as variables:
        yield variables


def on(cluster: Mapping[str, str], file: Path, out: Path, *flags: str) -> Any:
    """A sweep on the cluster, to its end."""
    return sweep(file, out, *slurm(*flags), env=cluster)


def slurm(*flags: str) -> list[str]:
    return ["--tiny", "--launcher", "slurm", "--gres", "none", *flags]


def ask(cluster: Mapping[str, str], *command: str) -> str:
    done = subprocess.run(
        command, env={**os.environ, **cluster}, capture_output=True, text=True, check=True
    )
    return done.stdout


def jobs_of(cluster: Mapping[str, str], name: str = "mine-tiny") -> list[str]:
    """The jobs that wait or run for sweeps of this name."""
    lines = ask(cluster, "squeue", "--noheader", "--array", "--format=%i %j").splitlines()
    return [line.split()[0] for line in lines if line.split()[1].startswith(name)]


def rows_of(out: Path, part: str = "") -> list[dict[str, Any]]:
    (found,) = [run for run in find_runs(out) if part in ("", run.path.parent.name)]
    return untimed_rows(found)


def ranks_of(out: Path, word: str) -> list[psutil.Process]:
    """Processes of a run that train into this folder, without those that have started them."""
    every = [(p, p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    return [p for p, words in every if {str(out), word, "-u"} <= set(words) and "-m" not in words]


def epochs(out: Path) -> int:
    return min((len(read_rows(run.epochs)[0]) for run in find_runs(out)), default=0)


def test_one_node_and_two_measure_what_they_measure_elsewhere(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    text = f"script: vit\n{SMALL}\ngrid: {{setup: [1_1, 1_2]}}\n"
    one, two = sweep_file(tmp_path, text), sweep_file(tmp_path, text.replace("1_2", "2_1"), "two")
    here, there = tmp_path / "here", tmp_path / "there"
    local = warm_sweeps.start(one, here, "--tiny")
    done = on(cluster, two, there)
    local.communicate(timeout=120)
    assert local.returncode == 0
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "[2/2] setup=2_1: finished after" in done.stdout
    assert rows_of(there, "1_1") == rows_of(here, "1_1")
    # Two nodes of one process are two processes.
    assert rows_of(there, "2_1") == rows_of(here, "1_2")
    for run in find_runs(there):
        found = json.loads(run.environment.read_text())
        assert found["launch"]["start"] == "slurm"
        assert found["variables"]["OMP_NUM_THREADS"] == "1"
    # Once more: it is done.
    again = on(cluster, two, there)
    assert again.returncode == 0 and "2 of 2 runs had been done before" in again.stdout
    assert "submitted" not in again.stdout


def test_a_new_runner_finds_the_jobs_of_a_killed_one(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    file, out = sweep_file(tmp_path, LONG + "seeds: [1, 2]"), tmp_path / "out"
    # Killed while it waits: the jobs stay, and the next runner finds them.
    runner = start(file, out, *slurm(), env=cluster)
    wait_for(lambda: len(jobs_of(cluster)) == 2)
    runner.kill()
    runner.communicate()
    array = jobs_of(cluster)
    assert {job.partition("_")[2] for job in array} == {"0", "1"}  # one array for both
    left = on(cluster, file, out, "--detach")
    assert left.returncode == 0 and "run on the cluster: 2" in left.stdout
    wait_for(lambda: epochs(out) >= 2 and len(find_runs(out)) == 2)
    assert jobs_of(cluster) == array
    # Cancelled by somebody else, one; shortly before the time limit, the other.
    ask(cluster, "scancel", array[0])
    ask(cluster, "scancel", "--signal=USR1", "--batch", array[1])
    wait_for(lambda: not jobs_of(cluster))
    done = on(cluster, file, out, "--detach", "--limit", "1:2")
    assert done.returncode == 1
    assert summary(out, "_s2_")["outcome"] == "timeout"
    assert "the job reached its time limit" in done.stdout
    # What was interrupted goes on, and is cancelled by a person who asks twice.
    runner = start(file, out, *slurm("--limit", "0:1"), env=cluster)
    wait_for(lambda: len(jobs_of(cluster)) == 1)
    assert jobs_of(cluster)[0].partition("_")[0] not in array[0]
    for _ in range(2):
        runner.terminate()
        time.sleep(0.3)
    printed, error = runner.communicate(timeout=120)
    assert runner.returncode == 143 and "interrupted after" in printed
    assert "the job was cancelled" in printed and "stopped, 1 run to go" in error
    assert summary(out, "_s1_")["outcome"] == "interrupted" and not jobs_of(cluster)


def test_a_run_that_does_not_fit_into_the_limit_goes_back_into_the_queue(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    text = LONG.replace("4000", "30") + "grid: {setup: [2_1]}"
    file, out = sweep_file(tmp_path, text), tmp_path / "out"
    runner = start(file, out, *slurm("--requeue", "1"), env=cluster)
    wait_for(lambda: epochs(out) >= 3)
    (job,) = jobs_of(cluster)
    ask(cluster, "scancel", "--signal=USR1", "--batch", job)
    printed, error = runner.communicate(timeout=120)
    assert runner.returncode == 0, printed + error
    (run,) = find_runs(out)
    rows, _ = read_rows(run.epochs)
    assert [row["epoch"] for row in rows] == [float(n) for n in range(1, 31)]
    assert {row["attempt"] for row in rows} == {1, 2}
    assert printed.count("submitted as job") == 1
    starts = [row for row in read_rows(run.attempts)[0] if row["event"] == "start"]
    # Saved where the signal came: nothing is done twice.
    assert [row["redone_updates"] for row in starts] == [None, 0]


def test_what_the_cluster_refuses_and_what_it_never_starts(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    file, out = sweep_file(tmp_path, f"script: vit\n{SMALL}\n"), tmp_path / "out"
    done = on(cluster, file, out, "--partition", "nowhere")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "sbatch refuses: invalid partition specified: nowhere" in done.stderr
    no_gpu = sweep(file, out, "--tiny", "--launcher", "slurm", env=cluster)
    assert no_gpu.returncode == 2 and "--gres none" in no_gpu.stderr
    # More than the partition allows: it waits for ever, and says why, in one of SLURM's two words.
    on(cluster, file, out, "--partition", "short", "--timeout", "30m", "--detach")
    (job,) = jobs_of(cluster)
    waits = on(cluster, file, out, "--detach")
    endless = r"waits: Partition(TimeLimit|Config), which does not end by itself: scancel"
    assert re.search(endless, waits.stdout), waits.stdout
    other = f"job {job} was submitted with other flags (--partition=short --timeout 30m) than"
    assert f"warning: {other} this call's (none)" in waits.stderr
    ask(cluster, "scancel", job)


def test_a_run_that_fails_says_why(cluster: dict[str, str], tmp_path: Path) -> None:
    """Told by the rank, or found in what torchrun prints of it."""
    text = LONG + "grid: {dataset: [nowhere.csv, embedded:digits]}"
    file, out = sweep_file(tmp_path, text), tmp_path / "out"
    runner = start(file, out, *slurm(), env=cluster)
    wait_for(lambda: any(read_rows(run.epochs)[0] for run in find_runs(out)), within_s=150)
    for rank in ranks_of(out, "embedded:digits"):
        rank.kill()
    printed, error = runner.communicate(timeout=120)
    assert runner.returncode == 1, error
    assert "failed after" in printed and "vit.py: error: --dataset nowhere.csv" in printed
    assert "interrupted after" in printed and "rank 0 was killed (SIGKILL)" in printed


def test_a_set_up_that_fails_is_the_reason(cluster: dict[str, str], tmp_path: Path) -> None:
    file, out = sweep_file(tmp_path, f"script: vit\n{SMALL}\n"), tmp_path / "out"
    setup = tmp_path / "setup.sh"
    setup.write_text("module() { echo 'error: no such module' >&2; return 4; }\nmodule load x\n")
    done = on(cluster, file, out, "--setup_script", str(setup))
    assert done.returncode == 1, done.stderr
    assert f"--setup_script {setup} ended with exit code 4" in done.stdout
    (found,) = find_runs(out)
    assert found.outcome() == "failed" and "--setup_script" in summary(out)["reason"]


def own_address() -> str | None:
    """One of this machine that is not loopback."""
    known = (a for of in psutil.net_if_addrs().values() for a in of if a.family == socket.AF_INET)
    return next((a.address for a in known if not a.address.startswith("127.")), None)


def test_nobody_is_let_in_and_what_a_stranger_writes_does_not_run(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    """On two nodes whose names mean an address of this machine, not its loopback, if it has one."""
    file, out = sweep_file(tmp_path, LONG + "grid: {setup: [2_1]}"), tmp_path / "out"
    address = own_address()
    nodes = slurm_cluster.cluster(address=address) if address else nullcontext(cluster)
    with nodes as variables:
        runner = start(file, out, *slurm(), env=variables)
        wait_for(lambda: epochs(out) >= 1)
        if address:
            only_reached_at(address, str(out), runner.pid)
        write_as_a_stranger(address or "127.0.0.1", out, tmp_path / "ran")
        for _ in range(2):
            runner.terminate()
            time.sleep(0.3)
        runner.communicate(timeout=120)
        wait_for(lambda: not jobs_of(variables))
    assert not (tmp_path / "ran").exists()


def only_reached_at(address: str, out: str, runner: int) -> None:
    found = [
        (p.info["name"], place)
        for p in psutil.process_iter(["name", "cmdline"])
        if out in " ".join(p.info["cmdline"] or []) and p.pid != runner
        if p.info["name"] != "srun"  # SLURM's own, which listens everywhere
        for place in places(p.pid)
    ]
    answers = [name for name, (_, port) in found if answers_at("127.0.0.2", port)]
    assert len(found) >= 3, found  # the rendezvous, and the collectives of both ranks
    assert {place[0] for _, place in found} <= {address, "127.0.0.1"} and not answers, found


def write_as_a_stranger(address: str, out: Path, ran: Path) -> None:
    """The port of a rendezvous stands on the command line of torchrun, its id in its own store."""
    commands = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    ports = {re.findall(r"--rdzv_endpoint=n1:(\d+) ", c)[0] for c in commands
             if str(out) in c and "--rdzv_endpoint=n1:" in c}  # fmt: skip
    (port,) = map(int, ports)
    store = TCPStore(address, port, is_master=False, wait_for_workers=False)
    (key,) = [k for k in store.list_keys() if re.fullmatch(r"torch\.rendezvous\.[0-9a-f]{32}", k)]
    store.set(key, base64.b64encode(pickle.dumps(Planted(ran))).decode())
    logs = out / "sweeps" / "mine-tiny" / "logs"
    read = "The rendezvous state is corrupt"
    wait_for(lambda: any(read in log.read_text() for log in logs.iterdir()))


def test_nothing_is_left_of_a_cluster() -> None:
    with slurm_cluster.cluster() as variables:
        folder = Path(variables["SLURM_CONF"]).parent
        ask(variables, "srun", "--nodes=2", "true")
        assert daemons(folder)
    assert not daemons(folder) and not folder.exists()


def daemons(folder: Path) -> list[int]:
    """Processes that know of this folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def link_as_printed(cluster: Mapping[str, str], port: int) -> subprocess.CompletedProcess[str]:
    line = STARTS.split("under SLURM:")[1].split("\n  emulated")[0].strip()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", line.replace("harness link", "harness link --mb 0.1 --seconds 2")],
        cwd=ROOT, env={**os.environ, **cluster, "PATH": path, "PET_MASTER_PORT": str(port)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_the_command_that_link_prints_measures_between_nodes(cluster: dict[str, str]) -> None:
    done = link_as_printed(cluster, free_port())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 node(s) of 1 process(es), over ")
    assert done.stdout.count("0 - 1") == 1


def test_where_the_port_is_taken_both_nodes_end(cluster: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.connect(server.getsockname())
        done = link_as_printed(cluster, client.getsockname()[1])
    assert done.returncode != 0 and "address already in use" in done.stderr

"""Machines over ssh: what is typed, what is planned, what hosts may say, what comes back."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
import tarfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from harness.core.provenance import ROOT
from harness.core.records import RunFolder, read_json, write_json
from harness.core.records.redact import redacted_command, without_home
from harness.core.settings import UserError
from harness.launch.choices import Host, Remote
from harness.launch.launcher import Exit
from harness.launch.outcome import Began, settle
from harness.launch.places import Options
from harness.launch.plan import Job
from harness.launch.ssh import place as ssh_module
from harness.launch.ssh.hosts import (
    TAR_FOLLOWS,
    Fetched,
    HostFacts,
    address_of,
    facts,
    merged,
    problems,
    put,
    received,
    send,
    warnings,
)
from harness.launch.ssh.place import Ssh
from harness.launch.sweep import PLACES
from tests.support.sweeps import jobs_of, sweep, sweep_file, sweep_options

A, B = Host("a"), Host("b", "me", 2222)
FACTS = HostFacts(
    commit="c" * 40, source="s", python="3.11.7", versions={"torch": "2.13.0"}, cores=4, gpus=(),
    interfaces={"lo": ("127.0.0.1",), "eth0": ("10.0.0.1", "fd00::1")}, address="10.0.0.1",
    unix=100.0, disturbed=None,
)  # fmt: skip
HERE = {"commit": "c" * 40, "source": "s"}


def remote(*flags: str) -> Remote:
    return sweep_options(["mine.yaml", "--launcher", "ssh", *flags]).remote


def jobs(folder: Path, text: str) -> list[Job]:
    return jobs_of(folder, f"script: vit\n{text}", tiny=True)


def place(by_host: dict[Host, HostFacts] | None = None, **more: Any) -> Ssh:
    there = Remote((A, B), "~/my harness", ".venv/bin/python", **more)
    return Ssh(Options(launcher="ssh", remote=there), by_host)


def test_hosts_as_they_are_typed(tmp_path: Path) -> None:
    options = remote("--hosts", "a,me@b:2222,[fd00::1]:22")
    assert options.hosts == (A, B, Host("fd00::1", None, 22))
    assert options.checkout == without_home(str(ROOT)) and options.python == ".venv/bin/python"
    assert [str(host) for host in options.hosts] == ["a", "b:2222", "fd00::1:22"]
    typed = remote("--hosts", "a", "--checkout", str(Path.home() / "h"))
    assert typed.folder == typed.checkout == "~/h"
    file = tmp_path / "hosts"
    file.write_text("# ours\n\na\nme@b:2222  # the far one\n")
    assert remote("--hosts-file", str(file)).hosts == (A, B)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "needs either --hosts a,b or --hosts_file FILE"),
        (["--hosts", "a", "--hosts_file", "f"], "needs either --hosts a,b or --hosts_file FILE"),
        (["--hosts", "a,-oProxyCommand=x"], "'-oProxyCommand=x': expected [user@]host[:port]"),
        (["--hosts", "a,b,a"], "host a is named twice"),
        (["--hosts", "a", "--ssh", 'ssh "x'], '--ssh ssh "x: no closing quotation'),
        (["--hosts", "a", "--ssh", " "], "--ssh: expected a command"),
        (["--hosts", "a", "--pack"], "--pack shares one machine"),
        (["--hosts_file", "nowhere"], "--hosts_file nowhere: No such file or directory"),
    ],
)
def test_hosts_that_cannot_be(flags: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        remote(*flags)
    assert message in str(error.value)


def test_a_hosts_file_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    for text, message in (("# a\n", "names no host"), ("a slots=4", "line 1: 'a slots=4'")):
        file.write_text(text)
        with pytest.raises(UserError, match=message):
            remote("--hosts_file", str(file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="no text"):
        remote("--hosts_file", str(file))


def test_flags_of_ssh_need_ssh() -> None:
    with pytest.raises(UserError, match="--interface needs --launcher ssh"):
        sweep_options(["mine.yaml", "--interface", "eth0"])
    assert PLACES["ssh"] is Ssh and not Ssh.here


def test_dry_run_prints_ssh_command_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (job,) = jobs(tmp_path, "settings: {setup: 2_2, lr: 0.001}")
    words = "vit.py --tiny --lr 0.001 --setup 2_2 --output_dir out"
    there = "cd ~/'my harness' && OMP_NUM_THREADS=1 .venv/bin/python -m harness.train.torchrun"
    rest = "--nnodes=2 --nproc_per_node=2 --node_rank={} --master_addr=a --master_port=29500"
    first, second = place().plan(job, "")
    assert shlex.split(first) == ["ssh", "-n", "a", f"{there} {rest.format(0)} {words}", "&"]
    command = f"{there} {rest.format(1)} {words}"
    assert shlex.split(second) == ["ssh", "-n", "-p", "2222", "me@b", command]
    named = place(master_addr="10.0.0.9", interface="ib0", ssh=("ssh", "-F", "my config"))
    first, _ = named.plan(job, "")
    assert first.startswith("ssh -F 'my config' -n a 'cd ")
    assert "GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0 " in first
    assert "--master_addr=10.0.0.9 " in first
    quoted, _ = place(master_addr="a;b").plan(job, "")
    assert "'--master_addr=a;b' " in shlex.split(quoted)[-2]
    there = Remote((A,), "~/h", "my venv/bin/python")
    (job,) = jobs(tmp_path, "settings: {setup: 1_1}")
    (line,) = Ssh(Options(launcher="ssh", remote=there)).plan(job, "")
    assert " 'my venv/bin/python' -m harness.train.torchrun " in shlex.split(line)[-1]


@pytest.mark.process
def test_a_dry_run_asks_no_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    file = sweep_file(tmp_path, "script: vit\ngrid: {setup: [1_1, 2_1, 3_1]}")
    flags = ["--tiny", "--dry_run", "--launcher", "ssh", "--hosts", "no-such-1,no-such-2"]
    done = sweep(file, tmp_path / "out", *flags, "--ssh", "/no/such/ssh")
    assert done.returncode == 0 and not done.stderr
    threads, *lines = done.stdout.splitlines()
    assert threads == (
        "# OMP_NUM_THREADS=1 is for hosts without GPUs: with GPUs the sweep takes a host's cores "
        "per GPU"
    )
    assert [line.split()[0] for line in lines[:3]] == ["/no/such/ssh"] * 3
    assert lines[3] == "# skipped: needs 3 nodes: --hosts names 2"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    chosen = Ssh(Options(launcher="ssh", remote=Remote((A,)))).dry_run([], tmp_path)
    assert chosen == ["# OMP_NUM_THREADS=3 is this shell's, and the sweep takes it, too"]


def test_what_hosts_cannot_do(tmp_path: Path) -> None:
    gpus = replace(FACTS, gpus=("0", "1"))

    def reason(text: str, of_b: HostFacts, **options: Any) -> str | None:
        there = place({A: FACTS if not of_b.gpus else gpus, B: of_b})
        there.options = replace(there.options, **options)
        return there.why_not(jobs(tmp_path, text)[0])

    two = replace(FACTS, cores=2)
    assert reason("settings: {setup: 2_2}", two) is None
    assert reason("settings: {setup: 2_4}", two) == "needs 4 devices a node: b:2222 has 2 cores"
    assert reason("settings: {setup: 2_4}", two, oversubscribe=True) is None
    assert reason("settings: {setup: 2_4}", gpus) == "needs 4 devices a node: a has 2 GPU(s)"
    on_cores = "settings: {setup: 2_4, use_cpu: true}"
    assert reason(on_cores, gpus) == reason(on_cores, FACTS)  # its GPUs do not matter
    assert "a: precision fp16 needs a GPU" in str(reason("settings: {precision: fp16}", FACTS))
    assert "the links of real hosts" in str(
        reason("settings: {setup: 2_1}\ngrid: {link: [1ms]}", FACTS)
    )
    # Fewest threads of all hosts; the first GPUs of each.
    there = place({A: gpus, B: replace(gpus, cores=8)})
    assert there.environment["OMP_NUM_THREADS"] in ("1", "2")  # the tests themselves set 1
    devices = there.free(jobs(tmp_path, "settings: {setup: 2_1}")[0], set())
    assert devices == (("0",), ("0",)) and there.visible(devices) == devices
    assert place({A: FACTS, B: FACTS}).visible(((), ())) == ()


def test_what_hosts_must_agree_on() -> None:
    def differences(b: HostFacts, **more: Any) -> list[str]:
        return problems({"a": FACTS, "b": b}, Remote((A, B), "~/h", "", **more), HERE)

    assert differences(FACTS) == []
    assert differences(replace(FACTS, commit="d" * 40)) == [
        f"b: ~/h is at commit {'d' * 12}, here it is {'c' * 12}: check out the same"
    ]
    assert (
        "b: the code in ~/h differs from that here"
        in differences(replace(FACTS, commit=None, source="t"))[0]
    )
    assert differences(replace(FACTS, commit=None)) == []  # a copy, and the same
    assert differences(replace(FACTS, versions={"torch": "2.12.0"})) == [
        "torch is 2.13.0 on a, 2.12.0 on b: install the same"
    ]
    assert differences(replace(FACTS, python="3.12.1"))[0].startswith(
        "Python is 3.11.7 on a, 3.12.1 on b"
    )
    assert differences(replace(FACTS, gpus=("0",))) == ["a: no GPU, while other hosts have GPUs"]
    other = replace(FACTS, interfaces={"lo": ("127.0.0.1",), "ib0": ()})
    assert differences(other, interface="eth0") == [
        "b: --interface eth0: no such interface with an address, there are lo"
    ]
    local = replace(FACTS, address="127.0.0.1")
    both = problems({"a": local, "b": local}, Remote((A, B)), HERE)
    assert len(both) == 1 and "choose one with --master_addr or --interface" in both[0]
    assert problems({"a": local}, Remote((A,)), HERE) == []


def test_what_is_worth_a_warning() -> None:
    clocks = {"a": 0.1, "b": -7.0}
    assert warnings({"a": FACTS, "b": replace(FACTS, source="t")}, clocks, HERE) == [
        "b: its files differ from those here, at the same commit",
        "b: its clock is 7 s behind: the rank that is reported as the first to fail may be wrong",
    ]


def test_addresses_and_interfaces_of_nodes() -> None:
    by_host = {A: FACTS, B: replace(FACTS, address="fd00::1")}
    first, second = place(by_host).nodes()
    assert (first.address, second.address) == ("10.0.0.1", "fd00::1") and first.remote
    assert first.environment == {"GLOO_SOCKET_IFNAME": "eth0"} and first.parent is None
    assert place(by_host, master_addr="1.2.3.4").nodes()[0].address == "1.2.3.4"
    assert address_of(FACTS, Remote(interface="lo")) == "127.0.0.1"


@pytest.mark.process
def test_a_host_tells_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.9 50000 127.0.0.1 22")
    line = subprocess.run(
        [sys.executable, "-m", "harness.launch.ssh.hosts"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    host = HostFacts(**json.loads(line))
    assert host.address == "127.0.0.1" and host.interface == "lo" and host.cores >= 1
    assert abs(host.unix - time.time()) < 60
    mine = facts()
    assert (host.commit, host.source, host.versions) == (mine.commit, mine.source, mine.versions)


# What ssh and the shell there end with, and what is made of it.
ANSWERS = {
    "refused": (255, "ssh: connect to host a port 22: Connection refused", "is sshd running"),
    "key": (255, "banner\nme@a: Permission denied (publickey).", "without a password"),
    "known": (255, "@@@\nHost key verification failed.", "connect once by hand"),
    "other": (255, "kex_exchange_identification: read", "a: kex_exchange_identification: read"),
    "folder": (91, "sh: cd: no such file", "a: no folder ~/my harness: clone this project"),
    "python": (127, "env: x", "a: no .venv/bin/python in ~/my harness: run make there"),
    "module": (1, "No module named psutil", "does not run there: No module named psutil"),
    "silent": (1, "", "does not run there: exit code 1"),
}


@pytest.mark.process
@pytest.mark.parametrize("name", ANSWERS)
def test_a_host_that_cannot_be_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, stderr, expected = ANSWERS[name]
    done = subprocess.CompletedProcess([], code, b"", stderr.encode())
    monkeypatch.setattr(ssh_module.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(UserError) as error:
        place().open([])
    first, second = str(error.value).split("; b:2222: ")  # one line, every host in it
    assert first.startswith("a: ") and expected in first and first == f"a: {second}"


NOISY = b"Welcome back!\n"  # as a .bashrc prints it, also where nobody reads it


def answers_of(output: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 0, output, b"")
    monkeypatch.setattr(ssh_module.subprocess, "run", lambda *_, **__: done)


def test_lines_that_the_shell_of_a_host_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = place()
    line = json.dumps(asdict(replace(FACTS, unix=time.time()))).encode() + b"\n"
    for output in (NOISY + line, line + NOISY, NOISY + b"[1]\n" + line):
        answers_of(output, monkeypatch)
        facts = there._ask(A)
        assert isinstance(facts, HostFacts) and facts.commit == FACTS.commit
    answers_of(NOISY, monkeypatch)
    assert there._ask(A) == "a: reports no facts, which are a JSON object on a line of its own"
    answers_of(line.replace(b'"cores"', b'"processors"'), monkeypatch)
    assert "is of another version: check out the same" in str(there._ask(A))
    answers_of(NOISY, monkeypatch)
    with pytest.raises(UserError, match=r"a: reports no facts.*; b:2222: reports no facts"):
        there.open([])
    (job,) = jobs(tmp_path, "settings: {setup: 1_1}")
    write_json(tmp_path / "summary.json", {"outcome": "finished"})
    pipe = io.BytesIO()
    send(tmp_path, pipe)
    answers_of(NOISY + TAR_FOLLOWS + pipe.getvalue(), monkeypatch)
    assert "summary.json" in there._fetch(A, job)
    answers_of(NOISY, monkeypatch)
    assert there._fetch(A, job) == "a: sends no records"


@pytest.mark.process
def test_ssh_that_is_not_there_or_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="a: /no/such/ssh: No such file or directory"):
        place(ssh=("/no/such/ssh",)).open([])
    monkeypatch.setattr(ssh_module, "ANSWER_S", 0.2)
    with pytest.raises(UserError, match="a: has not answered for 0 s"):
        place(ssh=("sh", "-c", "exec sleep 5", "ssh")).open([])


def test_others_at_work_there(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    busy = replace(FACTS, disturbed="others use 90% of the cores", unix=time.time())
    monkeypatch.setattr(Ssh, "_ask", lambda self, host: self.clocks.update({host: 0.0}) or busy)
    monkeypatch.setattr(ssh_module, "commit", lambda: {"commit": busy.commit})
    monkeypatch.setattr(ssh_module, "source_checksum", lambda: busy.source)
    there = place()
    there.open([])
    assert "warning: b:2222: others use 90% of the cores" in capsys.readouterr().err
    there.options.isolation = "error"
    with pytest.raises(UserError, match="a: others use 90% of the cores: wait"):
        there.open([])


def row(event: str, unix: float) -> bytes:
    return json.dumps({"event": event, "unix": unix}).encode() + b"\n"


def sent(unix: float = 50.0, **files: bytes) -> dict[str, Fetched]:
    return {name.replace("__", "/") + ".json": Fetched(c, unix) for name, c in files.items()}


def test_a_record_goes_through_the_pipe_without_checkpoints(tmp_path: Path) -> None:
    write_json(tmp_path / "summary.json", {"outcome": "finished"})
    for name in ("ranks/rank_0.jsonl", "checkpoint-8/model.bin", ".summary.json.17", "a/b/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    pipe = io.BytesIO()
    send(tmp_path, pipe)
    files = received(pipe.getvalue())
    assert sorted(files) == ["a/b/c.txt", "ranks/rank_0.jsonl", "summary.json"]
    assert files["a/b/c.txt"].content == b"a/b/c.txt"
    pipe = io.BytesIO()
    send(tmp_path / "nowhere", pipe)
    assert received(pipe.getvalue()) == {}


def test_nothing_is_taken_that_would_lie_outside() -> None:
    pipe = io.BytesIO()
    with tarfile.open(fileobj=pipe, mode="w") as tar:
        for name in ("../out", "/etc/out", "a/../../out", "fine"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    assert list(received(pipe.getvalue())) == ["fine"]


def test_of_each_node_what_its_ranks_wrote() -> None:
    first = sent(summary=b"0", ranks__rank_0=b"0", ranks__rank_3=b"stale", ranks__node=b"0")
    second = sent(summary=b"stale", ranks__rank_0=b"stale", ranks__rank_3=b"1", ranks__node=b"1")
    # The number of a file with readings is the node's.
    first |= sent(telemetry__node_0=b"0", telemetry__node_1=b"stale")
    second |= sent(telemetry__node_1=b"1")
    whole = {name: s.content for name, s in merged({0: first, 1: second}, processes=2).items()}
    assert whole == {
        "summary.json": b"0", "ranks/rank_0.json": b"0", "ranks/rank_3.json": b"1",
        "ranks/node.json": b"0", "telemetry/node_0.json": b"0", "telemetry/node_1.json": b"1",
    }  # fmt: skip


def attempt(*rows: bytes) -> dict[str, Fetched]:
    return {"attempts.jsonl": Fetched(b"".join(rows), 50.0)}


def test_a_record_comes_from_a_host_whose_clock_is_behind(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    put(attempt(row("start", 10), row("end", 100)), folder, 0.0)  # its end was written here
    finished = attempt(row("start", 10), row("start", 20), row("end", 60)) | sent(summary=b"{}")
    put(finished, folder, clock_s=0.0)
    assert not folder.summary.exists()
    put(finished, folder, clock_s=-90.0)
    assert folder.summary.exists()


def test_a_record_comes_and_a_newer_one_stays(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    put({}, folder, 0.0)
    assert not folder.path.exists()
    put(attempt(row("start", 10)) | sent(summary=b"{}", ranks__rank_0=b"x"), folder, clock_s=20.0)
    assert folder.summary.stat().st_mtime == 30.0  # by the clock of here
    # It goes on there, without an outcome yet: that of the attempt before is none.
    put(attempt(row("start", 10), row("start", 12)), folder, 0.0)
    assert not folder.summary.exists() and len(folder.attempts.read_text().splitlines()) == 2
    # Noted here meanwhile: what there is older, but why a rank failed is news.
    folder.attempts.write_bytes(folder.attempts.read_bytes() + row("end", 99))
    newer = folder.attempts.read_bytes()
    put(attempt(row("start", 10)) | sent(summary=b"{}", ranks__failure_1=b"f"), folder, 0.0)
    assert folder.attempts.read_bytes() == newer and not folder.summary.exists()
    assert (folder.path / "ranks" / "failure_1.json").read_bytes() == b"f"


def test_rows_that_lack_what_they_must_have_stop_no_record(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    put(attempt(b'{"attempt": 1}\n', row("start", 10)), folder, 0.0)
    put(attempt(b'{"event": "start"}\n', row("end", 20)) | sent(summary=b"{}"), folder, 0.0)
    assert folder.summary.read_bytes() == b"{}"


def test_another_run_of_the_same_settings_is_set_aside(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    put(attempt(row("start", 10)) | sent(old=b""), folder, 0.0)
    put(attempt(row("start", 11), b"half a li") | sent(new=b""), folder, 0.0)
    assert not (folder.path / "old.json").exists() and (folder.path / "new.json").exists()
    assert (tmp_path / "run.earlier-1" / "old.json").exists()


def test_the_rank_that_failed_wins_over_the_one_that_missed_it(tmp_path: Path) -> None:
    (job,) = jobs(tmp_path, "settings: {setup: 2_1}\ngrid: {seed: [1]}")
    job = replace(job, settings=replace(job.settings, output_dir=str(tmp_path)))
    now = time.time()

    def ended(summary: dict[str, Any], failures: dict[int, str]) -> dict[str, Any]:
        write_json(job.folder.summary, summary)
        for rank, reason in failures.items():
            write_json(
                job.folder.failure(rank),
                {"rank": rank, "outcome": "oom", "reason": reason, "unix": now - rank},
            )
        settle(job, Exit(1), Began(now - 5), tmp_path / "log", None)
        return read_json(job.folder.summary) or {}

    follows = {"outcome": "failed", "reason": "RuntimeError: Connection reset by peer [10.0.0.1]:1"}
    assert ended(follows, {})["outcome"] == "failed"
    assert ended(follows, {1: "Connection closed by peer"})["outcome"] == "failed"
    assert ended({"outcome": "failed", "reason": "its own"}, {1: "boom"})["reason"] == "its own"
    for summary in (follows, {"outcome": "interrupted", "reason": "SIGTERM"}):
        result = ended(summary, {1: "boom"})
        assert result["outcome"] == "oom"
        assert result["reason"].startswith("boom (rank 1); to try: --per_gpu_batch ")


def test_no_host_stands_in_a_published_command() -> None:
    shown = redacted_command(
        ["sweep", "--hosts", "me@a", "--ssh=ssh -i k", "--master_addr", "1.2.3.4"]
    )
    assert shown == "sweep --hosts '***' '--ssh=***' --master_addr '***'"
    cluster = ["sweep", "--account", "prj_smith", "--sbatch", "mail-user=jane@uni.edu"]
    cluster += ["--sbatch=mail-user=jane@uni.edu", "--sbatch", "mem=1G"]
    assert redacted_command(cluster) == (
        "sweep --account '***' --sbatch 'mail-user=***' '--sbatch=mail-user=***' --sbatch mem=1G"
    )

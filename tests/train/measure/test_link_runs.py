"""Links measured for real: with a run, and by the verb, between torchrun's own agents."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.core.records import RunFolder, find_runs, read_json
from harness.train.run.warm import free_port
from tests.support.ranks import ROOT, ran, script
from tests.support.sweeps import untimed_rows
from tests.support.warm_python import Python

SMALL = ["--tiny", "--train_size", "128", "--test_size", "32", "--epochs", "1", "--b", "16"]
LINK = {"delay_ms": 50, "rate_mbit": 10}  # far from what this machine carries, however busy


def agents(
    *argv: str, env: dict[str, str] | None = None, within: tuple[str, ...] = ("", ""),
    address: str = "127.0.0.1",
) -> list[subprocess.CompletedProcess[str]]:  # fmt: skip
    """torchrun as a person types it on each of two nodes, each in a network namespace or none,
    where it is forked from a process that has loaded everything.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    to = [f"--master_addr={address}", f"--master_port={free_port()}"]
    started: list[subprocess.Popen[str] | Python] = []
    for rank, name in enumerate(within):
        place = ["ip", "netns", "exec", name] if name else []
        command = [*place, *torchrun, *to, f"--node_rank={rank}", *argv]
        variables = {**os.environ, **(env or {})}
        started.append(
            subprocess.Popen(
                command, cwd=ROOT, env=variables, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            if name
            else Python(command, variables)
        )  # fmt: skip
    try:
        message = [process.communicate(timeout=150) for process in started]
    finally:
        for process in started:
            process.kill()
    done = [
        subprocess.CompletedProcess(process.args, process.wait(), *texts)
        for process, texts in zip(started, message, strict=True)
    ]
    for one in done:
        assert one.returncode == 0, one.stderr
    return done


def record(out: Path) -> tuple[RunFolder, Any]:
    (folder,) = find_runs(out)
    return folder, (read_json(folder.environment) or {})["link"]


@pytest.mark.process
@pytest.mark.slow
def test_a_run_on_two_nodes_measures_its_link_and_trains_as_on_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requested = {"HARNESS_LAUNCH": json.dumps({"link": LINK})}
    first, second = agents("bert.py", *SMALL, "--o", str(tmp_path / "two"), env=requested)
    assert script("bert", *SMALL, "--o", str(tmp_path / "one"), count=2).code == 0
    (two, result), (one, none) = record(tmp_path / "two"), record(tmp_path / "one")
    assert untimed_rows(two) == untimed_rows(one)  # every digit of the loss
    assert none is None
    assert result["asked"] == LINK
    assert [row["nodes"] for row in result["pairs"]] == [[0, 1]]
    assert 0 < result["rtt_min_ms"] <= result["rtt_median_ms"] < 20
    assert result["bandwidth_mbit"] > 200  # of this machine's memory
    observed = (read_json(two.environment) or {})["observed"]
    assert result["gradient_bytes"] == observed["parameter_bytes"] == result["allreduce_bytes"]
    assert result["allreduce_busbw_mbit"] == result["allreduce_algbw_mbit"] > 10
    assert result["took_s"] < 10
    # The link that was asked for is not there: said once, in the record, and in the table.
    warning = result["warning"]
    assert " ms, not 100 and it carries " in warning and warning.endswith(" Mbit/s, not 10")
    assert first.stderr.count(warning) == 1 and warning not in second.stderr
    assert main(["table", str(tmp_path / "two")]) == 0
    said = capsys.readouterr()
    assert f"warning: {two.path}: {warning}\n" in said.err and "warning" not in said.out


# ---- the verb ----


def verb(*argv: str) -> int:
    return main(["link", *argv])


@pytest.mark.process
def test_the_verb_shows_every_pair_and_every_size() -> None:
    requested = {"LOCAL_WORLD_SIZE": "1", "HARNESS_LAUNCH": json.dumps({"link": LINK})}
    done = ran(2, verb, "--mb", "1,0.25", env=requested)
    assert done.code == 0, done.err
    lines = [line.split() for line in done.out.splitlines()]
    assert lines[0][:6] == ["2", "node(s)", "of", "1", "process(es),", "over"]
    (pair,) = (words for words in lines if words[:3] == ["0", "-", "1"])
    assert len(pair) == 7 and all(float(word.replace(",", "")) > 0 for word in pair[3:])
    sizes = [words[:2] for words in lines if len(words) == 5 and words[0] in ("0.25", "1")]
    assert sizes == [["0.25", "0.25"], ["1", "1"]]
    assert "round trip: of 32 bytes" in done.out
    assert done.err.count("warning: the link is not the one that was asked for") == 1
    assert "no time" not in done.err


@pytest.mark.process
def test_the_verb_says_what_it_had_no_time_for() -> None:
    done = ran(2, verb, "--mb", "1,25", "--seconds", "1e-6", "--json")
    assert done.code == 0, done.err
    assert [row["bytes"] for row in json.loads(done.out)["allreduce"]] == [None, None]
    line = "no time in 1e-06 s for an all-reduce of 1, 25 MB: give more with --seconds"
    assert done.err.count(line) == 1


@pytest.mark.process
def test_the_verb_on_one_node_shows_no_pair() -> None:
    done = ran(2, verb, "--mb", "0.25", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["pairs"] == [] and result["rtt_min_ms"] is None
    (row,) = result["allreduce"]
    assert row["bytes"] == 250_000 and row["busbw_mbit"] == row["algbw_mbit"] > 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--mb", "0"], "--mb 0: expected MB"),
        (["--mb", "1,x"], "--mb 1,x: expected MB"),
        (["--mb", "4001"], "expected MB, 4000 at most"),
        (["--seconds", "0"], "--seconds 0: must be above 0"),
        (["--md", "1"], "unknown flag --md: there are --help, --json, --mb"),
    ],
)
def test_a_mistake_is_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verb(*argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and len(captured.err.splitlines()) == 1


def starts(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The commands that the verb alone prints, by where they are typed."""
    assert verb() == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    _, *lines = captured.err.splitlines()
    return {where.strip(): command.strip() for where, command in (x.split(":", 1) for x in lines)}


@pytest.mark.process
def test_alone_it_prints_commands_that_start_it_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands = starts(capsys)
    typed = [commands["here"], commands["on another"]]
    assert [f"--node_rank={n} " in command for n, command in enumerate(typed)] == [True, True]
    bin_first = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    port = {"PET_MASTER_PORT": str(free_port())}  # that of the command may be in use here
    ends = [
        subprocess.Popen(
            f"{command} --mb 0.1 --seconds 2", shell=True, cwd=ROOT, text=True,
            env={**os.environ, **bin_first, **port}, stdout=subprocess.PIPE,
        )
        for command in typed
    ]  # fmt: skip
    first, other = (end.communicate(timeout=150)[0] for end in ends)
    assert [end.returncode for end in ends] == [0, 0]
    assert first.startswith("2 node(s) of 1 process(es), over ") and other == ""
    assert commands["emulated here"].startswith("python -m harness nodes 2 --link 20ms -- torchrun")


def test_without_a_network_the_address_is_left_to_the_reader(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: Any) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr("socket.socket.connect", unreachable)
    assert "--master_addr=ADDRESS_OF_THIS_MACHINE " in starts(capsys)["here"]


def test_only_rank_0_prints_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert verb("--mb", "0") == 2
    assert capsys.readouterr().err == ""


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two, joined by a link that the kernel holds at 100 Mbit/s each way."""
    names = [f"harness{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ends = [f"name v0 netns {name}".split() for name in names]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.99.0.{number}/24", "dev", "v0")
            for interface in ("lo", "v0"):
                ip("-n", name, "link", "set", interface, "up")
            limit = ["rate", "100mbit", "burst", "64kb", "latency", "100ms"]
            words = ["tc", "-n", name, "qdisc", "add", "dev", "v0", "root", "tbf", *limit]
            subprocess.run(words, check=True)
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.root
def test_a_limited_link_is_measured_as_it_is(namespaces: tuple[str, str]) -> None:
    requested = {"HARNESS_LAUNCH": json.dumps({"link": {"rate_mbit": 100}})}
    named = {"GLOO_SOCKET_IFNAME": "v0", "OMP_NUM_THREADS": "1", **requested}
    argv = ["-m", "harness", "link", "--mb", "1", "--json"]
    first, second = agents(*argv, env=named, within=namespaces, address="10.99.0.1")
    assert second.stdout == ""
    result = json.loads(first.stdout)
    assert result["interface"] == "v0" and result["warning"] is None
    assert result["bandwidth_mbit"] == pytest.approx(100, rel=0.15)
    (row,) = result["allreduce"]
    assert row["bytes"] == 1_000_000 and row["busbw_mbit"] == pytest.approx(100, rel=0.3)
    assert result["rtt_min_ms"] < 5

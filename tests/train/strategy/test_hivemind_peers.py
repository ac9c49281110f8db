"""Peers that join, leave, are killed or do not fit: what remains on disk and in memory."""

from __future__ import annotations

import re
import shlex
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.core.command_line import parse
from harness.core.provenance import HIVEMIND
from harness.core.records import read_json, read_rows
from harness.core.rules import addresses_to_join, fit_to_world
from harness.core.settings import UserError
from harness.core.topology import World
from harness.train.data.samples import cut_tail
from tests.support import peers, sockets
from tests.support.ranks import ran, ranks, run_script
from tests.support.sweeps import command, gone, wait_for

pytest.importorskip("hivemind")

TINY = ["--tiny", "--strategy", "hivemind", "--train_size", "256", "--test_size", "40"]
NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWALVb3LLkUJHc1nQJbuDHoHX7Yc3SUkVoZoeCJDJU98hZ"


def vit(folder: Path, *flags: str, out: Path | None = None, **more: Any) -> peers.Peer:
    return peers.script(
        folder, "vit", *TINY, "--output_dir", str(out or folder / "out"), *flags, **more
    )


def updates(folder: Path) -> int:
    progress = [read_json(path) or {} for path in folder.glob("*/*/*/progress.json")]
    return max((int(p.get("update") or 0) for p in progress), default=0)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--precision", "fp16"], "--precision fp16"),
        (["--batchnorm", "sync"], "--batchnorm sync"),
        (["--local_updates", "--compress", "int8"], "8 bits lose"),
        (["--save_steps", "5"], "--save_steps does not go"),
        (["--tail", "pad"], "--tail pad does not go"),
        (["--optim", "adafactor"], "adamw_torch, adamw_torch_fused, sgd"),
        (["--lr_scheduler_type", "reduce_lr_on_plateau"], "reduce_lr_on_plateau"),
        (["--initial_peers", "10.0.0.1:4000"], "10.0.0.1:4000: not an address such as"),
        (["--initial_peers", "/ip6/fe80::1/tcp/4000/p2p/12D3"], "12D3: not an address such as"),
        (["--target_batch", "16"], "one peer alone brings 32"),
    ],
)
def test_what_peers_cannot_do_is_refused(flags: list[str], reason: str) -> None:
    with pytest.raises(UserError, match=re.escape(reason)):
        parse("vit", [*TINY, *flags], {})


def test_too_few_samples_for_an_update_are_refused() -> None:
    settings = fit_to_world(parse("vit", [*TINY, "--target_batch", "500"], {}), World())
    assert cut_tail(settings, 1437, 1) == 1000
    with pytest.raises(UserError, match="--target_batch 500: there are 499 training samples"):
        cut_tail(settings, 499, 1)


def test_addresses_come_from_the_flag_or_the_variable() -> None:
    settings = parse("vit", TINY, {})
    assert addresses_to_join(settings, {}) == []
    assert addresses_to_join(settings, {"INITIAL_PEERS": f"{NOBODY}, {NOBODY}"}) == [NOBODY] * 2
    joining = replace(settings, initial_peers=NOBODY)
    assert addresses_to_join(joining, {"INITIAL_PEERS": "/ip4/no"}) == [NOBODY]
    with pytest.raises(UserError, match="not an address"):
        addresses_to_join(settings, {"INITIAL_PEERS": "/ip4/10.0.0.1/tcp/9"})


def test_where_a_peer_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.train.strategy.hivemind import network

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    alone, several = (parse("vit", [*TINY, "--setup", s], {}) for s in ("1_1", "3_1"))
    assert network.listening_address(alone, []) == "127.0.0.1"
    assert network.listening_address(several, [NOBODY]) == "127.0.0.1"  # as the run it joins
    assert network.listening_address(several, [NOBODY.replace("ip4/127.0.0.1", "dns/no.invalid")])
    monkeypatch.setattr(network, "own_address", lambda towards: f"towards {towards}")
    assert network.listening_address(several, []) == f"towards {network.OUTSIDE}"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert network.listening_address(several, []) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(UserError, match="GLOO_SOCKET_IFNAME=none0: this machine has no such"):
        network.listening_address(several, [])


def test_the_line_to_join_with_gives_back_the_settings() -> None:
    from harness.train.strategy.hivemind.network import join_command

    flags = ["--lr", "3e-4", "--grad_acc", "2", "--setup", "3_1", "--warmup_steps", "7", "--rerun"]
    settings = fit_to_world(parse("vit", [*TINY, *flags], {}), World())
    line = shlex.split(join_command(settings, [NOBODY, NOBODY]))
    assert line[:2] == ["python", "vit.py"]
    joined = replace(settings, initial_peers=f"{NOBODY},{NOBODY}", rerun=False)
    assert fit_to_world(parse("vit", line[2:], {}), World()) == joined
    assert joined.target_batch == 3 * 32 * 2


def test_what_differs_is_named() -> None:
    from harness.train.strategy.hivemind.network import (
        check_checksum,
        check_requirements,
        requirements,
    )

    here = parse("vit", [*TINY, "--lr", "0.001", "--warmup_steps", "3"], {})
    run = requirements(parse("vit", [*TINY, "--lr", "0.003", "--model", "vit-tiny"], {}))
    with pytest.raises(UserError) as refused:
        check_requirements(here, run | {"torch": "1.0"})
    assert "--lr is 0.001 here, 0.003 in the run" in str(refused.value)
    assert "--model is vit-nano here, vit-tiny in the run" in str(refused.value)
    assert "--warmup_steps is 3 here, not given in the run" in str(refused.value)
    assert "torch is 2" in str(refused.value) and "--seed" not in str(refused.value)
    check_requirements(here, requirements(here))
    with pytest.raises(UserError, match="checksum a here, b in the run"):
        check_checksum("a", "b")


def without_hivemind(*argv: str) -> int:
    import sys

    sys.modules["hivemind"] = None  # type: ignore[assignment]
    return run_script("vit", list(argv), str(peers.ROOT))


def refused(done: Any, reason: str) -> None:
    lines = [line for line in done.err.splitlines() if line]
    assert done.code == 2, done.err
    assert len(lines) == 1 and lines[0].startswith("vit.py: error: "), done.err
    assert reason in lines[0]


@pytest.mark.process
def test_what_is_not_installed_is_named(tmp_path: Path) -> None:
    done = ran(1, without_hivemind, *TINY, "--o", str(tmp_path), env=peers.QUICK)
    refused(done, HIVEMIND.install)


@pytest.mark.process
def test_nobody_answers(tmp_path: Path) -> None:
    argv = [*TINY, "--initial_peers", NOBODY, "--o", str(tmp_path)]
    refused(ran(1, run_script, "vit", argv, str(peers.ROOT), env=peers.QUICK), "none of them answe")


def other_settings(folder: str) -> int:
    """A stand-in for a run that peers do not fit, or join too late."""
    from harness.train.strategy.hivemind.network import (
        SETTINGS,
        DhtState,
        addresses,
        open_dht,
        requirements,
    )

    state = DhtState(open_dht("127.0.0.1", []))
    state.publish(SETTINGS, requirements(parse("vit", [*TINY, "--lr", "0.5"], {})))
    state.start()  # or the settings expire before a slow peer has joined
    at = addresses(state.dht)[0]
    Path(folder, "at").write_text(at)
    wait_for(lambda: Path(folder, "next").is_file())
    state.publish_outcome({"outcome": "finished"})
    Path(folder, "over").write_text("")
    wait_for(lambda: Path(folder, "done").is_file())
    state.close()
    state.dht.shutdown()
    return 0


@pytest.mark.process
def test_a_peer_that_does_not_fit_is_refused_and_one_that_is_late(tmp_path: Path) -> None:
    run = peers.Peer(tmp_path / "run", other_settings, str(tmp_path))
    wait_for(lambda: (tmp_path / "at").is_file() and (tmp_path / "at").read_text())
    env = peers.QUICK | {"INITIAL_PEERS": (tmp_path / "at").read_text()}
    argv = [*TINY, "--o", str(tmp_path / "out")]
    refused(
        ran(1, run_script, "vit", argv, str(peers.ROOT), env=env),
        "does not fit the run that it joins: --lr is 0.0015 here, 0.5 in the run",
    )
    (tmp_path / "next").write_text("")
    wait_for(lambda: (tmp_path / "over").is_file())
    refused(ran(1, run_script, "vit", argv, str(peers.ROOT), env=env), "that run is over")
    (tmp_path / "done").write_text("")
    assert run.code() == 0, run.err
    assert not (tmp_path / "out").exists()


def goes_at_once(folder: str) -> list[bool]:
    """Whether the other peer knows the outcome of a recorder that published it and was gone."""
    from harness.train.strategy.hivemind.network import DhtState, addresses, open_dht

    known = []
    for _ in range(5):
        recorder = DhtState(open_dht("127.0.0.1", []))
        other = DhtState(open_dht("127.0.0.1", [addresses(recorder.dht)[0]]))
        other.publish_own({"number": 1})  # it has been used, as in a run
        recorder.publish_outcome({"outcome": "finished"})
        recorder.dht.shutdown()
        other.refresh()
        known.append(other.outcome == {"outcome": "finished"})
        other.dht.shutdown()
    return known


@pytest.mark.process
def test_the_outcome_outlives_a_recorder_that_goes_at_once(tmp_path: Path) -> None:
    """Or the others end with code 1, as if the run had not finished."""
    assert ranks(1, goes_at_once, str(tmp_path)) == [[True] * 5]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_one_that_joins_late_and_one_that_is_killed(tmp_path: Path) -> None:
    """The first peer records; a second one joins in the middle, a third one is killed."""
    out = tmp_path / "out"
    flags = ["--epochs", "6", "--target_batch", "32", "--save", "none"]
    argv = [*TINY, *flags, "--output_dir", str(out)]
    # Alone it might have been through before they came.
    first = peers.Peer(tmp_path / "first", peers.lingers, 12, 2.0, 3, argv)
    assert "one peer alone" in wait_for(lambda: first.err)
    join = ["--initial_peers", first.address()]
    wait_for(lambda: list(out.glob("*/*/*/epochs.jsonl")))
    second = vit(tmp_path / "second", *flags, *join, out=out)
    third = vit(tmp_path / "third", *flags, *join, out=tmp_path / "elsewhere")
    places = [out, tmp_path / "elsewhere"]
    wait_for(lambda: [p for o in places for p in o.glob("*/*/*/ranks/rank_[12].jsonl")])
    family = third.family()
    third.kill()
    assert family
    assert gone(family)

    assert (first.code(), second.code()) == (0, 0), first.err + second.err
    record = peers.record(out)
    rows = peers.rows(record)
    assert [row["epoch"] for row in rows] == list(range(1, 7))
    assert rows[-1]["updates"] == 6 * 8
    assert rows[0]["peers"] == 1 and max(row["peers"] for row in rows) >= 2
    assert rows[-1]["peers"] == 2
    assert peers.summary(record)["outcome"] == "finished"
    # Nobody's samples are lost, and nobody's are counted twice.
    kept = (read_json(record.path / "peers.json") or {}).values()
    assert sum(p["samples"] for p in kept) == sum(row["samples"] for row in rows)
    assert sorted(p["rank"] for p in kept) in ([0, 1, 2], [0, 1])
    joined, _ = read_rows(record.rank(1))
    if not joined:
        joined, _ = read_rows(record.rank(2))
    assert joined and joined[0]["epoch"] > 1
    assert "peer " in second.out and "peers.json" not in second.err
    printed = [line for line in (first.err + second.err).splitlines() if line]
    assert len(printed) == 1, "\n".join(printed)  # the warning, and nothing of the libraries


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_recorder_is_killed_and_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = ["--epochs", "4"]
    argv = [*TINY, *flags, "--output_dir", str(out)]
    # Until it is killed: alone it might be through before the second one came.
    first = peers.Peer(tmp_path / "first", peers.lingers, 12, 300.0, 99, argv)
    join = ["--initial_peers", first.address()]
    elsewhere = tmp_path / "elsewhere"
    argv = [*TINY, *flags, *join, "--output_dir", str(elsewhere)]
    second = peers.Peer(tmp_path / "second", peers.lingers, 17, 2.0, 99, argv)
    wait_for(lambda: list(out.glob("*/*/*/checkpoint-*/complete.json")) and second.out)
    others = re.search(r"answers at (\S+)", wait_for(lambda: second.out))
    assert others is not None
    first.kill()
    wait_for(lambda: list(elsewhere.glob("*/*/*/ranks/rank_1.jsonl")))  # it goes on alone
    again = vit(tmp_path / "again", *flags, "--initial_peers", others[1], out=out)
    assert (again.code(), second.code()) == (0, 0), again.err + second.err
    record = peers.record(out)
    epochs = [row["epoch"] for row in peers.rows(record)]
    assert epochs == sorted(set(epochs)) and epochs[-1] == 4
    first_row, *later = [row for row in peers.rows(record) if row["attempt"] == 2]
    for name in ("epoch_time_s", "timed_samples", "train_samples_per_s"):
        assert first_row[name] is None, name
    assert all(row["epoch_time_s"] > 0 and row["timed_samples"] > 0 for row in later)
    assert "epoch of unknown time" in again.out
    assert [row["event"] for row in read_rows(record.attempts)[0]] == ["start", "end"] * 2
    assert peers.summary(record)["attempts"] == 2


@pytest.mark.process
@pytest.mark.slow
def test_without_a_recorder_the_others_end_and_say_so(tmp_path: Path) -> None:
    first = vit(tmp_path / "first", "--epochs", "20")
    join = ["--initial_peers", first.address()]
    argv = [*TINY, "--output_dir", str(tmp_path / "second" / "out"), "--epochs", "20", *join]
    killed = tmp_path / "killed"
    second = peers.Peer(tmp_path / "second", peers.impatient, str(killed), argv)
    wait_for(lambda: list((tmp_path / "second").glob("out/*/*/*/ranks/rank_1.jsonl")))
    first.kill()
    killed.touch()
    assert second.code() == 1
    (line,) = second.err.splitlines()
    assert "the peer that records the run is gone" in line, first.err + line


@pytest.mark.process
@pytest.mark.parametrize(
    "signum",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_peer_takes_all_its_processes_with_it(tmp_path: Path, signum: int) -> None:
    peer = vit(tmp_path, "--epochs", "200", "--save", "none")
    wait_for(lambda: updates(tmp_path / "out") > 2)
    family = peer.family()
    names = [command(p) for p in family]
    # Nobody has named another machine.
    assert set().union(*(sockets.listening(p.pid) for p in family)) == {"127.0.0.1"}
    assert sum("p2pd" in name for name in names) == 1 and len(family) >= 4
    talks = [c for p in family for c in p.net_connections() if c.status == psutil.CONN_ESTABLISHED]
    assert talks == []  # alone, it has nobody to talk to
    (daemon,) = [name for name in names if "p2pd" in name]
    for off in ("-autoRelay=0", "-autonat=0", "-natPortMap=0", "-relay=0", "-b=0"):
        assert off in daemon.split()
    assert "bootstrapPeers" not in daemon
    peer.kill(signum)
    assert gone(family)
    peer.code()
    record = peers.record(tmp_path / "out")
    if signum != signal.SIGKILL:
        assert peer.process.exitcode == 128 + signum
        assert peers.summary(record)["outcome"] == "interrupted"
    else:
        assert not record.summary.exists()

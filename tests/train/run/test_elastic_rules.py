"""What elastic runs decide by arithmetic: batches, place, position, schedule, what was lost."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import cli
from harness.core import attempts, topology
from harness.core.attempts import write_summary
from harness.core.command_line import parse
from harness.core.identity import identity, run_id
from harness.core.records import RunFolder, read_rows
from harness.core.rules import fit_to_world
from harness.core.settings import Settings, UserError
from harness.core.topology import World
from harness.train import rendezvous
from harness.train.context import Launch, Position
from harness.train.data.samples import EpochOrder
from harness.train.loop.elastic_schedule import ElasticSchedule
from harness.train.run import elastic as restarts
from harness.train.run import failures
from harness.train.run.failures import Stopped
from harness.train.run.warm import free_port
from harness.train.session import Session


def launched(nodes: int, per_node: int, restarts: int = 3) -> dict[str, str]:
    """What torchrun --max_restarts tells each of its processes."""
    size = {"WORLD_SIZE": str(nodes * per_node), "LOCAL_WORLD_SIZE": str(per_node)}
    return {"RANK": "0", "TORCHELASTIC_MAX_RESTARTS": str(restarts), **size}


def settings(*argv: str, nodes: int = 1, per_node: int = 1) -> Settings:
    return parse("vit", ["--tiny", *argv], launched(nodes, per_node))


@pytest.mark.parametrize(
    ("effective", "most", "processes", "result"),
    [
        (64, 16, 4, (16, 1)),
        (64, 16, 2, (16, 2)),
        (64, 16, 1, (16, 4)),
        (48, 16, 2, (12, 2)),  # 24 a process: more than 16 at a time were never asked for
        (34, 16, 2, (1, 17)),
        (32, 16, 4, (8, 1)),
        (64, 16, 3, None),
    ],
)
def test_an_effective_batch_is_split_exactly_or_not_at_all(
    effective: int, most: int, processes: int, result: tuple[int, int] | None
) -> None:
    assert topology.split(effective, most, processes) == result
    if result is not None:
        assert result[0] * result[1] * processes == effective and result[0] <= most


def test_the_batch_of_fewer_nodes() -> None:
    whole = settings("--b", "16", "--grad_acc", "2", "--setup", "4_2", nodes=2, per_node=2)
    held = topology.for_world(whole, 4)
    assert (held.per_gpu_batch, held.grad_acc) == (16, 4)
    assert topology.for_world(whole, 8) == whole
    assert topology.for_world(replace(whole, elastic_batch="scale"), 4).grad_acc == 2
    with pytest.raises(UserError, match=r"6 processes cannot share .* 256 .* 1, 2, 4 node\(s\)"):
        topology.for_world(whole, 6)


def test_only_an_elastic_run_has_the_batch_of_fewer_processes() -> None:
    dp = fit_to_world(parse("vit", ["--tiny", "--b", "8", "--strategy", "dp"], {}), World(), gpus=4)
    assert dp.setup == "1_4"
    assert Session(World()).own_settings(dp) == dp and dp.grad_acc == 1
    whole = settings("--b", "16", "--setup", "4_1", nodes=2)
    assert Session(World(nodes=2, launched=True, elastic=True)).own_settings(whole).grad_acc == 2


def test_what_cannot_be_held_is_said_before_a_node_is_lost() -> None:
    warning = topology.warning(settings("--setup", "4_1"))
    assert warning is not None and "1, 2, 4 of 4 nodes" in warning
    assert topology.warning(settings("--setup", "2_1")) is None
    assert topology.warning(settings("--setup", "4_1", "--elastic_batch", "scale")) is None


def test_the_set_up_is_what_was_asked_for() -> None:
    names = {run_id(settings("--setup", "4_1", nodes=nodes)) for nodes in (1, 2, 4)}
    assert len(names) == 1  # one run, whoever is there
    assert settings("--setup", "4_1").strategy == "ddp"  # also while one is alone
    assert settings("--setup", "1_1").strategy == "single"
    for argv, nodes, message in [
        (["--setup", "2_1"], 3, "does not fit"),
        (["--setup", "2_2"], 1, "does not fit"),
        (["--setup", "2_1", "--strategy", "single"], 1, "does not fit"),
        ([], 2, "--max_restarts needs --setup"),
        (["--setup", "2_1", "--tail", "pad"], 1, "use --tail cut"),
        (["--setup", "2_1", "--elastic_batch", "scale", "--max_steps", "9"], 1, "--epochs"),
        (["--setup", "2_1", "--strategy", "diloco"], 2, "diloco does not go .* another trained"),
        (["--setup", "2_1", "--strategy", "hivemind"], 2, "peers come and go by themselves"),
    ]:
        with pytest.raises(UserError, match=message):
            settings(*argv, nodes=nodes)
    with pytest.raises(UserError, match="does not fit"):  # without restarts nobody joins later
        parse("vit", ["--tiny", "--setup", "4_1"], launched(2, 1, restarts=0))


def test_what_an_elastic_run_holds_is_part_of_its_name() -> None:
    whole = settings("--setup", "2_1")
    scaled = replace(whole, elastic_batch="scale")
    assert (identity(whole)["elastic_batch"], identity(scaled)["elastic_batch"]) == (
        "hold",
        "scale",
    )
    assert run_id(whole) != run_id(scaled)
    assert run_id(settings("--setup", "2_1", "--ddp_timeout", "9")) == run_id(whole)


# 100 samples, of which 48 have been trained on in the second of three epochs, in 20 updates.
PLAN = ElasticSchedule(Position(20, 1, 48), train_samples=100, epochs=3, batch=10, full_batch=20)


def test_a_plan_counts_samples() -> None:
    assert (PLAN.updates_per_epoch, PLAN.rest, PLAN.updates) == (10, 5, 20 + 5 + 10)
    assert [PLAN.epoch_at(u) for u in (20, 25)] == [1 + 48 / 98, 2.0]
    assert replace(PLAN, position=Position(30, 3)).updates == 30  # only the test is left
    assert ElasticSchedule(Position(), 100, 3, 20, 20).updates == PLAN.full_updates() == 15


def test_the_schedule_is_that_of_the_set_up_by_the_share_of_the_samples() -> None:
    assert PLAN.full_update_at(20) == (100 + 48) / 20
    assert PLAN.full_update_at(35) == (100 + 48 + 150) / 20
    undisturbed = ElasticSchedule(Position(), 100, 3, 20, 20)
    assert [undisturbed.full_update_at(u) for u in range(15)] == list(range(15))


def test_the_order_goes_on_behind_what_was_trained_on() -> None:
    whole, rest = EpochOrder(100, seed=1), EpochOrder(100, seed=1, multiple=10)
    rest.trained = {1: 48}
    orders = {}
    for epoch in (0, 1, 2):
        whole.set_epoch(epoch)
        rest.set_epoch(epoch)
        orders[epoch] = (list(whole), list(rest))
    assert len(rest) == 100
    assert orders[1][1] == orders[1][0][48:98]
    assert orders[0][1] == orders[0][0] and orders[2][1] == orders[2][0]


START = {"event": "start", "attempt": 1, "unix": 100.0}
END = {"event": "end", "attempt": 1, "unix": 160.0, "update": 50, "wall_s": 62.0}


@pytest.mark.parametrize(
    ("rows", "counted", "launcher", "gap", "lost", "redone"),
    [
        ([], None, 90.0, None, None, None),
        # A checkpoint at 130: 30 s thrown away, 20 between, 5 to get going.
        ([START, END], 130.0, 90.0, 20.0, 30 + 20 + 5, 10),
        # Nobody knows when the checkpoint was complete, from which it goes on at update 40.
        ([START, END], None, 90.0, 20.0, None, 10),
        # Another launcher: what lies between two of them is nobody's.
        ([START, END], 130.0, 170.0, None, 30 + 5, 10),
        ([START, END], 130.0, None, None, 30 + 5, 10),
        # Killed without a word.
        ([START, {**END, "unix": None, "update": None}], 130.0, 90.0, 80.0, 80 + 5, None),
        # One in between failed before it began: its 7 s are counted once.
        ([START, END, {**END, "attempt": None, "wall_s": 7.0}], 130.0, 90.0, 13.0, 55, 10),
    ],
)
def test_time_and_updates_lost_by_an_interruption(
    rows: Any, counted: Any, launcher: Any, gap: Any, lost: Any, redone: Any
) -> None:
    opened = attempts.Opened(180.0, counted, launcher)
    result = attempts.lost(rows, 40, opened, now_unix=185.0)
    assert result == {
        "counted_unix": counted, "gap_s": gap, "lost_s": lost, "redone_updates": redone,
    }  # fmt: skip


def test_a_restart_from_an_older_checkpoint_loses_what_earlier_attempts_kept() -> None:
    """It had the updates of two attempts and the time of one."""
    # 60 s to update 50, 30 s of them kept to update 25; from there 20 s to update 40, none kept.
    second = {**START, "attempt": 2, "unix": 200.0, "from_update": 25, "counted_unix": 130.0}
    rows: Any = [START, END, second, {**END, "attempt": 2, "unix": 220.0, "update": 40}]
    cost = {}
    for update, counted in ((25, 130.0), (10, 112.0), (0, None)):
        result = attempts.lost(rows, update, attempts.Opened(230.0, counted), now_unix=235.0)
        cost[update] = result["lost_s"], result["redone_updates"]
    assert cost == {25: (20 + 5, 15), 10: (20 + 5 + 18, 30), 0: (20 + 5 + 30, 40)}
    ahead: Any = [START, END, {**second, "counted_unix": 9e9}, rows[-1]]
    assert attempts.lost(ahead, 0, attempts.Opened(230.0), 235.0)["lost_s"] == 20 + 5 + 62
    # The third began at update 0: what was lost then is not lost once more.
    third = {**START, "attempt": 3, "unix": 300.0, "from_update": 0, "counted_unix": None}
    rows += [third, {**END, "attempt": 3, "unix": 310.0, "update": 8}]
    result = attempts.lost(rows, 0, attempts.Opened(320.0, None), now_unix=325.0)
    assert (result["lost_s"], result["redone_updates"]) == (10 + 5, 8)


def test_goodput_is_the_share_of_updates_that_count(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.epochs.write_text(
        '{"epoch": 1, "updates": 9, "samples": 9, "timed_s": 0, "timed_samples": 0, '
        '"epoch_time_s": 30.0, "peak_memory_gib_per_rank": [1]}\n'
    )
    now = time.time()
    attempts.begin(folder, 0, 2, 32, attempts.Opened(now - 1, launcher_unix=now - 9))
    attempts.end(folder, "failed", "planted", 40.0, update=5)
    assert attempts.is_resumed(folder, now - 9) and not attempts.is_resumed(folder, now + 60)
    assert not attempts.is_resumed(folder, None)
    later = attempts.Opened(time.time() + 15, launcher_unix=now - 9)
    attempts.begin(folder, 3, 1, 32, later)
    attempts.end(folder, "finished", None, 45.0, update=9)
    write_summary(folder, "finished")
    summary = read_rows(folder.attempts)[0]
    assert summary[2]["gap_s"] == pytest.approx(15, abs=1)
    result = json.loads(folder.summary.read_text())
    assert (result["restarts"], result["redone_updates"]) == (1, 2)
    assert result["goodput_share"] == pytest.approx(30 / (40 + 15 + 45), rel=0.02)


def test_goodput_is_unknown_where_a_killed_attempt_told_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for _ in range(2):
        attempts.begin(folder, 0, 1)
    assert attempts.total_elapsed_s(attempts.believed(folder)) is None


def test_an_attempt_that_died_before_it_began_does_not_end_a_killed_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    attempts.begin(folder, 0, 1)
    told = {"attempt": 1, "wall_s": 7.5, "measuring_s": 1.5, "update": 4}
    attempts.write_progress(folder, told)
    attempts.end(folder, "failed", "no peer", 2.0, begun=False)
    _, killed, unbegun = read_rows(folder.attempts)[0]
    assert {name: killed[name] for name in told} == told
    assert (unbegun["attempt"], unbegun["reason"]) == (None, "no peer")
    assert attempts.begin(folder, 0, 1) == 2


@pytest.mark.parametrize(
    ("launch", "error", "again"),
    [
        (None, RuntimeError(), False),
        (Launch(0.0, 1), RuntimeError(), True),
        (Launch(0.0, 0), RuntimeError(), False),
        (Launch(0.0, 0), Stopped(signal.SIGTERM), True),  # a node joins: no restart is used up
        (Launch(0.0, 1), Stopped(signal.SIGINT), False),
    ],
)
def test_which_errors_restart_a_run(
    launch: Launch | None, error: BaseException, again: bool
) -> None:
    assert failures._restarts(launch, error) is again


def test_restarts_that_would_fail_are_announced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(restarts.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(restarts.dist, "get_backend", lambda: "gloo")
    for shared, expected in (("True", 1), ("False", 0)):
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
        restarts.warn_of_restarts(settings("--setup", "2_1"))
        warning = capsys.readouterr().err
        assert warning.count("\n") == expected
        assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in warning) is bool(expected)


def test_a_store_that_cannot_listen_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "REACH_S", 0.5)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert cli.main(["store", f"127.0.0.1:{port}"]) == 2
        *_, line = capsys.readouterr().err.splitlines()
        assert line.endswith(f"port {port} is taken: use another")
    assert cli.main(["store", "no-port"]) == 2
    assert "PORT no-port: expected a whole number" in capsys.readouterr().err
    assert cli.main(["store", "192.0.2.1:29400"]) == 2
    assert "192.0.2.1" in capsys.readouterr().err


@pytest.mark.process
def test_the_store_listens(root: Path) -> None:
    port = str(free_port())
    command = [sys.executable, "-m", "harness", "store", port]
    store = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
    try:
        assert store.stdout is not None
        assert re.fullmatch("export PET_RDZV_ID=[0-9a-f]{32}\n", store.stdout.readline())
        assert f":{port}" in store.stdout.readline()
        socket.create_connection(("127.0.0.1", int(port)), timeout=5).close()
    finally:
        store.send_signal(signal.SIGINT)
    assert store.wait(timeout=10) == 130

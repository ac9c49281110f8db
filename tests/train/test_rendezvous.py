"""Where torch's processes meet: nobody else is let in, and nothing that lies there runs."""

from __future__ import annotations

import base64
import os
import pickle  # noqa: TID251 - as an intruder would
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousParameters,
    c10d_rendezvous_backend,
    dynamic_rendezvous,
    static_tcp_rendezvous,
)

from harness.core.settings import UserError
from harness.train import rendezvous
from tests.support.sockets import Planted, answers_at
from tests.support.sweeps import wait_for

HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"  # two addresses of this machine


@pytest.fixture
def hardened(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """harden() for one test: what it replaces comes back."""
    for module in (c10d_rendezvous_backend, static_tcp_rendezvous, rendezvous.of_ranks):
        monkeypatch.setattr(module, "TCPStore", TCPStore)
    monkeypatch.setattr(dynamic_rendezvous, "pickle", pickle)
    handler = dynamic_rendezvous.DynamicRendezvousHandler
    made = handler._create_tcp_store_server
    rendezvous.harden()
    yield
    handler._create_tcp_store_server = made  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (static_tcp_rendezvous, "TCPStore"),
        (dynamic_rendezvous, "pickle"),
        (dynamic_rendezvous.DynamicRendezvousHandler, "_create_tcp_store_server"),
    ],
)
def test_a_torch_without_what_is_replaced_is_refused(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would open a store to everybody, and nobody would notice."""
    monkeypatch.delattr(owner, name)
    with pytest.raises(UserError, match=f"{owner.__name__} has no {name}, which must be replaced"):
        rendezvous.harden()


def meeting(number: int) -> dynamic_rendezvous.DynamicRendezvousHandler:
    """A c10d rendezvous as torchrun makes it, which hosts its store."""
    parameters = RendezvousParameters(
        "c10d", f"{HERE}:{number}", "job1", 1, 1, local_addr=HERE, is_host=1
    )
    backend, store = c10d_rendezvous_backend.create_backend(parameters)
    return dynamic_rendezvous.create_handler(store, backend, parameters)


def test_a_store_listens_where_it_is_reached() -> None:
    for host, shared in ((HERE, False), ("localhost", False), (HERE, True)):
        store = rendezvous.store(host, is_master=True, wait_for_workers=False, multi_tenant=shared)
        assert answers_at(host, store.port)  # localhost may be ::1
        assert not answers_at(ELSEWHERE, store.port)


def test_all_stores_of_torch_listen_there(hardened: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    static = static_tcp_rendezvous.StaticTCPRendezvous(HERE, 0, 0, 1, "id", 5)
    static.next_rendezvous()
    handler: Any = meeting(0)
    stores = [
        static._store,
        handler._store,
        handler._create_tcp_store_server(HERE, 0),
        rendezvous.of_ranks._create_c10d_store(HERE, 0, 0, 1, rendezvous.TIMEOUT),
    ]
    for store in stores:
        assert answers_at(HERE, store.port)
        assert not answers_at(ELSEWHERE, store.port)


def test_a_run_meets_and_a_planted_state_does_not_run(hardened: None, tmp_path: Path) -> None:
    handler: Any = meeting(0)
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    assert not answers_at(ELSEWHERE, info.bootstrap_store_info.master_port)
    intruder = TCPStore(HERE, handler._store.port, is_master=False, wait_for_workers=False)
    # A run id alone keeps nobody out.
    key = "torch.rendezvous.job1"
    assert key in intruder.list_keys()
    intruder.set(key, base64.b64encode(pickle.dumps(Planted(tmp_path / "ran"))).decode())
    handler._stop_heartbeats()  # they read the state, too
    handler._state_holder._cache_duration = 0
    with pytest.raises(dynamic_rendezvous.RendezvousStateError):
        handler._state_holder.sync()
    assert not (tmp_path / "ran").exists()


def test_only_the_state_of_a_rendezvous_is_read(tmp_path: Path) -> None:
    state = dynamic_rendezvous._RendezvousState()
    node = dynamic_rendezvous._NodeDesc("a", 1, 2)
    state.participants[node] = 0
    state.wait_list.add(node)
    state.last_heartbeats[node] = state.deadline = datetime.now(UTC)
    assert vars(rendezvous.safe_loads(pickle.dumps(state))) == vars(state)
    for planted in (
        pickle.dumps(Planted(tmp_path / "ran")),
        b"",
        b"\x80\x05torn",
        b"cos\nsystem\n",
    ):
        with pytest.raises(pickle.UnpicklingError):
            rendezvous.safe_loads(planted)
    assert not (tmp_path / "ran").exists()


def test_an_address_that_nobody_answers_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "REPORT_EVERY_S", 0.0)
    monkeypatch.setattr(rendezvous, "REACH_S", 0.2)
    with socket.socket() as closed:
        closed.bind((HERE, 0))
        port = closed.getsockname()[1]
        with pytest.raises(UserError, match="the first node cannot be reached from here"):
            rendezvous.store(HERE, port, timeout=rendezvous.timedelta(seconds=0.2))
        assert f"waiting for {HERE}:{port}" in capsys.readouterr().err

    def refused(address: Any, **how: Any) -> socket.socket:
        raise TimeoutError(110, "Connection timed out")

    monkeypatch.setattr(socket, "create_connection", refused)
    with pytest.raises(UserError, match=r"does not reach itself at 192\.0\.2\.1: .*timed out"):
        rendezvous.store("192.0.2.1", is_master=True)


def test_a_name_that_is_loopback_only_here_is_not_bound(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.1.1", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [known])
    monkeypatch.setattr(rendezvous, "unreachable", lambda *_: None)
    listening = rendezvous._listen("first-node", 0)
    assert listening is not None and listening.getsockname()[0] == "0.0.0.0"
    listening.close()
    said = capsys.readouterr().err
    assert (
        "first-node is not an address that this machine alone has, so the rendezvous listens on"
        in said
    )
    own = rendezvous._listen(HERE, 0)
    assert own is not None and capsys.readouterr().err == ""
    own.close()


def test_ranks_of_one_node_talk_over_loopback() -> None:
    one = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    rendezvous.bind_to_loopback(one)
    assert one["GLOO_SOCKET_IFNAME"] == one["NCCL_SOCKET_IFNAME"] == "lo"
    chosen = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "eth1"}
    rendezvous.bind_to_loopback(chosen)
    assert chosen["GLOO_SOCKET_IFNAME"] == "eth1"
    for open_ in (
        {},
        {"WORLD_SIZE": "2"},  # nobody says on how many nodes
        {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3"},
    ):
        before = dict(open_)
        rendezvous.bind_to_loopback(open_)
        assert open_ == before


@pytest.mark.process
def test_a_planted_state_does_not_run_in_torchrun(root: Path, tmp_path: Path) -> None:
    """The elastic recipe of the docs: an id by environment, and torchrun of this project."""
    store = rendezvous.store(HERE, is_master=True, wait_for_workers=False)
    planted = base64.b64encode(pickle.dumps(Planted(tmp_path / "ran"))).decode()
    store.set("torch.rendezvous.known", planted)
    done = subprocess.run(
        [sys.executable, "-m", "harness.train.torchrun", "--nproc_per_node=1",
         "--rdzv_backend=c10d", f"--rdzv_endpoint={HERE}:{store.port}", "--rdzv_conf=is_host=0",
         "--no_python", "true"],
        cwd=root, env={**os.environ, "PET_RDZV_ID": "known"}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    said = "torchrun: error: the processes cannot meet: The rendezvous state is corrupt"
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "ran").exists()


def test_ranks_that_have_not_come_are_named(
    hardened: None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By rank 0, of which rank 1 says it, and again as long as it lasts."""
    monkeypatch.setattr(rendezvous, "MISSED_S", 0.5)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    printed = ""

    def says(line: str) -> bool:
        nonlocal printed
        printed += capfd.readouterr().err
        return re.search(line, printed) is not None

    def comes(rank: int, first: bool = False, port: int = 0) -> TCPStore:
        monkeypatch.setenv("RANK", str(rank))
        make: Any = rendezvous.of_ranks.TCPStore
        made: TCPStore = make(
            host_name=HERE, port=port, world_size=8, is_master=first, timeout=timedelta(seconds=60)
        )
        return made

    server = rendezvous.store(HERE, is_master=True, wait_for_workers=False)
    one = comes(1, port=server.port)
    assert wait_for(lambda: says(r"warning: not in the run after 0\.5 s: rank 0 \(node 0\)\n"))
    zero = comes(0, port=server.port)
    late = "rank 2 (node 1), rank 3 (node 1), rank 4 (node 2), rank 5 (node 2) and 2 more"
    assert wait_for(lambda: says(re.escape(f"warning: not in the run after 1 s: {late}\n")))
    others = [comes(rank, port=server.port) for rank in range(2, 7)]
    assert wait_for(lambda: says(r"warning: not in the run after [\d.]+ s: rank 7 \(node 3\)\n"))
    others.append(comes(7, port=server.port))
    naming = "_name_the_missing"
    assert wait_for(lambda: not any(naming in t.name for t in threading.enumerate()))
    del one, zero, others


def test_the_rank_that_has_the_store_does_not_wait_in_it(
    hardened: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own waits for the others within, for minutes, and says nothing."""
    monkeypatch.setenv("RANK", "0")
    make: Any = rendezvous.of_ranks.TCPStore
    made = make(host_name=HERE, port=0, world_size=2, is_master=True, timeout=timedelta(seconds=1))
    assert made.check([rendezvous.HERE.format(0)])
    made.set(rendezvous.HERE.format(1), "")


def test_a_port_that_is_taken_after_the_bind_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two agents of one machine bind to it, and one of them listens first."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((HERE, 0))

        class Late(socket.socket):
            def bind(self, address: Any) -> None:
                super().bind(address)
                other.listen()

        monkeypatch.setattr(rendezvous.socket, "socket", Late)
        assert rendezvous._listen(HERE, other.getsockname()[1]) is None

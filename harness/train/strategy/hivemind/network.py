"""Where peers meet: hivemind's table of keys, addresses, and processes that end with their peer.

Nobody else is asked for anything: no public peers to begin with, no relays, no mapping of ports.
Two peers that cannot reach one another do not find a way around it.
"""

from __future__ import annotations

import multiprocessing
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as TooLate
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from hivemind.utils import ValueWithExpiration, get_dht_time

from harness.core import process
from harness.core.command_line import to_argv
from harness.core.identity import identity, number
from harness.core.rules import INSTALL
from harness.core.settings import Settings, UserError

try:
    import hivemind
    from hivemind.p2p import P2P, PeerID
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
    from hivemind.utils.multiaddr import Multiaddr
except ImportError:
    raise UserError(
        f"--strategy hivemind needs a package that is not installed: {INSTALL}"
    ) from None


# What libp2p would do by itself to be reached from anywhere.
ALONE: dict[str, Any] = {
    "use_relay": False,
    "use_auto_relay": False,
    "auto_nat": False,
    "nat_port_map": False,
    "use_ipfs": False,
}


LOOPBACK = "/ip4/127."


def end_with_peer(parent_pid: int) -> None:
    """A process of hivemind, at its start: it ends with the peer, and by no signal of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    process.end_with_parent(parent_pid)


class Table(hivemind.DHT):
    """hivemind's table, whose process and whose daemon do not outlive this peer."""

    def run(self) -> None:
        end_with_peer(self._parent_pid)
        words = P2P._make_process_args
        me = [sys.executable, str(Path(process.__file__)), str(os.getpid())]
        P2P._make_process_args = staticmethod(lambda *a, **k: [*me, *words(*a, **k)])
        super().run()


@contextmanager
def forking() -> Iterator[None]:
    """hivemind's processes share the memory of this one, whatever it was started by itself.

    It also turns Ctrl-C off, and not only in them.
    """
    method = multiprocessing.get_start_method(allow_none=True)
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    multiprocessing.set_start_method("fork", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(method, force=True)
        signal.signal(signal.SIGINT, on_ctrl_c)


def open_table(host: str | None, initial_peers: list[str]) -> Table:
    """Listens on one address, or on all of this machine where none is given."""
    listen = f"/ip4/{host or '0.0.0.0'}/tcp/0"  # noqa: S104 - a peer is there to be reached
    try:
        return Table(start=True, initial_peers=initial_peers, host_maddrs=[listen], **ALONE)
    except P2PDaemonError as error:
        if "multiaddr" in str(error):
            why = str(error).rsplit('": ', 1)[-1]
            raise UserError(f"--initial_peers {','.join(initial_peers)}: {why}") from None
        raise UserError(
            f"--initial_peers {','.join(initial_peers)}: none of them answers. Is the run still "
            "there, and is its port open to this machine?"
        ) from None


async def _connect(table: Any, node: Any, peer: str, at: list[str]) -> None:
    with suppress(Exception):  # one that is behind a wall is reached by others, or by nobody
        await node.p2p._client.connect(PeerID.from_base58(peer), [Multiaddr(a) for a in at])


def connect(table: Table, peer: str, at: list[str]) -> Any:
    """Make another peer known to this one; libp2p would find it by and by, or not."""
    bare = [address.partition("/p2p/")[0] for address in at]
    return table.run_coroutine(partial(_connect, peer=peer, at=bare), return_future=True)


def addresses(table: Table) -> list[str]:
    """At which others reach this peer: those of the network first, the loopback only without."""
    found = [str(address) for address in table.get_visible_maddrs()]
    return [a for a in found if not a.startswith(LOOPBACK)] or found


def join_command(settings: Settings, at: list[str]) -> str:
    """The whole line with which another machine joins; it parses back to these settings."""
    joined = replace(settings, initial_peers=",".join(at), rerun=False)
    return shlex.join(["python", f"{settings.script}.py", *to_argv(joined, short=True)])


def own_address(towards: str, port: int) -> str:
    """The address of this machine on the way to another; of emulated nodes, the node's own."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, port))  # sends nothing
        return str(probe.getsockname()[0])


# ----
# Whether a peer that joins is about to do what the run does; if not, in what it differs.

# Those in which one peer's gradient could mean something else than another's.
LIBRARIES = ("torch", "transformers", "hivemind")


def of(settings: Settings) -> dict[str, str]:
    """Everything that all peers must have in common, as words."""
    libraries = {name: metadata.version(name).split("+")[0] for name in LIBRARIES}
    said = identity(settings)
    passed = {f"--{name}": value for name, value in said.pop("trainer").items()}
    named = {name if name == "script" else f"--{name}": value for name, value in said.items()}
    return {name: number(value) for name, value in {**named, **passed, **libraries}.items()}


def compare(settings: Settings, run: dict[str, str] | None) -> None:
    if run is None:
        return  # nobody has said anything yet
    here = of(settings)
    differing = [
        f"{name} is {here.get(name, 'not given')} here, {run.get(name, 'not given')} in the run"
        for name in sorted({*here, *run})
        if here.get(name) != run.get(name)
    ]
    if differing:
        raise UserError(f"this peer does not fit the run that it joins: {'; '.join(differing)}")


def compare_data(here: Any, run: Any) -> None:
    if here != run:
        raise UserError(
            f"this peer's samples are not those of the run that it joins (checksum {here} here, "
            f"{run} in the run): --dataset and what it names must be the same everywhere"
        )


# ----
# What peers tell one another besides weights and gradients: who there is, and how far.
#
# Everything is said again every second and forgotten some seconds after its peer is gone, so that
# nothing outlives a run, and nobody has to say goodbye. Times are those of the peers' own clocks:
# they must agree within a few seconds.

BEAT_S = 1.0


FORGET_S = 8.0  # what is not said again for so long is no longer in the table


LINGER_S = 4.0  # and is believed for so long after, because the table may fail to answer once


ANSWER_S = 10.0  # for the table to answer; far apart it takes some round trips


OUTCOME_KEPT_S = 600.0


SETTINGS, DATA, RECORDER, PEERS, OUTCOME = "settings", "data", "recorder", "peers", "outcome"


class Board:
    """Keys of the table, and a thread that says again what holds."""

    def __init__(self, table: Any) -> None:
        self.table = table
        self.id = str(table.peer_id)
        self.said: dict[tuple[str, str | None], Any] = {}
        self.seen: dict[str, dict[str, Any]] = {}  # the last that each peer has told
        self.living: dict[str, dict[str, Any]] = {}  # of these, who tells still
        self.heard_s: dict[str, float] = {}
        self.recorder: dict[str, Any] | None = None
        self.outcome: dict[str, Any] | None = None
        self.connected: set[str] = set()
        self.closed = threading.Event()
        # Held while processes are forked: a child must not inherit a pipe in the middle of a word.
        self.quiet = threading.Lock()
        self.thread = threading.Thread(target=self._beat, daemon=True)

    def start(self) -> None:
        self.look()
        self.thread.start()

    def say(self, key: str, value: Any, subkey: str | None = None) -> None:
        """From now on, until something else is said."""
        self.said[key, subkey] = value
        self._store(key, value, subkey, FORGET_S)

    def tell(self, own: dict[str, Any]) -> None:
        """What this peer has done so far."""
        self.seen[self.id] = self.living[self.id] = own
        self.heard_s[self.id] = time.monotonic()
        self.say(PEERS, own, self.id)

    def end(self, outcome: dict[str, Any]) -> None:
        """What became of the run; kept for those who are late."""
        self.outcome = outcome
        self._store(OUTCOME, outcome, None, OUTCOME_KEPT_S)

    def get(self, key: str) -> Any:
        """What was said last under a key; None where nothing was, or nobody answers."""
        try:
            found = self.table.get(key, latest=True, return_future=True).result(ANSWER_S)
        except (TooLate, OSError, RuntimeError):
            return None
        return None if found is None else _bare(found.value)

    def look(self) -> None:
        # First: who has heard that an epoch is open sees all peers that it was opened for.
        recorder = self.get(RECORDER)
        told = self.get(PEERS) or {}
        now_s = time.monotonic()
        self.heard_s |= dict.fromkeys(told, now_s)
        fresh = {k: v for k, v in {**self.living, **told}.items() if isinstance(v, dict)}
        self.living = {k: v for k, v in fresh.items() if now_s - self.heard_s[k] < LINGER_S}
        if recorder is not None:
            self.recorder, self.heard_s[RECORDER] = recorder, now_s
        elif now_s - self.heard_s.get(RECORDER, now_s) >= LINGER_S:
            self.recorder = None
        if (own := self.said.get((PEERS, self.id))) is not None:
            self.living[self.id] = own  # what is said now may not be in the table yet
        for peer in self.living.keys() - self.connected - {self.id}:
            self.connected.add(peer)
            connect(self.table, peer, self.living[peer].get("at", []))
        self.seen = {**self.seen, **self.living}
        self.outcome = self.outcome or self.get(OUTCOME)

    def wait(self, what: Callable[[], Any], within_s: float, every_s: float = 0.02) -> Any:
        """The first true value of a function of what is seen; what it is at the end otherwise."""
        until = time.monotonic() + within_s
        while not (found := what()) and time.monotonic() < until and not self.closed.wait(every_s):
            with self.quiet:
                self.look()
        return found

    def close(self) -> None:
        self.closed.set()
        if self.thread.is_alive():
            self.thread.join(ANSWER_S)

    def _beat(self) -> None:
        while not self.closed.wait(BEAT_S):
            with self.quiet:
                for (key, subkey), value in list(self.said.items()):
                    self._store(key, value, subkey, FORGET_S)
                self.look()

    def _store(self, key: str, value: Any, subkey: str | None, kept_s: float) -> None:
        until = get_dht_time() + kept_s
        self.table.store(key, value, until, subkey=subkey, return_future=True)


def _bare(value: Any) -> Any:
    """Without the times until which parts of it hold."""
    if isinstance(value, ValueWithExpiration):
        return _bare(value.value)
    if isinstance(value, dict):
        return {k: _bare(v) for k, v in value.items()}
    return value

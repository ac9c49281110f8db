"""How peers find each other and what they know of each other, through hivemind's DHT.

Nothing outside the run is contacted: no public bootstrap peers, no relays, no port mapping. Two
peers that cannot reach one another find no way around it.
"""

from __future__ import annotations

import os
import shlex
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Any

import hivemind
import psutil
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils import ValueWithExpiration, get_dht_time
from hivemind.utils.multiaddr import Multiaddr

from harness.core.command_line import to_argv
from harness.core.identity import identity, number
from harness.core.provenance import HIVEMIND
from harness.core.settings import Settings, UserError, parse_setup
from harness.train.rendezvous import OUTSIDE, address_towards
from harness.train.strategy.hivemind import end_with_peer

# What libp2p would do by itself to be reached from anywhere.
PRIVATE: dict[str, Any] = {
    "use_relay": False,
    "use_auto_relay": False,
    "auto_nat": False,
    "nat_port_map": False,
    "use_ipfs": False,
}
LOOPBACK = "/ip4/127."


class Dht(hivemind.DHT):
    """hivemind's DHT, whose process ends with this peer."""

    def run(self) -> None:
        end_with_peer(self._parent_pid)
        super().run()


def open_dht(host: str, initial_peers: list[str]) -> Dht:
    """Start a DHT that listens on one address of this machine."""
    listen = f"/ip4/{host}/tcp/0"
    flag = f"--initial_peers {','.join(initial_peers)}"
    try:
        return Dht(start=True, initial_peers=initial_peers, host_maddrs=[listen], **PRIVATE)
    except P2PDaemonError as error:
        if "multiaddr" in str(error):
            reason = str(error).rsplit('": ', 1)[-1]
            raise UserError(f"{flag}: {reason}") from None
        raise UserError(
            f"{flag}: none of them answers. Is the run still there, and is its port open to this "
            "machine?"
        ) from None


async def _connect(dht: Any, node: Any, peer: str, at: list[str]) -> None:
    with suppress(Exception):  # one that this peer cannot reach may be reached by others
        await node.p2p._client.connect(PeerID.from_base58(peer), [Multiaddr(a) for a in at])


def addresses(dht: Dht) -> list[str]:
    """Addresses at which others reach this peer; loopback only if there is no other."""
    visible = [str(address) for address in dht.get_visible_maddrs()]
    return [a for a in visible if not a.startswith(LOOPBACK)] or visible


def join_command(settings: Settings, at: list[str]) -> str:
    """The whole command with which another machine joins; it parses back to these settings."""
    joined = replace(settings, initial_peers=",".join(at), rerun=False)
    return shlex.join(["python", f"{settings.script}.py", *to_argv(joined)])


def own_address(towards: str, port: int = 9) -> str:
    """This machine's address on the route to another one, else its loopback."""
    return address_towards(towards, port) or "127.0.0.1"


def listening_address(settings: Settings, join: list[str]) -> str:
    """The address on which a peer listens that no launcher has started.

    It is that of the interface that is named, or that leads to the run, or, for a set-up of several
    machines, to the outside; else loopback.
    """
    if name := os.environ.get("GLOO_SOCKET_IFNAME"):
        known = psutil.net_if_addrs().get(name, [])
        address = next((a.address for a in known if a.family == socket.AF_INET), None)
        if address is None:
            raise UserError(f"GLOO_SOCKET_IFNAME={name}: this machine has no such IPv4 interface")
        return str(address)
    if join:
        return own_address(join[0].split("/")[2])
    several = parse_setup(str(settings.setup))[0] > 1
    return own_address(OUTSIDE) if several else "127.0.0.1"


# Libraries whose versions could give one peer's gradient another meaning than another's.
LIBRARIES = ("torch", "transformers", HIVEMIND.name)


def requirements(settings: Settings) -> dict[str, str]:
    """Everything that all peers must have in common, as text."""
    libraries = {name: metadata.version(name).split("+")[0] for name in LIBRARIES}
    fields = identity(settings)
    passed = {f"--{name}": value for name, value in fields.pop("trainer").items()}
    named = {name if name == "script" else f"--{name}": value for name, value in fields.items()}
    return {name: number(value) for name, value in {**named, **passed, **libraries}.items()}


def check_requirements(settings: Settings, run: dict[str, str]) -> None:
    here = requirements(settings)
    differing = [
        f"{name} is {here.get(name, 'not given')} here, {run.get(name, 'not given')} in the run"
        for name in sorted({*here, *run})
        if here.get(name) != run.get(name)
    ]
    if differing:
        raise UserError(f"this peer does not fit the run that it joins: {'; '.join(differing)}")


def check_checksum(here: Any, run: Any) -> None:
    if here != run:
        raise UserError(
            f"this peer's samples are not those of the run that it joins (checksum {here} here, "
            f"{run} in the run): --dataset and what it names must be the same everywhere"
        )


BEAT_S = 1.0
EXPIRE_S = 8.0  # what is not published again for so long leaves the DHT
GRACE_S = 4.0  # and is still believed for so long, because a look-up may fail once
ANSWER_S = 10.0  # for the DHT to answer; over a slow link it takes some round trips
SILENT_S = EXPIRE_S + GRACE_S + ANSWER_S  # without any answer of the DHT: nobody is there any more
OUTCOME_KEPT_S = 600.0
SETTINGS, DATA, RECORDER, PEERS, OUTCOME = "settings", "data", "recorder", "peers", "outcome"


class DhtState:
    """The state of the run in the DHT: the peers and their progress.

    A thread publishes everything again each second, and it expires some seconds after its peer is
    gone: nothing outlives a run, and nobody has to say goodbye. Expiry is by the peers' own clocks,
    which must agree within a few seconds.
    """

    def __init__(self, dht: Any) -> None:
        self.dht = dht
        self.id = str(dht.peer_id)
        self.published: dict[tuple[str, str | None], Any] = {}
        self.known: dict[str, dict[str, Any]] = {}  # what each peer has published last
        self.alive: dict[str, dict[str, Any]] = {}  # of these, the peers that still publish
        self.heard_s: dict[str, float] = {}
        self.recorder: dict[str, Any] | None = None
        self.outcome: dict[str, Any] | None = None
        self.connected: set[str] = set()
        self.closed = threading.Event()
        # Held while processes are forked: a child must not inherit a half-written pipe.
        self.quiet = threading.Lock()
        self.thread = threading.Thread(target=self._beat, daemon=True)

    def start(self) -> None:
        self.refresh()
        self.thread.start()

    def publish(self, key: str, value: Any, subkey: str | None = None) -> None:
        """Publish a value until another one is published under the key."""
        self.published[key, subkey] = value
        self._store(key, value, subkey, EXPIRE_S)

    def publish_own(self, own: dict[str, Any]) -> None:
        """Publish what this peer has done so far."""
        self.known[self.id] = self.alive[self.id] = own
        self.heard_s[self.id] = time.monotonic()
        self.publish(PEERS, own, self.id)

    def publish_outcome(self, outcome: dict[str, Any]) -> None:
        """Publish how the run has ended, for peers that come too late as well.

        On return other peers hold the outcome, so that this peer may go.
        """
        self.outcome = outcome
        with suppress(FutureTimeout, OSError, RuntimeError):
            self._store(OUTCOME, outcome, None, OUTCOME_KEPT_S).result(ANSWER_S)

    def get(self, key: str) -> Any:
        """The value published last; None if there is none or no peer answers."""
        return self._look_up(key)[1]

    def _look_up(self, key: str) -> tuple[bool, Any]:
        """Whether the DHT has answered, and with what value."""
        try:
            entry = self.dht.get(key, latest=True, return_future=True).result(ANSWER_S)
        except (FutureTimeout, OSError, RuntimeError):
            return False, None
        return True, None if entry is None else _without_expiration(entry.value)

    def settings(self) -> dict[str, str]:
        """What all peers have in common, from one of them: a look-up may fail, and what busy peers
        have published may have expired.
        """
        until = time.monotonic() + SILENT_S
        while not (common := self.get(SETTINGS)):
            if self.get(OUTCOME) is not None:
                raise UserError("--initial_peers: that run is over")
            if time.monotonic() >= until:
                raise UserError(
                    f"--initial_peers: a peer answers, but none has said within {SILENT_S:g} s "
                    "what the run trains: is the run still there?"
                )
            self.closed.wait(0.1)
        return dict(common)

    def refresh(self) -> None:
        # The recorder first: whoever sees an epoch opened must see all peers it was opened for.
        now_s = time.monotonic()  # an answer may take longer than GRACE_S
        knows_recorder, recorder = self._look_up(RECORDER)
        knows_peers, peers = self._look_up(PEERS)
        self.heard_s |= dict.fromkeys(peers or {}, now_s)
        valid = {k: v for k, v in {**self.alive, **(peers or {})}.items() if isinstance(v, dict)}
        kept_s = GRACE_S if knows_peers else SILENT_S
        self.alive = {k: v for k, v in valid.items() if now_s - self.heard_s[k] < kept_s}
        kept_s = GRACE_S if knows_recorder else SILENT_S
        if recorder is not None:
            self.recorder, self.heard_s[RECORDER] = recorder, now_s
        elif now_s - self.heard_s.get(RECORDER, now_s) >= kept_s:
            self.recorder = None
        if (own := self.published.get((PEERS, self.id))) is not None:
            self.alive[self.id] = own  # the newest may not have reached the DHT
        for peer in self.alive.keys() - self.connected - {self.id}:
            # By itself, libp2p would find a way to the peer later, or never.
            self.connected.add(peer)
            at = [address.partition("/p2p/")[0] for address in self.alive[peer].get("at", [])]
            self.dht.run_coroutine(partial(_connect, peer=peer, at=at), return_future=True)
        self.known = {**self.known, **self.alive}
        self.outcome = self.outcome or self.get(OUTCOME)

    def wait(self, condition: Callable[[], Any], within_s: float, every_s: float = 0.02) -> Any:
        """The first true value of a condition on this state; its last value if it times out."""
        until = time.monotonic() + within_s
        while not (value := condition()):
            if time.monotonic() >= until or self.closed.wait(every_s):
                break
            with self.quiet:
                self.refresh()
        return value

    def close(self) -> None:
        self.closed.set()
        if self.thread.is_alive():
            self.thread.join(ANSWER_S)

    def _beat(self) -> None:
        while not self.closed.wait(BEAT_S):
            with self.quiet:
                for (key, subkey), value in list(self.published.items()):
                    self._store(key, value, subkey, EXPIRE_S)
                self.refresh()

    def _store(self, key: str, value: Any, subkey: str | None, kept_s: float) -> Any:
        """Returns a future of whether some peer keeps the value."""
        until = get_dht_time() + kept_s
        return self.dht.store(key, value, until, subkey=subkey, return_future=True)


def _without_expiration(value: Any) -> Any:
    """The plain value; its parts carry expiration times."""
    if isinstance(value, ValueWithExpiration):
        return _without_expiration(value.value)
    if isinstance(value, dict):
        return {k: _without_expiration(v) for k, v in value.items()}
    return value

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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from harness import parent
from harness.flags import to_argv
from harness.peers import INSTALL
from harness.settings import Settings, UserError

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
    parent.end_with_parent(parent_pid)


class Table(hivemind.DHT):
    """hivemind's table, whose process and whose daemon do not outlive this peer."""

    def run(self) -> None:
        end_with_peer(self._parent_pid)
        words = P2P._make_process_args
        me = [sys.executable, str(Path(parent.__file__)), str(os.getpid())]
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

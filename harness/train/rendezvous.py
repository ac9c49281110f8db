"""The rendezvous of torch's processes, closed to everybody else.

torch's store listens on every address, asks for no password and lists its keys to whoever connects,
so that a secret run id alone keeps nobody out; and a c10d rendezvous unpickles what it finds there.
harden() changes both in torch's modules (also checked with torch 2.15): a store listens on the
address at which it is reached, and what is read from it cannot run code.
"""

from __future__ import annotations

import errno
import io
import os
import pickle  # noqa: TID251 - to read less than it would
import secrets
import socket
import threading
import time
from collections.abc import Iterable, MutableMapping
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from ipaddress import ip_address
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from torch.distributed import DistStoreError, TCPStore
from torch.distributed.elastic.rendezvous import (
    c10d_rendezvous_backend,
    dynamic_rendezvous,
    static_tcp_rendezvous,
)

from harness.core.process import warn
from harness.core.settings import UserError
from harness.train.patches import check_patched

# By its name: the package has a function of the same name.
of_ranks = import_module("torch.distributed.rendezvous")
REACH_S = 60.0  # for the first node to listen
REPORT_EVERY_S = 20.0  # between two lines about a node that does not answer
MISSED_S = 60.0  # between two lines about ranks that have not come
NAMED = 4  # ranks named in such a line
HERE = "harness/here/{}"  # in the store: the key of a rank that has come
BACKLOG = 4096
TIMEOUT = timedelta(minutes=5)  # torch's own, to connect to a store
OUTSIDE = "192.0.2.1"  # reserved for documentation: stands for any address outside
# All that the state of a rendezvous consists of, beside the types that pickle itself knows.
STATE = {
    (dynamic_rendezvous.__name__, "_RendezvousState"),
    (dynamic_rendezvous.__name__, "_NodeDesc"),
    *(("datetime", name) for name in ("datetime", "timedelta", "timezone")),
}


def harden() -> None:
    """From now on torch's rendezvous in this process makes stores as store() does, and reads the
    state of a rendezvous without running what is in it.
    """
    handler: Any = dynamic_rendezvous.DynamicRendezvousHandler
    stores = (c10d_rendezvous_backend, static_tcp_rendezvous, of_ranks)
    replaced = [*((module, "TCPStore") for module in stores), (dynamic_rendezvous, "pickle"),
                (handler, "_create_tcp_store_server")]  # fmt: skip
    check_patched(torch, "so that nobody else reaches the run", replaced)
    for module in stores:
        new = store_of_ranks if module is of_ranks else store
        setattr(module, "TCPStore", new)  # noqa: B010 - mypy: a function for a class
    handler._create_tcp_store_server = lambda _, host, port: store(
        host, port, is_master=True, multi_tenant=True
    )
    reader = SimpleNamespace(
        dumps=pickle.dumps, loads=safe_loads, PickleError=pickle.PickleError
    )  # what the module uses of pickle
    setattr(dynamic_rendezvous, "pickle", reader)  # noqa: B010


class _State(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in STATE:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a rendezvous")
        return super().find_class(module, name)


def safe_loads(pickled: bytes) -> Any:
    """The state of a rendezvous as it stands in a store, where anybody may have put it."""
    try:
        return _State(io.BytesIO(pickled)).load()
    except pickle.PickleError:
        raise
    except Exception as error:  # torn bytes raise whatever they lead to
        raise pickle.UnpicklingError(str(error)) from None


def store(
    host_name: str,
    port: int = 0,
    world_size: int | None = None,
    is_master: bool = False,
    timeout: timedelta = TIMEOUT,
    **more: Any,
) -> TCPStore:
    """A TCPStore whose server listens on host_name alone; a client says what it waits for."""
    listening = None
    if is_master:
        listening = _listen(host_name, port)
    elif (reason := unreachable(host_name, port, timeout.total_seconds())) is not None:
        raise UserError(reason)
    if listening is not None:
        port = listening.getsockname()[1]
        more["master_listen_fd"] = listening.detach()
    return TCPStore(host_name, port, world_size, is_master, timeout, **more)


def store_of_ranks(
    host_name: str, port: int, world_size: int, is_master: bool, timeout: timedelta, **more: Any
) -> TCPStore:
    """The store in which the ranks meet; the first one says who has not come."""
    # torch would wait in it for all of them, and say nothing.
    more["wait_for_workers"] = False
    made = store(host_name, port, world_size, is_master, timeout, **more)
    rank, per_node = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_WORLD_SIZE"))
    made.set(HERE.format(rank), "")
    # Only rank 1 says that rank 0 is missing: one line, not as many as there are ranks.
    awaited = {0: range(1, world_size), 1: range(1)}.get(rank)
    if awaited:
        args = (made, awaited, per_node or world_size)
        threading.Thread(target=_name_the_missing, args=args, daemon=True).start()
    return made


def _name_the_missing(made: TCPStore, ranks: Iterable[int], per_node: int) -> None:
    """Say which of these ranks are missing, until all have come."""
    waited_s = 0.0
    with suppress(RuntimeError):  # the store is gone
        connection = made.clone()  # torch waits on the other one
        while missing := [rank for rank in ranks if not connection.check([HERE.format(rank)])]:
            with suppress(DistStoreError):  # they have not come within this time
                connection.wait(
                    [HERE.format(rank) for rank in missing], timedelta(seconds=MISSED_S)
                )
                return
            waited_s += MISSED_S
            missing = [rank for rank in missing if not connection.check([HERE.format(rank)])]
            names = ", ".join(f"rank {rank} (node {rank // per_node})" for rank in missing[:NAMED])
            more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
            if missing:
                missed = f"not in the run after {waited_s:g} s: {names}{more}"
                warn(missed)


def _listen(host: str, port: int) -> socket.socket | None:
    """A socket on this address of this machine; None where torch shall decide: the port is taken,
    perhaps by a store of this process, which it then shares.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    everywhere = _only_a_name(host, str(address[0]))
    try:
        try:
            listening.bind(("", port) if everywhere else address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            # Perhaps the address of a router in front of this machine, to which it cannot bind.
            listening.bind(("", port))
            everywhere = True
        listening.listen(BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:  # which it also is if another listened after our bind
            raise
        listening.close()
        return None
    own_port = listening.getsockname()[1]
    if everywhere and (reason := unreachable(host, own_port, REACH_S)):
        listening.close()
        raise UserError(f"this machine does not reach itself at {host}: {reason}")
    if everywhere:
        warn(
            f"{host} is not an address that this machine alone has, so the rendezvous listens on "
            f"all of its addresses (port {own_port}): let only the nodes reach them"
        )
    return listening


def _only_a_name(host: str, address: str) -> bool:
    """Whether a host name means loopback on this machine (127.0.1.1) and not on others."""
    try:
        ip_address(host)
    except ValueError:
        return host != "localhost" and ip_address(address).is_loopback
    return False


def unreachable(host: str, port: int, within_s: float = REACH_S) -> str | None:
    """Why nobody answers there; None if somebody does. torch would wait longer and say nothing."""
    began_s = reported_s = time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return None
        except OSError as error:
            now_s, reason = time.monotonic(), error.strerror or str(error)
        if now_s - began_s > within_s:
            return (
                f"the first node cannot be reached from here ({reason}): "
                "check firewalls between the nodes, and --master_addr"
            )
        if now_s - reported_s > REPORT_EVERY_S:
            reported_s = now_s
            waited = f"waiting for {host}:{port} for {now_s - began_s:.0f} s"
            warn(f"{waited} ({reason})")
        time.sleep(0.1)


def address_towards(host: str, port: int = 9) -> str | None:
    """This machine's address on the route to another one, to which nothing is sent; None without a
    route. An emulated node has its own.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError:  # no route, or a name that is no IPv4 address
            return None
        return str(probe.getsockname()[0])


def new_id() -> str:
    """A run id that nobody can guess."""
    return secrets.token_hex(16)


def bind_to_loopback(environment: MutableMapping[str, str]) -> None:
    """Where all ranks are on one node, their collectives listen on its loopback alone."""
    size = environment.get("WORLD_SIZE")
    if size is None or environment.get("LOCAL_WORLD_SIZE") != size:
        return
    if int(environment.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0:
        return  # other nodes may come
    interfaces = psutil.net_if_addrs().items()
    loopback = next((n for n, known in interfaces for a in known if a.address == "127.0.0.1"), None)
    for library in ("GLOO", "NCCL") if loopback else ():
        environment.setdefault(f"{library}_SOCKET_IFNAME", str(loopback))

"""Hosts that ssh reaches: how they are addressed, and whether they can measure one run together.

python -m harness.launch.ssh.hosts     on a host, in its checkout: its facts as JSON
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil

from harness.core import provenance
from harness.core.provenance import ROOT, without_home
from harness.core.settings import UserError
from harness.launch.machine import Machine, disturbance, others, this_machine

HOST = re.compile(
    r"^(?:(?P<user>[\w.][\w.-]*)@)?(?P<name>[\w.][\w.-]*|\[[0-9a-fA-F:.%\w]+\])(?::(?P<port>\d+))?$"
)
# Nobody is there to type a password, and a lost host must be noticed. Options in --ssh come before
# these and win; those in ~/.ssh/config come after.
OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": "10",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "4",
}
NO_CHECKOUT = 91  # exit code of a command whose folder does not exist
CLOCKS_S = 2.0  # difference of two clocks that is worth a warning
SSH_FAILED = 255  # of ssh itself: no host, no access, connection lost


@dataclass(frozen=True)
class Host:
    """A machine, as ssh addresses it."""

    name: str
    user: str | None = None
    port: int | None = None

    def __str__(self) -> str:
        return self.name if self.port is None else f"{self.name}:{self.port}"

    @property
    def words(self) -> list[str]:
        port = [] if self.port is None else ["-p", str(self.port)]
        return [*port, f"{self.user}@{self.name}" if self.user else self.name]


@dataclass(frozen=True)
class Remote:
    """The choices for --launcher ssh; empty for every other launcher."""

    hosts: tuple[Host, ...] = ()
    checkout: str = ""
    python: str = ""
    master_addr: str | None = None
    interface: str | None = None
    ssh: tuple[str, ...] = ("ssh",)

    @property
    def folder(self) -> str:
        """The checkout, quoted for a shell except for a leading ~, which the shell expands."""
        home, slash, rest = self.checkout.partition("/")
        if not re.fullmatch(r"~[\w.-]*", home):
            return shlex.quote(self.checkout)
        return home + slash + (shlex.quote(rest) if rest else "")

    def command(self, words: Sequence[str], environment: Mapping[str, str]) -> str:
        """For the shell there: these words, run in the checkout."""
        return f"cd {self.folder} || exit {NO_CHECKOUT}; exec " + shlex.join(
            ["env", *(f"{k}={v}" for k, v in environment.items()), *words]
        )

    def ssh_to(self, host: Host, command: str) -> list[str]:
        options = [word for k, v in OPTIONS.items() for word in ("-o", f"{k}={v}")]
        return [*self.ssh, "-T", *options, *host.words, command]


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("with --launcher ssh")
    add = group.add_argument
    add("--hosts", metavar="A,B,...", help="[user@]host[:port], as ssh knows them")
    add("--hosts_file", metavar="FILE", help="the same, one per line; # begins a comment")
    add("--checkout", metavar="DIR", help="of this project on the hosts (where it is here)")
    add(
        "--remote_python",
        metavar="FILE",
        help="on the hosts, relative to the checkout (.venv/bin/python)",
    )
    add(
        "--master_addr",
        metavar="ADDRESS",
        help="of the first host as the others reach it (as ssh reaches it)",
    )
    add("--interface", metavar="NAME", help="for the traffic of training (the one ssh uses)")
    add("--ssh", metavar="COMMAND",
        help='ssh with your options: "ssh -F my_config" (ssh)')  # fmt: skip


FLAGS = ("hosts", "hosts_file", "checkout", "remote_python", "master_addr", "interface", "ssh")


def remote_of(given: Mapping[str, Any]) -> Remote:
    """From the flags; UserError if they do not go together."""
    if given["launcher"] != "ssh":
        if unused := [name for name in FLAGS if given[name] is not None]:
            raise UserError(f"--{unused[0]} needs --launcher ssh")
        return Remote()
    if (given["hosts"] is None) == (given["hosts_file"] is None):
        raise UserError("--launcher ssh needs either --hosts a,b or --hosts_file FILE")
    if given["pack"]:
        raise UserError("--pack shares one machine: leave it out with --launcher ssh")
    if given["hosts"] is not None:
        hosts = [_host("--hosts", text) for text in given["hosts"].split(",")]
    else:
        hosts = _in_file(Path(given["hosts_file"]))
    for host in hosts:
        if hosts.count(host) > 1:
            raise UserError(f"host {host} is named twice: every node needs its own host")
    return Remote(
        tuple(hosts),
        # The local shell has already expanded a ~; the home folder there may be another.
        checkout=without_home(given["checkout"] or str(ROOT)),
        python=given["remote_python"] or ".venv/bin/python",
        master_addr=given["master_addr"],
        interface=given["interface"],
        ssh=tuple(shlex.split(given["ssh"] or "ssh")),
    )


def _in_file(path: Path) -> list[Host]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "no text"
        raise UserError(f"--hosts_file {path}: {why}") from None
    named = {number: line.partition("#")[0].strip() for number, line in enumerate(lines, 1)}
    hosts = [_host(f"{path} line {number}:", text) for number, text in named.items() if text]
    if not hosts:
        raise UserError(f"--hosts_file {path}: names no host")
    return hosts


def _host(where: str, text: str) -> Host:
    match = HOST.match(text.strip())
    if not match:
        raise UserError(f"{where} {text.strip()!r}: expected [user@]host[:port]")
    port = int(match["port"]) if match["port"] else None
    return Host(match["name"].strip("[]"), match["user"], port)


@dataclass(frozen=True)
class HostFacts:
    """What a host reports about itself; torch is not loaded for it."""

    commit: str | None
    source: str
    python: str
    versions: dict[str, str | None]
    cores: int
    gpus: tuple[str, ...]
    interfaces: dict[str, tuple[str, ...]]  # their addresses, by name
    address: str | None  # at which ssh reached it
    unix: float  # its clock
    disturbed: str | None  # by what other users do there

    @property
    def machine(self) -> Machine:
        return Machine(self.gpus, tuple(range(self.cores)))

    @property
    def interface(self) -> str | None:
        """The one that has the address."""
        return next((n for n, known in self.interfaces.items() if self.address in known), None)


def facts() -> HostFacts:
    machine = this_machine()
    families = (socket.AF_INET, socket.AF_INET6)
    # address and port of the client, then ours
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return HostFacts(
        commit=provenance.commit()["commit"],
        source=provenance.source(),
        python=platform.python_version(),
        versions=provenance.versions(),
        cores=len(machine.cores),
        gpus=machine.gpus,
        interfaces={
            name: tuple(a.address.partition("%")[0] for a in addresses if a.family in families)
            for name, addresses in psutil.net_if_addrs().items()
        },
        address=connection[2] if len(connection) == 4 else None,
        disturbed=disturbance(others(machine)),
        unix=time.time(),
    )


def facts_of(line: dict[str, Any]) -> HostFacts:
    interfaces = {name: tuple(addresses) for name, addresses in line["interfaces"].items()}
    return HostFacts(**{**line, "gpus": tuple(line["gpus"]), "interfaces": interfaces})


def problems(hosts: Mapping[str, HostFacts], remote: Remote, here: Mapping[str, Any]) -> list[str]:
    """Why they cannot, one line each; here: commit and source of this machine."""
    lines = []
    for name, facts in hosts.items():
        theirs, ours = facts.commit, here["commit"]
        if theirs is not None and ours is not None and theirs != ours:
            lines.append(
                f"{name}: {remote.checkout} is at commit {theirs[:12]}, here it is {ours[:12]}: "
                "check out the same"
            )
        elif facts.source != here["source"] and None in (theirs, ours):
            lines.append(
                f"{name}: the code in {remote.checkout} differs from that here, and without git "
                "there is no way to compare them: copy it again"
            )
        if remote.interface is not None and not facts.interfaces.get(remote.interface):
            there = ", ".join(n for n, addresses in facts.interfaces.items() if addresses)
            lines.append(
                f"{name}: --interface {remote.interface}: no such interface with an address, "
                f"there are {there}"
            )
    return lines + _different(hosts) + _unreachable(hosts, remote)


def warnings(
    hosts: Mapping[str, HostFacts], clocks: Mapping[str, float], here: Mapping[str, Any]
) -> list[str]:
    """What the user should know of them; clocks: by how much theirs are ahead of ours."""
    lines = []
    for name, facts in hosts.items():
        if facts.commit == here["commit"] and facts.source != here["source"]:
            lines.append(f"{name}: its files differ from those here, at the same commit")
        apart_s = clocks[name]
        if abs(apart_s) > CLOCKS_S:
            lines.append(
                f"{name}: its clock is {abs(apart_s):.0f} s {'ahead' if apart_s > 0 else 'behind'}"
                ": the rank that is reported as the first to fail may be wrong"
            )
    return lines


def address_of(facts: HostFacts, remote: Remote) -> str | None:
    """At which other hosts reach this one."""
    if remote.interface is not None:
        return facts.interfaces[remote.interface][0]
    return facts.address


def _different(hosts: Mapping[str, HostFacts]) -> list[str]:
    """Versions that are not the same everywhere, and GPUs on some hosts only."""
    versions = {name: {"Python": facts.python, **facts.versions} for name, facts in hosts.items()}
    lines = []
    for package in next(iter(versions.values()), {}):
        by_version: dict[str, list[str]] = {}
        for name, installed in versions.items():
            by_version.setdefault(installed.get(package) or "none", []).append(name)
        if len(by_version) > 1:
            where = [f"{value} on {' and '.join(names)}" for value, names in by_version.items()]
            lines.append(f"{package} is {', '.join(where)}: install the same")
    if len({bool(facts.gpus) for facts in hosts.values()}) > 1:
        without = [name for name, facts in hosts.items() if not facts.gpus]
        lines.append(f"{' and '.join(without)}: no GPU, while other hosts have GPUs")
    return lines


def _unreachable(hosts: Mapping[str, HostFacts], remote: Remote) -> list[str]:
    if len(hosts) < 2 or remote.master_addr is not None or remote.interface is not None:
        return []
    name, first = next(iter(hosts.items()))
    if first.address is None or ip_address(first.address).is_loopback:
        return [
            f"{name}: ssh reaches it at {first.address or 'an unknown address'}, which "
            "other hosts do not reach: choose one with --master_addr or --interface"
        ]
    return []


if __name__ == "__main__":
    json.dump(asdict(facts()), sys.stdout)
    print()

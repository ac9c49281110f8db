"""Whether hosts can measure one run together: what each has and runs, compared.

python -m harness.launch.ssh.agreement     on a host, in its checkout: its facts as JSON
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from typing import Any

import psutil

from harness.core import provenance
from harness.launch.machine import Machine, disturbance, others, this_machine
from harness.launch.ssh.hosts import Remote

CLOCKS_S = 2.0  # difference of two clocks that is worth a warning


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

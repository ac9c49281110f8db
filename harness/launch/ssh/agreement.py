"""What a host is asked over ssh, in its checkout: python -m harness.launch.ssh.agreement

What it has and runs, as a line of JSON; no torch is loaded for it.
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

from harness.core.provenance import commit, source, versions
from harness.launch.machine import Machine, disturbance, others, this_machine
from harness.launch.ssh.hosts import Remote


@dataclass(frozen=True)
class Facts:
    """Of one host."""

    commit: str | None
    source: str
    python: str
    versions: dict[str, str | None]
    cores: int
    gpus: tuple[str, ...]
    interfaces: dict[str, tuple[str, ...]]  # their addresses, by name
    address: str | None  # at which ssh has reached it
    unix: float  # its clock
    disturbed: str | None  # what others do there

    @property
    def machine(self) -> Machine:
        return Machine(self.gpus, tuple(range(self.cores)))

    @property
    def interface(self) -> str | None:
        """That of the address."""
        return next((n for n, found in self.interfaces.items() if self.address in found), None)


def facts() -> Facts:
    machine = this_machine()
    families = (socket.AF_INET, socket.AF_INET6)
    # client's address, its port, ours, our port
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return Facts(
        commit=commit()["commit"],
        source=source(),
        python=platform.python_version(),
        versions=versions(),
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


def facts_of(line: dict[str, Any]) -> Facts:
    interfaces = {name: tuple(found) for name, found in line["interfaces"].items()}
    return Facts(**{**line, "gpus": tuple(line["gpus"]), "interfaces": interfaces})


if __name__ == "__main__":
    json.dump(asdict(facts()), sys.stdout)
    print()


# ----
# Whether hosts can measure one run together: what they say of themselves, compared.

CLOCKS_S = 2.0  # apart, before it is worth a word


def problems(found: Mapping[str, Facts], remote: Remote, here: Mapping[str, Any]) -> list[str]:
    """Why they cannot, a line each; here: commit and source of this machine."""
    lines = []
    for name, facts in found.items():
        theirs, ours = facts.commit, here["commit"]
        if theirs is not None and ours is not None and theirs != ours:
            lines.append(
                f"{name}: {remote.checkout} is at commit {theirs[:12]}, here it is {ours[:12]}: "
                "check out the same"
            )
        elif facts.source != here["source"] and None in (theirs, ours):
            lines.append(
                f"{name}: the code in {remote.checkout} is not that of here, and without git "
                "nobody can tell how it differs: copy it again"
            )
        if remote.interface is not None and not facts.interfaces.get(remote.interface):
            there = ", ".join(n for n, addresses in facts.interfaces.items() if addresses)
            lines.append(
                f"{name}: --interface {remote.interface}: no such interface with an address, "
                f"there are {there}"
            )
    return lines + _unlike(found) + _unreachable(found, remote)


def warnings(
    found: Mapping[str, Facts], clocks: Mapping[str, float], here: Mapping[str, Any]
) -> list[str]:
    """What should be known of them all the same; clocks: how far ahead of that of here."""
    lines = []
    for name, facts in found.items():
        if facts.commit == here["commit"] and facts.source != here["source"]:
            lines.append(f"{name}: its files differ from those of here beyond the commit")
        apart_s = clocks[name]
        if abs(apart_s) > CLOCKS_S:
            lines.append(
                f"{name}: its clock is {abs(apart_s):.0f} s {'ahead' if apart_s > 0 else 'behind'}"
                ": which rank failed first may be told wrong"
            )
    return lines


def address_of(facts: Facts, remote: Remote) -> str | None:
    """At which others reach this host."""
    if remote.interface is not None:
        return facts.interfaces[remote.interface][0]
    return facts.address


def _unlike(found: Mapping[str, Facts]) -> list[str]:
    """Versions that are not the same everywhere, and GPUs on some hosts only."""
    kinds = {name: {"Python": facts.python, **facts.versions} for name, facts in found.items()}
    lines = []
    for what in next(iter(kinds.values()), {}):
        by_value: dict[str, list[str]] = {}
        for name, values in kinds.items():
            by_value.setdefault(values.get(what) or "none", []).append(name)
        if len(by_value) > 1:
            told = [f"{value} on {' and '.join(names)}" for value, names in by_value.items()]
            lines.append(f"{what} is {', '.join(told)}: install the same")
    if len({bool(facts.gpus) for facts in found.values()}) > 1:
        without = [name for name, facts in found.items() if not facts.gpus]
        lines.append(f"{' and '.join(without)}: no GPU, where other hosts have some")
    return lines


def _unreachable(found: Mapping[str, Facts], remote: Remote) -> list[str]:
    if len(found) < 2 or remote.master_addr is not None or remote.interface is not None:
        return []
    name, first = next(iter(found.items()))
    if first.address is None or ip_address(first.address).is_loopback:
        return [
            f"{name}: ssh reaches it at {first.address or 'an address that it does not tell'}, "
            "where the other hosts do not: name one with --master_addr or --interface"
        ]
    return []

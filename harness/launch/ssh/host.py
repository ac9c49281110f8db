"""What a host is asked over ssh, in its checkout: python -m harness.launch.ssh.host

What it has and runs, as a line of JSON; no torch is loaded for it.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from harness.launch.machine import Machine, disturbed, others, this_machine
from harness.versions import commit, source, versions


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
        disturbed=disturbed(others(machine)),
        unix=time.time(),
    )


def facts_of(line: dict[str, Any]) -> Facts:
    interfaces = {name: tuple(found) for name, found in line["interfaces"].items()}
    return Facts(**{**line, "gpus": tuple(line["gpus"]), "interfaces": interfaces})


if __name__ == "__main__":
    json.dump(asdict(facts()), sys.stdout)
    print()

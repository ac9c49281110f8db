"""What a launcher asks of a host, at both ends of the connection: its facts, and a run's record.

    python -m harness.launch.ssh.hosts            on a host, in its checkout: its facts as JSON
    python -m harness.launch.ssh.hosts FOLDER     the records of a run to standard output, as tar

Checkpoints stay on the host: they are large, and the run continues there.
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
import socket
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from pathlib import Path, PurePosixPath
from typing import IO, Any

import psutil

from harness.core import provenance
from harness.core.records import (
    ATTEMPTS,
    CHECKPOINT,
    FAILURE_OF_RANK,
    SETTINGS,
    SUMMARY,
    TELEMETRY,
    RunFolder,
    rows_in,
)
from harness.core.records.disk import draft_of
from harness.launch.choices import Remote
from harness.launch.places import Machine, disturbed_by, others, this_machine

CLOCKS_S = 2.0  # a larger difference between two clocks causes a warning
# Marks the beginning of the tar: the host's shell may print lines of its own before it.
TAR_FOLLOWS = b"--- records of the run follow as tar ---\n"
OF_RANK = re.compile(r"_(\d+)\.\w+$")


@dataclass(frozen=True)
class HostFacts:
    """What a host reports about itself; torch is not loaded for it."""

    commit: str | None
    source: str
    python: str
    versions: dict[str, str | None]
    cores: int
    gpus: Sequence[str]
    interfaces: Mapping[str, Sequence[str]]  # the addresses of each, by name
    address: str | None  # the one at which ssh reached the host
    unix: float  # its clock
    disturbed: str | None  # how other users of the host would disturb a measurement

    @property
    def machine(self) -> Machine:
        return Machine(tuple(self.gpus), tuple(range(self.cores)))

    @property
    def interface(self) -> str | None:
        """The name of the interface with this address."""
        return next((n for n, known in self.interfaces.items() if self.address in known), None)


def facts() -> HostFacts:
    machine = this_machine()
    families = (socket.AF_INET, socket.AF_INET6)
    # client address and port, then the host's
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return HostFacts(
        commit=provenance.commit()["commit"],
        source=provenance.source_checksum(),
        python=platform.python_version(),
        versions=provenance.versions(),
        cores=len(machine.cores),
        gpus=machine.gpus,
        interfaces={
            name: tuple(a.address.partition("%")[0] for a in addresses if a.family in families)
            for name, addresses in psutil.net_if_addrs().items()
        },
        address=connection[2] if len(connection) == 4 else None,
        disturbed=disturbed_by(others(machine)),
        unix=time.time(),
    )


def problems(hosts: Mapping[str, HostFacts], remote: Remote, here: Mapping[str, Any]) -> list[str]:
    """Why the hosts cannot measure together, a line each; here: commit and source of this one."""
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
    """What the user should know about the hosts; clocks: how far each host's is ahead of ours."""
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
    """The address at which the other hosts reach this one."""
    if remote.interface is not None:
        return facts.interfaces[remote.interface][0]
    return facts.address


def _different(hosts: Mapping[str, HostFacts]) -> list[str]:
    """Versions that differ between hosts, and GPUs that only some hosts have."""
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


@dataclass(frozen=True)
class Fetched:
    """A file as it was on its host."""

    content: bytes
    unix: float  # when it was last written, by the host's clock


def send(folder: Path, to: IO[bytes]) -> None:
    """Write every record file of a run as tar; a missing folder gives an empty tar."""
    with tarfile.open(fileobj=to, mode="w|") as tar:
        for file in _files(folder):
            try:
                content, written_s = file.read_bytes(), file.stat().st_mtime
            except FileNotFoundError:
                continue  # a draft that has just been renamed
            entry = tarfile.TarInfo(str(PurePosixPath(file.relative_to(folder))))
            entry.size, entry.mtime = len(content), written_s
            tar.addfile(entry, io.BytesIO(content))


def _files(folder: Path) -> Iterator[Path]:
    for path, inner, names in os.walk(folder):
        inner[:] = sorted(d for d in inner if not d.startswith((".", CHECKPOINT)))
        yield from (Path(path, name) for name in sorted(names) if not name.startswith("."))


def received(tar: bytes) -> dict[str, Fetched]:
    """The files of a tar by path in the run's folder; paths that lead outside are ignored."""
    files: dict[str, Fetched] = {}
    with tarfile.open(fileobj=io.BytesIO(tar), mode="r|") as archive:
        for entry in archive:
            path = PurePosixPath(entry.name)
            if not entry.isfile() or path.is_absolute() or ".." in path.parts:
                continue
            file = archive.extractfile(entry)
            assert file is not None
            files[str(path)] = Fetched(file.read(), float(entry.mtime))
    return files


def merged(by_node: Mapping[int, Mapping[str, Fetched]], processes: int) -> dict[str, Fetched]:
    """One record from all nodes: node 0's files of the run, each node's files of its ranks, and
    files in folders that belong to no rank from the first node that has them.

    Other files may be left from an earlier run, in which the host was another node.
    """
    record: dict[str, Fetched] = {}
    for node, files in sorted(by_node.items()):
        for name, sent in files.items():
            inside = "/" in name
            match = OF_RANK.search(name) if inside else None
            of_node = name.startswith(f"{TELEMETRY}/")  # then the number is a node's, not a rank's
            owner = int(match[1]) // (1 if of_node else processes) if match else None
            if owner == node or (owner is None and (node == 0 or (inside and name not in record))):
                record[name] = sent
    return record


def put(files: Mapping[str, Fetched], folder: RunFolder, clock_s: float) -> None:
    """Write a record into its local folder unless that is newer; another run's is set aside there.

    clock_s: how far the host's clock is ahead of ours. Identical files are not rewritten.
    """
    here = folder.read_attempts()
    there, _ = rows_in(files[ATTEMPTS].content if ATTEMPTS in files else b"")
    if _latest(here) > _latest(there) + max(-clock_s, 0.0):
        # Failures of ranks are still news: rank 0 may not have had time to record them.
        files = {name: sent for name, sent in files.items() if name.startswith(FAILURE_OF_RANK)}
    elif files and SUMMARY not in files:
        folder.summary.unlink(missing_ok=True)  # of the previous attempt: this one has none yet
    if None not in (_began(here), _began(there)) and _began(here) != _began(there) and files:
        folder.set_aside()
    # Settings come first, the summary last: a reader who sees it may rely on the other files.
    for name in sorted(files, key=lambda name: (name == SUMMARY, name != SETTINGS, name)):
        _write(folder.path / name, files[name], clock_s)


def _write(path: Path, sent: Fetched, clock_s: float) -> None:
    if path.is_file() and path.read_bytes() == sent.content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    written_unix = sent.unix - clock_s
    with draft_of(path) as draft:
        draft.write_bytes(sent.content)
        os.utime(draft, (written_unix, written_unix))


def _latest(rows: Sequence[Mapping[str, Any]]) -> float:
    """When an attempt was last started or ended; 0 if there is none."""
    return max((row.get("unix") or 0.0 for row in rows), default=0.0)


def _began(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """When the run was first started, which identifies the run; None if never."""
    return next((row.get("unix") for row in rows if row.get("event") == "start"), None)


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.stdout.buffer.write(TAR_FOLLOWS)
        send(Path(sys.argv[1]), sys.stdout.buffer)
    else:
        print(json.dumps(asdict(facts())))

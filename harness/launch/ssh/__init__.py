"""Machines that are reached by ssh: the flags that name them, and how they are addressed."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.core.provenance import ROOT
from harness.core.records.redact import without_home
from harness.core.settings import UserError
from harness.launch.choices import Host, Remote

HOST = re.compile(
    r"^(?:(?P<user>[\w.][\w.-]*)@)?(?P<name>[\w.][\w.-]*|\[[0-9a-fA-F:.%\w]+\])(?::(?P<port>\d+))?$"
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("with --launcher ssh")
    add = group.add_argument
    add("--hosts", metavar="A,B,...", help="[user@]host[:port], as ssh knows them")
    add("--hosts_file", metavar="FILE", help="the same, one per line; # begins a comment")
    add("--checkout", metavar="DIR", help="of this project on the hosts (where it is here)")
    # fmt: off
    add("--remote_python", metavar="FILE",
        help="on the hosts, relative to the checkout (.venv/bin/python)")
    add("--master_addr", metavar="ADDRESS",
        help="of the first host as the others reach it (as ssh reaches it)")
    add("--interface", metavar="NAME", help="for the traffic of training (the one ssh uses)")
    add("--ssh", metavar="COMMAND", help='ssh with your options: "ssh -F my_config" (ssh)')
    # fmt: on


FLAGS = ("hosts", "hosts_file", "checkout", "remote_python", "master_addr", "interface", "ssh")


def remote_of(flags: Mapping[str, Any]) -> Remote:
    """The choices that the flags make; UserError if they contradict each other."""
    if flags["launcher"] != "ssh":
        if unused := [name for name in FLAGS if flags[name] is not None]:
            raise UserError(f"--{unused[0]} needs --launcher ssh")
        return Remote()
    if (flags["hosts"] is None) == (flags["hosts_file"] is None):
        raise UserError("--launcher ssh needs either --hosts a,b or --hosts_file FILE")
    if flags["pack"]:
        raise UserError("--pack shares one machine: leave it out with --launcher ssh")
    if flags["hosts"] is not None:
        hosts = [_host("--hosts", text) for text in flags["hosts"].split(",")]
    else:
        hosts = _in_file(Path(flags["hosts_file"]))
    for host in hosts:
        if hosts.count(host) > 1:
            raise UserError(f"host {host} is named twice: every node needs its own host")
    return Remote(
        tuple(hosts),
        # The local shell has already expanded a ~; the hosts may have another home folder.
        checkout=without_home(flags["checkout"] or str(ROOT)),
        python=flags["remote_python"] or ".venv/bin/python",
        master_addr=flags["master_addr"],
        interface=flags["interface"],
        ssh=_command(flags["ssh"] or "ssh"),
    )


def _command(text: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UserError(f"--ssh {text}: {str(error).lower()}") from None
    if not words:
        raise UserError('--ssh: expected a command such as "ssh -F my_config"')
    return words


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

"""Whether hosts can measure one run together: what they say of themselves, compared."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any

from harness.launch.ssh.host import Facts
from harness.launch.ssh.hosts import Remote

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

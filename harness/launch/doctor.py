"""python -m harness doctor: what works on this machine, what does not, and what to do about it."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from harness.core.command_line import print_json
from harness.core.links import Link
from harness.core.process import last_line
from harness.core.provenance import (
    OPTIONAL,
    PACKAGES,
    ROOT,
    Driver,
    OptionalPackage,
    cache_root,
    installing,
    missing_packages,
    nvidia_driver,
)
from harness.core.records.disk import try_writing
from harness.core.records.redact import without_home
from harness.core.settings import UserError
from harness.launch.netns.emulation import EmulatedNodes
from harness.launch.places import amd_gpus, disturbed_by, others, this_machine
from harness.launch.slurm.cluster import Unreachable, partitions

OK, LIMITED, PROBLEM = "ok", "limited", "problem"
ENOUGH_GIB = 5  # for packages' caches, a model and its checkpoints
HUB_TIMEOUT_S = 5
LOAD_S = 120  # for torch and the driver
AGAIN = "run make in the checkout again, or pip install"  # in the way it was installed


@dataclass(frozen=True)
class Check:
    """One line: `limited` concerns only some commands, `problem` prevents training."""

    name: str
    state: str
    finding: str
    advice: str = ""


def run(options: argparse.Namespace) -> int:
    checks = examine()
    if options.json:
        print_json([asdict(check) for check in checks])
    else:
        for check in checks:
            print(f"{check.state:<8} {check.name:<9} {check.finding}")
            if check.advice:
                print(f"{'':<18} -> {check.advice}")
    return int(any(check.state == PROBLEM for check in checks))


def examine() -> list[Check]:
    facts = _environment()
    return [
        _packages(facts),
        _looked_at("devices", lambda: _devices(facts, nvidia_driver())),
        _looked_at("load", _load),
        _folder("cache", cache_root()),
        _folder("outputs", Path("outputs")),
        _hub(),
        _looked_at("ports", _ports),
        _nodes(),
        _tool("ssh", "sweep --launcher ssh", "install an OpenSSH client"),
        _slurm(),
        *map(_package, OPTIONAL.values()),
    ]


def _looked_at(name: str, look: Callable[[], Check]) -> Check:
    """Run a check that needs a package; if that is missing, the other checks still run."""
    try:
        return look()
    except ModuleNotFoundError as error:
        return Check(name, LIMITED, f"not checked: package {error.name} is missing")


def _environment() -> dict[str, Any] | str:
    """The facts of `harness env`, from a separate process; a text, if it fails, says why."""
    command = [sys.executable, "-m", "harness", "env"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LOAD_S)
    except subprocess.TimeoutExpired:
        return f"it did not load within {LOAD_S} s: the driver hangs, or the machine is busy"
    if done.returncode:
        return last_line(done.stderr) or "no message"
    return dict(json.loads(done.stdout))


def _packages(facts: dict[str, Any] | str) -> Check:
    if missing := missing_packages():
        return Check("packages", PROBLEM, f"not installed: {', '.join(missing)}", installing())
    if isinstance(facts, str):
        return Check("packages", PROBLEM, f"torch cannot be loaded: {facts}", AGAIN)
    versions = facts["versions"]
    shown = ", ".join(f"{name} {versions[name]}" for name in PACKAGES[:4])
    return Check("packages", OK, f"python {facts['python']}, {shown}")


def _devices(facts: dict[str, Any] | str, driver: Driver | None) -> Check:
    """Check the GPUs: one that the driver has but torch cannot use is a problem in every run."""
    machine = this_machine()
    if isinstance(facts, str):
        return Check("devices", PROBLEM, "unknown: see packages")
    cpus = f"{len(machine.cores)} cores, {facts['memory_gib']:g} GiB of memory"
    if driver is not None and driver.problem:
        finding = f"NVIDIA's driver does not answer: {driver.problem}"
        return Check("devices", PROBLEM, finding, "fix that; after an update, restart the machine")
    if facts["gpus"]:
        shown = f"driver {driver.version}" if driver else "no NVIDIA driver"
        return Check("devices", OK, f"{', '.join(facts['gpus'])}; {shown}; {cpus}")
    if driver is None or not driver.gpus:
        if amd := amd_gpus():
            finding = f"{amd} GPU(s) of AMD that torch does not use; training uses {cpus}"
            return Check("devices", LIMITED, finding, "for them: a ROCm build of torch")
        return Check("devices", OK, f"no NVIDIA GPU; training uses {cpus}")
    if not machine.gpus:
        return Check("devices", LIMITED, f"CUDA_VISIBLE_DEVICES hides {driver.gpus} GPU(s); {cpus}")
    build = f"for CUDA {facts['cuda']}" if facts["cuda"] else "without CUDA"
    return Check(
        "devices",
        PROBLEM,
        f"{driver.gpus} GPU(s), but torch cannot use them: it is built {build}, and the driver "
        f"{driver.version} runs CUDA up to {'.'.join(map(str, driver.cuda))}",
        driver.advice,
    )


def _load() -> Check:
    busy = disturbed_by(others(this_machine()))
    if busy is None:
        return Check("load", OK, "nobody else uses the cores or GPUs")
    return Check("load", LIMITED, busy, "other programs will distort times measured now")


def _folder(name: str, path: Path) -> Check:
    existing, error = try_writing(path)
    shown = without_home(str(path))
    if error is not None:
        move = "set HF_HOME to" if name == "cache" else "give --output_dir"
        reason = f"{shown} cannot be written: {error.strerror}"
        return Check(name, PROBLEM, reason, f"{move} a folder of yours")
    free = shutil.disk_usage(existing).free / 2**30
    finding = f"{shown}, {free:,.0f} GiB free"
    if free < ENOUGH_GIB:
        return Check(name, LIMITED, finding, "a large model and its checkpoints need more")
    return Check(name, OK, finding)


def _hub() -> Check:
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    works = "--tiny, local files and what the cache has work without it"
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return Check("hub", LIMITED, f"HF_HUB_OFFLINE is set: {works}")
    if not endpoint.startswith(("http://", "https://")):
        return Check(
            "hub", PROBLEM, f"HF_ENDPOINT={endpoint} is not an address", "unset HF_ENDPOINT"
        )
    request = urllib.request.Request(endpoint, method="HEAD")  # noqa: S310 - looked at above
    try:
        with urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S):  # noqa: S310 - likewise
            pass
    except urllib.error.HTTPError:
        pass  # the endpoint answers
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        return Check("hub", LIMITED, f"{endpoint} does not answer ({reason})", works)
    return Check("hub", OK, f"{endpoint} answers")


def _ports() -> Check:
    """Ports that torch itself opens to everybody: whoever reaches one can run code."""
    import psutil

    addresses = [
        a.address
        for known in psutil.net_if_addrs().values()
        for a in known
        if a.family in (socket.AF_INET, socket.AF_INET6)
        and not ip_address(a.address.partition("%")[0]).is_loopback
    ]
    if not addresses:
        return Check("ports", OK, "no network: nobody else reaches what torchrun opens")
    return Check(
        "ports",
        LIMITED,
        "plain torchrun does not authenticate: anyone who can reach "
        f"{', '.join(addresses)} can run code here",
        "start with python -m harness.train.torchrun, as sweeps do, or close the ports above 1023",
    )


def _nodes() -> Check:
    try:
        with EmulatedNodes.open(1, Link()):
            return Check("nodes", OK, "can be emulated, links by a relay in user space")
    except (UserError, OSError) as error:
        needed = "needed for harness nodes and sweep --launcher netns"
        return Check("nodes", LIMITED, f"cannot be emulated: {error}", needed)


def _tool(name: str, needed_for: str, advice: str) -> Check:
    if path := shutil.which(name):
        return Check(name, OK, path)
    return Check(name, LIMITED, f"not found; {needed_for} needs it", advice)


def _slurm() -> Check:
    advice = "run it on a login node; --dry_run works here"
    check = _tool("sbatch", "sweep --launcher slurm", advice)
    if check.state == OK:
        try:
            return Check("sbatch", OK, f"{check.finding}; partitions: {', '.join(partitions())}")
        except Unreachable as error:
            reason = f"{check.finding}, but no cluster answers: {error}"
            return Check("sbatch", LIMITED, reason, advice)
    return check


def _package(package: OptionalPackage) -> Check:
    if not package.is_missing:
        return Check(package.name, OK, "installed")
    missing = f"not installed; {package.needed_for} needs it"
    return Check(package.name, LIMITED, missing, package.install)

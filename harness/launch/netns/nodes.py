"""Emulated nodes for sweeps (Netns), and for a command: python -m harness nodes N -- COMMAND."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness.core.links import Link, Network, link_of
from harness.core.process import GRACE_S, ending_signals, warn
from harness.core.provenance import NODES_LINK, SHARED_GPUS
from harness.core.settings import UserError, nearest
from harness.core.strategies import STRATEGIES
from harness.core.tasks import TASKS
from harness.launch.agents import Node
from harness.launch.netns.emulation import EmulatedNodes
from harness.launch.places import (
    Local,
    Machine,
    Options,
    launched,
    others,
    place_facts,
    this_machine,
    threads_variable,
    warning_of,
    why_not_on,
)
from harness.launch.plan import PORT, Job, script_of

OUR_SCRIPTS = {f"{name}.py" for name in TASKS}
# Flags of python and torchrun that run something else than a script; "-mNAME" is one word.
NO_SCRIPT = ("-c", "-m", "--module", "--no-python", "--no_python")


class Netns(Local):
    name = "netns"

    def __init__(self, options: Options, here: Machine | None = None) -> None:
        super().__init__(options, here)
        if options.pack:
            raise UserError("--pack: runs side by side would share the links; leave it out")
        self.emulated: EmulatedNodes | None = None

    def why_not(self, job: Job) -> str | None:
        return why_not_on(self.machine, job, self.options.oversubscribe)

    def plan(self, job: Job, scripts_in: str) -> list[str]:
        if self.options.elastic is not None:
            # Node by node, as the first one hosts the store. Outside of the nodes they would train
            # without the link.
            nodes = f"on emulated nodes, node by node (link {job.link}):"
            return [f"# {line}" for line in (nodes, *super().plan(job, scripts_in))]
        variables = [f"{k}={v}" for k, v in self.environment.items()]
        link = [] if job.link == Link() else [f"--link={job.link}"]
        nodes = shlex.join(["python", "-m", "harness", "nodes", str(job.nodes), *link])
        torchrun = f"torchrun --nnodes={job.nodes} --nproc_per_node={job.processes}"
        return [" ".join([*variables, nodes, "--", torchrun, script_of(job, scripts_in)])]

    def open(self, jobs: Sequence[Job]) -> None:
        hosted = [job.nodes for job in jobs if self.why_not(job) is None]
        if hosted:
            self.emulated = EmulatedNodes.open(max(hosted), Link())

    def nodes(self) -> list[Node]:
        assert self.emulated is not None
        return self.emulated.nodes

    def prepare(self, job: Job) -> None:
        assert self.emulated is not None
        self.emulated.change(job.link, job.nodes)

    def variables(self, job: Job) -> dict[str, str]:
        """Keep NCCL from bypassing the link; devices of one node may reach each other directly."""
        if job.nodes == 1 or job.devices > 1:
            return {}
        return {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}

    def facts(self, job: Job) -> dict[str, Any]:
        return {**super().facts(job), **emulation_facts(job.link, job.nodes)}

    def close(self) -> None:
        if self.emulated is not None:
            self.emulated.close()


def emulation_facts(link: Link | Network, count: int) -> dict[str, Any]:
    requested = None if link == Link() else link.facts(count)
    return {"emulator": "relay", "link": requested}


def run(options: argparse.Namespace) -> int:
    asked = [number for number in ending_signals() if number != signal.SIGINT]
    before = [signal.signal(number, lambda n, _: sys.exit(128 + n)) for number in asked]
    link = link_of(options.link)
    if options.command:
        refuse_missing_script(options.command)
    if options.nodes > 1 and options.command:
        refuse_apart(options.command)
    machine = this_machine()
    gpus = gpus_of(options.nodes, machine.gpus, options.oversubscribe)
    use = others(machine)  # before nodes are opened, which is work itself
    try:
        os.environ[NODES_LINK] = str(link)
        if 0 < len(machine.gpus) < options.nodes:
            os.environ[SHARED_GPUS] = str(len(machine.gpus))
        with EmulatedNodes.open(options.nodes, link) as emulated:
            place = place_facts("netns") | emulation_facts(link, options.nodes)
            launch = launched(None, Options(cold=True), use, place)
            os.environ["HARNESS_LAUNCH"] = json.dumps(launch)
            if not options.command:
                return show(emulated.nodes)
            if warning := warning_of(use):
                warn(warning)
            threads = threads_variable(machine.threads)
            return run_on(emulated.nodes, options.command, gpus, threads)
    finally:
        for number, handler in zip(asked, before, strict=True):
            signal.signal(number, handler)


def gpus_of(nodes: int, gpus: Sequence[str], oversubscribe: bool) -> list[Sequence[str]]:
    """The GPUs of each node, equally many, as NCCL would not notice that two nodes share one.

    Empty if the machine has none.
    """
    per_node = len(gpus) // nodes
    if gpus and not per_node and not oversubscribe:
        raise UserError(
            f"{nodes} nodes and {len(gpus)} GPU(s): CUDA_VISIBLE_DEVICES= trains on the CPU, and "
            "--oversubscribe lets nodes share a GPU, where each slows the others"
        )
    if not per_node:
        return [(gpus[n % len(gpus)],) for n in range(nodes if gpus else 0)]
    return [gpus[n * per_node : (n + 1) * per_node] for n in range(nodes)]


def run_on(
    nodes: list[Node], command: list[str], gpus: list[Sequence[str]], variables: dict[str, str]
) -> int:
    """Run a command on every node, with each output line marked; the first failure ends all."""
    command = torchrun_of_ours(command)
    started, muted, asked = list[subprocess.Popen[bytes]](), threading.Event(), list[int]()
    # Noted, not raised: an exception inside Popen.poll() could leave its lock held forever.
    before = {n: signal.signal(n, lambda number, _: asked.append(number)) for n in ending_signals()}
    try:
        for number in range(len(nodes)):
            started.append(_start(nodes, number, command, gpus, variables))
        printers = [
            threading.Thread(target=_print, args=(node.name, process, muted))
            for node, process in zip(nodes, started, strict=True)
        ]
        for printer in printers:
            printer.start()
        code = _wait(started, asked, muted)
        for printer in printers:
            printer.join(timeout=0 if _at_once(asked) else 5)
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        for number, handler in before.items():
            signal.signal(number, handler)
    if asked:
        raise KeyboardInterrupt if asked[0] == signal.SIGINT else SystemExit(128 + asked[0])
    return code


def torchrun_of_ours(command: list[str]) -> list[str]:
    """The command, with our torchrun in place of torchrun: no traceback if node 0 ends first."""
    if command[0] == "torchrun":
        return [sys.executable, "-m", "harness.train.torchrun", *command[1:]]
    if command[0].startswith("-") or command[0].endswith(".py"):
        line = shlex.join(["torchrun", *command])
        raise UserError(f"{command[0]} is not a command: did you mean -- {line}?")
    return command


def refuse_apart(command: list[str]) -> None:
    """Refuse a command that would train each node alone, into one record: only peers find each
    other without a launcher.
    """
    script = next((word for word in command[1:] if not word.startswith("-")), "")
    is_ours = Path(command[0]).name.startswith("python") and Path(script).name in OUR_SCRIPTS
    words = {*command, *map("=".join, pairwise(command))}
    meeting = (name for name, each in STRATEGIES.items() if each.has_peers)
    if is_ours and not any(f"--strategy={name}" in words for name in meeting):
        line = shlex.join(["torchrun", *command[command.index(script) :]])
        raise UserError(f"each node would train alone: did you mean -- {line}?")


def refuse_missing_script(command: list[str]) -> None:
    """Refuse a script that is not there: torchrun would say so on every node, in a long banner."""
    is_python = Path(command[0]).name.startswith(("python", "torchrun"))
    at = next((n for n, word in enumerate(command) if word.endswith(".py")), None)
    if not is_python or at is None or any(map(_runs_another, command[1:at])):
        return
    script = Path(command[at])
    if not script.exists() and not command[at].startswith("-"):
        names = sorted(str(script.with_name(file.name)) for file in script.parent.glob("*.py"))
        hint = nearest(str(script), names, "")
        raise UserError(f"{script}: there is no such file{hint and f': {hint}'}")


def _runs_another(word: str) -> bool:
    """Whether, after this word of python or torchrun, a name that ends in .py is not the script."""
    return word.startswith(NO_SCRIPT) or (not word.startswith("-") and Path(word).exists())


def show(nodes: list[Node]) -> int:
    """Print how to enter each node, and keep the nodes open until Ctrl-C."""
    for node in nodes:
        print(f"{node.name}  {node.address}  {' '.join(node.prefix)} bash")
    print("Ctrl-C ends them", flush=True)
    while True:
        time.sleep(3600)


def _start(
    nodes: list[Node], number: int, command: list[str], gpus: list[Sequence[str]],
    variables: dict[str, str],
) -> subprocess.Popen[bytes]:  # fmt: skip
    node = nodes[number]
    # Prefer the torchrun of our Python environment, whether activated or not.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    if shutil.which(command[0], path=path) is None:
        raise UserError(f"{command[0]}: no such command on the PATH, nor beside {sys.executable}")
    return node.start(
        [sys.executable, "-m", "harness.core.process", str(os.getpid()), *command],
        {
            **variables,
            "PATH": path,
            # Defaults for flags of torchrun that the command does not give.
            "PET_NNODES": str(len(nodes)),
            "PET_NODE_RANK": str(number),
            "PET_MASTER_ADDR": nodes[0].address,
            "PET_MASTER_PORT": str(PORT),
            **({"CUDA_VISIBLE_DEVICES": ",".join(gpus[number])} if gpus else {}),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def _wait(
    processes: list[subprocess.Popen[bytes]], asked: Sequence[int], muted: threading.Event
) -> int:
    """Wait until all have ended; returns the exit code of the first that failed.

    After a failure, or once a signal has asked for the end, the others may record their results,
    unless Ctrl-C comes a second time.
    """
    code, until = 0, float("inf")
    while None in (codes := [process.poll() for process in processes]):
        failed = next((c for c in codes if c), 0)
        if asked:
            muted.set()  # whoever stopped the command knows why it ends
        if (failed or asked) and until == float("inf"):
            code, until = failed, time.monotonic() + GRACE_S
            for process in processes:
                process.terminate()
        if time.monotonic() > until or _at_once(asked):
            break
        time.sleep(0.05)
    code = code or next((p.returncode for p in processes if p.returncode), 0)
    return 128 - code if code < 0 else code


def _at_once(asked: Sequence[int]) -> bool:
    """Whether Ctrl-C has come a second time."""
    return asked.count(signal.SIGINT) > 1


def _print(name: str, process: subprocess.Popen[bytes], muted: threading.Event) -> None:
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if muted.is_set():
                continue  # read on, so that the process does not block
            sys.stdout.write(f"[{name}] {line.decode(errors='replace')}")
            sys.stdout.flush()
    except BrokenPipeError:
        process.terminate()  # the reader has seen enough, as `head` has

"""Runs on other machines, which need only sshd and a checkout of this project."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.core.links import Link
from harness.core.process import last_line, warn
from harness.core.provenance import commit, source_checksum
from harness.core.records import rows_in
from harness.core.rules import why_a_gpu
from harness.core.settings import UserError
from harness.launch.agents import Node
from harness.launch.choices import NO_CHECKOUT, SSH_FAILED, Host, Remote
from harness.launch.outcome import State
from harness.launch.places import Devices, Machines, Options, threads_variable
from harness.launch.plan import PORT, Job, script_of, torchrun
from harness.launch.ssh.hosts import (
    TAR_FOLLOWS,
    Fetched,
    HostFacts,
    address_of,
    merged,
    problems,
    put,
    received,
    warnings,
)

ANSWER_S = 60.0  # for a host to report its facts, even from a slow disk
FETCH_S = 300.0  # for a record to be transferred
NO_PROGRAM = 127  # exit code of env
# Advice for each message of ssh.
HINTS = {
    "Permission denied": "it must let you in without a password (ssh-copy-id)",
    "Host key verification failed": "connect once by hand to see its key",
    "Could not resolve hostname": "see --hosts",
    "Connection refused": "is sshd running there?",
    "timed out": "is it on, and reachable from here?",
}


@dataclass(frozen=True, kw_only=True)
class SshNode(Node):
    """A host reached by ssh; its processes end with the connection that started them."""

    host: Host
    there: Remote

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], **pipes: Any
    ) -> subprocess.Popen[bytes]:
        line = self.there.in_checkout(command, {**environment, **self.environment})
        # In a session of its own, so that Ctrl-C reaches only the runner.
        return subprocess.Popen(self.there.ssh_to(self.host, line), start_new_session=True, **pipes)


class Ssh(Machines):
    name = "ssh"
    here = False

    def __init__(self, options: Options, facts: Mapping[Host, HostFacts] | None = None) -> None:
        super().__init__(options)
        self.remote = options.remote
        self.host_facts = dict(facts or {})  # of the hosts that have answered
        self.clocks: dict[Host, float] = {}  # how far each host's clock is ahead of ours

    def why_not(self, job: Job) -> str | None:
        hosts = self.remote.hosts
        if job.nodes > len(hosts):
            return f"needs {job.nodes} nodes: --hosts names {len(hosts)}"
        if job.link != Link():
            return f"link {job.link}: the links of real hosts cannot be changed (see --launcher)"
        for host in [host for host in hosts[: job.nodes] if host in self.host_facts]:
            machine = self.host_facts[host].machine.of(job)
            if not machine.gpus and (reason := why_a_gpu(job.settings)):
                return f"{host}: {reason.removeprefix('--')}"
            shared = self.options.oversubscribe and not machine.gpus
            if job.devices > machine.devices and not shared:
                what = f"{len(machine.gpus)} GPU(s)" if machine.gpus else f"{machine.devices} cores"
                return f"needs {job.devices} devices a node: {host} has {what}"
        return None

    def plan(self, job: Job, scripts_in: str) -> list[str]:
        """Without asking hosts: the first is addressed by name, and processes have one thread."""
        master = self.remote.master_addr or self.remote.hosts[0].name
        lines = []
        for node, host in enumerate(self.remote.hosts[: job.nodes]):
            flags = torchrun(job, node, master, PORT, self.options.elastic)
            environment = {**self.environment, **self._interfaces(host)}
            variables = shlex.join(f"{k}={v}" for k, v in environment.items())
            python = shlex.quote(self.remote.python)
            started = [f"{python} -m harness.train.torchrun", shlex.join(flags), script_of(job)]
            command = f"cd {self.remote.folder} && {variables} {' '.join(started)}"
            # All but the last run in the background, as they wait for one another.
            lines.append(
                shlex.join([*self.remote.ssh, "-n", *host.arguments, command])
                + (" &" if node < job.nodes - 1 else "")
            )
        return lines

    def dry_run(self, states: list[State], folder: Path) -> list[str]:
        which = "1 is for hosts without GPUs: with GPUs the sweep takes a host's cores per GPU"
        if chosen := os.environ.get("OMP_NUM_THREADS"):
            which = f"{chosen} is this shell's, and the sweep takes it, too"
        return [f"# OMP_NUM_THREADS={which}", *super().dry_run(states, folder)]

    @property
    def environment(self) -> dict[str, str]:
        """The same number of threads on every host, for every run."""
        fewest = min((facts.machine.threads for facts in self.host_facts.values()), default=1)
        return threads_variable(fewest) | super().environment

    def _interfaces(self, host: Host) -> dict[str, str]:
        """By default gloo uses the address of the host's own name, which is often 127.0.1.1."""
        if chosen := self.remote.interface:
            return {"GLOO_SOCKET_IFNAME": chosen, "NCCL_SOCKET_IFNAME": chosen}
        interface = self.host_facts[host].interface if host in self.host_facts else None
        return {"GLOO_SOCKET_IFNAME": interface} if interface else {}

    def free(self, job: Job, taken: set[str]) -> Devices | None:
        hosts = self.remote.hosts[: job.nodes]
        return tuple(tuple(self.host_facts[host].gpus[: job.devices]) for host in hosts)

    def visible(self, devices: Devices) -> Devices:
        return devices if any(devices) else ()

    def open(self, jobs: Sequence[Job]) -> None:
        """Ask all hosts at once and report the problems of every one."""
        answers = self._at_all(self.remote.hosts, self._ask)
        if errors := [text for text in answers.values() if isinstance(text, str)]:
            raise UserError("; ".join(errors))
        self.host_facts = {host: f for host, f in answers.items() if isinstance(f, HostFacts)}
        by_name = {str(host): facts for host, facts in self.host_facts.items()}
        here = {"commit": commit()["commit"], "source": source_checksum()}
        if errors := problems(by_name, self.remote, here):
            raise UserError("; ".join(errors))
        busy = [f"{name}: {f.disturbed}" for name, f in by_name.items() if f.disturbed]
        if busy and self.options.isolation == "error":
            raise UserError(f"{busy[0]}: wait, or measure anyway with --isolation warn")
        lines = warnings(by_name, {str(h): s for h, s in self.clocks.items()}, here)
        if self.options.isolation != "off":
            lines += [f"{line}: this disturbs what is measured now" for line in busy]
        for line in lines:
            warn(line)

    def nodes(self) -> list[Node]:
        first = self.remote.hosts[0]
        addresses = {h: address_of(f, self.remote) or h.name for h, f in self.host_facts.items()}
        if self.remote.master_addr:
            addresses[first] = self.remote.master_addr
        return [
            SshNode(
                name=str(host),
                address=addresses[host],
                environment=self._interfaces(host),
                remote=True,
                python=self.remote.python,
                host=host,
                there=self.remote,
            )
            for host in self.remote.hosts
        ]

    def collect(self, job: Job) -> str | None:
        """Fetch what each node has written; the host of rank 0 has the record."""
        hosts = self.remote.hosts[: job.nodes]
        answers = self._at_all(hosts, lambda host: self._fetch(host, job))
        errors = {host: text for host, text in answers.items() if isinstance(text, str)}
        for line in (text for host, text in errors.items() if host != hosts[0]):
            warn(f"files were not fetched: {line}")
        by_node = {n: a for n, h in enumerate(hosts) if not isinstance(a := answers[h], str)}
        put(merged(by_node, job.processes), job.folder, self.clocks[hosts[0]])
        return errors.get(hosts[0])

    def _at_all(self, hosts: Sequence[Host], ask: Callable[[Host], Any]) -> dict[Host, Any]:
        with ThreadPoolExecutor(len(hosts)) as pool:
            return dict(zip(hosts, pool.map(ask, hosts), strict=True))

    def _ask(self, host: Host) -> HostFacts | str:
        answer = self._run(host, ["-m", "harness.launch.ssh.hosts"], ANSWER_S)
        if isinstance(answer, str):
            return answer
        rows, _ = rows_in(answer)  # the host's shell may print lines of its own
        if not rows:
            return f"{host}: reports no facts, which are a JSON object on a line of its own"
        try:
            facts = HostFacts(**rows[-1])
        except TypeError:
            return f"{host}: {self.remote.checkout} is of another version: check out the same"
        self.clocks[host] = facts.unix - time.time()
        return facts

    def _fetch(self, host: Host, job: Job) -> dict[str, Fetched] | str:
        module = ["-m", "harness.launch.ssh.hosts", str(job.folder.path)]
        answer = self._run(host, module, FETCH_S)
        if isinstance(answer, str):
            return answer
        _, mark, tar = answer.partition(TAR_FOLLOWS)
        return received(tar) if mark else f"{host}: sends no records"

    def _run(self, host: Host, arguments: Sequence[str], within_s: float) -> bytes | str:
        """The output of Python on a host; or, in a line with the host's name, why there is none."""
        command = self.remote.in_checkout([self.remote.python, *arguments], {})
        try:
            done = subprocess.run(
                self.remote.ssh_to(host, command),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=within_s,
                start_new_session=True,
                check=False,
            )
        except OSError as error:
            return f"{host}: {self.remote.ssh[0]}: {error.strerror}"
        except subprocess.TimeoutExpired:
            return f"{host}: has not answered for {within_s:.0f} s"
        return done.stdout if done.returncode == 0 else self._why(host, done)

    def _why(self, host: Host, done: subprocess.CompletedProcess[bytes]) -> str:
        printed = done.stderr.decode(errors="replace")
        reason = last_line(printed) or f"exit code {done.returncode}"
        where = self.remote.checkout
        if done.returncode == SSH_FAILED:
            hint = next((hint for text, hint in HINTS.items() if text in reason), None)
            return f"{host}: {reason.rstrip('.')}" + (f": {hint}" if hint else "")
        if done.returncode == NO_CHECKOUT:
            return f"{host}: no folder {where}: clone this project there, or set --checkout"
        if done.returncode == NO_PROGRAM:
            return (
                f"{host}: no {self.remote.python} in {where}: run make there, or set "
                "--remote_python"
            )
        return f"{host}: {where} does not run there: {reason}: check out the same commit as here"

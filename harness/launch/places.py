"""Places that can host runs: which runs they can host, and how they start them."""

from __future__ import annotations

import os
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.core.links import Link
from harness.core.process import usable_cores
from harness.core.provenance import OPTIONAL, PEFT, ROOT, nvidia_driver, visible_gpus
from harness.core.records import DISTURBING_SHARE, SKIPPED
from harness.core.rules import why_a_gpu
from harness.core.strategies import strategy_of
from harness.launch.agents import Node, TorchrunAgent, WarmAgent
from harness.launch.choices import Remote, Slurm
from harness.launch.launcher import Launcher
from harness.launch.outcome import State, settled
from harness.launch.plan import Elastic, Job, commands

Devices = tuple[tuple[str, ...], ...]  # GPUs or cores, by node
LOOKS = 6  # at a busy machine, before it counts as disturbed


@dataclass(frozen=True)
class Machine:
    gpus: tuple[str, ...]  # as CUDA_VISIBLE_DEVICES names them
    cores: tuple[int, ...]

    @property
    def devices(self) -> int:
        """Number of devices: the GPUs, or the cores where there is no GPU."""
        return len(self.gpus) or len(self.cores)

    def of(self, job: Job) -> Machine:
        """The machine as a run uses it: without GPUs if the run trains on the CPU."""
        return replace(self, gpus=()) if job.settings.passed.get("use_cpu") else self

    @property
    def threads(self) -> int:
        """Threads per process; the same for every run of a sweep, so that only set-ups differ."""
        return max(1, len(self.cores) // len(self.gpus)) if self.gpus else 1


CORE = "core "  # before its number, as GPUs have numbers, too


def threads_variable(threads: int) -> dict[str, str]:
    """The number of threads per process, unless the user has set one: torchrun sets it only for
    several processes per node, and a single process would use every core.
    """
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}


def this_machine() -> Machine:
    return Machine(_gpus(), tuple(usable_cores()))


def why_not_on(machine: Machine, job: Job, oversubscribe: bool = False) -> str | None:
    """Why this machine lacks devices or packages for a run; None if it lacks none."""
    machine = machine.of(job)
    packages = (strategy_of(job.settings).package, PEFT.name if job.settings.lora else None)
    for package in (OPTIONAL[name] for name in packages if name):
        if package.is_missing:
            return f"{package.name} is not installed: {package.install}"
    if not machine.gpus and (reason := why_a_gpu(job.settings)):
        return reason.removeprefix("--")
    needed = job.nodes * job.devices
    if needed <= machine.devices or (oversubscribe and not machine.gpus):
        return None
    if machine.gpus:
        return f"needs {needed} devices: this machine has {len(machine.gpus)} GPU(s)"
    return (
        f"needs {needed} devices: this machine has {len(machine.cores)} cores, of which one "
        "stands for one device (--oversubscribe lets them share)"
    )


def others(machine: Machine, interval_s: float = 0.3) -> dict[str, Any]:
    """How others use this machine before a run begins, while no process of ours is busy.

    A busy machine is checked again, since a command that has just ended causes load for a moment.
    """
    import psutil  # not at the top: `doctor` runs without packages

    for _ in range(LOOKS):
        busy = round(psutil.cpu_percent(interval_s) / 100, 3)
        if busy <= DISTURBING_SHARE:
            break
    return {"cpu_busy_share": busy, "gpu_processes": _gpu_processes(machine)}


def disturbed_by(others: dict[str, Any]) -> str | None:
    """The use by others that would disturb a measurement, in words; None if there is none."""
    reasons = []
    if others["gpu_processes"]:
        reasons.append(f"{others['gpu_processes']} other process(es) use the GPUs")
    if others["cpu_busy_share"] > DISTURBING_SHARE:
        reasons.append(f"others use {others['cpu_busy_share']:.0%} of the cores")
    return " and ".join(reasons) or None


def warning_of(others: dict[str, Any]) -> str | None:
    """A warning for the user if others would disturb the measurement; else None."""
    busy = disturbed_by(others)
    return busy and f"{busy}: this disturbs what is measured now"


def _gpus() -> tuple[str, ...]:
    """The visible GPUs, named as by CUDA_VISIBLE_DEVICES; none without a driver."""
    driver = nvidia_driver()
    count = driver.gpus if driver else amd_gpus() if _torch_is_for_amd() else 0
    return visible_gpus(count) if count else ()


def _torch_is_for_amd() -> bool:
    """Whether torch is a ROCm build, found without loading it; other builds train on the CPU even
    beside an AMD GPU.
    """
    spec = find_spec("torch")
    build = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    text = build.read_text() if build and build.is_file() else ""
    return re.search(r"^hip\b.*= *['\"]", text, re.MULTILINE) is not None


def amd_gpus(nodes: Path = Path("/sys/class/kfd/kfd/topology/nodes")) -> int:
    """Number of AMD GPUs in the kernel's list, which also has CPUs: those have no SIMD units."""
    texts = (file.read_text() for file in nodes.glob("*/properties"))
    return sum(re.search(r"^simd_count [1-9]", text, re.MULTILINE) is not None for text in texts)


def _gpu_processes(machine: Machine) -> int | None:
    """Processes on the visible GPUs that are not ours; None where the driver does not list them."""
    if not machine.gpus:
        return 0
    import psutil
    import pynvml

    family = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    pids: set[int] = set()
    try:
        pynvml.nvmlInit()
        for name in machine.gpus:
            device = (
                pynvml.nvmlDeviceGetHandleByIndex(int(name))
                if name.isdigit()
                else pynvml.nvmlDeviceGetHandleByUUID(name)
            )
            pids |= {p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(device)}
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    return len(pids - family)


@dataclass
class Options:
    """How a sweep is run; nothing here changes what is measured."""

    output_dir: str = "outputs"
    launcher: str = "local"
    oversubscribe: bool = False
    elastic: Elastic | None = None
    timeout_s: float | None = None
    rerun: str | None = None  # failed | disturbed | all
    fail_fast: bool = False
    pack: bool = False
    cold: bool = False
    isolation: str = "warn"  # warn | error | off
    remote: Remote = field(default_factory=Remote)
    slurm: Slurm = field(default_factory=Slurm)


def place_facts(launcher: str) -> dict[str, Any]:
    """The keys about its place that every record has; a place overrides those that apply to it."""
    return {"launcher": launcher, "emulator": None, "link": None, "processes_per_core": None}


def launched(
    sweep: str | None, options: Options, others: Mapping[str, object], place: Mapping[str, object]
) -> dict[str, object]:
    """`launch` in the environment.json of a run. others: how others used the machine.

    sweep: its name; None for `harness nodes`.
    """
    return {
        "sweep": sweep,
        **place,
        "start": "cold" if options.cold else "warm",
        "packed": options.pack,
        "cpu_busy_share": others.get("cpu_busy_share"),
        "gpu_processes": others.get("gpu_processes"),
    }


class Place(ABC):
    """A place that can host runs."""

    name: str
    in_turn = True  # whether runs are started one after the other, in order

    def __init__(self, options: Options) -> None:
        self.options = options

    @abstractmethod
    def why_not(self, job: Job) -> str | None:
        """Why this place cannot host a run; None if it can."""

    @abstractmethod
    def dry_run(self, states: list[State], folder: Path) -> list[str]:
        """What would be run, as commands to paste; runs that are done or impossible as comments."""

    def commands(self, state: State) -> list[str]:
        """The commands that measure a run, as dry_run() shows them; none where an array of jobs
        measures it.
        """
        return []

    def open(self, jobs: Sequence[Job]) -> None:
        """Prepare the place for these runs; UserError, in one line, if that is impossible."""

    def facts(self, job: Job) -> dict[str, Any]:
        """What the record of a run says about the place."""
        return place_facts(self.name)

    def close(self) -> None:
        """Release everything that open() acquired."""


class Machines(Place):
    """A place whose nodes this process starts runs on, one after the other."""

    here = True  # whether runs compute on this machine

    @abstractmethod
    def plan(self, job: Job, scripts_in: str) -> list[str]:
        """The commands that measure a run, as a person would type them; without side effects."""

    def dry_run(self, states: list[State], folder: Path) -> list[str]:
        lines = []
        for state in states:
            planned = self.commands(state)
            outcome = settled(state.job.folder.outcome(), self.options.rerun)
            if why := f"skipped: {state.reason}" if state.state == SKIPPED else outcome:
                planned = [f"# {why}", *(f"# {line}" for line in planned)]
            lines += planned
        return lines

    def commands(self, state: State) -> list[str]:
        again = ("--rerun",) if self.options.rerun == "all" else ()
        return self.plan(replace(state.job, argv=(*state.job.argv, *again)), f"{ROOT}/")

    @abstractmethod
    def nodes(self) -> list[Node]:
        """The open nodes."""

    def start(self, log: Path) -> Launcher:
        agent_type = TorchrunAgent if self.options.cold else WarmAgent
        return Launcher(self.nodes(), self.environment, log, agent_type)

    def prepare(self, job: Job) -> None:
        """Called before a run: set its link."""

    def collect(self, job: Job) -> str | None:
        """Called after a run: fetch its record; returns why that failed, or None."""
        return None

    def free(self, job: Job, taken: set[str]) -> Devices | None:
        """Devices for a run that no other run uses, by node; None: wait."""
        return ()

    def visible(self, devices: Devices) -> Devices:
        """The GPUs that the ranks of each node may see; empty: all."""
        return ()

    @property
    def environment(self) -> dict[str, str]:
        """The environment of every process on every node."""
        # Restarted ranks would otherwise read old addresses from the first attempt's store.
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if self.options.elastic else {}

    def variables(self, job: Job) -> dict[str, str]:
        """Further environment variables for the ranks of one run."""
        return {}


class Local(Machines):
    """This machine, as one node, or as several if the strategy needs no launcher to join them."""

    name = "local"

    def __init__(self, options: Options, here: Machine | None = None) -> None:
        super().__init__(options)
        self.machine = here or this_machine()
        self.node_count = 1

    def why_not(self, job: Job) -> str | None:
        if job.nodes > 1 and not job.survives_node_loss:
            return f"needs {job.nodes} nodes: the local launcher has one; use --launcher netns"
        if job.link != Link():
            return (
                f"link {job.link}: the local launcher cannot slow a link down; use --launcher netns"
            )
        return why_not_on(self.machine, job, self.options.oversubscribe)

    def plan(self, job: Job, scripts_in: str) -> list[str]:
        variables = [shlex.join([f"{k}={v}"]) for k, v in self.environment.items()]
        gpus = self.machine.of(job).gpus
        if gpus and job.devices < len(gpus):
            variables.insert(
                0, shlex.join([f"CUDA_VISIBLE_DEVICES={','.join(gpus[: job.devices])}"])
            )
        planned = commands(job, scripts_in, self.options.elastic, "127.0.0.1")
        return [" ".join([*variables, line]) for line in planned]

    def open(self, jobs: Sequence[Job]) -> None:
        self.node_count = max((job.nodes for job in jobs if job.survives_node_loss), default=1)

    def nodes(self) -> list[Node]:
        return [Node() for _ in range(self.node_count)]

    def free(self, job: Job, taken: set[str]) -> Devices | None:
        """Free devices by node; with --oversubscribe, more processes than cores share them all."""
        machine = self.machine.of(job)
        every = machine.gpus or tuple(f"{CORE}{core}" for core in machine.cores)
        left = [device for device in every if device not in taken]
        if job.nodes * job.devices > len(every):
            return (every,) * job.nodes if not taken else None
        if job.nodes * job.devices > len(left):
            return None
        return tuple(
            tuple(left[node * job.devices : (node + 1) * job.devices]) for node in range(job.nodes)
        )

    def visible(self, devices: Devices) -> Devices:
        return devices if self.machine.gpus else ()

    @property
    def environment(self) -> dict[str, str]:
        return threads_variable(self.machine.threads) | super().environment

    def facts(self, job: Job) -> dict[str, Any]:
        share = round(job.nodes * job.processes / len(self.machine.cores), 3)
        return {
            **super().facts(job),
            "processes_per_core": None if self.machine.of(job).gpus else share,
        }

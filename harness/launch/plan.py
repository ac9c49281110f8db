"""From a sweep to its runs: every point, checked, with the command that measures it. Pure text."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.core.command_line import bare, to_argv
from harness.core.identity import number, run_id
from harness.core.links import Link, Network, link_of
from harness.core.records import FAILURES, FINISHED, RunFolder
from harness.core.rules import place, resolve
from harness.core.settings import Settings, UserError, parse_setup
from harness.core.strategies import STRATEGIES
from harness.core.topology import World
from harness.launch.slurm.flags import Slurm
from harness.launch.ssh.hosts import Remote
from harness.launch.sweepfile import HOLDS, LR_RULES, Point, Sweep

# Repetitions of one measurement: never an axis of the table.
REPLICATES = ("seed", "repeat")
# A node that is gone is missed after 5 s; those that are left wait 5 s for others to come.
KEEP_ALIVE = {
    "last_call_timeout": 5,
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 5,
    "read_timeout": 20,
}
PORT = 29500  # on which the first node is met, where nothing better is known


@dataclass(frozen=True)
class Elastic:
    """How much a run may lose and still go on."""

    max_restarts: int
    min_nodes: int | None = None  # None: all

    def least(self, job: Job) -> int:
        return min(self.min_nodes or job.nodes, job.nodes)

    def rendezvous_config(self, node: int | str) -> dict[str, int]:
        """The first node holds the store in which all meet."""
        return {"is_host": int(node == 0), **KEEP_ALIVE}


@dataclass(frozen=True)
class Job:
    """One run of a sweep: what it measures, and how it is started."""

    label: dict[str, Any]
    settings: Settings
    argv: tuple[str, ...]
    nodes: int
    devices: int  # of a node
    processes: int  # of a node; one for several devices with dp
    link: Link | Network

    @property
    def path(self) -> str:
        """Its folder below the output folder."""
        return f"{self.settings.script}/{self.settings.setup}/{run_id(self.settings)}"

    @property
    def peers(self) -> bool:
        """Whether the first node can go on when another is lost."""
        return STRATEGIES[str(self.settings.strategy)].processes == "peers"

    @property
    def folder(self) -> RunFolder:
        return RunFolder(Path(self.settings.output_dir) / self.path)

    def __str__(self) -> str:
        return " ".join(f"{k}={number(v)}" for k, v in self.label.items())


def plan(sweep: Sweep, output_dir: str = "outputs", repeat: int = 1) -> list[Job]:
    """Every run in the order in which it is measured; UserError names the point that is wrong."""
    if sweep.baseline is None and (sweep.hold, sweep.lr_rule) != (HOLDS[0], LR_RULES[0]):
        raise UserError(
            f"{sweep.file}: hold {sweep.hold} and lr_rule {sweep.lr_rule} start from a baseline, "
            "and there is none: write one, and choose runs with --select rather than --set"
        )
    points = list(_points(sweep, repeat))
    kept = [point for point in points if not any(_agrees(point, e) for e in sweep.exclude)]
    for unused in (e for e in sweep.exclude if not any(_agrees(p, e) for p in points)):
        raise UserError(f"{sweep.file}: exclude {_text(unused)} leaves out nothing")
    if not kept:
        raise UserError(f"{sweep.file}: no run is left")
    axes = axes_of(sweep)
    jobs: dict[str, Job] = {}
    for point in kept:
        label = {name: point[name] for name in (*axes, *REPLICATES) if name in point}
        try:
            job = _job(sweep, point, label, output_dir)
        except UserError as error:
            raise UserError(f"{sweep.file}: {_text(label)}: {error}") from None
        if job.path in jobs:
            raise UserError(f"{sweep.file}: {job} and {jobs[job.path]} are one and the same run")
        jobs[job.path] = job
    base = sweep.baseline or {}
    if not any(_agrees(job.label, base) for job in jobs.values()):
        raise UserError(f"{sweep.file}: baseline {_text(base)} is none of the runs")
    return list(jobs.values())


def axes_of(sweep: Sweep) -> list[str]:
    """What varies, repetitions apart, in the order of the file."""
    named = ["script"] if len(sweep.scripts) > 1 else []
    named += [key for run in sweep.runs for key in run] + list(sweep.grid)
    return [name for name in dict.fromkeys(named) if name not in REPLICATES]


def _points(sweep: Sweep, repeat: int) -> Iterator[Point]:
    """The cross product, the outermost of the order first."""
    axes: dict[str, list[Point]] = {"script": [{"script": script} for script in sweep.scripts]}
    if sweep.runs:
        axes["runs"] = sweep.runs
    axes |= {name: [{name: value} for value in values] for name, values in sweep.grid.items()}
    if repeat > 1:
        axes["repeat"] = [{"repeat": n} for n in range(1, repeat + 1)]
    # An axis of several settings takes the place of any of them.
    inside = {key: "runs" for run in sweep.runs for key in run if key not in axes}
    asked = [inside.get(name, name) for name in sweep.order]
    outermost = [name for name in REPLICATES[::-1] if name not in asked]
    order = [name for name in dict.fromkeys([*outermost, *asked, *axes]) if name in axes]
    for chosen in itertools.product(*(axes[name] for name in order)):
        parts = dict(zip(order, chosen, strict=True))
        point: Point = {}
        # Merged in the order of the file, whatever the order of running.
        for name in axes:
            if name == "runs" and parts[name].get("script", point["script"]) != point["script"]:
                break  # an entry for the other script
            point |= parts[name]
        else:
            yield sweep.settings[point["script"]] | point


def _agrees(point: Point, partial: Point) -> bool:
    return all(name in point and point[name] == value for name, value in partial.items())


def _job(sweep: Sweep, point: Point, label: dict[str, Any], output_dir: str) -> Job:
    given = _scaled(sweep, point)
    link = link_of(given.pop("link", "none"))
    script = given.pop("script")
    setup = given.get("setup", "1_1")
    nodes, devices, tag = parse_setup(setup)
    if link != Link():
        if nodes == 1:
            raise UserError(f"link {link} lies between nodes, and {setup} has one")
        if tag:
            raise UserError(f"setup {setup}: the tag is taken by the link {link}")
        link.check(nodes)
        setup = f"{setup}_{link.tag}"
    given |= {"setup": setup, "output_dir": output_dir}
    if sweep.tiny:
        given["tiny"] = True
    asked = bare(script, given)
    one = asked.strategy is not None and STRATEGIES[asked.strategy].needs_gpu
    processes = 1 if one else devices
    settings = place(resolve(asked), World(nodes, processes, launched=True))
    argv = tuple(to_argv(asked, short=True))
    return Job(label, settings, argv, nodes, devices, processes, link)


def _scaled(sweep: Sweep, point: Point) -> Point:
    """The point with batch and learning rate as hold and lr_rule make them.

    Both look at the point's baseline: the same point with the baseline's values.
    """
    base = point | (sweep.baseline or {})
    given = dict(point)
    per_gpu, grad_acc, lr = _sizes(sweep, point)
    base_batch = math.prod(_sizes(sweep, base)[:2]) * _devices(base)
    if sweep.hold == "effective_batch":
        per_gpu, rest = divmod(base_batch, grad_acc * _devices(point))
        if rest or not per_gpu:
            raise UserError(
                f"hold effective_batch: {base_batch} samples cannot be split over "
                f"{_devices(point)} devices x {grad_acc} passes; choose a per_gpu_batch that can"
            )
        given["per_gpu_batch"] = per_gpu
    factor = per_gpu * grad_acc * _devices(point) / base_batch
    if sweep.lr_rule != "none" and factor != 1:
        given["lr"] = lr * (factor if sweep.lr_rule == "linear" else math.sqrt(factor))
    return given


def _sizes(sweep: Sweep, point: Point) -> tuple[int, int, float]:
    """(per_gpu_batch, grad_acc, lr) with the script's defaults."""
    names = ("per_gpu_batch", "grad_acc", "lr")
    known = {name: point[name] for name in names if name in point}
    settings = resolve(replace(Settings(script=point["script"], tiny=sweep.tiny), **known))
    assert settings.per_gpu_batch is not None and settings.lr is not None
    return settings.per_gpu_batch, settings.grad_acc, settings.lr


def _devices(point: Point) -> int:
    nodes, devices, _ = parse_setup(point.get("setup", "1_1"))
    return nodes * devices


def _text(point: Point) -> str:
    return " ".join(f"{name}={number(value)}" for name, value in point.items())


def torchrun(
    job: Job,
    node: int | str,
    master: str,
    port: int,
    elastic: Elastic | None = None,
    address: str | None = None,
) -> list[str]:
    """What torchrun is told on one node, before the script.

    address: of the node; an elastic run takes its host's name otherwise, which may lead nowhere.
    """
    if elastic is not None:
        config = elastic.rendezvous_config(node).items()
        return [
            f"--nnodes={elastic.least(job)}:{job.nodes}",
            f"--nproc_per_node={job.processes}",
            f"--max_restarts={elastic.max_restarts}",
            "--rdzv_backend=c10d",
            f"--rdzv_endpoint={master}:{port}",
            f"--rdzv_conf={','.join(f'{name}={value}' for name, value in config)}",
            *([f"--local_addr={address}"] if address else []),
        ]
    if job.nodes == 1:
        return ["--standalone", f"--nproc_per_node={job.processes}"]
    return [
        f"--nnodes={job.nodes}",
        f"--nproc_per_node={job.processes}",
        f"--node_rank={node}",
        f"--master_addr={master}",
        f"--master_port={port}",
    ]


def script_of(job: Job, scripts_in: str = "") -> str:
    """The script and its flags, quoted."""
    return shlex.join([f"{scripts_in}{job.settings.script}.py", *job.argv])


def commands(job: Job, scripts_in: str = "", elastic: Elastic | None = None) -> list[str]:
    """The command of each node, as a person would type it; $MASTER is the first node's address."""
    script = script_of(job, scripts_in)
    master = "$MASTER" if job.nodes > 1 else "127.0.0.1"
    return [
        " ".join(["torchrun", *torchrun(job, node, master, PORT, elastic), script])
        for node in range(job.nodes)
    ]


# ----
# A run of a sweep as its runner sees it, and what decides whether it is to be run.

# What becomes of a run here, beside the outcomes of its record.
WAITING, RUNNING, ELSEWHERE, SKIPPED = "waiting", "running", "elsewhere", "skipped"


@dataclass
class Options:
    """How a sweep is run; nothing here changes what is measured."""

    output_dir: str = "outputs"
    launcher: str = "local"
    oversubscribe: bool = False
    elastic: Elastic | None = None
    timeout_s: float | None = None
    rerun: str | None = None  # failed | all
    fail_fast: bool = False
    pack: bool = False
    cold: bool = False
    isolation: str = "warn"  # warn | error | off
    remote: Remote = field(default_factory=Remote)
    slurm: Slurm = field(default_factory=Slurm)


@dataclass
class State:
    """One run, as the runner and its screen see it."""

    job: Job
    state: str = WAITING
    reason: str | None = None
    began_s: float | None = None
    took_s: float | None = None
    known: bool = False  # had its outcome before this runner came to it

    @property
    def failed(self) -> bool:
        return self.state in FAILURES


def place_facts(launcher: str) -> dict[str, Any]:
    """What a record says of the place, before the place has its say."""
    return {
        "launcher": launcher,
        "emulator": None,
        "link": None,
        "processes_per_core": None,
    }


def launched(
    sweep: str, options: Options, found: Mapping[str, object], place: Mapping[str, object]
) -> dict[str, object]:
    """What stands under launch in a run's environment.json."""
    return {
        "sweep": sweep,
        **place,
        "start": "cold" if options.cold else "warm",
        "packed": options.pack,
        "cpu_busy_share": found.get("cpu_busy_share"),
        "gpu_processes": found.get("gpu_processes"),
    }


def settled(outcome: str | None, rerun: str | None) -> str | None:
    """The outcome of a run that is not to be run (again); None of one that is.

    What was interrupted goes on; what failed otherwise stays a result until somebody asks.
    """
    if outcome is None or outcome == "interrupted" or rerun == "all":
        return None
    if outcome != FINISHED and rerun == "failed":
        return None
    return outcome


def in_short(row: Mapping[str, object]) -> str:
    """Quality and speed of a row or a summary, on a line."""
    parts = [("accuracy", "accuracy {:.4f}"), ("train_samples_per_s", "{:,.0f} samples/s")]
    return ", ".join(form.format(row[name]) for name, form in parts if row.get(name) is not None)


def new_log(folder: Path, job: Job) -> Path:
    """A file of its own for what each start prints."""
    stem = job.path.replace("/", "_")
    number = 1
    while (log := folder / f"{stem}_{number}.txt").exists():
        number += 1
    return log

"""From a sweep file to its jobs: checks every point and gives the command that measures it."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.core.command_line import bare, to_argv
from harness.core.identity import REPETITIONS, number, run_path
from harness.core.links import Link, Network
from harness.core.records import SCHEMA, RunFolder
from harness.core.records.redact import without_home
from harness.core.rules import fit_to_world, resolve
from harness.core.schema.environment import SweepRecord
from harness.core.settings import Settings, UserError, parse_setup
from harness.core.strategies import strategy_of
from harness.core.tasks import TASKS
from harness.core.topology import World, batch_of_device, effective_batch
from harness.launch.sweepfile import HOLDS, LR_RULES, Point, Sweep

# A lost node is noticed after 5 s; the remaining nodes then wait 5 s for further nodes.
KEEP_ALIVE = {
    "last_call_timeout": 5,
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 5,
    "read_timeout": 20,
}
MOST_RUNS = 100_000  # in one file, before exclude applies
PORT = 29500  # of the first node, unless a free port can be asked for


@dataclass(frozen=True)
class Elastic:
    """How many restarts and lost nodes a run survives."""

    max_restarts: int
    min_nodes: int | None = None  # None: all nodes of the job

    def least(self, job: Job) -> int:
        return min(self.min_nodes or job.nodes, job.nodes)

    def rendezvous_config(self, node: int | str) -> dict[str, int]:
        """torchrun's rendezvous settings; the first node hosts the store in which all meet."""
        return {"is_host": int(node == 0), **KEEP_ALIVE}


@dataclass(frozen=True)
class Job:
    """One run of a sweep: what it measures, and on how many nodes and devices."""

    label: dict[str, Any]
    settings: Settings
    argv: tuple[str, ...]
    nodes: int
    devices: int  # per node
    processes: int  # per node; with dp, one process for several devices
    link: Link | Network

    @property
    def path(self) -> str:
        """The folder of the run, below the output folder."""
        return run_path(self.settings)

    @property
    def survives_node_loss(self) -> bool:
        return strategy_of(self.settings).has_peers

    @property
    def folder(self) -> RunFolder:
        return RunFolder.at(Path(self.settings.output_dir) / self.path)

    def __str__(self) -> str:
        return _line_of(self.label)


def plan(sweep: Sweep, output_dir: str = "outputs", repeat: int = 1) -> list[Job]:
    """Every run, in the order of measurement; UserError names a point that is wrong."""
    if sweep.baseline is None and (sweep.hold, sweep.lr_rule) != (HOLDS[0], LR_RULES[0]):
        raise UserError(
            f"{sweep.file}: hold {sweep.hold} and lr_rule {sweep.lr_rule} start from a baseline, "
            "and there is none: add one, and choose runs with --select rather than --set"
        )
    axes = axes_of(sweep)
    jobs: dict[str, Job] = {}
    for point in _without_excluded(sweep, list(_points(sweep, repeat))):
        label = as_text({n: point[n] for n in (*axes, *REPETITIONS) if n in point})
        try:
            job = _job(sweep, point, label, output_dir)
        except UserError as error:
            texts = (sweep.file, _line_of(label), str(error))
            raise UserError(": ".join(filter(None, texts))) from None
        if job.path in jobs:
            raise UserError(
                f"{sweep.file}: {job} and {jobs[job.path]} are the same run: take one out, or "
                "exclude it"
            )
        jobs[job.path] = job
    baseline = as_text(sweep.baseline or {})
    if not any(_has(job.label, baseline) for job in jobs.values()):
        raise UserError(
            f"{sweep.file}: no run is the baseline {_line_of(baseline)}: add it to grid or runs, "
            "or name another baseline"
        )
    return list(jobs.values())


def plan_record(sweep: Sweep, runs: Iterable[tuple[Job, str | None]], command: str) -> SweepRecord:
    """What readers need to know of the plan, as it stands in sweep.json.

    runs: each job, with the reason if it is skipped.
    """
    return {
        "schema": SCHEMA,
        "name": sweep.name,
        "tiny": sweep.tiny,
        "target": sweep.target,
        "hold": sweep.hold,
        "lr_rule": sweep.lr_rule,
        "columns": sweep.columns,
        "per_node": sweep.per_node,
        "question": sweep.header.get("question"),
        "hypothesis": sweep.header.get("hypothesis"),
        "file": without_home(sweep.file),
        "command": command,
        "axes": axes_of(sweep),
        "baseline": as_text(sweep.baseline) if sweep.baseline else None,
        "expect": [
            {
                "of": as_text(entry["of"]),
                "against": as_text(entry["against"]) if entry["against"] else entry["against"],
                "measure": entry["measure"],
                "at_least": entry["at_least"],
                "at_most": entry["at_most"],
            }
            for entry in sweep.expect
        ],
        "runs": [{"label": job.label, "path": job.path, "skipped": reason} for job, reason in runs],
    }


def _without_excluded(sweep: Sweep, points: list[Point]) -> list[Point]:
    for unused in (e for e in sweep.exclude if not any(_has(point, e) for point in points)):
        raise UserError(f"{sweep.file}: exclude {_line_of(unused)} matches no run")
    kept = [point for point in points if not any(_has(point, e) for e in sweep.exclude)]
    if not kept:
        raise UserError(f"{sweep.file}: no run is left: exclude names all")
    return kept


def as_text(point: Point) -> Point:
    """The point with its link as a text, as in records."""
    return {name: str(value) if name == "link" else value for name, value in point.items()}


def axes_of(sweep: Sweep) -> list[str]:
    """The names of what varies, without repetitions: script, then those of runs, then of grid."""
    named = ["script"] if len(sweep.scripts) > 1 else []
    named += [key for run in sweep.runs for key in run] + list(sweep.grid)
    return [name for name in dict.fromkeys(named) if name not in REPETITIONS]


def _points(sweep: Sweep, repeat: int) -> Iterator[Point]:
    """The cross product of all axes, the outermost axis first."""
    axes: dict[str, list[Point]] = {"script": [{"script": script} for script in sweep.scripts]}
    if sweep.runs:
        axes["runs"] = sweep.runs
    axes |= {name: [{name: value} for value in values] for name, values in sweep.grid.items()}
    if repeat > 1:
        axes["repeat"] = [{"repeat": n} for n in range(1, repeat + 1)]
    # A setting that varies within `runs` has the position of that axis.
    inside = {key: "runs" for run in sweep.runs for key in run if key not in axes}
    named = [inside.get(name, name) for name in sweep.order]
    outermost = [name for name in REPETITIONS[::-1] if name not in named]
    order = [name for name in dict.fromkeys([*outermost, *named, *axes]) if name in axes]
    count = math.prod(map(len, axes.values()))
    if count > MOST_RUNS:
        raise UserError(f"{sweep.file}: {count:,} runs, of which {MOST_RUNS:,} is the most")
    for values in itertools.product(*(axes[name] for name in order)):
        by_axis = dict(zip(order, values, strict=True))
        point: Point = {}
        # Merge in the order of `axes`, whatever the order of measurement.
        for name in axes:
            if name == "runs" and by_axis[name].get("script", point["script"]) != point["script"]:
                break  # an entry for another script
            point |= by_axis[name]
        else:
            yield sweep.settings[point["script"]] | point


def _has(point: Point, partial: Point) -> bool:
    return all(name in point and point[name] == value for name, value in partial.items())


def _job(sweep: Sweep, point: Point, label: dict[str, Any], output_dir: str) -> Job:
    values = _scaled(sweep, point)
    _check_given(sweep, label, values)
    link: Link | Network = values.pop("link", Link())
    script = values.pop("script")
    setup = values.get("setup", "1_1")
    nodes, devices, tag = parse_setup(setup)
    if link != Link():
        if nodes == 1:
            raise UserError(
                f"link {link} needs at least two nodes, and setup {setup} has one: name each "
                "set-up with its link under runs (- {setup: 1_1} and - {setup: 2_1, link: 20ms})"
            )
        if tag:
            raise UserError(f"setup {setup}: leave out the tag, the link {link} sets it")
        link.check(nodes)
        setup = f"{setup}_{link.tag}"
    values |= {"setup": setup, "output_dir": output_dir}
    if sweep.tiny:
        values["tiny"] = True
    typed = bare(script, values)
    if typed.passed.get("push_to_hub"):
        raise UserError(
            "push_to_hub does not go with a sweep, whose runs would replace one another on the "
            "Hub: leave it out, and give the command of the run that you choose by hand with it"
        )
    processes = 1 if strategy_of(typed).needs_gpu else devices
    settings = fit_to_world(resolve(typed), World(nodes, processes, launched=True))
    argv = tuple(to_argv(typed))
    return Job(label, settings, argv, nodes, devices, processes, link)


def _scaled(sweep: Sweep, point: Point) -> Point:
    """The point with the batch size and learning rate that `hold` and `lr_rule` prescribe.

    Both start from the point's baseline: the same point with the baseline's values.
    """
    base = point | (sweep.baseline or {})
    scaled = dict(point)
    per_gpu, grad_acc, lr = _sizes(sweep, point)
    base_batch = effective_batch(*_sizes(sweep, base)[:2], _devices(base))
    if sweep.hold == "effective_batch":
        held = batch_of_device(base_batch, grad_acc, _devices(point))
        if held is None:
            raise UserError(
                f"hold effective_batch: {base_batch} samples cannot be split over "
                f"{_devices(point)} devices x {grad_acc} passes: change the baseline's batch"
            )
        scaled["per_gpu_batch"] = per_gpu = held
    factor = effective_batch(per_gpu, grad_acc, _devices(point)) / base_batch
    if sweep.lr_rule != "none" and factor != 1:
        scaled["lr"] = lr * (factor if sweep.lr_rule == "linear" else math.sqrt(factor))
    return scaled


def _check_given(sweep: Sweep, label: Point, scaled: Point) -> None:
    """Refuse a run whose values differ from its label, which identifies its record and baseline."""
    rules = {"per_gpu_batch": f"hold {sweep.hold}", "lr": f"lr_rule {sweep.lr_rule}"}
    for name, rule in rules.items():
        if name in label and scaled[name] != label[name]:
            raise UserError(
                f"{rule} gives {name} {number(scaled[name])}: name {name} under settings, as that "
                "of the baseline, and not under grid or runs"
            )


def _sizes(sweep: Sweep, point: Point) -> tuple[int, int, float]:
    """(per_gpu_batch, grad_acc, lr) of a point, with the script's defaults."""
    names = ("per_gpu_batch", "grad_acc", "lr")
    known = {name: point[name] for name in names if name in point}
    settings = resolve(replace(Settings(script=point["script"], tiny=sweep.tiny), **known))
    assert settings.per_gpu_batch is not None and settings.lr is not None
    return settings.per_gpu_batch, settings.grad_acc, settings.lr


def _devices(point: Point) -> int:
    nodes, devices, _ = parse_setup(point.get("setup", "1_1"))
    return nodes * devices


def _line_of(point: Point) -> str:
    return " ".join(f"{name}={number(value)}" for name, value in point.items())


def torchrun(
    job: Job,
    node: int | str,
    master: str,
    port: int,
    elastic: Elastic | None = None,
    address: str | None = None,
) -> list[str]:
    """The flags of torchrun on one node.

    address: of this node; without it an elastic run uses its host name, which may not resolve.
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
    """The script and its flags, quoted for a shell."""
    script = job.settings.script
    elsewhere = script in TASKS and not Path(f"{script}.py").is_file()
    return shlex.join([f"{scripts_in if elsewhere else ''}{script}.py", *job.argv])


def commands(
    job: Job, scripts_in: str = "", elastic: Elastic | None = None, first: str = "$MASTER"
) -> list[str]:
    """The command for each node, as a person would type it; first: the first node's address."""
    master = first if job.nodes > 1 else "127.0.0.1"
    return [
        " ".join(
            ["torchrun", *torchrun(job, node, master, PORT, elastic), script_of(job, scripts_in)]
        )
        for node in range(job.nodes)
    ]

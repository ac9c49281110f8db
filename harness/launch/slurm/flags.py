"""The flags of --launcher slurm, as people know them from sbatch."""

from __future__ import annotations

import argparse
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.core.settings import UserError

CORES_OF_A_GPU = 4  # for its process, its threads of communication and of the backward pass
# Flags of ours that decide it; everything else is up to who knows the cluster.
OURS = {
    **dict.fromkeys(("job-name", "chdir", "output", "error", "open-mode", "array", "nodes",
                     "ntasks", "ntasks-per-node", "signal", "parsable", "wait", "wrap",
                     "test-only")),
    **dict.fromkeys(("cpus-per-task", "cpus-per-gpu"), "--cpus_per_gpu"),
    **dict.fromkeys(("gres", "gpus", "gpus-per-node", "gpus-per-task"), "--gres"),
    **dict.fromkeys(("requeue", "no-requeue"), "--requeue"),
    "partition": "--partition", "account": "--account", "time": "--timeout",
}  # fmt: skip
# Flags of the other launchers, and why they mean nothing here.
MEANINGLESS = {
    "pack": "jobs run side by side as the cluster has room",
    "cold": "every job starts torchrun",
    "isolation": "keep others away from the nodes with --sbatch exclusive",
    "oversubscribe": "how many processes a core gets is the cluster's to say",
    "max_restarts": "a job ends with its first lost node; --requeue lets it go on from there",
}


@dataclass(frozen=True)
class Slurm:
    """What a person says of the cluster; nothing here changes what is measured."""

    partition: str | None = None
    account: str | None = None
    gres: str = "gpu"
    cpus_per_gpu: int | None = None
    requeue: int = 0
    setup_script: str | None = None
    sbatch: tuple[str, ...] = ()
    detach: bool = False

    @property
    def cores(self) -> int:
        """Of each device; one core stands for one device where GPUs are not wanted."""
        return self.cpus_per_gpu or (1 if self.gres == "none" else CORES_OF_A_GPU)


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "with --launcher slurm",
        "A job for each run, an array for runs of equal set-ups. --timeout is the time limit of a\n"
        "job. Ctrl-C once: stop waiting, the jobs stay; again within 3 s: the jobs are cancelled.",
    )
    add = group.add_argument
    add("--partition", metavar="NAME", help="of the jobs (the cluster's default)")
    add("--account", metavar="NAME", help="of the jobs (your default)")
    add(
        "--gres",
        metavar="NAME",
        help="what a device of a set-up is: gpu, gpu:a100, or none for a core (gpu)",
    )
    add(
        "--cpus_per_gpu",
        metavar="N",
        help=f"cores and threads of each device ({CORES_OF_A_GPU}; 1 with --gres none)",
    )
    add(
        "--requeue",
        metavar="N",
        help="a run that nears the time limit saves, goes back into the queue and on from there, "
        "at most so often (0: it saves and is recorded as timeout)",
    )
    add(
        "--setup_script",
        metavar="FILE",
        help="sourced by each job: module load, activate; python is the one that it leaves on "
        "the PATH",
    )
    add(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="any other option of sbatch: mem=64G, qos=long, exclusive; may be given again",
    )
    add("--detach", action="store_true", help="submit and leave; the same command looks again")


def slurm_of(given: dict[str, Any]) -> Slurm:
    """The values of these flags, once --launcher is known; UserError if they make no sense."""
    names = ("partition", "account", "gres", "cpus_per_gpu", "requeue", "setup_script", "sbatch",
             "detach")  # fmt: skip
    if given["launcher"] != "slurm":
        if used := [name for name in names if given[name]]:
            raise UserError(f"--{used[0]} needs --launcher slurm")
        return Slurm()
    for name, why in MEANINGLESS.items():
        if given[name]:
            raise UserError(f"--{name} means nothing with --launcher slurm: {why}")
    if given["gres"] and not re.match(r"^[A-Za-z][\w.-]*(:[A-Za-z][\w.-]*)?$", given["gres"]):
        raise UserError(
            f"--gres {given['gres']}: expected a name such as gpu or gpu:a100, or none; "
            "how many is up to the set-up"
        )
    return Slurm(
        partition=given["partition"],
        account=given["account"],
        gres=given["gres"] or "gpu",
        cpus_per_gpu=_whole("cpus_per_gpu", given["cpus_per_gpu"], 1),
        requeue=_whole("requeue", given["requeue"], 0) or 0,
        setup_script=_file(given["setup_script"]),
        sbatch=tuple(_option(text) for text in given["sbatch"]),
        detach=given["detach"],
    )


def _whole(name: str, text: str | None, least: int) -> int | None:
    if text is None:
        return None
    if not text.isdigit() or int(text) < least:
        raise UserError(f"--{name} {text}: expected a whole number from {least}")
    return int(text)


def _file(text: str | None) -> str | None:
    if text is None:
        return None
    if not Path(text).is_file():
        raise UserError(f"--setup_script {text}: there is no such file")
    return str(Path(text).absolute())


def _option(text: str) -> str:
    """A line of the script: dashes may be left out, which argparse would take for its own."""
    bare = text.lstrip("-")
    name, equals, value = bare.partition("=")
    if not re.match(r"^[A-Za-z][A-Za-z-]+$", name) or (equals and not value) or "\n" in value:
        raise UserError(f"--sbatch {text}: expected an option of sbatch: mem=64G or exclusive")
    if name in OURS:
        use = OURS[name]
        raise UserError(f"--sbatch {text}: " + (f"use {use}" if use else "the sweep decides that"))
    return f"--{name}={shlex.quote(value)}" if equals else f"--{name}"

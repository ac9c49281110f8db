"""The flags of --launcher slurm, mostly named as in sbatch, and their defaults at a site."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from harness.core.command_line import BadValue, integer, natural
from harness.core.settings import UserError
from harness.launch.choices import CORES_OF_A_GPU, Slurm

# Options of sbatch that the sweep sets (None) or a flag of ours does; users set all others.
OURS = {
    **dict.fromkeys(("job-name", "chdir", "output", "error", "open-mode", "array", "nodes",
                     "ntasks", "ntasks-per-node", "signal", "parsable", "wait", "wrap",
                     "test-only")),
    **dict.fromkeys(("clusters", "cluster"), "a login node of that cluster"),
    **dict.fromkeys(("cpus-per-task", "cpus-per-gpu"), "--cpus_per_gpu"),
    **dict.fromkeys(("gres", "gpus", "gpus-per-node", "gpus-per-task"), "--gres"),
    **dict.fromkeys(("requeue", "no-requeue"), "--requeue"),
    "partition": "--partition", "account": "--account", "time": "--timeout",
}  # fmt: skip
# Flags of other launchers, and why they have no meaning with SLURM.
MEANINGLESS = {
    "pack": "jobs run side by side as the cluster has room",
    "cold": "every job starts torchrun",
    "isolation": "keep others away from the nodes with --sbatch exclusive",
    "oversubscribe": "the cluster decides how many processes share a core",
    "max_restarts": "a job ends with its first lost node; --requeue continues it",
}

# A file of these flags, which apply unless the command line gives other values.
SITE_VARIABLE = "HARNESS_SLURM"
SITE_FILES = ("~/.config/harness/slurm.flags", "/etc/harness/slurm.flags")


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "with --launcher slurm",
        "A job for each run, an array for runs of equal set-ups. --timeout is the time limit of a\n"
        "job. Ctrl-C once: stop waiting, the jobs stay; again within 3 s: the jobs are cancelled.\n"
        f"{SITE_VARIABLE} names a file of these flags for all sweeps of a site (docs/nodes.md).",
    )
    add = group.add_argument
    # fmt: off
    add("--partition", type=_name, metavar="NAME", help="of the jobs (the cluster's default)")
    add("--account", type=_name, metavar="NAME", help="of the jobs (your default)")
    add("--gres", type=_gres, metavar="NAME",
        help="what a device of a set-up is: gpu, gpu:a100, or none for a core (gpu)")
    add("--cpus_per_gpu", type=integer, metavar="N",
        help=f"cores and threads of each device ({CORES_OF_A_GPU}; 1 with --gres none)")
    add("--requeue", type=natural, metavar="N",
        help="a run that nears the time limit is saved, requeued and continued, at most N times "
        "(0: it is saved and recorded as timeout)")
    add("--setup_script", type=_file, metavar="FILE",
        help="sourced by each job: module load, activate; `python` must then be on the PATH")
    add("--sbatch", type=_option, action="append", metavar="OPTION",
        help="any other option of sbatch: mem=64G, qos=long, exclusive; may be given again")
    add("--detach", action="store_true", help="submit and leave; the same command looks again")
    # fmt: on


def slurm_of(flags: Mapping[str, Any]) -> Slurm:
    """The values of these flags; UserError if they contradict each other."""
    ours = _given(flags)
    if flags["launcher"] != "slurm":
        for name in ours:
            raise UserError(f"--{name} needs --launcher slurm")
        return Slurm()
    for name, why in MEANINGLESS.items():
        if flags[name]:
            raise UserError(f"--{name} has no meaning with --launcher slurm: {why}")
    site = site_flags(os.environ)
    sbatch = (*site.pop("sbatch", ()), *ours.pop("sbatch", ()))
    return Slurm(**{**site, **ours, "sbatch": sbatch})


def _given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that were given, including zeros, which override the site's values."""
    named = {f.name: flags[f.name] for f in fields(Slurm)}
    return {
        name: value for name, value in named.items() if value is not None and value is not False
    }


def site_flags(environ: Mapping[str, str]) -> dict[str, Any]:
    """The flags in the site's file: the one that is named, or the user's own, or the machine's."""
    named = environ.get(SITE_VARIABLE)
    files = [Path(name).expanduser() for name in ([named] if named else SITE_FILES)]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        if named:
            raise UserError(f"{SITE_VARIABLE}={named}: there is no such file")
        return {}
    parser = _SiteParser(prog=str(file), add_help=False, allow_abbrev=False)
    add_flags(parser)
    try:
        return _given(vars(parser.parse_args(shlex.split(file.read_text("utf-8"), comments=True))))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: {error}") from None


class _SiteParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}")


def _name(text: str) -> str:
    """A name for a line of the script; it may list several names: long,short."""
    if not text.isprintable():
        raise BadValue(f"{text!r}: expected a name")
    return text


def _gres(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z][\w.-]*(:[A-Za-z][\w.-]*)?", text):
        raise BadValue(
            f"{text}: expected a name such as gpu or gpu:a100, or none; the set-up says how many"
        )
    return text


def _file(text: str) -> str:
    if not (path := Path(text).expanduser()).is_file():
        raise BadValue(f"{text}: there is no such file")
    return str(path.absolute())


def _option(text: str) -> str:
    """A line of the script; leading dashes are optional, as argparse would take them as its own."""
    name, equals, value = text.lstrip("-").partition("=")
    if not re.fullmatch(r"[A-Za-z][A-Za-z-]+", name) or (equals and not value) or "\n" in value:
        raise BadValue(f"{text}: expected an option of sbatch: mem=64G or exclusive")
    if name in OURS:
        use = OURS[name]
        raise BadValue(f"{text}: " + (f"use {use}" if use else "the sweep sets it"))
    return f"--{name}={shlex.quote(value)}" if equals else f"--{name}"

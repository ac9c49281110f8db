"""The flags of harness sweep, without the code behind them, which takes longer to load."""

from __future__ import annotations

import argparse
import re
from functools import partial

from harness.core.command_line import BadValue, integer, natural, one_of
from harness.launch import slurm, ssh
from harness.launch.choices import SECONDS

LAUNCHERS = ("local", "netns", "ssh", "slurm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Run every run of a sweep file that has no outcome yet."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "Ctrl-C once: the current run is recorded and the sweep stops; twice: at once (slurm: the\n"
        "jobs stay; twice: they are cancelled). The same command continues from there. Exit code:\n"
        "0, 1 if a run failed, 2 for a mistake."
    )
    add, switch = parser.add_argument, partial(parser.add_argument, action="store_true")
    repeated = partial(parser.add_argument, action="append", default=[])
    # fmt: off
    add("file", metavar="FILE", help="for example experiments/batch_size.yaml")
    switch("--tiny", help="laptop size: embedded data, no network")
    switch("--yes", help="do not ask before a sweep of more than 30 minutes")
    switch("--dry_run", help="print the commands, or the scripts of jobs, and stop")
    add("--out", "-o", "--o", "--output_dir", dest="output_dir", default="outputs", metavar="DIR",
        help="folder of the records (outputs)")
    add("--launcher", type=one_of(*LAUNCHERS), metavar="NAME", default="local",
        help="local: this machine; netns: emulated nodes on it, with the links that the file asks "
        "for; ssh: machines over ssh; slurm: a cluster (local)")
    switch("--oversubscribe",
           help="more processes than cores, for nodes without GPUs that share one machine: they "
           "slow one another down, and the record says so")
    add("--max_restarts", type=natural, default=0, metavar="N",
        help="how often lost processes are restarted from the last checkpoint (0)")
    add("--min_nodes", type=integer, metavar="N",
        help="how many nodes are enough to continue (all)")
    repeated("--select", type=_conditions, metavar="KEY=VALUE,...",
             help="only these runs, for example setup=1_2,seed=4*; given again: or these")
    repeated("--exclude", type=_conditions, metavar="KEY=VALUE,...", help="not these runs")
    add("--limit", type=_limit, default=slice(None), metavar="A:B",
        help="of those, from the A-th up to before the B-th, counted from 0")
    repeated("--set", type=_assignment, metavar="KEY=VALUE",
             help="a setting of all runs, instead of the file's; again with another value: an axis")
    add("--repeat", type=integer, default=1, metavar="N", help="measure everything N times (1)")
    add("--rerun", type=one_of("failed", "disturbed", "all"), metavar="WHICH",
        help="failed: runs that failed, from where they failed; disturbed: finished runs beside "
        "which other programs ran; all; of both the old records are kept aside")
    add("--timeout", type=seconds, metavar="TIME", dest="timeout_s",
        help="a run that takes longer is ended: 90 (seconds), 30m, 2h")
    switch("--fail_fast", help="stop at the first failure")
    add("--isolation", type=one_of("warn", "error", "off"), metavar="HOW",
        help="warn, error or off: when others use the GPUs or the cores before a run (warn)")
    switch("--pack",
           help="small runs side by side on disjoint devices; this disturbs what is measured")
    switch("--cold", help="torchrun anew for each run: seconds slower each")
    # fmt: on
    ssh.add_flags(parser)
    slurm.add_flags(parser)


def _conditions(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",")]
    if any(not name or not equals for name, equals, _ in pairs):
        raise BadValue(f"{text}: expected KEY=VALUE,..., for example setup=1_2")
    names = [name.strip() for name, _, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise BadValue(f"{text}: {twice[0]} is given twice: give the flag again for another value")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _limit(text: str) -> slice:
    if not re.match(r"^-?\d*:-?\d*$", text):
        raise BadValue(f"{text}: expected A:B, for example 0:10, 10: or :-1")
    first, last = (int(part) if part else None for part in text.split(":"))
    return slice(first, last)


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise BadValue(f"{text}: expected KEY=VALUE, for example --set epochs=1")
    return name.strip().replace("-", "_"), value.strip()


def seconds(text: str) -> float:
    match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)([smh]?)", text)
    if match is None or float(match[1]) == 0:
        raise BadValue(f"{text}: expected a time such as 90 (seconds), 30m or 2h")
    return float(match[1]) * SECONDS[match[2] or "s"]

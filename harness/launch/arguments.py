"""The command line of a sweep."""

from __future__ import annotations

import argparse
import difflib
import re
from dataclasses import dataclass, field
from typing import Any, NoReturn

from harness.launch.plan import Elastic
from harness.launch.slurm import flags as slurm_flags
from harness.launch.slurm.flags import slurm_of
from harness.launch.ssh import hosts
from harness.launch.ssh.hosts import remote_of
from harness.launch.state import Options
from harness.settings import UserError

TIME = re.compile(r"^([0-9.]+)(s|m|h)?$")
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}


@dataclass
class Arguments:
    file: str
    tiny: bool = False
    dry_run: bool = False
    select: list[dict[str, str]] = field(default_factory=list)
    exclude: list[dict[str, str]] = field(default_factory=list)
    limit: slice = field(default_factory=lambda: slice(None))
    settings: dict[str, list[str]] = field(default_factory=dict)
    repeat: int = 1
    options: Options = field(default_factory=Options)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if match := re.match(r"unrecognized arguments: (\S+)", message):
            flag = match[1].partition("=")[0]
            known = [name for action in self._actions for name in action.option_strings]
            near = difflib.get_close_matches(flag, known, n=1)
            hint = f": did you mean {near[0]}?" if near else ": see --help"
            message = f"unknown {flag}{hint}"
        raise UserError(message)


def parse(argv: list[str]) -> Arguments:
    """UserError if wrong; --help ends the process."""
    words = [_snake(word) for word in argv]
    given = vars(_parser().parse_args(words))
    return Arguments(
        file=given["file"],
        tiny=given["tiny"],
        dry_run=given["dry_run"],
        select=[_conditions("--select", text) for text in given["select"]],
        exclude=[_conditions("--exclude", text) for text in given["exclude"]],
        limit=_limit(given["limit"]),
        settings=_settings(given["set"]),
        repeat=given["repeat"],
        options=Options(
            output_dir=given["output_dir"],
            launcher=given["launcher"],
            oversubscribe=given["oversubscribe"],
            elastic=_elastic(given["max_restarts"], given["min_nodes"]),
            timeout_s=_seconds(given["timeout"]),
            rerun=given["rerun"],
            fail_fast=given["fail_fast"],
            pack=given["pack"],
            cold=given["cold"],
            isolation=given["isolation"] or "warn",
            slurm=slurm_of(given),
            remote=remote_of(given),
        ),
    )


def _parser() -> Parser:
    parser = Parser(
        prog="python -m harness sweep",
        description="Run every run of a sweep file that has not been run; go on where it stopped.",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Ctrl-C once: the current run is recorded and the sweep stops; twice: at once. The\n"
        "same command goes on from there. Exit code: 0, 1 if a run failed, 2 for a mistake.",
    )
    add = parser.add_argument
    add("file", help="for example experiments/batch_size.yaml")
    add("--tiny", action="store_true", help="laptop size: embedded data, no network")
    add("--dry_run", action="store_true", help="print the commands, one a line, and stop")
    add("--output_dir", "--o", default="outputs", help="folder of the records (outputs)")
    add(
        "--launcher",
        choices=("local", "netns", "ssh", "slurm"),
        default="local",
        help="where: this machine, emulated nodes on it (with the links that the file asks for), "
        "machines over ssh, a cluster (local)",
    )
    add(
        "--oversubscribe",
        action="store_true",
        help="more processes than cores, for nodes without GPUs that share one machine: they slow "
        "one another down, and the record says so",
    )
    add(
        "--max_restarts",
        type=natural,
        default=0,
        metavar="N",
        help="how often lost processes are started again, from the last checkpoint (0)",
    )
    add("--min_nodes", type=whole, metavar="N", help="how many nodes are enough to go on (all)")
    add(
        "--select",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="only these runs, for example setup=1_2,seed=4*; given again: or these",
    )
    add("--exclude", action="append", default=[], metavar="KEY=VALUE,...", help="not these runs")
    add(
        "--limit",
        default=":",
        metavar="A:B",
        help="of those, the A-th up to before the B-th, from 0",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting for all runs, instead of what the file says; again with another value: "
        "an axis",
    )
    add("--repeat", type=whole, default=1, metavar="N", help="measure everything N times (1)")
    add(
        "--rerun",
        choices=("failed", "all"),
        help="runs that failed, from where they failed; or all, the old records kept aside",
    )
    add("--timeout", metavar="TIME", help="a run that takes longer is ended: 90, 30m, 2h")
    add("--fail_fast", action="store_true", help="stop at the first failure")
    add(
        "--isolation",
        choices=("warn", "error", "off"),
        help="when others use the GPUs or the cores before a run (warn)",
    )
    add(
        "--pack",
        action="store_true",
        help="small runs side by side on disjoint devices; this disturbs what is measured",
    )
    add("--cold", action="store_true", help="torchrun anew for each run: seconds slower each")
    hosts.add_flags(parser)
    slurm_flags.add_flags(parser)
    return parser  # fmt: skip


def _snake(word: str) -> str:
    """--dry-run is --dry_run; values stay as they are."""
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    return "--" + name.replace("-", "_") + equals + value


def _elastic(max_restarts: int, min_nodes: int | None) -> Elastic | None:
    if min_nodes is not None and not max_restarts:
        raise UserError(f"--min_nodes {min_nodes}: needs --max_restarts, for example 3")
    return Elastic(max_restarts, min_nodes) if max_restarts else None


def natural(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number from 0")
    return int(text)


def whole(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number from 1")
    return int(text)


def _conditions(flag: str, text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",")]
    if any(not name or not equals for name, equals, _ in pairs):
        raise UserError(f"{flag} {text}: expected KEY=VALUE,..., for example setup=1_2")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _limit(text: str) -> slice:
    if not re.match(r"^-?\d*:-?\d*$", text):
        raise UserError(f"--limit {text}: expected A:B, for example 0:10, 10: or :-1")
    first, last = (int(part) if part else None for part in text.split(":"))
    return slice(first, last)


def _settings(pairs: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise UserError(f"--set {pair}: expected KEY=VALUE, for example --set epochs=1")
        found.setdefault(name.strip().replace("-", "_"), []).append(value.strip())
    return found


def _seconds(text: Any) -> float | None:
    if text is None:
        return None
    match = TIME.match(text)
    try:
        seconds = float(match[1]) * SECONDS[match[2]] if match else 0.0
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise UserError(f"--timeout {text}: expected a time such as 90, 30m or 2h")
    return seconds

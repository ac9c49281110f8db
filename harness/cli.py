"""The command line `python -m harness VERB`: the flags of all verbs, each error as one line.

The flags of all verbs but sweep are defined here; the work is done by run(options) of the module
that VERBS names. That module is imported once the command line is known to be right, because
pandas, matplotlib and torch take seconds to load.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from harness.core import tasks
from harness.core.command_line import (
    BadValue,
    integer,
    names_of,
    natural,
    one_of,
    positive,
    setting,
    trainer_flags,
)
from harness.core.process import (
    complain,
    install_quit_handlers,
    is_leader,
    open_closed_streams,
    quiet_when_closed,
    restore_interrupt,
    say_work,
    working,
)
from harness.core.provenance import without_package
from harness.core.records.disk import one_line
from harness.core.refused import MEANT, REFUSED
from harness.core.settings import UserError, nearest
from harness.core.strategies import DDP

LONG_USAGE = 300  # characters
FLAG = re.compile(r"--?[A-Za-z][\w-]*(=.*)?", re.DOTALL)


class Incomplete(UserError):
    """A required argument is missing."""


def _of_runs(flag: str) -> str | None:
    """A hint where a sweep is given a flag that belongs to its runs; None for any other flag."""
    taken = flag in trainer_flags() or any(flag in names_of(script) for script in tasks.TASKS)
    hint = f"it is one of runs: --set {flag}=VALUE gives it to all" if taken else None
    return (MEANT | REFUSED).get(flag, hint)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line that names the nearest flag or value."""

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse argv; the words after -- are a command of its own, the option `command`."""
        at = argv.index("--") if "--" in argv else len(argv)
        arguments = [_with_underscores(word) for word in argv[:at]]
        takes_command = self.get_default("takes_command")
        if at == len(argv) and takes_command:
            self._refuse_joined(argv)
        for word in arguments:
            name = word.partition("=")[0]
            if FLAG.fullmatch(word) and name not in self._option_string_actions:
                known = sorted(n[2:] for n in self._option_string_actions if n.startswith("--"))
                hint = nearest(name.lstrip("-"), known, mark="--")
                if "set" in known:
                    hint = _of_runs(name.lstrip("-")) or hint
                raise UserError(f"unknown flag {name}: {hint}")
        options = self.parse_intermixed_args(arguments)
        if "--" in argv and not (takes_command and argv[at + 1 :]):
            raise UserError(f"{'a' if takes_command else 'no'} command is expected after --")
        options.command, options.argv = [*argv[at + 1 :]], [*argv]
        return options

    def _refuse_joined(self, argv: Sequence[str]) -> None:
        """Refuse a command that lacks -- before it, or torchrun before its script."""
        scripts = (w for w in argv if w in ("torchrun", "python", "bash", "sh") or ".py" in w)
        if first := next(scripts, None):
            at = argv.index(first)
            torchrun = ["torchrun"] if first.endswith(".py") else []
            line = shlex.join([*argv[:at], "--", *torchrun, *argv[at:]])
            raise UserError(f"the command stands after --: {self.prog} {line}")

    def error(self, message: str) -> NoReturn:
        if match := re.match(r"the following arguments are required: (.*)", message):
            raise Incomplete(f"missing {match[1]}; {self._usage()}")
        raise UserError(self._reworded(message))

    def _usage(self) -> str:
        usage = " ".join(self.format_usage().split())
        # A long list of flags would hide the name of the missing argument.
        words = [a.metavar or a.dest for a in self._actions if not a.option_strings]
        short = f"usage: {self.prog} {' '.join(map(str, words))} [...], or --help"
        return usage if len(usage) < LONG_USAGE else short

    def _reworded(self, message: str) -> str:
        if match := re.match(r"unrecognized arguments: (.*)", message):
            return f"unexpected {match[1]}; {self._usage()}"
        # argparse names all spellings of a flag (--out/-o/...); the message names the first.
        if match := re.match(r"argument ([^\s/:]+)\S*: (.*)", message, re.DOTALL):
            name, reason = match.groups()
            if reason.startswith("ignored explicit argument"):
                return f"{name} takes no value"
            return f"{name} {reason}".replace(" expected one argument", " needs a value")
        return message


def _with_underscores(word: str) -> str:
    """Turn --dry-run into --dry_run; the value after = stays as it is."""
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    return "--" + name.replace("-", "_") + equals + value


# Without this, the formatter would put each bracket of these calls on a line of its own.
# fmt: off
def out(parser: Parser, help: str, default: str | None = None, metavar: str = "DIR") -> None:
    """Add --out, the output folder of any verb; the scripts spell it --output_dir."""
    names = ("--out", "-o", "--o", "--output_dir")
    parser.add_argument(*names, type=Path, default=default, metavar=metavar, help=help)


def target(parser: Parser) -> None:
    reach = "what is to be reached, for example accuracy=0.9 (the sweep's own)"
    parser.add_argument("--target", metavar="METRIC=VALUE", help=reach)


PART = "FOLDER:NAME=VALUE,NAME=VALUE for its runs with these settings"
SIDE = f"a run, a folder whose runs differ only in their seed, or {PART}"


def table(parser: Parser) -> None:
    add = parser.add_argument
    add("folder", nargs="?", default="outputs", type=Path, metavar="FOLDER",
        help=f"of runs or of a sweep (outputs); {PART}")
    add("--write", action="store_true", help="also write a sweep's table.md, table.csv, runs.csv")
    columns = "only these, by heading or field (accuracy,samples/s); first what tells rows apart"
    add("--columns", type=column_names, metavar="A,B,...", help=columns)
    add("--latex", action="store_true", help="print it for LaTeX, with booktabs")


def column_names(text: str) -> list[str]:
    if all(names := [name.strip() for name in text.split(",")]):
        return names
    raise BadValue(f"{text}: expected names with commas between them")


def nodes(parser: Parser) -> None:
    parser.usage = "python -m harness nodes N [--link LINK] [--oversubscribe] [-- COMMAND...]"
    parser.set_defaults(takes_command=True)
    parser.add_argument("nodes", type=integer, metavar="N", help="how many, from 1")
    parser.add_argument("--link", default="none",
                        help="between them: 20ms/200mbit, region, ... (unlimited)")
    parser.add_argument("--oversubscribe", action="store_true", help="nodes may share a GPU")


def link(parser: Parser) -> None:
    parser.description = "Measure the links between nodes, in a limited time."
    parser.epilog = (
        "Alone, without torchrun, it prints the commands that start it on two machines, under "
        "SLURM and on emulated nodes."
    )
    add = parser.add_argument
    add("--mb", type=megabytes, default=[1.0, 25.0], metavar="SIZE,...", help="sizes of the "
        "all-reduce in MB; a model's gradient has 4 bytes a weight (1,25)")
    add("--seconds", type=positive, default=10.0, help="limit of all measurements, as given to "
        "rank 0; slow links need more for large sizes (10)")


def megabytes(text: str) -> list[float]:
    try:
        sizes = [float(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(0 < size <= 4000 for size in sizes):
        raise BadValue(f"{text}: expected MB, 4000 at most, for example 25 or 1,25,400")
    return sorted(sizes)


def figures(parser: Parser) -> None:
    parser.description = "Draw the figure that answers a sweep's question, beside its records."
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help=f"of a sweep; with --all of any runs; {PART}")
    add("--all", action="store_true", help="every figure that the records have something for, as "
        "PNG and SVG, light and dark")
    out(parser, "folder of the figures (the sweep's own; with --all FOLDER/figures)")
    add("--format", type=one_of("png", "pdf", "svg"), help="png, pdf or svg (png; --all: and svg)")
    add("--width", type=inches, help="in a page, 2in or more: 3.3in, 84mm, 8.4cm (8in)")


def inches(text: str) -> float:
    match = re.fullmatch(r"(\d+\.?\d*)(in|cm|mm)", text)
    width = float(match[1]) / {"in": 1, "cm": 2.54, "mm": 25.4}[match[2]] if match else 0.0
    if not 2 <= width <= 20:
        raise BadValue(f"{text}: expected 2in to 20in, for example 3.3in, 84mm or 8.4cm")
    return width


def import_(parser: Parser) -> None:
    parser.description = (
        "Turn other people's records into ours, marked as imported. Flags say what name and "
        "content of all these files do not."
    )
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="a text file with a list a line "
        "(f1=[0.90,0.91]) whose name holds the settings, such as bert/2_1_2e-05_16_P100far.txt, or "
        "the trainer_state.json of the Trainer")
    add("--script", type=one_of(*tasks.TASKS), metavar="NAME", help=tasks.names())
    add("--setup", metavar="N_M[_tag]", help="nodes and processes of each")
    for name in ("lr", "epochs", "seed", "model", "dataset", "train_size", "test_size", "precision",
                 "strategy"):
        add(f"--{name}", type=setting(name), metavar="VALUE", help="as the flag of a run")
    add("--grad_acc", type=integer, metavar="VALUE", help="forward passes per update; without it "
        "the batch of an update is not known")
    add("--batch", "--b", "--per_gpu_batch", dest="per_gpu_batch", type=integer, metavar="VALUE",
        help="samples per process and forward pass")
    add("--source", type=source, metavar="NAME", help="who measured and where: their machine is "
        "then imported:NAME, and records of two sources are never averaged (the format of the "
        "file)")
    out(parser, "folder of the records (outputs)", "outputs")


def source(text: str) -> str:
    if not re.fullmatch(r"[\w.-]*[^\W_][\w.-]*", text):
        raise BadValue(f"{text}: expected letters, digits, and . _ - between them")
    return text


def compare(parser: Parser) -> None:
    parser.usage = "python -m harness compare A B [--target METRIC=VALUE] [--json]"
    parser.epilog = (
        "For example: python -m harness compare outputs:script=vit,setup=1_1 "
        "outputs:script=vit,setup=1_2"
    )
    parser.add_argument("a", metavar="A", help=SIDE)
    parser.add_argument("b", metavar="B", help="likewise; differences are B - A")
    target(parser)


def explain(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help=SIDE)
    parser.add_argument("baseline", nargs="?", metavar="BASELINE", help="likewise (a run of one "
                        "process beside RUN that is like it)")


def batches(parser: Parser) -> None:
    parser.add_argument("folder", metavar="FOLDER",
                        help="of runs or of a sweep over batches, or FOLDER:NAME=VALUE")
    target(parser)


def predict(parser: Parser) -> None:
    parser.usage = "python -m harness predict RECORDS --setup N_M [--link LINK] [FLAGS]"
    parser.description = "Step time, samples/s, efficiency, epochs, energy and cost of a topology."
    add = parser.add_argument
    add("records", metavar="RECORDS", help="a folder with runs of one process and of several on "
        "one machine; also FOLDER:NAME=VALUE,NAME=VALUE")
    add("--setup", required=True, help="N_M: N nodes of M processes")
    add("--link", help="between nodes, one way: 0.1ms/25gbit or a name")
    add("--batch", type=integer, help="samples per process and forward pass (the largest measured)")
    add("--strategy", default=DDP, help="ddp, fsdp, local_sgd or diloco (ddp)")
    add("--compress", default="none", help="bf16, int8 or int4; with ddp also fp16, powersgd")
    add("--exchange", type=setting("exchange"), default="auto", help="as of a run (auto)")
    add("--sync_every", type=integer, default=10, help="of local_sgd and diloco (10)")
    add("--sync_first", type=natural, default=0, help="of local_sgd and diloco (0)")
    add("--sync_scope", type=setting("sync_scope"), help="replicas: each a node or rank (as a run)")
    add("--fragments", type=integer, default=1, help="of diloco (1)")
    add("--overlap", type=natural, default=0, help="of diloco (0)")
    add("--epochs", type=integer, default=1, help="for time, energy and cost (1)")
    add("--restarts", type=natural, default=0, help="interruptions after which the run resumes (0)")
    for_predictions(parser)
    add("--plot", type=picture, metavar="FILE", help="draw samples/s over nodes: png, svg or pdf")


def for_predictions(parser: Parser) -> None:
    """Add the flags for facts that predictions need, and that records lack or may lack."""
    add = parser.add_argument
    add("--emulated", action="store_true", help="nodes share one machine; a link for each pair")
    add("--cost_per_gpu_hour", type=positive, help="of one device, in any currency")
    add("--gradient_mb", type=positive, help="where the records do not say: 4 bytes a weight")
    add("--train_size", type=integer, help="samples of an epoch, where the records do not say")
    add("--backend", type=one_of("gloo", "nccl"), help="where the records do not say: gloo, nccl")
    add("--blocks", type=integer, help="layers that fsdp gathers one at a time (known of ours)")
    add("--sharing", type=share, help="slowdown of each further process of a machine, 0 to 1")


def plan(parser: Parser) -> None:
    parser.usage = "python -m harness plan RECORDS --nodes N --link LINK --target METRIC=VALUE"
    parser.description = "Strategy, period, batch and exchange that reach a target over a link."
    add = parser.add_argument
    add("records", metavar="RECORDS", help="a folder with runs of one process and runs that reach "
        "the target on as many nodes, over any link; also FOLDER:NAME=VALUE")
    add("--nodes", required=True, help="how many there are, or several numbers to choose from: 2,4")
    add("--link", required=True, help="between nodes, one way: 80ms/50mbit or a name")
    add("--target", required=True, metavar="METRIC=VALUE", help="for example accuracy=0.9")
    add("--effective_batch", type=integer, help="only of trainings with this one")
    add("--deadline", type=positive, metavar="HOURS", help="the fewest node-hours within it")
    add("--budget", type=positive, help="node-hours, or money with --cost_per_gpu_hour")
    for_predictions(parser)


def share(text: str) -> float:
    value = 0.0 if re.fullmatch(r"0(\.0*)?", text) else positive(text)
    if value > 1:
        raise BadValue(f"{text}: expected a share, 0 to 1")
    return value


def picture(text: str) -> Path:
    if Path(text).suffix not in (".png", ".svg", ".pdf"):
        raise BadValue(f"{text}: expected a file that ends in png, svg or pdf")
    return Path(text)


def store(parser: Parser) -> None:
    parser.add_argument("at", type=endpoint, metavar="PORT", help="at the address where the nodes "
                        "reach this machine: 10.0.0.9:29400; a port alone is for nodes on this "
                        "machine")


def endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]") or "127.0.0.1", integer(port, 1, 65535)


def report(parser: Parser) -> None:
    parser.description = (
        "Write report.html, which opens from disk without a network; beside it report.md, and for "
        "each sweep its numbers as CSV and its figures as SVG, light; `figures --all` writes PNG."
    )
    parser.add_argument("folder", nargs="?", default="outputs", type=Path, metavar="FOLDER",
                        help=f"of the records (outputs); {PART}")
    out(parser, "folder of the report (FOLDER/report)")


def pack(parser: Parser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of a sweep or of any runs")
    where = "the archive (in the folder of the records, where verbs find it)"
    out(parser, where, metavar="NAME.jsonl.gz")


def unpack(parser: Parser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="an archive of harness pack")
    out(parser, "folder of the records (that of the archive)")


def push(parser: Parser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of a sweep or of any runs")
    parser.add_argument("repo", metavar="USER/NAME", help="of a dataset, made if missing")
    parser.add_argument("--public", action="store_true",
                        help="make a new dataset public (private)")
    parser.set_defaults(pushes=True)
    parser.epilog = "HF_TOKEN in the environment is the token; it must be allowed to write."


def pull(parser: Parser) -> None:
    parser.add_argument("repo", metavar="USER/NAME", help="a dataset that harness push has made")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="for its archives of records")
    parser.set_defaults(pushes=False)
    parser.epilog = "HF_TOKEN in the environment is the token, for a dataset that is not public."


def env(parser: Parser) -> None:
    parser.epilog = "The facts are printed as JSON with and without --json."


def doctor(parser: Parser) -> None:
    parser.epilog = "Exit code: 0, or 1 if something stops training itself."


def completion(parser: Parser) -> None:
    parser.epilog = 'In ~/.bashrc: eval "$(harness completion bash)"'
    parser.add_argument("shell", type=one_of("bash", "zsh", "fish"), help="bash, zsh or fish")


def sweep(parser: Parser) -> None:
    # The three dozen flags of a sweep are defined beside the launcher code that reads them.
    importlib.import_module("harness.launch.flags").add_arguments(parser)


@dataclass(frozen=True)
class Verb:
    module: str  # name below harness; its run(options) does the work and returns the exit code
    summary: str
    add_arguments: Callable[[Parser], None]
    json: bool = True  # whether the verb has --json, to print its data as one document


VERBS = {
    "sweep": Verb("launch.sweep", "run the runs of a file, or those that are still missing", sweep),
    "table": Verb("read.tables.command",
                  "what was measured: a row per run, or a sweep's table", table),
    "nodes": Verb("launch.netns.nodes", "run a command on each of N emulated nodes", nodes,
                  json=False),
    "link": Verb("train.measure.link",
                 "measure round trip, bandwidth and all-reduce of links", link),
    "figures": Verb("read.figures.catalogue", "draw what a sweep measured", figures),
    "import": Verb("read.imports.command",
                   "take over others' records and trainer_state.json", import_),
    "compare": Verb("read.compare.compare",
                    "how two runs or groups differ, and whether by more than noise", compare),
    "explain": Verb("read.explain.explain", "why N processes were not N times as fast", explain),
    "batches": Verb("read.compare.critical_batch",
                    "the batch beyond which larger ones do not pay", batches),
    "predict": Verb("read.figures.prediction",
                    "time and cost of topologies that were not measured", predict),
    "plan": Verb("read.predict.plan", "what reaches a target soonest over a link", plan),
    "store": Verb("train.run.elastic", "a rendezvous for runs that may lose any node", store,
                  json=False),
    "report": Verb("read.report.report", "tables and figures of a folder on one page", report),
    "pack": Verb("read.records.packing", "the records of a folder as one file", pack),
    "unpack": Verb("read.records.packing", "an archive as folders again", unpack),
    "push": Verb("read.records.sharing", "records of a folder to a dataset on the Hub", push),
    "pull": Verb("read.records.sharing", "records from a dataset on the Hub, checked", pull),
    "doctor": Verb("launch.doctor",
                   "what works on this machine, what does not, and what to do", doctor),
    "completion": Verb("completion", "complete verbs and flags in a shell", completion, json=False),
    "env": Verb("train.measure.environment", "machine and versions, to paste into a question", env),
}
# fmt: on


def parser_of(verb: str) -> Parser:
    summary = VERBS[verb].summary
    parser = Parser(
        prog=f"python -m harness {verb}",
        description=f"{summary[0].upper()}{summary[1:]}.",
        allow_abbrev=False,
    )
    VERBS[verb].add_arguments(parser)
    if VERBS[verb].json:
        parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    return parser


# What `python -m harness` lists, in this order.
GROUPS = {
    "to measure (one training: python vit.py --tiny)": ("sweep", "nodes", "link", "store"),
    "to read what was measured": ("table", "report", "figures", "compare", "explain", "batches"),
    "to estimate what was not": ("predict", "plan"),
    "to keep and share records": ("import", "pack", "unpack", "push", "pull"),
    "this machine": ("doctor", "env", "completion"),
}


def usage() -> str:
    parts = ["usage: python -m harness VERB [...]    python -m harness VERB --help"]
    for title, verbs in GROUPS.items():
        parts.append("\n".join([title, *(f"  {v:<10} {VERBS[v].summary}" for v in verbs)]))
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    if argv is None:
        install_quit_handlers()  # a verb may load torch or pandas
        open_closed_streams()
        say_work()
    with quiet_when_closed():
        return _main(sys.argv[1:] if argv is None else argv)
    return 0


def _main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    verb, *arguments = argv
    if verb not in VERBS:
        return complain("harness", UserError(f"unknown verb {verb}: {nearest(verb, VERBS)}"))
    before = arguments[: arguments.index("--")] if "--" in arguments else arguments
    try:
        parser = parser_of(verb)
        if {"-h", "--help"} & {*before}:
            print(parser.format_help())
            return 0
        options = parser.read(arguments)
        with working("loading libraries"):
            module = importlib.import_module(f"harness.{VERBS[verb].module}")
        restore_interrupt()
        return int(module.run(options))
    except KeyboardInterrupt:
        print(f"harness {verb}: stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT
    except ModuleNotFoundError as error:
        return complain(f"harness {verb}", without_package(error), is_leader())
    except (UserError, OSError) as error:
        return complain(f"harness {verb}", UserError(one_line(error)), is_leader())

"""python -m harness predict RECORDS --setup 16_8 --link 25gbit,0.1ms: what it would take."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from harness.links import Link
from harness.networks import link_of
from harness.parser import Parser
from harness.read.prediction.advice import advise
from harness.read.prediction.exchange import BACKENDS, Shape, wire_of
from harness.read.prediction.fitting import Fitted, fit_records
from harness.read.prediction.model import Plan, Prediction, over_nodes, predict
from harness.read.prediction.outcome import as_fields, outcome
from harness.read.prediction.told import Given
from harness.read.prediction.words import (
    advice_table,
    bend_line,
    curve_table,
    fit_lines,
    prediction_lines,
)
from harness.settings import UserError, parse_setup
from harness.strategies import STRATEGIES

PICTURES = (".png", ".svg", ".pdf")
SHOWN = 5  # choices of --advise
MOST = 100_000  # nodes; what is beyond is a slip of the finger


def main(argv: list[str]) -> int:
    try:
        asked = _parser().parse_args(argv)
        fitted = fit_records(asked.records, _given(asked))
        link = _link(asked.link)
        plan = _plan(asked, fitted, link)
        if asked.advise:
            return _advise(asked, fitted, plan)
        found = outcome(fitted, predict(fitted.model, plan), asked.cost_per_gpu_hour)
        curve = over_nodes(fitted.model, plan, plan.shape.nodes) if plan.shape.nodes > 1 else []
    except UserError as error:
        print(f"harness predict: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if asked.json:
        print(json.dumps({**as_fields(found), "assumed": fitted.assumed}, indent=2))
    else:
        screen = _screen()
        for line in (*fit_lines(fitted), "",
                     *prediction_lines(fitted, found, link, asked.epochs)):  # fmt: skip
            screen.print(line)
        if curve:
            _wide(curve_table(curve))
            screen.print(bend_line(curve))
    if asked.plot:
        _draw(asked.plot, curve or [found.prediction], f"{fitted.name} over {link}")
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="python -m harness predict", allow_abbrev=False,
        description="Step time, samples/s, efficiency, epochs, energy and cost of a topology.",
    )  # fmt: skip
    add = parser.add_argument
    add("records", help="a folder with runs of one process and of several on one machine; also "
                        "FOLDER:NAME=VALUE,NAME=VALUE")  # fmt: skip
    add("--setup", required=True, help="N_M: N nodes of M processes; with --advise the largest")
    add("--link", help="between nodes, one way: 25gbit,0.1ms or 20ms/200mbit or a name")
    add("--batch", type=_whole, help="samples per process and forward pass (the largest measured)")
    add("--strategy", default="ddp", help="ddp, fsdp, local_sgd or diloco (ddp)")
    add("--compress", default="none", help="bf16, fp16 for ddp; bf16, int8 for diloco")
    add("--sync_every", type=_whole, default=10, help="of local_sgd and diloco (10)")
    add("--sync_scope", choices=("node", "rank"), default="node", help="who trains apart (node)")
    add("--fragments", type=_whole, default=1, help="of diloco (1)")
    add("--overlap", type=_natural, default=0, help="of diloco (0)")
    add("--blocks", type=_whole, help="layers that fsdp gathers one at a time")
    add("--emulated", action="store_true", help="the nodes share one machine and its cores")
    add("--epochs", type=_whole, default=1, help="for time, energy and cost (1)")
    add("--cost_per_gpu_hour", type=_positive, help="of one device, in any currency")
    add("--gradient_mb", type=_positive, help="where the records do not say: 4 bytes a weight")
    add("--train_size", type=_whole, help="samples of an epoch, where the records do not say")
    add("--backend", choices=BACKENDS, help="where the records do not say")
    add("--sharing", type=_share, help="what each more process of a machine slows all by, 0 to 1")
    add("--plot", type=_picture, metavar="FILE", help="draws samples/s over nodes: png, svg or pdf")
    add("--advise", action="store_true", help="the best topology, batch and strategy")
    add("--deadline", type=_positive, help="hours, with --advise")
    add("--budget", type=_positive, help="with --advise and --cost_per_gpu_hour")
    add("--json", action="store_true", help="the numbers, for a program")
    return parser


def _given(asked: argparse.Namespace) -> Given:
    return Given(asked.gradient_mb, asked.backend, asked.sharing, asked.train_size)


def _plan(asked: argparse.Namespace, fitted: Fitted, link: Link) -> Plan:
    nodes, per_node, _ = parse_setup(asked.setup)
    if nodes > MOST:
        raise UserError(f"--setup {asked.setup}: {MOST:,} nodes at most")
    if asked.strategy not in STRATEGIES:
        raise UserError(f"--strategy {asked.strategy}: there is {', '.join(STRATEGIES)}")
    if nodes > 1 and asked.link is None:
        raise UserError(
            f"--setup {asked.setup} has {nodes} nodes and the link between them is not known: "
            "give --link, for example 25gbit,0.1ms; torchrun ... -m harness link measures one"
        )
    if asked.sync_every % asked.fragments:
        raise UserError(f"--fragments {asked.fragments}: must divide --sync_every")
    if (asked.deadline or asked.budget) and not asked.advise:
        raise UserError("--deadline and --budget go with --advise")
    batch = asked.batch or fitted.model.line.batches[-1]
    return Plan(
        Shape(nodes, per_node), batch, wire_of(link), asked.strategy, asked.compress,
        asked.sync_every, asked.sync_scope, asked.fragments, asked.overlap, asked.blocks,
        asked.emulated,
    )  # fmt: skip


def _link(text: str | None) -> Link:
    """A comma does as well as a stroke; what the model has no place for is refused."""
    found = link_of("none" if text is None else text.replace(",", "/"))
    if not isinstance(found, Link):
        raise UserError(f"--link {text}: pairs of nodes that differ are not modelled: "
                        "give the slowest of them")  # fmt: skip
    if found.loss or found.jitter_ms:
        raise UserError(f"--link {text}: loss and jitter are not modelled: leave them out")
    return found


def _advise(asked: argparse.Namespace, fitted: Fitted, plan: Plan) -> int:
    if (asked.deadline is None) == (asked.budget is None):
        raise UserError("--advise needs --deadline (hours) or --budget, one of them")
    choices = advise(
        fitted, plan, asked.epochs, asked.deadline, asked.budget, asked.cost_per_gpu_hour
    )
    screen = _screen()
    limit = f"{asked.deadline:g} h" if asked.deadline else f"a budget of {asked.budget:g}"
    for line in (*fit_lines(fitted), ""):
        screen.print(line)
    if not choices:
        screen.print(f"nothing up to {asked.setup} keeps {limit} for {asked.epochs} epochs")
        return 1
    how = "fewest device hours" if asked.deadline else "fastest"
    screen.print(f"{asked.epochs} epochs within {limit}, {how} first:")
    _wide(advice_table(choices[:SHOWN]))
    screen.print(
        "quality is not predicted: other effective batches and diloco are other trainings "
        "(python -m harness batches says from which batch on larger ones do not pay); "
        "over long delays diloco takes longer than is said here (its connections rest)"
    )
    return 0


def _draw(file: Path, curve: list[Prediction], title: str) -> None:
    from harness.read.prediction.drawing import curve_figure  # a second: only where it is needed

    file.parent.mkdir(parents=True, exist_ok=True)
    curve_figure(curve, title).savefig(file, dpi=150)


def _screen() -> Console:
    return Console(highlight=False, soft_wrap=True, markup=False, emoji=False)


def _wide(table: Table) -> None:
    screen = _screen()
    width = Measurement.get(screen, screen.options.update(max_width=1000), table).maximum
    Console(highlight=False, width=width).print(table)


def _picture(text: str) -> Path:
    if Path(text).suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text}: expected a file that ends in png, svg or pdf")
    return Path(text)


def _number(text: str, least: float, most: float, what: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not least <= found <= most:
        raise argparse.ArgumentTypeError(f"{text}: expected {what}")
    return found


def _whole(text: str) -> int:
    return _natural(text, 1)


def _natural(text: str, least: int = 0) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number, {least} or more")
    return int(text)


def _positive(text: str) -> float:
    return _number(text, sys.float_info.min, sys.float_info.max, "a number above 0")


def _share(text: str) -> float:
    return _number(text, 0.0, 1.0, "a share, 0 to 1")

"""python -m harness link: what the links between nodes carry, measured now.

    torchrun --nnodes=2 --nproc_per_node=1 --node_rank=0 --master_addr=... -m harness link

and with --node_rank=1 on the other node.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from harness.parent import end_with_parent
from harness.parser import Parser
from harness.settings import UserError
from harness.train.link import measure
from harness.world import World, world_of

START = "torchrun --nnodes=2 --nproc_per_node=1 --node_rank=... --master_addr=... -m harness link"
EMULATED = "python -m harness nodes 2 --link 20ms -- torchrun -m harness link"
UNKNOWN = "-"
LEGEND = (
    "round trip: of 32 bytes; carries: one way, at a transfer of so many MB; algbw: size / time; "
    "busbw: algbw x 2(n-1)/n; -: no time for it"
)


def main(argv: list[str]) -> int:
    """Every rank measures, rank 0 speaks."""
    leader = os.environ.get("RANK", "0") == "0"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()  # a rank does not outlive its launcher
    try:
        given = _parser().parse_args(argv)
        world = world_of(os.environ)
        if world.size == 1:
            raise UserError(
                f"a link takes two processes; start it on every node with {START}, "
                f"or on emulated nodes with {EMULATED}"
            )
    except UserError as error:
        return _refused(str(error), leader)
    found = _measured(world, given.mb)
    if found is not None:
        print(json.dumps(found, indent=2)) if given.json else _show(found, world)
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="python -m harness link",
        description="Measure the links between nodes, in ten seconds at most.",
        epilog=f"Started on every node: {START}; on emulated nodes: {EMULATED}",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--mb",
        type=_sizes,
        default=[1.0, 25.0],
        metavar="SIZE,...",
        help="sizes of the all-reduce in MB; a model's gradient has 4 bytes a weight (1,25)",
    )
    parser.add_argument("--json", action="store_true", help="the numbers, for a program")
    return parser


def _sizes(text: str) -> list[float]:
    try:
        sizes = [float(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(0 < size <= 4000 for size in sizes):
        raise argparse.ArgumentTypeError(
            f"{text}: expected MB, 4000 at most, for example 25 or 1,25,400"
        )
    return sorted(sizes)


def _refused(reason: str, leader: bool) -> int:
    if leader:
        print(f"harness link: error: {reason}", file=sys.stderr, flush=True)
    else:
        time.sleep(1)  # torchrun stops all ranks when one leaves: let the first speak
    return 2


def _measured(world: World, mb: list[float]) -> dict[str, Any] | None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", world.local_rank)
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend)
    found = measure(world, device, [max(1, int(size * 1e6)) for size in mb])
    dist.barrier()  # all ranks end together: torchrun stops the others as soon as one has left
    dist.destroy_process_group()
    if found is None:
        return None
    # Predictions read this from a file, which says by itself what it is of.
    about = {"backend": backend, "nodes": world.nodes, "processes_per_node": world.per_node}
    return {**about, **found}


# ---- the table ----


def _show(found: dict[str, Any], world: World) -> None:
    screen = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    where = found["interface"] or "an interface that is not known"
    screen.print(
        f"{world.nodes} node(s) of {world.per_node} process(es), over {where}, "
        f"measured in {found['took_s']:.1f} s"
    )
    if found["pairs"]:
        screen.print(_pairs(found["pairs"]))
    screen.print(_reductions(found["allreduce"]))
    screen.print(LEGEND, style="dim")
    if found["warning"]:
        print(f"warning: {found['warning']}", file=sys.stderr)


def _pairs(pairs: list[dict[str, Any]]) -> Table:
    table = _table("nodes", "round trip ms: min", "median", "carries Mbit/s", "at MB")
    for pair in pairs:
        table.add_row(
            "{} - {}".format(*pair["nodes"]),
            _text(pair["rtt_min_ms"], "{:,.2f}"),
            _text(pair["rtt_median_ms"], "{:,.2f}"),
            _text(pair["bandwidth_mbit"], "{:,.0f}"),
            _mb(pair["transfer_bytes"]),
        )
    return table


def _reductions(rows: list[dict[str, Any]]) -> Table:
    table = _table("all-reduce MB", "measured at", "time ms", "algbw Mbit/s", "busbw Mbit/s")
    for row in rows:
        table.add_row(
            _mb(row["asked_bytes"]),
            _mb(row["bytes"]),
            _text(None if row["s"] is None else row["s"] * 1000, "{:,.1f}"),
            _text(row["algbw_mbit"], "{:,.0f}"),
            _text(row["busbw_mbit"], "{:,.0f}"),
        )
    return table


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _mb(size: int | None) -> str:
    return _text(None if size is None else size / 1e6, "{:,.5g}")


def _text(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else form.format(value)

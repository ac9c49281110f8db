"""Links between nodes: measured for the record of a run, or by the verb link, and checked."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
from torch import nn

from harness.core import collectives
from harness.core.collectives import GLOO, NCCL
from harness.core.command_line import print_json
from harness.core.identity import UNKNOWN
from harness.core.links import least_rate_of, slowest_rate, tells_rate
from harness.core.process import end_with_parent, warn
from harness.core.schema.environment import LinkPair, LinkRecord, MeasuredLinks
from harness.core.settings import UserError
from harness.core.topology import World, world_of
from harness.train.measure.clock import MEASURING
from harness.train.measure.environment import launch
from harness.train.measure.link_probe import AllreduceRow, measure_allreduce, measure_pairs
from harness.train.rendezvous import OUTSIDE, address_towards
from harness.train.session import barrier

BUDGET_S = 10.0  # for everything; of the verb by default
LATE = 1.5  # times the budget: exchanges that have begun are completed
PAIRS_SHARE = 0.75  # of the budget at most; the all-reduces get the rest
# A larger gradient is not exchanged as a whole, because there may be no memory for it.
LARGEST = 2**29
# Beyond these differences a link is not the one that was asked for.
RTT_SHARE, RTT_MS = 0.1, 2.0
BANDWIDTH_SHARES = (0.7, 1.3)
# A transfer that would be shorter than this on the link asked for does not measure its rate: rate
# limiters let a burst pass.
SHORT_S = 0.05
# Commands that start the verb, ready to be pasted.
STARTS = """a link takes two processes, so this is started on both of its ends:
  here:           torchrun --nnodes=2 --node_rank=0 --master_addr={address} -m harness link
  on another:     torchrun --nnodes=2 --node_rank=1 --master_addr={address} -m harness link
  under SLURM:    srun --kill-on-bad-exit --nodes=2 --ntasks-per-node=1 bash -c \
'torchrun --nnodes=$SLURM_NNODES --node_rank=$SLURM_NODEID \
--master_addr=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) -m harness link'
  emulated here:  python -m harness nodes 2 --link 20ms -- torchrun -m harness link"""
OF_PAIRS = ("nodes", "round trip ms: min", "median", "carries Mbit/s", "at MB")
OF_SIZES = ("all-reduce MB", "measured at", "time ms", "algbw Mbit/s", "busbw Mbit/s")
LEGEND = (
    "round trip: of 32 bytes; carries: one way, at a transfer of so many MB; algbw: size / time; "
    "busbw: algbw x 2(n-1)/n; -: no time for it, or for a transfer long enough to tell"
)


class Measured(MeasuredLinks):
    """Links, and an all-reduce of each size."""

    allreduce: list[AllreduceRow]


class MeasuredAlone(Measured):
    """What the verb prints, for predictions to read."""

    backend: str
    nodes: int
    processes_per_node: int


@MEASURING.counted()
def link_of_run(model: nn.Module, world: World, device: torch.device) -> LinkRecord | None:
    """Measure the links at the size of this model's gradient; every rank calls this.

    Rank 0 gets the result, and warns if the link is not the one asked for. None for a single node.
    """
    if world.nodes == 1:
        return None
    trained = [p for p in model.parameters() if p.requires_grad]
    gradient = sum(p.nbytes for p in trained)
    result = measure(world, device, [min(gradient, LARGEST)], trained[0].dtype)
    if result is None:
        return None
    if result["warning"]:
        warn(result["warning"])
    if line := not_measured(result, BUDGET_S):
        warn(line)
    (allreduce,) = result["allreduce"]
    return {
        "asked": result["asked"],
        "interface": result["interface"],
        "pairs": result["pairs"],
        "rtt_min_ms": result["rtt_min_ms"],
        "rtt_median_ms": result["rtt_median_ms"],
        "bandwidth_mbit": result["bandwidth_mbit"],
        "took_s": result["took_s"],
        "warning": result["warning"],
        "gradient_bytes": gradient,
        "allreduce_bytes": allreduce["bytes"],
        "allreduce_s": allreduce["s"],
        "allreduce_algbw_mbit": allreduce["algbw_mbit"],
        "allreduce_busbw_mbit": allreduce["busbw_mbit"],
    }


def measure(
    world: World, device: torch.device, sizes: list[int], dtype: torch.dtype = torch.float32,
    budget_s: float = BUDGET_S,
) -> Measured | None:  # fmt: skip
    """Measure every pair of nodes, then an all-reduce of each size; warn if a link differs."""
    began_s = time.perf_counter()
    pairs = measure_pairs(world, device, began_s + budget_s * PAIRS_SHARE)
    until_s, takes_s = began_s + budget_s, partial(allreduce_s, pairs, world)
    allreduce = measure_allreduce(world, device, dtype, sizes, until_s, takes_s)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # training finds the memory as it would without this
    if world.rank != 0:
        return None
    asked = launch().get("link")
    return {
        "asked": asked,
        "interface": interface(device, os.environ),
        "pairs": pairs,
        "rtt_min_ms": _longest(pairs, "rtt_min_ms"),
        "rtt_median_ms": _longest(pairs, "rtt_median_ms"),
        "bandwidth_mbit": slowest_rate(pairs),
        "allreduce": allreduce,
        "took_s": time.perf_counter() - began_s,
        "warning": warning(asked, pairs),
    }


def allreduce_s(pairs: list[LinkPair], world: World, size: int) -> float | None:
    """The predicted seconds of an all-reduce over these links; None if their rate is not known. A
    single byte needs no rate.
    """
    rate = slowest_rate(pairs) if size > 1 else math.inf
    if not pairs or rate is None:
        return None
    delay_s = (_longest(pairs, "rtt_min_ms") or 0.0) / 2000
    wire = collectives.Wire(delay_s, rate * 1e6 / 8)
    shape = collectives.Shape(world.nodes, world.per_node)
    return collectives.allreduce(dist.get_backend(), size, shape, wire).alone_s


def _longest(pairs: list[LinkPair], name: Literal["rtt_min_ms", "rtt_median_ms"]) -> float | None:
    return max((ms for pair in pairs if (ms := pair[name]) is not None), default=None)


def interface(device: torch.device, environ: Mapping[str, str]) -> str | None:
    """The interface named for the backend, else that of this process's connections to ranks.

    Not the interface that leads to the master: gloo binds to the address of this host's own name.
    """
    variable = "NCCL_SOCKET_IFNAME" if device.type == "cuda" else "GLOO_SOCKET_IFNAME"
    named = environ.get(variable)
    if named in psutil.net_if_addrs():  # it may also be a pattern, or several
        return named
    store = int(environ["MASTER_PORT"])
    try:
        connections = psutil.Process().net_connections("tcp")
    except (psutil.Error, OSError):  # the system hides them
        return None
    own = {
        c.laddr.ip.removeprefix("::ffff:")
        for c in connections
        if c.status == psutil.CONN_ESTABLISHED and store not in (c.laddr.port, c.raddr.port)
    }
    interfaces = psutil.net_if_addrs().items()
    used = [name for name, addresses in interfaces if any(a.address in own for a in addresses)]
    return used[0] if len(used) == 1 else None  # of several, some serve other connections


def warning(asked: Any, pairs: list[LinkPair]) -> str | None:
    """How the links differ from what was asked for; None if they do not, or if nothing was."""
    wrong = []
    for pair in pairs:
        target = target_between(asked, pair["nodes"])
        if target is not None and (differs := difference(target, pair)):
            wrong.append(f"between nodes {pair['nodes'][0]} and {pair['nodes'][1]} {differs}")
    if not wrong:
        return None
    others = f"; and {len(wrong) - 1} more pairs" if len(wrong) > 1 else ""
    return f"the link is not the one that was asked for: {wrong[0]}{others}"


def target_between(asked: Any, nodes: list[int]) -> Mapping[str, Any] | None:
    """The link requested between two nodes: one for all pairs, or from a list by nodes."""
    if isinstance(asked, Mapping):
        return asked
    named = (pair for pair in asked or () if sorted(pair["nodes"]) == sorted(nodes))
    return next(named, None)


def difference(target: Mapping[str, Any], pair: Mapping[str, Any]) -> str:
    """How a pair differs from the link asked for; empty if it does not, or is unknown."""
    rtt, bandwidth = pair["rtt_min_ms"], pair["bandwidth_mbit"]
    target_rtt, rate = 2 * (target.get("delay_ms") or 0.0), target.get("rate_mbit")
    differences = []
    if rtt is not None:
        # Jitter may add to the delay or subtract from it, each way.
        off = abs(rtt - target_rtt) - 2 * (target.get("jitter_ms") or 0.0)
        if off > RTT_MS and off > RTT_SHARE * target_rtt:
            differences.append(f"a round trip takes {rtt:.1f} ms, not {target_rtt:g}")
    if rate and bandwidth is not None and rtt is not None:
        low, high = (share * rate for share in BANDWIDTH_SHARES)
        size = pair["transfer_bytes"]
        would_take_s = size * 8 / 1e6 / rate
        trip_s = max(rtt, target_rtt) / 1000
        tells = would_take_s >= SHORT_S and tells_rate(size, would_take_s, trip_s)
        if tells and not low <= bandwidth <= high:
            differences.append(f"it carries {bandwidth:,.0f} Mbit/s, not {rate:g}")
    return " and ".join(differences)


def run(options: argparse.Namespace) -> int:
    """python -m harness link: every rank measures, rank 0 prints."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()  # a rank does not outlive its launcher
    world = world_of(os.environ)
    if world.size == 1:
        # Where other machines probably reach this one.
        address = address_towards(OUTSIDE) or "ADDRESS_OF_THIS_MACHINE"
        print(f"harness link: {STARTS.format(address=address)}", file=sys.stderr)
        return 2
    result = _measure_now(world, options.mb, options.seconds)
    if result is not None:
        print_json(result) if options.json else _show(result, world)
        if line := without_rate(result, options.seconds) or unknown_pairs(result, options.seconds):
            warn(f"{line}: give more with --seconds")
        if line := without_time(result["allreduce"], options.seconds):
            warn(line)
    return 0


def not_measured(result: Mapping[str, Any], budget_s: float) -> str | None:
    """What a run's time for measuring was too short for, and what follows; None if for nothing."""
    unknown = sum(pair["rtt_min_ms"] is None for pair in result["pairs"])
    reduced = all(row["bytes"] for row in result["allreduce"])
    missing, follows = [], "--exchange auto takes the backend"
    if unknown:
        missing.append(f"round trips of {unknown} of {len(result['pairs'])} pairs of nodes")
        follows = follows if not reduced else "estimates leave these pairs out"
    elif without_rate(result, budget_s):
        missing.append("a transfer that tells the rate of the link")
        follows = follows if not reduced else "estimates count delays alone"
    if not reduced:
        missing.append("an all-reduce")
    line = f"no time in {budget_s:g} s for {' and '.join(missing)}: {follows}" if missing else None
    if result["took_s"] <= LATE * budget_s:
        return line
    trip = _text(result["rtt_min_ms"], "{:,.0f} ms")
    late = f"measuring the links took {result['took_s']:.0f} s (shortest round trip {trip})"
    return f"{late}; {line}" if line else late


def without_rate(result: Mapping[str, Any], budget_s: float) -> str | None:
    """That nothing is known of the rate between nodes; None if something is."""
    if not result["pairs"] or result["bandwidth_mbit"] or least_rate_of(result):
        return None
    return f"no time in {budget_s:g} s for a transfer that tells the rate of the link"


def unknown_pairs(result: Mapping[str, Any], budget_s: float) -> str | None:
    """Of how many pairs nothing is known of the rate; None if of no pair."""
    pairs = result["pairs"]
    unknown = sum(not (p["bandwidth_mbit"] or least_rate_of({"pairs": [p]})) for p in pairs)
    if not unknown:
        return None
    return (
        f"no time in {budget_s:g} s for a transfer that tells the rate of {unknown} of "
        f"{len(pairs)} pairs of nodes"
    )


def without_time(allreduce: Iterable[Mapping[str, Any]], budget_s: float) -> str | None:
    """The sizes that there was no time for; None if there was for all."""
    left_out = [row["asked_bytes"] for row in allreduce if row["bytes"] != row["asked_bytes"]]
    if not left_out:
        return None
    sizes = ", ".join(_text(size, "{:,.5g}", 1e-6) for size in left_out)
    return f"no time in {budget_s:g} s for an all-reduce of {sizes} MB: give more with --seconds"


def _measure_now(world: World, mb: list[float], budget_s: float) -> MeasuredAlone | None:
    device = torch.device("cpu")
    if gpus := torch.cuda.device_count():
        if world.per_node > gpus:
            raise UserError(
                f"{world.per_node} processes on this machine and {gpus} GPU(s), and NCCL needs one "
                "for each; CUDA_VISIBLE_DEVICES= measures between CPUs"
            )
        device = torch.device("cuda", world.local_rank)
        torch.cuda.set_device(device)
    backend = NCCL if device.type == "cuda" else GLOO
    dist.init_process_group(backend)
    sizes = [max(1, int(size * 1e6)) for size in mb]
    result = measure(world, device, sizes, budget_s=budget_s)
    barrier()  # torchrun stops all ranks as soon as one has left
    dist.destroy_process_group()
    if result is None:
        return None
    # Predictions read this from a file, which has to be self-contained.
    return {
        "backend": backend,
        "nodes": world.nodes,
        "processes_per_node": world.per_node,
        **result,
    }


def _show(result: Measured, world: World) -> None:
    interface = result["interface"] or "an unknown interface"
    print(
        f"{world.nodes} node(s) of {world.per_node} process(es), over {interface}, "
        f"measured in {result['took_s']:.1f} s"
    )
    pairs = [
        (
            "{} - {}".format(*pair["nodes"]),
            _text(pair["rtt_min_ms"], "{:,.2f}"),
            _text(pair["rtt_median_ms"], "{:,.2f}"),
            _text(pair["bandwidth_mbit"], "{:,.0f}"),
            _text(pair["transfer_bytes"], "{:,.5g}", 1e-6),
        )
        for pair in result["pairs"]
    ]
    sizes = [
        (
            _text(row["asked_bytes"], "{:,.5g}", 1e-6),
            _text(row["bytes"], "{:,.5g}", 1e-6),
            _text(row["s"], "{:,.1f}", 1e3),
            _text(row["algbw_mbit"], "{:,.0f}"),
            _text(row["busbw_mbit"], "{:,.0f}"),
        )
        for row in result["allreduce"]
    ]
    for headings, rows in ((OF_PAIRS, pairs), (OF_SIZES, sizes)):
        if rows:
            print("", *aligned(headings, rows), sep="\n")
    print("", LEGEND, sep="\n")
    if result["warning"]:
        warn(result["warning"])


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of cells below their headings, each column aligned to the right."""
    widths = [max(map(len, cells)) for cells in zip(headings, *rows, strict=True)]
    for cells in (headings, *rows):
        yield "  ".join(map(str.rjust, cells, widths))


def _text(value: float | None, form: str, scale: float = 1.0) -> str:
    return UNKNOWN if value is None else form.format(value * scale)

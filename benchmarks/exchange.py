"""Adding up over a link: gloo's own all-reduce, --exchange direct and all_to_all, and the floor.

    python -m benchmarks.exchange                            two nodes, six links: six minutes
    python -m benchmarks.exchange --nodes 4 --links 40ms/1000mbit
    python -m benchmarks.exchange --nodes 2 --links loopback --out found.json
    python -m benchmarks.exchange --training --links 10ms/1000mbit,40ms/1000mbit
    python -m benchmarks.exchange --training --caps 0,1,200 -- --model vit-tiny-patch32
    python -m benchmarks.exchange --messages --nodes 4 --links 40ms/50mbit
    python -m benchmarks.exchange --links 10ms/50mbit/loss1%,40ms/50mbit/jitter5ms --repeats 400 \
        --sizes 4,1048576,4194304

A link's delay is one way. All ways of exchanging take turns in the same processes. A row of a size
is added up again and again; a time is that of all repetitions by their number, because a rank that
begins late makes the others wait. With --training, the steps of vit.py --tiny are timed, with the
flags after -- added; --caps are DDP's bucket sizes in MB, 0 for its own. The floor is what would be
possible: one delay and all bytes to each other node, or two delays and a part of the bytes,
whichever is shorter, at the rate of a link that emulated nodes share with no others. With
--messages, each rank sends a text to all others, as it sends rows of a record, by torch's
all_gather_object and by gather().

Over links with loss or jitter, the times that predict simulates stand beside those measured. Losses
are rare: --repeats gives the least number of repetitions in a round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import markdown, off, parser_of, ratios, result_of, send_result, show
from harness.core.collectives import BACKEND, GLOO, MEANS, Shape, wire_of
from harness.core.links import Link, Network, link_of
from harness.core.records import read_json
from harness.core.settings import UserError
from harness.read.predict.exchange import longer_over
from harness.read.predict.lossy.tcp import control_of
from harness.read.predict.scenario import Scenario, form_of

LINKS = "1ms/50mbit,10ms/50mbit,40ms/50mbit,1ms/1000mbit,10ms/1000mbit,40ms/1000mbit"
SIZES = (4, 2**20, 4 * 2**20, 25 * 2**20)  # bytes
LEAST = 1024  # bytes, from which on gloo's closed form holds
MESSAGES = (1, 1000, 20_000)  # bytes; a row of a record has a thousand or two
WAYS = ("backend", "direct", "all_to_all")  # with two nodes, all_to_all is the same as direct
LONG_S = 1.5  # s that a way and size takes in a round, if possible
Found = dict[str, list[float]]
Once = Callable[[bool], None]  # argument: whether another repetition follows


def main(argv: list[str]) -> int:
    parser = parser_of("exchange", __doc__, rounds=3)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--links", default=LINKS, help="with commas; loopback: one node")
    parser.add_argument("--training", action="store_true", help="time the steps of a training")
    parser.add_argument("--messages", action="store_true", help="time what ranks tell each other")
    parser.add_argument("--caps", default="0", help="MB of a bucket, with commas; 0: DDP's own")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes, with commas")
    parser.add_argument("--repeats", type=int, default=2, help="of a way and size in a round")
    parser.add_argument("--link", default="loopback", help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help="of vit.py, with --training")
    options = parser.parse_args(argv)
    if options.inside:
        inside(options)
        return 0
    from harness.train.measure.environment import environment

    found = {link: measured(link, options) for link in options.links.split(",")}
    record = {
        "environment": environment(cuda=False), "nodes": options.nodes,
        "load": os.getloadavg()[0], "flags": options.flags, "links": found,
    }  # fmt: skip
    if options.training:
        text = training_table(found)
    elif options.messages:
        text = table(found, options.nodes, MESSAGES, gathered_s)
    else:
        text = table(found, options.nodes, sizes_of(options), ideal_s)
        text += f"\n\n{beside}" if (beside := simulated_table([record])) else ""
    show(text, options.out, record)
    return 0


def sizes_of(options: argparse.Namespace) -> list[int]:
    return [int(size) for size in options.sizes.split(",")]


def measured(link: str, options: argparse.Namespace) -> Found:
    """(way and size, or way and cap) -> seconds of each round."""
    words = [f"--rounds={options.rounds}", f"--caps={options.caps}", f"--link={link}"]
    words += [f"--sizes={options.sizes}", f"--repeats={options.repeats}"]
    words += ["--training"] if options.training else []
    words += ["--messages"] if options.messages else []
    inner = ["-m", "benchmarks.exchange", "--inside", *words, "--", *options.flags]
    nodes, run = str(options.nodes), ["-m", "torch.distributed.run", "--standalone"]
    if link == "loopback":
        command = [sys.executable, *run, f"--nproc_per_node={nodes}", *inner]
    else:
        emulated = [sys.executable, "-m", "harness", "nodes", nodes, "--link", link, "--"]
        command = [*emulated, "torchrun", *inner]
    found: Found = result_of(command)
    return found


def ideal_s(size: int, nodes: int, link: str) -> float | None:
    """The floor: all bytes to each node over its own link, or a part and then its sum."""
    if link == "loopback":
        return None
    of = link_of(link).between(0, 1)
    sending_s = size * 8e-6 / of.rate_mbit if of.rate_mbit else 0.0
    delay_s = of.delay_ms / 1000
    return min(delay_s + sending_s, 2 * delay_s + 2 / nodes * sending_s)


def gathered_s(size: int, nodes: int, link: str) -> float | None:
    """The floor of a message: one delay, and its bytes to each node over its own link."""
    if link == "loopback":
        return None
    of = link_of(link).between(0, 1)
    return of.delay_ms / 1000 + (size * 8e-6 / of.rate_mbit if of.rate_mbit else 0.0)


Ideal = Callable[[int, int, str], float | None]


def table(found: dict[str, Found], nodes: int, sizes: Sequence[int], ideal_of: Ideal) -> str:
    """A table of the medians over the rounds."""
    ways = [way for way in WAYS if any(f"{way} {sizes[0]}" in by for by in found.values())]
    heads = [
        f"{nodes} nodes, link one way", "bytes",
        *(f"{'gloo' if way == 'backend' else way}, ms" for way in ways),
        "direct: times as fast", "possible, ms", "fastest / possible",
    ]  # fmt: skip
    rows = []
    for link, by in found.items():
        for size in sizes:
            medians = [statistics.median(by[f"{way} {size}"]) for way in ways]
            ideal = ideal_of(size, nodes, link)
            least = ["", ""] if ideal is None else [_ms(ideal), f"{min(medians) / ideal:.2f}"]
            faster = ratios(by[f"backend {size}"], by[f"direct {size}"])
            rows.append([link, f"{size:,}", *map(_ms, medians), faster, *least])
    return markdown("l" + "r" * (len(heads) - 1), heads, rows)


def floors(folder: Path) -> str:
    """How far exchanges are from the ideal, by link and number of nodes: a folder of records."""
    by_nodes = sorted(_records_in(folder), key=_nodes_of)
    links = dict.fromkeys(link for record in by_nodes for link in record["links"])
    rows = [
        (link, str(_nodes_of(record)), *(_times_possible(record, link, size) for size in SIZES))
        for link in links for record in by_nodes
    ]  # fmt: skip
    heads = ("link one way", "nodes", *map(_size, SIZES))
    return markdown("lr" + "r" * len(SIZES), heads, rows)


def _records_in(folder: Path) -> list[dict[str, Any]]:
    records = [record for file in sorted(folder.glob("*.json")) if (record := read_json(file))]
    if not records:
        raise UserError(f"{folder} has no record of benchmarks.exchange: --out writes one")
    return records


def _size(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size} bytes"


def _nodes_of(record: Mapping[str, Any]) -> int:
    return int(record["nodes"])


def _times_possible(record: Mapping[str, Any], link: str, size: int) -> str:
    """The fastest way's time by the ideal one, and gloo's; "-" where gloo was not timed."""
    by = record["links"].get(link, {})
    medians = {way: statistics.median(times) for way in WAYS if (times := by.get(f"{way} {size}"))}
    ideal = ideal_s(size, _nodes_of(record), link)
    if ideal is None or "backend" not in medians:
        return "-"
    return f"{min(medians.values()) / ideal:.2f} ({medians['backend'] / ideal:.1f})"


def simulated(folder: Path) -> str:
    """Simulated beside measured times: a folder of records of links with loss or jitter. The last
    line does not count fewer bytes than gloo's closed form is made for.
    """
    records = _records_in(folder)
    errors = sorted(
        abs(simulated_s / measured_s - 1)
        for record in records
        for _, size, way, _, simulated_s, measured_s in compared(record)
        if way != BACKEND or size >= LEAST
    )
    if not errors:
        raise UserError(f"{folder} has no link with loss or jitter")
    return f"{simulated_table(records)}\n\nThese {len(errors)} times are {off(errors)}."


Compared = tuple[str, int, str, float, float, float]


def compared(record: Mapping[str, Any]) -> list[Compared]:
    """(link, bytes, way, seconds without loss and jitter, simulated, measured) where a link has
    either, the same between all nodes.
    """
    control, rows = _control_of(record), []
    for link, by in record["links"].items():
        of = Link() if link == "loopback" else link_of(link)
        if isinstance(of, Network) or (wire := wire_of(of)).is_steady:
            continue
        for name, each in by.items():
            way, size = name.split()
            plan = Scenario(Shape(_nodes_of(record)), 1, wire, exchange=way, emulated=True)
            times = exchange_s(plan, int(size), control)
            rows.append((link, int(size), way, *times, statistics.mean(each)))
    return rows


def _control_of(record: Mapping[str, Any]) -> str:
    """TCP's congestion control; emulated nodes have that of the machine."""
    tcp = record["environment"]["tcp"]
    return control_of([tcp] if tcp else [])


def simulated_table(records: Sequence[Mapping[str, Any]]) -> str:
    """A table of what compared() gives; nothing where no link has loss or jitter."""
    controls, rows = set[str](), []
    for record in records:
        for link, size, way, *seconds in compared(record):
            off_by = f"{seconds[1] / seconds[2] - 1:+.1%}"
            rows.append((link, f"{size:,}", way, *map(_ms, seconds), off_by))
            controls.add(_control_of(record))
    if len(controls) > 1:
        raise UserError(
            f"records of TCP's {' and '.join(sorted(controls))} have no table in common: keep "
            "those of each congestion control in a folder of their own"
        )
    heads = ("bytes", "way", "without, ms", "simulated, ms", "measured, ms", "off")
    return markdown("lrlrrrr", (", ".join(["link", *controls]), *heads), rows) if rows else ""


def exchange_s(plan: Scenario, size: int, control: str) -> tuple[float, float]:
    """Seconds of an exchange by gloo, without and with the loss and jitter of its link."""
    form = form_of(GLOO, size, plan.shape, plan)
    without_s = form(plan.wire).alone_s
    to_all = plan.exchange in MEANS
    return without_s, without_s + longer_over(form, plan.shape, plan.wire, control, to_all, True)


def training_table(found: dict[str, Found]) -> str:
    rows = []
    for link, by in found.items():
        for name, ours in by.items():
            way, cap = name.split()
            if way == "direct":
                theirs = by[f"backend {cap}"]
                medians = [_ms(statistics.median(of)) for of in (theirs, ours)]
                shown = "DDP's own" if cap == "0" else cap
                rows.append([link, shown, *medians, ratios(theirs, ours)])
    heads = ("link one way", "bucket, MB", "gloo, ms a step", "direct, ms a step", "times as fast")
    return markdown("lrrrr", heads, rows)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


# ---- what each node's process does ----


def inside(options: argparse.Namespace) -> None:
    kind = trained if options.training else gathered if options.messages else added_up
    send_result(kind(options))


def gathered(options: argparse.Namespace) -> Found:
    import torch.distributed as dist

    from harness.train.session import gather

    dist.init_process_group("gloo")
    nodes, found = dist.get_world_size(), Found()
    for size in MESSAGES:
        text = "x" * size
        everyone = [text] * nodes

        def by_torch(again: bool, text: str = text, everyone: list[str] = everyone) -> None:
            dist.all_gather_object(everyone, text)

        def directly(again: bool, text: str = text) -> None:
            gather(text)

        ways = {"backend": by_torch, "direct": directly}
        _in_turn(found, size, ways, gathered_s(size, nodes, options.link), options)
    return found


def added_up(options: argparse.Namespace) -> Found:
    import torch
    import torch.distributed as dist

    from harness.train.strategy.direct_allreduce import DirectAllreduce

    dist.init_process_group("gloo")
    nodes, found = dist.get_world_size(), Found()
    direct = DirectAllreduce(dist.group.WORLD)  # as in a training; each has its own message numbers
    everything = DirectAllreduce(dist.group.WORLD, None, True)
    for slot, size in enumerate(sizes_of(options)):
        row = torch.zeros(size // 4)

        def by_backend(again: bool, row: torch.Tensor = row) -> None:
            dist.all_reduce(row)

        def directly(again: bool, row: torch.Tensor = row, slot: int = slot) -> None:
            direct.begin(row, slot, again)()

        def to_all(again: bool, row: torch.Tensor = row, slot: int = slot) -> None:
            everything.begin(row, slot, again)()

        ways = {"backend": by_backend, "direct": directly}
        if nodes > 2:
            ways["all_to_all"] = to_all
        _in_turn(found, size, ways, ideal_s(size, nodes, options.link), options)
    return found


def _in_turn(
    found: Found, size: int, ways: Mapping[str, Once], ideal: float | None,
    options: argparse.Namespace,
) -> None:  # fmt: skip
    often = max(options.repeats, _often(ideal))
    for number in range(-1, options.rounds):
        for way, once in ways.items():
            seconds = _each_s(once, often if number >= 0 else 1)
            if number >= 0:
                found.setdefault(f"{way} {size}", []).append(seconds)


def _often(ideal: float | None) -> int:
    return 20 if ideal is None else min(20, max(2, round(LONG_S / 2 / ideal)))


def _each_s(once: Once, often: int) -> float:
    began_s = time.perf_counter()
    for number in range(often):
        once(number < often - 1)
    return (time.perf_counter() - began_s) / often


def trained(options: argparse.Namespace) -> Found:
    """Median step times of trainings that run one after the other."""
    from benchmarks.overlap import train

    found: Found = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(-1, options.rounds):
            for cap in options.caps.split(","):
                for way in WAYS[:2]:
                    flags = [f"--exchange={way}", "--epochs=1", *options.flags]
                    flags += [] if cap == "0" else [f"--ddp_bucket_cap_mb={cap}"]
                    rows = train(f"{folder}/{number}", flags)
                    if number >= 0:
                        steps = [row["step_time_median_s"] for row in rows]
                        found.setdefault(f"{way} {cap}", []).append(statistics.median(steps or [0]))
    return found


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

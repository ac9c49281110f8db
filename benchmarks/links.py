"""How exact the emulated links are: the requested figures against what programs get.

    python -m benchmarks.links                    two to four minutes
    python -m benchmarks.links --rounds 5         each throughput and round trip so many times
    python -m benchmarks.links --out found.json   and found.md beside it

Round trips: 20 to 60 datagrams of a few bytes. Throughput: one TCP stream without its first second
or so, in bytes of the program. Loss: counted over datagrams in one direction. The column "core" is
the processor time of the process that carries the packets, as a share of one core. With busy cores,
the two measuring programs wait for a core as well as for the link.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from benchmarks.results import ROOT, markdown, parser_of, show
from harness.core.links import link_of
from harness.launch.netns.emulation import EmulatedNodes
from harness.read.labels import digits

DELAYS_MS: tuple[int, ...] = (0, 1, 5, 20, 50, 100)  # one way
JITTERS = ("20ms/jitter2ms", "50ms/jitter10ms")
LOSSES = ("loss0.1%", "loss1%", "5ms/loss5%")
RATES_MBIT: tuple[int, ...] = (10, 100, 500, 1000, 2000)
FAR_MS = 20
PLACES = "3+3+2:within=0.5ms:between=40ms:a-b=10ms"  # eight nodes
HEADINGS = ("what", "link, one way", "asked", "got, median", "lowest to highest", "off", "core")
Row = dict[str, Any]


def main(argv: list[str]) -> int:
    parser = parser_of("links", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one of each kind, not to be quoted")
    options = parser.parse_args(argv)
    load = os.getloadavg()[0]
    few = slice(1, 2) if options.quick else slice(None)
    with EmulatedNodes.open(2, link_of("none")) as pair:
        about = {
            "congestion_control": pair.congestion_control,
            "priority": pair.priority,
            "cores": os.cpu_count(),
            "load_before": load,
        }
        rows = list(measured(pair, few, 1 if options.quick else options.rounds))
    rows += eight_nodes()
    show(table(about, rows), options.out, {**about, "rows": rows})
    return 0


def measured(pair: EmulatedNodes, few: slice, rounds: int) -> Iterator[Row]:
    """Measure two nodes over one link after the other."""
    for delay in DELAYS_MS[few]:
        yield round_trip(pair, f"{delay}ms", rounds)
    with busy_cores():
        yield round_trip(pair, f"{FAR_MS}ms", rounds) | {"what": "round trip, cores busy"}
    for text in JITTERS[few]:
        yield jitter(pair, text, 400 if rounds > 1 else 50)
    for text in LOSSES[few]:
        yield loss(pair, text, 50_000 if rounds > 1 else 5_000)
    for far in ("", f"{FAR_MS}ms/"):
        for rate in RATES_MBIT[few]:
            yield throughput(pair, f"{far}{rate}mbit", rounds)
    yield throughput(pair, "none", rounds)


def round_trip(pair: EmulatedNodes, text: str, rounds: int) -> Row:
    link = link_of(text)
    pair.change(link)
    with running(pair, 1, "echo"):
        count = 60 if link.between(0, 1).delay_ms < 20 else 20
        words = ("ping", pair.nodes[1].address, count, 0.002)
        found = [ended(pair, 0, *words)[0] for _ in range(rounds)]
    return row("round trip", text, "ms", 2 * link.between(0, 1).delay_ms,
               [statistics.median(of) for of in found])  # fmt: skip


def jitter(pair: EmulatedNodes, text: str, count: int) -> Row:
    """The spread of a round trip: both ways are drawn evenly, so its variance is 2/3 jitter²."""
    link = link_of(text)
    pair.change(link)
    with running(pair, 1, "echo"):
        (found,) = ended(pair, 0, "ping", pair.nodes[1].address, count, 0)
    requested = math.sqrt(2 / 3) * link.between(0, 1).jitter_ms
    return row("spread of round trips", text, "ms", requested, [statistics.stdev(found)])


def loss(pair: EmulatedNodes, text: str, count: int) -> Row:
    link = link_of(text)
    pair.change(link)
    with running(pair, 1, "count") as counter:
        ended(pair, 0, "flood", pair.nodes[1].address, count, 0.0001)
        got = answer_of(counter)
    share = link.between(0, 1).loss
    error = 100 * math.sqrt(share * (1 - share) / count)
    return row("loss", text, "%", 100 * share, [100 * (1 - got / count)]) | {"error": error}


def throughput(pair: EmulatedNodes, text: str, rounds: int) -> Row:
    link = link_of(text)
    pair.change(link)
    far = link.between(0, 1).delay_ms > 0
    found, shares = [], []
    for _ in range(rounds):
        with running(pair, 1, "receive", 1.5 if far else 0.5) as receiver:
            began_s, busy_s = time.perf_counter(), processor_s(pair)
            ended(pair, 0, "send", pair.nodes[1].address, 3.0 if far else 1.5)
            found.append(answer_of(receiver))
            shares.append((processor_s(pair) - busy_s) / (time.perf_counter() - began_s))
    requested = link.between(0, 1).rate_mbit
    return row("TCP", text, "Mbit/s", requested, found) | {"share": statistics.median(shares)}


def eight_nodes() -> Iterator[Row]:
    """Round trips from every node to every other, one node at a time; a row per distance."""
    network = link_of(PLACES)
    every = range(8)
    by_distance: dict[float, list[float]] = {}
    with EmulatedNodes.open(8, network) as nodes:
        servers = [start(nodes, node, "echo") for node in every]
        for server in servers:
            assert server.stdout is not None
            server.stdout.readline()
        for node in every:
            others = [other for other in every if other != node]
            addresses = ",".join(nodes.nodes[other].address for other in others)
            found = ended(nodes, node, "ping", addresses, 5, 0.002)
            for other, times in zip(others, found, strict=True):
                requested = 2 * network.between(node, other).delay_ms
                by_distance.setdefault(requested, []).append(statistics.median(times))
        for server in servers:
            server.kill()
            server.communicate()
    for distance, medians in sorted(by_distance.items()):
        yield row(f"round trip, {len(medians)} pairs of 8 nodes", PLACES, "ms", distance, medians)


def row(what: str, link: str, unit: str, requested: float | None, found: list[float]) -> Row:
    return {"what": what, "link": link, "unit": unit, "asked": requested, "found": sorted(found)}


def start(nodes: EmulatedNodes, node: int, *words: Any) -> subprocess.Popen[str]:
    command = [*nodes.enter(node), sys.executable, "-m", "benchmarks.inside", *map(str, words)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


@contextmanager
def running(nodes: EmulatedNodes, node: int, *words: Any) -> Iterator[subprocess.Popen[str]]:
    """Start the end that waits for the other; ready on entry, killed on exit."""
    process = start(nodes, node, *words)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def answer_of(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.read())


def ended(nodes: EmulatedNodes, node: int, *words: Any) -> Any:
    process = start(nodes, node, *words)
    text, _ = process.communicate()
    assert process.returncode == 0, f"{words} failed"
    return json.loads(text) if text else None


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keep all cores busy: one process per core that does nothing but compute."""
    burning = [subprocess.Popen([sys.executable, "-c", "while True: pass"])
               for _ in range(os.cpu_count() or 1)]  # fmt: skip
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def processor_s(nodes: EmulatedNodes) -> float:
    times = psutil.Process(nodes.holder.pid).cpu_times()
    return float(times.user + times.system)


def table(about: dict[str, Any], rows: list[Row]) -> str:
    return (
        f"Carried by the relay (priority {about['priority']}, TCP "
        f"{about['congestion_control']}) on {about['cores']} cores; load before "
        f"{about['load_before']:.1f}.\n\n{markdown('llrrrrr', HEADINGS, map(_cells, rows))}"
    )


def _cells(found: Row) -> tuple[str, ...]:
    middle = statistics.median(found["found"])
    low, high = found["found"][0], found["found"][-1]
    requested, unit = found["asked"], found["unit"]
    target = "as fast as it goes" if requested is None else f"{digits(requested)} {unit}"
    off = "" if requested is None else f"{middle - requested:+.3g} {unit}"
    if requested:
        off += f", {middle / requested - 1:+.1%}"
    if "error" in found:
        off += f" (expected ±{found['error']:.2g})"
    share = f"{found['share']:.2f}" if "share" in found else ""
    spread = f"{digits(low)} to {digits(high)}" if low != high else ""
    return found["what"], found["link"], target, f"{digits(middle)} {unit}", spread, off, share


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

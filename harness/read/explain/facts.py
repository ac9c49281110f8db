"""What a record says of how its run was made, as far as it bears on how fast it was."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from harness.core.identity import EVAL_BATCH
from harness.read.compare.comparable import micro_batch
from harness.read.records.groups import Group
from harness.read.records.loading import BANDWIDTH, RTT, is_number, link_numbers
from harness.read.records.runs import Run


@dataclass(frozen=True)
class Facts:
    """What a record says of how the run was made."""

    strategy: str
    nodes: int
    processes: int
    micro_batch: int  # samples of one pass on one device
    baseline_micro_batch: int
    eval_batch: float  # samples of one pass of evaluation
    threads: int | None
    baseline_threads: int | None
    on_cpu: bool
    emulated: bool  # its nodes share one machine
    cpu_percent: float | None  # of the cores of all nodes
    others_cores: float | None  # cores that were busy with something else, where there is one node
    throttled: float | None  # share of the readings, of the device that was slowed down most
    payload_bytes: float | None  # of an update, of one process
    rtt_ms: float | None
    bandwidth_mbit: float | None
    link_asked: str | None
    compress: str | None
    padding_setting: str | None


def facts_of(group: Group, baseline: Group | None) -> Facts:
    run = group.finished[0]
    environment, settings = run.environment, group.identity
    nodes, processes = run.nodes or 1, run.processes or 1
    rows = list(run.epochs)
    launch, link = environment.get("launch") or {}, link_numbers(environment)
    payload, updates = (run.measures.get(n) for n in ("payload_bytes", "updates"))
    samples = (environment.get("data") or {}).get("test_samples") or 0
    batch = settings.get("eval_batch") or EVAL_BATCH
    busy = _mean([((row.get("node") or {}).get("cpu_percent") or {}) for row in rows])
    facts = Facts(
        strategy=str(settings["strategy"]),
        nodes=nodes,
        processes=processes,
        micro_batch=micro_batch(group),
        baseline_micro_batch=0,
        eval_batch=min(batch, samples / processes),
        threads=environment.get("threads"),
        baseline_threads=None,
        on_cpu=(environment.get("observed") or {}).get("device") == "cpu",
        emulated=launch.get("launcher") == "netns",
        cpu_percent=busy,
        others_cores=_others(run, busy),
        throttled=_throttled(rows),
        payload_bytes=payload / updates / processes if payload and updates else None,
        rtt_ms=link.get(RTT),
        bandwidth_mbit=link.get(BANDWIDTH),
        link_asked=settings["link"],
        compress=settings.get("compress"),
        padding_setting=settings.get("padding"),
    )
    if baseline is None:
        return facts
    threads = baseline.finished[0].environment.get("threads")
    return replace(facts, baseline_micro_batch=micro_batch(baseline), baseline_threads=threads)


def _mean(readings: list[dict[str, Any]]) -> float | None:
    known = [reading["mean"] for reading in readings if is_number(reading.get("mean"))]
    return sum(known) / len(known) if known else None


def _others(run: Run, busy_percent: float | None) -> float | None:
    """About: what is busy in the epochs, less the run's own processor time a second of it all."""
    own = [run.measures.get(name) for name in ("user_s", "system_s", "wall_s")]
    cores = run.environment.get("cpu_cores")
    if run.nodes != 1 or busy_percent is None or not cores or None in own:
        return None
    user_s, system_s, wall_s = (value or 0.0 for value in own)
    return max(busy_percent / 100 * cores - (user_s + system_s) / wall_s, 0.0)


def _throttled(rows: list[dict[str, Any]]) -> float | None:
    """The largest share of readings, of any reason and epoch."""
    found = [
        share
        for row in rows
        for share in (((row.get("gpu") or {}).get("throttled")) or {}).values()
        if is_number(share)
    ]
    return max(found, default=None)

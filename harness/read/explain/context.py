"""The conditions of a run that affect its speed, as recorded, and what limits its exchanges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.core.collectives import (
    BACKEND,
    DIRECT,
    GLOO,
    MEANS,
    Cost,
    Shape,
    Wire,
    allreduce,
    coded_mean,
    powersgd_mean,
    ring_share,
)
from harness.core.identity import EVAL_BATCH
from harness.core.records import FINISHED, RUNNING, SKIPPED, WAITING
from harness.core.strategies import (
    EACH_UPDATE,
    GRADIENT_CODES,
    SENT_DIRECTLY,
    STRATEGIES,
    chooses_exchange,
    recorded_strategy,
    sends_directly,
)
from harness.read.measures import BANDWIDTH, RTT
from harness.read.records.groups import Group
from harness.read.records.recorded import is_number
from harness.read.records.runs import Run, link_numbers
from harness.read.statistics import spread

BOTH = "rate and the delay"
# Runs that have not failed, though they do not count.
OPEN = {WAITING: "have not begun", RUNNING: "are still running", SKIPPED: "were skipped"}
MUCH = 2  # times as long as the other: then it is the limit alone


@dataclass(frozen=True)
class RunContext:
    """The conditions of a run that affect its speed, as recorded."""

    strategy: str
    nodes: int
    processes: int
    micro_batch: int  # samples of one pass on one device; 0: unknown
    baseline_micro_batch: int
    eval_batch: float  # samples of one pass of evaluation
    on_cpu: bool
    emulated: bool  # its nodes share one machine
    cpu_percent: float | None  # of the cores of all nodes
    others_cores: float | None  # cores used by other programs, on the busiest machine
    throttled: float | None  # share of the readings, of the most throttled device
    payload_bytes: float | None  # per update and process
    rtt_ms: float | None
    bandwidth_mbit: float | None
    requested_link: str | None
    compress: str | None
    padding_setting: str | None
    epochs: float | None = None
    balances: bool = False  # it has equal shares, and --balance measured is possible
    other_exchange: str | None = None  # an --exchange that may wait for fewer round trips
    exchange: str = BACKEND
    backend: str | None = None
    shares: Sequence[int] = ()  # of an update's samples, by rank, with --balance
    requested_links: Sequence[Mapping[str, Any]] = ()  # one, or that of each pair of nodes
    sync_first: int = 0  # updates that are made together before replicas train apart

    @property
    def shares_machine(self) -> bool:
        """Whether several processes share the cores of one machine."""
        return self.on_cpu and self.processes > 1 and (self.nodes == 1 or self.emulated)


def run_context(group: Group, baseline: Group | None) -> RunContext:
    run = group.timed[0]
    settings, links = group.identity, [link_numbers(each.environment) for each in group.timed]
    link = {name: spread([each[name] for each in links if each.get(name)]).mean
            for name in (RTT, BANDWIDTH)}  # fmt: skip
    nodes, processes = run.nodes or 1, run.processes or 1
    payload, updates = (run.measures.get(n) for n in ("payload_bytes", "updates"))
    samples = run.data.get("test_samples") or 0
    batch = settings.get("eval_batch") or EVAL_BATCH
    return RunContext(
        strategy=str(settings["strategy"]),
        nodes=nodes,
        processes=processes,
        micro_batch=settings["per_gpu_batch"] or 0,
        baseline_micro_batch=0 if baseline is None else baseline.identity["per_gpu_batch"] or 0,
        eval_batch=min(batch, samples / processes),
        on_cpu=run.device == "cpu",
        emulated=run.launch.get("launcher") == "netns",
        cpu_percent=_cpu_percent(run.epochs),
        others_cores=_others_cores(run),
        throttled=_throttled(run.epochs),
        payload_bytes=payload / updates / processes if payload and updates else None,
        rtt_ms=link.get(RTT),
        bandwidth_mbit=link.get(BANDWIDTH),
        requested_link=settings["link"],
        compress=settings.get("compress"),
        padding_setting=settings.get("padding"),
        epochs=run.measures.get("epochs_done"),
        balances=_could_balance(run),
        other_exchange=_other_exchange(run),
        exchange=settings.get("exchange") or BACKEND,
        shares=run.observed.get("shares") or (),
        backend=run.observed.get("backend"),
        requested_links=_requested_links(run.launch.get("link")),
        sync_first=settings.get("sync_first") or 0,
    )


def not_counted(group: Group) -> Iterator[str]:
    """A sentence on the runs that did not finish, and on those that may still do so."""
    if len(group.runs) == len(group.finished):
        return
    states = Counter(run.current_state for run in group.runs if run.state != FINISHED)
    still_open = {text: states.pop(state, 0) for state, text in OPEN.items()}
    if left_out := states.total():
        yield f"{left_out} run(s) did not finish and are not counted."
    yield from (f"{number} run(s) {text}." for text, number in still_open.items() if number)


def _requested_links(requested: object) -> list[Mapping[str, Any]]:
    of_pairs = requested if isinstance(requested, list) else [requested]
    return [link for link in of_pairs if isinstance(link, dict)]


def _could_balance(run: Run) -> bool:
    """Whether --balance is possible, as far as recorded."""
    settings = run.settings
    if run.observed.get("batchnorm_layers"):
        return False
    if settings.get("balance") or settings.get("auto_batch") or settings.get("tail") == "pad":
        return False
    variables = run.environment.get("variables") or {}
    elastic = variables.get("TORCHELASTIC_MAX_RESTARTS") not in (None, "0")
    more = (settings.get("per_gpu_batch") or 0) > 1  # than the one sample that each rank keeps
    return run.identity["strategy"] in EACH_UPDATE and more and not elastic


def _other_exchange(run: Run) -> str | None:
    """The --exchange to try for a run that used the backend without choosing it by the link."""
    requested = (run.recorded_folder.read_settings() or {}).get("exchange")
    on_cpu = run.device == "cpu"
    if requested in ("auto", *SENT_DIRECTLY) or not on_cpu or (run.nodes or 1) == 1:
        return None
    if run.identity["strategy"] not in STRATEGIES or not sends_directly(run.identity):
        return None
    return "auto" if chooses_exchange(run.identity) else DIRECT


def _others_cores(run: Run) -> float | None:
    share, cores = run.others_cpu_share, run.environment.get("cpu_cores")
    return None if share is None or not cores else share * float(cores)


def _cpu_percent(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """The mean over the epochs in which it is known."""
    readings = (((row.get("node") or {}).get("cpu_percent") or {}).get("mean") for row in rows)
    return spread([value for value in readings if is_number(value)]).mean


def _throttled(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """The largest share of readings, over all reasons and epochs."""
    reasons = (((row.get("gpu") or {}).get("throttled")) or {} for row in rows)
    shares = [share for each in reasons for share in each.values() if is_number(share)]
    return max(shares, default=None)


def limit_of(context: RunContext, took_s: float) -> str | None:
    """What limits the exchange: the rate or the delay, whichever takes most of its closed form, or
    both if neither does; None if the form explains less than half of the measured time. Only the
    rate is judged for strategies but ddp: no record says how often these exchange in an update.
    """
    if not context.payload_bytes or not context.bandwidth_mbit or took_s <= 0:
        return None
    if not recorded_strategy(vars(context)).reduces_gradients:
        sent_s = ring_share(context.processes) * context.payload_bytes / _wire(context).bytes_per_s
        return "rate" if sent_s > took_s / 2 else None
    cost = _cost(context, context.payload_bytes)
    if cost.alone_s < took_s / 2:  # the measured time lacks what overlaps computing
        return None
    delay_s = cost.waits_s + cost.slack_s
    if cost.wire_s >= MUCH * delay_s:
        return "rate"
    return "delay" if delay_s >= MUCH * cost.wire_s else BOTH


def _wire(context: RunContext) -> Wire:
    return Wire((context.rtt_ms or 0.0) / 2e3, (context.bandwidth_mbit or 0.0) * 1e6 / 8)


def _cost(context: RunContext, size: float) -> Cost:
    """The cost of the exchange of one ddp update, as if of a single tensor."""
    wire, compress = _wire(context), str(context.compress)
    nodes = Shape(context.nodes)
    processes = Shape(context.nodes, max(1, context.processes // context.nodes))
    if context.exchange in MEANS:  # one process of each node takes part
        return MEANS[context.exchange](size, nodes, wire, context.emulated)
    if compress in GRADIENT_CODES:
        return coded_mean(size, processes, wire, context.emulated)
    if compress.startswith("powersgd"):
        return powersgd_mean(size, processes, wire)
    return allreduce(context.backend or GLOO, size, processes, wire)

"""Records -> model: runs of one process, runs of several on one machine, and measured links.

Runs on several nodes are never fitted on: each group of them is a case that can be predicted from
the others of its kind.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.core.collectives import Shape, Wire, ring_share, wire_of
from harness.core.links import Link
from harness.core.records import DISTURBING_SHARE, FINISHED, read_json
from harness.core.records.archives import parsed
from harness.core.schema.checks import check_fields
from harness.core.settings import UserError
from harness.core.strategies import recorded_strategy
from harness.read.labels import counted
from harness.read.predict.basis import Basis, basis_of, is_on_one_machine, missing_command
from harness.read.predict.computing import StepTime, crowd, fit_line, fit_sharing, slowdown
from harness.read.predict.exchange import BACKENDS, Reduction
from harness.read.predict.facts import (
    ALIKE,
    Overrides,
    backend_of,
    blocks_of,
    grad_acc_of,
    gradient_bytes,
    is_timed_like,
    model_of,
    shape_of,
    step_s,
    test_samples_of,
    train_samples_of,
)
from harness.read.predict.lossy.tcp import control_of
from harness.read.predict.model import Model
from harness.read.predict.phases import Phases, fit_phases
from harness.read.predict.scenario import APART
from harness.read.records.groups import by_key, with_times_that_count
from harness.read.records.processors import speed_text, spread_of
from harness.read.records.recorded import check_links, is_number, uniform_link, warn_not_read
from harness.read.records.runs import Run
from harness.read.records.selection import (
    parse_selector,
    read_selected,
)
from harness.read.statistics import spread, welch_half

# Links that were measured by themselves: what `python -m harness link --json` prints.
LINK_FILES = "link*.json"
NO_QUIET_ONE = ": no run of their set-up and batch is quiet"
MARK = re.compile(r"^\[node\d+\] ", re.MULTILINE)  # of `python -m harness nodes`


@dataclass(frozen=True)
class Fitted:
    """A model, what it was fitted on, and further facts of the records."""

    model: Model
    name: str
    machine: str
    first: Run  # a run of one process; times of other runs count where they are like its times
    runs: int
    left_out: int  # disturbed runs, where quiet ones of the same set-up and batch exist
    assumed: tuple[str, ...]
    of_model: tuple[Any, ...]  # the model that was trained, and its adapters
    train_samples: int | None
    phases: Phases  # what a run takes beside its steps
    power_w: float | None  # of one device, while it trains
    idle_w: float | None
    selected: tuple[Run, ...] = ()  # all runs that were asked for
    of_another_speed: frozenset[str | None] = frozenset()  # the paths of those left out for that
    not_read: tuple[str, ...] = ()  # a line for each selected run whose record is not believed
    folder: str = "RECORDS"  # the folder that a measured link belongs into
    shared: tuple[Run, ...] = ()  # those that tell what sharing a machine costs
    blocks: int | None = None  # layers that fsdp gathers one at a time
    fills_last: bool = False  # an epoch's last, partial batch counts: --tail pad, imported runs

    def updates_of(self, samples: int) -> int | None:
        """Updates of an epoch with so many samples each; None where the epoch's size is unknown."""
        if not self.train_samples:
            return None
        return (self.train_samples + (samples - 1) * self.fills_last) // samples

    def is_timed_like(self, run: Run) -> bool:
        """Whether the times of a run are comparable with those of the fit: of its machine, at the
        speed of its processor, with its torch and threads.
        """
        return is_timed_like(self.first, run) and run.path not in self.of_another_speed

    def unlike_text(self, run: Run) -> str:
        """Where a run was timed whose times are not comparable with those of the fit."""
        if run.path in self.of_another_speed:
            return f"on a processor of {speed_text([run])}"
        return "with another torch or number of threads"

    @property
    def runs_text(self) -> str:
        runs = f"{counted(self.runs, 'run')} on one machine"
        return f"{runs} ({self.left_out} disturbed left out)" if self.left_out else runs

    @property
    def of_sharing(self) -> str:
        """How many runs tell what sharing a machine costs, how sure, and whether they were
        disturbed; empty where a flag gives it.
        """
        if not self.shared:
            return ""
        texts = [f"of {counted(len(self.shared), 'run')}"]
        if busy := sum(run.is_beside_others for run in self.shared):
            texts.append(f"{busy} disturbed, which may have slowed them more")
        cost, off = self.model.sharing, self.model.sharing_spread
        alike = len({shape_of(run).ranks for run in self.shared}) == 1
        if cost is not None and off is not None and alike:
            half = welch_half((off**2 / len(self.shared), self.model.sharing_freedom))
            low, high = max(0.0, cost - half), cost + half
            texts.append(f"95 % interval {100 * low:.3g} to {100 * high:.3g} %")
        return f" ({', '.join(texts)})"

    @property
    def about(self) -> str:
        return f"{self.name} on {self.machine}: fitted on {self.runs_text}"


def all_reduces_of(runs: Sequence[Run]) -> Iterator[Reduction]:
    """All-reduces that runs measured over their link before they began. The model does not matter
    for an all-reduce, so those of all runs count.
    """
    for run in runs:
        link = run.measured_link
        row = {"bytes": link.get("allreduce_bytes"), "s": link.get("allreduce_s")}
        yield from _reductions(link, [row], shape_of(run), str(run.observed.get("backend")))


def measured_beside(selector: str) -> Iterator[Reduction]:
    """The all-reduces in link*.json files of a folder, or of FOLDER:NAME=VALUE."""
    folder, _ = parse_selector(selector)
    for file in sorted(folder.rglob(LINK_FILES)) if folder.is_dir() else ():
        try:
            link = _read_link(file)
            if not (link.get("nodes") and link.get("backend")):
                continue  # not ours
            rows = _checked_link(link, file)
        except UserError as error:
            warn_not_read([str(error)])
            continue
        shape = Shape(int(link["nodes"]), int(link["processes_per_node"]))
        yield from _reductions(link, rows, shape, link["backend"])


def _read_link(file: Path) -> dict[str, Any]:
    """The JSON of a file, also where `harness nodes` marked each line, and with messages before
    and after it.
    """
    if (link := read_json(file)) is not None:
        return link
    try:
        text = MARK.sub("", file.read_text(encoding="utf-8"))
        content = parsed(text[text.find("{") : text.rfind("}") + 1])
    except (OSError, ValueError):
        raise UserError(f"{file} is not JSON: its all-reduces are left out") from None
    return content if isinstance(content, dict) else {}


def _checked_link(link: Mapping[str, Any], file: Path) -> list[dict[str, Any]]:
    """The all-reduces of a file; UserError unless it is what `harness link` prints."""
    rows = link.get("allreduce") or []
    as_run = {name: link.get(name) for name in ("nodes", "processes_per_node")}
    check_fields("environment", {"link": link, **as_run}, file)
    check_links({"link": link}, file)
    if None in as_run.values() or not isinstance(rows, list):
        raise UserError(f"{file} is not what `harness link --json` prints")
    for row in rows:
        sizes = [row.get("bytes"), row.get("s")] if isinstance(row, dict) else [0]
        if not all(value is None or (is_number(value) and value > 0) for value in sizes):
            raise UserError(f"{file}: allreduce holds {row!s:.60}: expected bytes and s")
    return rows


def _reductions(
    link: Mapping[str, Any], rows: Iterable[Mapping[str, Any]], shape: Shape, backend: str
) -> Iterator[Reduction]:
    requested = uniform_link(link.get("asked")) or {}
    if requested.get("delay_ms") and requested.get("rate_mbit") is None:
        return  # TCP's window decides what passes, and a probe ends before that has opened
    wire = wire_between(link)
    for row in rows:
        size, seconds = row.get("bytes"), row.get("s")
        if wire is not None and shape.nodes > 1 and size and seconds and backend in BACKENDS:
            yield Reduction(backend, int(size), float(seconds), shape, wire)


def wire_between(link: Mapping[str, Any]) -> Wire | None:
    """The link as requested, or as measured if none was requested."""
    if (requested := uniform_link(link.get("asked"))) is not None:
        return wire_of(Link(
            delay_ms=requested.get("delay_ms") or 0.0, rate_mbit=requested.get("rate_mbit"),
            jitter_ms=requested.get("jitter_ms") or 0.0, loss=requested.get("loss") or 0.0,
        ))  # fmt: skip
    rtt_ms, mbit = link.get("rtt_min_ms"), link.get("bandwidth_mbit")
    if link.get("asked") or not is_number(rtt_ms) or not is_number(mbit):
        return None  # unequal links, or nothing is known
    return Wire(rtt_ms / 2000, mbit * 1e6 / 8)


def steady_wire(link: Mapping[str, Any]) -> Wire | None:
    """The link, or None where it loses packets or has jitter: its times predict no other link."""
    wire = wire_between(link)
    return wire if wire is not None and wire.is_steady else None


def fit_records(selector: str, overrides: Overrides) -> Fitted:
    """Fit a model on the runs that a selector names, and on the links measured beside them."""
    runs, _, not_read = read_selected(selector, None)
    return fit_read(selector, runs, not_read, overrides)


def fit_read(
    selector: str, runs: Sequence[Run], not_read: tuple[str, ...], overrides: Overrides
) -> Fitted:
    table = [*all_reduces_of(runs), *measured_beside(selector)]
    fitted = fit_on(selector, runs, overrides, table)
    folder, _ = parse_selector(selector)
    name = str(folder) if folder.is_dir() else fitted.folder
    return replace(fitted, not_read=not_read, folder=name)


def fit_on(
    selector: str, runs: Sequence[Run], overrides: Overrides, table: Iterable[Reduction]
) -> Fitted:
    """Fit a model on these runs; UserError, with the missing command, where they are not enough."""
    basis = basis_of(selector, runs, overrides)
    singles, first = basis.singles, basis.singles[0]
    line = fit_line([(r.identity["per_gpu_batch"], step_s(r, overrides) or 0.0) for r in singles])
    own_cores = own_cores_of(first)
    sharing, sharing_spread, inside_s, shared = _sharing(basis.runs, line, own_cores, overrides)
    sharing_freedom = len(shared) - 1
    if overrides.sharing is not None:  # given, so without a spread
        sharing, sharing_spread, sharing_freedom = overrides.sharing, 0.0, 1
    arguments = first.settings.get("training_arguments") or {}
    same = same_training(first, basis.near)
    coded = _coded_on_one_machine(first, same)
    tcp = _tcp_of(same)
    phases = fit_phases((shape_of(run), steady_wire(run.measured_link), run) for run in same)
    model = Model(
        line, sharing, sharing_spread, inside_s,
        gradient_bytes=gradient_bytes(first, basis.near, overrides),
        backend=backend_of(first, overrides),
        grad_acc=grad_acc_of(first),
        cap_mb=arguments.get("ddp_bucket_cap_mb"),
        table=tuple(table),
        shared_by=max((shape_of(run).ranks for run in shared), default=1),
        payloads=_payloads(same),
        hosts=_hosts(coded, line, sharing, own_cores, overrides),
        sharing_freedom=sharing_freedom,
        slow_start_after_idle=_slow_start_after_idle(tcp),
        congestion=control_of(tcp),
        own_cores=own_cores,
        notes=basis.notes,
    )  # fmt: skip
    return Fitted(
        model,
        name=", ".join(str(v) for n in ("script", "model") if (v := first.identity.get(n))),
        machine=str(first.machine or "unknown machine"),
        first=first,
        runs=len(basis.runs),
        left_out=basis.left_out,
        assumed=(
            *_assumptions(basis, first, line, overrides),
            *basis.notes,
            *spread_of([*basis.runs, *coded]),
            *_beside_others([*basis.runs, *coded], "runs", NO_QUIET_ONE),
            *_beside_others(phases.over_links, "runs over links"),
        ),
        of_model=tuple(model_of(first)),
        train_samples=overrides.train_size or train_samples_of(first),
        shared=() if overrides.sharing is not None else tuple(shared),
        blocks=overrides.blocks or blocks_of(first),
        fills_last=bool(first.imported) or first.identity["tail"] == "pad",
        phases=phases,
        power_w=_mean_power_w(singles),
        selected=tuple(runs),
        of_another_speed=frozenset(run.path for run in basis.others),
        idle_w=spread(
            [w for r in singles if is_number(w := r.environment.get("idle_power_w"))]
        ).mean,
    )


def _assumptions(basis: Basis, first: Run, line: StepTime, overrides: Overrides) -> Iterator[str]:
    """A sentence for each fact that the records lack, assumed here or given by a flag."""
    if len(line.batches) == 1:
        yield (
            f"only batch {line.batches[0]} was measured on one process: nothing is known of "
            f"others, and two thirds of a step are taken for the backward pass; one more: "
            f"{missing_command(basis.near, '1_1', 2 * line.batches[0])}"
        )
    if overrides.sharing is not None:
        yield f"processes of a machine slow each other by {overrides.sharing:.0%} each (--sharing)"
    if overrides.gradient_mb is not None:
        yield f"a gradient of {overrides.gradient_mb:g} MB (--gradient_mb)"
    if first.identity.get("grad_acc") is None:
        yield "one forward pass an update: the records do not say how many"
    for what, of, flag in (
        ("an epoch", train_samples_of, " (--train_size)"),
        ("an evaluation", test_samples_of, ""),
    ):
        sizes, own = {of(run) for run in basis.runs} - {None}, of(first)
        if len(sizes) > 1 and own is not None and not (flag and overrides.train_size):
            theirs = ", ".join(map(str, sorted(filter(None, sizes))))
            yield f"{what} of {own} samples: those of the runs have {theirs}{flag}"


def _beside_others(runs: Sequence[Run], what: str, why: str = "") -> Iterator[str]:
    if busy := sum(run.is_beside_others for run in runs):
        yield (
            f"{busy} of {len(runs)} {what} were disturbed (others used more than "
            f"{DISTURBING_SHARE:.0%} of the cores), and count as if they had run alone{why}"
        )


def own_cores_of(run: Run) -> int | None:
    """For how many such processes its machine has cores; None on GPUs or where unknown."""
    cores = run.environment.get("cpu_cores")
    return max(1, cores // run.threads) if cores and run.threads else None


def _sharing(
    basis: Iterable[Run], line: StepTime, own_cores: int | None, overrides: Overrides
) -> tuple[float | None, float | None, float, list[Run]]:
    """(share by which each further process slows all, its spread, exposed exchange of two
    processes, the runs that this is from).
    """
    slower: dict[int, list[float]] = {}
    inside, shared = list[float](), list[Run]()
    for run in basis:
        count, took_s, batch = (
            shape_of(run).ranks,
            step_s(run, overrides),
            run.identity["per_gpu_batch"],
        )
        if count == 1 or took_s is None or not line.knows(batch):
            continue
        # Without a measured exchange, its time counts as slowdown by sharing the machine.
        share = run.measures.get("comm_exposed_share", run.measures.get("comm_share", 0.0))
        exposed_s = took_s * min(1.0, max(0.0, share))
        cores, turns = crowd(count, own_cores)
        slower.setdefault(cores, []).append((took_s - exposed_s) / line.step_s(batch) / turns)
        shared.append(run)
        inside.append(exposed_s * count / (2 * (count - 1)))
    if not slower:
        return None, None, 0.0, []
    added = [(each - 1) / (count - 1) for count, many in slower.items() for each in many]
    return fit_sharing(slower), spread(added).sd, statistics.mean(inside), shared


def _coded_on_one_machine(first: Run, same: Iterable[Run]) -> list[Run]:
    """DDP runs with --compress on one machine, else as `first`: quiet ones if there are any."""
    facts = (*ALIKE.values(), grad_acc_of)
    coded = [
        run for run in same
        if is_on_one_machine(run) and shape_of(run).ranks > 1
        and recorded_strategy(run.identity).reduces_gradients
        and run.identity["compress"] not in (None, "none")
        and is_timed_like(first, run)
        and all(fact(run) in (None, fact(first)) for fact in facts)
    ]  # fmt: skip
    by_compress = by_key(coded, lambda run: str(run.identity["compress"]))
    return [run for alike in by_compress.values() for run in with_times_that_count(alike)]


def _hosts(
    coded: Iterable[Run],
    line: StepTime,
    sharing: float | None,
    own_cores: int | None,
    overrides: Overrides,
) -> dict[str, float]:
    """compress -> seconds that DDP with it waits on one machine, scaled to two processes."""
    waits: dict[str, list[float]] = {}
    for run in coded:
        ranks, batch = shape_of(run).ranks, run.identity["per_gpu_batch"]
        took_s = step_s(run, overrides)
        if sharing is not None and took_s is not None and line.knows(batch):
            computing_s = line.step_s(batch) * slowdown(sharing, ranks, own_cores)
            wait_s = (took_s - computing_s) / ring_share(ranks)
            waits.setdefault(str(run.identity["compress"]), []).append(wait_s)
    return {compress: max(0.0, statistics.mean(many)) for compress, many in waits.items()}


def same_training(first: Run, runs: Iterable[Run]) -> list[Run]:
    """Finished runs of the training of `first`, over any nodes and with any exchange: they tell
    what is sent, and what a run takes beside its steps.
    """
    same = _of_training(first)
    return [run for run in runs if run.state == FINISHED and _of_training(run) == same]


def _of_training(run: Run) -> list[Any]:
    same = ("script", "dataset", "train_size", "test_size", "precision")
    return [run.machine_kind, *model_of(run), *(run.identity.get(name) for name in same)]


def _payloads(runs: Iterable[Run]) -> dict[tuple[str, str], float]:
    """(strategy, compress) -> bytes of a unit per exchange / bytes that are trained."""
    shares: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        trained, ranks = run.observed.get("trained_bytes"), run.processes
        strategy, compress = str(run.identity.get("strategy")), run.identity.get("compress")
        updates, payload = run.measures.get("updates"), run.measures.get("payload_bytes")
        sent: float | None = None
        if strategy in APART:
            sent = run.observed.get("exchanged_bytes")
        elif payload and updates and ranks:
            sent = payload / updates / ranks
        if trained and sent and compress not in (None, "none"):
            shares.setdefault((strategy, str(compress)), []).append(sent / trained)
    return {each: statistics.median(many) for each, many in shares.items()}


def _tcp_of(runs: Iterable[Run]) -> list[Mapping[str, Any]]:
    """What runs record of TCP: those on several nodes, or those on one node if no others do."""
    recorded = [(shape_of(run).nodes, tcp) for run in runs if (tcp := run.environment.get("tcp"))]
    return [tcp for nodes, tcp in recorded if nodes > 1] or [tcp for _, tcp in recorded]


def _slow_start_after_idle(recorded: Sequence[Mapping[str, Any]]) -> bool:
    """Whether TCP repeats its slow start after a rest: yes, unless records say no kernel did."""
    return not recorded or any(
        tcp["slow_start_after_idle"] and not tcp["congestion_control"].startswith("bbr")
        for tcp in recorded
    )


def _mean_power_w(runs: Iterable[Run]) -> float | None:
    """The mean over the runs with known energy."""
    pairs = [(run.measures.get("energy_j"), run.measures.get("train_time_s")) for run in runs]
    return spread([energy_j / s for energy_j, s in pairs if energy_j and s]).mean

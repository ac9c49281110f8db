"""Records -> model: runs of one process, runs of several on one machine, and measured links.

Runs on several nodes are never fitted on: each group of them is a case that can be predicted from
the others of its kind.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from harness.core.links import Link
from harness.core.records import DISTURBING_SHARE, FINISHED, read_json
from harness.core.schema.dictionary import check_fields
from harness.core.settings import UserError, parse_setup
from harness.core.strategies import OF_ONE_STRATEGY, STRATEGIES
from harness.core.topology import effective_batch
from harness.read.predict.exchange import BACKENDS, GLOO, NCCL, Reduction, Shape, Wire, wire_of
from harness.read.predict.model import (
    COMPRESSED,
    EXPOSED,
    Model,
    Prediction,
    Scenario,
    StepTime,
    fit_line,
    fit_sharing,
    predict,
)
from harness.read.records.groups import Group
from harness.read.records.recorded import check_links, is_number, warn
from harness.read.records.runs import Run
from harness.read.records.selection import (
    read_selected,
    settings_that_differ,
    several_kinds,
    without_flags,
)
from harness.read.records.sweeps import SweepResults
from harness.read.statistics import spread

# Links that were measured by themselves: what `python -m harness link --json` prints.
LINK_FILES = "link*.json"

# Settings in which the runs of one fit may differ: they change the topology, or no step's time.
FREE = (
    "per_gpu_batch", "setup", "link", "strategy", "lr", "epochs", "train_size", "test_size",
    "eval_batch", "rank_dropout", "comm_probe",
)  # fmt: skip
# Beside them, settings in which a run may differ from those that it is predicted from.
PREDICTED_OVER = (*FREE, *OF_ONE_STRATEGY, "exchange", "fsdp_shard", "fsdp_offload")


# What is no setting and yet decides how long a step takes: where environment.json has it.
ALIKE = {
    "torch": ("versions", "torch"),
    "number format of the first layer": ("observed", "dtype"),
    "layout of the texts": ("observed", "padding"),
}


@dataclass(frozen=True)
class Overrides:
    """What the command line says in place of records."""

    gradient_mb: float | None = None
    backend: str | None = None
    sharing: float | None = None
    train_size: int | None = None


@dataclass(frozen=True)
class Fitted:
    """A model with what it was fitted on, and what else the records hold."""

    model: Model
    name: str
    machine: str
    runs: int
    assumed: tuple[str, ...]
    train_samples: int | None
    eval_s: float | None  # an epoch's evaluation on one process
    power_w: float | None  # of one device, while it trains
    idle_w: float | None
    not_read: tuple[str, ...] = ()  # a line for each selected run that is not believed


def shape_of(run: Run) -> Shape:
    if run.nodes and run.processes:
        return Shape(run.nodes, run.processes // run.nodes)
    nodes, per_node, _ = parse_setup(str(run.identity.get("setup") or "1_1"))
    return Shape(nodes, per_node)  # imported: the set-up is all that is known


def step_s(run: Run, overrides: Overrides) -> float | None:
    """Mean over the timed steps; of imported records what an epoch gives."""
    if not run.imported:
        rate = run.measures.get("train_samples_per_s")
        return run.effective_batch / rate if rate and run.effective_batch else None
    epoch_s, size = run.measures.get("epoch_time_s"), run.identity.get("train_size")
    samples = overrides.train_size or (size if is_number(size) else None)
    if not epoch_s or not samples:
        return None
    batch, grad_acc = run.identity["per_gpu_batch"], run.identity.get("grad_acc") or 1
    return epoch_s / -(-int(samples) // effective_batch(batch, grad_acc, shape_of(run).ranks))


def recorded(runs: Sequence[Run]) -> Iterator[Reduction]:
    """All-reduces that runs measured over their link before they began. The model does not matter
    for an all-reduce, so those of all runs count.
    """
    for run in runs:
        link = run.environment.get("link") or {}
        observed = run.environment.get("observed") or {}
        row = {"bytes": link.get("allreduce_bytes"), "s": link.get("allreduce_s")}
        yield from _reductions(link, [row], shape_of(run), str(observed.get("backend")))


def measured_beside(selector: str) -> Iterator[Reduction]:
    """Those in files of a folder, or of FOLDER:NAME=VALUE."""
    folder = Path(selector.rpartition(":")[0] if not Path(selector).exists() else selector)
    for file in sorted(folder.rglob(LINK_FILES)) if folder.is_dir() else ():
        link = read_json(file) or {}
        if not (link.get("nodes") and link.get("backend")):
            continue  # not ours
        try:
            rows = _checked_link(link, file)
        except UserError as error:
            warn([str(error)])
            continue
        shape = Shape(int(link["nodes"]), int(link["processes_per_node"]))
        yield from _reductions(link, rows, shape, link["backend"])


def _checked_link(link: Mapping[str, Any], file: Path) -> list[dict[str, Any]]:
    """Its all-reduces; UserError unless it is what `harness link` prints."""
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
    requested = link.get("asked")
    requested = requested if isinstance(requested, dict) else {}
    if requested.get("delay_ms") and requested.get("rate_mbit") is None:
        return  # TCP's window decides what passes, and a probe ends before that has opened
    wire = wire_between(link)
    for row in rows:
        size, seconds = row.get("bytes"), row.get("s")
        if wire is not None and shape.nodes > 1 and size and seconds and backend in BACKENDS:
            yield Reduction(backend, int(size), float(seconds), shape, wire)


def wire_between(link: Mapping[str, Any]) -> Wire | None:
    """As it was requested, where it was; else as it was measured."""
    requested = link.get("asked")
    if isinstance(requested, dict):
        return wire_of(Link(requested.get("delay_ms") or 0.0, requested.get("rate_mbit")))
    rtt_ms, mbit = link.get("rtt_min_ms"), link.get("bandwidth_mbit")
    if requested or not is_number(rtt_ms) or not is_number(mbit):
        return None  # unequal links, or nothing is known
    return Wire(rtt_ms / 2000, mbit * 1e6 / 8)


def fit_records(selector: str, overrides: Overrides) -> Fitted:
    """On the runs that an argument selects, and the links measured beside them."""
    runs, _, not_read = read_selected(selector, None)
    table = [*recorded(runs), *measured_beside(selector)]
    return replace(fit_on(selector, runs, overrides, table), not_read=not_read)


def fit_on(
    selector: str, runs: Sequence[Run], overrides: Overrides, table: Iterable[Reduction]
) -> Fitted:
    """UserError where the runs do not determine a model, with the command that is missing."""
    basis = [run for run in runs if _is_basis(run)]
    singles = [r for r in basis if shape_of(r).ranks == 1 and step_s(r, overrides) is not None]
    if not singles:
        raise UserError(
            f"{selector}: no finished run of one process, from which computing would be known: "
            f"{_command(runs, '1_1', None)}"
        )
    basis = [r for r in basis if shape_of(r).ranks > 1 or r in singles]
    _check_one_kind(selector, basis)
    first, assumed = singles[0], list[str]()
    line = fit_line([(r.identity["per_gpu_batch"], step_s(r, overrides) or 0.0) for r in singles])
    if len(line.batches) == 1:
        assumed.append(
            f"only batch {line.batches[0]} was measured on one process: nothing is known of "
            f"others, and two thirds of a step are taken for the backward pass; one more: "
            f"{_command(runs, '1_1', 2 * line.batches[0])}"
        )
    sharing, sharing_spread, inside_s = _sharing(basis, line, overrides)
    shared_by = max(shape_of(run).ranks for run in basis)
    if overrides.sharing is not None:
        sharing, sharing_spread, inside_s = overrides.sharing, None, 0.0
        assumed.append(f"processes of a machine slow each other by {sharing:.0%} each (--sharing)")
    if overrides.gradient_mb is not None:
        assumed.append(f"a gradient of {overrides.gradient_mb:g} MB (--gradient_mb)")
    if first.identity.get("grad_acc") is None:
        assumed.append("one forward pass an update: the records do not say how many")
    busy = [(_at(run, ("launch", "cpu_busy_share")) or 0.0) > DISTURBING_SHARE for run in basis]
    if any(busy):
        assumed.append(
            f"{sum(busy)} of {len(basis)} runs took as long as they take alone, though others used "
            f"more than {DISTURBING_SHARE:.0%} of the cores"
        )
    sizes = {size for run in basis if (size := _train_samples(run)) is not None}
    if len(sizes) > 1 and overrides.train_size is None:
        assumed.append(
            f"an epoch of {_train_samples(first)} samples: those of the runs have "
            f"{', '.join(map(str, sorted(sizes)))} (--train_size)"
        )
    arguments = first.settings.get("training_arguments") or {}
    model = Model(
        line, sharing, sharing_spread, inside_s,
        gradient_bytes=_gradient_bytes(first, runs, overrides),
        backend=_backend(first, overrides),
        grad_acc=first.identity.get("grad_acc") or 1,
        cap_mb=arguments.get("ddp_bucket_cap_mb"),
        table=tuple(table),
        shared_by=shared_by,
    )  # fmt: skip
    return Fitted(
        model,
        name=", ".join(str(v) for n in ("script", "model") if (v := first.identity.get(n))),
        machine=str(first.machine or "unknown machine"),
        runs=len(basis),
        assumed=tuple(assumed),
        train_samples=overrides.train_size or _train_samples(first),
        eval_s=_mean_ratio(singles, "eval_time_s", "epochs_done"),
        power_w=_mean_ratio(singles, "energy_j", "train_time_s"),
        idle_w=spread(
            [w for r in singles if is_number(w := r.environment.get("idle_power_w"))]
        ).mean,
    )


def _is_basis(run: Run) -> bool:
    """On one machine, as DDP or one process does it: what the model is fitted on."""
    settings = run.identity
    plain = settings.get("compress") in (None, "none") and settings.get("exchange") != "direct"
    known = settings.get("strategy") in (None, "single", "ddp")
    if run.state != FINISHED or not (plain and known) or settings.get("per_gpu_batch") is None:
        return False
    crowded = (run.environment.get("launch") or {}).get("packed") is True
    return shape_of(run).nodes == 1 and not crowded


def _check_one_kind(selector: str, runs: Sequence[Run]) -> None:
    machines = sorted({str(run.machine_kind) for run in runs})
    if len(machines) > 1:
        raise UserError(
            f"{selector}: runs of {len(machines)} kinds of machine ({', '.join(machines)}): a "
            "figure over them would be one of none; name a folder with the runs of one"
        )
    if unlike := settings_that_differ(runs, but=FREE):
        example = next(iter(unlike.values()))[0]
        raise UserError(several_kinds(selector, unlike, example))
    facts = {
        name: sorted({str(value) for run in runs if (value := _at(run, path)) is not None})
        for name, path in ALIKE.items()
    }
    if texts := [f"{name} ({', '.join(of)})" for name, of in facts.items() if len(of) > 1]:
        raise UserError(
            f"{selector}: its runs differ in {', '.join(texts)}, on which a step's time depends: "
            "name a folder with the runs of one kind"
        )


def _at(run: Run, path: tuple[str, str]) -> Any:
    record, name = path
    return (run.environment.get(record) or {}).get(name)


def _sharing(
    basis: Iterable[Run], line: StepTime, overrides: Overrides
) -> tuple[float | None, float | None, float]:
    """(share by which each further process slows all, its spread, exposed exchange of two)."""
    slower: dict[int, list[float]] = {}
    inside = []
    for run in basis:
        count, took_s, batch = (
            shape_of(run).ranks,
            step_s(run, overrides),
            run.identity["per_gpu_batch"],
        )
        if count == 1 or took_s is None or not line.knows(batch):
            continue
        # Where no exchange was measured, it counts as what processes cost each other.
        share = run.measures.get("comm_exposed_share", run.measures.get("comm_share", 0.0))
        exposed_s = took_s * min(1.0, max(0.0, share))
        slower.setdefault(count, []).append((took_s - exposed_s) / line.step_s(batch))
        inside.append(exposed_s * count / (2 * (count - 1)))
    if not slower:
        return None, None, 0.0
    sharing = fit_sharing(slower)
    added = [(each - 1) / (count - 1) for count, many in slower.items() for each in many]
    sd = spread(added).sd
    return (
        sharing,
        sd / sharing if sd is not None and sharing > 0 else None,
        statistics.mean(inside),
    )


def _backend(run: Run, overrides: Overrides) -> str:
    observed = run.environment.get("observed") or {}
    by_device = {"cpu": GLOO, "cuda": NCCL}.get(str(observed.get("device")).split(":")[0])
    backend = overrides.backend or observed.get("backend") or by_device
    if backend not in BACKENDS:
        raise UserError(
            f"the records do not say what would exchange: give --backend {' or '.join(BACKENDS)}"
        )
    return str(backend)


def _gradient_bytes(first: Run, runs: Sequence[Run], overrides: Overrides) -> int | None:
    if overrides.gradient_mb is not None:
        return round(overrides.gradient_mb * 1e6)
    for record, name in (("link", "gradient_bytes"), ("observed", "parameter_bytes")):
        for run in runs:
            size = (run.environment.get(record) or {}).get(name)
            if run.identity.get("model") == first.identity.get("model") and size:
                return int(size)
    return None


def _train_samples(run: Run) -> int | None:
    data = run.environment.get("data") or {}
    used = data.get("train_samples")
    return None if used is None else int(used) + int(data.get("left_out_samples") or 0)


def _mean_ratio(runs: Iterable[Run], amount: str, by: str) -> float | None:
    """The mean over the runs that know both."""
    pairs = [(run.measures.get(amount), run.measures.get(by)) for run in runs]
    return spread([total / size for total, size in pairs if total and size]).mean


def _command(runs: Sequence[Run], setup: str, batch: int | None) -> str:
    """What measures what is missing, made of the command of a run that is there."""
    flags = ["--setup", setup, *(["--per_gpu_batch", str(batch)] if batch else [])]
    run = next((run for run in runs if run.command), None)
    if run is None:
        return f"python {runs[0].identity.get('script') or 'bert'}.py {shlex.join(flags)}"
    drop = ["--setup", "--strategy", "--link", *(["--per_gpu_batch", "--b"] if batch else [])]
    kept = without_flags(run.command, drop)
    return f"python {shlex.join([*kept, *flags])}"


class PredictedGroup(NamedTuple):
    """A group on several nodes: what was measured, and what was predicted without it."""

    group: Group
    measured_s: tuple[float, ...]  # one a run
    prediction: Prediction

    @property
    def mean_s(self) -> float:
        return statistics.mean(self.measured_s)

    @property
    def error(self) -> float:
        return self.prediction.step_s / self.mean_s - 1

    @property
    def baseline_error(self) -> float:
        return self.prediction.baseline_s / self.mean_s - 1


class Workload(NamedTuple):
    """Runs of one training on one kind of machine, with what distinguishes it from the others."""

    name: str
    fitted: Fitted
    cases: list[PredictedGroup]


Kind = tuple[tuple[str, str], ...]  # settings that runs have in common, and their machine


def workloads_of(sweep: SweepResults) -> tuple[list[Workload], dict[str, list[str]]]:
    """What can be predicted; and reason -> the groups on several nodes of which it cannot."""
    excluded: dict[str, list[str]] = {}
    kinds: dict[Kind, list[Group]] = {}
    for group in sweep.groups:
        if group.finished:
            kinds.setdefault(_kind(group), []).append(group)
    names = _names([*kinds])
    workloads = [
        _workload(sweep, name, groups, excluded)
        for name, groups in zip(names, kinds.values(), strict=True)
    ]
    return [workload for workload in workloads if workload is not None], excluded


def _kind(group: Group) -> Kind:
    settings = group.finished[0].characteristics | {"machine": group.machine_kind}
    return tuple((n, str(value)) for n, value in settings.items() if n not in PREDICTED_OVER)


def _names(kinds: list[Kind]) -> list[str]:
    """By the first settings that distinguish them; one alone needs no name."""
    labels = [dict(kind) for kind in kinds]
    names = [""] * len(kinds)
    for setting in dict.fromkeys(name for label in labels for name in label):
        values = [label.get(setting, "None") for label in labels]
        longer = [", ".join(filter(None, each)) for each in zip(names, values, strict=True)]
        if len({*longer}) > len({*names}):
            names = longer
    return names


def _workload(
    sweep: SweepResults, name: str, groups: list[Group], excluded: dict[str, list[str]]
) -> Workload | None:
    """None where nothing of it is predicted; excluded: reason -> the groups."""
    far = [group for group in groups if shape_of(group.finished[0]).nodes > 1]
    runs = [run for group in groups for run in group.finished]
    try:
        fitted = fit_on(sweep.name, runs, Overrides(), recorded(runs))
    except UserError as error:
        if far:
            excluded.setdefault(str(error), []).extend(sweep.short_name_of(g) for g in far)
        return None
    cases = []
    for group in far:
        try:
            cases.append(_predicted(fitted, group))
        except UserError as error:
            excluded.setdefault(str(error), []).append(sweep.short_name_of(group))
    return Workload(name, fitted, cases) if cases else None


def _predicted(fitted: Fitted, group: Group) -> PredictedGroup:
    """UserError where it is not modelled, or not measured."""
    steps = [step_s(run, Overrides()) for run in group.finished]
    known = tuple(step for step in steps if step is not None)
    if len(known) < len(steps):
        changed = any(run.other_batches for run in group.finished)
        raise UserError("another batch ran than asked for" if changed else "no steps were timed")
    return PredictedGroup(group, known, predict(fitted.model, _scenario(group.finished)))


def _scenario(runs: Sequence[Run]) -> Scenario:
    first = runs[0]
    settings = first.identity
    # Several processes are DDP's where no strategy is recorded.
    strategy, compress = settings["strategy"] or "ddp", settings["compress"] or "none"
    if strategy not in EXPOSED:
        raise UserError(f"{strategy} is not modelled")
    if compress not in COMPRESSED[strategy]:
        raise UserError(f"{strategy} with {compress} is not modelled")
    if strategy == "fsdp":
        raise UserError("fsdp gathers layer by layer, and how many there are is in no record")
    if settings["exchange"] == "direct":
        raise UserError("--exchange direct is not modelled")
    if settings["per_gpu_batch"] is None:
        raise UserError("the batch is in no record")
    own = {n: settings[n] for n in ("sync_every", "sync_scope", "fragments", "overlap")}
    own = {n: STRATEGIES[strategy].own.get(n) if v is None else v for n, v in own.items()}
    return Scenario(
        shape_of(first), settings["per_gpu_batch"], _wire(runs), strategy, compress,
        emulated=(first.environment.get("launch") or {}).get("launcher") == "netns",
        **{name: value for name, value in own.items() if value is not None},
    )  # fmt: skip


def _wire(runs: Sequence[Run]) -> Wire:
    """Of the link that was requested; where none was, the median of what runs measured."""
    links = [run.environment.get("link") or {} for run in runs]
    requested = links[0].get("asked")
    if isinstance(requested, dict) and (requested.get("loss") or requested.get("jitter_ms")):
        raise UserError("loss and jitter are not modelled")
    if requested and not isinstance(requested, dict):
        raise UserError("links that differ between pairs of nodes are not modelled")
    wires = [wire for link in links if (wire := wire_between(link)) is not None]
    if not wires:
        raise UserError("the link between the nodes is in no record")
    return Wire(
        statistics.median(wire.delay_s for wire in wires),
        statistics.median(wire.bytes_per_s for wire in wires),
    )

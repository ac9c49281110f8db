"""What single records tell of a step, of the link below it, and of all-reduces over that."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.core.links import Link
from harness.core.records import FINISHED, read_json
from harness.core.settings import UserError, parse_setup
from harness.core.topology import effective_batch
from harness.read.predict.exchange import BACKENDS, GLOO, NCCL, Reduction, Shape, Wire, wire_of
from harness.read.predict.model import Model, fit_line, fit_sharing
from harness.read.records.loading import is_number
from harness.read.records.runs import Run
from harness.read.records.selection import read_selected

# Links that were measured by themselves: what `python -m harness link --json` prints.
LINK_FILES = "link*.json"


@dataclass(frozen=True)
class Given:
    """What the command line says in place of records."""

    gradient_mb: float | None = None
    backend: str | None = None
    sharing: float | None = None
    train_size: int | None = None


def shape_of(run: Run) -> Shape:
    environment = run.environment
    nodes, per_node = environment.get("nodes"), environment.get("processes_per_node")
    if not (nodes and per_node):  # imported: the set-up is all that is known
        nodes, per_node, _ = parse_setup(str(run.identity.get("setup") or "1_1"))
    return Shape(int(nodes), int(per_node))


def batch_or_none(run: Run) -> int | None:
    batch = run.identity.get("per_gpu_batch")
    return int(batch) if is_number(batch) else None


def batch_of(run: Run) -> int:
    batch = batch_or_none(run)
    assert batch is not None
    return batch


def step_s(run: Run, given: Given) -> float | None:
    """Mean over the timed steps; of imported records what an epoch gives."""
    rate = run.measures.get("train_samples_per_s")
    effective = run.environment.get("effective_batch")
    if rate and effective and not run.imported:
        return float(effective) / rate
    epoch_s, size = run.measures.get("epoch_time_s"), run.identity.get("train_size")
    samples = given.train_size or (size if is_number(size) else None)
    if not run.imported or not epoch_s or not samples:
        return None
    grad_acc = run.identity.get("grad_acc") or 1
    per_update = effective_batch(batch_of(run), grad_acc, shape_of(run).ranks)
    return float(epoch_s) / -(-int(samples) // per_update)


def recorded(records: Sequence[Run]) -> Iterable[Reduction]:
    """All-reduces that runs measured over their link before they began. What adds up is not the
    model, so that of all of them counts.
    """
    for run in records:
        link = run.environment.get("link") or {}
        observed = run.environment.get("observed") or {}
        row = {"bytes": link.get("allreduce_bytes"), "s": link.get("allreduce_s")}
        yield from _reductions(link, [row], shape_of(run), str(observed.get("backend")))


def measured_beside(word: str) -> Iterable[Reduction]:
    """Those in files of a folder, or of FOLDER:NAME=VALUE."""
    folder = Path(word.rpartition(":")[0] if not Path(word).exists() else word)
    for file in sorted(folder.rglob(LINK_FILES)) if folder.is_dir() else ():
        found = read_json(file) or {}
        if found.get("nodes") and found.get("backend"):
            shape = Shape(int(found["nodes"]), int(found["processes_per_node"]))
            yield from _reductions(found, found.get("allreduce") or [], shape, found["backend"])


def _reductions(
    link: dict[str, Any], rows: Iterable[dict[str, Any]], shape: Shape, backend: str
) -> Iterable[Reduction]:
    asked = link.get("asked")
    if isinstance(asked, dict) and asked.get("delay_ms") and asked.get("rate_mbit") is None:
        # Then TCP's window decides what passes, and a probe ends before that has opened.
        return
    wire = wire_between(link)
    for row in rows:
        size, seconds = row.get("bytes"), row.get("s")
        if wire is not None and shape.nodes > 1 and size and seconds and backend in BACKENDS:
            yield Reduction(backend, int(size), float(seconds), shape, wire)


def wire_between(link: dict[str, Any]) -> Wire | None:
    """As it was asked for, where it was; else as it was measured."""
    asked = link.get("asked")
    if isinstance(asked, dict):
        return wire_of(Link(asked.get("delay_ms") or 0.0, asked.get("rate_mbit")))
    if asked or not is_number(link.get("rtt_min_ms")) or not is_number(link.get("bandwidth_mbit")):
        return None  # unequal links, or nothing is known
    return Wire(link["rtt_min_ms"] / 2000, link["bandwidth_mbit"] * 1e6 / 8)


# ----
# Records -> model: runs of one process, runs of several on one machine, and measured links.

# Settings in which the runs of one fit may differ: they change the topology, or no step's time.
FREE = (
    "per_gpu_batch", "setup", "link", "strategy", "lr", "epochs", "train_size", "test_size",
    "eval_batch", "rank_dropout", "comm_probe",
)  # fmt: skip


@dataclass(frozen=True)
class Fitted:
    """A model with what it was fitted on, and what else the records tell."""

    model: Model
    name: str
    machine: str
    runs: int
    assumed: tuple[str, ...]
    train_samples: int | None
    eval_s: float | None  # an epoch's evaluation on one process
    power_w: float | None  # of one device, while it trains
    idle_w: float | None


def fit_records(word: str, given: Given) -> Fitted:
    """On the runs that a word of the command line names, and the links measured beside them."""
    records, _ = read_selected(word, None)
    return fit_on(word, records, given, [*recorded(records), *measured_beside(word)])


def fit_on(word: str, records: Sequence[Run], given: Given, table: Iterable[Reduction]) -> Fitted:
    """UserError where they do not determine a model; says what to run. Called by a word.

    Runs on several nodes are never fitted on.
    """
    basis = [run for run in records if _is_basis(run)]
    singles = [r for r in basis if shape_of(r).ranks == 1 and step_s(r, given) is not None]
    if not singles:
        raise UserError(
            f"{word}: no finished run of one process, from which computing would be known: "
            f"{_command(records, '1_1', None)}"
        )
    basis = [r for r in basis if shape_of(r).ranks > 1 or r in singles]
    _check_one_kind(word, basis)
    assumed: list[str] = []
    line = fit_line([(batch_of(r), step_s(r, given) or 0.0) for r in singles])
    if len(line.batches) == 1:
        assumed.append(
            f"only batch {line.batches[0]} was measured on one process: nothing is known of "
            f"others, and two thirds of a step are taken for the backward pass; one more: "
            f"{_command(records, '1_1', 2 * line.batches[0])}"
        )
    sharing, sharing_spread, inside_s = _sharing(basis, line, given)
    if given.sharing is not None:
        sharing, sharing_spread, inside_s = given.sharing, None, 0.0
        assumed.append(f"processes of a machine slow each other by {sharing:.0%} each (--sharing)")
    first = singles[0]
    backend = _backend(first, given)
    gradient = _gradient(basis, records, given, assumed)
    arguments = first.settings.get("training_arguments") or {}
    model = Model(
        line, sharing, sharing_spread, inside_s, gradient, backend,
        grad_acc=first.identity.get("grad_acc") or 1,
        cap_mb=arguments.get("ddp_bucket_cap_mb"),
        table=tuple(table),
    )  # fmt: skip
    if first.identity.get("grad_acc") is None:
        assumed.append("one forward pass an update: the records do not say how many")
    data = first.environment.get("data") or {}
    samples = given.train_size or _all_samples(data)
    name = ", ".join(str(first.identity[n]) for n in ("script", "model") if first.identity.get(n))
    machine = str(first.machine or "unknown machine")
    eval_s = _mean(_per_epoch(r, "eval_time_s") for r in singles)
    power, idle = _power(singles)
    return Fitted(
        model, name, machine, len(basis), tuple(assumed), samples, eval_s, power, idle
    )  # fmt: skip


def _is_basis(run: Run) -> bool:
    """On one machine, as DDP or one process does it: what the model is fitted on."""
    settings = run.identity
    plain = settings.get("compress") in (None, "none") and settings.get("exchange") != "direct"
    known = settings.get("strategy") in (None, "single", "ddp")
    if run.state != FINISHED or not (plain and known) or batch_or_none(run) is None:
        return False
    crowded = ((run.environment.get("launch") or {}).get("packed")) is True
    return shape_of(run).nodes == 1 and not crowded


def _check_one_kind(word: str, records: Sequence[Run]) -> None:
    machines = sorted({str(run.machine) for run in records})
    if len(machines) > 1:
        raise UserError(
            f"{word}: runs of {len(machines)} kinds of machine ({', '.join(machines)}): a figure "
            "over them would be one of none; name a folder with the runs of one"
        )
    for name in dict.fromkeys(name for run in records for name in run.characteristics):
        values = sorted({str(run.characteristics.get(name)) for run in records})
        if name not in FREE and len(values) > 1:
            raise UserError(
                f"{word}: its runs differ in {name} ({', '.join(values)}): name one kind, for "
                f"example {word}{',' if '=' in word else ':'}{name}={values[0]}"
            )


def _sharing(
    basis: Iterable[Run], line: Any, given: Given
) -> tuple[float | None, float | None, float]:
    """(share by which each more process slows all, its spread, exposed exchange of two)."""
    slower: dict[int, list[float]] = {}
    inside = []
    for run in basis:
        count, took_s = shape_of(run).per_node, step_s(run, given)
        if count == 1 or took_s is None or not line.knows(batch_of(run)):
            continue
        exposed_s = took_s * _exposed_share(run)
        slower.setdefault(count, []).append((took_s - exposed_s) / line.step_s(batch_of(run)))
        inside.append(exposed_s * count / (2 * (count - 1)))
    if not slower:
        return None, None, 0.0
    share = fit_sharing(slower)
    added = [(each - 1) / (count - 1) for count, many in slower.items() for each in many]
    spread = statistics.stdev(added) / share if len(added) > 1 and share > 0 else None
    return share, spread, statistics.mean(inside)


def _exposed_share(run: Run) -> float:
    """Where no exchange was measured it stays with what processes cost each other."""
    measures = run.measures
    found = measures.get("comm_exposed_share", measures.get("comm_share"))
    return min(1.0, max(0.0, found or 0.0))


def _backend(run: Run, given: Given) -> str:
    observed = run.environment.get("observed") or {}
    by_device = {"cpu": GLOO, "cuda": NCCL}.get(str(observed.get("device")).split(":")[0])
    found = given.backend or observed.get("backend") or by_device
    if found not in BACKENDS:
        raise UserError(
            f"the records do not say what would exchange: give --backend {' or '.join(BACKENDS)}"
        )
    return str(found)


def _gradient(
    basis: Sequence[Run], records: Sequence[Run], given: Given, assumed: list[str]
) -> int | None:
    if given.gradient_mb is not None:
        assumed.append(f"a gradient of {given.gradient_mb:g} MB (--gradient_mb)")
        return round(given.gradient_mb * 1e6)
    model = basis[0].settings.get("model")
    same = [r for r in records if r.identity.get("model") == model]
    for part, name in (("link", "gradient_bytes"), ("observed", "parameter_bytes")):
        for run in same:
            found = (run.environment.get(part) or {}).get(name)
            if is_number(found) and found > 0:
                return int(found)
    return None


def _all_samples(data: dict[str, Any]) -> int | None:
    used = data.get("train_samples")
    return None if used is None else int(used) + int(data.get("left_out_samples") or 0)


def _per_epoch(run: Run, name: str) -> float | None:
    total, epochs = run.measures.get(name), run.measures.get("epochs_done")
    return total / epochs if total and epochs else None


def _power(singles: Sequence[Run]) -> tuple[float | None, float | None]:
    """Mean power of the device over training, and before it; None where no run knows it."""
    watts = []
    for run in singles:
        energy, time_s = (run.measures.get(n) for n in ("energy_j", "train_time_s"))
        if energy and time_s:
            watts.append(energy / time_s)
    idle = [run.environment.get("idle_power_w") for run in singles]
    return _mean(watts), _mean(idle)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


def _command(records: Sequence[Run], setup: str, batch: int | None) -> str:
    """What measures what is missing, made of the command of a run that is there."""
    run = next((r for r in records if r.environment.get("command")), None)
    if run is None:
        more = f" --per_gpu_batch {batch}" if batch else ""
        return f"python {records[0].identity.get('script') or 'bert'}.py --setup {setup}{more}"
    words = shlex.split(str(run.environment["command"]))
    drop = ["--setup", "--strategy", "--link", *(["--per_gpu_batch", "--b"] if batch else [])]
    kept, skip = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        if skip or name in drop:
            skip = not skip and not equals
            continue
        kept.append(word)
    more_words = ["--per_gpu_batch", str(batch)] if batch else []
    return f"python {shlex.join([*kept, '--setup', setup, *more_words])}"

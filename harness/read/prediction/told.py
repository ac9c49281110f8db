"""What single records tell of a step, of the link below it, and of all-reduces over that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.links import Link
from harness.read.prediction.exchange import BACKENDS, Shape, Wire, wire_of
from harness.read.prediction.measured import Reduction
from harness.read.sides import Record
from harness.read.sweeps import is_number
from harness.records import read_json
from harness.settings import parse_setup

# Links that were measured by themselves: what `python -m harness link --json` prints.
LINK_FILES = "link*.json"


@dataclass(frozen=True)
class Given:
    """What the command line says in place of records."""

    gradient_mb: float | None = None
    backend: str | None = None
    sharing: float | None = None
    train_size: int | None = None


def shape_of(record: Record) -> Shape:
    environment = record.run.environment
    nodes, per_node = environment.get("nodes"), environment.get("processes_per_node")
    if not (nodes and per_node):  # imported: the set-up is all that is known
        nodes, per_node, _ = parse_setup(str(record.settings.get("setup") or "1_1"))
    return Shape(int(nodes), int(per_node))


def batch_or_none(record: Record) -> int | None:
    batch = record.settings.get("per_gpu_batch")
    return int(batch) if is_number(batch) else None


def batch_of(record: Record) -> int:
    batch = batch_or_none(record)
    assert batch is not None
    return batch


def step_s(record: Record, given: Given) -> float | None:
    """Mean over the timed steps; of imported records what an epoch gives."""
    rate = record.run.measures.get("train_samples_per_s")
    effective = record.run.environment.get("effective_batch")
    if rate and effective and not record.imported:
        return float(effective) / rate
    epoch_s, size = record.run.measures.get("epoch_time_s"), record.settings.get("train_size")
    samples = given.train_size or (size if is_number(size) else None)
    if not record.imported or not epoch_s or not samples:
        return None
    per_update = batch_of(record) * (record.settings.get("grad_acc") or 1) * shape_of(record).ranks
    return float(epoch_s) / -(-int(samples) // per_update)


# ---- links ----


def recorded(records: Sequence[Record]) -> Iterable[Reduction]:
    """All-reduces that runs measured over their link before they began. What adds up is not the
    model, so that of all of them counts.
    """
    for record in records:
        link = record.run.environment.get("link") or {}
        observed = record.run.environment.get("observed") or {}
        row = {"bytes": link.get("allreduce_bytes"), "s": link.get("allreduce_s")}
        yield from _reductions(link, [row], shape_of(record), str(observed.get("backend")))


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

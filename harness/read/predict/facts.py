"""Facts of a run for a prediction: its shape, steps and gradient, from records or from flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

from harness.core.collectives import GLOO, NCCL, Shape
from harness.core.settings import UserError, parse_setup
from harness.core.strategies import STRATEGIES
from harness.core.tasks import TASKS
from harness.core.topology import batch_of_update, effective_batch
from harness.read.predict.exchange import BACKENDS
from harness.read.records.comparable import THREADS
from harness.read.records.recorded import is_number
from harness.read.records.runs import Run

# Facts of environment.json that are no settings and yet decide how long a step takes.
ALIKE: dict[str, Callable[[Run], str | None]] = {
    "torch": lambda run: (run.environment.get("versions") or {}).get("torch"),
    "number format of the first layer": lambda run: run.observed.get("dtype"),
    "layout of the texts": lambda run: run.observed.get("padding"),
}


@dataclass(frozen=True)
class Overrides:
    """Values of the command line that replace those of records."""

    gradient_mb: float | None = None
    backend: str | None = None
    sharing: float | None = None
    train_size: int | None = None
    blocks: int | None = None  # layers that fsdp gathers one at a time

    @classmethod
    def of(cls, options: argparse.Namespace) -> Overrides:
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})


def is_timed_like(first: Run, run: Run) -> bool:
    """Whether the times of two runs are comparable: one kind of machine, alike in these facts."""
    facts: list[Callable[[Run], Any]] = [ALIKE["torch"], THREADS.of]
    pairs = [{fact(run), fact(first)} - {None} for fact in facts]
    return run.machine_kind == first.machine_kind and all(len(pair) < 2 for pair in pairs)


def shape_of(run: Run) -> Shape:
    if run.nodes and run.processes:
        return Shape(run.nodes, run.processes // run.nodes)
    nodes, per_node, _ = parse_setup(str(run.identity.get("setup") or "1_1"))
    return Shape(nodes, per_node)  # imported: the set-up is all that is known


def is_emulated(run: Run) -> bool:
    """Whether its nodes share one machine."""
    return run.launch.get("launcher") == "netns"


def step_s(run: Run, overrides: Overrides) -> float | None:
    """The mean of the timed steps; for an imported record, an epoch's time by its steps."""
    if not run.imported:
        rate = run.measures.get("train_samples_per_s")
        return run.effective_batch / rate if rate and run.effective_batch else None
    epoch_s, size = run.measures.get("epoch_time_s"), run.identity.get("train_size")
    samples = overrides.train_size or (size if is_number(size) else None)
    if not epoch_s or not samples:
        return None
    batch = effective_batch(run.identity["per_gpu_batch"], grad_acc_of(run), shape_of(run).ranks)
    return epoch_s / -(-int(samples) // batch)


def grad_acc_of(run: Run) -> int:
    """The recorded value; 1 where the records do not say."""
    return int(run.identity.get("grad_acc") or 1)


def effective_batch_of(run: Run) -> int | None:
    """The effective batch of a run that may have ended before it was recorded."""
    batch = run.identity.get("per_gpu_batch")
    own = effective_batch(batch, grad_acc_of(run), shape_of(run).ranks) if batch else 0
    return run.effective_batch or batch_of_update(run.identity.get("target_batch"), own) or None


def setting_of(run: Run, name: str) -> Any:
    """A setting; where it is null, as in imported records, that of the strategy."""
    value, strategy = run.identity[name], run.identity["strategy"]
    own = STRATEGIES[strategy].own if strategy in STRATEGIES else {}
    return own.get(name) if value is None else value


def missing_facts(basis: Sequence[Run], overrides: Overrides) -> dict[str, str]:
    """Fact -> flag for what imported runs of one process, which have only epoch times, do not say;
    empty if any of these runs is our own.
    """
    singles = [run for run in basis if shape_of(run).ranks == 1 and "epoch_time_s" in run.measures]
    if not singles or not all(run.imported for run in singles):
        return {}
    flags = {}
    if not any(step_s(run, overrides) for run in singles):
        flags["how many samples an epoch has"] = "--train_size N"
    if known_backend(singles[0], overrides) not in BACKENDS:
        flags["what would exchange"] = f"--backend {' or '.join(BACKENDS)}"
    if flags and gradient_bytes(singles[0], basis, overrides) is None:
        flags["how large a gradient is"] = "--gradient_mb N"
    return flags


def known_backend(run: Run, overrides: Overrides) -> Any:
    by_device = {"cpu": GLOO, "cuda": NCCL}.get(str(run.device).split(":")[0])
    return overrides.backend or run.observed.get("backend") or by_device


def backend_of(run: Run, overrides: Overrides) -> str:
    backend = known_backend(run, overrides)
    if backend not in BACKENDS:
        raise UserError(
            f"the records do not say what would exchange: give --backend {' or '.join(BACKENDS)}"
        )
    return str(backend)


def gradient_bytes(first: Run, runs: Sequence[Run], overrides: Overrides) -> int | None:
    if overrides.gradient_mb is not None:
        return round(overrides.gradient_mb * 1e6)
    alike = [run for run in runs if model_of(run) == model_of(first)]
    of_links = (size for run in alike if (size := run.measured_link.get("gradient_bytes")))
    trained = (held for run in alike if (held := run.observed.get("trained_bytes")))
    return next(chain(of_links, trained), None)


def model_of(run: Run) -> list[Any]:
    """What a step computes: the model, the rank of its adapters, and whether Muon trains it."""
    return [run.identity.get(name) or None for name in ("model", "lora", "muon")]


def blocks_of(run: Run) -> int | None:
    """The layers that fsdp gathers one at a time; None for a model that is not ours."""
    name = str(run.identity.get("model"))
    models = (each.architectures.get(name, {}) for each in TASKS.values())
    return next((n for model in models if (n := model.get("num_hidden_layers"))), None)


def train_samples_of(run: Run) -> int | None:
    used = run.data.get("train_samples")
    return None if used is None else int(used) + int(run.data.get("left_out_samples") or 0)


def test_samples_of(run: Run) -> int | None:
    return run.data.get("test_samples")

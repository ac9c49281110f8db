"""A strategy and its own flags are one thing to a reader: ddp powersgd, diloco h50."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from harness.core.identity import number
from harness.core.strategies import OF_ONE_STRATEGY, is_off

STRATEGY = "strategy"


# One letter, where the field has one.
SHORT = {"sync_every": "h", "outer_lr": "lr", "outer_momentum": "m", "target_batch": "t"}


def shown_axes(axes: Iterable[str]) -> tuple[str, ...]:
    """The axes that are told apart by a word of their own; flags of a strategy stand with it."""
    axes = tuple(axes)
    return tuple(a for a in axes if STRATEGY not in axes or a not in OF_ONE_STRATEGY)


def strategy_text(label: Mapping[str, Any]) -> str | None:
    """What a label says of the strategy; None if nothing."""
    named = label.get(STRATEGY)
    flags = [_flag(n, label[n]) for n in OF_ONE_STRATEGY if not is_off(label.get(n))]
    return " ".join([*([str(named)] if named is not None else []), *flags]) or None


def _flag(name: str, value: Any) -> str:
    if name == "compress":
        return str(value)
    if name in SHORT:
        return f"{SHORT[name]}{number(value)}"
    said = name.replace("_", " ")
    return said if value is True else f"{said} {number(value)}"


# What an axis may be called that is also what is measured.
TAKEN = (
    "path", "state", "reason", "machine", "nodes", "processes", "devices", "effective_batch",
    "updates", "samples", "accuracy", "recall", "f1", "attempts", "commit", "dirty",
    "baseline", "planned", "finished", "reached", "outcome", "seeds", "repeats",
)  # fmt: skip


def column_of(axis: str) -> str:
    """The column of an axis: as in load() where the setting has the name of a metric."""
    if axis == "precision":
        return "number_format"
    return f"label_{axis}" if axis in TAKEN else axis


def machine_kind(machine: str) -> str:
    """The kind of GPU that a machine label names, without their number."""
    return re.sub(r"x\d+$", "", machine)

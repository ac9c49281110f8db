"""From single readings to what they say about a stretch of time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Reading = dict[str, Any]
# What only grows: what matters is how much.
COUNTERS = ("energy_j", "cpu_energy_j", "disk_read_bytes", "disk_written_bytes",
            "network_sent_bytes", "network_received_bytes")  # fmt: skip
LISTS = ("throttled",)


def summed_up(readings: Sequence[Reading]) -> dict[str, Any]:
    """The first reading is that at the beginning: it counts for what grows, and for nothing else.

    Mean, the value that 95 % do not exceed, and the largest; how much a counter grew; the share of
    the readings in which each thing slowed the device down. None where nothing is known.
    """
    found: dict[str, Any] = {}
    first, later = readings[0], readings[1:] or readings[:1]
    for name in first:
        if name in COUNTERS:
            found[name] = _grown(first[name], later[-1][name])
        elif name in LISTS:
            found[name] = _shares([reading[name] for reading in later])
        else:
            found[name] = _gauge([reading[name] for reading in later])
    return found


def _grown(before: float | None, now: float | None) -> float | None:
    """A counter that has been set back has lost what it counted."""
    if before is None or now is None or now < before:
        return None
    return now - before


def _gauge(values: Sequence[float | None]) -> dict[str, float] | None:
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    return {
        "mean": math.fsum(known) / len(known),
        "p95": known[min(math.ceil(0.95 * len(known)), len(known)) - 1],
        "max": known[-1],
    }


def _shares(lists: Sequence[list[str] | None]) -> dict[str, float] | None:
    known = [names for names in lists if names is not None]
    if not known:
        return None
    every = sorted({name for names in known for name in names})
    return {name: sum(name in names for names in known) / len(known) for name in every}

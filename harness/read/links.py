"""The link between nodes as runs have measured it, and whether it was the one asked for."""

from __future__ import annotations

from typing import Any

from harness.read.sweeps import is_number

# Column -> field of environment.json's link.
RTT, BANDWIDTH = "link_rtt_median_ms", "link_bandwidth_mbit"
FIELDS = {
    "link_rtt_min_ms": "rtt_min_ms",
    RTT: "rtt_median_ms",
    BANDWIDTH: "bandwidth_mbit",
    "link_allreduce_s": "allreduce_s",
    "link_allreduce_algbw_mbit": "allreduce_algbw_mbit",
    "link_allreduce_busbw_mbit": "allreduce_busbw_mbit",
}


def link_numbers(environment: dict[str, Any]) -> dict[str, float]:
    """What is known; nothing of a run on one node."""
    link = environment.get("link") or {}
    return {name: link[at] for name, at in FIELDS.items() if is_number(link.get(at))}


def link_warning(environment: dict[str, Any]) -> str | None:
    """What was far from the link that was asked for."""
    return (environment.get("link") or {}).get("warning")

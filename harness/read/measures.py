"""The numbers of a run: those that are derived from its record, and what they depend on."""

from __future__ import annotations

import re
from functools import cache

from harness.core.schema.checks import fields
from harness.read.statistics import is_rate

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

# Millions of bytes: payload is what a strategy hands over, sent is what left the nodes.
PER_UPDATE = {
    "payload_mb_per_update": "payload_bytes",
    "network_mb_per_update": "network_sent_bytes",
}
WALL_OF_TRAINING = "wall_of_training_s"  # without the time that measuring itself took
TO_TARGET = ("tta_train_s", "tta_wall_s", "tta_epochs", "tta_samples")
MEMORY_FIRST, MEMORY_OTHERS = "peak_memory_first_gib", "peak_memory_others_gib"

DERIVED = {*FIELDS, *PER_UPDATE, WALL_OF_TRAINING, *TO_TARGET, MEMORY_FIRST, MEMORY_OTHERS}
TIMED = re.compile(r"(_s|_ms|_j|_w|_share|_skew|utilisation_percent)$|joules_per")


@cache
def is_timed(measure: str) -> bool:
    """Whether a measure depends on how busy the machine is: times, rates, their shares, energy. A
    metric of the script's own does not, whatever its name is.
    """
    return _is_ours(measure) and (is_rate(measure) or TIMED.search(measure) is not None)


@cache
def is_timed_or_memory(measure: str) -> bool:
    """Whether a measure depends on the batch of a process, and varies between repeats of a seed."""
    return is_timed(measure) or ("memory" in measure and _is_ours(measure))


def _is_ours(measure: str) -> bool:
    return measure in DERIVED or any(measure in fields(kind) for kind in ("summary", "epochs"))

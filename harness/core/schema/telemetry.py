"""What samplers read of devices and nodes, field by field: type, range, unit, and meaning."""

# Formatted by hand: the formatter would give each bracket of the long meanings a line of its own.
# fmt: off

from __future__ import annotations

from typing import Annotated, NotRequired, TypedDict

from harness.core.schema.fields import (
    Bytes,
    Celsius,
    Gib,
    Joules,
    Megahertz,
    Percent,
    Seconds,
    Share,
    Unix,
    Watts,
)


class Gauge(TypedDict):
    """Statistics of a gauge over the readings in a span of time, and over devices or nodes."""

    mean: Annotated[float, "mean over the readings; over several devices or nodes, mean of means"]
    p95: Annotated[float, "the value that 95 % of the readings do not exceed; over several, the "
                          "largest"]
    max: Annotated[float, "the largest reading"]


class GpuTelemetry(TypedDict):
    """Readings of devices by NVML over an epoch's training; null for what is not reported."""

    utilisation_percent: Annotated[Gauge | None,
        "share of the time in which any kernel ran: a busy device may still compute little"]
    memory_gib: Annotated[Gauge | None, "memory taken by all processes on the device"]
    power_w: Annotated[Gauge | None, "power draw"]
    temperature_c: Annotated[Gauge | None, "temperature"]
    sm_clock_mhz: Annotated[Gauge | None, "clock of the multiprocessors"]
    memory_clock_mhz: Annotated[Gauge | None, "clock of the memory"]
    energy_j: NotRequired[Annotated[Joules | None,
        "growth of the driver's energy counter; by device only"]]
    throttled: Annotated[dict[str, Share] | None,
        "share of the readings in which something slowed the device down: `power_cap`, "
        "`power_brake`, `hardware`, `heat`, `heat_software`; over several devices, the largest"]


class NodeTelemetry(TypedDict):
    """Readings of nodes by the operating system over an epoch's training."""

    cpu_percent: Annotated[Gauge | None, "utilisation of all cores together"]
    memory_gib: Annotated[Gauge | None, "memory that is not available"]
    disk_read_bytes: Annotated[Bytes | None,
        "growth of the counter; over several machines, the sum: emulated nodes share one"]
    disk_written_bytes: Annotated[Bytes | None,
        "growth of the counter; over several machines, the sum: emulated nodes share one"]
    network_sent_bytes: Annotated[Bytes | None,
        "growth of the counter of the interface that training uses; on one node, of all but `lo`"]
    network_received_bytes: Annotated[Bytes | None,
        "growth of the counter of the interface that training uses; on one node, of all but `lo`"]
    cpu_energy_j: Annotated[Joules | None,
        "energy of all processors, by RAPL; over several machines, the sum: emulated nodes share "
        "one"]


class ProcessorTime(TypedDict):
    """The time of a node's cores over an epoch's training, and how much of it was this run's."""

    machine: Annotated[str, "a hash that tells machines apart: emulated nodes share one"]
    network: Annotated[str | None,
        "a hash that tells network namespaces apart: nodes that share one count the same bytes; "
        "null where that is not known"]
    core_s: Annotated[Seconds, "cores x `seconds`"]
    busy_s: Annotated[Seconds, "processor time of all that ran, over all cores"]
    own_s: Annotated[Seconds,
        "processor time of the run's processes on this node and of those that they started"]
    seconds: Annotated[Seconds, "from the first to the last reading"]


class RankTelemetry(TypedDict):
    """What a node's sampler reported to the node's first rank at the end of an epoch."""

    gpus: Annotated[list[GpuTelemetry], "a list by device"]
    node: Annotated[NodeTelemetry, "the node itself"]
    processors: NotRequired[Annotated[ProcessorTime, "what its cores did"]]
    energy_j: Annotated[Joules | None,
        "of its devices together, without those that an emulated node before it has too"]


class GpuReading(TypedDict):
    """One reading of one device; null for what the device did not report."""

    utilisation_percent: Annotated[Percent | None, "as in epochs.jsonl, at this moment"]
    memory_gib: Annotated[Gib | None, "as in epochs.jsonl, at this moment"]
    power_w: Annotated[Watts | None, "as in epochs.jsonl, at this moment"]
    temperature_c: Annotated[Celsius | None, "as in epochs.jsonl, at this moment"]
    sm_clock_mhz: Annotated[Megahertz | None, "as in epochs.jsonl, at this moment"]
    memory_clock_mhz: Annotated[Megahertz | None, "as in epochs.jsonl, at this moment"]
    energy_j: Annotated[Joules | None, "the driver's counter, which only grows"]
    throttled: Annotated[list[str] | None, "what is slowing the device down"]


class NodeReading(TypedDict):
    """One reading of a node; counters have their current values."""

    cpu_percent: Annotated[Percent | None, "as in epochs.jsonl, since the reading before"]
    memory_gib: Annotated[Gib | None, "as in epochs.jsonl, at this moment"]
    disk_read_bytes: Annotated[Bytes | None, "the counter, which only grows"]
    disk_written_bytes: Annotated[Bytes | None, "the counter, which only grows"]
    network_sent_bytes: Annotated[Bytes | None, "the counter, which only grows"]
    network_received_bytes: Annotated[Bytes | None, "the counter, which only grows"]
    cpu_energy_j: Annotated[Joules | None, "the counter, which only grows"]


class TelemetryRow(TypedDict):
    """A row per reading of a node and its devices."""

    unix: Annotated[Unix, "when it was read"]
    gpus: Annotated[list[GpuReading], "a list by device"]
    node: Annotated[NodeReading, "the node itself"]

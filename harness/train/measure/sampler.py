"""A process that samples the GPUs and the node: python -m harness.train.measure.sampler.

Each line of its input is a request. "edge" is answered with a line of JSON that summarises the
readings since the last edge, and a new interval begins; "peek" is answered likewise, and the
interval goes on; "keep FILE" says where readings are to be kept, earlier ones included. It ends
with the process that started it. It loads no torch, so it starts within a moment.

With the option "watch" it also ends the only rank of a torchrun launch if that rank is stopped.
One of these starts with every run: what only some of them need is imported where it is used.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import psutil

from harness.core.process import end_with_parent
from harness.train.measure.processors import Processors

if TYPE_CHECKING:
    from harness.train.only_rank import OnlyRank

GIB = 2**30  # bytes
MIG = "MIG-"
LEAST_CPU_S = 0.03  # the kernel counts in hundredths of a second
# What slows a device down -> the bit of NVML's throttle reasons.
THROTTLES = {
    "power_cap": "nvmlClocksThrottleReasonSwPowerCap",
    "power_brake": "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
    "hardware": "nvmlClocksThrottleReasonHwSlowdown",
    "heat": "nvmlClocksThrottleReasonHwThermalSlowdown",
    "heat_software": "nvmlClocksThrottleReasonSwThermalSlowdown",
}


@cache
def nvml() -> Any:
    import pynvml  # as long as all other imports, and needed only where there are GPUs

    return pynvml


def _throttles(device: Any) -> list[str]:
    bits = nvml().nvmlDeviceGetCurrentClocksThrottleReasons(device)
    return [name for name, bit in THROTTLES.items() if bits & getattr(nvml(), bit)]


# Name -> how it is read. Energy is a counter; everything else is a gauge.
READINGS: dict[str, Callable[[Any], Any]] = {
    "utilisation_percent": lambda d: nvml().nvmlDeviceGetUtilizationRates(d).gpu,
    "memory_gib": lambda d: nvml().nvmlDeviceGetMemoryInfo(d).used / GIB,
    "power_w": lambda d: nvml().nvmlDeviceGetPowerUsage(d) / 1000,
    "temperature_c": lambda d: nvml().nvmlDeviceGetTemperature(d, nvml().NVML_TEMPERATURE_GPU),
    "sm_clock_mhz": lambda d: nvml().nvmlDeviceGetClockInfo(d, nvml().NVML_CLOCK_SM),
    "memory_clock_mhz": lambda d: nvml().nvmlDeviceGetClockInfo(d, nvml().NVML_CLOCK_MEM),
    "energy_j": lambda d: nvml().nvmlDeviceGetTotalEnergyConsumption(d) / 1000,
    "throttled": _throttles,
}
# Slices of a card share these, so they say nothing about one slice.
OF_A_CARD = tuple(name for name in READINGS if name not in ("utilisation_percent", "memory_gib"))
SLICE = "the device is a slice of a card (MIG): this is counted for the whole card"
NET = Path("/sys/class/net")
RAPL = Path("/sys/class/powercap")
# Readings of a node that only grow -> what counts them: the samplers of one machine, or of one
# network namespace, read the same counter.
COUNTED_BY = {
    **dict.fromkeys(("cpu_energy_j", "disk_read_bytes", "disk_written_bytes"), "machine"),
    **dict.fromkeys(("network_sent_bytes", "network_received_bytes"), "network"),
}
# Readings that only grow, and lists of names; all others are gauges.
COUNTERS = ("energy_j", *COUNTED_BY)
LISTS = ("throttled",)
MAX_READINGS = 100_000  # of one interval: more than a day at 1 Hz
MAX_EARLY = 1000  # readings kept for a record that has no folder yet
Reading = dict[str, Any]


class Gpus:
    """The devices with these UUIDs, in this order."""

    def __init__(self, uuids: list[str]) -> None:
        self.missing: dict[str, str] = {}  # reading -> why at least one device does not have it
        self.devices: list[tuple[Any, bool]] = []  # handle, whether it is a slice of a card
        if not uuids:
            self.missing["gpu"] = "training uses no NVIDIA device"
            return
        try:
            nvml().nvmlInit()
            self.devices = [_device(uuid) for uuid in uuids]
        except nvml().NVMLError as error:
            self.missing = dict.fromkeys(READINGS, f"NVML: {error}")

    def read(self) -> list[Reading]:
        """One reading per device; None for what it does not have."""
        return [self._read(*device) for device in self.devices]

    def _read(self, handle: Any, is_slice: bool) -> Reading:
        reading: Reading = dict.fromkeys(READINGS)
        for name, read in READINGS.items():
            if name in self.missing:
                continue
            if is_slice and name in OF_A_CARD:
                self.missing[name] = SLICE
                continue
            try:
                reading[name] = read(handle)
            except nvml().NVMLError_NotSupported as error:
                self.missing[name] = f"NVML: {error}"  # not tried again
            except nvml().NVMLError:
                pass  # may succeed the next time
        return reading

    def close(self) -> None:
        if self.devices:
            nvml().nvmlShutdown()


def _device(uuid: str) -> tuple[Any, bool]:
    """(handle, whether it is a slice); CUDA gives both kinds of UUID without their prefix."""
    bare = uuid.removeprefix("GPU-").removeprefix(MIG)
    try:
        return nvml().nvmlDeviceGetHandleByUUID(f"GPU-{bare}"), False
    except nvml().NVMLError:
        return nvml().nvmlDeviceGetHandleByUUID(f"{MIG}{bare}"), True


def interfaces(only: str | None = None) -> list[Any]:
    """The counters of this interface, or of all that leave this network namespace by themselves:
    not the loopback, and not bonds, VLANs and bridges, whose traffic passes through others.
    """
    names = psutil.net_io_counters(pernic=True)
    chosen = [only] if only else [
        name for name in names
        if name not in ("lo", "lo0") and not [*(NET / name).glob("lower_*")]
    ]  # fmt: skip
    return [names[name] for name in chosen if name in names]


class NodeSensors:
    """This machine, or this network namespace: cores, memory, disk, network and CPU energy."""

    def __init__(self, interface: str | None = None, rapl: Path = RAPL) -> None:
        self.interface = interface
        self.missing: dict[str, str] = {}
        self.packages = _packages(rapl)
        self.wraps = [0] * len(self.packages)
        self.last = [0] * len(self.packages)
        if not self.packages:
            self.missing["cpu_energy_j"] = f"no RAPL counters below {rapl}"
        psutil.cpu_percent(None)  # the first call only sets the beginning
        self.cpu_read_s = time.monotonic()

    def read(self) -> Reading:
        disk = self._disk()
        sent, received = self._network()
        return {
            "cpu_percent": self._cpu_percent(),
            "memory_gib": (psutil.virtual_memory().total - psutil.virtual_memory().available) / GIB,
            "disk_read_bytes": disk and disk.read_bytes,
            "disk_written_bytes": disk and disk.write_bytes,
            "network_sent_bytes": sent,
            "network_received_bytes": received,
            "cpu_energy_j": self._energy_j(),
        }

    def _cpu_percent(self) -> float | None:
        """Use of all cores since the last reading; None within less than the kernel can count."""
        now_s = time.monotonic()
        if now_s - self.cpu_read_s < LEAST_CPU_S:
            return None
        self.cpu_read_s = now_s
        return float(psutil.cpu_percent(None))

    def _disk(self) -> Any:
        try:
            counters = psutil.disk_io_counters()
        except (OSError, RuntimeError, NotImplementedError):
            counters = None
        if counters is None:
            why = "the system counts no disk bytes"
            self.missing |= {"disk_read_bytes": why, "disk_written_bytes": why}
        return counters

    def _network(self) -> tuple[int | None, int | None]:
        """Bytes of the interface that training uses; if unknown, of all but the loopback."""
        counters = interfaces(self.interface)
        if not counters:
            why = f"there is no interface {self.interface or 'but the loopback'}"
            self.missing |= {"network_sent_bytes": why, "network_received_bytes": why}
            return None, None
        return sum(c.bytes_sent for c in counters), sum(c.bytes_recv for c in counters)

    def _energy_j(self) -> float | None:
        total = 0
        for number, (counter, most) in enumerate(self.packages):
            try:
                now = int(counter.read_text())
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or str(error)
                self.missing["cpu_energy_j"] = f"{counter} cannot be read: {why}"
                return None
            if now < self.last[number]:  # it has wrapped around
                self.wraps[number] += most
            self.last[number] = now
            total += now + self.wraps[number]
        return total / 1e6 if self.packages else None


def _packages(rapl: Path) -> list[tuple[Path, int]]:
    """For each processor its counter in microjoules, and the value at which that wraps around."""
    packages = []
    for domain in sorted(rapl.glob("intel-rapl:*")):
        if domain.name.count(":") != 1:
            continue  # a part of a processor
        try:
            name = (domain / "name").read_text().strip()
            most = int((domain / "max_energy_range_uj").read_text())
        except (OSError, ValueError):
            continue
        if name == "psys":
            continue  # the whole machine, processors among it
        packages.append((domain / "energy_uj", most))
    return packages


def summarise(readings: Sequence[Reading]) -> dict[str, Any]:
    """What readings of one interval say; the first one only sets the beginning of counters.

    A gauge: mean, 95th percentile and maximum. A counter: how much it grew. A list: the share of
    the readings that contain each name. None if nothing is known.
    """
    summary: dict[str, Any] = {}
    first, later = readings[0], readings[1:] or readings[:1]
    for name in first:
        if name in COUNTERS:
            summary[name] = _growth(first[name], later[-1][name])
        elif name in LISTS:
            summary[name] = _shares([reading[name] for reading in later])
        else:
            summary[name] = _spread([reading[name] for reading in later])
    return summary


def _growth(before: float | None, now: float | None) -> float | None:
    """None for a counter that was reset, because what it had counted is lost."""
    if before is None or now is None or now < before:
        return None
    return now - before


def _spread(values: Sequence[float | None]) -> dict[str, float | None] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {
        "mean": math.fsum(known) / len(known),
        "p95": quantile(known, 0.95),
        "max": max(known),
    }


def quantile(values: Sequence[float], fraction: float) -> float | None:
    """The smallest value that this fraction of all values does not exceed; None without values."""
    if not values:
        return None
    return sorted(values)[max(math.ceil(len(values) * fraction) - 1, 0)]


def _shares(lists: Sequence[list[str] | None]) -> dict[str, float] | None:
    known = [names for names in lists if names is not None]
    if not known:
        return None
    every = sorted({name for names in known for name in names})
    return {name: sum(name in names for names in known) / len(known) for name in every}


class Sampler:
    """The readings since the last edge."""

    def __init__(self, gpus: Gpus, node: NodeSensors, processors: Processors) -> None:
        self.gpus, self.node, self.processors = gpus, node, processors
        self.file: TextIO | None = None
        self.early: list[str] = []  # until there is a file for them
        self.readings: list[tuple[float, list[Reading], Reading]] = []
        self.sample()

    def sample(self) -> None:
        gpus, node = self.gpus.read(), self.node.read()
        self.readings.append((time.monotonic(), gpus, node))
        if len(self.readings) > MAX_READINGS:
            del self.readings[1]  # the first is the beginning of the counters
        line = json.dumps({"unix": round(time.time(), 3), "gpus": gpus, "node": node}) + "\n"
        if self.file is None:
            self.early = [*self.early[-MAX_EARLY:], line]
        else:
            self.file.write(line)
            self.file.flush()

    def keep(self, path: Path) -> None:
        """Keep all readings in this file; before a record begins it has no folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a", encoding="utf-8")
        self.file.writelines(self.early)
        self.file.flush()
        self.early = []

    def edge(self) -> dict[str, Any]:
        """Summarise the interval since the last edge, and begin another."""
        summary = self.peek()
        self.readings = self.readings[-1:]
        self.processors.edge()
        return summary

    def peek(self) -> dict[str, Any]:
        """Summarise the interval since the last edge."""
        self.sample()
        first, last = self.readings[0], self.readings[-1]
        devices = range(len(first[1]))
        return {
            "seconds": last[0] - first[0],
            "readings": len(self.readings) - 1,
            "gpus": [summarise([gpus[n] for _, gpus, _ in self.readings]) for n in devices],
            "node": summarise([node for _, _, node in self.readings]),
            "processors": self.processors.since_edge(),
            "lowest_power_w": self._lowest_power_w(),
            "missing": self.gpus.missing | self.node.missing,
        }

    def _lowest_power_w(self) -> float | None:
        """The lowest sum over all devices, at one reading."""
        powers = [[gpu["power_w"] for gpu in gpus] for _, gpus, _ in self.readings if gpus]
        return min((sum(values) for values in powers if None not in values), default=None)


def serve(sampler: Sampler | None, period_s: float, only_rank: OnlyRank | None = None) -> None:
    """Sample periodically and answer each line of the input, until it ends; or only watch."""
    requests = selectors.DefaultSelector()
    requests.register(0, selectors.EVENT_READ)
    incomplete = b""  # the beginning of a line whose end has not come yet
    next_s = time.monotonic() + period_s
    while True:
        if only_rank is not None:
            only_rank.look()
        if requests.select(max(0.0, next_s - time.monotonic())):
            if not (chunk := os.read(0, 65536)):
                return
            *lines, incomplete = (incomplete + chunk).split(b"\n")
            for line in lines:
                if sampler is not None:
                    handle(sampler, line.decode())
            continue
        if sampler is not None:
            sampler.sample()
        # Readings that were missed are not caught up on.
        next_s = max(next_s + period_s, time.monotonic())


def handle(sampler: Sampler, line: str) -> None:
    request, _, path = line.partition(" ")
    if request == "keep":
        sampler.keep(Path(path))
    else:
        summary = sampler.edge() if request == "edge" else sampler.peek()
        print(json.dumps(summary), flush=True)


def main(argv: list[str]) -> int:
    options = json.loads(argv[0])
    end_with_parent(options["parent"])
    watch, period_s = options["watch"], options["period_s"]
    only_rank = None
    if watch:
        from harness.train.only_rank import OnlyRank

        only_rank = OnlyRank(options["parent"], every_s=period_s, **watch)
    if not options["samples"]:
        serve(None, period_s, only_rank)
        return 0
    gpus = Gpus(options["uuids"])
    try:
        sampler = Sampler(gpus, NodeSensors(options["interface"]), Processors(options["pids"]))
        serve(sampler, period_s, only_rank)
    finally:
        gpus.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

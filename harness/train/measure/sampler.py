"""What NVML tells of the devices of one node. Loads no torch: a sampler starts in no time."""

from __future__ import annotations

import json
import math
import os
import selectors
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import psutil
import pynvml

from harness.core.process import end_with_parent

GIB = 2**30


MIG = "MIG-"


# Bits of the throttle reasons that slow a device down against its will -> what they are called.
THROTTLES = {
    "power_cap": "nvmlClocksThrottleReasonSwPowerCap",
    "power_brake": "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
    "hardware": "nvmlClocksThrottleReasonHwSlowdown",
    "heat": "nvmlClocksThrottleReasonHwThermalSlowdown",
    "heat_software": "nvmlClocksThrottleReasonSwThermalSlowdown",
}


def _throttles(device: Any) -> list[str]:
    bits = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(device)
    return [name for name, bit in THROTTLES.items() if bits & getattr(pynvml, bit)]


# Name -> how it is read. Energy only grows; all else is as it is now.
READINGS: dict[str, Callable[[Any], Any]] = {
    "utilisation_percent": lambda d: pynvml.nvmlDeviceGetUtilizationRates(d).gpu,
    "memory_gib": lambda d: pynvml.nvmlDeviceGetMemoryInfo(d).used / GIB,
    "power_w": lambda d: pynvml.nvmlDeviceGetPowerUsage(d) / 1000,
    "temperature_c": lambda d: pynvml.nvmlDeviceGetTemperature(d, pynvml.NVML_TEMPERATURE_GPU),
    "sm_clock_mhz": lambda d: pynvml.nvmlDeviceGetClockInfo(d, pynvml.NVML_CLOCK_SM),
    "memory_clock_mhz": lambda d: pynvml.nvmlDeviceGetClockInfo(d, pynvml.NVML_CLOCK_MEM),
    "energy_j": lambda d: pynvml.nvmlDeviceGetTotalEnergyConsumption(d) / 1000,
    "throttled": _throttles,
}


# What a slice of a card shares with the other slices says nothing of the slice.
OF_A_CARD = (
    "power_w",
    "temperature_c",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "energy_j",
    "throttled",
)


SLICE = "the device is a slice of a card (MIG): this is counted for the whole card"


class Gpus:
    """The devices with these UUIDs, in this order."""

    def __init__(self, uuids: list[str]) -> None:
        self.missing: dict[str, str] = {}  # reading -> why there is none, on one device at least
        self.handles: list[Any] = []
        self.slices: list[bool] = []
        if not uuids:
            self.missing["gpu"] = "training uses no NVIDIA device"
            return
        try:
            pynvml.nvmlInit()
            found = [_device(uuid) for uuid in uuids]
        except pynvml.NVMLError as error:
            self.missing = dict.fromkeys(READINGS, _said(error))
            found = []
        self.handles = [handle for handle, _ in found]
        self.slices = [is_slice for _, is_slice in found]

    def read(self) -> list[dict[str, Any]]:
        """One reading a device; None for what it does not tell."""
        return [self._of(n) for n in range(len(self.handles))]

    def _of(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, read in READINGS.items():
            found[name] = None
            if name in self.missing:
                continue
            if self.slices[number] and name in OF_A_CARD:
                self.missing[name] = SLICE
                continue
            try:
                found[name] = read(self.handles[number])
            except pynvml.NVMLError_NotSupported as error:
                self.missing[name] = _said(error)  # and is not asked again
            except pynvml.NVMLError:
                pass  # now; perhaps not the next time
        return found

    def close(self) -> None:
        if self.handles:
            pynvml.nvmlShutdown()


def _device(uuid: str) -> tuple[Any, bool]:
    """(handle, whether it is a slice); CUDA gives both kinds of UUID without their prefix."""
    bare = uuid.removeprefix("GPU-").removeprefix(MIG)
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{bare}"), False
    except pynvml.NVMLError:
        return pynvml.nvmlDeviceGetHandleByUUID(f"{MIG}{bare}"), True


def _said(error: Exception) -> str:
    return f"NVML: {error}"


# ----
# What a node does: processors, memory, disk, network, and the energy of its processors.

GIB = 2**30


RAPL = Path("/sys/class/powercap")


class Node:
    """Readings of this machine, or of this network namespace; counters only grow."""

    def __init__(self, interface: str | None = None, rapl: Path = RAPL) -> None:
        self.interface = interface
        self.missing: dict[str, str] = {}
        self.packages = _packages(rapl)
        self.wraps = [0] * len(self.packages)
        self.last = [0] * len(self.packages)
        if not self.packages:
            self.missing["cpu_energy_j"] = f"no RAPL counters below {rapl}"
        psutil.cpu_percent(None)  # the first answer is about nothing

    def read(self) -> dict[str, Any]:
        disk = self._disk()
        sent, received = self._network()
        return {
            "cpu_percent": psutil.cpu_percent(None),  # of all cores, since it was asked before
            "memory_gib": (psutil.virtual_memory().total - psutil.virtual_memory().available) / GIB,
            "disk_read_bytes": disk and disk.read_bytes,
            "disk_written_bytes": disk and disk.write_bytes,
            "network_sent_bytes": sent,
            "network_received_bytes": received,
            "cpu_energy_j": self._energy_j(),
        }

    def _disk(self) -> Any:
        try:
            found = psutil.disk_io_counters()
        except (OSError, RuntimeError, NotImplementedError):
            found = None
        if found is None:
            why = "the system counts no disk bytes"
            self.missing |= {"disk_read_bytes": why, "disk_written_bytes": why}
        return found

    def _network(self) -> tuple[int | None, int | None]:
        """Of the interface that training uses, or of all but the loopback where it is not known."""
        counters = psutil.net_io_counters(pernic=True)
        if self.interface is not None:
            counters = {n: c for n, c in counters.items() if n == self.interface}
        else:
            counters.pop("lo", None)
        if not counters:
            why = f"there is no interface {self.interface or 'but the loopback'}"
            self.missing |= {"network_sent_bytes": why, "network_received_bytes": why}
            return None, None
        return (
            sum(c.bytes_sent for c in counters.values()),
            sum(c.bytes_recv for c in counters.values()),
        )

    def _energy_j(self) -> float | None:
        total = 0
        for number, (counter, most) in enumerate(self.packages):
            try:
                now = int(counter.read_text())
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or str(error)
                self.missing["cpu_energy_j"] = f"{counter} cannot be read: {why}"
                return None
            if now < self.last[number]:  # it begins again from 0
                self.wraps[number] += most
            self.last[number] = now
            total += now + self.wraps[number]
        return total / 1e6 if self.packages else None


def _packages(rapl: Path) -> list[tuple[Path, int]]:
    """Of each processor: its counter in microjoules, and the number at which it begins again."""
    found = []
    for domain in sorted(rapl.glob("intel-rapl:*")):
        if domain.name.count(":") != 1:
            continue  # a part of a processor
        try:
            most = int((domain / "max_energy_range_uj").read_text())
        except (OSError, ValueError):
            continue
        found.append((domain / "energy_uj", most))
    return found


# ----
# From single readings to what they say about a stretch of time.

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


# ----
# The process that looks, once a second by default: python -m harness.train.measure.sampler.
#
# Each line of its input is a question: "edge" is answered with a line of JSON,
# and another stretch begins; "peek" is answered likewise, and the stretch goes on;
# "keep FILE" says where readings are kept, those before it included. It ends with the process that
# started it.

KEPT = 100_000  # readings of one stretch: more than a day at one a second


EARLY = 1000  # readings before a record has begun


class Sampler:
    """Readings since the last edge."""

    def __init__(self, gpus: Gpus, node: Node) -> None:
        self.gpus, self.node = gpus, node
        self.raw: TextIO | None = None
        self.early: list[str] = []  # until it is known where they are to be kept
        self.readings: list[tuple[float, list[Reading], Reading]] = []
        self.look()

    def look(self) -> None:
        gpus, node = self.gpus.read(), self.node.read()
        self.readings.append((time.monotonic(), gpus, node))
        if len(self.readings) > KEPT:
            del self.readings[1]  # the first is where counters began
        line = json.dumps({"unix": round(time.time(), 3), "gpus": gpus, "node": node}) + "\n"
        if self.raw is None:
            self.early = [*self.early[-EARLY:], line]
        else:
            self.raw.write(line)
            self.raw.flush()

    def keep(self, file: Path) -> None:
        """From now on; a record that was not begun has no folder yet."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self.raw = file.open("a", encoding="utf-8")
        self.raw.writelines(self.early)
        self.raw.flush()
        self.early = []

    def edge(self) -> dict[str, Any]:
        """What has been since the last edge; from here on another stretch begins."""
        found = self.peek()
        self.readings = self.readings[-1:]
        return found

    def peek(self) -> dict[str, Any]:
        """What has been since the last edge."""
        self.look()
        first, last = self.readings[0], self.readings[-1]
        devices = range(len(first[1]))
        return {
            "seconds": last[0] - first[0],
            "readings": len(self.readings) - 1,
            "gpus": [summed_up([gpus[n] for _, gpus, _ in self.readings]) for n in devices],
            "node": summed_up([node for _, _, node in self.readings]),
            "lowest_power_w": self._lowest_power_w(),
            "missing": self.gpus.missing | self.node.missing,
        }

    def _lowest_power_w(self) -> float | None:
        """Of all devices together, at one reading."""
        powers = [[gpu["power_w"] for gpu in gpus] for _, gpus, _ in self.readings if gpus]
        known = [sum(of_all) for of_all in powers if None not in of_all]
        return min(known, default=None)


def serve(sampler: Sampler, every_s: float) -> None:
    """Until the input ends: a reading every so often, and an answer to each line."""
    lines = selectors.DefaultSelector()
    lines.register(0, selectors.EVENT_READ)
    begun = b""  # of a line that has not come whole
    next_s = time.monotonic() + every_s
    while True:
        if lines.select(max(0.0, next_s - time.monotonic())):
            if not (chunk := os.read(0, 65536)):
                return
            *whole, begun = (begun + chunk).split(b"\n")
            for line in whole:
                answer(sampler, line.decode())
            continue
        sampler.look()
        # No catching up: what was late is late.
        next_s = max(next_s + every_s, time.monotonic())


def answer(sampler: Sampler, line: str) -> None:
    asked, _, rest = line.partition(" ")
    if asked == "keep":
        sampler.keep(Path(rest))
    else:
        told = sampler.edge() if asked == "edge" else sampler.peek()
        print(json.dumps(told), flush=True)


def main(argv: list[str]) -> int:
    asked = json.loads(argv[0])
    end_with_parent(asked["parent"])
    gpus = Gpus(asked["uuids"])
    try:
        serve(Sampler(gpus, Node(asked["interface"])), asked["every_s"])
    finally:
        gpus.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

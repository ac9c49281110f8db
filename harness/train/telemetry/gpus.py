"""What NVML tells of the devices of one node. Loads no torch: a sampler starts in no time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml

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

"""What this machine has to run on, and who else uses it. Asks the driver; loads no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import psutil
import pynvml

from harness.core.rules import why_a_gpu
from harness.launch.plan import Job

BUSY = 0.25  # share of all cores that others may use without a warning


@dataclass(frozen=True)
class Machine:
    gpus: tuple[str, ...]  # as CUDA_VISIBLE_DEVICES names them
    cores: tuple[int, ...]

    @property
    def devices(self) -> int:
        """One core stands for one device where there is no GPU."""
        return len(self.gpus) or len(self.cores)

    @property
    def threads(self) -> int:
        """Per process; the same for every run of a sweep, so that only set-ups differ."""
        return max(1, len(self.cores) // len(self.gpus)) if self.gpus else 1


def this_machine() -> Machine:
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    cores = affinity(0) if affinity else range(os.cpu_count() or 1)
    return Machine(_gpus(), tuple(sorted(cores)))


def why_not(job: Job, machine: Machine, oversubscribe: bool = False) -> str | None:
    """Why this machine does not have the devices of all nodes of a run; None if it has."""
    if not machine.gpus and (reason := why_a_gpu(job.settings)):
        return reason.removeprefix("--")
    needed = job.nodes * job.devices
    if needed <= machine.devices or (oversubscribe and not machine.gpus):
        return None
    if machine.gpus:
        return f"needs {needed} devices: this machine has {len(machine.gpus)} GPU(s)"
    return (
        f"needs {needed} devices: this machine has {len(machine.cores)} cores, of which one "
        "stands for one device (--oversubscribe lets them share)"
    )


def others(machine: Machine, interval_s: float = 0.3) -> dict[str, Any]:
    """Who else uses this machine, before a run begins: nothing of ours is busy then."""
    return {
        "cpu_busy_share": round(psutil.cpu_percent(interval_s) / 100, 3),
        "gpu_processes": _gpu_processes(machine),
    }


def disturbance(others: dict[str, Any]) -> str | None:
    """What of it would disturb a measurement; None if nothing."""
    reasons = []
    if others["gpu_processes"]:
        reasons.append(f"{others['gpu_processes']} other process(es) use the GPUs")
    if others["cpu_busy_share"] > BUSY:
        reasons.append(f"others use {others['cpu_busy_share']:.0%} of the cores")
    return " and ".join(reasons) or None


def _gpus() -> tuple[str, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves visible, all without it; none without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return ()
    if visible is None:
        return tuple(str(i) for i in range(count))
    return tuple(name for name in visible.split(",") if name not in ("", "-1"))


def _gpu_processes(machine: Machine) -> int:
    """Processes on the visible GPUs that are not ours."""
    if not machine.gpus:
        return 0
    family = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    pids: set[int] = set()
    pynvml.nvmlInit()
    try:
        for name in machine.gpus:
            device = (
                pynvml.nvmlDeviceGetHandleByIndex(int(name))
                if name.isdigit()
                else pynvml.nvmlDeviceGetHandleByUUID(name)
            )
            pids |= {p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(device)}
    finally:
        pynvml.nvmlShutdown()
    return len(pids - family)

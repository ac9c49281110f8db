"""What a node does: processors, memory, disk, network, and the energy of its processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

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

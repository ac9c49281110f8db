"""The part of a rank in watching: one process of each node starts a sampler and asks it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from harness.records import RunFolder
from harness.train.cpu import of_all_ranks
from harness.train.link import interface
from harness.train.measures import Measure, total
from harness.train.telemetry.told import epoch_fields
from harness.train.telemetry.watch import GONE, Watch
from harness.world import World

HZ = 1.0  # where no settings say it
OFF = "nobody looked: --telemetry_hz 0"


def open_watch(hz: float, world: World, devices: int = 1) -> Watch | None:
    """The sampler of this node, on its first process; every process of a group calls it.

    Early, before anything is on the devices: what they take when idle is seen then.
    """
    if not hz:
        return None
    own = uuids(devices)
    everyone = [own] * world.size
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_gather_object(everyone, own)
    if world.local_rank != 0:
        return None
    first = world.rank // world.per_node * world.per_node
    of_node = [uuid for rank in everyone[first : first + world.per_node] for uuid in rank]
    device = torch.device("cuda" if own else "cpu")
    used = interface(device, os.environ) if world.nodes > 1 and world.launched else None
    return Watch(list(dict.fromkeys(of_node)), 1 / hz, used)


def uuids(devices: int) -> list[str]:
    """Of the GPUs that this process trains on: its own, or the first so many for dp."""
    if not torch.cuda.is_available():
        return []
    numbers = range(devices) if devices > 1 else [torch.cuda.current_device()]
    return [str(torch.cuda.get_device_properties(n).uuid) for n in numbers]


class Telemetry(Measure):
    """What devices and nodes do while the epochs run."""

    name = "energy_j"

    def __init__(self, run: Any, world: World, devices: int) -> None:
        self.run, self.world = run, world
        self.hz = HZ if run is None else run.settings.telemetry_hz
        self.watch = open_watch(HZ, world, devices) if run is None else run.watch
        self.before: float | None = _energy_before(run)  # of this node's devices, in this epoch
        self.begun: list[dict[str, Any]] = []

    def begin(self, folder: RunFolder) -> None:
        """Training is about to begin: what was seen until now, of all nodes."""
        found: dict[str, Any] = {}
        if self.watch is not None:
            self.watch.keep(folder.telemetry(self.world.rank // self.world.per_node))
            seen = self.watch.edge() or {"missing": {"all": GONE}, "lowest_power_w": None}
            found = {"missing": seen["missing"], "idle_power_w": seen["lowest_power_w"]}
        self.begun = of_all_ranks(found, self.world.size, self.run)

    def facts(self) -> dict[str, Any]:
        """How often was looked, what could not be seen, what devices take when nothing runs."""
        missing = {"all": OFF} if not self.hz else {}
        for of_node in self.begun:
            missing |= of_node.get("missing", {})
        idle = [of_node["idle_power_w"] for of_node in self.begun if of_node]
        return {
            "telemetry_hz": self.hz,
            "telemetry_missing": missing,
            "idle_power_w": total(idle),
        }

    def epoch_begins(self) -> None:
        if self.watch is not None:
            self.watch.edge()  # what was since the last epoch is in no epoch

    def of_rank(self, untimed: int) -> dict[str, Any]:
        """Nothing on the ranks that do not watch."""
        found = told(self.watch)
        if of_node := found.get("telemetry"):
            of_node["energy_j"] = _added(of_node["energy_j"], self.before)
        self.before = 0.0
        return found

    def of_run(self, ranks: Sequence[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
        return epoch_fields([rank["telemetry"] for rank in ranks if "telemetry" in rank])

    def so_far(self) -> float | None:
        seen = self.watch.peek() if self.watch is not None else None
        return _added(_energy(seen), self.before) if seen is not None else None

    def close(self) -> None:
        if self.watch is not None:
            self.watch.close()


def told(watch: Watch | None, goes_on: bool = False) -> dict[str, Any]:
    """What a node tells of an epoch that has ended; None where its sampler is gone."""
    if watch is None:
        return {}
    if (seen := watch.peek() if goes_on else watch.edge()) is None:
        return {"telemetry": None}
    return {"telemetry": {"gpus": seen["gpus"], "node": seen["node"], "energy_j": _energy(seen)}}


def _energy(seen: dict[str, Any]) -> float | None:
    """Of all devices of a node since it was asked before."""
    return total([device["energy_j"] for device in seen["gpus"]])


def _added(now: float | None, before: float | None) -> float | None:
    return None if now is None or before is None else now + before


def _energy_before(run: Any) -> float | None:
    """This node's part of the epoch in which the checkpoint was made."""
    if run is None or "samples" not in run.epoch_so_far:  # it was made between two epochs
        return 0.0
    by_rank = [(of or {}).get(Telemetry.name) for of in run.epoch_so_far.get("measured") or []]
    if not run.other_processes:
        return by_rank[run.world.rank] if by_rank else None
    # Others have come or gone: counted once, with rank 0.
    known = [value for value in by_rank if value is not None]
    return (sum(known) if known else None) if run.leader else 0.0

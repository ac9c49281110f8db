"""The part of a rank in watching: one process of each node starts a sampler and asks it."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from harness.records import RunFolder
from harness.train.link import interface
from harness.train.telemetry.told import epoch_fields
from harness.train.telemetry.watch import Watch
from harness.world import World

HZ = 1.0  # where no settings say it


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


class Seen:
    """What a recorder asks of it, at the edges of epochs."""

    def __init__(self, run: Any, world: World, devices: int) -> None:
        self.world = world
        self.hz = HZ if run is None else run.settings.telemetry_hz
        self.watch = open_watch(HZ, world, devices) if run is None else run.watch

    def begin(self, folder: RunFolder) -> dict[str, Any]:
        """Training is about to begin: of this node, what was seen until now."""
        if self.watch is None:
            return {}
        self.watch.keep(folder.telemetry(self.world.rank // self.world.per_node))
        told = self.watch.edge()
        if told is None:
            return {}
        return {"missing": told["missing"], "idle_power_w": told["lowest_power_w"]}

    def epoch_begins(self) -> None:
        """What was since the last epoch is in no epoch."""
        if self.watch is not None:
            self.watch.edge()

    def epoch_ended(self) -> dict[str, Any]:
        """For the row of this rank; nothing on the ranks that do not watch."""
        told = self.watch.edge() if self.watch is not None else None
        return {} if told is None else {"telemetry": told}


def facts_of_nodes(hz: float, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """For the record: how often was looked, what could not be seen, what devices take when idle."""
    nodes = [told for told in ranks if told]  # the others do not watch
    idle = [node["idle_power_w"] for node in nodes]
    missing: dict[str, str] = {}
    for node in nodes:
        missing |= node["missing"]
    return {
        "telemetry_hz": hz,
        "telemetry_missing": missing,
        "idle_power_w": sum(idle) if idle and None not in idle else None,  # type: ignore[arg-type]
    }


def row_fields(everyone: list[dict[str, Any]], per_node: int) -> dict[str, Any]:
    """Of the epoch, from the rows of all ranks."""
    return epoch_fields([rank.get("telemetry") for rank in everyone[::per_node]])

"""The sampler of a node, as the one process of the node that started it sees it."""

from __future__ import annotations

import json
import math
import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.core.provenance import ROOT
from harness.core.records import RunFolder
from harness.core.topology import World
from harness.train.context import Context
from harness.train.measure.base import Measure, total
from harness.train.measure.link import interface
from harness.train.measure.resources import of_all_ranks
from harness.train.measure.sampler import COUNTERS, LISTS

ANSWER_S = 5.0
Gather = Callable[[dict[str, Any]], list[dict[str, Any]]]  # a row -> those of all ranks


GONE = "the process that looks at the machine is gone or does not answer"


class Watch:
    """Starts a sampler; asked at the edges of epochs, never inside a step."""

    def __init__(self, uuids: list[str], every_s: float, interface: str | None = None) -> None:
        asked = {"uuids": uuids, "every_s": every_s, "interface": interface, "parent": os.getpid()}
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.lost: str | None = None  # why there is nothing more to be had
        self.process = subprocess.Popen(
            [sys.executable, "-m", "harness.train.measure.sampler", json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for those who train: it ends when they do
        )
        self.answers = selectors.DefaultSelector()
        assert self.process.stdout is not None
        self.answers.register(self.process.stdout, selectors.EVENT_READ)

    def keep(self, file: Path) -> None:
        """Every reading, a line each, from the first one on."""
        self._ask(f"keep {file.absolute()}")

    def edge(self) -> dict[str, Any] | None:
        """What has been since this was asked before; None when the sampler is gone."""
        return self._answer("edge")

    def peek(self) -> dict[str, Any] | None:
        """The same, and it goes on counting from where it did."""
        return self._answer("peek")

    def _answer(self, question: str) -> dict[str, Any] | None:
        if not self._ask(question):
            return None
        assert self.process.stdout is not None
        try:
            line = self.process.stdout.readline() if self.answers.select(ANSWER_S) else ""
            found: dict[str, Any] = json.loads(line)
        except (OSError, ValueError):
            self._give_up()
            return None
        return found

    def _ask(self, words: str) -> bool:
        if self.lost is not None:
            return False
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(words + "\n")
            self.process.stdin.flush()
        except OSError:
            self._give_up()
            return False
        return True

    def _give_up(self) -> None:
        self.lost = GONE
        self.close()

    def close(self) -> None:
        """It ends at the end of its input."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        try:
            self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


# ----
# What the nodes have told, as it stands in an epoch's row.

Told = dict[str, Any]


def epoch_fields(nodes: Sequence[Told | None]) -> dict[str, Any]:
    """Over all devices, and over all nodes; None where nobody looks, or one does not know.

    Means are means over them; p95 and max are the largest; what was counted is added up, unless
    one of them does not know it.
    """
    known = [node for node in nodes if node is not None]
    devices = [device for node in known for device in node["gpus"]]
    if not known or len(known) < len(nodes):
        return {"gpu": None, "node": None, "energy_j": None}
    return {
        # Energy stands beside it: with what was before, where the epoch was broken off.
        "gpu": _together([{n: v for n, v in of.items() if n != "energy_j"} for of in devices]),
        "node": _together([node["node"] for node in known]),
        "energy_j": total([node["energy_j"] for node in known]),
    }


def _together(told: Sequence[Told]) -> dict[str, Any] | None:
    if not told:
        return None
    found: dict[str, Any] = {}
    for name in told[0]:
        values = [one[name] for one in told]
        if name in COUNTERS:
            found[name] = total(values)
        elif name in LISTS:
            found[name] = _largest(values)
        else:
            found[name] = _spread(values)
    return found


def _largest(shares: Sequence[dict[str, float] | None]) -> dict[str, float] | None:
    known = [share for share in shares if share is not None]
    if not known:
        return None
    names = sorted({name for share in known for name in share})
    return {name: max(share.get(name, 0.0) for share in known) for name in names}


def _spread(values: Sequence[dict[str, float] | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {
        "mean": math.fsum(value["mean"] for value in known) / len(known),
        "p95": max(value["p95"] for value in known),
        "max": max(value["max"] for value in known),
    }


# ----
# The part of a rank in watching: one process of each node starts a sampler and asks it.

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

    def __init__(
        self, context: Context | None, world: World, devices: int, gather: Gather | None = None
    ) -> None:
        self.world = world
        self.gather = gather or partial(of_all_ranks, size=world.size)
        self.hz = HZ if context is None else context.settings.telemetry_hz
        self.watch = open_watch(HZ, world, devices) if context is None else context.watch
        self.before: float | None = _energy_before(context)  # of this node, in this epoch
        self.begun: list[dict[str, Any]] = []

    def open(self, folder: RunFolder) -> None:
        """Training is about to begin: what was seen until now, of all nodes."""
        found: dict[str, Any] = {}
        if self.watch is not None:
            self.watch.keep(folder.telemetry(self.world.rank // self.world.per_node))
            seen = self.watch.edge() or {"missing": {"all": GONE}, "lowest_power_w": None}
            found = {"missing": seen["missing"], "idle_power_w": seen["lowest_power_w"]}
        self.begun = self.gather(found)

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


def _energy_before(context: Context | None) -> float | None:
    """This node's part of the epoch in which the checkpoint was made."""
    if context is None or "samples" not in context.epoch_so_far:  # it was made between two epochs
        return 0.0
    measured = context.epoch_so_far.get("measured") or []
    by_rank = [(of or {}).get(Telemetry.name) for of in measured]
    if not context.other_processes:
        return by_rank[context.world.rank] if by_rank else None
    # Others have come or gone: counted once, with rank 0.
    known = [value for value in by_rank if value is not None]
    return (sum(known) if known else None) if context.is_rank0 else 0.0

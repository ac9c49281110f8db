"""Telemetry of a run: one process of each node starts a sampler, and rank 0 merges the nodes."""

from __future__ import annotations

import json
import math
import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from harness.core.provenance import RELAY, ROOT
from harness.core.records import RunFolder, total
from harness.core.schema.environment import MeasuredRecord
from harness.core.topology import World
from harness.train import session
from harness.train.context import Context
from harness.train.measure.link import interface
from harness.train.measure.processors import others_share
from harness.train.measure.resources import device_numbers
from harness.train.measure.rows import EpochMeasure
from harness.train.measure.sampler import COUNTED_BY, COUNTERS, LISTS

TIMEOUT_S = 5.0
HZ = 1.0  # without settings
OFF = "telemetry is off: --telemetry_hz 0"
GONE = "the sampler process is gone or does not answer"
Gather = Callable[[dict[str, Any]], list[dict[str, Any]]]  # a row -> those of all ranks


class SamplerClient:
    """Starts a sampler and asks it at the edges of epochs, never inside a step.

    samples: False for a sampler that only watches.
    """

    def __init__(
        self, uuids: list[str], period_s: float, interface: str | None = None,
        pids: Sequence[int] = (), watch: Mapping[str, Any] | None = None, samples: bool = True,
    ) -> None:  # fmt: skip
        stderr = os.dup(2) if watch else None
        options = {
            "uuids": uuids,
            "samples": samples,
            "period_s": period_s,
            "interface": interface,
            "parent": os.getpid(),
            # Processes of the run on this node, and the one that emulates its network.
            "pids": [*(pids or [os.getpid()]), *map(int, filter(None, [os.environ.get(RELAY)]))],
            "watch": {**watch, "stderr": stderr} if watch else None,  # of only_rank.OnlyRank
        }
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.uuids = uuids
        self.lost: str | None = None  # why there are no more answers
        self.process = subprocess.Popen(
            [sys.executable, "-m", "harness.train.measure.sampler", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the training, with which it ends
            pass_fds=[] if stderr is None else [stderr],
        )
        if stderr is not None:
            os.close(stderr)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.requests, self.answers = self.process.stdin, self.process.stdout
        self.ready = selectors.DefaultSelector()
        self.ready.register(self.answers, selectors.EVENT_READ)

    def keep(self, file: Path) -> None:
        """Write every reading to a file, one per line, from the first one on."""
        self._send(f"keep {file.absolute()}")

    def edge(self) -> dict[str, Any] | None:
        """The summary since the last edge; None if the sampler is gone."""
        return self._ask("edge")

    def peek(self) -> dict[str, Any] | None:
        """The same, without setting an edge."""
        return self._ask("peek")

    def _ask(self, request: str) -> dict[str, Any] | None:
        if not self._send(request):
            return None
        try:
            line = self.answers.readline() if self.ready.select(TIMEOUT_S) else ""
            summary: dict[str, Any] = json.loads(line)
        except (OSError, ValueError):
            self._give_up()
            return None
        return summary

    def _send(self, request: str) -> bool:
        if self.lost is not None:
            return False
        try:
            self.requests.write(request + "\n")
            self.requests.flush()
        except OSError:
            self._give_up()
            return False
        return True

    def _give_up(self) -> None:
        self.lost = GONE
        self.close()

    def close(self) -> None:
        """The sampler ends when its input does."""
        for pipe in (self.requests, self.answers):
            with suppress(OSError):
                pipe.close()
        try:
            self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start_sampler(
    hz: float, world: World, processes: Sequence[tuple[list[str], int]],
    watch: Mapping[str, Any] | None = None,
) -> SamplerClient | None:  # fmt: skip
    """The sampler of this node, on its first process, or of a peer.

    It starts before anything is on the devices, so that their idle power is seen. processes: GPU
    UUIDs and process ID of each rank. watch: how the sampler ends this process if it is stopped.
    """
    if not hz:
        return SamplerClient([], 1 / HZ, watch=watch, samples=False) if watch else None
    # A peer of hivemind has no group: it knows itself alone, and samples its own device.
    if world.local_rank != 0 and world.size > 1:
        return None
    first = world.rank // world.per_node * world.per_node if len(processes) > 1 else 0
    of_node = processes[first : first + world.per_node]
    of_ranks = dict.fromkeys(uuid for of_process, _ in of_node for uuid in of_process)
    device = torch.device("cuda" if of_ranks else "cpu")
    used = interface(device, os.environ) if world.nodes > 1 and world.launched else None
    pids = sorted({pid for _, pid in of_node})
    return SamplerClient(list(of_ranks), 1 / hz, used, pids, watch)


def uuids(devices: int) -> list[str]:
    """UUIDs of the GPUs of this process: its own, or the first `devices` for dp; 0: none."""
    if not devices:
        return []
    return [str(torch.cuda.get_device_properties(n).uuid) for n in device_numbers(devices)]


class Telemetry(EpochMeasure):
    """What devices and nodes do while the epochs run."""

    name = "energy_j"

    def __init__(
        self, context: Context | None, world: World, devices: int, gather: Gather | None = None
    ) -> None:
        self.world = world
        self.gather = gather or session.gather
        self.hz = HZ if context is None else context.settings.telemetry_hz
        if context is None:
            own = start_sampler(HZ, world, session.gather([uuids(devices), os.getpid()]))
        else:
            own = context.sampler
        self.sampler = own if self.hz else None  # without a rate it only watches
        self.before = _energy_before(context)  # of this node in this epoch, before the checkpoint
        self.before_training: list[dict[str, Any]] = []  # of all nodes
        self.shared: frozenset[str] = frozenset()  # devices that an earlier emulated node counts

    def open(self, folder: RunFolder) -> None:
        """Training is about to begin: gather what all nodes have seen until now."""
        row: dict[str, Any] = {}
        if self.sampler is not None:
            node, number = divmod(self.world.rank, self.world.per_node)
            if not number:  # of several peers on a node one writes its file
                self.sampler.keep(folder.telemetry(node))
            summary = self.sampler.edge() or {"missing": {"all": GONE}, "lowest_power_w": None}
            row = {"missing": summary["missing"], "idle_power_w": summary["lowest_power_w"],
                   "uuids": self.sampler.uuids}  # fmt: skip
        self.before_training = self.gather(row)
        if self.tells_of_all:
            before = self.before_training[: self.world.rank]
            self.shared = frozenset(uuid for row in before for uuid in row.get("uuids", ()))

    @property
    def tells_of_all(self) -> bool:
        """Whether all ranks have reported. Peers do not, and one cannot stand for all."""
        return len(self.before_training) == self.world.size

    def facts(self) -> MeasuredRecord:
        """The sampling rate, what could not be read, and the power of idle devices."""
        missing = {"all": OFF} if not self.hz else {}
        for row in self.before_training:
            missing |= row.get("missing", {})
        # Emulated nodes may train on the same devices.
        idle = {(*row["uuids"],): row["idle_power_w"] for row in self.before_training if row}
        return {
            "telemetry_hz": self.hz,
            "telemetry_missing": missing,
            "idle_power_w": total(idle.values()) if self.tells_of_all else None,
        }

    def epoch_begins(self) -> None:
        if self.sampler is not None:
            self.sampler.edge()  # what was between two epochs is in neither

    def rank_fields(self, untimed: int) -> dict[str, Any]:
        """The fields of a node, on its first rank; the other ranks have none."""
        fields = node_fields(self.sampler, self.shared)
        if node := fields.get("telemetry"):
            node["energy_j"] = total([node["energy_j"], self.before])
        self.before = 0.0
        return fields

    def run_fields(self, ranks: Sequence[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
        return merge_nodes([rank["telemetry"] for rank in ranks if "telemetry" in rank])

    def state(self) -> float | None:
        if self.sampler is None or (summary := self.sampler.peek()) is None:
            return None
        energy: float | None = total([_energy(summary, self.sampler, self.shared), self.before])
        return energy

    def close(self) -> None:
        if self.sampler is not None:
            self.sampler.close()


def node_fields(
    sampler: SamplerClient | None, shared: frozenset[str] = frozenset(), resumes: bool = False
) -> dict[str, Any]:
    """The telemetry of this node in the epoch that has ended; None if its sampler is gone."""
    if sampler is None:
        return {}
    if (summary := sampler.peek() if resumes else sampler.edge()) is None:
        return {"telemetry": None}
    of_node = {name: summary[name] for name in ("gpus", "node", "processors")}
    return {"telemetry": {**of_node, "energy_j": _energy(summary, sampler, shared)}}


def merge_nodes(nodes: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    """Over all devices and all nodes; None without a sampler, or if one of them is gone.

    Means are averaged, of p95 and max the largest counts, and counters are added up unless one of
    them is unknown; one that several nodes read counts once.
    """
    known = [node for node in nodes if node is not None]
    devices = [device for node in known for device in node["gpus"]]
    if not known or len(known) < len(nodes):
        return {"gpu": None, "node": None, "others_cpu_share": None, "energy_j": None}
    return {
        # Energy stands beside it: it includes the part of the epoch before an interruption.
        "gpu": _merge(devices) or None,
        "node": {**_merge([node["node"] for node in known]), **_counted(known)},
        "others_cpu_share": others_share(node["processors"] for node in known),
        "energy_j": total([node["energy_j"] for node in known]),
    }


def _merge(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Gauges and lists of names; no counters."""
    merged: dict[str, Any] = {}
    for name in summaries[0] if summaries else ():
        known = [summary[name] for summary in summaries if summary[name] is not None]
        if name in COUNTERS:
            continue
        if not known:
            merged[name] = None
        elif name in LISTS:
            names = sorted({name for shares in known for name in shares})
            merged[name] = {n: max(shares.get(n, 0.0) for shares in known) for n in names}
        else:
            merged[name] = {
                "mean": math.fsum(spread["mean"] for spread in known) / len(known),
                "p95": max(spread["p95"] for spread in known),
                "max": max(spread["max"] for spread in known),
            }
    return merged


def _counted(nodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums of counters: of nodes that read the same counter, the longest reading."""
    sums = {}
    by_time = sorted(nodes, key=lambda node: node["processors"]["seconds"])
    for name, of in COUNTED_BY.items():
        if name in nodes[0]["node"]:
            read = {node["processors"][of]: node["node"][name] for node in by_time}
            sums[name] = total(read.values())
    return sums


def _energy(
    summary: dict[str, Any], sampler: SamplerClient, shared: frozenset[str]
) -> float | None:
    """The energy of a node's devices since the last edge, without those that others count."""
    devices = zip(sampler.uuids, summary["gpus"], strict=False)  # without a driver none is read
    own = [device["energy_j"] for uuid, device in devices if uuid not in shared]
    energy: float | None = 0.0 if summary["gpus"] and not own else total(own)
    return energy


def _energy_before(context: Context | None) -> float | None:
    """This node's part of the epoch in which the checkpoint was written."""
    if context is None or "samples" not in context.epoch_so_far:  # written between two epochs
        return 0.0
    measured = context.epoch_so_far.get("measured") or []
    by_rank = [(of or {}).get(Telemetry.name) for of in measured]
    if not context.other_processes:
        return by_rank[context.world.rank] if by_rank else None
    # The number of processes has changed: all of it counts once, on rank 0.
    known = [value for value in by_rank if value is not None]
    return (sum(known) if known else None) if context.is_rank0 else 0.0

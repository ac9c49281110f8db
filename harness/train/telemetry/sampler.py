"""The process that looks, once a second by default: python -m harness.train.telemetry.sampler.

Each line of its input is a question: "edge" is answered with a line of JSON, in words of window.py,
and another stretch begins; "peek" is answered likewise, and the stretch goes on;
"keep FILE" says where readings are kept, those before it included. It ends with the process that
started it.
"""

from __future__ import annotations

import json
import os
import selectors
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from harness.parent import end_with_parent
from harness.train.telemetry.gpus import Gpus
from harness.train.telemetry.node import Node
from harness.train.telemetry.window import Reading, summed_up

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

"""The process that looks, once a second by default: python -m harness.train.telemetry.sampler.

Asked with a line of JSON for each of its arguments, it answers with one, in words of window.py.
It ends with the process that started it. Every reading is also kept in a file.
"""

from __future__ import annotations

import json
import selectors
import sys
import time
from pathlib import Path
from typing import Any

from harness.parent import end_with_parent
from harness.train.telemetry.gpus import Gpus
from harness.train.telemetry.node import Node
from harness.train.telemetry.window import Reading, summed_up

KEPT = 100_000  # readings of one stretch: more than a day at one a second


class Sampler:
    """Readings since the last edge."""

    def __init__(self, gpus: Gpus, node: Node, file: Path | None) -> None:
        self.gpus, self.node = gpus, node
        self.raw = file.open("a", encoding="utf-8") if file is not None else None
        self.began_s = time.monotonic()
        self.readings: list[tuple[float, list[Reading], Reading]] = []
        self.look()

    def look(self) -> None:
        now_s = time.monotonic()
        self.readings.append((now_s, self.gpus.read(), self.node.read()))
        if len(self.readings) > KEPT:
            del self.readings[1]  # the first is where counters began
        if self.raw is not None:
            row = {"unix": round(time.time(), 3), "gpus": self.readings[-1][1],
                   "node": self.readings[-1][2]}  # fmt: skip
            self.raw.write(json.dumps(row) + "\n")
            self.raw.flush()

    def edge(self) -> dict[str, Any]:
        """What has been since the last edge; from here on another stretch begins."""
        self.look()
        first, last = self.readings[0], self.readings[-1]
        devices = range(len(first[1]))
        found = {
            "seconds": last[0] - first[0],
            "readings": len(self.readings) - 1,
            "gpus": [summed_up([gpus[n] for _, gpus, _ in self.readings]) for n in devices],
            "node": summed_up([node for _, _, node in self.readings]),
            "missing": self.gpus.missing | self.node.missing,
        }
        self.readings = [last]
        return found


def serve(sampler: Sampler, every_s: float) -> None:
    """Until the input ends: a reading every so often, and an answer to each line."""
    lines = selectors.DefaultSelector()
    lines.register(sys.stdin, selectors.EVENT_READ)
    next_s = time.monotonic() + every_s
    while True:
        if lines.select(max(0.0, next_s - time.monotonic())):
            if not sys.stdin.readline():
                return
            print(json.dumps(sampler.edge()), flush=True)
            continue
        sampler.look()
        # No catching up: what was late is late.
        next_s = max(next_s + every_s, time.monotonic())


def main(argv: list[str]) -> int:
    asked = json.loads(argv[0])
    end_with_parent(asked["parent"])
    gpus = Gpus(asked["uuids"])
    try:
        file = Path(asked["file"]) if asked["file"] else None
        serve(Sampler(gpus, Node(asked["interface"]), file), asked["every_s"])
    finally:
        gpus.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

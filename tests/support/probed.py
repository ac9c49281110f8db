"""A link to probe, on a clock of its own."""

from __future__ import annotations

from typing import Any

from harness.train.measure.link_probe import climb

MIB = 2**20


class Link:
    """A link on a clock of its own: `besides` is what an exchange costs and does not count."""

    def __init__(self, mbit: float, latency_s: float = 0.0, besides_s: float = 0.0) -> None:
        self.mbit, self.latency_s, self.besides_s = mbit, latency_s, besides_s
        self.now_s, self.sizes = 100.0, list[int]()

    def once(self, size: int) -> float:
        seconds = self.latency_s + size * 8 / self.mbit / 1e6
        self.sizes.append(size)
        self.now_s += seconds + self.besides_s
        return seconds

    def climb(self, target: int, budget_s: float, **more: Any) -> tuple[int, float] | None:
        return climb(self.once, target, self.now_s + budget_s, clock=lambda: self.now_s, **more)

"""How long processors worked for a run: the kernel's count of each rank's process."""

from __future__ import annotations

import os
from typing import Any

from accelerate.utils import gather_object

KINDS = ("user_s", "system_s")


def of_all_ranks(mine: dict[str, Any], size: int, run: Any = None) -> list[dict[str, Any]]:
    """What each tells, by rank; of a run of peers, what the others have told before."""
    if run is not None and run.peers is not None:
        return [mine, *run.other_peers]
    return list(gather_object([mine])) if size > 1 else [mine]


class CpuTime:
    """Processor time since this was made, of this process and of the others as far as they told.

    Reading it is one call of the system. What worker processes took is known when they have ended.
    """

    def __init__(self, ranks: int = 1) -> None:
        self.alone = ranks == 1
        self.restart()

    def restart(self) -> None:
        self.before = os.times()
        self.of_ranks: list[dict[str, Any]] | None = None

    def own(self) -> dict[str, float]:
        """Of this process and of its worker processes that have ended."""
        now, then = os.times(), self.before
        user_s = now.user + now.children_user - then.user - then.children_user
        system_s = now.system + now.children_system - then.system - then.children_system
        return {"user_s": round(user_s, 3), "system_s": round(system_s, 3)}  # counted in 0.01 s

    def heard(self, of_ranks: list[dict[str, Any]]) -> None:
        """What all ranks told when they met; of one process there is always something newer."""
        self.of_ranks = of_ranks

    def per_rank(self) -> dict[str, list[float] | None]:
        """Lists by rank, null before the ranks have told anything."""
        told = [self.own()] if self.alone else self.of_ranks
        return {f"{kind}_per_rank": [r[kind] for r in told] if told else None for kind in KINDS}

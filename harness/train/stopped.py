"""Ends ranks whose process is stopped: nobody else would notice the only rank of a run, or ranks
that have not met. The process that looks is another one: a launcher, the sampler of a run, or
another rank of the same torchrun.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from harness.core.process import is_stopped, ranks_beside, report_to_torchrun
from harness.core.settings import Settings

LOOK_EVERY_S = 0.5


def report(reason: str) -> None:
    print(f"harness: {reason}", file=sys.stderr, flush=True)


class StoppedRanks:
    """Ends ranks whose process is stopped, and keeps the reasons by process.

    report: is given the reason before the rank is ended. later_s: how much longer to wait, so that
    another process that looks, too, comes first. every_s: seconds between two looks.
    """

    def __init__(
        self,
        hang_after_s: float,
        report: Callable[[str], None] = report,
        later_s: float = 0.0,
        every_s: float = LOOK_EVERY_S,
    ) -> None:
        self.hang_after_s, self.report = hang_after_s, report
        self.later_s, self.every_s = later_s, every_s
        self.reasons: dict[int, str] = {}
        self.stopped_s: dict[int, float] = {}
        self.looked_s = time.monotonic()

    def look(self, workers: Sequence[Any], node: int) -> None:
        passed_s = time.monotonic() - self.looked_s
        if not self.hang_after_s or passed_s < self.every_s:
            return
        self.looked_s += passed_s
        for worker in workers:
            if not is_stopped(worker.id):
                self.stopped_s.pop(worker.id, None)
                continue
            # A longer pause means that this process was stopped, too: no time of the run.
            stopped_s = self.stopped_s.get(worker.id, 0.0) + min(passed_s, 2 * self.every_s)
            self.stopped_s[worker.id] = stopped_s
            # Ranks that have met find a stopped one themselves, with their stacks: they come first.
            limit_s = self.hang_after_s * (1 if worker.world_size == 1 else 2)
            if stopped_s > limit_s + self.later_s and worker.id not in self.reasons:
                who = f"rank {worker.global_rank} (node {node})"
                reason = f"{who} has not answered for {limit_s:g} s: its process is stopped"
                self.reasons[worker.id] = reason
                self.report(reason)
                with suppress(ProcessLookupError):
                    os.kill(worker.id, signal.SIGKILL)


class UntilMet:
    """Looks at the ranks that the same torchrun has started, until their watchdogs do.

    The ranks would wait for a stopped one without end. The lowest rank that still runs ends the
    stopped ranks and itself; torchrun ends the others.
    """

    def __init__(self, hang_after_s: float, rank: int, node: int) -> None:
        self.rank, self.node = rank, node
        self.ranks = StoppedRanks(hang_after_s, self._report)
        self.over = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """The ranks have met."""
        self.over.set()

    def _watch(self) -> None:
        while not self.over.wait(LOOK_EVERY_S):
            self.look()
            if self.ranks.reasons:
                os._exit(1)

    def look(self) -> None:
        pids = ranks_beside()
        first = min((rank for rank, pid in pids.items() if not is_stopped(pid)), default=None)
        if self.rank != first or is_stopped(os.getppid()):  # as Ctrl-Z stops all, for a while
            return
        others = [SimpleNamespace(id=pids[rank], global_rank=rank, world_size=1) for rank in pids]
        self.ranks.look(others, self.node)

    def _report(self, reason: str) -> None:
        report(reason)
        report(f"stacks of rank {self.rank} (node {self.node}):")
        faulthandler.dump_traceback(file=2)
        report_to_torchrun(f"failed: {reason}")


def hang_after_of(argv: Sequence[str]) -> float:
    """The script's --hang_after among torchrun's arguments; 0 where the script will refuse it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--hang_after", type=float, default=Settings.hang_after)
    try:
        written = [re.sub("^--hang-after(?=$|=)", "--hang_after", word) for word in argv]
        return float(parser.parse_known_args(written)[0].hang_after)
    except argparse.ArgumentError:
        return 0.0

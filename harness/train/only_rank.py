"""Ends the only rank of a torchrun launch if its process is stopped."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

from harness.core import attempts
from harness.core.process import is_stopped, report_to_torchrun
from harness.core.records import RunFolder
from harness.train.stopped import StoppedRanks


class OnlyRank:
    """The process that started this one; no other rank can notice that it is stopped.

    It is ended as a failure: on record, and in torchrun's words.
    """

    def __init__(
        self, pid: int, launcher: int, every_s: float, hang_after_s: float, folder: str,
        resumes: bool, stderr: int,
    ) -> None:  # fmt: skip
        self.launcher = launcher
        self.rank = SimpleNamespace(id=pid, global_rank=0, world_size=1)
        self.ranks = StoppedRanks(hang_after_s, self.record, every_s=every_s)
        self.folder, self.resumes = RunFolder(Path(folder)), resumes  # torchrun starts it again
        self.stderr, self.began_s = stderr, time.monotonic()

    def look(self) -> None:
        if not is_stopped(self.launcher):  # as Ctrl-Z stops both, for a while
            self.ranks.look([self.rank], 0)

    def record(self, reason: str) -> None:
        line, folder = f"failed: {reason}", self.folder
        with suppress(OSError):
            os.write(self.stderr, f"{line}; the record is in {folder.path}\n".encode())
        report_to_torchrun(line)
        if attempts.unended(folder) is None:
            return  # stopped before there was anything to record
        with suppress(OSError):
            folder.write_failure(
                {"rank": 0, "outcome": "failed", "reason": reason, "unix": time.time()}
            )
            if not self.resumes:
                wall_s = time.monotonic() - self.began_s
                attempts.end_from_outside(folder, "failed", reason, wall_s)
                metric = (folder.read_settings() or {}).get("best_metric")
                attempts.write_summary(folder, "failed", reason, metric)

"""A run that breaks off: every rank tells why, and rank 0 writes the record."""

from __future__ import annotations

import signal
import sys
import time
from typing import Any

import torch.distributed as dist

from harness import attempts
from harness.public import settings_of
from harness.records import SCHEMA, write_json
from harness.summary import write_summary
from harness.train.outcome import Stopped, outcome_of


def record_failure(run: Any, error: BaseException) -> None:
    outcome, reason = outcome_of(error)
    rank, many = run.world.rank, run.world.size > 1
    row = {"rank": rank, "outcome": outcome, "reason": reason, "unix": time.time()}
    if outcome != "interrupted":
        write_json(run.folder.failure(rank), row)
    begins_again = _begins_again(run, error)
    if not run.leader:
        if not begins_again:
            _let_leader_record(run)
        return
    # A rank whose peer is gone fails too, or is stopped, a moment after the one that began it.
    follows = isinstance(error, Stopped) or attempts.only_follows(str(error))
    first = _first_failure(run, wait_s=2.0 if follows and many else 0.0)
    if first is not None:
        outcome = first["outcome"]
        reason = first["reason"] + (f" (rank {first['rank']})" if many else "")
    attempts.end(
        run.folder, outcome, reason, run.wall_s, run.cpu.per_rank(), run.update, bool(run.attempt)
    )
    run.folder.progress.unlink(missing_ok=True)
    if begins_again:
        # What becomes of the run is not known yet.
        print(f"{outcome}: {reason}; torchrun may start it again", file=sys.stderr)
        return
    if not run.folder.settings.is_file():
        write_json(run.folder.settings, {"schema": SCHEMA, **settings_of(run.settings)})
    write_summary(run.folder, outcome, reason, run.settings.best_metric)
    print(f"{outcome}: {reason}; the record is in {run.folder.path}", file=sys.stderr)


def _begins_again(run: Any, error: BaseException) -> bool:
    """Whether torchrun is about to go on with the run, as far as a process can know.

    It stops the others with SIGTERM when a node joins or leaves, which costs no restart. Whoever
    stops torchrun itself with SIGTERM sees an attempt that has ended and a run without outcome.
    """
    if run.launch is None:
        return False
    if isinstance(error, Stopped):
        return error.signum == signal.SIGTERM
    return run.launch.restarts_left > 0


def _let_leader_record(run: Any) -> None:
    """Rank 0 may be waiting for this one: let it see that it is gone, and write the record."""
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()
    until = time.monotonic() + 5
    while time.monotonic() < until and not run.folder.summary.is_file():
        time.sleep(0.05)


def _first_failure(run: Any, wait_s: float) -> dict[str, Any] | None:
    """The failure of another rank that came first, if one comes within this time."""
    until = time.monotonic() + wait_s
    while True:
        first = attempts.first_failure(run.folder, since=time.time() - run.wall_s)
        others = first is not None and first["rank"] != run.world.rank
        if others or time.monotonic() >= until:
            return first
        time.sleep(0.05)

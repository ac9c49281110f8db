"""Where the time of a run went, in parts that add up to all of it."""

from __future__ import annotations

import math
from typing import Any

from harness.read.sweep_runs import SweepRun
from harness.read.sweeps import is_number
from harness.records import RunFolder, read_rows

COMPUTE, EXCHANGE, STRAGGLERS = "computing", "exchanging", "waiting for slower ranks"
DATA, TRAINING, EVALUATION, SAVING, REST = (
    "waiting for data", "training, not told apart", "evaluation", "saving", "start, link and rest"
)  # fmt: skip
# In the order in which they are stacked.
PARTS = (COMPUTE, EXCHANGE, STRAGGLERS, DATA, TRAINING, EVALUATION, SAVING, REST)


def parts_of_time(run: SweepRun, folder: RunFolder) -> dict[str, float]:
    """Seconds of each part that is known, means over the ranks; empty where no time is.

    What ranks tell of their timed steps (compute_s, comm_exposed_s and of it comm_wait_s) is taken
    out of the time of training; what is left of that is not told apart.
    """
    wall_s = run.measures.get("wall_s")
    train_s = _sum(run.epochs, "epoch_time_s")
    if wall_s is None or train_s is None:
        return {}
    found = _of_training(folder)
    exposed, waited = found.get("comm_exposed_s"), found.get("comm_wait_s", 0.0)
    parts = {
        COMPUTE: found.get("compute_s"),
        EXCHANGE: None if exposed is None else exposed - waited,
        STRAGGLERS: None if exposed is None else found.get("comm_wait_s"),
        DATA: found.get("data_wait_s"),
    }
    known = {name: value for name, value in parts.items() if value is not None}
    known[TRAINING] = train_s - math.fsum(known.values())
    known[EVALUATION] = run.measures.get("eval_time_s", 0.0)
    # Of the last attempt only: what earlier ones wrote is in the rest.
    known[SAVING] = run.measures.get("save_time_s", 0.0)
    known[REST] = wall_s - train_s - known[EVALUATION] - known[SAVING]
    # Clocks of several ranks differ a little: nothing takes less than no time.
    return {name: max(known[name], 0.0) for name in PARTS if name in known}


def _of_training(folder: RunFolder) -> dict[str, float]:
    """Of each time that every rank tells for every epoch, the mean over the ranks."""
    ranks = [read_rows(file)[0] for file in sorted((folder.path / "ranks").glob("rank_*.jsonl"))]
    found = {}
    for name in ("compute_s", "comm_exposed_s", "comm_wait_s", "data_wait_s"):
        sums = [_sum(rows, name) for rows in ranks]
        known = [value for value in sums if value is not None]
        if known and len(known) == len(ranks):
            found[name] = math.fsum(known) / len(known)
    return found


def _sum(rows: Any, name: str) -> float | None:
    """None where one is unknown: a sum with something unknown in it is unknown."""
    values = [row.get(name) for row in rows]
    return math.fsum(values) if values and all(map(is_number, values)) else None

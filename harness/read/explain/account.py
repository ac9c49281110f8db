"""What the time of a run was spent on, an update at a time: parts that add up to all of it.

What is inside a step is that of one rank, the one in the middle (the lower of two): its computing,
its waiting for data, the exchange, and its waiting for slower ranks make up the step.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.core.records import RunFolder, read_rows
from harness.core.settings import UserError
from harness.read.records.loading import is_number
from harness.read.records.runs import Run
from harness.read.statistics import Spread, spread

COMPUTE, DATA, EXCHANGE, STRAGGLERS, UNTOLD = (
    "computing", "waiting for data", "exchanging", "waiting for slower ranks", "not told apart"
)  # fmt: skip


FIRST, EVALUATION, SAVING, REST = "first steps", "evaluation", "saving", "start and rest"


# In the order in which they are shown. Those of a step, then what is beside the timed steps.
OF_STEP = (COMPUTE, DATA, EXCHANGE, STRAGGLERS, UNTOLD)


BESIDE = (FIRST, EVALUATION, SAVING, REST)


PARTS = (*OF_STEP, *BESIDE)


@dataclass(frozen=True)
class Slowest:
    """The rank that the one in the middle waits for: how much longer it takes for its own part."""

    rank: int
    more_s: float  # an update, computing and waiting for data
    of_data_s: float  # of that, waiting for data


@dataclass(frozen=True)
class Account:
    """Of one run, or the means over several that differ in their seed alone."""

    runs: int
    devices: int
    samples: float  # of an update, over all devices
    updates: float
    rate: Spread  # samples/s of the timed steps
    step_s: float
    parts: dict[str, float | None]  # seconds an update; None: unknown
    spreads: dict[str, float | None]  # standard deviations of them, over the runs
    padding: float | None  # share of computing that padding takes
    evaluation_s: float | None  # of a sample on one device
    slowest: Slowest | None

    @property
    def per_device(self) -> float:
        """Samples of an update that each device has."""
        return self.samples / self.devices

    @property
    def at_work_s(self) -> float:
        """Seconds an update without the start, which does not grow with the run."""
        return math.fsum(v for n, v in self.parts.items() if v is not None and n != REST)


def account_of(run: Run) -> Account:
    """From the rows of one finished run."""
    folder, rows = run.directory, list(run.epochs)
    measures = run.measures
    devices = run.devices
    steps, timed_s = total(rows, "timed_steps"), total(rows, "timed_s")
    updates, samples = measures.get("updates"), total(rows, "timed_samples")
    if run.imported:
        raise UserError(f"{folder.path} is imported: its source tells nothing of single steps")
    if not steps or not timed_s or not samples or not updates or not devices:
        raise UserError(f"{folder.path} has no timed steps: measure a longer run, or more epochs")
    step_s = timed_s / steps
    of_step, slowest = _of_step(run, folder, rows, step_s, steps)
    padding = _padding(folder, rows)
    eval_samples, eval_s = total(rows, "eval_samples"), total(rows, "eval_time_s")
    parts = of_step | _beside(rows, measures, step_s, updates)
    return Account(
        runs=1,
        devices=devices,
        samples=samples / steps,
        updates=updates,
        rate=spread([samples / timed_s]),
        step_s=step_s,
        parts=parts,
        spreads=dict.fromkeys(parts),
        padding=padding,
        evaluation_s=devices * eval_s / eval_samples if eval_samples and eval_s else None,
        slowest=slowest,
    )


def _of_step(
    run: Run, folder: RunFolder, rows: list[dict[str, Any]], step_s: float, steps: float
) -> tuple[dict[str, float | None], Slowest | None]:
    """The parts of a step; where ranks do not tell them, data alone and what the probe found."""
    parts: dict[str, float | None] = dict.fromkeys(OF_STEP)
    slowest = None
    told = _told_by_ranks(folder, len(rows))
    alone = len(told) == 1 and "compute_s" in told[0]
    if alone or (told and all("comm_wait_s" in rank for rank in told)):
        computing = [rank["compute_s"] / steps for rank in told]
        exposed = [rank.get("comm_exposed_s", 0.0) / steps for rank in told]
        waited = [rank.get("comm_wait_s", 0.0) / steps for rank in told]
        # The rest of each rank's steps, which are as long as those of the first.
        data = [max(step_s - c - e, 0.0) for c, e in zip(computing, exposed, strict=True)]
        own = [c + d for c, d in zip(computing, data, strict=True)]
        middle, last = own.index(statistics.median_low(own)), own.index(max(own))
        parts |= {COMPUTE: computing[middle], DATA: data[middle]}
        if alone:
            parts |= {EXCHANGE: 0.0, STRAGGLERS: 0.0}
        else:
            parts |= {EXCHANGE: exposed[middle] - waited[middle], STRAGGLERS: waited[middle]}
            more = own[last] - own[middle], data[last] - data[middle]
            slowest = Slowest(last, *more)
    else:
        parts[DATA] = _data_wait(folder, rows, step_s)
        share = run.measures.get("comm_share")
        if share is not None:
            parts[EXCHANGE] = max(share, 0.0) * step_s
    left = step_s - math.fsum(value for value in parts.values() if value is not None)
    if parts[COMPUTE] is not None:
        parts[UNTOLD] = 0.0
    elif run.devices == 1 and run.identity["strategy"] != "hivemind":
        # There is nothing else.
        parts |= {COMPUTE: max(left, 0.0), EXCHANGE: 0.0, STRAGGLERS: 0.0, UNTOLD: 0.0}
    else:
        parts[UNTOLD] = max(left, 0.0)
    return parts, slowest


def _told_by_ranks(folder: RunFolder, epochs: int) -> list[dict[str, float]]:
    """For each rank the sums over the epochs of what it tells of its timed steps in all of them."""
    files = (folder.path / "ranks").glob("rank_*.jsonl")
    found = []
    for file in sorted(files, key=lambda f: int(f.stem.removeprefix("rank_"))):
        rows, _ = read_rows(file)
        names = ("compute_s", "comm_exposed_s", "comm_wait_s")
        sums = {name: total(rows, name) for name in names if len(rows) == epochs}
        found.append({name: value for name, value in sums.items() if value is not None})
    return found


def _data_wait(folder: RunFolder, rows: list[dict[str, Any]], step_s: float) -> float | None:
    """Seconds a step, by rank 0's share of the whole epochs."""
    known = [row for row in rows if is_number(row.get("data_wait_share"))]
    whole_s = total(rows, "epoch_time_s")
    if not whole_s or len(known) < len(rows):
        return None
    waited_s = math.fsum(row["data_wait_share"] * row["epoch_time_s"] for row in rows)
    return step_s * waited_s / whole_s


def _beside(
    rows: list[dict[str, Any]], measures: dict[str, float], step_s: float, updates: float
) -> dict[str, float | None]:
    """Seconds an update of what is in no timed step. Saving is that of the last attempt."""
    train_s, wall_s = total(rows, "epoch_time_s"), measures.get("wall_s")
    parts: dict[str, float | None] = {
        FIRST: None if train_s is None else max(train_s - step_s * updates, 0.0),
        EVALUATION: measures.get("eval_time_s"),
        SAVING: measures.get("save_time_s"),
    }
    known = math.fsum(value for value in parts.values() if value is not None)
    parts[REST] = None if wall_s is None else max(wall_s - step_s * updates - known, 0.0)
    return {name: None if value is None else value / updates for name, value in parts.items()}


def _padding(folder: RunFolder, rows: list[dict[str, Any]]) -> float | None:
    """By operations where these are known, else by tokens; None for images."""
    if any(not is_number(row.get("padding_share")) for row in rows):
        return None
    pairs = [(r.get("tflops_per_s"), r.get("tflops_per_s_without_padding")) for r in rows]
    weights = [row["timed_s"] for row in rows]
    if all(is_number(whole) and is_number(own) for whole, own in pairs):
        whole_tflop = math.fsum(s * whole for s, (whole, _) in zip(weights, pairs, strict=True))
        own_tflop = math.fsum(s * own for s, (_, own) in zip(weights, pairs, strict=True))
        return 1 - own_tflop / whole_tflop if whole_tflop else None
    shares = (s * row["padding_share"] for s, row in zip(weights, rows, strict=True))
    return math.fsum(shares) / math.fsum(weights)


def together(accounts: Sequence[Account]) -> Account:
    """The means; a part that one run does not know is unknown."""
    first = accounts[0]
    parts = _told_alike(accounts)
    values = {name: _known([told[name] for told in parts]) for name in PARTS}
    spreads = {name: spread(found) for name, found in values.items()}
    evaluation = _known([account.evaluation_s for account in accounts])
    padding = _known([account.padding for account in accounts])
    return Account(
        runs=len(accounts),
        devices=first.devices,
        samples=statistics.fmean(account.samples for account in accounts),
        updates=statistics.fmean(account.updates for account in accounts),
        rate=spread([value for a in accounts if (value := a.rate.mean) is not None], rate=True),
        step_s=statistics.fmean(account.step_s for account in accounts),
        parts={name: found.mean for name, found in spreads.items()},
        spreads={name: found.sd for name, found in spreads.items()},
        padding=spread(padding).mean,
        evaluation_s=spread(evaluation).mean,
        slowest=_same_rank([account.slowest for account in accounts]),
    )


def _told_alike(accounts: Sequence[Account]) -> list[dict[str, float | None]]:
    """What one run does not tell apart is told apart of none, so that means add up as well."""
    found = [dict(account.parts) for account in accounts]
    for names, rest in ((OF_STEP, UNTOLD), (BESIDE, REST)):
        unknown = [n for n in names if n != rest and any(parts[n] is None for parts in found)]
        for parts in found:
            left = parts[rest]
            if left is not None:
                parts[rest] = left + math.fsum(parts[name] or 0.0 for name in unknown)
            parts.update(dict.fromkeys(unknown))
    return found


def _known(values: list[float | None]) -> list[float]:
    """All of them, or none where one is unknown."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []


def _same_rank(found: list[Slowest | None]) -> Slowest | None:
    """A rank that is the slowest in most of the runs is slow, one that is so once is not."""
    told = [slowest for slowest in found if slowest is not None]
    if not told:
        return None
    rank, count = Counter(slowest.rank for slowest in told).most_common(1)[0]
    if count <= len(found) / 2:
        return None
    of_it = [slowest for slowest in told if slowest.rank == rank]
    return Slowest(
        rank,
        statistics.fmean(slowest.more_s for slowest in of_it),
        statistics.fmean(slowest.of_data_s for slowest in of_it),
    )


def total(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    """Over all epochs; unknown where one is."""
    values = [row.get(name) for row in rows]
    return math.fsum(v for v in values if is_number(v)) if all(map(is_number, values)) else None

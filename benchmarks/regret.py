"""How good plans are: each case of the published slow links is planned without any run of its own,
and the choice compared with the best that was measured there.

    python -m benchmarks.regret                      all (link, nodes), without that link
    python -m benchmarks.regret --without delay      likewise, without any link of that delay

Nothing is run. First comes how far off the predicted steps of all published groups on several nodes
are, each predicted from runs of one machine. The regret of a choice is how much longer it took than
the best of the same effective batch, both as measured: mean wall time to the target over the seeds.

The runs took the exchange that `auto` chose over their link, so that a choice is one of strategy,
compression and period. Errors are those of predictions with the exchange of the runs.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from benchmarks.results import markdown, off, parser_of
from harness.core.collectives import Wire, wire_of
from harness.core.links import plain_link
from harness.core.settings import UserError
from harness.read.predict.candidates import Candidate, candidates
from harness.read.predict.cases import workloads_of
from harness.read.predict.facts import Overrides, shape_of
from harness.read.predict.fitting import all_reduces_of, fit_on, steady_wire
from harness.read.predict.model import EXPOSED
from harness.read.predict.scenario import Scenario
from harness.read.records.groups import Group
from harness.read.records.runs import Run, Target
from harness.read.records.selection import read_selected
from harness.read.records.sweeps import read_results

RECORDS = "outputs/published:script=vit,dataset=embedded:digits"
TARGET = Target("accuracy", 0.9)
HEADINGS = ("nodes", "link", "chosen", "predicted s (95 %)", "measured s", "best", "best s",
            "regret")  # fmt: skip
BATCH = 16  # of slow_links.yaml, whose links can be left out one by one


class Case(NamedTuple):
    nodes: int
    link: str
    chosen: Candidate
    measured_s: dict[str, float]  # way -> mean wall time to the target, of those that reached it
    held: list[bool]  # per candidate with an interval: does it hold the measured time?
    errors: list[float]  # of each candidate: predicted / measured - 1

    @property
    def regret(self) -> float:
        """The regret of the choice; infinite where it did not reach the target here."""
        took_s = self.measured_s.get(way_of(self.chosen.plan), math.inf)
        return took_s / min(self.measured_s.values()) - 1


@cache
def steps_text() -> str:
    workloads, _ = workloads_of(read_results(RECORDS.partition(":")[0]))
    found = [case for workload in workloads for case in workload.cases]
    errors = sorted(abs(case.error) for case in found)
    ends = [(case.prediction.low_s, case.mean_s, case.prediction.high_s) for case in found]
    held = [low <= mean <= high for low, mean, high in ends if low is not None and high is not None]
    return f"steps of {len(errors)} groups {off(errors)}; {sum(held)} of {len(held)} intervals hold"


def wire_over(run: Run) -> Wire | None:
    return steady_wire(run.measured_link)


def cases(runs: Sequence[Run], without_delay: bool) -> Iterator[Case]:
    kinds = {(shape_of(run).nodes, str(run.identity["link"])) for run in runs}
    for nodes, link in sorted(kind for kind in kinds if kind[0] > 1):
        wire = wire_of(plain_link(link))

        def is_left_out(run: Run, wire: Wire = wire) -> bool:
            over = wire_over(run)
            if over is None or shape_of(run).nodes == 1:
                return False
            return over == wire or (without_delay and over.delay_s == wire.delay_s)

        basis = [run for run in runs if not is_left_out(run)]
        there = [r for r in runs if shape_of(r).nodes == nodes and wire_over(r) == wire]
        try:
            fitted = fit_on(RECORDS, basis, Overrides(), all_reduces_of(basis))
            found = candidates(fitted, basis, [nodes], wire, TARGET, emulated=True).reached
        except UserError as error:
            print(f"{nodes} nodes, {link}: {error}")
            continue
        times = [(way_of(each.plan), took(there, each.plan)) for each in found]
        measured = {way: s for way, s in times if s is not None and math.isfinite(s)}
        as_run = [each for each in found if each.plan.exchange in exchanges(there, each.plan)]
        pairs = [(each, measured[way_of(each.plan)]) for each in as_run
                 if way_of(each.plan) in measured]  # fmt: skip
        yield Case(
            nodes, link, found[0], measured,
            [e.interval[0] <= s <= e.interval[1] for e, s in pairs if e.interval is not None],
            [each.wall_s / seconds - 1 for each, seconds in pairs],
        )  # fmt: skip


def way_of(plan: Scenario) -> str:
    """The strategy as tables name it, without its exchange."""
    return replace(plan, exchange="backend").label


def alike(there: Sequence[Run], plan: Scenario) -> list[Run]:
    """The runs with the strategy, compression and period of a plan."""
    return [
        run for run in there
        if run.identity["strategy"] == plan.strategy and run.identity["compress"] == plan.compress
        and (run.identity["sync_every"] or plan.sync_every) == plan.sync_every
    ]  # fmt: skip


def exchanges(there: Sequence[Run], plan: Scenario) -> set[str]:
    return {run.identity["exchange"] for run in alike(there, plan)}


def took(there: Sequence[Run], plan: Scenario) -> float | None:
    """The mean time over the runs that are like a plan; infinite where one missed. Where `auto`
    chose one exchange for all of them, a choice with another exchange took as long.
    """
    runs, ways = alike(there, plan), exchanges(there, plan)
    if len(ways) > 1:
        runs = [run for run in runs if run.identity["exchange"] == plan.exchange]
    counted = Group(tuple(runs)).measured("tta_wall_s")
    return statistics.mean(r.measures["tta_wall_s"] for r in counted) if counted else None


def main(argv: list[str]) -> int:
    parser = parser_of("regret", __doc__, out=False)
    parser.add_argument("--without", choices=("link", "delay"), default="link")
    options = parser.parse_args(argv)
    runs = [
        run for run in read_selected(RECORDS, TARGET).runs
        if shape_of(run).nodes == 1
        or (run.identity["per_gpu_batch"] == BATCH and "tta_wall_s" in run.measures
            and run.launch.get("sweep") == "slow_links-tiny")
    ]  # fmt: skip
    found = list(cases([r for r in runs if r.identity["strategy"] in (*EXPOSED, "single")],
                       options.without == "delay"))  # fmt: skip
    rows = []
    for case in found:
        best = min(case.measured_s, key=lambda way: case.measured_s[way])
        chosen, ends = case.chosen, case.chosen.interval or (float("nan"), float("nan"))
        took_s = case.measured_s.get(way_of(chosen.plan), math.inf)
        rows.append((
            str(case.nodes), case.link, chosen.plan.label,
            f"{chosen.wall_s:.1f} ({ends[0]:.1f} to {ends[1]:.1f})", f"{took_s:.1f}",
            best, f"{case.measured_s[best]:.1f}", f"{case.regret:.1%}",
        ))  # fmt: skip
    print(steps_text(), "\n")
    print(markdown("rllrrlrr", HEADINGS, rows))
    near = sum(case.regret <= 0.1 for case in found)
    errors = sorted(abs(error) for case in found for error in case.errors)
    held = [each for case in found for each in case.held]
    print(
        f"\n{near} of {len(found)} choices within 10 % of the best; wall times of {len(errors)} "
        f"trainings {off(errors)}; {sum(held)} of {len(held)} intervals hold"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

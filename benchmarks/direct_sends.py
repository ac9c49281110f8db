"""How far predictions of direct sends are from the published runs that sent directly.

    python -m benchmarks.direct_sends

Nothing is run. First come runs that are predicted from runs of one process, as usual. For those of
start_together-tiny, on four nodes, no runs of one process from the same days are published: the
computing time there is the median step of DiLoCo's epochs apart, of groups other than the predicted
one, because only one update in ten or fifty of these exchanges anything.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence

from benchmarks.results import markdown
from harness.core.collectives import GLOO
from harness.core.strategies import SENT_DIRECTLY
from harness.read.predict.cases import PredictedGroup, as_timed, scenario_of, workloads_of
from harness.read.predict.computing import crowd, fit_line
from harness.read.predict.fitting import own_cores_of
from harness.read.predict.model import EXCHANGE, Model, predict
from harness.read.predict.scenario import APART
from harness.read.records.groups import Group
from harness.read.records.sweeps import read_results, read_sweep

RECORDS = "outputs/published"
FOUR = "outputs/published/exchange/sweeps/start_together-tiny"
HEADINGS = ("set-up", "link", "strategy", "runs", "step, ms", "predicted", "off", "of it exchange")


def cells(case: PredictedGroup) -> tuple[str, ...]:
    found = case.prediction
    return (
        str(found.plan.shape), str(case.runs[0].identity["link"]), scenario_of(case.runs).label,
        str(len(case.runs)),
        f"{1e3 * case.mean_s:.1f}", f"{1e3 * found.step_s:.1f}",
        f"{case.error:+.1%}".replace("%", " %"), f"{1e3 * found.parts[EXCHANGE]:.1f}",
    )  # fmt: skip


def from_one_process() -> Iterator[PredictedGroup]:
    workloads, _ = workloads_of(read_results(RECORDS))
    for workload in workloads:
        yield from (c for c in workload.cases if c.prediction.plan.exchange in SENT_DIRECTLY)


def start_together() -> Iterator[PredictedGroup]:
    groups = [group for group in read_sweep(FOUR).groups if group.finished]
    for group in groups:
        runs = tuple(group.measured("epoch_time_s"))
        first = runs[0]
        alone_s = computing_s([other for other in groups if other is not group])
        plan = as_timed(scenario_of(runs), first)
        cores = own_cores_of(first)
        _, turns = crowd(plan.shape.ranks, cores)
        # All four nodes computed in turns in this measurement: no sharing is added.
        line = fit_line([(plan.batch, alone_s / turns)])
        size = first.observed["trained_bytes"]
        model = Model(line, 0.0, None, 0.0, size, GLOO, own_cores=cores)
        yield PredictedGroup(group, runs, predict(model, plan))


def computing_s(groups: Sequence[Group]) -> float:
    apart = [run for group in groups for run in group.measured("epoch_time_s")
             if run.identity["strategy"] in APART]  # fmt: skip
    # Updates of the first epoch may have been made together.
    return statistics.median(float(row["step_time_median_s"] or 0.0)
                             for run in apart for row in run.epochs[1:])  # fmt: skip


def table() -> str:
    return markdown("lllrrrrr", HEADINGS, map(cells, (*from_one_process(), *start_together())))


def main(argv: Sequence[str]) -> int:
    if argv:
        print("usage: python -m benchmarks.direct_sends", file=sys.stderr)
        return 2
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Predictions that are written down before their runs, and their comparison with these runs.

    python -m benchmarks.prediction_fresh --write                experiments/prediction_fresh.csv
    python -m benchmarks.prediction_fresh --basis DIR --table FILE --write
    python -m benchmarks.prediction_fresh --measured DIR [--table FILE]
    python -m benchmarks.prediction_fresh --sweep prediction_same_hour ...     of another sweep

Predictions are made from runs of one machine, published ones or those below DIR, and from what
published runs say of the bytes that a compression sends; with published runs also from their
all-reduces over other links. No step over a link is fitted on. A table that exists is not written
again. --measured compares a table with the runs below DIR.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.results import off, parser_of
from harness.core.collectives import Shape, wire_of
from harness.core.links import Link
from harness.core.settings import UserError
from harness.launch.plan import Job, plan
from harness.launch.sweepfile import load
from harness.read.predict.facts import Overrides, step_s
from harness.read.predict.fitting import Fitted, fit_on, fit_records
from harness.read.predict.model import predict
from harness.read.predict.scenario import Scenario
from harness.read.records.runs import Run
from harness.read.records.selection import read_selected
from logcallback import WARMUP_STEPS

ROOT = Path(__file__).resolve().parents[1]
BASIS = f"{ROOT}/outputs/published:script=vit,dataset=embedded:digits"
SWEEPS = ROOT / "experiments"
SWEEP = "prediction_fresh"
# The settings that the runs of a case share; and the predicted numbers, in milliseconds.
KEY = ("setup", "link", "strategy", "compress", "sync_every", "exchange")
STEP = ("step_ms", "low_ms", "high_ms")


def fitted_on(basis: str | None) -> Fitted:
    published = fit_records(BASIS, Overrides())
    if basis is None:
        return published
    model, runs = published.model, read_selected(basis, None).runs
    here = fit_on(basis, runs, Overrides(), ())
    return replace(here, model=replace(here.model, payloads=model.payloads))


def predictions(fitted: Fitted, sweep: str) -> Iterator[dict[str, str]]:
    jobs = plan(load(SWEEPS / f"{sweep}.yaml", tiny=True))
    for job in {key(job): job for job in jobs if job.nodes > 1}.values():
        assert isinstance(job.link, Link)
        own, samples = job.settings, job.settings.per_gpu_batch or 0
        updates = fitted.updates_of(samples * job.nodes) or 0
        scenario = Scenario(
            Shape(job.nodes), samples, wire_of(job.link), str(own.strategy), own.compress,
            own.sync_every or 1, emulated=True, exchange=own.exchange, epoch_updates=updates,
            updates=updates * int(own.epochs or 1),
            untimed=max(1, min(WARMUP_STEPS, updates // 5)),
        )  # fmt: skip
        try:
            found = predict(fitted.model, scenario)
        except UserError as error:
            print(f"not predicted: {' '.join(key(job))}: {error}")
            continue
        times = (found.step_s, found.low_s, found.high_s)
        texts = ["" if each is None else f"{1e3 * each:.2f}" for each in times]
        yield dict(zip((*KEY, *STEP), (*key(job), *texts), strict=True))


def key(job: Job) -> tuple[str, ...]:
    own = job.settings
    every = str(own.sync_every or 1)
    return (
        f"{job.nodes}_{job.processes}",
        str(job.link),
        str(own.strategy),
        own.compress,
        every,
        own.exchange,
    )


def key_of(run: Run) -> tuple[str, ...]:
    named = {name: run.identity.get(name) for name in KEY}
    setup = "_".join(str(named["setup"]).split("_")[:2])
    every = str(named["sync_every"] or 1)
    return (setup, *(str(named[n]) for n in ("link", "strategy", "compress")), every,
            str(named["exchange"]))  # fmt: skip


def compared(folder: str, file: Path) -> int:
    measured: dict[tuple[str, ...], list[float]] = {}
    for run in read_selected(folder, None).runs:
        if (found := step_s(run, Overrides())) is not None:
            measured.setdefault(key_of(run), []).append(1e3 * found)
    with file.open(newline="") as content:
        rows = list(csv.DictReader(content))
    errors, held = [], []
    for row in rows:
        steps = measured.get(tuple(row[name] for name in KEY))
        if not steps:
            continue
        mean = statistics.mean(steps)
        errors.append(float(row["step_ms"]) / mean - 1)
        if row["low_ms"]:
            held.append(float(row["low_ms"]) <= mean <= float(row["high_ms"]))
        case = " ".join(row[name] for name in KEY)
        print(f"{case}: {mean:.1f} ms, predicted {row['step_ms']} ms ({errors[-1]:+.1%})")
    sizes = sorted(map(abs, errors))
    if not sizes:
        print(f"{folder}: no run of the {len(rows)} cases")
        return 1
    intervals = f"{sum(held)} of {len(held)} intervals hold"
    print(f"{len(sizes)} of {len(rows)} cases: {off(sizes)}; {intervals}")
    return 0


def main(argv: list[str]) -> int:
    parser = parser_of("prediction_fresh", __doc__, out=False)
    parser.add_argument("--sweep", default=SWEEP, help=f"name of a sweep file ({SWEEP})")
    parser.add_argument("--table", type=Path, help="of predictions (that beside the sweep file)")
    parser.add_argument("--basis", metavar="DIR", help="runs of one machine (published ones)")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--measured", metavar="DIR", help="the records of the runs")
    options = parser.parse_args(argv)
    table: Path = options.table or SWEEPS / f"{options.sweep}.csv"
    if options.measured:
        return compared(options.measured, table)
    if table.exists():
        print(f"{table.name} is there: predictions are not changed once they are made")
        return 1
    rows = list(predictions(fitted_on(options.basis), options.sweep))
    if options.write:
        with table.open("w", newline="") as file:
            writer = csv.DictWriter(file, (*KEY, *STEP), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    for row in rows:
        print(" ".join(row.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

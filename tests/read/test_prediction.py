"""The model of a step: worked out by hand, planted parameters recovered, limits kept."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.core.collectives import GLOO, NCCL, Shape, Wire, allreduce, wire_of
from harness.core.links import plain_link
from harness.core.settings import UserError
from harness.read.predict.cases import workloads_of
from harness.read.predict.command import curve_table
from harness.read.predict.computing import crowd, fit_line, fit_sharing
from harness.read.predict.exchange import TRAINING_FREEDOM, TRAINING_SPREAD, Reduction, correction
from harness.read.predict.facts import Overrides, step_s
from harness.read.predict.fitting import all_reduces_of
from harness.read.predict.model import (
    COMPUTE,
    EXCHANGE,
    SHARING,
    Model,
    below_half_efficiency,
    over_nodes,
    predict,
)
from harness.read.predict.scenario import Scenario
from harness.read.records.runs import Run
from harness.read.records.selection import read_selected
from harness.read.records.sweeps import read_results
from harness.read.statistics import welch_half
from tests.support.predicted import FAR, LINE, MB, MODEL


def test_planted_lines_are_found() -> None:
    assert (LINE.fixed_s, LINE.per_sample_s) == pytest.approx((0.010, 0.001))
    assert LINE.spread == pytest.approx(0, abs=1e-9) and LINE.freedom == 2
    random = np.random.default_rng(1)
    noisy = [(b, (0.01 + 0.001 * b) * f) for b in (4, 8, 16, 32, 64) * 20
             for f in [1 + 0.03 * random.standard_normal()]]  # fmt: skip
    prediction = fit_line(noisy)
    assert (prediction.fixed_s, prediction.per_sample_s) == pytest.approx((0.01, 0.001), rel=0.05)
    assert prediction.spread == pytest.approx(0.03, rel=0.2)


def test_a_line_has_no_part_below_zero() -> None:
    falling = fit_line([(8, 0.02), (16, 0.018)])
    assert falling.per_sample_s == 0 and 0.018 < falling.fixed_s < 0.02
    steep = fit_line([(8, 0.008), (16, 0.020)])
    assert steep.fixed_s == 0 and 0.001 < steep.per_sample_s < 0.00125


def test_one_batch_says_nothing_of_others() -> None:
    line = fit_line([(16, 0.02), (16, 0.03)])
    assert line.step_s(16) == 0.025 and line.knows(16) and not line.knows(32)
    assert line.backward_s(16) == pytest.approx(0.025 * 2 / 3)
    assert fit_line([(16, 0.02)]).spread is None
    with pytest.raises(UserError, match=r"only batch 16 was measured.*--per_gpu_batch 32"):
        predict(replace(MODEL, line=line), Scenario(Shape(1), 32))


def test_the_error_of_a_line_by_hand() -> None:
    """Of one batch that of a mean; two batches determine a line, each its own point of it. Between
    them it is known better than at either, beyond them worse.
    """
    one = fit_line([(16, 0.02), (16, 0.03), (16, 0.025), (16, 0.025)])
    assert one.spread is not None and one.spread_at(16) == pytest.approx(one.spread * 1.25**0.5)
    two = fit_line([(8, 0.0181), (8, 0.0179), (32, 0.0419), (32, 0.0421)])
    assert two.spread is not None
    for batch in (8, 32):
        assert two.spread_at(batch) == pytest.approx(two.spread * 1.5**0.5, rel=1e-3)
    between, beyond = two.spread_at(20), two.spread_at(64)
    assert between is not None and beyond is not None
    assert two.spread < between < two.spread * 1.5**0.5 < beyond
    assert fit_line([(16, 0.02)]).spread_at(16) is None


def test_sharing_by_hand() -> None:
    assert fit_sharing({2: [1.1, 1.3]}) == pytest.approx(0.2)
    # By least squares: (1 x 0.1 + 3 x 0.9) / (1 + 9).
    assert fit_sharing({2: [1.1], 4: [1.9]}) == pytest.approx(0.28)
    assert fit_sharing({2: [0.9]}) == 0 and fit_sharing({}) == 0


def test_processes_beyond_the_cores_take_turns() -> None:
    """Up to two may have cores of their own also where one alone uses all of them."""
    counts = (1, 2, 3, 4)
    assert [crowd(n, 2) for n in counts] == [(1, 1.0), (2, 1.0), (2, 1.5), (2, 2.0)]
    assert [crowd(n, 1) for n in counts] == [crowd(n, 2) for n in counts]
    assert crowd(4, 8) == (4, 1.0) == crowd(4, None)
    model = replace(MODEL, sharing=0.1, sharing_spread=0.01, sharing_freedom=9, shared_by=4)
    four = Scenario(Shape(1, 4), 16, Wire())
    steps = [predict(replace(model, own_cores=n), four) for n in (2, 3, None)]
    assert [p.parts[COMPUTE] + p.parts[SHARING] for p in steps] == pytest.approx(
        [0.026 * 1.1 * 2, 0.026 * 1.2 * 4 / 3, 0.026 * 1.3]
    )


def test_a_step_by_hand() -> None:
    """Two nodes, 4 MB: 1 MiB is ready first, the rest at the end of 10.67 ms of backward pass."""
    prediction = predict(MODEL, Scenario(Shape(2), 16, FAR))
    first, rest = 2**20, 4 * MB - 2**20
    backward_s = 0.016 * 2 / 3
    first_ready_s = backward_s * first / (4 * MB)
    first_sent_s = first_ready_s + first / 25e6
    # The rest waits until the first is off the link, then two round trips; and the hosts work.
    end_s = max(first_sent_s, backward_s) + rest / 25e6 + 2 * 0.04 + MODEL.inside_s
    assert prediction.parts == {
        COMPUTE: pytest.approx(0.026), SHARING: 0.0, EXCHANGE: pytest.approx(end_s - backward_s),
    }  # fmt: skip
    assert prediction.step_s == pytest.approx(sum(prediction.parts.values()))
    assert prediction.samples_per_s == pytest.approx(32 / prediction.step_s)
    assert prediction.efficiency == pytest.approx(0.026 / prediction.step_s)
    assert prediction.dominating == EXCHANGE


def test_limits() -> None:
    """No link, no waiting; and nothing is more than as many times one process."""
    near = predict(replace(MODEL, inside_s=0.0), Scenario(Shape(64), 16, Wire()))
    assert near.efficiency == 1 and near.dominating == COMPUTE
    for shape in (Shape(1), Shape(1, 4), Shape(2), Shape(16, 8), Shape(4096)):
        for backend in (GLOO, NCCL):
            prediction = predict(replace(MODEL, backend=backend), Scenario(shape, 16, FAR))
            assert 0 < prediction.efficiency <= 1
    inside = predict(MODEL, Scenario(Shape(1, 4), 16))
    assert inside.parts[SHARING] == pytest.approx(0.3 * 0.026)
    assert inside.parts[EXCHANGE] == pytest.approx(0.002 * 2 * 3 / 4)
    # Emulated nodes share one machine.
    shared = predict(MODEL, Scenario(Shape(4), 16, FAR, emulated=True))
    assert shared.parts[SHARING] == pytest.approx(0.3 * 0.026)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "local_sgd", "diloco"])
@pytest.mark.parametrize("backend", [GLOO, NCCL])
def test_a_worse_link_is_never_faster(strategy: str, backend: str) -> None:
    model = replace(MODEL, backend=backend)

    def step_s(nodes: int, delay_s: float, rate: float, size: int = 4_000_000) -> float:
        plan = Scenario(Shape(nodes), 16, Wire(delay_s, rate), strategy, blocks=12)
        return predict(replace(model, gradient_bytes=size), plan).step_s

    by_delay = [step_s(4, delay, 1e8) for delay in (0, 0.001, 0.01, 0.1)]
    by_rate = [step_s(4, 0.001, rate) for rate in (1e9, 1e8, 1e7, 1e6)]
    by_nodes = [step_s(nodes, 0.001, 1e8) for nodes in (1, 2, 4, 8, 64, 1024)][strategy == "fsdp" :]
    by_size = [step_s(4, 0.001, 1e8, size) for size in (10**5, 10**6, 10**7, 10**8)]
    for steps in (by_delay, by_rate, by_nodes, by_size):
        assert steps == sorted(steps)
        assert steps[0] < steps[-1]


@pytest.mark.parametrize(("model", "plan", "message"), [
    (MODEL, Scenario(Shape(2), 16, FAR, "hivemind"), "hivemind: not modelled"),
    (MODEL, Scenario(Shape(2), 16, FAR, compress="powersgd"), "--setup 1_2 --strategy ddp --comp"),
    (MODEL, Scenario(Shape(2), 16, FAR, compress="zip"), "zip: --strategy ddp has none, bf16"),
    (MODEL, Scenario(Shape(2), 16, FAR, compress="powersgd:2", exchange="direct"),
     "--exchange direct does not go with --compress powersgd: use --compress bf16"),
    (MODEL, Scenario(Shape(2), 16, FAR, "fsdp", blocks=2, exchange="all_to_all"),
     "--exchange all_to_all does not go with --strategy fsdp, but with ddp, local_sgd, diloco"),
    (MODEL, Scenario(Shape(2), 16, FAR, "diloco", sync_every=10, fragments=3),
     "--fragments 3: --sync_every 10 cannot be divided by it"),
    (MODEL, Scenario(Shape(2), 16, FAR, "diloco", sync_every=10, overlap=10),
     "--overlap 10: must be below --sync_every 10"),
    (MODEL, Scenario(Shape(2), 16, FAR, exchange="post"), "backend, direct, all_to_all"),
    (MODEL, Scenario(Shape(2), 16, FAR, "fsdp"), "give --blocks"),
    (MODEL, Scenario(Shape(1, 2), 16, FAR, "fsdp", blocks=2), "fsdp on one node"),
    (replace(MODEL, gradient_bytes=None), Scenario(Shape(2), 16, FAR), "give --gradient_mb"),
    (replace(MODEL, sharing=None), Scenario(Shape(1, 2), 16), "measure --setup 1_2"),
])  # fmt: skip
def test_what_is_unknown_is_not_guessed(model: Model, plan: Scenario, message: str) -> None:
    with pytest.raises(UserError, match=message):
        predict(model, plan)


def test_where_efficiency_falls_below_half() -> None:
    curve = over_nodes(replace(MODEL, backend=NCCL), Scenario(Shape(1), 16, Wire(0.002, 1e9)), 3000)
    assert [each.plan.shape.nodes for each in curve][-3:] == [1024, 2048, 3000]
    rates = [each.samples_per_s for each in curve]
    assert rates == sorted(rates)
    below = below_half_efficiency(curve)
    assert below is not None
    at = curve.index(below)
    assert below.efficiency < 0.5 <= curve[at - 1].efficiency
    assert below_half_efficiency(curve[:1]) is None


def test_a_curve_names_the_way_of_exchange_where_rows_differ() -> None:
    one = over_nodes(MODEL, Scenario(Shape(1), 16, FAR, exchange="direct"), 4)
    assert "exchange" not in curve_table(one).headings
    assert one[-1].plan.fields["exchange"] == "direct"
    other = [*one[:-1], replace(one[-1], plan=replace(one[-1].plan, exchange="all_to_all"))]
    table = curve_table(other)
    assert table.headings[-1] == "exchange"
    assert [row[-1] for row in table.rows] == ["direct", "direct", "all_to_all"]


def reductions(
    factor: float, wire: Wire, sizes: tuple[int, ...] = (10**5, 10**7)
) -> list[Reduction]:
    return [
        Reduction(GLOO, n, factor * allreduce(GLOO, n, Shape(2), wire).alone_s, Shape(2), wire)
        for n in sizes
    ]


def test_a_measured_link_is_given_back() -> None:
    table = reductions(1.5, FAR) + reductions(0.8, Wire(0.001, 25e6))
    prediction = correction(table, GLOO, Shape(2), FAR)
    assert prediction.of_link and prediction.at(10**5) == pytest.approx(1.5)
    assert prediction.at(10**6) == pytest.approx(1.5) and prediction.at(1) == pytest.approx(1.5)
    # Between two sizes half way by the logarithm.
    mixed = reductions(1.0, FAR, (10**4,)) + reductions(4.0, FAR, (10**6,))
    assert correction(mixed, GLOO, Shape(4), FAR).at(10**5) == pytest.approx(2.0)
    # Another link: the median of all, and how much they differ.
    other = correction(table, GLOO, Shape(2), Wire(0.1, 1e6))
    assert not other.of_link and other.at(10**6) == pytest.approx(math.sqrt(1.5 * 0.8))
    logs = [math.log(1.5)] * 2 + [math.log(0.8)] * 2
    assert other.spread == pytest.approx(statistics.stdev(logs)) and other.freedom == 3
    assert correction(table, NCCL, Shape(2), FAR).at(10**6) == 1
    # A rate that is not limited is another link than one that is.
    assert not correction(table, GLOO, Shape(2), Wire(0.020)).of_link


def test_an_interval_needs_a_spread_of_every_part() -> None:
    plan = Scenario(Shape(2), 16, FAR)
    assert predict(replace(MODEL, line=fit_line([(16, 0.0255)])), plan).low_s is None
    assert predict(replace(MODEL, backend=NCCL), plan).low_s is None  # of which none was compared
    noisy = fit_line([(8, 0.0185), (16, 0.0255), (32, 0.042), (16, 0.0265)])
    table = tuple(reductions(1.0, FAR) + reductions(1.1, FAR) + reductions(0.9, FAR))
    model = replace(MODEL, line=noisy, table=table)
    prediction = predict(model, plan)
    assert prediction.low_s is not None and prediction.high_s is not None
    assert prediction.low_s < prediction.step_s < prediction.high_s
    assert noisy.spread is not None and prediction.correction.spread is not None
    half = welch_half(
        (((noisy.spread_at(16) or 0) * prediction.parts[COMPUTE]) ** 2, noisy.freedom),
        ((prediction.correction.spread * prediction.parts[EXCHANGE]) ** 2,
         prediction.correction.freedom),
        ((TRAINING_SPREAD * prediction.parts[EXCHANGE]) ** 2, TRAINING_FREEDOM),
    )  # fmt: skip
    assert prediction.high_s - prediction.step_s == pytest.approx(half, rel=1e-4)
    assert predict(model, Scenario(Shape(1), 16)).low_s is not None
    # Other ways were compared on two nodes.
    for other in ({"exchange": "direct"}, {"exchange": "all_to_all"}, {"compress": "int8"},
                  {"strategy": "diloco", "compress": "bf16"}):  # fmt: skip
        assert predict(model, replace(plan, **other)).low_s is not None, other
        assert predict(model, replace(plan, shape=Shape(4), **other)).low_s is None, other
    assert predict(model, replace(plan, shape=Shape(4), compress="bf16")).low_s is not None


def test_published_steps_over_links(root: Path) -> None:
    """DDP on two nodes over twenty links, from what it takes without one: nothing is fitted on
    what is predicted, and the textbook's ring is far off.
    """
    folder = root / "records/xeon/sweeps/propagation-tiny"
    records = read_selected(str(folder), None).runs
    steps: dict[tuple[str, str | None], list[float]] = {}
    sizes = {}
    for record in records:
        environment = record.environment
        if environment["nodes"] == 2:
            rate = record.measures["train_samples_per_s"]
            key = record.identity["script"], record.identity["link"]
            steps.setdefault(key, []).append(environment["effective_batch"] / rate)
            sizes[record.identity["script"]] = environment["link"]["gradient_bytes"]
    ours, textbook = [], []
    for (script, link), seconds in steps.items():
        if link in (None, "none"):
            continue
        near = next(s for (name, at), s in steps.items() if name == script and at in (None, "none"))
        line = fit_line([(16, statistics.median(near))])
        model = Model(line, 0.0, None, 0.0, sizes[script], GLOO)
        prediction = predict(model, Scenario(Shape(2), 16, wire_of(plain_link(link))))
        measured_s = statistics.median(seconds)
        ours.append(abs(prediction.step_s / measured_s - 1))
        textbook.append(abs(prediction.baseline_s / measured_s - 1))
    assert len(ours) == 18
    assert statistics.median(ours) < 0.1 and max(ours) < 0.25
    assert statistics.median(textbook) > 0.1 and max(textbook) > 0.5
    # Of 60 runs, those over a distance without a rate say only how far TCP's window had opened.
    assert len(list(all_reduces_of(records))) == 36


def test_how_far_exchanges_of_trainings_are_from_measured_ones(root: Path) -> None:
    """What a step of DDP takes longer over a link with a rate than without a link, beside the
    exchange that is predicted from the all-reduces measured over it.
    """
    folder = root / "records/xeon/sweeps/propagation-tiny"
    over: dict[tuple[str, str], list[Run]] = {}
    for run in read_selected(str(folder), None).runs:
        if run.nodes == 2 and not run.is_disturbed:
            over.setdefault((run.identity["script"], str(run.identity["link"])), []).append(run)
    alone_s = {script: mean_step_s(over.pop((script, "None"))) for script in ("bert", "vit")}
    off = []
    for (script, link), runs in over.items():
        if table := tuple(all_reduces_of(runs)):
            size = runs[0].environment["link"]["gradient_bytes"]
            model = Model(fit_line([(16, alone_s[script])]), 0, None, 0, size, GLOO, table=table)
            plan = Scenario(Shape(2), 16, wire_of(plain_link(link)))
            longer_s = mean_step_s(runs) - alone_s[script]
            off.append(math.log(longer_s / predict(model, plan).parts[EXCHANGE]))
    assert len(off) == TRAINING_FREEDOM
    spread = math.sqrt(statistics.mean(each**2 for each in off))
    assert spread == pytest.approx(TRAINING_SPREAD, abs=5e-4)
    page = " ".join((root / "docs/prediction.md").read_text().split())
    assert f"That last part is {100 * TRAINING_SPREAD:.1f} %, from the ten published links" in page


def test_which_published_intervals_do_not_hold(root: Path) -> None:
    """Those that the page names."""
    workloads, _ = workloads_of(read_results(root / "outputs/published"))
    outside = set()
    for case in (case for workload in workloads for case in workload.cases):
        low_s, high_s = case.prediction.low_s, case.prediction.high_s
        if low_s is not None and high_s is not None and not low_s <= case.mean_s <= high_s:
            outside.add((case.prediction.plan.label, case.runs[0].identity["link"]))
    assert outside == {
        ("ddp int8 direct", "80ms/50mbit"), ("diloco h50 direct", "80ms/50mbit"),
    }  # fmt: skip


def mean_step_s(runs: list[Run]) -> float:
    return statistics.mean(step_s(run, Overrides()) or math.nan for run in runs)


def test_the_benchmark_finds_no_error_where_none_is_planted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From results as its folder holds them; nothing is run."""
    from benchmarks.prediction import MB as PLANTED_MB
    from benchmarks.prediction import main as benchmark

    def write(name: str, step_s: float, **more: object) -> None:
        text = json.dumps({"step_s": step_s, **more})
        (tmp_path / f"standin-{PLANTED_MB:g}mb-{name}.json").write_text(text)

    argv = ["--out", str(tmp_path), "--table", "--links", "20ms/200mbit"]
    assert benchmark(argv) == 1
    for batch in (8, 16, 32):
        write(f"1_1-b{batch}", 0.010 + 0.002 * batch)
    write("1_2", 0.042)
    wire = wire_of(plain_link("20ms/200mbit"))
    line = fit_line([(8, 0.026), (16, 0.042), (32, 0.074)])
    model = Model(line, 0.0, None, 0.0, int(PLANTED_MB * MB), GLOO)
    steps = {str(s): predict(model, Scenario(s, 16, wire)).step_s for s in (Shape(2), Shape(4))}
    seconds = allreduce(GLOO, 10**6, Shape(2), wire).alone_s
    link = {"allreduce": [{"bytes": 10**6, "s": seconds}, {"bytes": None, "s": None}]}
    write("20ms-200mbit-2_1", steps["2_1"], link=link)
    write("20ms-200mbit-4_1", 2 * steps["4_1"])
    assert benchmark(argv) == 0
    out = capsys.readouterr().out
    assert "| stand-in | 2_1 | 20ms/200mbit | " in out and "| +0.0% | +0.0% |" in out
    assert "| -50.0% | -50.0% |" in out
    assert "with the link's probe: 2 cases, off by 25.0% in the median, by 50.0% at most" in out
    assert (tmp_path / "prediction.md").read_text().startswith("| what |")

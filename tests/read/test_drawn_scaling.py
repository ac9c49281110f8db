"""Speed over the batch and the number of devices, as the figures have it; numbers by hand."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex

from harness.read.drawing import FAINT, INTERVAL, NothingToDraw
from harness.read.figures.catalogue import draw
from harness.read.records.sweeps import read_results
from tests.support.drawn import failed_at, measured, names_of, points, scaled, texts
from tests.support.paired import timed
from tests.support.records import TARGET, Plan, epochs


def test_epoch_time_over_the_batch(plan: Plan) -> None:
    for batch, seconds in ((4, 40.0), (16, 20.0)):
        for seed in (1, 2):
            plan.run("1_1", batch, seed, train_time_s=seconds + seed)
    plan.run("1_1", 64, 1, outcome="oom", reason="planted")
    drawn = draw("epoch_time", measured(plan))
    assert points(drawn) == [(4, 20.5), (4, 21), (16, 10.5), (16, 11)]
    means = [tuple(np.asarray(line.get_ydata())) for line in drawn.figure.axes[0].lines]
    assert (20.75, 10.75) in means
    assert failed_at(drawn) == [64.0] and "oom" in texts(drawn)  # marked, not left out
    assert "means. all at 64 oom; all at 4 20.75" in drawn.alt
    plan.content["runs"] = plan.content["runs"][:2]
    with pytest.raises(NothingToDraw, match="the batch per GPU does not vary"):
        draw("epoch_time", measured(plan))


UNLIKE = "no times of {} whose runs had unlike numbers of threads per process ({})"


def test_a_line_breaks_where_a_batch_has_no_times_that_count(plan: Plan) -> None:
    for batch, seconds in ((4, 40.0), (8, 30.0), (16, 20.0), (32, 10.0)):
        for seed in (1, 2):
            facts = {"threads": seed if batch == 8 else 1}
            plan.run("1_1", batch, seed, environment=facts, train_time_s=seconds,
                     epochs=epochs(0.9, seconds=seconds))  # fmt: skip
    sweep = measured(plan, target=TARGET)
    drawn = draw("epoch_time", sweep)
    (line,) = [line for line in drawn.figure.axes[0].lines if len(np.asarray(line.get_xdata())) > 2]
    assert np.asarray(line.get_ydata()).tolist() == pytest.approx(
        [40, math.nan, 20, 10], nan_ok=True
    )
    for name in ("epoch_time", "frontier", "time_to_accuracy"):
        assert UNLIKE.format("1 group", "b8") in draw(name, sweep).notes, name


def test_a_line_without_points_is_in_no_legend(plan: Plan) -> None:
    for seed in (1, 2):
        for strategy, threads in (("ddp", 1), ("dilo", 1), ("fsdp", seed)):
            for setup, devices in (("1_1", 1), ("1_4", 4)):
                label, facts = {"strategy": strategy}, {"threads": threads}
                plan.run(setup, 4, seed, devices, environment=facts, label=label)
    sweep = measured(plan, axes=["setup", "strategy"])
    for name in ("throughput", "efficiency", "frontier"):
        drawn = draw(name, sweep)
        named = " ".join(names_of(drawn))
        assert "ddp" in named and "dilo" in named and "fsdp" not in named, name
        assert UNLIKE.format("2 groups", "1_1 fsdp, 1_4 fsdp") in drawn.notes, name


@pytest.mark.parametrize(
    ("hold", "kind", "expected"),
    [("per_gpu_batch", "weak", [1, 0.75, 0.5]), ("effective_batch", "strong", [1, 0.75, 0.5])],
)
def test_scaling_efficiency(hold: str, kind: str, expected: list[float], plan: Plan) -> None:
    drawn = draw("efficiency", scaled(plan, hold))
    line, *_, ideal = drawn.figure.axes[0].lines
    assert list(np.asarray(line.get_xdata())) == [1, 2, 4]
    assert list(np.asarray(line.get_ydata())) == pytest.approx(expected)
    assert set(np.asarray(ideal.get_ydata())) == {1.0}
    assert any(kind in note for note in drawn.notes) and "0.50 on 4" in drawn.alt


def test_no_efficiency_without_a_run_on_one_device(plan: Plan) -> None:
    """Two nodes over a slow link are not the ideal that four are measured against."""
    for setup, devices in (("1_1", 1), ("2_1", 2), ("4_1", 4)):
        for strategy in ("ddp", "local_sgd"):
            if devices > 1 or strategy == "ddp":
                plan.run(setup, 4, 1, devices, label={"strategy": strategy})
    drawn = draw("efficiency", measured(plan, axes=["setup", "strategy"]))
    assert "not drawn, as no run on one device does its work: local_sgd" in drawn.notes
    assert names_of(drawn) == ["ddp"] and "local_sgd" not in drawn.alt
    assert drawn.figure.axes[0].get_ylabel() == "efficiency against one device"
    del plan.content["runs"][0]
    with pytest.raises(NothingToDraw, match="no run on one device finished, against which"):
        draw("efficiency", measured(plan, axes=["setup", "strategy"]))


def test_efficiency_names_what_is_not_compared(plan: Plan) -> None:
    for setup, devices, busy in (("1_1", 1, 0.0), ("1_2", 2, 0.6), ("1_4", 4, 0.0)):
        plan.run(setup, 4, 1, devices, environment={"launch": {"cpu_busy_share": busy}})
    sweep = measured(plan)
    left = "left out, as not comparable with one device: 1_2 (other programs)"
    assert left in draw("efficiency", sweep).notes
    del plan.content["runs"][2]
    with pytest.raises(NothingToDraw, match=f"or the same work; {re.escape(left)}"):
        draw("efficiency", measured(plan))


def test_a_wide_interval_does_not_flatten_the_lines_of_efficiency(plan: Plan) -> None:
    for setup, devices, rates in (("1_1", 1, (100, 100)), ("1_2", 2, (50, 300))):
        for seed, rate in enumerate(rates):
            plan.run(setup, 4, seed, devices, train_samples_per_s=rate)
    axes = draw("efficiency", measured(plan)).figure.axes[0]
    ends = [value for line in axes.lines for value in np.asarray(line.get_ydata())]
    assert max(ends) > 1000 and axes.get_ylim() == pytest.approx((0, 1.1))


def test_lines_of_several_processes_begin_with_the_single_one(plan: Plan) -> None:
    """One process has no strategy; with the batch of each it shows weak, with that of all strong
    scaling. Another batch is no beginning.
    """
    for strategy, setup, batch, devices, rate, seconds in (
        ("single", "1_1", 8, 1, 100.0, 40.0), ("ddp", "1_2", 8, 2, 150.0, 30.0),
        ("ddp", "1_2", 4, 2, 120.0, 25.0), ("fsdp", "1_2", 2, 2, 90.0, 60.0),
    ):  # fmt: skip
        rates = {"train_samples_per_s": rate, "train_time_s": seconds}
        plan.run(setup, batch, 1, devices, label={"strategy": strategy}, **rates)
    sweep = measured(plan, axes=["setup", "strategy", "per_gpu_batch"])
    drawn = draw("efficiency", sweep)
    values = [list(np.asarray(line.get_ydata())) for line in drawn.figure.axes[0].lines]
    assert [1.0, 0.75] in values  # 150 / (2 * 100)
    assert [1.0, 0.8] in values  # 40 / (2 * 25)
    assert "strong and weak" in drawn.alt and "fsdp" not in drawn.alt
    names = names_of(drawn)
    assert "ddp, batch per GPU 8" in names and not any("single" in name for name in names)
    rates = draw("throughput", sweep)
    assert sorted(rate for _, rate in points(rates)) == [90, 100, 100, 120, 150]
    assert "single at 1 100 (one value); ddp, batch per GPU 8 at 2 150" in rates.alt


def test_throughput_has_the_line_of_the_ideal(plan: Plan) -> None:
    drawn = draw("throughput", scaled(plan, "per_gpu_batch"))
    ends = [tuple(np.asarray(line.get_ydata())) for line in drawn.figure.axes[0].lines]
    assert (100.0, 150.0, 200.0) in ends and (100.0, 400.0) in ends
    assert drawn.notes == []


def test_a_title_says_what_was_found(plan: Plan) -> None:
    for seed in (1, 2, 3):
        plan.run("1_1", seed=seed, train_samples_per_s=100.0 + seed)
        plan.run("1_2", seed=seed, devices=2, train_samples_per_s=200.0 + seed)
    (legend,) = draw("throughput", measured(plan)).figure.legends
    title = legend.get_title().get_text()
    assert title.startswith("setup 1_2 against setup 1_1: samples/s: 1.98 times (1.96 to 2.00)")


def test_shared_cores_and_missing_devices_are_said(plan: Plan) -> None:
    crowded = {"launch": {"processes_per_core": 2.0}}
    plan.run("1_1", 4)
    plan.run("1_2", 4, devices=2, environment=crowded)
    found = measured(plan)
    assert (
        "1 of 2 runs had more processes than cores (up to 2" in draw("throughput", found).notes[0]
    )
    assert "1 of 2 runs" in draw("efficiency", found).notes[0]
    plan.content["runs"].pop()
    with pytest.raises(NothingToDraw, match="the number of devices does not vary"):
        draw("throughput", measured(plan))


def test_set_ups_with_as_many_devices_are_told_apart(plan: Plan) -> None:
    for setup, devices, rate in (("1_1", 1, 100), ("1_4", 4, 300), ("2_2", 4, 200)):
        plan.run(setup, 4, 1, devices, train_samples_per_s=rate)
    plan.run("4_1", 8, 1, 4, outcome="oom", reason="planted")
    found = measured(plan)
    for drawn, best, other in ((draw("throughput", found), 300.0, 200.0),
                               (draw("efficiency", found), 0.75, 0.5)):  # fmt: skip
        drawn_lines = [line.get_ydata() for line in drawn.figure.axes[0].lines]
        values = [tuple(map(float, np.asarray(line))) for line in drawn_lines]
        assert any(len(line) == 2 and line[-1] == best for line in values)
        assert any(other in line for line in values) and (best, other) not in values
    assert set(texts(draw("throughput", found))) == {
        "1_4", "2_2", "oom (batch per GPU 8)"
    }  # fmt: skip
    assert failed_at(draw("throughput", found)) == [4.0]


def test_no_efficiency_of_unlike_work(plan: Plan) -> None:
    plan.run("1_1", 4, environment={"effective_batch": 4})
    plan.run("1_2", 4, devices=2, environment={"effective_batch": 6})
    with pytest.raises(NothingToDraw, match="no two set-ups have the same batch"):
        draw("efficiency", measured(plan))


def test_machines_are_lines_of_their_own(plan: Plan) -> None:
    for seed, machine, rate in ((1, "a-cpux2", 100), (2, "b-cpux8", 900)):
        for setup, devices in (("1_1", 1), ("1_2", 2)):
            plan.run(setup, 4, seed, devices, machine=machine, train_samples_per_s=rate)
    drawn = draw("throughput", measured(plan))
    assert {*names_of(drawn)} == {"in proportion to the devices", "a-cpux2", "b-cpux8"}
    means = {y for line in drawn.figure.axes[0].lines for y in np.asarray(line.get_ydata())}
    assert 500.0 not in means  # which would be the mean over both


def test_gpus_of_one_kind_are_one_line(plan: Plan) -> None:
    for setup, devices in (("1_1", 1), ("1_2", 2)):
        gpus = {"gpus": ["a GPU"] * devices}
        plan.run(setup, 4, 1, devices, machine=f"a-gpux{devices}", environment=gpus)
    drawn = draw("throughput", measured(plan))
    assert any(len(np.asarray(line.get_xdata())) == 2 for line in drawn.figure.axes[0].lines)


def test_links_of_several_kinds_are_no_propagation(plan: Plan) -> None:
    plan.run("2_1", 4, label={"link": "1ms"})
    plan.run("4_1", 8, label={"link": "1ms"})
    plan.run("1_1", 64)  # the first value is to be one over a link
    plan.content["runs"].insert(0, plan.content["runs"].pop())
    with pytest.raises(NothingToDraw, match=r"per_gpu_batch varies too.*:per_gpu_batch=4$"):
        draw("propagation", measured(plan, axes=["setup", "per_gpu_batch", "link"]))
    for entry in plan.content["runs"]:
        entry["label"].pop("per_gpu_batch")
    with pytest.raises(NothingToDraw, match="several set-ups or machines"):
        draw("propagation", measured(plan, axes=["setup", "link"]))


def test_lines_with_a_common_place_stand_beside_each_other(plan: Plan) -> None:
    for batch in (4, 16):
        for setup, devices in (("1_1", 1), ("1_2", 2)):
            for seed, rate in ((1, 90), (2, 110)):
                plan.run(setup, batch, seed, devices, train_samples_per_s=rate)
    for name in ("throughput", "efficiency"):
        lines = draw(name, measured(plan)).figure.axes[0].lines
        at = [float(np.asarray(x.get_xdata())[0]) for x in lines if x.get_label() == INTERVAL]
        assert len(at) == len({*at}) == 4


def test_a_line_begins_with_the_single_process_of_its_own_batch(tmp_path: Path) -> None:
    """One with the batch of all together is of another line, where both were measured."""
    for batch, ranks, rate in ((8, 1, 700.0), (16, 1, 1300.0), (8, 2, 1400.0), (16, 2, 1600.0)):
        for seed in (1, 2):
            timed(tmp_path, batch, 1, ranks, seed=seed, step_s=batch * ranks / rate)
    sweep = replace(read_results(tmp_path), axes=("setup", "per_gpu_batch"))
    alt = draw("throughput", sweep).alt
    for batch, at in ((8, "700"), (16, "1,300")):
        assert alt.count(f"batch per GPU {batch} at 1 ") == 1
        assert f"batch per GPU {batch} at 1 {at} " in alt


def test_the_single_process_at_the_begin_of_a_line_is_no_ddp(plan: Plan) -> None:
    """It has a mark of its own; another one, of other epochs, begins no line and is not drawn."""
    for strategy, setup, devices, count in (
        ("single", "1_1", 1, 2), ("single", "1_1", 1, 12), ("ddp", "1_2", 2, 2),
    ):  # fmt: skip
        label = {"strategy": strategy, "epochs": count}
        rate = 100.0 * devices + count
        plan.run(setup, 4, 1, devices, label=label, train_samples_per_s=rate)
    drawn = draw("throughput", measured(plan, axes=["setup", "strategy", "epochs"]))
    ideal = "in proportion to the devices"
    assert {*names_of(drawn)} == {"ddp, epochs 2", "single process", ideal}
    assert [y for _, y in points(drawn)] == [102.0, 202.0]
    begin, end = drawn.figure.axes[0].collections
    assert to_hex(np.asarray(begin.get_facecolor())[0]) == FAINT
    assert to_hex(np.asarray(end.get_facecolor())[0]) != FAINT
    left_out = "not drawn, as no run of several devices does its work: 1_1 single epochs 12"
    assert left_out in drawn.notes

"""What stands in each figure, looked at from the inside; records and numbers made by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex

from harness.read.drawing import (
    CUT,
    DARK,
    FAILED,
    INTERVAL,
    MOST_LINES,
    Drawn,
    NothingToDraw,
    darken,
    for_page,
    listed,
    numbers_of,
    save,
)
from harness.read.explain.time_breakdown import PARTS
from harness.read.figures.catalogue import FIGURES, draw, draw_all, show
from harness.read.figures.time import targets_of
from harness.read.records.sweeps import SweepResults, read_all, read_results
from tests.support.records import Plan, epochs, lines, with_ranks


def measured(plan: Plan, **changes: Any) -> SweepResults:
    return read_results(plan.write(**changes))


def points(drawn: Drawn, panel: int = 0) -> list[tuple[float, float]]:
    """Of all single runs in a panel."""
    offsets = (found.get_offsets() for found in drawn.figure.axes[panel].collections)
    return sorted(tuple(map(float, point)) for array in offsets for point in np.asarray(array))


def texts(drawn: Drawn, panel: int = 0) -> list[str]:
    return [text.get_text() for text in drawn.figure.axes[panel].texts]


def failed_at(drawn: Drawn, panel: int = 0) -> list[float]:
    return [float(np.asarray(line.get_xdata())[0]) for line in drawn.figure.axes[panel].lines
            if line.get_marker() == "X" and line.get_color() == FAILED]  # fmt: skip


def test_curves_have_a_mean_an_interval_and_their_runs(plan: Plan) -> None:
    for seed, last in ((1, 0.8), (2, 0.9), (3, 1.0)):
        plan.run(seed=seed, epochs=epochs(0.5, last))
    drawn = draw("accuracy", measured(plan))
    (axes,) = drawn.figure.axes
    assert axes.get_title() == "1_1" and axes.get_ylabel() == "accuracy"
    assert list(np.asarray(axes.lines[0].get_ydata())) == pytest.approx([0.5, 0.9])
    runs = [(1, 0.5)] * 3 + [(2, 0.8), (2, 0.9), (2, 1.0)]
    band, scatter = axes.collections
    assert sorted(map(tuple, np.asarray(scatter.get_offsets()))) == runs
    # Student's t with 2 degrees of freedom, as in tests/read/test_sweep_table.py.
    edges = np.asarray(band.get_paths()[0].vertices)
    assert edges[:, 1].min() == pytest.approx(0.5) and axes.get_ylim()[1] <= 1.03
    assert edges[edges[:, 0] == 2][:, 1].min() == pytest.approx(0.651586, abs=1e-6)
    assert "0.9 (0.8 to 1, n = 3)" in drawn.alt
    assert drawn.tips["points_0"][1] == "batch per GPU 4, seed 1, epoch 2: 0.8"


def test_learning_rates_are_lines_and_set_ups_panels(plan: Plan) -> None:
    for setup in ("1_1", "2_1_far"):
        for lr in (0.1, 0.01):
            plan.run(setup, lr, epochs=epochs(0.5, 0.6), label={"lr": lr})
    for entry in plan.content["runs"]:
        entry["label"].pop("per_gpu_batch")
    drawn = draw("loss", measured(plan, axes=["setup", "lr"]))
    titles = [axes.get_title() for axes in drawn.figure.axes]
    assert titles == ["1_1", "2_1", "", ""]  # the losses of training above those of the test
    assert [axes.get_ylabel() for axes in drawn.figure.axes][::2] == ["training loss", "test loss"]
    train, other_train, test, other_test = (axes.get_ylim() for axes in drawn.figure.axes)
    assert train == other_train and test == other_test  # one scale for each
    (legend,) = drawn.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["lr 0.1", "lr 0.01"]


def test_a_run_that_failed_ends_with_a_cross(plan: Plan) -> None:
    plan.run(seed=1, epochs=epochs(0.5, 0.6, 0.7))
    plan.run(seed=2, epochs=epochs(0.5, 0.1), outcome="diverged", reason="loss nan")
    drawn = draw("accuracy", measured(plan))
    assert failed_at(drawn) == [2.0] and "diverged" in texts(drawn)


def test_what_has_no_room_is_said(plan: Plan) -> None:
    for batch in range(1, MOST_LINES + 4):
        plan.run("1_1", batch, epochs=epochs(0.5, 0.6))
        plan.run("1_2", 1, seed=batch, epochs=epochs(0.5, 0.6))
    # Batches may have panels of their own, another axis may not.
    drawn = draw("accuracy", measured(plan))
    assert drawn.notes == ["4 more panels are not drawn"]
    for entry in plan.content["runs"]:
        entry["label"]["warmup"] = entry["label"].pop("per_gpu_batch")
    drawn = draw("accuracy", measured(plan, axes=["setup", "warmup"]))
    assert "1_1: 3 more lines are not drawn: warmup 13; warmup 14; warmup 15 ..." in drawn.notes


def test_one_epoch_makes_no_line(plan: Plan) -> None:
    plan.run(epochs=epochs(0.5))
    with pytest.raises(NothingToDraw, match="one epoch makes no line"):
        draw("accuracy", measured(plan))
    with pytest.raises(NothingToDraw, match="no epoch of any run has train_loss or eval_loss"):
        draw("loss", measured(without_loss(plan)))


def without_loss(plan: Plan) -> Plan:
    plan.content["runs"].clear()
    plan.run(seed=9, epochs=[{"epoch": 1.0}, {"epoch": 2.0}])
    return plan


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
    assert ": 1_1 at 64 oom" in drawn.alt
    plan.content["runs"] = plan.content["runs"][:2]
    with pytest.raises(NothingToDraw, match="the batch per GPU does not vary"):
        draw("epoch_time", measured(plan))


def scaled(plan: Plan, hold: str) -> SweepResults:
    """1, 2 and 4 devices: 100, 150 and 200 samples/s, 30, 20 and 15 seconds."""
    for setup, devices, rate, seconds in (("1_1", 1, 100, 30), ("1_2", 2, 150, 20),
                                          ("1_4", 4, 200, 15)):  # fmt: skip
        batch = 4 if hold == "per_gpu_batch" else 4 // devices
        for seed in (1, 2):
            plan.run(setup, batch, seed, devices, train_samples_per_s=rate, train_time_s=seconds)
    return measured(plan, hold=hold)


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


def test_a_wide_interval_does_not_flatten_the_lines_of_efficiency(plan: Plan) -> None:
    for setup, devices, rates in (("1_1", 1, (100, 100)), ("1_2", 2, (50, 300))):
        for seed, rate in enumerate(rates):
            plan.run(setup, 4, seed, devices, train_samples_per_s=rate)
    axes = draw("efficiency", measured(plan)).figure.axes[0]
    ends = [value for line in axes.lines for value in np.asarray(line.get_ydata())]
    assert max(ends) > 1000 and axes.get_ylim() == pytest.approx((0, 1.1))


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
    assert set(texts(draw("throughput", found))) == {"1_4", "2_2", "oom"}
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
    (legend,) = drawn.figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names[:2] == ["batch per GPU 4, a-cpux2", "batch per GPU 4, b-cpux8"]
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
    plan.run("4_1", 4, label={"link": "1ms"})
    with pytest.raises(NothingToDraw, match="per_gpu_batch varies too"):
        draw("propagation", measured(plan, axes=["setup", "per_gpu_batch", "link"]))
    for entry in plan.content["runs"]:
        entry["label"].pop("per_gpu_batch")
    with pytest.raises(NothingToDraw, match="several set-ups or machines"):
        draw("propagation", measured(plan, axes=["setup", "link"]))


def test_time_to_accuracy_keeps_misses_and_failures(plan: Plan) -> None:
    plan.run("1_1", 4, 1, epochs=epochs(0.5, 0.9))
    plan.run("1_1", 4, 2, epochs=epochs(0.9, 0.9))
    plan.run("1_1", 4, 3, epochs=epochs(0.5, 0.6))
    plan.run("1_1", 16, 1, outcome="oom", reason="planted")
    drawn = draw("time_to_accuracy", measured(plan, target={"metric": "accuracy", "value": 0.85}))
    assert points(drawn) == [(2.0, 0.0), (4.0, 0.0)]
    assert texts(drawn) == ["1 of 3 missed", "oom"]
    assert "batch per GPU 4: 4 s, 1 of 3 missed" in drawn.alt  # a miss counts in the median
    with pytest.raises(NothingToDraw, match="no run reaches"):
        draw("time_to_accuracy", measured(plan, target={"metric": "accuracy", "value": 0.95}))


def test_a_target_is_made_where_none_is_named(plan: Plan) -> None:
    plan.run(seed=1, epochs=epochs(0.5, 0.8))
    (target,) = targets_of(measured(plan)).values()
    assert target.value == 0.76  # 95 % of the 0.8 in the summary
    drawn = draw("time_to_accuracy", measured(plan))
    assert drawn.notes == ["target: 95% of the best mean accuracy, as no sweep names one"]


def test_the_frontier_is_what_nothing_else_beats(plan: Plan) -> None:
    for batch, seconds, accuracy in ((1, 40, 0.9), (4, 20, 0.8), (16, 30, 0.7), (64, 10, 0.6)):
        plan.run("1_1", batch, train_time_s=seconds, accuracy=accuracy, energy_j=100.0 * seconds)
    plan.run("1_1", 256, outcome="oom", reason="planted")
    drawn = draw("frontier", measured(plan))
    assert [axes.get_xlabel() for axes in drawn.figure.axes] == [
        "training time (s)", "energy of the devices (kJ)",
    ]  # fmt: skip
    for panel, factor in ((0, 1), (1, 0.1)):
        step = next(x for x in drawn.figure.axes[panel].lines if x.get_drawstyle() == "steps-post")
        assert [*np.asarray(step.get_xdata())] == pytest.approx(
            [10 * factor, 20 * factor, 40 * factor]
        )
        assert [*np.asarray(step.get_ydata())] == [0.6, 0.8, 0.9]
        assert texts(drawn, panel) == ["1", "2", "3"]
    assert any("failed runs have no place here: 1_1 b256 (oom)" in note for note in drawn.notes)


def test_intervals_are_whole_or_say_that_they_go_on(plan: Plan) -> None:
    """A share has no interval beyond 1; a long one of efficiency ends with an arrow."""
    for seed, last in ((1, 0.1), (2, 0.9), (3, 1.0)):
        plan.run(seed=seed, epochs=epochs(0.5, last))
    (axes,) = draw("accuracy", measured(plan)).figure.axes
    edges = np.asarray(axes.collections[0].get_paths()[0].vertices)[:, 1]
    low, high = axes.get_ylim()
    assert low <= edges.min() >= 0 and edges.max() == 1 <= high
    for setup, devices, rates in (("1_1", 1, (100, 100)), ("1_2", 2, (50, 300))):
        for seed, rate in enumerate(rates):
            plan.run(setup, 16, seed, devices, train_samples_per_s=rate)
    drawn = draw("efficiency", measured(plan))
    arrows = [line for line in drawn.figure.axes[0].lines if line.get_marker() in "^v"]
    assert [list(np.asarray(a.get_ydata())) for a in arrows if not a.get_clip_on()] == [[1]]
    assert CUT in drawn.notes


def test_lines_with_a_common_place_stand_beside_each_other(plan: Plan) -> None:
    for batch in (4, 16):
        for setup, devices in (("1_1", 1), ("1_2", 2)):
            for seed, rate in ((1, 90), (2, 110)):
                plan.run(setup, batch, seed, devices, train_samples_per_s=rate)
    for name in ("throughput", "efficiency"):
        lines = draw(name, measured(plan)).figure.axes[0].lines
        at = [float(np.asarray(x.get_xdata())[0]) for x in lines if x.get_label() == INTERVAL]
        assert len(at) == len({*at}) == 4


def test_counts_of_misses_cover_no_run(plan: Plan) -> None:
    for batch, first in ((4, 0.9), (16, 0.5), (64, 0.5)):
        for seed, last in ((1, 0.9), (2, 0.6)):
            seconds = {4: 1.0, 16: 30.0, 64: 300.0}[batch]
            rows = epochs(first, last)
            for row in rows:
                row["epoch_time_s"] = seconds
            plan.run("1_1", batch, seed, epochs=rows)
    drawn = draw("time_to_accuracy", measured(plan, target={"metric": "accuracy", "value": 0.85}))
    drawn.figure.canvas.draw()
    (axes,) = drawn.figure.axes
    left = min(text.get_window_extent().x0 for text in axes.texts)
    runs = [axes.transData.transform(point)[0] for point in points(drawn)]
    assert len(runs) >= 3 and max(runs) < left


def test_the_frontier_compares_only_what_one_can_choose(plan: Plan) -> None:
    for link, seconds in (("1ms", 10.0), ("80ms", 90.0)):
        for batch, factor in ((4, 2.0), (16, 1.0)):
            plan.run("2_1", batch, label={"link": link}, train_time_s=factor * seconds)
    axes = ["setup", "per_gpu_batch", "link"]
    drawn = draw("frontier", measured(plan, axes=axes))
    assert [place.get_title() for place in drawn.figure.axes] == ["1ms", "80ms"]
    assert [sorted(x for x, _ in points(drawn, n)) for n in (0, 1)] == [[10, 20], [90, 180]]
    plan.content["runs"] = plan.content["runs"][::2]
    with pytest.raises(NothingToDraw, match="no two groups have the same script, model, dataset"):
        draw("frontier", measured(plan, axes=axes))


def timed(**more: Any) -> dict[str, Any]:
    """An epoch of 10 steps, of which 8 were timed and took 2 s each."""
    return {"epoch": 1.0, "epoch_time_s": 22.0, "timed_steps": 8, "timed_s": 16.0,
            "timed_samples": 64, **more}  # fmt: skip


ALL_OF_IT = {"updates": 10, "wall_s": 40.0, "eval_time_s": 5.0, "save_time_s": 2.0}


def bars(drawn: Drawn) -> list[dict[str, float]]:
    """Of each row the widths of its parts, by their names in the legend."""
    axes = drawn.figure.axes[0]
    named = [(c.get_label(), c.patches) for c in axes.containers]  # type: ignore[attr-defined]
    rows = len(axes.get_yticks())
    return [{n: p[row].get_width() for n, p in named if p[row].get_width()} for row in range(rows)]


def test_parts_add_up_to_all_of_the_time(plan: Plan) -> None:
    """Of the timed steps the rank in the middle tells 4.8 + 2.4 + 3.2 + 5.6 s; 10 of 8 run."""
    folder = plan.run("1_3", devices=3, epochs=[timed()], **ALL_OF_IT)
    with_ranks(
        folder,
        {"compute_s": 4.8, "comm_exposed_s": 8.8, "comm_wait_s": 5.6},
        {"compute_s": 4.0, "comm_exposed_s": 10.0, "comm_wait_s": 6.8},
        {"compute_s": 11.0, "comm_exposed_s": 3.2, "comm_wait_s": 0.0},
    )
    drawn = draw("where_time_went", measured(plan))
    (row,) = bars(drawn)
    assert row == pytest.approx({
        "computing": 6.0, "waiting for data": 3.0, "communicating": 4.0,
        "waiting for slower ranks": 7.0, "first steps": 2.0, "evaluation": 5.0, "saving": 2.0,
        "startup and other": 11.0,
    })  # fmt: skip
    assert [*row] == [name for name in PARTS if name in row]
    assert math.fsum(row.values()) == pytest.approx(ALL_OF_IT["wall_s"])
    assert texts(drawn) == ["40 s"] and drawn.notes == []
    assert "40 s: computing 15%, " in drawn.alt and "first steps 5%, " in drawn.alt


def test_the_bar_of_several_runs_is_their_mean_time(plan: Plan) -> None:
    """One of them tells its steps apart and the other does not: then none of both is told apart."""
    for seed, more in ((1, {}), (2, {"wall_s": 60.0})):
        folder = plan.run("1_2", seed=seed, devices=2, epochs=[timed()], **{**ALL_OF_IT, **more})
        told = {"compute_s": 8.0, "comm_exposed_s": 8.0, "comm_wait_s": 0.0}
        with_ranks(folder, told if seed == 1 else {"compute_s": None}, told)
    (row,) = bars(draw("where_time_went", measured(plan)))
    assert row == pytest.approx({
        "not separated": 20.0, "first steps": 2.0, "evaluation": 5.0, "saving": 2.0,
        "startup and other": 21.0,
    })  # fmt: skip
    assert math.fsum(row.values()) == pytest.approx(50.0)


def test_runs_without_timed_steps_are_named_and_not_drawn(plan: Plan) -> None:
    plan.run("1_1", 4, epochs=[timed()], **ALL_OF_IT)
    for seed in (1, 2):
        plan.run("1_1", 8, seed, epochs=epochs(0.5))
    plan.run("1_1", 16, outcome="oom", reason="planted")
    drawn = draw("where_time_went", measured(plan))
    assert [label.get_text() for label in drawn.figure.axes[0].get_yticklabels()] == ["1_1 b4"]
    assert drawn.notes == [
        "not drawn: has no timed steps: measure a longer run, or more epochs (1_1 b8: 2 runs)",
        "failed runs are left out: 1_1 b16 (oom)",
    ]
    plan.content["runs"] = plan.content["runs"][1:]
    with pytest.raises(NothingToDraw, match=r"where its time went: has no timed steps.*b8: 2 runs"):
        draw("where_time_went", measured(plan))
    plan.content["runs"].clear()
    plan.run(seed=5, outcome="oom", reason="planted")
    with pytest.raises(NothingToDraw, match="no run tells where its time went: none finished"):
        draw("where_time_went", measured(plan))


def reading(unix: float, busy: float, power: float | None, cpu: float) -> dict[str, Any]:
    gpus = [{"utilisation_percent": busy + n, "power_w": power, "memory_gib": 8.0} for n in (0, 1)]
    return {"unix": unix, "gpus": gpus, "node": {"cpu_percent": cpu, "memory_gib": 3.0}}


def test_usage_shows_every_device_of_every_node(plan: Plan) -> None:
    folder = plan.run("2_2", 4, epochs=epochs(0.5, 0.6))
    for node in (0, 1):
        rows = [reading(1000.0 + s, 10.0 * s + 50 * node, None, 30.0) for s in range(5)]
        lines(folder / "telemetry" / f"node_{node}.jsonl", [*rows, {"no": "time"}])
    drawn = draw("usage", measured(plan))
    named = [axes.get_ylabel() for axes in drawn.figure.axes]
    # What is known of no device has no panel.
    assert named == ["GPU busy (%)", "GPU memory (GiB)", "cores busy (%)", "node memory (GiB)"]
    busy = [x for x in drawn.figure.axes[0].lines if len(np.asarray(x.get_xdata())) == 5]
    assert [list(np.asarray(x.get_ydata())) for x in busy] == [
        [10.0 * s + 50 * node + gpu for s in range(5)] for node in (0, 1) for gpu in (0, 1)
    ]
    assert list(np.asarray(busy[0].get_xdata())) == [0, 1, 2, 3, 4]  # seconds since the start
    assert "GPU busy (%) 20, 21, 70, 71 in the mean" in drawn.alt
    assert named_lines(drawn) == ["node 0", "node 1"]


def named_lines(drawn: Drawn) -> list[str]:
    return [text.get_text() for legend in drawn.figure.legends for text in legend.get_texts()]


def test_usage_of_one_node_names_its_gpus(plan: Plan) -> None:
    """So that the first one, which may hold more, is told from the others."""
    rows = [reading(1000.0 + s, 10.0, None, 30.0) for s in range(3)]
    folder = plan.run("1_2", 4, epochs=epochs(0.5, 0.6)) / "telemetry" / "node_0.jsonl"
    lines(folder, rows)
    drawn = draw("usage", measured(plan))
    assert named_lines(drawn) == ["GPU 0", "GPU 1"]
    busy, _, cores, _ = drawn.figure.axes
    first, second = (line.get_color() for line in busy.lines[:2])
    assert first != second and cores.lines[0].get_color() not in (first, second)


def test_usage_is_shown_of_each_strategy_first(plan: Plan) -> None:
    for strategy in ("dp", "ddp"):
        for precision in ("fp32", "bf16"):
            label = {"model": f"model{len(strategy):040d}", "strategy": strategy}
            label["precision"] = precision
            folder = plan.run("1_2", 4, epochs=epochs(0.5), label=label)
            lines(folder / "telemetry" / "node_0.jsonl", [reading(1000.0, 10.0, None, 30.0)])
    titles = [axes.get_title() for axes in draw("usage", measured(plan)).figure.axes[:3]]
    assert [("ddp" in title, "bf16" in title) for title in titles] == [
        (False, False), (True, False), (False, True),
    ]  # fmt: skip


def test_usage_of_a_cpu_has_no_panels_of_gpus(plan: Plan) -> None:
    """Neither beside a run with GPUs nor where that is not drawn; titles stand where panels do."""
    rows = [reading(1000.0 + s, 10.0, 50.0, 30.0) for s in range(3)]
    for batch, gpus in ((4, []), (8, rows[0]["gpus"])):
        folder = plan.run("1_1", batch, epochs=epochs(0.5, 0.6)) / "telemetry" / "node_0.jsonl"
        lines(folder, [{**row, "gpus": gpus} for row in rows])
    shown = [axes for axes in draw("usage", measured(plan)).figure.axes if axes.get_visible()]
    named = [(axes.get_title(), axes.get_ylabel(), axes.get_xlabel()) for axes in shown]
    assert named == [
        ("1_1 b8, seed 1", "GPU busy (%)", ""), ("", "GPU power (W)", ""),
        ("", "GPU memory (GiB)", ""), ("1_1 b4, seed 1", "cores busy (%)", ""), ("", "", ""),
        ("", "node memory (GiB)", "time since the start (s)"), ("", "", "time since the start (s)"),
    ]  # fmt: skip
    for batch in (1, 2):
        folder = plan.run("1_1", batch) / "telemetry" / "node_0.jsonl"
        lines(folder, [{**row, "gpus": []} for row in rows])
    plan.content["runs"].append(plan.content["runs"].pop(1))  # fourth: not drawn
    named = [axes.get_ylabel() for axes in draw("usage", measured(plan)).figure.axes]
    assert named == ["cores busy (%)", "", "", "node memory (GiB)", "", ""]


def test_many_readings_are_averaged_and_few_runs_drawn(plan: Plan) -> None:
    for batch in (1, 2, 4, 8):
        folder = plan.run("1_1", batch)
        rows = [reading(float(s), s % 2 * 100, 200.0, 1.0) for s in range(4000)]
        lines(folder / "telemetry" / "node_0.jsonl", rows)
    drawn = draw("usage", measured(plan))
    assert len(drawn.figure.axes) == 3 * 5
    (line, *_) = drawn.figure.axes[0].lines
    assert set(np.asarray(line.get_ydata())) == {50.0}
    assert drawn.notes == ["1 more groups have readings: not drawn"]


def test_the_dark_one_differs_in_colours_alone(plan: Plan, tmp_path: Path) -> None:
    drawn = draw("throughput", scaled(plan, "per_gpu_batch"))
    inside = for_page(drawn, "mine-throughput")
    files = save(drawn, tmp_path, "throughput")
    assert [file.name for file in files] == [
        "throughput.svg", "throughput-dark.svg", "throughput.png", "throughput-dark.png",
    ]  # fmt: skip
    light, dark = files[0].read_text(), files[1].read_text()
    assert light != dark and len(light) == len(dark)
    for colour in ("#ffffff", "#000000", "#0072b2"):
        assert colour in light and colour not in dark and DARK[colour] in dark
    assert to_hex(drawn.figure.get_facecolor()) == DARK["#ffffff"]
    # In a page the reader decides, and every drawn run can be asked.
    assert "var(--c0072b2)" in inside and "#ffffff" not in inside
    assert inside.count("data-tip=") == 6 and 'id="mine-throughput-points_0"' in inside
    assert f"<title>{drawn.alt}</title>" in light and "<title>" not in inside


def test_darkening_twice_changes_nothing(plan: Plan) -> None:
    drawn = draw("throughput", scaled(plan, "per_gpu_batch"))
    darken(drawn.figure)
    once = [to_hex(line.get_color()) for line in drawn.figure.axes[0].lines]
    darken(drawn.figure)
    assert [to_hex(line.get_color()) for line in drawn.figure.axes[0].lines] == once
    assert not {*DARK} & {*once}


def test_words_in_place_of_figures() -> None:
    assert numbers_of([1.5]) == "1.5 (one run)"
    assert numbers_of([1.0, 3.0]) == "2 (1 to 3, n = 2)"
    assert listed(map(str, range(14))).endswith("; 11; and 2 more")


def test_every_figure_is_drawn_or_says_why(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    found = scaled(plan, "per_gpu_batch")
    drawn, missing = draw_all(found)
    assert {*drawn} | {*missing} == {*FIGURES} and not {*drawn} & {*missing}
    assert all(len(figure.alt) > 40 for figure in drawn.values()) and all(missing.values())
    assert "throughput" in drawn and missing["usage"].startswith("no readings")
    assert show([found], "throughput") is not None and show([found], "usage") is None
    assert "Utilisation, power and memory over time: not drawn, no readings" in (
        capsys.readouterr().out
    )


def test_runs_of_no_sweep_are_put_together_by_what_varies(plan: Plan) -> None:
    for setup, batch, seed in (("1_1", 4, 1), ("1_1", 4, 2), ("1_1", 8, 1), ("1_2", 4, 1)):
        folder = plan.run(setup, batch, seed)
        settings = {"schema": 1, "script": "bert", "model": "a/b", "setup": setup, "seed": seed,
                    "per_gpu_batch": batch, "repeat": 1, "trainer": {"warmup_steps": batch},
                    "output_dir": str(seed)}  # fmt: skip
        (folder / "settings.json").write_text(json.dumps(settings))
    (part,), problems = read_all(plan.output_dir)
    assert problems == [] and part.output_dir == plan.output_dir.absolute()
    assert part.axes == ("per_gpu_batch", "setup", "warmup_steps")
    assert part.baseline == {"setup": "1_1"}
    assert [len(group.runs) for group in part.groups] == [2, 1, 1]
    assert all(math.isclose(group.mean("accuracy") or 0, 0.8) for group in part.groups)


def test_a_sweep_with_several_seeds_is_shown_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once, often = Plan(tmp_path / "once"), Plan(tmp_path / "often")
    for plan, seeds in ((once, (1,)), (often, (1, 2))):
        for setup, devices in (("1_1", 1), ("1_2", 2)):
            for seed in seeds:
                plan.run(setup, 4, seed, devices, train_samples_per_s=100.0 * devices)
    target = {"metric": "accuracy", "value": 0.1}
    parts = [read_results(once.write(name="once", target=target)),
             read_results(often.write(name="often"))]  # fmt: skip
    assert show(parts, "throughput") is not None
    assert "(often)" in capsys.readouterr().out

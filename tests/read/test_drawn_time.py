"""Where the time went and how busy devices were, as the figures have it; numbers by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from harness.read.drawing import Drawn, NothingToDraw
from harness.read.explain.time_breakdown import PARTS
from harness.read.figures.catalogue import draw
from tests.support.drawn import measured, texts
from tests.support.records import Plan, epochs, lines, with_ranks


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
    assert [label.get_text() for label in drawn.figure.axes[0].get_yticklabels()] == ["b4"]
    assert drawn.notes == [
        "not drawn: has no timed steps: measure a longer run, or more epochs (b8: 2 runs)",
        "failed runs are left out: b16 (oom)",
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


def test_devices_of_one_colour_differ_in_their_lines(plan: Plan) -> None:
    folder = plan.run("1_8", 4, epochs=epochs(0.5))
    rows = [
        {"unix": 1000.0 + s, "gpus": [{"utilisation_percent": 10.0 * n} for n in range(8)]}
        for s in range(5)
    ]
    lines(folder / "telemetry" / "node_0.jsonl", rows)
    (axes,) = draw("usage", measured(plan)).figure.axes
    drawn = [x for x in axes.lines if len(np.asarray(x.get_xdata())) == 5]
    styles = [(x.get_color(), x.get_linestyle()) for x in drawn]
    assert len({*styles}) == 8 and len({colour for colour, _ in styles}) == 6


def test_usage_has_one_scale_for_all_runs(plan: Plan) -> None:
    for batch, memory in ((4, 3.0), (8, 9.0)):
        folder = plan.run("1_1", batch, epochs=epochs(0.5)) / "telemetry" / "node_0.jsonl"
        node = {"cpu_percent": 100.0, "memory_gib": memory}
        lines(folder, [{"unix": 1000.0 + s, "gpus": [], "node": node} for s in range(5)])
    axes = draw("usage", measured(plan)).figure.axes
    tops = [place.get_ylim()[1] for place in axes]
    # A line at 100 % does not lie on the frame.
    assert tops == pytest.approx([105, 105, 9.9, 9.9])
    assert axes[0].get_xlim() == axes[2].get_xlim() and axes[0].get_xlim()[0] == 0


def test_usage_marks_no_more_ends_of_epochs_than_can_be_told_apart(plan: Plan) -> None:
    for count, marked in ((20, 20), (21, 10), (100, 20)):
        ended = [{**row, "unix": 1001.0 + n} for n, row in enumerate(epochs(*[0.5] * count))]
        folder = plan.run("1_1", 4, seed=count, epochs=ended) / "telemetry" / "node_0.jsonl"
        lines(folder, [reading(1000.0 + s, 10.0, None, 30.0) for s in range(count)])
        drawn = draw("usage", measured(plan))
        dotted = [x for x in drawn.figure.axes[0].lines if x.get_linestyle() == ":"]
        assert len(dotted) == marked
        which = {20: "each epoch", 21: "one epoch in 2", 100: "one epoch in 5"}[count]
        assert f"dotted lines at the end of {which}" in " ".join(drawn.notes)
        plan.content["runs"].clear()
    assert drawn.notes[0].endswith("dotted lines at the end of one epoch in 5")


def test_the_line_of_a_run_that_was_resumed_has_a_gap(plan: Plan) -> None:
    """Readings of 0 to 2 s, and after a minute without any those of 62 to 64 s."""
    folder = plan.run("1_1", 4, epochs=epochs(0.5, 0.6)) / "telemetry" / "node_0.jsonl"
    lines(folder, [reading(1000.0 + s, 10.0, None, 30.0) for s in (0, 1, 2, 62, 63, 64)])
    busy = draw("usage", measured(plan)).figure.axes[0].lines
    assert [list(np.asarray(line.get_xdata())) for line in busy[:2]] == [[0, 1, 2], [62, 63, 64]]
    assert busy[0].get_color() == busy[1].get_color()


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
        ("b8, seed 1", "GPU busy (%)", ""), ("", "GPU power (W)", ""),
        ("", "GPU memory (GiB)", ""), ("b4, seed 1", "cores busy (%)", ""), ("", "", ""),
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
    assert drawn.notes == ["1 more group with readings is not drawn"]

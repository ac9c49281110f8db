"""Colours of strategies, scales of panels, and which figure answers what was run."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from harness.core.settings import UserError
from harness.read.drawing import BASE, BLACK, CUT, MOST_LINES, WHITE, Drawn, cycle
from harness.read.figures.catalogue import draw, figure_for, figures_for, show
from harness.read.figures.panels import (
    FAMILIES,
    FAR_APART,
    OWN,
    Panel,
    Series,
    Styles,
    same_scale,
    strategy_styles,
)
from harness.read.records.sweeps import read_results
from tests.support.drawn import measured, names_of, points
from tests.support.records import Plan, epochs

BUSY = {"launch": {"cpu_busy_share": 0.9, "launcher": "netns"}}


def test_a_strategy_has_its_colour_whatever_else_is_drawn() -> None:
    shown = ["ddp", "ddp int8", "ddp powersgd", "diloco h10", "diloco h10 int8", "diloco h50 lr1",
             "diloco h200", "local_sgd h10", "mine.py:Mine", "hivemind t640"]  # fmt: skip
    styles = strategy_styles(shown)
    assert styles["ddp"] == BASE and styles["mine.py:Mine"].colour == OWN[0]
    assert len({*styles.values()}) == len(shown)  # told apart by colour, marker or dash
    for name in shown[1:]:
        alone = strategy_styles([name])[name]
        assert alone.colour == styles[name].colour and alone.dash == "-"
    diloco = [styles[f"diloco {name}"].colour for name in ("h10", "h10 int8", "h50 lr1", "h200")]
    assert diloco == [FAMILIES["diloco"][n] for n in (0, 0, 1, 2)]


def test_lines_beyond_the_colours_differ_in_marker_and_in_dash() -> None:
    styles = [cycle(number) for number in range(MOST_LINES)]
    assert len({style.colour for style in styles}) < MOST_LINES
    assert len({(style.colour, style.marker) for style in styles}) == MOST_LINES
    assert len({(style.colour, style.dash) for style in styles}) == MOST_LINES


def test_lines_of_one_colour_differ_on_two_axes(plan: Plan) -> None:
    for compress in ("none", "int8", "powersgd"):
        for exchange in ("backend", "direct"):
            label = {"strategy": "ddp", "compress": compress, "exchange": exchange}
            plan.run("2_1", 4, label=label)
    sweep = measured(plan, axes=["strategy", "compress", "exchange"])
    lines = [Series(sweep.name_of(group), [group]) for group in sweep.groups]
    styles = Styles([sweep]).of_lines(sweep, [Panel("", lines)])
    assert len({*styles.values()}) == len(styles) == 6


def test_panels_have_one_scale_unless_they_are_far_apart() -> None:
    for tops, alike in (((1.0, 2.9), True), ((1.0, 3.1), False)):
        axes = [Figure().add_subplot() for _ in tops]
        for place, top in zip(axes, tops, strict=True):
            place.plot([0, 1], [0, top])
            place.set_ylim(0, top)
        same_scale(axes, FAR_APART)
        assert (axes[0].get_ylim() == axes[1].get_ylim()) == alike
        same_scale(axes)
        assert axes[0].get_ylim() == axes[1].get_ylim() == (0, tops[1])
    below = [Figure().add_subplot() for _ in range(2)]
    for place, low in zip(below, (-3.0, -1.0), strict=True):
        place.plot([0, 1], [low, low / 2])
        place.set_ylim(low, low / 2)
    same_scale(below)  # a metric of one's own may be negative
    assert below[0].get_ylim() == below[1].get_ylim() == (-3.0, -0.5)


def test_a_script_that_failed_leaves_the_other_its_scale(plan: Plan) -> None:
    for batch in (4, 16):
        plan.run("1_1", batch, accuracy=0.8 + batch / 1000, label={"script": "vit"})
        plan.run("1_1", batch, outcome="oom", reason="planted", label={"script": "bert"})
    drawn = draw("epoch_time", measured(plan, axes=["script", "per_gpu_batch"]))
    (accuracy,) = (a for a in drawn.figure.axes if a.get_ylabel() == "final accuracy")
    low, high = accuracy.get_ylim()
    assert 0.7 < low < high < 0.9  # that of vit; bert has crosses alone
    assert CUT not in drawn.notes


def test_marks_stand_aside_only_of_another_mark(plan: Plan) -> None:
    plan.run("1_1", 8)
    plan.run("1_1", 32)
    plan.run("1_2", 4, devices=2)
    plan.run("1_2", 32, devices=2)
    axes, *_ = draw("epoch_time", measured(plan)).figure.axes
    places = sorted(
        {float(np.asarray(line.get_xdata())[0]) for line in axes.lines if line.get_marker() in "os"}
    )
    assert places[:2] == [4.0, 8.0] and places[2] < 32 < places[3]


def test_many_cases_of_the_frontier_have_their_titles(plan: Plan) -> None:
    links = ("1ms", "5ms", "20ms", "80ms")
    for link in links:
        for batch in (4, 16):
            plan.run("2_1", batch, label={"link": link}, train_time_s=float(batch))
    drawn = draw("frontier", measured(plan, axes=["setup", "per_gpu_batch", "link"]))
    titles = [axes.get_title() for axes in drawn.figure.axes]
    assert titles == [*links, *links]  # training time, then wall time


def test_what_was_run_decides_the_figure(plan: Plan) -> None:
    for batch in (4, 16):
        plan.planned("1_2", batch, skipped="needs a GPU")
    for setup, devices in (("1_1", 1), ("1_2", 2)):
        plan.run(setup, 8, devices=devices)
    # Which shows speed alone: what that is worth stands beside it.
    assert figures_for(measured(plan)) == ("throughput", "frontier")


def test_one_learning_rate_that_is_done_has_its_curve(plan: Plan) -> None:
    plan.run("1_1", 4, label={"lr": 0.1}, epochs=epochs(0.5, 0.6))
    plan.planned("1_1", 4, lr=0.01)
    assert figure_for(measured(plan, axes=["setup", "lr"])) == "accuracy"


def test_a_link_beside_another_question_is_no_propagation(plan: Plan) -> None:
    for link in ("1ms", "80ms"):
        for lora in (0, 8):
            plan.run("2_1", 4, label={"link": link, "lora": lora})
    sweep = measured(plan, axes=["setup", "link", "lora"])
    assert draw(figure_for(sweep), sweep).alt


def test_a_figure_that_there_is_not(plan: Plan) -> None:
    plan.run()
    with pytest.raises(UserError, match="no figure troughput: there are accuracy, loss"):
        show("troughput", str(plan.write()))


def test_medians_with_disturbed_runs_have_hollow_markers(plan: Plan) -> None:
    target = {"metric": "accuracy", "value": 0.5}
    for strategy, busy in (("ddp", False), ("diloco", True)):
        for seed in (1, 2):
            label = {"strategy": strategy, "link": "80ms"}
            plan.run("2_1", 4, seed, label=label, environment=BUSY if busy else None,
                     epochs=epochs(0.6, 0.7))  # fmt: skip
    folder = plan.write(
        axes=["setup", "strategy", "link"], baseline={"strategy": "ddp"}, target=target
    )
    figure = draw("strategies", read_results(folder)).figure
    hollow = [
        line
        for axes in figure.axes
        for line in axes.lines
        if line.get_markerfacecolor() == WHITE and len(np.asarray(line.get_xdata()))
    ]
    assert len(hollow) == 2  # wall and training time of diloco
    (legend,) = figure.legends
    assert "hollow: all runs beside other programs" in [t.get_text() for t in legend.get_texts()]
    for axes in figure.axes:  # points of single runs fill no outline
        outlines = [line.zorder for line in axes.lines if line in hollow]
        assert all(order > each.zorder for order in outlines for each in axes.collections)


def test_points_of_disturbed_runs_are_outlines_in_times_to_a_target(plan: Plan) -> None:
    for strategy, busy in (("ddp", False), ("diloco", True)):
        for seed in (1, 2):
            plan.run("2_1", 4, seed, label={"strategy": strategy},
                     environment=BUSY if busy else None, epochs=epochs(0.6, 0.7))  # fmt: skip
    target = {"metric": "accuracy", "value": 0.5}
    figure = draw("time_to_accuracy", measured(plan, axes=["setup", "strategy"], target=target))
    for axes in figure.figure.axes[:2]:
        quiet, disturbed = axes.collections
        assert to_hex(np.asarray(disturbed.get_facecolor())[0]) == WHITE
        assert to_hex(np.asarray(quiet.get_facecolor())[0]) == BLACK
        assert disturbed.zorder > max(line.zorder for line in axes.lines)
    named = "hollow: all runs beside other programs"
    assert names_of(figure) == [named]
    del plan.content["runs"][2:]
    quiet_alone = measured(plan, axes=["setup", "strategy"], target=target)
    assert names_of(draw("time_to_accuracy", quiet_alone)) == []


def over_links(plan: Plan, *links: str) -> Drawn:
    for strategy in ("ddp", "diloco"):
        for link in links:
            label = {"strategy": strategy, "link": link}
            plan.run("2_1", 4, label=label, epochs=epochs(0.6, 0.7))
    target = {"metric": "accuracy", "value": 0.5}
    return draw("strategies", measured(plan, axes=["setup", "strategy", "link"], target=target))


def test_links_that_differ_in_delay_and_rate_share_a_panel(plan: Plan) -> None:
    """A panel per rate would have points at one delay each."""
    drawn = over_links(plan, "20ms/100mbit", "5ms/200mbit")
    wall, training = drawn.figure.axes
    assert wall.get_title() == "2_1, median wall time"
    for axes in (wall, training):
        named = [label.get_text() for label in axes.get_xticklabels()]
        assert named == ["5ms\n200mbit", "20ms\n100mbit"]
    assert training.get_xlabel() == "link between the nodes (delay one way, rate)"
    assert [x for x, _ in points(drawn)] == pytest.approx([-0.125, 0.125, 0.875, 1.125])
    assert not any(line.get_linestyle() == "-" for line in wall.lines)
    assert "by link, medians: " in drawn.alt and "over the delay" not in drawn.alt


def test_delays_of_one_rate_keep_its_panel(plan: Plan) -> None:
    drawn = over_links(plan, "5ms/200mbit", "20ms/200mbit", "20ms/100mbit")
    assert [axes.get_title() for axes in drawn.figure.axes] == [
        "2_1, 200 Mbit/s, median wall time", "2_1, 200 Mbit/s, median training time",
        "2_1, 100 Mbit/s, median wall time", "2_1, 100 Mbit/s, median training time",
    ]  # fmt: skip

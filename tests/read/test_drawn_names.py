"""What lines and panels are called: at the ends of lines, in a legend, in the title of a panel."""

from __future__ import annotations

import pytest

from harness.read.drawing import page_width
from harness.read.figures.catalogue import draw
from tests.support.drawn import failed_at, measured, names_at_ends, names_of, points, texts
from tests.support.records import Plan


def test_lines_that_end_apart_have_their_names_at_their_ends(plan: Plan) -> None:
    for setup in ("1_1", "1_2"):
        for batch, seconds in ((4, 30.0), (16, 20.0)):
            factor = 1.0 if setup == "1_1" else 0.5
            plan.run(setup, batch, 2, train_time_s=factor * seconds, accuracy=0.9 * factor)
    drawn = draw("epoch_time", measured(plan))
    assert names_at_ends(drawn) == ["1_1", "1_2"] == names_of(drawn)
    with page_width(3.3):  # there is no room beside them
        assert names_at_ends(draw("epoch_time", measured(plan))) == []


def test_lines_that_end_together_have_a_legend(plan: Plan) -> None:
    for setup in ("1_1", "1_2"):
        for batch, seconds in ((4, 30.0), (16, 20.0)):
            plan.run(setup, batch, 1, train_time_s=seconds)
    drawn = draw("epoch_time", measured(plan))
    assert names_at_ends(drawn) == [] and names_of(drawn) == ["1_1", "1_2"]


def test_a_line_that_ends_before_another_is_named_in_the_legend(plan: Plan) -> None:
    for setup, batches in (("1_1", (4, 16)), ("1_2", (4, 16, 64))):
        for batch in batches:
            factor = 1.0 if setup == "1_1" else 0.4
            plan.run(setup, batch, 1, train_time_s=factor * 100.0)
    drawn = draw("epoch_time", measured(plan))
    assert names_at_ends(drawn) == [] and names_of(drawn) == ["1_1", "1_2"]


def test_a_learning_rate_that_goes_along_with_the_batch_parts_no_line(plan: Plan) -> None:
    axes = ["setup", "per_gpu_batch", "lr"]
    for setup in ("1_1", "1_2"):
        for batch, lr in ((4, 0.1), (16, 0.2)):
            plan.run(setup, batch, 1, label={"lr": lr}, train_time_s=40.0)
    drawn = draw("epoch_time", measured(plan, axes=axes))
    assert names_of(drawn) == ["1_1", "1_2"]
    assert "each batch has a learning rate of its own" in drawn.notes
    plan.run("1_1", 16, 1, label={"lr": 0.1}, train_time_s=40.0)  # now 16 has two
    drawn = draw("epoch_time", measured(plan, axes=axes))
    assert "each batch has a learning rate of its own" not in drawn.notes
    # Beside the line of 1_1 with 0.1 each differs in the rate or the set-up, but for one in both.
    assert {*names_of(drawn)} == {"1_1, lr 0.1", "1_1, lr 0.2", "1_2, lr 0.1"}
    text = "not drawn, as they differ from all lines in more than one thing: 1_2 b16 lr 0.2"
    assert text in drawn.notes


def test_what_has_one_batch_and_failed_is_drawn_with_its_name(plan: Plan) -> None:
    axes = ["setup", "per_gpu_batch", "lr"]
    for batch in (4, 16):
        plan.run("1_1", batch, 1, label={"lr": 0.1}, train_time_s=40.0)
    plan.run("1_1", 4, 1, label={"lr": 9.0}, outcome="diverged", reason="planted")
    drawn = draw("epoch_time", measured(plan, axes=axes))
    assert failed_at(drawn) == [4.0] and "diverged (lr 9)" in texts(drawn)
    assert [x for x, _ in points(drawn)] == [4.0, 16.0]


def test_what_all_lines_of_a_panel_share_is_in_its_title(plan: Plan) -> None:
    for script, lr in (("vit", 0.1), ("bert", 0.2)):
        for setup in ("1_1", "1_2"):
            for batch in (4, 16):
                plan.run(setup, batch, label={"script": script, "lr": lr}, train_time_s=40.0)
    sweep = measured(plan, axes=["script", "setup", "per_gpu_batch", "lr"])
    drawn = draw("epoch_time", sweep)
    titles = [place.get_title() for place in drawn.figure.axes]
    assert titles[:2] == ["vit, lr 0.1", "bert, lr 0.2"] and names_of(drawn) == ["1_1", "1_2"]
    assert not any("learning rate" in note for note in drawn.notes)


@pytest.mark.parametrize("varied", [False, True])
def test_a_single_script_is_called_by_its_model(varied: bool, plan: Plan) -> None:
    for setup, devices in (("1_1", 1), ("1_2", 2)):
        for script in ("vit", "bert")[: 1 + varied]:
            label = {"script": script, "model": f"a/{script}-base"}
            plan.run(setup, 4, 1, devices, label=label)
    drawn = draw("throughput", measured(plan, axes=["script", "setup"]))
    titles = [place.get_title() for place in drawn.figure.axes]
    assert titles == (["vit", "bert"] if varied else ["vit-base"])

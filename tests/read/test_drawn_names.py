"""What lines and panels are called: at the ends of lines, in a legend, in the title of a panel."""

from __future__ import annotations

import json

import pytest

from harness.read.drawing import NothingToDraw, page_width
from harness.read.figures.catalogue import draw
from tests.support.drawn import failed_at, measured, names_at_ends, names_of, points, texts
from tests.support.records import TARGET, Plan, epochs


def test_lines_that_end_apart_have_their_names_at_their_ends(plan: Plan) -> None:
    for setup in ("1_1", "1_2"):
        for batch, seconds in ((4, 30.0), (16, 20.0)):
            factor = 1.0 if setup == "1_1" else 0.5
            plan.run(setup, batch, 2, train_time_s=factor * seconds, accuracy=0.9 * factor)
    drawn = draw("epoch_time", measured(plan))
    assert names_at_ends(drawn) == ["1_1", "1_2"] == names_of(drawn)
    with page_width(3.3):  # there is no room beside them, nor for a title, which is a caption's
        narrow = draw("epoch_time", measured(plan))
    assert names_at_ends(narrow) == [] and narrow.figure.legends[0].get_title().get_text() == ""
    assert "setup 1_2 against" in drawn.figure.get_suptitle()


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
    assert "the learning rate changes along with the batch" in drawn.notes
    plan.run("1_1", 16, 1, label={"lr": 0.1}, train_time_s=40.0)  # now 16 has two
    drawn = draw("epoch_time", measured(plan, axes=axes))
    assert "the learning rate changes along with the batch" not in drawn.notes
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


def test_a_name_at_the_end_of_a_line_covers_no_other(plan: Plan) -> None:
    """Set-ups with as many devices have their names where the line ends."""
    for strategy, factor in (("ddp", 1.0), ("local_sgd", 0.4)):
        for setup, devices, rate in (("1_1", 1, 100), ("1_4", 4, 300), ("2_2", 4, 200)):
            label = {"strategy": strategy}
            plan.run(setup, 4, 1, devices, label=label, train_samples_per_s=factor * rate)
    drawn = draw("throughput", measured(plan, axes=["setup", "strategy"]))
    assert names_at_ends(drawn) == [] and {"ddp", "local_sgd"} < {*names_of(drawn)}


def test_a_title_is_of_what_is_drawn(plan: Plan) -> None:
    """The set-ups with a batch of 32 alone, and a rate of their own, are faster by more."""
    axes = ["setup", "per_gpu_batch", "lr"]
    for setup, factor in (("1_1", 1.0), ("1_2", 1.5)):
        for batch in (4, 16):
            for seed in (1, 2):
                plan.run(setup, batch, seed, label={"lr": 0.1},
                         train_samples_per_s=factor * 100 + seed / 9)  # fmt: skip
        for seed in (1, 2):
            plan.run(setup, 32, seed, label={"lr": 0.2},
                     train_samples_per_s=factor**3 * 100 + seed / 9)  # fmt: skip
    plan.run("1_1", 16, 1, label={"lr": 0.3})
    drawn = draw("epoch_time", measured(plan, axes=axes))
    (legend,) = drawn.figure.legends or [None]
    title = legend.get_title().get_text() if legend else drawn.figure.get_suptitle()
    assert "1.50 times" in title and "3.3" not in title


def test_links_with_jitter_or_loss_are_lines_of_their_own(plan: Plan) -> None:
    for link, rate in (("1ms/100mbit", 90.0), ("9ms/100mbit", 80.0), ("9ms/100mbit/loss1%", 20.0)):
        facts = {"nodes": 2, "processes_per_node": 1, "effective_batch": 8}
        plan.run("2_1", 4, 1, label={"link": link}, environment=facts, train_samples_per_s=rate)
    for entry in plan.content["runs"]:
        del entry["label"]["per_gpu_batch"]
    drawn = draw("propagation", measured(plan, axes=["setup", "link"]))
    assert {"100 Mbit/s", "100 Mbit/s, loss0.01"} <= {*names_of(drawn)}
    assert "100 Mbit/s at 9 ms 80 (one value)" in drawn.alt
    bound = "at most: one delay an update"
    assert (bound in names_of(drawn)) == (drawn.figure.axes[0].get_ylim()[1] > 1000 * 8 / 9)


def test_times_to_a_target_that_do_not_count_are_not_called_missing(plan: Plan) -> None:
    """The threads of two runs are unlike, and every epoch has the metric."""
    for seed in (1, 2):
        facts = {"nodes": 2, "processes_per_node": 1, "threads": seed}
        label = {"link": "1ms", "strategy": "ddp"}
        plan.run("2_1", 4, seed, label=label, environment=facts, epochs=epochs(0.5, 0.95))
    for entry in plan.content["runs"]:
        del entry["label"]["per_gpu_batch"]
    axes = ["setup", "link", "strategy"]
    with pytest.raises(NothingToDraw, match="no run has a time to the target that counts"):
        draw("strategies", measured(plan, axes=axes, target=TARGET))
    other = {"metric": "acuracy", "value": 0.9}
    with pytest.raises(NothingToDraw, match="no epoch of any run has a number named acuracy"):
        draw("strategies", measured(plan, axes=axes, target=other))


def test_links_without_rates_are_no_propagation(plan: Plan) -> None:
    folder = plan.run("2_1", 4, 1, label={"link": "1ms"})
    summary = json.loads((folder / "summary.json").read_text())
    del summary["train_samples_per_s"]
    (folder / "summary.json").write_text(json.dumps(summary))
    del plan.content["runs"][0]["label"]["per_gpu_batch"]
    with pytest.raises(NothingToDraw, match="no finished run over a link has train_samples_per_s"):
        draw("propagation", measured(plan, axes=["setup", "link"]))


def test_without_a_finished_run_no_target_is_reached(plan: Plan) -> None:
    plan.run("1_1", 4, 1, outcome="oom", reason="planted")
    with pytest.raises(NothingToDraw, match="no run finished"):
        draw("time_to_accuracy", measured(plan, target=TARGET))

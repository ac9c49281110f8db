"""Times to a target and the frontier, as the figures have them; numbers made by hand."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.read.drawing import CUT, NothingToDraw, page_width
from harness.read.figures.catalogue import draw, figures_for
from harness.read.figures.links import _accuracies, _over_links
from harness.read.figures.panels import arrange
from harness.read.figures.time import targets_of
from harness.read.records.runs import Target, parse_target
from harness.read.records.sweeps import read_sweep
from tests.support.drawn import measured, points, texts
from tests.support.records import TARGET, Plan, epochs


def test_time_to_accuracy_keeps_misses_and_failures(plan: Plan) -> None:
    plan.run("1_1", 4, 1, epochs=epochs(0.5, 0.9))
    plan.run("1_1", 4, 2, epochs=epochs(0.9, 0.9))
    plan.run("1_1", 4, 3, epochs=epochs(0.5, 0.6))
    plan.run("1_1", 16, 1, outcome="oom", reason="planted")
    drawn = draw("time_to_accuracy", measured(plan, target={"metric": "accuracy", "value": 0.85}))
    wall, training, _ = drawn.figure.axes
    assert wall.get_xlabel() == "wall time to\naccuracy 0.85 (s)"
    assert training.get_xlabel() == "training time to\naccuracy 0.85 (s)"
    assert wall.get_xlim() == training.get_xlim()  # so that one sees what is not training
    assert points(drawn) == [(6.0, 0.0), (12.0, 0.0)]
    assert points(drawn, 1) == [(2.0, 0.0), (4.0, 0.0)]
    for panel in (0, 1):
        assert texts(drawn, panel) == ["1 of 3 missed", "oom"]
    # A miss counts in the median.
    wall_text, training_text = drawn.alt.split(
        " Training time to accuracy at least 0.85, medians: "
    )
    assert wall_text.startswith("Wall time to accuracy at least 0.85, medians: ")
    assert "batch per GPU 4: 12 s, 1 of 3 missed" in wall_text
    assert "batch per GPU 4: 4 s, 1 of 3 missed" in training_text
    with pytest.raises(NothingToDraw, match="no run reaches"):
        draw("time_to_accuracy", measured(plan, target={"metric": "accuracy", "value": 0.95}))


def test_a_time_that_is_not_known_is_no_miss(plan: Plan) -> None:
    """The first epoch went on from a checkpoint of another program: its time is in no row."""
    first, second = epochs(0.5, 0.9)
    plan.run("1_1", 4, 1, epochs=[first | {"epoch_time_s": None}, second])
    plan.run("1_1", 16, 1, epochs=epochs(0.9, 0.9))
    drawn = draw("time_to_accuracy", measured(plan, target={"metric": "accuracy", "value": 0.85}))
    wall, training = drawn.alt.split(" Training time to accuracy at least 0.85, medians: ")
    assert "batch per GPU 4: 12 s" in wall
    assert "batch per GPU 4: not known" in training and "not reached" not in drawn.alt


def test_beside_a_miss_a_time_that_is_not_known_leaves_the_median_unknown(plan: Plan) -> None:
    for seed, rows in enumerate((epochs(0.9), epochs(0.5, 0.9), epochs(0.5, 0.9), epochs(0.5))):
        if seed == 2:
            rows[0]["epoch_time_s"] = None
        plan.run(seed=seed, epochs=rows)
    (group,) = plan.groups(target={"metric": "accuracy", "value": 0.85})
    assert (group["reached"], group["finished"]) == (3, 4)
    assert group["tta_train_s"] is group["tta_train_s_median"] is None
    assert group["tta_wall_s_median"] == 12.0


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
        "training time (s)", "wall time without measuring (s)", "energy of the devices (kJ)",
    ]  # fmt: skip
    for panel, factor in ((0, 1), (2, 0.1)):
        step = next(x for x in drawn.figure.axes[panel].lines if x.get_drawstyle() == "steps-post")
        assert [*np.asarray(step.get_xdata())] == pytest.approx(
            [10 * factor, 20 * factor, 40 * factor]
        )
        assert [*np.asarray(step.get_ydata())] == [0.6, 0.8, 0.9]
        assert texts(drawn, panel) == ["1", "2", "3"]
    numbered = (
        "numbered: nothing cheaper is as accurate, within the noise where it is known. training"
    )
    assert any(note.startswith(numbered) for note in drawn.notes)
    assert any("failed runs have no place here: b256 (oom)" in note for note in drawn.notes)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"threads": 2, "observed": {"device": "cpu"}}, "threads per process"),
        ({"data": {"data_checksum": "other", "test_samples": 9}}, "data checksum"),
        ({"data": {"data_checksum": "one", "test_samples": 7}}, "test set"),
        ({"launch": {"cpu_busy_share": 0.6}}, "other programs"),
    ],
)
def test_the_frontier_ranks_what_compare_compares(
    facts: dict[str, Any], why: str, plan: Plan
) -> None:
    """Another batch is another training, and what the figure chooses from."""
    plain = {"threads": 1, "observed": {"device": "cpu"},
             "data": {"data_checksum": "one", "test_samples": 9}}  # fmt: skip
    plan.run("1_1", 1, environment=plain | facts, train_time_s=5, accuracy=0.99)
    for batch, seconds, accuracy in ((4, 20, 0.8), (16, 10, 0.7)):
        plan.run("1_1", batch, environment=plain, train_time_s=seconds, accuracy=accuracy)
    drawn = draw("frontier", measured(plan))
    left_out = f"left out, as not comparable with the others: b1 ({why})"
    assert drawn.notes[0] == left_out
    assert points(drawn) == [(10.0, 0.7), (20.0, 0.8)] and "1 b16 (0.7000 at 10)" in drawn.alt
    del plan.content["runs"][1]
    with pytest.raises(NothingToDraw, match="nothing to choose; left out.*" + why):
        draw("frontier", measured(plan))


def test_the_frontier_is_rather_of_quiet_runs_than_of_many(plan: Plan) -> None:
    """A quiet way that is left out may beat what the others would number."""
    busy = {"launch": {"cpu_busy_share": 0.6}}
    for batch, seconds, accuracy in ((1, 5, 0.99), (2, 4, 0.9)):
        plan.run("1_1", batch, train_time_s=seconds, accuracy=accuracy)
    for batch, seconds, accuracy in ((4, 20, 0.8), (16, 10, 0.7), (64, 8, 0.6)):
        plan.run("1_1", batch, environment=busy, train_time_s=seconds, accuracy=accuracy)
    drawn = draw("frontier", measured(plan))
    left_out = "left out, as not comparable with the others: b4, b16, b64 (other programs)"
    assert drawn.notes[0] == left_out
    assert points(drawn) == [(4.0, 0.9), (5.0, 0.99)]
    del plan.content["runs"][1]  # of one alone there is nothing to choose
    assert points(draw("frontier", measured(plan))) == [(8.0, 0.6), (10.0, 0.7), (20.0, 0.8)]


def test_links_in_the_names_of_set_ups_have_their_panels_of_the_frontier(plan: Plan) -> None:
    """Runs of several sweeps together, where no axis is the link."""
    for setup, link in (("2_1_near", "1ms"), ("2_1_far", "80ms")):
        for batch in (4, 16):
            plan.run(setup, batch, environment={"launch": {"link": link}}, train_time_s=batch)
    drawn = draw("frontier", measured(plan))
    assert [axes.get_title() for axes in drawn.figure.axes] == ["1ms", "80ms", "", ""]
    (legend,) = drawn.figure.legends
    named = [text.get_text() for text in legend.get_texts()]
    assert named == ["batch per GPU 4", "batch per GPU 16"]


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
    for panel, axes in enumerate(drawn.figure.axes[:2]):  # the third is of accuracy
        left = min(text.get_window_extent().x0 for text in axes.texts)
        runs = [axes.transData.transform(point)[0] for point in points(drawn, panel)]
        assert len(runs) >= 3 and max(runs) < left
        (strip,) = axes.patches  # no run has a time there, and no time is written there
        begins, ends = strip.get_x(), strip.get_x() + strip.get_width()  # type: ignore[attr-defined]
        longest = max(x for each in (0, 1) for x, _ in points(drawn, each))
        assert longest < begins < 1.1 * longest and ends == axes.get_xlim()[1]
        shown = [tick for tick in axes.get_xticks() if axes.get_xlim()[0] <= tick]
        assert len(shown) >= 2 and max(shown) < begins


def test_the_accuracy_stands_beside_the_times_to_it(plan: Plan) -> None:
    for seed, last in ((1, 0.92), (2, 0.94), (3, 0.96)):
        plan.run("1_1", 4, seed, epochs=epochs(0.5, last))
    drawn = draw("time_to_accuracy", measured(plan, target=TARGET))
    assert [x for x, _ in points(drawn, 2)] == pytest.approx([0.92, 0.94, 0.96])
    axes = drawn.figure.axes[2]
    bar = max((np.asarray(line.get_xdata()) for line in axes.lines), key=len)
    # Student's t of three: 4.3027 * 0.02 / sqrt(3)
    assert [*bar] == pytest.approx([0.94 - 0.04968, 0.94 + 0.04968], abs=1e-5)
    assert (
        "Final accuracy, means: setup 1_1, batch per GPU 4 0.94 (from 0.92 to 0.96, n = 3)."
        in drawn.alt
    )


@pytest.mark.parametrize(
    ("gains", "last", "numbered"),
    [
        # The last is better than 16 by 1 point in each seed, 8 by 0.1 in the mean.
        ((0.2, 0.1, 0.0), 4, "1 b16 (0.7200 at 10); 2 b4 (0.7300 at 30)."),
        # The last is better than 16, and worse than 8, which is noise to 16.
        ((9.0, 3.0, -3.0), 64, "1 b16 (0.7200 at 10)."),
    ],
)
def test_the_frontier_numbers_what_is_better_than_all_cheaper_ones(
    gains: tuple[float, ...], last: int, numbered: str, plan: Plan
) -> None:
    for each, seconds, of_seeds in ((16, 10.0, (0.0, 0.0, 0.0)), (8, 20.0, gains),
                                    (last, 30.0, (1.0, 1.1, 0.9))):  # fmt: skip
        for seed, gain in enumerate(of_seeds):
            accuracy = 0.7 + seed / 50 + gain / 100
            plan.run("1_1", each, seed, train_time_s=seconds, accuracy=accuracy)
    (note,) = [n for n in draw("frontier", measured(plan)).notes if n.startswith("numbered: ")]
    over_training, _, _ = note.partition(" wall time without measuring")
    assert over_training.endswith(f"training time (s): {numbered}")


def test_a_target_of_loss_needs_no_accuracy(plan: Plan) -> None:
    rows = [{"epoch": n, "eval_loss": loss, "epoch_time_s": 10.0, "samples": 8, "wall_s": 12.0 * n}
            for n, loss in ((1, 0.9), (2, 0.4))]  # fmt: skip
    folder = plan.run("1_1", 4, 1, epochs=rows)
    summary = json.loads((folder / "summary.json").read_text())
    del summary["accuracy"]
    (folder / "summary.json").write_text(json.dumps(summary))
    target = {"metric": "eval_loss", "value": 0.5}
    drawn = draw("time_to_accuracy", measured(plan, target=target))
    assert len(drawn.figure.axes) == 2 and points(drawn, 1) == [(20.0, 0.0)]


def test_close_accuracies_have_few_whole_ticks(plan: Plan) -> None:
    for batch, last in ((4, 0.92123), (16, 0.92124)):
        plan.run("1_1", batch, 1, epochs=epochs(0.5, last))
    drawn = draw("time_to_accuracy", measured(plan, target=TARGET))
    axes = drawn.figure.axes[2]
    drawn.figure.draw_without_rendering()
    assert len(axes.get_xticks()) <= 6 and axes.xaxis.get_offset_text().get_text() == ""


def test_a_narrow_page_has_its_panels_below_each_other(plan: Plan) -> None:
    plan.run("1_1", 4, 1, epochs=epochs(0.5, 0.9))
    with page_width(3.3):
        drawn = draw("time_to_accuracy", measured(plan, target=TARGET))
    wall, training, accuracy = drawn.figure.axes
    heights = [axes.get_position().y0 for axes in (wall, training, accuracy)]
    assert heights == sorted(heights, reverse=True)
    assert [label.get_text() for label in training.get_yticklabels()] == ["1_1 b4"]


def test_set_ups_with_a_target_have_the_time_to_it_beside_samples_per_second(root: Path) -> None:
    sweep = read_sweep(root / "outputs/published/sweeps/demo-tiny")
    assert figures_for(sweep) == ("throughput", "time_to_accuracy")
    missed = Target("accuracy", 0.99)  # then that figure has nothing to draw
    for target in (None, missed):
        assert figures_for(replace(sweep, target=target)) == ("throughput", "frontier")


@pytest.mark.parametrize(
    ("axis", "values", "first"),
    [("per_gpu_batch", (4, 16), "epoch_time"), ("link", ("1ms", "9ms"), "propagation"),
     ("lr", (0.1, 0.2), "learning_rate")],
)  # fmt: skip
def test_a_target_that_is_reached_has_its_figure_whatever_varies(
    axis: str, values: tuple[Any, Any], first: str, plan: Plan
) -> None:
    for setup in ("2_1",) if axis == "link" else ("1_2", "2_1"):
        for value in values:
            plan.run(setup, label={axis: value}, epochs=epochs(0.5, 0.9))
    axes = ["setup", axis]
    assert figures_for(measured(plan, axes=axes, target=TARGET)) == (first, "time_to_accuracy")
    assert "time_to_accuracy" not in figures_for(measured(plan, axes=axes))


def test_equal_seeds_over_unlike_links_are_no_pair() -> None:
    sides: list[Any] = [({1: 0.9}, {2: 0.8}), ({2: 0.7}, {1: 0.6})]
    cells: list[Any] = [SimpleNamespace(strategy="diloco", accuracies=both) for both in sides]
    gain = _over_links(_accuracies(cells, "diloco"))
    assert (gain.value, gain.paired, gain.n) == (pytest.approx(0.1), False, 2)
    cells.append(SimpleNamespace(strategy="diloco", accuracies=({1: 0.9}, {1: 0.7})))
    gain = _over_links(_accuracies(cells, "diloco"))  # of the pair alone
    assert (gain.value, gain.paired, gain.n) == (pytest.approx(0.2), True, 1)


def test_links_of_several_set_ups_are_lines_over_the_devices(plan: Plan) -> None:
    """A line over the delay would join set-ups. That of a single node has no link for a name."""
    plan.run("1_2")
    plan.run("1_4")
    for setup in ("2_1", "2_2"):
        for link in ("1ms", "9ms"):
            plan.run(setup, label={"link": link})
    sweep = measured(plan, axes=["setup", "link"])
    assert figures_for(sweep) == ("throughput", "frontier")
    assert {line.name for line in arrange(sweep, sweep.groups, ("setup",))[0][0].lines} == {
        "one node", "1ms", "9ms",
    }  # fmt: skip


def test_the_frontier_compares_only_what_one_can_choose(plan: Plan) -> None:
    for link, seconds in (("1ms", 10.0), ("80ms", 90.0)):
        for batch, factor in ((4, 2.0), (16, 1.0)):
            plan.run("2_1", batch, label={"link": link}, train_time_s=factor * seconds)
    axes = ["setup", "per_gpu_batch", "link"]
    drawn = draw("frontier", measured(plan, axes=axes))
    assert [place.get_title() for place in drawn.figure.axes] == ["1ms", "80ms", "", ""]
    assert [sorted(x for x, _ in points(drawn, n)) for n in (0, 1)] == [[10, 20], [90, 180]]
    (numbered,) = [note for note in drawn.notes if note.startswith("numbered: ")]
    assert " at 90)" in numbered and numbered.endswith(")")  # the caption goes on with a semicolon
    plan.run("2_1", 64, label={"link": "200ms"})  # alone over its link: it has no panel
    drawn = draw("frontier", measured(plan, axes=axes))
    (legend,) = drawn.figure.legends
    assert any("left out, as nothing else has the same script, link: batch per GPU 64" in note
               for note in drawn.notes)  # fmt: skip
    assert [text.get_text() for text in legend.get_texts()] == [
        "batch per GPU 4",
        "batch per GPU 16",
    ]
    del plan.content["runs"][-1]
    plan.content["runs"] = plan.content["runs"][::2]
    with pytest.raises(NothingToDraw, match="no two groups have the same script, model, dataset"):
        draw("frontier", measured(plan, axes=axes))


@pytest.mark.parametrize("apart", [1, 50])
def test_times_can_be_read_beside_long_counts(apart: int, plan: Plan) -> None:
    """Of the ticks of the whole width only the first lay left of the counts of misses."""
    for batch in (8, 16):
        for seed, last in ((1, 0.9), (2, 0.6)):
            rows = epochs(0.5, last)
            for row in rows:
                row["epoch_time_s"] = (2.0 + 0.1 * batch) * (apart if batch == 16 else 1)
            plan.run("1_1", batch, seed, epochs=rows)
    drawn = draw("time_to_accuracy", measured(plan, target={"metric": "accuracy", "value": 0.85}))
    for axes in drawn.figure.axes[:2]:
        (strip,) = axes.patches
        begins = strip.get_x()  # type: ignore[attr-defined]
        assert sum(0 < tick < begins for tick in axes.get_xticks()) >= 2


def test_a_time_axis_within_a_decade_has_more_than_one_tick(plan: Plan) -> None:
    """Times from 0.4 to 4 s, beside counts that take much of a narrow panel."""
    for batch, took in ((4, 0.4), (8, 1.5), (16, 4.0)):
        rows = [row | {"wall_s": took, "epoch_time_s": took} for row in epochs(0.9)]
        plan.run("1_1", batch, 1, epochs=rows)
        plan.run("1_1", batch, 2, epochs=epochs(0.5))
    for panel in draw("time_to_accuracy", measured(plan, target=TARGET)).figure.axes[:2]:
        low, high = panel.get_xlim()
        assert panel.get_xscale() == "log"
        assert len([tick for tick in panel.get_xticks() if low <= tick <= high]) >= 3


def test_a_metric_of_ones_own_may_have_a_target_from_above(plan: Plan) -> None:
    target = {"metric": "mistakes:min", "value": 40}
    for seed in (1, 2):
        rows = [row | {"mistakes": m} for row, m in zip(epochs(0.5, 0.9), (42, 34), strict=True)]
        plan.run("1_1", 4, seed, epochs=rows)
    sweep = measured(plan, target=target)
    assert str(sweep.target) == "mistakes at most 40" == str(parse_target("mistakes:min=40"))
    (group,) = sweep.groups
    assert group.values("tta_epochs") == [2.0, 2.0] and not group.missed("tta_epochs")


def test_medians_are_over_seeds_as_in_tables(plan: Plan) -> None:
    """Of three seeds, each measured twice."""
    for seed, times in ((1, (20, 40)), (2, (22, 24)), (3, (100, 26))):
        for repeat, seconds in enumerate(times, 1):
            rows = epochs(0.95, seconds=float(seconds))
            plan.run("1_1", 4, seed, epochs=rows, label={"repeat": repeat})
    sweep = measured(plan, target=TARGET)
    (group,) = sweep.groups
    median = statistics.median(group.values("tta_train_s"))
    assert median == 30 and f"{median:.4g} s" in draw("time_to_accuracy", sweep).alt

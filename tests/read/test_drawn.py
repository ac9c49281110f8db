"""Curves over the epochs, and what all figures share, seen from the inside; numbers by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text

from harness.read.compare.answers import answers, failed_variants
from harness.read.drawing import DARK, MOST_LINES, NothingToDraw, listed, numbers_of
from harness.read.figures.catalogue import FIGURES, draw, draw_all, headline, show
from harness.read.figures.panels import Styles
from harness.read.files import darken, for_page, save
from harness.read.records.sweeps import read_all, read_results
from harness.read.report.report import make_report
from tests.support.drawn import failed_at, measured, scaled, texts
from tests.support.records import STARTED, Plan, epochs, lines
from tests.support.settings import whole_settings


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
    assert "0.9 (from 0.8 to 1, n = 3)" in drawn.alt
    assert drawn.tips["points_0"][1] == "batch per GPU 4, seed 1, epoch 2: 0.8"


def test_learning_rates_are_lines_and_set_ups_panels(plan: Plan) -> None:
    for setup in ("1_1", "2_1_far"):
        for lr in (0.1, 0.01):
            plan.run(setup, lr, epochs=epochs(0.5, 0.6), label={"lr": lr})
    for entry in plan.content["runs"]:
        entry["label"].pop("per_gpu_batch")
    drawn = draw("loss", measured(plan, axes=["setup", "lr"]))
    titles = [axes.get_title() for axes in drawn.figure.axes]
    # The tag of a set-up names its link, unless the link has a word of its own.
    assert titles == ["1_1", "2_1_far", "", ""]  # the losses of training above those of the test
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


@pytest.mark.usefixtures("undrawn")
def test_groups_that_failed_before_an_epoch_are_named(plan: Plan) -> None:
    """In the figures they are asked about, and beside the answer of the report."""
    for setup, devices in (("1_1", 1), ("1_2", 2)):
        for seed in (1, 2):
            plan.run(setup, 4, seed, devices, epochs=epochs(0.5, 0.6), label={"lr": 0.0015})
            plan.run(setup, 4, seed, devices, epochs=[], outcome="diverged", label={"lr": 1000})
    found = measured(plan, axes=["lr", "setup"], baseline={"setup": "1_1"})
    failed = "lr 1000 1_1 (2 x diverged); lr 1000 1_2 (2 x diverged)"
    for name in ("accuracy", "loss", "efficiency"):
        assert f"failed runs have no place here: {failed}" in draw(name, found).notes
    throughput = draw("throughput", found)
    assert failed_at(throughput) and f"crosses: {failed}" in throughput.notes
    said = "lr 1000: 4 of 4 runs failed (diverged)."
    assert failed_variants(found) == [said]
    page, text, *_ = make_report(found.folder, plan.output_dir.parent / "report")
    assert f"<li>{said}</li>" in page.read_text() and f"- {said}" in text.read_text()


def test_an_interrupted_run_has_not_failed(plan: Plan) -> None:
    plan.run("1_1", 4)
    plan.run("1_2", 4, outcome="interrupted")
    assert failed_variants(measured(plan)) == ["setup 1_2: 1 of 1 runs interrupted."]
    plan.run("1_2", 4, seed=2, outcome="failed")
    (said,) = failed_variants(measured(plan))
    assert said.endswith(": 1 of 2 runs failed (failed), 1 of 2 runs interrupted.")


def test_a_failed_way_that_is_no_whole_value_is_named_by_itself(plan: Plan) -> None:
    plan.run("1_1", 4)
    plan.run("1_1", 8)
    plan.run("1_2", 4)
    plan.run("1_2", 8, outcome="oom")
    plan.planned("1_2", 8, seed=2)
    (said,) = failed_variants(measured(plan))
    assert said == "setup 1_2, batch per GPU 8: 1 of 2 runs failed (oom)."


def test_panels_that_are_not_drawn_are_counted(plan: Plan) -> None:
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


def test_the_dark_figure_differs_only_in_colours(plan: Plan, tmp_path: Path) -> None:
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


def test_values_and_long_lists_are_summarized() -> None:
    assert numbers_of([1.5]) == "1.5 (one value)"
    assert numbers_of([1.0, 3.0]) == "2 (from 1 to 3, n = 2)"
    assert listed(map(str, range(14))).endswith("; 11; and 2 more")


def test_every_figure_is_drawn_or_says_why(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    found = scaled(plan, "per_gpu_batch")
    drawn, missing = draw_all(found)
    assert {*drawn} | {*missing} == {*FIGURES} and not {*drawn} & {*missing}
    assert all(len(figure.alt) > 40 for figure in drawn.values()) and all(missing.values())
    assert "throughput" in drawn and missing["usage"].startswith("no readings")
    folder = str(found.folder)
    assert show("throughput", folder) is not None and show("usage", folder) is None
    assert "not drawn: Utilisation, power and memory over time: no readings" in (
        capsys.readouterr().out
    )


def test_a_page_has_the_finding_as_text_and_not_above_its_figures(plan: Plan) -> None:
    found = scaled(plan, "per_gpu_batch")
    found = found.against({"setup": "1_1"})
    start = headline(found).split(":")[0]
    assert " against setup 1_1" in start
    for styles in (None, Styles([found])):
        drawn = draw("throughput", found, styles)
        shown = [" ".join(text.get_text().split()) for text in drawn.figure.findobj(Text)]
        assert any(start in text for text in shown) == (styles is None)


def test_runs_of_no_sweep_are_put_together_by_what_varies(plan: Plan) -> None:
    for setup, batch, seed in (("1_1", 4, 1), ("1_1", 4, 2), ("1_1", 8, 1), ("1_2", 4, 1)):
        folder = plan.run(setup, batch, seed)
        settings = whole_settings(model="a/b", setup=setup, seed=seed, per_gpu_batch=batch,
                                  trainer={"warmup_steps": batch},
                                  output_dir=str(seed))  # fmt: skip
        (folder / "settings.json").write_text(json.dumps(settings))
        lines(folder / "attempts.jsonl", STARTED)
    (part,), problems = read_all(plan.output_dir)
    assert problems == [] and part.output_dir == plan.output_dir.absolute()
    assert part.axes == ("per_gpu_batch", "setup", "warmup_steps")
    assert part.baseline == {"setup": "1_1"}
    assert [len(group.runs) for group in part.groups] == [2, 1, 1]
    assert all(math.isclose(group.mean("accuracy") or 0, 0.8) for group in part.groups)


def test_a_notebook_shows_the_question_and_its_answers(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    for setup, devices in (("1_1", 1), ("1_2", 2)):
        for seed in (1, 2):
            plan.run(setup, 4, seed, devices, train_samples_per_s=100.0 * devices + seed)
    folder = plan.write(name="often", baseline={"setup": "1_1"})
    assert show("throughput", str(folder)) is not None
    question, answer, _, title = capsys.readouterr().out.splitlines()
    assert question.endswith("? (often)") and answer in map(str, answers(read_results(folder)))
    assert "samples/s: 1.99 times" in answer and title.startswith("Throughput by number of devices")


def test_a_notebook_says_what_a_figure_shows_that_no_answer_is_about(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    found = scaled(plan, "per_gpu_batch")
    drawn = show("efficiency", str(found.folder))
    assert drawn is not None and drawn.alt in capsys.readouterr().out.splitlines()

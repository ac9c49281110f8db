"""Which batch is fastest, what to ask next, and what a page shows of a sweep that began in part."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.read.compare.fastest import fastest_batch, next_question
from harness.read.figures.catalogue import draw
from harness.read.records.sweeps import read_sweep
from harness.read.report.report import make_report
from tests.support.drawn import measured
from tests.support.paired import Verb
from tests.support.records import Plan, epochs


def batches(plan: Plan, setup: str, rates: dict[int, float], best: int, seeds: int = 2) -> None:
    for batch, rate in rates.items():
        for seed in range(1, seeds + 1):
            rows = epochs(0.5, 0.9 if batch == best else 0.8)
            plan.run(setup, batch, seed, epochs=rows, updates=1000 // batch,
                     train_samples_per_s=rate * (1 + (seed + batch // 16) % 2 / 10),
                     environment={"effective_batch": batch})  # fmt: skip


def test_the_fastest_batch_is_one_sentence(plan: Plan) -> None:
    batches(plan, "1_1", {4: 100.0, 16: 200.0, 64: 3000.0}, best=4)
    assert fastest_batch(measured(plan)) == [
        "The fastest batch per GPU is 64 (beyond the noise); the highest mean accuracy has 4."
    ]
    batches(plan, "1_2", {4: 100.0, 16: 200.0, 64: 199.9}, best=16)
    sweep = measured(plan)
    assert fastest_batch(sweep) == [
        "The fastest batch per GPU is 64 in 1, 16 in 1 of 2 cases of setup (beyond the noise in 1);"
        " the highest mean accuracy has 4 in 1, 16 in 1."
    ]
    asked = "up to which batch larger ones pay: python -m harness batches "
    assert next_question(sweep) == f"{asked}{plan.folder} --target accuracy=VALUE"


def test_batches_that_compare_refuses_are_not_ranked(plan: Plan) -> None:
    """One seed shows no quality, and unlike data show nothing."""
    batches(plan, "1_1", {4: 100.0, 16: 200.0}, best=4, seeds=1)
    assert fastest_batch(measured(plan)) == [
        "The fastest batch per GPU is 16 (not beyond the noise)."
    ]
    plan.content["runs"].pop()
    plan.run("1_1", 64, environment={"data": {"data_checksum": "other"}})
    assert fastest_batch(measured(plan)) == []


def test_a_sweep_over_set_ups_names_the_sweep_over_batches(plan: Plan) -> None:
    for setup in ("1_1", "1_2"):
        plan.run(setup)
    sweep = measured(plan)
    assert fastest_batch(sweep) == []
    assert next_question(sweep) == (
        "which batch per GPU is fastest: python -m harness sweep experiments/batch_size.yaml --tiny"
    )
    del plan.content["runs"][1]
    assert next_question(measured(plan)) == ""


def test_a_page_shows_what_began_and_counts_the_rest(plan: Plan, tmp_path: Path) -> None:
    """As after `sweep --select script=vit`: no rows and no empty panel of bert."""
    for batch in (4, 16):
        plan.run("1_1", batch, epochs=epochs(0.5, 0.6), label={"script": "vit"})
        plan.planned("1_1", batch, script="bert")
    folder = plan.write(axes=["script", "setup", "per_gpu_batch"])
    page, *_ = make_report(folder, tmp_path / "report")
    html = page.read_text()
    assert "batch per GPU 16</td>" in html and "script bert" not in html
    assert "2 runs</td><td>waiting: not begun, or not selected</td>" in html
    assert [axes.get_title() for axes in draw("epoch_time", read_sweep(folder)).figure.axes] == [
        "vit"
    ]


def test_answers_stand_once_with_a_line_a_measure(plan: Plan, tmp_path: Path) -> None:
    other = Plan(plan.output_dir)
    other.folder = plan.output_dir / "sweeps" / "other"
    for each, seed in ((plan, 1), (other, 2)):
        for setup, rate in (("1_1", 100.0), ("1_2", 200.0)):
            each.run(setup, seed=seed, train_samples_per_s=rate)
        each.write(name=each.folder.name)
    page, *_ = make_report(plan.output_dir, tmp_path / "report")
    html = page.read_text()
    said = (
        "<li>setup 1_2 against setup 1_1:<ul><li>samples/s: 2.00 times as many</li><li>accuracy: "
    )
    assert html.count(said) == 2 and "of unknown noise" not in html
    assert html.count("so all of it may be chance") == 2  # a section, and no list above them
    assert html.count("<p>Next: which batch per GPU is fastest: <code>python -m harness") == 2


def test_figures_of_a_folder_that_is_no_sweep_name_those_below(
    plan: Plan, figures: Verb, tmp_path: Path
) -> None:
    plan.run("1_1")
    assert "draw all runs below it together with --all" in figures.refused(plan.output_dir)
    folder = plan.write()
    said = figures.refused(plan.output_dir)
    assert f"there is no sweep.json: name a sweep below it ({folder}), or draw" in said
    assert "a sweep writes it to" in figures.refused(tmp_path / "nothing")


@pytest.mark.parametrize("scripts", [("vit",), ("vit", "bert")])
def test_scripts_head_their_times_to_accuracy(scripts: tuple[str, ...], plan: Plan) -> None:
    for script in scripts:
        for batch in (4, 16):
            plan.run("1_1", batch, epochs=epochs(0.5, 0.8), label={"script": script})
    figure = draw("time_to_accuracy", measured(plan)).figure
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == (["", ""] if len(scripts) == 1 else ["vit", "vit", "bert", "bert"])

"""Which batch is fastest, what to ask next, and what a page shows of a sweep that began in part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.cli import main
from harness.read.compare.answers import answers
from harness.read.compare.fastest import fastest_batch, first_to_target, next_question
from harness.read.figures.catalogue import draw
from harness.read.records.sweeps import read_all, read_sweep
from harness.read.report.report import make_report
from harness.read.tables.command import markdown
from harness.read.tables.sweep_table import sweep_table
from tests.support.drawn import measured
from tests.support.paired import Verb
from tests.support.records import ENVIRONMENT, Plan, epochs, record


def batches(plan: Plan, setup: str, rates: dict[int, float], best: int, seeds: int = 3) -> None:
    """Noise of a few percent, of each batch another one."""
    for batch, rate in rates.items():
        for seed in range(1, seeds + 1):
            noise = (seed * batch) % 7 / 100
            one(plan, batch, seed, rate * (1 + noise),
                (0.9 if batch == best else 0.8) + noise / 10, setup)  # fmt: skip


def one(
    plan: Plan, batch: int, seed: int, rate: float, accuracy: float = 0.8, setup: str = "1_1",
    busy: float | None = None,
) -> None:  # fmt: skip
    plan.run(setup, batch, seed, epochs=epochs(0.5, accuracy), updates=1000 // batch,
             train_samples_per_s=rate,
             environment={"effective_batch": batch, "launch": {"cpu_busy_share": busy}},
             )  # fmt: skip


def answered(plan: Plan) -> tuple[str, str]:
    """The sentence, and what is said below it of batch 64 against 16."""
    sweep = measured(plan, baseline={"per_gpu_batch": 16})
    (sentence,) = fastest_batch(sweep)
    *_, answer = answers(sweep)
    return sentence, str(answer)


def test_with_a_target_the_batch_that_reaches_it_soonest_is_named(plan: Plan) -> None:
    for batch, wall_s in ((4, 20.0), (16, 40.0), (64, 10.0)):
        for seed in (1, 2, 3):
            reached = epochs(*([0.5] if batch == 64 else [0.5, 0.95]), seconds=wall_s + seed)
            plan.run("1_1", batch, seed, epochs=reached, updates=1000 // batch,
                     train_samples_per_s=100.0 * batch + seed,
                     environment={"effective_batch": batch})  # fmt: skip
    target = {"metric": "accuracy", "value": 0.9}
    (sentence,) = fastest_batch(measured(plan, target=target))
    # 64 is fastest, and never reaches it.
    assert sentence.startswith("The fastest batch per GPU is 64 (beyond the noise)")
    assert (
        "; accuracy at least 0.9 is reached soonest, by wall time, with 4 (beyond the noise; 64 "
        "missed it in 3 of 3 runs); the highest accuracy has 4 and 16" in sentence
    )
    plan.content["runs"] = [
        run for run in plan.content["runs"] if run["label"]["per_gpu_batch"] != 4
    ]
    (sentence,) = fastest_batch(measured(plan, target=target))
    assert (
        "; accuracy at least 0.9 is reached soonest, by wall time, with 16 (64 missed it"
        in sentence
    )


def test_a_learning_rate_of_its_own_belongs_to_a_batch(plan: Plan) -> None:
    """Else a batch that is compared with none is left out without a word, and may be fastest."""
    rates = {8: (0.0005, 3000.0), 32: (0.002, 1000.0), 64: (0.002, 1208.0)}
    for batch, (lr, rate) in rates.items():
        for seed in (1, 2, 3):
            plan.run("1_1", batch, seed, updates=1000 // batch, train_samples_per_s=rate + seed,
                     environment={"effective_batch": batch}, label={"lr": lr})  # fmt: skip
    axes = ["setup", "per_gpu_batch", "lr"]
    (sentence,) = fastest_batch(measured(plan, axes=axes))
    assert sentence.startswith("The fastest batch per GPU is 8 (beyond the noise)")
    # A batch with two rates: then a case is one rate, and is named where others are left out.
    for seed in (1, 2, 3):
        plan.run("1_1", 8, seed, updates=125, train_samples_per_s=900.0 + seed,
                 environment={"effective_batch": 8}, label={"lr": 0.002})  # fmt: skip
    (sentence,) = fastest_batch(measured(plan, axes=axes))
    assert sentence.startswith("The fastest batch per GPU for lr 0.002 is 64 (beyond the noise)")


def test_the_fastest_batch_is_one_sentence(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    batches(plan, "1_1", {4: 100.0, 16: 200.0, 64: 3000.0}, best=4)
    assert fastest_batch(measured(plan)) == [
        "The fastest batch per GPU is 64 (beyond the noise); the highest accuracy has 4 "
        "(beyond the noise)."
    ]
    batches(plan, "1_2", {4: 100.0, 16: 200.0, 64: 199.9}, best=16)
    sweep = measured(plan)
    assert fastest_batch(sweep) == [
        "The fastest batch per GPU is 64 for 1_1, 16 for 1_2 (beyond the noise in 1); the highest "
        "accuracy has 4 for 1_1, 16 for 1_2 (beyond the noise in 2)."
    ]
    shown, _ = sweep_table(sweep)
    assert shown.best == fastest_batch(sweep) and shown.best[0] in markdown(shown)
    asked = "up to which batch larger ones pay: python -m harness batches "
    assert next_question(sweep) == f"{asked}{plan.folder} --target accuracy=VALUE"
    monkeypatch.chdir(plan.folder.parent)
    assert next_question(sweep) == f"{asked}{plan.folder.name} --target accuracy=VALUE"


def test_batches_that_compare_refuses_are_not_ranked(plan: Plan) -> None:
    """One seed shows no quality, and unlike data show nothing."""
    batches(plan, "1_1", {4: 100.0, 16: 200.0}, best=4, seeds=1)
    assert fastest_batch(measured(plan)) == ["The fastest batch per GPU is 16 (of unknown noise)."]
    plan.content["runs"].pop()
    plan.run("1_1", 64, environment={"data": {"data_checksum": "other"}})
    assert fastest_batch(measured(plan)) == [
        "Which batch per GPU is fastest is not known: 64 not compared (data checksum)."
    ]


def test_seeds_that_one_batch_lacks_make_no_batch_fastest(plan: Plan) -> None:
    """Means of all runs favour batch 64 in both; by the seeds that both have it is behind."""
    for seed, rate, accuracy in ((1, 1000, 0.80), (2, 1003, 0.81), (3, 3000, 0.99)):
        one(plan, 64, seed, rate, accuracy)
        if seed < 3:
            one(plan, 16, seed, 1100 + seed, accuracy + 0.02 + seed / 1e4)
    sentence, answer = answered(plan)
    assert "samples/s: 0.91 times as many" in answer and "accuracy: -2.0 points (-2" in answer
    assert sentence == (
        "The fastest batch per GPU is 16 (beyond the noise); the highest accuracy has 16 (beyond "
        "the noise)."
    )


def test_a_few_cases_are_named_and_many_are_counted(plan: Plan) -> None:
    setups = {"1_1": 64, "1_2": 16, "1_3": 64, "1_4": 64, "2_1": 64, "2_2": 64, "2_3": 16}
    for setup, fastest in setups.items():
        batches(plan, setup, {16: 1000.0, 64: 3000.0 if fastest == 64 else 300.0}, 16, seeds=1)
        if setup == "1_3":
            (sentence,) = fastest_batch(measured(plan))
            assert sentence.startswith(
                "The fastest batch per GPU is 64 for 1_1 and 1_3, 16 for 1_2"
            )
    (sentence,) = fastest_batch(measured(plan))
    assert sentence.startswith("The fastest batch per GPU is 64 in 5, 16 in 2 of 7 cases of setup")


def test_a_lead_without_spread_is_not_beyond_the_noise(plan: Plan) -> None:
    for batch, rate in ((16, 1000.0), (64, 1050.0)):
        for seed in (1, 2, 3):
            one(plan, batch, seed, rate)
    sentence, answer = answered(plan)
    assert "1.05 times as many, no spread to judge noise by; accuracy: equal" in answer
    assert sentence == (
        "The fastest batch per GPU is 64 (no spread to judge noise by); the highest accuracy has "
        "16 and 64, equal."
    )


def test_equal_batches_are_all_the_fastest(plan: Plan) -> None:
    """Also where their rates differ by an error of rounding."""
    for batch, rate in ((4, 1000 * (1 + 1e-15)), (16, 1000.0), (64, 1000.0)):
        for seed in (1, 2, 3):
            one(plan, batch, seed, rate)
    sentence, answer = answered(plan)
    assert "samples/s: equal; accuracy: equal" in answer
    assert sentence == (
        "The fastest batch per GPU is 4, 16 and 64, equal; the highest accuracy has 4, 16 and 64, "
        "equal."
    )


def test_batches_that_are_equal_in_one_seed_may_differ_in_others(plan: Plan) -> None:
    for batch, seeds in ((16, (1, 2)), (64, (2, 3))):
        for seed in seeds:
            one(plan, batch, seed, 1000.0)
    assert answered(plan)[0] == "The fastest batch per GPU is 16 and 64, equal (of unknown noise)."


@pytest.mark.parametrize("rate", [15.0, 100.0])
def test_disturbed_batches_are_left_out_and_named(rate: float, plan: Plan) -> None:
    """Beside one that is as fast although it was disturbed, none is the fastest."""
    for batch, busy in ((4, None), (16, None), (64, 0.9)):
        for seed in (1, 2, 3):
            one(plan, batch, seed, (rate if busy else 100.0) * batch + seed * batch % 7, busy=busy)
    sentence, answer = answered(plan)
    assert "samples/s: not compared (other programs)" in answer
    if rate == 100.0:
        none = "Which batch per GPU is fastest is not known: 64 not compared (other programs); the "
        assert sentence == f"{none}highest accuracy has 4, 16 and 64, equal."
        return
    assert sentence == (
        "The fastest batch per GPU is 16 (beyond the noise; 64 not compared (other programs)); the "
        "highest accuracy has 4, 16 and 64, equal."
    )


def test_of_two_disturbed_batches_none_is_the_fastest_beside_a_quiet_one(plan: Plan) -> None:
    for batch, busy in ((4, 0.9), (16, None), (64, 0.9)):
        for seed in (1, 2, 3):
            one(plan, batch, seed, 100.0 * batch + seed * batch % 7, busy=busy)
    sentence, _ = answered(plan)
    assert sentence.startswith(
        "Which batch per GPU is fastest is not known: 4, 64 not compared (other programs); the "
    )
    plan.content["runs"] = [run for run in plan.content["runs"] if "_16_" not in run["path"]]
    assert fastest_batch(measured(plan))[0].startswith(
        "The fastest batch per GPU is 64 (beyond the noise; all runs disturbed); the highest"
    )
    batches(plan, "1_2", {4: 100.0, 16: 200.0}, best=16)
    batches(plan, "1_4", {4: 100.0}, best=4)
    plan.run("1_4", 16, environment={"data": {"data_checksum": "other"}})
    assert fastest_batch(measured(plan))[0].startswith(
        "The fastest batch per GPU is 64 for 1_1, 16 for 1_2 (beyond the noise in 2; not known in "
        "1; all runs disturbed in 1); "
    )


TARGET = {"metric": "accuracy", "value": 0.9}


def reaching(plan: Plan, setup: str, *walls_s: float, reached: float = 0.95) -> None:
    """A run for each wall time, with a seed of its own."""
    for seed, wall_s in enumerate(walls_s, 1):
        plan.run(setup, seed=seed, epochs=epochs(0.5, reached, seconds=wall_s / 2))


def test_the_row_that_reaches_the_target_first_is_named(plan: Plan, tmp_path: Path) -> None:
    reaching(plan, "1_1", 40.0, 40.4, 40.2)
    reaching(plan, "1_2", 20.0, 20.4, 20.2)
    reaching(plan, "2_1", 30.0, 30.4, 30.2)
    reaching(plan, "2_2", 10.0, 10.0, 10.0, reached=0.8)
    sweep = measured(plan, target=TARGET)
    (sentence,) = first_to_target(sweep)
    assert sentence == (
        "accuracy at least 0.9 is reached first, by wall time, by setup 1_2, 0.67 times as long "
        "(0.66 to 0.67) as by setup 2_1 (beyond the noise; setup 2_2 missed it in 3 of 3 runs)."
    )
    _, page, *_ = make_report(plan.folder, tmp_path / "page")
    assert sentence in page.read_text()


def test_who_is_first_is_told_by_wall_time(plan: Plan) -> None:
    """It was told by training time, of which batch 4 takes less here."""
    for batch, seconds, waits_s in ((4, 10.0, 90.0), (16, 20.0, 0.0)):
        for seed in (1, 2, 3):
            rows = [
                row | {"wall_s": row["wall_s"] + waits_s + seed}
                for row in epochs(0.5, 0.95, seconds=seconds)
            ]
            plan.run("1_1", batch, seed, epochs=rows, updates=1000 // batch,
                     environment={"effective_batch": batch})  # fmt: skip
    sweep = measured(plan, target=TARGET)
    (sentence,) = first_to_target(sweep)
    assert "first, by wall time, by batch per GPU 16, 0.80 times as long (" in sentence
    (sentence,) = fastest_batch(sweep)
    assert "accuracy at least 0.9 is reached soonest, by wall time, with 16 (" in sentence


def test_a_row_that_was_sooner_and_is_not_compared_is_named(plan: Plan) -> None:
    reaching(plan, "1_1", 40.0, 40.4)
    reaching(plan, "1_2", 20.0, 20.4)
    reaching(plan, "2_1", 10.0)
    reaching(plan, "2_2", 15.0, 15.4)
    plan.run("2_2", seed=3, outcome="diverged")
    (sentence,) = first_to_target(measured(plan, target=TARGET))
    assert "is reached first, by wall time, by setup 1_2, 0.50 times as long (" in sentence
    assert "setup 2_1, sooner, is not compared: one seed" in sentence
    assert "setup 2_2, sooner, is not compared: 1 of 3 runs failed" in sentence


def test_a_lead_within_the_noise_is_called_so(plan: Plan) -> None:
    reaching(plan, "1_1", 40.0, 20.0)
    reaching(plan, "1_2", 20.0, 30.0)
    (sentence,) = first_to_target(measured(plan, target=TARGET))
    assert "by setup 1_2, 0.87 times as long (" in sentence
    assert sentence.endswith(" as by setup 1_1 (not beyond the noise).")


def test_no_row_is_first_to_a_target_of_single_runs_or_of_misses(plan: Plan) -> None:
    reaching(plan, "1_1", 40.0)
    reaching(plan, "1_2", 20.0)
    assert first_to_target(measured(plan, target=TARGET)) == []
    reaching(plan, "2_1", 40.0, 41.0, reached=0.6)
    reaching(plan, "2_2", 20.0, 21.0, reached=0.6)
    sweep = measured(plan, target=TARGET)
    assert first_to_target(sweep) == [] == first_to_target(measured(plan))


def test_no_batch_is_the_fastest_where_leads_go_in_a_circle(plan: Plan) -> None:
    for batch, seed, rate in ((4, 1, 3), (16, 1, 1), (16, 2, 3), (64, 2, 1), (64, 3, 3), (4, 3, 1)):
        one(plan, batch, seed, rate, rate / 10)
    sentence, _ = answered(plan)
    assert sentence == (
        "Which batch per GPU is fastest is not known: each is slower than some other."
    )


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


def test_batches_is_named_with_the_folder_read_where_the_batch_varies(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of no sweep lie in a folder that has none of its own."""
    root = plan.output_dir
    plan.run("1_1", 4, epochs=epochs(0.5, 0.9))
    plan.run("1_2", 2, devices=2, epochs=epochs(0.5, 0.9))
    assert next_question(measured(plan)) == ""  # both train with 4 samples an update
    for batch in (8, 16, 32):
        *_, of_none = read_all(root)[0]
        assert next_question(of_none) == ""  # a fit takes three
        folder = record(root / "bert" / f"alone{batch}", "--per_gpu_batch", str(batch))
        folder.environment.write_text(json.dumps({**ENVIRONMENT, "effective_batch": batch}))
    *_, of_none = read_all(root)[0]
    command = next_question(of_none).removeprefix("up to which batch larger ones pay: ")
    assert command == f"python -m harness batches {root} --target accuracy=VALUE"
    assert main(command.replace("VALUE", "0.6").split()[3:]) == 0
    assert "bert" in capsys.readouterr().out


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
    of_batches = draw("epoch_time", read_sweep(folder)).figure.axes  # time, and accuracy below
    assert [axes.get_title() for axes in of_batches] == ["vit", ""]


@pytest.mark.usefixtures("undrawn")
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
    assert html.count("<li>one run each, so all of it may be chance") == 2  # none above them
    assert html.count("<p>Next: which batch per GPU is fastest: <code>python -m harness") == 2


def test_figures_of_a_folder_are_those_of_all_sweeps_and_tasks_below(
    plan: Plan, figures: Verb, tmp_path: Path
) -> None:
    plan.run("1_1", 4)
    plan.run("1_1", 8)
    folder, root = plan.write(), plan.output_dir
    said = figures(root)
    assert f"written: {folder / 'epoch_time.png'}" in said and "not drawn" not in said
    for seed, lr in (("1", "0.01"), ("2", "0.02")):
        record(root / "bert" / f"alone{seed}", "--lr", lr, "--seed", seed, epochs=2)
    said = figures(root)
    (alone,) = (root / "figures").glob("runs_of_bert_*/learning_rate.png")
    assert f"written: {alone}" in said and f"written: {folder / 'epoch_time.png'}" in said
    said = figures(root, "--out", tmp_path / "drawn")
    for file in ("sizes/epoch_time.png", f"{alone.parent.name}/learning_rate.png"):
        assert (tmp_path / "drawn" / file).is_file()
    assert "there is no such folder" in figures.refused(root / "sweeps" / "nothing")


@pytest.mark.parametrize("scripts", [("vit",), ("vit", "bert")])
def test_scripts_head_their_times_to_accuracy(scripts: tuple[str, ...], plan: Plan) -> None:
    for script in scripts:
        for batch in (4, 16):
            plan.run("1_1", batch, epochs=epochs(0.5, 0.8), label={"script": script})
    figure = draw("time_to_accuracy", measured(plan)).figure
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ([""] * 3 if len(scripts) == 1 else ["vit"] * 3 + ["bert"] * 3)


@pytest.mark.usefixtures("undrawn")
def test_runs_beside_the_baseline_that_differ_in_more_are_not_denied(
    plan: Plan, tmp_path: Path
) -> None:
    for setup, count in (("1_1", 12), ("1_2", 8)):
        plan.run(setup, 4, 1, label={"epochs": count})
    plan.write(axes=["setup", "epochs"], baseline={"setup": "1_1"})
    _, text, *_ = make_report(plan.output_dir, tmp_path / "report")
    said = "no finished run has its baseline with the same other settings (setup 1_1)"
    assert f"- Nothing is compared: {said}." in text.read_text().splitlines()

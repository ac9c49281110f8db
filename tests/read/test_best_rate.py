"""The learning rate with the highest accuracy, in one sentence, and the figure that shows it."""

from __future__ import annotations

from typing import Any

import pytest

from harness.read.compare.fastest import best_learning_rate
from harness.read.drawing import NothingToDraw
from harness.read.figures.catalogue import draw, figure_for, figures_for, headline
from harness.read.tables.sweep_table import sweep_table
from tests.support.drawn import measured, points, texts
from tests.support.records import Plan, epochs

AXES = ["setup", "per_gpu_batch", "lr"]


def rates(plan: Plan, setup: str, accuracies: dict[float, float], seeds: int = 3) -> None:
    """Noise of at most half a point, of each rate another one."""
    for n, (lr, accuracy) in enumerate(accuracies.items()):
        for seed in range(1, seeds + 1):
            noise = (seed * (n + 2)) % 5 / 1000
            rows = epochs(0.5, accuracy + noise)
            plan.run(setup, 4, seed, epochs=rows, label={"lr": lr})


def tuned(plan: Plan, **changes: Any) -> Any:
    return measured(plan, axes=AXES, baseline={"lr": 0.001}, **changes)


def test_the_rate_with_the_highest_accuracy_is_named_for_each_case(plan: Plan) -> None:
    rates(plan, "1_1", {0.001: 0.7, 0.002: 0.8, 0.004: 0.9})
    sweep = tuned(plan)
    assert best_learning_rate(sweep) == [
        "The learning rate with the highest accuracy is 0.004 (the largest tried; beyond the "
        "noise)."
    ]
    rates(plan, "1_2", {0.001: 0.7, 0.002: 0.801, 0.004: 0.8})
    rates(plan, "1_4", {0.001: 0.7, 0.002: 0.8, 0.004: 0.9})
    sweep = tuned(plan)
    (sentence,) = best_learning_rate(sweep)
    assert sentence == (
        "The learning rate with the highest accuracy is 0.004 for 1_1, 1_4 (the largest tried; "
        "beyond the noise); 0.002 for 1_2 (not beyond the noise)."
    )
    assert sweep_table(sweep)[0].best == [sentence]


def test_one_seed_gives_no_best_learning_rate(plan: Plan) -> None:
    rates(plan, "1_1", {0.001: 0.7, 0.002: 0.8}, seeds=1)
    assert best_learning_rate(tuned(plan)) == []
    rates(plan, "1_2", {0.001: 0.7, 0.002: 0.8})
    (sentence,) = best_learning_rate(tuned(plan))
    assert sentence.endswith(
        "is 0.002 for 1_2 (the largest tried; beyond the noise); not known in 1."
    )


def test_a_rate_with_failed_runs_is_not_the_best(plan: Plan) -> None:
    """Two of its seeds did well, and three diverged."""
    rates(plan, "1_1", {0.001: 0.7, 0.002: 0.8}, seeds=5)
    rates(plan, "1_1", {0.01: 0.95}, seeds=2)
    for seed in (3, 4, 5):
        plan.run("1_1", 4, seed, epochs=[], outcome="diverged", label={"lr": 0.01})
    (sentence,) = best_learning_rate(tuned(plan))
    assert sentence == (
        "The learning rate with the highest accuracy is 0.002 (beyond the noise; 0.01 left out: "
        "3 of 5 runs failed (diverged))."
    )


def test_a_rate_of_which_all_runs_failed_is_named(plan: Plan) -> None:
    rates(plan, "1_1", {0.001: 0.7, 0.002: 0.8})
    for seed in (1, 2, 3):
        plan.run("1_1", 4, seed, epochs=[], outcome="diverged", label={"lr": 0.01})
    (sentence,) = best_learning_rate(tuned(plan))
    assert sentence.endswith(
        "is 0.002 (beyond the noise; 0.01 left out: 3 of 3 runs failed (diverged))."
    )


def test_a_rate_that_is_left_alone_is_not_the_best(plan: Plan) -> None:
    rates(plan, "1_1", {0.001: 0.5, 0.01: 0.95}, seeds=2)
    plan.run("1_1", 4, 3, epochs=[], outcome="diverged", label={"lr": 0.01})
    assert best_learning_rate(tuned(plan)) == []


def test_rates_that_are_not_compared_and_machines_are_named(plan: Plan) -> None:
    rates(plan, "1_1", {0.001: 0.7, 0.002: 0.8})
    rates(plan, "1_2", {0.001: 0.7, 0.002: 0.8})
    for seed in (1, 2, 3):  # of other data
        rows = epochs(0.5, 0.9 + seed / 1000)
        plan.run("1_2", 4, seed, epochs=rows, label={"lr": 0.004},
                 environment={"data": {"data_checksum": "other"}})  # fmt: skip
    (sentence,) = best_learning_rate(tuned(plan))
    assert "0.002 for 1_1 (the largest tried; beyond the noise); 0.002 for 1_2 (" in sentence
    assert "1_2 (beyond the noise; 0.004 " in sentence and "data checksum" in sentence


def test_rates_that_are_no_numbers_have_no_ends(plan: Plan) -> None:
    for name, accuracy in (("slow", 0.7), ("fast", 0.8)):
        for seed in (1, 2, 3):
            rows = epochs(0.5, accuracy + seed / 1000)
            plan.run("1_1", 4, seed, epochs=rows, label={"lr": name})
    (sentence,) = best_learning_rate(measured(plan, axes=AXES, baseline={"lr": "slow"}))
    assert sentence.startswith("The learning rate with the highest accuracy is fast (")
    assert "tried" not in sentence


def test_a_rate_of_its_own_for_each_batch_is_not_tuned(plan: Plan) -> None:
    for batch, lr in ((4, 0.001), (8, 0.002)):
        for seed in (1, 2):
            plan.run("1_1", batch, seed, epochs=epochs(0.5, 0.8 + seed / 100), label={"lr": lr})
    sweep = measured(plan, axes=AXES, baseline={"per_gpu_batch": 4})
    assert best_learning_rate(sweep) == [] and figure_for(sweep) == "epoch_time"


def test_a_baseline_that_names_the_rate_alone_asks_about_it(plan: Plan) -> None:
    rates(plan, "1_1", {0.001: 0.7, 0.002: 0.8})
    for lr, accuracy in ((0.001, 0.7), (0.002, 0.6)):
        for seed in (1, 2, 3):
            rows = epochs(0.5, accuracy + seed / 1000)
            plan.run("1_1", 8, seed, epochs=rows, label={"lr": lr})
    sweep = tuned(plan)
    assert figures_for(sweep) == ("learning_rate",)
    drawn = draw("learning_rate", sweep)
    assert headline(sweep) == best_learning_rate(sweep)[0].removesuffix(".")
    above = drawn.figure.get_suptitle() or drawn.figure.legends[0].get_title().get_text()
    assert "highest accuracy" in " ".join(above.split())
    assert len(points(drawn)) == 12 and len(points(drawn, 1)) == 12
    assert [axes.get_ylabel() for axes in drawn.figure.axes] == [
        "final accuracy", "final evaluation loss"
    ]  # fmt: skip
    target = {"metric": "accuracy", "value": 0.6}
    timed = draw("learning_rate", tuned(plan, target=target))
    assert timed.figure.axes[1].get_ylabel().startswith("training time to")
    other = measured(plan, axes=AXES, baseline={"per_gpu_batch": 4})
    assert figure_for(other) == "epoch_time"


def test_times_of_a_rate_that_some_runs_missed_are_not_drawn(plan: Plan) -> None:
    for lr, reached in ((0.001, 3), (0.002, 2)):
        for seed in (1, 2, 3):
            rows = epochs(0.5, 0.95 if seed <= reached else 0.6, seconds=10.0 + seed)
            plan.run("1_1", 4, seed, epochs=rows, label={"lr": lr})
    target = {"metric": "accuracy", "value": 0.9}
    drawn = draw("learning_rate", tuned(plan, target=target))
    assert len(points(drawn)) == 6 and len(points(drawn, 1)) == 3
    assert "1/3 missed" in texts(drawn, 1)
    assert drawn.notes == ["missed below: all at 0.002, 1 of 3 missed it"]
    assert "1 of 3 missed it" in drawn.alt and "\n" not in drawn.alt


def test_a_single_rate_is_not_drawn(plan: Plan) -> None:
    rates(plan, "1_1", {0.001: 0.7})
    with pytest.raises(NothingToDraw, match="the learning rate does not vary"):
        draw("learning_rate", measured(plan, axes=AXES))

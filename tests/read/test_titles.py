"""The titles of figures: which way of a sweep they name, and what they say of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.read.compare.answers import answers, finding
from harness.read.records.sweeps import read_sweep
from tests.support.records import TARGET, Plan, epochs, with_rates

RATE = "train_samples_per_s"


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(tmp_path / "outputs")


def test_a_title_names_what_gains_most(plan: Plan) -> None:
    """0.5 is further from 1 than 1.2 is, and no gain; 4 times is further, and within the noise."""
    with_rates(plan, "1_1", 100.0, 100.0, 100.0)
    with_rates(plan, "1_2", 120.0, 121.0, 119.0)
    with_rates(plan, "1_4", 110.0, 111.0, 109.0)
    with_rates(plan, "2_1", 50.0, 51.0, 49.0)
    with_rates(plan, "2_2", 10.0, 400.0, 900.0)
    text = finding(read_sweep(plan.write()), RATE, "accuracy")
    assert text.startswith("setup 1_2 against setup 1_1: samples/s: 1.20 times (1.")
    assert text.endswith("; accuracy: equal")


def test_a_title_names_what_loses_most_where_nothing_gains(plan: Plan) -> None:
    with_rates(plan, "1_1", 100.0, 100.0, 100.0)
    with_rates(plan, "1_2", 80.0, 81.0, 79.0)
    with_rates(plan, "2_1", 50.0, 51.0, 49.0)
    text = finding(read_sweep(plan.write()), RATE)
    assert text.startswith("setup 2_1 against setup 1_1: samples/s: 0.50 times (0.")


def test_a_gain_in_most_cases_is_more_than_a_large_one_in_one(plan: Plan) -> None:
    """In the mean over the cases 1.2 and 1.2 gain more than 1.3 and nothing."""
    for script, faster in (("vit", 130.0), ("bert", 100.0)):
        label = {"script": script}
        with_rates(plan, "1_1", 100.0, 100.1, 99.9, label=label)
        with_rates(plan, "1_2", 120.0, 121.0, 119.0, label=label)
        with_rates(plan, "2_1", faster, faster + 1, faster - 1, label=label)
    text = finding(read_sweep(plan.write(axes=["script", "setup"])), RATE)
    assert text.startswith("setup 1_2 against setup 1_1 in 2 cases of script: samples/s: 1.20")


def test_a_title_is_rather_of_what_is_compared_in_quality_too(plan: Plan) -> None:
    """With twice the batch 1_4 is faster and another training; the one case of several is named."""
    for lr in (0.1, 0.2):
        label = {"lr": lr}
        with_rates(plan, "1_1", 100.0, 101.0, 99.0, label=label)
        with_rates(plan, "1_2", 150.0, 151.0, 149.0, label=label)
    other = {"effective_batch": 8, "updates": 50}
    with_rates(plan, "1_4", 400.0, 401.0, 399.0, label={"lr": 0.1}, environment=other)
    sweep = read_sweep(plan.write(axes=["setup", "lr"]))
    text = finding(sweep, RATE, "accuracy")
    assert text.startswith("setup 1_2 against setup 1_1 in 2 cases of lr: samples/s: 1.50 times (")
    assert finding(sweep, RATE).startswith("setup 1_4 against setup 1_1 for lr 0.1: samples/s: 4.")
    _, answer = answers(sweep)
    assert answer.compared == "setup 1_4 against setup 1_1 for lr 0.1"


def test_a_shorter_time_is_a_gain_unless_the_target_is_missed(plan: Plan) -> None:
    for setup, seconds in (("1_1", 2.0), ("1_2", 1.0), ("2_1", 6.0), ("2_2", 0.1)):
        for batch in (4, 16):
            last = 0.6 if (setup, batch) == ("2_2", 16) else 0.9
            for seed in range(3):
                rows = epochs(0.5, last, seconds=seconds + seed / 100)
                plan.run(setup, batch, seed, epochs=rows)
    text = finding(read_sweep(plan.write(target=TARGET)), "tta_train_s")
    assert text.startswith("setup 1_2 against setup 1_1 in 2 cases of batch per GPU: training time")
    assert "to accuracy 0.9: 0.50 times" in text


def test_a_title_says_that_nothing_is_more_than_noise(plan: Plan) -> None:
    with_rates(plan, "1_1", 100.0, 110.0, 90.0)
    assert finding(read_sweep(plan.write()), RATE) == ""
    with_rates(plan, "1_2", 90.0, 112.0, 103.0)
    text = finding(read_sweep(plan.write()), RATE)
    assert text.startswith("setup 1_2 against setup 1_1: samples/s: 1.0")
    assert text.endswith("), within the noise")


def test_a_title_of_single_runs_says_that_they_are(plan: Plan) -> None:
    with_rates(plan, "1_1", 100.0)
    with_rates(plan, "1_2", 150.0)
    assert finding(read_sweep(plan.write()), RATE) == (
        "setup 1_2 against setup 1_1: samples/s: 1.50 times; one run each, so all of it may be "
        "chance"
    )

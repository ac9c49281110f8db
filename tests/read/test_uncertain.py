"""Intervals too wide to tell anything are judged by one rule in sweeps, titles and `compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.read.compare.answers import answers, finding
from harness.read.compare.compare import OF_UNCERTAIN
from harness.read.records.sweeps import read_sweep
from tests.support.paired import Verb, pair, pairs
from tests.support.records import TARGET, Plan, epochs, row_of, with_rates

RATE = "train_samples_per_s"
BUSY = {"launch": {"cpu_busy_share": 0.6}}
RUNS_NEEDED = "too uncertain to tell (more quiet runs are needed)"
SEEDS_NEEDED = "too uncertain to tell (more seeds are needed)"


@pytest.fixture
def compared(capsys: pytest.CaptureFixture[str]) -> Verb:
    return Verb("compare", capsys)


def test_an_interval_that_is_too_wide_is_judged_as_in_a_sweep(
    tmp_path: Path, compared: Verb
) -> None:
    """Ten times the differences above: 33 points to either side."""
    one = pairs(tmp_path / "a", [0.4, 0.5, 0.6])
    other = pairs(tmp_path / "b", [0.7, 0.5, 0.4], "--lr", "0.01", first=7)
    text = compared.in_one_line(one, other)
    needed = "too uncertain to tell (more seeds are needed)"
    assert f"3 and 3 values, not paired: {needed}" in text
    assert "accuracy: B has 3.33 points more than A," in text
    assert "too uncertain to tell: the interval reaches to both sides of no difference, and" in text


def test_a_spread_of_thousands_has_no_decimals(tmp_path: Path, compared: Verb) -> None:
    for name in ("a", "b"):
        for seed, rate in enumerate((2000.0, 5000.0), 1):
            pair(tmp_path / name, seed, rate=rate)
    assert "samples/s 2,857 ± 2,121 2,857 ± 2,121 1.000 times" in compared.in_one_line(
        tmp_path / "a", tmp_path / "b"
    )


def slower(plan: Plan, setup: str, *seconds: float, **facts: Any) -> None:
    for seed, each in enumerate(seconds):
        plan.run(setup, seed=seed, epochs=epochs(0.5, 0.95, seconds=each), **facts)


def test_a_legend_says_what_is_too_wide_where_something_is(plan: Plan, table: Verb) -> None:
    slower(plan, "1_1", 1.0, 1.0)
    slower(plan, "2_1", 1.0, 1.1)
    assert OF_UNCERTAIN not in " ".join(table(plan.write(target=TARGET)).split())
    slower(plan, "1_2", 1.0, 8.0)
    folder = plan.write(target=TARGET, columns=["tta_train_s_ratio"])
    _, answer = map(str, answers(read_sweep(folder)))
    text = "training time to accuracy 0.9: 2.83 times as long (no usable interval from 2 seeds), "
    assert text + SEEDS_NEEDED in answer
    shown = table(folder)
    assert OF_UNCERTAIN in " ".join(shown.split())
    assert row_of(shown, "1_2")[-3:] == ["2.83", "(too", "wide)"]


def test_with_a_target_the_rate_is_answered_where_it_can_differ(plan: Plan) -> None:
    for lr in (0.1, 0.2):
        for strategy, rate in (("ddp", 100.0), ("diloco", 200.0)):
            for seed in (0, 1):
                label = {"strategy": strategy, "lr": lr}
                plan.run("1_2", seed=seed, label=label, epochs=epochs(0.95),
                         train_samples_per_s=rate + seed)  # fmt: skip
    axes = ["strategy", "lr"]
    folder = plan.write(target=TARGET, axes=axes, baseline={"strategy": "ddp"})
    (answer,) = map(str, answers(read_sweep(folder)))
    assert "samples/s: 2.00 times as many (1.93 to 2.06)" in answer
    folder = plan.write(target=TARGET, axes=axes, baseline={"lr": 0.1})
    (answer,) = map(str, answers(read_sweep(folder)))
    assert "samples/s" not in answer and "training time to accuracy 0.9: " in answer


def test_a_title_in_which_nothing_is_found_names_each_variant(plan: Plan) -> None:
    for setup, seconds in (("1_1", 1.0), ("1_2", 8.0), ("2_1", 1.1)):
        slower(plan, setup, 1.0, seconds, environment=BUSY)
    text = finding(read_sweep(plan.write(target=TARGET)), "tta_wall_s", "tta_train_s", "accuracy")
    first, second = text.split("; ")
    start = "all runs disturbed (other programs): setup 1_2 against setup 1_1: wall time to accu"
    assert first.startswith(start) and first.endswith(SEEDS_NEEDED)
    assert second.startswith("setup 2_1 against setup 1_1: wall time to accuracy 0.9: 1.0")
    assert second.endswith("), within the noise")


def test_a_title_of_single_runs_says_so_once(plan: Plan) -> None:
    for setup, rate in (("1_1", 100.0), ("1_2", 150.0), ("2_1", 50.0)):
        with_rates(plan, setup, rate)
    assert finding(read_sweep(plan.write()), RATE) == (
        "setup 1_2 against setup 1_1: samples/s: 1.50 times; setup 2_1 against setup 1_1: "
        "samples/s: 0.50 times; one run each, so all of it may be chance"
    )


def test_a_title_says_once_what_is_needed(plan: Plan) -> None:
    slower(plan, "1_1", 1.0, 1.0)
    slower(plan, "1_2", 1.0, 8.0)
    text = finding(read_sweep(plan.write(target=TARGET)), "tta_wall_s", "tta_train_s")
    wall, train = text.split("; ")
    assert wall.endswith(SEEDS_NEEDED) and train.endswith(", too uncertain to tell")

"""The batch beyond which larger ones do not pay off: planted curves are recovered."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.cli import main
from harness.read.compare.critical_batch import fit, interpolated
from harness.read.records.runs import Target, time_to_target
from tests.support.paired import Verb, pair
from tests.support.records import epochs, row_of, with_epochs

TARGET = Target("accuracy", 0.8)
BATCHES = (8, 16, 32, 64, 128)


def rows(*quality: float, samples: float = 100.0, metric: str = "accuracy") -> list[dict[str, Any]]:
    return [
        {"epoch": n, metric: value, "samples": samples, "epoch_time_s": 2.0}
        for n, value in enumerate(quality, 1)
    ]


def planted(least: float, critical: float, batch: float) -> float:
    return least * (1 + batch / critical)


def test_the_target_lies_between_two_evaluations() -> None:
    # From 0.6 to 0.9 in the third epoch: two thirds of the way to 0.8.
    passed = interpolated(rows(0.5, 0.6, 0.9, 0.95), TARGET)
    assert passed is not None and not passed.early
    assert passed.samples == pytest.approx(200 + 100 * 2 / 3)
    # What was measured is the end of that epoch.
    measured = time_to_target(rows(0.5, 0.6, 0.9, 0.95), TARGET)
    assert (measured["tta_train_s"], measured["tta_samples"]) == (6, 300)
    loss = interpolated(rows(1.0, 0.5, 0.25, metric="eval_loss"), Target("eval_loss", 0.4))
    assert loss is not None and loss.samples == pytest.approx(200 + 100 * 0.4)


def test_what_is_missed_early_or_unknown() -> None:
    missed = interpolated(rows(0.5, 0.79), TARGET)
    assert missed is not None and math.isinf(missed.samples)
    early = interpolated(rows(0.85, 0.9), TARGET)
    assert early is not None and early.early and early.samples == 100
    assert interpolated([], TARGET) is None
    assert interpolated([{"accuracy": None, "samples": 100}], TARGET) is None
    assert interpolated([{"accuracy": 0.9, "samples": None}], TARGET) is None
    without_time = [{**row, "epoch_time_s": None} for row in rows(0.5, 0.9)]
    no_time = interpolated(without_time, TARGET)
    assert no_time is not None and no_time.samples == 175
    assert "tta_train_s" not in time_to_target(without_time, TARGET)


@pytest.mark.parametrize(("least", "critical"), [(1000.0, 40.0), (5e5, 17.5), (300.0, 100.0)])
def test_a_planted_critical_batch_is_found(least: float, critical: float) -> None:
    curve = fit({float(b): [planted(least, critical, b)] * 2 for b in BATCHES})
    assert curve.why is None
    assert curve.least_samples == pytest.approx(least, rel=1e-6)
    assert curve.critical == pytest.approx(critical, rel=1e-6)
    assert curve.low == pytest.approx(critical, rel=1e-3) == curve.high
    assert curve.samples(critical) == pytest.approx(2 * least, rel=1e-6)


def test_the_interval_is_that_of_the_ratio() -> None:
    """Against its definition: at either end R, base - R slope is t standard errors from zero."""
    values = {8.0: [110.0, 122.0, 119.0], 16.0: [138.0, 150.0, 141.0], 64.0: [290.0, 262.0, 275.0]}
    curve = fit(values)
    assert curve.critical is not None and curve.low is not None and curve.high is not None
    assert curve.low < curve.critical < curve.high
    x = np.array([b for b, v in values.items() for _ in v])
    y = np.array([e for v in values.values() for e in v])
    w = np.array([1 / np.mean(v) ** 2 for v in values.values() for _ in v])
    design = np.stack([np.ones_like(x), x], axis=1) * np.sqrt(w)[:, None]
    beta, squares, *_ = np.linalg.lstsq(design, y * np.sqrt(w), rcond=None)
    covariance = np.linalg.inv(design.T @ design) * squares[0] / 7
    assert curve.critical == pytest.approx(beta[0] / beta[1])
    for end in (curve.low, curve.high):
        along = np.array([1.0, -end])
        error = math.sqrt(along @ covariance @ along)
        assert abs(along @ beta) / error == pytest.approx(2.364624, abs=1e-4)  # t, 7 degrees


def test_the_interval_covers_what_was_planted() -> None:
    random = np.random.default_rng(5)
    covered = 0
    for _ in range(300):
        values = {float(b): list(planted(1000, 40, b) * random.normal(1, 0.05, 3)) for b in BATCHES}
        curve = fit(values)
        assert curve.low is not None and curve.high is not None
        covered += curve.low <= 40 <= curve.high
    assert 0.92 <= covered / 300 <= 0.98


def test_what_the_data_do_not_determine() -> None:
    two = fit({8.0: [1.0, 1.1], 16.0: [1.2, 1.3]})
    assert two.critical is None and two.why is not None and "2 batches" in two.why
    flat = fit({8.0: [100, 110, 90.0], 16.0: [95.0, 105, 101], 32.0: [108.0, 92, 103]})
    assert flat.critical is None and flat.why is not None and "more than noise" in flat.why
    # As flat as the data are, a small critical batch can be excluded.
    assert flat.low is not None and 30 < flat.low < 300
    steep = fit({b: [b * 10.0 - 5, b * 10.0 - 4.9] for b in (8.0, 16.0, 32.0)})
    assert steep.critical is None and steep.why is not None and "smaller batches" in steep.why
    falling = fit({8.0: [300.0, 301.0], 16.0: [280.0, 281.0], 32.0: [240.0, 241.0]})
    assert falling.critical is None and falling.low is None
    bent = fit({8.0: [100.0], 16.0: [100.0], 32.0: [100.0], 64.0: [900.0]})
    assert bent.critical is None and bent.why is not None and "straight line" in bent.why


def sweep_of(
    folder: Path, critical: float = 40.0, batches: tuple[int, ...] = BATCHES, lr: str = "3e-3",
    rate: float = 100.0, machine: str = "a-cpux2", repeat: str = "1",
) -> Path:  # fmt: skip
    """Runs whose accuracy grows in a straight line, and reaches 0.8 where the plan has it."""
    for batch in batches:
        for seed, noise in ((1, 0.98), (2, 1.0), (3, 1.02)):
            samples = 1000 * (1 + batch / critical) * noise
            path = pair(
                folder, seed, "--b", str(batch // 2), "--lr", lr, "--repeat", repeat,
                rate=rate * batch**0.5, environment={"effective_batch": batch, "machine": machine},
            )  # fmt: skip
            its_epochs = [
                {
                    "epoch": n, "accuracy": min(0.8 * n * 400 / samples, 1.0), "samples": 400,
                    "epoch_time_s": 400 / (rate * batch**0.5),
                }
                for n in range(1, 13)
            ]  # fmt: skip
            with_epochs(path, its_epochs)
    return folder


@pytest.fixture
def batches(capsys: pytest.CaptureFixture[str]) -> Verb:
    return Verb("batches", capsys)


AT = ("--target", "accuracy=0.8")


def test_a_planted_sweep(tmp_path: Path, batches: Verb) -> None:
    text = batches.in_one_line(sweep_of(tmp_path), *AT)
    assert "bert, bert-nano, to accuracy at least 0.8" in text
    assert "32 0.003 3 2,000 ± 0 1,800 ± 36 1,801 566 3.54 ± 0.00" in text
    assert "Bcrit: 40 (95 % interval 3" in text and "extrapolated" not in text
    # (40 + 128) / (40 + 8)
    assert "from batch 8 to 128 the samples needed grow 3.50-fold" in text
    # To the end of an epoch of 400 samples: 2000 / 566 at batch 32, 2800 / 800 at 64.
    assert (
        "least training time to the target: 3.50 s, at batch 64; batch 128 takes 1.11 times" in text
    )
    assert "Bcrit: the batch at which twice the least samples are needed" in text


def test_repeats_of_a_seed_are_no_further_seeds(tmp_path: Path, batches: Verb) -> None:
    """They need as many samples, and would make the interval narrower."""
    once, twice = (
        json.loads(batches(sweep_of(tmp_path, repeat=repeat), *AT, "--json"))["families"][0]
        for repeat in ("1", "2")
    )
    for name, value in once["critical_batch"].items():
        assert twice["critical_batch"][name] == pytest.approx(value), name
    assert [len(batch["interpolated_samples"]) for batch in twice["batches"]] == [3] * 5


def test_beyond_what_was_measured(tmp_path: Path, batches: Verb) -> None:
    text = batches.in_one_line(sweep_of(tmp_path, critical=40.0, batches=(8, 16, 32)), *AT)
    assert "extrapolated: batches of 8 to 32 were measured" in text
    assert "at batch 32, the largest of those compared: larger ones may be faster" in text
    gone = pair(tmp_path, 9, "--b", "128", environment={"effective_batch": 256})
    with_epochs(gone, rows(0.1, 0.2))
    assert "the largest of those compared: larger ones are left out" in batches.in_one_line(
        tmp_path, *AT
    )


def test_misses_and_failures_are_left_out_and_named(tmp_path: Path, batches: Verb) -> None:
    sweep_of(tmp_path, batches=(8, 16, 32, 64))
    gone = pair(tmp_path, 9, "--b", "128", environment={"effective_batch": 256})
    with_epochs(gone, rows(0.1, 0.2))
    pair(tmp_path, 9, "--b", "256", outcome="diverged", environment={"effective_batch": 512})
    soon = pair(tmp_path, 9, "--b", "2", environment={"effective_batch": 4})
    with_epochs(soon, rows(0.9, 0.95))
    pair(tmp_path, 9, "--b", "1", environment={"effective_batch": 2})  # nothing of its epochs
    text = batches.in_one_line(tmp_path, *AT)
    assert "batch 256 is left out: 1 of 1 runs miss the target" in text
    assert "batch 512 is left out: 1 not finished" in text
    assert (
        "batch 4 is left out of the fit: 1 reaches it before the first evaluation "
        "(a --target beyond accuracy=0.9 tells when)"
    ) in text
    assert "batch 2 is left out: its records do not tell" in text
    assert "Bcrit: 40" in text


def test_the_first_evaluation_bounds_the_time_of_an_early_batch(
    tmp_path: Path, batches: Verb
) -> None:
    """It cannot be fitted; when that epoch ended was measured, as of any other batch."""
    sweep_of(tmp_path, batches=(8, 16))
    for seed, value in ((1, 0.85), (2, 0.9)):
        soon = pair(tmp_path, seed, "--b", "2", environment={"effective_batch": 4})
        with_epochs(soon, rows(value, 0.95))
    row = row_of(batches(tmp_path, *AT), "4")
    assert (row[3:6], row[-1]) == (["100±0", "-", "-"], "2.00±0.00")
    text = batches.in_one_line(tmp_path, *AT)
    assert "(a --target beyond accuracy=0.9 tells when)" in text
    assert "least training time to the target: 2.00 s, at batch 4; batch 8 takes" in text


def times_of(folder: Path, times: dict[int, dict[int, float]]) -> Path:
    """Runs that reach the target at the end of two epochs: batch -> seed -> seconds."""
    for batch, by_seed in times.items():
        for seed, seconds in by_seed.items():
            path = pair(folder, seed, "--b", str(batch // 2),
                        environment={"effective_batch": batch})  # fmt: skip
            with_epochs(path, epochs(0.5, 0.9, seconds=seconds / 2))
    return folder


def test_a_smaller_batch_that_takes_as_long_is_named(tmp_path: Path, batches: Verb) -> None:
    times = {16: {1: 8.0, 2: 9.2}, 32: {1: 8.1, 2: 8.8}, 64: {1: 14.0, 2: 14.6}}
    text = batches.in_one_line(times_of(tmp_path, times), *AT)
    assert "least training time to the target: 8.45 s, at batch 32; batch 64 takes 1.69" in text
    assert "; batch 16 takes 1.02 times as long (within noise)" in text


def test_seeds_that_one_batch_lacks_decide_nothing(tmp_path: Path, batches: Verb) -> None:
    """As `compare` has it: the mean of all runs is less at batch 16 for its third seed alone."""
    missing = {16: {1: 2.90, 2: 2.91, 3: 1.44}, 64: {1: 2.58, 2: 2.585}}
    text = batches.in_one_line(times_of(tmp_path / "missing", missing), *AT)
    assert (
        "least training time to the target: 2.58 s, at batch 64, the largest of those compared: "
        "larger ones may be faster; batch 16 takes 1.12 times as long (more than noise, of 2 pairs "
        "with the same seed)"
    ) in text
    # The other way round, the next larger one is the slower by the same pairs.
    text = batches.in_one_line(
        times_of(tmp_path / "after", {16: missing[64], 64: missing[16]}), *AT
    )
    assert (
        "2.58 s, at batch 16; batch 64 takes 1.12 times as long (more than noise, of 2 pairs"
    ) in text


def test_equal_times_and_times_in_a_circle_name_no_single_batch(
    tmp_path: Path, batches: Verb
) -> None:
    text = batches.in_one_line(times_of(tmp_path / "equal", {8: {1: 2.0}, 16: {1: 2.0}}), *AT)
    assert "the target: 2.00 s, at batch 8 and 2.00 s, at batch 16, the largest of those" in text
    # By the one seed that two of them share, each is faster than one and slower than the other.
    circle = {8: {1: 1.0, 3: 5.0}, 16: {1: 3.0, 2: 1.0}, 32: {2: 3.0, 3: 3.0}}
    text = batches.in_one_line(times_of(tmp_path / "circle", circle), *AT)
    assert "least training time to the target: not known, as each batch takes longer" in text


def test_not_determined(tmp_path: Path, batches: Verb) -> None:
    sweep_of(tmp_path, batches=(8, 64))
    text = batches.in_one_line(tmp_path, *AT)
    assert "Bcrit: not determined: 2 batches can be fitted; 3 are needed" in text


def test_learning_rates_are_families(tmp_path: Path, batches: Verb) -> None:
    sweep_of(tmp_path, 40.0, (8, 16, 32), lr="1e-3")
    sweep_of(tmp_path, 20.0, (8, 16, 32), lr="2e-3")
    text = batches.in_one_line(tmp_path, *AT)
    assert text.count("Bcrit: ") == 3  # and once in the legend
    slow, fast = text.index("bert-nano, lr 0.001"), text.index("bert-nano, lr 0.002")
    assert slow < text.index("Bcrit: 40") < fast < text.index("Bcrit: 20")
    assert "Bcrit: 20" in batches.in_one_line(f"{tmp_path}:lr=0.002", *AT)


def test_times_of_several_machines_are_not_compared(tmp_path: Path, batches: Verb) -> None:
    sweep_of(tmp_path, batches=(8, 16, 32))
    sweep_of(tmp_path, batches=(64, 128), machine="b-gpux8")
    text = batches.in_one_line(tmp_path, *AT)
    assert "Bcrit: 40" in text and "times are not compared: machine: batch 8 has a-cpux2" in text
    assert "least training time" not in text
    (family,) = json.loads(batches(tmp_path, *AT, "--json"))["families"]
    for each in family["batches"]:
        assert (each["train_samples_per_s"], each["tta_train_s"]) == (None, [])
        assert len(each["tta_samples"]) == 3


def test_processors_of_all_batches_are_compared_with_each_other(
    tmp_path: Path, batches: Verb
) -> None:
    """Both others are like the first one, and not like each other."""
    for batch, tflops in ((8, 1.0), (16, 1.2), (32, 0.82)):
        known = {"fp32_tflops": tflops, "bf16_tflops": 0.1, "threads": 1}
        facts = {"effective_batch": batch, "cpu_calibration": known, "observed": {"device": "cpu"}}
        for seed in (1, 2):
            path = pair(tmp_path, seed, "--b", str(batch // 2), environment=facts)
            with_epochs(path, epochs(0.5, 0.9))
    text = batches.in_one_line(tmp_path, *AT)
    assert "times are not compared: processor: " in text and "least training time" not in text


def test_mistakes(tmp_path: Path, batches: Verb, capsys: pytest.CaptureFixture[str]) -> None:
    folder = sweep_of(tmp_path / "a", batches=(8,))
    for arguments, text in (
        ([folder], "give --target METRIC=VALUE"),
        ([folder, *AT], "the batch does not vary"),
        ([folder, folder], "unexpected"),
        ([folder, "--aim", "1"], "unknown flag --aim"),
        ([tmp_path / "none", *AT], "there is no such folder"),
    ):
        assert text in batches.refused(*arguments)
    assert main(["batches"]) == 2 and main(["batches", "--help"]) == 0
    assert capsys.readouterr().out.count("usage: python -m harness batches") == 1

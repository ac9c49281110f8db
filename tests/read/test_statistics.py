"""Means and intervals: worked out by hand, and held against scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from harness.read.statistics import (
    Estimate,
    Noise,
    compared,
    difference,
    is_rate,
    leaders,
    ratio,
    spread,
    student_t,
    welch_half,
    welch_sum,
)


def test_mean_sd_and_interval() -> None:
    estimate = spread([0.8, 0.9, 1.0])
    assert (estimate.n, estimate.mean, estimate.sd) == (3, pytest.approx(0.9), pytest.approx(0.1))
    # Student's t with 2 degrees of freedom is 4.30265; 4.30265 * 0.1 / sqrt(3) = 0.248414.
    assert estimate.low == pytest.approx(0.651586, abs=1e-6)
    assert estimate.high == pytest.approx(1.148414, abs=1e-6)
    two = spread([10.0, 14.0])  # sd 2.8284, t 12.7062: 12 -+ 12.7062 * 2
    assert (two.mean, two.low, two.high) == (12, pytest.approx(-13.4124), pytest.approx(37.4124))
    assert spread([3.2, 3.2, 3.2]).sd == 0


def test_one_run_has_no_spread_and_none_has_no_mean() -> None:
    one = spread([5.0])
    assert (one.n, one.mean, one.median, one.sd, one.low, one.high) == (1, 5, 5, None, None, None)
    assert (spread([]).n, spread([]).mean) == (0, None)


def test_a_miss_is_infinite_and_the_median_need_not_be() -> None:
    estimate = spread([4.0, math.inf, 6.0])
    assert (estimate.n, estimate.mean, estimate.median) == (3, math.inf, 6)
    assert (estimate.sd, estimate.low, estimate.high) == (None, None, None)
    assert spread([4.0, math.inf]).median == math.inf


def test_a_mean_of_rates_is_the_total_by_the_total() -> None:
    # 100 samples at 10 a second and 100 at 30: 200 samples in 13.33 s.
    assert spread([10.0, 30.0], harmonic=True).mean == pytest.approx(15)
    equal = spread([32.1, 32.1, 32.1], harmonic=True)
    assert (equal.mean, equal.sd, equal.low, equal.high) == (32.1, 0, 32.1, 32.1)
    one = spread([10.0], harmonic=True)
    assert (one.n, one.mean, one.sd, one.low) == (1, 10, None, None)
    # So far apart that the time per sample may be nothing: the rate has no upper end.
    assert spread([1.0, 100.0], harmonic=True).high == math.inf
    assert spread([0.0, 2.0], harmonic=True).mean == 1  # no time passes no sample
    rates = ("train_samples_per_s", "train_samples_per_s_per_gpu", "tflops_per_s_without_padding",
             "train_samples_per_second", "link_bandwidth_mbit", "mfu")  # fmt: skip
    assert all(is_rate(name) for name in rates)
    assert not any(is_rate(name) for name in ("accuracy", "wall_s", "joules_per_sample"))


def test_a_paired_interval() -> None:
    # Differences 1, 2, 3: mean 2, sd 1, t of 2 degrees 4.30265: 2 -+ 4.30265 / sqrt(3).
    estimate = difference({1: 11.0, 2: 22.0, 3: 33.0}, {3: 30.0, 2: 20.0, 1: 10.0})
    assert estimate.paired and estimate.value == 2
    assert estimate.low == pytest.approx(2 - 2.484138, abs=1e-5)
    assert estimate.high == pytest.approx(2 + 2.484138, abs=1e-5)
    assert estimate.judged(0.0) == Noise.WITHIN


def test_a_welch_interval() -> None:
    # Squared standard errors 6 / 3 = 2 and 2 / 2 = 1, degrees of freedom 3^2 / (2^2/2 + 1^2/1) = 3,
    # t of 3 degrees 3.182446: 9 -+ 3.182446 sqrt(3).
    root = math.sqrt(6)
    estimate = difference({1: 10 - root, 2: 10.0, 3: 10 + root}, {4: 0.0, 5: 2.0})
    assert not estimate.paired and estimate.value == pytest.approx(9)
    assert estimate.low == pytest.approx(9 - 5.512158, abs=1e-5)
    assert estimate.high == pytest.approx(9 + 5.512158, abs=1e-5)
    assert estimate.judged(0.0) == Noise.BEYOND


def test_other_seeds_are_no_pairs_even_if_as_many() -> None:
    # Equal sizes and spreads: degrees of freedom 4, t 2.776445; s.e. sqrt(2/3).
    estimate = difference({4: 2.0, 5: 3.0, 6: 4.0}, {1: 1.0, 2: 2.0, 3: 3.0})
    assert not estimate.paired and estimate.value == 1
    assert estimate.low == pytest.approx(1 - 2.776445 * math.sqrt(2 / 3), abs=1e-5)


def test_seeds_of_one_side_alone_do_not_count_beside_pairs() -> None:
    """A slow seed that only one side has would make that side slow."""
    lower = {1: 10.0, 2: 20.0, 3: 40.0}
    (one, alone), (two, both) = (
        (ratio(upper, lower), difference(upper, lower))
        for upper in ({3: 44.0}, {2: 22.0, 3: 44.0, 7: 900.0})
    )
    assert one.value == pytest.approx(1.1) and alone.value == 4
    assert (one.n, one.paired, one.low) == (alone.n, alone.paired, alone.low) == (1, True, None)
    assert two.value == two.low == pytest.approx(1.1) and both.value == 3
    assert (two.n, two.paired) == (both.n, both.paired) == (2, True)
    assert [each.unpaired for each in (one, alone, two, both)] == [2, 2, 2, 2]
    assert both.scaled(2).unpaired == 2 and ratio({7: 1.0}, lower).unpaired == 0
    # A miss is not left out with its seed.
    assert ratio({3: 44.0, 7: math.inf}, lower).value == math.inf


def test_one_value_on_a_side_has_no_interval() -> None:
    estimate = difference({3: 2.0}, {1: 1.0, 2: 1.5})
    assert (estimate.value, estimate.low, estimate.high) == (0.75, None, None)
    assert estimate.judged(0.0) == Noise.UNKNOWN


def test_values_without_spread_tell_nothing_of_noise() -> None:
    assert difference({1: 2.0, 2: 2.0}, {1: 1.0, 2: 1.0}).judged(0.0) == Noise.NO_SPREAD
    assert difference({1: 2.0, 2: 2.0}, {3: 1.0, 4: 1.0}).judged(0.0) == Noise.NO_SPREAD
    equal = difference({1: 2.0, 2: 3.0}, {1: 2.0, 2: 3.0})
    assert (equal.value, equal.low, equal.high, equal.judged(0.0)) == (0, 0, 0, Noise.EQUAL)


def test_an_error_of_rounding_is_no_difference() -> None:
    lower = {1: 1000.0, 2: 2000.0}
    estimate = ratio({seed: value * (1 + 1e-15) for seed, value in lower.items()}, lower)
    assert estimate.value != 1 and estimate.judged(1.0) == Noise.EQUAL
    assert estimate.judged(0.0) == Noise.NO_SPREAD
    assert Estimate().judged(1.0) == Noise.UNKNOWN


def test_one_pair_is_never_equal() -> None:
    estimate = difference({1: 0.9, 2: 0.5}, {1: 0.9, 3: 0.7})
    assert (estimate.value, estimate.n) == (0, 1) and estimate.judged(0.0) == Noise.UNKNOWN
    assert compared({1: 0.9, 2: 0.5}, {1: 0.9, 3: 0.7}) == 1
    assert compared({1: 0.9, 2: 0.5}, {3: 0.9}) == 1 and compared({}, {3: 0.9}) == 0


def test_a_side_leads_by_what_it_shares_with_each_other() -> None:
    behind, ahead = {1: 10.0, 2: 10.0, 3: 900.0}, {1: 11.0, 2: 11.0}
    assert leaders([behind, ahead], ratio, 1.0) == [ahead]
    assert leaders([behind, {1: 12.0}, ahead], difference, 0.0) == [{1: 12.0}]
    assert leaders([ahead, {**ahead}], ratio, 1.0) == [ahead, ahead]
    assert leaders([{1: 3.0, 3: 1.0}, {1: 1.0, 2: 3.0}, {2: 1.0, 3: 3.0}], ratio, 1.0) == []


def test_a_ratio_is_compared_in_pairs_where_the_seeds_are_the_same() -> None:
    paired = ratio({1: 110.0, 2: 220.0}, {1: 100.0, 2: 200.0})
    # Every seed says 1.1.
    assert paired.value == paired.low == paired.high == pytest.approx(1.1)
    assert paired.paired and paired.n == 2
    # Other seeds, by their logarithms: middle ln 2 / 2, squared standard error (ln 2)^2 / 4, one
    # degree of freedom, t 12.7062.
    other = ratio({1: 100.0, 2: 100.0}, {3: 50.0, 4: 100.0})
    assert other.value == pytest.approx(math.sqrt(2)) and not other.paired
    assert other.low is not None
    assert math.log(other.low) == pytest.approx(math.log(2) / 2 * (1 - 12.7062), abs=1e-4)


def test_a_single_run_gives_a_ratio_without_interval() -> None:
    one = ratio({3: 3.0}, {1: 2.0, 2: 4.0})
    assert one.value == pytest.approx(3 / math.sqrt(8))
    assert (one.low, one.high, one.n) == (None, None, 1)
    assert ratio({}, {1: 2.0}).value is None
    assert ratio({1: 2.0}, {1: 0.0}).value is None
    assert difference({1: 0.5}, {}).value is None


def test_a_miss_leaves_a_ratio_without_interval() -> None:
    missed = ratio({1: 3.0, 2: math.inf}, {1: 2.0, 2: 4.0})
    assert (missed.value, missed.low, missed.high) == (math.inf, None, None)
    assert ratio({1: 3.0}, {1: math.inf}).value == 0
    assert ratio({1: math.inf}, {1: math.inf}) == Estimate()


def test_a_ratio_lies_in_its_interval() -> None:
    """Nine of ten seeds say 1.1; the tenth, which says 1.3, decides the ratio of the means."""
    lower = dict.fromkeys(range(9), 1.0) | {9: 1000.0}
    upper = {n: value * (1.3 if n == 9 else 1.1) for n, value in lower.items()}
    estimate = ratio(upper, lower)
    assert estimate.value == pytest.approx(1.1 * (1.3 / 1.1) ** 0.1)
    assert estimate.low is not None and estimate.high is not None
    assert estimate.low < estimate.value < estimate.high < sum(upper.values()) / sum(lower.values())


def test_an_estimate_is_scaled_to_other_units() -> None:
    scaled = Estimate(1.5, 1.2, None, 3, True).scaled(100, -100)
    assert (scaled.value, scaled.low, scaled.high) == (50, pytest.approx(20), None)
    assert (scaled.n, scaled.paired) == (3, True)


RANDOM = np.random.default_rng(3)
SAMPLES = [
    tuple(RANDOM.lognormal(3, 0.2, size=n) for n in sizes) for sizes in ((3, 3), (2, 5), (9, 4))
]


@pytest.mark.parametrize("freedom", [1, 2, 2.5, 7, 40])
def test_student_t_is_that_of_scipy(freedom: float) -> None:
    assert student_t(freedom) == pytest.approx(stats.t.ppf(0.975, freedom))


@pytest.mark.parametrize(("one", "other"), SAMPLES)
def test_intervals_are_those_of_scipy(one: np.ndarray, other: np.ndarray) -> None:
    estimate = spread(list(one))
    low, high = stats.t.interval(0.95, len(one) - 1, one.mean(), stats.sem(one))
    assert (estimate.mean, estimate.low, estimate.high) == pytest.approx((one.mean(), low, high))
    rate = spread(list(one), harmonic=True)
    ends = stats.t.interval(0.95, len(one) - 1, (1 / one).mean(), stats.sem(1 / one))
    assert rate.mean == pytest.approx(stats.hmean(one))
    # Where the time per sample may be nothing, the rate has no upper end.
    assert (1 / (rate.high or 0), 1 / (rate.low or 0)) == pytest.approx((max(ends[0], 0), ends[1]))

    apart = [dict(enumerate(one)), {f"other {n}": v for n, v in enumerate(other)}]
    welch = stats.ttest_ind(one, other, equal_var=False).confidence_interval()
    unpaired = difference(*apart)
    assert (unpaired.low, unpaired.high) == pytest.approx((welch.low, welch.high))
    logs = stats.ttest_ind(np.log(one), np.log(other), equal_var=False).confidence_interval()
    of_ratio = ratio(*apart)
    assert (of_ratio.low, of_ratio.high) == pytest.approx(tuple(np.exp(logs)))
    assert of_ratio.value == pytest.approx(stats.gmean(one) / stats.gmean(other))


def test_errors_add_up_in_any_order() -> None:
    """A sum of sums has the error of all parts: 13**2 / (4**2 / 2 + 9**2 / 3) = 169 / 35."""
    one, two, three = (4.0, 2), (9.0, 3), (1.0, 1)
    assert welch_sum(one, two) == (13.0, pytest.approx(169 / 35))
    assert welch_sum(welch_sum(one, two), three) == pytest.approx(welch_sum(three, two, one))
    assert welch_sum(one) == one and welch_half(one) == pytest.approx(4.302653 * 2)
    exact = welch_sum((0.0, 1))
    assert exact == (0.0, math.inf) and welch_half(exact) == 0
    assert welch_sum(one, exact) == one


def test_pairs_are_those_of_scipy() -> None:
    one, other = SAMPLES[0]
    pairs = [dict(enumerate(one)), dict(enumerate(other))]
    expected = stats.ttest_rel(one, other).confidence_interval()
    estimate = difference(*pairs)
    assert (estimate.low, estimate.high) == pytest.approx(
        (expected.low, expected.high)
    ) and estimate.n == 3
    logs = stats.ttest_rel(np.log(one), np.log(other)).confidence_interval()
    of_ratio = ratio(*pairs)
    assert (of_ratio.low, of_ratio.high) == pytest.approx(tuple(np.exp(logs)))
    assert of_ratio.value == pytest.approx(stats.gmean(one / other))


def test_the_interval_of_three_seeds_covers_the_truth() -> None:
    """95 of 100 times; a bootstrap of three values would do so 72 times."""
    random, covered = np.random.default_rng(7), 0
    for _ in range(1000):
        seeds, noise = random.normal(0, 0.05, 3), random.normal(0, 0.02, (2, 3))
        one, other = (dict(enumerate(seeds + row)) for row in noise)
        estimate = difference(one, other)
        assert estimate.low is not None and estimate.high is not None
        covered += estimate.low <= 0 <= estimate.high
    assert 930 <= covered <= 970

"""Means and their bootstrap intervals."""

import math

import numpy as np
import pytest

from esmshard.train.metrics import Interval, bootstrap, mean

NAN = math.nan


def test_the_mean_lies_inside_its_interval() -> None:
    interval = bootstrap([0.1, 0.2, 0.6, 0.9])
    assert interval.mean == pytest.approx(0.45)
    assert 0.1 <= interval.low < 0.45 < interval.high <= 0.9
    assert interval.n == 4


def test_the_width_is_that_of_the_normal_approximation() -> None:
    x = np.random.default_rng(1).normal(0.5, 0.2, 400)
    interval = bootstrap(x.tolist())
    half = 1.96 * x.std() / math.sqrt(len(x))
    assert interval.mean - interval.low == pytest.approx(half, rel=0.15)
    assert interval.high - interval.mean == pytest.approx(half, rel=0.15)


def test_about_95_percent_of_intervals_hold_the_truth() -> None:
    rng = np.random.default_rng(2)
    intervals = [bootstrap(rng.normal(0, 1, 60).tolist(), seed) for seed in range(300)]
    share = np.mean([interval.low <= 0 <= interval.high for interval in intervals])
    assert 0.90 <= share <= 0.98


def test_values_that_are_missing_are_left_out_and_not_counted() -> None:
    assert bootstrap([NAN, 0.1, NAN, 0.2, 0.6]) == bootstrap([0.1, 0.2, 0.6])
    assert bootstrap([NAN, 0.1, NAN, 0.2, 0.6]).n == 3


def test_the_same_seed_gives_the_same_interval() -> None:
    values = np.random.default_rng(3).random(20).tolist()
    assert bootstrap(values, 7) == bootstrap(values, 7)
    assert bootstrap(values, 7).low != bootstrap(values, 8).low
    assert bootstrap(values) == bootstrap(values, 0)


def test_two_methods_on_the_same_proteins_are_resampled_alike() -> None:
    x = np.random.default_rng(4).random(30)
    one, other = bootstrap(x.tolist()), bootstrap((x + 0.25).tolist())
    assert (other.low, other.mean, other.high) == pytest.approx((one.low + 0.25, one.mean + 0.25, one.high + 0.25))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("values", [[], [NAN], [NAN, NAN]])
def test_no_value_has_no_mean_and_no_interval(values: list[float]) -> None:
    interval = bootstrap(values)
    assert interval.n == 0
    assert all(math.isnan(v) for v in (interval.mean, interval.low, interval.high, mean(values)))


def test_equal_values_leave_no_doubt() -> None:
    assert bootstrap([0.25] * 5) == Interval(0.25, 0.25, 0.25, 5)
    assert bootstrap([0.75]) == Interval(0.75, 0.75, 0.75, 1)


def test_an_interval_is_printed_in_three_digits() -> None:
    assert str(Interval(0.12345, 0.1, 0.2, 9)) == "0.123 [0.100, 0.200]"


def test_the_plain_mean_skips_missing_values() -> None:
    assert mean([0.1, NAN, 0.3]) == pytest.approx(0.2)

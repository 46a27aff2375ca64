"""Metrics of records and their bootstrap intervals."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from esmshard.tasks.intervals import Interval, bootstrap, difference, draws, interval

NAN = math.nan


def mean(rows: Sequence[float]) -> dict[str, float]:
    known = [row for row in rows if not math.isnan(row)]
    return {"mean": float(np.mean(known)) if known else NAN}


def of_mean(values: Sequence[float], seed: int = 0) -> Interval:
    return interval(bootstrap(mean, values, seed)["mean"])


def test_the_value_lies_inside_its_interval() -> None:
    found = of_mean([0.1, 0.2, 0.6, 0.9])
    assert found.value == pytest.approx(0.45)
    assert 0.1 <= found.low < 0.45 < found.high <= 0.9


def test_the_width_is_that_of_the_normal_approximation() -> None:
    x = np.random.default_rng(1).normal(0.5, 0.2, 400)
    found, half = of_mean(x.tolist()), 1.96 * x.std() / math.sqrt(len(x))
    assert found.value - found.low == pytest.approx(half, rel=0.15)
    assert found.high - found.value == pytest.approx(half, rel=0.15)


def test_about_95_percent_of_intervals_hold_the_truth() -> None:
    rng = np.random.default_rng(2)
    intervals = [of_mean(rng.normal(0, 1, 60).tolist(), seed) for seed in range(40)]
    assert 0.85 <= np.mean([found.low <= 0 <= found.high for found in intervals]) <= 1


def test_a_metric_of_all_records_is_taken_anew_of_each_resample() -> None:
    # The ratio of two sums is no mean of ratios: 3 of 4 and 0 of 1 are 3 of 5.
    rows = [(3, 4), (0, 1)]

    def ratio(rows: Sequence[tuple[int, int]]) -> dict[str, float]:
        return {"ratio": sum(a for a, _ in rows) / sum(b for _, b in rows)}

    found = bootstrap(ratio, rows)["ratio"]
    assert found[0] == pytest.approx(0.6)
    assert {round(v, 6) for v in found[1:]} == {0.0, 0.6, 0.75}


def test_the_same_seed_gives_the_same_interval() -> None:
    values = np.random.default_rng(3).random(20).tolist()
    assert of_mean(values, 7) == of_mean(values, 7)
    assert of_mean(values, 7).low != of_mean(values, 8).low
    assert of_mean(values) == of_mean(values, 0)


def test_two_methods_on_the_same_records_are_resampled_alike() -> None:
    x = np.random.default_rng(4).random(30)
    one, other = bootstrap(mean, x.tolist())["mean"], bootstrap(mean, (x + 0.25).tolist())["mean"]
    found = difference(other, one)
    assert (found.value, found.low, found.high) == pytest.approx((0.25, 0.25, 0.25))
    # Two that were not resampled alike would differ by an interval as wide as their own.
    assert interval(one).high - interval(one).low > 0.1


def test_resamples_without_a_value_are_left_out() -> None:
    found = of_mean([NAN, NAN, 0.5, 0.5])
    assert (found.value, found.low, found.high) == (0.5, 0.5, 0.5)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("values", [[NAN], [NAN, NAN]])
def test_no_value_has_no_interval(values: list[float]) -> None:
    found = of_mean(values)
    assert all(math.isnan(v) for v in (found.value, found.low, found.high))


def test_there_are_fewer_resamples_of_many_records() -> None:
    assert sum(1 for _ in draws(10)) == 2000
    assert sum(1 for _ in draws(20_000)) == 500
    assert len(next(draws(1_000_000))) == 1_000_000, "one at a time"
    every = np.concatenate(list(draws(3)))
    assert np.bincount(every).tolist() == pytest.approx([2000] * 3, rel=0.1)


def test_an_interval_is_printed_in_three_digits() -> None:
    assert str(Interval(0.12345, 0.1, 0.2)) == "0.123 [0.100, 0.200]"

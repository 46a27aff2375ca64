"""Metrics of records and their bootstrap intervals."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from esmshard.data.mutations import parse_variant
from esmshard.tasks import metrics
from esmshard.tasks.metrics import Interval, bootstrap, difference, interval, variant_units


def mean(rows: Sequence[float]) -> dict[str, float]:
    return {"mean": float(np.mean(rows))}


def of_mean(values: Sequence[float], seed: int = 0) -> Interval:
    return interval(bootstrap(mean, values, seed)["mean"])


def test_intervals_are_those_of_the_normal_approximation_and_contain_the_truth() -> None:
    x = np.random.default_rng(1).normal(0.5, 0.2, 400)
    found, half = of_mean(x.tolist()), 1.96 * x.std() / math.sqrt(len(x))
    assert found.value - found.low == pytest.approx(half, rel=0.15)
    assert found.high - found.value == pytest.approx(half, rel=0.15)
    rng = np.random.default_rng(2)
    intervals = [of_mean(rng.normal(0, 1, 60).tolist(), seed) for seed in range(20)]
    assert 0.85 <= np.mean([found.low <= 0 <= found.high for found in intervals]) <= 1


def test_a_metric_of_all_records_is_taken_anew_of_each_resample() -> None:
    # The ratio of two sums is no mean of ratios: nine times 3/4 and once 0/1 give 27/37.
    rows = [(3, 4)] * 9 + [(0, 1)]

    def ratio(rows: Sequence[tuple[int, int]]) -> dict[str, float]:
        return {"ratio": sum(a for a, _ in rows) / sum(b for _, b in rows)}

    found = bootstrap(ratio, rows)["ratio"]
    assert found[0] == pytest.approx(27 / 37)
    possible = {round(3 * k / (4 * k + 10 - k), 6) for k in range(11)}
    assert {round(v, 6) for v in found[1:]} <= possible
    assert len(set(found)) > 3


def test_two_methods_on_the_same_records_are_resampled_alike() -> None:
    x = np.random.default_rng(4).random(30)
    one, other = bootstrap(mean, x.tolist())["mean"], bootstrap(mean, (x + 0.25).tolist())["mean"]
    found = difference(other, one)
    assert (found.value, found.low, found.high) == pytest.approx((0.25, 0.25, 0.25))
    # Different resamples would give the difference an interval.
    assert interval(one).high - interval(one).low > 0.1


def test_fewer_than_ten_records_or_blocks_have_no_interval() -> None:
    for count in (1, 9, 10):
        values = [2 / 3] * count  # all resamples agree
        found, gain = of_mean(values), difference(*(bootstrap(mean, [v - k for v in values])["mean"] for k in (0, 1)))
        assert (found.value, gain.value) == pytest.approx((2 / 3, 1))
        assert [math.isnan(v) for v in (found.low, found.high, gain.low, gain.high)] == [count < 10] * 4
    for blocks, known in ((9, False), (10, True)):
        # Block -1 is the wild type and not a position.
        block_N = np.append(-1, np.arange(39) % blocks)
        found = interval(bootstrap(mean, np.arange(40.0).tolist(), block_N=block_N)["mean"])
        assert math.isnan(found.low) is not known


def test_variants_of_the_same_sites_are_resampled_together_unless_the_sites_are_few() -> None:
    def units(names: Sequence[str]) -> tuple[list[int], str]:
        block_N, noun = variant_units([parse_variant(name) for name in names])
        return block_N.tolist(), noun

    singles = [f"A{site}{letter}" for site in range(1, 11) for letter in "CW"]
    assert units(["WT", *singles]) == ([-1, *np.arange(10).repeat(2).tolist()], "position")
    doubles = [f"A{site}{letter}:A50C" for site in range(1, 11) for letter in "CW"]
    assert units(doubles) == (np.arange(10).repeat(2).tolist(), "site combination")
    assert units(doubles[:18])[1] == "variant", "nine combinations"
    whole = [f"A1{a}:A2{b}" for a in "CDEFGH" for b in "CDEFGH"]
    assert units([*whole, *singles])[1] == "variant", "one combination has more than half of them"
    blocks, noun = units(["A1C", "WT", "A2C", "A1C"])
    assert noun == "variant"
    assert [blocks.count(one) for one in blocks] == [2, 1, 1, 2], "the rows of a variant are one unit"


def ece(rows: Sequence[tuple[float, bool]]) -> dict[str, float]:
    confidence, right = (np.array(column) for column in zip(*rows, strict=True))
    return {"ECE": metrics.calibration_error(metrics.calibration(confidence.astype(float), right.astype(bool)))}


def test_calibration_error_lies_in_its_interval() -> None:
    """The true error is 0.1. The error in a sample is higher, and the errors in its resamples are still higher."""
    rng, held, by_percentiles = np.random.default_rng(5), 0, 0
    for _ in range(12):
        confidence = rng.uniform(0.4, 1, 60)
        values = bootstrap(ece, list(zip(confidence, rng.random(60) < confidence - 0.1, strict=True)))["ECE"]
        found = interval(values, "ECE")
        assert 0 <= found.low <= found.value <= found.high
        held += found.low <= 0.1 <= found.high
        low, high = np.percentile(values[1:], [2.5, 97.5])
        by_percentiles += low <= 0.1 <= high
    assert held >= 10
    assert by_percentiles < 6

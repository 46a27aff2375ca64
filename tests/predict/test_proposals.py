"""Batches of variants to measure next: candidates, uncertainty, and what a shared position or residue costs."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from esmshard.data.mutations import Mutation, parse_variant
from esmshard.errors import UsageError
from esmshard.predict.proposals import candidates, choose, combinations, count_combinations, log_improvement

PROTEIN = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ"


def batch(values_MN: np.ndarray, count: int, kappa: float = 1.0) -> list[int]:
    return choose(values_MN, [()] * values_MN.shape[1], count, kappa, diversity=0)


def dense(values_MN: np.ndarray, count: int, kappa: float) -> list[int]:
    """GP-BUCB with the whole covariance: half of it between variants is shared, half of each variance its own."""
    mean_N = values_MN.mean(0)
    spread_MN = values_MN - mean_N
    between_NN = spread_MN.T @ spread_MN / (len(values_MN) - 1)
    own_N, prior_NN = 0.5 * between_NN.diagonal(), 0.5 * between_NN
    chosen: list[int] = []
    for _ in range(count):
        posterior_NN = prior_NN
        if chosen:
            k_NC = prior_NN[:, chosen]
            measured_CC = prior_NN[np.ix_(chosen, chosen)] + np.diag(own_N[chosen])
            posterior_NN = prior_NN - k_NC @ np.linalg.solve(measured_CC, k_NC.T)
        bound_N = mean_N + kappa * np.sqrt(np.maximum(posterior_NN.diagonal(), 0) + own_N)
        bound_N[chosen] = -np.inf
        chosen.append(int(bound_N.argmax()))
    return chosen


def test_batches_are_those_of_the_whole_covariance() -> None:
    for models, kappa in ((2, 1.0), (5, 0.3), (5, 3.0)):
        rng = np.random.default_rng(models)
        shared = rng.normal(size=(models, 3)) @ rng.normal(size=(3, 40))
        values_MN = shared + 0.3 * rng.normal(size=(models, 40)) + 0.5 * rng.normal(size=40)
        found = batch(values_MN, 12, kappa)
        assert found == dense(values_MN, 12, kappa)
        assert len(set(found)) == 12
        bounds = values_MN.mean(0) + kappa * values_MN.std(0, ddof=1)
        assert found[0] == int(bounds.argmax())
        assert found != np.argsort(-bounds)[:12].tolist(), "it is not the plain upper bound"
        assert batch(values_MN, 10, 0.0) == np.argsort(-values_MN.mean(0))[:10].tolist()


def test_the_objective_by_hand() -> None:
    """Models that agree, so that a batch follows from means and costs alone."""
    variants = [parse_variant(name) for name in ("M1A", "M1C", "K2A", "T3D:A4E", "M1D:K2C")]
    mean_N = np.array([4.0, 3.9, 3.7, 3.0, 3.8])
    cost, expected = 0.5 * mean_N.std(), list[int]()
    for _ in range(5):
        shared = np.zeros(5)
        for n, mine in enumerate(variants):
            for c, what in itertools.product(expected, ("position", "wild", "mutant")):
                theirs = {getattr(m, what) for m in variants[c]}
                shared[n] += sum(value in theirs for value in {getattr(m, what) for m in mine}) / len(mine)
        bound = mean_N - cost * shared
        bound[expected] = -np.inf
        expected.append(int(bound.argmax()))
    assert choose(np.repeat(mean_N[None], 3, axis=0), variants, 5, 1.0, 0.5) == expected
    assert expected != np.argsort(-mean_N).tolist()


def test_all_combinations_of_three_sites_and_a_part_of_more() -> None:
    sites = (4, 6, 15)
    library = [
        tuple(Mutation(n, PROTEIN[n], to) for n, to in zip(sites, letters, strict=True) if to != PROTEIN[n])
        for letters in itertools.product("ACDEF", repeat=3)
    ]
    for most, text in ((8000, "all 8,000"), (1000, "1,000 of 8,000")):
        variants, about = candidates(PROTEIN, sites, library, most)
        assert (len(set(variants)), len(variants), text in about) == (most, most, True)
    singles, _ = candidates(PROTEIN, sites, [one for one in library if len(one) < 2], 10)
    assert len(singles) == 3 * 19, "without combinations in the table, none are candidates"


def parts_of(sites: list[int]) -> list[Mutation]:
    """Different substitutions, one for each given site, which may come again."""
    return [Mutation(n, PROTEIN[n], "ACDEFGHIKLNPQ"[k]) for k, n in enumerate(sites)]


class Additive:
    """Two models, which agree on the sum of random effects of the changes."""

    def __init__(self, parts: list[Mutation]) -> None:
        self.effect_of = dict(zip(parts, np.random.default_rng(0).normal(size=len(parts)).tolist(), strict=True))

    def __call__(self, variants: list[tuple[Mutation, ...]]) -> np.ndarray:
        sums = [sum(self.effect_of[mutation] for mutation in variant) for variant in variants]
        return np.array([sums, sums], np.float32)[:, :, None]


few_sites = st.lists(st.integers(0, 6), min_size=2, max_size=9).filter(lambda sites: len({*sites}) > 1)


@settings(max_examples=60, deadline=None)
@given(few_sites, st.integers(2, 4), st.sampled_from([1.0, -1.0]))
def test_combinations_are_all_that_can_be_made(sites: list[int], size: int, sign: float) -> None:
    parts = parts_of(sites)
    model = Additive(parts)
    parts.sort(key=lambda part: -sign * model.effect_of[part])
    every = {
        tuple(sorted(members))
        for k in range(2, size + 1)
        for members in itertools.combinations(parts, k)
        if len({mutation.position for mutation in members}) == k
    }
    assert count_combinations(parts, size) == len(every)
    variants, values_MNT, about, _ = combinations(parts, size, 1000, model, sign)
    assert (len(variants), {*variants}, about["search"]) == (len(every), every, "exhaustive")
    # A beam predicts fewer, at different sites all the same, and loses nothing where effects add up.
    most = max(len(parts) * (size - 1), len(every) - 1)
    if most < len(every):
        beam, beam_MNT, about, _ = combinations(parts, size, most, model, sign)
        assert len(beam) == len({*beam}) == about["predicted"] <= most
        assert {*beam} <= every
        assert (beam_MNT == model(beam)).all()
        assert (sign * beam_MNT).max() == pytest.approx((sign * values_MNT).max())


def test_requests_that_are_too_large_or_too_small() -> None:
    many = [Mutation(n, "A", "C") for n in range(300)]
    with pytest.raises(UsageError, match="--from 181 "):
        combinations(many, 3, 10, Additive(many), 1.0)
    assert count_combinations(many[:181], 3) <= 1_000_000 < count_combinations(many[:182], 3)
    with pytest.raises(UsageError, match="1 site;"):
        combinations(parts_of([3, 3, 3]), 2, 10, Additive([]), 1.0)


def test_the_logarithm_of_the_expected_improvement() -> None:
    for gain, sd in ((0.3, 0.5), (-2.0, 0.7), (4.0, 0.1)):
        integral = quad(lambda x, *of: x * norm.pdf(x, *of), 0, gain + 12 * sd, args=(gain, sd))[0]
        assert log_improvement(np.array([gain]), np.array([sd]))[0] == pytest.approx(np.log(integral), rel=1e-6)
    gain_N = -np.geomspace(1, 1e4, 50)  # 1e4 deviations below, where a float is zero
    far_N = log_improvement(gain_N, np.ones(50))
    assert np.isfinite(far_N).all()
    assert (np.diff(far_N) < 0).all()
    assert log_improvement(np.array([-50.0]), np.ones(1))[0] == pytest.approx(-1258.744183, abs=2e-3)  # of mpmath
    assert np.isfinite(log_improvement(np.zeros(3), np.zeros(3))).all()


@pytest.mark.parametrize("by_models", [True, False])
def test_uncertain_variants_are_chosen(by_models: bool) -> None:
    """Of equal means, the second half of the variants is uncertain: models disagree, or have a deviation."""
    sd_N = np.repeat([0.01, 1.0], 20)
    noise_MN = np.random.default_rng(0).normal(size=(4, 40))
    values_MN = np.zeros((4, 40)) if not by_models else sd_N * (noise_MN - noise_MN.mean(0))
    given: dict[str, Any] = {"diversity": 0.0, "deviation_MN": None if by_models else np.tile(sd_N, (4, 1))}
    for acquisition in ("ucb", "thompson", "ei"):
        chosen = choose(values_MN, [()] * 40, 8, acquisition=acquisition, **given, best_measured=0.5)
        assert min(chosen) >= 20, acquisition
        assert chosen == choose(values_MN, [()] * 40, 8, acquisition=acquisition, **given, best_measured=0.5)
    values_MN += np.linspace(1, 0, 40)
    assert choose(values_MN, [()] * 40, 8, acquisition="greedy", **given) == [*range(8)]


def test_a_posterior_sample_is_the_best_of_one_model() -> None:
    values_MN = np.eye(5) + np.linspace(0, 0.1, 5)[:, None]
    chosen = choose(values_MN, [()] * 5, 5, diversity=0, acquisition="thompson")
    assert sorted(chosen) == [*range(5)]
    first = [choose(values_MN, [()] * 5, 1, diversity=0, acquisition=a)[0] for a in ("thompson", "ei")]
    assert first[0] == int(np.random.default_rng(0).integers(5))

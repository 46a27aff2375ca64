"""Batches of variants to measure next: candidates, uncertainty, and what a shared position or residue costs."""

import itertools

import numpy as np

from esmshard.data.variants import Mutation, parse_variant
from esmshard.predict.proposals import candidates, choose

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

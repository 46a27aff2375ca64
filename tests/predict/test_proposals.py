"""Batches of variants to measure next: what a shared position or residue costs."""

import inspect

import numpy as np
import pytest

from esmshard.cli import infer
from esmshard.data.variants.substitutions import Mutation, parse_variant
from esmshard.predict.proposals import DIVERSITY, KAPPA, choose, composition
from esmshard.predict.zero_shot import all_singles

PROTEIN = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ"


def one_change_everywhere() -> tuple[np.ndarray, list[tuple[Mutation, ...]]]:
    """Models that see one kind of change as the best wherever it can be made: a wild-type letter, by another one."""
    variants = all_singles(PROTEIN)
    rng = np.random.default_rng(0)
    wild, mutant = (dict(zip("ACDEFGHIKLMNPQRSTVWY", rng.normal(size=20), strict=True)) for _ in range(2))
    mean_N = np.array([wild[one[0].wild] + mutant[one[0].mutant] for one in variants])
    return mean_N + 0.05 * rng.normal(size=(5, len(variants))), variants


def test_a_batch_is_spread_over_positions_and_residues() -> None:
    values_MN, variants = one_change_everywhere()

    def chosen(diversity: float) -> list[tuple[Mutation, ...]]:
        return [variants[n] for n in choose(values_MN, variants, 24, KAPPA, diversity)]

    same, unlike = chosen(0), chosen(DIVERSITY)
    assert max(composition(same)["most_frequent_wild_type_residue"].values()) >= 12, "it is what is to be avoided"
    assert max(composition(unlike)["most_frequent_wild_type_residue"].values()) <= 8
    assert max(composition(unlike)["most_frequent_mutant_residue"].values()) <= 8
    assert composition(unlike)["positions"] > composition(same)["positions"]
    assert len(set(unlike)) == 24
    assert unlike[0] == same[0], "the first one shares nothing with any other"


def test_the_objective_by_hand() -> None:
    """Models that agree, so that a batch follows from means and costs alone."""
    variants = [parse_variant(name) for name in ("M1A", "M1C", "K2A", "T3D:A4E", "M1D:K2C")]
    mean_N = np.array([4.0, 3.9, 3.7, 3.0, 3.8])
    values_MN = np.repeat(mean_N[None], 3, axis=0)
    cost = 0.5 * mean_N.std()

    def best(chosen: list[int]) -> int:
        shared = np.zeros(5)
        for n, mine in enumerate(variants):
            for c in chosen:
                for what in ("position", "wild", "mutant"):
                    theirs = {getattr(m, what) for m in variants[c]}
                    shared[n] += sum(value in theirs for value in {getattr(m, what) for m in mine}) / len(mine)
        bound = mean_N - cost * shared
        bound[chosen] = -np.inf
        return int(bound.argmax())

    expected: list[int] = []
    for _ in range(5):
        expected.append(best(expected))
    assert choose(values_MN, variants, 5, 1.0, 0.5) == expected
    assert expected != np.argsort(-mean_N).tolist()


def test_the_command_has_the_same_defaults() -> None:
    given = inspect.signature(infer.predict).parameters
    assert (given["kappa"].default, given["diversity"].default) == (KAPPA, DIVERSITY)


@pytest.mark.parametrize("diversity", [0, 0.15, 10])
def test_scale_and_origin_of_the_values_do_not_matter(diversity: float) -> None:
    values_MN, variants = one_change_everywhere()
    chosen = choose(values_MN, variants, 12, KAPPA, diversity)
    assert choose(1000 * values_MN - 7, variants, 12, KAPPA, diversity) == chosen

"""Chooses which variants to measure next: variants with high or uncertain predictions that differ from each other."""

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.preprocessing import MultiLabelBinarizer

from esmshard.data.variants import Mutation, is_library
from esmshard.vocab import STANDARD

KAPPA = 1.0  # how many standard deviations the upper confidence bound adds to the mean
DIVERSITY = 0.15
"""The penalty on a candidate for each position, wild-type residue or mutant residue that it shares with a chosen
variant, in standard deviations of the predictions. The value was tuned on beta-lactamase: `benchmarks/results`."""
MOST, MOST_PASSES = 160_000, 20_000
"""The maximum number of candidate combinations: MOST = 20^4, or MOST_PASSES if each one needs a forward pass."""


def candidates(
    protein: str, sites: Collection[int], measured: Sequence[tuple[Mutation, ...]], most: int
) -> tuple[list[tuple[Mutation, ...]], str]:
    """Return candidate variants, which change only the given sites, and a sentence about the candidates.

    If `measured` is a combinatorial library (see `is_library`), candidates are combinations of amino acids at `sites`.
    If there are more than `most`, a random part of them is returned. Variants with few and with many changes are then
    about as frequent as in `measured`. If `measured` is no such library, candidates are single substitutions. `sites`
    are counted from 0, and those with X, B, U, Z or O are left out.
    """
    sites = sorted(site for site in sites if protein[site] in STANDARD)
    if not is_library(measured):
        singles: list[tuple[Mutation, ...]] = [
            (Mutation(n, protein[n], to),) for n in sites for to in STANDARD if to != protein[n]
        ]
        return singles, f"the candidates are the {len(singles):,} single substitutions at {len(sites):,} sites"
    total = len(STANDARD) ** len(sites)

    def variant(letters: Sequence[str]) -> tuple[Mutation, ...]:
        return tuple(Mutation(n, protein[n], to) for n, to in zip(sites, letters, strict=True) if to != protein[n])

    if total <= most:
        variants = [variant(letters) for letters in itertools.product(STANDARD, repeat=len(sites))]
        return variants, f"the candidates are all {total:,} combinations of letters at {len(sites)} sites"
    rng = np.random.default_rng(0)
    counts = np.array([min(len(changes), len(sites)) for changes in measured if changes])
    drawn: dict[tuple[Mutation, ...], None] = {}
    for count in rng.choice(counts, 2 * most).tolist():
        letters = [protein[n] for n in sites]
        for place in rng.choice(len(sites), count, replace=False).tolist():
            letters[place] = STANDARD[rng.integers(len(STANDARD))]
        drawn[variant(letters)] = None
    variants = list(drawn)[:most]
    return variants, (
        f"the candidates are {len(variants):,} of {total:,} combinations of letters at {len(sites)} sites, drawn at "
        "random with as many changes as measured variants have; for others, give a table, or fewer sites with --sites"
    )


def choose(
    values_MN: npt.NDArray[np.floating],
    variants: Sequence[tuple[Mutation, ...]],
    count: int,
    kappa: float = KAPPA,
    diversity: float = DIVERSITY,
) -> list[int]:
    """Choose variants to measure together, one after the other. Each choice is the variant with the highest
    mean + kappa x sd - diversity x spread x shared.

    `sd` is the standard deviation of a variant's predictions over the models. After each choice, `sd` shrinks by the
    information that a measurement of the chosen variant would give about the other variants (GP-BUCB: Desautels et al.
    2014, JMLR 15:3873, with the models in place of a Gaussian process). A measurement of other variants reduces only
    half of a variant's variance, since the other half is assumed to be independent of them.

    Predictions differ much less between models than between variants, so without a cost the choices could be the same
    substitution at every position. Shared traits therefore have a cost. `spread` is the standard deviation of the mean
    predictions of all candidates. A trait is a position, a wild-type residue or a mutant residue. `shared` is how many
    traits a variant shares with each chosen variant, added up and divided by the number of the variant's changes.

    Args:
        values_MN: predictions of M models for N variants; higher is better. With one model, `sd` is 0.
        variants: mutations of the N variants.
        count: the number of variants to choose, at most N.
        kappa: how many times `sd` is added; see KAPPA.
        diversity: the cost of a shared trait; see DIVERSITY. With 0, shared traits have no cost.

    Returns:
        The indices of the chosen variants, in the order of choice.
    """
    mean_N = values_MN.mean(0, dtype=np.float64)
    spread_MN = (values_MN - mean_N) / np.sqrt(max(1, len(values_MN) - 1))
    unshared_N = 0.5 * (spread_MN**2).sum(0)
    shared_MN = np.sqrt(0.5) * spread_MN
    traits_NK, cost, shared_N = _traits(variants), diversity * mean_N.std(), np.zeros(len(variants))
    changes_N = np.array([max(1, len(variant)) for variant in variants])
    chosen: list[int] = []
    for _ in range(count):
        bound_N = mean_N + kappa * np.sqrt(unshared_N + (shared_MN**2).sum(0)) - cost * shared_N
        bound_N[chosen] = -np.inf
        best = int(bound_N.argmax())
        chosen.append(best)
        shared_N += (traits_NK @ traits_NK[best].T).toarray()[:, 0] / changes_N
        direction_M = shared_MN[:, best].copy()
        total = direction_M @ direction_M + unshared_N[best]
        if total > 0:  # a measurement of `best` is a rank-one update of the covariance
            length = direction_M @ direction_M
            share = (1 - np.sqrt(max(0.0, 1 - length / total))) / length if length > 0 else 0.0
            shared_MN = shared_MN - share * np.outer(direction_M, direction_M @ shared_MN)
    return chosen


def _traits(variants: Sequence[tuple[Mutation, ...]]) -> Any:
    """Return which traits (position, wild-type and mutant residue) each variant has, as a sparse 0/1 matrix [N, K]."""
    traits = [
        {trait for m in variant for trait in (f"at {m.position}", f"from {m.wild}", f"to {m.mutant}")}
        for variant in variants
    ]
    return MultiLabelBinarizer(sparse_output=True).fit_transform(traits)

"""The choice of variants to measure next: candidates, and promising and uncertain ones that differ from each other."""

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.preprocessing import MultiLabelBinarizer

from esmshard.data.variants import Mutation, is_library
from esmshard.vocab import STANDARD

KAPPA = 1.0
"""The standard deviations that the upper confidence bound adds to a mean."""
DIVERSITY = 0.15
"""The cost of a shared position, wild-type residue or mutant residue for each chosen variant that has it, in standard
deviations of the predictions. Measured on beta-lactamase: `benchmarks/results`.
"""
MOST, MOST_PASSES = 160_000, 20_000
"""The most combinations that are candidates: 20 to the power of 4; and where each takes a forward pass of its own."""


def candidates(
    protein: str, sites: Collection[int], measured: Sequence[tuple[Mutation, ...]], most: int
) -> tuple[list[tuple[Mutation, ...]], str]:
    """Return variants that change some sites of a protein, and a sentence about what they are.

    Of a combinatorial library (see `is_library`) they are the combinations of letters at the sites: all, or so many as
    `most`, drawn with as many changes as measured variants have. Otherwise they are single substitutions.

    Args:
        protein: the wild type.
        sites: the positions, from 0, that may change. Those without one of the 20 amino acids never do.
        measured: the measured variants.
        most: the most combinations.
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
        found = [variant(letters) for letters in itertools.product(STANDARD, repeat=len(sites))]
        return found, f"the candidates are all {total:,} combinations of letters at {len(sites)} sites"
    rng = np.random.default_rng(0)
    counts = np.array([min(len(one), len(sites)) for one in measured if one])
    drawn: dict[tuple[Mutation, ...], None] = {}
    for count in rng.choice(counts, 2 * most).tolist():
        letters = [protein[n] for n in sites]
        for place in rng.choice(len(sites), count, replace=False).tolist():
            letters[place] = STANDARD[rng.integers(len(STANDARD))]
        drawn[variant(letters)] = None
    found = list(drawn)[:most]
    return found, (
        f"the candidates are {len(found):,} of {total:,} combinations of letters at {len(sites)} sites, drawn at "
        "random with as many changes as measured variants have; a table, or --sites with fewer sites, names others"
    )


def choose(
    values_MN: npt.NDArray[np.floating],
    variants: Sequence[tuple[Mutation, ...]],
    count: int,
    kappa: float = KAPPA,
    diversity: float = DIVERSITY,
) -> list[int]:
    """Choose variants to measure together: one after the other, the variant with the highest
    mean + kappa x sd - diversity x spread x shared.

    `sd` is the deviation of the models. It shrinks by what the measurement of each chosen variant would reveal about
    the others: variants for which the models err together count as one question (GP-BUCB: Desautels et al. 2014, JMLR
    15:3873, with the models in place of a Gaussian process). Half of each variance is the variant's own. The few models
    of a cross-validation deviate by much less than their means, so that this alone hardly prevents a batch that
    replaces one kind of residue by another everywhere. So a shared trait has a cost: `spread` is the standard deviation
    of the predictions of all candidates, and `shared` counts the variants chosen before that have the same position,
    plus those with the same wild-type residue, plus those with the same mutant residue (of several changes, the mean).

    Args:
        values_MN: predictions of M models for N variants; higher is better. Of a single one, the means decide.
        variants: mutations of the N variants.
        count: number of variants to choose, at most N.
        kappa: standard deviations that are added to a mean.
        diversity: see `DIVERSITY`; with 0 the same change may be chosen at every position.

    Returns:
        Numbers of the chosen variants, in the order of choice.
    """
    mean_N = values_MN.mean(0, dtype=np.float64)
    spread_MN = (values_MN - mean_N) / np.sqrt(max(1, len(values_MN) - 1))
    own_N = 0.5 * (spread_MN**2).sum(0)  # the own variance of each variant
    shared_MN = np.sqrt(0.5) * spread_MN
    traits_NK, cost, shared_N = _traits(variants), diversity * mean_N.std(), np.zeros(len(variants))
    changes_N = np.array([max(1, len(one)) for one in variants])
    chosen: list[int] = []
    for _ in range(count):
        bound_N = mean_N + kappa * np.sqrt(own_N + (shared_MN**2).sum(0)) - cost * shared_N
        bound_N[chosen] = -np.inf
        best = int(bound_N.argmax())
        chosen.append(best)
        shared_N += (traits_NK @ traits_NK[best].T).toarray()[:, 0] / changes_N
        direction_M = shared_MN[:, best].copy()
        total = direction_M @ direction_M + own_N[best]
        if total > 0:  # Conditioning is a rank-one update of the covariance in the space of the models.
            length = direction_M @ direction_M
            share = (1 - np.sqrt(max(0.0, 1 - length / total))) / length if length > 0 else 0.0
            shared_MN = shared_MN - share * np.outer(direction_M, direction_M @ shared_MN)
    return chosen


def _traits(variants: Sequence[tuple[Mutation, ...]]) -> Any:
    """Return which variants have which position, wild-type residue and mutant residue, a sparse matrix [N, traits]."""
    traits = [
        {trait for m in one for trait in (f"at {m.position}", f"from {m.wild}", f"to {m.mutant}")} for one in variants
    ]
    return MultiLabelBinarizer(sparse_output=True).fit_transform(traits)

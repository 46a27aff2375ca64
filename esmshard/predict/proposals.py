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
"""The cost of a position, wild-type residue or mutant residue that a chosen variant also has, in standard deviations of
the predictions. It was measured on beta-lactamase: `benchmarks/results`.
"""
MOST, MOST_PASSES = 160_000, 20_000
"""The most combinations that are candidates, 20 to the power of 4, and the most if each takes a forward pass."""


def candidates(
    protein: str, sites: Collection[int], measured: Sequence[tuple[Mutation, ...]], most: int
) -> tuple[list[tuple[Mutation, ...]], str]:
    """Return variants that change some sites of a protein, and a sentence about them.

    For a combinatorial library (see `is_library`) they are combinations of letters at the sites: all of them, or `most`
    of them, drawn with as many changes as measured variants have. Otherwise they are single substitutions. `sites` are
    positions, from 0; positions without one of the 20 amino acids never change.
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

    `sd` is the deviation of the models. It shrinks with each chosen variant by the information that a measurement of
    this variant would give about the others (GP-BUCB: Desautels et al. 2014, JMLR 15:3873, with the models in place of
    a Gaussian process). Half of each variance is not shared with other variants. The models of a cross-validation
    deviate much less than the means of variants. Therefore a shared trait also has a cost, or a batch would replace one
    kind of residue by another one everywhere: `spread` is the standard deviation of the predictions of all candidates,
    and `shared` counts the chosen variants with the same position, plus the chosen variants with the same wild-type
    residue, plus the chosen variants with the same mutant residue (the mean over several changes).

    Args:
        values_MN: predictions of M models for N variants; higher is better. With one model, the means decide.
        variants: mutations of the N variants.
        count: number of variants to choose, at most N.
        kappa: see `KAPPA`.
        diversity: see `DIVERSITY`; with 0 the same change may be chosen at every position.

    Returns:
        Numbers of the chosen variants, in the order of choice.
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
        if total > 0:  # Conditioning is a rank-one update of the covariance in the space of the models.
            length = direction_M @ direction_M
            share = (1 - np.sqrt(max(0.0, 1 - length / total))) / length if length > 0 else 0.0
            shared_MN = shared_MN - share * np.outer(direction_M, direction_M @ shared_MN)
    return chosen


def _traits(variants: Sequence[tuple[Mutation, ...]]) -> Any:
    """Return which positions, wild-type residues and mutant residues each variant has, a sparse matrix [N, traits]."""
    traits = [
        {trait for m in variant for trait in (f"at {m.position}", f"from {m.wild}", f"to {m.mutant}")}
        for variant in variants
    ]
    return MultiLabelBinarizer(sparse_output=True).fit_transform(traits)

"""The choice of variants to measure next: candidates, and promising and uncertain ones that differ from each other."""

import itertools
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from esmshard.data.variants.mutations import is_library
from esmshard.data.variants.substitutions import Mutation
from esmshard.vocab import STANDARD

KAPPA = 1.0
"""The standard deviations that the upper confidence bound adds to a mean."""
DIVERSITY = 0.15
"""The cost of a shared position, wild-type residue or mutant residue for each chosen variant that has it, in standard
deviations of the predictions. Measured on beta-lactamase: `benchmarks/results`.
"""
MOST, MOST_PASSES = 160_000, 20_000
"""The most combinations that are candidates: 20 to the power of 4; and where each takes a forward pass of its own."""
OBJECTIVE = (
    "one after the other, the variant with the highest mean + kappa x sd - diversity x spread x shared: sd shrinks by "
    "the information of the variants that were chosen before (GP-BUCB), spread is the standard deviation of the "
    "predictions of all candidates, and shared counts the variants chosen before that have the same position, plus "
    "those with the same wild-type residue, plus those with the same mutant residue (of several changes, the mean)"
)


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
    """Choose variants to measure together; see `OBJECTIVE`.

    After each choice, the deviations of the other variants shrink by what its measurement would reveal about them. The
    models show this: variants for which the models err together count as one question (GP-BUCB: Desautels et al. 2014,
    JMLR 15:3873, with the models in place of a Gaussian process). Half of each variance is the variant's own. The few
    models of a cross-validation deviate by much less than their means, so that this alone hardly prevents a batch that
    replaces one kind of residue by another everywhere. So a shared position, wild-type residue or mutant residue has a
    cost.

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
    traits, cost = _Traits(variants), diversity * mean_N.std()
    chosen: list[int] = []
    for _ in range(count):
        bound_N = mean_N + kappa * np.sqrt(own_N + (shared_MN**2).sum(0)) - cost * traits.shared_N
        bound_N[chosen] = -np.inf
        best = int(bound_N.argmax())
        chosen.append(best)
        traits.take(best)
        direction_M = shared_MN[:, best].copy()
        total = direction_M @ direction_M + own_N[best]
        if total > 0:  # Conditioning is a rank-one update of the covariance in the space of the models.
            length = direction_M @ direction_M
            share = (1 - np.sqrt(max(0.0, 1 - length / total))) / length if length > 0 else 0.0
            shared_MN = shared_MN - share * np.outer(direction_M, direction_M @ shared_MN)
    return chosen


class _Traits:
    """Positions, wild-type residues and mutant residues of N variants, and how many chosen variants share them."""

    def __init__(self, variants: Sequence[tuple[Mutation, ...]]) -> None:
        self._of = [
            {trait for m in one for trait in (("position", m.position), ("wild", m.wild), ("mutant", m.mutant))}
            for one in variants
        ]
        having: dict[tuple[str, object], list[int]] = {}
        for n, traits in enumerate(self._of):
            for trait in traits:
                having.setdefault(trait, []).append(n)
        self._having = {trait: np.array(numbers) for trait, numbers in having.items()}
        self._changes_N = np.array([max(1, len(one)) for one in variants])
        self.shared_N = np.zeros(len(variants))

    def take(self, chosen: int) -> None:
        for trait in self._of[chosen]:
            numbers = self._having[trait]
            self.shared_N[numbers] += 1 / self._changes_N[numbers]


def composition(variants: Sequence[tuple[Mutation, ...]]) -> dict[str, object]:
    """Describe how different variants are: the numbers of different positions and residues, and the most frequent
    residues.

    >>> composition([(Mutation(0, "M", "L"),), (Mutation(4, "M", "V"),)])["most_frequent_wild_type_residue"]
    {'M': 2}
    """
    positions = Counter(m.position for one in variants for m in one)
    wild = Counter(m.wild for one in variants for m in one)
    mutant = Counter(m.mutant for one in variants for m in one)
    return {
        "positions": len(positions),
        "wild_type_residues": len(wild),
        "mutant_residues": len(mutant),
        "most_frequent_wild_type_residue": dict(wild.most_common(1)),
        "most_frequent_mutant_residue": dict(mutant.most_common(1)),
    }

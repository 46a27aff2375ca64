"""The choice of variants to measure next: promising and uncertain variants that differ from each other."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from esmshard.data.variants.substitutions import Mutation

KAPPA = 1.0
"""The standard deviations that the upper confidence bound adds to a mean."""
DIVERSITY = 0.15
"""The cost of a shared position, wild-type residue or mutant residue for each chosen variant that has it, in standard
deviations of the predictions. Measured on beta-lactamase: `benchmarks/results`.
"""
OBJECTIVE = (
    "one after the other, the variant with the highest mean + kappa x sd - diversity x spread x shared: sd shrinks by "
    "the information of the variants that were chosen before (GP-BUCB), spread is the standard deviation of the "
    "predictions of all candidates, and shared counts the variants chosen before that have the same position, plus "
    "those with the same wild-type residue, plus those with the same mutant residue (of several changes, the mean)"
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
        values_MN: predictions of M models, at least two, for N variants; higher is better.
        variants: mutations of the N variants.
        count: number of variants to choose, at most N.
        kappa: standard deviations that are added to a mean.
        diversity: see `DIVERSITY`; with 0 the same change may be chosen at every position.

    Returns:
        Numbers of the chosen variants, in the order of choice.
    """
    mean_N = values_MN.mean(0, dtype=np.float64)
    spread_MN = (values_MN - mean_N) / np.sqrt(len(values_MN) - 1)
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
        self._having: dict[tuple[str, object], list[int]] = {}
        for n, traits in enumerate(self._of):
            for trait in traits:
                self._having.setdefault(trait, []).append(n)
        self._changes_N = np.array([max(1, len(one)) for one in variants])
        self.shared_N = np.zeros(len(variants))

    def take(self, chosen: int) -> None:
        for trait in self._of[chosen]:
            for n in self._having[trait]:
                self.shared_N[n] += 1 / self._changes_N[n]


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

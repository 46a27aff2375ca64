"""Chooses which variants to measure next: variants with high or uncertain predictions that differ from each other."""

import bisect
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr
from sklearn.preprocessing import MultiLabelBinarizer

from esmshard.data.mutations import Mutation, name_of
from esmshard.data.variants import is_library
from esmshard.errors import UsageError
from esmshard.io.tables import counted
from esmshard.vocab import STANDARD

Acquisition = Literal["ucb", "greedy", "thompson", "ei"]

KAPPA = 1.0  # how many standard deviations the upper confidence bound adds to the mean
DIVERSITY = 0.15
"""The penalty on a candidate for each position, wild-type residue or mutant residue that it shares with a chosen
variant, in standard deviations of the predictions. The value was tuned on beta-lactamase: `benchmarks/results`."""
MOST, MOST_PASSES = 160_000, 20_000
"""The maximum number of candidate combinations: MOST = 20^4, or MOST_PASSES if each one needs a forward pass."""
FROM, MOST_COMBINED = 20, 1_000_000
"""How many of the best single substitutions are combined, and the maximum number of their combinations."""


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


def combinations(
    parts: Sequence[Mutation],
    size: int,
    most: int,
    predict: Callable[[list[tuple[Mutation, ...]]], npt.NDArray[np.float32]],
    sign: float,
) -> tuple[list[tuple[Mutation, ...]], npt.NDArray[np.float32], dict[str, Any], str]:
    """Combine 2 to `size` of the given substitutions, with at most one change of each site.

    If there are more than `most` combinations, a beam search makes at most `most` of them: it keeps the best ones of
    each size, and extends each of these by one more substitution.

    Args:
        parts: single substitutions, the best ones first.
        size: the maximum number of changes of a combination.
        most: the maximum number of combinations to predict.
        predict: a function that returns the predictions of M models for T targets of N variants, [M, N, T].
        sign: 1, or -1 if lower values of the first target are better.

    Returns:
        N combinations, their predictions [M, N, T], facts for a JSON file, and a sentence about the combinations.

    Raises:
        UsageError: there are no combinations, or more than MOST_COMBINED.
    """
    total = count_combinations(parts, size)
    if not total:
        raise UsageError(
            f"--combine {size} needs single substitutions at two sites, and the {len(parts)} best ones are at "
            f"{counted(len({part.position for part in parts}), 'site')}; pass a higher --from, or more sites to --sites"
        )

    def fitting(limit: int) -> int:
        return bisect.bisect_right(range(len(parts)), limit, key=lambda n: count_combinations(parts[:n], size)) - 1

    of = f"combinations of 2{f' to {size}' if size > 2 else ''} of the {len(parts):,} best single substitutions"
    if total > MOST_COMBINED:
        raise UsageError(
            f"--combine {size} --from {len(parts)}: there are {total:,} {of}, and the limit is {MOST_COMBINED:,}; "
            f"pass --from {fitting(MOST_COMBINED)} at most, or a lower --combine"
        )
    about = {"size": size, "singles": [name_of((part,)) for part in parts], "combinations": total}
    if total <= most:
        at_site = defaultdict(list)
        for part in sorted(parts):
            at_site[part.position].append(part)
        chosen_sites = (sites for k in range(2, size + 1) for sites in itertools.combinations(at_site.values(), k))
        variants = [variant for sites in chosen_sites for variant in itertools.product(*sites)]
        about |= {"search": "exhaustive", "predicted": total}
        return variants, predict(variants), about, f"the candidates are all {total:,} {of}"
    width = most // (len(parts) * (size - 1))
    kept: list[tuple[Mutation, ...]] = [(part,) for part in parts]
    variants, values = [], []
    for _ in range(2, size + 1):
        longer = {
            tuple(sorted((*variant, part)))
            for variant, part in itertools.product(kept[:width], parts)
            if all(part.position != mutation.position for mutation in variant)
        }
        if not longer:  # each combination changes all sites
            break
        kept = sorted(longer)
        variants += kept
        values.append(predict(kept))
        kept = [kept[n] for n in np.argsort(-sign * values[-1].mean(0)[:, 0], kind="stable")]
    about |= {"search": "beam", "width": width, "predicted": len(variants)}
    sentence = (
        f"the candidates are {len(variants):,} of {total:,} {of}: a beam search extended the {width:,} best of each "
        f"size, as each prediction needs a forward pass; --from {fitting(most)} predicts all combinations"
    )
    return variants, np.concatenate(values, 1), about, sentence


def count_combinations(parts: Sequence[Mutation], size: int) -> int:
    """Return the number of combinations of 2 to `size` substitutions, with at most one change of each site.

    >>> count_combinations([Mutation(0, "M", "A"), Mutation(0, "M", "C"), Mutation(4, "K", "C")], 3)
    2
    """
    ways = [1] + [0] * size  # by the number of changes: elementary symmetric polynomials of the counts of each site
    for count in Counter(part.position for part in parts).values():
        for k in range(size, 0, -1):
            ways[k] += count * ways[k - 1]
    return sum(ways[2:])


def choose(
    values_MN: npt.NDArray[np.floating],
    variants: Sequence[tuple[Mutation, ...]],
    count: int,
    kappa: float = KAPPA,
    diversity: float = DIVERSITY,
    acquisition: Acquisition = "ucb",
    deviation_MN: npt.NDArray[np.floating] | None = None,
    best_measured: float = np.inf,
) -> list[int]:
    """Choose variants to measure together, one after the other. Each choice is the variant with the highest
    acquisition, after diversity x spread x shared was subtracted from each prediction.

    `mean` is the mean prediction of a variant over the models. Its variance `sd`^2 is the variance of the predictions
    over the models, plus the mean of the models' variances. The acquisition is one of these:

    - `ucb`: mean + kappa x sd.
    - `greedy`: mean.
    - `thompson`: the prediction of a random model, another one for each choice. If models have deviations, a random
      number with this standard deviation is added for each variant.
    - `ei`: the expected improvement over the best measured value (Jones et al. 1998, J. Global Optim. 13:455), or over
      the highest mean if all means are below this value. Models shrink predictions towards their mean, so the means are
      often too low.

    For `ucb` and `ei`, `sd` shrinks after each choice by the information that a measurement of the chosen variant would
    give about the other variants (GP-BUCB: Desautels et al. 2014, JMLR 15:3873, with the models in place of a Gaussian
    process). A measurement of other variants reduces only half of the variance over the models, since the other half
    and the models' own variances are assumed to be independent of them.

    Predictions differ much less between models than between variants, so without a cost the choices could be the same
    substitution at every position. Shared traits therefore have a cost. `spread` is the standard deviation of the mean
    predictions of all candidates. A trait is a position, a wild-type residue or a mutant residue. `shared` is how many
    traits a variant shares with each chosen variant, added up and divided by the number of the variant's changes.

    Args:
        values_MN: predictions of M models for N variants; higher is better.
        variants: mutations of the N variants.
        count: the number of variants to choose, at most N.
        kappa: how many times `sd` is added; see KAPPA.
        diversity: the cost of a shared trait; see DIVERSITY. With 0, shared traits have no cost.
        acquisition: what each choice maximises; see above.
        deviation_MN: the standard deviation of each prediction, if the models give one.
        best_measured: the best measured value, for `ei`.

    Returns:
        The indices of the chosen variants, in the order of choice.
    """
    mean_N = values_MN.mean(0, dtype=np.float64)
    spread_MN = (values_MN - mean_N) / np.sqrt(max(1, len(values_MN) - 1))
    unshared_N = 0.5 * (spread_MN**2).sum(0)
    if deviation_MN is not None:
        unshared_N = unshared_N + (deviation_MN**2).mean(0)
    shared_MN = np.sqrt(0.5) * spread_MN
    traits_NK, cost, shared_N = _traits(variants), diversity * mean_N.std(), np.zeros(len(variants))
    rng, best_measured = np.random.default_rng(0), min(best_measured, float(mean_N.max()))
    changes_N = np.array([max(1, len(variant)) for variant in variants])
    chosen: list[int] = []
    for _ in range(count):
        value_N, sd_N = mean_N, np.sqrt(unshared_N + (shared_MN**2).sum(0))
        if acquisition == "thompson":
            m = int(rng.integers(len(values_MN)))
            value_N = values_MN[m].astype(np.float64)
            if deviation_MN is not None:
                value_N += deviation_MN[m] * rng.standard_normal(len(value_N))
        value_N = value_N - cost * shared_N
        if acquisition == "ucb":
            value_N += kappa * sd_N
        elif acquisition == "ei":
            value_N = log_improvement(value_N - best_measured, sd_N)
        value_N[chosen] = -np.inf
        best = int(value_N.argmax())
        chosen.append(best)
        shared_N += (traits_NK @ traits_NK[best].T).toarray()[:, 0] / changes_N
        direction_M = shared_MN[:, best].copy()
        total = direction_M @ direction_M + unshared_N[best]
        if total > 0:  # a measurement of `best` is a rank-one update of the covariance
            length = direction_M @ direction_M
            share = (1 - np.sqrt(max(0.0, 1 - length / total))) / length if length > 0 else 0.0
            shared_MN = shared_MN - share * np.outer(direction_M, direction_M @ shared_MN)
    return chosen


def wells(count: int, columns: Collection[str]) -> dict[str, list[str]]:
    """Return a column with the wells of 96-well plates for `count` rows, row by row. Its name is `well`, or `esmshard
    well` if the user's `columns` have this name.

    >>> wells(14, ["mutant"])["well"][10:], wells(98, ["well"])["esmshard well"][94:]
    (['A11', 'A12', 'B1', 'B2'], ['1-H11', '1-H12', '2-A1', '2-A2'])
    """
    key, plate = "well", [f"{row}{number}" for row in "ABCDEFGH" for number in range(1, 13)]
    while key in columns:
        key = f"esmshard {key}"
    return {key: [f"{n // 96 + 1}-" * (count > 96) + plate[n % 96] for n in range(count)]}


def log_improvement(gain_N: npt.NDArray[np.float64], sd_N: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the logarithm of the expectation of max(0, x), for x of N normal distributions with the given means and
    standard deviations. With logarithms, variants can be compared whose expected improvement is too small for a float
    (Ament et al. 2023, arXiv:2310.20708).
    """
    sd_N = np.maximum(sd_N, 1e-9 * (np.abs(gain_N).max() or 1.0))
    z_N, root = gain_N / sd_N, np.sqrt(2 * np.pi)
    near_N, far_N = np.maximum(z_N, -30), np.minimum(z_N, -30)
    near_N = np.log(np.exp(-(near_N**2) / 2) / root + near_N * ndtr(near_N))
    far_N = -(far_N**2) / 2 - np.log(root * far_N**2)  # the asymptotic form; its relative error is 3 / z^2
    return np.asarray(np.log(sd_N) + np.where(z_N > -30, near_N, far_N), np.float64)


def _traits(variants: Sequence[tuple[Mutation, ...]]) -> Any:
    """Return which traits (position, wild-type and mutant residue) each variant has, as a sparse 0/1 matrix [N, K]."""
    traits = [
        {trait for m in variant for trait in (f"at {m.position}", f"from {m.wild}", f"to {m.mutant}")}
        for variant in variants
    ]
    return MultiLabelBinarizer(sparse_output=True).fit_transform(traits)

"""Assigns records to training, validation and test set, or to the folds of a cross-validation.

The functions return a number for each of N records, int64 [N]: the index of a set in `SETS`, a fold, or `LEFT_OUT`. The
argument `shares` has the relative sizes of the sets (they need not add up to 1), or K equal numbers for K folds.

Random choices depend on `seed` and on the names of records, clusters and positions, never on the order of a file. All
records of a cluster go to the same set; positions are treated like clusters. The largest clusters are assigned first.
Each cluster goes to a random set with enough room. The probability of a set is in proportion to its free room, so every
set gets large and small clusters. The size of a set differs from its share by less than the size of the largest
cluster. No set is empty if there are enough clusters.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from esmshard.errors import InputError
from esmshard.io.tables import counted

SETS = ("train", "valid", "test")
TRAIN, VALID, TEST = range(3)
LEFT_OUT = -1
RATIOS = (0.8, 0.1, 0.1)

Numbers = npt.NDArray[np.int64]


def by_cluster(clusters: Sequence[str], shares: Sequence[float] = RATIOS, seed: int = 0) -> Numbers:
    """Assign clusters to sets at random. `clusters` has the cluster name of each record. Raises `InputError` if there
    are fewer clusters than sets.
    """
    names, group_N = _groups(clusters)
    _check_enough(len(names), len(shares), "cluster")
    number_N: Numbers = _assign(names, np.bincount(group_N, minlength=len(names)).tolist(), shares, seed)[group_N]
    return number_N


def components(*memberships: Sequence[str]) -> list[str]:
    """Join several clusterings. Each clustering has the cluster name of each of N records.

    Two records are in one joined cluster if any clustering has them in one cluster, directly or through other records.
    The name of a joined cluster is the alphabetically first of its names in the first clustering.

    >>> components(["a", "b", "c", "d"], ["1", "1", "2", "3"])
    ['a', 'a', 'c', 'd']
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    count, groups = len(memberships[0]), [_groups(clusters) for clusters in memberships]
    # The nodes are records and clusters. Each record has an edge to its cluster in each clustering.
    first_nodes = np.cumsum([count, *(len(names) for names, _ in groups)])
    node_E = np.concatenate([group_N + first for (_, group_N), first in zip(groups, first_nodes, strict=False)])
    record_E = np.tile(np.arange(count), len(groups))
    graph = coo_array((np.ones(len(node_E), np.int8), (record_E, node_E)), shape=(first_nodes[-1], first_nodes[-1]))
    component_N = connected_components(graph, directed=False)[1][:count].tolist()
    names: dict[int, str] = {}
    for component, name in zip(component_N, memberships[0], strict=True):
        names[component] = min(name, names.get(component, name))
    return [names[component] for component in component_N]


def of_variants(
    by: str,
    names: Sequence[str],
    positions: Sequence[frozenset[int]],
    shares: Sequence[float] = RATIOS,
    seed: int = 0,
    train_max: int = 1,
) -> Numbers:
    """Split variants of one protein with the method `by`: `ratio` (function `by_cluster`), `mutations` (function
    `by_mutation_count`), `position`, `modulo` or `contiguous` (function `by_position`).
    """
    if by == "ratio":
        return by_cluster(names, shares, seed)
    if by == "mutations":
        return by_mutation_count([len(changed) for changed in positions], names, train_max, shares, seed)
    return by_position(positions, shares, seed, by)


def by_position(
    positions: Sequence[frozenset[int]], shares: Sequence[float] = RATIOS, seed: int = 0, by: str = "position"
) -> Numbers:
    """Split variants of one protein by the positions that they change.

    A variant is left out if its changed positions belong to several sets. Otherwise, variants of two sets could change
    the same position. Positions that are changed together are not kept in one set: variants with several random changes
    would join all positions into one set. The unchanged wild type goes to the first set or fold.

    Args:
        positions: the changed positions of each of N variants, counted from 0.
        shares: the relative sizes of the sets. The size of a set is the number of changes at its positions. If `by` is
            `modulo` or `contiguous`, only the number of shares counts.
        seed: the random seed.
        by: `position`: positions go to sets at random, and folds have nearly equal numbers of changes. `modulo`: the
            i-th changed position goes to fold i mod K, with i from 0. `contiguous`: each fold has neighbouring changed
            positions, and the folds differ by at most 1 in the number of positions. `modulo` and `contiguous` are the
            folds of ProteinGym (`create_folds_by_position_modulo` and
            `create_folds_by_contiguous_position_discontiguous` in ProteinNPT, Notin et al. 2023), but ProteinGym drops
            variants with several changes.

    Raises:
        InputError: a set would be empty, or there are fewer changed positions than sets.
    """
    count = Counter(place for changed in positions for place in changed)
    places = sorted(count)
    sets = len(shares)
    _check_enough(len(places), sets, "changed position")
    if by == "modulo":
        number_P = np.arange(len(places)) % sets
    elif by == "contiguous":
        number_P = np.repeat(np.arange(sets), [len(part) for part in np.array_split(places, sets)])
    else:
        number_P = _assign([str(place) for place in places], [count[place] for place in places], shares, seed)
    number_of = dict(zip(places, number_P.tolist(), strict=True))
    sets_of = [{number_of[place] for place in changed} or {0} for changed in positions]
    number_N = np.array([numbers.pop() if len(numbers) == 1 else LEFT_OUT for numbers in sets_of], dtype=np.int64)
    if empty := set(range(sets)) - set(number_N.tolist()):
        left = (
            f"{(number_N == LEFT_OUT).sum():,} of {counted(len(positions), 'variant')} change positions of several sets"
        )
        raise InputError(
            f"{len(empty)} of {sets} sets would be empty, since {left}; pass --by mutations or ratio, or set "
            "data.split to mutations or random"
        )
    return number_N


def by_mutation_count(
    counts: Sequence[int], names: Sequence[str], train_max: int = 1, shares: Sequence[float] = RATIOS, seed: int = 0
) -> Numbers:
    """Train on few changes and test on many, as `one_vs_rest` to `three_vs_rest` of FLIP do (Dallago et al. 2021).

    Variants with at most `train_max` changes are divided into training and validation set, in proportion to the first
    two `shares`. All other variants are the test set. The wild type (no change) is always in the training set. Variants
    with the same name go to the same set.
    """
    count_N = np.asarray(counts)
    number_N = _below(count_N <= train_max, count_N > 0, names, shares, seed)
    if not (number_N == TEST).any():
        raise InputError(
            f"the test set is empty: no variant has more than {train_max} changes; lower --train-max or data.train_max"
        )
    return number_N


def low_to_high(
    values: npt.ArrayLike, names: Sequence[str], limit: float, shares: Sequence[float] = RATIOS, seed: int = 0
) -> Numbers:
    """Train on low values and test on high values, as the split `low_vs_high` of FLIP does (Dallago et al. 2021).

    Variants with a value of at most `limit` are divided into training and validation set, in proportion to the first
    two `shares`. All other variants are the test set. In FLIP, the limit is the value of the wild type. Variants with
    the same name are treated as one variant with their mean value. Variants with the value NaN are left out.
    """
    given_N = np.asarray(values, dtype=np.float64)
    keys, group_N = _groups(names)
    sum_G = np.bincount(group_N, np.nan_to_num(given_N), minlength=len(keys))
    count_G = np.bincount(group_N, ~np.isnan(given_N), minlength=len(keys))
    value_N = np.divide(sum_G, count_G, out=np.full(len(keys), np.nan), where=count_G > 0)[group_N]
    number_N = _below(value_N <= limit, np.ones(len(value_N), dtype=np.bool_), names, shares, seed)
    number_N[np.isnan(given_N)] = LEFT_OUT
    if not (number_N == TEST).any():
        raise InputError(f"no value is above {limit:g}, so the test set would be empty; lower --train-max")
    return number_N


def sets_of_fold(fold_N: Numbers, fold: int, folds: int) -> Numbers:
    """Return the set of each record in round `fold` of a cross-validation. Fold `fold` is the test set, the next fold
    (fold 0 after the last fold) is the validation set, and all other folds are the training set.

    >>> sets_of_fold(np.array([0, 1, 2, 3, -1]), 3, 4).tolist()
    [1, 0, 0, 2, -1]
    """
    number_N = np.full(len(fold_N), TRAIN, dtype=np.int64)
    number_N[fold_N == (fold + 1) % folds] = VALID
    number_N[fold_N == fold] = TEST
    number_N[fold_N == LEFT_OUT] = LEFT_OUT
    return number_N


def check_given(number_N: Numbers, source: Path) -> None:
    """Raise `InputError` if one of the three sets has no record. The file `source` names the sets of the records."""
    for k, name in enumerate(SETS):
        if not (number_N == k).any():
            raise InputError(
                f"{source}: gives no record to the {name} set; add records to this set, or split in another way"
            )


def _check_enough(groups: int, sets: int, what: str) -> None:
    if groups < sets:
        parts = f"{counted(sets, 'set')} cannot be made of {counted(groups, what)}"
        raise InputError(f"{parts}, which cannot be divided; give more data, or split in another way")


def _assign(names: list[str], sizes: Sequence[float], shares: Sequence[float], seed: int) -> Numbers:
    """Return the set of each of G clusters or positions, int64 [G], as described at the top of this file."""
    draws = [hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=16).digest() for name in names]
    order = sorted(range(len(names)), key=lambda g: (-sizes[g], draws[g]))
    room = [share / sum(shares) * sum(sizes) for share in shares]
    empty = set(range(len(shares)))
    slack = 1e-9 * sum(sizes)  # for floating-point errors, as 0.1 * 30 is not exactly 3
    number_G = np.empty(len(names), dtype=np.int64)
    for done, g in enumerate(order):
        candidates = sorted(empty) if len(order) - done <= len(empty) else range(len(shares))
        fitting = [k for k in candidates if sizes[g] <= room[k] + slack]
        if fitting:
            at = int.from_bytes(draws[g][8:], "big") / 2**64 * sum(room[k] for k in fitting)
            chosen = fitting[-1]
            for k in fitting:
                at -= room[k]
                if at < 0:
                    chosen = k
                    break
        else:
            chosen = max(candidates, key=lambda k: room[k])
        number_G[g] = chosen
        room[chosen] -= sizes[g]
        empty.discard(chosen)
    return number_G


def _below(
    low_N: npt.NDArray[np.bool_],
    mutant_N: npt.NDArray[np.bool_],
    names: Sequence[str],
    shares: Sequence[float],
    seed: int,
) -> Numbers:
    """Divide variants with a true `low_N` into training and validation set. All other variants are the test set.
    Variants with a true `low_N` and a false `mutant_N` are always in the training set.
    """
    pool = np.flatnonzero(low_N & mutant_N).tolist()
    keys, group_P = _groups([names[n] for n in pool])
    if len(keys) < TEST:
        raise InputError(
            f"{counted(len(keys), 'variant')} up to train_max cannot fill the training and the validation set; raise "
            "--train-max or data.train_max"
        )
    two = [share / sum(shares) for share in shares[:TEST]]
    number_N = np.where(low_N, TRAIN, TEST).astype(np.int64)
    number_N[pool] = _assign(keys, np.bincount(group_P).tolist(), two, seed)[group_P]
    return number_N


def _groups(names: Sequence[str]) -> tuple[list[str], Numbers]:
    """Return the distinct names, and the index of each of N names among them, int64 [N]."""
    place: dict[str, int] = {}
    group_N = np.array([place.setdefault(name, len(place)) for name in names], dtype=np.int64)
    return list(place), group_N

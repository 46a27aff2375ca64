"""Splits: no cluster is divided, no record is lost, and sizes and folds are as described."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esmshard.data.splits.assignment import (
    Numbers,
    by_cluster,
    by_mutation_count,
    by_position,
    check_given,
    components,
    low_to_high,
    sets_of_fold,
)
from esmshard.errors import InputError

NAMES = [f"r{n}" for n in range(100)]


def by_modulo(positions: Sequence[frozenset[int]], folds: int) -> Numbers:
    return by_position(positions, [1] * folds, by="modulo")


def by_contiguous(positions: Sequence[frozenset[int]], folds: int) -> Numbers:
    return by_position(positions, [1] * folds, by="contiguous")


def sizes(number_N: Sequence[int] | np.ndarray) -> list[int]:
    return np.bincount(np.asarray(number_N)).tolist()


def changed(*positions: int) -> frozenset[int]:
    return frozenset(positions)


def test_sizes_follow_from_ratios_and_folds() -> None:
    for clusters, shares, wanted in (
        (NAMES, (0.8, 0.1, 0.1), [80, 10, 10]),
        (NAMES, (50, 30, 20), [50, 30, 20]),
        (NAMES[:5], (0.98, 0.01, 0.01), [3, 1, 1]),  # no set is empty, however small its ratio
        (["a"] * 98 + ["b", "c"], (0.8, 0.1, 0.1), [98, 1, 1]),
        (["a"] * 90 + NAMES[:10], (0.8, 0.1, 0.1), [90, 4, 6]),  # what fits nowhere goes where the most room is
        (NAMES, [1] * 5, [20] * 5),
        ([f"{n // 5}" for n in range(100)], [1] * 4, [25] * 4),
    ):
        assert sizes(by_cluster(clusters, shares, seed=4)) == wanted


def test_the_seed_matters() -> None:
    tests = [frozenset(np.flatnonzero(by_cluster(NAMES, seed=seed) == 2).tolist()) for seed in range(20)]
    assert len(set(tests)) == 20
    # The largest cluster that fits goes to test or validation in a fifth of all seeds, not always to train.
    where = [int(by_cluster(["big"] * 10 + NAMES[:90], seed=seed)[0]) for seed in range(100)]
    assert 5 <= where.count(1) + where.count(2) <= 40
    assert min(where.count(1), where.count(2)) > 0


ABC = ["a", "b", "c"]
SINGLES = [changed(n) for n in range(9)]


def test_what_cannot_be_divided() -> None:
    for act, token in (
        (lambda: by_cluster(["a"] * 50 + ["b"]), "of 2 clusters"),
        (lambda: by_cluster(["a"], [1] * 5), "of 1 cluster,"),
        (lambda: by_contiguous(SINGLES[:3], 4), "of 3 changed positions"),
        (lambda: by_position(SINGLES[:2]), "of 2 changed positions"),
        (lambda: by_position([changed(1, 2, 3)] * 4), "3 of 3 sets would be empty, since 4 of 4"),
        (lambda: by_modulo([changed(0), changed(1), changed(2, 3)], 4), "2 of 4 sets would be empty, since 1"),
        (lambda: by_mutation_count([1, 1, 2], ABC, 2), "more than 2 changes"),
        (lambda: by_mutation_count([0, 1, 1, 2], ["WT", "a", "a", "b"]), "--train-max"),
        (lambda: low_to_high([0.1, 0.2, 0.6], ABC, 0.6), "no value is above 0.6"),
        (lambda: check_given(np.array([0, 2, -1]), Path("x.fasta")), "valid"),
    ):
        with pytest.raises(InputError, match=token):
            act()


def test_folds_of_proteingym() -> None:
    assert by_modulo([changed(p) for p in (20, 2, 5, 5, 6, 9, 11)], 3).tolist() == [2, 0, 1, 1, 2, 0, 1]
    positions = [changed(p) for p in (40, 0, 3, 9, 10, 11, 30, 0, 0, 0)]
    assert by_contiguous(positions, 3).tolist() == [2, 0, 0, 0, 1, 1, 2, 0, 0, 0]
    positions = [changed(p) for p in range(6)] + [changed(0, 1), changed(0, 3), changed(1, 2, 3), changed()]
    assert by_contiguous(positions, 3).tolist() == [0, 0, 1, 1, 2, 2, 0, -1, -1, 0]


def test_sizes_are_those_of_variants_and_not_of_positions() -> None:
    positions = [changed(n % 50) for n in range(950)]
    assert sizes(by_position(positions)) == [760, 95, 95]
    assert sizes(by_position(positions, [1] * 5)) == [190] * 5
    # One position has half of all variants: it is most of the training set.
    positions = [changed(0)] * 50 + [changed(n) for n in range(1, 51)]
    assert sizes(by_position(positions, (0.5, 0.3, 0.2))) == [50, 30, 20]


def test_one_against_the_rest() -> None:
    counts = [0, *[1] * 90, *[2] * 10, 3]
    names = [f"v{n}" for n in range(len(counts))]
    number_N = by_mutation_count(counts, names)
    assert set(number_N[91:].tolist()) == {2}
    assert sizes(number_N) == [81, 10, 11]
    assert np.flatnonzero(by_mutation_count(counts, names, train_max=2) == 2).tolist() == [101]
    first = {int(by_mutation_count([0, 1, 1, 2], ["WT", *ABC], seed=seed)[0]) for seed in range(30)}
    assert first == {0}, "the wild type never validates"


def test_low_values_train_and_high_ones_test() -> None:
    number_N = low_to_high([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, float("nan")], list("abcdefg"), 0.4, (0.5, 0.5, 1.0))
    assert number_N[4:].tolist() == [2, 2, -1]
    assert sorted(number_N[:4].tolist()) == [0, 0, 1, 1]
    # Rows of one variant: the mean of 0.1 and 0.5 is at the limit, that of 0.2 and 0.9 above it.
    number_N = low_to_high([0.1, 0.5, 0.2, 0.9, 0.0, 0.9], ["a", "a", "b", "b", "c", "d"], 0.3, (1, 1, 1))
    assert number_N[2:4].tolist() == [2, 2]
    assert number_N[0] == number_N[1]
    assert sorted({int(number_N[0]), int(number_N[4])}) == [0, 1]


clusterings = st.lists(st.integers(0, 12), min_size=1, max_size=80)
shares = st.tuples(*[st.floats(0.05, 1.0)] * 3)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(clusterings, shares, st.integers(0, 5), st.sampled_from([None, 3, 5]))
def test_clusters_are_never_cut_and_sizes_are_near(
    labels: list[int], ratios: tuple[float, ...], seed: int, folds: int | None
) -> None:
    clusters, sizes_K = [f"c{label}" for label in labels], [1.0] * folds if folds else ratios
    groups, sets = len(set(clusters)), len(sizes_K)
    if groups < sets:
        with pytest.raises(InputError):
            by_cluster(clusters, sizes_K, seed)
        return
    number_N = by_cluster(clusters, sizes_K, seed)
    assert len({(c, k) for c, k in zip(clusters, number_N.tolist(), strict=True)}) == groups
    assert set(number_N.tolist()) == set(range(sets))
    largest = max(clusters.count(c) for c in clusters)
    wanted = [len(clusters) * size / sum(sizes_K) for size in sizes_K]
    for k in range(sets):
        misses = abs((number_N == k).sum() - wanted[k])
        assert misses < largest + 1e-6 if min(wanted) >= largest else misses < largest * sets


@settings(max_examples=20, deadline=None, derandomize=True)
@given(clusterings, st.integers(0, 3), st.randoms(use_true_random=False))
def test_the_order_of_the_file_does_not_matter(labels: list[int], seed: int, random: object) -> None:
    def shuffled(count: int) -> list[int]:
        order = list(range(count))
        random.shuffle(order)  # type: ignore[attr-defined]
        return order

    keys, other = [f"k{label}" for label in labels] + ABC, [f"o{label % 5}" for label in labels] + ABC
    order = shuffled(len(keys))
    assert by_cluster([keys[n] for n in order], seed=seed).tolist() == by_cluster(keys, seed=seed)[order].tolist()
    joined = components([keys[n] for n in order], [other[n] for n in order])
    assert joined == [components(keys, other)[n] for n in order]
    pairs = {*zip(joined, (keys[n] for n in order), strict=True), *zip(joined, (other[n] for n in order), strict=True)}
    assert len({cluster for _, cluster in pairs}) == len(pairs), "records of a cluster are in one joined cluster"
    positions = [changed(label, (label * 7) % 13) if n % 3 else changed(label) for n, label in enumerate(labels)]
    positions += [changed(n) for n in range(30)]
    order = shuffled(len(positions))
    for split in (lambda p: by_position(p, seed=seed), lambda p: by_modulo(p, 4), lambda p: by_contiguous(p, 4)):
        assert split([positions[n] for n in order]).tolist() == split(positions)[order].tolist()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.frozensets(st.integers(0, 30), max_size=3), max_size=60), st.integers(0, 3), st.sampled_from([3, 5]))
def test_no_position_is_on_two_sides(positions: list[frozenset[int]], seed: int, folds: int) -> None:
    positions = positions + [changed(n) for n in range(31)]
    for number_N in (by_position(positions, seed=seed), by_modulo(positions, folds), by_contiguous(positions, folds)):
        side: dict[int, int] = {}
        for changes, number in zip(positions, number_N.tolist(), strict=True):
            if number >= 0:
                assert all(side.setdefault(p, number) == number for p in changes)
        for n, changes in enumerate(positions):
            if number_N[n] < 0:  # only variants across sets are left out
                assert len({side[p] for p in changes}) > 1


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.integers(-1, 4), min_size=5, max_size=40))
def test_over_all_rounds_every_record_is_tested_once(folds: list[int]) -> None:
    fold_N = np.array(folds)
    rounds = np.stack([sets_of_fold(fold_N, k, 5) for k in range(5)])
    assert ((rounds == 2).sum(0) == (fold_N >= 0)).all()
    assert ((rounds == 1).sum(0) == (fold_N >= 0)).all()
    assert ((rounds == -1).sum(0) == 5 * (fold_N < 0)).all()

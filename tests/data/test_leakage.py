"""Leakage: small sets counted by hand, and random sets against plain Python sets of words."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esmshard.data.splits import leakage
from esmshard.data.splits.leakage import ComparedRecords, Leakage, Overlap, check, variant_notices
from esmshard.io.remote import data_file
from esmshard.io.store import cached
from esmshard.vocab import STANDARD, encode_residues

PROTEIN = "ACDEFGHIKLMNPQRSTVWYACEG"


def records(*sequences: str, name: str = "t") -> ComparedRecords:
    tokens = [np.frombuffer(encode_residues(s), dtype=np.uint8) for s in sequences]
    return ComparedRecords(len(tokens), tokens.__getitem__, lambda n: f"{name}{n}")


def overlap(train: Sequence[str], test: Sequence[str], most: int = leakage.MOST) -> Overlap:
    return check(records(*train), {"test": records(*test, name="q")}, most).overlaps["test"]


def test_similar_records() -> None:
    for train, test, identical, similar, closest in (
        # A fifth of the words of one training record is similar, less is not.
        (["MMMM", PROTEIN[:8] + "WWWW"], [PROTEIN], 0, 1, [("q0", "t1", 4 / 20)]),
        (["MMMM", PROTEIN[:8] + "WWWW"], [PROTEIN + "HKLM"], 0, 0, []),  # 4 of 24
        # The share is that of the test record.
        (["W" * 40, "MM" + PROTEIN * 2 + "MM"], [PROTEIN[2:20]], 0, 1, [("q0", "t1", 1.0)]),
        # Peptides need four common words.
        (["WW", "ACDEFGHWWWW"], ["ACDEFGHIK"], 0, 0, []),
        (["WW", "ACDEFGHIWWW"], ["ACDEFGHIK"], 0, 1, [("q0", "t1", 4 / 5)]),
        # Records too short for a word are compared as a whole, and the first training record is named.
        (["ACD", "WWWWWWW", "MMMMMMMM"], ["ACD", "GHE", "A"], 1, 0, [("q0", "t0", 1.0)]),
        (["W", PROTEIN, "MKT", PROTEIN], ["GG", PROTEIN, PROTEIN[1:]], 1, 1, [("q1", "t1", 1.0), ("q2", "t1", 1.0)]),
    ):
        assert overlap(train, test) == Overlap(len(test), identical, len(test), similar, closest)


def test_several_sets_do_not_mix() -> None:
    sets = {"valid": records("KLMNP", name="v"), "test": records("GG", PROTEIN[:-1], PROTEIN, name="q")}
    found = check(records(PROTEIN, "WWWWWW"), sets).overlaps
    assert found["valid"] == Overlap(1, 0, 1)
    assert found["test"] == Overlap(3, 1, 3, 1, [("q2", "t0", 1.0), ("q1", "t0", 1.0)])


def words(sequence: str) -> set[str]:
    found = {sequence[k : k + 5] for k in range(len(sequence) - 4)}
    return {word for word in found if set(word) <= set(STANDARD)}


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(20, 400))
def test_it_agrees_with_sets_of_words(seed: int, block: int) -> None:
    """Pieces of a few parents over a small alphabet, in blocks of any size."""
    rng = random.Random(seed)
    parents = ["".join(rng.choices("ACDEX", k=40)) for _ in range(4)]

    def some(count: int) -> list[str]:
        parts = [
            [rng.choice(parents)[rng.randrange(20) :][: rng.randrange(25)] for _ in range(2)] for _ in range(count)
        ]
        return ["A" * rng.randrange(9) + "".join(part) + "W" for part in parts]

    train, test = some(rng.randrange(1, 30)), some(rng.randrange(1, 12))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leakage, "_BLOCK", block)
        found = check(records(*train), {"test": records(*test, name="q")}).overlaps["test"]
    shares = []
    for n, sequence in enumerate(test):
        mine = words(sequence)
        if sequence in train:
            shares.append((1.0, n, train.index(sequence)))
            continue
        best = max(((len(mine & words(t)) / max(1, len(mine)), -k) for k, t in enumerate(train)), default=(0.0, 0))
        if best[0] >= 0.2 and best[0] * len(mine) > 3.5:
            shares.append((best[0], n, -best[1]))
    identical = sum(sequence in train for sequence in test)
    shares.sort(key=lambda s: (-s[0], test[s[1]] not in train, s[1]))
    assert (found.identical, found.similar) == (identical, len(shares) - identical)
    assert [(mine, theirs) for mine, theirs, _ in found.closest] == [(f"q{n}", f"t{k}") for _, n, k in shares[:3]]
    assert [share for _, _, share in found.closest] == pytest.approx([share for share, _, _ in shares[:3]])


def random_proteins(count: int, length: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(STANDARD, k=length + n % 7)) for n in range(count)]


def test_a_large_training_set_is_sampled_evenly() -> None:
    train = random_proteins(1000, 100, 0)
    found = check(records(*train), {"test": records(*train[:500], name="q")}, most=20_600)
    assert found.train_records == 1000
    assert 195 <= found.train_compared <= 205
    assert 90 <= found.overlaps["test"].identical <= 110  # a fifth of the 500, spread over all of them
    assert f"{found.train_compared} of 1,000 training records" in found.notices()[0]


def test_redundant_and_large_sets_are_sampled_and_identical_ones_counted_in_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every pair shares 60 words: 400 * 400 * 60 pairs are more than 100,000 are allowed."""
    core = random_proteins(1, 64, 1)[0]
    train = [core + tail for tail in random_proteins(400, 20, 2)]
    test = [core + tail for tail in random_proteins(390, 30, 3)] + train[:10]
    found = overlap(train, test, most=100_000)
    assert (found.records, found.identical) == (400, 10)
    assert 1 <= found.compared <= 10
    assert found.similar <= found.compared
    monkeypatch.setattr(leakage, "_INDEXED", 5_000)
    proteins = random_proteins(100, 97, 5)
    found = overlap(proteins, [protein[:-1] for protein in proteins])
    assert (found.records, found.identical) == (100, 0)
    assert 45 <= found.compared == found.similar <= 55


def test_known_mutations_are_counted_by_name_and_position() -> None:
    names = ["WT", "A1G", "C3D", "A1G:C3D", "A1G", "E5F", "C3E:E5F"]
    positions = [frozenset(p) for p in ([], [0], [2], [0, 2], [0], [4], [2, 4])]
    sets = {"train": np.array([0, 1, 2]), "valid": np.array([5]), "test": np.array([3, 4, 6])}
    assert variant_notices(names, positions, sets) == [
        "leakage: of 3 test variants 1 are training variants, 2 change only positions that training variants change, "
        "and 3 change at least one such position",
        "leakage: none of 1 valid variants changes a position that training variants change",
    ]
    (clean,) = variant_notices(names, positions, {"train": np.array([1]), "test": np.array([0])})
    assert clean.startswith("leakage: none of 1 test variants")


def test_sentences_of_families() -> None:
    leaky = Overlap(5000, 2, 400, 30, [("q1", "t1", 1.0), ("q2", "t7", 0.347)])
    of_test, of_valid = Leakage(2000, 1000, {"valid": Overlap(7, 0, 7), "test": leaky}).notices()
    assert of_valid.startswith("leakage: none of 7 valid records")
    for part in ("of 5,000 test", "400", "2 are identical and 30 similar", "2,000", "q1 and t1 100%, q2 and t7 35%"):
        assert part in of_test


def test_the_shipped_sample_is_clean() -> None:
    stores = {name: cached(data_file(f"sample:contact/{name}")) for name in ("train", "valid", "test")}
    train, valid, test = (ComparedRecords(len(s), s.residues, s.id) for s in stores.values())
    (notice,) = check(train, {"valid": valid, "test": test}).notices()
    assert notice.startswith("leakage: none of 99 valid records and 100 test records is identical or similar")

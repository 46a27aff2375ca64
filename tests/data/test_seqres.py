"""Residues with atoms find their places in SEQRES."""

import itertools
import random
from collections.abc import Sequence

from esmshard.data.structures.chains import align_to_listed


def test_letters_alone_when_numbers_say_nothing() -> None:
    assert align_to_listed("TAYI", "MKTAYIAK", [1, 1, 1], None) == [2, 3, 4, 5]
    assert align_to_listed("MKYI", "MKTAYIAK", [1, 1, 1], None) == [0, 1, 4, 5]
    assert align_to_listed("AAA", "AAAAA", [1, 1], 3) == [2, 3, 4]
    assert align_to_listed("AAA", "AAAAA", [1, 1], 9) == [0, 1, 2]
    assert align_to_listed("AAA", "AAAAA", [1, 3], 1) == [0, 1, 4]
    assert align_to_listed("AAK", "AAAAK", [1, 1], None) == [2, 3, 4]
    assert align_to_listed("AK", "AAAAK", [400], None) == [3, 4]
    assert align_to_listed("AWA", "AAAAA", [2, 2], 1) == [0, 2, 4]
    assert align_to_listed("W", "AAA", [], 2) == [1]
    assert align_to_listed("", "AAA", [], None) == []


def test_one_gap_is_better_than_two_and_a_wrong_residue_better_than_two_gaps() -> None:
    assert align_to_listed("MKTLV", "MKTAYIAGELV", [1, 1, 1, 1], 1) == [0, 1, 2, 9, 10]
    assert align_to_listed("MKTWVQR", "MKTLVQR", [1] * 6, 1) == [0, 1, 2, 3, 4, 5, 6]
    assert align_to_listed("ACDEFWHIK", "ACDEFGHIKWHI", [1] * 8, 1) == [0, 1, 2, 3, 4, 5, 6, 7, 8]


def test_any_alignment_is_as_good_as_the_best_of_all() -> None:
    """Against all choices of places, scored by the rule itself: -4 a mismatch, -3 an unexpected step, +1 the start."""
    rng = random.Random(4)
    for _ in range(150):
        m = rng.randint(1, 9)
        n = rng.randint(1, m)
        listed, observed = (["AB", "ABC"][k % 2] for k in (0, 1))
        listed_m = [rng.choice(listed) for _ in range(m)]
        observed_n = [rng.choice(observed) for _ in range(n)]
        steps, first = [rng.choice([1, 1, 1, 2, 3, 40]) for _ in range(n - 1)], rng.choice([None, 1, 2, 5, 20])

        def score(places: Sequence[int], *given: object) -> int:
            listed_m, observed_n, steps, first = given
            wrong = sum(listed_m[p] != o for p, o in zip(places, observed_n, strict=True))  # type: ignore[index, call-overload]
            jumps = sum(b - a != s for a, b, s in zip(places, places[1:], steps, strict=False))  # type: ignore[call-overload]
            return -4 * wrong - 3 * jumps + (first is not None and places[0] == first - 1)  # type: ignore[operator]

        given = (listed_m, observed_n, steps, first)
        places = align_to_listed(observed_n, listed_m, steps, first)
        assert all(b > a for a, b in itertools.pairwise(places))
        assert score(places, *given) == max(score(p, *given) for p in itertools.combinations(range(m), n))
